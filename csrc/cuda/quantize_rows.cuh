// 1x16 blocks. A row is held in registers by some lanes of a warp, a warp or several, so that its
// amax and its codes take one pass over the input. Bound by memory without four-over-six, by issue
// with it.
#pragma once

#include <algorithm>

#include "encode_block.cuh"

namespace megatron_nvfp4::cuda {

// How scales are stored: byte by byte into the linear layout, in words of four neighbours into
// either layout, or byte by byte into either.
enum class ScaleStore { kLinear, kWords, kAny };

// How threads share a row: each warp takes kLanes * kBlocks consecutive blocks, a thread kBlocks of
// them, kLanes apart; below 32 lanes, a warp holds several rows. kWhole: no row has fewer blocks
// than its threads. kWords needs whole rows, 32 lanes and four blocks.
template <int lanes, int blocks, bool whole, ScaleStore store>
struct Cut {
  static constexpr int kLanes = lanes;
  static constexpr int kBlocks = blocks;
  static constexpr bool kWhole = whole;
  static constexpr ScaleStore kStore = store;
};

// Row of a CTA's thread row. Spread, a CTA's rows (1, 2, 4 or 8) are 32 apart: their swizzled
// scales are neighbours in memory, and those of the next CTA follow.
NVFP4_DEVICE int64_t row_of(unsigned cta, bool spread) {
  const unsigned rows = blockDim.y;
  if (!spread) return static_cast<int64_t>(cta) * rows + threadIdx.y;
  if (rows == 8) {  // two neighbours each 32
    return static_cast<int64_t>(cta / 16) * 128 + cta % 16 * 2 + threadIdx.y / 4 +
           32 * (threadIdx.y % 4);
  }
  const unsigned i = cta & (128 / rows - 1);
  return static_cast<int64_t>(cta - i) * rows + i % 32 + 32 * (i / 32 * rows + threadIdx.y);
}

// Where a row's blocks come from: memory. fetch starts the loads of a block, finish makes words;
// kComputes: that takes registers.
template <class T>
struct FromMemory {
  static constexpr bool kComputes = false;
  using Raw = Words<T>;
  struct Row {};
  NVFP4_DEVICE Row row(const QuantizeArgs&, int64_t) { return {}; }
  NVFP4_DEVICE void fetch(const QuantizeArgs& args, int64_t, int64_t block, Raw& raw) {
    load_block<T>(static_cast<const uint4*>(args.x) + block * (T::kWords / 4), raw.w);
  }
  NVFP4_DEVICE Words<T> finish(Row, const Raw& raw) { return raw; }
};

template <class T, class C, class Source = FromMemory<T>>
struct RowsConfig {
  static constexpr int kBlocks = T::kBytes == 2 ? 4 : 2;
  static constexpr int kMaxThreads = C::two || Source::kComputes ? 384 : 512;
  static constexpr int kMinCtas = 2;  // 80 registers a thread, or 64
  static constexpr int kThreads = 128;
  static_assert(kThreads / 32 <= 4, "rows that row_of spreads would leave their 128-row tile");
};

// Largest amax among the threads of a row; every warp belongs to one row if a row has more than
// one.
NVFP4_DEVICE float across_warps(float amax, float* warp_amax) {
  const int warps = blockDim.x / 32, warp = threadIdx.y * warps + threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) warp_amax[warp] = amax;
  __syncthreads();
  for (int i = 0; i < warps; ++i) amax = fmaxf(amax, warp_amax[threadIdx.y * warps + i]);
  return amax;
}

// Of four blocks 32 lanes apart, byte j from block j: the word of four neighbouring blocks that
// belongs to this lane, at word index lane / 4 + 8 * (lane % 4). Lanes trade bytes with the lane
// beside them, then with the one two further.
NVFP4_DEVICE uint32_t trade_scales(uint32_t word, int lane) {
  uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, static_cast<int>(word), 1);
  word = __byte_perm(word, other, lane & 1 ? 0x3715 : 0x6240);
  other = __shfl_xor_sync(0xFFFFFFFFu, static_cast<int>(word), 2);
  return __byte_perm(word, other, lane & 2 ? 0x3276 : 0x5410);
}

// A row's blocks as one thread sees them: block j, kLanes after block j - 1, at index first + j *
// kLanes of the row, which has num_blocks, and at index first_of_all + j * kLanes of the matrix.
struct Place {
  int64_t row, read_row, first_of_all;  // read_row: row, or the last one where that is outside
  int first, num_blocks;
  bool inside;  // the row exists
};

template <class Source, class Cut>
NVFP4_DEVICE void fetch_of_row(const QuantizeArgs& args, const Place& at, int j,
                               typename Source::Raw& raw) {
  // Beyond the row's end, its first block again, which does not change its amax.
  const bool valid = Cut::kWhole || at.first + j * Cut::kLanes < at.num_blocks;
  Source::fetch(args, at.read_row, at.first_of_all + (valid ? j * Cut::kLanes : -at.first), raw);
}

// Amax of the row without its NaNs.
template <class T, class Cut, class Source>
__device__ __noinline__ float amax_of_numbers(const QuantizeArgs& args, Place at) {
  const auto row = Source::row(args, at.read_row);
  float amax = 0.0f;
#pragma unroll 1
  for (int j = 0; j < Cut::kBlocks; ++j) {
    typename Source::Raw raw;
    fetch_of_row<Source, Cut>(args, at, j, raw);
    amax = fmaxf(amax, largest_number<T>(Source::finish(row, raw).w));
  }
  return max_over_lanes(amax, Cut::kLanes);
}

template <class Cut>
NVFP4_DEVICE void store_block(const QuantizeArgs& args, const Place& at, int j, Encoded block,
                              uint32_t& scale_word) {
  const int64_t b = at.first_of_all + j * Cut::kLanes;
  reinterpret_cast<uint2*>(args.codes)[b] = block.codes;
  if constexpr (Cut::kStore == ScaleStore::kWords) {
    scale_word = (scale_word & ~(0xFFu << (8 * j))) | block.scale << (8 * j);
  } else {
    const int c = at.first + j * Cut::kLanes;
    const bool swizzled = Cut::kStore == ScaleStore::kAny && args.swizzled;
    args.block_scales[swizzled ? scale_offset(at.row, c, at.num_blocks, true) : b] = block.scale;
  }
  if (!Cut::kWhole && args.decoded) {
    store_decoded(static_cast<uint4*>(args.decoded) + 2 * b, block.codes, block.scale);
  }
}

// Encodes again, by numerics.h, the blocks j with bit j in `which`.
template <class T, class C, class Cut, class Source>
__device__ __noinline__ uint32_t encode_again(const QuantizeArgs& args, Place at, uint32_t which,
                                              Outer outer, uint32_t scale_word) {
  const auto row = Source::row(args, at.read_row);
#pragma unroll 1
  for (int j = 0; j < Cut::kBlocks; ++j) {
    if (!(which >> j & 1u)) continue;
    typename Source::Raw raw;
    fetch_of_row<Source, Cut>(args, at, j, raw);
    const Encoded block =
        encode_any_block<T, C>(Source::finish(row, raw), outer, error_divisor(args.e4m3_max).value);
    store_block<Cut>(args, at, j, block, scale_word);
  }
  return scale_word;
}

// What a source has computed, a block of 16-bit words.
template <class T>
NVFP4_DEVICE void keep_block(const QuantizeArgs& args, int64_t block, const Words<T>& words) {
  uint4* to = static_cast<uint4*>(args.kept) + block * 2;
  to[0] = {words.w[0], words.w[1], words.w[2], words.w[3]};
  to[1] = {words.w[4], words.w[5], words.w[6], words.w[7]};
}

template <class T, class C, class Cut, class Source>
__global__ void __launch_bounds__(RowsConfig<T, C, Source>::kMaxThreads,
                                  RowsConfig<T, C, Source>::kMinCtas)
    quantize_rows_kernel(const __grid_constant__ QuantizeArgs args) {
  constexpr int kBlocks = Cut::kBlocks, kLanes = Cut::kLanes;
  constexpr bool kWords = Cut::kStore == ScaleStore::kWords;
  constexpr bool kAny = Cut::kStore == ScaleStore::kAny;
  const int lane = threadIdx.x % kLanes;
  // The rows that an amax pass has read last may still be in the cache: begin there.
  const bool backwards = args.source >= AmaxSource::kTensor;
  const unsigned cta = backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  Place at;
  at.row = row_of(cta, kWords && args.swizzled);
  at.inside = at.row < args.num_rows;
  at.num_blocks = args.num_cols / kBlock;
  at.first = (blockIdx.y * blockDim.x + threadIdx.x / kLanes * kLanes) * kBlocks + lane;
  at.read_row = at.inside ? at.row : args.num_rows - 1;
  at.first_of_all = at.read_row * at.num_blocks + at.first;

  typename Source::Raw raw[kBlocks];
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) fetch_of_row<Source, Cut>(args, at, j, raw[j]);
  const auto source_row = Source::row(args, at.read_row);
  float block_amax[kBlocks], amax;
  if (args.source != AmaxSource::kSelf) amax = outer_amax(args, at.read_row, lane, kLanes);
  Words<T> words[kBlocks];
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    words[j] = Source::finish(source_row, raw[j]);
    block_amax[j] = T::amax(words[j].w);
    if constexpr (Source::kComputes) {
      const bool valid = Cut::kWhole || at.first + j * kLanes < at.num_blocks;
      if (args.kept && at.inside && valid)
        keep_block<T>(args, at.first_of_all + j * kLanes, words[j]);
    }
  }
  if (args.source == AmaxSource::kSelf) {
    amax = block_amax[0];
#pragma unroll
    for (int j = 1; j < kBlocks; ++j) amax = larger_bits(amax, block_amax[j]);
    amax = max_over_lanes(amax, kLanes);
    if (__any_sync(0xFFFFFFFFu, is_nan(amax))) amax = amax_of_numbers<T, Cut, Source>(args, at);
    if constexpr (kLanes == 32) {
      __shared__ float warp_amax[RowsConfig<T, C, Source>::kMaxThreads / 32];
      if (blockDim.x > 32) amax = across_warps(amax, warp_amax);
    }
    if (at.inside && threadIdx.x == 0) args.amax[at.row] = amax;
  }
  const Outer outer = outer_of(amax, args.e4m3_max);
  const Divisor divisor = error_divisor(args.e4m3_max);
  uint32_t scale_word = 0, again = 0;
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    Encoded block;
    const bool ordinary = encode_block<T, C>(words[j].w, block_amax[j], outer, divisor, block);
    if (!ordinary) again |= 1u << j;
    const int b = at.first + j * kLanes;
    if (Cut::kWhole ? at.inside : at.inside && b < at.num_blocks) {
      store_block<Cut>(args, at, j, block, scale_word);
    } else {
      again &= ~(1u << j);
      if (kAny && args.swizzled && b < (at.num_blocks + 3) / 4 * 4) {
        args.block_scales[scale_offset(at.row, b, at.num_blocks, true)] = 0;
      }
    }
  }
  if (again) scale_word = encode_again<T, C, Cut, Source>(args, at, again, outer, scale_word);
  if constexpr (kWords) {
    if (!at.inside && !args.swizzled) return;
    scale_word = trade_scales(scale_word, lane);
    const int c = lane / 4 + 8 * (lane % 4);
    if (args.swizzled && blockDim.y == 8) {  // a row is a warp: 32 bytes of each column of tiles
      __shared__ uint4 gathered[32 * 2];
      reinterpret_cast<uint32_t*>(gathered + 2 * c + threadIdx.y / 4)[threadIdx.y % 4] = scale_word;
      __syncthreads();
      if (threadIdx.y >= 2) return;
      const int i = threadIdx.y * 32 + lane;
      const int64_t tile = at.row / 128 * (at.num_blocks / 4) + i / 2;
      reinterpret_cast<uint4*>(args.block_scales)[tile * 32 + cta % 16 * 2 + i % 2] = gathered[i];
      return;
    }
    int64_t offset = at.first_of_all / 4 - lane / 4 + c;
    if (args.swizzled) {
      const int row_in_tile = static_cast<int>(at.row) % 128;
      const int tiles = at.num_blocks / 4;
      offset = (at.row / 128 * tiles + (at.first - lane) / 4 + c) * 128 + row_in_tile % 32 * 4 +
               row_in_tile / 32;
    }
    reinterpret_cast<uint32_t*>(args.block_scales)[offset] = scale_word;
  }
}

template <class T, class C, class Cut, class Source = FromMemory<T>>
cudaError_t launch_cut(const QuantizeArgs& args, int row_threads, int chunks, cudaStream_t stream) {
  constexpr bool kWords = Cut::kStore == ScaleStore::kWords;
  const bool eight = kWords && args.swizzled && row_threads == 32;
  const int rows_per_cta = eight ? 8 : std::max(1, RowsConfig<T, C>::kThreads / row_threads);
  const int64_t rows = args.swizzled ? (args.num_rows + 127) / 128 * 128 : args.num_rows;
  const dim3 grid((rows + rows_per_cta - 1) / rows_per_cta, chunks);
  quantize_rows_kernel<T, C, Cut, Source>
      <<<grid, dim3(row_threads, rows_per_cta), 0, stream>>>(args);
  return cudaGetLastError();
}

template <class T, class C>
cudaError_t launch_rows(const QuantizeArgs& args, cudaStream_t stream) {
  using Config = RowsConfig<T, C>;
  constexpr int kBlocks = Config::kBlocks;
  const int num_blocks = args.num_cols / kBlock;
  if (num_blocks <= 8 * kBlocks)
    return launch_cut<T, C, Cut<8, kBlocks, false, ScaleStore::kAny>>(args, 8, 1, stream);
  int row_threads = (num_blocks + 32 * kBlocks - 1) / (32 * kBlocks) * 32, chunks = 1;
  if constexpr (T::kBytes == 2) {
    if (num_blocks == 48 && !args.decoded)
      return launch_cut<T, C, Cut<16, 3, true, ScaleStore::kAny>>(args, 16, 1, stream);
    if (num_blocks % 128 == 0 && !args.decoded && row_threads <= Config::kMaxThreads) {
      if (args.swizzled) {
        return launch_cut<T, C, Cut<32, 4, true, ScaleStore::kWords>>(args, row_threads, 1, stream);
      }
      return launch_cut<T, C, Cut<32, 4, true, ScaleStore::kLinear>>(args, row_threads, 1, stream);
    }
  }
  if (row_threads > Config::kMaxThreads) {  // a given amax: a row may be cut
    row_threads = Config::kThreads;
    chunks = (num_blocks + row_threads * kBlocks - 1) / (row_threads * kBlocks);
  }
  return launch_cut<T, C, Cut<32, kBlocks, false, ScaleStore::kAny>>(args, row_threads, chunks,
                                                                     stream);
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
