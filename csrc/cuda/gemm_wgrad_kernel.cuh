// Grouped BF16 weight gradient of Hopper: c_g = a_g^T b_g, or c_g += it, over the rows of a group.
//
// Rows of c lie on the M side of the tensor core's instruction: two warpgroups hold 64 rows each of
// a tile of 128x256. A group of 256 tokens is soon multiplied, so what counts is the way out:
// through shared memory, each warp its own 16 rows, so that every access to c is of whole lines,
// and of one warpgroup while the other multiplies. What c held is loaded ahead into a window of
// registers, from before the tile runs.
#pragma once

#include <cstdint>

#include "gemm_wgrad_pipeline.cuh"
#include "wgmma.cuh"

namespace megatron_nvfp4::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

SM90_FN void store_volatile(uint32_t address, int value) {
  asm volatile("st.volatile.shared.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
SM90_FN int load_volatile(uint32_t address) {
  int value;
  asm volatile("ld.volatile.shared.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

template <class Tile>
struct WgradMultiplier {
  static constexpr int kValues = Tile::kCols / 2;
  using Mma = Wgmma<__nv_bfloat16, Tile::kCols>;
  const WgradShared<Tile>& shared;
  const int wg, lane, warp;

  __device__ __forceinline__ WgradMultiplier(const WgradShared<Tile>& s, int group_of_warps)
      : shared(s),
        wg(group_of_warps),
        lane(threadIdx.x % 32),
        warp(warp_uniform(threadIdx.x / 32 % 4)) {}

  // Zeroes the rows of the next group, up to a multiple of 16: 0 times an Inf is a NaN. Both
  // warpgroups write the same zeros to b, whoever comes first.
  __device__ __forceinline__ void clear_rest(uint32_t stage, int num_tokens) const {
    const int first = num_tokens * 8, last = (num_tokens + 15) / 16 * 16 * 8;  // 16-byte units
    constexpr int kBoxes = 1 + Tile::kCols / 64;
    const uint32_t a = stage + wg * Tile::kBlockBytes, b = stage + Tile::kABytes;
    for (int i = first + threadIdx.x % 128; i < last; i += 128) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const uint32_t address = (box == 0 ? a : b + (box - 1) * Tile::kBlockBytes) + i * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
      }
    }
    fence_async_proxy();
    named_barrier_sync(1 + wg, 128);
  }

  // The first kSteps times 16 tokens of a stage.
  template <int kSteps>
  __device__ __forceinline__ void multiply_stage(float (&acc)[kValues], int stage_index,
                                                 bool first) const {
    constexpr int kStep = Tile::kTokenMajor ? 128 : 2;
    const uint32_t stage = shared.stages + stage_index * Tile::kStageBytes;
    const uint32_t a_address = stage + wg * Tile::kBlockBytes, b_address = stage + Tile::kABytes;
    const uint64_t a = Tile::kTokenMajor ? descriptor_mn_major(a_address, Tile::kBlockBytes)
                                         : descriptor_k_major(a_address);
    const uint64_t b = Tile::kTokenMajor ? descriptor_mn_major(b_address, Tile::kBlockBytes)
                                         : descriptor_k_major(b_address);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Mma::template ss<Tile::kTokenMajor, Tile::kTokenMajor>(acc, a + kStep * step,
                                                             b + kStep * step, step > 0 || !first);
    }
    wgmma_commit();
  }

  // As multiply_stage, for the steps that num_tokens < kDepth fill.
  template <int kSteps = 1>
  __device__ __forceinline__ void multiply_rest(float (&acc)[kValues], int stage_index, bool first,
                                                int num_tokens) const {
    if constexpr (kSteps < Tile::kDepth / 16) {
      if (num_tokens > kSteps * 16) {
        multiply_rest<kSteps + 1>(acc, stage_index, first, num_tokens);
        return;
      }
    }
    multiply_stage<kSteps>(acc, stage_index, first);
  }

  __device__ __forceinline__ void release(int stage) const {
    release_stage<Tile::kCluster>(shared.empty + 8 * stage, lane);
  }

  // Before a tile. `position` counts the stages of the block so far; the first warpgroup needs none
  // that the second has yet to free, since the ring holds more than kLag.
  __device__ __forceinline__ void keep_behind(int position, int num_stages) const {
    static_assert(Tile::kLag < Tile::kStages, "the first warpgroup would wait for the second");
    if constexpr (Tile::kLag > 0) {
      if (wg == 0) return;
      const int target = position + min(Tile::kLag, num_stages);
      while (load_volatile(shared.progress) - target < 0) __nanosleep(20);
    }
  }
  __device__ __forceinline__ void count_stage(int& position) const {
    if constexpr (Tile::kLag > 0) {
      ++position;
      if (threadIdx.x == 0) store_volatile(shared.progress, position);
    }
  }

  __device__ __forceinline__ void multiply(float (&acc)[kValues], int num_tokens,
                                           StageCursor<Tile::kStages>& cursor,
                                           int& position) const {
    int previous = -1;
    keep_behind(position, (num_tokens + Tile::kDepth - 1) / Tile::kDepth);
#pragma unroll 1
    for (int k = 0; k < num_tokens / Tile::kDepth; ++k) {
      barrier_wait(shared.full + 8 * cursor.stage, cursor.parity);
      multiply_stage<Tile::kDepth / 16>(acc, cursor.stage, k == 0);
      count_stage(position);
      wgmma_wait<1>();
      if (k > 0) release(previous);
      previous = cursor.stage;
      cursor.advance();
    }
    const int rest = num_tokens % Tile::kDepth;
    if (rest > 0) {
      barrier_wait(shared.full + 8 * cursor.stage, cursor.parity);
      if (Tile::kTokenMajor && rest % 16) {
        clear_rest(shared.stages + cursor.stage * Tile::kStageBytes, rest);
      }
      multiply_rest(acc, cursor.stage, num_tokens < Tile::kDepth, rest);
      count_stage(position);
    }
    wgmma_wait<0>();
    if (previous >= 0) release(previous);
    if (rest > 0) {
      release(cursor.stage);
      cursor.advance();
    }
    hold(acc);
  }

  __device__ __forceinline__ uint32_t warp_staging() const {
    return shared.staging + (wg * 4 + warp) * Tile::kWarpStaging;
  }
};

// The 16 rows of c of one warp, in units of 16 bytes a lane. Unit i is `i % kSteps` of the rows of
// chunk `i / kSteps` of the columns.
template <class Tile>
struct WgradRows {
  using Out = typename Tile::Out;
  static constexpr int kUnit = 16 / sizeof(Out);
  static constexpr int kChunk = Tile::kChunk;
  static constexpr int kLanes = kChunk / kUnit;  // of a row
  static constexpr int kRowsAtOnce = 32 / kLanes, kSteps = 16 / kRowsAtOnce;
  static constexpr int kUnits = Tile::kCols / kChunk * kSteps, kWindow = kUnits < 12 ? kUnits : 12;
  Out* first;
  int64_t stride;  // of c
  int rows_left, cols_left, row, col;
  uint4 old[kWindow];

  __device__ __forceinline__ WgradRows(const WgradArgs& args, const WgradItem& item, int wg,
                                       int warp, int lane)
      : row(lane / kLanes), col(lane % kLanes * kUnit) {
    const int first_row = item.first_row + wg * 64 + warp * 16;
    rows_left = args.num_rows - first_row - row;
    cols_left = args.num_cols - item.first_col - col;
    stride = args.num_cols;
    first =
        static_cast<Out*>(args.out[item.group]) + (first_row + row) * stride + item.first_col + col;
  }

  __device__ __forceinline__ bool inside(int i) const {
    return i % kSteps * kRowsAtOnce < rows_left && i / kSteps * kChunk < cols_left;
  }
  __device__ __forceinline__ uint4* address(int i) const {
    return reinterpret_cast<uint4*>(first + i % kSteps * kRowsAtOnce * stride +
                                    i / kSteps * kChunk);
  }
  __device__ __forceinline__ void load(int i) {
    old[i % kWindow] = inside(i) ? __ldcs(address(i)) : uint4{};
  }
  __device__ __forceinline__ void load_window() {
#pragma unroll
    for (int i = 0; i < kWindow; ++i) load(i);
  }

  __device__ __forceinline__ void write_zeros() const {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (inside(i)) __stcs(address(i), uint4{});
    }
  }

  // BF16, not accumulated: columns chunk * 64 and on, rounded, into a box of 16 rows of 128 bytes,
  // swizzled.
  __device__ __forceinline__ static void stage_chunk(const float (&acc)[Tile::kCols / 2],
                                                     uint32_t box, int chunk, int lane) {
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
      const float* v = &acc[chunk * 32 + i];
      const uint32_t r[4] = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                             pack_bf16(v[6], v[7])};
      store_matrices<false>(box + lane % 16 * 128 + ((i / 4 + lane / 16) ^ (lane % 8)) * 16, r);
    }
  }

  // Into evenly spaced results: the copies run on beside what follows.
  __device__ __forceinline__ static void write_mapped(const float (&acc)[Tile::kCols / 2],
                                                      uint32_t staging, const CUtensorMap* map,
                                                      int col, int row, int group, int lane) {
#pragma unroll
    for (int chunk = 0; chunk < Tile::kCols / kResultCols; ++chunk) {
      const uint32_t box = staging + chunk % Tile::kBoxes * Tile::kBoxBytes;
      if (chunk == 0) store_wait_read<0>();
      if (chunk >= Tile::kBoxes) store_wait_read<Tile::kBoxes - 1>();
      __syncwarp();
      stage_chunk(acc, box, chunk, lane);
      fence_async_proxy();
      __syncwarp();
      if (elect_lane()) {
        tma_store(map, box, col + chunk * kResultCols, row, group);
        store_commit();
      }
    }
  }

  __device__ __forceinline__ void write_scattered(const float (&acc)[Tile::kCols / 2],
                                                  uint32_t staging, int lane) const {
#pragma unroll
    for (int chunk = 0; chunk < Tile::kCols / kResultCols; ++chunk) {
      const uint32_t box = staging + chunk % Tile::kBoxes * Tile::kBoxBytes;
      __syncwarp();  // the reads of a chunk before
      stage_chunk(acc, box, chunk, lane);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int r = i * kRowsAtOnce + row;
        const uint4 unit = load_shared(box + r * 128 + ((col / kUnit) ^ (r % 8)) * 16);
        if (inside(chunk * kSteps + i)) __stcs(address(chunk * kSteps + i), unit);
      }
    }
  }

  __device__ __forceinline__ static float4 add(float4 y, uint4 old) {
    return {__fadd_rn(y.x, __uint_as_float(old.x)), __fadd_rn(y.y, __uint_as_float(old.y)),
            __fadd_rn(y.z, __uint_as_float(old.z)), __fadd_rn(y.w, __uint_as_float(old.w))};
  }
  // Four columns of unit i, from column `at` of it on.
  __device__ __forceinline__ float4 staged(uint32_t staging, int i, int at) const {
    const uint4 v =
        load_shared(staging + (i % kSteps * kRowsAtOnce + row) * Tile::kPitch + (col + at) * 4);
    return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
  }

  // FP32 into shared memory; what c held is added on the way out.
  __device__ __forceinline__ void write_summed(const float (&acc)[Tile::kCols / 2],
                                               uint32_t staging, int lane) {
    const uint32_t to = staging + lane / 4 * Tile::kPitch + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (i % kSteps == 0) {
        __syncwarp();
#pragma unroll
        for (int j = 0; j < kChunk / 4; ++j) {  // blocks of eight columns, halves of the rows
          const int a = i / kSteps * (kChunk / 2) + 2 * j;
          store_shared(to + j % 2 * 8 * Tile::kPitch + j / 2 * 32, {acc[a], acc[a + 1]});
        }
        __syncwarp();
      }
      float4 y = staged(staging, i, 0);
      const uint4 before = old[i % kWindow];
      uint4 unit;
      if constexpr (kUnit == 4) {
        if constexpr (Tile::kAccumulate) y = add(y, before);
        unit = {__float_as_uint(y.x), __float_as_uint(y.y), __float_as_uint(y.z),
                __float_as_uint(y.w)};
      } else {
        y = add(y,
                {before.x << 16, before.x & 0xFFFF0000u, before.y << 16, before.y & 0xFFFF0000u});
        const float4 z = add(staged(staging, i, 4), {before.z << 16, before.z & 0xFFFF0000u,
                                                     before.w << 16, before.w & 0xFFFF0000u});
        unit = {pack_bf16(y.x, y.y), pack_bf16(y.z, y.w), pack_bf16(z.x, z.y), pack_bf16(z.z, z.w)};
      }
      if (inside(i)) __stcs(address(i), unit);
      if (Tile::kAccumulate && i + kWindow < kUnits) load(i + kWindow);
    }
  }
};

template <int kValues>
SM90_FN void scale(const WgradArgs& args, int group, float (&acc)[kValues]) {
  if (!args.group_scale) return;
  const float s = args.group_scale[group * args.group_stride];
#pragma unroll
  for (int i = 0; i < kValues; ++i) acc[i] = __fmul_rn(acc[i], s);
}

template <class Tile>
SM90_FN void multiply_item(const WgradMaps& maps, const WgradArgs& args,
                           const WgradMultiplier<Tile>& multiplier,
                           float (&acc)[WgradMultiplier<Tile>::kValues], const WgradItem& item,
                           StageCursor<Tile::kStages>& cursor, int& position) {
  const int wg = multiplier.wg, warp = multiplier.warp, lane = multiplier.lane;
  if (item.num_tokens == 0) {
    if (!Tile::kAccumulate) WgradRows<Tile>(args, item, wg, warp, lane).write_zeros();
    return;
  }
  const uint32_t staging = multiplier.warp_staging();
  if constexpr (Tile::kStaged) {
    multiplier.multiply(acc, item.num_tokens, cursor, position);
    scale(args, item.group, acc);
    if (args.mapped) {
      const int group = args.reversed ? args.num_groups - 1 - item.group : item.group;
      WgradRows<Tile>::write_mapped(acc, staging, &maps.c, item.first_col,
                                    item.first_row + wg * 64 + warp * 16, group, lane);
    } else {
      WgradRows<Tile>(args, item, wg, warp, lane).write_scattered(acc, staging, lane);
    }
  } else {
    WgradRows<Tile> rows(args, item, wg, warp, lane);
    if constexpr (Tile::kAccumulate) rows.load_window();
    multiplier.multiply(acc, item.num_tokens, cursor, position);
    scale(args, item.group, acc);
    rows.write_summed(acc, staging, lane);
  }
}

#endif

template <class Tile>
__global__ void __launch_bounds__(kGemmThreads, 1)
    gemm_wgrad_kernel(const __grid_constant__ WgradMaps maps,
                      const __grid_constant__ WgradArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t raw[];
  WgradShared<Tile> shared(raw, args.num_groups);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kStages; ++i) {
      barrier_init(shared.full + 8 * i, 1);
      barrier_init(shared.empty + 8 * i, 4 * kMultipliers * Tile::kCluster);
    }
    store_volatile(shared.progress, 0);
    barrier_init_fence();
  }
  shared.order_groups(args.offsets, args.num_groups);
  __syncthreads();
  cluster_sync<Tile::kCluster>();
  const int warp = warp_uniform(threadIdx.x / 32);
  if (warp >= 4 * kMultipliers) {
    shrink_registers<40>();
    if (warp == 4 * kMultipliers) copy_operands<Tile>(maps, args, shared);
  } else {
    grow_registers<232>();
    StageCursor<Tile::kStages> cursor(0);
    const WgradMultiplier<Tile> multiplier(shared, warp / 4);
    // The first product of a tile replaces these. Undefined, they would be kept from the start of
    // the kernel on, where registers are few, and spill.
    float acc[WgradMultiplier<Tile>::kValues];
#pragma unroll
    for (int i = 0; i < WgradMultiplier<Tile>::kValues; ++i) acc[i] = 0.0f;
    const int rank = cluster_rank<Tile::kCluster>();
    int position = 0;
    for (WgradItems<Tile> items(args); items.left(); items.advance()) {
      multiply_item<Tile>(maps, args, multiplier, acc, items.item(shared, rank), cursor, position);
    }
    store_wait<0>();
  }
  cluster_sync<Tile::kCluster>();  // nobody leaves while others copy into its memory
#endif
}

}  // namespace megatron_nvfp4::cuda
