"""From selectors to a Policy: explicit > environment > config file > default.

The only place that reads MINITE_* variables, and it reads them at the call, never at import.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from .policy import BACKENDS, LayerRule, Policy, get_recipe, load_config, recipe_faults
from .recipe import Recipe

DEFAULT_RECIPE = "nvfp4_per_token"
VARIABLES = {
    "MINITE_RECIPE": "recipe of every quantised layer",
    "MINITE_CONFIG": "YAML policy file",
    "MINITE_BACKEND": "auto, reference, cpu, cuda, blackwell or te",
}
DISABLE_BACKWARD_QUANT = "DISABLE_BACKWARD_QUANT"
# Read by others in the same process or in the sampler; they change numbers there, never here.
FOREIGN_VARIABLES = {
    "NVTE_NVFP4_DISABLE_RHT": "Transformer Engine modules only",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "Transformer Engine modules only",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "Transformer Engine modules only",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "Transformer Engine modules only",
    "NVTE_NVFP4_4OVER6": "Transformer Engine modules only",
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": "Transformer Engine modules only",
    "NVTE_NVFP4_4OVER6_ERR_MODE": "Transformer Engine modules only",
    "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH": "Transformer Engine modules only",
    "NVTE_BACKWARD_OVERRIDE": "Transformer Engine modules only",
    "NVTE_USE_FAST_MATH": "Transformer Engine modules only",
    "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH": "the sampler; set it to 1 there for equal bits",
    "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION": "the sampler; set it to 1 for per-token scales",
}


def environment_faults(environ: Mapping[str, str] | None = None) -> list[str]:
    """Everything wrong with the selectors in the environment, each with its remedy."""
    environ = os.environ if environ is None else environ
    faults = []
    for name in sorted(environ):
        if name.startswith("MINITE_") and name not in VARIABLES:
            near = get_close_matches(name, VARIABLES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(VARIABLES)}"
            faults.append(f"unknown variable {name}={environ[name]!r}; {hint}")
    if environ.get("MINITE_RECIPE"):
        faults += recipe_faults(environ["MINITE_RECIPE"], "MINITE_RECIPE")
    config = environ.get("MINITE_CONFIG")
    if config and not Path(config).is_file():
        faults.append(f"MINITE_CONFIG={config!r} is not a file; give the path of a YAML policy")
    backend = environ.get("MINITE_BACKEND")
    if backend and backend not in BACKENDS:
        faults.append(f"MINITE_BACKEND={backend!r}; use one of {', '.join(BACKENDS)}")
    if environ.get(DISABLE_BACKWARD_QUANT, "") not in ("", "0", "1"):
        value = environ[DISABLE_BACKWARD_QUANT]
        faults.append(f"{DISABLE_BACKWARD_QUANT}={value!r}; use 1 (BF16 layer bypass) or 0")
    return faults


def resolve(
    recipe: str | Recipe | None = None,
    config: str | Path | None = None,
    *,
    backend: str | None = None,
    deterministic: str | None = None,
    deterministic_attention: str | None = None,
    deterministic_sampler: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Policy:
    """The policy that the selectors ask for, with the source of every setting.

    recipe, config, backend, deterministic and its two: explicit selectors; None leaves the choice to
        the environment, then to the config file, then to the default. Whether a profile exists and the
        run can honour it, the run says.
    Raises ValueError with the faults of all selectors at once, with every recipe that contradicts
    DISABLE_BACKWARD_QUANT, or for an attention or a sampler of a profile that is not given.
    """
    environ = os.environ if environ is None else environ
    config_source = "explicit" if config else "MINITE_CONFIG"
    config = config or environ.get("MINITE_CONFIG") or None
    file = _check_selectors(recipe, config, backend, environ)
    sources = {}
    if config:
        sources["config"] = f"{config_source}: {config}"

    def choose(key: str, explicit, variable: str | None, default):
        for source, value in (
            ("explicit", explicit),
            (variable, environ.get(variable) if variable else None),
            (f"config file {config}", file.get(key)),
        ):
            if value not in (None, ""):
                sources[key] = source
                return value
        sources[key] = "default"
        return default

    chosen = choose("recipe", recipe, "MINITE_RECIPE", DEFAULT_RECIPE)
    chosen = chosen if isinstance(chosen, Recipe) else get_recipe(chosen)
    disable = choose("disable_backward_quant", None, DISABLE_BACKWARD_QUANT, False) in (True, "1")
    rules = tuple(
        LayerRule(
            recipe=get_recipe(rule["recipe"]),
            match=rule.get("match"),
            layer_numbers=tuple(rule.get("layer_numbers", ())),
        )
        for rule in file.get("layers", ())
    )
    if disable:
        places = [(f"recipe ({sources['recipe']})", chosen)]
        places += [(f"layers[{i}] of the config file", r.recipe) for i, r in enumerate(rules)]
        _check_contradictions(places, sources["disable_backward_quant"])
        chosen = chosen.with_bypass()
        rules = tuple(replace(rule, recipe=rule.recipe.with_bypass()) for rule in rules)
    profile = choose("deterministic", deterministic, None, None)
    attention = choose("deterministic_attention", deterministic_attention, None, "triton")
    sampler = choose("deterministic_sampler", deterministic_sampler, None, "tp1")
    if profile is None:
        _check_no_profile_needed(sources)
    return Policy(
        recipe=chosen,
        rules=rules,
        shared_experts_bf16=choose("shared_experts", None, None, "recipe") == "bf16",
        last_layers_bf16=float(choose("last_layers_bf16", None, None, 0.0)),
        backend=choose("backend", backend, "MINITE_BACKEND", "auto"),
        strict=bool(choose("strict", None, None, False)),
        disable_backward_quant=disable,
        moe_dataflow=choose("moe_dataflow", None, None, "auto"),
        deterministic=profile,
        deterministic_attention=attention,
        deterministic_sampler=sampler,
        sources=sources,
    )


def _check_selectors(
    recipe: str | Recipe | None,
    config: str | Path | None,
    backend: str | None,
    environ: Mapping[str, str],
) -> dict:
    """The content of the config file; one ValueError for what is wrong in any selector."""
    faults = environment_faults(environ)
    if isinstance(recipe, str) and recipe:
        faults += recipe_faults(recipe, "recipe")
    if backend and backend not in BACKENDS:
        faults.append(f"backend={backend!r}; use one of {', '.join(BACKENDS)}")
    file = {}
    missing = config == environ.get("MINITE_CONFIG") and not Path(config or "").is_file()
    if config and not missing:  # else environment_faults has said so
        try:
            file = load_config(config)
        except ValueError as error:
            faults.append(str(error).replace("\n", "\n  "))
    if faults:
        raise ValueError("cannot choose a recipe:\n" + "\n".join(f"  - {f}" for f in faults))
    return file


def _check_contradictions(places: list[tuple[str, Recipe]], source: str) -> None:
    faults = [
        f"{place}: {recipe.name} has backward {recipe.backward!r}, not quantised"
        for place, recipe in places
        if recipe.backward in ("bf16", "dequantized")
    ]
    if faults:
        raise ValueError(
            f"{DISABLE_BACKWARD_QUANT}=1 ({source}) replaces a quantised backward; it contradicts\n"
            + "\n".join(f"  - {fault}" for fault in faults)
            + "\nunset it, or choose recipes with a quantised backward"
        )


def _check_no_profile_needed(sources: Mapping[str, str]) -> None:
    given = [
        f"{name} ({sources[name]})"
        for name in ("deterministic_attention", "deterministic_sampler")
        if sources[name] != "default"
    ]
    if given:
        raise ValueError(
            f"{', '.join(given)}: has no effect without a profile; name one (deterministic, "
            "--minite-deterministic), or leave it out"
        )


def describe(policy: Policy, environ: Mapping[str, str] | None = None) -> dict:
    """What a policy does, as plain data: for `describe`, `--json` and run_meta.json."""
    environ = os.environ if environ is None else environ
    return {
        **describe_recipe(policy.recipe),
        "layers": [
            {
                "recipe": rule.recipe.name,
                "backward": rule.recipe.backward,
                "match": rule.match,
                "layer_numbers": list(rule.layer_numbers),
            }
            for rule in policy.rules
        ],
        "shared_experts": "bf16" if policy.shared_experts_bf16 else "recipe",
        "last_layers_bf16": policy.last_layers_bf16,
        "never_quantized": ["router", "embedding", "output head"],
        "backend": policy.backend,
        "strict": policy.strict,
        "moe_dataflow": policy.moe_dataflow,
        "deterministic": policy.deterministic,
        "deterministic_attention": policy.deterministic_attention,
        "deterministic_sampler": policy.deterministic_sampler,
        "sources": dict(policy.sources),
        "environment": {name: environ.get(name) for name in (*VARIABLES, DISABLE_BACKWARD_QUANT)},
        "foreign_environment": {
            name: {"value": environ.get(name), "read_by": reader}
            for name, reader in FOREIGN_VARIABLES.items()
        },
    }


def describe_recipe(recipe: Recipe) -> dict:
    """Operands, backward, saved state and needs of one recipe, as plain data."""
    gemms = {"fprop": recipe.fprop, "dgrad": recipe.dgrad, "wgrad": recipe.wgrad}
    return {
        "name": recipe.name,
        "group": recipe.group,
        "summary": recipe.summary,
        **{
            gemm: {
                "left": str(operands.left),
                "right": str(operands.right),
                "hadamard": operands.hadamard,
            }
            for gemm, operands in gemms.items()
        },
        "backward": recipe.backward,
        "saved_bits_per_element": recipe.saved,
        "requires": list(recipe.requires),
    }
