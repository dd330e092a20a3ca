// 4-bit weights from rows to the chunks that grouped_gemm_w4 reads, and back, exactly. Bound by
// memory.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <tuple>

#include "gemm_w4.cuh"

namespace megatron_nvfp4::cuda {
namespace {

using at::Tensor;

constexpr int kThreads = 128;
constexpr int kSpan = 4;             // chunks along K that a CTA takes
constexpr int kRowBytes = 128 + 16;  // of codes in shared memory: padded against bank conflicts
constexpr int kScaleBytes = 4 * kSpan + 4;

// Nibbles n0 .. n3 at bits 0, 8, 16, 24 to a half word of a chunk: S15 M11-9, S12 M8-6, S14 M5-3,
// S13 M2-0.
__device__ uint32_t spread(uint32_t n) {
  return (n & 7u) << 9 | (n & 8u) << 12 | (n >> 2 & 0x1C0u) | (n << 1 & 0x1000u) |
         (n >> 13 & 0x38u) | (n >> 5 & 0x4000u) | (n >> 24 & 7u) | (n >> 14 & 0x2000u);
}
__device__ uint32_t gather(uint32_t half, int index) {
  const int sign = index == 0 ? 15 : index == 1 ? 12 : index == 2 ? 14 : 13;
  return (half >> sign & 1u) << 3 | (half >> (9 - 3 * index) & 7u);
}

struct Shape {
  int num_groups, n, k, chunks_n, chunks_k;
};

// A CTA: 64 rows of one group by kSpan chunks.
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const uint8_t* codes, const uint8_t* scales, Shape shape, bool reversed,
                uint8_t* packed) {
  __shared__ __align__(16) uint8_t rows[kChunk * kRowBytes];
  __shared__ uint8_t row_scales[kChunk * kScaleBytes];
  const int group = blockIdx.z, first_row = blockIdx.y * kChunk, first_chunk = blockIdx.x * kSpan;
  const int64_t from =
      static_cast<int64_t>(reversed ? shape.num_groups - 1 - group : group) * shape.n;
  const int num_blocks = shape.k / 16, first_block = first_chunk * 4;
#pragma unroll
  for (int i = 0; i < kChunk * 4 * kSpan / kThreads; ++i) {  // blocks of 16: 8 bytes and a scale
    const int unit = i * kThreads + threadIdx.x, row = unit / (4 * kSpan),
              block = unit % (4 * kSpan);
    const bool inside = first_row + row < shape.n && first_block + block < num_blocks;
    const int64_t at = (from + first_row + row) * num_blocks + first_block + block;
    const uint2 zero = {0, 0};
    *reinterpret_cast<uint2*>(rows + row * kRowBytes + block * 8) =
        inside ? __ldg(reinterpret_cast<const uint2*>(codes) + at) : zero;
    row_scales[row * kScaleBytes + block] = inside ? __ldg(scales + at) : 0;
  }
  __syncthreads();
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  for (int c = 0; c < kSpan && first_chunk + c < shape.chunks_k; ++c) {
    uint8_t* chunk = packed + ((static_cast<int64_t>(group) * shape.chunks_k + first_chunk + c) *
                                   shape.chunks_n +
                               blockIdx.y) *
                                  kChunkBytes;
    uint32_t words[4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint8_t* at = rows + row * kRowBytes + (c * 4 + step) * 8 + lane % 4;
      const uint32_t bytes = at[0] | at[8 * kRowBytes] << 8 | at[4] << 16 |
                             static_cast<uint32_t>(at[8 * kRowBytes + 4]) << 24;
      words[step] = spread(bytes & 0x0F0F0F0Fu) | spread(bytes >> 4 & 0x0F0F0F0Fu) << 16;
    }
    reinterpret_cast<uint4*>(chunk)[threadIdx.x] = {words[0], words[1], words[2], words[3]};
    if (threadIdx.x < kChunkBytes / 4 - kChunkCodes / 4) {  // four scales of a row
      const int place = threadIdx.x / 2, upper = threadIdx.x % 2;
      const uint8_t* at =
          row_scales + (place / 8 * 16 + place % 8 + 8 * upper) * kScaleBytes + c * 4;
      reinterpret_cast<uint32_t*>(chunk + kChunkCodes)[threadIdx.x] =
          at[0] | at[1] << 8 | at[2] << 16 | static_cast<uint32_t>(at[3]) << 24;
    }
  }
}

// One block of 16 a thread.
__global__ void unpack_kernel(const uint8_t* packed, Shape shape, uint8_t* codes, uint8_t* scales) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int num_blocks = shape.k / 16;
  if (at >= static_cast<int64_t>(shape.num_groups) * shape.n * num_blocks) return;
  const int block = static_cast<int>(at % num_blocks);
  const int row = static_cast<int>(at / num_blocks % shape.n);
  const int64_t group = at / num_blocks / shape.n;
  const uint8_t* chunk =
      packed + ((group * shape.chunks_k + block / 4) * shape.chunks_n + row / kChunk) * kChunkBytes;
  const int warp = row % kChunk / 16, upper = row % 16 / 8, place = warp * 8 + row % 8;
  uint32_t bytes[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {  // pairs of columns
    const int thread = place * 4 + i % 4;
    const uint32_t word = reinterpret_cast<const uint32_t*>(chunk)[thread * 4 + block % 4];
    const int index = upper + i / 4 * 2;
    bytes[i / 4] |= (gather(word & 0xFFFFu, index) | gather(word >> 16, index) << 4)
                    << (8 * (i % 4));
  }
  reinterpret_cast<uint2*>(codes)[at] = {bytes[0], bytes[1]};
  scales[at] = chunk[kChunkCodes + place * 8 + upper * 4 + block % 4];
}

Shape shape_of(int64_t num_groups, int64_t n, int64_t k) {
  const auto chunks = [](int64_t size) { return static_cast<int>((size + kChunk - 1) / kChunk); };
  return {static_cast<int>(num_groups), static_cast<int>(n), static_cast<int>(k), chunks(n),
          chunks(k)};
}

Tensor pack_weights_nvfp4(const Tensor& codes_in, const Tensor& scales_in, int64_t num_groups,
                          bool reversed) {
  TORCH_CHECK_VALUE(
      codes_in.dim() == 2 && codes_in.scalar_type() == at::kByte && codes_in.size(1) % 8 == 0,
      "pack_weights_nvfp4: codes are ", codes_in.scalar_type(), " ", codes_in.sizes(),
      "; give uint8 (G*N, K/2) with K a multiple of 16");
  TORCH_CHECK_VALUE(
      num_groups > 0 && num_groups <= kMaxGroups && codes_in.size(0) % num_groups == 0,
      "pack_weights_nvfp4: num_groups=", num_groups, " for ", codes_in.size(0),
      " rows; give a divisor of the rows between 1 and ", kMaxGroups);
  TORCH_CHECK_VALUE(
      scales_in.dim() == 2 && scales_in.scalar_type() == at::kFloat8_e4m3fn &&
          scales_in.size(0) == codes_in.size(0) && scales_in.size(1) == codes_in.size(1) / 8,
      "pack_weights_nvfp4: block_scales are ", scales_in.scalar_type(), " ", scales_in.sizes(),
      "; give float8_e4m3fn (", codes_in.size(0), ", ", codes_in.size(1) / 8, "), not swizzled");
  const c10::cuda::CUDAGuard guard(codes_in.device());
  Tensor codes = codes_in.contiguous();
  const Tensor scales = scales_in.contiguous();
  if (reinterpret_cast<uintptr_t>(codes.const_data_ptr()) % 8 != 0) codes = codes.clone();
  const Shape shape = shape_of(num_groups, codes.size(0) / num_groups, codes.size(1) * 2);
  Tensor packed =
      at::empty({num_groups, shape.chunks_k, shape.chunks_n, kChunkBytes}, codes.options());
  if (packed.numel() == 0) return packed;
  const dim3 grid((shape.chunks_k + kSpan - 1) / kSpan, shape.chunks_n, shape.num_groups);
  pack_kernel<<<grid, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      codes.const_data_ptr<uint8_t>(), static_cast<const uint8_t*>(scales.const_data_ptr()), shape,
      reversed, packed.mutable_data_ptr<uint8_t>());
  C10_CUDA_CHECK(cudaGetLastError());
  return packed;
}

std::tuple<Tensor, Tensor> unpack_weights_nvfp4(const Tensor& packed_in, int64_t num_rows,
                                                int64_t num_cols) {
  TORCH_CHECK_VALUE(packed_in.dim() == 4 && packed_in.scalar_type() == at::kByte &&
                        packed_in.size(0) > 0 && packed_in.size(3) == kChunkBytes,
                    "unpack_weights_nvfp4: packed is ", packed_in.scalar_type(), " ",
                    packed_in.sizes(), "; give what pack_weights_nvfp4 returned");
  const int64_t num_groups = packed_in.size(0);
  const Shape shape = shape_of(num_groups, num_rows / num_groups, num_cols);
  TORCH_CHECK_VALUE(num_rows % num_groups == 0 && num_cols % 16 == 0 &&
                        shape.chunks_k == packed_in.size(1) && shape.chunks_n == packed_in.size(2),
                    "unpack_weights_nvfp4: num_rows=", num_rows, ", num_cols=", num_cols,
                    " do not fit packed ", packed_in.sizes(),
                    "; give G*N and K of the packed codes");
  const c10::cuda::CUDAGuard guard(packed_in.device());
  const Tensor packed = packed_in.contiguous();
  Tensor codes = at::empty({num_rows, num_cols / 2}, packed.options());
  Tensor scales = at::empty({num_rows, num_cols / 16}, packed.options().dtype(at::kFloat8_e4m3fn));
  const int64_t num = scales.numel();
  if (num == 0) return {codes, scales};
  unpack_kernel<<<static_cast<unsigned>((num + kThreads - 1) / kThreads), kThreads, 0,
                  c10::cuda::getCurrentCUDAStream()>>>(
      packed.const_data_ptr<uint8_t>(), shape, codes.mutable_data_ptr<uint8_t>(),
      static_cast<uint8_t*>(scales.mutable_data_ptr()));
  C10_CUDA_CHECK(cudaGetLastError());
  return {codes, scales};
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_nvfp4, CUDA, m) {
  m.impl("pack_weights_nvfp4", &pack_weights_nvfp4);
  m.impl("unpack_weights_nvfp4", &unpack_weights_nvfp4);
}

}  // namespace megatron_nvfp4::cuda
