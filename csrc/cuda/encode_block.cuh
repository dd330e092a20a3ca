// A block of 16 elements to codes and scale: the fast functions for ordinary blocks, numerics.h for
// all.
#pragma once

#include "fast_block.h"
#include "input.cuh"
#include "quantize.h"

namespace megatron_nvfp4::cuda {

// How the scale of a block is chosen: by its amax, or by four-over-six with one of the errors.
template <FourOverSix metric_, bool fast_>
struct Choice {
  static constexpr FourOverSix metric = metric_;
  static constexpr bool fast = fast_;
  static constexpr bool two = metric_ != FourOverSix::kOff;
};
using NoChoice = Choice<FourOverSix::kOff, false>;

// Divisor of the strict error, and its reciprocal rounded to nearest (6 * 448 or 6 * 256).
struct Divisor {
  float value, inverse;
};

NVFP4_DEVICE Divisor error_divisor(int e4m3_max) {
  const float value = kE2m1Max * static_cast<float>(e4m3_max);
  return {value, reciprocal(value)};
}

// Codes of a block under one scale (first element in the lowest nibble of x), and the error they
// make.
struct Candidate {
  uint2 codes;
  float error;
};

// By numerics.h, for any input: elements x[0], x[stride], ... in global or shared memory. Not
// inlined: it would cost the fast path its registers.
template <class T>
__device__ __noinline__ Candidate encode_any(const void* x, int64_t stride, float scale,
                                             Outer outer, FourOverSix metric, bool fast,
                                             float divisor) {
  Candidate out = {{0, 0}, 0.0f};
  const float multiplier = block_multiplier(scale, outer.s_dec);
#pragma unroll 1
  for (int i = 0; i < kBlock; ++i) {
    const float value = T::load(x, i * stride);
    const uint32_t code = encode_e2m1(multiply(value, multiplier));
    (i < 8 ? out.codes.x : out.codes.y) |= code << (4 * (i % 8));
    if (metric == FourOverSix::kOff) continue;
    const float scaled = code_times_scale(code, scale);
    const float difference = fast ? fast_difference(scaled, value, outer.s_enc)
                                  : strict_difference(scaled, value, outer.amax, divisor);
    out.error = add(out.error, error_term(difference, metric));
  }
  return out;
}

// The same by the fast functions, for an ordinary block in registers; multiplier = fast_multiplier.
template <class T>
NVFP4_DEVICE uint2 encode_ordinary(const uint32_t (&words)[T::kWords], float multiplier) {
  float y[2][8];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) y[i / 8][i % 8] = multiply(T::element(words, i), multiplier);
  return {encode8(y[0]), encode8(y[1])};
}

// Both candidates of four-over-six at once, for an ordinary block; index 0 is six, 1 is four.
template <class T, class C>
NVFP4_DEVICE void encode_two(const uint32_t (&words)[T::kWords], const float (&scale)[2],
                             const float (&multiplier)[2], const Outer& outer, Divisor divisor,
                             Candidate (&out)[2]) {
  const float scale64[2] = {multiply(scale[0], 64.0f), multiply(scale[1], 64.0f)};
  out[0].error = out[1].error = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float q[2][8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = T::element(words, 8 * half + i);
      const float x_scaled = multiply(x, outer.s_enc);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float y = multiply(x, multiplier[k]);
        const float r = negated_e2m1(y);
        q[k][i] = signed_e2m1(y, r);
        out[k].error =
            add(out[k].error, fast_error_term<C::metric, C::fast>(r, scale64[k], x, x_scaled, outer,
                                                                  divisor.value, divisor.inverse));
      }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      (half ? out[k].codes.y : out[k].codes.x) = narrow_codes(widen_codes(q[k]));
    }
  }
}

// Scale codes of a block: one, or six's and four's.
template <class C>
NVFP4_DEVICE void choose_scales(float block_amax, const Outer& outer, uint32_t (&codes)[2]) {
  if constexpr (C::two) {
    // An amax too small for the fast division gets scale 0 either way; Inf, 448 as FLT_MAX does.
    const float sixth = fast_divide(smaller(block_amax, kFltMax), kE2m1Max, kSixth);
    const float base =
        outer.ordinary ? multiply(sixth, outer.s_enc) : four_over_six_base(block_amax, outer.s_enc);
    codes[0] = scale_by_six(base);
    codes[1] = scale_by_four(base);
  } else {
    codes[0] = codes[1] = block_scale(block_amax, outer.s_enc);
  }
}

// Encodes one block under its scales. `x` and `stride` say where its elements also lie in memory.
template <class T, class C>
NVFP4_DEVICE void encode_block(const uint32_t (&words)[T::kWords], const void* x, int64_t stride,
                               float block_amax, const uint32_t (&scale_codes)[2],
                               const Outer& outer, Divisor divisor, Candidate (&out)[2]) {
  float scale[2], multiplier[2];
  bool ordinary = outer.ordinary && NVFP4_HARDWARE_E4M3;
#pragma unroll
  for (int k = 0; k < (C::two ? 2 : 1); ++k) {
    scale[k] = decode_e4m3(scale_codes[k]);
    multiplier[k] = fast_multiplier(scale[k], outer.s_dec);
    ordinary = ordinary && is_ordinary(block_amax, multiplier[k]);
  }
  if (__builtin_expect(ordinary, 1)) {
    if constexpr (C::two) {
      encode_two<T, C>(words, scale, multiplier, outer, divisor, out);
    } else {
      out[0].codes = encode_ordinary<T>(words, multiplier[0]);
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < (C::two ? 2 : 1); ++k) {
    out[k] = encode_any<T>(x, stride, scale[k], outer, C::metric, C::fast, divisor.value);
  }
}

// Where the scale of row r and block column c lies in a matrix of `cols` block columns.
NVFP4_DEVICE int64_t scale_offset(int64_t r, int c, int cols, bool swizzled) {
  if (!swizzled) return r * cols + c;
  const int64_t tile = r / 128 * ((cols + 3) / 4) + c / 4;
  return tile * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
}

// Stores q * s_b of a block as BF16, which holds it exactly.
NVFP4_DEVICE void store_decoded(uint4* out, uint2 codes, uint32_t scale_code) {
  const float scale = decode_e4m3(scale_code);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t word = half ? codes.y : codes.x;
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float even = code_times_scale(word >> (8 * i) & 15u, scale);
      const float odd = code_times_scale(word >> (8 * i + 4) & 15u, scale);
      pairs[i] = __byte_perm(bits_of(even), bits_of(odd), 0x7632);
    }
    out[half] = {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
}

// Amax under which `row` is encoded, for all lanes of an aligned run of `width` with the same row.
NVFP4_DEVICE float outer_amax(const QuantizeArgs& args, int64_t row, int lane, int width) {
  switch (args.source) {
    case AmaxSource::kRow:
      return __ldg(args.amax + row);
    case AmaxSource::kTensor:
      return __ldg(args.amax);
    default:
      const int group = find_group(args.offsets, args.num_groups, row, lane, width);
      return group < args.num_groups ? __ldg(args.amax + group) : 0.0f;
  }
}

}  // namespace megatron_nvfp4::cuda
