// Launches of the BF16 GEMMs of Hopper, free of torch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace megatron_nvfp4::cuda {

constexpr int kMaxGroups = 1024;  // row starts of all groups lie in shared memory

// Row boundaries of groups, on the device.
struct RowOffsets {
  const void* data;
  bool wide;  // int64, else int32
#if defined(__CUDACC__)
  __device__ int operator[](int i) const {
    return wide ? static_cast<int>(static_cast<const int64_t*>(data)[i])
                : static_cast<const int32_t*>(data)[i];
  }
#endif
};

struct DenseArgs {
  RowOffsets offsets;
  const void* x;             // (M, K)
  const void* weights;       // (G, N, K), or (G, K, N) if transposed
  int64_t weight_stride;     // bytes from one group's to the next in memory
  const float* row_scale;    // or null
  const float* group_scale;  // or null
  const float* col_scale;    // or null: (G, N), in place of group_scale
  const float* bias;         // or null: (G, N)
  void* out;                 // (M, N)
  int64_t num_rows;
  int num_groups, num_cols, depth;
  int row_stride, group_stride;  // of the scales; 0: one for all
  bool transposed;
  bool reversed;  // group g's weight is the (G-1-g)th in memory
  bool fp32;
  bool halved;  // tiles have half as many tokens; gemm_dense chooses
};

cudaError_t gemm_dense(const DenseArgs& args, int num_sms, cudaStream_t stream);

}  // namespace megatron_nvfp4::cuda
