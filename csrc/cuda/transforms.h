// The quantisers with transposition, rotation or random rounding, MXFP8 and simulated floats, as
// the operators call them. No torch here: the kernels compile without it.
#pragma once

#include "../simulated.h"
#include "../transforms.h"
#include "quantize.h"

namespace megatron_nvfp4::cuda {

// NVFP4 of the transpose of a contiguous, 16-byte aligned matrix, 1x16 blocks along its rows.
struct ColumnArgs {
  const void* x;  // (num_rows, num_cols), num_rows a multiple of 16
  InputType type;
  int64_t num_rows, num_cols;
  uint8_t* codes;          // (num_cols, num_rows / 2)
  uint8_t* block_scales;   // (num_cols, num_rows / 16)
  float* amax;             // (num_groups,)
  const int64_t* offsets;  // row boundaries of the groups, multiples of 16; null: one group
  int num_groups;
  int e4m3_max;
  bool rotated, stochastic;
  RandomKey key;
};

// Fills args.amax: of every group after the rotation, 0 if it is empty. NaN does not take part.
cudaError_t find_column_amax(const ColumnArgs& args, cudaStream_t stream);

// Encodes under args.amax.
cudaError_t quantize_columns(const ColumnArgs& args, cudaStream_t stream);

// 1x16 blocks rounded stochastically, under a given amax: any source but kSelf, linear scales.
cudaError_t quantize_rows_stochastic(const QuantizeArgs& args, RandomKey key, cudaStream_t stream);

// A contiguous, 16-byte aligned matrix of whole blocks of 32 to MXFP8.
struct Mxfp8Args {
  const void* x;  // (num_rows, num_cols)
  InputType type;
  int64_t num_rows, num_cols;
  uint8_t* codes;         // (num_rows, num_cols), or transposed
  uint8_t* block_scales;  // (num_rows, num_cols / 32), or (num_cols, num_rows / 32)
};

cudaError_t quantize_mxfp8(const Mxfp8Args& args, cudaStream_t stream);
// Of the transpose: blocks along the rows of x.
cudaError_t quantize_mxfp8_columns(const Mxfp8Args& args, cudaStream_t stream);
// The column form's values as BF16 (num_rows, num_cols), num_cols even; exact in BF16's normal
// range.
cudaError_t round_mxfp8_columns(const void* x, InputType type, int64_t num_rows, int64_t num_cols,
                                void* out, cudaStream_t stream);
// The inverse, in the output type.
cudaError_t dequantize_mxfp8(const uint8_t* codes, const uint8_t* block_scales,
                             int64_t num_elements, InputType type, void* out, cudaStream_t stream);

// A matrix to a simulated float under given row amaxes: values FP32, linear scales.
cudaError_t quantize_simulated(const QuantizeArgs& args, FloatFormat format, float* values,
                               cudaStream_t stream);

}  // namespace megatron_nvfp4::cuda
