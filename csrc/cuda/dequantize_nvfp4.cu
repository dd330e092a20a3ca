// Decodes NVFP4: q * s_b * S_dec of the row, rounded once to the output type. Bound by memory
// (writes).
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "../numerics.h"

namespace megatron_nvfp4::cuda {
namespace {

using at::Tensor;

__device__ void store(__nv_bfloat16* out, float x) { *out = __float2bfloat16_rn(x); }
__device__ void store(__half* out, float x) { *out = __float2half_rn(x); }
__device__ void store(float* out, float x) { *out = x; }

// Eight elements a thread: half a block.
template <class Out>
__global__ void dequantize_kernel(const uint32_t* codes, const uint8_t* scales,
                                  const float* row_scale, int64_t scale_stride, Out* out,
                                  int64_t halves_per_row, int64_t num_halves) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= num_halves) return;
  const float scale = decode_e4m3(scales[i / 2]);
  const float outer = row_scale ? row_scale[i / halves_per_row * scale_stride] : 1.0f;
  const uint32_t word = codes[i];
  alignas(16) Out values[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    store(values + j, multiply(code_times_scale(word >> (4 * j) & 15u, scale), outer));
  }
#pragma unroll
  for (int j = 0; j < static_cast<int>(sizeof values / 16); ++j) {
    reinterpret_cast<uint4*>(out + 8 * i)[j] = reinterpret_cast<const uint4*>(values)[j];
  }
}

Tensor dequantize_rows(const Tensor& codes_in, const Tensor& scales_in,
                       const std::optional<Tensor>& row_scale_in, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(
      codes_in.dim() == 2 && codes_in.scalar_type() == at::kByte && codes_in.size(1) % 8 == 0,
      "dequantize_nvfp4: codes are ", codes_in.scalar_type(), " ", codes_in.sizes(),
      "; give uint8 (M, K/2) with whole blocks of 8 bytes");
  TORCH_CHECK_VALUE(
      scales_in.dim() == 2 && scales_in.scalar_type() == at::kFloat8_e4m3fn &&
          scales_in.size(0) == codes_in.size(0) && scales_in.size(1) == codes_in.size(1) / 8,
      "dequantize_nvfp4: block_scales are ", scales_in.scalar_type(), " ", scales_in.sizes(),
      "; give float8_e4m3fn (", codes_in.size(0), ", ", codes_in.size(1) / 8, ")");
  const c10::cuda::CUDAGuard guard(codes_in.device());
  const Tensor codes = codes_in.contiguous(), scales = scales_in.contiguous();
  Tensor out = at::empty({codes.size(0), codes.size(1) * 2}, codes.options().dtype(dtype));
  std::optional<Tensor> row_scale;
  if (row_scale_in) row_scale = row_scale_in->contiguous();
  const int64_t num = codes.numel() / 4, per_row = codes.size(1) / 4;
  if (num == 0) return out;
  const int64_t stride = row_scale && row_scale->numel() > 1 ? 1 : 0;
  const auto launch = [&](auto* to) {
    dequantize_kernel<<<static_cast<unsigned>((num + 255) / 256), 256, 0,
                        c10::cuda::getCurrentCUDAStream()>>>(
        static_cast<const uint32_t*>(codes.const_data_ptr()),
        static_cast<const uint8_t*>(scales.const_data_ptr()),
        row_scale ? row_scale->const_data_ptr<float>() : nullptr, stride, to, per_row, num);
  };
  switch (dtype) {
    case at::kBFloat16:
      launch(static_cast<__nv_bfloat16*>(out.mutable_data_ptr()));
      break;
    case at::kHalf:
      launch(static_cast<__half*>(out.mutable_data_ptr()));
      break;
    default:
      TORCH_CHECK_VALUE(dtype == at::kFloat, "dequantize_nvfp4: ", dtype,
                        "; give BF16, FP16 or FP32");
      launch(static_cast<float*>(out.mutable_data_ptr()));
  }
  C10_CUDA_CHECK(cudaGetLastError());
  return out;
}

Tensor decode_nvfp4(const Tensor& codes, const Tensor& block_scales) {
  return dequantize_rows(codes, block_scales, std::nullopt, at::kBFloat16);
}

Tensor dequantize_nvfp4(const Tensor& codes, const Tensor& block_scales, const Tensor& row_scale,
                        at::ScalarType dtype) {
  TORCH_CHECK_VALUE(row_scale.dim() == 1 && row_scale.scalar_type() == at::kFloat &&
                        (row_scale.size(0) == 1 || row_scale.size(0) == codes.size(0)) &&
                        row_scale.device() == codes.device(),
                    "dequantize_nvfp4: row_scale is ", row_scale.scalar_type(), " ",
                    row_scale.sizes(), " on ", row_scale.device(), "; give float32 (1,) or (",
                    codes.size(0), ",) on ", codes.device());
  return dequantize_rows(codes, block_scales, row_scale, dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_nvfp4, CUDA, m) {
  m.impl("decode_nvfp4", &decode_nvfp4);
  m.impl("dequantize_nvfp4", &dequantize_nvfp4);
}

}  // namespace megatron_nvfp4::cuda
