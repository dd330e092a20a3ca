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

// -q * 2^-6 with q the E2M1 value nearest to y * 2^6, for |y| < 7 * 2^-6; a zero has either sign.
//
// Above 1 the subtractions of c = |y| * 2^22 + y leave the two leading bits of y, rounded to even;
// below, c is the constant that leaves multiples of 1/2. A NaN stays NaN.
NVFP4_FN float negated_e2m1(float y) {
  const float c = larger(fused(absolute(y), 4194304.0f, y), 1.5f * 4194304.0f * kCodeScale);
  return subtract(subtract(c, y), c);
}

// q * 2^-6 with the sign of y on a zero; r = negated_e2m1(y). The sum rounds back to q unless q is
// zero.
NVFP4_FN float signed_e2m1(float y, float r) { return fused(y, 9.313225746154785e-10f, -r); }

// E4M3 bits of two floats, the first in the low byte.
NVFP4_FN uint32_t encode_e4m3x2(float low, float high) {
#if NVFP4_HARDWARE_E4M3
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return encode_e4m3_software(low) | (encode_e4m3_software(high) << 8);
#endif
}

// Eight rounded elements as E4M3 bytes S00CCC00 with the code SCCC: the even ones and the odd ones.
struct WideCodes {
  uint32_t even, odd;
};

NVFP4_FN WideCodes widen_codes(const float (&q)[8]) {
  return {encode_e4m3x2(q[0], q[2]) | (encode_e4m3x2(q[4], q[6]) << 16),
          encode_e4m3x2(q[1], q[3]) | (encode_e4m3x2(q[5], q[7]) << 16)};
}

// Their codes, the first element's in the lowest nibble. A NaN byte, 0x7F, becomes code 7.
NVFP4_FN uint32_t narrow_codes(WideCodes wide) {
  const uint32_t even = ((wide.even >> 2) & 0x07070707u) | ((wide.even >> 4) & 0x08080808u);
  return even | (wide.odd & 0x80808080u) | ((wide.odd << 2) & 0x70707070u);
}

// Codes of eight elements y * 2^6, |y| < 7 * 2^-6 or NaN.
NVFP4_FN uint32_t encode8(const float (&y)[8]) {
#if NVFP4_HARDWARE_E2M1
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    codes |= encode_e2m1x2(multiply(y[2 * i], 64.0f), multiply(y[2 * i + 1], 64.0f)) << (8 * i);
  }
  return codes;
#else
  float q[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) q[i] = signed_e2m1(y[i], negated_e2m1(y[i]));
  return narrow_codes(widen_codes(q));
#endif
}

// What all blocks of a row share. `ordinary`: the functions above may be used.
struct Outer {
  float amax, s_enc, s_dec;
  bool ordinary;
};

NVFP4_FN Outer outer_of(float amax, int e4m3_max) {
  Outer outer;
  outer.amax = amax;
  outer.s_enc = encode_scale(amax, e4m3_max);
  outer.s_dec = decode_scale(outer.s_enc);
  outer.ordinary = (amax == 0.0f) | ((amax >= kOrdinaryMin) & (amax <= kOrdinaryMax));
  return outer;
}

// block_multiplier * 2^-6 of an ordinary row.
NVFP4_FN float fast_multiplier(float scale, float s_dec) {
  // A zero scale leaves NaN, which gives way to the bound.
  const float z = multiply(scale, multiply(s_dec, 1.0f / kCodeScale));
  return smaller(fast_reciprocal(z), kFltMax * kCodeScale);
}

// Whether the fast functions may encode a block: none of its elements reaches 7. Only a block whose
// scale is subnormal or was made for a smaller amax can.
NVFP4_FN bool is_ordinary(float block_amax, float multiplier) {
  return multiply(block_amax, multiplier) < 6.99f * kCodeScale;
}

// One element's term of a four-over-six error; r = negated_e2m1. strict needs inverse = RN(1 /
// divisor).
template <FourOverSix metric, bool fast>
NVFP4_FN float fast_error_term(float r, float scale64, float x, float x_scaled, const Outer& outer,
                               float divisor, float inverse) {
  float difference;
  if (fast) {
    difference = fused(-r, scale64, -x_scaled);  // q * s_b is exact, so this rounds once
  } else {
    const float decoded = multiply(multiply(-r, scale64), outer.amax);
    difference = subtract(fast_divide(decoded, divisor, inverse), x);
  }
  return error_term(difference, metric);
}

}  // namespace megatron_nvfp4::cuda
