// Gated activations of pairs of BF16 numbers, with the roundings of quant/swiglu.py.
#pragma once

#include "../moe_gate.h"
#include "gate.h"
#include "input.cuh"

namespace megatron_nvfp4::cuda {

NVFP4_DEVICE uint32_t bits_of_pair(__nv_bfloat162 pair) {
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// RN(a * b) of two pairs of BF16 numbers.
NVFP4_DEVICE uint32_t multiply2(uint32_t a, uint32_t b) {
  return bits_of_pair(__hmul2_rn(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                 *reinterpret_cast<const __nv_bfloat162*>(&b)));
}

NVFP4_DEVICE uint32_t round2(float low, float high) {
  return bits_of_pair(__floats2bfloat162_rn(low, high));
}

NVFP4_DEVICE float low_of(uint32_t pair) { return float_of(pair << 16); }
NVFP4_DEVICE float high_of(uint32_t pair) { return float_of(pair & 0xFFFF0000u); }

// RN of two FP32 numbers to BF16, kept in FP32.
struct Pair {
  float low, high;

  NVFP4_DEVICE_MEMBER Pair rounded() const {
    const uint32_t bits = round2(low, high);
    return {low_of(bits), high_of(bits)};
  }
};

NVFP4_DEVICE Pair pair_of(uint32_t bits) { return {low_of(bits), high_of(bits)}; }
NVFP4_DEVICE Pair operator*(Pair a, Pair b) {
  return {multiply(a.low, b.low), multiply(a.high, b.high)};
}
NVFP4_DEVICE Pair operator*(Pair a, float b) { return {multiply(a.low, b), multiply(a.high, b)}; }
// 1 + x and 1 - x.
NVFP4_DEVICE Pair one_plus(Pair x) { return {add(1.0f, x.low), add(1.0f, x.high)}; }
NVFP4_DEVICE Pair one_minus(Pair x) { return {subtract(1.0f, x.low), subtract(1.0f, x.high)}; }

template <bool kFastMath>
NVFP4_DEVICE Pair sigmoids(Pair x) {
  return {sigmoid_of<kFastMath>(clamp_gate(x.low)), sigmoid_of<kFastMath>(clamp_gate(x.high))};
}

// act of two gates, as packed BF16.
template <Gate kind, bool kFastMath>
NVFP4_DEVICE uint32_t activate2(uint32_t gates) {
  const Pair gate = pair_of(gates);
  if constexpr (kind == Gate::kGelu) {
    return round2(gelu_of(gate.low), gelu_of(gate.high));
  } else if constexpr (kind == Gate::kQuickGelu) {
    const Pair s = sigmoids<kFastMath>((gate * kQuick).rounded());
    return multiply2(gates, round2(s.low, s.high));
  } else {
    const Pair clamped = {clamp_gate(gate.low), clamp_gate(gate.high)};
    const Pair s = {sigmoid_of<kFastMath>(clamped.low), sigmoid_of<kFastMath>(clamped.high)};
    const Pair act = clamped * s;
    return round2(act.low, act.high);
  }
}

// What the backward takes of two gates: act, and the sigmoid or gelu's slope; BF16 numbers.
struct Factors {
  uint32_t act;
  Pair factor;
};

template <Gate kind>
NVFP4_DEVICE Factors factors_of(uint32_t gates) {
  const Pair gate = pair_of(gates);
  if constexpr (kind == Gate::kGelu) {
    const Pair slope = {gelu_slope_of(gate.low), gelu_slope_of(gate.high)};
    return {activate2<kind, false>(gates), slope.rounded()};
  } else if constexpr (kind == Gate::kQuickGelu) {
    const Pair s = sigmoids<false>((gate * kQuick).rounded());
    const uint32_t bits = round2(s.low, s.high);
    return {multiply2(gates, bits), pair_of(bits)};
  } else {
    const Pair clamped = {clamp_gate(gate.low), clamp_gate(gate.high)};
    const Pair s = {sigmoid_of<false>(clamped.low), sigmoid_of<false>(clamped.high)};
    const Pair act = clamped * s;
    return {round2(act.low, act.high), s.rounded()};
  }
}

}  // namespace megatron_nvfp4::cuda
