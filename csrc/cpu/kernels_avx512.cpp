// The CPU kernels for AVX-512. The target is set here, not by a flag: see kernels_impl.h.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif

namespace megatron_nvfp4 {
namespace {

constexpr int kLanes = 16;

#include "kernels_impl.h"
#include "transforms_impl.h"
#include "transpose_avx2.h"

// The register tile of gemm_impl.h: 28 sums, two vectors of b and one of a in 32 registers.
using Vec = __m512;
constexpr int kVec = 16, kTileRows = 14;
NVFP4_FN Vec load(const float* x) { return _mm512_load_ps(x); }
NVFP4_FN void store(float* x, Vec v) { _mm512_store_ps(x, v); }
NVFP4_FN Vec broadcast(float x) { return _mm512_set1_ps(x); }
NVFP4_FN Vec fused_multiply_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

#include "gemm_impl.h"

}  // namespace

const CpuKernels kAvx512Kernels = {"avx512",
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
