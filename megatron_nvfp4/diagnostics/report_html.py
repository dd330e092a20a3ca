"""The diagnosis as one HTML file that loads nothing: tables, three maps, and sliders on the loaded gaps.

The files in assets/ are put into one page with the data. Numbers in the tables and the maps are of all
tokens; the segment map and the sliders are of every k-th response where there are many, and the page says so.
"""

import base64
import html
import json
import math
import re
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from megatron_nvfp4.rl.triage import TriageConfig

from .mismatch import Gaps, quantile
from .report_whatif import MAX_TAIL_COUNT, MAX_TAIL_GAP, caps, tables, thin

DELTA_BINS = 31  # on each side of 0 in the quadrant map
ADVANTAGE_BINS = 12
DELTA_SCALE = 0.02  # where the axis of delta turns from linear to logarithmic
NUM_THRESHOLDS = 161  # of the tail curve
ARRAY_TYPES = {
    "segment_offsets": torch.int32,
    "deep_offsets": torch.int32,
    "num_valid": torch.int32,
    "num_negative": torch.int32,
    "eligible": torch.uint8,
}


def page(diagnosis: dict, gaps: Gaps | None) -> str:
    """The page. diagnosis and gaps: what report.diagnose returns; without gaps it holds the checks alone."""
    data = payload(gaps) if gaps is not None else {}
    data["steps"] = diagnosis["steps"]
    parts = {
        "STYLE": _asset("page.css"),
        "SUMMARY": _summary(diagnosis),
        "TABLES": _tables(diagnosis),
        "SOURCES": _sources(diagnosis),
        "DATA": json.dumps(data, separators=(",", ":")),  # numbers and base64: no markup
        "WHATIF": _asset("whatif.js"),
        "CHARTS": _asset("charts.js"),
        "PAGE": _asset("page.js"),
    }
    # In one pass: a file's name in a part may look like another part's place.
    return re.sub("@([A-Z]+)@", lambda place: parts[place[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


# --- data -----------------------------------------------------------------------------------------


def payload(gaps: Gaps) -> dict[str, Any]:
    """What the scripts draw: `tails` of all tokens; `quadrants`, `whatif` and the slider's ends if there are
    advantages."""
    data: dict[str, Any] = {"tails": _tails(gaps)}
    if gaps.advantages is None:
        return data
    config = gaps.settings.config
    kept, stride = thin(gaps.responses, config.gate_width)
    shown = gaps if stride == 1 else Gaps(kept, gaps.settings)
    data["quadrants"] = _quadrants(gaps)
    data["whatif"] = {name: encode(name, values) for name, values in tables(shown).items()} | {
        "caps": caps(shown),
        "stride": stride,
        "width": config.gate_width,
    }
    data["whatif"]["step"] = encode("segment_offsets", kept.steps)
    data["whatif"]["number"] = encode(
        "segment_offsets", torch.arange(0, gaps.responses.num_responses, stride)
    )
    data["settings"] = settings_of(config, gaps.settings.tis_cap, caps(shown))
    data["limits"] = {"tailCount": MAX_TAIL_COUNT, "tailGap": MAX_TAIL_GAP}
    return data


def settings_of(config: TriageConfig, cap: float, positions: list[float]) -> dict[str, float]:
    """The settings of assets/whatif.js."""
    return {
        "mildMean": config.mild_mean,
        "mildWeight": config.mild_weight,
        "deepMean": config.deep_mean,
        "deepWeight": config.deep_weight,
        "tailGap": config.tail_gap,
        "tailCount": config.tail_count,
        "tailStrength": config.tail_strength,
        "capIndex": positions.index(cap) if cap in positions else 0,
    }


def encode(name: str, values: Tensor) -> dict[str, str]:
    """Base64 of the little-endian values, with JavaScript's name of their type."""
    values = values.to(ARRAY_TYPES.get(name, torch.float64)).contiguous()
    kind = {torch.int32: "Int32", torch.uint8: "Uint8", torch.float64: "Float64"}[values.dtype]
    raw = values.flatten().numpy().tobytes()
    return {"type": kind, "base64": base64.b64encode(raw).decode("ascii")}


def _tails(gaps: Gaps) -> dict[str, list[float]]:
    """Share of all tokens with delta < -x and with delta > x, over x."""
    largest = max(float(gaps.size.max()), 1e-3)
    x = torch.logspace(-4, math.log10(largest), NUM_THRESHOLDS, dtype=torch.float64)
    result = {"x": x.tolist()}
    for name, values in (("below", -gaps.delta), ("above", gaps.delta)):
        ordered = values.sort().values
        beyond = ordered.numel() - torch.searchsorted(ordered, x, right=True)
        result[name] = (beyond / ordered.numel()).tolist()
    return result


def _quadrants(gaps: Gaps) -> dict[str, Any]:
    """Tokens and |A| in cells of advantage x delta; tokens beyond the axes are in the cells at their ends."""
    assert gaps.advantages is not None
    size = gaps.advantages.abs()
    top = max(quantile(size, 0.999), 1e-6)
    reach = max(quantile(gaps.size, 0.9999), 0.5)
    bound = math.asinh(reach / DELTA_SCALE)
    u = torch.asinh(gaps.delta / DELTA_SCALE) / bound
    # Odd numbers of cells: those in the middle hold the zeros.
    columns = _cells(u, DELTA_BINS)
    rows = _cells(gaps.advantages / top, ADVANTAGE_BINS)
    width = 2 * DELTA_BINS + 1
    shape = (2 * ADVANTAGE_BINS + 1) * width
    cell = rows * width + columns
    return {
        "columns": width,
        "rows": 2 * ADVANTAGE_BINS + 1,
        "reach": reach,
        "scale": DELTA_SCALE,
        "top": top,
        "tokens": torch.bincount(cell, minlength=shape).tolist(),
        "mass": [round(x, 4) for x in torch.bincount(cell, size, minlength=shape).tolist()],
    }


def _cells(u: Tensor, half: int) -> Tensor:
    """Cells 0 .. 2 half of u from -1 to 1: the middle one is 0 alone, the others by sign."""
    place = torch.ceil(u.abs() * half).clamp(0, half)
    return (half + u.sign() * place).long()


# --- text -----------------------------------------------------------------------------------------


def number(value: Any, form: str = ".4g") -> str:
    """A number for people; a dash where there is none."""
    if isinstance(value, dict):
        shown = number(value["value"], form)
        if value.get("low") is None:
            return shown
        return f"{shown} ({number(value['low'], form)} to {number(value['high'], form)})"
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:{form}}"


def _summary(diagnosis: dict) -> str:
    verdict = diagnosis["verdict"]
    found = "".join(f"<li>{html.escape(each['text'])}</li>" for each in diagnosis["findings"])
    return (
        f'<p class="verdict {verdict}"><span>{verdict}</span></p>'
        f"<p>{html.escape(diagnosis['advice'])}</p>"
        + (f"<ul>{found}</ul>" if found else "")
        + (_tiles(diagnosis) if diagnosis["gap"] is not None else "")
    )


def _tiles(diagnosis: dict) -> str:
    """The numbers that are looked for first, with their intervals."""
    gap, clip, regions, gate = (diagnosis[name] for name in ("gap", "clipping", "regions", "gate"))
    shown = [
        ("mean |delta|", number(gap["mean_abs"], ".3g")),
        ("P99.9 of |delta|", number(gap["abs"]["p999"], ".3g")),
    ]
    if regions is not None:
        shown.append(("rho_asym", number(regions["rho_asym"], ".3g")))
        shown.append(("segments gated", number(gate["gated_share"], ".2%")))
    shown.append((f"tokens above C = {clip['tis_cap']:g}", number(clip["tis_above"], ".2%")))
    tiles = ""
    for name, text in shown:
        value, _, interval = text.partition(" ")
        small = f"<small>{html.escape(interval.strip('()'))}</small>" if interval else ""
        tiles += f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}{small}</dd></div>"
    return f'<dl class="tiles">{tiles}</dl>'


def _table(head: list[str], rows: list[list[str]], caption: str) -> str:
    titles = "".join(f'<th scope="col">{html.escape(each)}</th>' for each in head)
    body = "".join(
        f'<tr><th scope="row">{html.escape(row[0])}</th>'
        + "".join(f"<td>{html.escape(each)}</td>" for each in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f"<div class=scroll><table><caption>{html.escape(caption)}</caption>"
        f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _tables(diagnosis: dict) -> str:
    checks = [[each["name"], each["status"], each["found"]] for each in diagnosis["checks"]]
    parts = [_table(["check", "result", "found"], checks, "Checks")]
    parts[0] = parts[0].replace("<td>failed</td>", '<td class="failed">failed</td>')
    if diagnosis["gap"] is not None:
        caption = "The gap, with 95 % intervals over resampled responses"
        parts.append(_table(["statistic", "value"], key_rows(diagnosis), caption))
    if diagnosis["segments"] is not None:
        rows = [
            [
                each["steps"],
                *(number(each[name]) for name in ("r_amp", "h_seg", "c_tok", "p_adj")),
            ]
            for each in diagnosis["segments"]["windows"]
        ]
        tau = number(diagnosis["segments"]["tau_ana"])
        parts.append(
            _table(
                ["steps", "tail tokens", "tail-heavy segments", "in the top 5 %", "adjacency"],
                rows,
                f"Segments of A < 0, tail tokens below {tau}",
            )
        )
    return "".join(parts)


def key_rows(diagnosis: dict) -> list[list[str]]:
    """(statistic, value) of what is read first."""
    gap, clip, regions = (diagnosis[name] for name in ("gap", "clipping", "regions"))
    below, above = diagnosis["settings"]["clip"]
    rows = [
        ["tokens", f"{gap['tokens']:,}"],
        ["mean |delta|, tokens alike", number(gap["mean_abs"])],
        ["mean |delta|, responses alike", number(gap["mean_abs_by_response"])],
        ["P99 of |delta|", number(gap["abs"]["p99"])],
        ["P99.9 of |delta|", number(gap["abs"]["p999"])],
        ["5 % quantile of delta", number(gap["delta"]["q05"])],
        ["KL estimate k1", number(gap["k1"])],
        ["KL estimate k3", number(gap["k3"])],
        ["mean exp|delta|", number(gap["mult_prob_error"])],
        [f"tokens below PPO's {1 - below:g}", number(clip["ppo_below"], ".3%")],
        [f"tokens above PPO's {1 + above:g}", number(clip["ppo_above"], ".3%")],
        [f"tokens above C = {clip['tis_cap']:g}", number(clip["tis_above"], ".3%")],
    ]
    if regions is not None:
        rows.append(["rho_asym, tokens alike", number(regions["rho_asym"])])
        rows.append(["rho_asym, responses alike", number(regions["rho_asym_by_response"])])
    for name, trend in diagnosis["trends"].items():
        rows.append([f"slope of {name} a step", number(trend, ".3g")])
    return rows


def _sources(diagnosis: dict) -> str:
    rows = [[each["file"], each["format"], str(each["responses"])] for each in diagnosis["sources"]]
    return _table(["file", "format", "responses"], rows, "Read from")
