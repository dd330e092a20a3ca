"""What the laboratory's runs say: intervals over seeds, a table, sentences, a plot."""

import importlib.util
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

# 97.5 % quantile of Student's t by degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
SMOOTH = 5  # updates of a plotted mean
STYLES = {"tis": "--", "triage": ":", "calibrated": "-."}
Run = list[dict]


def report(out: Path, paths: Mapping[str, Sequence[Path]]) -> None:
    """table.txt, also printed, and rl_lab.png, of the finished runs of each arm, one a seed."""
    runs = {arm: [read(path) for path in files] for arm, files in paths.items()}
    text = table(runs) + "\n" + "\n".join(sentences(runs)) + "\n"
    write(out / "table.txt", text)
    print("\n" + text)
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed; the same command draws it where it is")
        return
    plot(out / "rl_lab.png", runs)
    print(f"plot: {out / 'rl_lab.png'}")


def write(path: Path, text: str) -> None:
    """A whole file or none of it: its presence says that what it holds is done."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def read(path: Path) -> Run:
    """The updates of a run."""
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


# --- numbers of a run -----------------------------------------------------------------------------


def quarter(run: Run, last: bool) -> Run:
    num = -(-len(run) // 4)
    return run[-num:] if last else run[:num]


def average(name: str, last: bool = True) -> Callable[[Run], float]:
    """Of a run: the mean of a measure over its first or last quarter."""
    return lambda run: mean(line[name] for line in quarter(run, last))


def growth(name: str) -> Callable[[Run], float]:
    """Of a run: last quarter minus first."""
    return lambda run: average(name)(run) - average(name, last=False)(run)


def pooled(top: Sequence[str], bottom: Sequence[str], lines: Run) -> float:
    """Sums over updates first, the ratio then; NaN for 0 / 0, infinity for x / 0."""
    above = sum(line[name] for line in lines for name in top)
    below = sum(line[name] for line in lines for name in bottom)
    if below == 0:
        return math.inf if above else math.nan
    return above / below


def rho(lines: Run, by_response: bool = False) -> float:
    """Mass of A < 0, delta < 0 over that of A > 0, delta > 0."""
    end = "_by_response" * by_response
    return pooled([f"mass_low{end}"], [f"mass_high{end}"], lines)


def trigger_rate(lines: Run, *names: str) -> float:
    return pooled([f"num_{name}" for name in names], ["num_eligible"], lines)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): Student's 95 % interval over seeds; one seed has none, (mean, NaN, NaN)."""
    centre = mean(values)
    if len(values) < 2 or not math.isfinite(centre):
        return centre, math.nan, math.nan
    quantile = STUDENT[min(len(values) - 1, len(STUDENT)) - 1]
    half = quantile * stdev(values) / math.sqrt(len(values))
    return centre, centre - half, centre + half


def verdict(what: str, values: Sequence[float], unit: str = "") -> str:
    """A sentence about differences, one a seed: what the interval allows to say and no more."""
    centre, low, high = interval(values)
    number = f"{centre:+.4f}{unit}"
    if len(values) < 2:
        return f"{what}: {number}, one seed: an illustration, no interval."
    found = "higher" if low > 0 else "lower" if high < 0 else "no difference shown"
    return f"{what}: {number} ({low:+.4f} to {high:+.4f}): {found}."


# --- table and sentences --------------------------------------------------------------------------


def table(runs: Mapping[str, Sequence[Run]]) -> str:
    """A row an arm: means over seeds, with the half width of the interval where there are several."""

    def cell(values: Sequence[float], form: str = ".3f") -> str:
        if any(math.isnan(value) for value in values):
            return "-"
        centre, low, _ = interval(values)
        half = "" if math.isnan(low) else f" +- {centre - low:{form}}"
        return f"{centre:{form}}{half}"

    lines = [
        "| arm | seeds | reward | right | gap, first quarter | gap | gap by response | q05 "
        "| rho, tokens | rho, responses | energy per token | gated segments |",
        "|---" * 12 + "|",
    ]
    for arm, of_seeds in runs.items():
        last = [quarter(run, last=True) for run in of_seeds]
        cells = [
            cell([average("reward")(run) for run in of_seeds]),
            cell([average("right")(run) for run in of_seeds]),
            cell([average("gap", last=False)(run) for run in of_seeds], ".5f"),
            cell([average("gap")(run) for run in of_seeds], ".5f"),
            cell([average("gap_by_response")(run) for run in of_seeds], ".5f"),
            cell([average("q05")(run) for run in of_seeds], ".5f"),
            cell([rho(part) for part in last], ".2f"),
            cell([rho(part, by_response=True) for part in last], ".2f"),
            cell([pooled(["energy"], ["tokens"], part) for part in last], ".2e"),
            gated(of_seeds),
        ]
        lines.append(f"| {arm} | {len(of_seeds)} | {' | '.join(cells)} |")
    lines.append("\nLast quarter of the updates, unless it says otherwise; gated: of all updates.")
    return "\n".join(lines) + "\n"


def gated(of_seeds: Sequence[Run]) -> str:
    """How many eligible segments the reported thresholds reach, over all updates of all seeds."""
    lines = [line for run in of_seeds for line in run]
    num = int(sum(line["num_gated"] for line in lines))
    rate = trigger_rate(lines, "gated")
    return f"{num} ({100 * rate:.3f} %)" if math.isfinite(rate) else "none eligible"


def sentences(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Comparisons, seed by seed: each arm's growth, pairs with bf16, methods with the arm without."""
    lines = ["Differences of the same seed, last quarter, mean and 95 % interval over seeds:", ""]
    for arm, of_seeds in runs.items():
        lines.append(
            "- "
            + verdict(
                f"gap of {arm}, last quarter minus first", [growth("gap")(run) for run in of_seeds]
            )
        )
    for arm in runs:
        base = arm.partition("+")[0] if "+" in arm else "bf16"
        if base == arm or base not in runs:
            continue
        for name in ("reward", "gap"):
            pairs = zip(runs[arm], runs[base], strict=True)
            values = [average(name)(run) - average(name)(other) for run, other in pairs]
            lines.append("- " + verdict(f"{name} of {arm} minus {base}", values))
    lines += [
        "",
        "Segments that the reported thresholds reach, of the eligible ones, all updates:",
        "",
    ]
    return lines + [f"- {arm}: {tiers(of_seeds)}" for arm, of_seeds in runs.items()]


def tiers(of_seeds: Sequence[Run]) -> str:
    """Each tier's count and share."""
    lines = [line for run in of_seeds for line in run]
    eligible = int(sum(line["num_eligible"] for line in lines))
    if not eligible:
        return "no segment had a negative advantage."
    parts = []
    for name, label in (
        ("mild", "mean gap below -0.5"),
        ("deep", "below -1.5"),
        ("tail_one", "one token below -6"),
        ("tail_full", "two or more"),
    ):
        num = int(sum(line[f"num_{name}"] for line in lines))
        parts.append(f"{label} {num} ({100 * num / eligible:.3f} %)")
    return f"{', '.join(parts)}, of {eligible}."


# --- plot -----------------------------------------------------------------------------------------


def smooth(values: Sequence[float], num: int = SMOOTH) -> list[float]:
    """Means over up to `num` values that end at each one; NaN where one of them is."""
    return [mean(values[max(0, end - num) : end]) for end in range(1, len(values) + 1)]


def series(run: Run, name: str) -> list[float]:
    """One of the plotted measures of every update."""
    if name.startswith("rho"):
        return [_finite(rho([line], "responses" in name)) for line in run]
    if name == "energy per token":
        return [line["energy"] / line["tokens"] for line in run]
    if name == "gated segments, %":
        return [_finite(100 * trigger_rate([line], "gated")) for line in run]
    return [line[name] for line in run]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def plot(path: Path, runs: Mapping[str, Sequence[Run]]) -> None:
    """Thin: one seed. Thick: the mean of the seeds, over some updates. A colour for each pair of numerics."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(19, 8), layout="constrained")
    panels = {
        "reward": "mean reward",
        "surprise": "surprise: mean of the sampler's -log p",
        "gap": "gap: mean |delta| over tokens",
        "energy per token": "energy: mean of delta^2 / 2",
        "q05": "5 % quantile of delta",
        "rho, tokens": "rho, tokens alike",
        "rho, responses": "rho, responses alike",
        "gated segments, %": "segments that the reported gate reaches, %",
    }
    pairs = list(dict.fromkeys(arm.partition("+")[0] for arm in runs))
    for axis, (name, title) in zip(axes.flat, panels.items(), strict=True):
        for arm, of_seeds in runs.items():
            pair, _, method = arm.partition("+")
            color = f"C{pairs.index(pair) % 10}"
            curves = [series(run, name) for run in of_seeds]
            for curve in curves:
                axis.plot(curve, color=color, linewidth=0.5, alpha=0.35)
            together = [mean(column) for column in zip(*curves, strict=True)]
            axis.plot(smooth(together), STYLES.get(method, "-"), color=color, label=arm)
        axis.set(title=title, xlabel="update")
        axis.grid(alpha=0.3)
        if name in ("gap", "energy per token") or name.startswith("rho"):
            axis.set_yscale("log")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(path, dpi=120)
