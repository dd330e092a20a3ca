"""Tables and the plot of a profile: kernels.csv, the same shortened in Markdown, steps.png."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from .kernel_costs import CLASSES
from .trace import Call, Row, Step, calls_of, collapse, tabulate

TABLES = "kernels"  # .csv and .md
NUM_LONGEST = 40  # rows of a table in Markdown; the CSV has all
NAME_WIDTH = 90  # C++ names of kernels run to thousands of characters
FIELDS = (
    "kernel",
    "operator",
    "module",
    "phase",
    "class",
    "calls",
    "time_us",
    "share",
    "bytes",
    "gb_per_s",
    "flops",
    "tflop_per_s",
    "gap_before_us",
)


def write_report(folder: Path, steps: Sequence[Step], device: str) -> None:
    """Write the three files of the given steps, at least one; shares are of all steps' time together."""
    total = sum(step.time for step in steps)
    calls = calls_of(steps)
    write_csv(folder / f"{TABLES}.csv", tabulate(calls), total)
    plotted = _plot(folder / "steps.png", steps)
    parts = [
        f"# Profile of steps {steps[0].number} to {steps[-1].number}\n\n{device}, torch {torch.__version__}. "
        "Times in ms. A gap is time in which nothing runs on the device (CPU: no operator, so Python); it is "
        "host-bound until the call that ends it had been issued. Where streams overlap, computation goes "
        "first.\n",
        "![steps](steps.png)\n" if plotted else "No plot: matplotlib is not installed.\n",
        f"## Steps\n\n{table(*_step_rows(steps))}",
        f"## Step {middle_of(steps).number}, the one of middle length\n\n{summary(middle_of(steps))}\n",
        "## Kernels\n\nThe longest; GB/s and TFLOP/s from the recorded shapes, where these tell.\n\n"
        + table(*_kernel_rows(tabulate(calls, by_module=False), total)),
        "## Modules\n\nAll layers in one row; a gap belongs to the call that ends it.\n\n"
        + table(*_module_rows(calls, total)),
    ]
    (folder / f"{TABLES}.md").write_text("\n".join(parts), encoding="utf-8")


def summary(step: Step) -> str:
    """One line: how long, how busy, whose fault the gaps are, and the shares by class."""
    busy = step.time - step.gap
    shares = ", ".join(f"{kind} {step.shares[kind] / step.time:.1%}" for kind in CLASSES)
    return (
        f"step {step.number}: {step.time / 1e3:.2f} ms, busy {busy / 1e3:.2f} ms, "
        f"{len(step.gaps)} gaps of {step.gap / 1e3:.2f} ms together, "
        f"host-bound {step.host_bound / step.time:.1%}; {shares}"
    )


def middle_of(steps: Sequence[Step]) -> Step:
    """The step of median length; of two, the shorter."""
    return sorted(steps, key=lambda step: step.time)[(len(steps) - 1) // 2]


def write_csv(path: Path, rows: Iterable[Row], total: float) -> None:
    """One line a row, in full; empty where a figure is not known."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for row in rows:
            writer.writerow(
                (
                    row.kernel,
                    row.operator,
                    row.module,
                    row.phase,
                    row.kind,
                    row.calls,
                    f"{row.time:.3f}",
                    f"{row.time / total:.6f}",
                    row.bytes if row.bytes_time else "",
                    _figure(row.gb_per_s, ".3f"),
                    row.flops if row.flops_time else "",
                    _figure(row.tflop_per_s, ".6f"),
                    f"{row.gap:.3f}",
                )
            )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.2f}"


def _step_rows(steps: Sequence[Step]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            str(step.number),
            _ms(step.time),
            _ms(step.time - step.gap),
            f"{step.host_bound / step.time:.1%}",
            str(len(step.calls)),
            *(_ms(step.shares[kind]) for kind in CLASSES),
        ]
        for step in steps
    ]
    return ["step", "time", "busy", "host-bound", "calls", *CLASSES], rows


def _kernel_rows(rows: Sequence[Row], total: float) -> tuple[list[str], list[list[str]]]:
    header = "kernel,operator,class,calls,time,share,GB/s,TFLOP/s,gaps before".split(",")
    return header, [
        [
            f"`{_short(row.kernel)}`",
            "" if row.operator == row.kernel else _short(row.operator),
            row.kind,
            str(row.calls),
            _ms(row.time),
            f"{row.time / total:.1%}",
            _figure(row.gb_per_s, ".3g"),
            _figure(row.tflop_per_s, ".3g"),
            _ms(row.gap),
        ]
        for row in rows[:NUM_LONGEST]
    ]


def _module_rows(calls: Iterable[Call], total: float) -> tuple[list[str], list[list[str]]]:
    sums: dict[tuple[str, str], dict[str, float]] = {}
    for call in calls:
        place = sums.setdefault((collapse(call.module), call.phase), dict.fromkeys(CLASSES, 0.0))
        place[call.kind] += call.time
        place[CLASSES[-1]] += call.gap
    longest = sorted(sums.items(), key=lambda item: -sum(item[1].values()))[:NUM_LONGEST]
    rows = [
        [
            f"`{module}`",
            phase,
            *(_ms(times[kind]) for kind in CLASSES),
            f"{sum(times.values()) / total:.1%}",
        ]
        for (module, phase), times in longest
    ]
    return ["module", "phase", *CLASSES, "share"], rows


def _short(name: str) -> str:
    """A kernel's name cut to NAME_WIDTH."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    if len(name) > NAME_WIDTH:
        name = name[: NAME_WIDTH - 3] + "..."
    return name


def _plot(path: Path, steps: Sequence[Step]) -> bool:
    """A bar a step, stacked by class; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(max(5.0, 2.5 + 0.6 * len(steps)), 4.0), layout="constrained")
    axes = figure.subplots()
    places, bottom = range(len(steps)), [0.0] * len(steps)
    colours = ("tab:blue", "tab:orange", "tab:red", "tab:green", "lightgrey")
    for kind, colour in zip(CLASSES, colours, strict=True):
        heights = [step.shares[kind] / 1e3 for step in steps]
        axes.bar(places, heights, 0.7, bottom=bottom, label=kind, color=colour)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(places, [str(step.number) for step in steps])
    axes.set_xlabel("step")
    axes.set_ylabel("ms")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)
    return True
