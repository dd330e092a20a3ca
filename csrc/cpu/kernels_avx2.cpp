// The CPU kernels for AVX2. The target is set here, not by a flag: see kernels_impl.h.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

namespace megatron_nvfp4 {
namespace {

constexpr int kLanes = 8;

#include "kernels_impl.h"
#include "transforms_impl.h"
#include "transpose_avx2.h"

// The register tile of gemm_impl.h: 12 sums, two vectors of b and one of a in 16 registers.
using Vec = __m256;
constexpr int kVec = 8, kTileRows = 6;
NVFP4_FN Vec load(const float* x) { return _mm256_load_ps(x); }
NVFP4_FN void store(float* x, Vec v) { _mm256_store_ps(x, v); }
NVFP4_FN Vec broadcast(float x) { return _mm256_set1_ps(x); }
NVFP4_FN Vec fused_multiply_add(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

#include "gemm_impl.h"

}  // namespace

const CpuKernels kAvx2Kernels = {"avx2",
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

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
