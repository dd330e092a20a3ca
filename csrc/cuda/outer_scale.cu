// S_dec of amax, in one launch: quant.nvfp4's encode_scale and decode_scale.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "../numerics.h"

namespace megatron_nvfp4::cuda {
namespace {

using at::Tensor;

__global__ void outer_scale_kernel(const float* amax, int e4m3_max, int64_t num, float* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < num) out[i] = decode_scale(encode_scale(amax[i], e4m3_max));
}

Tensor outer_scale(const Tensor& amax_in, int64_t e4m3_max) {
  TORCH_CHECK_VALUE(amax_in.scalar_type() == at::kFloat, "outer_scale: amax is ",
                    amax_in.scalar_type(), "; give float32");
  const c10::cuda::CUDAGuard guard(amax_in.device());
  const Tensor amax = amax_in.contiguous();
  Tensor out = at::empty_like(amax);
  const int64_t num = amax.numel();
  if (num == 0) return out;
  outer_scale_kernel<<<static_cast<unsigned>((num + 255) / 256), 256, 0,
                       c10::cuda::getCurrentCUDAStream()>>>(
      amax.const_data_ptr<float>(), static_cast<int>(e4m3_max), num, out.mutable_data_ptr<float>());
  C10_CUDA_CHECK(cudaGetLastError());
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_nvfp4, CUDA, m) { m.impl("outer_scale", &outer_scale); }

}  // namespace megatron_nvfp4::cuda
