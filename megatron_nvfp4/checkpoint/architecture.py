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
class Indexer:
    """The part of sparse attention that chooses each query's topk keys.

    Layer `offset` (counted from 1), those before it and every frequency-th behind it have one of their
    own, the others take the choice of the last one that has: Megatron's rule, the only one it knows.
    """

    topk: int
    num_heads: int
    head_dim: int
    frequency: int = 1
    offset: int = 1

    def is_in(self, layer: int) -> bool:
        """Whether decoder layer `layer`, counted from 0, has one of its own."""
        return max(layer + 1 - self.offset, 0) % self.frequency == 0


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
    latent, indexer and experts are None where the model has none. Says nothing about rope or the
    tokenizer.
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
    indexer: Indexer | None = None
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
        is_shared = self.indexer is not None and self.indexer.frequency > 1
        return len(set(self.moe_layers)) <= 1 and not is_shared


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
    if config.get("rope_interleave") is False:
        raise ValueError(
            "config.json: rope_interleave=false pairs a head's rotated rows by halves, Megatron's latent"
            " attention pairs neighbours; take a model with rope_interleave=true"
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


def _layer_kinds(config: Config, name: str, kinds: tuple[str, str]) -> tuple[bool, ...] | None:
    """A list of one of two kinds for each layer as flags of the second one; None: no list there."""
    found, num_layers = config.get(name), config["num_hidden_layers"]
    if found is None:
        return None
    if len(found) != num_layers or not set(found) <= set(kinds):
        raise ValueError(
            f"config.json: {name} has {len(found)} entries of {sorted(set(found))}; give one for each of"
            f" {num_layers} layers, {kinds[0]!r} or {kinds[1]!r}"
        )
    return tuple(kind == kinds[1] for kind in found)


def _layers_behind_dense(config: Config) -> dict[str, Any]:
    """The MoE layers of DeepSeek and GLM: as listed, or all behind the first dense ones."""
    moe_layers = _layer_kinds(config, "mlp_layer_types", ("dense", "sparse"))
    if moe_layers is None:
        first, step = config["first_k_dense_replace"], config.get("moe_layer_freq") or 1
        moe_layers = tuple(i >= first and i % step == 0 for i in range(config["num_hidden_layers"]))
    ffn_size = config["moe_intermediate_size"]
    return {
        "moe_layers": moe_layers,
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
    # transformers' head_dim of these models, which not all of their files spell out.
    return _layers_behind_dense(config) | {"latent": latent, "head_dim": latent.rope_dim}


def _glm4_moe_lite(config: Config) -> dict[str, Any]:
    return _deepseek({"first_k_dense_replace": 1, **config})  # transformers' default


def _glm_moe_dsa(config: Config) -> dict[str, Any]:
    if config["q_lora_rank"] is None:
        raise ValueError(
            "config.json: q_lora_rank=null, but the indexer reads the low-rank queries; give their rank"
        )
    sizes = (config[f"index_{name}"] for name in ("topk", "n_heads", "head_dim"))
    indexer = Indexer(*sizes, *_index_sharing(config))
    return _deepseek({"first_k_dense_replace": 3, **config}) | {"indexer": indexer}


def _index_sharing(config: Config) -> tuple[int, int]:
    """Frequency and offset of Megatron's rule for the layers that reuse another one's choice of keys.

    Source: GlmMoeDsaConfig of transformers 5.17. ValueError: a list that the rule does not give.
    """
    name, pattern = "indexer_types", config.get("index_topk_pattern")
    if config.get(name) is None and pattern is not None:
        letters = {"F": "full", "S": "shared"}
        config = {**config, name: [letters.get(kind, kind) for kind in pattern]}
    is_shared = _layer_kinds(config, name, ("full", "shared"))
    num_layers = config["num_hidden_layers"]
    if is_shared is None:
        rule = max(config.get("index_topk_freq", 1), 1), config.get("index_skip_topk_offset", 2)
        is_shared = tuple(max(i + 1 - rule[1], 0) % rule[0] > 0 for i in range(num_layers))
    if not any(is_shared):
        return 1, 1
    offset = is_shared.index(True)
    behind = is_shared[offset:]
    frequency = behind.index(False) + 1 if False in behind else num_layers
    found = Indexer(0, 0, 0, frequency, offset)
    if offset == 0 or any(found.is_in(i) == shared for i, shared in enumerate(is_shared)):
        kinds = "".join("S" if shared else "F" for shared in is_shared)
        raise ValueError(
            f"config.json: layers with an indexer of their own (F) and without (S) are {kinds}; Megatron"
            " can only have the first few and every n-th behind them: take a model of that kind"
        )
    return frequency, offset


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
    "glm4_moe_lite": _glm4_moe_lite,
    "glm_moe_dsa": _glm_moe_dsa,
}
