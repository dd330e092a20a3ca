// 16x16 blocks without four-over-six: the row form and, on request, the transposed form, whose
// codes and scales are the same ones in other places. A CTA takes 128 rows, a warp 16 of them;
// every lane holds whole blocks of one tile column. Bound by memory.
#include "tile.cuh"

namespace megatron_nvfp4::cuda {

cudaError_t search_tiles(const QuantizeArgs& args, cudaStream_t stream);  // search_tiles.cu

namespace {

constexpr int kWarps = 8;
constexpr int kTileRows = kWarps * kBlock;

template <class T>
struct TileCut {
  static constexpr int kCols = T::kBytes == 2 ? 128 : 64;
  static constexpr int kLanes = kCols / kBlock;         // of a row
  static constexpr int kBlocks = kBlock * kLanes / 32;  // of a lane, 32 / kLanes rows apart
  static constexpr int kRowStep = 32 / kLanes;
  static constexpr int kRowWords = kCols / 8;  // of codes
};

// What a CTA keeps for the transposed form. Eight rows of codes are followed by two words, so that
// a warp that reads every eighth row in two columns of words meets every bank once.
template <class T>
struct TileShared {
  uint32_t codes[kTileRows * TileCut<T>::kRowWords + kTileRows / 8 * 2];
  uint8_t scales[TileCut<T>::kLanes][kWarps];  // by tile column and row

  NVFP4_DEVICE_MEMBER uint32_t* code(int row, int word) {
    return codes + row * TileCut<T>::kRowWords + row / 8 * 2 + word;
  }
};

// Where a lane's blocks lie: block j in row strip + row + j * kRowStep of block column b.
struct TilePlace {
  int64_t strip;
  int row, b;
};

template <class T>
NVFP4_DEVICE const uint4* block_at(const QuantizeArgs& args, const TilePlace& at, int j) {
  // Outside the matrix, its last row or column: of the same strip, or of one that is not stored.
  const int64_t row = min(at.strip + at.row + j * TileCut<T>::kRowStep, args.num_rows - 1);
  const int num_blocks = args.num_cols / kBlock;
  return static_cast<const uint4*>(args.x) +
         (row * num_blocks + min(at.b, num_blocks - 1)) * (T::kWords / 4);
}

// Over the lanes with the same tile.
template <class T>
NVFP4_DEVICE float larger_of_tile(float x) {
#pragma unroll
  for (int lanes = 16; lanes >= TileCut<T>::kLanes; lanes /= 2) {
    x = larger_bits(x, __shfl_xor_sync(0xFFFFFFFFu, x, lanes));
  }
  return x;
}

template <class T>
__device__ __noinline__ float amax_of_numbers(const QuantizeArgs& args, TilePlace at) {
  float amax = 0.0f;
#pragma unroll 1
  for (int j = 0; j < TileCut<T>::kBlocks; ++j) {
    uint32_t words[T::kWords];
    load_block<T>(block_at<T>(args, at, j), words);
    amax = fmaxf(amax, largest_number<T>(words));
  }
  return larger_of_tile<T>(amax);
}

template <class T>
NVFP4_DEVICE void store_codes(const QuantizeArgs& args, const TilePlace& at, int j, uint2 codes,
                              TileShared<T>& shared) {
  const int in_strip = at.row + j * TileCut<T>::kRowStep;
  const int64_t row = at.strip + in_strip;
  const int num_blocks = args.num_cols / kBlock;
  if (row < args.num_rows && at.b < num_blocks) {
    reinterpret_cast<uint2*>(args.codes)[row * num_blocks + at.b] = codes;
  }
  if (args.codes_t) {
    const int lane_in_row = threadIdx.x % TileCut<T>::kLanes;
    *reinterpret_cast<uint2*>(shared.code(threadIdx.x / 32 * kBlock + in_strip, 2 * lane_in_row)) =
        codes;
  }
}

// A lane's part of a tile again, by numerics.h.
template <class T>
__device__ __noinline__ void encode_again(const QuantizeArgs& args, TilePlace at, float scale,
                                          Outer outer, TileShared<T>& shared) {
#pragma unroll 1
  for (int j = 0; j < TileCut<T>::kBlocks; ++j) {
    uint32_t words[T::kWords];
    load_block<T>(block_at<T>(args, at, j), words);
    store_codes<T>(args, at, j, encode_any<T, NoChoice>(pass<T>(words), scale, outer, 0.0f).codes,
                   shared);
  }
}

// Stores the scales of four neighbouring blocks of a row, c a multiple of four; bytes of blocks
// beyond the row's end are zero.
NVFP4_DEVICE void store_scale_word(uint8_t* scales, int64_t row, int64_t rows, int c, int cols,
                                   bool swizzled, uint32_t word) {
  if (c >= cols) return;
  if (swizzled) {
    *reinterpret_cast<uint32_t*>(scales + scale_offset(row, c, cols, true)) = row < rows ? word : 0;
  } else if (row < rows) {
    uint8_t* out = scales + row * cols + c;
    if (cols % 4 == 0) {
      *reinterpret_cast<uint32_t*>(out) = word;
    } else {
      for (int i = 0; i < min(cols - c, 4); ++i) out[i] = word >> (8 * i);
    }
  }
}

// The scales of the strip's tiles in its 16 rows. Lanes with the same tile have the same byte.
template <class T>
NVFP4_DEVICE void store_strip_scales(const QuantizeArgs& args, const TilePlace& at, uint32_t byte) {
  const int lane = threadIdx.x % 32;
  uint32_t word = byte << (8 * (lane % 4));
  word |= __shfl_xor_sync(0xFFFFFFFFu, static_cast<int>(word), 1);
  word |= __shfl_xor_sync(0xFFFFFFFFu, static_cast<int>(word), 2);
  const int row = lane % 4 + lane / TileCut<T>::kLanes * 4;
  if (row >= kBlock) return;
  store_scale_word(args.block_scales, at.strip + row, args.num_rows, at.b / 4 * 4,
                   args.num_cols / kBlock, args.swizzled, word);
}

// Nibble j of word i becomes nibble i of word j.
NVFP4_DEVICE void transpose_nibbles(uint32_t (&w)[8]) {
  const auto trade = [](uint32_t& a, uint32_t& b, uint32_t low, uint32_t high) {
    const uint32_t old = a;
    a = __byte_perm(old, b, low);
    b = __byte_perm(old, b, high);
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) trade(w[i], w[i + 4], 0x5410, 0x7632);
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    trade(w[i], w[i + 2], 0x6240, 0x7351);
    trade(w[i + 1], w[i + 3], 0x6240, 0x7351);
  }
  constexpr uint32_t kLow = 0x0F0F0F0Fu;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const uint32_t old = w[i];
    w[i] = (old & kLow) | ((w[i + 1] << 4) & ~kLow);
    w[i + 1] = ((old >> 4) & kLow) | (w[i + 1] & ~kLow);
  }
}

template <class T>
NVFP4_DEVICE void store_transposed(const QuantizeArgs& args, int64_t first_row, int first_col,
                                   TileShared<T>& shared) {
  using Cut = TileCut<T>;
  const int octet = threadIdx.x % (kTileRows / 8), cols = threadIdx.x / (kTileRows / 8) * 8;
  const int64_t row = first_row + 8 * octet;
  if (cols < Cut::kCols) {
    uint32_t words[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = *shared.code(8 * octet + i, cols / 8);
    transpose_nibbles(words);
    if (row < args.num_rows) {
      const int64_t row_words = args.num_rows / 8;
      uint32_t* out =
          reinterpret_cast<uint32_t*>(args.codes_t) + (first_col + cols) * row_words + row / 8;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (first_col + cols + j < args.num_cols) out[j * row_words] = words[j];
      }
    }
  }
  const int col = threadIdx.x / 2, half = threadIdx.x % 2;
  if (col < Cut::kCols) {
    const uint32_t word =
        *reinterpret_cast<const uint32_t*>(&shared.scales[col / kBlock][4 * half]);
    const int64_t row_blocks = args.num_rows / kBlock;
    const int64_t padded = (args.num_cols + 127) / 128 * 128;
    if (first_col + col < padded) {
      store_scale_word(args.block_scales_t, first_col + col, args.num_cols,
                       static_cast<int>(first_row / kBlock) + 4 * half,
                       static_cast<int>(row_blocks), args.swizzled, word);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kWarps * 32, T::kBytes == 2 ? 4 : 3)
    quantize_tiles_kernel(const __grid_constant__ QuantizeArgs args, unsigned tiles_per_row) {
  using Cut = TileCut<T>;
  __shared__ __align__(16) TileShared<T> shared;
  // An amax pass has read the last rows last: begin there.
  const unsigned tile = gridDim.x - 1 - blockIdx.x;
  const int64_t first_row = static_cast<int64_t>(tile / tiles_per_row) * kTileRows;
  const int first_col = static_cast<int>(tile % tiles_per_row) * Cut::kCols;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const TilePlace at = {first_row + warp * kBlock, lane / Cut::kLanes,
                        first_col / kBlock + lane % Cut::kLanes};

  uint32_t words[Cut::kBlocks][T::kWords];
#pragma unroll
  for (int j = 0; j < Cut::kBlocks; ++j) load_block<T>(block_at<T>(args, at, j), words[j]);
  bool cut;
  const Outer outer =
      outer_of(strip_amax(args, min(at.strip, args.num_rows - 1), cut), args.e4m3_max);
  float block_amax = T::amax(words[0]);
#pragma unroll
  for (int j = 1; j < Cut::kBlocks; ++j) block_amax = larger_bits(block_amax, T::amax(words[j]));
  block_amax = larger_of_tile<T>(block_amax);
  const Scales s = choose_scales<NoChoice>(block_amax, outer);
  const float multiplier = fast_multiplier(s.value[0], outer.s_dec);
  const bool ordinary =
      NVFP4_HARDWARE_E4M3 && outer.ordinary && is_ordinary(block_amax, multiplier);
  uint32_t code = s.code[0];
#pragma unroll
  for (int j = 0; j < Cut::kBlocks; ++j) {
    store_codes<T>(args, at, j, encode_ordinary<T>(words[j], multiplier), shared);
  }
  if (__any_sync(0xFFFFFFFFu, !ordinary)) {
    const float amax = amax_of_numbers<T>(args, at);
    if (!ordinary) {
      const Scales any = choose_any_scales<NoChoice>(amax, outer);
      code = any.code[0];
      encode_again<T>(args, at, any.value[0], outer, shared);
    }
  }
  if (cut) code = kNanScale;
  if (at.b >= args.num_cols / kBlock || at.strip >= args.num_rows) code = 0;
  store_strip_scales<T>(args, at, code);
  if (!args.codes_t) return;
  if (lane < Cut::kLanes) shared.scales[lane][warp] = code;
  __syncthreads();
  store_transposed<T>(args, first_row, first_col, shared);
}

template <class T>
cudaError_t launch_tiles(const QuantizeArgs& args, cudaStream_t stream) {
  // Padding of the transposed form's swizzled scales reaches up to the next 128 columns.
  const int64_t round = args.swizzled && args.codes_t ? 128 : TileCut<T>::kCols;
  const int64_t tiles_per_row = (args.num_cols + round - 1) / round * (round / TileCut<T>::kCols);
  const int64_t tiles = (args.num_rows + kTileRows - 1) / kTileRows * tiles_per_row;
  quantize_tiles_kernel<T><<<static_cast<unsigned>(tiles), kWarps * 32, 0, stream>>>(
      args, static_cast<unsigned>(tiles_per_row));
  return cudaGetLastError();
}

}  // namespace

cudaError_t quantize_tiles(const QuantizeArgs& args, cudaStream_t stream) {
  if (args.four_over_six != FourOverSix::kOff) return search_tiles(args, stream);
  switch (args.type) {
    case InputType::kBFloat16:
      return launch_tiles<BFloat16Input>(args, stream);
    case InputType::kHalf:
      return launch_tiles<HalfInput>(args, stream);
    default:
      return launch_tiles<FloatInput>(args, stream);
  }
}

}  // namespace megatron_nvfp4::cuda
