// Schemas of every operator and the module that makes Python load them. Kernels register their
// implementations beside their code (TORCH_LIBRARY_IMPL).
#include <Python.h>
#include <torch/library.h>
#include <torch/version.h>

#include <string>

namespace {

// The torch whose headers this was compiled against; the stamp of the install must agree.
std::string build_info() { return TORCH_VERSION; }

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module_definition); }

TORCH_LIBRARY(megatron_nvfp4, m) {
  m.def("build_info() -> str", &build_info);
  // Instruction set of the CPU kernels on this machine: default, avx2 or avx512.
  m.def("cpu_isa() -> str");
  // Shapes and meaning: quant.quantize and quantize_grouped, whose spec the integers spell out;
  // four_over_six is 0 (off), 1 (mae) or 2 (mse). No output is an alias of an input.
  m.def(
      "quantize_nvfp4(Tensor x, Tensor? amax, Tensor? offsets, int block_rows, bool per_token, "
      "int e4m3_max, int four_over_six, bool fast_error) "
      "-> (Tensor codes, Tensor block_scales, Tensor amax_used)");
  // The same into given tensors, CUDA only. given_amax: amax is read, not written. swizzled: scales
  // in the 128x4 layout, padding zeroed. codes_t, block_scales_t: the form of x.t() too, 16x16
  // blocks only. decoded: q * s_b as BF16 (M, K), exact, 1x16 blocks only.
  m.def(
      "quantize_nvfp4_out(Tensor x, Tensor? offsets, int block_rows, bool per_token, int e4m3_max, "
      "int four_over_six, bool fast_error, bool given_amax, bool swizzled, *, Tensor(a!) codes, "
      "Tensor(b!) block_scales, Tensor(c!) amax, Tensor(d!)? codes_t, Tensor(e!)? block_scales_t, "
      "Tensor(f!)? decoded) -> ()");
  // Number of inputs, over all floats, for which this GPU's fast paths differ from numerics.h,
  // int64 (8,): E2M1, reciprocal, divisions by 6, 1536 and 2688, hardware E4M3, hardware E2M1,
  // encoding scale.
  m.def("check_numerics_out(Tensor(a!) counts) -> ()");
  // quant.swiglu.swiglu_quantize, CUDA only: gate_up BF16 (M, 2K), probs FP32 (M,). fast_math: by
  // the hardware's exponential and reciprocal.
  m.def(
      "swiglu_quantize(Tensor gate_up, Tensor probs, int e4m3_max, bool fast_math) "
      "-> (Tensor codes, Tensor block_scales, Tensor amax)");
  // quantize_nvfp4 without four-over-six, rounded stochastically: quant.random_bits under (seed,
  // offset).
  m.def(
      "quantize_nvfp4_stochastic(Tensor x, Tensor? amax, Tensor? offsets, int block_rows, "
      "bool per_token, int e4m3_max, int seed, int offset) "
      "-> (Tensor codes, Tensor block_scales, Tensor amax_used)");
  // The form of x.t(), M % 16 == 0, 1x16 blocks and one amax, or one per group of rows of x, whole
  // blocks each; rotated: of rht(x.t()); seed and offset count if stochastic.
  m.def(
      "quantize_nvfp4_columns(Tensor x, Tensor? amax, Tensor? offsets, int e4m3_max, bool rotated, "
      "bool stochastic, int seed, int offset) "
      "-> (Tensor codes, Tensor block_scales, Tensor amax_used)");
  // quant.quantize_simulated of E`exponent`M`mantissa`; values are FP32.
  m.def(
      "quantize_simulated(Tensor x, Tensor? amax, int exponent, int mantissa) "
      "-> (Tensor values, Tensor block_scales, Tensor amax_used)");
  // q * s_b, BF16 (M, K), exact.
  m.def("decode_nvfp4(Tensor codes, Tensor block_scales) -> Tensor");
  // row_scale: S_dec of every row, FP32 (M,), or (1,) for all.
  m.def(
      "dequantize_nvfp4(Tensor codes, Tensor block_scales, Tensor row_scale, ScalarType dtype) "
      "-> Tensor");
  m.def("quantize_mxfp8(Tensor x) -> (Tensor codes, Tensor block_scales)");
  // The form of x.t(), M % 32 == 0.
  m.def("quantize_mxfp8_columns(Tensor x) -> (Tensor codes, Tensor block_scales)");
  m.def("dequantize_mxfp8(Tensor codes, Tensor block_scales, ScalarType dtype) -> Tensor");
}
