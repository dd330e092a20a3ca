// What the operators on rows of experts check, for CPU and CUDA: quant/dispatch.py and
// quant/swiglu.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

#include "moe_gate.h"

namespace megatron_nvfp4 {

constexpr int kRun = 8;     // neighbouring elements that one lane takes
constexpr int kLanes = 32;  // see ordered_sum

// All operands are on x's device.
inline void check_device(const char* op, const char* name, const at::Tensor& t,
                         const at::Tensor& x) {
  TORCH_CHECK_VALUE(t.device() == x.device(), op, ": ", name, " is on ", t.device(),
                    "; give it on ", x.device());
}

inline void check_rows(const char* op, const char* name, const at::Tensor& x) {
  const at::ScalarType type = x.scalar_type();
  TORCH_CHECK_VALUE(
      x.dim() == 2 && (type == at::kBFloat16 || type == at::kHalf || type == at::kFloat), op, ": ",
      name, " is ", type, " ", x.sizes(), "; give BF16, FP16 or FP32 (M, K)");
  TORCH_CHECK_VALUE(x.size(1) % kRun == 0 && x.size(1) <= 1 << 25, op, ": K=", x.size(1), " of ",
                    name, " is not a multiple of 8 up to 2^25; pad the columns");
}

inline void check_index(const char* op, const at::Tensor& index, const at::Tensor& x) {
  TORCH_CHECK_VALUE(
      index.dim() == 1 && (index.scalar_type() == at::kLong || index.scalar_type() == at::kInt), op,
      ": index is ", index.scalar_type(), " ", index.sizes(), "; give int64 or int32 (M,)");
  check_device(op, "index", index, x);
}

inline void check_slots(const char* op, const at::Tensor& rows_of_token,
                        const std::optional<at::Tensor>& weights, const at::Tensor& rows) {
  TORCH_CHECK_VALUE(rows_of_token.dim() == 2 && rows_of_token.scalar_type() == at::kLong, op,
                    ": rows_of_token is ", rows_of_token.scalar_type(), " ", rows_of_token.sizes(),
                    "; give int64 (T, top_k)");
  check_device(op, "rows_of_token", rows_of_token, rows);
  if (!weights) return;
  TORCH_CHECK_VALUE(
      weights->sizes() == rows_of_token.sizes() && weights->scalar_type() == at::kFloat, op,
      ": weights are ", weights->scalar_type(), " ", weights->sizes(), "; give float32 ",
      rows_of_token.sizes());
  check_device(op, "weights", *weights, rows);
}

// Of combine_rows_backward.
inline void check_combine_backward(const at::Tensor& grad, const at::Tensor& rows,
                                   const at::Tensor& rows_of_token, const at::Tensor& weights,
                                   const at::Tensor& token_of_row) {
  const char* op = "combine_rows_backward";
  check_rows(op, "rows", rows);
  check_slots(op, rows_of_token, weights, rows);
  const std::array<int64_t, 2> shape = {rows_of_token.size(0), rows.size(1)};
  TORCH_CHECK_VALUE(
      grad.sizes() == at::IntArrayRef(shape) && grad.scalar_type() == rows.scalar_type(), op,
      ": grad is ", grad.scalar_type(), " ", grad.sizes(), "; give ", rows.scalar_type(), " ",
      at::IntArrayRef(shape));
  check_device(op, "grad", grad, rows);
  TORCH_CHECK_VALUE(token_of_row.sizes() == at::IntArrayRef{rows.size(0)} &&
                        token_of_row.scalar_type() == at::kLong,
                    op, ": token_of_row is ", token_of_row.scalar_type(), " ", token_of_row.sizes(),
                    "; give int64 (", rows.size(0), ",)");
  check_device(op, "token_of_row", token_of_row, rows);
}

// Codes, scales and amax of rows quantised per token.
inline void check_packed(const at::Tensor& codes, const at::Tensor& block_scales,
                         const at::Tensor& amax) {
  const char* op = "gather_rows";
  TORCH_CHECK_VALUE(codes.dim() == 2 && codes.scalar_type() == at::kByte && codes.size(1) % 8 == 0,
                    op, ": codes are ", codes.scalar_type(), " ", codes.sizes(),
                    "; give uint8 (T, K/2) with whole blocks of 8 bytes");
  const std::array<int64_t, 2> shape = {codes.size(0), codes.size(1) / 8};
  TORCH_CHECK_VALUE(block_scales.sizes() == at::IntArrayRef(shape) &&
                        block_scales.scalar_type() == at::kFloat8_e4m3fn,
                    op, ": block_scales are ", block_scales.scalar_type(), " ",
                    block_scales.sizes(), "; give float8_e4m3fn ", at::IntArrayRef(shape));
  TORCH_CHECK_VALUE(
      amax.sizes() == at::IntArrayRef{codes.size(0)} && amax.scalar_type() == at::kFloat, op,
      ": amax is ", amax.scalar_type(), " ", amax.sizes(), "; give float32 (", codes.size(0),
      ",), one a token");
  check_device(op, "block_scales", block_scales, codes);
  check_device(op, "amax", amax, codes);
}

// block: columns of the product that make one unit.
inline Gate check_activation(const char* op, const at::Tensor& h,
                             const std::optional<at::Tensor>& probs, int64_t kind, int64_t block) {
  TORCH_CHECK_VALUE(h.dim() == 2 && h.scalar_type() == at::kBFloat16 &&
                        h.size(1) % (2 * block) == 0 && h.size(1) <= 1 << 26,
                    op, ": h is ", h.scalar_type(), " ", h.sizes(),
                    "; give BF16 (M, 2F), F a multiple of ", block);
  TORCH_CHECK_VALUE(kind >= 0 && kind <= 2, op, ": kind=", kind,
                    "; give 0 (swiglu), 1 (geglu) or 2 (quick_geglu)");
  if (probs) {
    TORCH_CHECK_VALUE(
        probs->sizes() == at::IntArrayRef{h.size(0)} && probs->scalar_type() == at::kFloat, op,
        ": probs are ", probs->scalar_type(), " ", probs->sizes(), "; give float32 (", h.size(0),
        ",)");
    check_device(op, "probs", *probs, h);
  }
  return static_cast<Gate>(kind);
}

inline void check_grad_y(const char* op, const at::Tensor& grad_y, const at::Tensor& h) {
  const std::array<int64_t, 2> shape = {h.size(0), h.size(1) / 2};
  TORCH_CHECK_VALUE(
      grad_y.sizes() == at::IntArrayRef(shape) && grad_y.scalar_type() == h.scalar_type(), op,
      ": grad is ", grad_y.scalar_type(), " ", grad_y.sizes(), "; give ", h.scalar_type(), " ",
      at::IntArrayRef(shape));
  check_device(op, "grad", grad_y, h);
}

inline void check_e4m3_max(const char* op, int64_t e4m3_max) {
  TORCH_CHECK_VALUE(e4m3_max == 448 || e4m3_max == 256, op, ": e4m3_max=", e4m3_max,
                    "; give 448 or 256");
}

// Rows that hold any routing of `num_choices`.
inline int64_t check_route(const at::Tensor& chosen, int64_t num_experts, int64_t multiple,
                           int64_t top_k) {
  TORCH_CHECK_VALUE(
      chosen.dim() == 2 && (chosen.scalar_type() == at::kLong || chosen.scalar_type() == at::kInt ||
                            chosen.scalar_type() == at::kBool),
      "route: chosen is ", chosen.scalar_type(), " ", chosen.sizes(),
      "; give int64 or int32 experts (T, top_k), or a bool map (T, E)");
  const bool is_map = chosen.scalar_type() == at::kBool;
  TORCH_CHECK_VALUE(chosen.size(1) == (is_map ? num_experts : top_k) && top_k >= 0,
                    "route: chosen ", chosen.sizes(), " of ", num_experts,
                    " experts with top_k=", top_k, "; give (T, top_k), or a map (T, E)");
  TORCH_CHECK_VALUE(num_experts >= 1 && num_experts <= 1024 && multiple >= 1,
                    "route: ", num_experts, " experts, multiple=", multiple,
                    "; give 1 to 1024 experts and a multiple from 1 on");
  const int64_t most = chosen.size(0) * top_k + num_experts * (multiple - 1);
  TORCH_CHECK_VALUE(most < int64_t{1} << 31, "route: ", most,
                    " rows exceed 2^31; split the tokens");
  return (most + multiple - 1) / multiple * multiple;
}

}  // namespace megatron_nvfp4
