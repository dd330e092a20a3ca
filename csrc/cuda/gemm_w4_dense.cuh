// The GEMM on 4-bit weights for one group of few rows: a CTA for each tile, no schedule.
//
// At few rows a call costs what lies around its products: boundaries, items and rings of outputs
// are left out, weights are on their way before the other warps have met, and a warpgroup decodes
// up to 128 of K at once.
#pragma once

#include "gemm_w4_epilogue.cuh"
#include "wgmma.cuh"

namespace megatron_nvfp4::cuda {

// kGroups warpgroups of 64 features, each by kMaxTokens tokens. kMixed: two warpgroups, one with
// all the CTA's tokens, one with half of them, so that three tiles of features by 256 tokens make
// four equal CTAs. kBuffers fragments of kSteps times 16 of K are decoded ahead.
template <int kGroups_, int kTokens, int kSteps_, int kBuffers_, bool kMixed_ = false>
struct DenseConfig {
  static constexpr int kGroups = kGroups_, kTiles = 1, kMaxTokens = kTokens;
  static constexpr int kSteps = kSteps_, kBuffers = kBuffers_;
  static constexpr bool kMixed = kMixed_;
  static constexpr int kThreads = (kGroups * 4 + 2) * 32;
  // A stage is kSpan chunks along K: activations, then weights.
  static constexpr int kSpan = 2, kTokenBytes = kTokens * 128, kWeightBytes = kGroups * kChunkBytes;
  static constexpr int kWeights = kSpan * kTokenBytes;
  static constexpr int kStageBytes = (kWeights + kSpan * kWeightBytes + 1023) / 1024 * 1024;
  // Shared memory: barriers, then stages, which hold the output in the end.
  static constexpr int kFull = 0, kEmpty = 512, kStages = 1024, kSharedBytes = 227 * 1024;
  static constexpr int kNumStages = std::min(12, (kSharedBytes - kStages) / kStageBytes);
  static constexpr int kOutput = kStages, kRowBytes = 128, kOutputBytes = kTokens * kRowBytes;
  static_assert(kGroups * kOutputBytes <= kNumStages * kStageBytes);
  static_assert(!kMixed || kGroups == 2);

  // f of the width to multiply. Without the branch ptxas would mix decoding among the products and
  // serialise them (C7513).
  template <class F>
  SM90_FN void for_width(int num_rows, F&& f) {
    constexpr int kHalf = kTokens / 2, kQuarter = std::max(8, kTokens / 4);
    if (num_rows > kHalf) {
      f(std::integral_constant<int, kTokens>());
    } else if (num_rows > kQuarter) {
      f(std::integral_constant<int, kHalf>());
    } else {
      f(std::integral_constant<int, kQuarter>());
    }
  }
};

// What a CTA computes.
template <class C>
struct DensePlace {
  int row, tiles, part;  // first row; first tile of features and place among the CTAs that share it

  SM90_MEMBER explicit DensePlace(const GemmW4Args& args) {
    constexpr int kRows = C::kMixed ? 2 * C::kMaxTokens : C::kMaxTokens;
    const int index = C::kMixed ? blockIdx.x / 4 : blockIdx.x;
    const int row_tiles = (static_cast<int>(args.num_rows) + kRows - 1) / kRows;
    part = C::kMixed ? blockIdx.x % 4 : 0;
    row = index % row_tiles * kRows + part / 2 * C::kMaxTokens;
    tiles = index / row_tiles * (C::kMixed ? 3 : C::kGroups);
  }
  // Of three tiles and two halves of the tokens: the third tile goes to the first warpgroup of the
  // odd CTAs, the other two to the first of an even CTA in one half, in quarters in the other.
  SM90_MEMBER int tile(int group) const {
    if constexpr (!C::kMixed) return tiles + group;
    return tiles + (group == 0 ? (part % 2 ? 2 : part / 2 ? 0 : 1) : part / 2);
  }
  SM90_MEMBER int first_token(int group) const {
    return C::kMixed && group == 1 ? part % 2 * (C::kMaxTokens / 2) : 0;
  }
  SM90_MEMBER int num_tokens(const GemmW4Args& args, int group) const {
    const int most = C::kMixed && group == 1 ? C::kMaxTokens / 2 : C::kMaxTokens;
    return min(most, static_cast<int>(args.num_rows) - row - first_token(group));
  }
};

// ---- the copying warps; one lane of a converged warp copies ----

template <class C>
SM90_FN void copy_weights(const GemmW4Args& args, const DensePlace<C>& place) {
  constexpr int kParts = C::kMixed ? C::kGroups : 1, kChunks = C::kGroups / kParts;
  const int chunks_n = (args.n + kChunk - 1) / kChunk, chunks_k = (args.k + kChunk - 1) / kChunk;
  const uint64_t policy = evict_first_policy();
  const int64_t step = static_cast<int64_t>(chunks_n) * kChunkBytes;
  uint32_t bytes[kParts], sum = 0;
  const uint8_t* from[kParts];
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    bytes[p] = max(0, min(kChunks, chunks_n - place.tile(p))) * kChunkBytes;
    from[p] = args.weights + static_cast<int64_t>(place.tile(p)) * kChunkBytes;
    sum += bytes[p];
  }
  StageRing ring{0, C::kNumStages, 1};
  for (int chunk = 0; chunk < chunks_k; chunk += C::kSpan) {
    const uint32_t full = shared_base() + C::kFull + 8 * ring.stage;
    const uint32_t to = shared_base() + C::kStages + ring.stage * C::kStageBytes + C::kWeights;
    barrier_wait(shared_base() + C::kEmpty + 8 * ring.stage, ring.parity);
    if (elect_lane()) {
      const int spans = min(C::kSpan, chunks_k - chunk);
      barrier_expect(full, spans * sum);
#pragma unroll
      for (int i = 0; i < C::kSpan * kParts; ++i) {
        const int s = i / kParts, p = i % kParts;
        if (s < spans && bytes[p] != 0) {
          bulk_load(to + s * C::kWeightBytes + p * kChunkBytes, from[p] + s * step, bytes[p], full,
                    policy);
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int p = 0; p < kParts; ++p) from[p] += C::kSpan * step;
    ring.next();
  }
}

template <class C>
SM90_FN void copy_tokens(const GemmW4Args& args, const CUtensorMap& map,
                         const DensePlace<C>& place) {
  StageRing ring{0, C::kNumStages, 1};
  for (int k = 0; k < args.k; k += C::kSpan * kChunk) {
    const uint32_t full = shared_base() + C::kFull + 8 * ring.stage;
    const uint32_t to = shared_base() + C::kStages + ring.stage * C::kStageBytes;
    barrier_wait(shared_base() + C::kEmpty + 8 * ring.stage, ring.parity);
    if (elect_lane()) {
      barrier_expect(full, C::kSpan * C::kTokenBytes);
#pragma unroll
      for (int s = 0; s < C::kSpan; ++s) {
        tma_load(to + s * C::kTokenBytes, &map, k + s * kChunk, place.row, full);
      }
    }
    __syncwarp();
    ring.next();
  }
}

// ---- the multiplying warpgroups ----

// One stage of a warpgroup's weights: a thread's codes and scales.
template <class C>
struct StageWeights {
  uint4 codes[C::kSpan];
  uint2 scales[C::kSpan];

  SM90_MEMBER StageWeights(uint32_t stage, int num_chunks) {
    const int thread = threadIdx.x % 128;
    const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
    const uint32_t weights = stage + C::kWeights + group * kChunkBytes;
#pragma unroll
    for (int s = 0; s < C::kSpan; ++s) {
      codes[s] = load_shared_16(weights + s * C::kWeightBytes + thread * 16);
      scales[s] = load_shared_8(weights + s * C::kWeightBytes + kChunkCodes + thread / 4 * 8);
      // Behind the end of K activations are zeros, and weights nobody's.
      if (s >= num_chunks) scales[s] = {0, 0};
    }
  }
  template <class T>
  SM90_MEMBER void decode(int first_step, uint32_t (&a)[C::kSteps][4]) const {
#pragma unroll
    for (int i = 0; i < C::kSteps; i += 2) {
      const int s = (first_step + i) / 4;
      if ((first_step + i) % 4 == 0) {
        WeightDecoder<T>::template decode<0>(codes[s].x, codes[s].y, scales[s], a[i], a[i + 1]);
      } else {
        WeightDecoder<T>::template decode<1>(codes[s].z, codes[s].w, scales[s], a[i], a[i + 1]);
      }
    }
  }
};

// A warp is done with the stage `back` before this one.
template <class C>
SM90_FN void release_earlier(int stage, int back) {
  const int done = stage - back + (stage < back ? C::kNumStages : 0);
  if (threadIdx.x % 32 == 0) barrier_arrive(shared_base() + C::kEmpty + 8 * done);
}

template <class C, class T>
SM90_FN void multiply_dense(const GemmW4Args& args, int first_token, int num_tokens,
                            float (&d)[C::kMaxTokens / 2]) {
  // Products of kFills fragments a stage; those of the stage kLag + 1 before are the last to end.
  constexpr int kFills = C::kSpan * 4 / C::kSteps, kLag = (C::kBuffers - 1) / kFills;
  constexpr int kUnroll = std::max(1, C::kBuffers / kFills);
  static_assert(kUnroll * kFills % C::kBuffers == 0 && kLag + 1 < C::kNumStages);
  const int chunks_k = (args.k + kChunk - 1) / kChunk;
  StageRing ring{0, C::kNumStages, 0};
  uint32_t a[C::kBuffers][C::kSteps][4];
#pragma unroll
  for (int i = 0; i < C::kMaxTokens / 2; ++i) d[i] = 0.0f;
#pragma unroll 1
  for (int base = 0; base < chunks_k; base += kUnroll * C::kSpan) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int chunk = base + u * C::kSpan;
      if (u > 0 && chunk >= chunks_k) break;
      barrier_wait(shared_base() + C::kFull + 8 * ring.stage, ring.parity);
      const uint32_t stage = shared_base() + C::kStages + ring.stage * C::kStageBytes;
      const uint64_t x = descriptor_k_major(stage + first_token * 128);
      const StageWeights<C> weights(stage, chunks_k - chunk);
#pragma unroll
      for (int fill = 0; fill < kFills; ++fill) {
        auto& fragment = a[(u * kFills + fill) % C::kBuffers];
        wgmma_wait<C::kBuffers - 1>();
        if (fill == (C::kBuffers - 1) % kFills && chunk > kLag * C::kSpan) {
          release_earlier<C>(ring.stage, kLag + 1);
        }
        weights.template decode<T>(fill * C::kSteps, fragment);
        C::for_width(num_tokens, [&](auto width) {
          constexpr int kWidth = decltype(width)::value;
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < C::kSteps; ++i) {
            const int step = fill * C::kSteps + i;
            Wgmma<T, kWidth>::rs(reinterpret_cast<float (&)[kWidth / 2]>(d), fragment[i],
                                 x + step / 4 * (C::kTokenBytes >> 4) + 2 * (step % 4));
          }
          wgmma_commit();
        });
      }
      ring.next();
    }
  }
  wgmma_wait<0>();
  hold(d);
}

// A group's end on the device, and the row scales, token i in lane i % 32. Not by the read-only
// path: the kernel before may write them beside this one's start.
SM90_FN int load_end(const GemmW4Args& args) {
  const volatile void* end = args.offsets;
  return args.long_offsets ? static_cast<int>(static_cast<const volatile long long*>(end)[1])
                           : static_cast<const volatile int*>(end)[1];
}
template <int kCount>
SM90_FN void load_row_scales(const GemmW4Args& args, int row, int num_tokens,
                             float (&scale)[kCount]) {
  const float by_group = args.group_scale ? __ldg(args.group_scale) : 1.0f;
  const volatile float* from = args.row_scale;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int token = i * 32 + threadIdx.x % 32;
    const bool has_scale = from && token < num_tokens;
    scale[i] = __fmul_rn(has_scale ? from[args.one_row_scale ? 0 : row + token] : 1.0f, by_group);
  }
}

// Whole rows of 64 features, from shared memory.
template <class C>
SM90_FN void store_rows(const GemmW4Args& args, int group, int row, int num_tokens, int feature) {
  const int unit = threadIdx.x % 8, f = feature + unit * 8;
  const uint32_t from = shared_base() + C::kOutput + group * C::kOutputBytes;
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(args.out) + static_cast<int64_t>(row) * args.n;
#pragma unroll
  for (int base = 0; base < C::kMaxTokens; base += 16) {
    const int token = base + threadIdx.x % 128 / 8;
    if (token < num_tokens && f < args.n) {
      *reinterpret_cast<uint4*>(out + static_cast<int64_t>(token) * args.n + f) =
          load_shared_16(from + token * C::kRowBytes + (unit ^ token % 8) * 16);
    }
  }
}

template <class C, class T>
SM90_FN void multiply_and_store(const GemmW4Args& args, const DensePlace<C>& place) {
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  const int group = warp / 4, first_token = place.first_token(group);
  const int row = place.row + first_token, num_tokens = place.num_tokens(args, group);
  const int feature = place.tile(group) * kChunk;
  await_previous_kernel();
  const int num_valid = load_end(args) - row;
  float scale[(C::kMaxTokens + 31) / 32], d[1][C::kMaxTokens / 2];
  load_row_scales(args, row, num_tokens, scale);
  multiply_dense<C, T>(args, first_token, num_tokens, d[0]);
  scale_products<C, T>(scale, d);
  if (args.bias) add_bias<C>(args, 0, feature + warp % 4 * 16, d);
  if (num_valid < num_tokens) {  // rows that belong to no group
#pragma unroll
    for (int i = 0; i < C::kMaxTokens / 2; ++i) {
      if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= num_valid) d[0][i] = 0.0f;
    }
  }
  if (args.float_out) {
    store_float<C>(args, {0, row, num_tokens, 0}, feature + warp % 4 * 16, d[0]);
    return;
  }
  if constexpr (C::kGroups > 1) named_barrier_sync(1, C::kGroups * 128);  // stages are read
  stage_bf16<C>(num_tokens, d);
  named_barrier_sync(2 + group, 128);
  store_rows<C>(args, group, row, num_tokens, feature);
}

// ---- the kernel ----

template <class C, class T>
__global__ void __launch_bounds__(C::kThreads, 1)
    gemm_w4_dense_kernel(const __grid_constant__ CUtensorMap map,
                         const __grid_constant__ GemmW4Args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const int role = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0) - C::kGroups * 4;
  const DensePlace<C> place(args);
  allow_next_kernel();  // which waits for this one's end before it reads or writes
  if (role == 0) {      // goes on at once: fresh stages are empty
    if (elect_lane()) {
#pragma unroll
      for (int i = 0; i < C::kNumStages; ++i) {
        barrier_init(shared_base() + C::kFull + 8 * i, 2);
        barrier_init(shared_base() + C::kEmpty + 8 * i, C::kGroups * 4);
      }
      barrier_init_fence();
    }
    __syncwarp();
    named_barrier_arrive(15, C::kThreads);
    copy_weights<C>(args, place);
    return;
  }
  if (role == 1) tma_prefetch(&map);
  named_barrier_sync(15, C::kThreads);
  if (role == 1) {
    // Beside the decoder of x, only x and its scales are not there from the start.
    await_previous_kernel();
    copy_tokens<C>(args, map, place);
  } else {
    multiply_and_store<C, T>(args, place);
  }
#endif
}

template <class C>
int64_t count_dense_ctas(int64_t num_rows, int64_t n) {
  const auto tiles = [](int64_t size, int64_t tile) { return (size + tile - 1) / tile; };
  const int64_t features = tiles(n, kChunk);
  return C::kMixed ? 4 * tiles(num_rows, 2 * C::kMaxTokens) * tiles(features, 3)
                   : tiles(num_rows, C::kMaxTokens) * tiles(features, C::kGroups);
}

template <class C, class T>
cudaError_t launch_gemm_w4_dense(const GemmW4Args& args, cudaStream_t stream) {
  CUtensorMap map = {};
  const auto type = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                              : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const uint64_t k = args.k, rows = args.num_rows;
  if (cudaError_t e = encode_tensor_map<2>(&map, type, args.x, {k, rows}, {2 * k},
                                           {64u, static_cast<uint32_t>(C::kMaxTokens)})) {
    return e;
  }
  const auto kernel = gemm_w4_dense_kernel<C, T>;
  constexpr int kBytes = C::kStages + C::kNumStages * C::kStageBytes;
  if (cudaError_t e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)) {
    return e;
  }
  cudaLaunchAttribute early = {};  // start beside the decoder of x
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = args.after_decoder;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(count_dense_ctas<C>(args.num_rows, args.n)));
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, map, args);
}

}  // namespace megatron_nvfp4::cuda
