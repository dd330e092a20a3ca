"""`bench.py moe_ops`: kernels of the expert dataflow beside a copy of as many bytes, and beside torch's way.

4096 tokens of 2048 choose 8 of 128 experts of 768. Both sides run as CUDA graphs in one process over tensors
that no cache holds, but for rows that a kernel itself reads again. Every result is compared with the
definition before it is timed. Bytes: every input once, every output once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from bench import CACHE_BYTES, TOKEN, copy_us, graph_us, machine
from torch import Tensor

from megatron_nvfp4.backends import dispatch as kernels
from megatron_nvfp4.backends import ops
from megatron_nvfp4.quant import QuantizedTensor, dispatch, swiglu

TOKENS, HIDDEN, EXPERTS, TOP_K, FFN = 4096, 2048, 128, 8, 768
ROWS = TOKENS * TOP_K
FIELDS = (
    *("gpu", "torch", "cuda", "driver", "commit", "op", "shape", "bytes", "us", "gb_per_s"),
    *("copy_us", "of_copy", "peer", "peer_us", "ratio", "goal"),
)


@dataclass(frozen=True)
class Case:
    """One kernel or chain. make: fresh operands; ours, peer: what is timed on them.

    The peer's result is not compared. num_bytes: None where no copy is a bound. goal: wanted ratio of the
    peer's time to ours.
    """

    op: str
    shape: str
    num_bytes: int | None
    make: Callable[[], tuple]
    ours: Callable[..., object]
    definition: Callable[..., object] | None = None
    peer_name: str = ""
    peer: Callable[..., object] | None = None
    goal: float | None = None


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def routing() -> dispatch.Routing:
    chosen = torch.rand(TOKENS, EXPERTS, device="cuda").topk(TOP_K).indices
    return kernels.route(chosen, EXPERTS)


def tokens_and_index() -> tuple:
    return normal(TOKENS, HIDDEN), routing().token_of_row


def packed_and_index() -> tuple:
    return ops.quantize_nvfp4(normal(TOKENS, HIDDEN), TOKEN), routing().token_of_row


def rows_and_slots() -> tuple:
    return normal(ROWS, HIDDEN), routing().rows_of_token, torch.rand(TOKENS, TOP_K, device="cuda")


def combine_by_torch(rows: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    return (rows[slots] * weights[..., None]).sum(1).bfloat16()


def backward_operands() -> tuple:
    picked = routing()
    weights = torch.rand(TOKENS, TOP_K, device="cuda")
    rows = normal(ROWS, HIDDEN)
    return normal(TOKENS, HIDDEN), rows, picked.rows_of_token, weights, picked.token_of_row


def combine_backward(*operands):
    return kernels.combine_rows_backward(*operands[:4], token_of_row=operands[4])


def activation_operands() -> tuple:
    return normal(ROWS, 2 * FFN), torch.rand(ROWS, device="cuda"), normal(ROWS, FFN)


def activate_by_torch(h: Tensor, probs: Tensor, grad: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up * probs[:, None]).bfloat16()


def activation_cases() -> Iterator[Case]:
    shape, packed = f"{ROWS}x2x{FFN}", FFN // 2 + FFN // 16 + 4
    for kind in swiglu.KINDS:
        yield Case(
            f"{kind} forward",
            shape,
            ROWS * (6 * FFN + 4),
            activation_operands,
            lambda h, p, g, kind=kind: kernels.weighted_activation(h, p, kind),
            lambda h, p, g, kind=kind: swiglu.weighted_activation(h, p, kind),
            *(("torch, eager", activate_by_torch) if kind == "swiglu" else ()),
        )
        for keep in (False, True):
            yield Case(
                f"{kind} quantised{', kept' if keep else ''}",
                shape,
                ROWS * (4 * FFN + packed + 4 + (2 * FFN if keep else 0)),
                activation_operands,
                lambda h, p, g, kind=kind, keep=keep: kernels.weighted_activation_quantize(
                    h, p, TOKEN, kind, keep
                ),
                lambda h, p, g, kind=kind, keep=keep: swiglu.weighted_activation_quantize(
                    h, p, TOKEN, kind, keep
                ),
            )
        yield Case(
            f"{kind} backward",
            shape,
            ROWS * (10 * FFN + 8),
            activation_operands,
            lambda h, p, g, kind=kind: kernels.weighted_activation_backward(g, h, p, kind),
            lambda h, p, g, kind=kind: swiglu.weighted_activation_backward(g, h, p, kind),
        )


def row_cases() -> Iterator[Case]:
    token, packed = 2 * HIDDEN, HIDDEN // 2 + HIDDEN // 16 + 4
    shape = f"top-{TOP_K} of {TOKENS}x{HIDDEN}"
    yield Case(
        "route",
        f"top-{TOP_K} of {TOKENS}, {EXPERTS} experts",
        None,
        lambda: (torch.rand(TOKENS, EXPERTS, device="cuda").topk(TOP_K).indices,),
        lambda chosen: tuple(vars(kernels.route(chosen, EXPERTS)).values()),
        lambda chosen: tuple(vars(dispatch.route(chosen, EXPERTS)).values()),
        "torch's sort",
        lambda chosen: dispatch.route(chosen, EXPERTS),
    )
    yield Case(
        "gather packed",
        shape,
        (TOKENS + ROWS) * packed + 8 * ROWS,
        packed_and_index,
        kernels.gather_rows,
        dispatch.gather_rows,
    )
    yield Case(
        "gather BF16",
        shape,
        (TOKENS + ROWS) * token + 8 * ROWS,
        tokens_and_index,
        kernels.gather_rows,
        dispatch.gather_rows,
        "index_select",
        lambda x, index: x.index_select(0, index),
    )
    yield Case(
        "gather BF16 with amax",
        shape,
        (TOKENS + ROWS) * token + 12 * ROWS,
        tokens_and_index,
        kernels.gather_rows_amax,
        dispatch.gather_rows_amax,
    )
    yield Case(
        "quantise, gather packed",
        shape,
        TOKENS * (token + packed) + (TOKENS + ROWS) * packed + 8 * ROWS,
        tokens_and_index,
        lambda x, index: kernels.gather_rows(ops.quantize_nvfp4(x, TOKEN), index),
        lambda x, index: ops.quantize_nvfp4(dispatch.gather_rows(x, index), TOKEN),
        "gather BF16, quantise",
        lambda x, index: ops.quantize_nvfp4(kernels.gather_rows(x, index), TOKEN),
        goal=3.8,
    )
    yield Case(
        "combine",
        shape,
        (TOKENS + ROWS) * token + 12 * ROWS,
        rows_and_slots,
        kernels.combine_rows,
        dispatch.combine_rows,
        "torch, eager",
        combine_by_torch,
    )
    yield Case(
        "combine backward",
        shape,
        (TOKENS + 2 * ROWS) * token + 20 * ROWS,
        backward_operands,
        combine_backward,
        lambda *operands: dispatch.combine_rows_backward(*operands[:4]),
    )


def flat(result: object) -> list[Tensor]:
    """The tensors of a result."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, QuantizedTensor):
        return [result.codes, result.block_scales, result.amax]
    return [t for part in result for t in flat(part)] if isinstance(result, tuple) else []


def measure(case: Case) -> dict[str, object]:
    operands = case.make()
    for ours, theirs in zip(
        flat(case.ours(*operands)), flat(case.definition(*operands)), strict=True
    ):
        if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
            raise RuntimeError(f"{case.op}: bytes differ from the definition; not timed")
    num = max(2, CACHE_BYTES // (case.num_bytes or CACHE_BYTES) + 1)
    sets = [case.make() for _ in range(num)]
    kept = []  # outputs, so that no call writes where the cache still holds another's
    us = graph_us([lambda s=s: kept.append(case.ours(*s)) for s in sets])
    row = {"op": case.op, "shape": case.shape, "us": round(us, 2)}
    if case.num_bytes:
        ceiling = copy_us(case.num_bytes)
        row |= {
            "bytes": case.num_bytes,
            "gb_per_s": round(case.num_bytes / us / 1e3),
            "copy_us": round(ceiling, 2),
            "of_copy": round(ceiling / us, 3),
        }
    if case.peer:
        kept.clear()
        peer_us = graph_us([lambda s=s: kept.append(case.peer(*s)) for s in sets])
        row |= {"peer": case.peer_name, "peer_us": round(peer_us, 2)}
        row |= {"ratio": round(peer_us / us, 2), "goal": case.goal or ""}
    return row


def rows(only: str) -> Iterator[dict[str, object]]:
    """A row for every case whose op contains `only`."""
    fixed = machine()
    for case in (*row_cases(), *activation_cases()):
        if only in case.op:
            torch.cuda.empty_cache()
            yield fixed | measure(case)
