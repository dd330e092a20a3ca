// A matrix product of one task: a block of rows times a block of columns, over the whole depth.
//
// Every output is one FP32 accumulator that starts at +0 and takes a fused multiply-add for each
// position of the depth, ascending. Where the product of two operands is exact in FP32, as it is
// for BF16 and decoded values short of overflow and underflow, that equals a multiply and an add.
// Vectors run over columns, so neither the instruction set nor the split into tasks changes a bit.
#pragma once

#include <cstdint>

namespace megatron_nvfp4 {

enum class InputType : int;

// Element (i, d) of an operand is data[i * stride + d * depth_stride].
struct GemmOperand {
  const void* data;
  InputType type;  // BF16 or FP32
  int64_t stride, depth_stride;
};

// Factors of an output: rows[row * row_stride] and columns[column * column_stride], either null.
// Two factors are multiplied first, then the accumulator by their product.
struct GemmScale {
  const float* rows;
  int64_t row_stride;
  const float* columns;
  int64_t column_stride;
};

struct GemmTask {
  GemmOperand a, b;  // row i of the product from a, column j from b
  int64_t num_rows, num_cols, depth;
  GemmScale scale;
  const float* bias;  // (num_cols,) or null
  bool accumulate;    // adds what `out` holds
  void* out;          // row stride `out_stride`, in elements
  InputType out_type;
  int64_t out_stride;
};

// The largest task, and the blocks of operands that stay in a core's caches. Multiples of every
// register tile.
constexpr int64_t kGemmRows = 1008, kGemmCols = 512;
constexpr int64_t kGemmCachedRows = 168, kGemmCachedDepth = 256;

// Floats that a task needs room for, from an address that is a multiple of 64.
constexpr int64_t kGemmScratch =
    kGemmRows * kGemmCols + (kGemmCachedRows + kGemmCols) * kGemmCachedDepth;

}  // namespace megatron_nvfp4
