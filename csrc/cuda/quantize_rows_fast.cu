#include "quantize_rows.cuh"

namespace megatron_nvfp4::cuda {

cudaError_t quantize_rows_fast(const QuantizeArgs& args, cudaStream_t stream) {
  if (args.four_over_six == FourOverSix::kMae) {
    return launch_rows_of_type<Choice<FourOverSix::kMae, true>>(args, stream);
  }
  return launch_rows_of_type<Choice<FourOverSix::kMse, true>>(args, stream);
}

}  // namespace megatron_nvfp4::cuda
