// The GEMM on 4-bit weights with FP16 activations that hold q * s_b.
#include "gemm_w4_configs.cuh"

namespace megatron_nvfp4::cuda {

cudaError_t gemm_w4_half(const GemmW4Args& args, int config, cudaStream_t stream) {
  return launch_config<__half>(args, config, stream);
}

}  // namespace megatron_nvfp4::cuda
