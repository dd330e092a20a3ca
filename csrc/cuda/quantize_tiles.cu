#include "quantize_tiles.cuh"

namespace megatron_nvfp4::cuda {

cudaError_t quantize_tiles(const QuantizeArgs& args, cudaStream_t stream) {
  switch (args.four_over_six) {
    case FourOverSix::kOff:
      return launch_tiles_of_type<NoChoice>(args, stream);
    case FourOverSix::kMae:
      return args.fast_error ? launch_tiles_of_type<Choice<FourOverSix::kMae, true>>(args, stream)
                             : launch_tiles_of_type<Choice<FourOverSix::kMae, false>>(args, stream);
    default:
      return args.fast_error ? launch_tiles_of_type<Choice<FourOverSix::kMse, true>>(args, stream)
                             : launch_tiles_of_type<Choice<FourOverSix::kMse, false>>(args, stream);
  }
}

}  // namespace megatron_nvfp4::cuda
