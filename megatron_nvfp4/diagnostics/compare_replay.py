"""Runs captured inputs through captured weights again, to tell an operator from what it was given.

For every linear whose input, weight and output both sides hold, three products are made offline and compared,
bit for bit, with what the side that gave the input computed:
    left     left's input through left's weight, with left's output
    right    right's input through right's weight, with right's output
    common   left's input through right's weight, with left's output
`left` or `right` differing says that this machine's product is not the one that ran there (another kernel,
or a fault in it); `common` differing where these agree says that the weights or formats do. With none of them
differing, the operator only passes on what differs in its input. This is agreement in replay, not of what
ran.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_nvfp4.quant.nvfp4 import QuantizedTensor, quantize
from megatron_nvfp4.recipes import BF16, RECIPES, Format, NVFP4Spec

from .compare import Comparison
from .compare_sides import Key, Piece, Side, rows_of
from .compare_values import Numbers, ValueDifference, compare_values

Operand = QuantizedTensor | Tensor
# (input (M, K), weights of G experts (G*N, K), offsets (G+1,), their formats, dtype of the result)
Product = Callable[[Operand, Operand, Tensor, tuple[Format, Format], torch.dtype], Tensor]
FORMATS = {
    str(spec): spec
    for recipe in RECIPES.values()
    for spec in (recipe.fprop.left, recipe.fprop.right)
    if isinstance(spec, NVFP4Spec)
}
VIEWS = ("left", "right", "common")


@dataclass(frozen=True)
class Replay:
    """One linear. differences: by view, None where the bits agree; verdict: what they say together."""

    module: str
    num_rows: int
    differences: dict[str, ValueDifference | None]
    verdict: str
    provenance: str = "replay"


def replay(comparison: Comparison, product: Product) -> tuple[list[Replay], dict[str, str]]:
    """Of every quantised linear that both sides hold in full; and, by module, why another could not be."""
    done, reasons = [], {}
    sides = (comparison.left, comparison.right)
    modules = {key.module: None for key in comparison.left.quantities if key.what == "output"}
    for module in modules:
        # Of products that other code computes (a head's, a router's) the order of sums is not known here.
        if not any(_weight_names(side, module, ".codes") for side in sides):
            continue
        try:
            linears = [_Linear(side, module) for side in sides]
            _require_alike(*linears)
        except ValueError as error:
            reasons[module] = str(error)
            continue
        pairs = {"left": (0, 0), "right": (1, 1), "common": (0, 1)}
        differences = {
            view: linears[of_input].difference(linears[of_weight], product)
            for view, (of_input, of_weight) in pairs.items()
        }
        verdict = _verdict(differences, *linears)
        done.append(Replay(module, linears[0].num_rows, differences, verdict))
    return done, reasons


def _verdict(
    differences: dict[str, ValueDifference | None], left: "_Linear", right: "_Linear"
) -> str:
    odd = [view for view in ("left", "right") if differences[view] is not None]
    if odd:
        return f"the {' and the '.join(odd)} side's product is not the one computed here"
    common = differences["common"]
    if common is None:
        return "passes on its input"
    size = f"relative L2 {common.rel_l2:.3g} on a common input"
    formats = [(side.input_format, side.weight_format) for side in (left, right)]
    return f"the {'weights' if formats[0] == formats[1] else 'formats'} differ: {size}"


def _require_alike(left: "_Linear", right: "_Linear") -> None:
    """ValueError where the left's input does not go through the right's weight."""
    if left.input_format != right.input_format and left.raw is None:
        raise ValueError(
            f"the sides read {left.input_format} and {right.input_format}, and the input before "
            "quantisation was not captured"
        )
    shapes = [tuple(side.weight.shape) for side in (left, right)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the weights are {shapes[0]} and {shapes[1]}")


class _Linear:
    """One side's operands and output of a linear, rows of an expert together."""

    def __init__(self, side: Side, module: str) -> None:
        """ValueError with the reason for what cannot be replayed."""
        self.module = module
        if any(
            key.part and key.module == module and not key.what.endswith(".grad")
            for key in side.quantities
        ):
            raise ValueError("its tensors are shards, or are not known by token")
        if Key(module, "bias") in side.quantities:
            raise ValueError("it adds a bias")
        self.output = self._pieces(side, "output")
        output = rows_of(self.output)
        self.dtype, self.num_rows = output.dtype, len(output)
        experts = [piece.expert for piece in self.output]
        expert = torch.cat([each() for each in experts]) if experts[0] else None
        self.order = torch.arange(len(output)) if expert is None else expert.argsort(stable=True)
        self.y = output[self.order]
        self.weight, self.weight_format, self.num_groups = self._weight(side)
        self.raw = self._raw(side)
        self.x, self.input_format = self._input(side)
        counts = torch.tensor([len(output)])
        if expert is not None:
            counts = torch.bincount(expert, minlength=self.num_groups)
        self.offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))

    def difference(self, other: "_Linear", product: Product) -> ValueDifference | None:
        """Of this side's output from its input through the other's weight."""
        x, spec = self.x, other.input_format
        if self.input_format != spec:
            x = self.raw if spec == BF16 else quantize(self.raw, spec)
        formats = (spec, other.weight_format)
        y = product(x, other.weight, self.offsets, formats, self.dtype)
        return compare_values(Numbers.of("output", self.y), Numbers.of("output", y))

    def _pieces(self, side: Side, what: str) -> list[Piece]:
        pieces = side.quantities.get(Key(self.module, what))
        if not pieces:
            raise ValueError(f"{what} was not captured with tensors: true")
        return pieces

    def _raw(self, side: Side) -> Tensor | None:
        """The input before quantisation; behind a norm of the linear's own it was not seen."""
        is_seen = Key(self.module, "input") in side.quantities
        if not is_seen or Key(self.module, "layer_norm_weight") in side.quantities:
            return None
        return rows_of(self._pieces(side, "input"))[self.order]

    def _input(self, side: Side) -> tuple[Operand, Format]:
        if Key(self.module, "input.codes") not in side.quantities:
            if self.weight_format != BF16 or self.raw is None:
                raise ValueError("what its product reads was not captured")
            return self.raw, BF16
        pieces = self._pieces(side, "input.codes")
        spec = _format(pieces[0])
        if spec.outer != "token":
            raise ValueError(
                f"{spec}: a scale of all rows is not one of the rows that were captured"
            )
        parts = [
            rows_of(self._pieces(side, f"input.{part}"))[self.order]
            for part in ("codes", "block_scales", "amax")
        ]
        return QuantizedTensor(parts[0], parts[1], parts[2].flatten(), spec), spec

    def _weight(self, side: Side) -> tuple[Operand, Format, int]:
        names = _weight_names(side, self.module, ".codes")
        if not names:
            names = _weight_names(side, self.module, "")
            weights = [self._pieces(side, name)[0].load() for name in names]
            return torch.cat(weights), BF16, len(weights)
        codes, scales, amax = (
            torch.cat([self._pieces(side, f"{name}.{part}")[0].load() for name in names])
            for part in ("codes", "block_scales", "amax")
        )
        spec, num = _format(self._pieces(side, f"{names[0]}.codes")[0]), len(names)
        if spec.outer != "tensor":
            raise ValueError(f"weights of {spec}")
        offsets = torch.arange(num + 1) * (len(scales) // num)
        return QuantizedTensor(codes, scales, amax, spec, offsets), spec, num


def _weight_names(side: Side, module: str, suffix: str) -> list[str]:
    """`weight`, or the experts' weight0, ... in order, of those that have something with this suffix."""
    whats = {key.what.removesuffix(suffix) for key in side.quantities
             if key.module == module and key.what.endswith(suffix)}  # fmt: skip
    numbers = [what.removeprefix("weight") for what in whats if what.startswith("weight")]
    experts = sorted(int(number) for number in numbers if number.isdigit())
    return [f"weight{number}" for number in experts] or (["weight"] if "weight" in whats else [])


def _format(piece: Piece) -> NVFP4Spec:
    if piece.format not in FORMATS:
        raise ValueError(f"no product of {piece.format or 'unknown codes'} is replayed")
    return FORMATS[piece.format]
