// The kernel: y (M, N) = x w^T on Hopper, with weights as the wgmma operand in registers.
//
// Features are wgmma's M and tokens its N, so that a group's rows cost multiples of 16, not of 64.
// A CTA is persistent. In its last warpgroup a warp copies weights, another activations, by the
// copy engine, and the rest store outputs. The other warpgroups each take kTiles tiles of 64
// features: they decode weights into A fragments while the tensor core works on those before. K
// ascends in steps of 16 into one accumulator whatever the tile, hence the same bits from each.
#pragma once

#include "gemm_w4_epilogue.cuh"
#include "wgmma.cuh"

namespace megatron_nvfp4::cuda {

// ---- the copying warps: one of weights, one of activations ----

// The CTA's item in this round; num_rows is 0 behind the last one.
template <class C>
SM90_FN Item item_of_round(const GemmW4Args& args, int round) {
  const int index = item_in_round(round);
  Item item = {};
  if (index < load_shared(shared_base() + C::kItems)) {
    item = find_item(schedule_of(args), args.max_tokens, index);
  }
  return uniform(item);
}

// Copies `part` of each stage of the CTA's items. The next item is sought in the middle of one,
// while the stages on their way last. The whole warp walks, so that the compiler sees one address
// for all lanes; one lane copies.
template <class C, class Part>
SM90_FN void copy_items(const GemmW4Args& args, Part part) {
  const int num_k = (args.k + C::kSpan * kChunk - 1) / (C::kSpan * kChunk);
  StageRing ring{0, args.num_stages, 1};
  for (int round = 0; part.item.num_rows > 0; ++round) {
    part.start();
    Item next = part.item;
    for (int k = 0; k < num_k; ++k) {
      barrier_wait(shared_base() + C::kEmpty + 8 * ring.stage, ring.parity);
      if (elect_lane()) part.copy(ring.stage, k);
      __syncwarp();
      part.advance();
      ring.next();
      if (k == num_k / 2) next = part.find(round + 1);
    }
    part.item = next;
  }
  barrier_wait(shared_base() + C::kEmpty + 8 * ring.stage, ring.parity);
  if (elect_lane()) part.end(ring.stage);
}

// The first stage of an item carries it to the multiplying warps.
template <class C>
struct WeightCopies {
  const GemmW4Args& args;
  Item item;
  float scale, next_scale;
  int chunks_n, chunks_k;
  uint32_t bytes;
  uint64_t policy;
  const uint8_t* from;

  SM90_MEMBER explicit WeightCopies(const GemmW4Args& a) : args(a) {
    chunks_n = (args.n + kChunk - 1) / kChunk;
    chunks_k = (args.k + kChunk - 1) / kChunk;
    // Weights of few rows are read once: they need not push activations out of L2.
    policy = C::kMaxTokens <= 64 ? evict_first_policy() : evict_normal_policy();
    item = find(0);
  }
  SM90_MEMBER Item find(int round) {
    const Item found = item_of_round<C>(args, round);
    next_scale = args.group_scale
                     ? __ldg(args.group_scale + (args.one_group_scale ? 0 : found.group))
                     : 1.0f;
    return found;
  }
  SM90_MEMBER void start() {
    const int first = item.feature_tile * C::kChunks;
    scale = next_scale;
    bytes = min(C::kChunks, chunks_n - first) * kChunkBytes;
    from = args.weights +
           (static_cast<int64_t>(item.group) * chunks_k * chunks_n + first) * kChunkBytes;
  }
  SM90_MEMBER void copy(int stage, int k) {
    const uint32_t full = shared_base() + C::kFull + 8 * stage;
    const uint32_t to = shared_base() + C::kStages + stage * C::kStageBytes + C::kWeights;
    const int chunks = min(C::kSpan, chunks_k - k * C::kSpan);
    if (k == 0) {
      post_item(shared_base() + C::kInfo + 32 * stage, item);
      store_shared(shared_base() + C::kInfo + 32 * stage + 16, __float_as_int(scale));
    }
    barrier_expect(full, chunks * bytes);
#pragma unroll
    for (int s = 0; s < C::kSpan; ++s) {
      if (s < chunks) {
        bulk_load(to + s * C::kWeightBytes, from + s * chunks_n * kChunkBytes, bytes, full, policy);
      }
    }
  }
  SM90_MEMBER void advance() { from += C::kSpan * chunks_n * kChunkBytes; }
  SM90_MEMBER void end(int stage) {
    post_item(shared_base() + C::kInfo + 32 * stage, item);
    barrier_arrive(shared_base() + C::kFull + 8 * stage);
  }
};

// Activations, and with an item's first stage its row scales.
template <class C>
struct ActivationCopies {
  const GemmW4Args& args;
  const GemmMaps& maps;
  Item item;
  int rows;

  SM90_MEMBER ActivationCopies(const GemmW4Args& a, const GemmMaps& m) : args(a), maps(m) {
    item = find(0);
  }
  SM90_MEMBER Item find(int round) { return item_of_round<C>(args, round); }
  SM90_MEMBER void start() { rows = (item.num_rows + 15) & ~15; }
  SM90_MEMBER void copy(int stage, int k) {
    const uint32_t full = shared_base() + C::kFull + 8 * stage;
    const uint32_t to = shared_base() + C::kStages + stage * C::kStageBytes;
    if (k == 0 && has_row_scales(args)) {  // from and to a multiple of 16 bytes
      const int scale_bytes = ((item.row % 4 + item.num_rows + 3) & ~3) * 4;
      barrier_expect_more(full, scale_bytes);
      bulk_load(shared_base() + args.row_scales + stage * C::kScaleBytes,
                args.row_scale + item.row / 4 * 4, scale_bytes, full);
    }
    barrier_expect(full, C::kSpan * rows * 128);
#pragma unroll
    for (int s = 0; s < C::kSpan; ++s) {
      const int column = (k * C::kSpan + s) * kChunk;
#pragma unroll
      for (int r = 0; r < C::kMaxTokens; r += 64) {
        const uint32_t at = to + s * C::kTokenBytes + r * 128;
        if (r + 64 <= rows) {
          tma_load(at, &maps.rows64, column, item.row + r, full);
        } else {
#pragma unroll
          for (int q = r; q < r + 64 && q < C::kMaxTokens; q += 16) {
            if (q < rows) tma_load(at + (q - r) * 128, &maps.rows16, column, item.row + q, full);
          }
        }
      }
    }
  }
  SM90_MEMBER void advance() {}
  SM90_MEMBER void end(int stage) { barrier_arrive(shared_base() + C::kFull + 8 * stage); }
};

// ---- the multiplying warpgroups ----

// A thread's weights of one chunk, or of half a chunk.
template <class T>
SM90_FN void decode_all(uint4 codes, uint2 scales, uint32_t (&a)[4][4]) {
  WeightDecoder<T>::template decode<0>(codes.x, codes.y, scales, a[0], a[1]);
  WeightDecoder<T>::template decode<1>(codes.z, codes.w, scales, a[2], a[3]);
}
template <class T>
SM90_FN void decode_half(uint4 codes, uint2 scales, int half, uint32_t (&a)[2][4]) {
  if (half == 0) {
    WeightDecoder<T>::template decode<0>(codes.x, codes.y, scales, a[0], a[1]);
  } else {
    WeightDecoder<T>::template decode<1>(codes.z, codes.w, scales, a[0], a[1]);
  }
}

// Only this depends on the width of the tile: code for each width in its own loop would keep its
// own registers, and ptxas serialises wgmma when they run out (C7512).
template <class C, class T>
SM90_FN void multiply_fragment(int num_rows, const uint32_t (&fragment)[C::kSteps][4], uint64_t x,
                               float (&d)[C::kMaxTokens / 2]) {
  C::for_width(num_rows, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kSteps; ++i) {
      Wgmma<T, kWidth>::rs(reinterpret_cast<float (&)[kWidth / 2]>(d), fragment[i], x + 2 * i);
    }
    wgmma_commit();
  });
}

SM90_FN void release_stage(uint32_t empty) {
  if (threadIdx.x % 32 == 0) barrier_arrive(empty);
}

// Products of one item. Releases all its stages.
template <class C, class T>
SM90_FN void multiply_item(const GemmW4Args& args, StageRing& ring, int num_rows,
                           float (&d)[C::kTiles][C::kMaxTokens / 2]) {
  constexpr int kSets = 4 / C::kSteps, kFills = C::kSpan * C::kTiles * kSets;
  static_assert(kFills % C::kBuffers == 0 && C::kBuffers <= kFills);
  const int thread = threadIdx.x % 128, chunks_k = (args.k + kChunk - 1) / kChunk;
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  const uint32_t weights =
      shared_base() + C::kStages + C::kWeights + group * C::kTiles * kChunkBytes;
  const uint32_t my_codes = weights + thread * 16;
  const uint32_t my_scales = weights + kChunkCodes + thread / 4 * 8;
  const uint32_t empty = shared_base() + C::kEmpty;
  uint32_t a[C::kBuffers][C::kSteps][4];
#pragma unroll
  for (int m = 0; m < C::kTiles; ++m) {
#pragma unroll
    for (int i = 0; i < C::kMaxTokens / 2; ++i) d[m][i] = 0.0f;
  }
  int previous = 0;
#pragma unroll 1
  for (int k = 0; k < chunks_k; k += C::kSpan) {
    barrier_wait(shared_base() + C::kFull + 8 * ring.stage, ring.parity);
    const uint32_t offset = ring.stage * C::kStageBytes;
    const uint64_t x = descriptor_k_major(shared_base() + C::kStages + offset);
    uint4 codes = load_shared_16(my_codes + offset);
    uint2 scales = load_shared_8(my_scales + offset);
#pragma unroll
    for (int c = 0; c < C::kSpan * C::kTiles; ++c) {
      const int s = c / C::kTiles, m = c % C::kTiles;
      if (s > 0 && m == 0 && k + s >= chunks_k) {  // K ends within the stage
        wgmma_wait<0>();
        if (c * kSets < C::kBuffers && k) release_stage(empty + 8 * previous);
        break;
      }
      uint4 next_codes = codes;
      uint2 next_scales = scales;
      if (c + 1 < C::kSpan * C::kTiles) {
        const int at = (c + 1) / C::kTiles * C::kWeightBytes + (c + 1) % C::kTiles * kChunkBytes;
        next_codes = load_shared_16(my_codes + offset + at);
        next_scales = load_shared_8(my_scales + offset + at);
      }
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        const int fill = c * kSets + set, buffer = fill % C::kBuffers;
        auto& fragment = a[buffer];
        wgmma_wait<C::kBuffers - 1>();
        // All products of the stage before are done.
        if (fill == C::kBuffers - 1 && k) release_stage(empty + 8 * previous);
        if constexpr (C::kSteps == 4) {
          decode_all<T>(codes, scales, fragment);
        } else {
          decode_half<T>(codes, scales, set, fragment);
        }
        multiply_fragment<C, T>(num_rows, fragment,
                                x + s * (C::kTokenBytes >> 4) + 2 * set * C::kSteps, d[m]);
      }
      codes = next_codes;
      scales = next_scales;
    }
    previous = ring.stage;
    ring.next();
  }
  wgmma_wait<0>();
  release_stage(empty + 8 * previous);
}

template <class C, class T>
SM90_FN void multiply_items(const GemmW4Args& args) {
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  StageRing ring{0, args.num_stages, 0};
  for (int round = 0;; ++round) {
    barrier_wait(shared_base() + C::kFull + 8 * ring.stage, ring.parity);
    const Item item = posted_item(shared_base() + C::kInfo + 32 * ring.stage);
    if (item.num_rows == 0) {
      if (!args.float_out) pass_output<C>(item, group, round);
      break;
    }
    float scale[(C::kMaxTokens + 31) / 32], d[C::kTiles][C::kMaxTokens / 2];
    load_scales<C>(args, item, ring.stage, scale);
    multiply_item<C, T>(args, ring, item.num_rows, d);
    store_item<C, T>(args, item, round, scale, d);
  }
}

// ---- the kernel ----

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
#pragma unroll 1
    for (int i = 0; i < args.num_stages; ++i) {
      barrier_init(shared_base() + C::kFull + 8 * i, 2);
      barrier_init(shared_base() + C::kEmpty + 8 * i, C::kGroups * 4);
    }
#pragma unroll 1
    for (int i = 0; i < C::kGroups; ++i) {
      barrier_init(shared_base() + C::kOutFull + 8 * i, 4);
      barrier_init(shared_base() + C::kOutEmpty + 8 * i, C::kWriters);
    }
    barrier_init_fence();
    tma_prefetch(&maps.rows64);
    tma_prefetch(&maps.rows16);
  }
  __syncthreads();
  // Narrow tiles take the time of their weights, whatever their rows.
  if (C::kMaxTokens > 64 && args.num_groups > 1) sort_groups(schedule, args.max_tokens);
  const int num_items =
      count_items(schedule, args.max_tokens, args.feature_tiles, shared_base() + C::kSums);
  if (threadIdx.x == 0) store_shared(shared_base() + C::kItems, num_items);
  __syncthreads();
  const int num_rows = load_shared(schedule.start(args.num_groups));
  if (num_rows < args.num_rows) zero_tail(args, num_rows);
  if (threadIdx.x >= C::kGroups * 128) {
    if constexpr (C::kGroups > 1) shrink_registers<C::kCopier>();
    const int role = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0) - C::kGroups * 4;
    if (role == 0) {
      copy_items<C>(args, WeightCopies<C>(args));
    } else if (role == 1) {
      // Beside the decoder of x, only x and its scales are not there from the start.
      await_previous_kernel();
      copy_items<C>(args, ActivationCopies<C>(args, maps));
    } else {
      write_items<C>(args);
    }
  } else {
    if constexpr (C::kGroups > 1) grow_registers<C::kMultiplier>();
    multiply_items<C, T>(args);
  }
#endif
}

// Rows of a tile, of one group: as few as the same number of rounds allows.
inline int smallest_tile(int64_t num_rows, int max_tokens, int feature_tiles, int ctas) {
  const int64_t tiles = (num_rows + max_tokens - 1) / max_tokens;
  const int64_t rounds = (tiles * feature_tiles + ctas - 1) / ctas;
  const int64_t most = std::max(tiles, rounds * ctas / feature_tiles);
  return std::max(16, static_cast<int>((num_rows + 8 * most - 1) / (8 * most) * 8));
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
  args.num_stages =
      std::min(C::kMaxStages, (bytes - C::kStages - tables) / (C::kStageBytes + C::kScaleBytes));
  args.row_scales = C::kStages + args.num_stages * C::kStageBytes;
  args.tables = args.row_scales + args.num_stages * C::kScaleBytes;
  args.feature_tiles = (args.n + kChunk * C::kChunks - 1) / (kChunk * C::kChunks);
  args.max_tokens = args.num_groups == 1
                        ? smallest_tile(args.num_rows, C::kMaxTokens, args.feature_tiles, ctas)
                        : C::kMaxTokens;
  const auto kernel = gemm_w4_kernel<C, T>;
  const int needed = args.tables + tables;
  if (cudaError_t e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) {
    return e;
  }
  cudaLaunchAttribute early = {};  // start beside the decoder of x
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
