"""Softmax and top-k of router logits; formula in ../ops/router.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _route(
    logits, weights, experts, num_rows, row_stride, col_stride,
    num_experts: tl.constexpr, top_k: tl.constexpr, RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols, slots = tl.arange(0, COLS), tl.arange(0, SLOTS)
    exists = cols < num_experts
    inside = (rows < num_rows)[:, None] & exists[None, :]
    at = rows[:, None] * row_stride + cols[None, :] * col_stride
    logit = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
    logit = tl.where(exists[None, :], logit, -float("inf"))
    largest = tl.max(logit, axis=1)[:, None]
    power = tl.where(exists[None, :], tl.exp(logit - largest), 0.0)
    probability = power / tl.sum(power, axis=1)[:, None]
    logit = tl.where(logit == logit, logit, -1e30)  # a NaN is chosen last
    values = tl.zeros([ROWS, SLOTS], dtype=tl.float32)
    ids = tl.zeros([ROWS, SLOTS], dtype=tl.int32)
    free = tl.broadcast_to(exists[None, :], (ROWS, COLS))
    for k in tl.static_range(top_k):
        best = tl.max(logit, axis=1)[:, None]
        lowest = tl.where(free & (logit == best), cols[None, :], num_experts + 1)
        winner = tl.min(lowest, axis=1)[:, None].to(tl.int32)
        value = tl.sum(tl.where(cols[None, :] == winner, probability, 0.0), axis=1)[:, None]
        values = tl.where(slots[None, :] == k, value, values)
        ids = tl.where(slots[None, :] == k, winner, ids)
        free = free & (cols[None, :] != winner)
        logit = tl.where(free, logit, -float("inf"))
    if RENORMALIZE:
        chosen = tl.sum(tl.where(slots[None, :] < top_k, values, 0.0), axis=1)[:, None]
        values = values / tl.where(chosen > 0.0, chosen, 1.0)
    out = rows[:, None] * top_k + slots[None, :]
    stored = (rows < num_rows)[:, None] & (slots[None, :] < top_k)
    tl.store(weights + out, values, mask=stored)
    tl.store(experts + out, ids, mask=stored)


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Logits BF16 (M, E) to weights FP32 and expert numbers int32, (M, top_k), by falling logit."""
    num_rows, num_experts = logits.shape
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(num_rows, top_k, dtype=torch.int32, device=logits.device)
    if num_rows:
        cols = triton.next_power_of_2(num_experts)
        rows = max(1, min(4, 256 // cols))
        _route[(triton.cdiv(num_rows, rows),)](
            logits, weights, experts, num_rows, *logits.stride(),
            num_experts, top_k, renormalize,
            ROWS=rows, COLS=cols, SLOTS=triton.next_power_of_2(top_k),
            num_warps=1 if cols <= 512 else 4,
        )  # fmt: skip
    return weights, experts
