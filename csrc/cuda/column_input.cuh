// Columns of a matrix in registers: two neighbours a lane, so that a warp reads 64 columns and, of
// 16-bit types, whole 128-byte lines.
#pragma once

#include "input.cuh"
#include "quantize.h"

namespace megatron_nvfp4::cuda {

constexpr int kColumnWarps = 4;  // each takes one block of rows of the same 64 columns
constexpr int kCtaColumns = 64;

// Elements (row, col) and (row, col + 1) in FP32; zeros outside.
template <class T>
NVFP4_DEVICE float2 load_pair(const void* x, int64_t row, int64_t num_cols, int64_t col) {
  const int64_t index = row * num_cols + col;
  if (num_cols % 2 == 0) {  // pairs are aligned
    if (col >= num_cols) return {0.0f, 0.0f};
    if constexpr (T::kBytes == 2) {
      const uint32_t word = __ldg(static_cast<const uint32_t*>(x) + index / 2);
      return {T::even(word), T::odd(word)};
    } else {
      return __ldg(static_cast<const float2*>(x) + index / 2);
    }
  }
  return {col < num_cols ? T::load(x, index) : 0.0f,
          col + 1 < num_cols ? T::load(x, index + 1) : 0.0f};
}

// `num` rows of two columns.
template <class T, int num>
NVFP4_DEVICE void load_column_pair(const void* x, int64_t first_row, int64_t num_cols, int64_t col,
                                   float (&out)[num][2]) {
#pragma unroll
  for (int i = 0; i < num; ++i) {
    const float2 pair = load_pair<T>(x, first_row + i, num_cols, col);
    out[i][0] = pair.x;
    out[i][1] = pair.y;
  }
}

template <int num>
NVFP4_DEVICE float column_amax(const float (&x)[num][2], int column) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < num; ++i) amax = max_magnitude(amax, x[i][column]);
  return amax;
}

// Calls the function object with the input type's class.
template <class Launch>
cudaError_t for_type(InputType type, const Launch& launch) {
  switch (type) {
    case InputType::kBFloat16:
      launch(BFloat16Input{});
      break;
    case InputType::kHalf:
      launch(HalfInput{});
      break;
    default:
      launch(FloatInput{});
  }
  return cudaGetLastError();
}

}  // namespace megatron_nvfp4::cuda
