"""Mixture of experts: FC1, silu_and_mul, FC2, router weight on FC2's accumulator, FP32 sum by slots.

    h = bf16(x w13_e)                               a = silu_and_mul(h)
    y = bf16(fp32 accumulator of (a w2_e) * w)      out = bf16(sum over slots k of y_k)

In NVFP4 w multiplies the outer scale of a row of a, and their product the accumulator. The sum starts with
slot 0 and adds in FP32. Where two ranks of the sampler have half of the experts each, a rank adds the slots
of its own so, zeros in the others' place, and the two results are added. Formula: SGLang 0.5.23,
kernels/ops/moe/fused_moe_triton_kernels.py and moe_sum_reduce. A row's bits do not depend on the rows beside
it. Shared experts and dropped tokens are left out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nvfp4.backends import dispatch
from megatron_nvfp4.recipes import Operands

from .activation import silu_and_mul_backward, silu_and_mul_forward
from .linear import (
    UNQUANTIZED,
    Prepared,
    Weights,
    add_partials,
    check_matrix,
    gradients,
    grouped_dgrad,
)


@dataclass(frozen=True)
class _Order:
    """Rows by expert: `tokens`, `slots` (M,) of each, `places` (T, K) where each pair went, offsets (E+1,).

    -1 for a pair without a row, and for rows behind the last expert's.
    """

    tokens: Tensor
    slots: Tensor
    places: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, experts: Tensor, num_experts: int) -> "_Order":
        """Ids of -1, and of E or more, are of experts that stand elsewhere."""
        routing = dispatch.route(torch.where(experts < num_experts, experts, -1), num_experts)
        rows = routing.rows_of_token
        return cls(routing.token_of_row, routing.slot_of_row, rows, routing.offsets)

    def to_rows(self, weights: Tensor) -> Tensor:
        """Of weights (T, K) that of each row, anything for rows behind the last expert's."""
        assert self.tokens.shape[0] == weights.numel(), "a row for each pair"
        of_rows = weights.new_empty(self.tokens.shape)
        of_rows[self.places] = (
            weights  # -1, of a pair without a row, is the last, then behind all experts'
        )
        return of_rows


def experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Tensor | Weights,
    w2: Tensor | Weights,
    operands: Operands = UNQUANTIZED,
    num_ranks: int = 1,
) -> Tensor:
    """x BF16 (T, H) through the experts `ids` int (T, K) with weights FP32 (T, K), as `route` gives
    them: BF16 (T, H).

    w13: BF16 (E, 2F, H), gates above ups; w2: BF16 (E, H, F); or each expert's by itself, as Weights.
    operands: formats of both products' operands in the forward. num_ranks: 1, or 2 of which each has half
    of the experts. Raises ValueError for shapes or dtypes that do not fit; ids are trusted.
    """
    num_experts, width, size = w13.shape
    check_matrix("experts", x, size)
    if w13.dtype != torch.bfloat16 or w2.dtype != torch.bfloat16:
        raise ValueError(f"experts: w13 is {w13.dtype}, w2 {w2.dtype}; give both in torch.bfloat16")
    if w2.shape != (num_experts, size, width // 2):
        raise ValueError(
            f"experts: w2 {tuple(w2.shape)} does not fit w13 {tuple(w13.shape)}; give "
            f"({num_experts}, {size}, {width // 2})"
        )
    if weights.dtype != torch.float32 or weights.shape != ids.shape:
        raise ValueError(
            f"experts: weights are {weights.dtype} {tuple(weights.shape)}, ids {tuple(ids.shape)}; give FP32 "
            "weights of the ids' shape, as route returns them"
        )
    w13, w2 = Weights.of(w13), Weights.of(w2)
    leaves = (*w13.leaves, *w2.leaves)
    return _Experts.apply(x, weights, ids, w13, w2, operands, num_ranks, *leaves)


def run_experts(
    x: Tensor, weights: Tensor, ids: Tensor, w13: Prepared, w2: Prepared, num_ranks: int = 1
) -> tuple[Tensor, Tensor, _Order]:
    """`experts` of prepared weights, no checks, no gradient: the result, FC1's output, the order of rows.

    An id of -1, or of E or more, of an expert that stands elsewhere, adds zero.
    """
    order = _Order.of(ids, w13.shape[0])
    rows = dispatch.gather_rows(w13.rows_of(x), order.tokens)
    h = w13.times(rows, order.offsets, x.dtype)
    a = silu_and_mul_forward(h)
    y = w2.times(a, order.offsets, x.dtype, row_factors=order.to_rows(weights))
    if num_ranks == 1:
        return dispatch.combine_rows(y, order.places), h, order
    owners = ids // (w13.shape[0] // num_ranks)
    shares = (order.places.where(owners == rank, -1) for rank in range(num_ranks))
    return add_partials([dispatch.combine_rows(y, share) for share in shares]), h, order


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, ids, w13, w2, operands, num_ranks, *_leaves):
        prepared = w13.prepared(operands), w2.prepared(operands)
        out, h, ctx.order = run_experts(x, weights, ids, *prepared, num_ranks)
        ctx.save_for_backward(x, weights, h)
        ctx.matrices, ctx.versions = (w13, w2), (w13.versions(), w2.versions())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (x, weights, h), order, (w13, w2) = ctx.saved_tensors, ctx.order, ctx.matrices
        for each, versions in zip(ctx.matrices, ctx.versions, strict=True):
            each.check(versions)
        needs_x, *_ = ctx.needs_input_grad
        needs = ctx.needs_input_grad[7:]
        num_w13 = len(w13.leaves)
        grad = dispatch.gather_rows(grad.contiguous(), order.tokens)
        # The gradient of the activation before its weight: times the activation it is the weight's.
        inner = grouped_dgrad(grad, w2, order.offsets)
        grad_h, weighted, grad_weights = _activation_backward(inner, h, weights, order)
        grads_w2 = gradients(w2, grad, weighted, order.offsets, needs[num_w13:])
        rows = dispatch.gather_rows(x, order.tokens)
        grads_w13 = gradients(w13, grad_h, rows, order.offsets, needs[:num_w13])
        grad_x = None
        if needs_x:
            grad_rows = grouped_dgrad(grad_h, w13, order.offsets)
            grad_x = dispatch.combine_rows(grad_rows, order.places)
        return grad_x, grad_weights, None, None, None, None, None, *grads_w13, *grads_w2


def _activation_backward(
    inner: Tensor, h: Tensor, weights: Tensor, order: _Order
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of h, the activation times its weight, gradient of weights; see kernels/experts.py."""
    if h.device.type == "cuda":
        from megatron_nvfp4.deterministic.kernels import experts

        return experts.activation_backward(inner, h, weights, order.tokens, order.slots)
    at = order.tokens * weights.shape[1] + order.slots
    is_row = order.tokens >= 0
    weight = torch.where(is_row, weights.flatten()[at.clamp_min(0)], 0.0)[:, None]
    a = silu_and_mul_forward(h).float()
    grad_weights = torch.zeros_like(weights)
    grad_weights.view(-1)[at[is_row]] = (inner.float() * a).sum(1)[is_row]
    grad_h = silu_and_mul_backward(inner.float() * weight, h)
    return grad_h, (a * weight).to(h.dtype), grad_weights
