"""The verbs `recipes` and `describe`: what there is and what is selected. Needs no torch."""

import json
import sys
from pathlib import Path


def show_recipes(*, as_json: bool) -> None:
    """Print every recipe by group, and the profiles: tables on a terminal, else plain columns, or JSON."""
    from megatron_nvfp4.deterministic.profiles import PROFILES
    from megatron_nvfp4.recipes import ALIASES, GROUPS, RECIPES, describe_recipe

    if as_json:
        found = {
            "recipes": [describe_recipe(recipe) for recipe in RECIPES.values()],
            "aliases": ALIASES,
            "profiles": [describe_profile(profile) for profile in PROFILES.values()],
        }
        print(json.dumps(found, indent=2))
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
    print("\nprofiles of the deterministic mode (describe NAME), which need no recipe")
    width = max(map(len, PROFILES))
    for profile in PROFILES.values():
        print(f"  {profile.name.ljust(width)}  {profile.summary}")


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

    recipe, config: explicit selectors or None; a profile's name in the place of a recipe's is described by
    itself. ValueError with every fault of the selectors, for names beside a deterministic profile that are
    none, and for a profile beside a policy.
    """
    from megatron_nvfp4.deterministic.profiles import PROFILES, require_names
    from megatron_nvfp4.recipes import describe, describe_recipe, resolve

    if recipe in PROFILES:
        if config:
            raise ValueError(
                f"describe {recipe} --config {config}: a profile is described by itself; give one of them"
            )
        profile = describe_profile(PROFILES[recipe])
        print(json.dumps(profile, indent=2) if as_json else "\n".join(profile_lines(profile)))
        return
    policy = resolve(recipe, config)
    require_names(policy)
    description = describe(policy)
    if policy.deterministic is not None:
        # No layer computes by the recipe then.
        for key in describe_recipe(policy.recipe):
            del description[key]
        sources = description["sources"].items()
        description["sources"] = {key: source for key, source in sources if source != "default"}
        chosen = (policy.deterministic_attention, policy.deterministic_sampler)
        description["profile"] = describe_profile(PROFILES[policy.deterministic], *chosen)
    if as_json:
        print(json.dumps(description, indent=2))
        return
    print("\n".join(policy_lines(description)))


def describe_profile(profile, attention: str | None = None, ranks: str = "tp1") -> dict:
    """What a deterministic profile computes and how both sides are started, as plain data.

    profile: a deterministic.Profile. attention, ranks: the sampler's; attention None is the profile's first.
    """
    from megatron_nvfp4.cli.sampler import learner_arguments
    from megatron_nvfp4.deterministic.sampler import launch_command

    attention = attention or profile.attention[0]
    has_experts = profile.router_weight is not None
    return {
        "name": profile.name,
        "summary": profile.summary,
        "families": list(profile.families),
        "dense": str(profile.dense),
        "experts": str(profile.experts) if has_experts else None,
        **{
            name: getattr(profile, name)
            for name in ("residual", "norm_weight", "logits", "logprobs", "missing")
        },
        "attention": attention,
        "attentions": list(profile.attention),
        "sampler": ranks,
        "learner_command": learner_arguments(profile.name, attention, ranks),
        "sampler_command": launch_command(profile, attention, ranks),
    }


def profile_lines(profile: dict) -> list[str]:
    """The dictionary of `describe_profile` as lines of text."""
    known = " or ".join(profile["attentions"])
    return [
        f"deterministic profile {profile['name']}: {profile['summary']}",
        f"  models     {', '.join(profile['families'])}",
        f"  experts    {profile['experts'] or 'none'}",
        f"  dense      {profile['dense']}; router, embedding and head bf16",
        f"  stream     {profile['residual']}, norms' weights {profile['norm_weight']}",
        f"  log-probs  {profile['logprobs']}, of logits in {profile['logits']}",
        f"  attention  {profile['attention']} (the profile has {known}), the same on both sides",
        f"  sampler    {profile['sampler']} (its --tp-size and --ep-size: tp1, tp2 or tp2ep2)",
        "",
        "the run",
        f"  {profile['learner_command']}",
        "the sampler",
        f"  {profile['sampler_command']}",
    ]


def policy_lines(description: dict) -> list[str]:
    """The dictionary of `recipes.describe` as lines of text; a profile in it stands in the recipe's place."""
    if "profile" in description:
        head = profile_lines(description["profile"])
    else:
        head = _recipe_lines(description)
    lines = [
        *head,
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


def _recipe_lines(description: dict) -> list[str]:
    saved = description["saved_bits_per_element"]
    lines = [f"recipe {description['name']} ({description['group']}): {description['summary']}"]
    for gemm in ("fprop", "dgrad", "wgrad"):
        operands = description[gemm]
        rotated = " after RHT" if operands["hadamard"] else ""
        lines.append(f"  {gemm:9} {operands['left']} x {operands['right']}{rotated}")
    return [
        *lines,
        f"  backward  {description['backward']}",
        f"  saved     {saved['activations']:g} bits per activation, {saved['weight']:g} per weight",
        f"  needs     {', '.join(description['requires']) or '-'}",
        "",
        "layers (the first line that applies)",
        *_layer_lines(description),
        "",
        f"backend {description['backend']}, strict {str(description['strict']).lower()}",
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
