"""silu(gate) * up; formula in ../ops/activation.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Fast exponential and reciprocal, subnormals flushed: the instructions are the formula.
_SILU_MUL = """
{
    .reg .f32 t;
    mul.ftz.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.ftz.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 t, t;
    mul.ftz.f32 t, $1, t;
    mul.ftz.f32 $0, $2, t;
}
"""
_ASM = tl.constexpr(_SILU_MUL)


@triton.jit
def _silu_and_mul(x, y, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < size
    gate = tl.load(x + row * 2 * size + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + cols, mask=inside, other=0.0).to(tl.float32)
    value = tl.inline_asm_elementwise(
        _ASM, "=f,f,f", [gate, up], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(y + row * size + cols, value.to(y.dtype.element_ty), mask=inside)


def silu_and_mul(x: Tensor) -> Tensor:
    """BF16 (M, 2F), contiguous, to BF16 (M, F)."""
    num_rows, size = x.shape[0], x.shape[1] // 2
    y = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    if y.numel():
        _silu_and_mul[(num_rows, triton.cdiv(size, 1024))](x, y, size, BLOCK=1024, num_warps=4)
    return y
