// The way out: scales, bias, rounding. Multiplying warps leave BF16 rows in shared memory, and the
// writing warps store them while the next item is multiplied.
#pragma once

#include "gemm_w4_config.cuh"

namespace megatron_nvfp4::cuda {

// ---- the multiplying warps ----

SM90_FN float load_bias(const GemmW4Args& args, int group, int feature) {
  const int64_t index = static_cast<int64_t>(group) * args.n + feature;
  return args.float_bias ? __ldg(static_cast<const float*>(args.bias) + index)
                         : __bfloat162float(static_cast<const __nv_bfloat16*>(args.bias)[index]);
}

// first: this warp's first feature.
template <class C>
SM90_FN void add_bias(const GemmW4Args& args, int group, int first,
                      float (&d)[C::kTiles][C::kMaxTokens / 2]) {
#pragma unroll
  for (int m = 0; m < C::kTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int f = min(first + m * kChunk + threadIdx.x % 32 / 4 + 8 * h, args.n - 1);
      const float bias = load_bias(args, group, f);
#pragma unroll
      for (int i = 0; i < C::kMaxTokens / 4; ++i) {
        float& v = d[m][i / 2 * 4 + h * 2 + i % 2];
        v = __fadd_rn(v, bias);
      }
    }
  }
}

// Row times group scale of each token of the item, rounded once, token i in lane i % 32: they came
// with its first stage.
template <class C, int kCount>
SM90_FN void load_scales(const GemmW4Args& args, const Item& item, int stage,
                         float (&scale)[kCount]) {
  const float by_group = __int_as_float(load_shared(shared_base() + C::kInfo + 32 * stage + 16));
  const uint32_t from = shared_base() + args.row_scales + stage * C::kScaleBytes +
                        (item.row % 4 + threadIdx.x % 32) * 4;
  const float all = args.row_scale && args.one_row_scale ? __ldg(args.row_scale) : 1.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    scale[i] = all;
    if (has_row_scales(args) && i * 32 + threadIdx.x % 32 < item.num_rows) {
      scale[i] = __int_as_float(load_shared(from + i * 128));
    }
    scale[i] = __fmul_rn(scale[i], by_group);
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

// Rounded, and turned to rows of tokens in shared memory. A row's 16-byte units trade places with
// the token's number: no bank conflicts.
template <class C>
SM90_FN void stage_bf16(int num_rows, const float (&d)[C::kTiles][C::kMaxTokens / 2]) {
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  // 8 x 8 matrices (token half, feature half); lanes 0-7, 8-15, ... address their rows.
  const int unit = (warp % 4 * 2 + lane / 8 % 2) ^ (lane % 8), token = lane % 8 + lane / 16 * 8;
  const uint32_t to =
      shared_base() + C::kOutput + warp / 4 * C::kOutputBytes + token * C::kRowBytes + unit * 16;
#pragma unroll
  for (int j = 0; j < C::kMaxTokens; j += 16) {
    if (j >= num_rows) break;
#pragma unroll
    for (int m = 0; m < C::kTiles; ++m) {
      const float* v = &d[m][j / 2];
      store_matrices_transposed(to + j * C::kRowBytes + m * 128,
                                {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                 pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])});
    }
  }
}

// Tells the writing warps that a warp's part of an item is there. num_rows of 0 ends their work.
template <class C>
SM90_FN void pass_output(const Item& item, int group, int round) {
  if (item.num_rows == 0) {
    barrier_wait(shared_base() + C::kOutEmpty + 8 * group, round % 2 ^ 1);
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    if (threadIdx.x % 128 == 0) post_item(shared_base() + C::kOutInfo + 16 * group, item);
    barrier_arrive(shared_base() + C::kOutFull + 8 * group);
  }
}

// Products times scales, token i's in lane i % 32.
template <class C, class T, int kCount>
SM90_FN void scale_products(float (&scale)[kCount], float (&d)[C::kTiles][C::kMaxTokens / 2]) {
  const int lane = threadIdx.x % 32;
  constexpr float kLift = WeightDecoder<T>::kLift;
  // The factor that decoding left out goes into the scale, or, should that overflow, into d first.
  bool huge = false;
#pragma unroll
  for (float s : scale) huge |= fabsf(s) >= 0x1p120f;
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
}

// Scales, adds the bias, rounds, and leaves the output to the writing warps, or as FP32 stores it.
// A warp works alone: 16 features of every token. What is rarely asked for stands apart: this code
// runs once an item, from memory rather than from the instruction cache.
template <class C, class T, int kCount>
SM90_FN void store_item(const GemmW4Args& args, const Item& item, int round, float (&scale)[kCount],
                        float (&d)[C::kTiles][C::kMaxTokens / 2]) {
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
  scale_products<C, T>(scale, d);
  const int first =
      (item.feature_tile * C::kChunks + warp / 4 * C::kTiles) * kChunk + warp % 4 * 16;
  if (args.bias) add_bias<C>(args, item.group, first, d);
  if (args.float_out) {
#pragma unroll
    for (int m = 0; m < C::kTiles; ++m) store_float<C>(args, item, first + m * kChunk, d[m]);
    return;
  }
  barrier_wait(shared_base() + C::kOutEmpty + warp / 4 * 8, round % 2 ^ 1);
  stage_bf16<C>(item.num_rows, d);
  pass_output<C>(item, warp / 4, round);
}

// ---- the writing warps ----

// One warpgroup's part of an item's output, whole rows of it at a time.
template <class C>
SM90_FN void write_output(const GemmW4Args& args, const Item& item, int group) {
  constexpr int kUnits = C::kRowBytes / 16, kRows = 32 / kUnits * C::kWriters, kBatch = 4;
  const int writer = threadIdx.x - C::kGroups * 128 - 64, unit = writer % kUnits;
  const int first = writer / kUnits;
  const int f = (item.feature_tile * C::kChunks + group * C::kTiles) * kChunk + unit * 8;
  const int num_rows = f < args.n ? item.num_rows : 0;
  const uint32_t from = shared_base() + C::kOutput + group * C::kOutputBytes;
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(args.out) + f;
  for (int base = first; base < num_rows; base += kRows * kBatch) {
    uint4 v[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int row = base + j * kRows;
      if (row < num_rows) {
        v[j] = load_shared_16(from + row * C::kRowBytes + (unit ^ row % 8) * 16);
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int row = base + j * kRows;
      if (row < num_rows) {
        *reinterpret_cast<uint4*>(out + static_cast<int64_t>(item.row + row) * args.n) = v[j];
      }
    }
  }
}

// Stores the outputs of the multiplying warpgroups as they come.
template <class C>
SM90_FN void write_items(const GemmW4Args& args) {
  for (int round = 0, more = !args.float_out; more; ++round) {
    for (int group = 0; group < C::kGroups; ++group) {
      barrier_wait(shared_base() + C::kOutFull + 8 * group, round % 2);
      const Item item = posted_item(shared_base() + C::kOutInfo + 16 * group);
      more = item.num_rows;
      write_output<C>(args, item, group);
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(shared_base() + C::kOutEmpty + 8 * group);
    }
  }
}

}  // namespace megatron_nvfp4::cuda
