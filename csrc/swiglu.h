// SiLU of a BF16 number, for C++ and CUDA, as quant/swiglu.py defines it.
#pragma once

#include <cmath>

#include "numerics.h"

namespace megatron_nvfp4 {

constexpr float kGateMin = -87.0f;

NVFP4_FN float multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// x bounded from below; a NaN stays.
NVFP4_FN float clamp_gate(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(kGateMin));
  return y;
#else
  return x < kGateMin ? kGateMin : x;
#endif
}

// exp(-x) for a BF16 number x in -87 .. 87, to about 2^-23: 2^n * exp(f), |f| <= ln(2) / 2.
NVFP4_FN float exp_of_minus(float x) {
  // The addition leaves n in the low bits.
  const float shifted = multiply_add(x, -1.44269504f, 12582912.0f);
  const float n = subtract(shifted, 12582912.0f);
  const float f = multiply_add(n, -1.42860677e-6f, multiply_add(n, -0.693145752f, -x));
  float e = 8.37312452e-3f;
  e = multiply_add(e, f, 4.18978221e-2f);
  e = multiply_add(e, f, 0.16666472f);
  e = multiply_add(e, f, 0.499987185f);
  e = multiply_add(e, f, 1.0f);
  e = multiply_add(e, f, 1.0f);
  return float_of(bits_of(e) + (bits_of(shifted) << 23));
}

}  // namespace megatron_nvfp4
