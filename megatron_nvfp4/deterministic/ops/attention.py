"""Causal attention over packed sequences in the orders of SGLang's two deterministic attention backends.

`triton`: a prompt row walks the keys of its prompt in tiles of 64, a response row those of its
sequence in splits:

    s = fp32(q k) * scale          m' = max(m, max s)          r = exp(m - m')       p = exp(s - m')
    total = total * r + sum(p)     acc = acc * r + bf16(p) v   out = bf16(acc / total)

A response row of position n has ceil((n+1) / 256) splits of equal length rounded up to 32, each walked
in tiles of 32 keys and finished to (acc / total, m + log total); they are merged in order by the same
rules. So the rows that the sampler produced by decoding get other last bits than a prefill of the same
tokens, and the learner has to know which are which.
`fa3`: FlashAttention 3's own kernel with one split, where decoding and prefill agree, with the backward
below; on the CPU every row counts as a prompt row.

Orders: SGLang 0.5.23, kernels/ops/attention/extend_attention.py (deterministic form) and
decode_attention.py. Windows, sinks and caps of logits are left out. Backward: P = exp(s - lse),
dS = P (dO V - sum(dO O)), tiles in order, operands of products in BF16.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PROMPT_KEYS, RESPONSE_KEYS, SPLIT = 64, 32, 256


@dataclass(frozen=True)
class PackedBatch:
    """Sequences laid row after row: what every operator needs to know of them.

    prompt_lengths, lengths: rows by prefill, rows in all, of each sequence. On the device: starts int32
    (B+1,), prompts int32 (B,), positions int64 (T,), responses int32 (R,) the rows made by decoding,
    response_starts int32 (R,) the first row of each one's sequence.
    """

    prompt_lengths: tuple[int, ...]
    lengths: tuple[int, ...]
    starts: Tensor
    prompts: Tensor
    positions: Tensor
    responses: Tensor
    response_starts: Tensor

    @classmethod
    def of(
        cls, prompt_lengths: Sequence[int], lengths: Sequence[int], device: torch.device | str
    ) -> "PackedBatch":
        """ValueError unless every sequence has 1 <= prompt length <= length."""
        if len(prompt_lengths) != len(lengths):
            raise ValueError(
                f"PackedBatch: {len(prompt_lengths)} prompt lengths, {len(lengths)} lengths; give one each "
                "of every sequence"
            )
        for number, (prompt, length) in enumerate(zip(prompt_lengths, lengths, strict=True)):
            if not 1 <= prompt <= length:
                raise ValueError(
                    f"PackedBatch: sequence {number} has a prompt of {prompt} of {length} rows; "
                    f"give 1 to {length}"
                )
        starts, positions, responses, response_starts = [0], [], [], []
        for prompt, length in zip(prompt_lengths, lengths, strict=True):
            start = starts[-1]
            positions.append(torch.arange(length))
            responses.append(torch.arange(start + prompt, start + length, dtype=torch.int32))
            response_starts.append(torch.full((length - prompt,), start, dtype=torch.int32))
            starts.append(start + length)
        empty = [torch.zeros(0, dtype=torch.int32)]
        return cls(
            tuple(prompt_lengths),
            tuple(lengths),
            torch.tensor(starts, dtype=torch.int32).to(device),
            torch.tensor(prompt_lengths, dtype=torch.int32).to(device),
            torch.cat(positions or empty).long().to(device),
            torch.cat(responses or empty).to(device),
            torch.cat(response_starts or empty).to(device),
        )

    @property
    def num_rows(self) -> int:
        return sum(self.lengths)


def attention(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, kind: str) -> Tensor:
    """q BF16 (T, heads, D), k and v BF16 (T, kv_heads, D): BF16 (T, heads, D), scaled by D^-0.5.

    kind: "triton" or "fa3". Raises ValueError for shapes and dtypes that do not fit or another kind,
    RuntimeError where FlashAttention 3 is missing.
    """
    if kind not in ("triton", "fa3"):
        raise ValueError(f"attention: kind={kind!r}; use 'triton' or 'fa3'")
    _check(q, k, v, batch)
    if kind == "fa3" and q.device.type == "cpu":
        batch = PackedBatch.of(batch.lengths, batch.lengths, q.device)
    return _Attention.apply(q, k, v, batch, kind)


def _check(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 3 or t.dtype != torch.bfloat16 or t.shape[0] != batch.num_rows:
            raise ValueError(
                f"attention: {name} is {t.dtype} {tuple(t.shape)}; give BF16 ({batch.num_rows}, heads, D)"
            )
    if k.shape != v.shape or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit; heads "
            "are a multiple of kv_heads, D is one"
        )
    if q.shape[1] == k.shape[1] or q.shape[2] not in (64, 128):
        raise ValueError(
            f"attention: {q.shape[1]} heads on {k.shape[1]} kv heads of {q.shape[2]} dimensions; the "
            "order of addition is known for grouped queries of 64 or 128 dimensions"
        )


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch):
    """FlashAttention 3 without gradients: out BF16 (T, heads, D), log-sum-exp FP32 (T, heads).

    SGLang's copy of it comes first: that is the binary the sampler runs.
    """
    lse_flag = "return_softmax_lse"
    try:
        from sgl_kernel.flash_attn import flash_attn_varlen_func
    except ImportError as absent:
        try:
            from flash_attn_interface import flash_attn_varlen_func
        except ImportError as error:
            raise RuntimeError(
                "attention: kind='fa3' needs FlashAttention 3, in sgl_kernel.flash_attn, which cannot be "
                f"imported ({absent}), or in flash_attn_interface ({error}); install sglang-kernel, or use "
                "the triton backend on both sides"
            ) from error
        lse_flag = "return_attn_probs"
    longest = max(batch.lengths, default=0)
    out, lse, *_ = flash_attn_varlen_func(
        q, k, v, batch.starts, batch.starts, longest, longest,
        softmax_scale=q.shape[2] ** -0.5, causal=True, num_splits=1, **{lse_flag: True},
    )  # fmt: skip
    return out, lse.t().contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, kind: str) -> Tensor:
        scale = q.shape[2] ** -0.5
        if q.device.type == "cuda":
            from megatron_nvfp4.deterministic.kernels import attention

            q, k, v = (_dense_heads(t) for t in (q, k, v))
            k, v = (k, v) if k.stride(0) == v.stride(0) else (k.contiguous(), v.contiguous())
            if kind == "fa3" and q.shape[0]:
                out, lse = _flash_attention(q, k, v, batch)
            else:
                out, lse = attention.attend(q, k, v, batch, scale)
        else:
            out, lse = _attend_ref(q, k, v, batch, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.batch, ctx.scale = batch, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        if q.device.type == "cuda":
            from megatron_nvfp4.deterministic.kernels import attention_backward as kernels

            grads = kernels.attend_backward(q, k, v, out, lse, grad, ctx.batch, ctx.scale)
        else:
            grads = _attend_backward_ref(q, k, v, out, lse, grad, ctx.batch, ctx.scale)
        return *grads, None, None


def _dense_heads(x: Tensor) -> Tensor:
    fits = x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) % 16 == 0
    return x if fits and x.data_ptr() % 16 == 0 else x.contiguous()


def _walk(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, num_keys: int):
    """Rows q (heads, R, D) over k and v (heads, L, D) by tiles of num_keys keys: max, total, acc."""
    shape = q.shape[:2]
    largest = torch.full(shape, -torch.inf, device=q.device)
    total, acc = torch.zeros_like(largest), torch.zeros(q.shape, device=q.device)
    for first in range(0, k.shape[1], num_keys):
        tile = slice(first, first + num_keys)
        score = (q.float() @ k[:, tile].float().transpose(1, 2)) * scale
        score = torch.where(seen[:, tile], score, -torch.inf)
        new_max = torch.maximum(score.amax(2).nan_to_num(neginf=-1e20), largest)
        rescale, weight = torch.exp(largest - new_max), torch.exp(score - new_max[..., None])
        total = total * rescale + weight.sum(2)
        acc = acc * rescale[..., None] + weight.to(v.dtype).float() @ v[:, tile].float()
        largest = new_max
    return largest, total, acc


def _walk_splits(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One response row q (heads, 1, D) over keys (heads, L, D): FP32 output, log-sum-exp (heads, 1)."""
    length = k.shape[1]
    num_splits = math.ceil(length / SPLIT)
    step = math.ceil(math.ceil(length / num_splits) / RESPONSE_KEYS) * RESPONSE_KEYS
    seen = torch.ones(1, length, dtype=torch.bool, device=q.device)
    largest = torch.full(q.shape[:2], -torch.inf, device=q.device)
    total, acc = torch.zeros_like(largest), torch.zeros(q.shape, device=q.device)
    for first in range(0, length, step):
        part = slice(first, first + step)
        m, t, a = _walk(q, k[:, part], v[:, part], seen[:, part], scale, RESPONSE_KEYS)
        part_lse = m + torch.log(t)
        new_max = torch.maximum(part_lse, largest)
        rescale, weight = torch.exp(largest - new_max), torch.exp(part_lse - new_max)
        acc = acc * rescale[..., None] + weight[..., None] * (a / t[..., None])
        total, largest = total * rescale + weight, new_max
    return acc / total[..., None], largest + torch.log(total)


def _sequences(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]):
    """(q, k, v) as (heads, L, D) of every sequence, keys and values repeated for every head."""
    group = q.shape[1] // k.shape[1]
    for parts in zip(*(t.split(list(lengths)) for t in (q, k, v)), strict=True):
        query, *others = (t.transpose(0, 1) for t in parts)
        yield (query, *(t.repeat_interleave(group, dim=0) for t in others))


def _attend_ref(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, scale: float):
    outs, lses = [], []
    triples = _sequences(q, k, v, batch.lengths)
    for prompt, (query, key, value) in zip(batch.prompt_lengths, triples, strict=True):
        seen = torch.ones(prompt, prompt, dtype=torch.bool, device=q.device).tril()
        rows = (query[:, :prompt], key[:, :prompt], value[:, :prompt])
        largest, total, acc = _walk(*rows, seen, scale, PROMPT_KEYS)
        parts = [(acc / total[..., None], largest + torch.log(total))]
        for row in range(prompt, query.shape[1]):
            at = slice(0, row + 1)
            parts.append(_walk_splits(query[:, row : row + 1], key[:, at], value[:, at], scale))
        outs.append(torch.cat([out for out, _ in parts], dim=1).transpose(0, 1))
        lses.append(torch.cat([lse for _, lse in parts], dim=1).transpose(0, 1))
    if not outs:
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    return torch.cat(outs).to(q.dtype), torch.cat(lses)


def _attend_backward_ref(q, k, v, out, lse, grad, batch: PackedBatch, scale: float):
    grads = []
    rest = _sequences(
        grad, lse[..., None], (out.float() * grad.float()).sum(2)[..., None], batch.lengths
    )
    for (query, key, value), (grad_out, row_lse, delta) in zip(
        _sequences(q, k, v, batch.lengths), rest, strict=True
    ):
        query, key, value, grad_out = (t.float() for t in (query, key, value, grad_out))
        seen = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool, device=q.device).tril()
        weight = torch.where(seen, torch.exp(query @ key.transpose(1, 2) * scale - row_lse), 0.0)
        grad_value = weight.to(q.dtype).float().transpose(1, 2) @ grad_out
        grad_score = (weight * (grad_out @ value.transpose(1, 2) - delta)).to(q.dtype).float()
        grad_query, grad_key = grad_score @ key, grad_score.transpose(1, 2) @ query
        # Heads that share keys and values add up.
        grad_key, grad_value = (
            t.unflatten(0, (k.shape[1], -1)).sum(1) for t in (grad_key, grad_value)
        )
        parts = (grad_query * scale, grad_key * scale, grad_value)
        grads.append([t.transpose(0, 1).to(q.dtype) for t in parts])
    if not grads:
        return tuple(torch.zeros_like(t) for t in (q, k, v))
    return tuple(torch.cat(parts) for parts in zip(*grads, strict=True))
