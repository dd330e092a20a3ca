"""The expert dataflow: tokens to combined expert outputs in one autograd function, no row handled twice.

    tokens -> quantised once each -> FC1 on gathered rows -> weighted activation -> FC2 -> combined

A per-token format depends on the token alone, so it is taken before rows are copied to their experts, and the
copies are of packed rows. What the backward needs is kept once per token: packed where it multiplies the
dequantised forward operands, else in the tokens' own dtype; gathered rows are made anew, never kept.

The bits are those of GroupedLinear between a permutation, `quant.swiglu` and `combine_rows`: every GEMM sees
the same operands in the same order. Against Megatron's own code around the GEMMs three sums differ:
- outputs and token gradients of a token's experts: added in FP32 in slot order and rounded once; Megatron
  adds in the rows' dtype, in any order on a GPU. Equal for up to two experts a token.
- gradients of probabilities: `quant.dispatch.ordered_sum`; Megatron takes torch's sum.
- products with probabilities are FP32; Megatron's backward rounds them when probabilities are 16-bit.
On a GPU stochastic rounding draws by position in matrices whose padding differs from GroupedLinear's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nvfp4.backends import (
    Matrices,
    Operand,
    PackedWeights,
    cuda_gemm,
    dispatch,
    extension,
)
from megatron_nvfp4.quant import QuantizedTensor
from megatron_nvfp4.quant.nvfp4 import group_amax
from megatron_nvfp4.quant.swiglu import KINDS
from megatron_nvfp4.recipes import BF16, FORWARD, NVFP4Spec

from .autograd import flatten, unflatten
from .expert_matmul import ExpertMatmul, is_quantized_once, keeps_packed
from .matmul import (
    FPROP_LEFT,
    WGRAD_RIGHT,
    MatmulSetup,
    check_finite,
    check_versions,
    decode_operand,
    gemm_backend,
    multiply,
    quantize_columns,
    quantize_operand,
    versions_read,
    weight_gradient,
)
from .moe_exchange import ExpertExchange, RowTrip
from .moe_rows import RowPlan

ROUTER_WEIGHTS = ("before_fc2", "after_fc2")


@dataclass(frozen=True, kw_only=True)
class ExpertDataflow:
    """Experts of a gated MLP over routed tokens.

    activation: one of quant.swiglu.KINDS. router_weight: "before_fc2" multiplies the activation, as Megatron
    does; "after_fc2" the FP32 accumulator of FC2 before its one rounding, as SGLang does. Its backward takes
    the gradient of a probability from the activation before quantisation in both cases.
    recompute: keep only the tokens, and compute FC1 and the activation again in the backward.
    """

    activation: str = "swiglu"
    router_weight: str = "before_fc2"
    recompute: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("activation", KINDS), ("router_weight", ROUTER_WEIGHTS)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"ExpertDataflow: {name}={getattr(self, name)!r}; use one of {', '.join(allowed)}"
                )

    def __call__(
        self,
        x: Tensor,
        chosen: Tensor,
        probs: Tensor,
        fc1: ExpertMatmul,
        fc2: ExpertMatmul,
        *,
        top_k: int | None = None,
        exchange: ExpertExchange | None = None,
    ) -> Tensor:
        """Tokens x (T, H) through their experts, weighted and added: (T, H) in fc1's dtype.

        chosen: experts, int64 (T, top_k), -1 for a dropped choice; or a routing map, bool (T, E), at most
        top_k experts a token. probs: FP32 of the same shape. A token without experts gets zeros.
        Without `exchange` nothing waits for a GPU and the call can be captured. ValueError for shapes that
        do not fit.
        """
        _check(x, chosen, probs, fc1, fc2)
        plan = RowPlan.make(chosen, len(fc1.weights), top_k, exchange)
        x = x.to(fc1.setup.dtype).contiguous()
        leaves = (*fc1.leaves, *fc2.leaves)
        functions = None if torch.compiler.is_compiling() else extension.functions()
        if functions is None:
            return _Experts.apply(x, probs, plan, self, fc1, fc2, *leaves)
        with torch.no_grad():
            out, saved, rest = _forward(x, probs, plan, self, fc1, fc2)
        if fc1.setup.keep_for_backward:
            launches = (False, False, False)  # our kernels stand between the products
            calls = (_backward,)
            functions.record_product(
                "ExpertDataflow", out, x, probs, leaves, len(leaves), saved, *launches, rest, calls
            )
        return out


@dataclass(frozen=True)
class ExpertValues:
    """What one forward of the dataflow computed on this rank.

    tokens: what was sent to the experts, as it was sent; x itself without an exchange. packed: FC1's left
    operand of every token if is_quantized_once, else `tokens`. h, y, out: rows of FC1, the activation
    (None where it was only computed quantised) and FC2, ordered as plan.index. y_operand: FC2's left operand.
    """

    fc1: ExpertMatmul
    fc2: ExpertMatmul
    flow: ExpertDataflow
    plan: RowPlan
    tokens: Operand
    packed: Operand
    prob_rows: Tensor
    h: Tensor
    y: Tensor | None
    y_operand: Operand
    out: Tensor


GradObserver = Callable[[Tensor, Tensor], None]
Observer = Callable[[ExpertValues], GradObserver | None]
_observer: Observer | None = None


def observe(observer: Observer | None) -> None:
    """Show every later forward of the dataflow in this process to `observer`; None shows them to nobody.

    Hooks on the experts' linears see no rows inside the dataflow; this is their place. The observer changes
    nothing, and keeps nothing but copies. What it returns is called in the backward with the gradients of
    `h` and `out`, in this order.
    """
    global _observer
    _observer = observer


def row_kernels(device: torch.device) -> str:
    """Who moves rows and activates on tensors of this device: "cuda", "cpu" or "reference"."""
    return dispatch.kernels_of(device)


def _check(x: Tensor, chosen: Tensor, probs: Tensor, fc1: ExpertMatmul, fc2: ExpertMatmul) -> None:
    name, (size1, size2) = fc1.setup.name, (m.weights[0].shape for m in (fc1, fc2))
    if x.dim() != 2 or x.shape[1] != size1[1]:
        raise ValueError(f"{name}: tokens are {tuple(x.shape)}; give (T, {size1[1]})")
    if len(fc1.weights) != len(fc2.weights) or size1[0] != 2 * size2[1] or size2[0] != size1[1]:
        raise ValueError(
            f"{name}: {len(fc1.weights)} weights {tuple(size1)} and {len(fc2.weights)} {tuple(size2)} are no "
            "gated experts; give (2F, H) and (H, F) of each"
        )
    if chosen.shape != probs.shape or chosen.shape[0] != x.shape[0] or probs.dtype != torch.float32:
        raise ValueError(
            f"{name}: choices {tuple(chosen.shape)} and probabilities {probs.dtype} {tuple(probs.shape)} of "
            f"{x.shape[0]} tokens; give float32 probabilities of the choices' shape"
        )


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the backward has of its forward beside the tensors that autograd keeps.

    names: of the kept operands, with their numbers of tensors and their rests, see flatten. setups, weights,
    versions: of FC1 and FC2. show_grads: what an observer returned.
    """

    flow: ExpertDataflow
    trip: RowTrip | None
    probs_shape: torch.Size
    names: list[tuple[str, int, object]]
    setups: tuple[MatmulSetup, MatmulSetup]
    weights: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    versions: tuple[list[int], list[int]]
    show_grads: GradObserver | None


def _forward(
    x: Tensor,
    probs: Tensor,
    plan: RowPlan,
    flow: ExpertDataflow,
    fc1: ExpertMatmul,
    fc2: ExpertMatmul,
) -> tuple[Tensor, list[Tensor | None], _Kept]:
    """The combined outputs, the tensors to save, and the rest, with every rank's part of it."""
    check_finite(x, fc1.setup)
    prob_rows = plan.to_rows(probs)
    # The same on every rank, whatever is frozen there: ranks must agree on what travels.
    keeps_original = fc1.setup.keep_for_backward and not keeps_packed(fc1.recipe)
    tokens, prob_rows = _send(x, prob_rows, plan, fc1, keeps_original)
    # `packed` is FC1's left operand of every token, `tokens` what was sent.
    packed = _quantize_tokens(tokens, fc1)
    h = _hidden(packed, plan, fc1)
    y, y_operand = _activate(h, prob_rows, plan, fc2, flow)
    out = _output(y_operand, prob_rows, plan, fc2, flow)
    show_grads = None
    if _observer is not None:
        values = ExpertValues(fc1, fc2, flow, plan, tokens, packed, prob_rows, h, y, y_operand, out)
        show_grads = _observer(values)
    out = _return(plan, out)[0]
    kept = {"prob_rows": prob_rows, "plan": plan.tensors()}
    if fc1.trains or flow.recompute:
        kept["tokens"] = tokens if keeps_original else packed
    if not flow.recompute:
        kept["h"] = h
        if fc2.trains and fc2.recipe.wgrad.right == FORWARD:
            kept["y"] = y_operand
        elif y is not None:
            kept["y"] = y
    if fc1.recipe.dgrad.right == FORWARD and (x.requires_grad or flow.recompute):
        kept["w1"] = fc1.operand
    if fc2.recipe.dgrad.right == FORWARD:
        kept["w2"] = fc2.operand
    saved, names = _flatten(kept if fc1.setup.keep_for_backward else {})
    rest = _Kept(
        flow,
        plan.trip,
        probs.shape,
        names,
        (fc1.setup, fc2.setup),
        (fc1.weights, fc2.weights),
        tuple(versions_read(m.weights, m.setup) for m in (fc1, fc2)),
        show_grads,
    )
    return dispatch.combine_rows(out, plan.rows_of_token), saved, rest


def _backward(
    rest: _Kept,
    grad_output: Tensor,
    saved: Sequence[Tensor | None],
    needs_x: bool,
    _needs_probs: bool,
    needs_weights: bool,
) -> tuple[Tensor | None, Tensor, Matrices | list, Matrices | list]:
    """Gradients of tokens, probabilities, and the leaves of FC1 and FC2; the probabilities' always."""
    kept, flow = _unflatten(saved, rest.names), rest.flow
    fc1, fc2 = (
        ExpertMatmul(setup, kept.get(key), weights)
        for setup, key, weights in zip(rest.setups, ("w1", "w2"), rest.weights, strict=True)
    )
    for matmul, versions in zip((fc1, fc2), rest.versions, strict=True):
        check_versions(matmul.weights, matmul.setup, versions)
    plan = RowPlan(*kept["plan"], rest.trip)
    tokens, prob_rows = kept.get("tokens"), kept["prob_rows"]
    grad_rows = dispatch.gather_rows(grad_output.to(fc1.setup.dtype).contiguous(), plan.send)
    if plan.trip is not None:
        grad_rows = dispatch.gather_rows(plan.trip.there(grad_rows)[0], plan.index)
    h, y = kept.get("h"), kept.get("y")
    if h is None:
        h = _hidden(_quantize_tokens(tokens, fc1), plan, fc1.with_operand())
    if y is None and needs_weights and fc2.trains:
        y = _activation_of_wgrad(h, prob_rows, plan, fc2, flow)
    grad_y = fc2.dgrad(grad_rows, plan.offsets)
    grads1, grads2 = ([None] * len(matmul.leaves) for matmul in (fc1, fc2))
    if needs_weights and fc2.trains:
        grads2 = _fc2_wgrad(grad_rows, y, prob_rows, plan, fc2, flow)
    grad_h, grad_probs = dispatch.weighted_activation_backward(
        grad_y, h, prob_rows, flow.activation
    )
    if rest.show_grads is not None:
        rest.show_grads(grad_h, grad_rows)
    del kept, h, y, grad_y, grad_rows
    grad_x = fc1.dgrad(grad_h, plan.offsets) if needs_x else None
    if needs_weights and fc1.trains:
        rows = _rows_of_wgrad(tokens, plan, fc1)
        grads1 = weight_gradient(grad_h, rows, plan.offsets, fc1.weights, fc1.setup)
    columns = [grad_probs] if grad_x is None else [grad_probs, grad_x]
    grad_probs, *returned = _return(plan, *columns)
    grad_x = dispatch.combine_rows(returned[0], plan.rows_of_token) if returned else None
    return grad_x, plan.from_rows(grad_probs, rest.probs_shape), grads1, grads2


class _Experts(torch.autograd.Function):
    """The dataflow where the extension's node cannot be used: not built, or under torch.compile."""

    @staticmethod
    def forward(ctx, x, probs, plan, flow, fc1, fc2, *_leaves):
        out, saved, ctx.rest = _forward(x, probs, plan, flow, fc1, fc2)
        ctx.save_for_backward(*saved)  # so that hooks (offload, memory counts) see them
        return out

    @staticmethod
    @once_differentiable  # the gradients of a quantised product have no derivative
    def backward(ctx, grad_output):
        needs_x, needs_probs, _, _, _, _, *needs_weights = ctx.needs_input_grad
        needs = (needs_x, needs_probs, any(needs_weights))
        grad_x, grad_probs, *grads = _backward(ctx.rest, grad_output, ctx.saved_tensors, *needs)
        return (grad_x, grad_probs, None, None, None, None, *grads[0], *grads[1])


def _send(
    x: Tensor, prob_rows: Tensor, plan: RowPlan, fc1: ExpertMatmul, keeps_original: bool
) -> tuple[Operand, Tensor]:
    """Tokens and probabilities where their experts are, the latter in the order of the experts.

    Without a trip the tokens themselves. On one they travel packed, unless the backward there needs more.
    """
    if plan.trip is None:
        return x, prob_rows
    if keeps_original or not is_quantized_once(fc1.recipe):
        rows, probs = plan.trip.there(dispatch.gather_rows(x, plan.send), prob_rows)
        return rows, probs[plan.index]
    packed = dispatch.gather_rows(_quantize_tokens(x, fc1), plan.send)
    parts, bare = flatten(packed)
    *parts, probs = plan.trip.there(*parts, prob_rows)
    return unflatten(parts, bare), probs[plan.index]


def _return(plan: RowPlan, *columns: Tensor) -> tuple[Tensor, ...]:
    """Rows of this rank's experts on the rank of their tokens, in the order of `plan.send`."""
    if plan.trip is None:
        return columns
    return plan.trip.back(*(column[plan.rows_of_source[:, 0]] for column in columns))


def _quantize_tokens(tokens: Operand, fc1: ExpertMatmul) -> Operand:
    """FC1's left operand of every token, where that does not depend on the token's company."""
    if isinstance(tokens, QuantizedTensor) or not is_quantized_once(fc1.recipe):
        return tokens
    return quantize_operand(tokens, fc1.recipe.fprop.left, FPROP_LEFT, fc1.setup)


def _row_operand(tokens: Operand, plan: RowPlan, fc1: ExpertMatmul) -> Operand:
    """FC1's left operand in the order of the experts."""
    spec = fc1.recipe.fprop.left
    if isinstance(tokens, QuantizedTensor) or spec == BF16:
        return dispatch.gather_rows(tokens, plan.index)
    if isinstance(spec, NVFP4Spec) and spec.outer == "tensor":
        rows, amax = dispatch.gather_rows_amax(tokens, plan.index)
        amax = group_amax(amax[:, None], plan.offsets)
        return quantize_operand(rows, spec, FPROP_LEFT, fc1.setup, offsets=plan.offsets, amax=amax)
    rows = dispatch.gather_rows(tokens, plan.index)
    return quantize_operand(rows, spec, FPROP_LEFT, fc1.setup, offsets=plan.offsets)


def _hidden(packed: Operand, plan: RowPlan, fc1: ExpertMatmul) -> Tensor:
    """FC1's output h (M, 2F)."""
    recipe, setup = fc1.recipe, fc1.setup
    formats = (recipe.fprop.left, recipe.fprop.right)
    if isinstance(packed, QuantizedTensor) and isinstance(fc1.operand, PackedWeights):
        num_cols, num_rows = fc1.operand.num_rows, plan.index.shape[0]
        shape = (num_rows, num_cols, packed.shape[1])
        gemm_backend("grouped_gemm", formats, shape, packed.device, setup)
        # Rows past the last group may read any token: the product has zeros there.
        index = plan.index.clamp_min(0)
        return cuda_gemm.grouped_gemm(
            packed, fc1.operand, plan.offsets, None, setup.dtype, False, row_index=index
        )
    rows = _row_operand(packed, plan, fc1)
    return multiply(rows, fc1.operand, plan.offsets, formats, setup)


def _activate(
    h: Tensor, prob_rows: Tensor, plan: RowPlan, fc2: ExpertMatmul, flow: ExpertDataflow
) -> tuple[Tensor | None, Operand]:
    """The activation if the backward keeps it, and FC2's left operand."""
    recipe, setup = fc2.recipe, fc2.setup
    probs = prob_rows if flow.router_weight == "before_fc2" else None
    keep = fc2.trains and recipe.wgrad.right == BF16 and not flow.recompute
    spec = recipe.fprop.left
    is_plain = is_quantized_once(fc2.recipe) and spec.four_over_six is None
    if is_plain and h.shape[1] <= 2 * dispatch.MAX_QUANTIZED_COLS and not setup.params.strict:
        return dispatch.weighted_activation_quantize(h, probs, spec, flow.activation, keep)
    check_finite(h, setup)  # an infinite gate may have a finite activation
    y = dispatch.weighted_activation(h, probs, flow.activation)
    check_finite(y, setup)
    operand = quantize_operand(y, spec, FPROP_LEFT, setup, offsets=plan.offsets)
    return y if keep else None, operand


def _activation_of_wgrad(
    h: Tensor, prob_rows: Tensor, plan: RowPlan, fc2: ExpertMatmul, flow: ExpertDataflow
) -> Operand:
    """What FC2's weight gradient reads of the activations, where it was not kept."""
    if fc2.recipe.wgrad.right == FORWARD:
        return _activate(h, prob_rows, plan, fc2, flow)[1]
    probs = prob_rows if flow.router_weight == "before_fc2" else None
    return dispatch.weighted_activation(h, probs, flow.activation)


def _output(
    y_operand: Operand, prob_rows: Tensor, plan: RowPlan, fc2: ExpertMatmul, flow: ExpertDataflow
) -> Tensor:
    """FC2's output (M, H)."""
    recipe, setup = fc2.recipe, fc2.setup
    formats = (recipe.fprop.left, recipe.fprop.right)
    if flow.router_weight == "before_fc2":
        return multiply(y_operand, fc2.operand, plan.offsets, formats, setup)
    out = multiply(y_operand, fc2.operand, plan.offsets, formats, setup, out_dtype=torch.float32)
    return (out * prob_rows[:, None]).to(setup.dtype)


def _fc2_wgrad(
    grad_rows: Tensor,
    y: Operand,
    prob_rows: Tensor,
    plan: RowPlan,
    fc2: ExpertMatmul,
    flow: ExpertDataflow,
) -> list[Tensor | None]:
    setup, spec = fc2.setup, fc2.recipe.wgrad.right
    if flow.router_weight == "after_fc2":
        grad_rows = (grad_rows * prob_rows[:, None]).to(grad_rows.dtype)
    if spec not in (BF16, FORWARD):
        y = quantize_columns(y, spec, WGRAD_RIGHT, plan.offsets, setup)[0]
    return weight_gradient(grad_rows, y, plan.offsets, fc2.weights, setup)


def _rows_of_wgrad(tokens: Operand, plan: RowPlan, fc1: ExpertMatmul) -> Operand:
    """The activations of FC1's weight gradient in the order of the experts, from what was kept."""
    recipe, setup = fc1.recipe, fc1.setup
    if recipe.wgrad.right == FORWARD:
        if not isinstance(tokens, QuantizedTensor):
            return _row_operand(tokens, plan, fc1)
        # A token is decoded once, not once for every expert.
        tokens = decode_operand(tokens, "grouped_wgrad", recipe.wgrad.left, setup)
    rows = dispatch.gather_rows(tokens, plan.index)
    if recipe.wgrad.right in (BF16, FORWARD):
        return rows
    return quantize_columns(rows, recipe.wgrad.right, WGRAD_RIGHT, plan.offsets, setup)[0]


_LIST = object()


def _flatten(kept: dict[str, Operand | Matrices | list[Tensor]]) -> tuple[list, list]:
    """Operands as the tensors that autograd keeps, so that hooks (offload, memory counts) see them."""
    tensors, names = [], []
    for key, operand in kept.items():
        parts, rest = (operand, _LIST) if isinstance(operand, list) else flatten(operand)
        names.append((key, len(parts), rest))
        tensors += parts
    return tensors, names


def _unflatten(saved: Sequence[Tensor | None], names: list) -> dict[str, Operand | list[Tensor]]:
    tensors, kept = list(saved), {}
    for key, size, rest in names:
        parts, tensors = tensors[:size], tensors[size:]
        kept[key] = parts if rest is _LIST else unflatten(parts, rest)
    return kept
