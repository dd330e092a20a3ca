// Grouped BF16 GEMM of Hopper: the operator, its checks, and the choice of a tile. Bound by the
// tensor cores from about 250 rows a group, below that by the bytes of the weights.
#if !defined(__CUDA_ARCH__)  // no device code: torch's headers are parsed for the host alone
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "gemm_dense.cuh"

namespace megatron_nvfp4::cuda {
namespace {

using at::Tensor;

constexpr const char* kName = "grouped_gemm_bf16";

bool aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0; }

void check_matrix(const char* name, const Tensor& t, const Tensor& x) {
  TORCH_CHECK_VALUE(t.scalar_type() == at::kBFloat16 && t.device() == x.device(), kName, ": ", name,
                    " is ", t.scalar_type(), " on ", t.device(), "; give BF16 on ", x.device());
  TORCH_CHECK_VALUE(t.is_contiguous() && aligned(t), kName, ": ", name, " has strides ",
                    t.strides(), " or does not begin at a multiple of 16 bytes; give a contiguous",
                    " copy (", name, ".clone(memory_format=torch.contiguous_format))");
}

// Null, or FP32 of one of the sizes.
const float* checked_scale(const char* name, const std::optional<Tensor>& t, const Tensor& x,
                           int64_t size, bool one) {
  if (!t) return nullptr;
  TORCH_CHECK_VALUE(
      t->dim() == 1 && t->scalar_type() == at::kFloat && t->is_contiguous() &&
          t->device() == x.device() && (t->numel() == size || (one && t->numel() == 1)),
      kName, ": ", name, " is ", t->scalar_type(), " ", t->sizes(), " on ", t->device(),
      "; give contiguous float32 (", size, ",)", one ? " or (1,)" : "", " on ", x.device());
  return t->const_data_ptr<float>();
}

// The weights of all groups as one array: where it begins, and how far apart they lie.
struct WeightArray {
  const void* data;
  int64_t stride;
  bool reversed;
  Tensor stacked;  // owner of a copy, if there is one
};

// Without a copy if the addresses ascend or descend evenly.
WeightArray weight_array(const std::vector<Tensor>& weights) {
  const Tensor& first = weights.front();
  const int64_t size = first.numel() * first.element_size();
  if (first.dim() == 3) return {first.const_data_ptr(), size / first.size(0), false, {}};
  const auto address = [&](size_t i) {
    return static_cast<const char*>(weights[i].const_data_ptr());
  };
  int64_t stride = size;
  if (weights.size() > 1) stride = address(1) - address(0);
  const bool reversed = stride < 0;
  bool even = stride % 16 == 0 && std::abs(stride) >= size;
  for (size_t i = 1; i < weights.size(); ++i) even &= address(i) - address(i - 1) == stride;
  if (even)
    return {reversed ? address(weights.size() - 1) : address(0), std::abs(stride), reversed};
  const Tensor stacked = at::stack(weights);
  return {stacked.const_data_ptr(), size, false, stacked};
}

Tensor grouped_gemm_bf16(const Tensor& x, const std::vector<Tensor>& weights, bool transposed,
                         const Tensor& offsets, const std::optional<Tensor>& row_scale,
                         const std::optional<Tensor>& group_scale,
                         const std::optional<Tensor>& col_scale, const std::optional<Tensor>& bias,
                         at::ScalarType out_dtype) {
  TORCH_CHECK_VALUE(x.dim() == 2, kName, ": x has shape ", x.sizes(), "; give (M, K)");
  check_matrix("x", x, x);
  const int64_t num_groups = offsets.numel() - 1;
  TORCH_CHECK_VALUE(offsets.dim() == 1 && num_groups >= 1 && num_groups <= kMaxGroups &&
                        (offsets.scalar_type() == at::kLong || offsets.scalar_type() == at::kInt) &&
                        offsets.is_contiguous() && offsets.device() == x.device(),
                    kName, ": offsets are ", offsets.scalar_type(), " ", offsets.sizes(), " on ",
                    offsets.device(), "; give contiguous int64 or int32 (G+1,), G = 1..",
                    kMaxGroups, ", on ", x.device());
  TORCH_CHECK_VALUE(!weights.empty(), kName, ": no weights; give one (G, N, K) or G of (N, K)");
  const bool stacked = weights.size() == 1 && weights[0].dim() == 3;
  for (const Tensor& w : weights) {
    check_matrix("weights", w, x);
    TORCH_CHECK_VALUE(w.sizes() == weights[0].sizes() && w.dim() == (stacked ? 3 : 2), kName,
                      ": weights have shapes ", weights[0].sizes(), " and ", w.sizes(),
                      "; give one tensor of three dimensions or G of two and one shape");
  }
  const int64_t num_weights = stacked ? weights[0].size(0) : static_cast<int64_t>(weights.size());
  TORCH_CHECK_VALUE(num_weights == num_groups, kName, ": ", num_weights, " weights for ",
                    num_groups, " groups of offsets; give as many of each");
  const int64_t depth = weights[0].size(transposed ? -2 : -1);
  const int64_t num_cols = weights[0].size(transposed ? -1 : -2);
  TORCH_CHECK_VALUE(depth == x.size(1), kName, ": x has K=", x.size(1), ", weights have K=", depth,
                    transposed ? " (their first dimension)" : " (their last dimension)",
                    "; give equal ones, or set transposed=", transposed ? "False" : "True");
  TORCH_CHECK_VALUE(depth > 0 && depth % 8 == 0, kName, ": K=", depth,
                    " is not a positive multiple of 8; pad x and the weights with zeros");
  TORCH_CHECK_VALUE(num_cols > 0 && num_cols % 8 == 0, kName, ": N=", num_cols,
                    " is not a positive multiple of 8; pad the weights with zeros");
  const int64_t num_rows = x.size(0);
  TORCH_CHECK_VALUE(num_rows < (int64_t{1} << 31), kName, ": M=", num_rows,
                    " rows exceed 2^31; split x");
  TORCH_CHECK_VALUE(out_dtype == at::kBFloat16 || out_dtype == at::kFloat, kName, ": out_dtype is ",
                    out_dtype, "; give BF16 or FP32");
  std::optional<Tensor> bias_fp32;
  if (bias) {
    TORCH_CHECK_VALUE(
        bias->dim() == 2 && bias->size(0) == num_groups && bias->size(1) == num_cols &&
            bias->device() == x.device() && bias->is_floating_point(),
        kName, ": bias is ", bias->scalar_type(), " ", bias->sizes(), " on ", bias->device(),
        "; give floats (", num_groups, ", ", num_cols, ") on ", x.device());
    bias_fp32 = bias->to(at::kFloat).contiguous();
  }
  DenseArgs args = {};
  args.offsets = {offsets.const_data_ptr(), offsets.scalar_type() == at::kLong};
  args.x = x.const_data_ptr();
  args.num_rows = num_rows;
  args.transposed = transposed;
  args.row_scale = checked_scale("row_scale", row_scale, x, num_rows, true);
  args.group_scale = checked_scale("group_scale", group_scale, x, num_groups, true);
  args.col_scale = checked_scale("col_scale", col_scale, x, num_groups * num_cols, false);
  args.bias = bias_fp32 ? bias_fp32->const_data_ptr<float>() : nullptr;
  args.row_stride = row_scale && row_scale->numel() > 1;
  args.group_stride = group_scale && group_scale->numel() > 1;
  args.num_groups = static_cast<int>(num_groups);
  args.num_cols = static_cast<int>(num_cols);
  args.depth = static_cast<int>(depth);
  args.fp32 = out_dtype == at::kFloat;

  const c10::cuda::CUDAGuard guard(x.device());
  const auto* properties = at::cuda::getCurrentDeviceProperties();
  TORCH_CHECK(properties->major == 9, kName, ": needs a Hopper GPU (compute capability 9.0), not ",
              properties->name, " (", properties->major, ".", properties->minor, ")");
  Tensor out = at::empty({num_rows, num_cols}, x.options().dtype(out_dtype));
  if (num_rows == 0) return out;
  args.out = out.mutable_data_ptr();

  const WeightArray array = weight_array(weights);
  args.weights = array.data;
  args.weight_stride = array.stride;
  args.reversed = array.reversed;
  C10_CUDA_CHECK(
      gemm_dense(args, properties->multiProcessorCount, c10::cuda::getCurrentCUDAStream()));
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_nvfp4, CUDA, m) { m.impl("grouped_gemm_bf16", &grouped_gemm_bf16); }

}  // namespace megatron_nvfp4::cuda

#endif
