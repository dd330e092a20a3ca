"""Which layer takes which recipe: anchored name patterns, layer numbers, the last layers in BF16.

Layer names are Megatron checkpoint names with the model-wide layer index, for example
`decoder.layers.7.mlp.experts.linear_fc1`. Router, embedding and output head are never asked about:
no module of ours stands there.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from reprlib import repr as short

from .recipe import RECIPES, Recipe

ALIASES = {
    "nvfp4": "nvfp4_per_token",
    "per_token": "nvfp4_per_token",
    "mini_nvfp4_per_token": "nvfp4_per_token",
    "4over6": "nvfp4_per_token_4over6",
    "pretrain": "nvfp4_pretrain",
    "w4a16": "nvfp4_w4a16",
    "w4a8": "nvfp4_w4a8",
}
BACKENDS = ("auto", "reference", "cpu", "cuda", "blackwell", "te")
# A multi-token-prediction layer (mtp.layers.<i>) has no place among the decoder's numbers.
LAYER_INDEX = re.compile(r"(?:^|(?<!mtp)\.)layers\.(\d+)\.")
MOE_DATAFLOWS = ("auto", "fused", "unfused")
SHARED_EXPERTS = re.compile(r"(?:^|.*\.)shared_experts(?:\..*|$)")


def get_recipe(name: str) -> Recipe:
    """The recipe called `name` (or by an alias); ValueError with the nearest names otherwise."""
    recipe = RECIPES.get(ALIASES.get(name, name))
    if recipe is None:
        near = get_close_matches(str(name), [*RECIPES, *ALIASES], n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(
            f"unknown recipe {name!r}{hint} (list them: python -m megatron_nvfp4 recipes)"
        )
    return recipe


def layer_number_of(name: str) -> int | None:
    """Megatron's number, from 1, of the decoder layer that `name` lies in; None outside."""
    found = LAYER_INDEX.search(name)
    return int(found[1]) + 1 if found else None


@functools.cache
def name_pattern(pattern: str) -> re.Pattern[str]:
    """A pattern of the policy file, anchored: the whole name must match. `*` stands within one dotted part.

    `**` stands for any number of parts, none included, or as the last part for everything below.
    """
    *parts, last = pattern.split(".")
    regex = "".join(
        r"(?:[^.]+\.)*" if part == "**" else _part_regex(part) + r"\." for part in parts
    )
    return re.compile(regex + (r"[^.]+(?:\.[^.]+)*" if last == "**" else _part_regex(last)))


def _part_regex(part: str) -> str:
    return re.escape(part).replace(r"\*", "[^.]*")


@dataclass(frozen=True, kw_only=True)
class LayerRule:
    """One recipe for the layers that `match` (anchored pattern) or `layer_numbers` (from 1) select.

    With both, a layer must satisfy both.
    """

    recipe: Recipe
    match: str | None = None
    layer_numbers: tuple[int, ...] = ()

    def applies(self, name: str, layer_number: int | None) -> bool:
        if self.layer_numbers and layer_number not in self.layer_numbers:
            return False
        return self.match is None or name_pattern(self.match).fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Recipes of a whole model and the backend that runs them.

    rules: the first that applies wins; then shared_experts_bf16; then last_layers_bf16 (a fraction
        of the layers, rounded up); then `recipe`.
    moe_dataflow: one of MOE_DATAFLOWS; "auto" fuses where the model's configuration allows it.
    deterministic: profile of the deterministic mode that a Megatron run computes, None without it.
    deterministic_attention: the sampler's attention backend, of which the profile's order is.
    deterministic_sampler: the ranks that one sampler is spread over, tp1, tp2 or tp2ep2.
    sources: for each setting, where it came from ("explicit", a variable, a file, "default").
    """

    recipe: Recipe
    rules: tuple[LayerRule, ...] = ()
    shared_experts_bf16: bool = False
    last_layers_bf16: float = 0.0
    backend: str = "auto"
    strict: bool = False
    disable_backward_quant: bool = False
    moe_dataflow: str = "auto"
    deterministic: str | None = None
    deterministic_attention: str = "triton"
    deterministic_sampler: str = "tp1"
    sources: Mapping[str, str] = field(default_factory=dict)

    def named(self, name: str) -> Recipe:
        """The recipe called `name` under this policy's choice of backward."""
        recipe = get_recipe(name)
        return recipe.with_bypass() if self.disable_backward_quant else recipe

    def recipe_for(self, name: str, num_layers: int | None = None) -> Recipe:
        """Recipe of the layer `name`; num_layers of the whole model, for last_layers_bf16."""
        layer_number = layer_number_of(name)
        for rule in self.rules:
            if rule.applies(name, layer_number):
                return rule.recipe
        if self.shared_experts_bf16 and SHARED_EXPERTS.fullmatch(name):
            return RECIPES["bf16"]
        if self.last_layers_bf16 and layer_number is not None:
            if num_layers is None:
                raise ValueError(
                    f"{name}: last_layers_bf16 needs the number of layers of the model"
                )
            # 0.07 * 100 is 7.000000000000001: round away the float's error before rounding up.
            num_bf16 = math.ceil(round(self.last_layers_bf16 * num_layers, 9))
            if layer_number > num_layers - num_bf16:
                return RECIPES["bf16"]
        return self.recipe

    @property
    def all_recipes(self) -> tuple[Recipe, ...]:
        """Every recipe some layer may take, the default first, each once."""
        recipes = [self.recipe, *(rule.recipe for rule in self.rules)]
        if self.shared_experts_bf16 or self.last_layers_bf16:
            recipes.append(RECIPES["bf16"])
        return tuple(dict.fromkeys(recipes))


CONFIG_KEYS = {
    "recipe": str,
    "layers": list,
    "shared_experts": str,
    "last_layers_bf16": float,
    "backend": str,
    "strict": bool,
    "disable_backward_quant": bool,
    "moe_dataflow": str,
    "deterministic": str,
    "deterministic_attention": str,
    "deterministic_sampler": str,
}
RULE_KEYS = {"match": str, "layer_numbers": list, "recipe": str}


def load_config(path: str | Path) -> dict:
    """Read and check a YAML policy file; every fault in it is reported in one ValueError."""
    config = read_mapping(path, "policy file")
    faults = _config_faults(config)
    if faults:
        raise ValueError(f"policy file {path}:\n" + "\n".join(f"  - {fault}" for fault in faults))
    return config


def read_mapping(path: str | Path, kind: str) -> dict:
    """The mapping in a YAML file, {} of an empty one; ValueError for all else and for a key given twice."""
    import yaml

    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {kind} {path}: {error}") from error

    class UniqueKeys(yaml.SafeLoader):
        """YAML lets the last of two equal keys win; a second `layers:` would drop the first."""

        def construct_mapping(self, node, deep=False):
            seen = set()
            for key, _ in node.value:
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"the key {key.value!r} stands twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    try:
        found = yaml.load(text, Loader=UniqueKeys)
    except yaml.YAMLError as error:
        raise ValueError(f"{kind} {path} is not YAML: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{kind} {path}: expected a mapping, found {type(found).__name__}")
    return found


def _config_faults(config: dict) -> list[str]:
    faults = type_faults(config, CONFIG_KEYS, "")
    if isinstance(config.get("recipe"), str):
        faults += recipe_faults(config["recipe"], "recipe")
    if "shared_experts" in config and config["shared_experts"] not in ("bf16", "recipe"):
        faults.append(f"shared_experts={short(config['shared_experts'])}: use 'bf16' or 'recipe'")
    if "backend" in config and config["backend"] not in BACKENDS:
        faults.append(f"backend={short(config['backend'])}: use one of {', '.join(BACKENDS)}")
    if "moe_dataflow" in config and config["moe_dataflow"] not in MOE_DATAFLOWS:
        value = short(config["moe_dataflow"])
        faults.append(f"moe_dataflow={value}: use one of {', '.join(MOE_DATAFLOWS)}")
    fraction = config.get("last_layers_bf16", 0.0)
    if type(fraction) in (int, float) and not 0 <= fraction <= 1:
        faults.append(
            f"last_layers_bf16={fraction}: a fraction from 0 to 1 (0.15 is the last 15 %)"
        )
    rules = config.get("layers")
    for index, rule in enumerate(rules if isinstance(rules, list) else []):
        where = f"layers[{index}]"
        if not isinstance(rule, dict):
            faults.append(f"{where}: expected a mapping with match or layer_numbers, and recipe")
            continue
        faults += type_faults(rule, RULE_KEYS, where + ".")
        if isinstance(rule.get("recipe"), str):
            faults += recipe_faults(rule["recipe"], where + ".recipe")
        elif "recipe" not in rule:
            faults.append(f"{where}: recipe is missing")
        empty = [key for key in ("match", "layer_numbers") if key in rule and not rule[key]]
        if empty or not {"match", "layer_numbers"} & set(rule):
            faults.append(f"{where}: give match (a name pattern) or layer_numbers (from 1)")
        match = rule.get("match")
        if isinstance(match, str) and match and "" in match.split("."):
            faults.append(f"{where}.match={match!r}: an empty part between dots matches no layer")
        numbers = rule.get("layer_numbers")
        if isinstance(numbers, list) and any(type(n) is not int or n < 1 for n in numbers):
            faults.append(
                f"{where}.layer_numbers={numbers}: whole numbers from 1, as Megatron counts"
            )
    return faults


def type_faults(mapping: dict, keys: dict[str, type], where: str) -> list[str]:
    """Unknown keys of a mapping and values of another type than `keys` has; `where` stands before a key."""
    faults = []
    for key, value in mapping.items():
        if key not in keys:
            near = get_close_matches(str(key), keys, n=1)
            hint = f"; did you mean {near[0]}?" if near else f" (known: {', '.join(keys)})"
            faults.append(f"unknown key {where}{key}{hint}")
            continue
        allowed = (int, float) if keys[key] is float else (keys[key],)
        if type(value) not in allowed:
            faults.append(f"{where}{key}={short(value)}: expected {keys[key].__name__}")
    return faults


def recipe_faults(name: str, where: str) -> list[str]:
    """What is wrong with a recipe's name that stands at `where`, as a list of none or one."""
    try:
        get_recipe(name)
    except ValueError as error:
        return [f"{where}: {error}"]
    return []
