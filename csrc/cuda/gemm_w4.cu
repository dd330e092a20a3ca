// The operator of the grouped GEMM on 4-bit weights: checks, choice of tile, launch.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <limits>
#include <optional>

#include "gemm_w4.cuh"

namespace megatron_nvfp4::cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The configuration that was fastest at the mean rows of a group.
int choose_config(int64_t num_rows, int64_t num_groups, int64_t n, int num_sms) {
  if (num_groups == 1) {
    const int dense = choose_dense_config(num_rows, static_cast<int>(n), num_sms);
    if (dense >= 0) return kNumConfigs + dense;
  }
  const int64_t mean = (num_rows + num_groups - 1) / num_groups;
  // Tiles of 256 features would leave SMs without one.
  if (num_groups * ((n + 255) / 256) * ((mean + 159) / 160) < 100) return mean <= 64 ? 0 : 1;
  return mean <= 44 ? 2 : mean <= 110 ? 3 : 4;
}

int device_attribute(cudaDeviceAttr attribute) {
  int device, value;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

void check_gpu() {
  const int major = device_attribute(cudaDevAttrComputeCapabilityMajor);
  const int minor = device_attribute(cudaDevAttrComputeCapabilityMinor);
  TORCH_CHECK(major == 9 && minor == 0, "grouped_gemm_w4: this GPU has compute capability ", major,
              ".", minor, ", the kernel needs 9.0; use the generic kernels");
}

// Contiguous, from a multiple of 16 bytes.
Tensor aligned(const Tensor& t) {
  const Tensor dense = t.contiguous();
  return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : dense.clone();
}

void check_scale(const OptionalTensor& scale, const char* name, int64_t size, const Tensor& x) {
  TORCH_CHECK_VALUE(
      !scale || (scale->dim() == 1 && scale->scalar_type() == at::kFloat &&
                 (scale->size(0) == 1 || scale->size(0) == size) && scale->device() == x.device()),
      "grouped_gemm_w4: ", name, " is ", scale->scalar_type(), " ", scale->sizes(), " on ",
      scale->device(), "; give float32 (1,) or (", size, ",) on ", x.device());
}

void check_indices(const Tensor& t, const char* name, const Tensor& x) {
  TORCH_CHECK_VALUE(t.dim() == 1 && t.device() == x.device() &&
                        (t.scalar_type() == at::kInt || t.scalar_type() == at::kLong),
                    "grouped_gemm_w4: ", name, " is ", t.scalar_type(), " ", t.sizes(), " on ",
                    t.device(), "; give int32 or int64, one dimension, on ", x.device());
}

struct Shapes {
  int64_t num_groups, n, k;
  bool packed_x;
};

Shapes check_operands(const Tensor& x, const OptionalTensor& x_scales, const Tensor& packed,
                      const Tensor& offsets, int64_t n, const OptionalTensor& bias) {
  const bool packed_x = x.scalar_type() == at::kByte;
  TORCH_CHECK_VALUE(x.dim() == 2 && (packed_x || x.scalar_type() == at::kHalf ||
                                     x.scalar_type() == at::kBFloat16),
                    "grouped_gemm_w4: x is ", x.scalar_type(), " ", x.sizes(),
                    "; give uint8 codes (M, K/2), or float16 or bfloat16 (M, K)");
  const int64_t k = x.size(1) * (packed_x ? 2 : 1);
  TORCH_CHECK_VALUE(k > 0 && k % 16 == 0, "grouped_gemm_w4: K=", k,
                    " is not a positive multiple of 16; exclude the layer from the recipe");
  TORCH_CHECK_VALUE(packed_x == x_scales.has_value(), "grouped_gemm_w4: x is ", x.scalar_type(),
                    packed_x ? " without x_scales; give its block scales"
                             : " with x_scales; give them for uint8 codes alone");
  TORCH_CHECK_VALUE(
      !packed_x || (x_scales->dim() == 2 && x_scales->scalar_type() == at::kFloat8_e4m3fn &&
                    x_scales->size(0) == x.size(0) && x_scales->size(1) == k / 16 &&
                    x_scales->device() == x.device()),
      "grouped_gemm_w4: x_scales are ", x_scales->scalar_type(), " ", x_scales->sizes(),
      "; give float8_e4m3fn (", x.size(0), ", ", k / 16, "), not swizzled, on ", x.device());
  TORCH_CHECK_VALUE(n > 0 && n % 8 == 0, "grouped_gemm_w4: N=", n,
                    " is not a positive multiple of 8; exclude the layer from the recipe");
  check_indices(offsets, "offsets", x);
  const int64_t num_groups = offsets.size(0) - 1;
  TORCH_CHECK_VALUE(num_groups > 0 && num_groups <= kMaxGroups, "grouped_gemm_w4: ", num_groups,
                    " groups; give offsets of 1 to ", kMaxGroups, " groups, (G+1,)");
  TORCH_CHECK_VALUE(packed.dim() == 4 && packed.scalar_type() == at::kByte &&
                        packed.size(0) == num_groups &&
                        packed.size(1) == (k + kChunk - 1) / kChunk &&
                        packed.size(2) == (n + kChunk - 1) / kChunk &&
                        packed.size(3) == kChunkBytes && packed.device() == x.device(),
                    "grouped_gemm_w4: packed is ", packed.scalar_type(), " ", packed.sizes(),
                    " on ", packed.device(), "; give pack_weights_nvfp4 of ", num_groups,
                    " groups of N=", n, ", K=", k, " on ", x.device());
  TORCH_CHECK_VALUE(
      !bias || (bias->dim() == 2 && bias->size(0) == num_groups && bias->size(1) == n &&
                (bias->scalar_type() == at::kBFloat16 || bias->scalar_type() == at::kFloat) &&
                bias->device() == x.device()),
      "grouped_gemm_w4: bias is ", bias->scalar_type(), " ", bias->sizes(),
      "; give bfloat16 or float32 (", num_groups, ", ", n, ") on ", x.device());
  return {num_groups, n, k, packed_x};
}

const void* pointer(const OptionalTensor& t) { return t ? t->const_data_ptr() : nullptr; }

// FP16 rows of x; with any_scale, its gathered rows go to row_scale.
Tensor decode(const Tensor& codes, const Tensor& scales, const OptionalTensor& row_index,
              int64_t num_rows, const OptionalTensor& any_scale, const OptionalTensor& row_scale) {
  const int64_t k = codes.size(1) * 2;
  Tensor x = at::empty({num_rows, k}, codes.options().dtype(at::kHalf));
  C10_CUDA_CHECK(decode_activations(
      codes.const_data_ptr<uint8_t>(), static_cast<const uint8_t*>(scales.const_data_ptr()),
      pointer(row_index), row_index && row_index->scalar_type() == at::kLong, num_rows,
      static_cast<int>(k), x.mutable_data_ptr(), static_cast<const float*>(pointer(any_scale)),
      any_scale ? row_scale->mutable_data_ptr<float>() : nullptr,
      c10::cuda::getCurrentCUDAStream()));
  return x;
}

Tensor grouped_gemm_w4(const Tensor& x_in, const OptionalTensor& x_scales_in,
                       const Tensor& packed_in, const Tensor& offsets_in, int64_t num_cols,
                       const OptionalTensor& row_scale_in, const OptionalTensor& group_scale_in,
                       const OptionalTensor& bias_in, const OptionalTensor& row_index_in,
                       at::ScalarType out_dtype, int64_t config) {
  const auto [num_groups, n, k, packed_x] =
      check_operands(x_in, x_scales_in, packed_in, offsets_in, num_cols, bias_in);
  check_scale(row_scale_in, "row_scale", x_in.size(0), x_in);
  check_scale(group_scale_in, "group_scale", num_groups, x_in);
  if (row_index_in) check_indices(*row_index_in, "row_index", x_in);
  TORCH_CHECK_VALUE(out_dtype == at::kBFloat16 || out_dtype == at::kFloat,
                    "grouped_gemm_w4: out_dtype is ", out_dtype, "; give bfloat16 or float32");
  const int num_configs = kNumConfigs + (num_groups == 1 ? kNumDenseConfigs : 0);
  TORCH_CHECK_VALUE(config >= -1 && config < num_configs, "grouped_gemm_w4: config=", config,
                    " for ", num_groups, " groups; give -1 to choose, or 0 to ", num_configs - 1);
  const c10::cuda::CUDAGuard guard(x_in.device());
  check_gpu();
  const auto dense = [](const OptionalTensor& t) {
    return t ? OptionalTensor(aligned(*t)) : std::nullopt;
  };
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const OptionalTensor row_index = dense(row_index_in);
  OptionalTensor row_scale = dense(row_scale_in);
  const OptionalTensor group_scale = dense(group_scale_in), bias = dense(bias_in);
  const int64_t num_rows = row_index ? row_index->size(0) : x_in.size(0);
  TORCH_CHECK_VALUE(num_rows < std::numeric_limits<int>::max() - 256, "grouped_gemm_w4: ", num_rows,
                    " rows; give fewer than 2^31 - 256");
  Tensor out = at::empty({num_rows, n}, x_in.options().dtype(out_dtype));
  if (num_rows == 0) return out;
  const Tensor packed = aligned(packed_in), offsets = aligned(offsets_in);
  const bool one_row_scale = row_scale && row_scale->size(0) == 1;
  const OptionalTensor any_scale = row_index && !one_row_scale ? row_scale : std::nullopt;
  Tensor x = row_index && !packed_x ? x_in.index_select(0, *row_index) : aligned(x_in);
  if (any_scale && !packed_x) row_scale = any_scale->index_select(0, *row_index);
  if (packed_x) {
    if (any_scale) row_scale = at::empty({num_rows}, any_scale->options());
    x = decode(x, aligned(*x_scales_in), row_index, num_rows, any_scale, row_scale);
  }
  GemmW4Args args = {};
  args.x = x.const_data_ptr();
  args.weights = packed.const_data_ptr<uint8_t>();
  args.offsets = offsets.const_data_ptr();
  args.row_scale = static_cast<const float*>(pointer(row_scale));
  args.group_scale = static_cast<const float*>(pointer(group_scale));
  args.bias = pointer(bias);
  args.out = out.mutable_data_ptr();
  args.num_rows = num_rows;
  args.num_groups = static_cast<int>(num_groups);
  args.n = static_cast<int>(n);
  args.k = static_cast<int>(k);
  args.long_offsets = offsets.scalar_type() == at::kLong;
  args.after_decoder = packed_x;
  args.one_row_scale = one_row_scale;
  args.one_group_scale = group_scale && group_scale->size(0) == 1;
  args.float_bias = bias && bias->scalar_type() == at::kFloat;
  args.float_out = out_dtype == at::kFloat;
  const int chosen = config >= 0 ? static_cast<int>(config)
                                 : choose_config(num_rows, num_groups, n,
                                                 device_attribute(cudaDevAttrMultiProcessorCount));
  const bool is_half = x.scalar_type() == at::kHalf;
  if (chosen >= kNumConfigs) {
    const auto run = is_half ? gemm_w4_dense_half : gemm_w4_dense_bf16;
    C10_CUDA_CHECK(run(args, chosen - kNumConfigs, stream));
  } else {
    C10_CUDA_CHECK((is_half ? gemm_w4_half : gemm_w4_bf16)(args, chosen, stream));
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_nvfp4, CUDA, m) { m.impl("grouped_gemm_w4", &grouped_gemm_w4); }

}  // namespace megatron_nvfp4::cuda
