// The arithmetic of numerics.h made cheap for ordinary data, with the same bits.
//
// Each function names the inputs for which it equals its counterpart in numerics.h;
// check_numerics.cu compares them over all such inputs. What lies outside goes through numerics.h
// itself. Host code can include this file, too, to compare on a machine without a GPU.
#pragma once

#include <cmath>

#include "../numerics.h"

namespace megatron_nvfp4::cuda {

// Elements are scaled by 2^-6 so that a rounded one is a float whose E4M3 bits hold its E2M1 code.
constexpr float kCodeScale = 0.015625f;
// Outer amaxes for which every factor of the encoding stays normal.
constexpr float kOrdinaryMin = 8.0e-28f;
constexpr float kOrdinaryMax = 1.2e27f;

NVFP4_FN float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// fmaxf: a NaN gives way.
NVFP4_FN float larger(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fmaxf(a, b);
#else
  return a > b ? a : b;
#endif
}

NVFP4_FN float smaller(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fminf(a, b);
#else
  return a < b ? a : b;
#endif
}

// reciprocal(x) for exponent fields 3..251, NaN for 0: one Newton step on the hardware's
// approximation.
NVFP4_FN float fast_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
#else
  const float y = 1.0f / x;
#endif
  return fused(y, fused(-x, y, 1.0f), y);
}

// divide(x, divisor) for divisor 6 and |x| > 1e-35, for 6 * 256 and 6 * 448 and |x| > 1e-31, and
// for 0 but its sign; inverse is RN(1 / divisor). The remainder of the first quotient is exact, and
// corrects it.
NVFP4_FN float fast_divide(float x, float divisor, float inverse) {
  const float q = multiply(x, inverse);
  return fused(fused(-divisor, q, x), inverse, q);
}

// q * 2^-6 with q the E2M1 value nearest to y * 2^6, for 0 <= y < 7 * 2^-6.
//
// Above 1 the subtractions of c = y * (2^22 + 1) leave the two leading bits of y, rounded to even;
// below, c is the constant that leaves multiples of 1/2.
NVFP4_FN float round_e2m1(float y) {
  const float c = larger(multiply(y, 4194305.0f), 1.5f * 4194304.0f * kCodeScale);
  return subtract(c, subtract(c, y));
}

// E4M3 bits of two non-negative floats, the first in the low byte.
NVFP4_FN uint32_t encode_e4m3x2(float low, float high) {
#if NVFP4_HARDWARE_E4M3
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return encode_e4m3_software(low) | (encode_e4m3_software(high) << 8);
#endif
}

// The inverse, for a pair that holds no NaN.
NVFP4_FN void decode_e4m3x2(uint32_t pair, float& low, float& high) {
#if NVFP4_HARDWARE_E4M3
  asm("{ .reg .b32 h; .reg .b16 a, b; cvt.rn.f16x2.e4m3x2 h, %2; mov.b32 {a, b}, h;"
      " cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
      : "=f"(low), "=f"(high)
      : "h"(static_cast<uint16_t>(pair)));
#else
  low = decode_e4m3(pair & 0xFFu);
  high = decode_e4m3(pair >> 8);
#endif
}

// Signs of eight elements, in bit 7 of the bytes: of the even ones and of the odd ones. Other bits
// are anything.
struct Signs {
  uint32_t even, odd;
};

// Eight rounded magnitudes as E4M3 bytes 000CCC00 with the code CCC: the even ones and the odd
// ones.
struct WideCodes {
  uint32_t even, odd;
};

NVFP4_FN WideCodes widen_codes(const float (&q)[8]) {
  return {encode_e4m3x2(q[0], q[2]) | (encode_e4m3x2(q[4], q[6]) << 16),
          encode_e4m3x2(q[1], q[3]) | (encode_e4m3x2(q[5], q[7]) << 16)};
}

// Their codes under their signs, the first element's in the lowest nibble.
NVFP4_FN uint32_t narrow_codes(WideCodes wide, Signs signs) {
  const uint32_t magnitudes = (wide.even >> 2) + (wide.odd << 2);
  return magnitudes | (signs.odd & 0x80808080u) | ((signs.even >> 4) & 0x08080808u);
}

// What all blocks of a row share. `ordinary`: the functions above may be used.
struct Outer {
  float amax, s_enc, s_dec;
  bool ordinary;
};

NVFP4_FN bool is_ordinary_amax(float amax) {
  return (amax == 0.0f) | ((amax >= kOrdinaryMin) & (amax <= kOrdinaryMax));
}

// encode_scale of an ordinary amax: its reciprocal, and the remainder of the first quotient.
NVFP4_FN float fast_encode_scale(float amax, int e4m3_max) {
  const float dividend = static_cast<float>(e4m3_max) * kE2m1Max;
  const float inverse = fast_reciprocal(amax);
  const float q = multiply(dividend, inverse);
  return select(amax == 0.0f, 1.0f, fused(fused(-amax, q, dividend), inverse, q));
}

// Not inlined on the device: rarely run.
#if defined(__CUDACC__)
static __host__ __device__ __noinline__
#else
static inline
#endif
    Outer any_outer(float amax, int e4m3_max) {
  const float s_enc = encode_scale(amax, e4m3_max);
  return {amax, s_enc, decode_scale(s_enc), false};
}

NVFP4_FN Outer outer_of(float amax, int e4m3_max) {
  if (!is_ordinary_amax(amax)) return any_outer(amax, e4m3_max);
  const float s_enc = fast_encode_scale(amax, e4m3_max);
  return {amax, s_enc, fast_reciprocal(s_enc), true};
}

// block_multiplier * 2^-6 of an ordinary row.
NVFP4_FN float fast_multiplier(float scale, float s_dec) {
  // A zero scale leaves NaN, which gives way to the bound.
  const float z = multiply(scale, multiply(s_dec, 1.0f / kCodeScale));
  return smaller(fast_reciprocal(z), kFltMax * kCodeScale);
}

// Whether the fast functions may encode a block of an ordinary row: it holds no NaN, which would be
// its amax here, and none of its elements reaches 7. Only a block whose scale is subnormal or was
// made for a smaller amax can.
NVFP4_FN bool is_ordinary(float block_amax, float multiplier) {
  return multiply(block_amax, multiplier) < 6.99f * kCodeScale;
}

// Term of a four-over-six error of an element with magnitude x; q = round_e2m1. strict needs
// inverse = RN(1 / divisor). A difference has the other sign for a negative element, its term not.
template <FourOverSix metric, bool fast>
NVFP4_FN float fast_error_term(float q, float scale64, float x, float x_scaled, const Outer& outer,
                               float divisor, float inverse) {
  float difference;
  if (fast) {
    difference = fused(q, scale64, -x_scaled);  // q * s_b is exact, so this rounds once
  } else {
    const float decoded = multiply(multiply(q, scale64), outer.amax);
    difference = subtract(fast_divide(decoded, divisor, inverse), x);
  }
  return error_term(difference, metric);
}

}  // namespace megatron_nvfp4::cuda
