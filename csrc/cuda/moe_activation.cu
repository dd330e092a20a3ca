// Gated activation times the router's probability, and its backward, a warp a row. Bound by memory.
#include "activation.cuh"
#include "moe_activation.cuh"
#include "row_types.cuh"

namespace megatron_nvfp4::cuda {
namespace {

using Words = uint32_t[4];

NVFP4_DEVICE void words_of(uint4 v, Words& words) {
  words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
}

NVFP4_DEVICE uint4 vector_of(const Words& words) {
  return {words[0], words[1], words[2], words[3]};
}

template <Gate kind, bool kWeighted>
NVFP4_DEVICE uint4 activate_run(uint4 gates, uint4 ups, float prob) {
  Words gate, up, out;
  words_of(gates, gate);
  words_of(ups, up);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[i] = multiply2(activate2<kind, false>(gate[i]), up[i]);
    if constexpr (kWeighted) {
      const Pair y = pair_of(out[i]) * prob;
      out[i] = round2(y.low, y.high);
    }
  }
  return vector_of(out);
}

template <Gate kind, bool kWeighted>
__global__ void __launch_bounds__(kRowWarps * 32)
    activation_kernel(const __grid_constant__ ActivationArgs args) {
  constexpr int kUnroll = 3;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / 32;
  if (row >= args.num_rows) return;
  const int lane = threadIdx.x % 32, num_runs = static_cast<int>(args.num_cols / 8);
  const uint4* h = static_cast<const uint4*>(args.h) + row * 2 * num_runs;
  uint4* y = static_cast<uint4*>(args.y) + row * num_runs;
  const float prob = kWeighted ? __ldg(args.probs + row) : 1.0f;
  for (int first = lane; first < num_runs; first += 32 * kUnroll) {
    uint4 gates[kUnroll], ups[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int run = first + 32 * i;
      if (run >= num_runs) continue;
      gates[i] = __ldg(h + run);
      ups[i] = __ldg(h + num_runs + run);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int run = first + 32 * i;
      if (run < num_runs) y[run] = activate_run<kind, kWeighted>(gates[i], ups[i], prob);
    }
  }
}

// Without probabilities every step is rounded to BF16.
template <bool kWeighted>
NVFP4_DEVICE Pair step(Pair product) {
  if constexpr (kWeighted) return product;
  return product.rounded();
}

// Gradients of two gates and ups; adds the two terms of the probability's to `sum`.
template <Gate kind, bool kWeighted>
NVFP4_DEVICE void backward2(uint32_t gates, uint32_t ups, uint32_t grads, float prob,
                            uint32_t& grad_gates, uint32_t& grad_ups, float& sum) {
  const Factors f = factors_of<kind>(gates);
  const Pair gate = pair_of(gates), up = pair_of(ups), act = pair_of(f.act);
  const Pair grad = pair_of(grads), g = kWeighted ? grad * prob : grad;
  Pair grad_gate, grad_up;
  if constexpr (kind == Gate::kGelu) {
    grad_gate = step<kWeighted>(g * up) * f.factor;
    grad_up = g * act;
  } else {
    const Pair scaled = kind == Gate::kSilu ? gate : (gate * kQuick).rounded();
    const Pair inner = one_plus((scaled * one_minus(f.factor).rounded()).rounded()).rounded();
    grad_gate = step<kWeighted>(step<kWeighted>(g * f.factor) * inner) * up;
    grad_up = kind == Gate::kSilu ? g * act : step<kWeighted>(g * gate) * f.factor;
  }
  grad_gates = round2(grad_gate.low, grad_gate.high);
  grad_ups = round2(grad_up.low, grad_up.high);
  if constexpr (kWeighted) {
    const Pair term = pair_of(multiply2(f.act, ups)) * grad;
    sum = add(add(sum, term.low), term.high);
  }
}

template <Gate kind, bool kWeighted>
__global__ void __launch_bounds__(kRowWarps * 32)
    activation_backward_kernel(const __grid_constant__ ActivationArgs args) {
  constexpr int kUnroll = 3;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / 32;
  if (row >= args.num_rows) return;
  const int lane = threadIdx.x % 32, num_runs = static_cast<int>(args.num_cols / 8);
  const uint4* h = static_cast<const uint4*>(args.h) + row * 2 * num_runs;
  const uint4* grad_y = static_cast<const uint4*>(args.grad_y) + row * num_runs;
  uint4* grad_h = static_cast<uint4*>(args.grad_h) + row * 2 * num_runs;
  const float prob = kWeighted ? __ldg(args.probs + row) : 1.0f;
  float sum = 0.0f;
  for (int first = lane; first < num_runs; first += 32 * kUnroll) {
    uint4 gates[kUnroll], ups[kUnroll], grads[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int run = first + 32 * i;
      if (run >= num_runs) continue;
      gates[i] = __ldg(h + run);
      ups[i] = __ldg(h + num_runs + run);
      grads[i] = __ldg(grad_y + run);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int run = first + 32 * i;
      if (run >= num_runs) continue;
      Words gate, up, grad, grad_gate, grad_up;
      words_of(gates[i], gate);
      words_of(ups[i], up);
      words_of(grads[i], grad);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        backward2<kind, kWeighted>(gate[j], up[j], grad[j], prob, grad_gate[j], grad_up[j], sum);
      }
      grad_h[run] = vector_of(grad_gate);
      grad_h[num_runs + run] = vector_of(grad_up);
    }
  }
  if constexpr (kWeighted) {
    sum = add_lanes(sum);
    if (lane == 0) args.grad_probs[row] = sum;
  }
}

using Kernel = void (*)(ActivationArgs);

template <Gate kind>
Kernel forward_of(bool weighted) {
  return weighted ? activation_kernel<kind, true> : activation_kernel<kind, false>;
}

template <Gate kind>
Kernel backward_of(bool weighted) {
  return weighted ? activation_backward_kernel<kind, true>
                  : activation_backward_kernel<kind, false>;
}

cudaError_t launch(Kernel kernel, const ActivationArgs& args, cudaStream_t stream) {
  const auto ctas = static_cast<unsigned>((args.num_rows + kRowWarps - 1) / kRowWarps);
  kernel<<<ctas, kRowWarps * 32, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t weighted_activation(const ActivationArgs& args, cudaStream_t stream) {
  const Kernel kernels[] = {forward_of<Gate::kSilu>(args.probs),
                            forward_of<Gate::kGelu>(args.probs),
                            forward_of<Gate::kQuickGelu>(args.probs)};
  return launch(kernels[static_cast<int>(args.kind)], args, stream);
}

cudaError_t weighted_activation_backward(const ActivationArgs& args, cudaStream_t stream) {
  const Kernel kernels[] = {backward_of<Gate::kSilu>(args.probs),
                            backward_of<Gate::kGelu>(args.probs),
                            backward_of<Gate::kQuickGelu>(args.probs)};
  return launch(kernels[static_cast<int>(args.kind)], args, stream);
}

}  // namespace megatron_nvfp4::cuda
