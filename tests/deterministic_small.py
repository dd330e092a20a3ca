"""Small Qwen3 checkpoints as dictionaries, the same bytes on every machine, for the deterministic tests."""

import torch
from torch import Tensor

DENSE = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1024,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}


def random_weights(config: dict, seed: int = 0) -> dict[str, Tensor]:
    """BF16 weights under Hugging Face's names, drawn on the CPU in a fixed order."""
    generator = torch.Generator().manual_seed(seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    size = config["head_dim"]
    num_queries, num_keys = (
        config[name] * size for name in ("num_attention_heads", "num_key_value_heads")
    )

    def matrix(num_rows: int, num_cols: int, gain: float = 1.0) -> Tensor:
        drawn = torch.randn(num_rows, num_cols, generator=generator)
        return (drawn * (gain / num_cols**0.5)).to(torch.bfloat16)

    def gamma(width: int) -> Tensor:
        return (1 + 0.1 * torch.randn(width, generator=generator)).to(torch.bfloat16)

    def mlp(prefix: str, width: int) -> dict[str, Tensor]:
        return {
            prefix + "gate_proj.weight": matrix(width, hidden),
            prefix + "up_proj.weight": matrix(width, hidden),
            prefix + "down_proj.weight": matrix(hidden, width, 2.0),
        }

    embedding = torch.randn(vocab, hidden, generator=generator).to(torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": gamma(hidden),
        "lm_head.weight": matrix(vocab, hidden, 2.0),
    }
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{number}."
        attn = prefix + "self_attn."
        weights[prefix + "input_layernorm.weight"] = gamma(hidden)
        weights[prefix + "post_attention_layernorm.weight"] = gamma(hidden)
        weights[attn + "q_proj.weight"] = matrix(num_queries, hidden)
        weights[attn + "k_proj.weight"] = matrix(num_keys, hidden)
        weights[attn + "v_proj.weight"] = matrix(num_keys, hidden)
        weights[attn + "o_proj.weight"] = matrix(hidden, num_queries)
        weights[attn + "q_norm.weight"] = gamma(size)
        weights[attn + "k_norm.weight"] = gamma(size)
        if "num_experts" not in config:
            weights |= mlp(prefix + "mlp.", config["intermediate_size"])
            continue
        weights[prefix + "mlp.gate.weight"] = matrix(config["num_experts"], hidden, 2.0)
        for expert in range(config["num_experts"]):
            weights |= mlp(f"{prefix}mlp.experts.{expert}.", config["moe_intermediate_size"])
    return weights
