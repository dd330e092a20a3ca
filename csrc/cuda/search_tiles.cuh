// 16x16 blocks with four-over-six: the row form and, on request, the transposed form in one pass.
// The two add a tile's errors in different orders, so that each is searched by itself. A CTA takes
// 64x64 elements; its four warps each take 16 rows by 64 columns from registers, then 64 rows by 16
// columns from shared memory, so that loads and stores fill whole sectors in both directions. Bound
// by issue.
#pragma once

#include "tile.cuh"

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

// Amax of a tile, and whether the fast functions may see the tile: it holds no NaN.
struct TileAmax {
  float value;
  bool numbers;
};

// What the row form leaves for the transposed form, by strip of 16 rows (and by tile of 16
// columns).
struct TileShared {
  TileAmax block_amax[kTileBlocks][kTileBlocks];
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

// Over the lanes that differ in bits 2, 3 and 4, which hold the tile.
NVFP4_DEVICE float larger_of_tile(float x) {
  for (int lanes = 16; lanes >= 4; lanes /= 2) {
    x = larger_bits(x, __shfl_xor_sync(0xFFFFFFFFu, x, lanes));
  }
  return x;
}

template <class T>
NVFP4_DEVICE TileAmax amax_of_tile(const uint32_t (&words)[2][T::kWords]) {
  TileAmax amax;
  amax.value = larger_of_tile(larger_bits(T::amax(words[0]), T::amax(words[1])));
  amax.numbers = !is_nan(amax.value);
  if (__any_sync(0xFFFFFFFFu, !amax.numbers)) {
    amax.value = larger_of_tile(fmaxf(largest_number<T>(words[0]), largest_number<T>(words[1])));
  }
  return amax;
}

// Codes under both candidates, and their errors; index 0 is six, 1 is four.
struct Searched {
  uint2 codes[2];
  float error[2];
};

// Encodes two of a tile's 16 vectors, the others being with the lanes that differ in bits 2, 3
// and 4. Those lanes' errors are added to these by the tree of numerics.h, whose first stride or
// whose last one is within this lane's pair. A vector outside the matrix has no error. Returns the
// scale's code.
template <class T, class C>
NVFP4_DEVICE uint32_t encode_pair(const uint32_t (&words)[2][T::kWords], const bool (&inside)[2],
                                  TileAmax block_amax, const Outer& outer, Divisor divisor,
                                  bool pair_is_first_stride, uint2 (&codes)[2]) {
  const Scales s = outer.ordinary ? choose_scales<C>(block_amax.value, outer)
                                  : choose_any_scales<C>(block_amax.value, outer);
  const float multiplier[2] = {fast_multiplier(s.value[0], outer.s_dec),
                               fast_multiplier(s.value[1], outer.s_dec)};
  const bool ordinary = NVFP4_HARDWARE_E4M3 && outer.ordinary && block_amax.numbers &&
                        is_ordinary(block_amax.value, multiplier[0]);
  Searched found[2];
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    if (__builtin_expect(ordinary, 1)) {
      Two<T, C> two;
      two.encode(words[v], s.value, multiplier, outer, divisor);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        found[v].codes[k] = two.codes(words[v], k == 1);
        found[v].error[k] = two.error[k];
      }
    } else {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const Candidate any = encode_any<T, C>(pass<T>(words[v]), s.value[k], outer, divisor.value);
        found[v].codes[k] = any.codes;
        found[v].error[k] = any.error;
      }
    }
    if (!inside[v]) found[v].error[0] = found[v].error[1] = 0.0f;
  }
  float sum[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    float a = found[0].error[k], b = found[1].error[k];
    if (pair_is_first_stride) a = add(a, b);
    for (int lanes = 16; lanes >= 4; lanes /= 2) {
      a = add(a, __shfl_xor_sync(0xFFFFFFFFu, a, lanes));
      b = add(b, __shfl_xor_sync(0xFFFFFFFFu, b, lanes));
    }
    sum[k] = pair_is_first_stride ? a : add(a, b);
  }
  const bool four = sum[1] < sum[0];
#pragma unroll
  for (int v = 0; v < 2; ++v) codes[v] = four ? found[v].codes[1] : found[v].codes[0];
  return four ? s.code[1] : s.code[0];
}

template <class T, class C>
NVFP4_DEVICE void encode_rows_of_tile(const QuantizeArgs& args, int64_t first_row, int first_block,
                                      TileStore<T>& store, TileShared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int num_blocks = args.num_cols / kBlock, b = first_block + lane % 4;
  const int row_in_tile[2] = {warp * kBlock + lane / 4, warp * kBlock + lane / 4 + 8};
  uint32_t words[2][T::kWords] = {};
  bool inside[2];
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    const int64_t row = first_row + row_in_tile[v];
    inside[v] = row < args.num_rows && b < num_blocks;
    const uint4* x = static_cast<const uint4*>(args.x) + (row * num_blocks + b) * (T::kWords / 4);
    if (inside[v]) load_block<T>(x, words[v]);
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
  const TileAmax block_amax = amax_of_tile<T>(words);
  bool cut;
  const float amax = strip_amax(args, min(first_row + warp * kBlock, args.num_rows - 1), cut);
  if (lane < kTileBlocks) shared.block_amax[warp][lane] = block_amax;
  if (lane == 0) shared.outer_amax[warp] = amax, shared.cut[warp] = cut;
  uint2 codes[2];
  uint32_t scale = encode_pair<T, C>(words, inside, block_amax, outer_of(amax, args.e4m3_max),
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
  // Whole tiles: the rows of a matrix with a transposed form are a multiple of 16.
  const bool inside[2] = {true, true};
  uint2 codes[2];
  uint32_t scale = encode_pair<T, C>(words, inside, shared.block_amax[strip][warp],
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
__global__ void __launch_bounds__(128, T::kBytes == 2 ? 5 : 4)
    search_tiles_kernel(const __grid_constant__ QuantizeArgs args, int tiles_per_row) {
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
cudaError_t search_tiles(const QuantizeArgs& args, cudaStream_t stream) {
  // Padding of swizzled scales reaches up to the next 128 rows: of the transposed form, columns.
  const int64_t round = args.swizzled ? 128 : kTile;
  const int64_t col_round = args.codes_t ? round : kTile;
  const int64_t tiles_down = (args.num_rows + round - 1) / round * (round / kTile);
  const int64_t tiles_per_row = (args.num_cols + col_round - 1) / col_round * (col_round / kTile);
  search_tiles_kernel<T, C><<<static_cast<unsigned>(tiles_down * tiles_per_row), 128, 0, stream>>>(
      args, static_cast<int>(tiles_per_row));
  return cudaGetLastError();
}

template <class C>
cudaError_t search_tiles_of_type(const QuantizeArgs& args, cudaStream_t stream) {
  switch (args.type) {
    case InputType::kBFloat16:
      return search_tiles<BFloat16Input, C>(args, stream);
    case InputType::kHalf:
      return search_tiles<HalfInput, C>(args, stream);
    default:
      return search_tiles<FloatInput, C>(args, stream);
  }
}

}  // namespace megatron_nvfp4::cuda
