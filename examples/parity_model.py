"""Models for parity.py: random Qwen3 checkpoints, and Megatron models with a checkpoint's weights."""

import json
from pathlib import Path

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
# Layers of Qwen3-30B-A3B and of Qwen3-1.7B, four of them.
WIDE = MOE | {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
WIDE_DENSE = DENSE | {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
}
SIZES = {"moe": MOE, "dense": DENSE, "wide": WIDE, "wide_dense": WIDE_DENSE}
_OUTLIERS, _OUTLIER_GAIN = 4, 8.0


def random_weights(config: dict, seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    """BF16 weights under Hugging Face's names, drawn in a fixed order: on the CPU the same everywhere."""
    generator = torch.Generator(device).manual_seed(seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    size = config["head_dim"]
    num_queries, num_keys = (
        config[name] * size for name in ("num_attention_heads", "num_key_value_heads")
    )

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def matrix(num_rows: int, num_cols: int, gain: float = 1.0) -> Tensor:
        return (normal(num_rows, num_cols) * (gain / num_cols**0.5)).to(torch.bfloat16)

    def gamma(width: int) -> Tensor:
        return (1 + 0.1 * normal(width)).to(torch.bfloat16)

    def mlp(prefix: str, width: int) -> dict[str, Tensor]:
        return {
            prefix + "gate_proj.weight": matrix(width, hidden),
            prefix + "up_proj.weight": matrix(width, hidden),
            prefix + "down_proj.weight": matrix(hidden, width, 2.0),
        }

    weights = {
        "model.embed_tokens.weight": normal(vocab, hidden).to(torch.bfloat16),
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


def with_outliers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Norms with a few large weights, as trained models have: their channels ruin the scale of a block."""
    found = {}
    for name, weight in weights.items():
        is_stream_norm = name.endswith("layernorm.weight")
        found[name] = weight.clone() if is_stream_norm else weight
        if is_stream_norm:
            found[name][:: len(weight) // _OUTLIERS] *= _OUTLIER_GAIN
    return found


def write_checkpoint(folder: Path, config: dict, weights: dict[str, Tensor]) -> None:
    """config.json and model.safetensors as transformers reads them."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    architecture = "Qwen3MoeForCausalLM" if "num_experts" in config else "Qwen3ForCausalLM"
    more = {
        "architectures": [architecture],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if "num_experts" in config:
        more |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    (folder / "config.json").write_text(json.dumps(config | more, indent=2))
    save_file(
        {name: t.cpu() for name, t in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def megatron_model(folder: Path, policy, max_positions: int):
    """GPTModel on minite layers under `policy`, with the weights of a Hugging Face checkpoint.

    Needs Megatron's process groups, by which it is cut. What the checkpoint converter writes to disk goes
    into memory here.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_nvfp4.checkpoint.arguments import megatron_arguments
    from megatron_nvfp4.checkpoint.as_megatron import ParametersOfHF
    from megatron_nvfp4.checkpoint.hf import HFReader
    from megatron_nvfp4.mcore import deterministic_run
    from megatron_nvfp4.mcore.layer_specs import get_minite_block_spec

    reader = HFReader(folder)
    weights = ParametersOfHF(reader)
    arch = weights.arch
    args = megatron_arguments(arch, reader.config, vocab_size_padded=arch.vocab_size)
    moe = {}
    if arch.experts:
        moe = {
            "num_moe_experts": args.num_experts,
            "moe_router_topk": args.moe_router_topk,
            "moe_ffn_hidden_size": args.moe_ffn_hidden_size,
            "moe_router_pre_softmax": args.moe_router_pre_softmax,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": True,
            "moe_token_dispatcher_type": "alltoall",
        }
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        layernorm_epsilon=args.norm_epsilon,
        qk_layernorm=args.qk_layernorm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        transformer_impl="minite",
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        **moe,
    )
    config.minite_policy = policy
    deterministic_run.install()
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_minite_block_spec(config),
        vocab_size=arch.vocab_size,
        max_sequence_length=max_positions,
        position_embedding_type="rope",
        rotary_base=args.rotary_base,
        share_embeddings_and_output_weights=arch.tied,
    )
    places = dict(model.named_parameters())
    share = (config.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank())
    with torch.no_grad():
        for parameter in weights.parameters:
            whole = weights.read(parameter)
            places[parameter.key].copy_(_share(whole, parameter.split, *share))
    return model.cuda()


def _share(whole: Tensor, split: str | None, num_ranks: int, rank: int) -> Tensor:
    """What a tensor-parallel rank holds of a parameter; halves (gate, up) are cut one by one."""
    if split is None:
        return whole
    if split == "halves":
        return torch.cat([_share(half, "rows", num_ranks, rank) for half in whole.chunk(2)])
    return whole.chunk(num_ranks, dim=1 if split == "columns" else 0)[rank]
