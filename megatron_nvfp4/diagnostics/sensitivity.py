"""What each recipe costs a model: the loss of a text, and the error of every linear.

A row is one recipe in a set of linears, all others in BF16. Rows are measured one by one, so that what is
measured can be kept; sensitivity_report.py makes tables of them.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from megatron_nvfp4.recipes import BF16, RECIPES, LayerRule, Policy, Recipe, get_recipe
from megatron_nvfp4.recipes.policy import layer_number_of

from .capture_record import replay_operand
from .sensitivity_model import Decoder
from .statistics import decode, error_statistics

BASELINE = RECIPES["bf16"]
# One of each forward that differs, from the mildest.
DEFAULT_RECIPES = (
    "nvfp4_w4a16",
    "nvfp4_w4a8",
    "nvfp4_per_token_4over6",
    "nvfp4_per_token",
    "nvfp4_per_tensor",
    "nvfp4_pretrain",
)
# Gives a linear the numerics of a recipe; ValueError for a shape that the recipe cannot take.
SetRecipe = Callable[[nn.Module, Recipe], None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a sweep.

    mode: "all" linears take the recipe, "only" those of `unit`, or all "without" those of `unit`.
    unit: a kind (`linear_fc2`), a layer (`layer 3`, from 1 as in a policy) or a linear's whole name.
    """

    recipe: str
    mode: str = "all"
    unit: str = ""

    @property
    def label(self) -> str:
        """What it is called in tables."""
        return self.recipe if self.mode == "all" else f"{self.recipe} {self.mode} {self.unit}"

    @property
    def file_name(self) -> str:
        """A file name that no other row has."""
        return re.sub(r"[^\w.]", "-", self.label) + ".json"

    def policy(self, exclude: Sequence[str]) -> Policy:
        """The row's recipes; layers that match a pattern of `exclude` are in BF16 whatever it says."""
        recipe = get_recipe(self.recipe)
        rules = [LayerRule(recipe=BASELINE, match=pattern) for pattern in exclude]
        if self.mode == "all":
            return Policy(recipe=recipe, rules=tuple(rules))
        inside, outside = (recipe, BASELINE) if self.mode == "only" else (BASELINE, recipe)
        if self.unit.startswith("layer "):
            numbers = (int(self.unit.removeprefix("layer ")),)
            rules.append(LayerRule(recipe=inside, layer_numbers=numbers))
        else:
            match = self.unit if "." in self.unit else f"**.{self.unit}"
            rules.append(LayerRule(recipe=inside, match=match))
        return Policy(recipe=outside, rules=tuple(rules))


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a row came to. logprobs, top: of every sequence its tokens'; see sensitivity_model.Scores.

    kept: linears that the recipe cannot take, which stayed in BF16, with the reason.
    """

    row: Row
    logprobs: list[list[float]]
    top: list[list[int]]
    num_quantized: int
    kept: dict[str, str] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "Measurement":
        """The inverse of as_data. KeyError or TypeError for anything else."""
        return cls(**{**data, "row": Row(**data["row"])})

    @property
    def losses(self) -> list[float]:
        """Mean negative log-likelihood of each sequence, in nats a token."""
        return [-sum(values) / len(values) for values in self.logprobs]

    @property
    def nll(self) -> float:
        """Mean over all tokens, in nats."""
        count = sum(map(len, self.logprobs))
        return -math.fsum(value for values in self.logprobs for value in values) / count


def choose_recipes(patterns: Sequence[str]) -> list[str]:
    """Names of the recipes that names, aliases or patterns (`sweep_e2*`) say, each once, without bf16.

    ValueError for a pattern that no recipe matches, and for a name that is none.
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        if any(sign in pattern for sign in "*?["):
            names = [name for name in RECIPES if fnmatchcase(name, pattern)]
            if not names:
                raise ValueError(
                    f"--recipes {pattern}: no recipe matches (list them: python -m megatron_nvfp4 recipes)"
                )
        else:
            names = [get_recipe(pattern).name]
        found |= dict.fromkeys(names)
    found.pop(BASELINE.name, None)
    return list(found)


def plan(
    recipes: Sequence[str],
    names: Sequence[str],
    *,
    exclude: Sequence[str] = (),
    one_at_a_time: str | None = None,
    all_but_one: str | None = None,
) -> list[Row]:
    """The rows of a sweep over linears `names`, BF16 first.

    one_at_a_time, all_but_one: see units_of, or None; each adds a row for every recipe and unit.
    ValueError for a pattern of `exclude` that no linear matches.
    """
    for pattern in exclude:
        rule = LayerRule(recipe=BASELINE, match=pattern)
        if not any(rule.applies(name, layer_number_of(name)) for name in names):
            near = get_close_matches(pattern, names, n=1, cutoff=0.3) or names[:1]
            raise ValueError(
                f"--exclude {pattern}: no linear matches; a name has to match whole, with * for a part and "
                f"** for any number of them; there is {near[0]}"
            )
    rows = [Row(recipe=BASELINE.name), *(Row(recipe=recipe) for recipe in recipes)]
    for mode, kind in (("only", one_at_a_time), ("without", all_but_one)):
        for unit in units_of(names, kind) if kind else ():
            rows += [Row(recipe=recipe, mode=mode, unit=unit) for recipe in recipes]
    return rows


def units_of(names: Sequence[str], kind: str) -> list[str]:
    """The units that linears `names` fall into, each once, in order; kind: "kind", "layer" or "module"."""
    if kind == "module":
        return list(names)
    if kind == "layer":
        return list(dict.fromkeys(f"layer {layer_number_of(name)}" for name in names))
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def apply(
    model: Decoder, policy: Policy, set_recipe: SetRecipe
) -> tuple[dict[str, Recipe], dict[str, str]]:
    """Give every linear its recipe: those that took a quantised one, and why others could not."""
    taken, kept = {}, {}
    for name, module in model.linears.items():
        recipe = policy.recipe_for(name, model.shape.num_layers)
        try:
            set_recipe(module, recipe)
        except ValueError as error:
            kept[name] = str(error)
            set_recipe(module, BASELINE)
            continue
        if recipe.quantized:
            taken[name] = recipe
    return taken, kept


def measure(
    model: Decoder,
    row: Row,
    segments: Sequence[Tensor],
    set_recipe: SetRecipe,
    exclude: Sequence[str] = (),
) -> Measurement:
    """Run the text under a row. ValueError where no linear at all could take the recipe."""
    taken, kept = apply(model, row.policy(exclude), set_recipe)
    if row.recipe != BASELINE.name and not taken:
        reason = next(iter(kept.values()), "--exclude leaves none")
        raise ValueError(f"{row.label}: no linear takes the recipe; {reason}")
    scores = [model.scores(tokens) for tokens in segments]
    return Measurement(
        row=row,
        logprobs=[each.logprobs.tolist() for each in scores],
        top=[each.top.tolist() for each in scores],
        num_quantized=len(taken),
        kept=kept,
    )


# --- errors ---------------------------------------------------------------------------------------


@dataclass
class ErrorSums:
    """Sums over matrices, from which statistics.ERRORS of all of them together follow."""

    error: float = 0.0
    signal: float = 0.0
    absolute: float = 0.0
    count: int = 0

    def add(self, x: Tensor, other: Tensor) -> None:
        """Enter x (M, K) and what became of it."""
        rel_l2, _, mae = error_statistics(x, other.float()).tolist()
        norm = vector_norm(x, dtype=torch.float64).item()
        self.error += (rel_l2 * norm) ** 2
        self.signal += norm**2
        self.absolute += mae * x.numel()
        self.count += x.numel()

    def figures(self) -> dict[str, float | None]:
        """rel_l2, snr_db and mae; None for no number."""
        rel_l2 = math.sqrt(self.error / self.signal) if self.signal else None
        snr_db = -20 * math.log10(rel_l2) if rel_l2 else None
        return {"rel_l2": rel_l2, "snr_db": snr_db, "mae": self.absolute / max(self.count, 1)}


def layer_errors(
    model: Decoder,
    recipe: str,
    segments: Sequence[Tensor],
    set_recipe: SetRecipe,
    exclude: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Errors of every linear under a recipe, on the inputs that it has in the BF16 model.

    One line for each linear and each of weight, activation and output that is quantised, the output against
    the BF16 linear's on the same input: module, what, rel_l2, snr_db, mae, over all sequences.
    """
    policy = Row(recipe=recipe).policy(exclude)
    recipes, _ = apply(model, policy, set_recipe)
    apply(model, Policy(recipe=BASELINE), set_recipe)
    sums: dict[tuple[str, str], ErrorSums] = {}
    hooks = [
        model.linears[name].register_forward_hook(_observer(name, each, set_recipe, sums))
        for name, each in recipes.items()
    ]
    try:
        for tokens in segments:
            model.scores(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    for name, each in recipes.items():
        if each.fprop.right != BF16:
            found = ErrorSums()
            for weight in _weights(model.linears[name]):
                found.add(weight, decode(replay_operand(weight, each.fprop.right)))
            sums[name, "weight"] = found
    order = ("weight", "activation", "output")
    return [
        {"module": name, "what": what, **sums[name, what].figures()}
        for name in recipes
        for what in order
        if (name, what) in sums
    ]


def _observer(name: str, recipe: Recipe, set_recipe: SetRecipe, sums: dict):
    def observe(module: nn.Module, inputs: tuple, output: Tensor) -> None:
        x, spec = inputs[0], recipe.fprop.left
        if spec != BF16:
            # Experts have an amax each, rows of one follow each other.
            parts = x.split(inputs[1]) if len(inputs) > 1 else (x,)
            for part in parts:
                if len(part):
                    operand = replay_operand(part, spec)
                    sums.setdefault((name, "activation"), ErrorSums()).add(part, decode(operand))
        set_recipe(module, recipe)
        other = module.forward(*inputs)
        set_recipe(module, BASELINE)
        sums.setdefault((name, "output"), ErrorSums()).add(output, other)

    return observe


def _weights(module: nn.Module) -> list[Tensor]:
    """Matrices of a linear; of experts, one each."""
    return [
        value.detach() for name, value in module.named_parameters() if name.startswith("weight")
    ]
