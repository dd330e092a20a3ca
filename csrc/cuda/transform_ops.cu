// CUDA implementations of the operators in bindings.cpp behind transforms.h: checks, and calls of
// the kernels.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "transforms.h"

namespace megatron_nvfp4::cuda {
namespace {

using at::Tensor;

InputType type_of(const char* op, at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return InputType::kBFloat16;
  if (dtype == at::kHalf) return InputType::kHalf;
  TORCH_CHECK_VALUE(dtype == at::kFloat, op, ": ", dtype, "; give BF16, FP16 or FP32");
  return InputType::kFloat;
}

// A contiguous matrix at a multiple of 16 bytes whose `axis` is whole blocks.
Tensor checked_matrix(const char* op, const Tensor& x, int axis, int64_t block) {
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x has shape ", x.sizes(), "; give a matrix (M, K)");
  TORCH_CHECK_VALUE(x.size(axis) % block == 0, op, ": ", axis == 0 ? "M=" : "K=", x.size(axis),
                    " is not a multiple of ", block,
                    axis == 0 ? "; pad the rows" : "; pad the columns or leave this layer in BF16");
  TORCH_CHECK_VALUE(x.size(1) <= 1 << 21, op, ": K=", x.size(1),
                    " exceeds 2^21; split the columns");
  const Tensor whole = x.contiguous();
  return reinterpret_cast<uintptr_t>(whole.const_data_ptr()) % 16 ? whole.clone() : whole;
}

Tensor amax_for(const char* op, const std::optional<Tensor>& given, const Tensor& x, int64_t num) {
  if (!given) return at::empty({num}, x.options().dtype(at::kFloat));
  TORCH_CHECK_VALUE(given->dim() == 1 && given->size(0) == num &&
                        given->scalar_type() == at::kFloat && given->device() == x.device(),
                    op, ": amax is ", given->scalar_type(), " ", given->sizes(), " on ",
                    given->device(), "; give float32 (", num, ",) on ", x.device());
  return given->clone(at::MemoryFormat::Contiguous);
}

// Row boundaries; values are not looked at: that would wait for the GPU.
std::optional<Tensor> checked_offsets(const char* op, const std::optional<Tensor>& offsets,
                                      const Tensor& x) {
  if (!offsets) return std::nullopt;
  TORCH_CHECK_VALUE(offsets->dim() == 1 && offsets->numel() > 0 &&
                        at::isIntegralType(offsets->scalar_type(), false) &&
                        offsets->device() == x.device(),
                    op, ": offsets are ", offsets->scalar_type(), " ", offsets->sizes(), " on ",
                    offsets->device(), "; give integers (G+1,) on ", x.device());
  return offsets->to(at::kLong).contiguous();
}

uint8_t* bytes(Tensor& t) { return static_cast<uint8_t*>(t.mutable_data_ptr()); }

Tensor empty_like_matrix(const Tensor& x, int64_t rows, int64_t cols, at::ScalarType dtype) {
  return at::empty({rows, cols}, x.options().dtype(dtype));
}

RandomKey random_key(int64_t seed, int64_t offset) {
  return {static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)};
}

void check_e4m3_max(const char* op, int64_t e4m3_max) {
  TORCH_CHECK_VALUE(e4m3_max == 448 || e4m3_max == 256, op, ": e4m3_max=", e4m3_max,
                    "; give 448 or 256");
}

// Arguments of a row form whose amax is in `amax`, found first unless it was given.
QuantizeArgs row_args(const char* op, const Tensor& x, Tensor& scales, Tensor& amax,
                      bool given_amax, AmaxSource source, const std::optional<Tensor>& offsets) {
  QuantizeArgs args{};
  args.x = x.const_data_ptr();
  args.type = type_of(op, x.scalar_type());
  args.num_rows = x.size(0);
  args.num_cols = static_cast<int>(x.size(1));
  args.block_scales = bytes(scales);
  args.amax = amax.mutable_data_ptr<float>();
  args.source = source;
  args.offsets = offsets ? offsets->const_data_ptr<int64_t>() : nullptr;
  args.num_groups = offsets ? static_cast<int>(offsets->numel()) - 1 : 1;
  if (!given_amax) C10_CUDA_CHECK(find_amax(args, c10::cuda::getCurrentCUDAStream()));
  return args;
}

std::tuple<Tensor, Tensor, Tensor> quantize_nvfp4_stochastic(
    const Tensor& input, const std::optional<Tensor>& given_amax,
    const std::optional<Tensor>& offsets_given, int64_t block_rows, bool per_token,
    int64_t e4m3_max, int64_t seed, int64_t offset) {
  const char* op = "quantize_nvfp4_stochastic";
  const c10::cuda::CUDAGuard guard(input.device());
  const Tensor x = checked_matrix(op, input, 1, kBlock);
  TORCH_CHECK_VALUE(block_rows == 1, op, ": block_rows=", block_rows,
                    " has no kernel; give 1, or use the reference backend");
  check_e4m3_max(op, e4m3_max);
  const auto offsets = checked_offsets(op, per_token ? std::nullopt : offsets_given, x);
  const int64_t num_amax = per_token ? x.size(0) : offsets ? offsets->numel() - 1 : 1;
  Tensor codes = empty_like_matrix(x, x.size(0), x.size(1) / 2, at::kByte);
  Tensor scales = empty_like_matrix(x, x.size(0), x.size(1) / kBlock, at::kFloat8_e4m3fn);
  Tensor amax = amax_for(op, given_amax, x, num_amax);
  const AmaxSource source = per_token ? AmaxSource::kRow
                            : offsets ? AmaxSource::kGroup
                                      : AmaxSource::kTensor;
  QuantizeArgs args = row_args(op, x, scales, amax, given_amax.has_value(), source, offsets);
  args.codes = bytes(codes);
  args.e4m3_max = static_cast<int>(e4m3_max);
  C10_CUDA_CHECK(
      quantize_rows_stochastic(args, random_key(seed, offset), c10::cuda::getCurrentCUDAStream()));
  return {codes, scales, amax};
}

std::tuple<Tensor, Tensor, Tensor> quantize_nvfp4_columns(
    const Tensor& input, const std::optional<Tensor>& given_amax,
    const std::optional<Tensor>& offsets_given, int64_t e4m3_max, bool rotated, bool stochastic,
    int64_t seed, int64_t offset) {
  const char* op = "quantize_nvfp4_columns";
  const c10::cuda::CUDAGuard guard(input.device());
  const Tensor x = checked_matrix(op, input, 0, kBlock);
  check_e4m3_max(op, e4m3_max);
  const auto offsets = checked_offsets(op, offsets_given, x);
  const int64_t num_rows = x.size(0), num_cols = x.size(1);
  Tensor codes = empty_like_matrix(x, num_cols, num_rows / 2, at::kByte);
  Tensor scales = empty_like_matrix(x, num_cols, num_rows / kBlock, at::kFloat8_e4m3fn);
  Tensor amax = amax_for(op, given_amax, x, offsets ? offsets->numel() - 1 : 1);
  const ColumnArgs args{x.const_data_ptr(),
                        type_of(op, x.scalar_type()),
                        num_rows,
                        num_cols,
                        bytes(codes),
                        bytes(scales),
                        amax.mutable_data_ptr<float>(),
                        offsets ? offsets->const_data_ptr<int64_t>() : nullptr,
                        offsets ? static_cast<int>(offsets->numel()) - 1 : 1,
                        static_cast<int>(e4m3_max),
                        rotated,
                        stochastic,
                        random_key(seed, offset)};
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  if (!given_amax) C10_CUDA_CHECK(find_column_amax(args, stream));
  C10_CUDA_CHECK(quantize_columns(args, stream));
  return {codes, scales, amax};
}

std::tuple<Tensor, Tensor, Tensor> quantize_simulated_op(const Tensor& input,
                                                         const std::optional<Tensor>& given_amax,
                                                         int64_t exponent, int64_t mantissa) {
  const char* op = "quantize_simulated";
  const c10::cuda::CUDAGuard guard(input.device());
  const Tensor x = checked_matrix(op, input, 1, kBlock);
  TORCH_CHECK_VALUE(exponent >= 2 && exponent <= 5 && mantissa >= 1 && mantissa <= 4, op, ": E",
                    exponent, "M", mantissa, "; give E2..5, M1..4");
  Tensor values = empty_like_matrix(x, x.size(0), x.size(1), at::kFloat);
  Tensor scales = empty_like_matrix(x, x.size(0), x.size(1) / kBlock, at::kFloat8_e4m3fn);
  Tensor amax = amax_for(op, given_amax, x, x.size(0));
  const QuantizeArgs args =
      row_args(op, x, scales, amax, given_amax.has_value(), AmaxSource::kRow, std::nullopt);
  const FloatFormat format = {static_cast<int>(exponent), static_cast<int>(mantissa)};
  C10_CUDA_CHECK(quantize_simulated(args, format, values.mutable_data_ptr<float>(),
                                    c10::cuda::getCurrentCUDAStream()));
  return {values, scales, amax};
}

std::tuple<Tensor, Tensor> quantize_mxfp8_op(const Tensor& input) {
  const char* op = "quantize_mxfp8";
  const c10::cuda::CUDAGuard guard(input.device());
  const Tensor x = checked_matrix(op, input, 1, kMxfp8Block);
  const int64_t num_rows = x.size(0), num_cols = x.size(1);
  Tensor codes = empty_like_matrix(x, num_rows, num_cols, at::kFloat8_e4m3fn);
  Tensor scales = empty_like_matrix(x, num_rows, num_cols / kMxfp8Block, at::kByte);
  const Mxfp8Args args{x.const_data_ptr(), type_of(op, x.scalar_type()),
                       num_rows,           num_cols,
                       bytes(codes),       bytes(scales)};
  C10_CUDA_CHECK(quantize_mxfp8(args, c10::cuda::getCurrentCUDAStream()));
  return {codes, scales};
}

std::tuple<Tensor, Tensor> quantize_mxfp8_columns_op(const Tensor& input) {
  const char* op = "quantize_mxfp8_columns";
  const c10::cuda::CUDAGuard guard(input.device());
  const Tensor x = checked_matrix(op, input, 0, kMxfp8Block);
  const int64_t num_rows = x.size(0), num_cols = x.size(1);
  Tensor codes = empty_like_matrix(x, num_cols, num_rows, at::kFloat8_e4m3fn);
  Tensor scales = empty_like_matrix(x, num_cols, num_rows / kMxfp8Block, at::kByte);
  const Mxfp8Args args{x.const_data_ptr(), type_of(op, x.scalar_type()),
                       num_rows,           num_cols,
                       bytes(codes),       bytes(scales)};
  C10_CUDA_CHECK(quantize_mxfp8_columns(args, c10::cuda::getCurrentCUDAStream()));
  return {codes, scales};
}

Tensor round_mxfp8_columns_op(const Tensor& input) {
  const char* op = "round_mxfp8_columns";
  const c10::cuda::CUDAGuard guard(input.device());
  const Tensor x = checked_matrix(op, input, 0, kMxfp8Block);
  TORCH_CHECK_VALUE(x.size(1) % 2 == 0, op, ": N=", x.size(1), "; give an even number of columns");
  Tensor out = at::empty(x.sizes(), x.options().dtype(at::kBFloat16));
  C10_CUDA_CHECK(round_mxfp8_columns(x.const_data_ptr(), type_of(op, x.scalar_type()), x.size(0),
                                     x.size(1), out.mutable_data_ptr(),
                                     c10::cuda::getCurrentCUDAStream()));
  return out;
}

Tensor dequantize_mxfp8_op(const Tensor& codes_in, const Tensor& scales_in, at::ScalarType dtype) {
  const char* op = "dequantize_mxfp8";
  TORCH_CHECK_VALUE(codes_in.scalar_type() == at::kFloat8_e4m3fn &&
                        scales_in.scalar_type() == at::kByte &&
                        scales_in.device() == codes_in.device() && scales_in.dim() == 2 &&
                        codes_in.dim() == 2 && scales_in.size(0) == codes_in.size(0) &&
                        scales_in.size(1) * kMxfp8Block == codes_in.size(1),
                    op, ": codes ", codes_in.scalar_type(), " ", codes_in.sizes(),
                    ", block_scales ", scales_in.scalar_type(), " ", scales_in.sizes(),
                    "; give float8_e4m3fn (M, K) and uint8 (M, K/32) on one device");
  const c10::cuda::CUDAGuard guard(codes_in.device());
  const Tensor codes = checked_matrix(op, codes_in, 1, kMxfp8Block),
               scales = scales_in.contiguous();
  Tensor out = at::empty(codes.sizes(), codes.options().dtype(dtype));
  C10_CUDA_CHECK(dequantize_mxfp8(static_cast<const uint8_t*>(codes.const_data_ptr()),
                                  static_cast<const uint8_t*>(scales.const_data_ptr()),
                                  codes.numel(), type_of(op, dtype), out.mutable_data_ptr(),
                                  c10::cuda::getCurrentCUDAStream()));
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_nvfp4, CUDA, m) {
  m.impl("quantize_nvfp4_stochastic", &quantize_nvfp4_stochastic);
  m.impl("quantize_nvfp4_columns", &quantize_nvfp4_columns);
  m.impl("quantize_simulated", &quantize_simulated_op);
  m.impl("quantize_mxfp8", &quantize_mxfp8_op);
  m.impl("quantize_mxfp8_columns", &quantize_mxfp8_columns_op);
  m.impl("round_mxfp8_columns", &round_mxfp8_columns_op);
  m.impl("dequantize_mxfp8", &dequantize_mxfp8_op);
}

}  // namespace megatron_nvfp4::cuda
