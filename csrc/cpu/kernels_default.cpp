// The CPU kernels in the compiler's default instruction set (SSE2 on x86-64, NEON on AArch64).
#include "kernels.h"

namespace megatron_nvfp4 {
namespace {

constexpr int kLanes = 8;

NVFP4_FN void transpose8(const uint8_t* rows, int row_bytes, uint32_t* out) {
  for (int l = 0; l < 8; ++l) {
    for (int j = 0; j < 8; ++j) {
      std::memcpy(&out[j * kLanes + l], rows + l * row_bytes + j * 4, 4);
    }
  }
}

#include "kernels_impl.h"
#include "transforms_impl.h"

using Vec = float __attribute__((vector_size(16)));
constexpr int kVec = 4, kTileRows = 6;

NVFP4_FN Vec load(const float* x) {
  Vec v;
  std::memcpy(&v, x, sizeof v);
  return v;
}
NVFP4_FN void store(float* x, Vec v) { std::memcpy(x, &v, sizeof v); }
NVFP4_FN Vec broadcast(float x) { return Vec{x, x, x, x}; }

// RN(a * b + c). Without the instruction: the product is exact in FP64, their sum is rounded to
// odd, after which rounding to FP32 rounds as if once. Source: Boldo and Melquiond, Emulation of a
// FMA and correctly rounded sums, 2008.
NVFP4_FN float fused_multiply_add(float a, float b, float c) {
#if defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  const double product = static_cast<double>(a) * b, addend = c;
  const double sum = product + addend, part = sum - product;
  const double error = (product - (sum - part)) + (addend - part);
  uint64_t bits;
  std::memcpy(&bits, &sum, sizeof bits);
  const bool inexact = error < 0.0 || error > 0.0;  // false for the NaN that an infinite sum gives
  if (inexact && bits % 2 == 0) bits += (error > 0.0) == (sum > 0.0) ? 1 : -1;
  double odd;
  std::memcpy(&odd, &bits, sizeof odd);
  return static_cast<float>(odd);
#endif
}

NVFP4_FN Vec fused_multiply_add(Vec a, Vec b, Vec c) {
  for (int i = 0; i < kVec; ++i) c[i] = fused_multiply_add(a[i], b[i], c[i]);
  return c;
}

#include "gemm_impl.h"

}  // namespace

const CpuKernels kDefaultKernels = {"default",
                                    amax,
                                    quantize,
                                    dequantize,
                                    quantize_mxfp8,
                                    dequantize_mxfp8,
                                    column_amax,
                                    quantize_columns,
                                    quantize_mxfp8_columns,
                                    quantize_simulated,
                                    gemm};

}  // namespace megatron_nvfp4
