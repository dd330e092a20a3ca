// CPU implementations of the operators in bindings.cpp: checks, threads, and calls of the kernels.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "dispatch.h"

namespace megatron_nvfp4 {
namespace {

using at::Tensor;

constexpr int64_t kGrain = 1 << 15;  // elements worth a thread

std::string cpu_isa() { return kernels().isa; }

// work(i) for 0 <= i < num, each of `elements` elements, over torch's threads.
template <class Work>
void for_each(int64_t num, int64_t elements, const Work& work) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, elements));
  at::parallel_for(0, num, grain, [&](int64_t begin, int64_t end) {
    const ExactFloats exact;
    for (int64_t i = begin; i < end; ++i) work(i);
  });
}

InputType type_of(const char* op, at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return InputType::kBFloat16;
  if (dtype == at::kHalf) return InputType::kHalf;
  TORCH_CHECK_VALUE(dtype == at::kFloat, op, ": ", dtype, "; give BF16, FP16 or FP32");
  return InputType::kFloat;
}

Tensor checked_matrix(const char* op, const Tensor& x, int64_t block) {
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x has shape ", x.sizes(), "; give a matrix (M, K)");
  TORCH_CHECK_VALUE(x.size(1) % block == 0, op, ": K=", x.size(1), " is not a multiple of ", block,
                    "; pad the columns or leave this layer in BF16");
  return x.contiguous();
}

const uint8_t* bytes(const Tensor& t) { return static_cast<const uint8_t*>(t.const_data_ptr()); }
uint8_t* mutable_bytes(Tensor& t) { return static_cast<uint8_t*>(t.mutable_data_ptr()); }

const uint8_t* row_of(const Tensor& x, int64_t row) {
  return bytes(x) + row * x.size(1) * static_cast<int64_t>(x.element_size());
}

// Row boundaries on the host: {0, M} for an ungrouped matrix.
std::vector<int64_t> row_bounds(const std::optional<Tensor>& offsets, int64_t num_rows,
                                int64_t block_rows) {
  if (!offsets) return {0, num_rows};
  TORCH_CHECK_VALUE(offsets->dim() == 1 && offsets->numel() > 0 &&
                        at::isIntegralType(offsets->scalar_type(), false),
                    "quantize_nvfp4: offsets are ", offsets->scalar_type(), " ", offsets->sizes(),
                    "; give integers (G+1,)");
  const Tensor wide = offsets->to(at::kLong).contiguous();
  const int64_t* data = wide.const_data_ptr<int64_t>();
  std::vector<int64_t> bounds(data, data + wide.numel());
  TORCH_CHECK_VALUE(bounds.front() == 0 && bounds.back() == num_rows &&
                        std::is_sorted(bounds.begin(), bounds.end()),
                    "quantize_nvfp4: offsets ", at::IntArrayRef(bounds),
                    " do not rise from 0 to M=", num_rows);
  const bool whole =
      std::all_of(bounds.begin(), bounds.end(), [&](int64_t b) { return b % block_rows == 0; });
  TORCH_CHECK_VALUE(
      whole, "quantize_nvfp4: offsets ", at::IntArrayRef(bounds),
      " cut 16x16 tiles or blocks of columns; pad every group to a multiple of 16 rows");
  return bounds;
}

// max |x| of every row group, FP32 (G,).
Tensor group_amax(const Tensor& x, const std::vector<int64_t>& bounds, InputType type) {
  std::vector<float> rows(x.size(0));
  for_each(x.size(0), x.size(1),
           [&](int64_t row) { rows[row] = kernels().amax(row_of(x, row), type, x.size(1)); });
  Tensor amax = at::empty({static_cast<int64_t>(bounds.size()) - 1}, x.options().dtype(at::kFloat));
  float* out = amax.mutable_data_ptr<float>();
  for (size_t group = 0; group + 1 < bounds.size(); ++group) {
    out[group] = 0.0f;
    for (int64_t row = bounds[group]; row < bounds[group + 1]; ++row) {
      out[group] = std::max(out[group], rows[row]);
    }
  }
  return amax;
}

Tensor checked_amax(const Tensor& amax, int64_t num) {
  TORCH_CHECK_VALUE(amax.dim() == 1 && amax.size(0) == num && amax.scalar_type() == at::kFloat,
                    "quantize_nvfp4: amax is ", amax.scalar_type(), " ", amax.sizes(),
                    "; give float32 (", num, ",), one for each tensor, group or token");
  return amax.clone(at::MemoryFormat::Contiguous);
}

// The last group that starts at or before the row: empty groups are passed over.
int64_t group_of(const std::vector<int64_t>& bounds, int64_t row) {
  return std::upper_bound(bounds.begin() + 1, bounds.end(), row) - (bounds.begin() + 1);
}

void quantize_rows(const QuantizeArgs& args, int64_t num_rows, int64_t block_rows,
                   const std::vector<int64_t>& bounds, const float* amax) {
  const int64_t num_units = (num_rows + block_rows - 1) / block_rows;
  for_each(num_units, block_rows * args.num_cols, [&](int64_t unit) {
    const int64_t row = unit * block_rows;
    const int64_t count = std::min(block_rows, num_rows - row);
    kernels().quantize(args, row, static_cast<int>(count), amax[group_of(bounds, row)]);
  });
}

std::tuple<Tensor, Tensor, Tensor> quantize_nvfp4_by(
    const Tensor& input, const std::optional<Tensor>& given_amax,
    const std::optional<Tensor>& offsets, int64_t block_rows, bool per_token, int64_t e4m3_max,
    int64_t four_over_six, bool fast_error, const std::optional<RandomKey>& key) {
  const Tensor x = checked_matrix("quantize_nvfp4", input, kBlock);
  const InputType type = type_of("quantize_nvfp4", x.scalar_type());
  TORCH_CHECK_VALUE(block_rows == 1 || (block_rows == kBlock && !per_token),
                    "quantize_nvfp4: block_rows=", block_rows,
                    "; give 1, or 16 with per_token=False");
  TORCH_CHECK_VALUE(e4m3_max == 448 || e4m3_max == 256, "quantize_nvfp4: e4m3_max=", e4m3_max,
                    "; give 448 or 256");
  TORCH_CHECK_VALUE(four_over_six >= 0 && four_over_six <= 2,
                    "quantize_nvfp4: four_over_six=", four_over_six,
                    "; give 0 (off), 1 (mae), 2 (mse)");
  const int64_t num_rows = x.size(0), num_cols = x.size(1);
  Tensor codes = at::empty({num_rows, num_cols / 2}, x.options().dtype(at::kByte));
  Tensor scales = at::empty({num_rows, num_cols / kBlock}, x.options().dtype(at::kFloat8_e4m3fn));
  const QuantizeArgs args{x.const_data_ptr(),
                          type,
                          num_cols,
                          mutable_bytes(codes),
                          mutable_bytes(scales),
                          static_cast<int>(e4m3_max),
                          static_cast<FourOverSix>(four_over_six),
                          fast_error,
                          key.has_value(),
                          key.value_or(RandomKey{})};
  if (!per_token) {
    const std::vector<int64_t> bounds = row_bounds(offsets, num_rows, block_rows);
    const int64_t num_groups = static_cast<int64_t>(bounds.size()) - 1;
    Tensor amax = given_amax ? checked_amax(*given_amax, num_groups) : group_amax(x, bounds, type);
    quantize_rows(args, num_rows, block_rows, bounds, amax.const_data_ptr<float>());
    return {codes, scales, amax};
  }
  Tensor amax = given_amax ? checked_amax(*given_amax, num_rows)
                           : at::empty({num_rows}, x.options().dtype(at::kFloat));
  float* row_amax = amax.mutable_data_ptr<float>();
  for_each(num_rows, num_cols, [&](int64_t row) {
    if (!given_amax) row_amax[row] = kernels().amax(row_of(x, row), type, num_cols);
    kernels().quantize(args, row, 1, row_amax[row]);
  });
  return {codes, scales, amax};
}

std::tuple<Tensor, Tensor, Tensor> quantize_nvfp4(
    const Tensor& x, const std::optional<Tensor>& amax, const std::optional<Tensor>& offsets,
    int64_t block_rows, bool per_token, int64_t e4m3_max, int64_t four_over_six, bool fast_error) {
  return quantize_nvfp4_by(x, amax, offsets, block_rows, per_token, e4m3_max, four_over_six,
                           fast_error, std::nullopt);
}

RandomKey random_key(int64_t seed, int64_t offset) {
  return {static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)};
}

std::tuple<Tensor, Tensor, Tensor> quantize_nvfp4_stochastic(
    const Tensor& x, const std::optional<Tensor>& amax, const std::optional<Tensor>& offsets,
    int64_t block_rows, bool per_token, int64_t e4m3_max, int64_t seed, int64_t offset) {
  return quantize_nvfp4_by(x, amax, offsets, block_rows, per_token, e4m3_max, 0, false,
                           random_key(seed, offset));
}

std::tuple<Tensor, Tensor, Tensor> quantize_nvfp4_columns(const Tensor& input,
                                                          const std::optional<Tensor>& given_amax,
                                                          const std::optional<Tensor>& offsets,
                                                          int64_t e4m3_max, bool rotated,
                                                          bool stochastic, int64_t seed,
                                                          int64_t offset) {
  const Tensor x = checked_matrix("quantize_nvfp4_columns", input, 1);
  const InputType type = type_of("quantize_nvfp4_columns", x.scalar_type());
  const int64_t num_rows = x.size(0), num_cols = x.size(1);
  TORCH_CHECK_VALUE(num_rows % kBlock == 0, "quantize_nvfp4_columns: M=", num_rows,
                    " is not a multiple of 16; pad the rows");
  TORCH_CHECK_VALUE(e4m3_max == 448 || e4m3_max == 256,
                    "quantize_nvfp4_columns: e4m3_max=", e4m3_max, "; give 448 or 256");
  const std::vector<int64_t> bounds = row_bounds(offsets, num_rows, kBlock);
  Tensor codes = at::empty({num_cols, num_rows / 2}, x.options().dtype(at::kByte));
  Tensor scales = at::empty({num_cols, num_rows / kBlock}, x.options().dtype(at::kFloat8_e4m3fn));
  const ColumnArgs args{x.const_data_ptr(),
                        type,
                        num_rows,
                        num_cols,
                        mutable_bytes(codes),
                        mutable_bytes(scales),
                        static_cast<int>(e4m3_max),
                        rotated,
                        stochastic,
                        random_key(seed, offset)};
  const int64_t num_groups = static_cast<int64_t>(bounds.size()) - 1,
                num_blocks = num_rows / kBlock;
  Tensor amax = given_amax ? checked_amax(*given_amax, num_groups)
                           : at::zeros({num_groups}, x.options().dtype(at::kFloat));
  float* group_amax = amax.mutable_data_ptr<float>();
  if (!given_amax) {
    std::vector<float> found(num_blocks);
    for_each(num_blocks, kBlock * num_cols,
             [&](int64_t block) { found[block] = kernels().column_amax(args, block); });
    for (int64_t block = 0; block < num_blocks; ++block) {
      float& group = group_amax[group_of(bounds, block * kBlock)];
      group = std::max(group, found[block]);
    }
  }
  for_each(num_blocks, kBlock * num_cols, [&](int64_t block) {
    kernels().quantize_columns(args, block, group_amax[group_of(bounds, block * kBlock)]);
  });
  return {codes, scales, amax};
}

std::tuple<Tensor, Tensor, Tensor> quantize_simulated(const Tensor& input,
                                                      const std::optional<Tensor>& given_amax,
                                                      int64_t exponent, int64_t mantissa) {
  const Tensor x = checked_matrix("quantize_simulated", input, kBlock);
  const InputType type = type_of("quantize_simulated", x.scalar_type());
  TORCH_CHECK_VALUE(exponent >= 2 && exponent <= 5 && mantissa >= 1 && mantissa <= 4,
                    "quantize_simulated: E", exponent, "M", mantissa, "; give E2..5, M1..4");
  const FloatFormat format = {static_cast<int>(exponent), static_cast<int>(mantissa)};
  const int64_t num_rows = x.size(0), num_cols = x.size(1);
  Tensor values = at::empty({num_rows, num_cols}, x.options().dtype(at::kFloat));
  Tensor scales = at::empty({num_rows, num_cols / kBlock}, x.options().dtype(at::kFloat8_e4m3fn));
  Tensor amax = given_amax ? checked_amax(*given_amax, num_rows)
                           : at::empty({num_rows}, x.options().dtype(at::kFloat));
  float *row_amax = amax.mutable_data_ptr<float>(), *to = values.mutable_data_ptr<float>();
  uint8_t* scales_to = mutable_bytes(scales);
  for_each(num_rows, num_cols, [&](int64_t row) {
    if (!given_amax) row_amax[row] = kernels().amax(row_of(x, row), type, num_cols);
    kernels().quantize_simulated(row_of(x, row), type, num_cols, format, row_amax[row],
                                 to + row * num_cols, scales_to + row * (num_cols / kBlock));
  });
  return {values, scales, amax};
}

void check_quantized(const char* op, const Tensor& codes, const Tensor& scales,
                     at::ScalarType codes_type, at::ScalarType scales_type, int64_t block_bytes) {
  TORCH_CHECK_VALUE(
      codes.dim() == 2 && codes.scalar_type() == codes_type && codes.size(1) % block_bytes == 0, op,
      ": codes are ", codes.scalar_type(), " ", codes.sizes(), "; give ", codes_type,
      " with whole blocks of ", block_bytes, " bytes");
  TORCH_CHECK_VALUE(scales.dim() == 2 && scales.scalar_type() == scales_type &&
                        scales.size(0) == codes.size(0) &&
                        scales.size(1) == codes.size(1) / block_bytes,
                    op, ": block_scales are ", scales.scalar_type(), " ", scales.sizes(), "; give ",
                    scales_type, " (", codes.size(0), ", ", codes.size(1) / block_bytes, ")");
}

Tensor dequantize_rows(const Tensor& codes_in, const Tensor& scales_in, const float* row_scale,
                       int64_t scale_stride, at::ScalarType dtype) {
  check_quantized("dequantize_nvfp4", codes_in, scales_in, at::kByte, at::kFloat8_e4m3fn,
                  kBlock / 2);
  const Tensor codes = codes_in.contiguous(), scales = scales_in.contiguous();
  const InputType type = type_of("dequantize_nvfp4", dtype);
  const int64_t num_cols = codes.size(1) * 2;
  Tensor out = at::empty({codes.size(0), num_cols}, codes.options().dtype(dtype));
  uint8_t* to = mutable_bytes(out);
  const int64_t out_bytes = num_cols * static_cast<int64_t>(out.element_size());
  for_each(codes.size(0), num_cols, [&](int64_t row) {
    kernels().dequantize(row_of(codes, row), row_of(scales, row), num_cols,
                         row_scale[row * scale_stride], type, to + row * out_bytes);
  });
  return out;
}

Tensor decode_nvfp4(const Tensor& codes, const Tensor& block_scales) {
  const float one = 1.0f;
  return dequantize_rows(codes, block_scales, &one, 0, at::kBFloat16);
}

Tensor dequantize_nvfp4(const Tensor& codes, const Tensor& block_scales, const Tensor& row_scale,
                        at::ScalarType dtype) {
  TORCH_CHECK_VALUE(row_scale.dim() == 1 && row_scale.scalar_type() == at::kFloat &&
                        (row_scale.size(0) == 1 || row_scale.size(0) == codes.size(0)),
                    "dequantize_nvfp4: row_scale is ", row_scale.scalar_type(), " ",
                    row_scale.sizes(), "; give float32 (1,) or (", codes.size(0), ",)");
  const Tensor scale = row_scale.contiguous();
  const int64_t stride = scale.size(0) == 1 ? 0 : 1;
  return dequantize_rows(codes, block_scales, scale.const_data_ptr<float>(), stride, dtype);
}

std::tuple<Tensor, Tensor> quantize_mxfp8(const Tensor& input) {
  const Tensor x = checked_matrix("quantize_mxfp8", input, kMxfp8Block);
  const InputType type = type_of("quantize_mxfp8", x.scalar_type());
  const int64_t num_rows = x.size(0), num_cols = x.size(1), num_blocks = num_cols / kMxfp8Block;
  Tensor codes = at::empty({num_rows, num_cols}, x.options().dtype(at::kFloat8_e4m3fn));
  Tensor scales = at::empty({num_rows, num_blocks}, x.options().dtype(at::kByte));
  uint8_t *codes_to = mutable_bytes(codes), *scales_to = mutable_bytes(scales);
  for_each(num_rows, num_cols, [&](int64_t row) {
    kernels().quantize_mxfp8(row_of(x, row), type, num_blocks, codes_to + row * num_cols,
                             scales_to + row * num_blocks);
  });
  return {codes, scales};
}

std::tuple<Tensor, Tensor> quantize_mxfp8_columns(const Tensor& input) {
  const Tensor x = checked_matrix("quantize_mxfp8_columns", input, 1);
  const InputType type = type_of("quantize_mxfp8_columns", x.scalar_type());
  const int64_t num_rows = x.size(0), num_cols = x.size(1), num_blocks = num_rows / kMxfp8Block;
  TORCH_CHECK_VALUE(num_rows % kMxfp8Block == 0, "quantize_mxfp8_columns: M=", num_rows,
                    " is not a multiple of 32; pad the rows");
  Tensor codes = at::empty({num_cols, num_rows}, x.options().dtype(at::kFloat8_e4m3fn));
  Tensor scales = at::empty({num_cols, num_blocks}, x.options().dtype(at::kByte));
  uint8_t *codes_to = mutable_bytes(codes), *scales_to = mutable_bytes(scales);
  for_each(num_blocks, kMxfp8Block * num_cols, [&](int64_t block) {
    kernels().quantize_mxfp8_columns(x.const_data_ptr(), type, num_rows, num_cols, block, codes_to,
                                     scales_to);
  });
  return {codes, scales};
}

Tensor dequantize_mxfp8(const Tensor& codes_in, const Tensor& scales_in, at::ScalarType dtype) {
  check_quantized("dequantize_mxfp8", codes_in, scales_in, at::kFloat8_e4m3fn, at::kByte,
                  kMxfp8Block);
  const Tensor codes = codes_in.contiguous(), scales = scales_in.contiguous();
  const InputType type = type_of("dequantize_mxfp8", dtype);
  Tensor out = at::empty(codes.sizes(), codes.options().dtype(dtype));
  uint8_t* to = mutable_bytes(out);
  const int64_t out_bytes = codes.size(1) * static_cast<int64_t>(out.element_size());
  for_each(codes.size(0), codes.size(1), [&](int64_t row) {
    kernels().dequantize_mxfp8(row_of(codes, row), row_of(scales, row), scales.size(1), type,
                               to + row * out_bytes);
  });
  return out;
}

Tensor outer_scale(const Tensor& amax_in, int64_t e4m3_max) {
  TORCH_CHECK_VALUE(amax_in.scalar_type() == at::kFloat, "outer_scale: amax is ",
                    amax_in.scalar_type(), "; give float32");
  const Tensor amax = amax_in.contiguous();
  Tensor out = at::empty(amax.sizes(), amax.options());
  const float* from = amax.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < amax.numel(); ++i) {
    to[i] = decode_scale(encode_scale(from[i], static_cast<int>(e4m3_max)));
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_nvfp4, CompositeExplicitAutograd, m) { m.impl("cpu_isa", &cpu_isa); }

TORCH_LIBRARY_IMPL(megatron_nvfp4, CPU, m) {
  m.impl("quantize_nvfp4", &quantize_nvfp4);
  m.impl("quantize_nvfp4_stochastic", &quantize_nvfp4_stochastic);
  m.impl("quantize_nvfp4_columns", &quantize_nvfp4_columns);
  m.impl("outer_scale", &outer_scale);
  m.impl("decode_nvfp4", &decode_nvfp4);
  m.impl("dequantize_nvfp4", &dequantize_nvfp4);
  m.impl("quantize_mxfp8", &quantize_mxfp8);
  m.impl("quantize_mxfp8_columns", &quantize_mxfp8_columns);
  m.impl("quantize_simulated", &quantize_simulated);
  m.impl("dequantize_mxfp8", &dequantize_mxfp8);
}

}  // namespace megatron_nvfp4
