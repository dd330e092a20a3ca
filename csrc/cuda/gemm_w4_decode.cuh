// NVFP4 to 16-bit values, q * s_b, exactly. Issue slots of the decoding warps bound the GEMM at few
// rows, so that every instruction here counts.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "async_copy.cuh"

namespace megatron_nvfp4::cuda {

SM90_FN uint4 load_shared_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}
SM90_FN uint2 load_shared_8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
SM90_FN void store_shared_16(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// Byte i of the result is byte (selector >> 4i) & 7 of high:low; bit 3 of a selector must be 0.
SM90_FN uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(selector));
  return r;
}

SM90_FN uint32_t pack_bf16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// Four 8 x 8 matrices of 16-bit values, transposed; lane i gives the address of row i % 8 of matrix
// i / 8.
SM90_FN void store_matrices_transposed(uint32_t address, const uint32_t (&v)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
      : "memory");
}

// Two E4M3 in bits 16 kHalf .. 16 kHalf + 15 to FP16.
template <int kHalf>
SM90_FN uint32_t scales_to_half(uint32_t e4m3) {
  uint32_t h;
  if constexpr (kHalf == 0) {
    asm("{ .reg .b16 x, y; mov.b32 {x, y}, %1; cvt.rn.f16x2.e4m3x2 %0, x; }" : "=r"(h) : "r"(e4m3));
  } else {
    asm("{ .reg .b16 x, y; mov.b32 {x, y}, %1; cvt.rn.f16x2.e4m3x2 %0, y; }" : "=r"(h) : "r"(e4m3));
  }
  return h;
}

SM90_FN uint32_t multiply_half2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
SM90_FN uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Both halves of a times half kIndex of b; written so that the choice is part of the multiply.
template <int kIndex>
SM90_FN uint32_t scale_half2(uint32_t a, uint32_t b) {
  const __half2 scales = *reinterpret_cast<const __half2*>(&b);
  const __half2 both = kIndex == 0 ? __low2half2(scales) : __high2half2(scales);
  return multiply_half2(a, *reinterpret_cast<const uint32_t*>(&both));
}

// Weights of one thread: a word holds, in each 16-bit half (an even column and the odd one behind
// it), four codes as sign and magnitude: S15 M11-9 (row, column), S12 M8-6 (row + 8, column),
// S14 M5-3 (row, column + 8), S13 M2-0 (row + 8, column + 8). The first is the FP16 q * 2^-14 under
// a mask; the others are one shift or multiplication away from it.
template <class T>
struct WeightDecoder;

template <>
struct WeightDecoder<__half> {
  // Decoded values are multiplied by 2^-kLift, exactly: the block scale's 2^7 is all FP16 has.
  static constexpr float kLift = 128.0f;

  // Two steps of 16 along K. scales: E4M3, of (row, row + 8), the steps' in half kHalf.
  template <int kHalf>
  SM90_FN void decode(uint32_t first, uint32_t second, uint2 scales, uint32_t (&a)[4],
                      uint32_t (&b)[4]) {
    const uint32_t upper = multiply_half2(scales_to_half<kHalf>(scales.x), 0x58005800u);
    const uint32_t lower = multiply_half2(scales_to_half<kHalf>(scales.y), 0x58005800u);
    step<0>(first, upper, lower, a);
    step<1>(second, upper, lower, b);
  }

 private:
  template <int kIndex>
  SM90_FN void step(uint32_t word, uint32_t upper, uint32_t lower, uint32_t (&a)[4]) {
    constexpr uint32_t kMask = 0x8E008E00u;
    a[0] = scale_half2<kIndex>(word & kMask, upper);
    a[1] = scale_half2<kIndex>((word << 3) & kMask, lower);
    a[2] = scale_half2<kIndex>(((word & 0x40384038u) * 66u) & kMask, upper);
    a[3] = scale_half2<kIndex>(((word & 0x20072007u) * 516u) & kMask, lower);
  }
};

template <>
struct WeightDecoder<__nv_bfloat16> {
  static constexpr float kLift = 1.0f;

  template <int kHalf>
  SM90_FN void decode(uint32_t first, uint32_t second, uint2 scales, uint32_t (&a)[4],
                      uint32_t (&b)[4]) {
    const uint32_t upper = to_bf16(scales_to_half<kHalf>(scales.x));
    const uint32_t lower = to_bf16(scales_to_half<kHalf>(scales.y));
    step(first, permute(upper, 0, 0x1010), permute(lower, 0, 0x1010), a);
    step(second, permute(upper, 0, 0x3232), permute(lower, 0, 0x3232), b);
  }

 private:
  SM90_FN uint32_t to_bf16(uint32_t half2) {
    const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&half2));
    const __nv_bfloat162 b = __floats2bfloat162_rn(f.x, f.y);
    return *reinterpret_cast<const uint32_t*>(&b);
  }
  // Sign and magnitude at S15 M8-6 are the BF16 q * 2^-126; a factor that lifts it and holds the
  // scale too would overflow.
  SM90_FN uint32_t scaled(uint32_t sign, uint32_t magnitude, uint32_t scale) {
    const uint32_t bits = (sign & 0x80008000u) | (magnitude & 0x01C001C0u);
    return multiply_bf16x2(multiply_bf16x2(bits, 0x7E807E80u), scale);
  }
  SM90_FN void step(uint32_t word, uint32_t upper, uint32_t lower, uint32_t (&a)[4]) {
    a[0] = scaled(word, word >> 3, upper);
    a[1] = scaled(word << 3, word, lower);
    a[2] = scaled(word << 1, word << 3, upper);
    a[3] = scaled(word << 2, word << 6, lower);
  }
};

// Eight codes of one row, in order, times half kIndex of scales, to four FP16 pairs. An E2M1
// magnitude is the upper byte of its FP16 value: one byte permute looks up four.
template <int kIndex>
SM90_FN void decode_activations(uint32_t codes, uint32_t scales, uint32_t (&values)[4]) {
  const uint32_t magnitudes = codes & 0x77777777u, even_signs = codes << 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t upper = permute(0x3E3C3800u, 0x46444240u, magnitudes >> (16 * i));
    const uint32_t signs = permute(even_signs, codes, i ? 0x7362 : 0x5140);
    const uint32_t bytes = upper | (signs & 0x80808080u);
    values[2 * i] = scale_half2<kIndex>(permute(bytes, 0, 0x1404), scales);
    values[2 * i + 1] = scale_half2<kIndex>(permute(bytes, 0, 0x3424), scales);
  }
}

}  // namespace megatron_nvfp4::cuda
