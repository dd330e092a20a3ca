// Input types of the CUDA quantisers: a block of 16 elements as 32-bit words in registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fast_block.h"

namespace megatron_nvfp4::cuda {

#define NVFP4_DEVICE static __device__ __forceinline__
#define NVFP4_DEVICE_MEMBER __device__ __forceinline__

// Whatever T is, T::amax is a NaN if the block holds one, and the bits of a NaN exceed those of
// every number: a maximum over such bits keeps it. largest_number leaves NaNs out.

// max(|a|, |b|) of both halves under any signs, NaN if either is.
template <bool kBFloat16>
NVFP4_DEVICE uint32_t max_magnitude2(uint32_t a, uint32_t b) {
  uint32_t m;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  if constexpr (kBFloat16) {
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  }
#else
  // Both formats order like their bits.
  const uint32_t low_a = a & 0x7FFFu, low_b = b & 0x7FFFu;
  const uint32_t high_a = a & 0x7FFF0000u, high_b = b & 0x7FFF0000u;
  m = (low_a > low_b ? low_a : low_b) | (high_a > high_b ? high_a : high_b);
#endif
  return m;
}

// Both halves of the result are max |x| of a block of packed 16-bit words, under any sign.
template <bool kBFloat16>
NVFP4_DEVICE uint32_t amax_of_pairs(const uint32_t (&words)[8]) {
  uint32_t m[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) m[i] = max_magnitude2<kBFloat16>(words[i], words[i + 4]);
  m[0] = max_magnitude2<kBFloat16>(m[0], m[1]);
  m[2] = max_magnitude2<kBFloat16>(m[2], m[3]);
  m[0] = max_magnitude2<kBFloat16>(m[0], m[2]);
  return max_magnitude2<kBFloat16>(m[0], __byte_perm(m[0], 0, 0x1032));
}

// Signs of elements 8 * half .. 8 * half + 7 of a block of packed 16-bit words.
NVFP4_DEVICE Signs signs_of_pairs(const uint32_t (&words)[8], int half) {
  const uint32_t left = __byte_perm(words[4 * half], words[4 * half + 1], 0x7351);
  const uint32_t right = __byte_perm(words[4 * half + 2], words[4 * half + 3], 0x7351);
  return {__byte_perm(left, right, 0x5410), __byte_perm(left, right, 0x7632)};
}

struct BFloat16Input {
  static constexpr int kWords = 8;  // per block
  static constexpr int kBytes = 2;  // per element
  NVFP4_DEVICE float even(uint32_t word) { return float_of(word << 16); }
  NVFP4_DEVICE float odd(uint32_t word) { return float_of(word & 0xFFFF0000u); }
  NVFP4_DEVICE float element(const uint32_t (&words)[8], int i) {
    return i % 2 ? odd(words[i / 2]) : even(words[i / 2]);
  }
  NVFP4_DEVICE float magnitude(const uint32_t (&words)[8], int i) {
    return i % 2 ? float_of(words[i / 2] & 0x7FFF0000u) : fabsf(float_of(words[i / 2] << 16));
  }
  NVFP4_DEVICE Signs signs(const uint32_t (&words)[8], int half) {
    return signs_of_pairs(words, half);
  }
  NVFP4_DEVICE float amax(const uint32_t (&words)[8]) {
    return float_of(amax_of_pairs<true>(words) & 0x7FFF0000u);
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
  NVFP4_DEVICE float magnitude(const uint32_t (&words)[8], int i) {
    return fabsf(element(words, i));
  }
  NVFP4_DEVICE Signs signs(const uint32_t (&words)[8], int half) {
    return signs_of_pairs(words, half);
  }
  NVFP4_DEVICE float amax(const uint32_t (&words)[8]) {
    const uint32_t m = amax_of_pairs<false>(words) & 0x7FFFu;
    return even(m);
  }
  NVFP4_DEVICE float load(const void* x, int64_t i) {
    return even(static_cast<const uint16_t*>(x)[i]);
  }
};

struct FloatInput {
  static constexpr int kWords = 16;
  static constexpr int kBytes = 4;
  NVFP4_DEVICE float element(const uint32_t (&words)[16], int i) { return float_of(words[i]); }
  NVFP4_DEVICE float magnitude(const uint32_t (&words)[16], int i) {
    return fabsf(float_of(words[i]));
  }
  NVFP4_DEVICE Signs signs(const uint32_t (&words)[16], int half) {
    const uint32_t* w = words + 8 * half;
    return {__byte_perm(__byte_perm(w[0], w[2], 0x0073), __byte_perm(w[4], w[6], 0x0073), 0x5410),
            __byte_perm(__byte_perm(w[1], w[3], 0x0073), __byte_perm(w[5], w[7], 0x0073), 0x5410)};
  }
  NVFP4_DEVICE float amax(const uint32_t (&words)[16]) {
    uint32_t m = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) m = max(m, words[i] & 0x7FFFFFFFu);
    return float_of(m);
  }
  NVFP4_DEVICE float load(const void* x, int64_t i) { return static_cast<const float*>(x)[i]; }
};

NVFP4_DEVICE bool is_nan(float x) { return !(x == x); }

// Larger of two magnitudes; a NaN wins.
NVFP4_DEVICE float larger_bits(float a, float b) { return float_of(max(bits_of(a), bits_of(b))); }

// max |x| of a block's numbers, 0 if there are none.
template <class T>
NVFP4_DEVICE float largest_number(const uint32_t (&words)[T::kWords]) {
  float m = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) m = fmaxf(m, T::magnitude(words, i));
  return m;
}

// A block from 16-byte aligned memory.
template <class T>
NVFP4_DEVICE void load_block(const uint4* p, uint32_t (&words)[T::kWords]) {
#pragma unroll
  for (int i = 0; i < T::kWords / 4; ++i) {
    const uint4 v = __ldg(p + i);
    words[4 * i] = v.x;
    words[4 * i + 1] = v.y;
    words[4 * i + 2] = v.z;
    words[4 * i + 3] = v.w;
  }
}

// Maximum over aligned runs of `width` lanes, a power of two, of magnitudes by their bits.
NVFP4_DEVICE float max_over_lanes(float x, int width) {
  uint32_t m = bits_of(x);
#if __CUDA_ARCH__ >= 800
  if (width == 32) return float_of(__reduce_max_sync(0xFFFFFFFFu, m));
#endif
  for (int offset = width / 2; offset > 0; offset /= 2) {
    m = max(m, static_cast<uint32_t>(__shfl_xor_sync(0xFFFFFFFFu, static_cast<int>(m), offset)));
  }
  return float_of(m);
}

// Index of the row group that holds `row`: the number of groups that end at or before it. The lanes
// of an aligned run of `width`, all with the same row, search together. num_groups if no group
// holds it.
NVFP4_DEVICE int find_group(const int64_t* offsets, int num_groups, int64_t row, int lane,
                            int width) {
  int before = 0;
#pragma unroll 1
  for (int g = lane; g < num_groups; g += width) before += __ldg(offsets + g + 1) <= row;
  for (int offset = width / 2; offset > 0; offset /= 2) {
    before += __shfl_xor_sync(0xFFFFFFFFu, before, offset);
  }
  return before;
}

}  // namespace megatron_nvfp4::cuda
