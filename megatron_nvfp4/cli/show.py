"""The verbs `recipes` and `describe`: what there is and what is selected. Needs no torch."""

import json
import sys
from pathlib import Path


def show_recipes(*, as_json: bool) -> None:
    """Print every recipe by group: a table on a terminal, plain columns otherwise, or JSON."""
    from megatron_nvfp4.recipes import ALIASES, GROUPS, RECIPES, describe_recipe

    if as_json:
        recipes = [describe_recipe(recipe) for recipe in RECIPES.values()]
        print(json.dumps({"recipes": recipes, "aliases": ALIASES}, indent=2))
        return
    groups = {
        group: [
            (r.name, str(r.fprop), r.backward, ", ".join(r.requires) or "-")
            for r in RECIPES.values()
            if r.group == group
        ]
        for group in GROUPS
    }
    if not (sys.stdout.isatty() and _print_rich(groups)):
        _print_plain(groups)
    print("aliases: " + ", ".join(f"{alias} = {name}" for alias, name in ALIASES.items()))


_COLUMNS = ("name", "forward", "backward", "needs")


def _print_rich(groups: dict[str, list[tuple[str, ...]]]) -> bool:
    """Print by rich; False where it is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    console = Console()
    for group, rows in groups.items():
        table = Table(title=group, title_justify="left")
        for column in _COLUMNS:
            table.add_column(column, no_wrap=column == "name")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    return True


def _print_plain(groups: dict[str, list[tuple[str, ...]]]) -> None:
    everything = [_COLUMNS, *(row for rows in groups.values() for row in rows)]
    widths = [max(len(row[i]) for row in everything) for i in range(len(_COLUMNS))]
    for group, rows in groups.items():
        print(f"{group}:")
        for row in (_COLUMNS, *rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print(("  " + "  ".join(cells)).rstrip())
        print()


def show_policy(recipe: str | None, config: str | Path | None, *, as_json: bool) -> None:
    """Print what the selectors resolve to: numerics, layers, backend, each setting's source.

    recipe, config: explicit selectors or None. ValueError with every fault of the selectors, or for names
    beside a deterministic profile that are none.
    """
    from megatron_nvfp4.deterministic.profiles import PROFILES, require_names
    from megatron_nvfp4.recipes import describe, resolve

    if recipe in PROFILES:
        raise ValueError(
            f"{recipe} is a profile of the deterministic mode, not a recipe; give it by "
            "--minite-deterministic or the policy's `deterministic` (docs/deterministic.md)"
        )
    policy = resolve(recipe, config)
    require_names(policy)
    description = describe(policy)
    if as_json:
        print(json.dumps(description, indent=2))
        return
    print("\n".join(policy_lines(description)))


def policy_lines(description: dict) -> list[str]:
    """The dictionary of `recipes.describe` as lines of text."""
    saved = description["saved_bits_per_element"]
    lines = [f"recipe {description['name']} ({description['group']}): {description['summary']}"]
    for gemm in ("fprop", "dgrad", "wgrad"):
        operands = description[gemm]
        rotated = " after RHT" if operands["hadamard"] else ""
        lines.append(f"  {gemm:9} {operands['left']} x {operands['right']}{rotated}")
    lines += [
        f"  backward  {description['backward']}",
        f"  saved     {saved['activations']:g} bits per activation, {saved['weight']:g} per weight",
        f"  needs     {', '.join(description['requires']) or '-'}",
        "",
        "layers (the first line that applies)",
        *_layer_lines(description),
        *_deterministic_lines(description),
        "",
        f"backend {description['backend']}, strict {str(description['strict']).lower()}",
        "",
        "settings",
        *(f"  {key} from {source}" for key, source in description["sources"].items()),
        "",
        "variables that change numbers here",
        *(f"  {name} {_value(value)}" for name, value in description["environment"].items()),
        "",
        "variables that change numbers elsewhere, and never here",
    ]
    for name, foreign in description["foreign_environment"].items():
        lines.append(f"  {name} {_value(foreign['value'])}: {foreign['read_by']}")
    return lines


def _deterministic_lines(description: dict) -> list[str]:
    profile, attention = description["deterministic"], description["deterministic_attention"]
    if profile is None:
        return []
    sampler = description["deterministic_sampler"]
    return [
        "",
        f"deterministic profile {profile}, {attention} attention, a sampler of {sampler}: it computes the "
        "whole model",
    ]


def _layer_lines(description: dict) -> list[str]:
    lines = [f"  never quantised: {', '.join(description['never_quantized'])}"]
    for rule in description["layers"]:
        selectors = [rule["match"]] if rule["match"] else []
        if rule["layer_numbers"]:
            selectors.append("layers " + ", ".join(map(str, rule["layer_numbers"])))
        where = " in ".join(selectors)
        lines.append(f"  {where}: {rule['recipe']}, backward {rule['backward']}")
    if description["shared_experts"] == "bf16":
        lines.append("  shared experts: bf16")
    if description["last_layers_bf16"]:
        lines.append(f"  last {description['last_layers_bf16']:g} of the layers, rounded up: bf16")
    if description["moe_dataflow"] != "auto":
        lines.append(f"  MoE dataflow: {description['moe_dataflow']}")
    lines.append(f"  all others: {description['name']}, backward {description['backward']}")
    return lines


def _value(value: str | None) -> str:
    return "(unset)" if value is None else f"= {value!r}"
