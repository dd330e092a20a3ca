#include "quantize_rows.cuh"

namespace megatron_nvfp4::cuda {

// quantize_rows_strict.cu, quantize_rows_fast.cu
cudaError_t quantize_rows_strict(const QuantizeArgs& args, cudaStream_t stream);
cudaError_t quantize_rows_fast(const QuantizeArgs& args, cudaStream_t stream);

int max_cols_on_chip(const QuantizeArgs& args) {
  const bool two = args.four_over_six != FourOverSix::kOff;
  using One = RowsConfig<FloatInput, NoChoice>;
  using Two = RowsConfig<FloatInput, Choice<FourOverSix::kMae, true>>;
  const int threads = two ? Two::kMaxThreads : One::kMaxThreads;
  return threads * (args.type == InputType::kFloat ? 2 : 4) * kBlock;
}

cudaError_t quantize_rows(const QuantizeArgs& args, cudaStream_t stream) {
  if (args.four_over_six == FourOverSix::kOff) return launch_rows_of_type<NoChoice>(args, stream);
  return (args.fast_error ? quantize_rows_fast : quantize_rows_strict)(args, stream);
}

}  // namespace megatron_nvfp4::cuda
