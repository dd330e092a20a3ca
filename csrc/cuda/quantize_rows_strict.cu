#include "quantize_rows.cuh"

namespace megatron_nvfp4::cuda {

cudaError_t quantize_rows_strict(const QuantizeArgs& args, cudaStream_t stream) {
  if (args.four_over_six == FourOverSix::kMae) {
    return launch_rows_of_type<Choice<FourOverSix::kMae, false>>(args, stream);
  }
  return launch_rows_of_type<Choice<FourOverSix::kMse, false>>(args, stream);
}

}  // namespace megatron_nvfp4::cuda
