// The bits of NVFP4 and MXFP8 for C++ and CUDA: quant/nvfp4.py and quant/mxfp8.py function by
// function.
//
// Every operation is one FP32 round-to-nearest-even with subnormals: device code says so by
// intrinsic, host code must be compiled with -ffp-contract=off. All functions are free of branches,
// so that a loop over them vectorises, and of memory, so that they compile into any instruction
// set.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define NVFP4_FN static __host__ __device__ __forceinline__
#else
// Inlined by force: a copy shared between files compiled for different instruction sets would run
// instructions that the machine at hand may not have.
#define NVFP4_FN static inline __attribute__((always_inline))
#endif

// cvt to E2M1 exists on architecture (a) and family (f) specific targets of Blackwell only.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 1000) && \
    (defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__))
#define NVFP4_HARDWARE_E2M1 1
#else
#define NVFP4_HARDWARE_E2M1 0
#endif
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 890)
#define NVFP4_HARDWARE_E4M3 1
#else
#define NVFP4_HARDWARE_E4M3 0
#endif

namespace megatron_nvfp4 {

constexpr int kBlock = 16;
constexpr int kMxfp8Block = 32;
constexpr float kE2m1Max = 6.0f;
constexpr float kE4m3Max = 448.0f;
constexpr float kFltMax = 3.402823466e38f;
constexpr float kSixth = 1.0f / 6.0f;           // fp32(1/6), 0x3E2AAAAB
constexpr float kMxfp8Inverse = 1.0f / 448.0f;  // fp32(1/448), 0x3B124925

enum class FourOverSix : int { kOff = 0, kMae = 1, kMse = 2 };

// ---- one rounding per operation ----

NVFP4_FN uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

NVFP4_FN float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

#if defined(__CUDA_ARCH__)
NVFP4_FN float multiply(float a, float b) { return __fmul_rn(a, b); }
NVFP4_FN float add(float a, float b) { return __fadd_rn(a, b); }
NVFP4_FN float subtract(float a, float b) { return __fsub_rn(a, b); }
NVFP4_FN float divide(float a, float b) { return __fdiv_rn(a, b); }
NVFP4_FN float reciprocal(float a) { return __frcp_rn(a); }
#else
NVFP4_FN float multiply(float a, float b) { return a * b; }
NVFP4_FN float add(float a, float b) { return a + b; }
NVFP4_FN float subtract(float a, float b) { return a - b; }
NVFP4_FN float divide(float a, float b) { return a / b; }
NVFP4_FN float reciprocal(float a) { return 1.0f / a; }
#endif

// condition ? yes : no with both sides computed: a host compiler that honours floating-point
// exceptions would rather branch around one of them, and not vectorise.
NVFP4_FN uint32_t select(bool condition, uint32_t yes, uint32_t no) {
#if defined(__CUDA_ARCH__)
  return condition ? yes : no;
#else
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
#endif
}

NVFP4_FN float select(bool condition, float yes, float no) {
  return float_of(select(condition, bits_of(yes), bits_of(no)));
}

// Of two numbers below 2^31: signed, because most vector units compare only signed integers.
NVFP4_FN uint32_t minimum(uint32_t a, uint32_t b) {
  return static_cast<int32_t>(a) < static_cast<int32_t>(b) ? a : b;
}

NVFP4_FN float absolute(float x) { return float_of(bits_of(x) & 0x7FFFFFFFu); }

// min(x, bound); a NaN x stays NaN, as in torch.clamp_max.
NVFP4_FN float clamp_max(float x, float bound) { return select(bound < x, bound, x); }

// max(amax, |x|) of an amax that is no NaN; a NaN x does not take part.
NVFP4_FN float max_magnitude(float amax, float x) {
#if defined(__CUDA_ARCH__)
  return fmaxf(amax, fabsf(x));
#else
  return absolute(x) > amax ? absolute(x) : amax;
#endif
}

// ---- element formats ----

// Software encode_e4m3, on the host and before sm_89.
NVFP4_FN uint32_t encode_e4m3_software(float x) {
  const uint32_t sign = (bits_of(x) >> 24) & 0x80u;
  const float magnitude = clamp_max(absolute(x), kE4m3Max);
  const uint32_t bits = bits_of(magnitude);
  // Round off 20 mantissa bits, ties to even, and move the exponent's bias from 127 to 7.
  const uint32_t normal = ((bits + 0x7FFFFu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 the step is 2^-9, the spacing of floats at 2^14: the addition rounds.
  const uint32_t subnormal = bits_of(add(magnitude, 16384.0f)) & 0xFu;
  const uint32_t code = sign | select(magnitude < 0.015625f, subnormal, normal);
  return select(magnitude == magnitude, code, 0x7Fu);
}

// FP32 to E4M3 (FN) bits, ties to even, saturating at +-448, sign of zero kept, NaN to 0x7F.
NVFP4_FN uint32_t encode_e4m3(float x) {
#if NVFP4_HARDWARE_E4M3
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return pair & 0xFFu;
#else
  return encode_e4m3_software(x);
#endif
}

// E4M3 (FN) bits 0..255 to FP32, exact; 0x7F and 0xFF are NaN.
NVFP4_FN float decode_e4m3(uint32_t code) {
  const uint32_t low = code & 0x7Fu;
  const uint32_t sign = (code & 0x80u) << 24;
  // With exponent field 0 the value is m * 2^-9 = (1 + m/8) * 2^-6 - 2^-6.
  const float subnormal = subtract(float_of((low << 20) + (121u << 23)), 0.015625f);
  const uint32_t finite = select(low < 8u, bits_of(subnormal), (low << 20) + (120u << 23));
  return float_of(sign | select(low == 0x7Fu, 0x7FC00000u, finite));
}

// Software encode_e2m1, on the host and before sm_100a.
//
// E2M1 steps by 1/2 up to 2, by 1 up to 4 and by 2 up to 6: in units of codes the map is the
// smallest of 2|x|, |x| + 2, |x|/2 + 4 and 7. Rounding is monotonic, so each may be rounded first.
// One addition rounds it to an integer, ties to even, because from 2^23 on the floats are the
// integers. Positive floats order like their bits, and a NaN's bits exceed all of them, which
// leaves the 7.
NVFP4_FN uint32_t encode_e2m1_software(float x) {
  constexpr float kIntegers = 8388608.0f;  // 0x4B000000
  const float magnitude = absolute(x);
  const uint32_t halves = bits_of(add(multiply(magnitude, 2.0f), kIntegers));
  const uint32_t ones = bits_of(add(magnitude, kIntegers + 2.0f));
  const uint32_t twos = bits_of(add(multiply(magnitude, 0.5f), kIntegers + 4.0f));
  const uint32_t code = minimum(minimum(halves, ones), minimum(twos, 0x4B000007u)) & 7u;
  return x == x ? code | ((bits_of(x) >> 28) & 8u) : code;
}

// Codes of two neighbours in one byte, the even column's in the low nibble.
NVFP4_FN uint32_t encode_e2m1x2(float even, float odd) {
#if NVFP4_HARDWARE_E2M1
  uint32_t byte;
  asm("{ .reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, %2, %1; cvt.u32.u8 %0, t; }"
      : "=r"(byte)
      : "f"(even), "f"(odd));
  return byte;
#else
  return encode_e2m1_software(even) | (encode_e2m1_software(odd) << 4);
#endif
}

// FP32 to an E2M1 code 0..15: ties to even, saturating, sign of zero kept, NaN to +6 (7).
NVFP4_FN uint32_t encode_e2m1(float x) {
#if NVFP4_HARDWARE_E2M1
  return encode_e2m1x2(x, 0.0f);
#else
  return encode_e2m1_software(x);
#endif
}

// E2M1 code 0..15 to FP32, exact.
NVFP4_FN float decode_e2m1(uint32_t code) {
  const uint32_t low = code & 7u;
  const uint32_t subnormal = (0u - low) & 0x3F000000u;  // 0 or 1/2
  const uint32_t magnitude = low < 2u ? subnormal : (low << 22) + (126u << 23);
  return float_of(((code & 8u) << 28) | magnitude);
}

// ---- NVFP4 ----

// S_enc of an amax; e4m3_max is 448 or 256.
NVFP4_FN float encode_scale(float amax, int e4m3_max) {
  const float scale = clamp_max(divide(static_cast<float>(e4m3_max) * kE2m1Max, amax), kFltMax);
  return select((amax == 0.0f) | (scale == 0.0f), 1.0f, scale);
}

// S_dec of an S_enc.
NVFP4_FN float decode_scale(float s_enc) { return reciprocal(s_enc); }

// E4M3 scale of a block, without four-over-six.
NVFP4_FN uint32_t block_scale(float block_amax, float s_enc) {
  return encode_e4m3(clamp_max(multiply(block_amax, multiply(s_enc, kSixth)), kFltMax));
}

// What a block's elements are multiplied by before encode_e2m1; scale is the decoded block scale.
NVFP4_FN float block_multiplier(float scale, float s_dec) {
  return clamp_max(reciprocal(multiply(scale, s_dec)), kFltMax);
}

// The unrounded scale of a block under four-over-six.
NVFP4_FN float four_over_six_base(float block_amax, float s_enc) {
  return multiply(divide(block_amax, kE2m1Max), s_enc);
}

// E4M3 scale that maps a block's amax to 6.
NVFP4_FN uint32_t scale_by_six(float base) { return encode_e4m3(base); }

// E4M3 scale that maps a block's amax to 4.
NVFP4_FN uint32_t scale_by_four(float base) { return encode_e4m3(multiply(base, 1.5f)); }

// q * s_b, exact in FP32, BF16 and FP16.
NVFP4_FN float code_times_scale(uint32_t code, float scale) {
  return multiply(decode_e2m1(code), scale);
}

// Difference of an element from its decoded value; divisor is 6 * e4m3_max.
NVFP4_FN float strict_difference(float scaled, float x, float amax, float divisor) {
  return subtract(divide(multiply(scaled, amax), divisor), x);
}

// The same in units of the encoded element: fp16(scaled), which is exact, against x * S_enc.
NVFP4_FN float fast_difference(float scaled, float x, float s_enc) {
  return subtract(scaled, multiply(x, s_enc));
}

// One element's share of a block's error. A block adds its elements 0..15 in sequence, starting at
// 0; a 16x16 tile then adds its rows by tree_sum. Four is taken where its error is less than six's.
NVFP4_FN float error_term(float difference, FourOverSix metric) {
  return metric == FourOverSix::kMae ? absolute(difference) : multiply(difference, difference);
}

// Sum of 16 values as a tree with strides 8, 4, 2, 1; overwrites them.
NVFP4_FN float tree_sum(float (&values)[kBlock]) {
  for (int stride = kBlock / 2; stride > 0; stride /= 2) {
    for (int i = 0; i < stride; ++i) values[i] = add(values[i], values[i + stride]);
  }
  return values[0];
}

// ---- MXFP8 ----

// Biased exponent 0..254 of the power of two at or above x >= 0; Inf saturates.
NVFP4_FN uint32_t encode_e8m0(float x) {
  const uint32_t exponent = bits_of(x) >> 23;
  const uint32_t mantissa = bits_of(x) & 0x7FFFFFu;
  // A subnormal up to 2^-127 is covered by exponent 0, the value 2^-127.
  const uint32_t covered = select(exponent == 0u, 0x400000u, 0u);
  const uint32_t up = exponent + static_cast<uint32_t>(mantissa > covered);
  return minimum(up, 254u);
}

// Exponent of a block of 32.
NVFP4_FN uint32_t mxfp8_block_scale(float block_amax) {
  return encode_e8m0(multiply(block_amax, kMxfp8Inverse));
}

// 2^(127 - e) for e in 0..254: what a block's elements are multiplied by before encode_e4m3.
NVFP4_FN float mxfp8_block_multiplier(uint32_t e) {
  return float_of(select(e == 254u, 0x00400000u, (254u - e) << 23));  // 2^-127 is subnormal
}

// q * 2^(e - 127), exact unless it overflows; q is a decoded E4M3 code, e an exponent 0..254.
NVFP4_FN float mxfp8_decode(float q, uint32_t e) {
  return multiply(q, float_of(select(e == 0u, 0x00400000u, e << 23)));
}

}  // namespace megatron_nvfp4
