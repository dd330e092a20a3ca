"""Causal attention over packed sequences, forward; formulas and orders in ../ops/attention.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_nvfp4.deterministic.ops.attention import PackedBatch

PROMPT_ROWS, PROMPT_KEYS = 128, 64
HEADS, RESPONSE_KEYS = 16, 32
SPLIT = tl.constexpr(256)


@triton.jit
def _prompt(
    q, k, v, out, lse, starts, prompt_lengths, scale, q_stride, kv_stride, num_heads,
    GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    sequence, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + sequence).to(tl.int64)
    length = tl.load(prompt_lengths + sequence)
    if tile * ROWS >= length:
        return
    row, dim = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    inside = row < length
    at = (start + row[:, None]) * q_stride + head * SIZE + dim[None, :]
    query = tl.load(q + at, mask=inside[:, None], other=0.0)
    key_base, value_base = k + (head // GROUP) * SIZE, v + (head // GROUP) * SIZE
    largest = tl.zeros([ROWS], dtype=tl.float32) - float("inf")
    total = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, SIZE], dtype=tl.float32)
    # Tiles behind the last row are masked throughout and change nothing.
    for first in range(0, tl.minimum(length, tile * ROWS + ROWS), KEYS):
        key = first + tl.arange(0, KEYS)
        exists = key < length
        key_at = (start + key[None, :]) * kv_stride + dim[:, None]
        score = tl.dot(query, tl.load(key_base + key_at, mask=exists[None, :], other=0.0))
        score *= scale
        seen = inside[:, None] & exists[None, :] & (row[:, None] >= key[None, :])
        score = tl.where(seen, score, float("-inf"))
        row_max = tl.max(score, 1)
        new_max = tl.maximum(tl.where(row_max == float("-inf"), -1e20, row_max), largest)
        rescale = tl.exp(largest - new_max)
        weight = tl.exp(score - new_max[:, None])
        total = total * rescale + tl.sum(weight, 1)
        value_at = (start + key[:, None]) * kv_stride + dim[None, :]
        value = tl.load(value_base + value_at, mask=exists[:, None], other=0.0)
        acc = acc * rescale[:, None] + tl.dot(weight.to(value.dtype), value)
        largest = new_max
    out_at = ((start + row[:, None]) * num_heads + head) * SIZE + dim[None, :]
    tl.store(out + out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(lse + (start + row) * num_heads + head, largest + tl.log(total), mask=inside)


@triton.jit
def _response(
    q, k, v, out, lse, rows, row_starts, scale, q_stride, kv_stride,
    num_heads: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    request, tile = tl.program_id(0), tl.program_id(1)
    valid: tl.constexpr = HEADS if HEADS < GROUP else GROUP
    row = tl.load(rows + request).to(tl.int64)
    start = tl.load(row_starts + request).to(tl.int64)
    length = (row - start).to(tl.int32) + 1
    head, dim = tile * valid + tl.arange(0, HEADS), tl.arange(0, SIZE)
    is_head = (head < (tile + 1) * valid) & (head < num_heads)
    kv_head = tile // tl.cdiv(GROUP, HEADS)
    q_at = row * q_stride + head[:, None] * SIZE + dim[None, :]
    query = tl.load(q + q_at, mask=is_head[:, None], other=0.0)
    key_base, value_base = k + kv_head * SIZE, v + kv_head * SIZE
    num_splits = tl.cdiv(length, SPLIT)
    split_length = tl.cdiv(tl.cdiv(length, num_splits), 32) * 32
    all_max = tl.zeros([HEADS], dtype=tl.float32) - float("inf")
    all_total = tl.zeros([HEADS], dtype=tl.float32)
    all_acc = tl.zeros([HEADS, SIZE], dtype=tl.float32)
    for split in range(num_splits):
        end = tl.minimum(split * split_length + split_length, length)
        largest = tl.zeros([HEADS], dtype=tl.float32) - float("inf")
        total = tl.zeros([HEADS], dtype=tl.float32)
        acc = tl.zeros([HEADS, SIZE], dtype=tl.float32)
        for first in tl.range(split * split_length, end, KEYS):
            key = first + tl.arange(0, KEYS)
            exists = key < end
            key_at = (start + key[None, :]) * kv_stride + dim[:, None]
            score = tl.dot(query, tl.load(key_base + key_at, mask=exists[None, :], other=0.0))
            score *= scale
            score = tl.where(is_head[:, None] & exists[None, :], score, float("-inf"))
            value_at = (start + key[:, None]) * kv_stride + dim[None, :]
            value = tl.load(value_base + value_at, mask=exists[:, None], other=0.0)
            new_max = tl.maximum(tl.max(score, 1), largest)
            rescale = tl.exp(largest - new_max)
            weight = tl.exp(score - new_max[:, None])
            acc *= rescale[:, None]
            acc += tl.dot(weight.to(value.dtype), value)
            total = total * rescale + tl.sum(weight, 1)
            largest = new_max
        part, part_lse = acc / total[:, None], largest + tl.log(total)
        new_max = tl.maximum(part_lse, all_max)
        rescale, weight = tl.exp(all_max - new_max), tl.exp(part_lse - new_max)
        all_acc = tl.fma(
            all_acc, tl.broadcast_to(rescale[:, None], (HEADS, SIZE)), weight[:, None] * part
        )
        all_total = tl.fma(all_total, rescale, weight)
        all_max = new_max
    out_at = (row * num_heads + head[:, None]) * SIZE + dim[None, :]
    result = (all_acc / all_total[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_at, result, mask=is_head[:, None])
    tl.store(lse + row * num_heads + head, all_max + tl.log(all_total), mask=is_head)


def attend(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, scale: float
) -> tuple[Tensor, Tensor]:
    """Output BF16 (T, heads, D) and log-sum-exp FP32 (T, heads); batch: a PackedBatch on q's device.

    q BF16 (T, heads, D), k and v BF16 (T, kv_heads, D), dense in their last two axes.
    """
    num_rows, num_heads, size = q.shape
    group = num_heads // k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_rows, num_heads, dtype=torch.float32, device=q.device)
    longest = max(batch.prompt_lengths, default=0)
    if longest:
        grid = (len(batch.prompt_lengths), num_heads, triton.cdiv(longest, PROMPT_ROWS))
        _prompt[grid](
            q, k, v, out, lse, batch.starts, batch.prompts, scale, q.stride(0), k.stride(0), num_heads,
            GROUP=group, SIZE=size, ROWS=PROMPT_ROWS, KEYS=PROMPT_KEYS,
            num_warps=4 if size <= 64 else 8, num_stages=1,
        )  # fmt: skip
    if batch.responses.numel():
        _response[(batch.responses.numel(), triton.cdiv(num_heads, min(HEADS, group)))](
            q, k, v, out, lse, batch.responses, batch.response_starts, scale, q.stride(0), k.stride(0),
            num_heads, GROUP=group, SIZE=size, HEADS=HEADS, KEYS=RESPONSE_KEYS,
            num_warps=4, num_stages=2,
        )  # fmt: skip
    return out, lse
