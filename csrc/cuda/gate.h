// Activations of one BF16 gate and their derivatives, before they are rounded to BF16, after which
// they equal quant/swiglu.py's for every finite gate. Host code can include this file, too, to
// compare.
#pragma once

#include "../swiglu.h"
#include "fast_block.h"

namespace megatron_nvfp4::cuda {

constexpr float kGeluMin = -12.5f;
constexpr float kQuick = 1.702f;

// 1 / (1 + exp(-x)) by the hardware's approximations.
NVFP4_FN float approximate_sigmoid(float x) {
#if defined(__CUDA_ARCH__)
  float e, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(multiply(x, -1.44269504f)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(add(e, 1.0f)));
  return inverse;
#else
  return 1.0f / (1.0f + std::exp2(x * -1.44269504f));
#endif
}

// 1 / (1 + exp(-x)) for x from clamp_gate.
template <bool kFastMath>
NVFP4_FN float sigmoid_of(float x) {
  if constexpr (kFastMath) return approximate_sigmoid(x);
  // Beyond 87 the exponential does not count.
  const float e = exp_of_minus(x > -kGateMin ? -kGateMin : x);
  return fast_reciprocal(add(e, 1.0f));
}

// Phi(-a) = exp * ratio for a = min(|x|, 12.5): exp(-a^2 / 2), and a polynomial in 1 / (1 + a/4)
// that is off by 2^-26.7 at most, fitted for relative error.
struct NormalTail {
  float a, exp, ratio;
};

NVFP4_FN NormalTail normal_tail(float x) {
  const float a = smaller(absolute(x), -kGeluMin);
  const float u = fast_reciprocal(multiply_add(a, 0.25f, 1.0f));
  float p = 0.0355608873f;
  p = multiply_add(p, u, -0.20494771f);
  p = multiply_add(p, u, 0.415673912f);
  p = multiply_add(p, u, -0.361171961f);
  p = multiply_add(p, u, 0.327713192f);
  p = multiply_add(p, u, -0.0330017842f);
  p = multiply_add(p, u, 0.126004249f);
  p = multiply_add(p, u, 0.093847692f);
  p = multiply_add(p, u, 0.10034956f);
  p = multiply_add(p, u, -2.80380009e-05f);
  return {a, exp_of_minus(multiply(multiply(a, a), 0.5f)), p};
}

// x * Phi(x).
NVFP4_FN float gelu_of(float x) {
  const NormalTail tail = normal_tail(x);
  const float phi = multiply(tail.exp, tail.ratio);
  const float bounded = x < kGeluMin ? kGeluMin : x;
  return multiply(bounded, x < 0.0f ? phi : subtract(1.0f, phi));
}

// Phi(x) + x * phi(x).
NVFP4_FN float gelu_slope_of(float x) {
  const NormalTail tail = normal_tail(x);
  const float slope = multiply(tail.exp, multiply_add(tail.a, -0.398942280f, tail.ratio));
  return select(x == x, x < 0.0f ? slope : subtract(1.0f, slope), x);
}

}  // namespace megatron_nvfp4::cuda
