// Input types of the CUDA quantisers: a block of 16 elements as 32-bit words in registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../numerics.h"

namespace megatron_nvfp4::cuda {

#define NVFP4_DEVICE static __device__ __forceinline__

// max(|a|, |b|) of both halves; a NaN gives way to the other operand.
NVFP4_DEVICE uint32_t max_magnitude2(__nv_bfloat162 a, __nv_bfloat162 b) {
  const __nv_bfloat162 m = __hmax2(__habs2(a), __habs2(b));
  return *reinterpret_cast<const uint32_t*>(&m);
}
NVFP4_DEVICE uint32_t max_magnitude2(__half2 a, __half2 b) {
  const __half2 m = __hmax2(__habs2(a), __habs2(b));
  return *reinterpret_cast<const uint32_t*>(&m);
}

// max |x| of a block of packed 16-bit words; NaN does not take part.
template <class T, class Pair>
NVFP4_DEVICE float amax_of_pairs(const uint32_t (&words)[8]) {
  uint32_t m[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) m[i] = words[i];
#pragma unroll
  for (int stride = 4; stride > 0; stride /= 2) {
#pragma unroll
    for (int i = 0; i < stride; ++i) {
      m[i] = max_magnitude2(*reinterpret_cast<const Pair*>(&m[i]),
                            *reinterpret_cast<const Pair*>(&m[i + stride]));
    }
  }
  // The last maximum drops a NaN that a pair of NaNs has left.
  return fmaxf(fmaxf(T::even(m[0]), T::odd(m[0])), 0.0f);
}

struct BFloat16Input {
  static constexpr int kWords = 8;  // per block
  static constexpr int kBytes = 2;  // per element
  NVFP4_DEVICE float even(uint32_t word) { return float_of(word << 16); }
  NVFP4_DEVICE float odd(uint32_t word) { return float_of(word & 0xFFFF0000u); }
  NVFP4_DEVICE float element(const uint32_t (&words)[8], int i) {
    return i % 2 ? odd(words[i / 2]) : even(words[i / 2]);
  }
  NVFP4_DEVICE float amax(const uint32_t (&words)[8]) {
    return amax_of_pairs<BFloat16Input, __nv_bfloat162>(words);
  }
  NVFP4_DEVICE float load(const void* x, int64_t i) {
    return even(static_cast<const uint16_t*>(x)[i]);
  }
};

struct HalfInput {
  static constexpr int kWords = 8;
  static constexpr int kBytes = 2;
  NVFP4_DEVICE float even(uint32_t word) { return __low2float(*reinterpret_cast<__half2*>(&word)); }
  NVFP4_DEVICE float odd(uint32_t word) { return __high2float(*reinterpret_cast<__half2*>(&word)); }
  NVFP4_DEVICE float element(const uint32_t (&words)[8], int i) {
    return i % 2 ? odd(words[i / 2]) : even(words[i / 2]);
  }
  NVFP4_DEVICE float amax(const uint32_t (&words)[8]) {
    return amax_of_pairs<HalfInput, __half2>(words);
  }
  NVFP4_DEVICE float load(const void* x, int64_t i) {
    return even(static_cast<const uint16_t*>(x)[i]);
  }
};

struct FloatInput {
  static constexpr int kWords = 16;
  static constexpr int kBytes = 4;
  NVFP4_DEVICE float element(const uint32_t (&words)[16], int i) { return float_of(words[i]); }
  NVFP4_DEVICE float amax(const uint32_t (&words)[16]) {
    float m = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) m = fmaxf(m, fabsf(float_of(words[i])));
    return m;
  }
  NVFP4_DEVICE float load(const void* x, int64_t i) { return static_cast<const float*>(x)[i]; }
};

// A block from 16-byte aligned memory, zeros if it is not `valid`.
template <class T>
NVFP4_DEVICE void load_block(const uint4* p, bool valid, uint32_t (&words)[T::kWords]) {
#pragma unroll
  for (int i = 0; i < T::kWords / 4; ++i) {
    const uint4 v = valid ? __ldg(p + i) : uint4{0, 0, 0, 0};
    words[4 * i] = v.x;
    words[4 * i + 1] = v.y;
    words[4 * i + 2] = v.z;
    words[4 * i + 3] = v.w;
  }
}

// Maximum over lanes of non-negative values, whose bits order like the values; width is a power of
// two.
NVFP4_DEVICE float max_over_lanes(float x, int width) {
#if __CUDA_ARCH__ >= 800
  if (width == 32) return float_of(__reduce_max_sync(0xFFFFFFFFu, bits_of(x)));
#endif
  for (int offset = width / 2; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, offset));
  }
  return x;
}

// Index of the row group that holds `row`: the number of groups that end at or before it. The lanes
// of an aligned run of `width`, all with the same row, search together. num_groups if no group
// holds it.
NVFP4_DEVICE int find_group(const int64_t* offsets, int num_groups, int64_t row, int lane,
                            int width) {
  int before = 0;
  for (int g = lane; g < num_groups; g += width) before += __ldg(offsets + g + 1) <= row;
  for (int offset = width / 2; offset > 0; offset /= 2) {
    before += __shfl_xor_sync(0xFFFFFFFFu, before, offset);
  }
  return before;
}

}  // namespace megatron_nvfp4::cuda
