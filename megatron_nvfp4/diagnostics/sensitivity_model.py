"""The plain decoder of Llama, Qwen2, Qwen3 and Qwen3-MoE, forward only, around linears that are given to it.

Parameters have Megatron's names, q, k and v of a layer are one product and gate and up another, as in
training, so that a scale over a whole weight or a whole input is the training's. Norms, softmax, rotation
and activation are computed in FP32 and rounded once to the model's dtype, but for the steps of
quant/swiglu.py; logits are FP32. A sequence is computed by itself: no padding, no cache.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_nvfp4.quant.swiglu import weighted_activation

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
LOGITS = 1 << 26  # FP32 logits that are held at once
KINDS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class Shape(Protocol):
    """What the decoder asks of a model's architecture: checkpoint.architecture.Architecture has it."""

    model_type: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_groups: int
    head_dim: int
    tied: bool
    moe_layers: Sequence[bool]
    qkv_bias: bool
    qk_norm: bool
    experts: Any


class Builder(Protocol):
    """Makes the layer `name` of weights (N, K) and a bias (N,) or None; several weights: one an expert."""

    def __call__(self, name: str, weights: Sequence[Tensor], bias: Tensor | None) -> nn.Module: ...


@dataclass(frozen=True)
class Scores:
    """Of a sequence but its first token: log-probs FP64 (T,), and the likeliest tokens int64 (T,)."""

    logprobs: Tensor
    top: Tensor


class Decoder:
    """A model whose linears are modules from `build`; `linears` has them by Megatron's names."""

    def __init__(
        self,
        shape: Shape,
        config: Mapping[str, Any],
        read: Callable[[str], Tensor],
        build: Builder,
    ) -> None:
        """read: a parameter by Megatron's name, in the model's dtype and on its device. config: config.json.

        ValueError: a family, rotary embedding, activation or attention that is not computed here.
        """
        _refuse(shape, config)
        self.shape, self.read, self.build = shape, read, build
        self.eps = config["rms_norm_eps"]
        self.top_k = config.get("num_experts_per_tok", 0)
        self.renormalize = bool(config.get("norm_topk_prob", False))
        self.max_length = int(config.get("max_position_embeddings") or 2**31)
        self.frequencies = rotary_frequencies(config, shape.head_dim)
        self.embedding = read("embedding.word_embeddings.weight")
        self.head = self.embedding if shape.tied else read("output_layer.weight")
        self.norm = read("decoder.final_layernorm.weight")
        self.weights: dict[str, Tensor] = {}
        self.linears: dict[str, nn.Module] = {}
        for number in range(shape.num_layers):
            self._load(f"decoder.layers.{number}.", shape.moe_layers[number])

    def _load(self, prefix: str, is_moe: bool) -> None:
        attention, shape = prefix + "self_attention.", self.shape
        norm = "pre_mlp_layernorm.weight" if is_moe else "mlp.linear_fc1.layer_norm_weight"
        names = {"norm": f"{attention}linear_qkv.layer_norm_weight", "mlp_norm": prefix + norm}
        if shape.qk_norm:
            names |= {part: f"{attention}{part}_layernorm.weight" for part in "qk"}
        if is_moe:
            names["router"] = f"{prefix}mlp.router.weight"
        self.weights |= {prefix + name: self.read(key) for name, key in names.items()}
        experts = shape.experts.num_experts if is_moe else None
        mlp = f"{prefix}mlp.experts." if is_moe else f"{prefix}mlp."
        for name in (f"{attention}linear_qkv", f"{attention}linear_proj"):
            has_bias = shape.qkv_bias and name.endswith("qkv")
            self._add(name, None, self.read(f"{name}.bias") if has_bias else None)
        for name in (f"{mlp}linear_fc1", f"{mlp}linear_fc2"):
            self._add(name, experts, None)

    def _add(self, name: str, num_experts: int | None, bias: Tensor | None) -> None:
        numbers = [""] if num_experts is None else range(num_experts)
        weights = [self.read(f"{name}.weight{number}") for number in numbers]
        if name.endswith("linear_fc2") and weights[0].shape[1] % 8:
            raise ValueError(
                f"{name}: K={weights[0].shape[1]} is not a multiple of 8, which the activation before it "
                "takes; take a model with another intermediate_size"
            )
        self.linears[name] = self.build(name, weights, bias)

    @torch.no_grad()
    def scores(self, tokens: Tensor) -> Scores:
        """Of one sequence, int64 (T + 1,): every token is predicted from those before it.

        ValueError: fewer than two tokens, more than there are positions, or one outside the vocabulary.
        """
        check_tokens(tokens.tolist(), self.shape.vocab_size, self.max_length)
        tokens = tokens.to(self.embedding.device)
        hidden = self.hidden(tokens[:-1])
        head = self.head.float()
        logprobs, top = [], []
        chunk = max(1, LOGITS // head.shape[0])
        for rows, targets in zip(hidden.split(chunk), tokens[1:].split(chunk), strict=True):
            logits = functional.linear(rows.float(), head)
            found = torch.log_softmax(logits.double(), dim=1).gather(1, targets[:, None])
            logprobs.append(found[:, 0])
            top.append(logits.argmax(dim=1))
        result = Scores(torch.cat(logprobs).cpu(), torch.cat(top).cpu())
        if not torch.isfinite(result.logprobs).all():
            raise RuntimeError(
                "a log-probability is not finite: a weight or an activation holds NaN or Inf; look at the "
                "checkpoint (verify-checkpoint) and at the recipe's range"
            )
        return result

    def hidden(self, tokens: Tensor) -> Tensor:
        """Hidden states behind the last norm (T, H) of one sequence, int64 (T,)."""
        residual = functional.embedding(tokens, self.embedding)
        angles = torch.arange(len(tokens), dtype=torch.float32)[:, None] * self.frequencies
        table = torch.cat([angles.cos(), angles.sin()], dim=1).to(residual.device)
        for number in range(self.shape.num_layers):
            prefix = f"decoder.layers.{number}."
            h = rms_norm(residual, self.weights[prefix + "norm"], self.eps)
            residual = residual + self._attend(h, prefix, table)
            h = rms_norm(residual, self.weights[prefix + "mlp_norm"], self.eps)
            is_moe = self.shape.moe_layers[number]
            residual = residual + (self._experts if is_moe else self._mlp)(h, prefix)
        return rms_norm(residual, self.norm, self.eps)

    def _attend(self, h: Tensor, prefix: str, table: Tensor) -> Tensor:
        shape, name = self.shape, prefix + "self_attention.linear_"
        size = shape.head_dim
        repeats = shape.num_heads // shape.num_groups
        # Megatron's rows: the queries of a group, its key, its value.
        qkv = self.linears[name + "qkv"](h).view(len(h), shape.num_groups, repeats + 2, size)
        q, k, v = qkv.split([repeats, 1, 1], dim=2)
        q, k, v = (part.flatten(1, 2).transpose(0, 1) for part in (q, k, v))
        if shape.qk_norm:
            q, k = (
                rms_norm(part, self.weights[prefix + which], self.eps)
                for part, which in ((q, "q"), (k, "k"))
            )
        q, k = (rotate(part, table).float() for part in (q, k))
        k, v = (part.float().repeat_interleave(repeats, dim=0) for part in (k, v))
        out = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
        return self.linears[name + "proj"](out[0].transpose(0, 1).flatten(1).to(h.dtype))

    def _mlp(self, h: Tensor, prefix: str) -> Tensor:
        fc1, fc2 = (self.linears[f"{prefix}mlp.linear_fc{i}"] for i in (1, 2))
        return fc2(weighted_activation(fc1(h), None))

    def _experts(self, h: Tensor, prefix: str) -> Tensor:
        """Rows in the order of their experts; the probability is a factor of FC2's input, as in Megatron."""
        fc1, fc2 = (self.linears[f"{prefix}mlp.experts.linear_fc{i}"] for i in (1, 2))
        logits = functional.linear(h.float(), self.weights[prefix + "router"].float())
        probs, ids = torch.softmax(logits, dim=1).topk(self.top_k, dim=1)
        if self.renormalize:
            probs = probs / probs.sum(dim=1, keepdim=True)
        order = torch.argsort(ids.flatten(), stable=True)
        splits = torch.bincount(ids.flatten(), minlength=len(self.weights[prefix + "router"]))
        splits, rows = splits.tolist(), order // self.top_k
        y = weighted_activation(fc1(h[rows], splits), probs.flatten()[order])
        y = fc2(y, splits).float()
        return torch.zeros_like(h, dtype=torch.float32).index_add_(0, rows, y).to(h.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Of the last axis, in FP32, rounded once to x's dtype."""
    return functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """x (heads, T, D) turned in halves by cosines and sines FP32 (T, D); rounded once to x's dtype."""
    cos, sin = table.chunk(2, dim=1)
    first, second = x.float().chunk(2, dim=2)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)
    return turned.to(x.dtype)


def rotary_frequencies(config: Mapping[str, Any], head_dim: int) -> Tensor:
    """FP32 (D/2,): theta^(-2i/D), stretched where the config says "llama3".

    Formula: Llama 3.1's, as in transformers' modeling_rope_utils.py (_compute_llama3_parameters): waves
    longer than old/low turn `factor` times slower, those shorter than old/high as before, those between
    are mixed. ValueError for another kind.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta") or 10000.0)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return frequencies
    if kind != "llama3":
        raise ValueError(
            f"config.json: rope_type={kind!r} is not computed here; take a model with default or llama3"
        )
    low, high, factor = (rope[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
    old = rope["original_max_position_embeddings"]
    wave = 2 * math.pi / frequencies
    share = ((old / wave - low) / (high - low)).clamp(0, 1)
    return (1 - share) * frequencies / factor + share * frequencies


def check_tokens(tokens: Sequence[int], vocab_size: int, max_length: int) -> None:
    """ValueError for a sequence that the model cannot score."""
    if len(tokens) < 2:
        raise ValueError(f"a text of {len(tokens)} tokens: give two at least, the first is given")
    if len(tokens) - 1 > max_length:
        raise ValueError(
            f"{len(tokens) - 1} tokens in a sequence, max_position_embeddings={max_length}; "
            "give a smaller --length"
        )
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ValueError(
            f"token {wrong} is outside the vocabulary of {vocab_size}; tokenise the text with this "
            "model's own tokenizer"
        )


def _refuse(shape: Shape, config: Mapping[str, Any]) -> None:
    if shape.model_type not in FAMILIES:
        raise ValueError(
            f"config.json: model_type={shape.model_type!r} is not computed here; take a model of "
            + ", ".join(FAMILIES)
        )
    rope = config.get("rope_parameters") or {}
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    for name, value, remedy in (
        ("hidden_act", config.get("hidden_act", "silu") != "silu", "silu"),
        ("use_sliding_window", bool(config.get("use_sliding_window")), "false"),
        ("partial_rotary_factor", partial != 1.0, "1"),
    ):
        if value:
            given = partial if name == "partial_rotary_factor" else config[name]
            raise ValueError(
                f"config.json: {name}={given!r} is not computed here; take a model with {remedy}"
            )
