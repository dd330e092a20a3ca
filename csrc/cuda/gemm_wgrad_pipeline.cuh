// What the weight gradient of Hopper walks through: its tiles, their order, and the operands of
// each in shared memory.
#pragma once

#include <cstdint>

#include "gemm_dense_pipeline.cuh"
#include "gemm_wgrad.cuh"

namespace megatron_nvfp4::cuda {

constexpr int kResultRows = 16, kResultCols = 64;  // box of a warp's rows of c

struct WgradMaps {
  CUtensorMap a, b;
  CUtensorMap c;  // of all groups' results, where they lie evenly spaced
};

// kTokenMajor: a and b lie (M, N) and (M, K); otherwise (N, M) and (K, M). kPaired: two blocks, a
// cluster, have neighbouring rows and share the tile of b.
template <class Out_, bool kAccumulate_, bool kTokenMajor_, bool kPaired_>
struct WgradTile {
  using Out = Out_;
  static constexpr bool kAccumulate = kAccumulate_, kTokenMajor = kTokenMajor_;
  static constexpr bool kPaired = kPaired_;
  // BF16 as it leaves, in boxes; otherwise FP32, 64 columns at a time.
  static constexpr bool kStaged = sizeof(Out) == 2 && !kAccumulate;
  static constexpr int kRows = 64 * kMultipliers, kCols = 256, kCluster = kPaired ? 2 : 1;
  static constexpr bool kFine = kStaged && kTokenMajor;
  static constexpr int kDepth = kFine ? 32 : 64;  // tokens of a stage
  static constexpr int kStages = kFine ? (kPaired ? 8 : 7) : (kPaired ? 4 : 3);
  // The second warpgroup begins a tile this many stages behind the first, so that the way out of
  // one runs beside the products of the other; whether it is so changes no result.
  static constexpr int kLag = kFine && kPaired ? 4 : 0;
  static constexpr int kBlockBytes = 128 * kDepth;  // 64 rows of a or columns of b
  static constexpr int kABytes = kRows / 64 * kBlockBytes;
  static constexpr int kStageBytes = kABytes + kCols / 64 * kBlockBytes;
  static constexpr int kBoxBytes = kResultRows * kResultCols * 2;
  static constexpr int kBoxes = kPaired ? 2 : kFine ? 3 : 4;  // a warp, under way
  static constexpr int kChunk = 64;
  static constexpr int kPitch = 4 * kChunk + 32;  // of FP32; spreads the banks
  static constexpr int kWarpStaging = kStaged ? kBoxes * kBoxBytes : 16 * kPitch;
  static constexpr int kStagingBytes = 4 * kMultipliers * kWarpStaging;
  static constexpr int shared_bytes(int num_groups) {
    return 1024 + kStages * kStageBytes + kStagingBytes + 2 * kStages * 8 + 8 +
           (num_groups + 1) * 4 + num_groups * 2;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <class Tile>
struct WgradShared {
  uint32_t stages, staging, full, empty;
  uint32_t progress;  // stages that the first warpgroup has begun
  int* row_start;
  uint16_t* order;  // groups in the order of their items
  int* costs;       // in the staging, before the first tile

  __device__ __forceinline__ WgradShared(uint8_t* raw, int num_groups) {
    uint8_t* base =
        reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
    uint8_t* barriers = base + Tile::kStages * Tile::kStageBytes + Tile::kStagingBytes;
    stages = shared_address(base);
    staging = stages + Tile::kStages * Tile::kStageBytes;
    full = shared_address(barriers);
    empty = full + 8 * Tile::kStages;
    progress = empty + 8 * Tile::kStages;
    row_start = reinterpret_cast<int*>(barriers + 16 * Tile::kStages + 8);
    order = reinterpret_cast<uint16_t*>(row_start + num_groups + 1);
    costs = reinterpret_cast<int*>(base + Tile::kStages * Tile::kStageBytes);
  }

  // All threads call.
  __device__ __forceinline__ void order_groups(const RowOffsets& offsets, int num_groups) const {
    for (int g = threadIdx.x; g <= num_groups; g += kGemmThreads) row_start[g] = offsets[g];
    __syncthreads();
    for (int g = threadIdx.x; g < num_groups; g += kGemmThreads) {
      costs[g] = row_start[g + 1] - row_start[g];
    }
    __syncthreads();
    // Accumulating is bound by the bytes of c: costly and cheap groups side by side share them
    // better than in order.
    sort_groups<!Tile::kAccumulate>(costs, order, num_groups);
  }
};

// One tile of one group's result.
struct WgradItem {
  int group, first_row, first_col, first_token, num_tokens;
};

// The items of a cluster: every step-th, in the order of rows, columns and groups. A number of
// three digits that is added to needs no division.
template <class Tile>
class WgradItems {
  int num_groups_, row_tiles_, col_tiles_;  // row tiles of a whole cluster
  int row_, col_, slot_, row_step_, col_step_, slot_step_;

 public:
  __device__ __forceinline__ explicit WgradItems(const WgradArgs& args)
      : num_groups_(args.num_groups) {
    constexpr int kClusterRows = Tile::kRows * Tile::kCluster;
    row_tiles_ = (args.num_rows + kClusterRows - 1) / kClusterRows;
    col_tiles_ = (args.num_cols + Tile::kCols - 1) / Tile::kCols;
    const int first = blockIdx.x / Tile::kCluster, step = gridDim.x / Tile::kCluster;
    row_ = first % row_tiles_;
    col_ = first / row_tiles_ % col_tiles_;
    slot_ = first / row_tiles_ / col_tiles_;
    row_step_ = step % row_tiles_;
    col_step_ = step / row_tiles_ % col_tiles_;
    slot_step_ = step / row_tiles_ / col_tiles_;
  }

  __device__ __forceinline__ bool left() const { return slot_ < num_groups_; }
  __device__ __forceinline__ void advance() {
    row_ += row_step_;
    const int col_carry = row_ >= row_tiles_;
    if (col_carry) row_ -= row_tiles_;
    col_ += col_step_ + col_carry;
    const int slot_carry = col_ >= col_tiles_;
    if (slot_carry) col_ -= col_tiles_;
    slot_ += slot_step_ + slot_carry;
  }

  __device__ __forceinline__ WgradItem item(const WgradShared<Tile>& shared, int rank) const {
    const int group = warp_uniform(shared.order[slot_]);
    const int begin = warp_uniform(shared.row_start[group]);
    const int end = warp_uniform(shared.row_start[group + 1]);
    return {group, (row_ * Tile::kCluster + rank) * Tile::kRows, col_ * Tile::kCols, begin,
            end - begin};
  }
};

// One warp calls: copies issued by one lane of a converged warp take a few instructions, by a
// thread on its own a hundred cycles each.
template <class Tile>
SM90_FN void copy_operands(const WgradMaps& maps, const WgradArgs& args,
                           const WgradShared<Tile>& shared) {
  constexpr int kShare = Tile::kCols / Tile::kCluster;  // of b, copied to the whole cluster
  const int rank = cluster_rank<Tile::kCluster>();
  StageCursor<Tile::kStages> cursor(1);
  for (WgradItems<Tile> items(args); items.left(); items.advance()) {
    const WgradItem item = items.item(shared, rank);
    for (int k = 0; k < item.num_tokens; k += Tile::kDepth, cursor.advance()) {
      const uint32_t full = shared.full + 8 * cursor.stage;
      const uint32_t a = shared.stages + cursor.stage * Tile::kStageBytes;
      const uint32_t b = a + Tile::kABytes + rank * (kShare / 64) * Tile::kBlockBytes;
      const int token = item.first_token + k, first_col = item.first_col + rank * kShare;
      barrier_wait(shared.empty + 8 * cursor.stage, cursor.parity);
      if (elect_lane()) {
        barrier_expect(full, Tile::kStageBytes);
        if constexpr (Tile::kTokenMajor) {
#pragma unroll
          for (int n = 0; n < Tile::kRows / 64; ++n) {
            tma_load(a + n * Tile::kBlockBytes, &maps.a, item.first_row + n * 64, token, full);
          }
#pragma unroll
          for (int n = 0; n < kShare / 64; ++n) {
            tma_load_all<Tile::kCluster>(b + n * Tile::kBlockBytes, &maps.b, first_col + n * 64,
                                         token, full);
          }
        } else {
          tma_load(a, &maps.a, token, item.first_row, full);
          tma_load_all<Tile::kCluster>(b, &maps.b, token, first_col, full);
        }
      }
      __syncwarp();
    }
  }
}

#endif

}  // namespace megatron_nvfp4::cuda
