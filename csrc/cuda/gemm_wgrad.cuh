// Launch of the BF16 weight gradient of Hopper, free of torch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "gemm_dense.cuh"

namespace megatron_nvfp4::cuda {

struct WgradArgs {
  RowOffsets offsets;
  const void* a;                       // (M, N), or (N, M)
  const void* b;                       // (M, K), or (K, M)
  const float* group_scale;            // or null
  int64_t num_tokens;                  // M
  int num_groups, num_rows, num_cols;  // G, N, K
  int group_stride;                    // of the scales; 0: one for all
  bool token_major, accumulate, fp32;
  bool mapped, reversed;  // set by the launch: results evenly spaced, the last group first
  void* out[kMaxGroups];  // (N, K) each
};

cudaError_t gemm_wgrad(const WgradArgs& args, int num_sms, cudaStream_t stream);

}  // namespace megatron_nvfp4::cuda
