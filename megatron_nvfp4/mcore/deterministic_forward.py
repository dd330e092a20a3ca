"""The deterministic forward on a Megatron GPT model's own parameters: log-probabilities that a sampler
reported.

Between Megatron's layers travels one tensor, rounded to BF16; SGLang's norms read the sum of two before
its rounding. So the forward is not assembled from layer specs: it takes the built model's parameters,
whatever spec they came from, and computes beside Megatron's forward, which stays as it is, or in its
place (deterministic_run.py). Gradients arrive in the parameters, or in their main_grad, through the hooks
that Megatron's DDP has set on them (deterministic_weights.py).

With --tensor-model-parallel-size 2 every rank gives its shards, which are the shares of a sampler of tp2:
groups of heads, halves of gate and of up one above the other, columns of the projections behind them, rows of
the padded vocabulary. Gradients of q and k norms are each rank's part: Megatron's finalize_model_grads adds
them, with or without a profile.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_nvfp4.deterministic.model import Model
from megatron_nvfp4.deterministic.ops.collectives import all_gathered
from megatron_nvfp4.deterministic.profiles import Profile, RunFacts, SamplerRanks, require

from .arguments import moe_layer_pattern
from .deterministic_weights import model_weights, own_weights

# (attribute of TransformerConfig, values the forward computes, remedy)
_NEEDED = (
    ("normalization", ("RMSNorm",), "use --normalization RMSNorm"),
    ("layernorm_zero_centered_gamma", (False,), "drop --apply-layernorm-1p"),
    ("add_bias_linear", (False,), "use --disable-bias-linear"),
    ("add_qkv_bias", (False,), "drop --add-qkv-bias"),
    ("qk_layernorm", (True,), "use --qk-layernorm"),
    ("gated_linear_unit", (True,), "use --swiglu"),
    ("activation_func", (torch.nn.functional.silu,), "use --swiglu"),
    ("multi_latent_attention", (False,), "use a model without it"),
    ("pipeline_model_parallel_size", (1,), "the forward holds all layers, use 1"),
    ("mtp_num_layers", (None,), "the sampler scores with the main model alone, leave it unset"),
    ("moe_router_score_function", ("softmax",), "use softmax"),
    ("moe_router_enable_expert_bias", (False,), "drop --moe-router-enable-expert-bias"),
    ("moe_router_num_groups", (None,), "leave it unset"),
    ("moe_router_topk_scaling_factor", (None,), "leave it unset"),
    ("qk_l2_norm", (False,), "drop --qk-l2-norm"),
    ("softmax_scale", (None,), "leave it unset"),
    ("softmax_type", ("vanilla",), "use vanilla"),
    ("attention_output_gate", (False,), "drop it"),
    ("no_rope_freq", (None,), "leave it unset"),
    ("rotary_interleaved", (False,), "drop --rotary-interleaved"),
    ("glu_linear_offset", (0.0,), "leave it unset"),
    ("activation_func_clamp_value", (None,), "leave it unset"),
    ("fp32_residual_connection", (False,), "drop --fp32-residual-connection"),
    ("apply_residual_connection_post_layernorm", (False,), "drop it"),
    ("use_mup", (False,), "drop --use-mup"),
    ("moe_aux_loss_coeff", (0.0, None), "the forward has no loss beside the tokens', set it to 0"),
    ("moe_z_loss_coeff", (None,), "the forward has no loss beside the tokens', leave it unset"),
    (
        "moe_router_load_balancing_type",
        ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
        "the sampler's router takes the largest logits, use none",
    ),
    ("moe_input_jitter_eps", (None,), "leave it unset"),
    ("moe_router_force_load_balancing", (False,), "drop --moe-router-force-load-balancing"),
    ("moe_router_force_biased", (None,), "leave it unset"),
    ("moe_latent_size", (None,), "leave it unset"),
    ("moe_mlp_glu_interleave_size", (None,), "leave it unset"),
)


def deterministic_model(
    model: torch.nn.Module,
    profile: str | Profile,
    *,
    vocab_size: int,
    attention_kind: str = "triton",
    sampler: SamplerRanks | str = "tp1",
) -> Model:
    """The forward of `profile` on the present values of a GPTModel, with gradients to its parameters.

    model: a GPTModel, or what Megatron wrapped around it. vocab_size: tokens without the padding of the
    embedding. sampler: the ranks it is spread over, tp1, tp2 or tp2ep2. To be called anew after every
    optimizer step, on all tensor-parallel ranks alike. Raises ValueError with all reasons where the
    model or its configuration cannot honour the profile.
    """
    while not hasattr(model, "decoder"):
        model = model.module
    sampler = SamplerRanks.parse(sampler)
    profile = require_model(model, profile, attention_kind, sampler)
    positions = model.max_sequence_length
    return build(model, profile, attention_kind, sampler, vocab_size, positions)


def require_model(
    model: torch.nn.Module,
    profile: str | Profile,
    attention_kind: str,
    sampler: SamplerRanks,
) -> Profile:
    """The profile, or ValueError with all reasons why this GPTModel cannot honour it."""
    device = next(model.parameters()).device
    facts = run_facts(model.config, attention_kind, sampler, device)
    is_scaled = model.position_embedding_type != "rope" or model.rotary_scaling
    facts = replace(facts, rope_scaling=is_scaled)
    return require(profile, facts, [*config_faults(model.config), *_rope_faults(model)])


def build(
    model: torch.nn.Module,
    profile: Profile,
    attention_kind: str,
    sampler: SamplerRanks,
    vocab_size: int,
    num_positions: int,
    kind: type[Model] = Model,
) -> Model:
    """The forward for sequences of up to `num_positions` tokens, of a GPTModel that honours the profile."""
    config = model.config
    described = {
        "model_type": _model_type(config),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "rms_norm_eps": config.layernorm_epsilon,
        "rope_theta": model.rotary_base,
        "max_position_embeddings": num_positions,
        "vocab_size": vocab_size,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "intermediate_size": config.ffn_hidden_size,
        "moe_intermediate_size": config.moe_ffn_hidden_size,
        "num_experts": config.num_moe_experts or 0,
        "mlp_only_layers": [n for n, moe in enumerate(moe_layer_pattern(config)) if not moe],
        "num_experts_per_tok": config.moe_router_topk,
        # Megatron takes the softmax of the chosen logits, unless it is told to take it first.
        "norm_topk_prob": not config.moe_router_pre_softmax,
    }
    group = get_tensor_model_parallel_group() if config.tensor_model_parallel_size > 1 else None
    weights = model_weights(model, sampler if group is None else SamplerRanks())
    return kind(
        weights, described, profile, attention_kind=attention_kind, sampler=sampler, group=group
    )


def _model_type(config: TransformerConfig) -> str:
    return "qwen3_moe" if config.num_moe_experts else "qwen3"


def run_facts(
    config: TransformerConfig,
    attention_kind: str,
    sampler: SamplerRanks,
    device: torch.device,
) -> RunFacts:
    """What Megatron's configuration says of a run on `device`; of rope it knows nothing."""
    has_both = bool(config.num_moe_experts) and not all(moe_layer_pattern(config))
    return RunFacts(
        model_type=_model_type(config),
        attention=attention_kind,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        hidden_size=config.hidden_size,
        mlp_width=config.moe_ffn_hidden_size if config.num_moe_experts else config.ffn_hidden_size,
        num_experts=config.num_moe_experts or 0,
        dense_width=config.ffn_hidden_size if has_both else None,
        sampler=sampler,
        params_dtype=str(config.params_dtype).removeprefix("torch."),
        tensor_parallel=config.tensor_model_parallel_size,
        expert_tensor_parallel=config.expert_tensor_parallel_size,
        expert_parallel=config.expert_model_parallel_size,
        context_parallel=config.context_parallel_size,
        sequence_parallel=config.sequence_parallel,
        hidden_dropout=config.hidden_dropout,
        attention_dropout=config.attention_dropout,
        router_dtype=config.moe_router_dtype,
        capacity_factor=config.moe_expert_capacity_factor,
        shared_experts=config.moe_shared_expert_intermediate_size is not None,
        sliding_window=config.window_size is not None,
    )


def config_faults(config: TransformerConfig) -> list[str]:
    """What Megatron's configuration can say and the forward does not compute."""
    faults = []
    for name, computed, remedy in _NEEDED:
        value = getattr(config, name, computed[0])
        if value not in computed:
            faults.append(f"{name}={getattr(value, '__name__', value)}: {remedy}")
    return faults


def _rope_faults(model: torch.nn.Module) -> list[str]:
    faults = []
    if model.rotary_percent != 1.0:
        faults.append(f"rotary_percent={model.rotary_percent}: use --rotary-percent 1")
    factor = getattr(getattr(model, "rotary_pos_emb", None), "seq_len_interpolation_factor", None)
    if factor is not None:
        faults.append(
            f"seq_len_interpolation_factor={factor}: drop --rotary-seq-len-interpolation-factor"
        )
    return faults


def hf_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Whole weights of a GPTModel under Hugging Face's names, as a sampler loads them.

    Of one rank: views, or casts, that carry gradients. Of several tensor-parallel ranks: new tensors, each
    gathered when it is asked for, so all ranks take them alike, to the last. The embedding and the head
    keep the padding of the vocabulary.
    """
    is_one = model.config.tensor_model_parallel_size == 1
    for name, weight in own_weights(model):
        axis = None if is_one else _split_axis(name)
        if axis is not None:
            weight = all_gathered(weight.detach(), get_tensor_model_parallel_group(), axis)
        yield name, weight


def _split_axis(name: str) -> int | None:
    """Along which axis tensor-parallel ranks have parts of the weight; None where each has it whole."""
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return 0
    if not name.endswith("_proj.weight"):
        return None
    return 1 if name.endswith((".o_proj.weight", ".down_proj.weight")) else 0
