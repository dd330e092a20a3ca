"""RMSNorm kernels; formulas in ../ops/norm.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns a block adds at a time; part of the order of addition.
CHUNK = 1024


@triton.jit
def _rms_norm(x, weight, y, row_stride: tl.constexpr, size: tl.constexpr, eps, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * row_stride
    total = tl.zeros([1], dtype=tl.float32)
    for start in range(0, size, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        inside = cols < size
        value = tl.load(x + row + cols, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(tl.where(inside, value * value, 0.0))
    scale = 1.0 / tl.sqrt(total / size + eps)
    for start in range(0, size, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        inside = cols < size
        value = tl.load(x + row + cols, mask=inside, other=0.0)
        gamma = tl.load(weight + cols, mask=inside, other=1.0).to(tl.float32)
        normed = value.to(tl.float32) * scale * gamma
        tl.store(y + row + cols, normed.to(value.dtype), mask=inside)


@triton.jit
def _add(x, residual, total, new_residual, num_values, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_values
    left = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, left + right, mask=inside)
    tl.store(new_residual + at, (left + right).to(new_residual.dtype.element_ty), mask=inside)


@triton.jit
def _inverse_rms(x, inverse, row_stride, size, eps, CHUNK: tl.constexpr):
    # FP32 tensors alone: a BF16 one beside them would widen the loads and change the order of addition.
    # The size is no constant: dividing by one could become a multiplication.
    row = tl.program_id(0)
    total = 0.0
    for start in range(0, size, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        value = tl.load(x + row.to(tl.int64) * row_stride + cols, mask=cols < size, other=0.0)
        total += tl.sum(value * value)
    tl.store(inverse + row, tl.rsqrt(total / size + eps))


@triton.jit
def _scale(x, inverse, weight, y, size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = cols < size, row.to(tl.int64) * size + cols
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * tl.load(inverse + row)
    value = value.to(x.dtype.element_ty).to(tl.float32)  # FP32 stays as it is
    value *= tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """BF16 (M, N) and (N,), contiguous, to BF16 (M, N)."""
    y = torch.empty_like(x)
    num_rows, size = x.shape
    if num_rows:
        _rms_norm[(num_rows,)](x, weight, y, size, size, eps, CHUNK=CHUNK, num_warps=4)
    return y


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x BF16 (M, N), residual (M, N) and weight (N,) of one dtype, all contiguous: y BF16, the new
    residual in its dtype, and 1/rms, FP32 (M,)."""
    if residual.dtype == torch.float32:
        total = new_residual = residual + x
    else:
        total = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        new_residual = torch.empty_like(x)
        grid = (triton.cdiv(x.numel(), 4 * CHUNK),)
        if x.numel():
            _add[grid](x, residual, total, new_residual, x.numel(), BLOCK=4 * CHUNK, num_warps=8)
    y = torch.empty_like(x)
    return y, new_residual, _normalize(total, total, weight, y, eps)


def rms_norm_fp32(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x (M, N), BF16 or FP32, and weight FP32 (N,), contiguous, to y FP32 (M, N) and 1/rms, FP32 (M,)."""
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    return y, _normalize(x, x.float(), weight, y, eps)


def _normalize(x: Tensor, values: Tensor, weight: Tensor, y: Tensor, eps: float) -> Tensor:
    """1/rms of values, which are x in FP32; y becomes x over the rms, rounded as x is, times weight."""
    num_rows, size = x.shape
    inverse = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        # No contraction: squares round before they are added.
        _inverse_rms[(num_rows,)](
            values, inverse, size, size, eps, CHUNK=CHUNK, num_warps=4, enable_fp_fusion=False
        )
        block = min(CHUNK, triton.next_power_of_2(size))
        grid = (num_rows, triton.cdiv(size, block))
        _scale[grid](x, inverse, weight, y, size, BLOCK=block, num_warps=4)
    return inverse
