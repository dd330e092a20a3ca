#include "search_tiles.cuh"

namespace megatron_nvfp4::cuda {

cudaError_t search_tiles(const QuantizeArgs& args, cudaStream_t stream) {
  if (args.four_over_six == FourOverSix::kMae) {
    return args.fast_error ? search_tiles_of_type<Choice<FourOverSix::kMae, true>>(args, stream)
                           : search_tiles_of_type<Choice<FourOverSix::kMae, false>>(args, stream);
  }
  return args.fast_error ? search_tiles_of_type<Choice<FourOverSix::kMse, true>>(args, stream)
                         : search_tiles_of_type<Choice<FourOverSix::kMse, false>>(args, stream);
}

}  // namespace megatron_nvfp4::cuda
