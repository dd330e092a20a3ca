// CUDA implementations of the NVFP4 quantisation operators in bindings.cpp: checks, and calls of
// the kernels.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "quantize.h"

namespace megatron_nvfp4::cuda {
namespace {

using at::Tensor;

InputType type_of(const Tensor& x) {
  if (x.scalar_type() == at::kBFloat16) return InputType::kBFloat16;
  if (x.scalar_type() == at::kHalf) return InputType::kHalf;
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat, "quantize_nvfp4: x is ", x.scalar_type(),
                    "; give BF16, FP16 or FP32");
  return InputType::kFloat;
}

// What the spec's integers mean, checked.
struct Spec {
  int64_t block_rows;
  bool per_token;
  int64_t e4m3_max, four_over_six;
  bool fast_error;

  void check() const {
    TORCH_CHECK_VALUE(block_rows == 1 || (block_rows == kBlock && !per_token),
                      "quantize_nvfp4: block_rows=", block_rows,
                      "; give 1, or 16 with per_token=False");
    TORCH_CHECK_VALUE(e4m3_max == 448 || e4m3_max == 256, "quantize_nvfp4: e4m3_max=", e4m3_max,
                      "; give 448 or 256");
    TORCH_CHECK_VALUE(four_over_six >= 0 && four_over_six <= 2,
                      "quantize_nvfp4: four_over_six=", four_over_six,
                      "; give 0 (off), 1 (mae), 2 (mse)");
  }
};

void check_x(const Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() == 2, "quantize_nvfp4: x has shape ", x.sizes(),
                    "; give a matrix (M, K)");
  TORCH_CHECK_VALUE(x.size(1) % kBlock == 0, "quantize_nvfp4: K=", x.size(1),
                    " is not a multiple of 16; pad the columns or leave this layer in BF16");
  TORCH_CHECK_VALUE(x.size(1) <= 1 << 26, "quantize_nvfp4: K=", x.size(1),
                    " exceeds 2^26; split the columns");
}

// A tensor of a kernel: contiguous, 16-byte aligned, on x's device, of the dtype and size.
void check_operand(const char* name, const Tensor& t, const Tensor& x, at::ScalarType dtype,
                   at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(t.sizes() == shape && t.scalar_type() == dtype && t.device() == x.device(),
                    "quantize_nvfp4: ", name, " is ", t.scalar_type(), " ", t.sizes(), " on ",
                    t.device(), "; give ", dtype, " ", shape, " on ", x.device());
  TORCH_CHECK_VALUE(t.is_contiguous(), "quantize_nvfp4: ", name, " has strides ", t.strides(),
                    "; give a contiguous tensor (", name, ".contiguous())");
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0,
                    "quantize_nvfp4: ", name,
                    " does not begin at a multiple of 16 bytes; give a copy (", name, ".clone())");
}

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Checks a scale matrix: (rows, cols), or padded to whole 128x4 tiles.
void check_scales(const char* name, const Tensor& t, const Tensor& x, int64_t rows, int64_t cols,
                  bool swizzled) {
  if (swizzled) rows = round_up(rows, 128), cols = round_up(cols, 4);
  check_operand(name, t, x, at::kFloat8_e4m3fn, {rows, cols});
}

template <class T>
T* pointer(const std::optional<Tensor>& t) {
  return t ? static_cast<T*>(t->mutable_data_ptr()) : nullptr;
}

// Row boundaries as the kernels read them; values are not looked at: that would wait for the GPU.
std::optional<Tensor> checked_offsets(const std::optional<Tensor>& offsets, const Tensor& x) {
  if (!offsets) return std::nullopt;
  TORCH_CHECK_VALUE(offsets->dim() == 1 && offsets->numel() > 0 &&
                        at::isIntegralType(offsets->scalar_type(), false) &&
                        offsets->device() == x.device(),
                    "quantize_nvfp4: offsets are ", offsets->scalar_type(), " ", offsets->sizes(),
                    " on ", offsets->device(), "; give integers (G+1,) on ", x.device());
  return offsets->to(at::kLong).contiguous();
}

void run(const QuantizeArgs& given, bool given_amax, int64_t block_rows) {
  QuantizeArgs args = given;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const bool on_chip = args.source == AmaxSource::kSelf && args.num_cols <= max_cols_on_chip(args);
  if (args.source == AmaxSource::kSelf && (given_amax || !on_chip)) args.source = AmaxSource::kRow;
  // With no columns or no rows there is nothing to encode, but an amax of 0 to write.
  const bool empty = args.num_rows == 0 || args.num_cols == 0;
  if (empty && args.source == AmaxSource::kSelf) args.source = AmaxSource::kRow;
  if (!given_amax && args.source != AmaxSource::kSelf) C10_CUDA_CHECK(find_amax(args, stream));
  if (empty) return;
  C10_CUDA_CHECK((block_rows == 1 ? quantize_rows : quantize_tiles)(args, stream));
}

void quantize_nvfp4_out(const Tensor& x, const std::optional<Tensor>& offsets_given,
                        int64_t block_rows, bool per_token, int64_t e4m3_max, int64_t four_over_six,
                        bool fast_error, bool given_amax, bool swizzled, const Tensor& codes,
                        const Tensor& block_scales, const Tensor& amax,
                        const std::optional<Tensor>& codes_t,
                        const std::optional<Tensor>& block_scales_t,
                        const std::optional<Tensor>& decoded) {
  Spec{block_rows, per_token, e4m3_max, four_over_six, fast_error}.check();
  check_x(x);
  const InputType type = type_of(x);
  const int64_t num_rows = x.size(0), num_cols = x.size(1);
  const auto offsets = checked_offsets(per_token ? std::nullopt : offsets_given, x);
  const int64_t num_amax = per_token ? num_rows : offsets ? offsets->numel() - 1 : 1;
  check_operand("x", x, x, x.scalar_type(), x.sizes());
  check_operand("codes", codes, x, at::kByte, {num_rows, num_cols / 2});
  check_scales("block_scales", block_scales, x, num_rows, num_cols / kBlock, swizzled);
  check_operand("amax", amax, x, at::kFloat, {num_amax});
  TORCH_CHECK_VALUE(codes_t.has_value() == block_scales_t.has_value(),
                    "quantize_nvfp4: give both codes_t and block_scales_t, or neither");
  if (codes_t) {
    TORCH_CHECK_VALUE(block_rows == kBlock, "quantize_nvfp4: block_rows=", block_rows,
                      " has no transposed form; give 16, or quantise x.t()");
    TORCH_CHECK_VALUE(num_rows % kBlock == 0, "quantize_nvfp4: M=", num_rows,
                      " is not a multiple of 16, as the transposed form needs; pad the rows");
    check_operand("codes_t", *codes_t, x, at::kByte, {num_cols, num_rows / 2});
    check_scales("block_scales_t", *block_scales_t, x, num_cols, num_rows / kBlock, swizzled);
  }
  if (decoded) {
    TORCH_CHECK_VALUE(block_rows == 1, "quantize_nvfp4: decoded needs block_rows=1, not ",
                      block_rows);
    check_operand("decoded", *decoded, x, at::kBFloat16, x.sizes());
  }
  const c10::cuda::CUDAGuard guard(x.device());
  QuantizeArgs args{};
  args.x = x.const_data_ptr();
  args.type = type;
  args.num_rows = num_rows;
  args.num_cols = static_cast<int>(num_cols);
  args.codes = pointer<uint8_t>(codes);
  args.block_scales = pointer<uint8_t>(block_scales);
  args.amax = pointer<float>(amax);
  args.source = per_token ? AmaxSource::kSelf : offsets ? AmaxSource::kGroup : AmaxSource::kTensor;
  args.offsets = offsets ? offsets->const_data_ptr<int64_t>() : nullptr;
  args.num_groups = offsets ? static_cast<int>(offsets->numel()) - 1 : 1;
  args.e4m3_max = static_cast<int>(e4m3_max);
  args.four_over_six = static_cast<FourOverSix>(four_over_six);
  args.fast_error = fast_error;
  args.swizzled = swizzled;
  args.codes_t = pointer<uint8_t>(codes_t);
  args.block_scales_t = pointer<uint8_t>(block_scales_t);
  args.decoded = pointer<void>(decoded);
  run(args, given_amax, block_rows);
}

std::tuple<Tensor, Tensor, Tensor> quantize_nvfp4(const Tensor& input,
                                                  const std::optional<Tensor>& given_amax,
                                                  const std::optional<Tensor>& offsets,
                                                  int64_t block_rows, bool per_token,
                                                  int64_t e4m3_max, int64_t four_over_six,
                                                  bool fast_error) {
  check_x(input);
  Tensor x = input.contiguous();
  if (reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16) x = x.clone();
  const int64_t num_rows = x.size(0), num_cols = x.size(1);
  const c10::cuda::CUDAGuard guard(x.device());
  Tensor codes = at::empty({num_rows, num_cols / 2}, x.options().dtype(at::kByte));
  Tensor scales = at::empty({num_rows, num_cols / kBlock}, x.options().dtype(at::kFloat8_e4m3fn));
  const int64_t num_amax = per_token ? num_rows : offsets ? offsets->numel() - 1 : 1;
  if (given_amax) {
    TORCH_CHECK_VALUE(given_amax->dim() == 1 && given_amax->size(0) == num_amax &&
                          given_amax->scalar_type() == at::kFloat,
                      "quantize_nvfp4: amax is ", given_amax->scalar_type(), " ",
                      given_amax->sizes(), "; give float32 (", num_amax,
                      ",), one for each tensor, group or token");
  }
  Tensor amax = given_amax ? given_amax->clone(at::MemoryFormat::Contiguous)
                           : at::empty({num_amax}, x.options().dtype(at::kFloat));
  quantize_nvfp4_out(x, offsets, block_rows, per_token, e4m3_max, four_over_six, fast_error,
                     given_amax.has_value(), false, codes, scales, amax, std::nullopt, std::nullopt,
                     std::nullopt);
  return {codes, scales, amax};
}

void check_numerics_out(const Tensor& counts) {
  TORCH_CHECK_VALUE(counts.numel() == kNumericsChecks && counts.scalar_type() == at::kLong &&
                        counts.is_contiguous(),
                    "check_numerics: counts is ", counts.scalar_type(), " ", counts.sizes(),
                    "; give contiguous int64 (", kNumericsChecks, ",)");
  const c10::cuda::CUDAGuard guard(counts.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(check_numerics(counts.mutable_data_ptr<int64_t>(), stream));
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_nvfp4, CUDA, m) {
  m.impl("quantize_nvfp4", &quantize_nvfp4);
  m.impl("quantize_nvfp4_out", &quantize_nvfp4_out);
  m.impl("check_numerics_out", &check_numerics_out);
}

}  // namespace megatron_nvfp4::cuda
