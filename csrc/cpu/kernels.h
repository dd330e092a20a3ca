// The loops of the CPU kernels, compiled once per instruction set, and the choice between them.
//
// All of them are loops over numerics.h in kernels_impl.h, so that every instruction set gives the
// same bits; only the transposition of a tile and the vectors of gemm_impl.h differ.
#pragma once

#include <cstdint>

#include "../simulated.h"
#include "../transforms.h"
#include "gemm.h"

namespace megatron_nvfp4 {

enum class InputType : int { kBFloat16, kHalf, kFloat };

// An NVFP4 quantisation of contiguous rows: the matrices and what all rows share.
struct QuantizeArgs {
  const void* x;  // (M, num_cols) of `type`
  InputType type;
  int64_t num_cols;
  uint8_t* codes;         // (M, num_cols / 2)
  uint8_t* block_scales;  // (M, num_cols / 16)
  int e4m3_max;
  FourOverSix four_over_six;
  bool fast_error;
  bool stochastic = false;
  RandomKey key = {};
};

// An NVFP4 quantisation of the transpose of a contiguous matrix, blocks of 16 along its rows.
struct ColumnArgs {
  const void* x;  // (num_rows, num_cols) of `type`, num_rows a multiple of 16
  InputType type;
  int64_t num_rows, num_cols;
  uint8_t* codes;         // (num_cols, num_rows / 2)
  uint8_t* block_scales;  // (num_cols, num_rows / 16)
  int e4m3_max;
  bool rotated, stochastic;
  RandomKey key;
};

struct CpuKernels {
  const char* isa;
  // max |x| of `num` contiguous elements; NaN does not take part.
  float (*amax)(const void* x, InputType type, int64_t num);
  // Rows first_row .. first_row + num_rows - 1 (1..16 of them), which share their block scales.
  void (*quantize)(const QuantizeArgs& args, int64_t first_row, int num_rows, float amax);
  // q * s_b of one row times `scale`, in the output type.
  void (*dequantize)(const uint8_t* codes, const uint8_t* block_scales, int64_t num_cols,
                     float scale, InputType type, void* out);
  // MXFP8 of contiguous blocks of 32.
  void (*quantize_mxfp8)(const void* x, InputType type, int64_t num_blocks, uint8_t* codes,
                         uint8_t* block_scales);
  void (*dequantize_mxfp8)(const uint8_t* codes, const uint8_t* block_scales, int64_t num_blocks,
                           InputType type, void* out);
  // max |x| of rows 16 * row_block and on, transformed if args.rotated.
  float (*column_amax)(const ColumnArgs& args, int64_t row_block);
  void (*quantize_columns)(const ColumnArgs& args, int64_t row_block, float amax);
  // MXFP8 of the transpose of (num_rows, num_cols): rows 32 * row_block and on.
  void (*quantize_mxfp8_columns)(const void* x, InputType type, int64_t num_rows, int64_t num_cols,
                                 int64_t row_block, uint8_t* codes, uint8_t* block_scales);
  // Simulated float of one row.
  void (*quantize_simulated)(const void* x, InputType type, int64_t num_cols,
                             const FloatFormat& format, float amax, float* values,
                             uint8_t* block_scales);
  // One task of a matrix product; scratch holds kGemmScratch floats.
  void (*gemm)(const GemmTask& task, float* scratch);
};

extern const CpuKernels kDefaultKernels;
#if defined(__x86_64__)
extern const CpuKernels kAvx2Kernels;
extern const CpuKernels kAvx512Kernels;
#endif

}  // namespace megatron_nvfp4
