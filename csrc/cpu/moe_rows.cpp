// CPU implementations of the operators that move rows between tokens and experts.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "../moe_checks.h"
#include "dispatch.h"
#include "ordered_sum.h"

namespace megatron_nvfp4 {
namespace {

using at::Tensor;

constexpr int64_t kGrain = 1 << 15;  // elements worth a thread

template <class Work>
void for_rows(int64_t num_rows, int64_t num_cols, const Work& work) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, num_cols));
  at::parallel_for(0, num_rows, grain, [&](int64_t begin, int64_t end) {
    const ExactFloats exact;
    for (int64_t row = begin; row < end; ++row) work(row);
  });
}

// work(T*) with the C++ type of a floating-point tensor.
template <class Work>
void with_type(at::ScalarType type, const Work& work) {
  if (type == at::kBFloat16) {
    work(static_cast<at::BFloat16*>(nullptr));
  } else if (type == at::kHalf) {
    work(static_cast<at::Half*>(nullptr));
  } else {
    work(static_cast<float*>(nullptr));
  }
}

InputType input_type(at::ScalarType type) {
  if (type == at::kBFloat16) return InputType::kBFloat16;
  return type == at::kHalf ? InputType::kHalf : InputType::kFloat;
}

Tensor checked_indices(const char* op, const Tensor& index, int64_t num_rows) {
  const Tensor wide = index.to(at::kLong).contiguous();
  const int64_t* begin = wide.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < wide.numel(); ++i) {
    TORCH_CHECK_VALUE(begin[i] >= -1 && begin[i] < num_rows, op, ": index ", begin[i], " of ",
                      num_rows, " rows; give -1 for none, or 0 .. ", num_rows - 1);
  }
  return wide;
}

// Rows of bytes; an index of -1 gives zeros.
Tensor gather(const Tensor& input, const Tensor& index) {
  const Tensor x = input.contiguous();
  std::vector<int64_t> shape = x.sizes().vec();
  shape[0] = index.size(0);
  Tensor out = at::empty(shape, x.options());
  const int64_t row_bytes = (x.dim() == 1 ? 1 : x.size(1)) * static_cast<int64_t>(x.element_size());
  const int64_t* from = index.const_data_ptr<int64_t>();
  const auto* source = static_cast<const uint8_t*>(x.const_data_ptr());
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  if (row_bytes == 0) return out;
  for_rows(index.size(0), row_bytes, [&](int64_t row) {
    if (from[row] < 0) {
      std::memset(to + row * row_bytes, 0, row_bytes);
    } else {
      std::memcpy(to + row * row_bytes, source + from[row] * row_bytes, row_bytes);
    }
  });
  return out;
}

Tensor gather_rows(const Tensor& x, const Tensor& index) {
  check_rows("gather_rows", "x", x);
  check_index("gather_rows", index, x);
  return gather(x, checked_indices("gather_rows", index, x.size(0)));
}

std::tuple<Tensor, Tensor, Tensor> gather_rows_nvfp4(const Tensor& codes, const Tensor& scales,
                                                     const Tensor& amax, const Tensor& index_in) {
  check_packed(codes, scales, amax);
  check_index("gather_rows", index_in, codes);
  const Tensor index = checked_indices("gather_rows", index_in, codes.size(0));
  return {gather(codes, index), gather(scales, index), gather(amax, index)};
}

std::tuple<Tensor, Tensor> gather_rows_amax(const Tensor& x, const Tensor& index) {
  check_rows("gather_rows_amax", "x", x);
  check_index("gather_rows_amax", index, x);
  const Tensor rows = gather(x, checked_indices("gather_rows_amax", index, x.size(0)));
  Tensor amax = at::empty({rows.size(0)}, rows.options().dtype(at::kFloat));
  float* to = amax.mutable_data_ptr<float>();
  const int64_t num_cols = rows.size(1), row_bytes = num_cols * rows.element_size();
  const auto* from = static_cast<const uint8_t*>(rows.const_data_ptr());
  for_rows(rows.size(0), num_cols, [&](int64_t row) {
    to[row] = kernels().amax(from + row * row_bytes, input_type(rows.scalar_type()), num_cols);
  });
  return {rows, amax};
}

Tensor combine_rows(const Tensor& rows_in, const Tensor& slots,
                    const std::optional<Tensor>& weights) {
  check_rows("combine_rows", "rows", rows_in);
  check_slots("combine_rows", slots, weights, rows_in);
  const Tensor rows = rows_in.contiguous();
  const Tensor index = checked_indices("combine_rows", slots.flatten(), rows.size(0));
  const std::optional<Tensor> factors = weights ? std::optional(weights->contiguous()) : weights;
  const int64_t num_tokens = slots.size(0), top_k = slots.size(1), num_cols = rows.size(1);
  Tensor out = at::empty({num_tokens, num_cols}, rows.options());
  const int64_t* row_of = index.const_data_ptr<int64_t>();
  const float* factor = factors ? factors->const_data_ptr<float>() : nullptr;
  with_type(rows.scalar_type(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* from = rows.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    for_rows(num_tokens, num_cols * std::max<int64_t>(top_k, 1), [&](int64_t token) {
      std::vector<float> total(num_cols, 0.0f);
      for (int64_t choice = token * top_k; choice < (token + 1) * top_k; ++choice) {
        if (row_of[choice] < 0) continue;
        const T* row = from + row_of[choice] * num_cols;
        if (factor) {
          for (int64_t i = 0; i < num_cols; ++i) {
            total[i] = add(total[i], multiply(static_cast<float>(row[i]), factor[choice]));
          }
        } else {
          for (int64_t i = 0; i < num_cols; ++i) {
            total[i] = add(total[i], static_cast<float>(row[i]));
          }
        }
      }
      for (int64_t i = 0; i < num_cols; ++i) to[token * num_cols + i] = static_cast<T>(total[i]);
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> combine_rows_backward(const Tensor& grad_in, const Tensor& rows_in,
                                                 const Tensor& slots, const Tensor& weights_in,
                                                 const Tensor& token_of_row) {
  check_combine_backward(grad_in, rows_in, slots, weights_in, token_of_row);
  const Tensor grad = grad_in.contiguous(), rows = rows_in.contiguous();
  const Tensor weights = weights_in.contiguous();
  const Tensor index = checked_indices("combine_rows_backward", slots.flatten(), rows.size(0));
  const int64_t top_k = slots.size(1), num_cols = rows.size(1);
  Tensor grad_rows = at::zeros(rows.sizes(), rows.options());
  Tensor grad_weights = at::zeros(weights.sizes(), weights.options());
  const int64_t* row_of = index.const_data_ptr<int64_t>();
  const float* factor = weights.const_data_ptr<float>();
  float* grad_factor = grad_weights.mutable_data_ptr<float>();
  with_type(rows.scalar_type(), [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T *from = rows.const_data_ptr<T>(), *grads = grad.const_data_ptr<T>();
    T* to = grad_rows.mutable_data_ptr<T>();
    for_rows(index.numel(), num_cols, [&](int64_t choice) {
      if (row_of[choice] < 0) return;
      const T* g = grads + choice / top_k * num_cols;
      const T* row = from + row_of[choice] * num_cols;
      T* out = to + row_of[choice] * num_cols;
      OrderedSum sum;
      for (int64_t i = 0; i < num_cols; ++i) {
        const float value = static_cast<float>(g[i]);
        out[i] = static_cast<T>(multiply(value, factor[choice]));
        sum.add_term(i, multiply(value, static_cast<float>(row[i])));
      }
      grad_factor[choice] = sum.total();
    });
  });
  return {grad_rows, grad_weights};
}

// Experts of every choice, int64 (T * top_k); num_experts for none.
std::vector<int64_t> experts_of(const Tensor& chosen_in, int64_t num_experts, int64_t top_k) {
  const int64_t num_tokens = chosen_in.size(0);
  std::vector<int64_t> expert(num_tokens * top_k, num_experts);
  if (chosen_in.scalar_type() == at::kBool) {
    const Tensor map = chosen_in.contiguous();
    const bool* has = map.const_data_ptr<bool>();
    for (int64_t token = 0; token < num_tokens; ++token) {
      int64_t slot = 0;
      for (int64_t e = 0; e < num_experts && slot < top_k; ++e) {
        if (has[token * num_experts + e]) expert[token * top_k + slot++] = e;
      }
    }
    return expert;
  }
  const Tensor chosen = chosen_in.to(at::kLong).contiguous();
  const int64_t* from = chosen.const_data_ptr<int64_t>();
  for (size_t i = 0; i < expert.size(); ++i) {
    TORCH_CHECK_VALUE(from[i] < num_experts, "route: expert ", from[i], " of ", num_experts,
                      "; give 0 .. ", num_experts - 1, ", or -1 for none");
    if (from[i] >= 0) expert[i] = from[i];
  }
  return expert;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> route(const Tensor& chosen, int64_t num_experts,
                                                 int64_t multiple, int64_t top_k) {
  const int64_t num_rows = check_route(chosen, num_experts, multiple, top_k);
  const auto options = chosen.options().dtype(at::kLong);
  Tensor tokens = at::full({num_rows}, -1, options), slots = at::full({num_rows}, -1, options);
  Tensor rows = at::full({chosen.size(0), top_k}, -1, options);
  Tensor offsets = at::zeros({num_experts + 1}, options);
  const std::vector<int64_t> expert = experts_of(chosen, num_experts, top_k);
  std::vector<int64_t> next(num_experts + 1, 0);
  for (const int64_t e : expert) ++next[e];
  int64_t* offset = offsets.mutable_data_ptr<int64_t>();
  for (int64_t e = 0; e < num_experts; ++e) {
    offset[e + 1] = offset[e] + (next[e] + multiple - 1) / multiple * multiple;
    next[e] = offset[e];
  }
  int64_t *token = tokens.mutable_data_ptr<int64_t>(), *slot = slots.mutable_data_ptr<int64_t>();
  int64_t* row_of = rows.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < static_cast<int64_t>(expert.size()); ++i) {
    if (expert[i] == num_experts) continue;
    const int64_t row = next[expert[i]]++;
    token[row] = i / top_k;
    slot[row] = i % top_k;
    row_of[i] = row;
  }
  return {tokens, slots, rows, offsets};
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_nvfp4, CPU, m) {
  m.impl("gather_rows", &gather_rows);
  m.impl("gather_rows_nvfp4", &gather_rows_nvfp4);
  m.impl("gather_rows_amax", &gather_rows_amax);
  m.impl("combine_rows", &combine_rows);
  m.impl("combine_rows_backward", &combine_rows_backward);
  m.impl("route", &route);
}

}  // namespace megatron_nvfp4
