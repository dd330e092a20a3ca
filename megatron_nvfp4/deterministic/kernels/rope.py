"""Rotary embedding kernel; formula in ../ops/rope.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Heads that a program rotates side by side.
HEADS = 32


@triton.jit
def _rotate(
    x, y, cos_sin, positions, num_heads, x_row_stride, sign,
    HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    cols = tl.arange(0, HALF)
    table = cos_sin + tl.load(positions + row).to(tl.int64) * (2 * HALF)
    cos = tl.load(table + cols)[None, :]
    sin = (tl.load(table + HALF + cols) * sign)[None, :]
    inside = (heads < num_heads)[:, None]
    at = heads[:, None] * (2 * HALF) + cols[None, :]
    source, target = x + row * x_row_stride + at, y + row * num_heads * (2 * HALF) + at
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    # One rounded product, the other inside the fused multiply-add.
    cos, sin = tl.broadcast_to(cos, (HEADS, HALF)), tl.broadcast_to(sin, (HEADS, HALF))
    low, high = tl.fma(first, cos, -(second * sin)), tl.fma(second, cos, first * sin)
    tl.store(target, low.to(y.dtype.element_ty), mask=inside)
    tl.store(target + HALF, high.to(y.dtype.element_ty), mask=inside)


def rotate(
    x: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    sign: float,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x (T, heads, D), its last two axes dense, cos_sin FP32 (P, D), positions (T,): x's shape."""
    num_rows, num_heads, size = x.shape
    y = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if num_rows:
        heads = min(HEADS, triton.next_power_of_2(num_heads))
        _rotate[(num_rows, triton.cdiv(num_heads, heads))](
            x, y, cos_sin, positions, num_heads, x.stride(0), sign, HALF=size // 2, HEADS=heads,
            num_warps=1 if heads < 16 else 4,
        )  # fmt: skip
    return y
