"""Rotary embedding kernel; formula in ../ops/rope.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    x, y, cos_sin, positions, num_heads, x_row_stride, sign, HALF: tl.constexpr
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, HALF)
    table = cos_sin + tl.load(positions + row).to(tl.int64) * (2 * HALF)
    cos, sin = tl.load(table + cols), tl.load(table + HALF + cols) * sign
    source = x + row * x_row_stride + head * (2 * HALF)
    target = y + (row * num_heads + head) * (2 * HALF)
    first = tl.load(source + cols).to(tl.float32)
    second = tl.load(source + HALF + cols).to(tl.float32)
    # One rounded product, the other inside the fused multiply-add.
    tl.store(target + cols, tl.fma(first, cos, -(second * sin)).to(y.dtype.element_ty))
    tl.store(target + HALF + cols, tl.fma(second, cos, first * sin).to(y.dtype.element_ty))


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
        _rotate[(num_rows, num_heads)](
            x, y, cos_sin, positions, num_heads, x.stride(0), sign, HALF=size // 2, num_warps=1
        )
    return y
