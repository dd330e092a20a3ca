"""The whole diagnosis of some responses: checks, statistics, findings, and a paragraph of advice.

A finding is a statistic beyond a bound that a neighbour publishes or that its text names; the bounds are
here and nowhere else. Everything is in one dictionary of plain values, the JSON that `diagnose` writes.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from .checks import check, usable
from .mismatch import Gaps, Settings, clipping, gap, per_step, regions, trends
from .mismatch_segments import gate, segments
from .readers import Responses

SCHEMA = "diagnose/1"
MAX_ERROR = 1.05  # of mean exp|delta|: above it NeMo-RL plots the example
MAX_RHO = 1.5  # rho_asym of both published runs while they drift, before they fail (1.50, 1.49)
MAX_GATED = 0.05  # share of segments that a gate measured on a healthy window reaches
MAX_ABOVE_CAP = 0.01  # share of tokens that TIS would truncate
MIN_GROWTH = 1.5  # of mean |delta|, last quarter of the steps over the first


def diagnose(responses: Responses, settings: Settings | None = None) -> tuple[dict, Gaps | None]:
    """(diagnosis, the gaps it is of); no gaps where no token has one.

    The diagnosis has `verdict`: "sound" where all checks passed and nothing was found, else "unsound".
    Statistics are None without gaps, those of direction and segments also without advantages. NaN and
    infinity are None and "inf" in it, as JSON has neither.
    """
    settings = Settings() if settings is None else settings
    checks = check(responses)
    valid = usable(responses)
    gaps = Gaps(responses, settings) if bool(valid.any()) else None
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "sources": [
            {"file": file, "format": name, "responses": num}
            for file, name, num in responses.sources
        ],
        "settings": asdict(settings),
        "checks": [asdict(each) for each in checks],
    }
    result |= _statistics(gaps) if gaps else dict.fromkeys(STATISTICS)
    failed = [each.name for each in checks if each.status == "failed"]
    found = list(_findings(result)) if gaps else []
    result["findings"] = found
    result["verdict"] = "unsound" if failed or found else "sound"
    result["advice"] = _advice(result, failed)
    return _plain(result), gaps


STATISTICS = (
    "gap",
    "clipping",
    "steps",
    "trends",
    "regions",
    "segments",
    "gate",
)


def _statistics(gaps: Gaps) -> dict[str, Any]:
    steps = per_step(gaps)
    directed = gaps.advantages is not None
    return {
        "gap": gap(gaps),
        "clipping": clipping(gaps),
        "steps": steps,
        "trends": trends(steps, gaps.settings.seed),
        "regions": regions(gaps) if directed else None,
        "segments": segments(gaps) if directed else None,
        "gate": gate(gaps) if directed else None,
    }


def _plain(value: Any) -> Any:
    """With NaN as None and infinities as "inf" and "-inf"."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else f"{value}"
    return value


# --- findings -------------------------------------------------------------------------------------


def _finding(name: str, value: float, bound: float, text: str) -> dict[str, Any]:
    return {"name": name, "value": value, "bound": bound, "text": text}


def _findings(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    measured = result["gap"]
    error, bulk = measured["mult_prob_error"]["value"], measured["mult_prob_error_without_top"]
    if bulk > MAX_ERROR:
        yield _finding(
            "bulk",
            bulk,
            MAX_ERROR,
            f"mean exp|delta| is {bulk:.4f} without the largest 1 % of the gaps, above {MAX_ERROR}: the two "
            "sides differ on ordinary tokens",
        )
    elif error > MAX_ERROR:
        yield _finding(
            "outliers",
            error,
            MAX_ERROR,
            f"mean exp|delta| is {error:.4g}, above {MAX_ERROR}, and {bulk:.4f} without the largest 1 % of "
            "the gaps: a few tokens make it",
        )
    above = result["clipping"]["tis_above"]["value"]
    if above > MAX_ABOVE_CAP:
        yield _finding(
            "truncation",
            above,
            MAX_ABOVE_CAP,
            f"TIS at C={result['clipping']['tis_cap']:g} truncates {100 * above:.2f} % of the tokens, above "
            f"{100 * MAX_ABOVE_CAP:g} %",
        )
    trend = result["trends"].get("mean_abs")
    if trend and trend["low"] is not None and trend["low"] > 0 and trend["growth"] >= MIN_GROWTH:
        yield _finding(
            "growth",
            trend["growth"],
            MIN_GROWTH,
            f"mean |delta| grows {trend['value']:+.2e} a step ({trend['low']:+.2e} to {trend['high']:+.2e}), "
            f"from {trend['first_quarter']:.4f} to {trend['last_quarter']:.4f}",
        )
    if result["regions"] is not None:
        yield from _directed_findings(result)


def _directed_findings(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    rho = result["regions"]["rho_asym"]
    if rho["value"] >= MAX_RHO and (rho["low"] is None or rho["low"] > 1):
        yield _finding(
            "direction",
            rho["value"],
            MAX_RHO,
            f"rho_asym is {_with_interval(rho)}, at least {MAX_RHO}: updates that widen the gap lie on the "
            "side of A < 0, delta < 0",
        )
    gated = result["gate"]["gated_share"]
    if gated > MAX_GATED:
        yield _finding(
            "segments",
            gated,
            MAX_GATED,
            f"{100 * gated:.2f} % of the segments of A < 0 are below the gate's thresholds, above "
            f"{100 * MAX_GATED:g} %",
        )


def _with_interval(stat: dict[str, Any]) -> str:
    if stat["low"] is None:
        return f"{stat['value']:.3f}"
    return f"{stat['value']:.3f} ({stat['low']:.3f} to {stat['high']:.3f})"


# --- advice ---------------------------------------------------------------------------------------


def _advice(result: dict[str, Any], failed: list[str]) -> str:
    """One paragraph that follows from the numbers; a failed check comes before everything else."""
    if result["gap"] is None:
        return (
            f"Nothing can be measured: see the failed checks ({', '.join(failed)}). Give a dump with the "
            "log-probs of both sides."
        )
    said = []
    if failed:
        said.append(
            f"Mend what the failed checks name first ({', '.join(failed)}): until then the statistics "
            "describe that, not the numerics."
        )
    names = {finding["name"] for finding in result["findings"]}
    if not names and not failed:
        said.append(
            f"Nothing stands out: mean |delta| is {result['gap']['mean_abs']['value']:.4g}, P99.9 is "
            f"{result['gap']['abs']['p999']['value']:.3g}, and TIS at C={result['clipping']['tis_cap']:g} "
            f"truncates {100 * result['clipping']['tis_above']['value']:.3f} % of the tokens. Keep it on and "
            "look again later in the run."
        )
    said += _advice_on_size(result, names)
    if result["regions"] is None:
        said.append("The files hold no advantages, so the direction of the updates is not known.")
    else:
        said += _advice_on_direction(result, names)
    return " ".join(said)


def _advice_on_size(result: dict[str, Any], names: set[str]) -> Iterator[str]:
    trend = result["trends"].get("mean_abs")
    if "bulk" in names:
        yield (
            "The gap is in the bulk of the tokens, which weights and clipping do not mend: look for another "
            "execution (recipe or excluded layers of one side, KV cache, weight export) and let the verb "
            "compare name the first operator that differs."
        )
        if trend and "growth" not in names:
            yield "It does not grow over the steps, which speaks for the execution and against training."
    if "growth" in names:
        yield (
            "It grows as training goes on; whatever the cause, lower the learning rate or stop before the "
            "tail does, and look whether it starts at 0 (drift) or not (execution)."
        )
    if "outliers" in names:
        yield (
            "A few tokens make the mean; it is no sign of a bulk fault. Truncated weights bound them: keep "
            "TIS on and watch P99.9 in place of the mean."
        )
    if "truncation" in names:
        yield (
            "TIS cuts many tokens and so biases the update; the sliders of the HTML page show what another "
            "C would cut."
        )


def _advice_on_direction(result: dict[str, Any], names: set[str]) -> Iterator[str]:
    rho, by_response = (result["regions"][name] for name in ("rho_asym", "rho_asym_by_response"))
    if "direction" in names:
        gated = result["gate"]
        yield (
            "The direction is unbalanced as it was before the published runs failed; TRIAGE is for that, and "
            f"its gate would take {gated['gated']} of {gated['eligible']} segments at these thresholds."
        )
        if by_response["value"] < MAX_RHO:
            yield (
                f"With every response alike rho_asym is {by_response['value']:.2f}: long responses of A < 0 "
                "carry much of it."
            )
    elif "segments" in names:
        yield (
            "Segments of A < 0 lie far below the sampler while the direction as a whole is balanced "
            f"(rho_asym {rho['value']:.2f}): the gate acts where they are."
        )
    width = next(iter(result["segments"]["widths"].values()))
    null = width["shuffled"]["c_tok"]
    if null and width["c_tok"] > null["high"]:
        yield (
            f"Tail tokens cluster: the top 5 % of the segments hold {100 * width['c_tok']:.1f} % of them, "
            f"where a shuffle within responses gives {100 * null['median']:.1f} %; response means do not "
            "show it. The published runs did so while healthy, too: compare with an earlier step."
        )
