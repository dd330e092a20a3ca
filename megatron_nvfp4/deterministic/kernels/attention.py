"""Causal attention over packed sequences, forward; formulas and orders in ../ops/attention.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_nvfp4.deterministic.ops.attention import PackedBatch

PROMPT_ROWS, PROMPT_KEYS = 64, 64
# Query heads that SGLang's kernel takes at once; ours takes LANES, those of several rows.
HEADS, LANES, RESPONSE_KEYS = 16, 64, 32
SPLIT = tl.constexpr(256)


@triton.jit
def _walk(
    query, key_base, value_base, start, row, first_key, last_key, length, scale, kv_stride,
    largest, total, acc,
    MASKED: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Tiles of keys from first_key to last_key; MASKED: some are behind a row, or behind the last."""
    dim = tl.arange(0, SIZE)
    for first in range(first_key, last_key, KEYS):
        key = first + tl.arange(0, KEYS)
        exists = key < length
        key_at = key_base + (start + key[None, :]) * kv_stride + dim[:, None]
        value_at = value_base + (start + key[:, None]) * kv_stride + dim[None, :]
        if MASKED:
            score = tl.dot(query, tl.load(key_at, mask=exists[None, :], other=0.0)) * scale
            seen = exists[None, :] & (row[:, None] >= key[None, :])
            score = tl.where(seen, score, float("-inf"))
        else:
            # The product rounds before the maximum is subtracted, as it does behind a mask.
            score = tl.fma(tl.dot(query, tl.load(key_at)), scale, 0.0)
        row_max = tl.max(score, 1)
        new_max = tl.maximum(tl.where(row_max == float("-inf"), -1e20, row_max), largest)
        rescale = tl.exp(largest - new_max)
        weight = tl.exp(score - new_max[:, None])
        total = total * rescale + tl.sum(weight, 1)
        if MASKED:
            value = tl.load(value_at, mask=exists[:, None], other=0.0)
        else:
            value = tl.load(value_at)
        acc = acc * rescale[:, None] + tl.dot(weight.to(value.dtype), value)
        largest = new_max
    return largest, total, acc


@triton.jit
def _prompt(
    q, k, v, out, lse, starts, prompt_lengths, scale, q_stride, kv_stride, num_heads,
    GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    tile = tl.num_programs(2) - 1 - tl.program_id(2)  # those with most keys begin
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
    largest, total, acc = _walk(
        query, key_base, value_base, start, row, 0, tile * ROWS, length, scale, kv_stride,
        largest, total, acc, MASKED=False, SIZE=SIZE, KEYS=KEYS,
    )  # fmt: skip
    largest, total, acc = _walk(
        query, key_base, value_base, start, row, tile * ROWS, tl.minimum(length, tile * ROWS + ROWS),
        length, scale, kv_stride, largest, total, acc, MASKED=True, SIZE=SIZE, KEYS=KEYS,
    )  # fmt: skip
    out_at = ((start + row[:, None]) * num_heads + head) * SIZE + dim[None, :]
    tl.store(out + out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(lse + (start + row) * num_heads + head, largest + tl.log(total), mask=inside)


@triton.jit
def _row_sums(weight, LANES: tl.constexpr, KEYS: tl.constexpr):
    """In the order of SGLang's kernel: its four warps have a quarter of the keys each, whose sums pair up."""
    quarters = tl.sum(tl.reshape(weight, (LANES, 4, KEYS // 4)), axis=2)
    return tl.sum(tl.sum(tl.reshape(quarters, (LANES, 2, 2)), axis=1), axis=1)


@triton.jit
def _response(
    q, k, v, out, lse, starts, prompt_lengths, scale, q_stride, kv_stride,
    num_heads: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
    LANES: tl.constexpr, VALID: tl.constexpr, SLOTS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    num_rows: tl.constexpr = LANES // SLOTS
    sequence, tile = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + sequence).to(tl.int64)
    length = (tl.load(starts + sequence + 1) - start).to(tl.int32)
    prompt = tl.load(prompt_lengths + sequence)
    # Rows side by side that begin at a multiple of num_rows have splits of one length, for that changes at
    # multiples of 32. Keys behind a row change nothing in it.
    first_row = (prompt // num_rows + tl.num_programs(2) - 1 - tl.program_id(2)) * num_rows
    if first_row >= length:
        return
    lane, dim = tl.arange(0, LANES), tl.arange(0, SIZE)
    row, head = first_row + lane // SLOTS, tile * VALID + lane % SLOTS
    inside = (lane % SLOTS < VALID) & (head < num_heads) & (row >= prompt) & (row < length)
    kv_head = tile // tl.cdiv(GROUP, 16)
    q_at = (start + row[:, None]) * q_stride + head[:, None] * SIZE + dim[None, :]
    query = tl.load(q + q_at, mask=inside[:, None], other=0.0)
    key_base, value_base = k + kv_head * SIZE, v + kv_head * SIZE
    longest = tl.minimum(first_row + num_rows, length)
    num_splits = tl.cdiv(longest, SPLIT)
    split_length = tl.cdiv(tl.cdiv(longest, num_splits), 32) * 32
    all_max = tl.zeros([LANES], dtype=tl.float32) - float("inf")
    all_total = tl.zeros([LANES], dtype=tl.float32)
    all_acc = tl.zeros([LANES, SIZE], dtype=tl.float32)
    for split in range(num_splits):
        end = tl.minimum(split * split_length + split_length, longest)
        largest = tl.zeros([LANES], dtype=tl.float32) - float("inf")
        total = tl.zeros([LANES], dtype=tl.float32)
        acc = tl.zeros([LANES, SIZE], dtype=tl.float32)
        for first in tl.range(split * split_length, end, KEYS):
            key = first + tl.arange(0, KEYS)
            exists = key < end
            key_at = (start + key[None, :]) * kv_stride + dim[:, None]
            score = tl.dot(query, tl.load(key_base + key_at, mask=exists[None, :], other=0.0))
            score *= scale
            seen = inside[:, None] & exists[None, :] & (row[:, None] >= key[None, :])
            score = tl.where(seen, score, float("-inf"))
            value_at = (start + key[:, None]) * kv_stride + dim[None, :]
            value = tl.load(value_base + value_at, mask=exists[:, None], other=0.0)
            new_max = tl.maximum(tl.max(score, 1), largest)
            rescale = tl.exp(largest - new_max)
            weight = tl.exp(score - new_max[:, None])
            acc *= rescale[:, None]
            acc += tl.dot(weight.to(value.dtype), value)
            total = total * rescale + _row_sums(weight, LANES, KEYS)
            largest = new_max
        part, part_lse = acc / total[:, None], largest + tl.log(total)
        new_max = tl.maximum(part_lse, all_max)
        rescale, weight = tl.exp(all_max - new_max), tl.exp(part_lse - new_max)
        all_acc = tl.fma(
            all_acc, tl.broadcast_to(rescale[:, None], (LANES, SIZE)), weight[:, None] * part
        )
        all_total = tl.fma(all_total, rescale, weight)
        all_max = new_max
    out_at = ((start + row[:, None]) * num_heads + head[:, None]) * SIZE + dim[None, :]
    result = (all_acc / all_total[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_at, result, mask=inside[:, None])
    tl.store(lse + (start + row) * num_heads + head, all_max + tl.log(all_total), mask=inside)


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
    num_sequences, longest = len(batch.lengths), max(batch.prompt_lengths, default=0)
    if longest:
        grid = (num_sequences, num_heads, triton.cdiv(longest, PROMPT_ROWS))
        _prompt[grid](
            q, k, v, out, lse, batch.starts, batch.prompts, scale, q.stride(0), k.stride(0), num_heads,
            GROUP=group, SIZE=size, ROWS=PROMPT_ROWS, KEYS=PROMPT_KEYS,
            num_warps=4, num_stages=3,
        )  # fmt: skip
    if batch.responses.numel():
        valid = min(HEADS, group)
        slots = triton.next_power_of_2(valid)
        rows = LANES // slots
        pairs = zip(batch.prompt_lengths, batch.lengths, strict=True)
        most = max(triton.cdiv(length, rows) - prompt // rows for prompt, length in pairs)
        _response[(num_sequences, triton.cdiv(num_heads, valid), most)](
            q, k, v, out, lse, batch.starts, batch.prompts, scale, q.stride(0), k.stride(0),
            num_heads, GROUP=group, SIZE=size, LANES=LANES, VALID=valid, SLOTS=slots,
            KEYS=RESPONSE_KEYS, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out, lse
