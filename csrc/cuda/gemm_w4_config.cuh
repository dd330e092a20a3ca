// What the warps of the GEMM on 4-bit weights share: sizes, shared memory, items, stages.
#pragma once

#include <algorithm>
#include <type_traits>

#include "gemm_w4_decode.cuh"
#include "gemm_w4_schedule.cuh"

namespace megatron_nvfp4::cuda {

// A stage holds kSpan chunks along K. kBuffers fragments of kSteps times 16 of K are decoded ahead.
// kTokens: widths of a tile.
template <int kGroups_, int kTiles_, int kSpan_, int kSteps_, int kBuffers_, int... kTokens>
struct GemmConfig {
  static constexpr int kGroups = kGroups_, kTiles = kTiles_, kSpan = kSpan_, kSteps = kSteps_;
  static constexpr int kBuffers = kBuffers_;
  static constexpr int kChunks = kGroups * kTiles;
  static constexpr int kMaxTokens = std::max({kTokens...});
  static constexpr int kThreads = (kGroups + 1) * 128;
  // Registers of multiplying and copying threads: on average what the launch gives.
  static constexpr int kMultiplier = kGroups == 4 ? 104 : kGroups == 3 ? 144 : 224;
  static constexpr int kCopier = kGroups == 4 ? 64 : kGroups == 3 ? 80 : 56;
  static constexpr int kWriters = 2;  // warps that store
  // A stage: activations, then weights, for each chunk along K.
  static constexpr int kTokenBytes = kMaxTokens * 128, kWeightBytes = kChunks * kChunkBytes;
  static constexpr int kWeights = kSpan * kTokenBytes;
  static constexpr int kStageBytes = (kWeights + kSpan * kWeightBytes + 1023) / 1024 * 1024;
  // Shared memory: barriers, the number of items, sums of count_items, items as read and as
  // written, an item's output as BF16 (kRowBytes of each token for each warpgroup), stages, row
  // scales of each stage's item, then the schedule. Offsets known here cost no registers.
  static constexpr int kMaxStages = 24, kFull = 0, kEmpty = 8 * kMaxStages;
  static constexpr int kOutFull = 16 * kMaxStages, kOutEmpty = kOutFull + 8 * kGroups;
  static constexpr int kItems = kOutEmpty + 8 * kGroups, kSums = kItems + 8;
  static constexpr int kInfo = 1024, kOutInfo = kInfo + 32 * kMaxStages, kOutput = 2048;
  static constexpr int kScaleBytes = kMaxTokens * 4 + 16;
  static constexpr int kRowBytes = kTiles * kChunk * 2, kOutputBytes = kMaxTokens * kRowBytes;
  static constexpr int kStages = kOutput + kGroups * kOutputBytes;
  static_assert(kSums + kMaxGroups / 8 <= kInfo && kOutInfo + 16 * kGroups <= kOutput);
  static_assert(kStages % 1024 == 0);

  // f of the narrowest width that holds num_rows, found by halving.
  template <class F>
  SM90_FN void for_width(int num_rows, F&& f) {
    search<0, sizeof...(kTokens) - 1>(num_rows, f);
  }

 private:
  __host__ __device__ static constexpr int width(int i) {
    const int widths[] = {kTokens...};
    return widths[i];
  }
  template <int kLow, int kHigh, class F>
  SM90_FN void search(int num_rows, F& f) {
    if constexpr (kLow == kHigh) {
      f(std::integral_constant<int, width(kLow)>());
    } else {
      constexpr int kMiddle = (kLow + kHigh) / 2, kWidth = width(kMiddle);
      if (num_rows <= kWidth) {
        search<kLow, kMiddle>(num_rows, f);
      } else {
        search<kMiddle + 1, kHigh>(num_rows, f);
      }
    }
  }
};

struct GemmMaps {
  CUtensorMap rows64, rows16;  // boxes of 64 elements along K of 16-bit x
};

SM90_FN uint32_t shared_base() {
  extern __shared__ __align__(1024) uint8_t gemm_w4_shared[];
  return shared_address(gemm_w4_shared);
}
SM90_FN bool has_row_scales(const GemmW4Args& args) {
  return args.row_scale && !args.one_row_scale;
}
SM90_FN Schedule schedule_of(const GemmW4Args& args) {
  return {shared_base() + args.tables, args.num_groups};
}
SM90_FN Item uniform(const Item& item) {  // the same in every lane, which the compiler learns here
  return {__shfl_sync(0xFFFFFFFFu, item.group, 0), __shfl_sync(0xFFFFFFFFu, item.row, 0),
          __shfl_sync(0xFFFFFFFFu, item.num_rows, 0),
          __shfl_sync(0xFFFFFFFFu, item.feature_tile, 0)};
}
SM90_FN void post_item(uint32_t address, const Item& item) {
  store_shared_int4(address, {item.group, item.row, item.num_rows, item.feature_tile});
}
SM90_FN Item posted_item(uint32_t address) {
  const int4 v = load_shared_int4(address);
  return uniform({v.x, v.y, v.z, v.w});
}

struct StageRing {
  int stage, num_stages;
  uint32_t parity;
  SM90_MEMBER void next() {
    if (++stage == num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace megatron_nvfp4::cuda
