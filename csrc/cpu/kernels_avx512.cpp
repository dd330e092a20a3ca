// The CPU kernels for AVX-512. The target is set here, not by a flag: see kernels_impl.h.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2")
#endif

namespace megatron_nvfp4 {
namespace {

constexpr int kLanes = 16;

#include "kernels_impl.h"
#include "transforms_impl.h"
#include "transpose_avx2.h"

}  // namespace

const CpuKernels kAvx512Kernels = {"avx512",
                                   amax,
                                   quantize,
                                   dequantize,
                                   quantize_mxfp8,
                                   dequantize_mxfp8,
                                   column_amax,
                                   quantize_columns,
                                   quantize_mxfp8_columns,
                                   quantize_simulated};

}  // namespace megatron_nvfp4

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
