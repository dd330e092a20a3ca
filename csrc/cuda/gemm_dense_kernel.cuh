// Grouped BF16 GEMM of Hopper: y = x w_g^T or x w_g for the rows of each group.
//
// Features lie on the M side of the tensor core's instruction and tokens on its N side, so that a
// group costs multiples of 16 rows. A block is persistent: one warp copies by TMA into a ring of
// stages, two warpgroups multiply 64 features each by all tokens of the tile.
#pragma once

#include <cstdint>

#include "gemm_dense.cuh"
#include "gemm_dense_pipeline.cuh"
#include "wgmma.cuh"

namespace megatron_nvfp4::cuda {

constexpr int kTokenBoxes = 6;  // tensor maps of x for 8, 16, ... 256 rows

struct DenseMaps {
  CUtensorMap x[kTokenBoxes];
  CUtensorMap weights;
};

// kTransposed: weights lie (K, N), features contiguous. The blocks of a cluster have neighbouring
// features and the same tokens.
template <int kTokens_, int kStages_, int kCluster_, bool kTransposed_>
struct DenseTile {
  static constexpr int kTokens = kTokens_, kStages = kStages_, kCluster = kCluster_;
  static constexpr bool kTransposed = kTransposed_;
  static constexpr int kMinTokens = kTokens > 128 ? 48 : 16;  // smallest tile compiled
  static_assert(16 % (8 * kCluster) == 0, "a block copies whole groups of 8 rows");
  static constexpr int kFeatures = 64 * kMultipliers;
  static constexpr int kTokenBytes = kTokens * 128, kWeightBytes = kFeatures * 128;
  static constexpr int kStageBytes = kTokenBytes + kWeightBytes;
  // Two buffers a warpgroup; 16 bytes more a row spread the rows over the banks.
  static constexpr int kChunk = 32, kPitch = 128 + 16;
  static constexpr int kStaging = 2 * kChunk * kPitch;
  static constexpr int kFixedBytes = kStages * kStageBytes + kMultipliers * kStaging +
                                     kMultipliers * kTokens * 4 + 2 * kStages * 8;
  static constexpr int shared_bytes(int num_groups) {
    return 1024 + kFixedBytes + 3 * (num_groups + 1) * 4;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <class Tile>
struct DenseShared {
  uint8_t* stages;
  uint8_t* staging;
  float* token_scales;
  uint32_t full, empty;  // barriers of the stages
  int* order;            // groups in the order of their items
  int* tile_start;       // of the groups in that order, in tiles of tokens
  int* row_start;        // of every group
  bool halved;           // DenseArgs

  __device__ __forceinline__ DenseShared(uint8_t* raw, const DenseArgs& args)
      : halved(args.halved) {
    const int num_groups = args.num_groups;
    stages =
        reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
    staging = stages + Tile::kStages * Tile::kStageBytes;
    token_scales = reinterpret_cast<float*>(staging + kMultipliers * Tile::kStaging);
    uint64_t* barriers = reinterpret_cast<uint64_t*>(token_scales + kMultipliers * Tile::kTokens);
    full = shared_address(barriers);
    empty = shared_address(barriers + Tile::kStages);
    order = reinterpret_cast<int*>(barriers + 2 * Tile::kStages);
    tile_start = order + num_groups + 1;
    row_start = tile_start + num_groups + 1;
  }

  __device__ __forceinline__ int num_rows(int group) const {
    return row_start[group + 1] - row_start[group];
  }
  // Tiles of tokens of a group, equal in size, and that size, a multiple of 16.
  __device__ __forceinline__ int num_tiles(int num_rows) const {
    constexpr int kHalf = Tile::kTokens / 2;
    const int halves = (num_rows + kHalf - 1) / kHalf;
    return halved ? halves : (halves + 1) / 2;
  }
  __device__ __forceinline__ int tile_size(int num_rows) const {
    constexpr int kUnit = 16;
    const int tiles = max(num_tiles(num_rows), 1);
    return ((num_rows + tiles - 1) / tiles + kUnit - 1) / kUnit * kUnit;
  }

  // All threads call.
  __device__ __forceinline__ void order_groups(const RowOffsets& offsets, int num_groups) {
    for (int g = threadIdx.x; g <= num_groups; g += kGemmThreads) row_start[g] = offsets[g];
    __syncthreads();
    for (int g = threadIdx.x; g < num_groups; g += kGemmThreads) {
      tile_start[g] = tile_size(num_rows(g));
    }
    __syncthreads();
    sort_groups<true>(tile_start, order, num_groups);
    __syncthreads();
    if (threadIdx.x < 32) count_tiles(num_groups);
  }

  // One warp calls.
  __device__ __forceinline__ void count_tiles(int num_groups) {
    const int lane = threadIdx.x;
    int base = 0;
    for (int first = 0; first < num_groups; first += 32) {
      const int i = first + lane;
      const int tiles = i < num_groups ? num_tiles(num_rows(order[i])) : 0;
      int sum = tiles;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        if (lane >= step) sum += other;
      }
      if (i < num_groups) tile_start[i] = base + sum - tiles;
      base += __shfl_sync(0xFFFFFFFFu, sum, 31);
    }
    if (lane == 0) tile_start[num_groups] = base;
  }
};

// One tile of one group. `padded` counts its tokens up to a compiled size.
struct DenseItem {
  int group, first_token, num_tokens, padded, first_feature;

  template <class Tile>
  __device__ __forceinline__ static DenseItem find(const DenseShared<Tile>& shared, int item,
                                                   int num_groups, int feature_tiles) {
    int low = 0, high = num_groups;  // the last group that begins at or before the item
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (shared.tile_start[middle] * feature_tiles <= item ? low : high) = middle;
    }
    const int group = shared.order[low], num_rows = shared.num_rows(group);
    const int tiles = shared.tile_start[low + 1] - shared.tile_start[low];
    const int rest = item - shared.tile_start[low] * feature_tiles;
    // The token tiles of one weight tile run side by side.
    constexpr int kUnit = 16;
    const int size = shared.tile_size(num_rows);
    const int first = rest % tiles * size;
    const int num_tokens = min(size, num_rows - first);
    const int padded = (num_tokens + kUnit - 1) / kUnit * 16;
    return {group, shared.row_start[group] + first, num_tokens, max(padded, Tile::kMinTokens),
            rest / tiles};
  }

  // The same, in registers that a warp shares.
  __device__ __forceinline__ DenseItem uniform() const {
    return {warp_uniform(group), warp_uniform(first_token), warp_uniform(num_tokens),
            warp_uniform(padded), warp_uniform(first_feature)};
  }
};

// One warp calls: copies issued by one lane of a converged warp take a few instructions, by a
// thread on its own a hundred cycles each.
template <class Tile>
SM90_FN void copy_tiles(const DenseMaps& maps, const DenseArgs& args,
                        const DenseShared<Tile>& shared, int num_items, int feature_tiles) {
  StageCursor<Tile::kStages> cursor(1);
  const int rank = cluster_rank<Tile::kCluster>();
  for (int i = blockIdx.x / Tile::kCluster; i < num_items; i += gridDim.x / Tile::kCluster) {
    DenseItem item = DenseItem::find(shared, i, args.num_groups, feature_tiles).uniform();
    item.first_feature = (item.first_feature * Tile::kCluster + rank) * Tile::kFeatures;
    const int num_rows = item.padded, share = num_rows / Tile::kCluster;
    const int weight = args.reversed ? args.num_groups - 1 - item.group : item.group;
    for (int k = 0; k < args.depth; k += kStageDepth, cursor.advance()) {
      const uint32_t full = shared.full + 8 * cursor.stage;
      const uint32_t tokens = shared_address(shared.stages + cursor.stage * Tile::kStageBytes);
      const uint32_t weights = tokens + Tile::kTokenBytes;
      barrier_wait(shared.empty + 8 * cursor.stage, cursor.parity);
      if (elect_lane()) {
        barrier_expect(full, num_rows * 128 + Tile::kWeightBytes);
        if constexpr (Tile::kTransposed) {
#pragma unroll
          for (int n = 0; n < Tile::kFeatures; n += 64) {
            tma_load(weights + n * 128, &maps.weights, item.first_feature + n, k, weight, full);
          }
        } else {
          tma_load(weights, &maps.weights, k, item.first_feature, weight, full);
        }
        int row = rank * share;
        const int end = row + share;
#pragma unroll
        for (int box = kTokenBoxes - 1; box >= 0; --box) {
          if ((8 << box) <= Tile::kTokens / Tile::kCluster && end - row >= (8 << box)) {
            tma_load_all<Tile::kCluster>(tokens + row * 128, &maps.x[box], k,
                                         item.first_token + row, full);
            row += 8 << box;
          }
        }
      }
      __syncwarp();
    }
  }
}

// Scales and bias of the features of a thread: rows lane / 4 and lane / 4 + 8 of its warp.
struct FeatureScales {
  float scale[2], bias[2];
};

template <class Tile, int kTokens>
struct DenseMultiplier {
  const DenseArgs& args;
  const DenseShared<Tile>& shared;
  const int group_of_warps, lane, warp;

  __device__ __forceinline__ DenseMultiplier(const DenseArgs& a, const DenseShared<Tile>& s, int wg)
      : args(a),
        shared(s),
        group_of_warps(wg),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32 % 4) {}

  __device__ __forceinline__ void sync() const { named_barrier_sync(1 + group_of_warps, 128); }

  __device__ __forceinline__ void multiply(float (&acc)[kTokens / 2],
                                           StageCursor<Tile::kStages>& cursor) const {
    using Mma = Wgmma<__nv_bfloat16, kTokens>;
    constexpr int kStep = Tile::kTransposed ? 128 : 2;
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) acc[i] = 0.0f;
    const uint32_t stages = shared_address(shared.stages);
    const uint32_t weights0 = stages + Tile::kTokenBytes + group_of_warps * 8192;
    uint32_t previous = 0;
#pragma unroll 1
    for (int k = 0; k < args.depth; k += kStageDepth) {
      const uint32_t offset = cursor.stage * Tile::kStageBytes;
      const uint32_t weights = weights0 + offset;
      const uint64_t a =
          Tile::kTransposed ? descriptor_mn_major(weights, 8192) : descriptor_k_major(weights);
      const uint64_t b = descriptor_k_major(stages + offset);
      barrier_wait(shared.full + 8 * cursor.stage, cursor.parity);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kStageDepth / 16; ++step) {
        Mma::template ss<Tile::kTransposed>(acc, a + kStep * step, b + 2 * step);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (previous) release_stage<Tile::kCluster>(previous, lane);
      previous = shared.empty + 8 * cursor.stage;
      cursor.advance();
    }
    wgmma_wait<0>();
    hold(acc);
    release_stage<Tile::kCluster>(previous, lane);
  }

  // The scale of every token, and what the features of this thread bring.
  __device__ __forceinline__ FeatureScales load_scales(const DenseItem& item,
                                                       float* token_scales) const {
    const float group = args.group_scale && !args.col_scale
                            ? args.group_scale[item.group * args.group_stride]
                            : 1.0f;
    for (int t = threadIdx.x % 128; t < item.num_tokens; t += 128) {
      const int64_t row = static_cast<int64_t>(item.first_token + t) * args.row_stride;
      token_scales[t] = args.row_scale ? __fmul_rn(args.row_scale[row], group) : group;
    }
    FeatureScales features;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int feature = item.first_feature + warp * 16 + lane / 4 + i * 8;
      const int64_t at = static_cast<int64_t>(item.group) * args.num_cols + feature;
      const bool inside = feature < args.num_cols;
      features.scale[i] = args.col_scale && inside ? args.col_scale[at] : 1.0f;
      features.bias[i] = args.bias && inside ? args.bias[at] : 0.0f;
    }
    return features;
  }

  // acc[m][4j + 2h + c]: feature half h, token 8j + 2(lane % 4) + c. A missing scale is 1, and
  // multiplying by 1 changes no bit.
  template <bool kScaled>
  __device__ __forceinline__ float value(float acc, float token_scale, float feature_scale,
                                         float bias) const {
    if constexpr (!kScaled) return acc;
    const float y = __fmul_rn(acc, __fmul_rn(token_scale, feature_scale));
    return args.bias ? __fadd_rn(y, bias) : y;
  }

  // Through shared memory, so that whole rows of features leave. A bulk copy for each row would
  // take 90 cycles: a warp issues them one lane at a time.
  template <bool kScaled>
  __device__ __forceinline__ void write_bf16(const float (&acc)[kTokens / 2], const DenseItem& item,
                                             const float* token_scales,
                                             const FeatureScales& features) const {
    constexpr int kUnits = 8;  // of 16 bytes, a row
    const int unit = threadIdx.x % kUnits, row = threadIdx.x % 128 / kUnits;
    const uint32_t staging = shared_address(shared.staging + group_of_warps * Tile::kStaging);
    const bool inside = item.first_feature + unit * 8 < args.num_cols;
    __nv_bfloat16* out = static_cast<__nv_bfloat16*>(args.out) + item.first_feature + unit * 8 +
                         static_cast<int64_t>(item.first_token) * args.num_cols;
#pragma unroll
    for (int chunk = 0; chunk < kTokens; chunk += Tile::kChunk) {
      // Two buffers: whoever writes here has passed the barrier behind the reads of last time.
      const uint32_t buffer = staging + chunk / Tile::kChunk % 2 * Tile::kChunk * Tile::kPitch;
#pragma unroll
      for (int t = chunk; t < chunk + Tile::kChunk && t < kTokens; t += 16) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // halves of the features, then of the tokens
          const float* a = &acc[t / 2 + i / 2 * 4 + i % 2 * 2];
          float2 s = {1.0f, 1.0f};
          if constexpr (kScaled) {
            s = *reinterpret_cast<const float2*>(token_scales + t + i / 2 * 8 + lane % 4 * 2);
          }
          const float feature = features.scale[i % 2], bias = features.bias[i % 2];
          r[i] = pack_bf16(value<kScaled>(a[0], s.x, feature, bias),
                           value<kScaled>(a[1], s.y, feature, bias));
        }
        const int token = t - chunk + lane % 8 + lane / 16 * 8;
        const int feature = warp * 16 + lane / 8 % 2 * 8;
        store_matrices<true>(buffer + token * Tile::kPitch + feature * 2, r);
      }
      sync();
#pragma unroll
      for (int t = 0; t < Tile::kChunk && chunk + t < kTokens; t += 128 / kUnits) {
        const int token = chunk + t + row;
        if (inside && token < item.num_tokens) {
          *reinterpret_cast<uint4*>(out + static_cast<int64_t>(token) * args.num_cols) =
              load_shared(buffer + (t + row) * Tile::kPitch + unit * 16);
        }
      }
    }
    sync();  // the next tile begins with the first buffer
  }

  // Straight from the registers: eight features of a token fill a sector.
  __device__ __forceinline__ void write_fp32(const float (&acc)[kTokens / 2], const DenseItem& item,
                                             const float* token_scales,
                                             const FeatureScales& features) const {
    float* out = static_cast<float*>(args.out);
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) {
      const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const int half = i / 2 % 2, feature = item.first_feature + warp * 16 + lane / 4 + half * 8;
      if (token < item.num_tokens && feature < args.num_cols) {
        out[static_cast<int64_t>(item.first_token + token) * args.num_cols + feature] =
            value<true>(acc[i], token_scales[token], features.scale[half], features.bias[half]);
      }
    }
  }

  __device__ __forceinline__ void run(const DenseItem& item,
                                      StageCursor<Tile::kStages>& cursor) const {
    float acc[kTokens / 2];
    multiply(acc, cursor);
    float* token_scales = shared.token_scales + group_of_warps * Tile::kTokens;
    const bool scaled = args.row_scale || args.group_scale || args.col_scale || args.bias;
    FeatureScales features = {};
    if (scaled || args.fp32) {
      features = load_scales(item, token_scales);
      sync();
      if (args.fp32) {
        write_fp32(acc, item, token_scales, features);
      } else {
        write_bf16<true>(acc, item, token_scales, features);
      }
      sync();  // before the next tile's scales
    } else {
      write_bf16<false>(acc, item, token_scales, features);
    }
  }
};

// The multiplier compiled for the tile's number of tokens.
template <class Tile, int kTokens = Tile::kMinTokens>
SM90_FN void multiply_tile(const DenseArgs& args, const DenseShared<Tile>& shared, int wg,
                           const DenseItem& item, int num_rows,
                           StageCursor<Tile::kStages>& cursor) {
  if (num_rows <= kTokens || kTokens >= Tile::kTokens) {
    DenseMultiplier<Tile, kTokens>(args, shared, wg).run(item, cursor);
  } else if constexpr (kTokens < Tile::kTokens) {
    multiply_tile<Tile, kTokens + 16>(args, shared, wg, item, num_rows, cursor);
  }
}

#endif

template <class Tile>
__global__ void __launch_bounds__(kGemmThreads, 1)
    gemm_dense_kernel(const __grid_constant__ DenseMaps maps,
                      const __grid_constant__ DenseArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t raw[];
  DenseShared<Tile> shared(raw, args);
  if (threadIdx.x == 32) {
    for (int i = 0; i < Tile::kStages; ++i) {
      barrier_init(shared.full + 8 * i, 1);
      barrier_init(shared.empty + 8 * i, 4 * kMultipliers * Tile::kCluster);
    }
    barrier_init_fence();
  }
  shared.order_groups(args.offsets, args.num_groups);
  __syncthreads();
  cluster_sync<Tile::kCluster>();
  constexpr int kClusterFeatures = Tile::kFeatures * Tile::kCluster;
  const int feature_tiles = (args.num_cols + kClusterFeatures - 1) / kClusterFeatures;
  const int num_items = warp_uniform(shared.tile_start[args.num_groups]) * feature_tiles;
  const int warp = warp_uniform(threadIdx.x / 32);
  if (warp >= 4 * kMultipliers) {
    shrink_registers<40>();
    if (warp == 4 * kMultipliers) {
      copy_tiles<Tile>(maps, args, shared, num_items, feature_tiles);
    }
  } else {
    grow_registers<232>();
    StageCursor<Tile::kStages> cursor(0);
    const int wg = warp / 4;
    const int rank = cluster_rank<Tile::kCluster>();
    for (int i = blockIdx.x / Tile::kCluster; i < num_items; i += gridDim.x / Tile::kCluster) {
      DenseItem item = DenseItem::find(shared, i, args.num_groups, feature_tiles).uniform();
      item.first_feature = (item.first_feature * Tile::kCluster + rank) * Tile::kFeatures + wg * 64;
      multiply_tile<Tile>(args, shared, wg, item, item.padded, cursor);
    }
  }
  cluster_sync<Tile::kCluster>();  // nobody leaves while others copy into its memory
#endif
}

}  // namespace megatron_nvfp4::cuda
