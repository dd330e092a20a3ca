// Schemas of every operator and the module that makes Python load them. Kernels register their
// implementations beside their code (TORCH_LIBRARY_IMPL).
#include <Python.h>
#include <torch/library.h>
#include <torch/version.h>

#include <string>

#include "product_node.h"

namespace {

// The torch whose headers this was compiled against; the stamp of the install must agree.
std::string build_info() { return TORCH_VERSION; }

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  PyObject* module = PyModule_Create(&module_definition);
  if (module) megatron_nvfp4::add_functions(module);
  return module;
}

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
  // S_dec of an FP32 amax of any shape.
  m.def("outer_scale(Tensor amax, int e4m3_max) -> Tensor");
  // q * s_b, BF16 (M, K), exact.
  m.def("decode_nvfp4(Tensor codes, Tensor block_scales) -> Tensor");
  // row_scale: S_dec of every row, FP32 (M,), or (1,) for all.
  m.def(
      "dequantize_nvfp4(Tensor codes, Tensor block_scales, Tensor row_scale, ScalarType dtype) "
      "-> Tensor");
  m.def("quantize_mxfp8(Tensor x) -> (Tensor codes, Tensor block_scales)");
  // The form of x.t(), M % 32 == 0.
  m.def("quantize_mxfp8_columns(Tensor x) -> (Tensor codes, Tensor block_scales)");
  // What quantize_mxfp8_columns decodes to, in the order of x: BF16 (M, K), CUDA only.
  m.def("round_mxfp8_columns(Tensor x) -> Tensor");
  m.def("dequantize_mxfp8(Tensor codes, Tensor block_scales, ScalarType dtype) -> Tensor");
  // GEMMs. Row groups of a or x lie between device-side offsets (G+1,), K is walked upwards with
  // one FP32 accumulator, then y * RN(row_scale * group_scale) + bias, rounded once:
  // backends/__init__.py. Scales are FP32: row (M,) or (1,), group (G,) or (1,), col (G*N,) in
  // place of group; bias (G, N). Decoded operands, CPU only: a (M, K) and b (G*N, K) BF16 or FP32.
  m.def(
      "grouped_gemm_decoded(Tensor a, Tensor b, Tensor offsets, Tensor? row_scale, "
      "Tensor? group_scale, Tensor? col_scale, Tensor? bias, ScalarType out_dtype) -> Tensor");
  // out[g] = or += a_g b_g^T of the column groups of a (N, M) and b (K, M), CPU only.
  m.def(
      "grouped_wgrad_decoded(Tensor a, Tensor b, Tensor offsets, Tensor? row_scale, "
      "Tensor? group_scale, bool accumulate, *, Tensor(c!)[] out) -> ()");
  // wgmma, compute capability 9.0. packed: the weights by pack_weights_nvfp4. x: NVFP4 codes with
  // x_scales, q * s_b as FP16, or BF16; row m of the product takes row row_index[m] of x and of
  // row_scale. config: a tile configuration, -1 chooses; the bits are the same.
  m.def(
      "grouped_gemm_w4(Tensor x, Tensor? x_scales, Tensor packed, Tensor offsets, int num_cols, "
      "Tensor? row_scale, Tensor? group_scale, Tensor? bias, Tensor? row_index, "
      "ScalarType out_dtype, int config=-1) -> Tensor");
  // Rows of x BF16 (M, K) by quantize_nvfp4, each with its own amax, and then grouped_gemm_w4, to
  // BF16.
  m.def(
      "grouped_linear_w4(Tensor x, Tensor packed, Tensor offsets, int num_cols, Tensor "
      "group_scale, "
      "int e4m3_max, int four_over_six, bool fast_error) -> Tensor");
  // NVFP4 weights (G*N, K) in the order of wgmma fragments, (G, ceil(K/64), ceil(N/64), 2304);
  // reversed: group g from group G-1-g. The inverse takes num_rows = G*N.
  m.def(
      "pack_weights_nvfp4(Tensor codes, Tensor block_scales, int num_groups, bool reversed) "
      "-> Tensor");
  m.def(
      "unpack_weights_nvfp4(Tensor packed, int num_rows, int num_cols) "
      "-> (Tensor codes, Tensor block_scales)");
  // wgmma too. weights: one (G, N, K) or G matrices (N, K), BF16; transposed: (K, N) each.
  m.def(
      "grouped_gemm_bf16(Tensor x, Tensor[] weights, bool transposed, Tensor offsets, "
      "Tensor? row_scale, Tensor? group_scale, Tensor? col_scale, Tensor? bias, "
      "ScalarType out_dtype) -> Tensor");
  m.def(
      "grouped_wgrad_bf16(Tensor a, Tensor b, bool token_major, Tensor offsets, "
      "Tensor? group_scale, bool accumulate, *, Tensor(c!)[] out) -> ()");
  // The same of one contiguous out (G, N, K); generic: by grouped_wgrad_generic.
  m.def(
      "grouped_wgrad_block(Tensor a, Tensor b, bool token_major, Tensor offsets, "
      "Tensor? group_scale, bool generic, *, Tensor(c!) out) -> ()");
  // mma.sync, any GPU from 8.0 on. a, b: BF16, or NVFP4 codes with their scales; b_transposed: b is
  // BF16 (G*K, N).
  m.def(
      "grouped_gemm_generic(Tensor a, Tensor? a_scales, Tensor b, Tensor? b_scales, "
      "bool b_transposed, Tensor offsets, int num_cols, Tensor? row_scale, Tensor? group_scale, "
      "Tensor? col_scale, Tensor? bias, ScalarType out_dtype) -> Tensor");
  // token_major: a (M, N) and b (M, K); else (N, M) and (K, M), groups multiples of 16.
  m.def(
      "grouped_wgrad_generic(Tensor a, Tensor b, bool token_major, Tensor offsets, "
      "Tensor? group_scale, bool accumulate, *, Tensor(c!)[] out) -> ()");
  // Scales (M, K/16) of row groups, of one byte each, in the 128x4 layout, every group padded to
  // 128 rows, CUDA only: (R, C'), R the host's bound for any offsets (G+1,), padding 0.
  m.def("swizzle_groups_128x4(Tensor block_scales, Tensor offsets) -> Tensor");
  // The fields of GroupPlan (csrc/blackwell/group_plan.h) of every group, int64 (G, 13), CUDA only.
  m.def("blackwell_group_plan(Tensor offsets, int num_cols, int num_k) -> Tensor");
  // The epilogue of Blackwell's GEMM on given accumulators, FP32 (M, N), CUDA only; rows from
  // offsets[G] on are 0.
  m.def(
      "blackwell_epilogue(Tensor acc, Tensor offsets, Tensor? row_scale, Tensor? group_scale, "
      "Tensor? bias, ScalarType out_dtype) -> Tensor");
  // Boundaries int64 (G+1,) on x's device of groups of so many rows, G = 1..1024, CUDA only.
  m.def("row_offsets(Tensor x, int[] splits) -> Tensor");
  // Rows of experts: quant.dispatch and quant.swiglu. index: int64 or int32 (M,), -1 for zeros;
  // rows_of_token: int64 (T, top_k), -1 for a choice that was dropped. On CUDA neither is looked
  // at.
  m.def("gather_rows(Tensor x, Tensor index) -> Tensor");
  m.def(
      "gather_rows_nvfp4(Tensor codes, Tensor block_scales, Tensor amax, Tensor index) "
      "-> (Tensor codes, Tensor block_scales, Tensor amax)");
  m.def("gather_rows_amax(Tensor x, Tensor index) -> (Tensor rows, Tensor amax)");
  m.def("combine_rows(Tensor rows, Tensor rows_of_token, Tensor? weights) -> Tensor");
  m.def(
      "combine_rows_backward(Tensor grad, Tensor rows, Tensor rows_of_token, Tensor weights, "
      "Tensor token_of_row) -> (Tensor grad_rows, Tensor grad_weights)");
  // chosen: experts (T, top_k), or a bool map (T, E), of which a token's first top_k are taken.
  m.def(
      "route(Tensor chosen, int num_experts, int multiple, int top_k) "
      "-> (Tensor token_of_row, Tensor slot_of_row, Tensor rows_of_token, Tensor offsets)");
  // Gated activations of h BF16 (M, 2F), kind 0 (swiglu), 1 (geglu) or 2 (quick_geglu), times probs
  // FP32 (M,). Without probs, grad_probs is empty; y is, unless it is kept. fast_math: by the GPU's
  // exponential and reciprocal.
  m.def("weighted_activation(Tensor h, Tensor? probs, int kind) -> Tensor");
  m.def(
      "weighted_activation_backward(Tensor grad_y, Tensor h, Tensor? probs, int kind) "
      "-> (Tensor grad_h, Tensor grad_probs)");
  m.def(
      "weighted_activation_quantize(Tensor h, Tensor? probs, int kind, int e4m3_max, "
      "bool fast_math, bool keep) "
      "-> (Tensor codes, Tensor block_scales, Tensor amax, Tensor y)");
}
