"""Log-probabilities of given tokens and their gradients; formula in ../ops/logprobs.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024


@triton.jit
def _rescaled(logit, divisor, ROUNDED: tl.constexpr):
    value = tl.div_rn(logit.to(tl.float32), divisor)
    return value.to(tl.bfloat16).to(tl.float32) if ROUNDED else value


@triton.jit
def _token_logprobs(
    logits, temperature, tokens, logprobs, largest, log_total,
    row_stride: tl.constexpr, size: tl.constexpr, CHUNK: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base, divisor = logits + row * row_stride, tl.load(temperature + row)
    # Division by a positive number keeps the order: the largest logit is the largest quotient.
    wide = tl.arange(0, 4 * CHUNK)
    seen = tl.full([4 * CHUNK], -float("inf"), tl.float32)
    for start in range(0, size, 4 * CHUNK):
        inside = start + wide < size
        value = tl.load(base + start + wide, mask=inside, other=-float("inf"))
        seen = tl.maximum(seen, value.to(tl.float32))
    top = _rescaled(tl.max(seen), divisor, ROUNDED)
    # How many neighbours a thread holds fixes the order of a chunk's sum: as many as it would load of the
    # rescaled logits' dtype.
    in_chunk = tl.max_contiguous(tl.arange(0, CHUNK), 8 if ROUNDED else 4)
    chunks = tl.arange(0, 4) * CHUNK
    total = 0.0
    for start in range(0, size, 4 * CHUNK):
        cols = start + chunks[:, None] + in_chunk[None, :]
        inside = cols < size
        value = _rescaled(tl.load(base + cols, mask=inside, other=0.0), divisor, ROUNDED)
        sums = tl.sum(tl.where(inside, tl.exp(value - top), 0.0), axis=1)
        even, odd = tl.split(tl.reshape(sums, (2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        total = total + first + second + third + fourth
    log_sum = tl.log(total)
    chosen = _rescaled(tl.load(base + tl.load(tokens + row)), divisor, ROUNDED)
    result = chosen - top - log_sum
    if ROUNDED:
        result = result.to(tl.bfloat16).to(tl.float32)
    tl.store(logprobs + row, result)
    tl.store(largest + row, top)
    tl.store(log_total + row, log_sum)


@triton.jit
def _grad_logits(
    logits, temperature, tokens, largest, log_total, grad, out, size,
    ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = cols < size, row * size + cols
    divisor = tl.load(temperature + row)
    value = _rescaled(tl.load(logits + at, mask=inside, other=0.0), divisor, ROUNDED)
    factor = tl.load(grad + row) / divisor
    probability = tl.exp(value - tl.load(largest + row) - tl.load(log_total + row))
    slope = tl.where(cols == tl.load(tokens + row), factor, 0.0) - factor * probability
    tl.store(out + at, slope.to(out.dtype.element_ty), mask=inside)


def token_logprobs(
    logits: Tensor, temperature: Tensor, tokens: Tensor, is_rounded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of logits BF16 (M, V), contiguous, temperature FP32 (M,) and tokens int64 (M,): log-probability,
    maximum, log of the sum.

    FP32 (M,) each. is_rounded: logits over the temperature, and log-probabilities, are rounded to BF16, which
    also fixes the order.
    """
    num_rows, size = logits.shape
    outs = [torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(3)]
    if num_rows:
        _token_logprobs[(num_rows,)](
            logits, temperature, tokens, *outs, size, size, CHUNK=CHUNK, ROUNDED=is_rounded,
            num_warps=4,
        )  # fmt: skip
    return outs[0], outs[1], outs[2]


def grad_logits(
    logits: Tensor,
    temperature: Tensor,
    tokens: Tensor,
    largest: Tensor,
    log_total: Tensor,
    grad: Tensor,
    is_rounded: bool,
) -> Tensor:
    """Gradient of the logits, BF16 (M, V), from that of the result, FP32 (M,); the rest as token_logprobs."""
    num_rows, size = logits.shape
    out = torch.empty_like(logits)
    if num_rows:
        grid = (num_rows, triton.cdiv(size, 4 * CHUNK))
        _grad_logits[grid](
            logits, temperature, tokens, largest, log_total, grad, out, size,
            ROUNDED=is_rounded, BLOCK=4 * CHUNK, num_warps=8,
        )  # fmt: skip
    return out
