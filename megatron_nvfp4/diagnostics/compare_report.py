"""A comparison in words, and as plain data."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .compare import Comparison, Operator
from .compare_replay import Replay
from .compare_values import ValueDifference

FORMAT = "minite-compare/1"


def text(
    comparison: Comparison, replays: Sequence[Replay], reasons: Mapping[str, str], common: bool
) -> list[str]:
    """Lines for a terminal. common: what was not compared is no fault."""
    first, compared = comparison.first, len(comparison.operators)
    lines = []
    if first is None:
        which = "outputs" if same(comparison, False) else "compared outputs"
        lines.append(f"compare: all {compared} {which} have the same bits")
    else:
        lines += _first(comparison, first)
    lines += _context(comparison, common)
    lines += _replays(replays, reasons)
    return lines


def _first(comparison: Comparison, first: Operator) -> list[str]:
    place = f" at {first.place}" if first.place is not None else ""
    lines = [f"compare: {first.key} differs{place}: {first.reason}"]
    found = first.natural
    if found is not None:
        ulp = "" if found.max_ulp is None else f", by up to {found.max_ulp} ulp"
        lines.append(
            f"  {found.num_unequal} of {found.num_values} values in {found.num_rows} rows{ulp}; largest "
            f"difference {found.max_abs:.6g}, relative L2 {found.rel_l2:.3g}"
            + (f"; {found.num_nonfinite} finite on one side only" if found.num_nonfinite else "")
        )
    before = comparison.operators.index(first)
    last = f", last {comparison.operators[before - 1].key}" if before else ""
    are = "output before it is" if before == 1 else "outputs before it are"
    lines.append(f"  the {before} {are} the same{last}")
    after = sum(operator.differs for operator in comparison.operators)
    lines.append(f"  {after} of {len(comparison.operators)} outputs differ in all")
    if any(operator.conditioned_rows is not None for operator in comparison.operators):
        other = comparison.first_conditioned
        where = "no output differs" if other is None else f"the first to differ is {other.key}"
        lines.append(f"  where routing agrees, {where}")
    return lines


def _context(comparison: Comparison, common: bool) -> list[str]:
    tokens, lines = comparison.tokens, []
    remedy = "" if common else " (--common leaves them out of the verdict)"
    if tokens.num_left or tokens.num_right:
        lines.append(
            f"  tokens: {tokens.num_both} on both sides, {tokens.num_left} on the left alone, "
            f"{tokens.num_right} on the right alone"
        )
    for name, keys in (("left", comparison.only_left), ("right", comparison.only_right)):
        if keys:
            listed = ", ".join(map(str, keys[:3])) + (", ..." if len(keys) > 3 else "")
            lines.append(f"  on the {name} side alone: {len(keys)}: {listed}{remedy}")
    if comparison.not_compared:
        lines.append(
            f"  not comparable, as microbatches are cut differently: {len(comparison.not_compared)}, such "
            f"as {comparison.not_compared[0]}{remedy}"
        )
    notes = [*comparison.left.notes, *comparison.right.notes, *tokens.notes]
    return lines + [f"  note: {note}" for note in dict.fromkeys(notes)]


def _replays(replays: Sequence[Replay], reasons: Mapping[str, str]) -> list[str]:
    lines = [f"  replay of {each.module}: {each.verdict}" for each in replays]
    return lines + [f"  no replay of {module}: {reason}" for module, reason in reasons.items()]


def same(comparison: Comparison, common: bool) -> bool:
    """Whether nothing differs; without `common`, also that everything was compared."""
    missing = comparison.only_left or comparison.only_right or comparison.not_compared
    return comparison.first is None and (common or not missing)


def as_data(
    comparison: Comparison, replays: Sequence[Replay], reasons: Mapping[str, str]
) -> dict[str, Any]:
    """All of it for JSON: numbers that are none are null."""
    tokens, first = comparison.tokens, comparison.first
    conditioned = comparison.first_conditioned
    return {
        "format": FORMAT,
        "left": comparison.left.path,
        "right": comparison.right.path,
        "first": None if first is None else _operator(first),
        "first_where_routing_agrees": None if conditioned is None else str(conditioned.key),
        "tokens": {
            "both": tokens.num_both, "left_only": tokens.num_left, "right_only": tokens.num_right,
        },
        "operators": [_operator(operator) for operator in comparison.operators],
        "left_only": [str(key) for key in comparison.only_left],
        "right_only": [str(key) for key in comparison.only_right],
        "not_compared": [str(key) for key in comparison.not_compared],
        "replay": [
            {
                "module": each.module,
                "provenance": each.provenance,
                "num_rows": each.num_rows,
                "verdict": each.verdict,
                "differences": {view: _values(d) for view, d in each.differences.items()},
            }
            for each in replays
        ],
        "not_replayed": dict(reasons),
        "notes": [*comparison.left.notes, *comparison.right.notes, *tokens.notes],
    }  # fmt: skip


def _operator(operator: Operator) -> dict[str, Any]:
    place = operator.place
    return {
        "module": operator.key.module,
        "what": operator.key.what,
        "part": operator.key.part,
        "provenance": list(operator.provenances),
        "differs": operator.differs,
        "reason": operator.reason,
        "place": None
        if place is None
        else {
            "token": None if place.token is None else asdict(place.token),
            "expert": place.expert,
            "index": list(place.index),
        },
        "num_rows": operator.num_rows,
        "num_values": operator.num_values,
        "rows_left_only": operator.num_left,
        "rows_right_only": operator.num_right,
        "rows_of_padding": operator.num_padding,
        "natural": _values(operator.natural),
        "conditioned_rows": operator.conditioned_rows,
        "conditioned": _values(operator.conditioned),
    }


def _values(found: ValueDifference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {key: _finite(value) for key, value in asdict(found).items()}


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
