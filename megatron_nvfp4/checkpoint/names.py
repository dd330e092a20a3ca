"""The names under which Megatron stores one parameter, and their translation to Transformer Engine's.

Megatron's local spec keeps norms outside of the linears behind them and experts in a list; distributed
checkpoints stack layers and experts; other trainers put a prefix in front.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_nvfp4.checkpoint.architecture import Architecture

_PREFIXES = ("module.", "model.")
# What a checkpoint holds beside weights: all of it can be left behind in a conversion.
_NO_WEIGHT = re.compile(
    r"^(optimizer|opt_param_scheduler|rng_state|rerun_state_machine|common_state)\b"
    r"|(^|\.)(_extra_state\d*|inv_freq|local_tokens_per_expert)(/|$)"
)
_LAYER = re.compile(
    r"^((?:decoder|mtp)\.layers\.(?:(\d+)\.)?)(transformer_layer\.|mtp_model_layer\.)?"
)
_LISTED = re.compile(
    r"^mlp\.experts\.(?:local_experts|experts)\.(\d+)\.(linear_fc\d)\.(\w+?)(_[wv])?$"
)
_GROUPED = re.compile(r"^(mlp\.experts\.)(linear_fc\d\.\w+?)(\d+)$")
_STACKED = re.compile(r"^(mlp\.experts\.)(?:experts\.)?(linear_fc\d\.\w+)$")
_HALVES = {"_w": "gate", "_v": "up", None: None}


@dataclass(frozen=True)
class Address:
    """Where a distributed checkpoint keeps one parameter: a key, and the place on its leading axes.

    half: "gate" or "up" where the key holds only that half of FC1.
    """

    key: str
    layer: int | None = None
    expert: int | None = None
    half: str | None = None


def without_prefix(name: str) -> str:
    """The name without the wrappers in front of it, `module.` and `model.`, however many."""
    while name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    return name


def is_weight(name: str) -> bool:
    """Whether a stored name is a parameter's, not optimizer state, extra state or a random state."""
    return _NO_WEIGHT.search(without_prefix(name)) is None


def from_local_name(name: str, arch: Architecture | None = None) -> str:
    """Transformer Engine's name of a parameter stored as `name`; names that are its already stay.

    arch: tells a dense layer's norm from an MoE layer's and latent attention's norms from those of q
    and k; None: names are told apart as in a model without MoE layers and latent attention. Layer and
    expert numbers are kept as they are.
    """
    name = without_prefix(name)
    match = _LAYER.match(name)
    if match is None:
        return name
    prefix = match[1] + ("transformer_layer." if match[3] else "")
    rest = name[match.end() :]
    listed = _LISTED.match(rest)
    if listed is not None:
        expert, linear, what, half = listed.groups()
        return f"{prefix}mlp.experts.{linear}.{what}{expert}{half or ''}"
    layer = int(match[2]) if match[2] else 0
    return prefix + _norms(arch, layer, is_mtp=bool(match[3])).get(rest, rest)


def _norms(arch: Architecture | None, layer: int, *, is_mtp: bool) -> dict[str, str]:
    """Other places of a layer's norms -> Transformer Engine's."""
    attention, fc1 = "self_attention.linear_", "mlp.linear_fc1.layer_norm_weight"
    is_last = is_mtp or (arch is not None and layer >= arch.num_layers)
    is_moe = arch is not None and arch.moe_layers[-1 if is_last else layer]
    if is_moe:
        # The local spec maps a dense layer's norm and an MoE layer's to the same stored name.
        norms = {fc1: "pre_mlp_layernorm.weight"}
    else:
        norms = {"pre_mlp_layernorm.weight": fc1}
    if arch is None or arch.latent is None:
        return norms | {"input_layernorm.weight": f"{attention}qkv.layer_norm_weight"}
    for first in ("q_down", "kv_down", "qkv_down", "q"):
        norms[f"{attention}{first}_proj.layer_norm_weight"] = "input_layernorm.weight"
    for name in ("q", "kv"):
        up = f"{attention}{name}_up_proj.layer_norm_weight"
        norm = f"self_attention.{name}_layernorm.weight"
        norms |= {norm: up} if arch.indexer is None else {up: norm}
    return norms


def stored_parameters(
    key: str, shape: tuple[int, ...], arch: Architecture
) -> Iterator[tuple[str, Address]]:
    """Every parameter that a distributed checkpoint's tensor `key` of `shape` holds, with its place."""
    plain = without_prefix(key)
    match = _LAYER.match(plain)
    if match is None:
        yield plain, Address(key)
        return
    stacked = match[2] is None
    axes = list(shape)
    for layer in range(axes.pop(0)) if stacked else [None]:
        name = f"{match[1]}{layer}.{plain[match.end() :]}" if stacked else plain
        name = from_local_name(name, arch)
        half = name[-2:] if name.endswith(("_w", "_v")) else None
        prefix, rest = _split(name.removesuffix(half or ""))
        experts = None if _GROUPED.match(rest) else _STACKED.match(rest)
        if experts is None:
            yield prefix + rest, Address(key, layer, half=_HALVES[half])
            continue
        for expert in range(axes[0]):
            yield f"{prefix}{experts[1]}{experts[2]}{expert}", Address(key, layer, expert)


def _split(name: str) -> tuple[str, str]:
    match = _LAYER.match(name)
    assert match is not None
    return name[: match.end()], name[match.end() :]


def distributed_address(key: str, *, stacked: bool) -> Address:
    """Where Megatron's distributed checkpoints keep the parameter `key`.

    stacked: whether decoder layers share one tensor, with the layer as its first axis; experts of a
    layer always share one.
    """
    match = _LAYER.match(key)
    if match is None:
        return Address(key)
    prefix, rest = _split(key)
    layer = None
    if stacked and prefix.startswith("decoder."):
        prefix, layer = "decoder.layers.", int(match[2])
    grouped = _GROUPED.match(rest)
    if grouped is not None:
        return Address(f"{prefix}{grouped[1]}experts.{grouped[2]}", layer, int(grouped[3]))
    return Address(prefix + rest, layer)
