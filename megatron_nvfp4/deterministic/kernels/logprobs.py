"""Log-probabilities of given tokens; formula in ../ops/logprobs.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024


@triton.jit
def _token_logprobs(
    logits, tokens, logprobs, largest, log_total, row_stride: tl.constexpr, size: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    cols = tl.arange(0, CHUNK)
    top = tl.max(tl.load(base + cols, mask=cols < size, other=-float("inf")))
    for start in range(CHUNK, size, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        value = tl.load(base + cols, mask=cols < size, other=-float("inf"))
        top = tl.max(tl.maximum(value, top))
    total = 0.0
    for start in range(0, size, CHUNK):
        cols = start + tl.arange(0, CHUNK)
        inside = cols < size
        value = tl.load(base + cols, mask=inside, other=0.0)
        total += tl.sum(tl.where(inside, tl.exp(value - top), 0.0))
    log_sum = tl.log(total)
    chosen = tl.load(base + tl.load(tokens + row))
    tl.store(logprobs + row, (chosen - top - log_sum).to(logits.dtype.element_ty).to(tl.float32))
    tl.store(largest + row, top)
    tl.store(log_total + row, log_sum)


def token_logprobs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of logits (M, V), contiguous, and tokens int64 (M,): log-probability, maximum, log of the sum.

    FP32 (M,) each; the first holds values of the logits' dtype, BF16 or FP32, which also fixes the order.
    """
    num_rows, size = logits.shape
    outs = [torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(3)]
    if num_rows:
        _token_logprobs[(num_rows,)](logits, tokens, *outs, size, size, CHUNK=CHUNK, num_warps=4)
    return outs[0], outs[1], outs[2]
