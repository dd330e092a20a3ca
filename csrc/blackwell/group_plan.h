// Where each row group of a grouped block-scaled GEMM lies. No CUTLASS here, so that the arithmetic
// runs and is tested on any GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../numerics.h"

namespace megatron_nvfp4::cuda {

// Scales lie in tiles of 128 rows and 4 blocks, 512 bytes each, the tiles of a row of tiles in
// sequence: quant/layout.py, swizzle_scales. Every group begins a tile.
constexpr int kScaleTileRows = 128;
constexpr int kScaleTileCols = 4;
constexpr int kScaleTileBytes = kScaleTileRows * kScaleTileCols;

NVFP4_FN constexpr int64_t num_row_tiles(int64_t num_rows) {
  return (num_rows + kScaleTileRows - 1) / kScaleTileRows;
}
NVFP4_FN constexpr int64_t num_col_tiles(int64_t num_k) {
  return (num_k / kBlock + kScaleTileCols - 1) / kScaleTileCols;
}

// Row tiles that suffice for any division of num_rows rows into num_groups groups: all the host
// knows. A group that is not empty wastes at most 127 rows.
NVFP4_FN int64_t max_row_tiles(int64_t num_rows, int64_t num_groups) {
  const int64_t num_used = num_groups < num_rows ? num_groups : num_rows;
  return (num_rows + (kScaleTileRows - 1) * num_used) / kScaleTileRows;
}

// Group g of A (M, K) times B_g: offsets in bytes, of row_scale, bias and the output in elements.
struct GroupPlan {
  int64_t num_rows, num_cols, num_k;      // the group's M, N, K
  int64_t a, b, a_scales, b_scales, out;  // from the beginning of each matrix
  int64_t row_scale, bias;
  int64_t a_row_tiles, b_row_tiles, col_tiles;  // of the scales
};
constexpr int kPlanFields = sizeof(GroupPlan) / sizeof(int64_t);

// first_tile: row tiles of the groups before.
NVFP4_FN GroupPlan plan_group(int64_t first_row, int64_t end_row, int64_t first_tile, int64_t group,
                              int64_t num_cols, int64_t num_k) {
  GroupPlan plan;
  plan.num_rows = end_row - first_row;
  plan.num_cols = num_cols;
  plan.num_k = num_k;
  plan.a_row_tiles = num_row_tiles(plan.num_rows);
  plan.b_row_tiles = num_row_tiles(num_cols);
  plan.col_tiles = num_col_tiles(num_k);
  plan.a = first_row * (num_k / 2);
  plan.b = group * num_cols * (num_k / 2);
  plan.a_scales = first_tile * plan.col_tiles * kScaleTileBytes;
  plan.b_scales = group * plan.b_row_tiles * plan.col_tiles * kScaleTileBytes;
  plan.out = first_row * num_cols;
  plan.row_scale = first_row;
  plan.bias = group * num_cols;
  return plan;
}

#if defined(__CUDACC__)
constexpr int kPlanThreads = 256;

// One CTA of kPlanThreads threads calls visit(g, first_row, end_row, first_tile) for every group.
// Returns the row tiles of all groups.
template <class Visit>
__device__ int64_t for_each_group(const int64_t* offsets, int num_groups, Visit visit) {
  __shared__ int64_t warp_sums[kPlanThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t before = 0;  // tiles of the rounds before
  for (int base = 0; base < num_groups; base += kPlanThreads) {
    const int group = base + threadIdx.x;
    const bool inside = group < num_groups;
    const int64_t first_row = inside ? offsets[group] : 0;
    const int64_t end_row = inside ? offsets[group + 1] : 0;
    const int64_t num_tiles = num_row_tiles(end_row - first_row);
    int64_t sum = num_tiles;  // inclusive, over the warp
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int64_t other = __shfl_up_sync(0xFFFFFFFFu, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int64_t earlier = before;
    for (int w = 0; w < kPlanThreads / 32; ++w) {
      if (w < warp) earlier += warp_sums[w];
      before += warp_sums[w];
    }
    if (inside) visit(group, first_row, end_row, earlier + sum - num_tiles);
    __syncthreads();  // warp_sums is written again
  }
  return before;
}
#endif

}  // namespace megatron_nvfp4::cuda
