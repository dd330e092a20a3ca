"""Whether what a linear makes of a row depends on the rows beside it: one target in six other contexts.

The rows are a model's own inputs of its linears, from a BF16 run. The target stands first, with neighbours of
its own sequence behind it; then, with everything else as it was,

    position    in the midst of the same neighbours
    neighbours  before as many rows of another sequence
    padding     before as many rows of zeros
    length      before four times as many rows, of both sequences
    outliers    before the same neighbours, scaled to an amax of 100 times the target's
    alone       by itself

The first keeps the amax over all rows, the last two but one change it for most inputs, "outliers" always.
Says nothing of attention, norms, router or head, nor of how accurate a recipe is.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_nvfp4.recipes import BF16, Format, Policy, Recipe

from .sensitivity import BASELINE, SetRecipe, apply
from .sensitivity_model import Decoder
from .statistics import Quantized

CONTEXTS = ("position", "neighbours", "padding", "length", "outliers", "alone")
OUTLIER = 100.0  # no power of two: those a scale can follow without a change of codes
Quantize = Callable[[Tensor, Format], Quantized]


@dataclass(kw_only=True)
class Change:
    """What one context did to the target, over all linears.

    linears: how many were tested. amax, scale, codes, outputs: in how many the amax of all rows, an outer
    scale of the target, a code or block scale of it, or a bit of its output is another. elements: outputs
    that differ, of num_elements. max_abs, rel_l2: of the outputs' differences, in all linears together.
    """

    context: str
    linears: int = 0
    amax: int = 0
    scale: int = 0
    codes: int = 0
    outputs: int = 0
    elements: int = 0
    num_elements: int = 0
    max_abs: float = 0.0
    error: float = 0.0
    signal: float = 0.0

    @property
    def rel_l2(self) -> float:
        """Norm of the differences over that of the outputs."""
        return math.sqrt(self.error / self.signal) if self.signal else 0.0

    @property
    def is_clean(self) -> bool:
        """Whether no bit of the target is another."""
        return not (self.scale or self.codes or self.outputs)

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        rest = {k: v for k, v in asdict(self).items() if k not in ("error", "signal")}
        return rest | {"rel_l2": self.rel_l2}


def context_swap(
    model: Decoder,
    segments: Sequence[Tensor],
    recipes: Sequence[Recipe],
    set_recipe: SetRecipe,
    quantize: Quantize,
    *,
    num_target: int = 16,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, list[Change]]:
    """For every recipe what each of CONTEXTS changes, over the linears that take it.

    segments: two sequences; the target's rows are num_target from the middle of the first. Experts are
    tested by the first one of each layer, with all rows. quantize: a matrix in a format, with one group of
    rows. ValueError: fewer than two sequences, or too short ones; no linear that takes a recipe.
    """
    inputs = linear_inputs(model, segments, num_target)
    found = {}
    for recipe in recipes:
        taken, kept = apply(model, Policy(recipe=recipe), set_recipe)
        if recipe.quantized and not taken:
            raise ValueError(f"{recipe.name}: no linear takes it; {next(iter(kept.values()))}")
        changes = {context: Change(context=context) for context in CONTEXTS}
        for number, name in enumerate(taken or model.linears):
            _test(model.linears[name], inputs[name], recipe, quantize, num_target, changes)
            if number % 20 == 19:
                progress(f"{recipe.name}: {number + 1} of {len(taken or model.linears)} linears")
        found[recipe.name] = list(changes.values())
    apply(model, Policy(recipe=BASELINE), set_recipe)
    return found


def linear_inputs(
    model: Decoder, segments: Sequence[Tensor], num_target: int
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Target, neighbours and other rows for every linear, by its name."""
    if len(segments) < 2:
        raise ValueError("one sequence of tokens: give a text of two, or a smaller --length")
    shortest = min(len(tokens) for tokens in segments[:2]) - 1
    if not 1 <= num_target <= shortest // 2:
        raise ValueError(
            f"--target-tokens {num_target}: give 1 to {shortest // 2}, half of a sequence of {shortest}"
        )
    rows: dict[str, list[Tensor]] = {name: [] for name in model.linears}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, inputs, name=name: rows[name].append(inputs[0].detach().clone())
        )
        for name, module in model.linears.items()
    ]
    try:
        for tokens in segments[:2]:
            model.scores(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: _parts(*both, num_target) for name, both in rows.items()}


def _parts(first: Tensor, second: Tensor, num_target: int) -> tuple[Tensor, Tensor, Tensor]:
    start = len(first) // 2
    target = first[start : start + num_target]
    neighbours = torch.cat([first[:start], first[start + num_target :]])
    times = -(-len(neighbours) // len(second))
    return target, neighbours, second.repeat(times, 1)[: len(neighbours)]


def in_context(
    context: str, target: Tensor, neighbours: Tensor, others: Tensor
) -> tuple[Tensor, int]:
    """The rows of a context (M, K), and where the target begins in them; "reference" is what they swap."""
    if context == "position":
        half = len(neighbours) // 2 | 1  # odd: no tile of rows begins with the target
        return torch.cat([neighbours[:half], target, neighbours[half:]]), min(half, len(neighbours))
    if context == "outliers":
        amaxes = (rows.abs().amax().float().item() for rows in (target, neighbours))
        amax, theirs = amaxes
        limit = torch.finfo(neighbours.dtype).max
        wanted = min(OUTLIER * (amax or 1.0), limit)
        neighbours = (neighbours.float() * (wanted / (theirs or 1.0))).to(neighbours.dtype)
    behind = {
        "neighbours": [others],
        "padding": [torch.zeros_like(neighbours)],
        "length": [neighbours, others, neighbours, others],
        "alone": [],
    }
    return torch.cat([target, *behind.get(context, [neighbours])]), 0


def _test(
    module: nn.Module,
    rows: tuple[Tensor, Tensor, Tensor],
    recipe: Recipe,
    quantize: Quantize,
    num_target: int,
    changes: Mapping[str, Change],
) -> None:
    """Enter one linear, which has the recipe, into the changes."""
    spec = recipe.fprop.left

    def run(context: str) -> tuple[Tensor, list[Tensor], Tensor | None, Tensor]:
        x, start = in_context(context, *rows)
        here = slice(start, start + num_target)
        codes, scale = [], None
        if spec != BF16:
            codes, scale = _target_parts(quantize(x, spec), here)
        num_experts = getattr(module, "num_gemms", 0)
        splits = ([len(x)] + [0] * (num_experts - 1),) if num_experts else ()
        return x.abs().amax(), codes, scale, module(x, *splits)[here]

    with torch.no_grad():
        amax, codes, scale, y = run("reference")
        for context, change in changes.items():
            its_amax, its_codes, its_scale, its_y = run(context)
            differs = _bits(y) != _bits(its_y)
            change.linears += 1
            change.amax += int(its_amax != amax)
            change.scale += int(scale is not None and not torch.equal(scale, its_scale))
            change.codes += int(not all(map(torch.equal, codes, its_codes)))
            change.outputs += int(differs.any())
            change.elements += int(differs.sum())
            change.num_elements += y.numel()
            lost = its_y.double() - y.double()
            change.max_abs = max(change.max_abs, lost.abs().amax().item())
            change.error += lost.pow(2).sum().item()
            change.signal += y.double().pow(2).sum().item()


def _target_parts(operand: Quantized, here: slice) -> tuple[list[Tensor], Tensor | None]:
    """Bytes of a quantised matrix's codes and block scales in some rows, and their outer scale."""
    parts = (getattr(operand, "codes", None), getattr(operand, "values", None))
    codes = [_bits(part[here]) for part in (*parts, operand.block_scales) if part is not None]
    if hasattr(operand, "row_scale"):
        return codes, operand.row_scale()[here].clone()
    scale = getattr(operand, "outer_scale", None)
    return codes, None if scale is None else scale[here].clone()


def _bits(x: Tensor) -> Tensor:
    """The bytes of every element, so that -0 is not 0."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])
