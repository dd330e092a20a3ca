// The block-scaled grouped GEMM of Blackwell, as its operator calls it. No torch and no CUTLASS
// here. Compiled for compute capability 10.0 and 10.3; it has never run.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace megatron_nvfp4::cuda {

// out[rows of g] = scale_and_bias(A[rows of g] @ B_g^T). Contiguous, 16-byte aligned, on the
// current device; optional ones are null. num_k is a multiple of 32, num_cols of 8, all sizes below
// 2^31.
struct GroupedGemmArgs {
  const uint8_t* a;         // codes (num_rows, num_k / 2)
  const uint8_t* a_scales;  // 128x4 tiles, every group beginning one
  const uint8_t* b;         // codes (num_groups * num_cols, num_k / 2)
  const uint8_t* b_scales;
  const int64_t* offsets;    // (num_groups + 1,), read on the device only
  const float* row_scale;    // (num_rows,)
  const float* group_scale;  // (num_groups,)
  const float* bias;         // (num_groups, num_cols)
  void* out;  // (num_rows, num_cols); rows from offsets[num_groups] on are not written
  int num_groups, num_cols, num_k;
  int device, num_sms;
};

// One instance for each output type. workspace: workspace_bytes of device memory, 128-byte aligned,
// of no other launch in flight.
struct GroupedGemm {
  size_t (*workspace_bytes)(const GroupedGemmArgs& args);
  // Null, or what went wrong.
  const char* (*launch)(const GroupedGemmArgs& args, void* workspace, cudaStream_t stream);
};
GroupedGemm grouped_gemm_bf16();
GroupedGemm grouped_gemm_fp32();

}  // namespace megatron_nvfp4::cuda
