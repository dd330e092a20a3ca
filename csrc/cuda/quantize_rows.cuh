// 1x16 blocks. A row is held in registers by 4 to 512 threads, 2 or 4 blocks each, so that its amax
// and its codes take one pass over the input. Bound by memory without four-over-six, by issue with
// it.
#pragma once

#include <algorithm>

#include "encode_block.cuh"

namespace megatron_nvfp4::cuda {

template <class T, class C>
struct RowsConfig {
  static constexpr int kBlocks = T::kBytes == 2 ? 4 : 2;  // per thread
  static constexpr int kMaxThreads = C::two ? 384 : 512;
  static constexpr int kMinCtas = 2;  // 64 registers a thread, 80 with two candidates
  static constexpr int kThreads = 128;
};

// Largest amax among the threads of a row; every warp belongs to one row if a row has more than
// one.
NVFP4_DEVICE float row_amax(float amax, float* warp_amax) {
  const int row_threads = blockDim.x;
  amax = max_over_lanes(amax, min(row_threads, 32));
  if (row_threads <= 32) return amax;
  const int warps = row_threads / 32;
  const int warp = threadIdx.y * warps + threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) warp_amax[warp] = amax;
  __syncthreads();
  for (int i = 0; i < warps; ++i) amax = fmaxf(amax, warp_amax[threadIdx.y * warps + i]);
  return amax;
}

template <class T, class C>
__global__ void __launch_bounds__(RowsConfig<T, C>::kMaxThreads, RowsConfig<T, C>::kMinCtas)
    quantize_rows_kernel(const __grid_constant__ QuantizeArgs args) {
  constexpr int kBlocks = RowsConfig<T, C>::kBlocks;
  __shared__ float warp_amax[RowsConfig<T, C>::kMaxThreads / 32];
  const int num_blocks = args.num_cols / kBlock;
  // The rows that an amax pass has read last may still be in the cache: begin there.
  const bool backwards = args.source >= AmaxSource::kTensor;
  const int64_t group = backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int64_t row = group * blockDim.y + threadIdx.y;
  const bool inside = row < args.num_rows;
  const int first = blockIdx.y * blockDim.x * kBlocks + threadIdx.x;
  const char* x = static_cast<const char*>(args.x) + row * args.num_cols * T::kBytes;

  uint32_t words[kBlocks][T::kWords];
  float block_amax[kBlocks], amax = 0.0f;
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    const int b = first + j * blockDim.x;
    load_block<T>(reinterpret_cast<const uint4*>(x) + b * (T::kWords / 4), inside && b < num_blocks,
                  words[j]);
  }
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    block_amax[j] = T::amax(words[j]);
    amax = fmaxf(amax, block_amax[j]);
  }
  if (args.source == AmaxSource::kSelf) {
    amax = row_amax(amax, warp_amax);
    if (inside && threadIdx.x == 0) args.amax[row] = amax;
  } else {
    const int width = min(static_cast<int>(blockDim.x), 32);
    amax = outer_amax(args, inside ? row : args.num_rows - 1, threadIdx.x % width, width);
  }
  const Outer outer = outer_of(amax, args.e4m3_max);
  const Divisor divisor = error_divisor(args.e4m3_max);
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    const int b = first + j * blockDim.x;
    uint32_t scale_codes[2] = {0, 0};
    if (inside && b < num_blocks) {
      Candidate found[2];
      choose_scales<C>(block_amax[j], outer, scale_codes);
      encode_block<T, C>(words[j], x + b * (kBlock * T::kBytes), 1, block_amax[j], scale_codes,
                         outer, divisor, found);
      const bool four = C::two && found[1].error < found[0].error;
      const uint2 codes = four ? found[1].codes : found[0].codes;
      scale_codes[0] = four ? scale_codes[1] : scale_codes[0];
      const int64_t block = row * num_blocks + b;
      reinterpret_cast<uint2*>(args.codes)[block] = codes;
      if (args.decoded) {
        store_decoded(static_cast<uint4*>(args.decoded) + 2 * block, codes, scale_codes[0]);
      }
      args.block_scales[scale_offset(row, b, num_blocks, args.swizzled)] = scale_codes[0];
    } else if (args.swizzled && b < (num_blocks + 3) / 4 * 4) {
      args.block_scales[scale_offset(row, b, num_blocks, true)] = 0;
    }
  }
}

template <class T, class C>
cudaError_t launch_rows(const QuantizeArgs& args, cudaStream_t stream) {
  using Config = RowsConfig<T, C>;
  const int num_blocks = args.num_cols / kBlock;
  int row_threads = (num_blocks + Config::kBlocks - 1) / Config::kBlocks, chunks = 1;
  if (row_threads > 32) {
    row_threads = (row_threads + 31) / 32 * 32;
    if (row_threads > Config::kMaxThreads) {  // a given amax: a row may be cut
      row_threads = Config::kThreads;
      chunks = (num_blocks + row_threads * Config::kBlocks - 1) / (row_threads * Config::kBlocks);
    }
  } else {
    int power = 4;
    while (power < row_threads) power *= 2;
    row_threads = power;
  }
  const int rows_per_cta = std::max(1, Config::kThreads / row_threads);
  const int64_t rows = args.swizzled ? (args.num_rows + 127) / 128 * 128 : args.num_rows;
  const dim3 grid((rows + rows_per_cta - 1) / rows_per_cta, chunks);
  quantize_rows_kernel<T, C><<<grid, dim3(row_threads, rows_per_cta), 0, stream>>>(args);
  return cudaGetLastError();
}

template <class C>
cudaError_t launch_rows_of_type(const QuantizeArgs& args, cudaStream_t stream) {
  switch (args.type) {
    case InputType::kBFloat16:
      return launch_rows<BFloat16Input, C>(args, stream);
    case InputType::kHalf:
      return launch_rows<HalfInput, C>(args, stream);
    default:
      return launch_rows<FloatInput, C>(args, stream);
  }
}

}  // namespace megatron_nvfp4::cuda
