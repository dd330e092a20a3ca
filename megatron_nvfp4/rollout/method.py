"""What the plugins of both samplers have in common: which layers, which formats, and what they compute.

SGLang and vLLM name a layer's modules alike. Nothing of either is imported here.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from megatron_nvfp4.deterministic.ops.experts import run_experts
from megatron_nvfp4.deterministic.ops.linear import Prepared
from megatron_nvfp4.quant.layout import dense_offsets
from megatron_nvfp4.recipes import BF16, Operands, Policy, get_recipe, resolve

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
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def layer_name(prefix: str) -> str | None:
    """Megatron's name of a sampler's module `prefix`, None for one that is never quantised."""
    found = _LAYER.fullmatch(prefix)
    if not found or found[2] not in MODULES:
        return None
    return f"decoder.layers.{found[1]}.{MODULES[found[2]]}"


def sampler_policy(environ: Mapping[str, str] | None = None) -> Policy | None:
    """What the environment selects, None where it selects nothing; ValueError for a wrong selection."""
    policy = resolve(environ=environ)
    return None if policy.sources["recipe"] == "default" and not policy.rules else policy


def operands_for(prefix: str, policy: Policy | None, num_layers: int | None) -> Operands | None:
    """Formats of a module's product by the policy, None where it stays BF16.

    Raises ValueError for a recipe whose forward the sampler has not, or experts with two recipes.
    """
    name = layer_name(prefix)
    if name is None:
        return None
    if policy is None:
        is_experts = prefix.endswith(".experts")
        return get_recipe(DEFAULT_RECIPE).fprop if is_experts else None
    recipe = policy.recipe_for(name, num_layers)
    if name.endswith("experts.linear_fc1"):
        other = policy.recipe_for(name.replace("linear_fc1", "linear_fc2"), num_layers)
        if other.fprop != recipe.fprop:
            raise ValueError(
                f"{prefix}: the policy gives fc1 {recipe.name} and fc2 {other.name}; one method computes "
                "both, give them one recipe"
            )
    if recipe.fprop.right == BF16 and recipe.fprop.left == BF16:
        return None
    if recipe.fprop.right.outer != "tensor" or recipe.fprop.hadamard:
        raise ValueError(f"{prefix}: recipe {recipe.name} has no sampler; use {DEFAULT_RECIPE}")
    return recipe.fprop


def check_experts(prefix: str, facts: Iterable[tuple[str, object, tuple]]) -> None:
    """ValueError for experts that `mix` does not compute: each fact is (name, value, values it may have)."""
    wrong = [f"{name}={value!r}" for name, value, right in facts if value not in right]
    if wrong:
        raise ValueError(
            f"{prefix}: {NAME} has no experts with {', '.join(wrong)}; leave the layer in BF16 by a policy"
        )


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
    is_here = ids >= 0
    # Behind the last expert's rows, where the product writes zeros.
    ids = ids.where(is_here, w13.shape[0])
    return run_experts(x, weights.float().where(is_here, 0.0), ids, w13, w2)[0]
