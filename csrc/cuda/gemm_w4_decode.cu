// Packed activations to the FP16 rows that the GEMM reads, with the gather of routed rows. Decoding
// in the GEMM itself was slower at almost every shape: every tile of features repeats it.
#include "gemm_w4.cuh"
#include "gemm_w4_decode.cuh"

namespace megatron_nvfp4::cuda {
namespace {

constexpr int kThreads = 128;

// A block of 16 a thread: at few rows the latency of one load is what it takes.
__global__ void __launch_bounds__(kThreads)
    decode_activations_kernel(const uint2* codes, const uint8_t* scales, const void* row_index,
                              bool long_index, int64_t num_blocks, int row_blocks, uint4* out,
                              const float* row_scale, float* out_scale) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // In this order: it starts beside the end of the kernel before, and the GEMM that may start now
  // reads weights that a kernel before has written.
  await_previous_kernel();
  allow_next_kernel();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= num_blocks) return;
  int64_t source = at;
  if (row_index) {
    const int64_t row = at / row_blocks, block = at - row * row_blocks;
    const int64_t from = long_index ? __ldg(static_cast<const long long*>(row_index) + row)
                                    : __ldg(static_cast<const int*>(row_index) + row);
    if (row_scale && block == 0) out_scale[row] = __ldg(row_scale + from);
    source = from * row_blocks + block;
  }
  const uint2 words = __ldg(codes + source);
  const uint32_t scale = scales_to_half<0>(__ldg(scales + source));
  uint32_t low[4], high[4];
  decode_activations<0>(words.x, scale, low);
  decode_activations<0>(words.y, scale, high);
  out[2 * at] = {low[0], low[1], low[2], low[3]};
  out[2 * at + 1] = {high[0], high[1], high[2], high[3]};
#endif
}

}  // namespace

cudaError_t decode_activations(const uint8_t* codes, const uint8_t* scales, const void* row_index,
                               bool long_index, int64_t num_rows, int k, void* out,
                               const float* row_scale, float* out_scale, cudaStream_t stream) {
  const int64_t num_blocks = num_rows * (k / 16);
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((num_blocks + kThreads - 1) / kThreads));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, decode_activations_kernel,
                            reinterpret_cast<const uint2*>(codes), scales, row_index, long_index,
                            num_blocks, k / 16, static_cast<uint4*>(out), row_scale, out_scale);
}

}  // namespace megatron_nvfp4::cuda
