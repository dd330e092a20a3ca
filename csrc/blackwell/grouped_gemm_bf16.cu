// The instance with BF16 output.
#include "grouped_gemm.cuh"

namespace megatron_nvfp4::cuda {

GroupedGemm grouped_gemm_bf16() {
  using Instance = blackwell::Instance<cutlass::bfloat16_t>;
  return {Instance::workspace_bytes, Instance::launch};
}

}  // namespace megatron_nvfp4::cuda
