// The instance with FP32 output.
#include "grouped_gemm.cuh"

namespace megatron_nvfp4::cuda {

GroupedGemm grouped_gemm_fp32() {
  using Instance = blackwell::Instance<float>;
  return {Instance::workspace_bytes, Instance::launch};
}

}  // namespace megatron_nvfp4::cuda
