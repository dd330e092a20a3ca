// Grouped BF16 weight gradient of Hopper: the operator and its checks. Bound by the bytes of the
// result below about 500 tokens a group.
#if !defined(__CUDA_ARCH__)  // no device code: torch's headers are parsed for the host alone
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "gemm_wgrad.cuh"

namespace megatron_nvfp4::cuda {
namespace {

using at::Tensor;

constexpr const char* kName = "grouped_wgrad_bf16";

void check_memory(const char* name, const Tensor& t, const Tensor& a) {
  TORCH_CHECK_VALUE(t.dim() == 2 && t.device() == a.device(), kName, ": ", name, " has shape ",
                    t.sizes(), " on ", t.device(), "; give a matrix on ", a.device());
  TORCH_CHECK_VALUE(t.is_contiguous() && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0,
                    kName, ": ", name, " has strides ", t.strides(),
                    " or does not begin at a multiple of 16 bytes; give a contiguous tensor (",
                    name, ".clone(memory_format=torch.contiguous_format))");
}

void check_outputs(at::TensorList out, const Tensor& a, int64_t num_rows, int64_t num_cols) {
  for (const Tensor& t : out) {
    check_memory("out", t, a);
    TORCH_CHECK_VALUE(t.scalar_type() == out[0].scalar_type() &&
                          (t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kFloat) &&
                          t.size(0) == num_rows && t.size(1) == num_cols,
                      kName, ": out holds ", t.scalar_type(), " ", t.sizes(),
                      "; give all BF16 or all FP32 (", num_rows, ", ", num_cols, ")");
  }
}

void grouped_wgrad_bf16(const Tensor& a, const Tensor& b, bool token_major, const Tensor& offsets,
                        const std::optional<Tensor>& group_scale, bool accumulate,
                        at::TensorList out) {
  const auto num_groups = static_cast<int64_t>(out.size());
  for (const Tensor* t : {&a, &b}) {
    const char* name = t == &a ? "a" : "b";
    TORCH_CHECK_VALUE(t->scalar_type() == at::kBFloat16, kName, ": ", name, " is ",
                      t->scalar_type(), "; give BF16");
    check_memory(name, *t, a);
  }
  const int token_dim = token_major ? 0 : 1;
  const int64_t num_tokens = a.size(token_dim);
  const int64_t num_rows = a.size(1 - token_dim), num_cols = b.size(1 - token_dim);
  TORCH_CHECK_VALUE(b.size(token_dim) == num_tokens, kName, ": a has M=", num_tokens,
                    ", b has M=", b.size(token_dim), " (dimension ", token_dim,
                    "); give the same tokens");
  TORCH_CHECK_VALUE(num_tokens < (int64_t{1} << 31), kName, ": M=", num_tokens,
                    " exceeds 2^31; split the tokens");
  TORCH_CHECK_VALUE(num_rows > 0 && num_rows % 8 == 0, kName, ": N=", num_rows,
                    " is not a positive multiple of 8; pad a with zeros");
  TORCH_CHECK_VALUE(num_cols > 0 && num_cols % 8 == 0, kName, ": K=", num_cols,
                    " is not a positive multiple of 8; pad b with zeros");
  TORCH_CHECK_VALUE(
      token_major || num_tokens % 16 == 0, kName, ": M=", num_tokens,
      " is not a multiple of 16, as the groups of token_major=False are; pad with zeros");
  TORCH_CHECK_VALUE(num_groups >= 1 && num_groups <= kMaxGroups, kName, ": ", num_groups,
                    " outputs; give one for each group, 1..", kMaxGroups);
  TORCH_CHECK_VALUE(offsets.dim() == 1 && offsets.numel() == num_groups + 1 &&
                        (offsets.scalar_type() == at::kLong || offsets.scalar_type() == at::kInt) &&
                        offsets.is_contiguous() && offsets.device() == a.device(),
                    kName, ": offsets are ", offsets.scalar_type(), " ", offsets.sizes(), " on ",
                    offsets.device(), "; give contiguous int64 or int32 (", num_groups + 1,
                    ",), one more than outputs, on ", a.device());
  check_outputs(out, a, num_rows, num_cols);
  if (group_scale) {
    TORCH_CHECK_VALUE(group_scale->dim() == 1 && group_scale->scalar_type() == at::kFloat &&
                          (group_scale->numel() == 1 || group_scale->numel() == num_groups) &&
                          group_scale->is_contiguous() && group_scale->device() == a.device(),
                      kName, ": group_scale is ", group_scale->scalar_type(), " ",
                      group_scale->sizes(), " on ", group_scale->device(),
                      "; give contiguous float32 (", num_groups, ",) or (1,) on ", a.device());
  }
  const c10::cuda::CUDAGuard guard(a.device());
  const auto* properties = at::cuda::getCurrentDeviceProperties();
  TORCH_CHECK(properties->major == 9, kName, ": needs a Hopper GPU (compute capability 9.0), not ",
              properties->name, " (", properties->major, ".", properties->minor, ")");
  if (num_tokens == 0) {  // a tensor map has no empty dimension
    for (const Tensor& t : out) {
      if (!accumulate) t.zero_();
    }
    return;
  }
  WgradArgs args = {};
  args.offsets = {offsets.const_data_ptr(), offsets.scalar_type() == at::kLong};
  args.a = a.const_data_ptr();
  args.b = b.const_data_ptr();
  args.group_scale = group_scale ? group_scale->const_data_ptr<float>() : nullptr;
  args.group_stride = group_scale && group_scale->numel() > 1;
  args.num_tokens = num_tokens;
  args.num_groups = static_cast<int>(num_groups);
  args.num_rows = static_cast<int>(num_rows);
  args.num_cols = static_cast<int>(num_cols);
  args.token_major = token_major;
  args.accumulate = accumulate;
  args.fp32 = out[0].scalar_type() == at::kFloat;
  for (int64_t g = 0; g < num_groups; ++g) args.out[g] = out[g].mutable_data_ptr();
  C10_CUDA_CHECK(
      gemm_wgrad(args, properties->multiProcessorCount, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_nvfp4, CUDA, m) { m.impl("grouped_wgrad_bf16", &grouped_wgrad_bf16); }

}  // namespace megatron_nvfp4::cuda

#endif
