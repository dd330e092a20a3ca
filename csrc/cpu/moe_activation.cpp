// CPU implementations of the gated activations, BF16. Functions of one BF16 gate are tables: built
// in FP64 once, as quant/swiglu.py defines them.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "../moe_checks.h"
#include "dispatch.h"
#include "ordered_sum.h"

namespace megatron_nvfp4 {
namespace {

using at::BFloat16;
using at::Tensor;

constexpr int64_t kGrain = 1 << 15;  // elements worth a thread
constexpr double kGateMin = -87.0, kGeluMin = -12.5;
constexpr float kQuick = 1.702f;

// RN to BF16, kept in FP32.
float round(float x) { return static_cast<float>(static_cast<BFloat16>(x)); }

// RN of FP64 to FP32, then to BF16, as torch converts.
float round(double x) { return round(static_cast<float>(x)); }

// A NaN stays.
double at_least(double x, double bound) { return x < bound ? bound : x; }

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-at_least(x, kGateMin))); }

double normal(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

// What a gate's value gives: its activation and, for the backward, the sigmoid or gelu's slope.
struct GateTable {
  std::vector<float> act, factor;

  explicit GateTable(Gate kind) : act(65536), factor(65536) {
    const ExactFloats exact;
    const double root = std::sqrt(2.0 * M_PI);
    for (uint32_t i = 0; i < 65536; ++i) {
      const float gate = float_of(i << 16);
      if (kind == Gate::kSilu) {
        const double g = at_least(gate, kGateMin);
        act[i] = round(g / (1.0 + std::exp(-g)));
        factor[i] = round(sigmoid(gate));
      } else if (kind == Gate::kQuickGelu) {
        factor[i] = round(sigmoid(round(multiply(kQuick, gate))));
        act[i] = round(multiply(gate, factor[i]));
      } else {
        const double g = at_least(gate, kGeluMin), bounded = g > 40.0 ? 40.0 : g;
        act[i] = round(g * normal(g));
        factor[i] = round(normal(bounded) + bounded * (std::exp(-0.5 * bounded * bounded) / root));
      }
    }
  }
};

const GateTable& table_of(Gate kind) {
  static const GateTable tables[] = {GateTable(Gate::kSilu), GateTable(Gate::kGelu),
                                     GateTable(Gate::kQuickGelu)};
  return tables[static_cast<int>(kind)];
}

// Rows of h as gate and up, and of what belongs to them.
struct Operands {
  const GateTable& table;
  const uint16_t* h;
  const float* probs;  // null: no factor
  int64_t num_cols;

  void forward(int64_t row, BFloat16* y) const {
    const uint16_t *gate = h + row * 2 * num_cols, *up = gate + num_cols;
    for (int64_t i = 0; i < num_cols; ++i) {
      const float product = round(multiply(table.act[gate[i]], value(up[i])));
      y[i] = static_cast<BFloat16>(probs ? multiply(product, probs[row]) : product);
    }
  }

  // Gradients of a row into grad (2F), and that of its probability.
  float backward(int64_t row, Gate kind, const BFloat16* grad_y, BFloat16* grad) const {
    const uint16_t *gates = h + row * 2 * num_cols, *ups = gates + num_cols;
    OrderedSum sum;
    for (int64_t i = 0; i < num_cols; ++i) {
      const float gate = value(gates[i]), up = value(ups[i]),
                  grad_i = static_cast<float>(grad_y[i]);
      const float act = table.act[gates[i]], factor = table.factor[gates[i]];
      const float g = probs ? multiply(grad_i, probs[row]) : grad_i;
      float grad_gate, grad_up;
      if (kind == Gate::kGelu) {
        grad_gate = step(step(g, up), factor);
        grad_up = multiply(g, act);
      } else {
        const float scaled = kind == Gate::kSilu ? gate : round(multiply(kQuick, gate));
        const float inner =
            round(add(1.0f, round(multiply(scaled, round(subtract(1.0f, factor))))));
        grad_gate = step(step(step(g, factor), inner), up);
        grad_up = kind == Gate::kSilu ? multiply(g, act) : step(step(g, gate), factor);
      }
      grad[i] = static_cast<BFloat16>(grad_gate);
      grad[num_cols + i] = static_cast<BFloat16>(grad_up);
      sum.add_term(i, multiply(round(multiply(act, up)), grad_i));
    }
    return sum.total();
  }

 private:
  static float value(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }
  float step(float a, float b) const { return probs ? multiply(a, b) : round(multiply(a, b)); }
};

template <class Work>
void for_rows(const Operands& operands, int64_t num_rows, const Work& work) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, operands.num_cols));
  at::parallel_for(0, num_rows, grain, [&](int64_t begin, int64_t end) {
    const ExactFloats exact;
    for (int64_t row = begin; row < end; ++row) work(row);
  });
}

Operands operands_of(const Tensor& h, const std::optional<Tensor>& probs, Gate kind) {
  return {table_of(kind), reinterpret_cast<const uint16_t*>(h.const_data_ptr<BFloat16>()),
          probs ? probs->const_data_ptr<float>() : nullptr, h.size(1) / 2};
}

std::optional<Tensor> dense(const std::optional<Tensor>& t) {
  return t ? std::optional(t->contiguous()) : t;
}

Tensor weighted_activation(const Tensor& h_in, const std::optional<Tensor>& probs_in,
                           int64_t kind_in) {
  const Gate kind = check_activation("weighted_activation", h_in, probs_in, kind_in, kRun);
  const Tensor h = h_in.contiguous();
  const std::optional<Tensor> probs = dense(probs_in);
  const Operands operands = operands_of(h, probs, kind);
  Tensor y = at::empty({h.size(0), operands.num_cols}, h.options());
  BFloat16* to = y.mutable_data_ptr<BFloat16>();
  for_rows(operands, h.size(0),
           [&](int64_t row) { operands.forward(row, to + row * operands.num_cols); });
  return y;
}

std::tuple<Tensor, Tensor> weighted_activation_backward(const Tensor& grad_in, const Tensor& h_in,
                                                        const std::optional<Tensor>& probs_in,
                                                        int64_t kind_in) {
  const char* op = "weighted_activation_backward";
  const Gate kind = check_activation(op, h_in, probs_in, kind_in, kRun);
  check_grad_y(op, grad_in, h_in);
  const Tensor h = h_in.contiguous(), grad_y = grad_in.contiguous();
  const std::optional<Tensor> probs = dense(probs_in);
  const Operands operands = operands_of(h, probs, kind);
  Tensor grad_h = at::empty(h.sizes(), h.options());
  Tensor grad_probs = at::empty({probs ? h.size(0) : 0}, h.options().dtype(at::kFloat));
  const BFloat16* from = grad_y.const_data_ptr<BFloat16>();
  BFloat16* to = grad_h.mutable_data_ptr<BFloat16>();
  float* grad_prob = probs ? grad_probs.mutable_data_ptr<float>() : nullptr;
  for_rows(operands, h.size(0), [&](int64_t row) {
    const float sum = operands.backward(row, kind, from + row * operands.num_cols,
                                        to + row * 2 * operands.num_cols);
    if (grad_prob) grad_prob[row] = sum;
  });
  return {grad_h, grad_probs};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> weighted_activation_quantize(
    const Tensor& h_in, const std::optional<Tensor>& probs_in, int64_t kind_in, int64_t e4m3_max,
    bool /*fast_math: the tables are exact*/, bool keep) {
  const char* op = "weighted_activation_quantize";
  const Gate kind = check_activation(op, h_in, probs_in, kind_in, kBlock);
  check_e4m3_max(op, e4m3_max);
  const Tensor h = h_in.contiguous();
  const std::optional<Tensor> probs = dense(probs_in);
  const Operands operands = operands_of(h, probs, kind);
  const int64_t num_rows = h.size(0), num_cols = operands.num_cols;
  Tensor codes = at::empty({num_rows, num_cols / 2}, h.options().dtype(at::kByte));
  Tensor scales = at::empty({num_rows, num_cols / kBlock}, h.options().dtype(at::kFloat8_e4m3fn));
  Tensor amax = at::empty({num_rows}, h.options().dtype(at::kFloat));
  Tensor y = at::empty({keep ? num_rows : 0, num_cols}, h.options());
  BFloat16* kept = y.mutable_data_ptr<BFloat16>();
  auto* codes_to = codes.mutable_data_ptr<uint8_t>();
  auto* scales_to = static_cast<uint8_t*>(scales.mutable_data_ptr());
  float* amax_to = amax.mutable_data_ptr<float>();
  for_rows(operands, num_rows, [&](int64_t row) {
    std::vector<BFloat16> own(keep ? 0 : num_cols);
    BFloat16* values = keep ? kept + row * num_cols : own.data();
    operands.forward(row, values);
    const QuantizeArgs args{values,
                            InputType::kBFloat16,
                            num_cols,
                            codes_to + row * num_cols / 2,
                            scales_to + row * num_cols / kBlock,
                            static_cast<int>(e4m3_max),
                            FourOverSix::kOff,
                            false};
    amax_to[row] = kernels().amax(values, InputType::kBFloat16, num_cols);
    kernels().quantize(args, 0, 1, amax_to[row]);
  });
  return {codes, scales, amax, y};
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_nvfp4, CPU, m) {
  m.impl("weighted_activation", &weighted_activation);
  m.impl("weighted_activation_backward", &weighted_activation_backward);
  m.impl("weighted_activation_quantize", &weighted_activation_quantize);
}

}  // namespace megatron_nvfp4
