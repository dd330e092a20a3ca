"""Gradients between the products of experts; formulas in ../ops/experts.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import slopes


@triton.jit
def _activation_backward(
    inner, h, weights, tokens, slots, grad_h, weighted, grad_weights, size,
    top_k: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    if token < 0:
        return
    at = token * top_k + tl.load(slots + row)
    weight = tl.load(weights + at)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, size, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < size
        source = h + row * 2 * size + cols
        gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(inner + row * size + cols, mask=inside, other=0.0).to(tl.float32)
        y = (gate / (1.0 + tl.exp(-gate)) * up).to(h.dtype.element_ty).to(tl.float32)
        total += slope * y
        tl.store(weighted + row * size + cols, (y * weight).to(h.dtype.element_ty), mask=inside)
        of_gate, of_up = slopes(gate, up, slope * weight)
        target = grad_h + row * 2 * size + cols
        tl.store(target, of_gate.to(h.dtype.element_ty), mask=inside)
        tl.store(target + size, of_up.to(h.dtype.element_ty), mask=inside)
    tl.store(grad_weights + at, tl.sum(total))


def activation_backward(
    inner: Tensor, h: Tensor, weights: Tensor, tokens: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What stands between the two products' gradients: that of h, BF16 (M, 2F), the activation times its
    weight, BF16 (M, F), and the gradient of weights, FP32 (T, K).

    inner: the gradient of the activation before its weight, BF16 (M, F). tokens, slots: int64 (M,), the
    weight of each row; rows of token -1 stay unwritten, weights without a row get 0.
    """
    num_rows, size = inner.shape
    grad_h, weighted = torch.empty_like(h), torch.empty_like(inner)
    grad_weights = torch.zeros_like(weights)
    if num_rows:
        block = min(1024, triton.next_power_of_2(size))
        _activation_backward[(num_rows,)](
            inner, h, weights, tokens, slots, grad_h, weighted, grad_weights, size, weights.shape[1],
            BLOCK=block, num_warps=4,
        )  # fmt: skip
    return grad_h, weighted, grad_weights
