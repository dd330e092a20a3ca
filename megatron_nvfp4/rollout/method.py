"""What the plugins of both samplers have in common: which layers, which formats, and what they compute.

SGLang and vLLM name a layer's modules alike. Nothing of either is imported here.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from megatron_nvfp4.deterministic.ops.experts import run_experts
from megatron_nvfp4.deterministic.ops.linear import Prepared
from megatron_nvfp4.deterministic.profiles import PROFILES
from megatron_nvfp4.quant.layout import dense_offsets
from megatron_nvfp4.recipes import NVFP4Spec, Operands, Policy, Recipe, get_recipe, resolve

NAME = "minite_nvfp4"
DEFAULT_RECIPE = "nvfp4_per_token"
MIN_CAPABILITY = 80
# The sampler's modules of a layer, by what Megatron calls them.
MODULES = {
    "self_attn.qkv_proj": "self_attention.linear_qkv",
    "self_attn.o_proj": "self_attention.linear_proj",
    "mlp.gate_up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
    "mlp.experts": "mlp.experts.linear_fc1",
}
# Modules that have a name of Megatron's, but stay BF16 here: what would quantise them is refused.
_SHARED = {
    f"mlp.{shared}.{ours}": f"mlp.shared_experts.{megatrons}"
    for shared in ("shared_expert", "shared_experts")
    for ours, megatrons in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2"))
}
_ROUTERS = ("gate", "router", "shared_expert_gate")
# Settings of a policy that decide what a layer computes; `layers` beside them.
_SELECTORS = ("recipe", "shared_experts", "last_layers_bf16")
# Before `layers`: nothing where the model's root is "model", else what no policy can name.
_LAYER = re.compile(r"(?:model|(.+))\.layers\.(\d+)\.(.+)")


def layer_name(prefix: str) -> str | None:
    """Megatron's name of a sampler's module `prefix`, None for one that is never quantised."""
    found = _LAYER.fullmatch(prefix)
    if not found or found[1] or found[3] not in MODULES:
        return None
    return f"decoder.layers.{found[2]}.{MODULES[found[3]]}"


def sampler_policy(environ: Mapping[str, str] | None = None) -> Policy | None:
    """What the environment selects, None where it selects nothing that changes numbers.

    Raises ValueError for a wrong selection, and for a deterministic profile without this method.
    """
    policy = resolve(environ=environ)
    if policy.deterministic is not None:
        profile = PROFILES.get(policy.deterministic)
        if profile is None or ("quantization", NAME) not in profile.sampler:
            usable = [p.name for p in PROFILES.values() if ("quantization", NAME) in p.sampler]
            raise ValueError(
                f"--quantization {NAME}: the policy's profile {policy.deterministic} has nothing in NVFP4; "
                f"leave the argument out, or give deterministic: {' or '.join(usable)}"
            )
    chosen = [name for name in _SELECTORS if policy.sources[name] != "default"]
    if policy.rules:
        chosen.append("layers")
    if chosen and policy.deterministic is not None:
        raise ValueError(
            f"{', '.join(chosen)} beside deterministic: {policy.deterministic}: the profile says what is "
            "quantised; leave one of them out"
        )
    return policy if chosen or policy.deterministic is not None else None


def operands_for(
    prefix: str, policy: Policy | None, num_layers: int | None, *, is_experts: bool
) -> Operands | None:
    """Formats of a module's product by the policy, None where it stays BF16.

    is_experts: of routed experts, else a linear. Raises ValueError as `policy_operands`, and for a module
    that the policy quantises but by which no policy can name it: it would stay BF16 without a word.
    """
    operands = policy_operands(prefix, policy, num_layers, is_experts=is_experts)
    if operands is not None and layer_name(prefix) is None:
        kind = "experts" if is_experts else "linears"
        raise ValueError(
            f"{prefix}: {kind} of this name have no layer name of Megatron's; serve the model without "
            f"--quantization {NAME}, or by a policy whose recipe is bf16 and whose `layers` select others"
        )
    return operands


def policy_operands(
    prefix: str, policy: Policy | None, num_layers: int | None, *, is_experts: bool
) -> Operands | None:
    """What `operands_for` gives, also for modules that it refuses for their name.

    Raises ValueError for a recipe whose forward the sampler has not or that mixes tokens, experts with two
    recipes, and a policy that counts layers where num_layers is unknown.
    """
    name = _asked_name(prefix, is_experts)
    if name is None:
        return None
    if policy is None:
        return get_recipe(DEFAULT_RECIPE).fprop if is_experts else None
    if policy.deterministic is not None:
        profile = PROFILES[policy.deterministic]
        operands = profile.experts if is_experts else profile.dense
        return None if operands == Operands() else operands
    recipe = _recipe_for(prefix, name, policy, num_layers)
    if is_experts:
        other = _recipe_for(prefix, name.replace("linear_fc1", "linear_fc2"), policy, num_layers)
        if other.fprop != recipe.fprop:
            raise ValueError(
                f"{prefix}: the policy gives fc1 {recipe.name} and fc2 {other.name}; one method computes "
                "both, give them one recipe"
            )
    return None if recipe.fprop == Operands() else _checked(prefix, recipe)


def _asked_name(prefix: str, is_experts: bool) -> str | None:
    """The name by which the policy is asked for a module, the sampler's own where Megatron's is unknown.

    None for a router, and for linears outside the layers: embedding, head, towers of other kinds.
    """
    found = _LAYER.fullmatch(prefix)
    layer = f"decoder.layers.{found[2]}." if found else ""
    if is_experts:
        return layer + MODULES["mlp.experts"]
    if not found or found[3].rpartition(".")[2] in _ROUTERS:
        return None
    return layer + {**MODULES, **_SHARED}.get(found[3], found[3])


def _recipe_for(prefix: str, name: str, policy: Policy, num_layers: int | None) -> Recipe:
    try:
        return policy.recipe_for(name, num_layers)
    except ValueError as error:
        raise ValueError(
            f"{prefix}: this sampler does not say how many layers the model has, which last_layers_bf16 "
            "needs; give `layers` rules with layer_numbers instead"
        ) from error


def _checked(prefix: str, recipe: Recipe) -> Operands:
    """The recipe's forward; ValueError for one that the sampler has not."""
    left, right = recipe.fprop.left, recipe.fprop.right
    if not isinstance(right, NVFP4Spec) or right.outer != "tensor" or recipe.fprop.hadamard:
        raise ValueError(f"{prefix}: recipe {recipe.name} has no sampler; use {DEFAULT_RECIPE}")
    if isinstance(left, NVFP4Spec) and left.outer != "token":
        raise ValueError(
            f"{prefix}: recipe {recipe.name} has one activation scale per {left.outer}: a token's bits would "
            f"depend on what else is in its batch; use {DEFAULT_RECIPE}"
        )
    return recipe.fprop


def check_experts(prefix: str, facts: Iterable[tuple[str, object, tuple]]) -> None:
    """ValueError for experts that `mix` does not compute: each fact is (name, value, values it may have)."""
    wrong = [f"{name}={value!r}" for name, value, right in facts if value not in right]
    if wrong:
        raise ValueError(
            f"{prefix}: {NAME} has no experts with {', '.join(wrong)}; leave the layer in BF16 by a policy"
        )


def prepare(prefix: str, weight: Tensor, operands: Operands) -> Prepared:
    """A loaded weight (N, K), or experts' (E, N, K), quantised; ValueError for one that is not BF16."""
    if weight.dtype != torch.bfloat16:
        raise ValueError(
            f"{prefix}: the weight is {weight.dtype}, {NAME} quantises BF16; serve with --dtype bfloat16"
        )
    return Prepared.of(weight if weight.dim() == 3 else weight[None], operands)


def refresh(layer: torch.nn.Module, name: str, prepared: Prepared) -> None:
    """Set `layer.name`, or after a weight update its values, in place: CUDA graphs have its address."""
    former = getattr(layer, name, None)
    if former is None:
        setattr(layer, name, prepared)
    else:
        former.copy_from(prepared)


def multiply(x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """The linear layer of one prepared weight: x BF16 (..., K) to BF16 (..., N)."""
    rows = x.reshape(-1, x.shape[-1])
    bias = None if bias is None else bias[None]
    y = prepared.times(rows, dense_offsets(rows.shape[0], x.device), x.dtype, bias)
    return y.view(*x.shape[:-1], y.shape[1])


def mix(x: Tensor, weights: Tensor, ids: Tensor, w13: Prepared, w2: Prepared) -> Tensor:
    """The experts' layer: x BF16 (T, H), weights FP32 (T, K), ids (T, K): BF16 (T, H).

    An id of -1 adds zero: of a row that pads a CUDA graph, or of an expert that another rank has.
    """
    return run_experts(x, weights.float(), ids, w13, w2)[0]
