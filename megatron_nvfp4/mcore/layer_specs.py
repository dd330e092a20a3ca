"""Layer specs of GPT models on minite layers: the one place the patch, the launcher and --spec share."""

from functools import partial

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from . import wgrad_fusion
from .arguments import moe_layer_pattern, policy_of, require_supported
from .layer_numerics import MegatronLinear
from .moe import MiniTEMoELayer
from .spec_provider import MiniTESpecProvider


class MiniTETransformerLayer(TransformerLayer):
    """Megatron's layer, which tells each of our linears, and the MoE layer, its model-wide name.

    Inside a pipeline stage module paths count from the stage's first layer; the policy needs the name that
    checkpoints use, decoder.layers.<model-wide index>.
    """

    def __init__(self, config, submodules, *args, **kwargs) -> None:
        if submodules is LAYER_FROM_CONFIG:
            layer_number = kwargs.get("layer_number", args[0] if args else 1)
            offset = 0
            if not kwargs.get("is_mtp_layer") and kwargs.get("add_layer_offset", True):
                offset = get_transformer_layer_offset(config, kwargs.get("vp_stage"))
            moe = moe_layer_pattern(config)[layer_number + offset - 1]
            submodules = get_minite_layer_spec(config, moe).submodules
        super().__init__(config, submodules, *args, **kwargs)
        stem = f"decoder.layers.{self.layer_number - 1}"
        if self.is_mtp_layer:
            stem = f"mtp.layers.{self.layer_number - 1}.transformer_layer"
        for name, module in self.named_modules():
            if isinstance(module, MegatronLinear | MiniTEMoELayer):
                module.layer_name = f"{stem}.{name}"
        if policy_of(config).deterministic:
            self.register_forward_pre_hook(_refuse_to_run)


def _refuse_to_run(layer: MiniTETransformerLayer, _) -> None:
    profile = policy_of(layer.config).deterministic
    raise RuntimeError(
        f"layer {layer.layer_number}: deterministic: {profile} takes the place of a GPTModel's forward, "
        "and this model has kept its own; build a GPTModel of a Megatron-LM that calls finish_init "
        "(core_v0.19), or leave the profile out"
    )


# Stands for "build the submodules from the config", where a bare ModuleSpec is all that can be given.
LAYER_FROM_CONFIG = TransformerLayerSubmodules()


def get_minite_layer_spec(
    config: TransformerConfig, moe: bool, qk_l2_norm: bool = False
) -> ModuleSpec:
    """Spec of one decoder layer, MoE or dense.

    Raises ValueError with every reason why `config` cannot run on minite layers.
    """
    require_supported(config, HAVE_TE)
    if config.gradient_accumulation_fusion:
        wgrad_fusion.install()
    if policy_of(config).deterministic:
        from . import deterministic_run

        deterministic_run.install()
    backend = MiniTESpecProvider()
    qk_norm = IdentityOp
    if qk_l2_norm:
        qk_norm = L2Norm
    elif config.qk_layernorm:
        qk_norm = backend.layer_norm(for_qk=True)
    mlp = get_mlp_module_spec_for_backend(
        backend=backend,
        num_experts=config.num_moe_experts if moe else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
    )
    if moe:
        mlp = partial(MiniTEMoELayer, *mlp.args, **mlp.keywords)
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_layer_norm_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    return ModuleSpec(
        module=MiniTETransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=backend.layer_norm() if moe else IdentityOp,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def get_minite_layer_specs(config: TransformerConfig, qk_l2_norm: bool = False) -> list[ModuleSpec]:
    """Specs of every decoder layer of the model, in order."""
    pattern = moe_layer_pattern(config)
    specs = {moe: get_minite_layer_spec(config, moe, qk_l2_norm) for moe in set(pattern)}
    return [specs[moe] for moe in pattern]


def get_minite_block_spec(
    config: TransformerConfig,
    qk_l2_norm: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage, and the final norm."""
    specs = get_minite_layer_specs(config, qk_l2_norm)
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        indices = layout.get_layer_id_list(
            layer_type=LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank
        )
        local = [specs[index] for index in indices]
    else:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
        local = specs[first : first + get_num_layers_to_build(config, vp_stage, pp_rank)]
    final_norm = MiniTESpecProvider().layer_norm(rms_norm=config.normalization == "RMSNorm")
    return TransformerBlockSubmodules(layer_specs=local, layer_norm=final_norm)


class GPTSpec(ModuleSpec):
    """What `--spec megatron_nvfp4.mcore gpt_spec` names, in every way frameworks use it.

    Called f(GPTModelConfig, vp_stage=) or f(GPTModelConfig), and f(args, config, vp_stage) (slime, miles):
    returns the block spec. Used as it is (gpt_builders.py, and models/gpt.py of core_v0.19, which do not
    call a ModuleSpec): a layer spec whose layer builds itself from its config; the final norm is then
    Megatron's default.
    """

    def __init__(self) -> None:
        super().__init__(module=MiniTETransformerLayer, submodules=LAYER_FROM_CONFIG)

    def __call__(
        self, first, config=None, vp_stage: int | None = None
    ) -> TransformerBlockSubmodules:
        """first: a GPTModelConfig (with .transformer), a TransformerConfig, or args followed by config."""
        if isinstance(config, int):  # f(GPTModelConfig, vp_stage) by position
            config, vp_stage = None, config
        if config is None:
            config = getattr(first, "transformer", first)
        if not isinstance(config, TransformerConfig):
            raise ValueError(
                f"gpt_spec: called with {type(first).__name__} and {type(config).__name__}; give a "
                "GPTModelConfig, or args and a TransformerConfig"
            )
        return get_minite_block_spec(config, getattr(config, "qk_l2_norm", False), vp_stage)


gpt_spec = GPTSpec()
