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

// A block's words by value, so that a function that is not inlined gets them in registers.
template <class T>
struct Words {
  uint32_t w[T::kWords];
};

template <class T>
NVFP4_DEVICE Words<T> pass(const uint32_t (&words)[T::kWords]) {
  Words<T> out;
#pragma unroll
  for (int i = 0; i < T::kWords; ++i) out.w[i] = words[i];
  return out;
}

// By numerics.h, for any input. Not inlined: it would cost the fast path its registers.
template <class T, class C>
__device__ __noinline__ Candidate encode_any(Words<T> x, float scale, Outer outer, float divisor) {
  Candidate out = {{0, 0}, 0.0f};
  const float multiplier = block_multiplier(scale, outer.s_dec);
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const float value = T::element(x.w, i);
    const uint32_t code = encode_e2m1(multiply(value, multiplier));
    (i < 8 ? out.codes.x : out.codes.y) |= code << (4 * (i % 8));
    if (!C::two) continue;
    const float scaled = code_times_scale(code, scale);
    const float difference = C::fast ? fast_difference(scaled, value, outer.s_enc)
                                     : strict_difference(scaled, value, outer.amax, divisor);
    out.error = add(out.error, error_term(difference, C::metric));
  }
  return out;
}

// The same by the fast functions, for an ordinary block; multiplier = fast_multiplier.
template <class T>
NVFP4_DEVICE uint2 encode_ordinary(const uint32_t (&words)[T::kWords], float multiplier) {
  uint32_t codes[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#if NVFP4_HARDWARE_E2M1
    codes[half] = 0;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float even = multiply(T::element(words, 8 * half + i), multiplier);
      const float odd = multiply(T::element(words, 8 * half + i + 1), multiplier);
      codes[half] |= encode_e2m1x2(multiply(even, 64.0f), multiply(odd, 64.0f)) << (4 * i);
    }
#else
    float q[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      q[i] = round_e2m1(multiply(T::magnitude(words, 8 * half + i), multiplier));
    }
    codes[half] = narrow_codes(widen_codes(q), T::signs(words, half));
#endif
  }
  return {codes[0], codes[1]};
}

// Both candidates of four-over-six at once, for an ordinary block, and which has the smaller error;
// index 0 is six, 1 is four.
template <class T, class C>
struct Two {
  WideCodes wide[2][2];  // by candidate and half
  float error[2];

  NVFP4_DEVICE_MEMBER void encode(const uint32_t (&words)[T::kWords], const float (&scale)[2],
                                  const float (&multiplier)[2], const Outer& outer,
                                  Divisor divisor) {
    const float scale64[2] = {multiply(scale[0], 64.0f), multiply(scale[1], 64.0f)};
    error[0] = error[1] = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float q[2][8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float x = T::magnitude(words, 8 * half + i);
        const float x_scaled = multiply(x, outer.s_enc);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          q[k][i] = round_e2m1(multiply(x, multiplier[k]));
          error[k] = add(
              error[k], fast_error_term<C::metric, C::fast>(q[k][i], scale64[k], x, x_scaled, outer,
                                                            divisor.value, divisor.inverse));
        }
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) wide[k][half] = widen_codes(q[k]);
    }
  }

  NVFP4_DEVICE_MEMBER uint2 codes(const uint32_t (&words)[T::kWords], bool four) const {
    uint32_t out[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const WideCodes chosen = {four ? wide[1][half].even : wide[0][half].even,
                                four ? wide[1][half].odd : wide[0][half].odd};
      out[half] = narrow_codes(chosen, T::signs(words, half));
    }
    return {out[0], out[1]};
  }
};

// Scales of a block, decoded, and their codes: one, or six's and four's.
struct Scales {
  float value[2];
  uint32_t code[2];
};

// For any block; block_amax is no NaN.
template <class C>
NVFP4_DEVICE Scales choose_any_scales(float block_amax, const Outer& outer) {
  Scales s;
  if constexpr (C::two) {
    const float base = four_over_six_base(block_amax, outer.s_enc);
    s.code[0] = scale_by_six(base);
    s.code[1] = scale_by_four(base);
  } else {
    s.code[0] = s.code[1] = block_scale(block_amax, outer.s_enc);
  }
  s.value[0] = decode_e4m3(s.code[0]);
  s.value[1] = decode_e4m3(s.code[1]);
  return s;
}

// For a block of an ordinary row; the conversion saturates as the clamps of numerics.h do.
template <class C>
NVFP4_DEVICE Scales choose_scales(float block_amax, const Outer& outer) {
  Scales s;
  uint32_t pair;
  if constexpr (C::two) {
    // An amax too small for the fast division gets scale 0 either way; Inf, 448 as FLT_MAX does.
    const float sixth = fast_divide(smaller(block_amax, kFltMax), kE2m1Max, kSixth);
    const float base = multiply(sixth, outer.s_enc);
    pair = encode_e4m3x2(base, multiply(base, 1.5f));
  } else {
    pair = encode_e4m3x2(multiply(block_amax, multiply(outer.s_enc, kSixth)), 0.0f);
  }
  decode_e4m3x2(pair, s.value[0], s.value[1]);
  s.code[0] = pair & 0xFFu;
  s.code[1] = pair >> 8;
  return s;
}

// A block's codes and its scale's code.
struct Encoded {
  uint2 codes;
  uint32_t scale;
};

// Any block under its own amax, by numerics.h.
template <class T, class C>
__device__ __noinline__ Encoded encode_any_block(Words<T> x, Outer outer, float divisor) {
  const Scales s = choose_any_scales<C>(largest_number<T>(x.w), outer);
  const Candidate six = encode_any<T, C>(x, s.value[0], outer, divisor);
  if constexpr (C::two) {
    const Candidate four = encode_any<T, C>(x, s.value[1], outer, divisor);
    if (four.error < six.error) return {four.codes, s.code[1]};
  }
  return {six.codes, s.code[0]};
}

// A block under its own amax by the fast functions. Returns whether they may encode it; if not, the
// result is meaningless.
template <class T, class C>
NVFP4_DEVICE bool encode_block(const uint32_t (&words)[T::kWords], float block_amax,
                               const Outer& outer, Divisor divisor, Encoded& out) {
  const Scales s = choose_scales<C>(block_amax, outer);
  // Four's scale is no smaller than six's, so that its multiplier is no larger.
  const float multiplier = fast_multiplier(s.value[0], outer.s_dec);
  if constexpr (C::two) {
    Two<T, C> two;
    two.encode(words, s.value, {multiplier, fast_multiplier(s.value[1], outer.s_dec)}, outer,
               divisor);
    const bool four = two.error[1] < two.error[0];
    out = {two.codes(words, four), four ? s.code[1] : s.code[0]};
  } else {
    out = {encode_ordinary<T>(words, multiplier), s.code[0]};
  }
  return NVFP4_HARDWARE_E4M3 && outer.ordinary && is_ordinary(block_amax, multiplier);
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
