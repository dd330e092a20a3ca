// The tiles that the GEMM on 4-bit weights is compiled for.
#pragma once

#include "gemm_w4_kernel.cuh"

namespace megatron_nvfp4::cuda {

template <class T>
cudaError_t launch_config(const GemmW4Args& args, int config, cudaStream_t stream) {
  switch (config) {
    case 0:
      return launch_gemm_w4<GemmConfig<1, 1, 2, 4, 2, 16, 32, 64>, T>(args, stream);
    case 1:
      return launch_gemm_w4<GemmConfig<3, 1, 2, 4, 2, 16, 32, 64>, T>(args, stream);
    case 2:
      return launch_gemm_w4<GemmConfig<4, 2, 1, 4, 1, 16, 32, 48>, T>(args, stream);
    case 3:
      return launch_gemm_w4<GemmConfig<4, 1, 1, 4, 1, 48, 64, 96>, T>(args, stream);
    case 4:
      return launch_gemm_w4<GemmConfig<2, 2, 1, 2, 2, 96, 128, 152, 160>, T>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace megatron_nvfp4::cuda
