"""Gradients of causal attention over packed sequences; formulas in ../ops/attention.py.

One program owns a tile of queries, or of keys and values with every query head that reads them, so that
nothing is added atomically.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_nvfp4.deterministic.ops.attention import PackedBatch

ROWS, KEYS = 64, 64


@triton.jit
def _grad_queries(
    q, k, v, grad, lse, delta, grad_q, starts, scale, q_stride, kv_stride, num_heads,
    GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    sequence, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + sequence).to(tl.int64)
    length = (tl.load(starts + sequence + 1) - start).to(tl.int32)
    if tile * ROWS >= length:
        return
    row, dim = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    inside = row < length
    q_at = (start + row[:, None]) * q_stride + head * SIZE + dim[None, :]
    dense = ((start + row[:, None]) * num_heads + head) * SIZE + dim[None, :]
    at = (start + row) * num_heads + head
    query = tl.load(q + q_at, mask=inside[:, None], other=0.0)
    grad_out = tl.load(grad + dense, mask=inside[:, None], other=0.0)
    row_lse = tl.load(lse + at, mask=inside, other=0.0)
    row_delta = tl.load(delta + at, mask=inside, other=0.0)
    acc = tl.zeros([ROWS, SIZE], dtype=tl.float32)
    for first in range(0, tl.minimum(length, tile * ROWS + ROWS), KEYS):
        key = first + tl.arange(0, KEYS)
        exists = key < length
        kv_at = (start + key[:, None]) * kv_stride + (head // GROUP) * SIZE + dim[None, :]
        keys = tl.load(k + kv_at, mask=exists[:, None], other=0.0)
        values = tl.load(v + kv_at, mask=exists[:, None], other=0.0)
        score = tl.dot(query, tl.trans(keys)) * scale
        seen = inside[:, None] & exists[None, :] & (row[:, None] >= key[None, :])
        weight = tl.where(seen, tl.exp(score - row_lse[:, None]), 0.0)
        grad_score = weight * (tl.dot(grad_out, tl.trans(values)) - row_delta[:, None])
        acc += tl.dot(grad_score.to(keys.dtype), keys)
    tl.store(grad_q + dense, (acc * scale).to(grad_q.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _grad_keys(
    q, k, v, grad, lse, delta, grad_k, grad_v, starts, scale, q_stride, kv_stride, num_heads, num_kv,
    GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    sequence, kv_head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + sequence).to(tl.int64)
    length = (tl.load(starts + sequence + 1) - start).to(tl.int32)
    if tile * KEYS >= length:
        return
    key, dim = tile * KEYS + tl.arange(0, KEYS), tl.arange(0, SIZE)
    exists = key < length
    kv_at = (start + key[:, None]) * kv_stride + kv_head * SIZE + dim[None, :]
    keys = tl.load(k + kv_at, mask=exists[:, None], other=0.0)
    values = tl.load(v + kv_at, mask=exists[:, None], other=0.0)
    acc_k = tl.zeros([KEYS, SIZE], dtype=tl.float32)
    acc_v = tl.zeros([KEYS, SIZE], dtype=tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        for first in range(tile * KEYS // ROWS * ROWS, length, ROWS):
            row = first + tl.arange(0, ROWS)
            inside = row < length
            q_at = (start + row[:, None]) * q_stride + head * SIZE + dim[None, :]
            dense = ((start + row[:, None]) * num_heads + head) * SIZE + dim[None, :]
            at = (start + row) * num_heads + head
            query = tl.load(q + q_at, mask=inside[:, None], other=0.0)
            grad_out = tl.load(grad + dense, mask=inside[:, None], other=0.0)
            row_lse = tl.load(lse + at, mask=inside, other=0.0)
            row_delta = tl.load(delta + at, mask=inside, other=0.0)
            score = tl.dot(keys, tl.trans(query)) * scale
            seen = exists[:, None] & inside[None, :] & (row[None, :] >= key[:, None])
            weight = tl.where(seen, tl.exp(score - row_lse[None, :]), 0.0)
            acc_v += tl.dot(weight.to(query.dtype), grad_out)
            grad_score = weight * (tl.dot(values, tl.trans(grad_out)) - row_delta[None, :])
            acc_k += tl.dot(grad_score.to(query.dtype), query)
    out_at = ((start + key[:, None]) * num_kv + kv_head) * SIZE + dim[None, :]
    tl.store(grad_k + out_at, (acc_k * scale).to(grad_k.dtype.element_ty), mask=exists[:, None])
    tl.store(grad_v + out_at, acc_v.to(grad_v.dtype.element_ty), mask=exists[:, None])


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    batch: PackedBatch,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, BF16 and dense, from that of `out`; tensors as attention.attend's."""
    num_heads, size = q.shape[1:]
    num_kv, group = k.shape[1], num_heads // k.shape[1]
    delta = (out.float() * grad.float()).sum(-1)
    grad_q, grad_k, grad_v = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)
    )
    num_sequences, longest = len(batch.lengths), max(batch.lengths, default=0)
    if not longest:
        return grad_q, grad_k, grad_v
    _grad_queries[(num_sequences, num_heads, triton.cdiv(longest, ROWS))](
        q, k, v, grad, lse, delta, grad_q, batch.starts, scale, q.stride(0), k.stride(0), num_heads,
        GROUP=group, SIZE=size, ROWS=ROWS, KEYS=KEYS, num_warps=4, num_stages=2,
    )  # fmt: skip
    _grad_keys[(num_sequences, num_kv, triton.cdiv(longest, KEYS))](
        q, k, v, grad, lse, delta, grad_k, grad_v, batch.starts, scale, q.stride(0), k.stride(0),
        num_heads, num_kv, GROUP=group, SIZE=size, ROWS=ROWS, KEYS=KEYS, num_warps=4, num_stages=1,
    )  # fmt: skip
    return grad_q, grad_k, grad_v
