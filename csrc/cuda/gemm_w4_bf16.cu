// The GEMM on 4-bit weights with BF16 activations: weights decode to BF16.
#include "gemm_w4_configs.cuh"

namespace megatron_nvfp4::cuda {

cudaError_t gemm_w4_bf16(const GemmW4Args& args, int config, cudaStream_t stream) {
  return launch_config<__nv_bfloat16>(args, config, stream);
}

}  // namespace megatron_nvfp4::cuda
