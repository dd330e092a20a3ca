// What follows the accumulator, one FP32 rounding an operation. Shared by the GEMM's epilogue,
// which only Blackwell runs, and the operator that tests it on any GPU.
#pragma once

#include "../numerics.h"

namespace megatron_nvfp4 {

// What stands in for an argument that is absent: neither changes a bit, the sign of zero included.
constexpr float kNoScale = 1.0f;
constexpr float kNoBias = -0.0f;

// acc * RN(row_scale * group_scale) + bias; the caller rounds it to the output type.
NVFP4_FN float scale_and_bias(float acc, float row_scale, float group_scale, float bias) {
  return add(multiply(acc, multiply(row_scale, group_scale)), bias);
}

}  // namespace megatron_nvfp4
