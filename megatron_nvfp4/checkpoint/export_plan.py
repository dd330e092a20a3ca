"""What an NVFP4 export does with every tensor, decided before one is read.

The policy of training says which layers, its recipe how their weights are rounded; a choice that a sampler
could not be told is refused here.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_nvfp4.checkpoint.formats import MODELOPT, ServingFormat
from megatron_nvfp4.checkpoint.ignore import (
    differences,
    expert_container,
    fused_with,
    ignore_list,
)
from megatron_nvfp4.checkpoint.plan import Architecture, Parameter, copies, hf_tensors, parameters
from megatron_nvfp4.checkpoint.values import check_float
from megatron_nvfp4.quant.nvfp4 import BLOCK
from megatron_nvfp4.recipes import BF16, NVFP4Spec, Policy, Recipe, resolve
from megatron_nvfp4.recipes.policy import layer_number_of

# Ways to round weights that are no training recipe of ours. They say how, the policy says which layers.
# te: Transformer Engine's per-tensor 1x16, which most of our recipes share. modelopt: nvidia-modelopt's
# division formula. nvfp4_online: what SGLang's option of that name does to expert weights as it loads them;
# its weight_scale_2 may differ from this one in the last bit.
ROUNDINGS: dict[str, tuple[NVFP4Spec | None, str]] = {
    "te": (NVFP4Spec(), "tensor"),
    "modelopt": (None, "tensor"),
    "nvfp4_online": (NVFP4Spec(four_over_six="mse", error="fast"), "token"),
}
_QUANTIZABLE = re.compile(r"(.+\.linear_[^.]+)\.weight\d*")


class Source(Protocol):
    """A Hugging Face checkpoint, on the disk (hf.HFReader) or seen through a Megatron one."""

    @property
    def config(self) -> dict[str, Any]: ...

    def names(self) -> list[str]: ...

    def meta(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]: ...

    def read(
        self,
        name: str,
        start: int | None = None,
        stop: int | None = None,
        *,
        index: int | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Layer:
    """One Megatron parameter: where its rows lie in the source, and in the file to be written.

    spec: how it is rounded; None with quantized: by ModelOpt's formula.
    """

    source: Parameter
    target: Parameter
    quantized: bool = False
    spec: NVFP4Spec | None = None

    @property
    def names(self) -> list[str]:
        """Hugging Face tensors of the target, in order."""
        return list(dict.fromkeys(rows.hf_name for rows in self.target.rows))


@dataclass
class ExportPlan:
    """What becomes of every tensor.

    activations: of formats.ACTIVATIONS; ignore: names for the configuration; notes: what a user may not
    expect. copied: tensors that belong to no parameter (a head beside tied embeddings).
    """

    form: ServingFormat
    recipe: str
    layers: list[Layer]
    copied: list[str]
    activations: str
    ignore: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def quantized(self) -> list[str]:
        """Modules stored in NVFP4."""
        return [module_of(name) for layer in self.layers if layer.quantized for name in layer.names]

    @property
    def kept(self) -> list[str]:
        """Modules of a matrix that stays as it is: router, embedding and head among them."""
        names = [
            name
            for layer in self.layers
            if not layer.quantized and len(layer.target.shape) == 2
            for name in layer.names
        ]
        return [module_of(name) for name in (*names, *self.copied)]

    @property
    def weights(self) -> str:
        """How weights are rounded, for the record."""
        specs = {layer.spec for layer in self.layers if layer.quantized}
        words = sorted("modelopt division" if spec is None else str(spec) for spec in specs)
        return ", ".join(words)


def plan_export(
    source: Source,
    form: ServingFormat,
    recipe: str | None = None,
    policy: str | Path | None = None,
    *,
    static_activations: bool = False,
) -> ExportPlan:
    """Decide for every tensor of `source` what becomes of it; reads none.

    recipe: a training recipe, or one of ROUNDINGS, which keeps the policy's choice of layers; None: the
        policy's, by the rules of recipes.resolve. policy: the YAML file of training.
    static_activations: whether amax of the inputs will be given.
    ValueError naming the tensor or layer: one that is missing, unknown, of another shape or dtype, of a K
        that is no multiple of 16, of a recipe that is not NVFP4; layers of different activations; and what
        a sampler would read otherwise than it is stored.
    """
    arch = Architecture.from_hf_config(source.config)
    names = set(source.names())
    copied = _check_tensors(source, arch, names)
    rounding = ROUNDINGS.get(recipe or "")
    chosen = resolve(None if rounding else recipe, policy)
    _check_rules(chosen, arch)
    per_expert = {name for name in names if not is_fused_expert(name)}
    targets = parameters(arch, hf_names=per_expert)
    kinds: dict[str, str] = {}
    layers = []
    for found, target in zip(parameters(arch, hf_names=names), targets, strict=True):
        assert found.key == target.key
        layer_recipe = _recipe_of(target, chosen, arch)
        if layer_recipe is None:
            layers.append(Layer(found, target))
            continue
        spec, inputs = rounding or (layer_recipe.fprop.right, _activations(layer_recipe))
        assert spec is None or isinstance(spec, NVFP4Spec)
        kinds.setdefault(
            inputs, f"{_policy_name(target)} ({recipe if rounding else layer_recipe.name})"
        )
        layers.append(Layer(found, target, True, spec))
    name = recipe if rounding else chosen.recipe.name
    plan = ExportPlan(form, str(name), layers, copied, "none")
    if not kinds:
        raise ValueError(
            f"recipe {name} leaves every layer in BF16; choose another recipe or policy"
        )
    for layer in layers:
        if layer.quantized:
            _check_weight(source, layer)
    plan.activations = _choose_activations(plan, kinds, static_activations)
    absorbed = [module for module in plan.quantized if module.endswith(".kv_b_proj")]
    if absorbed:
        plan.notes.append(
            f"{absorbed[0]} and {len(absorbed) - 1} more are NVFP4: SGLang 0.5.23 absorbs kv_b_proj and "
            "cannot decode it there; a policy rule '**.linear_kv_up_proj: bf16' keeps them"
        )
    plan.ignore = ignore_list(plan.kept, plan.quantized, each_expert=form is not MODELOPT)
    _check_readers(plan)
    return plan


def _check_rules(policy: Policy, arch: Architecture) -> None:
    """ValueError naming a rule that selects no layer of the model, and the layers whose names are near."""
    named = (_policy_name(target) for target in parameters(arch))
    names = list(dict.fromkeys(name for name in named if name is not None))
    for rule in policy.rules:
        if any(rule.applies(name, layer_number_of(name)) for name in names):
            continue
        numbers = f"layer_numbers {list(rule.layer_numbers)}" if rule.layer_numbers else ""
        match = f"match {rule.match!r}" if rule.match is not None else ""
        near = get_close_matches(rule.match or "", names, n=3, cutoff=0.0)
        raise ValueError(
            f"policy: the rule with {' and '.join(filter(None, (match, numbers)))} selects none of the"
            f" model's {arch.num_layers} layers; correct it"
            + (f": names are like {', '.join(near)}" if match else "")
        )


def _recipe_of(target: Parameter, policy: Policy, arch: Architecture) -> Recipe | None:
    """The recipe that quantises a parameter, None where none does."""
    name = _policy_name(target)
    if name is None:
        return None
    recipe = policy.recipe_for(name, arch.num_layers)
    if recipe.fprop.right == BF16:
        return None
    if not isinstance(recipe.fprop.right, NVFP4Spec):
        raise ValueError(
            f"{name}: recipe {recipe.name} has {recipe.fprop.right} weights, which an NVFP4 file cannot "
            "hold; choose an nvfp4 recipe, or bf16 for this layer"
        )
    return recipe


def _policy_name(target: Parameter) -> str | None:
    """The name under which the policy knows a weight, None for what is never quantised.

    eh_proj of prediction layers, router and shared gate are no `linear_`; nor are embedding and head. An
    indexer's linears choose keys, and samplers fuse two of them: they stay as they are.
    """
    if ".indexer." in target.key:
        return None
    found = _QUANTIZABLE.fullmatch(target.key)
    return found[1] if found else None


def _activations(recipe: Recipe) -> str:
    left = recipe.fprop.left
    if left == BF16:
        return "none"
    if isinstance(left, NVFP4Spec):
        return left.outer
    raise ValueError(
        f"recipe {recipe.name}: no serving format declares {left} activations; export with "
        "--recipe nvfp4_w4a16 for 4-bit weights alone"
    )


def _choose_activations(plan: ExportPlan, kinds: Mapping[str, str], static: bool) -> str:
    """What the file declares, of formats.ACTIVATIONS; notes say where that is less than the recipe has."""
    if len(kinds) > 1:
        listed = "; ".join(f"{kind}: {layer}" for kind, layer in kinds.items())
        raise ValueError(
            f"activations of more than one kind ({listed}): one file declares one; change the policy"
        )
    kind = next(iter(kinds))
    if static and kind != "tensor":
        raise ValueError(
            f"--input-amax: recipe {plan.recipe} has no activation scale per tensor (its activations: "
            f"per {kind}); leave it out, or choose nvfp4_per_tensor, te or modelopt"
        )
    if kind == "tensor" and not static:
        plan.notes.append(
            f"recipe {plan.recipe} has one activation scale per input, and no amax was given "
            "(--input-amax): the file is weight-only (W4A16)"
        )
        return "none"
    if kind == "token" and plan.form is not MODELOPT:
        plan.notes.append(
            f"{plan.form.name} cannot say that activations are scaled per token: the file is "
            "weight-only (W4A16); --format modelopt can"
        )
        return "none"
    if kind == "token":
        plan.notes.append(
            "activations are scaled per token: no input_scale is written; SGLang does so in experts with "
            "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION=1, and runs dense linears with a scale of 1"
        )
    return {"token": "token", "tensor": "static", "none": "none"}[kind]


def _check_tensors(source: Source, arch: Architecture, names: set[str]) -> list[str]:
    """ValueError unless the source holds the model's tensors and no others; the copies among them."""
    expected = hf_tensors(arch, hf_names=names)
    missing = sorted(set(expected) - names)
    if missing:
        raise ValueError(
            f"{missing[0]}: is missing, as are {len(missing) - 1} more tensors that config.json asks for;"
            " copy the checkpoint again, or correct config.json"
        )
    repeated = copies(arch, hf_names=names)
    for name in sorted(names):
        if name.endswith("rotary_emb.inv_freq"):  # computed from the config by every reader
            continue
        if name not in expected and name not in repeated:
            raise ValueError(
                f"{name}: is no tensor of model_type={arch.model_type!r}; remove it or correct config.json"
            )
        dtype, shape = source.meta(name)
        check_float(name, dtype)
        if name in expected and shape != expected[name]:
            raise ValueError(
                f"{name}: shape {shape}, config.json asks for {expected[name]}; correct one of them"
            )
    return [name for name in repeated if name in names]


def _check_weight(source: Source, layer: Layer) -> None:
    num_columns = layer.target.shape[1]
    if num_columns % BLOCK:
        raise ValueError(
            f"{layer.names[0]}: K={num_columns} is not a multiple of {BLOCK}; leave the layer in BF16 by a "
            f"policy rule (match: {_policy_name(layer.target)}, recipe: bf16)"
        )


def _check_readers(plan: ExportPlan) -> None:
    found = differences(plan.form.name, plan.quantized, plan.kept, plan.ignore)
    if found:
        raise ValueError(
            "the policy cannot be told to every sampler:\n"
            + "\n".join(f"  - {difference}" for difference in found[:20])
            + "\ngive what a sampler fuses (q/k/v, gate/up, q_a/kv_a, the experts of a layer), and in "
            "latent attention each projection through all layers, one kind of recipe"
        )


def is_fused_expert(name: str) -> bool:
    return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def module_of(name: str) -> str:
    return name.removesuffix(".weight")


# --- amax of the inputs ---------------------------------------------------------------------------


def read_input_amax(path: str | Path, modules: Sequence[str]) -> tuple[dict[str, float], int]:
    """(max |input| of every module, number of experts that had none and took their layer's largest).

    path: JSON {module: amax}, by Hugging Face names; modules that a sampler fuses share the largest.
    ValueError: not such a file, a number that is not positive and finite, modules without an entry.
    """
    try:
        given = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--input-amax {path}: {error}; give a JSON file {{module: amax}}"
        ) from error
    if not isinstance(given, dict):
        raise ValueError(f"--input-amax {path}: give a JSON object {{module: amax}}")
    groups = {module: _input_groups(module, fused) for module, fused in fused_with(modules).items()}
    shared: dict[str, float] = {}
    of_layer: dict[str, float] = {}
    for module, amax in given.items():
        if module not in groups:
            continue
        if type(amax) not in (int, float) or not math.isfinite(amax) or amax <= 0:
            raise ValueError(
                f"--input-amax {path}: {module}: {amax!r}; give a positive, finite number"
            )
        group, layer = groups[module]
        shared[group] = max(amax, shared.get(group, 0.0))
        if layer:
            of_layer[layer] = max(amax, of_layer.get(layer, 0.0))
    found, unseen, missing = {}, set(), []
    for module, (group, layer) in groups.items():
        if group not in shared and layer in of_layer:
            unseen.add(group)
        value = shared.get(group, of_layer.get(layer or ""))
        if value is None:
            missing.append(module)
        else:
            found[module] = value
    if missing:
        raise ValueError(
            f"--input-amax {path}: no amax of {missing[0]} and {len(missing) - 1} more quantised modules; "
            "measure them too"
        )
    return found, len(unseen)


def _input_groups(module: str, fused: str) -> tuple[str, str | None]:
    """(what has the same input, the same over all experts of the layer)."""
    container = expert_container(module)
    return fused, f"{container}.{fused.rpartition('.')[2]}" if container else None
