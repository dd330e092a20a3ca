// Grouped BF16 weight gradient of Hopper: c_g = a_g^T b_g, or c_g += it, over the rows of a group.
//
// Rows of c lie on the M side of the tensor core's instruction: two warpgroups hold 64 rows each of
// a tile of 128x256. A
// group of 256 tokens is four stages deep, so what counts is the way out: through shared memory,
// each warp its own 16 rows, so that every access to c is of whole lines. What c held is loaded
// ahead into a window of registers, from before the tile runs.
#pragma once

#include <cstdint>

#include "gemm_dense_pipeline.cuh"
#include "gemm_wgrad.cuh"
#include "wgmma.cuh"

namespace megatron_nvfp4::cuda {

constexpr int kResultRows = 16, kResultCols = 64;  // box of a warp's rows of c

struct WgradMaps {
  CUtensorMap a, b;
  CUtensorMap c;  // of all groups' results, where they lie evenly spaced
};

// kTokenMajor: a and b lie (M, N) and (M, K); otherwise (N, M) and (K, M).
template <class Out_, bool kAccumulate_, bool kTokenMajor_>
struct WgradTile {
  using Out = Out_;
  static constexpr bool kAccumulate = kAccumulate_, kTokenMajor = kTokenMajor_;
  // BF16 as it leaves, a whole tile; otherwise FP32, 64 columns at a time.
  static constexpr bool kStaged = sizeof(Out) == 2 && !kAccumulate;
  static constexpr int kRows = 64 * kMultipliers, kCols = 256, kStages = 3;
  static constexpr int kStageBytes = (kRows + kCols) * 128;
  static constexpr int kChunk = 64;
  static constexpr int kPitch = kStaged ? 2 * kCols + 16 : 4 * kChunk + 32;  // spreads the banks
  static constexpr int kStagingBytes = kRows * kPitch;
  static constexpr int shared_bytes(int num_groups) {
    return 1024 + kStages * kStageBytes + kStagingBytes + 2 * kStages * 8 +
           3 * (num_groups + 1) * 4;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <class Tile>
struct WgradShared {
  uint32_t stages, staging, full, empty;
  int* row_start;
  int* order;  // groups in the order of their items
  int* num_tokens;

  __device__ __forceinline__ WgradShared(uint8_t* raw, int num_groups) {
    uint8_t* base =
        reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
    uint8_t* barriers = base + Tile::kStages * Tile::kStageBytes + Tile::kStagingBytes;
    stages = shared_address(base);
    staging = stages + Tile::kStages * Tile::kStageBytes;
    full = shared_address(barriers);
    empty = full + 8 * Tile::kStages;
    row_start = reinterpret_cast<int*>(barriers + 16 * Tile::kStages);
    order = row_start + num_groups + 1;
    num_tokens = order + num_groups + 1;
  }

  // All threads call.
  __device__ __forceinline__ void order_groups(const RowOffsets& offsets, int num_groups) const {
    for (int g = threadIdx.x; g <= num_groups; g += kGemmThreads) row_start[g] = offsets[g];
    __syncthreads();
    for (int g = threadIdx.x; g < num_groups; g += kGemmThreads) {
      num_tokens[g] = row_start[g + 1] - row_start[g];
    }
    __syncthreads();
    // Accumulating is bound by the bytes of c: costly and cheap groups side by side share them
    // better than in order.
    sort_groups<!Tile::kAccumulate>(num_tokens, order, num_groups);
  }
};

// One tile of one group's result.
struct WgradItem {
  int group, first_row, first_col, first_token, num_tokens;

  template <class Tile>
  __device__ __forceinline__ static WgradItem find(const WgradShared<Tile>& shared, int item,
                                                   int row_tiles, int col_tiles) {
    const int group = shared.order[item / (row_tiles * col_tiles)];
    const int rest = item % (row_tiles * col_tiles);
    const int begin = shared.row_start[group];
    return {group, rest % row_tiles * Tile::kRows, rest / row_tiles * Tile::kCols, begin,
            shared.num_tokens[group]};
  }
};

template <class Tile>
SM90_FN void copy_operands(const WgradMaps& maps, const WgradShared<Tile>& shared, int num_items,
                           int row_tiles, int col_tiles) {
  StageCursor<Tile::kStages> cursor(1);
  for (int i = blockIdx.x; i < num_items; i += gridDim.x) {
    const WgradItem item = WgradItem::find(shared, i, row_tiles, col_tiles);
    for (int k = 0; k < item.num_tokens; k += kStageDepth, cursor.advance()) {
      const uint32_t full = shared.full + 8 * cursor.stage;
      const uint32_t a = shared.stages + cursor.stage * Tile::kStageBytes;
      const uint32_t b = a + Tile::kRows * 128;
      const int token = item.first_token + k;
      barrier_wait(shared.empty + 8 * cursor.stage, cursor.parity);
      barrier_expect(full, Tile::kStageBytes);
      if constexpr (Tile::kTokenMajor) {
#pragma unroll
        for (int n = 0; n < Tile::kRows; n += 64) {
          tma_load(a + n * 128, &maps.a, item.first_row + n, token, full);
        }
#pragma unroll
        for (int n = 0; n < Tile::kCols; n += 64) {
          tma_load(b + n * 128, &maps.b, item.first_col + n, token, full);
        }
      } else {
        tma_load(a, &maps.a, token, item.first_row, full);
        tma_load(b, &maps.b, token, item.first_col, full);
      }
    }
  }
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
    const uint32_t a = stage + wg * 8192, b = stage + Tile::kRows * 128;
    for (int i = first + threadIdx.x % 128; i < last; i += 128) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const uint32_t address = (box == 0 ? a : b + (box - 1) * 8192) + i * 16;
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
    const uint32_t a_address = stage + wg * 8192, b_address = stage + Tile::kRows * 128;
    const uint64_t a =
        Tile::kTokenMajor ? descriptor_mn_major(a_address, 8192) : descriptor_k_major(a_address);
    const uint64_t b =
        Tile::kTokenMajor ? descriptor_mn_major(b_address, 8192) : descriptor_k_major(b_address);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Mma::template ss<Tile::kTokenMajor, Tile::kTokenMajor>(acc, a + kStep * step,
                                                             b + kStep * step, step > 0 || !first);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void release(int stage) const {
    release_stage<1>(shared.empty + 8 * stage, lane);
  }

  __device__ __forceinline__ void multiply(float (&acc)[kValues], int num_tokens,
                                           StageCursor<Tile::kStages>& cursor) const {
    int previous = -1;
#pragma unroll 1
    for (int k = 0; k < num_tokens / kStageDepth; ++k) {
      barrier_wait(shared.full + 8 * cursor.stage, cursor.parity);
      multiply_stage<4>(acc, cursor.stage, k == 0);
      wgmma_wait<1>();
      if (k > 0) release(previous);
      previous = cursor.stage;
      cursor.advance();
    }
    const int rest = num_tokens % kStageDepth;
    if (rest > 0) {
      const bool first = num_tokens < kStageDepth;
      barrier_wait(shared.full + 8 * cursor.stage, cursor.parity);
      if (Tile::kTokenMajor && rest % 16) {
        clear_rest(shared.stages + cursor.stage * Tile::kStageBytes, rest);
      }
      if (rest > 48) {
        multiply_stage<4>(acc, cursor.stage, first);
      } else if (rest > 32) {
        multiply_stage<3>(acc, cursor.stage, first);
      } else if (rest > 16) {
        multiply_stage<2>(acc, cursor.stage, first);
      } else {
        multiply_stage<1>(acc, cursor.stage, first);
      }
    }
    wgmma_wait<0>();
    hold(acc);
    if (previous >= 0) release(previous);
    if (rest > 0) {
      release(cursor.stage);
      cursor.advance();
    }
    if (num_tokens == 0) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) acc[i] = 0.0f;
    }
  }

  __device__ __forceinline__ uint32_t warp_staging() const {
    return shared.staging + (wg * 64 + warp * 16) * Tile::kPitch;
  }
};

// The 16 rows of c of one warp, in units of 16 bytes a lane. Unit i is `i % kSteps` of the rows of
// chunk `i / kSteps` of the columns.
template <class Tile>
struct WgradRows {
  using Out = typename Tile::Out;
  static constexpr int kUnit = 16 / sizeof(Out);
  static constexpr int kChunk = Tile::kStaged ? Tile::kCols : Tile::kChunk;
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

  // BF16, not accumulated, into evenly spaced results: the copies run on beside the next tile.
  __device__ __forceinline__ static void write_mapped(const float (&acc)[Tile::kCols / 2],
                                                      uint32_t staging, const CUtensorMap* map,
                                                      int col, int row, int group, int lane) {
    if (lane == 0) store_wait_read<0>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Tile::kCols / 2; i += 8) {  // boxes of 16 rows of 128 bytes, swizzled
      const uint32_t r[4] = {pack_bf16(acc[i], acc[i + 1]), pack_bf16(acc[i + 2], acc[i + 3]),
                             pack_bf16(acc[i + 4], acc[i + 5]), pack_bf16(acc[i + 6], acc[i + 7])};
      const int unit = ((i / 4 + lane / 16) % 8) ^ (lane % 8);
      store_matrices<false>(staging + i / 32 * (kResultRows * 128) + lane % 16 * 128 + unit * 16,
                            r);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int box = 0; box < Tile::kCols / kResultCols; ++box) {
        tma_store(map, staging + box * kResultRows * 128, col + box * kResultCols, row, group);
      }
      store_commit();
    }
  }

  // BF16, not accumulated: rounded on the way into shared memory.
  __device__ __forceinline__ void write_rounded(const float (&acc)[Tile::kCols / 2],
                                                uint32_t staging, int lane) const {
    const uint32_t to = staging + lane % 16 * Tile::kPitch + lane / 16 * 16;
    __syncwarp();  // the reads of the tile before
#pragma unroll
    for (int i = 0; i < Tile::kCols / 2; i += 8) {  // acc[4j + 2h + c]: row half h, column 8j + ..
      const uint32_t r[4] = {pack_bf16(acc[i], acc[i + 1]), pack_bf16(acc[i + 2], acc[i + 3]),
                             pack_bf16(acc[i + 4], acc[i + 5]), pack_bf16(acc[i + 6], acc[i + 7])};
      store_matrices<false>(to + i * 4, r);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const uint4 unit = load_shared(staging + (i * kRowsAtOnce + row) * Tile::kPitch + col * 2);
      if (inside(i)) __stcs(address(i), unit);
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

template <class Tile>
SM90_FN void multiply_item(const WgradMaps& maps, const WgradArgs& args,
                           const WgradMultiplier<Tile>& multiplier,
                           float (&acc)[WgradMultiplier<Tile>::kValues], const WgradItem& item,
                           StageCursor<Tile::kStages>& cursor) {
  if (Tile::kAccumulate && item.num_tokens == 0) return;
  WgradRows<Tile> rows(args, item, multiplier.wg, multiplier.warp, multiplier.lane);
  if constexpr (Tile::kAccumulate) rows.load_window();
  multiplier.multiply(acc, item.num_tokens, cursor);
  if (args.group_scale) {
    const float s = args.group_scale[item.group * args.group_stride];
#pragma unroll
    for (int i = 0; i < WgradMultiplier<Tile>::kValues; ++i) acc[i] = __fmul_rn(acc[i], s);
  }
  if (Tile::kStaged && args.mapped) {
    const int row = item.first_row + multiplier.wg * 64 + multiplier.warp * 16;
    const int group = args.reversed ? args.num_groups - 1 - item.group : item.group;
    const uint32_t staging =
        multiplier.shared.staging + (multiplier.wg * 4 + multiplier.warp) * 16 * Tile::kCols * 2;
    rows.write_mapped(acc, staging, &maps.c, item.first_col, row, group, multiplier.lane);
  } else if constexpr (Tile::kStaged) {
    rows.write_rounded(acc, multiplier.warp_staging(), multiplier.lane);
  } else {
    rows.write_summed(acc, multiplier.warp_staging(), multiplier.lane);
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
      barrier_init(shared.empty + 8 * i, 4 * kMultipliers);
    }
    barrier_init_fence();
  }
  shared.order_groups(args.offsets, args.num_groups);
  __syncthreads();
  const int row_tiles = (args.num_rows + Tile::kRows - 1) / Tile::kRows;
  const int col_tiles = (args.num_cols + Tile::kCols - 1) / Tile::kCols;
  const int num_items = args.num_groups * row_tiles * col_tiles;
  if (threadIdx.x >= 128 * kMultipliers) {
    shrink_registers<40>();
    if (threadIdx.x == 128 * kMultipliers) {
      copy_operands<Tile>(maps, shared, num_items, row_tiles, col_tiles);
    }
  } else {
    grow_registers<232>();
    StageCursor<Tile::kStages> cursor(0);
    const WgradMultiplier<Tile> multiplier(shared, warp_uniform(threadIdx.x / 128));
    // The first product of a tile replaces these. Undefined, they would be kept from the start of
    // the kernel on, where registers are few, and spill.
    float acc[WgradMultiplier<Tile>::kValues];
#pragma unroll
    for (int i = 0; i < WgradMultiplier<Tile>::kValues; ++i) acc[i] = 0.0f;
    for (int i = blockIdx.x; i < num_items; i += gridDim.x) {
      WgradItem item = WgradItem::find(shared, i, row_tiles, col_tiles);
      item.num_tokens = warp_uniform(item.num_tokens);
      multiply_item<Tile>(maps, args, multiplier, acc, item, cursor);
    }
    store_wait<0>();
  }
#endif
}

}  // namespace megatron_nvfp4::cuda
