"""The few names of SGLang 0.5.23 that the plugin touches: enough to load and run a layer without it."""

import fnmatch
import sys
import types
from typing import NamedTuple

import torch

MODULES = (
    "sglang",
    "sglang.srt",
    "sglang.srt.layers",
    "sglang.srt.layers.linear",
    "sglang.srt.layers.moe",
    "sglang.srt.layers.moe.fused_moe_triton",
    "sglang.srt.layers.moe.fused_moe_triton.layer",
    "sglang.srt.layers.moe.token_dispatcher",
    "sglang.srt.layers.moe.token_dispatcher.standard",
    "sglang.srt.layers.quantization",
    "sglang.srt.layers.quantization.base_config",
    "sglang.srt.layers.quantization.modelopt_quant",
    "sglang.srt.layers.quantization.unquant",
    "sglang.srt.layers.quantization.utils",
    "sglang.srt.server_args",
    "sglang.srt.utils",
)


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping = {}


class LinearMethodBase:
    pass


class FusedMoEMethodBase:
    pass


class UnquantizedLinearMethod(LinearMethodBase):
    pass


class LinearBase(torch.nn.Module):
    pass


class FusedMoE(torch.nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts


class StandardCombineInput(NamedTuple):
    hidden_states: torch.Tensor


class ModelOptFp4Config(QuantizationConfig):
    def __init__(self, excluded: list[str]) -> None:
        super().__init__()
        self.exclude_modules, self.packed_modules_mapping = excluded, None

    @classmethod
    def from_config(cls, config: dict) -> "ModelOptFp4Config":
        return cls(config.get("ignore", []))

    def is_layer_excluded(self, prefix: str) -> bool:
        return any(fnmatch.fnmatch(prefix, pattern) for pattern in self.exclude_modules)


def is_layer_skipped(prefix: str, ignored: list[str], fused_mapping: dict) -> bool:
    """A fused projection by its parts, of which all are ignored or none is."""
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    module, _, name = prefix.rpartition(".")
    found = {f"{module}.{part}" in ignored for part in parts.get(name, (name,))}
    if len(found) > 1:
        raise ValueError(f"Detected some but not all shards of {prefix}")
    return found.pop()


def set_weight_attrs(weight: torch.Tensor, attributes: dict) -> None:
    for name, value in attributes.items():
        setattr(weight, name, value)


def install(monkeypatch) -> types.SimpleNamespace:
    """Put the stand-in into sys.modules; returns the table of methods and the choices of the command line."""
    modules = {name: types.ModuleType(name) for name in MODULES}
    methods, choices = {"modelopt_fp4": ModelOptFp4Config}, []
    names = {
        "layers.linear": (LinearBase,),
        "layers.moe.fused_moe_triton.layer": (FusedMoE,),
        "layers.moe.token_dispatcher.standard": (StandardCombineInput,),
        "layers.quantization.base_config": (
            QuantizationConfig,
            LinearMethodBase,
            FusedMoEMethodBase,
        ),
        "layers.quantization.modelopt_quant": (ModelOptFp4Config,),
        "layers.quantization.unquant": (UnquantizedLinearMethod,),
        "layers.quantization.utils": (is_layer_skipped,),
        "utils": (set_weight_attrs,),
    }
    for module, members in names.items():
        for member in members:
            setattr(modules[f"sglang.srt.{module}"], member.__name__, member)
    modules["sglang.srt.layers.quantization"].QUANTIZATION_METHODS = methods
    modules["sglang.srt.server_args"].add_quantization_method_choices = choices.extend
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return types.SimpleNamespace(methods=methods, choices=choices)
