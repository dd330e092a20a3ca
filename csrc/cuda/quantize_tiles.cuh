// 16x16 blocks: the row form and, on request, the transposed form in one pass. A CTA takes 64x64
// elements; its four warps each take 16 rows by 64 columns from registers, then 64 rows by 16
// columns from shared memory, so that loads and stores fill whole sectors in both directions.
#pragma once

#include "encode_block.cuh"

namespace megatron_nvfp4::cuda {

constexpr int kTile = 64;
constexpr int kTileBlocks = kTile / kBlock;

// Elements of a CTA's tile. Each 16 rows are followed by 8 words, so that a warp that reads words
// of one column from four of them, and eight columns, meets every bank once.
template <class T>
struct TileStore {
  static constexpr int kRowWords = kTile * T::kBytes / 4;
  static constexpr int kStripWords = kBlock * kRowWords + 8;
  uint32_t words[kTileBlocks * kStripWords];

  NVFP4_DEVICE int at(int row, int word) {
    return row / kBlock * kStripWords + row % kBlock * kRowWords + word;
  }
};

// What the row form leaves for the transposed form, by strip of 16 rows (and by tile of 16
// columns).
struct TileShared {
  float block_amax[kTileBlocks][kTileBlocks];
  float outer_amax[kTileBlocks];
  bool cut[kTileBlocks];
};

// Columns 2 * pair and 2 * pair + 1 of a strip, as two blocks.
template <class T>
NVFP4_DEVICE void load_columns(const TileStore<T>& store, int strip, int pair,
                               uint32_t (&words)[2][T::kWords]) {
  const uint32_t* p = store.words + TileStore<T>::at(strip * kBlock, pair * (T::kBytes / 2));
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) {
    const uint32_t* upper = p + 2 * i * TileStore<T>::kRowWords;
    const uint32_t* lower = upper + TileStore<T>::kRowWords;
    if constexpr (T::kBytes == 2) {
      words[0][i] = __byte_perm(*upper, *lower, 0x5410);
      words[1][i] = __byte_perm(*upper, *lower, 0x7632);
    } else {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        words[k][2 * i] = upper[k];
        words[k][2 * i + 1] = lower[k];
      }
    }
  }
}

// Encodes two of a tile's 16 vectors, the others being with the lanes that differ in bits 2, 3
// and 4. Those lanes' errors are added to these by the tree of numerics.h, whose first stride or
// whose last one is within this lane's pair. A vector outside the matrix has no address x and no
// error. Returns the scale's code.
template <class T, class C>
NVFP4_DEVICE uint32_t encode_pair(const uint32_t (&words)[2][T::kWords], const void* const (&x)[2],
                                  int64_t stride, float block_amax, const Outer& outer,
                                  Divisor divisor, bool pair_is_first_stride, uint2 (&codes)[2]) {
  uint32_t scale_codes[2];
  choose_scales<C>(block_amax, outer, scale_codes);
  Candidate found[2][2];
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    if (x[v]) {
      encode_block<T, C>(words[v], x[v], stride, block_amax, scale_codes, outer, divisor, found[v]);
    } else {
      found[v][0] = found[v][1] = {{0, 0}, 0.0f};
    }
  }
  bool four = false;
  if constexpr (C::two) {
    float sum[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float a = found[0][k].error, b = found[1][k].error;
      if (pair_is_first_stride) a = add(a, b);
      for (int lanes = 16; lanes >= 4; lanes /= 2) {
        a = add(a, __shfl_xor_sync(0xFFFFFFFFu, a, lanes));
        b = add(b, __shfl_xor_sync(0xFFFFFFFFu, b, lanes));
      }
      sum[k] = pair_is_first_stride ? a : add(a, b);
    }
    four = sum[1] < sum[0];
  }
#pragma unroll
  for (int v = 0; v < 2; ++v) codes[v] = four ? found[v][1].codes : found[v][0].codes;
  return four ? scale_codes[1] : scale_codes[0];
}

// Stores a scale, or the zero of the swizzled layout's padding, or nothing.
NVFP4_DEVICE void store_scale(uint8_t* scales, int64_t row, int64_t rows, int col, int cols,
                              bool swizzled, uint32_t code) {
  if (row < rows && col < cols) {
    scales[scale_offset(row, col, cols, swizzled)] = code;
  } else if (swizzled && row < (rows + 127) / 128 * 128 && col < (cols + 3) / 4 * 4) {
    scales[scale_offset(row, col, cols, true)] = 0;
  }
}

// Amax of the group of a strip, and whether the group's rows are not whole tiles.
NVFP4_DEVICE float strip_amax(const QuantizeArgs& args, int64_t row, bool& cut) {
  cut = false;
  if (args.source == AmaxSource::kTensor) return __ldg(args.amax);
  const int group = find_group(args.offsets, args.num_groups, row, threadIdx.x % 32, 32);
  if (group >= args.num_groups) return 0.0f;
  cut = (__ldg(args.offsets + group) | __ldg(args.offsets + group + 1)) % kBlock != 0;
  return __ldg(args.amax + group);
}

constexpr uint32_t kNanScale = 0x7F;

template <class T, class C>
NVFP4_DEVICE void encode_rows_of_tile(const QuantizeArgs& args, int64_t first_row, int first_block,
                                      TileStore<T>& store, TileShared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int num_blocks = args.num_cols / kBlock, b = first_block + lane % 4;
  const int row_in_tile[2] = {warp * kBlock + lane / 4, warp * kBlock + lane / 4 + 8};
  uint32_t words[2][T::kWords];
  const void* x[2];
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int64_t row = first_row + row_in_tile[v];
    const bool inside = row < args.num_rows && b < num_blocks;
    const int64_t offset = (row * num_blocks + b) * (kBlock * T::kBytes);
    x[v] = inside ? static_cast<const char*>(args.x) + offset : nullptr;
    load_block<T>(static_cast<const uint4*>(x[v]), inside, words[v]);
  }
  if (args.codes_t) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
#pragma unroll
      for (int i = 0; i < T::kWords; i += 4) {
        const int word = TileStore<T>::at(row_in_tile[v], lane % 4 * T::kWords + i);
        *reinterpret_cast<uint4*>(store.words + word) = {words[v][i], words[v][i + 1],
                                                         words[v][i + 2], words[v][i + 3]};
      }
    }
  }
  float block_amax = fmaxf(T::amax(words[0]), T::amax(words[1]));
  for (int lanes = 16; lanes >= 4; lanes /= 2) {
    block_amax = fmaxf(block_amax, __shfl_xor_sync(0xFFFFFFFFu, block_amax, lanes));
  }
  bool cut;
  const float amax = strip_amax(args, min(first_row + warp * kBlock, args.num_rows - 1), cut);
  if (lane < kTileBlocks) shared.block_amax[warp][lane] = block_amax;
  if (lane == 0) shared.outer_amax[warp] = amax, shared.cut[warp] = cut;
  uint2 codes[2];
  uint32_t scale = encode_pair<T, C>(words, x, 1, block_amax, outer_of(amax, args.e4m3_max),
                                     error_divisor(args.e4m3_max), true, codes);
  scale = cut ? kNanScale : scale;
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int64_t row = first_row + row_in_tile[v];
    if (row < args.num_rows && b < num_blocks) {
      reinterpret_cast<uint2*>(args.codes)[row * num_blocks + b] = codes[v];
    }
    store_scale(args.block_scales, row, args.num_rows, b, num_blocks, args.swizzled, scale);
  }
}

template <class T, class C>
NVFP4_DEVICE void encode_columns_of_tile(const QuantizeArgs& args, int64_t first_row,
                                         int first_block, const TileStore<T>& store,
                                         const TileShared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, strip = lane % 4;
  const int pair = warp * 8 + lane / 4;
  const int row_blocks = static_cast<int>(args.num_rows / kBlock);
  const int row_block = static_cast<int>(first_row / kBlock) + strip;
  uint32_t words[2][T::kWords];
  load_columns<T>(store, strip, pair, words);
  const void* x[2];
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    const uint32_t* row = store.words + TileStore<T>::at(strip * kBlock, 0);
    x[v] = reinterpret_cast<const char*>(row) + (2 * pair + v) * T::kBytes;
  }
  uint2 codes[2];
  const int64_t stride = TileStore<T>::kRowWords * 4 / T::kBytes;
  uint32_t scale = encode_pair<T, C>(words, x, stride, shared.block_amax[strip][warp],
                                     outer_of(shared.outer_amax[strip], args.e4m3_max),
                                     error_divisor(args.e4m3_max), false, codes);
  scale = shared.cut[strip] ? kNanScale : scale;
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int col = first_block * kBlock + 2 * pair + v;
    if (col < args.num_cols && row_block < row_blocks) {
      reinterpret_cast<uint2*>(args.codes_t)[static_cast<int64_t>(col) * row_blocks + row_block] =
          codes[v];
    }
    store_scale(args.block_scales_t, col, args.num_cols, row_block, row_blocks, args.swizzled,
                scale);
  }
}

template <class T, class C>
__global__ void __launch_bounds__(128, C::two           ? 5
                                       : T::kBytes == 2 ? 8
                                                        : 6)
    quantize_tiles_kernel(const __grid_constant__ QuantizeArgs args, int tiles_per_row) {
  __shared__ __align__(16) TileStore<T> store;
  __shared__ TileShared shared;
  // An amax pass has read the last rows last: begin there.
  const int64_t tile = gridDim.x - 1 - blockIdx.x;
  const int64_t first_row = tile / tiles_per_row * kTile;
  const int first_block = static_cast<int>(tile % tiles_per_row) * kTileBlocks;
  encode_rows_of_tile<T, C>(args, first_row, first_block, store, shared);
  if (!args.codes_t) return;
  __syncthreads();
  encode_columns_of_tile<T, C>(args, first_row, first_block, store, shared);
}

template <class T, class C>
cudaError_t launch_tiles(const QuantizeArgs& args, cudaStream_t stream) {
  // Padding of swizzled scales reaches up to the next 128 rows: of the transposed form, columns.
  const int64_t round = args.swizzled ? 128 : kTile;
  const int64_t col_round = args.codes_t ? round : kTile;
  const int64_t tiles_down = (args.num_rows + round - 1) / round * (round / kTile);
  const int64_t tiles_per_row = (args.num_cols + col_round - 1) / col_round * (col_round / kTile);
  quantize_tiles_kernel<T, C>
      <<<static_cast<unsigned>(tiles_down * tiles_per_row), 128, 0, stream>>>(
          args, static_cast<int>(tiles_per_row));
  return cudaGetLastError();
}

template <class C>
cudaError_t launch_tiles_of_type(const QuantizeArgs& args, cudaStream_t stream) {
  switch (args.type) {
    case InputType::kBFloat16:
      return launch_tiles<BFloat16Input, C>(args, stream);
    case InputType::kHalf:
      return launch_tiles<HalfInput, C>(args, stream);
    default:
      return launch_tiles<FloatInput, C>(args, stream);
  }
}

}  // namespace megatron_nvfp4::cuda
