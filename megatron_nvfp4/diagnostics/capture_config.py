"""The YAML file that says what to capture, when, and on which ranks.

    out: captures            # folder of statistics and dumps
    steps: [3, "10:20", "every 50"]
    ranks: [0, 1]            # left out: all
    rules:                   # a module takes what every rule that matches it names
      - match: decoder.layers.*.mlp.experts.**
        what: [inputs, outputs, operands, grads, weights]
        tensors: true        # dump them too; left out: statistics alone
      - match: ["**.router", model]
        what: [routing, logprobs]

Names are the policy file's: model-wide, anchored, `*` for one part and `**` for any.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nvfp4.recipes.policy import name_pattern, read_mapping, type_faults

WHAT = ("inputs", "outputs", "grads", "weights", "operands", "routing", "logprobs")
KEYS = {"out": str, "steps": list, "ranks": list, "rules": list}
RULE_KEYS = {"match": object, "what": list, "tensors": bool}
_RANGE = re.compile(r"(\d+):(\d+)")
_EVERY = re.compile(r"every (\d+)")


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Which steps, counted from 1: any of `single`, of the closed `ranges`, or multiples of `every`."""

    single: frozenset[int] = frozenset()
    ranges: tuple[tuple[int, int], ...] = ()
    every: tuple[int, ...] = ()

    def __contains__(self, step: int) -> bool:
        return (
            step in self.single
            or any(low <= step <= high for low, high in self.ranges)
            or any(step % period == 0 for period in self.every)
        )

    def any_in(self, first: int, last: int) -> bool:
        """Whether a run of steps first..last has one of them."""
        return any(step in self for step in range(first, last + 1))

    def unquoted_ranges(self, last: int) -> list[str]:
        """Of steps behind the last: what YAML may have made them of, which reads 10:20 as 10 * 60 + 20."""
        behind = (divmod(step, 60) for step in sorted(self.single) if step > last)
        return [
            f'without quotes {low}:{high} is {60 * low + high}, write "{low}:{high}"'
            for low, high in behind
            if 1 <= low <= high
        ]


@dataclass(frozen=True, kw_only=True)
class CaptureRule:
    """What to take of modules with these names; tensors: dump them, too."""

    match: tuple[str, ...]
    what: frozenset[str]
    tensors: bool = False


@dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    """A capture file. ranks: None for all."""

    out: Path
    steps: Steps
    rules: tuple[CaptureRule, ...]
    ranks: frozenset[int] | None = None

    def of(self, name: str) -> dict[str, bool]:
        """What to take of the module `name`, and whether to dump it; empty for nothing."""
        wanted: dict[str, bool] = {}
        for rule in self.rules:
            if any(name_pattern(pattern).fullmatch(name) for pattern in rule.match):
                for what in rule.what:
                    wanted[what] = wanted.get(what, False) or rule.tensors
        return wanted


def load_capture_config(path: str | Path) -> CaptureConfig:
    """Read and check a capture file; every fault in it is reported in one ValueError."""
    found = read_mapping(path, "--minite-capture")
    faults = _faults(found)
    if faults:
        listed = "\n".join(f"  - {fault}" for fault in faults)
        raise ValueError(f"--minite-capture {path}:\n{listed}")
    rules = tuple(
        CaptureRule(
            match=tuple(_patterns(rule["match"])),
            what=frozenset(rule["what"]),
            tensors=rule.get("tensors", False),
        )
        for rule in found["rules"]
    )
    ranks = frozenset(found["ranks"]) if "ranks" in found else None
    return CaptureConfig(
        out=Path(found["out"]), steps=parse_steps(found["steps"]), rules=rules, ranks=ranks
    )


def parse_steps(entries: list[Any]) -> Steps:
    """Steps of a list of `3`, `"10:20"` and `"every 50"`; ValueError for anything else."""
    single, ranges, every = set(), [], []
    for entry in entries:
        text = str(entry)
        if type(entry) is int and entry >= 1:
            single.add(entry)
        elif (found := _RANGE.fullmatch(text)) and 1 <= int(found[1]) <= int(found[2]):
            ranges.append((int(found[1]), int(found[2])))
        elif (found := _EVERY.fullmatch(text)) and int(found[1]):
            every.append(int(found[1]))
        else:
            raise ValueError(
                f'steps: {entry!r} is no step; give 3, a range "10:20" in quotes, or every 50'
            )
    return Steps(single=frozenset(single), ranges=tuple(ranges), every=tuple(every))


def _faults(found: Mapping[str, Any]) -> list[str]:
    faults = type_faults(found, KEYS, "")
    faults += [f"{key} is missing" for key in ("out", "steps", "rules") if not found.get(key)]
    if isinstance(found.get("steps"), list):
        try:
            parse_steps(found["steps"])
        except ValueError as error:
            faults.append(str(error))
    ranks = found.get("ranks")
    if isinstance(ranks, list) and any(type(rank) is not int or rank < 0 for rank in ranks):
        faults.append(f"ranks={ranks}: whole numbers from 0")
    if ranks == []:
        faults.append("ranks=[]: is no rank; leave ranks out for all")
    rules = found.get("rules")
    for index, rule in enumerate(rules if isinstance(rules, list) else []):
        faults += _rule_faults(rule, f"rules[{index}]")
    return faults


def _rule_faults(rule: Any, where: str) -> list[str]:
    if not isinstance(rule, dict):
        return [f"{where}: expected a mapping with match and what"]
    known = {key: value for key, value in rule.items() if key != "match"}
    faults = type_faults(known, RULE_KEYS, where + ".")
    patterns = _patterns(rule.get("match"))
    if not patterns or not all(isinstance(p, str) and all(p.split(".")) for p in patterns):
        faults.append(
            f"{where}.match={rule.get('match')!r}: give a name pattern, or a list of them"
        )
    what = rule.get("what")
    unknown = [each for each in what if each not in WHAT] if isinstance(what, list) else []
    if not what or unknown:
        named = ", ".join(map(str, unknown)) or "nothing"
        faults.append(f"{where}.what: {named}; use some of {', '.join(WHAT)}")
    return faults


def _patterns(match: Any) -> list[Any]:
    return match if isinstance(match, list) else [match] if match else []
