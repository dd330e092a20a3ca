// Functions of `megatron_nvfp4._C` itself, which take Python objects and so cannot be operators.
#pragma once

#include <Python.h>

namespace megatron_nvfp4 {

void add_functions(PyObject* module);

}  // namespace megatron_nvfp4
