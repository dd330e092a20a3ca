"""The weighted sum of a token's experts; formula in ../ops/experts.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _combine(
    y, weights, places, out, size, top_k: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(top_k):
        place = tl.load(places + row * top_k + slot).to(tl.int64)
        value = tl.load(y + place * size + cols, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + row * top_k + slot)
        total += value.to(tl.bfloat16).to(tl.float32)
    tl.store(out + row * size + cols, total.to(out.dtype.element_ty), mask=inside)


def combine(y: Tensor, weights: Tensor | None, places: Tensor) -> Tensor:
    """Rows `places` (T, K) of y (T * K, H), times weights FP32 (T, K), added by slot: BF16 (T, H)."""
    num_tokens, top_k = places.shape
    out = torch.empty(num_tokens, y.shape[1], dtype=torch.bfloat16, device=y.device)
    if out.numel():
        grid = (num_tokens, triton.cdiv(y.shape[1], 1024))
        _combine[grid](
            y, y if weights is None else weights, places, out, y.shape[1], top_k,
            WEIGHTED=weights is not None, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out
