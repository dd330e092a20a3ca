"""Tables (CSV and Markdown) and the plot of a sweep."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

from megatron_nvfp4.recipes.policy import layer_number_of

from .profile_report import table
from .sensitivity import Measurement
from .sensitivity_forced import gap_figures
from .sensitivity_model import KINDS

SWEEP = ("row", "recipe", "mode", "unit", "linears", "kept_bf16", "nll", "perplexity")
SWEEP += ("minus_bf16", "standard_error", "mean_abs_gap", "top1_flips")
ERRORS = ("recipe", "module", "what", "rel_l2", "snr_db", "mae")
WORST = 3  # linears of each recipe that the Markdown names


def sweep_rows(found: Sequence[Measurement]) -> list[dict[str, Any]]:
    """A line for every row, the first of which is BF16; columns are SWEEP.

    minus_bf16: difference of the mean losses; standard_error: of it, from the differences of whole sequences,
    None for one sequence. mean_abs_gap, top1_flips: of the log-probs to BF16's, token by token.
    """
    base = found[0]
    lines = []
    for each in found:
        gaps = [a - b for a, b in zip(each.losses, base.losses, strict=True)]
        error = stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else None
        figures = gap_figures(each, base)
        lines.append(
            {
                "row": each.row.label,
                "recipe": each.row.recipe,
                "mode": each.row.mode,
                "unit": each.row.unit,
                "linears": each.num_quantized,
                "kept_bf16": len(each.kept),
                "nll": each.nll,
                "perplexity": math.exp(min(each.nll, 700)),
                "minus_bf16": each.nll - base.nll,
                "standard_error": error,
                "mean_abs_gap": figures["mean_abs"],
                "top1_flips": figures["top1_flips"],
            }
        )
    return lines


def as_csv(columns: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> str:
    """In full precision; empty for what is no number."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return stream.getvalue()


def as_markdown(
    found: Sequence[Measurement], errors: Mapping[str, Sequence[Mapping[str, Any]]], text: str
) -> str:
    """All tables. errors: layer_errors by recipe; text: one line that says what was run."""
    lines = sweep_rows(found)
    parts = [f"# Sensitivity\n\n{text}\n", _loss_table(lines, "all")]
    for mode, title in (("only", "One unit quantised"), ("without", "All but one unit quantised")):
        if any(line["mode"] == mode for line in lines):
            parts.append(f"## {title}\n\n{_loss_table(lines, mode)}")
    if errors:
        parts.append("## Errors by kind of linear\n\n" + _kind_table(errors))
        parts.append(
            f"## The {WORST} largest output errors of each recipe\n\n" + _worst_table(errors)
        )
    reasons = dict.fromkeys(reason for each in found for reason in each.kept.values())
    if reasons:
        listed = "".join(f"- {reason}\n" for reason in reasons)
        parts.append(f"## Linears that stayed in BF16\n\n{listed}")
    return "\n".join(parts)


def _loss_table(lines: Sequence[Mapping[str, Any]], mode: str) -> str:
    header = ["recipe", *(["unit"] if mode != "all" else []), "linears", "NLL", "perplexity"]
    header += ["minus BF16", "s.e.", "mean gap of log-probs", "top-1 differs"]
    rows = []
    chosen = [line for line in lines if line["mode"] == mode]
    if mode != "all":  # of every recipe the unit that matters most first
        recipes = list(dict.fromkeys(line["recipe"] for line in lines))
        sign = -1 if mode == "only" else 1
        chosen.sort(key=lambda line: (recipes.index(line["recipe"]), sign * line["minus_bf16"]))
    for line in chosen:
        error = line["standard_error"]
        rows.append(
            [
                line["recipe"],
                *([line["unit"]] if mode != "all" else []),
                str(line["linears"]),
                f"{line['nll']:.4f}",
                f"{line['perplexity']:.2f}",
                f"{line['minus_bf16']:+.4f}",
                "" if error is None else f"{error:.4f}",
                f"{line['mean_abs_gap']:.4f}",
                f"{line['top1_flips']:.1%}",
            ]
        )
    return table(header, rows)


def _kind_table(errors: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Root mean square of rel_l2 over the layers."""
    header = ["recipe", "of", *KINDS]
    rows = []
    for recipe, lines in errors.items():
        for what in ("weight", "activation", "output"):
            cells = []
            for kind in KINDS:
                found = _figures(lines, what, lambda name, kind=kind: name.endswith(kind))
                cells.append(f"{_rms(found):.4f} ({_decibel(_rms(found))})" if found else "")
            if any(cells):
                rows.append([recipe, what, *cells])
    return "Relative L2 error, root mean square over the layers (SNR in dB).\n\n" + table(
        header, rows
    )


def _worst_table(errors: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    rows = []
    for recipe, lines in errors.items():
        outputs = [line for line in lines if line["what"] == "output" and line["rel_l2"]]
        outputs.sort(key=lambda line: line["rel_l2"], reverse=True)
        for line in outputs[:WORST]:
            value = line["rel_l2"]
            rows.append([recipe, line["module"], f"{value:.4f}", _decibel(value)])
    return table(["recipe", "linear", "relative L2", "SNR, dB"], rows)


def _figures(lines, what: str, is_wanted) -> list[float]:
    return [
        line["rel_l2"]
        for line in lines
        if line["what"] == what and is_wanted(line["module"]) and line["rel_l2"] is not None
    ]


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values) / len(values))


def _decibel(rel_l2: float) -> str:
    return f"{-20 * math.log10(rel_l2):.1f}" if rel_l2 else "inf"


def plot(
    path: Path, found: Sequence[Measurement], errors: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    """Losses, losses by unit and errors by layer, as far as they were measured, into a PNG.

    ModuleNotFoundError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = sweep_rows(found)
    units = [line for line in lines if line["mode"] != "all"]
    panels = [_plot_losses, *([_plot_units] if units else []), *([_plot_errors] if errors else [])]
    num_labels = max(len(lines) - len(units), len({line["unit"] for line in units}))
    height = max(4.0, min(0.2 * num_labels, 40.0) + 1.5)
    figure, axes = plt.subplots(
        1, len(panels), figsize=(6.5 * len(panels), height), layout="constrained", squeeze=False
    )
    for panel, axis in zip(panels, axes[0], strict=True):
        panel(axis, lines, errors)
        axis.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=150, format="png")
    finally:
        plt.close(figure)


def _plot_losses(axis, lines, errors) -> None:
    chosen = [line for line in lines if line["mode"] == "all" and line["recipe"] != "bf16"]
    for height, line in enumerate(reversed(chosen)):
        error = line["standard_error"]
        axis.errorbar(line["minus_bf16"], height, xerr=error, fmt="oC0", capsize=3)
    axis.set_yticks(range(len(chosen)), [line["recipe"] for line in reversed(chosen)], fontsize=8)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set(xlabel="NLL minus BF16 (nats a token, one s.e.)", title="All linears")


def _plot_units(axis, lines, errors) -> None:
    labels = list(dict.fromkeys(line["unit"] for line in lines if line["mode"] != "all"))
    series: dict[str, list] = {}
    for line in lines:
        if line["mode"] != "all":
            series.setdefault(f"{line['recipe']}, {line['mode']}", []).append(line)
    for name, chosen in series.items():
        heights = [labels.index(line["unit"]) for line in chosen]
        values = [line["minus_bf16"] for line in chosen]
        drawn = axis.plot(values, heights, "o", markersize=4, label=name)
        whole = next(x for x in lines if x["mode"] == "all" and x["recipe"] == chosen[0]["recipe"])
        axis.axvline(whole["minus_bf16"], color=drawn[0].get_color(), linewidth=0.8)
    axis.set_yticks(range(len(labels)), labels, fontsize=6 if len(labels) > 12 else 8)
    axis.invert_yaxis()
    axis.set(xlabel="NLL minus BF16 (line: all units)", title="One unit, or all but one")
    _legend(axis)


def _plot_errors(axis, lines, errors) -> None:
    for index, (recipe, found) in enumerate(errors.items()):
        numbers = sorted({layer_number_of(line["module"]) for line in found})
        values = [
            _rms(_figures(found, "output", lambda name, n=n: layer_number_of(name) == n) or [0.0])
            for n in numbers
        ]
        axis.plot(numbers, values, ("-", "--", ":")[index % 3], label=recipe)
    axis.set(xlabel="layer", ylabel="relative L2 of outputs", title="Errors on BF16 inputs")
    _legend(axis)


def _legend(axis) -> None:
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
