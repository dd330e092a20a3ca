// NVFP4 of the transpose without turning it in memory, with the random Hadamard transform and
// stochastic rounding on request. Bound by memory, with random bits by issue.
#include <algorithm>

#include "column_input.cuh"
#include "transforms.h"

namespace megatron_nvfp4::cuda {
namespace {

constexpr int kRun = 8;  // row blocks a warp of the amax pass takes: spares atomics

template <class T, bool rotated>
NVFP4_DEVICE void load_block_pair(const ColumnArgs& args, int64_t row_block, int64_t col,
                                  float (&x)[kBlock][2]) {
  load_column_pair<T>(args.x, row_block * kBlock, args.num_cols, col, x);
  if constexpr (rotated) rotate(x);
}

// Group of a block of rows, for a whole warp.
NVFP4_DEVICE int group_of(const ColumnArgs& args, int64_t row_block, int lane) {
  return args.offsets ? find_group(args.offsets, args.num_groups, row_block * kBlock, lane, 32) : 0;
}

NVFP4_DEVICE void raise_amax(const ColumnArgs& args, int group, float amax, int lane) {
  amax = max_over_lanes(amax, 32);
  if (lane != 0 || group >= args.num_groups) return;
  // Non-negative floats order like their bits.
  atomicMax(reinterpret_cast<int*>(args.amax + group), __float_as_int(amax));
}

template <class T, bool rotated>
__global__ void __launch_bounds__(kColumnWarps * 32)
    column_amax_kernel(const __grid_constant__ ColumnArgs args) {
  const int lane = threadIdx.x % 32;
  const int64_t col = static_cast<int64_t>(blockIdx.y) * kCtaColumns + 2 * lane;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kColumnWarps + threadIdx.x / 32) * kRun;
  const int64_t last = min(first + kRun, args.num_rows / kBlock);
  if (first >= last) return;
  int group = group_of(args, first, lane);
  float amax = 0.0f;
  for (int64_t row_block = first; row_block < last; ++row_block) {
    if (args.offsets && group < args.num_groups &&
        row_block * kBlock >= __ldg(args.offsets + group + 1)) {
      raise_amax(args, group, amax, lane);
      group = group_of(args, row_block, lane);
      amax = 0.0f;
    }
    float x[kBlock][2];
    load_block_pair<T, rotated>(args, row_block, col, x);
    amax = fmaxf(amax, fmaxf(column_amax(x, 0), column_amax(x, 1)));
  }
  raise_amax(args, group, amax, lane);
}

// Codes of one column's block; `first_group` counts eights of elements in the transpose.
template <bool stochastic>
NVFP4_DEVICE uint2 encode_column(const float (&x)[kBlock][2], int column, float multiplier,
                                 uint64_t first_group, const RandomKey& key) {
  uint32_t codes[2] = {0, 0};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (stochastic) {
      uint32_t words[4];
      random_words(first_group + half, key, words);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float scaled = multiply(x[8 * half + i][column], multiplier);
        codes[half] |= encode_e2m1_stochastic(scaled, random_bits(words, i)) << (4 * i);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const float even = multiply(x[8 * half + i][column], multiplier);
        const float odd = multiply(x[8 * half + i + 1][column], multiplier);
        codes[half] |= encode_e2m1x2(even, odd) << (4 * i);
      }
    }
  }
  return {codes[0], codes[1]};
}

// What a CTA has encoded, by column and block of rows; a row of uint2 is padded against conflicts.
struct ColumnShared {
  uint2 codes[kCtaColumns][kColumnWarps + 1];
  uint8_t scales[kCtaColumns][kColumnWarps];
};

NVFP4_DEVICE void store_columns(const ColumnArgs& args, const ColumnShared& shared,
                                int64_t first_row_block, int64_t first_col) {
  const int64_t num_blocks = args.num_rows / kBlock;
  const int64_t row_block = first_row_block + threadIdx.x % kColumnWarps;
  for (int c = threadIdx.x / kColumnWarps; c < kCtaColumns; c += blockDim.x / kColumnWarps) {
    if (first_col + c >= args.num_cols || row_block >= num_blocks) continue;
    const int64_t block = (first_col + c) * num_blocks + row_block;
    reinterpret_cast<uint2*>(args.codes)[block] = shared.codes[c][threadIdx.x % kColumnWarps];
    args.block_scales[block] = shared.scales[c][threadIdx.x % kColumnWarps];
  }
}

template <class T, bool rotated, bool stochastic>
__global__ void __launch_bounds__(kColumnWarps * 32)
    quantize_columns_kernel(const __grid_constant__ ColumnArgs args) {
  __shared__ ColumnShared shared;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first_row_block = static_cast<int64_t>(blockIdx.x) * kColumnWarps;
  const int64_t first_col = static_cast<int64_t>(blockIdx.y) * kCtaColumns;
  const int64_t row_block = first_row_block + warp, num_blocks = args.num_rows / kBlock;
  if (row_block < num_blocks) {
    float x[kBlock][2];
    load_block_pair<T, rotated>(args, row_block, first_col + 2 * lane, x);
    const int group = group_of(args, row_block, lane);
    const float amax = group < args.num_groups ? __ldg(args.amax + group) : 0.0f;
    const float s_enc = encode_scale(amax, args.e4m3_max), s_dec = decode_scale(s_enc);
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const uint32_t scale = block_scale(column_amax(x, column), s_enc);
      const float multiplier = block_multiplier(decode_e4m3(scale), s_dec);
      const int64_t block = (first_col + 2 * lane + column) * num_blocks + row_block;
      shared.codes[2 * lane + column][warp] = encode_column<stochastic>(
          x, column, multiplier, 2 * static_cast<uint64_t>(block), args.key);
      shared.scales[2 * lane + column][warp] = static_cast<uint8_t>(scale);
    }
  }
  __syncthreads();
  store_columns(args, shared, first_row_block, first_col);
}

dim3 grid_of(const ColumnArgs& args, int64_t row_blocks_per_cta) {
  const int64_t num_blocks = args.num_rows / kBlock;
  return dim3(static_cast<unsigned>((num_blocks + row_blocks_per_cta - 1) / row_blocks_per_cta),
              static_cast<unsigned>((args.num_cols + kCtaColumns - 1) / kCtaColumns));
}

bool is_empty(const ColumnArgs& args) { return args.num_rows == 0 || args.num_cols == 0; }

}  // namespace

cudaError_t find_column_amax(const ColumnArgs& args, cudaStream_t stream) {
  const cudaError_t status = cudaMemsetAsync(args.amax, 0, args.num_groups * sizeof(float), stream);
  if (status != cudaSuccess || is_empty(args)) return status;
  return for_type(args.type, [&](auto type) {
    using T = decltype(type);
    const auto kernel = args.rotated ? column_amax_kernel<T, true> : column_amax_kernel<T, false>;
    kernel<<<grid_of(args, kColumnWarps * kRun), kColumnWarps * 32, 0, stream>>>(args);
  });
}

cudaError_t quantize_columns(const ColumnArgs& args, cudaStream_t stream) {
  if (is_empty(args)) return cudaSuccess;
  return for_type(args.type, [&](auto type) {
    using T = decltype(type);
    const auto kernel = args.stochastic ? (args.rotated ? quantize_columns_kernel<T, true, true>
                                                        : quantize_columns_kernel<T, false, true>)
                                        : (args.rotated ? quantize_columns_kernel<T, true, false>
                                                        : quantize_columns_kernel<T, false, false>);
    kernel<<<grid_of(args, kColumnWarps), kColumnWarps * 32, 0, stream>>>(args);
  });
}

}  // namespace megatron_nvfp4::cuda
