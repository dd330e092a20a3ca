// CPU implementations of the matrix products in bindings.cpp: checks, tasks, and threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include "dispatch.h"
#include "gemm.h"

namespace megatron_nvfp4 {
namespace {

using at::Tensor;
using Bounds = std::vector<int64_t>;

InputType type_of(const char* op, const char* name, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(dtype == at::kBFloat16 || dtype == at::kFloat, op, ": ", name, " is ", dtype,
                    "; give BF16 or FP32");
  return dtype == at::kBFloat16 ? InputType::kBFloat16 : InputType::kFloat;
}

void check_matrix(const char* op, const char* name, const Tensor& t) {
  TORCH_CHECK_VALUE(t.dim() == 2, op, ": ", name, " has shape ", t.sizes(), "; give a matrix");
}

// Group boundaries that rise from 0 to at most `size`.
Bounds bounds_of(const char* op, const Tensor& offsets, int64_t size) {
  TORCH_CHECK_VALUE(offsets.dim() == 1 && offsets.numel() > 1 &&
                        (offsets.scalar_type() == at::kLong || offsets.scalar_type() == at::kInt),
                    op, ": offsets are ", offsets.scalar_type(), " ", offsets.sizes(),
                    "; give int64 or int32 (G+1,)");
  const Tensor wide = offsets.to(at::kLong).contiguous();
  const int64_t* data = wide.const_data_ptr<int64_t>();
  Bounds bounds(data, data + wide.numel());
  TORCH_CHECK_VALUE(
      bounds.front() == 0 && bounds.back() <= size && std::is_sorted(bounds.begin(), bounds.end()),
      op, ": offsets ", at::IntArrayRef(bounds), " do not rise from 0 to at most M=", size);
  return bounds;
}

// A vector of factors, contiguous; of one element if it is one for all.
std::optional<Tensor> factors(const char* op, const char* name, const std::optional<Tensor>& t,
                              int64_t size, bool shared = true) {
  if (!t) return std::nullopt;
  TORCH_CHECK_VALUE(t->scalar_type() == at::kFloat && t->dim() == 1 &&
                        (t->size(0) == size || (shared && t->size(0) == 1)),
                    op, ": ", name, " is ", t->scalar_type(), " ", t->sizes(), "; give float32 (",
                    size, ",)", shared ? " or (1,)" : "");
  return t->contiguous();
}

const float* data_of(const std::optional<Tensor>& t) {
  return t ? t->const_data_ptr<float>() : nullptr;
}

int64_t stride_of(const std::optional<Tensor>& t) { return t && t->size(0) > 1 ? 1 : 0; }

const float* at_or_null(const float* data, int64_t offset) {
  return data ? data + offset : nullptr;
}

GemmOperand operand(const char* op, const char* name, const Tensor& t) {
  return {t.const_data_ptr(), type_of(op, name, t.scalar_type()), t.stride(0), t.stride(1)};
}

// The operand from a row and a depth on.
GemmOperand from(GemmOperand operand, int64_t row, int64_t depth) {
  const int64_t bytes = operand.type == InputType::kFloat ? 4 : 2;
  const int64_t offset = row * operand.stride + depth * operand.depth_stride;
  operand.data = static_cast<const char*>(operand.data) + offset * bytes;
  return operand;
}

void* element(Tensor& t, int64_t index) {
  return static_cast<char*>(t.mutable_data_ptr()) + index * static_cast<int64_t>(t.element_size());
}

// Rows and columns [row, end_row) x [col, end_col) of a group's product.
struct Piece {
  int64_t group, row, end_row, col, end_col;
};

// Cuts (rows of each group) x num_cols into pieces of at most a task's size, small enough that all
// threads have work. The cut does not change bits.
std::vector<Piece> cut(const Bounds& bounds, int64_t num_cols) {
  const int64_t wanted = at::get_num_threads() > 1 ? 4 * at::get_num_threads() : 1;
  for (int64_t rows = kGemmRows, cols = kGemmCols;; (rows > kGemmCachedRows ? rows : cols) /= 2) {
    std::vector<Piece> pieces;
    for (int64_t group = 0; group + 1 < static_cast<int64_t>(bounds.size()); ++group) {
      for (int64_t row = bounds[group]; row < bounds[group + 1]; row += rows) {
        for (int64_t col = 0; col < num_cols; col += cols) {
          pieces.push_back({group, row, std::min(row + rows, bounds[group + 1]), col,
                            std::min(col + cols, num_cols)});
        }
      }
    }
    if (static_cast<int64_t>(pieces.size()) >= wanted || cols <= 64) return pieces;
  }
}

// Runs task_of(piece) of every piece, each thread taking the next.
template <class TaskOf>
void run(const std::vector<Piece>& pieces, const TaskOf& task_of) {
  const int64_t num = static_cast<int64_t>(pieces.size());
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, std::min<int64_t>(num, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    const ExactFloats exact;
    const c10::DataPtr scratch = c10::GetCPUAllocator()->allocate(kGemmScratch * sizeof(float));
    for (int64_t i = next++; i < num; i = next++) {
      kernels().gemm(task_of(pieces[i]), static_cast<float*>(scratch.get()));
    }
  });
}

Tensor grouped_gemm_decoded(const Tensor& a, const Tensor& b, const Tensor& offsets,
                            const std::optional<Tensor>& row_scale,
                            const std::optional<Tensor>& group_scale,
                            const std::optional<Tensor>& col_scale,
                            const std::optional<Tensor>& bias, at::ScalarType out_dtype) {
  constexpr const char* kOp = "grouped_gemm_decoded";
  check_matrix(kOp, "a", a);
  check_matrix(kOp, "b", b);
  const Bounds bounds = bounds_of(kOp, offsets, a.size(0));
  const int64_t num_groups = static_cast<int64_t>(bounds.size()) - 1,
                num_cols = b.size(0) / num_groups;
  TORCH_CHECK_VALUE(b.size(0) % num_groups == 0 && b.size(1) == a.size(1), kOp, ": a is ",
                    a.sizes(), ", b ", b.sizes(), "; give b (G*N, K) of G=", num_groups,
                    " groups and K=", a.size(1));
  TORCH_CHECK_VALUE(!(group_scale && col_scale), kOp,
                    ": group_scale and col_scale are given; multiply them into col_scale");
  TORCH_CHECK_VALUE(
      !bias || (bias->dim() == 2 && bias->size(0) == num_groups && bias->size(1) == num_cols), kOp,
      ": bias has shape ", bias ? bias->sizes() : at::IntArrayRef(), "; give (", num_groups, ", ",
      num_cols, ")");
  if (bias) type_of(kOp, "bias", bias->scalar_type());
  const auto rows = factors(kOp, "row_scale", row_scale, a.size(0));
  const auto groups = factors(kOp, "group_scale", group_scale, num_groups);
  const auto columns = factors(kOp, "col_scale", col_scale, b.size(0), false);
  std::optional<Tensor> addend;
  if (bias) addend = bias->to(at::kFloat).contiguous();
  const InputType out_type = type_of(kOp, "out_dtype", out_dtype);
  Tensor out = at::empty({a.size(0), num_cols}, a.options().dtype(out_dtype));
  out.narrow(0, bounds.back(), a.size(0) - bounds.back()).zero_();
  const GemmOperand left = operand(kOp, "a", a), right = operand(kOp, "b", b);
  const bool by_column = columns.has_value();
  const float* factor = data_of(by_column ? columns : groups);
  run(cut(bounds, num_cols), [&](const Piece& piece) {
    const int64_t col = piece.group * num_cols + piece.col;
    const GemmScale scale = {
        at_or_null(data_of(rows), piece.row * stride_of(rows)), stride_of(rows),
        at_or_null(factor, by_column ? col : piece.group * stride_of(groups)), by_column};
    return GemmTask{from(left, piece.row, 0),
                    from(right, col, 0),
                    piece.end_row - piece.row,
                    piece.end_col - piece.col,
                    a.size(1),
                    scale,
                    at_or_null(data_of(addend), col),
                    false,
                    element(out, piece.row * num_cols + piece.col),
                    out_type,
                    num_cols};
  });
  return out;
}

void grouped_wgrad_decoded(const Tensor& a, const Tensor& b, const Tensor& offsets,
                           const std::optional<Tensor>& row_scale,
                           const std::optional<Tensor>& group_scale, bool accumulate,
                           at::TensorList out) {
  constexpr const char* kOp = "grouped_wgrad_decoded";
  check_matrix(kOp, "a", a);
  check_matrix(kOp, "b", b);
  TORCH_CHECK_VALUE(a.size(1) == b.size(1), kOp, ": a is ", a.sizes(), ", b ", b.sizes(),
                    "; give a (N, M) and b (K, M)");
  const Bounds bounds = bounds_of(kOp, offsets, a.size(1));
  const int64_t num_groups = static_cast<int64_t>(bounds.size()) - 1;
  const int64_t num_rows = a.size(0), num_cols = b.size(0);
  TORCH_CHECK_VALUE(static_cast<int64_t>(out.size()) == num_groups, kOp, ": out holds ", out.size(),
                    " tensors; give one for each of G=", num_groups, " groups");
  for (const Tensor& t : out) {
    type_of(kOp, "out", t.scalar_type());
    TORCH_CHECK_VALUE(
        t.dim() == 2 && t.size(0) == num_rows && t.size(1) == num_cols && t.is_contiguous(), kOp,
        ": out is ", t.sizes(), " with strides ", t.strides(), "; give contiguous (", num_rows,
        ", ", num_cols, ")");
  }
  const auto rows = factors(kOp, "row_scale", row_scale, num_rows);
  const auto groups = factors(kOp, "group_scale", group_scale, num_groups);
  const GemmOperand left = operand(kOp, "a", a), right = operand(kOp, "b", b);
  std::vector<Tensor> to(out.begin(), out.end());
  // Every group has the same outputs; an empty one that accumulates is left as it is.
  Bounds outputs = {0};
  std::vector<int64_t> group_ids;
  for (int64_t group = 0; group < num_groups; ++group) {
    if (accumulate && bounds[group] == bounds[group + 1]) continue;
    outputs.push_back(outputs.back() + num_rows);
    group_ids.push_back(group);
  }
  run(cut(outputs, num_cols), [&](const Piece& piece) {
    const int64_t group = group_ids[piece.group], first = bounds[group];
    const int64_t row = piece.row - outputs[piece.group];
    const bool empty = first == bounds[group + 1];
    const GemmScale scale = {at_or_null(data_of(rows), row * stride_of(rows)), stride_of(rows),
                             at_or_null(data_of(groups), group * stride_of(groups)), 0};
    return GemmTask{from(left, row, first),
                    from(right, piece.col, first),
                    piece.end_row - piece.row,
                    piece.end_col - piece.col,
                    bounds[group + 1] - first,
                    empty ? GemmScale{} : scale,  // exact zeros, whatever the scale
                    nullptr,
                    accumulate,
                    element(to[group], row * num_cols + piece.col),
                    type_of(kOp, "out", to[group].scalar_type()),
                    num_cols};
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_nvfp4, CPU, m) {
  m.impl("grouped_gemm_decoded", &grouped_gemm_decoded);
  m.impl("grouped_wgrad_decoded", &grouped_wgrad_decoded);
}

}  // namespace megatron_nvfp4
