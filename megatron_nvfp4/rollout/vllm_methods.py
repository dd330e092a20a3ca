"""vLLM's classes of the method minite_nvfp4, made when vLLM is there; what they compute stands in
method.py.

Interfaces: vLLM 0.26.0, model_executor/layers: quantization/base_config.py, linear.py,
fused_moe/fused_moe_method_base.py. Layers are imported only when a model is built: a plugin is called
before vLLM has chosen its platform.
"""

import functools
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_nvfp4.deterministic.ops.linear import Prepared
from megatron_nvfp4.recipes import Operands, Policy

from .method import (
    MIN_CAPABILITY,
    NAME,
    check_experts,
    mix,
    multiply,
    operands_for,
    prepare,
    refresh,
    sampler_policy,
)

# Weights of dense layers by name, as long as their layers have them.
_PREPARED: WeakValueDictionary[str, Prepared] = WeakValueDictionary()


@torch.library.custom_op("megatron_nvfp4::vllm_linear", mutates_args=())
def _linear(x: Tensor, bias: Tensor | None, prefix: str) -> Tensor:
    """`multiply` by the weight of layer `prefix`, as one node for torch.compile: vLLM allows no breaks."""
    return multiply(x, _PREPARED[prefix], bias)


@_linear.register_fake
def _(x: Tensor, bias: Tensor | None, prefix: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], _PREPARED[prefix].shape[1])


@functools.cache
def config_class() -> type:
    """The QuantizationConfig that vLLM's table holds."""
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    class MiniteConfig(QuantizationConfig):
        def __init__(self) -> None:
            super().__init__()
            self.policy, self.num_layers = sampler_policy(), None

        def __reduce__(self) -> tuple:
            # vLLM sends its configuration to other processes; a class of a function has no address there.
            return _config_of, (vars(self),)

        def get_name(self) -> str:
            return NAME

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.bfloat16]

        @classmethod
        def get_min_capability(cls) -> int:
            return MIN_CAPABILITY

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def override_quantization_method(cls, hf_quant_cfg, user_quant, **others) -> str | None:
            # Claimed for from_config's refusal: vLLM's own error does not say what to serve.
            return NAME if user_quant == NAME else None

        @classmethod
        def from_config(cls, config: dict):
            raise ValueError(
                f"--quantization {NAME}: the checkpoint is quantised ({config.get('quant_method')}); serve "
                "the BF16 checkpoint, it is quantised when it is loaded"
            )

        def maybe_update_config(self, model_name, hf_config=None, revision=None) -> None:
            text_config = getattr(hf_config, "text_config", hf_config)
            self.num_layers = getattr(text_config, "num_hidden_layers", None)

        def get_quant_method(self, layer: torch.nn.Module, prefix: str):
            from vllm.model_executor.layers.fused_moe import RoutedExperts
            from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

            if isinstance(layer, RoutedExperts):
                operands = self.operands(prefix, is_experts=True)
                return operands and experts_method()(layer.moe_config, prefix, operands)
            if not isinstance(layer, LinearBase):
                return None
            _key_graphs_by(self.policy)
            operands = self.operands(prefix, is_experts=False)
            return linear_method()(prefix, operands) if operands else UnquantizedLinearMethod()

        def operands(self, prefix: str, is_experts: bool) -> Operands | None:
            return operands_for(prefix, self.policy, self.num_layers, is_experts=is_experts)

    return MiniteConfig


def _config_of(state: dict):
    config = object.__new__(config_class())
    vars(config).update(state)
    return config


def _key_graphs_by(policy: Policy | None) -> None:
    """Put the policy into the key of vLLM's cache of compiled graphs: it decides what they call."""
    from vllm.config import get_current_vllm_config

    get_current_vllm_config().additional_config[NAME] = repr(policy)


@functools.cache
def linear_method() -> type:
    """LinearMethodBase of dense layers."""
    from vllm.model_executor.layers.linear import LinearMethodBase
    from vllm.model_executor.utils import set_weight_attrs

    class MiniteLinearMethod(LinearMethodBase):
        def __init__(self, prefix: str, operands: Operands) -> None:
            self.prefix, self.operands = prefix, operands

        def create_weights(
            self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size,
            params_dtype, **attributes,
        ) -> None:  # fmt: skip
            shape = (sum(output_partition_sizes), input_size_per_partition)
            weight = Parameter(torch.empty(*shape, dtype=params_dtype), requires_grad=False)
            layer.register_parameter("weight", weight)
            set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0} | attributes)

        def process_weights_after_loading(self, layer) -> None:
            prepared = prepare(self.prefix, layer.weight.data, self.operands)
            refresh(layer, "minite_weight", prepared)
            if _PREPARED.setdefault(self.prefix, layer.minite_weight) is not layer.minite_weight:
                raise ValueError(
                    f"{self.prefix}: two layers of this process have this name, and a compiled graph finds a "
                    "weight by it; run one model a process"
                )

        def apply(self, layer, x, bias=None) -> Tensor:
            return torch.ops.megatron_nvfp4.vllm_linear(x, bias, self.prefix)

    return MiniteLinearMethod


@functools.cache
def experts_method() -> type:
    """FusedMoEMethodBase of routed experts."""
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
    from vllm.model_executor.utils import set_weight_attrs

    class MiniteExpertsMethod(FusedMoEMethodBase):
        def __init__(self, moe, prefix: str, operands: Operands) -> None:
            super().__init__(moe)
            self.prefix, self.operands = prefix, operands

        def create_weights(
            self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype,
            **attributes,
        ) -> None:  # fmt: skip
            _check_experts(self.prefix, self.moe, layer)
            width = intermediate_size_per_partition
            shapes = {"w13_weight": (2 * width, hidden_size), "w2_weight": (hidden_size, width)}
            for name, shape in shapes.items():
                data = torch.empty(num_experts, *shape, dtype=params_dtype)
                layer.register_parameter(name, Parameter(data, requires_grad=False))
                set_weight_attrs(getattr(layer, name), attributes)

        def process_weights_after_loading(self, layer) -> None:
            for name in ("w13_weight", "w2_weight"):
                weight = getattr(layer, name).data
                prepared = prepare(f"{self.prefix}.{name}", weight, self.operands)
                refresh(layer, "minite_" + name, prepared)

        def get_fused_moe_quant_config(self, layer) -> None:
            return None  # of vLLM's kernels

        def apply(
            self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input
        ) -> Tensor:
            # Shared experts are the runner's: only a kernel of vLLM's overlaps them itself.
            here = layer.expert_map
            ids = topk_ids if here is None else here[topk_ids.long()]
            return mix(x, topk_weights, ids, layer.minite_w13_weight, layer.minite_w2_weight)

    return MiniteExpertsMethod


def _check_experts(prefix: str, moe, layer) -> None:
    """ValueError for what the experts' operator does not compute."""
    facts = (
        ("activation", moe.activation.value, ("silu",)),
        ("has_bias", moe.has_bias, (False,)),
        ("is_lora_enabled", moe.is_lora_enabled, (False,)),
        ("swiglu_limit", moe.swiglu_limit, (None,)),
        ("swiglu_alpha", moe.swiglu_alpha, (None,)),
        ("swiglu_beta", moe.swiglu_beta, (None,)),
        ("apply_router_weight_on_input", layer.apply_router_weight_on_input, (False,)),
        ("dp_size", moe.dp_size, (1,)),
        ("pcp_size", moe.pcp_size, (1,)),
        ("is_sequence_parallel", moe.is_sequence_parallel, (False,)),
    )
    check_experts(prefix, facts)
