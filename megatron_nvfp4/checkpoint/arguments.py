"""A model's shape as Megatron's arguments, which its checkpoints carry and --use-checkpoint-args reads."""

import argparse
from typing import Any

from megatron_nvfp4.checkpoint.architecture import Architecture, Config


def megatron_arguments(
    arch: Architecture, config: Config, *, vocab_size_padded: int, **others: int | None
) -> argparse.Namespace:
    """What Megatron's parser would hold for the model of a parsed config.json.

    others: more arguments under Megatron's names, as sizes of the parallel groups. Rope scaling, the data
    and the optimizer are not among them: a training script still sets those.
    """
    values: dict[str, Any] = {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": arch.ffn_size,
        "num_attention_heads": arch.num_heads,
        "group_query_attention": arch.latent is None,
        "num_query_groups": arch.num_groups if arch.latent is None else 1,
        "kv_channels": arch.head_dim,
        "qk_layernorm": arch.qk_norm or arch.latent is not None,
        "max_position_embeddings": config.get("max_position_embeddings"),
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "swiglu": True,
        "squared_relu": False,
        "normalization": "RMSNorm",
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": False,
        "attention_dropout": config.get("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": not arch.tied,
        "vocab_size": arch.vocab_size,
        "padded_vocab_size": vocab_size_padded,
        "mtp_num_layers": arch.num_mtp_layers or None,
        "num_experts": None,
        "moe_layer_freq": 1,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
    return argparse.Namespace(
        **values | _rope(config) | _latent(arch) | _moe(arch, config) | others
    )


def _rope(config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    default = 0.5 if config["model_type"] == "glm4_moe" else 1.0  # transformers' defaults

    def value(name: str, default: float) -> float:
        return rope.get(name, config.get(name) or default)

    return {
        "position_embedding_type": "rope",
        "add_position_embedding": True,  # Megatron's name for "some kind of position is encoded"
        "use_rotary_position_embeddings": False,
        "rotary_base": int(value("rope_theta", 10000)),
        "rotary_percent": float(value("partial_rotary_factor", default)),
        "rotary_interleaved": False,
    }


def _latent(arch: Architecture) -> dict[str, Any]:
    if arch.latent is None:
        return {"multi_latent_attention": False}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": arch.latent.q_rank,
        "kv_lora_rank": arch.latent.kv_rank,
        "qk_head_dim": arch.latent.nope_dim,
        "qk_pos_emb_head_dim": arch.latent.rope_dim,
        "v_head_dim": arch.latent.v_dim,
        **_indexer(arch),
    }


def _indexer(arch: Architecture) -> dict[str, Any]:
    if arch.indexer is None:
        return {}
    return {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": arch.indexer.num_heads,
        "dsa_indexer_head_dim": arch.indexer.head_dim,
        "dsa_indexer_topk": arch.indexer.topk,
        "dsa_indexer_topk_freq": arch.indexer.frequency,
        "dsa_indexer_skip_topk_offset": arch.indexer.offset,
        # What transformers' GLM fixes in its code.
        "dsa_indexer_rope_interleaved": True,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "dsa_indexer_rotate_activation": False,
    }


def _moe(arch: Architecture, config: Config) -> dict[str, Any]:
    if arch.experts is None:
        return {}
    experts = arch.experts
    return {
        "num_experts": experts.num_experts,
        "moe_layer_freq": 1
        if all(arch.moe_layers)
        else [int(is_moe) for is_moe in arch.moe_layers],
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_grouped_gemm": True,
        "moe_router_topk": config["num_experts_per_tok"],
        # Softmax over the chosen experts alone is what norm_topk_prob does afterwards.
        "moe_router_pre_softmax": not experts.has_router_bias and not config.get("norm_topk_prob"),
        "moe_router_score_function": "sigmoid" if experts.has_router_bias else "softmax",
        "moe_router_enable_expert_bias": experts.has_router_bias,
        **_router_groups(config),
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor"),
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size or None,
        "moe_shared_expert_gate": experts.has_shared_gate,
    }


def _router_groups(config: Config) -> dict[str, Any]:
    """Where a token's experts must lie in a few groups of them."""
    if (config.get("n_group") or 1) == 1:
        return {}
    return {
        "moe_router_num_groups": config["n_group"],
        "moe_router_group_topk": config["topk_group"],
    }
