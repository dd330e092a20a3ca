"""Qwen3 and Qwen3-MoE assembled from the deterministic operators, in SGLang's order, from weights with
HF's names.

    first layer   residual = embedding;  h = rms_norm(residual)
    other layers  h, residual = add_rms_norm(h, residual)
    attention     q, k, v = h wqkv;  q, k = rope(rms_norm per head);  h = attention(q, k, v) wo
    then          h, residual = add_rms_norm(h, residual);  h = MLP or experts(h)
    at the end    h, _ = add_rms_norm(h, residual);  log-probabilities of the tokens by the head

Order: SGLang 0.5.23, models/qwen3.py and models/qwen3_moe.py with --enable-deterministic-inference, and
models/qwen3.py with --rl-on-policy-target. The profile says which norms, dtypes and roundings. Weights
are held whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .ops.activation import silu_and_mul
from .ops.attention import PackedBatch, attention
from .ops.experts import experts
from .ops.linear import linear
from .ops.logprobs import token_logprobs
from .ops.norm import add_rms_norm, rms_norm, rms_norm_fp32
from .ops.rope import apply_rope, rope_table
from .ops.router import route
from .parity import record
from .profiles import Profile, RunFacts, require


@dataclass(frozen=True)
class Layer:
    """Weights of one layer: projections of one input stacked, gate None where the MLP is dense."""

    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor
    k_norm: Tensor
    qkv: Tensor
    output: Tensor
    gate: Tensor | None
    w13: Tensor
    w2: Tensor

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], number: int, profile: Profile) -> "Layer":
        """The tensors of model.layers.`number`, stacked; norms' weights as `profile` multiplies them."""
        prefix = f"model.layers.{number}."
        attn, mlp = prefix + "self_attn.", prefix + "mlp."
        gate = weights.get(mlp + "gate.weight")
        if gate is None:
            w13, w2 = _stacked(weights, mlp), weights[mlp + "down_proj.weight"]
        else:
            names = [f"{mlp}experts.{expert}." for expert in range(gate.shape[0])]
            w13 = torch.stack([_stacked(weights, name) for name in names])
            w2 = torch.stack([weights[name + "down_proj.weight"] for name in names])
        norms = (
            prefix + "input_layernorm.weight",
            prefix + "post_attention_layernorm.weight",
            attn + "q_norm.weight",
            attn + "k_norm.weight",
        )
        return cls(
            *(_widened(weights[name], profile.norm_weight) for name in norms),
            torch.cat([weights[f"{attn}{name}_proj.weight"] for name in "qkv"]),
            weights[attn + "o_proj.weight"],
            gate,
            w13,
            w2,
        )


def _widened(x: Tensor, dtype: str) -> Tensor:
    """x in FP32 where dtype is float32, which changes no value; as it is elsewhere."""
    return x.float() if dtype == "float32" else x


def _stacked(weights: Mapping[str, Tensor], prefix: str) -> Tensor:
    return torch.cat([weights[f"{prefix}{name}_proj.weight"] for name in ("gate", "up")])


def run_facts(config: Mapping, attention_kind: str, device: torch.device | str) -> RunFacts:
    """What a profile asks of a Hugging Face config (its dictionary) run on one `device`."""
    device = torch.device(device)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return RunFacts(
        model_type=config["model_type"],
        attention=attention_kind,
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        attention_dropout=config.get("attention_dropout", 0.0),
        sliding_window=bool(config.get("use_sliding_window")),
        rope_scaling=rope.get("rope_type", "default") != "default",
    )


class Model:
    """The forward of one profile; every weight's gradient flows to the tensors it was given."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        config: Mapping,
        profile: Profile | str,
        *,
        attention_kind: str = "triton",
    ) -> None:
        """weights: BF16 under Hugging Face's names on one device; config: config.json's dictionary.

        The embedding and the norms' weights may be FP32 where the profile takes them so. Raises
        ValueError with all reasons where the profile cannot be honoured, or for biases, KeyError for a
        weight that lacks.
        """
        biases = [name for name in weights if name.endswith(".bias")]
        if biases:
            raise ValueError(
                f"{biases[0]}: {len(biases)} biases, which the forward does not add; use a model without them"
            )
        self.embedding = weights["model.embed_tokens.weight"]
        device = self.embedding.device
        self.profile = require(profile, run_facts(config, attention_kind, device))
        self.attention_kind, self.config = attention_kind, config
        num_layers = config["num_hidden_layers"]
        self.layers = [Layer.of(weights, n, self.profile) for n in range(num_layers)]
        self.norm = _widened(weights["model.norm.weight"], self.profile.norm_weight)
        tied = config.get("tie_word_embeddings", False)
        head = self.embedding if tied else weights["lm_head.weight"]
        head = head[: config["vocab_size"]]  # rows behind it are padding
        # An FP32 embedding multiplies in BF16 where it is the head too.
        self.head = head.to(torch.bfloat16) if self.profile.residual == "float32" else head
        theta = (config.get("rope_parameters") or config)["rope_theta"]
        self.table = rope_table(
            config["head_dim"],
            theta,
            config["max_position_embeddings"],
            device,
            self.profile.rope_frequencies,
        )

    def hidden(self, tokens: Tensor, batch: PackedBatch) -> Tensor:
        """Hidden states after the last norm, BF16 (T, H), of tokens int64 (T,) laid as `batch` says."""
        if tokens.shape != (batch.num_rows,):
            raise ValueError(
                f"hidden: tokens {tuple(tokens.shape)} do not fit the batch; give ({batch.num_rows},)"
            )
        eps = self.config["rms_norm_eps"]
        embedded = functional.embedding(tokens, self.embedding)
        residual = record("embedding", _widened(embedded, self.profile.residual))
        h = self._norm(residual, self.layers[0].input_norm).to(torch.bfloat16)
        for number, layer in enumerate(self.layers):
            name = f"layers.{number}."
            if number:
                h, residual = add_rms_norm(h, residual, layer.input_norm, eps)
            record(name + "input_norm", h)
            h = self._attend(layer, h, batch, name)
            h, residual = add_rms_norm(h, residual, layer.post_norm, eps)
            record(name + "post_norm", h)
            h = self._mlp(layer, h, name)
        h, _ = add_rms_norm(h, residual, self.norm, eps)
        return record("norm", h)

    def logprobs(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        temperature: float = 1.0,
    ) -> list[Tensor]:
        """Log-probability, FP32, of every response token of every sequence, with gradients.

        Values are those of BF16 where the profile's log-probabilities are.
        """
        for number, response in enumerate(responses):
            if not response:
                raise ValueError(f"logprobs: response {number} is empty; leave the sequence out")
        device = self.embedding.device
        rows = [[*p, *r[:-1]] for p, r in zip(prompts, responses, strict=True)]
        batch = PackedBatch.of([len(p) for p in prompts], [len(r) for r in rows], device)
        tokens = torch.tensor([t for row in rows for t in row]).to(device)
        h = self.hidden(tokens, batch)
        firsts = torch.tensor(batch.lengths).cumsum(0).tolist()
        lengths = [len(r) for r in responses]
        scored = torch.cat([torch.arange(f - n, f) for f, n in zip(firsts, lengths, strict=True)])
        targets = torch.tensor([t for r in responses for t in r]).to(device)
        rounding = getattr(torch, self.profile.logprobs)
        result = token_logprobs(h[scored.to(device)], self.head, targets, temperature, rounding)
        return list(record("logprobs", result).split(lengths))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        norm = rms_norm_fp32 if self.profile.norm_weight == "float32" else rms_norm
        return norm(x, weight, self.config["rms_norm_eps"])

    def _attend(self, layer: Layer, h: Tensor, batch: PackedBatch, name: str) -> Tensor:
        config, size = self.config, self.config["head_dim"]
        sizes = [config["num_attention_heads"] * size] + 2 * [config["num_key_value_heads"] * size]
        qkv = record(name + "qkv", linear(h, layer.qkv, self.profile.dense))
        q, k, v = (t.unflatten(1, (-1, size)) for t in qkv.split(sizes, dim=1))
        q = record(name + "q_norm", self._norm(q, layer.q_norm))
        k = record(name + "k_norm", self._norm(k, layer.k_norm))
        q = record(name + "q_rope", apply_rope(q, self.table, batch.positions))
        k = record(name + "k_rope", apply_rope(k, self.table, batch.positions))
        out = record(name + "attention", attention(q, k, v, batch, self.attention_kind))
        return record(name + "output", linear(out.flatten(1), layer.output, self.profile.dense))

    def _mlp(self, layer: Layer, h: Tensor, name: str) -> Tensor:
        if layer.gate is None:
            h = record(name + "fc1", linear(h, layer.w13, self.profile.dense))
            h = record(name + "activation", silu_and_mul(h, self.profile.silu_roundings))
            return record(name + "fc2", linear(h, layer.w2, self.profile.dense))
        logits = record(name + "router_logits", linear(h, layer.gate))
        top_k, renormalize = self.config["num_experts_per_tok"], self.config["norm_topk_prob"]
        weights, ids = route(logits, top_k, renormalize)
        record(name + "router_weights", weights)
        record(name + "router_ids", ids)
        out = experts(h, weights, ids, layer.w13, layer.w2, self.profile.experts)
        return record(name + "experts", out)
