"""What a Hugging Face config.json says about a model, in the terms a conversion needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention; q_rank None: queries have no low-rank form."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class Experts:
    """Routed and shared experts of a model's MoE layers."""

    num_experts: int
    ffn_size: int
    shared_ffn_size: int = 0
    shared_name: str = "shared_experts"
    has_shared_gate: bool = False
    has_router_bias: bool = False


@dataclass(frozen=True)
class Architecture:
    """Shape of one language model.

    moe_layers: for each decoder layer whether its MLP is a mixture of experts.
    num_mtp_layers: layers that predict further tokens, which Hugging Face numbers behind the others.
    latent and experts are None where the model has none. Says nothing about rope or the tokenizer.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_groups: int
    head_dim: int
    ffn_size: int
    tied: bool
    moe_layers: tuple[bool, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    latent: LatentAttention | None = None
    experts: Experts | None = None
    num_mtp_layers: int = 0

    @classmethod
    def from_hf_config(cls, config: Config) -> "Architecture":
        """The architecture of a parsed config.json.

        ValueError: an unknown model_type (the message lists the known), a missing entry, weights that
        are already quantised, or an option whose weights have no place in Megatron.
        """
        model_type = config.get("model_type")
        if model_type not in FAMILIES:
            raise ValueError(
                f"config.json: model_type={model_type!r} is not converted; take a model of "
                + ", ".join(FAMILIES)
            )
        _refuse_what_has_no_place(config)
        try:
            return cls(**_shared_entries(config) | FAMILIES[model_type](config))
        except KeyError as error:
            raise ValueError(
                f"config.json: {error.args[0]} is missing; model_type={model_type!r} needs it, so copy"
                " the model's own config.json there"
            ) from None

    @property
    def is_uniform(self) -> bool:
        """Whether all decoder layers hold the same tensors, so that Megatron stacks them."""
        return len(set(self.moe_layers)) <= 1


def _refuse_what_has_no_place(config: Config) -> None:
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise ValueError(
            f"config.json: quantization_config.quant_method={method!r}; convert the unquantised"
            " checkpoint, or dequantise this one first"
        )
    # Megatron has biases on all linears of a layer, on q/k/v alone, or on none.
    refused = ["mlp_bias"]
    if config["model_type"] not in ("qwen2", "qwen2_moe", "glm4_moe"):
        refused.append("attention_bias")
    for name in refused:
        if config.get(name):
            raise ValueError(
                f"config.json: {name}=true adds biases that Megatron's layer has no place for;"
                " take a model without them (set it to false where they are zero)"
            )


def _shared_entries(config: Config) -> dict[str, Any]:
    num_heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
    return {
        "model_type": config["model_type"],
        "vocab_size": config["vocab_size"],
        "hidden_size": hidden_size,
        "num_layers": config["num_hidden_layers"],
        "num_heads": num_heads,
        "num_groups": config.get("num_key_value_heads") or num_heads,
        "head_dim": config.get("head_dim") or hidden_size // num_heads,
        "ffn_size": config["intermediate_size"],
        "tied": bool(config.get("tie_word_embeddings", False)),
        "moe_layers": (False,) * config["num_hidden_layers"],
    }


def _llama(config: Config) -> dict[str, Any]:
    return {}


def _qwen2(config: Config) -> dict[str, Any]:
    return {"qkv_bias": True}


def _qwen3(config: Config) -> dict[str, Any]:
    return {"qk_norm": True}


def _num_experts(config: Config) -> int:
    # transformers 5 saves Qwen3-MoE's number under a name of its own.
    return config["num_local_experts"] if "num_local_experts" in config else config["num_experts"]


def _sparse_layers(config: Config) -> tuple[bool, ...]:
    """Qwen's rule: every decoder_sparse_step-th layer, but for those named dense."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return tuple(
        i not in dense and _num_experts(config) > 0 and (i + 1) % step == 0
        for i in range(config["num_hidden_layers"])
    )


def _qwen2_moe(config: Config) -> dict[str, Any]:
    return {
        "qkv_bias": config.get("qkv_bias", True),
        "moe_layers": _sparse_layers(config),
        "experts": Experts(
            _num_experts(config),
            config["moe_intermediate_size"],
            config["shared_expert_intermediate_size"],
            shared_name="shared_expert",
            has_shared_gate=True,
        ),
    }


def _qwen3_moe(config: Config) -> dict[str, Any]:
    return {
        "qk_norm": True,
        "moe_layers": _sparse_layers(config),
        "experts": Experts(_num_experts(config), config["moe_intermediate_size"]),
    }


def _layers_behind_dense(config: Config) -> dict[str, Any]:
    """The MoE layers of DeepSeek and GLM: all behind the first dense ones."""
    first, step = config["first_k_dense_replace"], config.get("moe_layer_freq") or 1
    ffn_size = config["moe_intermediate_size"]
    return {
        "moe_layers": tuple(
            i >= first and i % step == 0 for i in range(config["num_hidden_layers"])
        ),
        "num_mtp_layers": config.get("num_nextn_predict_layers") or 0,
        "experts": Experts(
            config["n_routed_experts"],
            ffn_size,
            ffn_size * (config.get("n_shared_experts") or 0),
            has_router_bias=config["model_type"] != "deepseek_v2",
        ),
    }


def _deepseek(config: Config) -> dict[str, Any]:
    latent = LatentAttention(
        config.get("q_lora_rank"),
        config["kv_lora_rank"],
        config["qk_nope_head_dim"],
        config["qk_rope_head_dim"],
        config["v_head_dim"],
    )
    return _layers_behind_dense(config) | {"latent": latent}


def _glm4_moe(config: Config) -> dict[str, Any]:
    return _layers_behind_dense(config) | {
        "qkv_bias": bool(config.get("attention_bias", False)),
        "qk_norm": bool(config.get("use_qk_norm", False)),
    }


FAMILIES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "glm4_moe": _glm4_moe,
}
