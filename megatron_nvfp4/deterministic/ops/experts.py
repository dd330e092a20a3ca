"""Mixture of experts: FC1, silu_and_mul, FC2, router weight on FC2's accumulator, FP32 sum by slots.

    h = bf16(x w13_e)                               a = silu_and_mul(h)
    y = bf16(fp32 accumulator of (a w2_e) * w)      out = bf16(sum over slots k of y_k)

The sum starts with slot 0 and adds in FP32. Formula: SGLang 0.5.23,
kernels/ops/moe/fused_moe_triton_kernels.py and moe_sum_reduce. A row's bits do not depend on the rows
beside it. Shared experts and dropped tokens are left out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nvfp4.recipes import Operands

from .activation import silu_and_mul_backward, silu_and_mul_forward
from .linear import UNQUANTIZED, Prepared, check_matrix, grouped_dgrad, grouped_wgrad


@dataclass(frozen=True)
class _Order:
    """Pairs (token, slot) by expert: `rows` their tokens, `places` (T, K) where they went, offsets (E+1,)."""

    pairs: Tensor
    rows: Tensor
    places: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, experts: Tensor, num_experts: int) -> "_Order":
        top_k = experts.shape[1]
        ids, pairs = experts.flatten().long().sort(stable=True)
        places = torch.empty_like(pairs)
        places[pairs] = torch.arange(pairs.numel(), device=pairs.device)
        bounds = torch.arange(num_experts + 1, device=pairs.device)
        offsets = torch.searchsorted(ids, bounds)
        return cls(pairs, pairs // top_k, places.view(experts.shape), offsets)


def experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Tensor,
    w2: Tensor,
    operands: Operands = UNQUANTIZED,
) -> Tensor:
    """x BF16 (T, H) through the experts `ids` int (T, K) with weights FP32 (T, K), as `route` gives
    them: BF16 (T, H).

    w13: BF16 (E, 2F, H), gates above ups; w2: BF16 (E, H, F). operands: formats of both products'
    operands in the forward. Raises ValueError for shapes or dtypes that do not fit; ids are trusted.
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
    return _Experts.apply(x, weights, ids, w13, w2, operands)


def _combine(y: Tensor, weights: Tensor | None, places: Tensor) -> Tensor:
    if y.device.type == "cuda":
        from megatron_nvfp4.deterministic.kernels import experts

        return experts.combine(y, weights, places)
    values = y[places.flatten()].view(*places.shape, y.shape[1]).float()
    if weights is not None:
        values = values * weights[..., None]
    total = torch.zeros_like(values[:, 0])
    for value in values.to(torch.bfloat16).unbind(1):
        total = total + value.float()
    return total.to(torch.bfloat16)


def run_experts(
    x: Tensor, weights: Tensor, ids: Tensor, w13: Prepared, w2: Prepared
) -> tuple[Tensor, Tensor, _Order]:
    """`experts` of prepared weights, no checks, no gradient: the result, FC1's output, the order of rows."""
    order = _Order.of(ids, w13.shape[0])
    h = w13.times(x[order.rows], order.offsets, x.dtype)
    # FC2's accumulators themselves: the router weight comes before their rounding.
    y = w2.times(silu_and_mul_forward(h), order.offsets, torch.float32)
    return _combine(y, weights, order.places), h, order


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, ids, w13, w2, operands):
        prepared = Prepared.of(w13, operands), Prepared.of(w2, operands)
        out, h, ctx.order = run_experts(x, weights, ids, *prepared)
        ctx.save_for_backward(x, weights, h, w13, w2)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weights, h, w13, w2 = ctx.saved_tensors
        order = ctx.order
        a, grad = silu_and_mul_forward(h), grad[order.rows]
        scale = weights.flatten()[order.pairs][:, None]
        grad_w2 = grouped_wgrad((grad.float() * scale).to(grad.dtype), a, order.offsets)
        # The gradient of y / w: <it, a> is the weight's, and times w it is a's.
        inner = grouped_dgrad(grad, w2, order.offsets).float()
        grad_weights = (inner * a.float()).sum(1)[order.places.flatten()].view(weights.shape)
        grad_h = silu_and_mul_backward(inner * scale, h)
        grad_w13 = grouped_wgrad(grad_h, x[order.rows], order.offsets)
        grad_rows = grouped_dgrad(grad_h, w13, order.offsets)
        return _combine(grad_rows, None, order.places), grad_weights, None, grad_w13, grad_w2, None
