"""A comparison as one HTML page that loads nothing: operators in order, coloured by who differs first."""

import html
from collections.abc import Mapping, Sequence

from .compare import Comparison, Operator
from .compare_replay import VIEWS, Replay
from .compare_report import text
from .compare_values import ValueDifference

STYLE = """
:root{--bg:#fbfaf7;--ink:#1d2126;--soft:#6b7280;--line:#dcd8ce;--same:#2f7d4f;--first:#b42318;
--later:#b26a00;--card:#fff;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--bg:#15181c;--ink:#e6e4df;--soft:#9aa2ad;--line:#333a42;
--same:#5fbf86;--first:#ff7a6b;--later:#e0a23c;--card:#1c2127}}
body{background:var(--bg);color:var(--ink);font:14px/1.45 system-ui,sans-serif;margin:0;padding:28px 32px}
h1{font-size:20px;margin:0 0 4px}h2{font-size:15px;margin:26px 0 8px}
p.paths{color:var(--soft);margin:0 0 16px;overflow-wrap:anywhere}
pre{background:var(--card);border:1px solid var(--line);border-left:4px solid var(--first);padding:10px 14px;
white-space:pre-wrap;overflow-wrap:anywhere;border-radius:4px;margin:0}
pre.same{border-left-color:var(--same)}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:4px;background:var(--card)}
table{border-collapse:collapse;width:100%}th{font-weight:600;color:var(--soft);font-size:12px;text-align:left;
position:sticky;top:0;background:var(--card)}
td,th{padding:5px 10px;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.name{font-family:ui-monospace,monospace;font-size:12.5px}
.what{color:var(--soft)}.mark{font-weight:600;white-space:nowrap}
tr.same .mark{color:var(--same)}tr.first .mark{color:var(--first)}tr.later .mark{color:var(--later)}
tr.first{background:color-mix(in srgb,var(--first) 12%,transparent)}
svg rect{fill:var(--later)}tr.first svg rect{fill:var(--first)}svg line{stroke:var(--line)}
small{color:var(--soft)}label{user-select:none}
body:has(#only:checked) tr.same{display:none}
.strip{display:flex;flex-wrap:wrap;gap:2px;margin:0 0 6px}
.strip a{width:11px;height:18px;border-radius:2px;background:var(--same)}
.strip a.later{background:var(--later)}.strip a.first{background:var(--first);outline:2px solid var(--ink)}
td.place{font-size:12px;max-width:250px;overflow-wrap:anywhere}td.name{min-width:260px;overflow-wrap:anywhere}
"""
HEAD = (
    "operator",
    "",
    "values that differ",
    "max ulp",
    "max |a-b|",
    "relative L2",
    "distances, ulp",
    "first difference",
    "same routing",
)


def page(comparison: Comparison, replays: Sequence[Replay], reasons: Mapping[str, str]) -> str:
    """The page's text. Opens without a network; switches to dark by the reader's setting."""
    first = comparison.first
    summary = "\n".join(text(comparison, [], {}, True))
    kinds = [
        "first" if operator is first else "later" if operator.differs else "same"
        for operator in comparison.operators
    ]
    rows = "".join(map(_row, comparison.operators, kinds, range(len(kinds))))
    strip = "".join(map(_square, comparison.operators, kinds, range(len(kinds))))
    checked = "" if first is None else " checked"
    sides = f"{html.escape(comparison.left.path)} (left) and {html.escape(comparison.right.path)} (right)"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>compare</title><style>{STYLE}</style>"
        f'<h1>{_headline(first)}</h1><p class="paths">{sides}</p>'
        f'<pre class="{"same" if first is None else "differs"}">{html.escape(summary)}</pre>'
        "<h2>Operators in order of execution</h2>"
        f'<div class="strip">{strip}</div>'
        f'<p><label><input type="checkbox" id="only"{checked}> only those that differ</label></p>'
        f'<div class="scroll"><table>{_header(HEAD)}<tbody>{rows}</tbody></table></div>'
        f"{_missing(comparison)}{_replay_table(replays, reasons)}</html>\n"
    )


def _headline(first: Operator | None) -> str:
    if first is None:
        return "Everything that was compared is the same, bit for bit"
    return f"First difference: {html.escape(str(first.key))}"


def _header(names: Sequence[str]) -> str:
    return "<thead><tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr></thead>"


def _square(operator: Operator, kind: str, number: int) -> str:
    label = html.escape(f"{operator.key}: {'same' if kind == 'same' else 'differs'}")
    return f'<a href="#o{number}" class="{kind}" title="{label}" aria-label="{label}"></a>'


def _row(operator: Operator, kind: str, number: int) -> str:
    mark = {"first": "first", "later": "differs", "same": "same"}[kind]
    provenance = html.escape(" / ".join(dict.fromkeys(operator.provenances)))
    key = operator.key
    name = (
        f'<td class="name">{html.escape(key.module)} <span class="what">{html.escape(key.what)} '
        f"{html.escape(key.part)}</span><br><small>{provenance}</small></td>"
    )
    cells = _cells(operator.natural, operator)
    place = html.escape(f"{operator.place or ''}: {operator.reason}") if operator.differs else ""
    return (
        f'<tr id="o{number}" class="{kind}">{name}<td class="mark">{mark}</td>{cells}'
        f'<td class="place">{place}</td>'
        f'<td class="n">{_conditioned(operator)}</td></tr>'
    )


def _cells(found: ValueDifference | None, operator: Operator) -> str:
    if found is None:
        total = f"0 of {operator.num_values}" if operator.num_values else ""
        return f'<td class="n">{total}</td>' + "<td></td>" * 4
    ulp = "" if found.max_ulp is None else str(found.max_ulp)
    share = f"{found.num_unequal} of {found.num_values}"
    return (
        f'<td class="n">{share}</td><td class="n">{ulp}</td><td class="n">{found.max_abs:.4g}</td>'
        f'<td class="n">{found.rel_l2:.3g}</td><td>{_histogram(found.histogram)}</td>'
    )


def _conditioned(operator: Operator) -> str:
    if operator.conditioned_rows is None:
        return ""
    found = operator.conditioned
    if found is None:
        return f"same in {operator.conditioned_rows} rows"
    return f"{found.num_unequal} of {found.num_values}"


def _histogram(bins: Sequence[int]) -> str:
    """Bars of the counts of distances 1, 2-3, 4-7, ... ulp; heights are relative to the largest."""
    if not any(bins):
        return ""
    top, width, height = max(bins), 6, 28
    bars = "".join(
        f'<rect x="{index * width}" y="{height - bar:.1f}" width="{width - 1}" height="{bar:.1f}">'
        f"<title>{count} of {1 << index} to {(2 << index) - 1} ulp</title></rect>"
        for index, count in enumerate(bins)
        if (bar := max(1.5, height * count / top) if count else 0)
    )
    span = len(bins) * width
    return (
        f'<svg width="{span}" height="{height + 1}" role="img" aria-label="distances in ulp">'
        f'<line x1="0" x2="{span}" y1="{height + 0.5}" y2="{height + 0.5}"/>{bars}</svg>'
    )


def _missing(comparison: Comparison) -> str:
    parts = []
    for name, keys in (
        ("On the left side alone", comparison.only_left),
        ("On the right side alone", comparison.only_right),
        ("Not comparable, as microbatches are cut differently", comparison.not_compared),
    ):
        if keys:
            items = "".join(f"<li>{html.escape(str(key))}</li>" for key in keys)
            parts.append(
                f"<details><summary>{name}: {len(keys)}</summary><ul>{items}</ul></details>"
            )
    return f"<h2>Not compared</h2>{''.join(parts)}" if parts else ""


def _replay_table(replays: Sequence[Replay], reasons: Mapping[str, str]) -> str:
    if not replays and not reasons:
        return ""
    rows = "".join(
        f'<tr><td class="name">{html.escape(each.module)}</td>'
        + "".join(f'<td class="n">{_of_view(each, view)}</td>' for view in VIEWS)
        + f"<td>{html.escape(each.verdict)}</td></tr>"
        for each in replays
    )
    rows += "".join(
        f'<tr><td class="name">{html.escape(module)}</td><td></td><td></td><td></td>'
        f"<td><small>not replayed: {html.escape(reason)}</small></td></tr>"
        for module, reason in reasons.items()
    )
    head = _header(("linear", "left", "right", "left's input, right's weight", "what it says"))
    return (
        "<h2>Replay: one input through both operators</h2>"
        f'<div class="scroll"><table>{head}<tbody>{rows}</tbody></table></div>'
    )


def _of_view(each: Replay, view: str) -> str:
    found = each.differences[view]
    return "same" if found is None else f"{found.num_unequal} of {found.num_values}"
