// The kernel: y (M, N) = x w^T on Hopper, with weights as the wgmma operand in registers.
//
// Features are wgmma's M and tokens its N, so that a group's rows cost multiples of 16, not of 64.
// A CTA is persistent. A warp of its last warpgroup copies weights and activations by the copy
// engine. The other warpgroups each take kTiles tiles of 64 features: they decode weights into A
// fragments while the tensor core works on those before. K ascends in steps of 16 into one
// accumulator whatever the tile, hence the same bits from each.
#pragma once

#include <algorithm>
#include <type_traits>

#include "gemm_w4_decode.cuh"
#include "gemm_w4_schedule.cuh"
#include "wgmma.cuh"

namespace megatron_nvfp4::cuda {

// kBuffers fragments of kSteps times 16 of K are decoded ahead. kTokens: widths of a tile.
template <int kGroups_, int kTiles_, int kSteps_, int kBuffers_, int... kTokens>
struct GemmConfig {
  static constexpr int kGroups = kGroups_, kTiles = kTiles_, kSteps = kSteps_;
  static constexpr int kBuffers = kBuffers_;
  static constexpr int kChunks = kGroups * kTiles;
  static constexpr int kMaxTokens = std::max({kTokens...});
  static constexpr int kThreads = (kGroups + 1) * 128;
  // Registers of multiplying and copying threads: on average what the launch gives.
  static constexpr int kMultiplier = kGroups == 4 ? 112 : 232, kCopier = kGroups == 4 ? 32 : 40;
  static constexpr int kWeightBytes = kChunks * kChunkBytes;
  static constexpr int kStageBytes = (kMaxTokens * 128 + kWeightBytes + 1023) / 1024 * 1024;
  // Shared memory: barriers, a few words, outputs in transit (32 tokens x 16 features of each
  // warp), stages, then the schedule. Offsets known here cost no registers.
  static constexpr int kMaxStages = 24, kFull = 0, kEmpty = 8 * kMaxStages;
  static constexpr int kTotal = 16 * kMaxStages, kCounts = kTotal + 4, kOutput = 512;
  static constexpr int kStages = (kOutput + kGroups * 4 * 1024 + 1023) / 1024 * 1024;
  static_assert(kCounts + 18 * 4 <= kOutput);

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
SM90_FN Schedule schedule_of(const GemmW4Args& args) {
  return {shared_base() + args.tables, args.num_groups};
}
// The CTA's next item, if there is one.
template <class C>
SM90_FN bool next_item(const GemmW4Args& args, int round, Item& item) {
  const int index = item_in_round(round);
  if (index >= __shfl_sync(0xFFFFFFFFu, load_shared(shared_base() + C::kTotal), 0)) return false;
  item = find_item(schedule_of(args), C::kMaxTokens, index);
  // The same in every lane, which the compiler learns here.
  item.group = __shfl_sync(0xFFFFFFFFu, item.group, 0);
  item.row = __shfl_sync(0xFFFFFFFFu, item.row, 0);
  item.num_rows = __shfl_sync(0xFFFFFFFFu, item.num_rows, 0);
  item.feature_tile = __shfl_sync(0xFFFFFFFFu, item.feature_tile, 0);
  return true;
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

// ---- the copying warp ----

// The whole warp walks, so that the compiler sees one address for all lanes; one lane copies.
template <class C>
SM90_FN void copy_stages(const GemmW4Args& args, const GemmMaps& maps) {
  const int chunks_n = (args.n + kChunk - 1) / kChunk, num_k = (args.k + kChunk - 1) / kChunk;
  // Weights of few rows are read once: they need not push activations out of L2.
  const uint64_t policy = C::kMaxTokens <= 64 ? evict_first_policy() : evict_normal_policy();
  StageRing ring{0, args.num_stages, 1};
  Item item;
  for (int round = 0; next_item<C>(args, round, item); ++round) {
    const int first = item.feature_tile * C::kChunks, rows = (item.num_rows + 15) & ~15;
    const uint32_t bytes = min(C::kChunks, chunks_n - first) * kChunkBytes;
    const uint8_t* weights =
        args.weights + (static_cast<int64_t>(item.group) * num_k * chunks_n + first) * kChunkBytes;
    for (int k = 0; k < num_k; ++k) {
      barrier_wait(shared_base() + C::kEmpty + 8 * ring.stage, ring.parity);
      const uint32_t full = shared_base() + C::kFull + 8 * ring.stage;
      const uint32_t to = shared_base() + C::kStages + ring.stage * C::kStageBytes;
      if (elect_lane()) {
        barrier_expect(full, bytes + rows * 128);
        bulk_load(to + C::kMaxTokens * 128, weights, bytes, full, policy);
        // Beside the decoder of x, only x is not there from the start.
        if (round == 0 && k == 0) await_previous_kernel();
#pragma unroll
        for (int r = 0; r < C::kMaxTokens; r += 64) {
          if (r + 64 <= rows) {
            tma_load(to + r * 128, &maps.rows64, k * kChunk, item.row + r, full);
          } else {
#pragma unroll
            for (int q = r; q < r + 64 && q < C::kMaxTokens; q += 16) {
              if (q < rows) tma_load(to + q * 128, &maps.rows16, k * kChunk, item.row + q, full);
            }
          }
        }
      }
      __syncwarp();
      weights += static_cast<int64_t>(chunks_n) * kChunkBytes;
      ring.next();
    }
  }
  await_previous_kernel();  // whose memory may be reused once this kernel has ended
}

// ---- the multiplying warpgroups ----

// Products of one item. Releases all its stages.
template <class C, class T>
SM90_FN void multiply_item(const GemmW4Args& args, StageRing& ring, int num_rows,
                           float (&d)[C::kTiles][C::kMaxTokens / 2]) {
  constexpr int kSets = 4 / C::kSteps, kFills = C::kTiles * kSets;
  static_assert(kFills % C::kBuffers == 0 && C::kBuffers <= kFills);
  const int thread = threadIdx.x % 128, num_k = (args.k + kChunk - 1) / kChunk;
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  const uint32_t weights =
      shared_base() + C::kStages + C::kMaxTokens * 128 + group * C::kTiles * kChunkBytes;
  const uint32_t my_codes = weights + thread * 16;
  const uint32_t my_scales = weights + kChunkCodes + thread / 4 * 8;
  uint32_t a[C::kBuffers][C::kSteps][4];
#pragma unroll
  for (int m = 0; m < C::kTiles; ++m) {
#pragma unroll
    for (int i = 0; i < C::kMaxTokens / 2; ++i) d[m][i] = 0.0f;
  }
  int previous = 0;
#pragma unroll 1
  for (int k = 0; k < num_k; ++k) {
    barrier_wait(shared_base() + C::kFull + 8 * ring.stage, ring.parity);
    const uint32_t offset = ring.stage * C::kStageBytes;
    const uint64_t x = descriptor_k_major(shared_base() + C::kStages + offset);
    uint4 codes = load_shared_16(my_codes + offset);
    uint2 scales = load_shared_8(my_scales + offset);
#pragma unroll
    for (int m = 0; m < C::kTiles; ++m) {
      uint4 next_codes = codes;
      uint2 next_scales = scales;
      if (m + 1 < C::kTiles) {
        next_codes = load_shared_16(my_codes + offset + (m + 1) * kChunkBytes);
        next_scales = load_shared_8(my_scales + offset + (m + 1) * kChunkBytes);
      }
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        const int fill = m * kSets + set, buffer = fill % C::kBuffers;
        auto& fragment = a[buffer];
        wgmma_wait<C::kBuffers - 1>();
        // All products of the stage before are done.
        if (fill == C::kBuffers - 1 && k && threadIdx.x % 32 == 0) {
          barrier_arrive(shared_base() + C::kEmpty + 8 * previous);
        }
        if constexpr (C::kSteps == 4) {
          WeightDecoder<T>::template decode<0>(codes.x, codes.y, scales, fragment[0], fragment[1]);
          WeightDecoder<T>::template decode<1>(codes.z, codes.w, scales, fragment[2], fragment[3]);
        } else if (set == 0) {
          WeightDecoder<T>::template decode<0>(codes.x, codes.y, scales, fragment[0], fragment[1]);
        } else {
          WeightDecoder<T>::template decode<1>(codes.z, codes.w, scales, fragment[0], fragment[1]);
        }
        // Only this depends on the width of the tile: code for each width in its own loop would
        // keep its own registers, and ptxas serialises wgmma when they run out (C7512).
        C::for_width(num_rows, [&](auto width) {
          constexpr int kWidth = decltype(width)::value;
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < C::kSteps; ++i) {
            Wgmma<T, kWidth>::rs(reinterpret_cast<float (&)[kWidth / 2]>(d[m]), fragment[i],
                                 x + 2 * (set * C::kSteps + i));
          }
          wgmma_commit();
        });
      }
      codes = next_codes;
      scales = next_scales;
    }
    previous = ring.stage;
    ring.next();
  }
  wgmma_wait<0>();
  if (threadIdx.x % 32 == 0) barrier_arrive(shared_base() + C::kEmpty + 8 * previous);
}

SM90_FN float load_bias(const GemmW4Args& args, int group, int feature) {
  const int64_t index = static_cast<int64_t>(group) * args.n + feature;
  return args.float_bias ? __ldg(static_cast<const float*>(args.bias) + index)
                         : __bfloat162float(static_cast<const __nv_bfloat16*>(args.bias)[index]);
}

// Row scale of each token of the item, token i in lane i % 32. Nothing is computed with it here:
// its latency passes behind the products.
template <int kCount>
SM90_FN void load_scales(const GemmW4Args& args, const Item& item, float (&scale)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int token = i * 32 + threadIdx.x % 32;
    scale[i] = 1.0f;
    if (!args.row_scale || token >= item.num_rows) continue;
    int64_t row = args.one_row_scale ? 0 : item.row + token;
    if (args.row_index && !args.one_row_scale) {
      row = args.long_index ? __ldg(static_cast<const long long*>(args.row_index) + row)
                            : __ldg(static_cast<const int*>(args.row_index) + row);
    }
    scale[i] = __ldg(args.row_scale + row);
  }
}

// Eight features of four tokens at a time: whole 32-byte sectors.
template <class C>
SM90_FN void store_float(const GemmW4Args& args, const Item& item, int feature,
                         const float (&d)[C::kMaxTokens / 2]) {
  const int lane = threadIdx.x % 32;
  float* out = static_cast<float*>(args.out) + static_cast<int64_t>(item.row) * args.n;
#pragma unroll
  for (int i = 0; i < C::kMaxTokens / 2; ++i) {
    const int token = i / 4 * 8 + lane % 4 * 2 + i % 2, f = feature + lane / 4 + i / 2 % 2 * 8;
    if (token < item.num_rows && f < args.n) out[static_cast<int64_t>(token) * args.n + f] = d[i];
  }
}

// Rounded, and turned in the warp's part of shared memory to 32 bytes of each of 32 tokens.
template <class C>
SM90_FN void store_bf16(const GemmW4Args& args, const Item& item, int feature,
                        const float (&d)[C::kMaxTokens / 2]) {
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  const uint32_t buffer = shared_base() + C::kOutput + warp * 1024;
  // 8 x 8 matrices (token half, feature half); lanes 0-7, 8-15, ... address their rows. Halves of a
  // token's 32 bytes trade places every four tokens: no bank conflicts.
  const uint32_t to = buffer + (lane % 8 + lane / 16 * 8) * 32 + ((lane / 8 ^ lane / 4) & 1) * 16;
  const uint32_t from = buffer + lane / 2 * 32 + ((lane ^ lane / 8) & 1) * 16;
  const int f = feature + lane % 2 * 8;
  const int64_t stride = static_cast<int64_t>(args.n) * 16;
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(args.out) +
                       static_cast<int64_t>(item.row + lane / 2) * args.n + f;
  const int num_rows = f < args.n ? item.num_rows - lane / 2 : 0;
#pragma unroll
  for (int base = 0; base < C::kMaxTokens; base += 32) {
    if (base >= item.num_rows) break;
#pragma unroll
    for (int j = base; j < C::kMaxTokens && j < base + 32; j += 16) {
      const float* v = d + j / 2;
      store_matrices_transposed(to + (j - base) * 32,
                                {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                 pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])});
    }
    __syncwarp();
#pragma unroll
    for (int j = base; j < C::kMaxTokens && j < base + 32; j += 16) {
      const uint4 v = load_shared_16(from + (j - base) * 32);
      if (j < num_rows) *reinterpret_cast<uint4*>(out) = v;
      out += stride;
    }
    __syncwarp();
  }
}

// Scales, adds the bias, rounds and stores. A warp works alone: 16 features of every token. What is
// rarely asked for stands apart: this code runs once an item, from memory rather than from the
// instruction cache.
template <class C, class T, int kCount>
SM90_FN void store_item(const GemmW4Args& args, const Item& item, float (&scale)[kCount],
                        float (&d)[C::kTiles][C::kMaxTokens / 2]) {
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  constexpr float kLift = WeightDecoder<T>::kLift;
  // One rounding of row times group. The factor that decoding left out goes into the scale, or,
  // should that overflow, into d first.
  const float by_group =
      args.group_scale ? __ldg(args.group_scale + (args.one_group_scale ? 0 : item.group)) : 1.0f;
  bool huge = false;
#pragma unroll
  for (float& s : scale) {
    s = __fmul_rn(s, by_group);
    huge |= fabsf(s) >= 0x1p120f;
  }
  const bool lift_products = __any_sync(0xFFFFFFFFu, huge);
#pragma unroll
  for (int i = 0; i < C::kMaxTokens / 2; ++i) {
    if (!lift_products) break;
#pragma unroll
    for (int m = 0; m < C::kTiles; ++m) d[m][i] = __fmul_rn(d[m][i], kLift);
  }
#pragma unroll
  for (float& s : scale) s = lift_products ? s : __fmul_rn(s, kLift);
#pragma unroll
  for (int i = 0; i < C::kMaxTokens / 4; ++i) {  // tokens of this thread: two of every eight
    const int token = i / 2 * 8 + lane % 4 * 2 + i % 2;
    const float s = __shfl_sync(0xFFFFFFFFu, scale[i / 8], token % 32);
#pragma unroll
    for (int m = 0; m < C::kTiles; ++m) {
      float* v = &d[m][i / 2 * 4 + i % 2];
      v[0] = __fmul_rn(v[0], s);
      v[2] = __fmul_rn(v[2], s);
    }
  }
  const int first =
      (item.feature_tile * C::kChunks + warp / 4 * C::kTiles) * kChunk + warp % 4 * 16;
  if (args.bias) {
#pragma unroll
    for (int m = 0; m < C::kTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int f = min(first + m * kChunk + lane / 4 + 8 * h, args.n - 1);
        const float bias = load_bias(args, item.group, f);
#pragma unroll
        for (int i = 0; i < C::kMaxTokens / 4; ++i) {
          float& v = d[m][i / 2 * 4 + h * 2 + i % 2];
          v = __fadd_rn(v, bias);
        }
      }
    }
  }
  if (args.float_out) {
#pragma unroll
    for (int m = 0; m < C::kTiles; ++m) store_float<C>(args, item, first + m * kChunk, d[m]);
  } else {
#pragma unroll
    for (int m = 0; m < C::kTiles; ++m) store_bf16<C>(args, item, first + m * kChunk, d[m]);
  }
}

template <class C, class T>
SM90_FN void multiply_items(const GemmW4Args& args) {
  StageRing ring{0, args.num_stages, 0};
  Item item;
  for (int round = 0; next_item<C>(args, round, item); ++round) {
    float scale[(C::kMaxTokens + 31) / 32], d[C::kTiles][C::kMaxTokens / 2];
    load_scales(args, item, scale);
    multiply_item<C, T>(args, ring, item.num_rows, d);
    store_item<C, T>(args, item, scale, d);
  }
}

// Rows that belong to no group.
SM90_FN void zero_tail(const GemmW4Args& args, int64_t first_row) {
  const int64_t unit = args.float_out ? 4 : 8, end = args.num_rows * args.n / unit;
  uint4* out = static_cast<uint4*>(args.out);
  for (int64_t i = first_row * args.n / unit + blockIdx.x * blockDim.x + threadIdx.x; i < end;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    out[i] = {0, 0, 0, 0};
  }
}

template <class C, class T>
__global__ void __launch_bounds__(C::kThreads, 1)
    gemm_w4_kernel(const __grid_constant__ GemmMaps maps, const __grid_constant__ GemmW4Args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const Schedule schedule = schedule_of(args);
  load_boundaries(schedule, args.offsets, args.long_offsets);
  if (threadIdx.x == 0) {
    for (int i = 0; i < args.num_stages; ++i) {
      barrier_init(shared_base() + C::kFull + 8 * i, 1);
      barrier_init(shared_base() + C::kEmpty + 8 * i, C::kGroups * 4);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    // Narrow tiles take the time of their weights, whatever their rows.
    if (C::kMaxTokens > 64) sort_groups(schedule, C::kMaxTokens, shared_base() + C::kCounts);
    const int total = count_items(schedule, C::kMaxTokens, args.feature_tiles);
    if (threadIdx.x == 0) store_shared(shared_base() + C::kTotal, total);
  }
  __syncthreads();
  zero_tail(args, load_shared(schedule.start(args.num_groups)));
  if (threadIdx.x >= C::kGroups * 128) {
    if constexpr (C::kGroups > 1) shrink_registers<C::kCopier>();
    if (threadIdx.x < C::kGroups * 128 + 32) copy_stages<C>(args, maps);
  } else {
    if constexpr (C::kGroups > 1) grow_registers<C::kMultiplier>();
    multiply_items<C, T>(args);
  }
#endif
}

template <class C, class T>
cudaError_t launch_gemm_w4(GemmW4Args args, cudaStream_t stream) {
  GemmMaps maps = {};
  const auto type = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                              : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const uint64_t k = args.k, rows = args.num_rows;
  for (uint32_t box : {64u, 16u}) {
    CUtensorMap* map = box == 64 ? &maps.rows64 : &maps.rows16;
    const cudaError_t error =
        encode_tensor_map<2>(map, type, args.x, {k, rows}, {2 * k}, {64u, box});
    if (error != cudaSuccess) return error;
  }
  int device, ctas, bytes;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (cudaError_t e = cudaDeviceGetAttribute(&ctas, cudaDevAttrMultiProcessorCount, device)) {
    return e;
  }
  if (cudaError_t e =
          cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) {
    return e;
  }
  const int tables = Schedule::num_bytes(args.num_groups);
  args.num_stages = std::min(C::kMaxStages, (bytes - C::kStages - tables) / C::kStageBytes);
  args.tables = C::kStages + args.num_stages * C::kStageBytes;
  args.feature_tiles = (args.n + kChunk * C::kChunks - 1) / (kChunk * C::kChunks);
  const auto kernel = gemm_w4_kernel<C, T>;
  const int needed = args.tables + tables;
  if (cudaError_t e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) {
    return e;
  }
  cudaLaunchAttribute early = {};  // start beside the decoder of x; see copy_stages
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = args.after_decoder;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = needed;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, maps, args);
}

}  // namespace megatron_nvfp4::cuda
