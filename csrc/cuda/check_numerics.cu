// Compares the functions of fast_block.h and the hardware's conversions with numerics.h on this
// GPU.
#include "fast_block.h"
#include "quantize.h"

namespace megatron_nvfp4::cuda {
namespace {

__device__ bool differs(float a, float b) { return a != b && (a == a || b == b); }

__device__ bool division_differs(float x, float divisor, float smallest) {
  const float magnitude = absolute(x);
  if (!((magnitude > smallest && magnitude <= kFltMax) || x == 0.0f)) return false;
  return differs(fast_divide(x, divisor, reciprocal(divisor)), divide(x, divisor));
}

[[maybe_unused]] __device__ uint32_t fast_code(float y) {
  const float q[8] = {0, 0, 0, round_e2m1(fabsf(y)), 0, 0, 0, 0};
  return narrow_codes(widen_codes(q), {0, bits_of(y) >> 16 & 0x8000u}) >> 12;
}

__global__ void check_numerics_kernel(unsigned long long* counts) {
  unsigned long long bad[kNumericsChecks] = {};
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < 1ull << 32; i += step) {
    const float x = float_of(static_cast<uint32_t>(i));
    const uint32_t exponent = bits_of(x) >> 23 & 255u;
#if NVFP4_HARDWARE_E4M3
    if (absolute(x) < 6.99f * kCodeScale) {
      bad[0] += fast_code(x) != encode_e2m1_software(multiply(x, 1.0f / kCodeScale));
    }
    bad[5] += encode_e4m3(x) != encode_e4m3_software(x);
#endif
    if (exponent >= 3 && exponent <= 251) bad[1] += differs(fast_reciprocal(x), reciprocal(x));
    bad[2] += division_differs(x, kE2m1Max, 1e-35f);
    bad[3] += division_differs(x, kE2m1Max * 256.0f, 1e-31f);
    bad[4] += division_differs(x, kE2m1Max * 448.0f, 1e-31f);
    if (is_ordinary_amax(x)) {
      for (const int e4m3_max : {256, 448}) {
        bad[7] += differs(fast_encode_scale(x, e4m3_max), encode_scale(x, e4m3_max));
      }
    }
#if NVFP4_HARDWARE_E2M1
    bad[6] += encode_e2m1(x) != encode_e2m1_software(x);
#endif
  }
  for (int k = 0; k < kNumericsChecks; ++k) {
    if (bad[k]) atomicAdd(counts + k, bad[k]);
  }
}

}  // namespace

cudaError_t check_numerics(int64_t* counts, cudaStream_t stream) {
  const cudaError_t status = cudaMemsetAsync(counts, 0, kNumericsChecks * sizeof *counts, stream);
  if (status != cudaSuccess) return status;
  check_numerics_kernel<<<2048, 256, 0, stream>>>(reinterpret_cast<unsigned long long*>(counts));
  return cudaGetLastError();
}

}  // namespace megatron_nvfp4::cuda
