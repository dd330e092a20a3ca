"""What one captured step gathers: vectors of statistics on the device, and copies of tensors."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_nvfp4.quant import (
    QuantizedTensor,
    quantize,
    quantize_grouped,
    quantize_mxfp8,
    quantize_simulated,
)
from megatron_nvfp4.recipes import MXFP8, FloatSpec, Format, NVFP4Spec

from .dump import DumpWriter
from .statistics import (
    CODES,
    ERRORS,
    VALUES,
    Quantized,
    code_statistics,
    decode,
    error_statistics,
    value_statistics,
)

COUNTS = {*CODES, "num_values", "num_zeros", "nonfinite_rows"}
ROUTING = ("experts_without_rows", "most_rows", "num_choices")


@dataclass(frozen=True)
class Place:
    """Where a tensor belongs: its module, the microbatch, whether it is dumped, the table of its rows, and
    whether it is of a parameter."""

    module: str
    instance: int
    dump: bool
    rows: str | None = None
    parameter: bool = False


@dataclass
class StepRecord:
    """Gathers one step. `flush` hands out lines of statistics, after one wait for the device."""

    step: int
    rank: int
    writer: DumpWriter
    is_open: bool = True
    _lines: list[tuple[dict[str, Any], tuple[str, ...], Tensor]] = field(default_factory=list)
    _order: int = 0

    def tensor(self, place: Place, what: str, x: Tensor, provenance: str) -> None:
        """Statistics of a floating-point tensor, and a copy where it is dumped."""
        if not self.is_open:
            return
        self._line(place, what, x, provenance, VALUES, value_statistics(x))
        self._copy(place, what, x, provenance)

    def operand(
        self, place: Place, what: str, x: Tensor, operand: Quantized, provenance: str
    ) -> None:
        """Statistics of what quantisation did to x (M, K), and its parts where they are dumped."""
        if self.is_open:
            self.errors(place, what, x, operand, provenance)
            self.parts(place, what, operand, provenance)

    def errors(
        self, place: Place, what: str, x: Tensor, operand: Quantized, provenance: str
    ) -> None:
        """The statistics alone."""
        decoded = decode(operand)
        names, vector = ERRORS, error_statistics(x, decoded)
        if isinstance(operand, QuantizedTensor):
            of_codes = code_statistics(x, operand, decoded)
            names, vector = ERRORS + CODES, torch.cat((vector, of_codes))
        self._line(place, f"{what}.operand", x, provenance, names, vector)

    def parts(self, place: Place, what: str, operand: Quantized, provenance: str) -> None:
        """The parts alone; a scale of all rows has no table of rows."""
        for part in ("codes", "values", "block_scales", "amax"):
            tensor = getattr(operand, part, None)
            if tensor is not None:
                rows = place.rows if tensor.shape[0] == operand.shape[0] else None
                of_part = replace(place, rows=rows)
                spec = str(getattr(operand, "spec", MXFP8))
                self._copy(of_part, f"{what}.{part}", tensor, provenance, spec)

    def routing(self, place: Place, ids: Tensor, weights: Tensor, slots: Tensor, num: int) -> None:
        """Experts of every token (T, top_k), -1 for none; their weights; their rows in expert order."""
        if not self.is_open:
            return
        counts = torch.zeros(num + 1, dtype=torch.int64, device=ids.device)
        expert = torch.where(ids < 0, num, ids).flatten()
        counts = counts.scatter_add(0, expert, torch.ones_like(expert))[:-1]
        vector = torch.stack(((counts == 0).sum(), counts.amax(), counts.sum())).double()
        self._line(place, "routing", ids, "hook", ROUTING, vector)
        self._copy(place, "routing.ids", ids, "hook")
        self._copy(place, "routing.weights", weights, "hook")
        self._copy(place, "routing.slots", slots, "replay")

    def note(self, text: str) -> None:
        """Say in the dump why something is missing; once."""
        if text not in self.writer.notes:
            self.writer.notes.append(text)

    def flush(self) -> list[dict[str, Any]]:
        """Statistics as plain data, a line for each tensor; null for what is no number."""
        if not self._lines:
            return []
        values = torch.cat([vector for _, _, vector in self._lines]).tolist()
        lines, start = [], 0
        for line, names, vector in self._lines:
            part = values[start : start + vector.numel()]
            start += vector.numel()
            lines.append(line | dict(zip(names, map(_plain, names, part), strict=True)))
        self._lines.clear()
        return lines

    def _line(self, place: Place, what, x, provenance, names, vector: Tensor) -> None:
        line = {"step": self.step, "rank": self.rank, "module": place.module, "what": what}
        line |= {"instance": place.instance, "provenance": provenance}
        line |= {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}
        self._lines.append((line, names, vector))

    def _copy(self, place: Place, what, tensor, provenance: str, format: str = "") -> None:
        self._order += 1
        if place.dump:
            self.writer.add(
                place.module,
                what,
                tensor,
                instance=place.instance,
                order=self._order,
                provenance=provenance,
                parameter=place.parameter,
                rows=place.rows,
                format=format,
            )


def _plain(name: str, value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if name in COUNTS or name in ROUTING else value


def json_lines(lines: list[dict[str, Any]]) -> bytes:
    """The lines of a .jsonl file."""
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """TensorBoard's tags of a line, capture/MODULE/WHAT/STATISTIC, and their values."""
    stem = f"capture/{line['module']}/{line['what']}"
    names = (*VALUES, *ERRORS, *CODES, *ROUTING)
    return {f"{stem}/{name}": line[name] for name in names if line.get(name) is not None}


def replay_operand(
    x: Tensor, spec: Format, offsets_of: Callable[[], Tensor] | None = None
) -> Quantized | None:
    """x (M, K) in `spec`, as every backend gives it; None for BF16, and where rounding is stochastic.

    offsets_of: gives the boundaries of row groups, which have an amax each.
    """
    if spec == MXFP8:
        return quantize_mxfp8(x)
    if isinstance(spec, FloatSpec):
        return quantize_simulated(x, spec)
    if not isinstance(spec, NVFP4Spec) or spec.rounding != "nearest":
        return None
    if spec.outer == "token" or offsets_of is None:
        return quantize(x, spec)
    return quantize_grouped(x, offsets_of(), spec)


def weight_operand(
    record: StepRecord,
    place: Place,
    weights: Sequence[Tensor],
    spec: Format,
    first_expert: int | None = None,
) -> None:
    """Enter the forward operand of whole weights (N, K), one amax each.

    first_expert: number in the model of the first of experts' weights, which are entered one by one.
    """
    stacked = torch.cat([weight.detach() for weight in weights])
    size, num = weights[0].shape[0], len(weights)
    whole = replay_operand(
        stacked, spec, lambda: torch.arange(num + 1, device=stacked.device) * size
    )
    if whole is None:
        return
    place = replace(place, rows=None, parameter=True)
    record.errors(place, "weight", stacked, whole, "replay")
    if not place.dump:
        return
    for index, weight in enumerate(weights):
        operand = replay_operand(weight.detach(), spec)
        name = "weight" if first_expert is None else f"weight{first_expert + index}"
        record.parts(place, name, operand, "replay")
