"""Tiny Hugging Face configurations, one of every shape that a conversion meets, and random weights."""

import json
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_nvfp4.checkpoint.plan import Architecture, hf_tensors

_GQA = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_BEHIND_DENSE = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
_LATENT = {
    "num_key_value_heads": 8,
    "head_dim": 8,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
CONFIGS = {
    "llama": {**_GQA, "model_type": "llama"},
    "llama_tied": {**_GQA, "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {**_GQA, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**_GQA, "model_type": "qwen3"},
    "qwen3_tied": {**_GQA, "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": {**_GQA, **_EXPERTS, "model_type": "qwen3_moe", "norm_topk_prob": True},
    "qwen2_moe": {
        **_GQA,
        **_EXPERTS,
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [1],
    },
    "deepseek_v2": {**_GQA, **_BEHIND_DENSE, **_LATENT, "model_type": "deepseek_v2"},
    "deepseek_v3": {
        **_GQA,
        **_BEHIND_DENSE,
        **_LATENT,
        "model_type": "deepseek_v3",
        "q_lora_rank": 40,
        "num_nextn_predict_layers": 1,
    },
    "glm4_moe": {
        **_GQA,
        **_BEHIND_DENSE,
        "model_type": "glm4_moe",
        "use_qk_norm": True,
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
    },
}
CONFIGS["deepseek_v2"] |= {"q_lora_rank": None}
MOE = [name for name, config in CONFIGS.items() if "num_experts_per_tok" in config]


def architecture(name: str) -> Architecture:
    return Architecture.from_hf_config(CONFIGS[name])


def fused_names(arch: Architecture) -> list[str]:
    """The names of a checkpoint whose experts are fused into one tensor per layer and projection."""
    names = set()
    for name in hf_tensors(arch):
        parts = name.partition(".mlp.experts.")
        names |= {parts[0] + ".mlp.experts.gate_up_proj"} if parts[1] else {name}
    return sorted(names)


def random_weights(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Weights of each name, the same whatever else is asked for; a router's bias is FP32."""
    weights = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(shape, generator=generator) * 0.1
        weights[name] = values if "correction_bias" in name else values.to(dtype)
    return weights


def write_hf(folder, config: dict, weights: dict[str, torch.Tensor]) -> None:
    """A checkpoint folder of one file, by the safetensors library."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_rank_file(path: Path) -> dict:
    """A file of the `torch` format that a test has written, with its Namespace."""
    return torch.load(path, weights_only=False)
