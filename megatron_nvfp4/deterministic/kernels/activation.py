"""silu(gate) * up and its gradients; formula in ../ops/activation.py."""

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


@triton.jit
def slopes(gate, up, grad):
    """Gradients of gate and up from that of silu(gate) * up, all FP32."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    return grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), grad * gate * sigmoid


@triton.jit
def _backward(grad, x, grad_x, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < size
    gate = tl.load(x + row * 2 * size + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + cols, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(grad + row * size + cols, mask=inside, other=0.0).to(tl.float32)
    of_gate, of_up = slopes(gate, up, slope)
    target = grad_x + row * 2 * size + cols
    tl.store(target, of_gate.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(target + size, of_up.to(grad_x.dtype.element_ty), mask=inside)


def silu_and_mul(x: Tensor) -> Tensor:
    """BF16 (M, 2F), contiguous, to BF16 (M, F)."""
    num_rows, size = x.shape[0], x.shape[1] // 2
    y = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    if y.numel():
        _silu_and_mul[(num_rows, triton.cdiv(size, 1024))](x, y, size, BLOCK=1024, num_warps=4)
    return y


def silu_and_mul_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, BF16 (M, 2F), from that of the result, BF16 (M, F), both contiguous."""
    num_rows, size = grad.shape
    grad_x = torch.empty_like(x)
    if grad.numel():
        grid = (num_rows, triton.cdiv(size, 1024))
        _backward[grid](grad, x, grad_x, size, BLOCK=1024, num_warps=4)
    return grad_x
