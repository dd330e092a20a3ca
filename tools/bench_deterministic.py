"""`bench.py deterministic`: the deterministic mode beside SGLang's own kernels and beside the ordinary path.

Operators: CUDA graphs on both sides, weights rotated past the cache, shapes of Qwen3-30B-A3B. SGLang's
kernels are called as its forward with --enable-deterministic-inference calls them; its alignment of
experts' rows to blocks is left out of its time, our sort is in ours. Bits are compared before the clock.
Whole models: Megatron's GPTModel on minite layers with a profile, in turns with one without, on the same
weights, forward and backward into Megatron's DDP, between events, host time included. Ordinary attention
is Transformer Engine's, or torch's where that is missing. A row that fails names its error, and the others
go on. `ratio` is the peer's time over ours: above 1 we are faster.
"""

import contextlib
import csv
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from bench import graph_us, machine
from bench_gemm import Calls, num_sets
from torch import Tensor

from megatron_nvfp4.deterministic.ops.attention import PackedBatch, attention
from megatron_nvfp4.deterministic.ops.experts import run_experts
from megatron_nvfp4.deterministic.ops.linear import UNQUANTIZED, Prepared, linear
from megatron_nvfp4.deterministic.ops.logprobs import token_logprobs
from megatron_nvfp4.deterministic.ops.norm import add_rms_norm, rms_norm
from megatron_nvfp4.deterministic.ops.router import route
from megatron_nvfp4.recipes import RECIPES, Operands

HIDDEN, EXPERTS, TOP_K, FFN = 2048, 128, 8, 768
HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128
VOCABULARY = 151936
EPS, TEMPERATURE = 1e-6, 0.8
LINEARS = {"qkv": (5120, 2048), "o": (2048, 4096)}
FIELDS = (
    *("gpu", "torch", "cuda", "driver", "commit"),
    *("op", "case", "us", "sglang_us", "torch_us", "ordinary_us"),
    *("ratio", "torch_ratio", "goal", "values", "n_diff", "note"),
)
NO_FA3 = (
    "skipped: FlashAttention 3 (sgl_kernel.flash_attn or flash_attn_interface) is not installed"
)
KERNEL_FIELDS = ("op", "case", "side", "kernel", "calls", "us", "share")


# --- operators ------------------------------------------------------------------------------------


class Sglang:
    """Kernels of an importable SGLang, tensors and buffers as its deterministic forward gives them."""

    def __init__(self) -> None:
        """Raises ImportError, or whatever else SGLang's modules raise."""
        from sgl_kernel import moe_align_block_size, moe_sum_reduce
        from sglang.kernels.ops.attention import decode_attention, extend_attention
        from sglang.kernels.ops.moe.fused_moe_triton_kernels import invoke_fused_moe_kernel
        from sglang.srt.batch_invariant_ops import batch_invariant_ops

        self.invariant = batch_invariant_ops
        self.extend = extend_attention.extend_attention_fwd_unified
        self.decode = decode_attention.decode_attention_fwd
        self.fused_moe, self.align = invoke_fused_moe_kernel, moe_align_block_size
        self.sum_slots = moe_sum_reduce

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.invariant.matmul_persistent(x, weight.t())

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x.float() + residual.float()
        mean = self.invariant.mean_dim(total.pow(2), -1, keepdim=True)
        return (total * torch.rsqrt(mean + EPS) * weight).to(x.dtype), total.to(x.dtype)

    def token_logprobs(self, hidden: Tensor, head: Tensor, tokens: Tensor, divisor: Tensor):
        logits = self.linear(hidden, head).float().div_(divisor)
        return self.invariant.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]

    def silu(self) -> tuple[Callable[[Tensor, Tensor], object], str]:
        """(gates and ups, output) -> None, and a note where its own cannot be built."""
        try:
            from sglang.kernels.ops.activation.activation import activation_module

            run = activation_module(torch.bfloat16).run_activation
            return (lambda h, a: run(h, a, "silu")), ""
        except Exception as error:  # its compiler and its loader each raise their own
            from megatron_nvfp4.deterministic.ops.activation import silu_and_mul_forward

            note = f"SGLang's silu cannot be built, ours on both sides: {error_line(error)}"
            return (lambda h, a: a.copy_(silu_and_mul_forward(h))), note

    def experts(self, x: Tensor, weights: Tensor, ids: Tensor) -> tuple[Callable, str]:
        """(w13, w2) -> output, for these tokens, and a note."""
        import triton.language as tl

        block, num_pairs = 64, ids.numel()
        capacity = -(-(num_pairs + (EXPERTS + 1) * (block - 1)) // 4) * 4
        like = {"dtype": torch.int32, "device": x.device}
        pairs, owners = torch.empty(capacity, **like), torch.empty(-(-capacity // block), **like)
        padded, counts = torch.empty(1, **like), torch.empty(EXPERTS + 2, **like)
        self.align(ids, EXPERTS + 1, block, pairs, owners, padded, counts, True)
        config = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}
        config |= {"num_warps": 4, "num_stages": 3}
        names = ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16")
        plain = dict.fromkeys((*names, "per_channel_quant", "filter_expert"), False)
        plain["compute_type"] = tl.bfloat16
        silu, note = self.silu()
        h = x.new_empty(num_pairs, 2 * FFN)
        a, y = x.new_empty(num_pairs, FFN), x.new_empty(*ids.shape, HIDDEN)

        def run(w13: Tensor, w2: Tensor) -> Tensor:
            given = (None, None, None, weights, ids, pairs, owners, padded)
            self.fused_moe(x, w13, None, h, *given, False, TOP_K, dict(config), **plain)
            silu(h, a)
            self.fused_moe(a, w2, None, y, *given, True, 1, dict(config), **plain)
            out = torch.empty_like(x)
            self.sum_slots(y, out, 1.0)
            return out

        return run, note

    def prompt_rows(self, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch) -> Callable:
        """The prefilled rows, by the extend kernel."""
        lengths = torch.tensor(batch.prompt_lengths, device=q.device)
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        rows = prompt_rows(batch)
        prefixes = torch.zeros(len(lengths), dtype=torch.int32, device=q.device)
        query, longest = q[rows].contiguous(), max(batch.prompt_lengths)
        out, bounds = torch.empty_like(query), (bounds, bounds.int(), rows)

        def run() -> Tensor:
            self.extend(
                query, out, k, v, 1.0, 1.0, *bounds, prefixes, longest,
                sm_scale=HEAD_DIM**-0.5, is_causal=True,
            )  # fmt: skip
            return out

        return run

    def response_rows(self, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch) -> Callable:
        """The decoded rows, one request each."""
        rows, starts = batch.responses.long(), batch.response_starts.long()
        lengths = rows - starts + 1
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        index = torch.repeat_interleave(starts - ends[:-1], lengths)
        index += torch.arange(index.numel(), device=q.device)
        most = -(-max(batch.lengths) // 256)
        like = {"dtype": torch.float32, "device": q.device}
        parts = torch.empty(rows.numel(), HEADS, most, HEAD_DIM, **like)
        sums = torch.empty(rows.numel(), HEADS, most, **like)
        splits, query = ((lengths + 255) // 256).int(), q[rows].contiguous()
        out = torch.empty_like(query)

        def run() -> Tensor:
            self.decode(
                query, k, v, out, ends, index, parts, sums, splits, most,
                HEAD_DIM**-0.5, 1.0, 1.0, use_pdl=True,
            )  # fmt: skip
            return out

        return run


@dataclass
class Trial:
    """Calls of one operator on rotating tensors; every call returns what it computes, a tensor or a tuple.

    compared: of our first result, what SGLang's is compared with.
    """

    case: str
    ours: Calls
    sglang: Calls | None = None
    torch: Calls | None = None
    goal: float | None = None
    note: str = ""
    compared: Callable[[object], object] = field(default=lambda result: result)


Draw = Callable[..., Tensor]


def _draw(generator: torch.Generator) -> Draw:
    return lambda *shape, scale=1.0: (
        torch.randn(*shape, generator=generator, device="cuda") * scale
    ).to(torch.bfloat16)


def linear_trials(peer: Sglang | None, draw: Draw) -> Iterator[Trial]:
    shapes = [(name, rows, shape) for name, shape in LINEARS.items() for rows in (1, 32, 256, 4096)]
    for name, rows, (n, k) in [*shapes, ("head", 256, (VOCABULARY, HIDDEN))]:
        x, weights = draw(rows, k), [draw(n, k) for _ in range(num_sets(2 * n * k))]
        yield Trial(
            f"{name}, {rows} x {n} x {k}",
            [lambda x=x, w=w: linear(x, w) for w in weights],
            peer and [lambda x=x, w=w: peer.linear(x, w) for w in weights],
            [lambda x=x, w=w: torch.mm(x, w.t()) for w in weights],
            goal=1.25,
        )


def experts_trials(peer: Sglang | None, draw: Draw) -> Iterator[Trial]:
    w13 = draw(EXPERTS, 2 * FFN, HIDDEN, scale=HIDDEN**-0.5)
    w2 = draw(EXPERTS, HIDDEN, FFN, scale=FFN**-0.5)
    for recipe in ("bf16", "nvfp4_per_token"):
        operands: Operands = RECIPES[recipe].fprop
        prepared = [Prepared.of(weight, operands) for weight in (w13, w2)]
        for num_tokens in (32, 512, 4096):
            x = draw(num_tokens, HIDDEN)
            weights, ids = route(draw(num_tokens, EXPERTS), TOP_K, True)
            run, note = peer.experts(x, weights, ids) if peer else (None, "")

            def ours(x=x, weights=weights, ids=ids, prepared=prepared) -> Tensor:
                return run_experts(x, weights, ids, *prepared)[0]

            is_plain = operands == UNQUANTIZED
            yield Trial(
                f"{recipe}, {num_tokens} tokens",
                [ours],
                run and [lambda run=run: run(w13, w2)],
                goal=2.0,
                note=note if is_plain else "; ".join(filter(None, (note, "SGLang's is BF16"))),
                compared=(lambda result: result) if is_plain else (lambda result: None),
            )


def norm_trials(peer: Sglang | None, draw: Draw) -> Iterator[Trial]:
    for rows, size in ((4096, HIDDEN), (4096 * HEADS, HEAD_DIM)):
        weight, xs = draw(size), [draw(rows, size) for _ in range(num_sets(4 * rows * size))]
        yield Trial(
            f"rms_norm, {rows} x {size}",
            [lambda x=x, w=weight: rms_norm(x, w, EPS) for x in xs],
            peer and [lambda x=x, w=weight: peer.invariant.rms_norm(x, w, EPS) for x in xs],
            [
                lambda x=x, w=weight: torch.nn.functional.rms_norm(x, w.shape, w, EPS)
                for x in xs
            ],
        )  # fmt: skip
    weight, rows = draw(HIDDEN), 4096
    pairs = [(draw(rows, HIDDEN), draw(rows, HIDDEN)) for _ in range(num_sets(8 * rows * HIDDEN))]
    yield Trial(
        f"add_rms_norm, {rows} x {HIDDEN}",
        [lambda x=x, r=r: add_rms_norm(x, r, weight, EPS) for x, r in pairs],
        peer and [lambda x=x, r=r: peer.add_rms_norm(x, r, weight) for x, r in pairs],
    )


def logprob_trials(peer: Sglang | None, draw: Draw) -> Iterator[Trial]:
    head = draw(VOCABULARY, HIDDEN, scale=HIDDEN**-0.5)
    for rows in (256, 1024):
        hidden, tokens = draw(rows, HIDDEN), torch.arange(rows, device="cuda") * 97
        divisor = torch.full((rows, 1), TEMPERATURE, device="cuda")
        yield Trial(
            f"head and log-probabilities, {rows} x {VOCABULARY}",
            [lambda h=hidden, t=tokens, d=divisor[:, 0]: token_logprobs(h, head, t, d)],
            peer
            and [lambda h=hidden, t=tokens, d=divisor: peer.token_logprobs(h, head, t, d)],
            [
                lambda h=hidden, t=tokens: torch.nn.functional.cross_entropy(
                    torch.mm(h, head.t()).float(), t, reduction="none"
                )
            ],
        )  # fmt: skip


def attention_trials(peer: Sglang | None, draw: Draw) -> Iterator[Trial]:
    for num, prompt in ((1, 4096), (4, 1024), (1, 1024), (4, 256)):
        length = 4096 // num
        batch = PackedBatch.of((prompt,) * num, (length,) * num, "cuda")
        sets = [_heads(draw) for _ in range(3)]
        theirs = None
        if peer:
            theirs = [_both(peer, *tensors, batch) for tensors in sets]
        order = torch.cat([prompt_rows(batch), batch.responses.long()])
        yield Trial(
            f"{num} x {length}, {prompt} prompt rows each",
            [lambda s=s, b=batch: attention(*s, b, "triton") for s in sets],
            theirs,
            [lambda s=s, n=num: _torch_attention(*s, n) for s in sets],
            compared=lambda out, rows=order: out[rows],
        )


def prompt_rows(batch: PackedBatch) -> Tensor:
    """Numbers of the prefilled rows, int64, on the device."""
    spans = zip(batch.starts.tolist(), batch.prompt_lengths, strict=False)
    rows = [torch.arange(start, start + length) for start, length in spans]
    return torch.cat(rows).to(batch.starts.device)


def _heads(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(draw(4096, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))


def _both(peer: Sglang, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch) -> Callable:
    prompts = peer.prompt_rows(q, k, v, batch)
    if not batch.responses.numel():
        return prompts
    responses = peer.response_rows(q, k, v, batch)
    return lambda: torch.cat([prompts(), responses()])


def has_fa3() -> bool:
    """Whether the forward of attention kind fa3 finds FlashAttention 3."""
    for name in ("sgl_kernel.flash_attn", "flash_attn_interface"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
            return True
    return False


def fa3_trials(peer: Sglang | None, draw: Draw) -> Iterator[Trial]:
    if not has_fa3():
        print(NO_FA3, file=sys.stderr)
        return
    for num in (1, 4):
        lengths = (4096 // num,) * num
        batch = PackedBatch.of(lengths, lengths, "cuda")
        sets = [_heads(draw) for _ in range(3)]
        yield Trial(
            f"fa3, {num} x {lengths[0]}",
            [lambda s=s, b=batch: attention(*s, b, "fa3") for s in sets],
            torch=[lambda s=s, n=num: _torch_attention(*s, n) for s in sets],
        )


def _torch_attention(q: Tensor, k: Tensor, v: Tensor, num_sequences: int) -> Tensor:
    """Causal attention of sequences of one length by the fastest of torch's kernels."""
    q, k, v = (t.unflatten(0, (num_sequences, -1)).transpose(1, 2) for t in (q, k, v))
    return sdpa(q, k, v).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (B, heads, S, D), grouped: cuDNN's kernel, else FlashAttention 2, else torch's."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )


OPS = {
    "linear": linear_trials,
    "experts": experts_trials,
    "norm": norm_trials,
    "logprobs": logprob_trials,
    "attention": attention_trials,
    "attention fa3": fa3_trials,
}


def operator_rows(only: str) -> Iterator[dict[str, object]]:
    """A row for every case of the operators whose name contains `only`."""
    chosen = [op for op in OPS if only in op]
    if not chosen:
        return
    peer, reason = None, ""
    try:
        peer = Sglang()
    except Exception as error:  # SGLang's own imports raise what they like
        reason = f"SGLang cannot be imported: {error_line(error)}"
        print(reason, file=sys.stderr)
    for op in chosen:
        draw = _draw(torch.Generator("cuda").manual_seed(0))
        torch.cuda.empty_cache()
        with torch.no_grad():
            for trial, failure in _each(OPS[op](peer, draw)):
                row = {"op": op, "case": trial.case if trial else ""}
                yield row | _guarded(lambda t=trial: measure(t, reason), failure)


def _each(trials: Iterator[Trial]) -> Iterator[tuple[Trial | None, str]]:
    """The trials, and at last the error of the one that could not be made."""
    try:
        for trial in trials:
            yield trial, ""
    except Exception as error:
        yield None, error_line(error)


def measure(trial: Trial, reason: str) -> dict[str, object]:
    """The columns of a trial; `reason`: why SGLang is missing where it is."""
    row: dict[str, object] = {"goal": trial.goal or "", "note": trial.note or reason}
    if trial.sglang:
        row |= compare_bits(trial.compared(trial.ours[0]()), trial.sglang[0]())
        row["sglang_us"] = round(graph_us(trial.sglang), 1)
    row["us"] = round(graph_us(trial.ours), 1)
    if trial.torch:
        row["torch_us"] = round(graph_us(trial.torch), 1)
    return row | ratios(row)


def compare_bits(ours: object, theirs: object) -> dict[str, object]:
    """How many values were compared and how many differ; nothing for ours None."""
    if ours is None:
        return {}
    pairs = list(zip(_tensors(ours), _tensors(theirs), strict=True))
    unequal = [(a != b) & ~(a.isnan() & b.isnan()) for a, b in pairs]
    return {
        "values": sum(a.numel() for a, _ in pairs),
        "n_diff": sum(int(part.sum()) for part in unequal),
    }


def _tensors(result: object) -> Sequence[Tensor]:
    return (result,) if isinstance(result, Tensor) else result


def ratios(row: dict[str, object]) -> dict[str, object]:
    """Of times in microseconds: the peer's over ours, the peer SGLang or the ordinary path; torch's apart."""
    found = {}
    for peer, name in (
        ("sglang_us", "ratio"),
        ("ordinary_us", "ratio"),
        ("torch_us", "torch_ratio"),
    ):
        if row.get(peer):
            found[name] = round(row[peer] / row["us"], 2)
    return found


def _guarded(work: Callable[[], dict[str, object]], failure: str = "") -> dict[str, object]:
    """What the work returns, or its error; one that ends the process is not caught."""
    if failure:
        return {"note": f"FAILED: {failure}"}
    try:
        return work()
    except Exception as error:
        return {"note": f"FAILED: {error_line(error)}"}


def error_line(error: BaseException) -> str:
    """Kind and text of an error in one line of the table."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def rows(only: str, table: Path | None) -> Iterator[dict[str, object]]:
    """All rows; beside `table`, where one is written, a second with the kernels of each model.

    At the end SystemExit where a row failed or a bit differed.
    """
    from bench_deterministic_model import MODEL_CASES, model_rows

    if not any(only in op for op in (*OPS, *(f"model {case.name}" for case in MODEL_CASES))):
        sys.exit(f"error: --only {only!r}: no such op; ops: {', '.join(OPS)}, model")
    fixed, num_failed = machine(), 0
    with contextlib.ExitStack() as stack:
        kernels = None
        if table is not None:
            table.parent.mkdir(parents=True, exist_ok=True)
            path = table.with_stem(f"{table.stem}_kernels")
            kernels = csv.DictWriter(
                stack.enter_context(path.open("w", buffering=1)), KERNEL_FIELDS
            )
            kernels.writeheader()
        for found in (operator_rows(only), model_rows(only, kernels)):
            for row in found:
                num_failed += row.get("note", "").startswith("FAILED") or bool(row.get("n_diff"))
                yield fixed | row
    if num_failed:
        sys.exit(f"{num_failed} rows failed or have other bits than SGLang's")
