"""`--quantization minite_nvfp4` for SGLang 0.5.23 and later: NVFP4 by this project's quantisers and GEMMs.

SGLang calls `register` in each of its processes (entry point `sglang.srt.plugins`); nothing of SGLang
is replaced. BF16 checkpoints are quantised when they are loaded, and again after every weight update;
NVFP4 checkpoints in ModelOpt's format, as `export-nvfp4` writes them, are taken as they are, in the
linear layout. Activations are quantised per token. The learner computes the same with the profile
`sglang_minite_nvfp4`.

Which layers: of a BF16 checkpoint those that the policy selects (MINITE_RECIPE, MINITE_CONFIG), by
Megatron's layer names, or without any selection the experts alone; of an NVFP4 checkpoint those it does
not exclude. Router, embedding and head stay BF16. One rank: a shard of a weight has another amax than
the weight.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_nvfp4.deterministic.ops.experts import run_experts
from megatron_nvfp4.deterministic.ops.linear import Prepared
from megatron_nvfp4.quant.layout import dense_offsets
from megatron_nvfp4.recipes import BF16, Operands, Policy, get_recipe, resolve

NAME = "minite_nvfp4"
DEFAULT_RECIPE = "nvfp4_per_token"
MIN_CAPABILITY = 80
# SGLang's modules of a layer, by what Megatron calls them.
MODULES = {
    "self_attn.qkv_proj": "self_attention.linear_qkv",
    "self_attn.o_proj": "self_attention.linear_proj",
    "mlp.gate_up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
    "mlp.experts": "mlp.experts.linear_fc1",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def register() -> None:
    """Add the method to SGLang's table and to the choices of its command line."""
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.server_args import add_quantization_method_choices

    from .sglang_methods import config_class

    others = {name: method for name, method in QUANTIZATION_METHODS.items() if name != NAME}
    QUANTIZATION_METHODS.clear()
    # First: the first method that claims a checkpoint has it, and modelopt_fp4 claims its own.
    QUANTIZATION_METHODS.update({NAME: config_class(), **others})
    add_quantization_method_choices([NAME])


def layer_name(prefix: str) -> str | None:
    """Megatron's name of SGLang's module `prefix`, None for one that is never quantised."""
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
                f"{prefix}: the policy gives fc1 {recipe.name} and fc2 {other.name}; SGLang has one method "
                "for both, give them one recipe"
            )
    if recipe.fprop.right == BF16 and recipe.fprop.left == BF16:
        return None
    if recipe.fprop.right.outer != "tensor" or recipe.fprop.hadamard:
        raise ValueError(f"{prefix}: recipe {recipe.name} has no sampler; use {DEFAULT_RECIPE}")
    return recipe.fprop


def one_scale(prefix: str, scales: Tensor) -> Tensor:
    """The outer scale FP32 (G,) of fused projections with (G, parts); ValueError where parts differ."""
    if not torch.equal(scales, scales[:, :1].expand_as(scales)):
        worst = int((scales != scales[:, :1]).any(1).int().argmax())
        raise ValueError(
            f"{prefix}: fused projections have outer scales {scales[worst].tolist()}; one product needs one, "
            "export with a joint scale (export-nvfp4 does)"
        )
    return scales[:, 0].contiguous()


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

    An id of -1, of a row that pads a CUDA graph, has a weight of 0 and any expert will do.
    """
    return run_experts(x, weights.float(), ids.clamp(min=0), w13, w2)[0]
