"""SGLang's classes of the method minite_nvfp4, made when SGLang is there; what they compute stands in
method.py.

Interfaces: SGLang 0.5.23, srt/layers/quantization/base_config.py. Parameters keep the checkpoint's
shapes and dtypes, so that weight updates load into them; what the products read is made beside them.
"""

import functools
import math

import torch
from torch.nn import Parameter

from megatron_nvfp4.deterministic.ops.linear import Prepared
from megatron_nvfp4.recipes import Operands

from .checkpoint import declared_operands, keeps_experts
from .method import (
    MIN_CAPABILITY,
    NAME,
    check_experts,
    mix,
    multiply,
    operands_for,
    policy_operands,
    prepare,
    refresh,
    sampler_policy,
)

BLOCK = 16
CHECKPOINTS = ("modelopt", "modelopt_fp4")  # quant_method of the checkpoints it takes


@functools.cache
def config_class() -> type:
    """The QuantizationConfig that SGLang's table holds."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.quantization.utils import is_layer_skipped

    class MiniteConfig(QuantizationConfig):
        def __init__(
            self, checkpoint=None, declared: Operands | None = None, num_layers: int | None = None
        ) -> None:
            super().__init__()
            # checkpoint, declared: of an NVFP4 checkpoint, SGLang's reading of it and its formats.
            self.checkpoint, self.declared, self.num_layers = checkpoint, declared, num_layers
            self.policy = sampler_policy()

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
        def from_config(cls, config: dict):
            declared = declared_operands(config)
            text_config = getattr(config.get("hf_config"), "text_config", config.get("hf_config"))
            num_layers = getattr(text_config, "num_hidden_layers", None)
            return cls(ModelOptFp4Config.from_config(config), declared, num_layers)

        @classmethod
        def override_quantization_method(cls, hf_quant_cfg, user_quant) -> str | None:
            method = (hf_quant_cfg or {}).get("quant_method", "")
            return NAME if user_quant == NAME and method in CHECKPOINTS else None

        def get_quant_method(self, layer: torch.nn.Module, prefix: str):
            is_linear = isinstance(layer, LinearBase)
            if not is_linear and not isinstance(layer, FusedMoE):
                return None
            if self.checkpoint is None:
                asked = {"is_experts": not is_linear}
                operands = operands_for(prefix, self.policy, self.num_layers, **asked)
            else:
                num_experts = None if is_linear else layer.num_experts
                operands = self.stored(prefix, num_experts)
            if operands is None:
                return UnquantizedLinearMethod() if is_linear else None
            method = linear_method() if is_linear else experts_method()
            return method(prefix, operands, self.checkpoint is not None)

        def stored(self, prefix: str, num_experts: int | None) -> Operands | None:
            """Formats of a module of the checkpoint, None where it has it in BF16; num_experts: of experts.

            Raises ValueError where a policy is given that says something else.
            """
            keeps = self.keeps(prefix, num_experts) or prefix.endswith("mlp.gate")
            found = None if keeps else self.declared
            if self.policy is not None:
                is_experts = num_experts is not None
                asked = policy_operands(prefix, self.policy, self.num_layers, is_experts=is_experts)
                if asked != found:
                    raise ValueError(
                        f"{prefix}: the checkpoint has {found or 'BF16'}, the policy {asked or 'BF16'}; "
                        "unset MINITE_RECIPE and MINITE_CONFIG, or export the checkpoint by this policy"
                    )
            return found

        def keeps(self, prefix: str, num_experts: int | None) -> bool:
            """Whether the checkpoint has the module in BF16; it names the parts of a fused projection."""
            checkpoint = self.checkpoint
            if num_experts is not None:
                return keeps_experts(checkpoint, prefix, num_experts)
            names = checkpoint.exclude_modules, checkpoint.packed_modules_mapping or {}
            return is_layer_skipped(prefix, *names) or checkpoint.is_layer_excluded(prefix)

        def get_scaled_act_names(self) -> list[str]:
            return []

    return MiniteConfig


@functools.cache
def linear_method() -> type:
    """LinearMethodBase of dense layers."""
    from sglang.srt.layers.quantization.base_config import LinearMethodBase
    from sglang.srt.utils import set_weight_attrs

    class MiniteLinearMethod(LinearMethodBase):
        def __init__(self, prefix: str, operands: Operands, is_packed: bool) -> None:
            self.prefix, self.operands, self.is_packed = prefix, operands, is_packed

        def create_weights(
            self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size,
            params_dtype, **attributes,
        ) -> None:  # fmt: skip
            num_rows, num_cols = sum(output_partition_sizes), input_size_per_partition
            num_ranks = _num_ranks(self.prefix, (num_rows, num_cols), (output_size, input_size))
            _check_cut(self.prefix, num_ranks, self.is_packed)
            matrices = _parameters(self.is_packed, (num_rows,), num_cols, params_dtype)
            for suffix, parameter in matrices.items():
                layer.register_parameter("weight" + suffix, parameter)
                set_weight_attrs(parameter, {"input_dim": 1, "output_dim": 0} | attributes)
            scales = ("weight_scale_2", "input_scale") if self.is_packed else ()
            for name in scales:
                parameter = _ones(len(output_partition_sizes))
                layer.register_parameter(name, parameter)
                set_weight_attrs(parameter, {"needs_scalar_to_array": True} | attributes)

        def process_weights_after_loading(self, layer) -> None:
            if self.is_packed:
                scale = _one_scale(self.prefix, layer.weight_scale_2.data[None])
                parts = layer.weight.data[None], layer.weight_scale.data[None]
                prepared = Prepared.of_codes(*parts, scale, self.operands)
            else:
                prepared = prepare(self.prefix, layer.weight.data, self.operands)
            refresh(layer, "minite_weight", prepared)

        def apply(self, layer, x, bias=None) -> torch.Tensor:
            return multiply(x, layer.minite_weight, bias)

    return MiniteLinearMethod


@functools.cache
def experts_method() -> type:
    """FusedMoEMethodBase of routed experts."""
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
    from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
    from sglang.srt.utils import set_weight_attrs

    class MiniteExpertsMethod(FusedMoEMethodBase):
        def __init__(self, prefix: str, operands: Operands, is_packed: bool) -> None:
            self.prefix, self.operands, self.is_packed = prefix, operands, is_packed

        def create_weights(
            self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype,
            **attributes,
        ) -> None:  # fmt: skip
            width = intermediate_size_per_partition
            whole = attributes.get("moe_intermediate_size", width)
            _num_ranks(self.prefix, (num_experts, width), (layer.num_experts, whole))
            _check_cut(self.prefix, whole // width, self.is_packed)
            shapes = {"w13_weight": (2 * width, hidden_size), "w2_weight": (hidden_size, width)}
            for name, (num_rows, num_cols) in shapes.items():
                lead = (num_experts, num_rows)
                matrices = _parameters(self.is_packed, lead, num_cols, params_dtype)
                for suffix, parameter in matrices.items():
                    layer.register_parameter(name + suffix, parameter)
                    set_weight_attrs(parameter, attributes | {"quant_method": "block"})
                if self.is_packed:
                    parts = (num_experts, 2) if name == "w13_weight" else (num_experts,)
                    inputs = name.replace("weight", "input_scale")
                    for each, shape in ((name + "_scale_2", parts), (inputs, (num_experts,))):
                        layer.register_parameter(each, _ones(*shape))
                        set_weight_attrs(
                            getattr(layer, each), attributes | {"quant_method": "tensor"}
                        )

        def create_moe_runner(self, layer, moe_runner_config) -> None:
            _check_experts(self.prefix, moe_runner_config)
            self.moe_runner_config = moe_runner_config

        def process_weights_after_loading(self, layer) -> None:
            for name in ("w13_weight", "w2_weight"):
                weight = getattr(layer, name).data
                if self.is_packed:
                    scales = getattr(layer, name + "_scale_2").data
                    scale = _one_scale(f"{self.prefix}.{name}", scales.view(len(weight), -1))
                    block_scales = getattr(layer, name + "_scale").data
                    prepared = Prepared.of_codes(weight, block_scales, scale, self.operands)
                else:
                    prepared = prepare(f"{self.prefix}.{name}", weight, self.operands)
                refresh(layer, "minite_" + name, prepared)

        def apply(self, layer, dispatch_output):
            chosen = dispatch_output.topk_output
            out = mix(
                dispatch_output.hidden_states, chosen.topk_weights, chosen.topk_ids,
                layer.minite_w13_weight, layer.minite_w2_weight,
            )  # fmt: skip
            return StandardCombineInput(hidden_states=out)

    return MiniteExpertsMethod


def _parameters(
    is_packed: bool, lead: tuple[int, ...], num_cols: int, dtype: torch.dtype
) -> dict[str, Parameter]:
    """Matrices (*lead, num_cols) in BF16, or their codes and block scales, by the suffix of their name."""
    if not is_packed:
        return {"": _empty(lead, num_cols, dtype)}
    if num_cols % BLOCK:
        raise ValueError(f"{NAME}: K={num_cols} is no multiple of {BLOCK}; exclude the layer")
    codes = _empty(lead, num_cols // 2, torch.uint8)
    return {"": codes, "_scale": _empty(lead, num_cols // BLOCK, torch.float8_e4m3fn)}


def _empty(lead: tuple[int, ...], num_cols: int, dtype: torch.dtype) -> Parameter:
    return Parameter(torch.empty(*lead, num_cols, dtype=dtype), requires_grad=False)


def _ones(*shape: int) -> Parameter:
    return Parameter(torch.ones(*shape, dtype=torch.float32), requires_grad=False)


def _num_ranks(prefix: str, held: tuple[int, int], whole: tuple[int, int]) -> int:
    """How many ranks share what one holds a part of, 1 or 2; ValueError for others."""
    num_ranks = math.prod(of // part for part, of in zip(held, whole, strict=True))
    if num_ranks > 2 or math.prod(held) * num_ranks != math.prod(whole):
        raise ValueError(
            f"{prefix}: this rank holds {held} of {whole}; the order in which more than two ranks add their "
            "sums is not known, start SGLang with tp_size=2 and ep_size=1 or 2, or with both 1"
        )
    return num_ranks


def _check_cut(prefix: str, num_parts: int, is_packed: bool) -> None:
    """ValueError for matrices of an NVFP4 checkpoint that are cut into parts."""
    if is_packed and num_parts > 1:
        raise ValueError(
            f"{prefix}: an NVFP4 matrix cut into {num_parts} keeps the scale of the whole, the learner "
            "quantises each part by itself; serve the BF16 checkpoint, or experts with ep_size=tp_size"
        )


def _one_scale(prefix: str, scales: torch.Tensor) -> torch.Tensor:
    """The outer scale FP32 (G,) of fused projections with (G, parts); ValueError where parts differ."""
    if not torch.equal(scales, scales[:, :1].expand_as(scales)):
        worst = int((scales != scales[:, :1]).any(1).int().argmax())
        raise ValueError(
            f"{prefix}: fused projections have outer scales {scales[worst].tolist()}; one product needs one, "
            "export with a joint scale (export-nvfp4 does)"
        )
    return scales[:, 0].contiguous()


def _check_experts(prefix: str, config) -> None:
    """ValueError for what the experts' operator does not compute."""
    facts = (
        ("activation", config.activation, ("silu",)),
        ("is_gated", config.is_gated, (True,)),
        ("apply_router_weight_on_input", config.apply_router_weight_on_input, (False,)),
        ("routed_scaling_factor", config.routed_scaling_factor, (None, 1.0)),
        ("no_combine", config.no_combine, (False,)),
    )
    check_experts(prefix, facts)
