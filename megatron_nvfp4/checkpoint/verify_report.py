"""What a check of an NVFP4 checkpoint found, as data and in words."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_nvfp4.checkpoint.ignore import natural_order, reader_names


@dataclass(frozen=True)
class Finding:
    """One fault ("error") or doubt ("warning") about a tensor, a module or a configuration entry."""

    level: str
    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


@dataclass(frozen=True)
class Comparison:
    """A decoded weight against the original: cosine, |decoded| / |original|, both in FP64."""

    module: str
    cosine: float
    norm_ratio: float


@dataclass
class Report:
    """What `verify` found. learner_minus_sampler: modules some sampler would read otherwise than stored."""

    folder: str
    format: str = ""
    activations: str = ""
    kv_cache: str = ""
    producer: dict[str, Any] = field(default_factory=dict)
    num_quantized: int = 0
    num_kept: int = 0
    bits_per_weight: float = 0.0
    learner_minus_sampler: list[str] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]

    def error(self, name: str, what: str) -> None:
        self.findings.append(Finding("error", name, what))

    def warn(self, name: str, what: str) -> None:
        self.findings.append(Finding("warning", name, what))

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for --json."""
        return {"ok": not self.errors, **asdict(self)}


def lines_of(report: Report, *, limit: int = 50) -> Iterator[str]:
    """A report as lines of text; at most `limit` findings of each kind."""
    recipe = report.producer.get("recipe", "not recorded")
    producer = report.producer.get("name", "unknown")
    yield f"{report.folder}: {report.format or 'unreadable'}"
    if report.format:
        yield f"  recipe {recipe} by {producer}; activations {report.activations}"
        yield (
            f"  {report.num_quantized} NVFP4 linears at {report.bits_per_weight:.3f} bits a weight, "
            f"{report.num_kept} tensors unquantised"
        )
        yield f"  KV cache: {report.kv_cache}"
        names = sorted(set(report.learner_minus_sampler), key=natural_order)
        readers = ", ".join(reader_names(report.format))
        yield f"  learner minus sampler ({readers}): {', '.join(names[:limit]) or 'none'}"
    yield from _table(report.comparisons)
    for level, title in (("warning", "warnings"), ("error", "faults")):
        found = [finding for finding in report.findings if finding.level == level]
        if found:
            yield f"{len(found)} {title}:"
            yield from (f"  {finding}" for finding in found[:limit])
            if len(found) > limit:
                yield f"  and {len(found) - limit} more (all with --json)"
    if not report.errors:
        yield "no faults"


def _table(comparisons: list[Comparison]) -> Iterator[str]:
    """Per layer: the worst cosine and the norm ratio farthest from 1."""
    layers: dict[str, list[Comparison]] = {}
    for found in comparisons:
        parts = found.module.split(".")
        end = next((i + 1 for i, part in enumerate(parts) if part.isdecimal()), len(parts))
        layers.setdefault(".".join(parts[:end]), []).append(found)
    if layers:
        width = max(len(layer) for layer in layers)
        yield f"  {'layer'.ljust(width)}  lowest cosine  farthest norm ratio  of weights"
    for layer in sorted(layers, key=natural_order):
        found = layers[layer]
        cosine = min(comparison.cosine for comparison in found)
        ratio = max(
            (comparison.norm_ratio for comparison in found), key=lambda r: abs(math.log(r or 1))
        )
        yield f"  {layer.ljust(width)}  {cosine:13.5f}  {ratio:19.5g}  {len(found):10d}"
