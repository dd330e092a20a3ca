"""RMSNorm kernels and their gradients; formulas in ../ops/norm.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns a block adds at a time; part of the order of addition.
CHUNK = 1024
# Sizes of heads, whose rows are normalised several at once.
HEAD_SIZES = (64, 128, 256)
# Partial sums of a weight's gradient: their number does not depend on the GPU.
NUM_PARTS = 512


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
def _rms_norm_heads(
    x, weight, y, num_rows, token_stride, num_heads: tl.constexpr, SIZE: tl.constexpr, eps,
    ROWS: tl.constexpr,
):  # fmt: skip
    # What _rms_norm does with so short a row, several at once: a thread has 8 neighbours, its zeros add
    # nothing.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, SIZE)
    inside = (row < num_rows)[:, None] & (cols < SIZE)[None, :]
    source = (row // num_heads) * token_stride + (row % num_heads) * SIZE
    value = tl.load(x + source[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(tl.where(inside, value * value, 0.0), axis=1)[:, None]
    scale = 1.0 / tl.sqrt(total / SIZE + eps)
    gamma = tl.load(weight + cols).to(tl.float32)[None, :]
    at = row[:, None] * SIZE + cols[None, :]
    tl.store(y + at, (value * scale * gamma).to(y.dtype.element_ty), mask=inside)


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


@triton.jit
def _add_rms_norm(
    x, residual, weight, y, stream, row_stride, size, eps, CHUNK: tl.constexpr, LANES: tl.constexpr
):
    # The order of _inverse_rms on the FP32 sum, whose values a thread would load LANES at a time.
    base = tl.program_id(0).to(tl.int64) * row_stride
    lanes = tl.max_contiguous(tl.arange(0, CHUNK), LANES)
    total = 0.0
    for start in range(0, size, CHUNK):
        cols = start + lanes
        inside = cols < size
        left = tl.load(x + base + cols, mask=inside, other=0.0).to(tl.float32)
        value = left + tl.load(residual + base + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(stream + base + cols, value.to(stream.dtype.element_ty), mask=inside)
        total += tl.sum(value * value)
    scale = tl.rsqrt(total / size + eps)
    for start in range(0, size, CHUNK):
        cols = start + lanes
        inside = cols < size
        left = tl.load(x + base + cols, mask=inside, other=0.0).to(tl.float32)
        value = left + tl.load(residual + base + cols, mask=inside, other=0.0).to(tl.float32)
        value = value * scale * tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + base + cols, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gradients(
    grad, x, residual, weight, grad_stream, grad_x, grad_residual, parts,
    num_rows, rows_each, token_stride, num_heads, size, eps,
    HAS_RESIDUAL: tl.constexpr, IS_WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * rows_each
    last = tl.minimum(first + rows_each, num_rows)
    cols = tl.arange(0, BLOCK)
    gamma = tl.load(weight + cols, mask=cols < size, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & (cols < size)[None, :]
        at = row[:, None] * size + cols[None, :]
        source = (row // num_heads) * token_stride + (row % num_heads) * size
        value = tl.load(x + source[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(value * value, axis=1) / size + eps)[:, None]
        normed, scaled = value * inverse, slope * gamma
        total += slope * normed
        mean = (tl.sum(scaled * normed, axis=1) / size)[:, None]
        result = inverse * (scaled - normed * mean)
        if HAS_RESIDUAL:
            result += tl.load(grad_stream + at, mask=inside, other=0.0).to(tl.float32)
            if IS_WIDE:
                tl.store(grad_residual + at, result, mask=inside)
        tl.store(grad_x + at, result.to(grad_x.dtype.element_ty), mask=inside)
    part = parts + tl.program_id(0) * size + cols
    tl.store(part, tl.sum(total, axis=0), mask=cols < size)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x BF16 (M, N), contiguous, or (T, heads, N) as `dense_heads` leaves it, weight (N,): BF16, dense."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x.shape[-1]
    num_rows = x.numel() // size
    if num_rows and size in HEAD_SIZES:
        rows = 4096 // size
        num_heads = x.shape[1] if x.dim() == 3 else 1
        _rms_norm_heads[(triton.cdiv(num_rows, rows),)](
            x, weight, y, num_rows, x.stride(0), num_heads, size, eps, ROWS=rows, num_warps=4
        )
    elif num_rows:
        _rms_norm[(num_rows,)](x, weight, y, size, size, eps, CHUNK=CHUNK, num_warps=4)
    return y


def dense_heads(x: Tensor) -> Tensor:
    """x (..., N), as it is where it is (T, heads, N) with rows of one distance; contiguous else.

    The distance and the address are multiples of 16, so that the width of a load, of which the order
    depends, is that of a contiguous tensor.
    """
    is_dense = x.dim() == 3 and x.shape[2] in HEAD_SIZES and x.stride()[1:] == (x.shape[2], 1)
    if is_dense and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.contiguous()


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x BF16 (M, N), residual (M, N) and weight (N,) of one dtype, all contiguous: y BF16 and the new
    residual in its dtype."""
    y, stream = torch.empty_like(x), torch.empty_like(residual)
    num_rows, size = x.shape
    if num_rows:
        # No contraction: squares round before they are added.
        _add_rms_norm[(num_rows,)](
            x, residual, weight, y, stream, size, size, eps, CHUNK=CHUNK,
            LANES=4 if size % 16 == 0 else 1, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return y, stream


def norm_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    grad_stream: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a norm of x, or of x + residual: those of x, of the residual and of the weight.

    grad, residual and grad_stream, the gradient of x + residual, are contiguous; x is as `dense_heads`
    leaves it. Each has its tensor's shape and dtype, but the weight's is FP32. An x and a residual of one
    dtype share one gradient.
    """
    size, num_heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    num_rows = x.numel() // size
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    is_wide = residual is not None and residual.dtype != x.dtype
    grad_residual = torch.empty_like(residual) if is_wide else grad_x
    if not num_rows:
        return grad_x, grad_residual, torch.zeros(size, device=x.device)
    block = triton.next_power_of_2(size)
    rows = max(1, 2048 // block)
    rows_each = triton.cdiv(triton.cdiv(num_rows, NUM_PARTS), rows) * rows
    num_parts = triton.cdiv(num_rows, rows_each)
    parts = torch.empty(num_parts, size, dtype=torch.float32, device=x.device)
    absent = grad if residual is None else residual
    _gradients[(num_parts,)](
        grad, x, absent, weight, absent if grad_stream is None else grad_stream, grad_x,
        grad_residual, parts, num_rows, rows_each, x.stride(0) if x.dim() == 3 else size, num_heads,
        size, eps, HAS_RESIDUAL=residual is not None, IS_WIDE=is_wide, ROWS=rows, BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return grad_x, grad_residual, parts.sum(0)


def rms_norm_fp32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (M, N), BF16 or FP32, and weight FP32 (N,), contiguous, to FP32 (M, N)."""
    y, values = torch.empty(x.shape, dtype=torch.float32, device=x.device), x.float()
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
    return y
