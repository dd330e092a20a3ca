// The module megatron_nvfp4._blackwell: schema, checks and launch of the block-scaled grouped GEMM.
// Separate from _C because CUTLASS is needed to compile it.
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <Python.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <limits>
#include <optional>

#include "group_plan.h"
#include "grouped_gemm.h"

namespace megatron_nvfp4::cuda {
namespace {

using at::Tensor;

constexpr char kOp[] = "grouped_gemm_nvfp4_blackwell";

const uint8_t* checked_codes(const char* name, const Tensor& codes, int64_t num_k, at::Device on) {
  TORCH_CHECK_VALUE(codes.dim() == 2 && codes.scalar_type() == at::kByte &&
                        codes.size(1) * 2 == num_k && codes.is_contiguous() && codes.device() == on,
                    kOp, ": ", name, " are ", codes.scalar_type(), " ", codes.sizes(), " on ",
                    codes.device(), "; give contiguous uint8 (rows, ", num_k / 2, ") on ", on);
  const auto* data = static_cast<const uint8_t*>(codes.const_data_ptr());
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(data) % 16 == 0, kOp, ": ", name,
                    " begin off a multiple of 16 bytes; give a tensor of its own");
  return data;
}

const uint8_t* checked_scales(const char* name, const Tensor& scales, int64_t row_tiles,
                              int64_t col_tiles, at::Device on) {
  TORCH_CHECK_VALUE(scales.scalar_type() == at::kFloat8_e4m3fn && scales.dim() == 2 &&
                        scales.size(0) >= row_tiles * kScaleTileRows &&
                        scales.size(1) == col_tiles * kScaleTileCols && scales.is_contiguous() &&
                        scales.device() == on,
                    kOp, ": ", name, " are ", scales.scalar_type(), " ", scales.sizes(), " on ",
                    scales.device(), "; give float8_e4m3fn of at least (",
                    row_tiles * kScaleTileRows, ", ", col_tiles * kScaleTileCols,
                    ") as swizzle_groups_128x4 returns them on ", on);
  const auto* data = static_cast<const uint8_t*>(scales.const_data_ptr());
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(data) % 128 == 0, kOp, ": ", name,
                    " begin off a multiple of 128 bytes; give a tensor of its own");
  return data;
}

const float* checked_floats(const char* name, const std::optional<Tensor>& given,
                            at::IntArrayRef shape, at::Device on) {
  if (!given) return nullptr;
  TORCH_CHECK_VALUE(given->scalar_type() == at::kFloat && given->sizes() == shape &&
                        given->is_contiguous() && given->device() == on,
                    kOp, ": ", name, " is ", given->scalar_type(), " ", given->sizes(), " on ",
                    given->device(), "; give contiguous float32 ", shape, " on ", on);
  return given->const_data_ptr<float>();
}

void check_sizes(int64_t num_rows, int64_t num_cols, int64_t num_k) {
  constexpr int64_t kLargest = std::numeric_limits<int>::max();
  TORCH_CHECK_VALUE(num_k > 0 && num_k % 32 == 0, kOp, ": K=", num_k,
                    " is not a positive multiple of 32; use backend='cuda'");
  TORCH_CHECK_VALUE(num_cols > 0 && num_cols % 8 == 0, kOp, ": N=", num_cols,
                    " is not a positive multiple of 8; use backend='cuda'");
  TORCH_CHECK_VALUE(num_rows <= kLargest && num_cols <= kLargest && num_k <= kLargest, kOp,
                    ": M=", num_rows, ", N=", num_cols, ", K=", num_k, "; give sizes below 2^31");
}

Tensor checked_offsets(const Tensor& offsets, at::Device on) {
  TORCH_CHECK_VALUE(offsets.dim() == 1 && offsets.numel() > 1 &&
                        at::isIntegralType(offsets.scalar_type(), false) && offsets.device() == on,
                    kOp, ": offsets are ", offsets.scalar_type(), " ", offsets.sizes(), " on ",
                    offsets.device(), "; give integers (G+1,), G >= 1, on ", on);
  return offsets.to(at::kLong).contiguous();
}

Tensor grouped_gemm_nvfp4_blackwell(const Tensor& a_codes, const Tensor& a_scales,
                                    const Tensor& b_codes, const Tensor& b_scales,
                                    const Tensor& offsets_given, int64_t num_cols,
                                    const std::optional<Tensor>& row_scale,
                                    const std::optional<Tensor>& group_scale,
                                    const std::optional<Tensor>& bias, at::ScalarType out_dtype) {
  const at::Device on = a_codes.device();
  TORCH_CHECK_VALUE(a_codes.dim() == 2, kOp, ": a_codes have shape ", a_codes.sizes(),
                    "; give uint8 (M, K/2)");
  TORCH_CHECK_VALUE(out_dtype == at::kBFloat16 || out_dtype == at::kFloat, kOp,
                    ": out_dtype=", out_dtype, "; give BF16 or FP32");
  const int64_t num_rows = a_codes.size(0), num_k = a_codes.size(1) * 2;
  check_sizes(num_rows, num_cols, num_k);
  const c10::cuda::CUDAGuard guard(on);
  const Tensor offsets = checked_offsets(offsets_given, on);
  const int64_t num_groups = offsets.numel() - 1, col_tiles = num_col_tiles(num_k);
  TORCH_CHECK_VALUE(b_codes.dim() == 2 && b_codes.size(0) == num_groups * num_cols, kOp,
                    ": b_codes have shape ", b_codes.sizes(), "; give (", num_groups * num_cols,
                    ", ", num_k / 2, "), the ", num_groups, " weights of N=", num_cols);
  GroupedGemmArgs args{};
  args.a = checked_codes("a_codes", a_codes, num_k, on);
  args.b = checked_codes("b_codes", b_codes, num_k, on);
  args.a_scales = checked_scales("a_scales_128x4", a_scales, max_row_tiles(num_rows, num_groups),
                                 col_tiles, on);
  args.b_scales = checked_scales("b_scales_128x4", b_scales, num_groups * num_row_tiles(num_cols),
                                 col_tiles, on);
  args.row_scale = checked_floats("row_scale", row_scale, {num_rows}, on);
  args.group_scale = checked_floats("group_scale", group_scale, {num_groups}, on);
  args.bias = checked_floats("bias", bias, {num_groups, num_cols}, on);
  args.offsets = offsets.const_data_ptr<int64_t>();
  args.num_groups = static_cast<int>(num_groups);
  args.num_cols = static_cast<int>(num_cols);
  args.num_k = static_cast<int>(num_k);
  args.device = on.index();
  const cudaDeviceProp* device = at::cuda::getCurrentDeviceProperties();
  TORCH_CHECK(device->major == 10, kOp, ": needs compute capability 10.0 or 10.3, this GPU has ",
              device->major, ".", device->minor, "; use backend='cuda'");
  args.num_sms = device->multiProcessorCount;
  Tensor out = at::empty({num_rows, num_cols}, a_codes.options().dtype(out_dtype));
  if (num_rows == 0) return out;
  args.out = out.mutable_data_ptr();
  const GroupedGemm gemm = out_dtype == at::kFloat ? grouped_gemm_fp32() : grouped_gemm_bf16();
  // Of torch's allocator: in the order of the stream, no memory of an earlier launch that runs.
  const int64_t bytes = static_cast<int64_t>(gemm.workspace_bytes(args));
  const Tensor workspace = at::empty({bytes}, a_codes.options());
  const char* error =
      gemm.launch(args, workspace.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream());
  TORCH_CHECK(error == nullptr, kOp, ": M=", num_rows, ", N=", num_cols, ", K=", num_k,
              ", G=", num_groups, ": ", error, "; use backend='cuda' and report this");
  return out;
}

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_blackwell", nullptr, -1, nullptr};

}  // namespace

TORCH_LIBRARY_FRAGMENT(megatron_nvfp4, m) {
  // a_codes (M, K/2) and b_codes (G*N, K/2) uint8, scales of both as swizzle_groups_128x4 returns
  // them, offsets (G+1,), row_scale (M,), group_scale (G,), bias (G, N), all three FP32:
  // (M, N) in BF16 or FP32. Rows from offsets[G] on are not written.
  m.def(
      "grouped_gemm_nvfp4_blackwell(Tensor a_codes, Tensor a_scales_128x4, Tensor b_codes, "
      "Tensor b_scales_128x4, Tensor offsets, int num_cols, Tensor? row_scale, "
      "Tensor? group_scale, Tensor? bias, ScalarType out_dtype) -> Tensor");
}

TORCH_LIBRARY_IMPL(megatron_nvfp4, CUDA, m) {
  m.impl("grouped_gemm_nvfp4_blackwell", &grouped_gemm_nvfp4_blackwell);
}

}  // namespace megatron_nvfp4::cuda

PyMODINIT_FUNC PyInit__blackwell() {
  return PyModule_Create(&megatron_nvfp4::cuda::module_definition);
}
