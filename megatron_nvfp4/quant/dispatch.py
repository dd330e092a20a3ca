"""Rows of experts, the definition: where tokens go, rows gathered, combined, and the gradients of both.

Rows of an expert lie together, ordered by token, then by slot (a token's k-th choice); a group may be padded
by rows of no token, index -1. Sums over slots and over a row have one order, below, which does not depend on
the device, on other rows or on the number of rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .nvfp4 import QuantizedTensor, row_amax

LANES, RUN = 32, 8
INDEX_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Routing:
    """Rows of the experts and tokens, each from the other; int64, -1 where there is none.

    token_of_row, slot_of_row: (M,), M = num_rows(T * top_k, E, multiple); rows from offsets[E] on are -1.
    rows_of_token: (T, top_k).
    offsets: (E+1,) first row of every expert, padding included.
    """

    token_of_row: Tensor
    slot_of_row: Tensor
    rows_of_token: Tensor
    offsets: Tensor


def num_rows(num_choices: int, num_experts: int, multiple: int) -> int:
    """Rows that hold any routing of T * top_k choices, every group padded: known without looking."""
    return -(-(num_choices + num_experts * (multiple - 1)) // multiple) * multiple


def route(
    chosen: Tensor, num_experts: int, multiple: int = 1, *, top_k: int | None = None
) -> Routing:
    """Rows sorted by expert, then token, then slot; every group padded to whole `multiple`s of rows.

    chosen: experts of every token, int64 or int32 (T, top_k), -1 for a choice that was dropped; or a routing
        map, bool (T, E), whose slots are a token's experts in ascending order: `top_k` bounds them, and
        experts beyond it are dropped.
    Waits for no GPU; experts are not looked at. Raises ValueError for other shapes or dtypes.
    """
    chosen = check_chosen(chosen, num_experts, multiple, top_k)
    if chosen.dtype == torch.bool:
        chosen = _experts_of_map(chosen, top_k)
    device, slots = chosen.device, chosen.shape[1]
    size = num_rows(chosen.numel(), num_experts, multiple)
    expert = torch.where(chosen < 0, num_experts, chosen).long().flatten()
    expert, choice = torch.sort(expert, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts = counts.scatter_add(0, expert, torch.ones_like(expert))
    padded = (counts[:-1] + multiple - 1) // multiple * multiple
    offsets = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    before = counts.cumsum(0) - counts
    rank = torch.arange(expert.numel(), device=device) - before[expert]
    row = torch.where(expert < num_experts, offsets[expert] + rank, size)
    slot_of = torch.full((size + 1,), -1, dtype=torch.int64, device=device)
    choice_of_row = slot_of.scatter(0, row, choice)[:size]
    rows = torch.empty_like(choice).scatter(0, choice, torch.where(row < size, row, -1))
    is_token = choice_of_row >= 0
    return Routing(
        torch.where(is_token, choice_of_row // max(slots, 1), -1),
        torch.where(is_token, choice_of_row % max(slots, 1), -1),
        rows.reshape(chosen.shape),
        offsets,
    )


def _experts_of_map(routing_map: Tensor, top_k: int) -> Tensor:
    num_experts = routing_map.shape[1]
    expert = torch.arange(num_experts, device=routing_map.device)
    expert = torch.where(routing_map, expert, num_experts).sort(dim=1).values[:, :top_k]
    chosen = torch.where(expert < num_experts, expert, -1)
    return torch.nn.functional.pad(chosen, (0, top_k - chosen.shape[1]), value=-1)


def check_chosen(chosen: Tensor, num_experts: int, multiple: int, top_k: int | None) -> Tensor:
    """`chosen`, if `route` takes these arguments; else ValueError."""
    is_map = chosen.dtype == torch.bool
    if chosen.dim() != 2 or not (is_map or chosen.dtype in INDEX_DTYPES):
        raise ValueError(
            f"route: chosen is {chosen.dtype} {tuple(chosen.shape)}; "
            "give int64 or int32 experts (T, top_k), or a bool map (T, E)"
        )
    if is_map and (chosen.shape[1] != num_experts or top_k is None or top_k < 1):
        raise ValueError(
            f"route: a map {tuple(chosen.shape)} of {num_experts} experts with top_k={top_k}; "
            "give (T, E) and top_k, the most experts that a token has"
        )
    if not is_map and top_k not in (None, chosen.shape[1]):
        raise ValueError(f"route: top_k={top_k} of experts {tuple(chosen.shape)}; leave top_k out")
    if num_experts < 1 or multiple < 1:
        raise ValueError(f"route: {num_experts} experts, multiple={multiple}; give both from 1 on")
    return chosen


def gather_rows(x: Tensor | QuantizedTensor, index: Tensor) -> Tensor | QuantizedTensor:
    """Row m of the result is row index[m] of x; index -1 gives zeros (of NVFP4: codes, scales and amax 0).

    x: (T, K), or quantised per token. index: int64 or int32 (M,). Its gradient in x is
    combine_rows(grad, rows_of_token, None).
    """
    check_index("gather_rows", index)
    if isinstance(x, QuantizedTensor):
        check_per_token(x)
        scales = _gather(x.block_scales.view(torch.uint8), index).view(x.block_scales.dtype)
        return QuantizedTensor(_gather(x.codes, index), scales, _gather(x.amax, index), x.spec)
    check_rows("gather_rows", "x", x)
    return _gather(x, index)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    out = x.new_zeros(index.shape[0], *x.shape[1:])
    if x.shape[0] == 0:
        return out
    rows = x[index.clamp_min(0)]
    return torch.where((index >= 0).view(-1, *(1,) * (x.dim() - 1)), rows, out)


def gather_rows_amax(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """(gather_rows(x, index), max |.| of every row of it): FP32 (M,), NaN not taking part, as row_amax."""
    rows = gather_rows(x, index)
    return rows, row_amax(rows)


def combine_rows(rows: Tensor, rows_of_token: Tensor, weights: Tensor | None = None) -> Tensor:
    """out[t] = sum over slots k of weights[t, k] * rows[rows_of_token[t, k]], rounded once to rows' dtype.

    rows: (M, K). rows_of_token: int64 (T, top_k), -1 where a choice was dropped. weights: FP32 (T, top_k), or
    None for 1. FP32 throughout: the product is rounded, then added, slots ascending from +0.
    """
    check_rows("combine_rows", "rows", rows)
    check_slots("combine_rows", rows_of_token, weights)
    num_tokens, top_k = rows_of_token.shape
    total = torch.zeros(num_tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
    for slot in range(top_k if rows.shape[0] else 0):
        index = rows_of_token[:, slot]
        term = rows[index.clamp_min(0)].float()
        if weights is not None:
            term = term * weights[:, slot, None]
        total = torch.where((index >= 0)[:, None], total + term, total)
    return total.to(rows.dtype)


def combine_rows_backward(
    grad: Tensor,
    rows: Tensor,
    rows_of_token: Tensor,
    weights: Tensor,
    *,
    token_of_row: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of combine_rows: (M, K) in rows' dtype and FP32 (T, top_k).

    grad_rows = weights * grad, rounded once; rows of no token get zeros. grad_weights = ordered_sum(grad *
    rows); dropped choices get 0. grad: (T, K) in rows' dtype. No row belongs to two choices.
    token_of_row: Routing's, if at hand; kernels then need not derive it.
    """
    check_rows("combine_rows_backward", "rows", rows)
    check_grad("combine_rows_backward", grad, (rows_of_token.shape[0], rows.shape[1]), rows.dtype)
    check_slots("combine_rows_backward", rows_of_token, weights)
    grad_rows = torch.zeros(rows.shape[0] + 1, rows.shape[1], dtype=rows.dtype, device=rows.device)
    grad_weights = torch.zeros_like(weights)
    for slot in range(rows_of_token.shape[1] if rows.shape[0] else 0):
        index = rows_of_token[:, slot]
        target = torch.where(index >= 0, index, rows.shape[0])
        grad_rows[target] = (grad.float() * weights[:, slot, None]).to(rows.dtype)
        dot = ordered_sum(grad.float() * rows[index.clamp_min(0)].float())
        grad_weights[:, slot] = torch.where(index >= 0, dot, 0.0)
    return grad_rows[:-1], grad_weights


def rows_to_tokens(rows_of_token: Tensor, num_rows: int) -> Tensor:
    """token_of_row (M,) of rows_of_token (T, top_k): int64, -1 for a row of no token."""
    num_tokens, top_k = rows_of_token.shape
    token = torch.arange(num_tokens, device=rows_of_token.device).repeat_interleave(top_k)
    target = torch.where(rows_of_token >= 0, rows_of_token, num_rows).flatten()
    empty = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=rows_of_token.device)
    return empty.scatter(0, target, token)[:num_rows]


def ordered_sum(terms: Tensor) -> Tensor:
    """Sum of every row of FP32 terms (M, K) in the order of a warp: FP32 (M,).

    Element j belongs to lane j / 8 % 32. A lane adds its elements upwards, starting at 0; then lanes are
    added as a tree with strides 16, 8, 4, 2, 1.
    """
    num_rows, num_cols = terms.shape
    steps = -(-num_cols // (LANES * RUN))
    padded = torch.nn.functional.pad(terms, (0, steps * LANES * RUN - num_cols))
    runs = padded.reshape(num_rows, steps, LANES, RUN)
    lanes = torch.zeros(num_rows, LANES, dtype=torch.float32, device=terms.device)
    for step in range(steps):
        for place in range(RUN):
            lanes = lanes + runs[:, step, :, place]
    stride = LANES // 2
    while stride:
        lanes = lanes[:, :stride] + lanes[:, stride : 2 * stride]
        stride //= 2
    return lanes[:, 0]


def check_index(op: str, index: Tensor) -> None:
    """ValueError unless index is int64 or int32 (M,)."""
    if index.dim() != 1 or index.dtype not in INDEX_DTYPES:
        raise ValueError(
            f"{op}: index is {index.dtype} {tuple(index.shape)}; give int64 or int32 (M,)"
        )


def check_per_token(x: QuantizedTensor) -> None:
    """ValueError unless every row of x has its own outer scale, and so can move alone."""
    if x.spec.outer != "token":
        raise ValueError(f"gather_rows: {x.spec}; quantise with outer='token', or gather before")


def check_rows(op: str, name: str, x: Tensor) -> None:
    """ValueError unless x is a matrix of BF16, FP16 or FP32 with a multiple of 8 columns."""
    if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"{op}: {name} is {x.dtype} {tuple(x.shape)}; give BF16, FP16 or FP32 (M, K)"
        )
    if x.shape[1] % RUN:
        raise ValueError(f"{op}: K={x.shape[1]} of {name} is not a multiple of 8; pad the columns")


def check_grad(op: str, grad: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """ValueError unless grad has this shape and dtype."""
    if grad.shape != shape or grad.dtype != dtype:
        raise ValueError(
            f"{op}: grad is {grad.dtype} {tuple(grad.shape)}; give {dtype} {tuple(shape)}"
        )


def check_slots(op: str, rows_of_token: Tensor, weights: Tensor | None) -> None:
    """ValueError unless rows_of_token is int64 (T, top_k), and weights FP32 of its shape or None."""
    if rows_of_token.dim() != 2 or rows_of_token.dtype != torch.int64:
        raise ValueError(
            f"{op}: rows_of_token is {rows_of_token.dtype} {tuple(rows_of_token.shape)}; "
            "give int64 (T, top_k)"
        )
    if weights is not None and (
        weights.shape != rows_of_token.shape or weights.dtype != torch.float32
    ):
        raise ValueError(
            f"{op}: weights are {weights.dtype} {tuple(weights.shape)}; "
            f"give float32 {tuple(rows_of_token.shape)}"
        )
