"""Gradients of causal attention over packed sequences; formulas in ../ops/attention.py.

One program owns a tile of queries of one head, or a tile of keys and values for one query head, whose
gradients the heads of a group then add up: nothing is added atomically.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_nvfp4.deterministic.ops.attention import PackedBatch

# Rows, keys, warps and stages of the two kernels; keys a multiple of rows in the second, rows of keys in the
# first.
FOR_QUERIES = {"ROWS": 128, "KEYS": 64, "num_warps": 8, "num_stages": 3}
FOR_KEYS = {"ROWS": 64, "KEYS": 128, "num_warps": 8, "num_stages": 2}


@triton.jit
def _walk_keys(
    query, grad_out, row_lse, row_delta, key_base, value_base, start, row, first_key, last_key,
    length, log2_scale, kv_stride, acc,
    MASKED: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    dim = tl.arange(0, SIZE)
    for first in range(first_key, last_key, KEYS):
        key = first + tl.arange(0, KEYS)
        exists = (key < length)[:, None]
        at = (start + key[:, None]) * kv_stride + dim[None, :]
        keys = tl.load(key_base + at, mask=exists, other=0.0)
        values = tl.load(value_base + at, mask=exists, other=0.0)
        score = tl.dot(query, tl.trans(keys))
        weight = tl.exp2(score * log2_scale - row_lse[:, None])
        if MASKED:
            weight = tl.where(row[:, None] >= key[None, :], weight, 0.0)
        grad_score = weight * (tl.dot(grad_out, tl.trans(values)) - row_delta[:, None])
        acc += tl.dot(grad_score.to(keys.dtype), keys)
    return acc


@triton.jit
def _grad_queries(
    q, k, v, out, grad, lse, delta, grad_q, starts, scale, log2_scale, q_stride, kv_stride, num_heads,
    GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    tile = tl.num_programs(2) - 1 - tl.program_id(2)  # those with most keys begin
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
    result = tl.load(out + dense, mask=inside[:, None], other=0.0)
    row_delta = tl.sum(result.to(tl.float32) * grad_out.to(tl.float32), 1)
    tl.store(delta + at, row_delta, mask=inside)
    row_lse = tl.load(lse + at, mask=inside, other=float("inf")) * 1.4426950408889634
    key_base, value_base = k + (head // GROUP) * SIZE, v + (head // GROUP) * SIZE
    acc = tl.zeros([ROWS, SIZE], dtype=tl.float32)
    acc = _walk_keys(
        query, grad_out, row_lse, row_delta, key_base, value_base, start, row, 0, tile * ROWS,
        length, log2_scale, kv_stride, acc, MASKED=False, SIZE=SIZE, KEYS=KEYS,
    )  # fmt: skip
    acc = _walk_keys(
        query, grad_out, row_lse, row_delta, key_base, value_base, start, row, tile * ROWS,
        tl.minimum(length, tile * ROWS + ROWS), length, log2_scale, kv_stride, acc,
        MASKED=True, SIZE=SIZE, KEYS=KEYS,
    )  # fmt: skip
    tl.store(grad_q + dense, (acc * scale).to(grad_q.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _walk_rows(
    keys, values, q, grad, lse, delta, start, head, key, first_row, last_row, length, log2_scale,
    q_stride, num_heads, acc_k, acc_v,
    MASKED: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    dim = tl.arange(0, SIZE)
    for first in range(first_row, last_row, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = row < length
        q_at = (start + row[:, None]) * q_stride + head * SIZE + dim[None, :]
        at = (start + row) * num_heads + head
        query = tl.load(q + q_at, mask=inside[:, None], other=0.0)
        grad_out = tl.load(
            grad + at[:, None] * SIZE + dim[None, :], mask=inside[:, None], other=0.0
        )
        row_lse = tl.load(lse + at, mask=inside, other=float("inf")) * 1.4426950408889634
        row_delta = tl.load(delta + at, mask=inside, other=0.0)
        score = tl.dot(keys, tl.trans(query))
        weight = tl.exp2(score * log2_scale - row_lse[None, :])
        if MASKED:
            weight = tl.where(row[None, :] >= key[:, None], weight, 0.0)
        acc_v += tl.dot(weight.to(query.dtype), grad_out)
        grad_score = weight * (tl.dot(values, tl.trans(grad_out)) - row_delta[None, :])
        acc_k += tl.dot(grad_score.to(query.dtype), query)
    return acc_k, acc_v


@triton.jit
def _grad_keys(
    q, k, v, grad, lse, delta, grad_k, grad_v, starts, scale, log2_scale, q_stride, kv_stride, num_heads,
    GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    sequence, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + sequence).to(tl.int64)
    length = (tl.load(starts + sequence + 1) - start).to(tl.int32)
    if tile * KEYS >= length:
        return
    key, dim = tile * KEYS + tl.arange(0, KEYS), tl.arange(0, SIZE)
    exists = (key < length)[:, None]
    kv_at = (start + key[:, None]) * kv_stride + (head // GROUP) * SIZE + dim[None, :]
    keys = tl.load(k + kv_at, mask=exists, other=0.0)
    values = tl.load(v + kv_at, mask=exists, other=0.0)
    acc_k = tl.zeros([KEYS, SIZE], dtype=tl.float32)
    acc_v = tl.zeros([KEYS, SIZE], dtype=tl.float32)
    middle = tl.minimum(length, tile * KEYS + KEYS)
    acc_k, acc_v = _walk_rows(
        keys, values, q, grad, lse, delta, start, head, key, tile * KEYS, middle, length, log2_scale,
        q_stride, num_heads, acc_k, acc_v, MASKED=True, SIZE=SIZE, ROWS=ROWS,
    )  # fmt: skip
    acc_k, acc_v = _walk_rows(
        keys, values, q, grad, lse, delta, start, head, key, middle, length, length, log2_scale,
        q_stride, num_heads, acc_k, acc_v, MASKED=False, SIZE=SIZE, ROWS=ROWS,
    )  # fmt: skip
    out_at = ((start + key[:, None]) * num_heads + head) * SIZE + dim[None, :]
    tl.store(grad_k + out_at, acc_k * scale, mask=exists)
    tl.store(grad_v + out_at, acc_v, mask=exists)


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
    longest = max(batch.lengths, default=0)
    if not longest:
        return tuple(torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    grad_q, delta = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(lse)
    grid = (len(batch.lengths), num_heads)
    scales = scale, scale * math.log2(math.e)
    _grad_queries[(*grid, triton.cdiv(longest, FOR_QUERIES["ROWS"]))](
        q, k, v, out, grad, lse, delta, grad_q, batch.starts, *scales, q.stride(0), k.stride(0),
        num_heads, GROUP=group, SIZE=size, **FOR_QUERIES,
    )  # fmt: skip
    of_heads = torch.empty(2, *q.shape, dtype=torch.float32, device=q.device)
    _grad_keys[(*grid, triton.cdiv(longest, FOR_KEYS["KEYS"]))](
        q, k, v, grad, lse, delta, *of_heads, batch.starts, *scales, q.stride(0), k.stride(0),
        num_heads, GROUP=group, SIZE=size, **FOR_KEYS,
    )  # fmt: skip
    grad_k, grad_v = of_heads.unflatten(2, (num_kv, group)).sum(3).to(k.dtype)
    return grad_q, grad_k, grad_v
