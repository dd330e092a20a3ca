// The random Hadamard transform, random bits and stochastic rounding for C++ and CUDA: what
// quant/transforms.py and encode_e2m1_stochastic in quant/nvfp4.py define. Rules as in numerics.h.
#pragma once

#include "numerics.h"

#if defined(__CUDACC__)
#define NVFP4_UNROLL _Pragma("unroll")
#else
#define NVFP4_UNROLL
#endif

namespace megatron_nvfp4 {

constexpr uint32_t kNegativeSigns = 0xD7E8u;  // bit i: element i changes its sign

// FP32 to the nearest BF16, as FP32; ties to even.
NVFP4_FN float round_to_bfloat16(float x) {
#if defined(__CUDA_ARCH__)
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return float_of(static_cast<uint32_t>(bits) << 16);
#else
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u;
  return float_of(select(x == x, rounded, 0x7FC00000u));
#endif
}

// Transforms kWidth blocks, element i of block l being x[i][l], and rounds to BF16.
template <int kWidth>
NVFP4_FN void rotate(float (&x)[kBlock][kWidth]) {
  NVFP4_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    const float factor = (kNegativeSigns >> i) & 1u ? -0.25f : 0.25f;
    NVFP4_UNROLL
    for (int l = 0; l < kWidth; ++l) x[i][l] = multiply(x[i][l], factor);
  }
  NVFP4_UNROLL
  for (int stride = 1; stride < kBlock; stride *= 2) {
    NVFP4_UNROLL
    for (int k = 0; k < kBlock / 2; ++k) {
      const int i = k / stride * 2 * stride + k % stride;
      NVFP4_UNROLL
      for (int l = 0; l < kWidth; ++l) {
        const float a = x[i][l], b = x[i + stride][l];
        x[i][l] = add(a, b);
        x[i + stride][l] = subtract(a, b);
      }
    }
  }
  NVFP4_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    NVFP4_UNROLL
    for (int l = 0; l < kWidth; ++l) x[i][l] = round_to_bfloat16(x[i][l]);
  }
}

// What random bits are a function of, beside the element.
struct RandomKey {
  uint64_t seed, offset;
};

NVFP4_FN uint32_t multiply_high(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __umulhi(a, b);
#else
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
#endif
}

// Random bits of the eight elements 8 * group and on, two in a word, the first in the low half.
// Philox4x32-10 at the counter (group, key.offset).
NVFP4_FN void random_words(uint64_t group, const RandomKey& key, uint32_t (&words)[4]) {
  uint32_t c0 = static_cast<uint32_t>(group), c1 = static_cast<uint32_t>(group >> 32);
  uint32_t c2 = static_cast<uint32_t>(key.offset), c3 = static_cast<uint32_t>(key.offset >> 32);
  uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  NVFP4_UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = multiply_high(c0, 0xD2511F53u), low0 = c0 * 0xD2511F53u;
    const uint32_t high1 = multiply_high(c2, 0xCD9E8D57u), low1 = c2 * 0xCD9E8D57u;
    c0 = high1 ^ c1 ^ k0;
    c2 = high0 ^ c3 ^ k1;
    c1 = low1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// Bits 0..65535 of element i of a group.
NVFP4_FN uint32_t random_bits(const uint32_t (&words)[4], int i) {
  return words[i / 2] >> (16 * (i % 2)) & 0xFFFFu;
}

// FP32 to an E2M1 code 0..15, up or down by `bits`.
NVFP4_FN uint32_t encode_e2m1_stochastic(float x, uint32_t bits) {
  const float size = absolute(x);
  const float magnitude = select(size < kE2m1Max, size, kE2m1Max);  // NaN too
  const float step = select(magnitude < 2.0f, 0.5f, select(magnitude < 4.0f, 1.0f, 2.0f));
  const float u = multiply(add(static_cast<float>(static_cast<int32_t>(bits)), 0.5f), 0x1p-16f);
  const float t = add(magnitude, multiply(u, step));
  // In units of codes, as in encode_e2m1_software, but rounded down.
  const uint32_t halves = static_cast<uint32_t>(static_cast<int32_t>(multiply(t, 2.0f)));
  const uint32_t ones = static_cast<uint32_t>(static_cast<int32_t>(t)) + 2u;
  const uint32_t twos = static_cast<uint32_t>(static_cast<int32_t>(multiply(t, 0.5f))) + 4u;
  const uint32_t code = minimum(halves, minimum(ones, twos));
  return select(x == x, code | ((bits_of(x) >> 28) & 8u), code);
}

}  // namespace megatron_nvfp4
