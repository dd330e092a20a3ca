// The kernels that move rows between tokens and experts, as the operators call them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace megatron_nvfp4::cuda {

// One matrix of rows to gather: rows of `row_bytes`, both sides contiguous.
struct RowPart {
  const void* from;
  void* to;
  int64_t row_bytes;
};

// An index of -1 gives a row of zeros; int64, or int32 if not `is_long`.
struct RowIndex {
  const void* data;
  bool is_long;
  int64_t num_rows;
};

enum class RowType : int { kBFloat16, kHalf, kFloat };

// Rows quantised per token: codes of row_bytes, a multiple of 8, scales of an eighth, one amax.
struct PackedRows {
  const void *codes, *scales;
  const uint32_t* amax;
  void *codes_out, *scales_out;
  uint32_t* amax_out;
  int64_t row_bytes;
};

// row_bytes is a multiple of 16.
cudaError_t gather_rows(const RowPart& part, const RowIndex& index, cudaStream_t stream);
cudaError_t gather_rows(const PackedRows& rows, const RowIndex& index, cudaStream_t stream);

cudaError_t gather_rows_amax(const void* x, RowType type, int64_t num_cols, const RowIndex& index,
                             void* rows, float* amax, cudaStream_t stream);

// Slots of tokens: rows_of_token and weights (T, top_k), weights may be null.
struct Slots {
  const int64_t* row;
  const float* weight;
  int64_t num_tokens;
  int top_k;
};

cudaError_t combine_rows(const void* rows, RowType type, int64_t num_cols, const Slots& slots,
                         void* out, cudaStream_t stream);

// token_of_row (num_rows,): rows of no token, -1, get zeros.
struct CombineBackward {
  const void *grad, *rows;
  RowType type;
  int64_t num_cols, num_rows;
  Slots slots;
  const int64_t* token_of_row;
  void* grad_rows;
  float* grad_weights;
};

cudaError_t combine_rows_backward(const CombineBackward& args, cudaStream_t stream);

// quant.dispatch.route. chosen: experts (T, top_k), int64 or int32; or a map, bool (T, E).
struct RouteArgs {
  const void* chosen;
  int chosen_bytes;  // of an element: 8, 4, or 1 for a map
  int64_t num_tokens, num_rows;
  int top_k, num_experts, multiple;
  int64_t *token_of_row, *slot_of_row;  // (num_rows,)
  int64_t *rows_of_token, *offsets;
  int* counts;             // (num_experts, route_chunks)
  int* totals;             // (num_experts,)
  int16_t* chosen_of_map;  // (T, top_k), for a map
};

int64_t route_chunks(int64_t num_choices);
cudaError_t route(const RouteArgs& args, cudaStream_t stream);

}  // namespace megatron_nvfp4::cuda
