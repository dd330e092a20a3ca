// Packed activations to the FP16 rows that the GEMM reads, with the gather of routed rows. Decoding
// in the GEMM itself was slower at almost every shape: every tile of features repeats it.
#include "gemm_w4.cuh"
#include "gemm_w4_decode.cuh"

namespace megatron_nvfp4::cuda {
namespace {

constexpr int kWarps = 4;

// A warp a row; eight codes a lane, so that loads and stores of a warp are dense.
__global__ void __launch_bounds__(kWarps * 32)
    decode_activations_kernel(const uint32_t* codes, const uint8_t* scales, const void* row_index,
                              bool long_index, int num_rows, int units, uint4* out,
                              const float* row_scale, float* out_scale) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  allow_next_kernel();
  const int row = blockIdx.x * kWarps + threadIdx.x / 32;
  if (row >= num_rows) return;
  int64_t source = row;
  if (row_index) {
    source = long_index ? __ldg(static_cast<const long long*>(row_index) + row)
                        : __ldg(static_cast<const int*>(row_index) + row);
  }
  if (row_scale && threadIdx.x % 32 == 0) out_scale[row] = __ldg(row_scale + source);
  const uint32_t* row_codes = codes + source * units;
  const uint8_t* row_scales = scales + source * (units / 2);
  uint4* row_out = out + static_cast<int64_t>(row) * units;
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < units; i += 32) {
    const uint32_t scale = scales_to_half<0>(__ldg(row_scales + i / 2));
    uint32_t values[4];
    decode_activations<0>(__ldg(row_codes + i), scale, values);
    row_out[i] = {values[0], values[1], values[2], values[3]};
  }
#endif
}

}  // namespace

cudaError_t decode_activations(const uint8_t* codes, const uint8_t* scales, const void* row_index,
                               bool long_index, int64_t num_rows, int k, void* out,
                               const float* row_scale, float* out_scale, cudaStream_t stream) {
  decode_activations_kernel<<<static_cast<unsigned>((num_rows + kWarps - 1) / kWarps), kWarps * 32,
                              0, stream>>>(reinterpret_cast<const uint32_t*>(codes), scales,
                                           row_index, long_index, static_cast<int>(num_rows), k / 8,
                                           static_cast<uint4*>(out), row_scale, out_scale);
  return cudaGetLastError();
}

}  // namespace megatron_nvfp4::cuda
