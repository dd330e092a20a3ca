// A product with many weights as one node of autograd: what Python's nodes do once a weight costs
// more host time than all kernels of a small layer. Numerics are decided in Python; where both
// gradients are products of BF16 matrices, the node launches them itself.
#include "product_node.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace megatron_nvfp4 {
namespace {

namespace py = pybind11;
using at::Tensor;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;

using Gemm = Tensor(const Tensor&, const Tensors&, bool, const Tensor&, const OptionalTensor&,
                    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                    at::ScalarType);
using Wgrad = void(const Tensor&, const Tensor&, bool, const Tensor&, const OptionalTensor&, bool,
                   at::TensorList);
using Quantize = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&,
                                                    const OptionalTensor&, int64_t, bool, int64_t,
                                                    int64_t, bool);
using OuterScale = Tensor(const Tensor&, int64_t);
using GemmW4 = Tensor(const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&, int64_t,
                      const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                      const OptionalTensor&, at::ScalarType, int64_t);

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Matrices of a contiguous block (G, N, K), without what views of autograd's cost.
Tensors matrices_of(const Tensor& block) {
  Tensors matrices;
  matrices.reserve(block.size(0));
  for (int64_t g = 0; g < block.size(0); ++g) {
    matrices.push_back(at::detail::make_tensor<c10::TensorImpl>(c10::Storage(block.storage()),
                                                                block.key_set(), block.dtype()));
    auto* impl = matrices.back().unsafeGetTensorImpl();
    impl->set_storage_offset(block.storage_offset() + g * block.stride(0));
    impl->set_sizes_and_strides(block.sizes().slice(1), block.strides().slice(1));
  }
  return matrices;
}

void grouped_wgrad_block(const Tensor& a, const Tensor& b, bool token_major, const Tensor& offsets,
                         const OptionalTensor& group_scale, bool generic, const Tensor& out) {
  static const auto wgmma = find<Wgrad>("megatron_nvfp4::grouped_wgrad_bf16");
  static const auto mma = find<Wgrad>("megatron_nvfp4::grouped_wgrad_generic");
  (generic ? mma : wgmma)
      .call(a, b, token_major, offsets, group_scale, /*accumulate=*/false, matrices_of(out));
}

Tensor grouped_linear_w4(const Tensor& x, const Tensor& packed, const Tensor& offsets,
                         int64_t num_cols, const Tensor& group_scale, int64_t e4m3_max,
                         int64_t four_over_six, bool fast_error) {
  static const auto quantize = find<Quantize>("megatron_nvfp4::quantize_nvfp4");
  static const auto outer_scale = find<OuterScale>("megatron_nvfp4::outer_scale");
  static const auto gemm = find<GemmW4>("megatron_nvfp4::grouped_gemm_w4");
  const auto [codes, scales, amax] = quantize.call(x, {}, {}, /*block_rows=*/1, /*per_token=*/true,
                                                   e4m3_max, four_over_six, fast_error);
  const Tensor row_scale = outer_scale.call(amax, e4m3_max);
  return gemm.call(codes, scales, packed, offsets, num_cols, row_scale, group_scale, {}, {},
                   at::kBFloat16, /*config=*/-1);
}

bool is_plain(const Tensor& t, at::ScalarType dtype = at::kBFloat16) {
  return t.scalar_type() == dtype && t.is_contiguous() &&
         reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

// Python's part of the backward, all of them functions of what the forward kept: (kept, grad,
// saved, needs_x, needs_bias, needs_weights) -> gradients of x, bias and the leaves, these in one
// part or more; the main_grad of every weight, or None; flags the weights and returns what stands
// for the leaves' gradients.
enum Call : size_t { kBackward, kMainGrads, kMarkAccumulated };

// Which gradients are wanted and not yet there.
struct Needs {
  bool x, bias, weights;
};

// Its inputs, and so the gradients it returns: x, bias, the leaves among the weights.
class ProductBackward : public torch::autograd::Node {
 public:
  static constexpr size_t kNumOthers = 2;

  ProductBackward(std::string name, const std::vector<OptionalTensor>& saved, Tensors weights,
                  bool launches_x, bool launches_weights, bool into_main_grad, py::object kept,
                  py::tuple calls)
      : name_(std::move(name)),
        weights_(std::move(weights)),
        launches_x_(launches_x),
        launches_weights_(launches_weights),
        into_main_grad_(into_main_grad),
        kept_(std::move(kept)),
        calls_(std::move(calls)) {
    for (const OptionalTensor& t : saved) saved_.emplace_back(t, /*is_output=*/false);
    for (const Tensor& weight : weights_) versions_.push_back(weight._version());
  }

  ~ProductBackward() override {
    const py::handle references[] = {kept_.release(), calls_.release()};
    if (!Py_IsInitialized()) return;  // the process is ending
    const py::gil_scoped_acquire gil;
    for (py::handle reference : references) reference.dec_ref();
  }

  std::string name() const override { return name_ + "Backward"; }

  void release_variables() override {
    for (auto& variable : saved_) variable.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    const bool is_differentiated = at::GradMode::is_enabled() && grads[0].requires_grad();
    const at::AutoGradMode off(false);
    const Tensor grad = grads[0].defined() ? grads[0] : input_metadata(0).zeros_like();
    Tensors saved;
    for (auto& variable : saved_) saved.push_back(variable.unpack());
    Needs needs = {task_should_compute_output(0), task_should_compute_output(1), false};
    for (size_t i = kNumOthers; i < num_outputs(); ++i)
      needs.weights |= task_should_compute_output(i);
    variable_list out(num_outputs());
    launch(grad, saved, needs, out);
    if (needs.x || needs.bias || needs.weights) ask(grad, saved, needs, out);
    return is_differentiated ? refuse_second(std::move(out)) : out;
  }

 private:
  // Whatever is out of the ordinary is left to Python.
  void launch(const Tensor& grad, const Tensors& saved, Needs& needs, variable_list& out) const {
    if (!launches_x_ && !launches_weights_) return;
    bool plain = is_plain(grad);
    for (size_t g = 0; plain && g < weights_.size(); ++g)
      plain = is_plain(weights_[g]) && weights_[g]._version() == versions_[g];
    if (!plain) return;
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensor &offsets = saved[0], &x = saved[1];
    if (launches_x_ && needs.x) {
      static const auto gemm = find<Gemm>("megatron_nvfp4::grouped_gemm_bf16");
      out[0] =
          gemm.call(grad, weights_, /*transposed=*/true, offsets, {}, {}, {}, {}, at::kBFloat16);
      needs.x = false;
    }
    if (!launches_weights_ || !needs.weights || !x.defined() || !is_plain(x)) return;
    static const auto wgrad = find<Wgrad>("megatron_nvfp4::grouped_wgrad_bf16");
    if (into_main_grad_) {
      const py::gil_scoped_acquire gil;
      const auto found = py::cast<std::optional<Tensors>>(calls_[kMainGrads](kept_));
      if (!found || !are_writable(*found)) return;
      wgrad.call(grad, x, /*token_major=*/true, offsets, {}, /*accumulate=*/true, *found);
      hand_out(calls_[kMarkAccumulated](kept_), kNumOthers, out);
    } else {
      const auto size = weights_[0].sizes();
      Tensors grads = matrices_of(at::empty(
          {static_cast<int64_t>(weights_.size()), size[0], size[1]}, weights_[0].options()));
      wgrad.call(grad, x, /*token_major=*/true, offsets, {}, /*accumulate=*/false, grads);
      std::move(grads.begin(), grads.begin() + (out.size() - kNumOthers), out.begin() + kNumOthers);
    }
    needs.weights = false;
  }

  bool are_writable(const Tensors& targets) const {
    const auto dtype = targets[0].scalar_type() == at::kFloat ? at::kFloat : at::kBFloat16;
    return std::all_of(targets.begin(), targets.end(),
                       [&](const Tensor& t) { return is_plain(t, dtype); });
  }

  void ask(const Tensor& grad, const Tensors& saved, Needs needs, variable_list& out) const {
    const py::gil_scoped_acquire gil;
    const auto found = py::cast<py::tuple>(
        calls_[kBackward](kept_, grad, saved, needs.x, needs.bias, needs.weights));
    for (size_t i = 0; i < kNumOthers; ++i)
      if (!found[i].is_none()) out[i] = py::cast<Tensor>(found[i]);
    size_t at = kNumOthers;
    for (size_t i = kNumOthers; i < found.size(); ++i) at = hand_out(found[i], at, out);
  }

  // Gradients of the leaves from `at` on: a block (n, N, K), a sequence, or None for all that are
  // left. Returns the next leaf.
  static size_t hand_out(const py::object& grads, size_t at, variable_list& out) {
    if (grads.is_none()) return out.size();
    if (THPVariable_Check(grads.ptr())) {
      for (Tensor& t : matrices_of(py::cast<Tensor>(grads))) out.at(at++) = std::move(t);
    } else {
      for (auto& t : py::cast<std::vector<OptionalTensor>>(grads))
        out.at(at++) = t.value_or(Tensor());
    }
    return at;
  }

  // The gradients of a quantised product have no derivative.
  variable_list refuse_second(variable_list out) const {
    for (Tensor& t : out)
      if (t.defined()) t = t.detach().requires_grad_();
    const auto error = std::make_shared<torch::autograd::DelayedError>(
        name_ + ": trying to differentiate twice; its gradients have no derivative",
        static_cast<int64_t>(out.size()));
    return (*error)(std::move(out));
  }

  std::string name_;
  std::vector<torch::autograd::SavedVariable> saved_;
  Tensors weights_;  // parameters, kept by their layer: hooks for saved tensors are not for them
  std::vector<uint32_t> versions_;
  bool launches_x_, launches_weights_;
  bool into_main_grad_;
  py::object kept_;
  py::tuple calls_;
};

// Makes y the product of x and the weights for autograd, which is told of the first num_leaves.
void record_product(std::string name, const Tensor& y, const Tensor& x, const OptionalTensor& bias,
                    Tensors weights, size_t num_leaves, const std::vector<OptionalTensor>& saved,
                    bool launches_x, bool launches_weights, bool into_main_grad, py::object kept,
                    py::tuple calls) {
  TORCH_CHECK(!x._fw_grad(0).defined(), name,
              " has no forward derivative; use reverse mode (backward)");
  torch::autograd::edge_list edges;
  edges.reserve(num_leaves + ProductBackward::kNumOthers);
  const auto add = [&](const Tensor& t) {
    edges.push_back(torch::autograd::impl::gradient_edge(t));
  };
  add(x);
  if (bias)
    add(*bias);
  else
    edges.emplace_back();
  for (size_t i = 0; i < num_leaves; ++i) add(weights.at(i));
  if (std::none_of(edges.begin(), edges.end(), [](const auto& e) { return e.is_valid(); })) return;
  const std::shared_ptr<ProductBackward> node(
      new ProductBackward(std::move(name), saved, std::move(weights), launches_x, launches_weights,
                          into_main_grad, std::move(kept), std::move(calls)),
      torch::autograd::deleteNode);
  node->set_next_edges(std::move(edges));
  torch::autograd::set_history(y, node);
}

// Whether memory is filled by the matrices in this order, without gaps.
bool follow_each_other(const Tensors& weights, bool reversed) {
  const Tensor& first = reversed ? weights.back() : weights.front();
  const auto* address = static_cast<const char*>(first.const_data_ptr());
  for (size_t i = 0; i < weights.size(); ++i) {
    const Tensor& weight = weights[reversed ? weights.size() - 1 - i : i];
    if (weight.const_data_ptr() != address || !weight.is_contiguous() ||
        weight.scalar_type() != first.scalar_type() || weight.sizes() != first.sizes())
      return false;
    address += first.nbytes();
  }
  return address <= static_cast<const char*>(first.storage().data()) + first.storage().nbytes();
}

// Weights (N, K) as one (G, N, K) in their memory, and whether it begins with the last; None where
// they do not lie so.
std::pair<OptionalTensor, bool> weight_block(const Tensors& weights) {
  for (const bool reversed : {false, true}) {
    if (!follow_each_other(weights, reversed)) continue;
    const Tensor first = (reversed ? weights.back() : weights.front()).detach();
    const int64_t n = first.size(0), k = first.size(1);
    return {first.as_strided({static_cast<int64_t>(weights.size()), n, k}, {n * k, k, 1}),
            reversed};
  }
  return {std::nullopt, false};
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_nvfp4, CompositeExplicitAutograd, m) {
  m.impl("grouped_wgrad_block", &grouped_wgrad_block);
  m.impl("grouped_linear_w4", &grouped_linear_w4);
}

void add_functions(PyObject* module) {
  auto m = py::reinterpret_borrow<py::module_>(module);
  m.def("record_product", &record_product);
  m.def("weight_block", &weight_block);
}

}  // namespace megatron_nvfp4
