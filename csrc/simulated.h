// Simulated floats ExMy for C++ and CUDA: quant/simulated.py function by function. Rules as in
// numerics.h.
#pragma once

#include "numerics.h"

namespace megatron_nvfp4 {

// exponent: 2..5 bits, mantissa: 1..4 bits.
struct FloatFormat {
  int exponent, mantissa;
};

// The largest value: all bits set.
NVFP4_FN float largest(const FloatFormat& format) {
  const uint32_t power = 1u << (format.exponent - 1);  // 2^E - 1 - bias
  const uint32_t mantissa = (0x7FFFFFu >> (23 - format.mantissa)) << (23 - format.mantissa);
  return float_of(((power + 127u) << 23) | mantissa);
}

// S_enc of a row's amax.
NVFP4_FN float simulated_encode_scale(float amax, const FloatFormat& format) {
  const float scale = clamp_max(divide(multiply(kE4m3Max, largest(format)), amax), kFltMax);
  return select((amax == 0.0f) | (scale == 0.0f), 1.0f, scale);
}

// E4M3 scale of a block.
NVFP4_FN uint32_t simulated_block_scale(float block_amax, float s_enc, const FloatFormat& format) {
  const float inverse = divide(1.0f, largest(format));
  return encode_e4m3(clamp_max(multiply(block_amax, multiply(s_enc, inverse)), kFltMax));
}

// FP32 to the nearest value of the format: ties to even, saturating, NaN to the largest.
NVFP4_FN float round_to_float(float x, const FloatFormat& format) {
  const float size = absolute(x), limit = largest(format);
  const float magnitude = select(size < limit, size, limit);  // NaN too
  const uint32_t smallest = 129u - (1u << (format.exponent - 1));
  const uint32_t field = bits_of(magnitude) >> 23;
  const uint32_t power = select(minimum(field, smallest) == smallest, field, smallest);
  // 2^23 times the step: from there on floats are multiples of the step, so that adding rounds.
  const float shift = float_of((power - static_cast<uint32_t>(format.mantissa) + 23u) << 23);
  const uint32_t rounded = bits_of(subtract(add(magnitude, shift), shift));
  return float_of(rounded | select(x == x, bits_of(x) & 0x80000000u, 0u));
}

}  // namespace megatron_nvfp4
