// CUDA implementations of the operators on rows of experts: checks, and calls of the kernels.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "../moe_checks.h"
#include "moe_activation.cuh"
#include "moe_rows.cuh"
#include "quantize.h"

namespace megatron_nvfp4::cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Contiguous, beginning at a multiple of 16 bytes.
Tensor aligned(const Tensor& t) {
  const Tensor dense = t.contiguous();
  return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 ? dense.clone() : dense;
}

OptionalTensor dense(const OptionalTensor& t) { return t ? OptionalTensor(t->contiguous()) : t; }

const float* floats(const OptionalTensor& t) { return t ? t->const_data_ptr<float>() : nullptr; }

RowType row_type(const Tensor& x) {
  if (x.scalar_type() == at::kBFloat16) return RowType::kBFloat16;
  return x.scalar_type() == at::kHalf ? RowType::kHalf : RowType::kFloat;
}

RowIndex row_index(const Tensor& index) {
  return {index.const_data_ptr(), index.scalar_type() == at::kLong, index.size(0)};
}

Tensor gather_rows_op(const Tensor& x_in, const Tensor& index_in) {
  check_rows("gather_rows", "x", x_in);
  check_index("gather_rows", index_in, x_in);
  const c10::cuda::CUDAGuard guard(x_in.device());
  const Tensor x = aligned(x_in), index = index_in.contiguous();
  Tensor rows = at::empty({index.size(0), x.size(1)}, x.options());
  if (rows.numel() == 0) return rows;
  if (x.size(0) == 0) return rows.zero_();
  const RowPart part{x.const_data_ptr(), rows.mutable_data_ptr(),
                     x.size(1) * static_cast<int64_t>(x.element_size())};
  C10_CUDA_CHECK(gather_rows(part, row_index(index), c10::cuda::getCurrentCUDAStream()));
  return rows;
}

std::tuple<Tensor, Tensor, Tensor> gather_rows_nvfp4_op(const Tensor& codes_in,
                                                        const Tensor& scales_in,
                                                        const Tensor& amax_in,
                                                        const Tensor& index_in) {
  check_packed(codes_in, scales_in, amax_in);
  check_index("gather_rows", index_in, codes_in);
  const c10::cuda::CUDAGuard guard(codes_in.device());
  const Tensor codes = aligned(codes_in), scales = aligned(scales_in);
  const Tensor amax = amax_in.contiguous(), index = index_in.contiguous();
  const int64_t num_rows = index.size(0);
  Tensor codes_out = at::empty({num_rows, codes.size(1)}, codes.options());
  Tensor scales_out = at::empty({num_rows, scales.size(1)}, scales.options());
  Tensor amax_out = at::empty({num_rows}, amax.options());
  if (num_rows == 0 || codes.numel() == 0) {
    // Rows of no token, or of no columns: amax 0 either way.
    codes_out.zero_(), scales_out.zero_(), amax_out.zero_();
    return {codes_out, scales_out, amax_out};
  }
  const PackedRows rows{codes.const_data_ptr(),
                        scales.const_data_ptr(),
                        static_cast<const uint32_t*>(amax.const_data_ptr()),
                        codes_out.mutable_data_ptr(),
                        scales_out.mutable_data_ptr(),
                        static_cast<uint32_t*>(amax_out.mutable_data_ptr()),
                        codes.size(1)};
  C10_CUDA_CHECK(gather_rows(rows, row_index(index), c10::cuda::getCurrentCUDAStream()));
  return {codes_out, scales_out, amax_out};
}

std::tuple<Tensor, Tensor> gather_rows_amax_op(const Tensor& x_in, const Tensor& index_in) {
  check_rows("gather_rows_amax", "x", x_in);
  check_index("gather_rows_amax", index_in, x_in);
  const c10::cuda::CUDAGuard guard(x_in.device());
  const Tensor x = aligned(x_in), index = index_in.contiguous();
  Tensor rows = at::empty({index.size(0), x.size(1)}, x.options());
  Tensor amax = at::empty({index.size(0)}, x.options().dtype(at::kFloat));
  if (x.numel() == 0) return {rows.zero_(), amax.zero_()};
  if (index.size(0) == 0) return {rows, amax};
  C10_CUDA_CHECK(gather_rows_amax(x.const_data_ptr(), row_type(x), x.size(1), row_index(index),
                                  rows.mutable_data_ptr(), amax.mutable_data_ptr<float>(),
                                  c10::cuda::getCurrentCUDAStream()));
  return {rows, amax};
}

Slots slots_of(const Tensor& rows_of_token, const OptionalTensor& weights) {
  return {rows_of_token.const_data_ptr<int64_t>(), floats(weights), rows_of_token.size(0),
          static_cast<int>(rows_of_token.size(1))};
}

Tensor combine_rows_op(const Tensor& rows_in, const Tensor& slots_in,
                       const OptionalTensor& weights_in) {
  check_rows("combine_rows", "rows", rows_in);
  check_slots("combine_rows", slots_in, weights_in, rows_in);
  const c10::cuda::CUDAGuard guard(rows_in.device());
  const Tensor rows = aligned(rows_in), slots = slots_in.contiguous();
  const OptionalTensor weights = dense(weights_in);
  Tensor out = at::empty({slots.size(0), rows.size(1)}, rows.options());
  if (out.numel() == 0) return out;
  C10_CUDA_CHECK(combine_rows(rows.const_data_ptr(), row_type(rows), rows.size(1),
                              slots_of(slots, weights), out.mutable_data_ptr(),
                              c10::cuda::getCurrentCUDAStream()));
  return out;
}

std::tuple<Tensor, Tensor> combine_rows_backward_op(const Tensor& grad_in, const Tensor& rows_in,
                                                    const Tensor& slots_in,
                                                    const Tensor& weights_in,
                                                    const Tensor& token_of_row_in) {
  check_combine_backward(grad_in, rows_in, slots_in, weights_in, token_of_row_in);
  const c10::cuda::CUDAGuard guard(rows_in.device());
  const Tensor grad = aligned(grad_in), rows = aligned(rows_in), slots = slots_in.contiguous();
  const Tensor weights = weights_in.contiguous(), token_of_row = token_of_row_in.contiguous();
  Tensor grad_rows = at::empty(rows.sizes(), rows.options());
  Tensor grad_weights = at::empty(weights.sizes(), weights.options());
  if (grad_rows.numel() == 0) return {grad_rows, grad_weights.zero_()};
  const CombineBackward args{grad.const_data_ptr(),
                             rows.const_data_ptr(),
                             row_type(rows),
                             rows.size(1),
                             rows.size(0),
                             slots_of(slots, weights),
                             token_of_row.const_data_ptr<int64_t>(),
                             grad_rows.mutable_data_ptr(),
                             grad_weights.mutable_data_ptr<float>()};
  C10_CUDA_CHECK(combine_rows_backward(args, c10::cuda::getCurrentCUDAStream()));
  return {grad_rows, grad_weights};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> route_op(const Tensor& chosen_in, int64_t num_experts,
                                                    int64_t multiple, int64_t top_k) {
  const int64_t num_rows = check_route(chosen_in, num_experts, multiple, top_k);
  const c10::cuda::CUDAGuard guard(chosen_in.device());
  const Tensor chosen = chosen_in.contiguous();
  const int64_t num_tokens = chosen.size(0), num_choices = num_tokens * top_k;
  const auto options = chosen.options().dtype(at::kLong);
  Tensor tokens = at::empty({num_rows}, options), slots = at::empty({num_rows}, options);
  Tensor rows = at::empty({num_tokens, top_k}, options);
  Tensor offsets = at::empty({num_experts + 1}, options);
  const auto ints = chosen.options().dtype(at::kInt);
  Tensor counts = at::empty({num_experts, route_chunks(num_choices)}, ints);
  Tensor totals = at::empty({num_experts}, ints);
  const bool is_map = chosen.scalar_type() == at::kBool;
  Tensor listed = at::empty({is_map ? num_choices : 0}, chosen.options().dtype(at::kShort));
  const RouteArgs args{chosen.const_data_ptr(),
                       static_cast<int>(chosen.element_size()),
                       num_tokens,
                       num_rows,
                       static_cast<int>(top_k),
                       static_cast<int>(num_experts),
                       static_cast<int>(multiple),
                       tokens.mutable_data_ptr<int64_t>(),
                       slots.mutable_data_ptr<int64_t>(),
                       rows.mutable_data_ptr<int64_t>(),
                       offsets.mutable_data_ptr<int64_t>(),
                       counts.mutable_data_ptr<int>(),
                       totals.mutable_data_ptr<int>(),
                       is_map ? listed.mutable_data_ptr<int16_t>() : nullptr};
  C10_CUDA_CHECK(route(args, c10::cuda::getCurrentCUDAStream()));
  return {tokens, slots, rows, offsets};
}

Tensor weighted_activation_op(const Tensor& h_in, const OptionalTensor& probs_in, int64_t kind) {
  const Gate gate = check_activation("weighted_activation", h_in, probs_in, kind, kRun);
  const c10::cuda::CUDAGuard guard(h_in.device());
  const Tensor h = aligned(h_in);
  const OptionalTensor probs = dense(probs_in);
  Tensor y = at::empty({h.size(0), h.size(1) / 2}, h.options());
  if (y.numel() == 0) return y;
  ActivationArgs args{};
  args.h = h.const_data_ptr();
  args.probs = floats(probs);
  args.num_rows = h.size(0);
  args.num_cols = y.size(1);
  args.kind = gate;
  args.y = y.mutable_data_ptr();
  C10_CUDA_CHECK(weighted_activation(args, c10::cuda::getCurrentCUDAStream()));
  return y;
}

std::tuple<Tensor, Tensor> weighted_activation_backward_op(const Tensor& grad_in,
                                                           const Tensor& h_in,
                                                           const OptionalTensor& probs_in,
                                                           int64_t kind) {
  const char* op = "weighted_activation_backward";
  const Gate gate = check_activation(op, h_in, probs_in, kind, kRun);
  check_grad_y(op, grad_in, h_in);
  const c10::cuda::CUDAGuard guard(h_in.device());
  const Tensor h = aligned(h_in), grad_y = aligned(grad_in);
  const OptionalTensor probs = dense(probs_in);
  Tensor grad_h = at::empty(h.sizes(), h.options());
  Tensor grad_probs = at::empty({probs ? h.size(0) : 0}, h.options().dtype(at::kFloat));
  if (h.numel() == 0) return {grad_h, grad_probs.zero_()};
  ActivationArgs args{};
  args.h = h.const_data_ptr();
  args.probs = floats(probs);
  args.num_rows = h.size(0);
  args.num_cols = h.size(1) / 2;
  args.kind = gate;
  args.grad_y = grad_y.const_data_ptr();
  args.grad_h = grad_h.mutable_data_ptr();
  args.grad_probs = grad_probs.mutable_data_ptr<float>();
  C10_CUDA_CHECK(weighted_activation_backward(args, c10::cuda::getCurrentCUDAStream()));
  return {grad_h, grad_probs};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> weighted_activation_quantize_op(
    const Tensor& h_in, const OptionalTensor& probs_in, int64_t kind, int64_t e4m3_max,
    bool fast_math, bool keep) {
  const char* op = "weighted_activation_quantize";
  const Gate gate = check_activation(op, h_in, probs_in, kind, kBlock);
  check_e4m3_max(op, e4m3_max);
  const int64_t num_rows = h_in.size(0), num_cols = h_in.size(1) / 2;
  TORCH_CHECK_VALUE(num_cols <= kMaxActivationCols, op, ": F=", num_cols, " exceeds ",
                    kMaxActivationCols, "; quantise the activation by itself");
  const c10::cuda::CUDAGuard guard(h_in.device());
  const Tensor h = aligned(h_in);
  const OptionalTensor probs = dense(probs_in);
  Tensor codes = at::empty({num_rows, num_cols / 2}, h.options().dtype(at::kByte));
  Tensor scales = at::empty({num_rows, num_cols / kBlock}, h.options().dtype(at::kFloat8_e4m3fn));
  Tensor amax = at::empty({num_rows}, h.options().dtype(at::kFloat));
  Tensor y = at::empty({keep ? num_rows : 0, num_cols}, h.options());
  if (num_cols == 0) amax.zero_();
  if (num_rows == 0 || num_cols == 0) return {codes, scales, amax, y};
  QuantizeArgs args{};
  args.x = h.const_data_ptr();
  args.type = InputType::kBFloat16;
  args.num_rows = num_rows;
  args.num_cols = static_cast<int>(num_cols);
  args.codes = codes.mutable_data_ptr<uint8_t>();
  args.block_scales = static_cast<uint8_t*>(scales.mutable_data_ptr());
  args.amax = amax.mutable_data_ptr<float>();
  args.source = AmaxSource::kSelf;
  args.e4m3_max = static_cast<int>(e4m3_max);
  args.probs = floats(probs);
  args.kept = keep ? y.mutable_data_ptr() : nullptr;
  C10_CUDA_CHECK(
      weighted_activation_quantize(args, gate, fast_math, c10::cuda::getCurrentCUDAStream()));
  return {codes, scales, amax, y};
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_nvfp4, CUDA, m) {
  m.impl("gather_rows", &gather_rows_op);
  m.impl("gather_rows_nvfp4", &gather_rows_nvfp4_op);
  m.impl("gather_rows_amax", &gather_rows_amax_op);
  m.impl("combine_rows", &combine_rows_op);
  m.impl("combine_rows_backward", &combine_rows_backward_op);
  m.impl("route", &route_op);
  m.impl("weighted_activation", &weighted_activation_op);
  m.impl("weighted_activation_backward", &weighted_activation_backward_op);
  m.impl("weighted_activation_quantize", &weighted_activation_quantize_op);
}

}  // namespace megatron_nvfp4::cuda
