"""What an NVFP4 checkpoint in ModelOpt's format says that the sampler has to compute."""

import logging
from collections.abc import Mapping
from copy import copy
from typing import Any, Protocol

from megatron_nvfp4.recipes import BF16, RECIPES, NVFP4Spec, Operands

from .method import NAME

logger = logging.getLogger(__name__)
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")  # values of quant_algo
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Exclusions(Protocol):
    """SGLang's reading of what a checkpoint leaves in BF16."""

    exclude_modules: list[str]

    def is_layer_excluded(self, prefix: str) -> bool: ...


def declared_operands(config: Mapping[str, Any]) -> Operands:
    """Forward formats of every quantised layer, from the checkpoint's quantization_config.

    Files of other tools than export-nvfp4 do not say how activations were scaled: they are here, per token.
    Raises ValueError for other formats than NVFP4, weights of several recipes beside quantised
    activations, and a file of ours whose activations are scaled otherwise.
    """
    config = config.get("quantization", config)  # as older hf_quant_config.json has it
    algorithm = config.get("quant_algo")
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"--quantization {NAME}: the checkpoint's quant_algo is {algorithm!r}, it takes "
            f"{' or '.join(ALGORITHMS)}; serve a BF16 checkpoint or one of export-nvfp4 --format modelopt"
        )
    producer = config.get("producer") or {}
    activations = producer.get("activations", "token")
    if algorithm == "W4A16_NVFP4":
        activations = "none"
    elif "activations" not in producer:
        logger.warning(
            "%s: the checkpoint is not of export-nvfp4; activations are scaled per token, its input "
            "scales are not read",
            NAME,
        )
    weights = producer.get("weights", str(NVFP4Spec()))
    if activations == "none":
        specs = (recipe.fprop.right for recipe in RECIPES.values())
        right = next((s for s in specs if isinstance(s, NVFP4Spec) and str(s) == weights), None)
        return Operands(left=BF16, right=right or NVFP4Spec())
    if activations != "token":
        raise ValueError(
            f"--quantization {NAME}: it computes one activation scale per token, the checkpoint's "
            f"producer.activations is {activations!r}; export with --recipe nvfp4_per_token or "
            "nvfp4_w4a16, or serve it by modelopt_fp4"
        )
    for recipe in RECIPES.values():
        left, right = recipe.fprop.left, recipe.fprop.right
        is_per_token = isinstance(left, NVFP4Spec) and left.outer == "token"
        if is_per_token and str(right) == weights:
            return recipe.fprop
    raise ValueError(
        f"--quantization {NAME}: no recipe has activations per token beside weights {weights}, which the "
        "checkpoint's producer names; export it by one recipe"
    )


def keeps_experts(checkpoint: Exclusions, prefix: str, num_experts: int) -> bool:
    """Whether the checkpoint has all experts of a layer in BF16; ValueError where it has some of them."""
    if checkpoint.is_layer_excluded(prefix):
        return True
    listed = set(checkpoint.exclude_modules)
    others = copy(checkpoint)
    # Full names are looked up: lists of every expert's projections are long.
    others.exclude_modules = [name for name in listed if "*" in name or "." not in name]
    found = {}
    for expert in range(num_experts):
        for projection in _PROJECTIONS:
            name = f"{prefix}.{expert}.{projection}"
            is_listed = name in listed or f"{prefix}.{expert}" in listed
            found[name] = is_listed or others.is_layer_excluded(name)
    if len(set(found.values())) == 2:
        kept = [name for name, is_kept in found.items() if is_kept]
        raise ValueError(
            f"{prefix}: the checkpoint excludes {len(kept)} of {len(found)} projections of the experts, "
            f"{kept[0]} among them; one method computes them all, export them in one format"
        )
    return all(found.values())
