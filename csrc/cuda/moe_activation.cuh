// The gated activations and their backward, as the operators call them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../moe_gate.h"

namespace megatron_nvfp4::cuda {

// BF16 but for the probabilities; num_cols, of the product, a multiple of 8.
struct ActivationArgs {
  const void* h;       // (num_rows, 2 * num_cols)
  const float* probs;  // (num_rows,), or null
  int64_t num_rows, num_cols;
  Gate kind;
  void* y;             // (num_rows, num_cols), of the forward
  const void* grad_y;  // the rest, of the backward
  void* grad_h;
  float* grad_probs;  // null without probs
};

cudaError_t weighted_activation(const ActivationArgs& args, cudaStream_t stream);
cudaError_t weighted_activation_backward(const ActivationArgs& args, cudaStream_t stream);

}  // namespace megatron_nvfp4::cuda
