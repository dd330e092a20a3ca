"""The few names of vLLM 0.26.0 that the plugin touches: enough to load and run a layer without it.

Signatures and abstract methods are vLLM's; where vLLM is installed, test_vllm_plugin compares them.
"""

import enum
import sys
import types
from abc import ABC, abstractmethod

import torch

MODULES = (
    "vllm",
    "vllm.config",
    "vllm.model_executor",
    "vllm.model_executor.layers",
    "vllm.model_executor.layers.fused_moe",
    "vllm.model_executor.layers.linear",
    "vllm.model_executor.layers.quantization",
    "vllm.model_executor.layers.quantization.base_config",
    "vllm.model_executor.utils",
)


class QuantizeMethodBase(ABC):
    @abstractmethod
    def create_weights(self, layer, *weight_args, **extra_weight_attrs): ...

    @abstractmethod
    def apply(self, layer, *args, **kwargs): ...

    def process_weights_after_loading(self, layer):
        return


class LinearMethodBase(QuantizeMethodBase):
    @abstractmethod
    def create_weights(
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        output_size,
        params_dtype,
        **extra_weight_attrs,
    ): ...

    @abstractmethod
    def apply(self, layer, x, bias=None): ...


class UnquantizedLinearMethod(LinearMethodBase):
    create_weights = apply = None


class FusedMoEMethodBase(QuantizeMethodBase):
    def __init__(self, moe):
        super().__init__()
        self.moe = moe

    @abstractmethod
    def create_weights(
        self,
        layer,
        num_experts,
        hidden_size,
        intermediate_size_per_partition,
        params_dtype,
        **extra_weight_attrs,
    ): ...

    @abstractmethod
    def get_fused_moe_quant_config(self, layer): ...

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input): ...


class QuantizationConfig(ABC):
    def __init__(self):
        super().__init__()
        self.packed_modules_mapping = {}

    @abstractmethod
    def get_name(self): ...

    @abstractmethod
    def get_supported_act_dtypes(self): ...

    @classmethod
    @abstractmethod
    def get_min_capability(cls): ...

    @staticmethod
    @abstractmethod
    def get_config_filenames(): ...

    @classmethod
    @abstractmethod
    def from_config(cls, config): ...

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None):
        return None

    @abstractmethod
    def get_quant_method(self, layer, prefix): ...

    def maybe_update_config(self, model_name, hf_config=None, revision=None):
        return


class LinearBase(torch.nn.Module):
    def __init__(self, num_rows: int, num_cols: int, quant_config, prefix: str) -> None:
        super().__init__()
        self.quant_method = quant_config.get_quant_method(self, prefix=prefix)
        if isinstance(self.quant_method, UnquantizedLinearMethod):
            return
        self.quant_method.create_weights(
            self, num_cols, [num_rows], num_cols, num_rows, torch.bfloat16, weight_loader=self.load
        )

    def load(self, param, loaded_weight) -> None:
        param.data.copy_(loaded_weight)

    def forward(self, x, bias=None):
        return self.quant_method.apply(self, x, bias)


class MoEActivation(enum.Enum):
    SILU = "silu"
    GELU = "gelu"


class FusedMoEConfig(types.SimpleNamespace):
    activation = MoEActivation.SILU
    has_bias = is_lora_enabled = is_sequence_parallel = False
    swiglu_limit = swiglu_alpha = swiglu_beta = None
    dp_size = pcp_size = 1


class RoutedExperts(torch.nn.Module):
    def __init__(
        self, shape, quant_config, prefix: str, moe_config=None, expert_map=None, **attributes
    ) -> None:
        super().__init__()
        num_experts, width, size = shape
        self.moe_config, self.expert_map = moe_config or FusedMoEConfig(), expert_map
        self.apply_router_weight_on_input = attributes.get("apply_router_weight_on_input", False)
        self.quant_method = quant_config.get_quant_method(self, prefix)
        if self.quant_method is None:
            return
        self.quant_method.create_weights(
            layer=self,
            num_experts=num_experts,
            hidden_size=size,
            unpadded_hidden_size=size,
            intermediate_size_per_partition=width,
            params_dtype=torch.bfloat16,
            weight_loader=None,
            global_num_experts=num_experts,
        )

    def forward_modular(self, x, topk_weights, topk_ids):
        return self.quant_method.apply(
            layer=self,
            x=x,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            shared_experts=None,
            shared_experts_input=None,
        )


def set_weight_attrs(weight: torch.Tensor, weight_attrs: dict) -> None:
    for name, value in weight_attrs.items():
        assert not hasattr(weight, name)
        setattr(weight, name, value)


def install(monkeypatch) -> types.SimpleNamespace:
    """Put the stand-in into sys.modules; returns the registered methods and the current configuration."""
    modules = {name: types.ModuleType(name) for name in MODULES}
    methods, config = {}, types.SimpleNamespace(additional_config={})

    def register_quantization_config(quantization):
        return lambda method: methods.setdefault(quantization, method)

    names = {
        "config": {"get_current_vllm_config": lambda: config},
        "model_executor.layers.fused_moe": {
            "FusedMoEMethodBase": FusedMoEMethodBase,
            "RoutedExperts": RoutedExperts,
        },
        "model_executor.layers.linear": {
            "LinearBase": LinearBase,
            "LinearMethodBase": LinearMethodBase,
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
        },
        "model_executor.layers.quantization": {
            "register_quantization_config": register_quantization_config
        },
        "model_executor.layers.quantization.base_config": {
            "QuantizationConfig": QuantizationConfig
        },
        "model_executor.utils": {"set_weight_attrs": set_weight_attrs},
    }
    for module, members in names.items():
        vars(modules[f"vllm.{module}"]).update(members)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return types.SimpleNamespace(methods=methods, config=config)
