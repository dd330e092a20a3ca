"""Dense models of the deterministic profiles, assembled anew from the operators or, for sglang_rl_fsdp, from
its formulas in plain torch."""

from dataclasses import replace

import pytest
import torch
from deterministic_small import DENSE, NO_FA3, random_weights
from torch import Tensor
from torch.nn import functional

from megatron_nvfp4.deterministic import model as model_module
from megatron_nvfp4.deterministic import parity
from megatron_nvfp4.deterministic.model import Model
from megatron_nvfp4.deterministic.ops.activation import silu_and_mul
from megatron_nvfp4.deterministic.ops.attention import PackedBatch, attention
from megatron_nvfp4.deterministic.ops.linear import linear
from megatron_nvfp4.deterministic.ops.logprobs import token_logprobs
from megatron_nvfp4.deterministic.ops.norm import add_rms_norm, rms_norm, rms_norm_fp32
from megatron_nvfp4.deterministic.ops.rope import apply_rope, rope_table
from megatron_nvfp4.deterministic.profiles import PROFILES

EPS = 1e-6
RL = PROFILES["sglang_rl_fsdp"]
SMALL = DENSE | {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 96, "head_dim": 64}
PROMPTS, RESPONSES = [[1, 2, 3], [5], [9, 9]], [[7, 95], [0, 1, 2], [4]]


class _TorchOperators:
    """The four formulas of --rl-on-policy-target in plain torch, each rounding written out."""

    stream_dtype, frequency_device = torch.float32, "cpu"

    @staticmethod
    def normalized(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) / x.shape[-1] + EPS)

    @classmethod
    def first_norm(cls, stream: Tensor, weight: Tensor) -> Tensor:
        return (cls.normalized(stream) * weight).bfloat16()

    @classmethod
    def head_norm(cls, x: Tensor, weight: Tensor) -> Tensor:
        return cls.normalized(x.float()).bfloat16().float() * weight

    @classmethod
    def add_norm(cls, x: Tensor, stream: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        stream = stream + x.float()
        return (cls.normalized(stream) * weight).bfloat16(), stream

    @staticmethod
    def activation(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=1)
        silu = functional.silu(gate.float()).bfloat16()
        return (silu.float() * up.float()).bfloat16()

    @staticmethod
    def logprobs(hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        logits = linear(hidden, head).float() / torch.tensor(temperature)
        logits = logits.bfloat16().float()
        top = logits.amax(1)
        log_sum = (logits - top[:, None]).exp().sum(1).log()
        return (logits.gather(1, tokens[:, None])[:, 0] - top - log_sum).bfloat16().float()


class _Operators:
    """What sglang_det_bf16 computes, operator by operator."""

    stream_dtype, frequency_device = torch.bfloat16, None
    first_norm = head_norm = staticmethod(lambda x, weight: rms_norm(x, weight, EPS))
    add_norm = staticmethod(lambda x, stream, weight: add_rms_norm(x, stream, weight, EPS))
    activation = staticmethod(silu_and_mul)
    logprobs = staticmethod(token_logprobs)


def _assembled(weights, config, ops, kind: str, tokens: Tensor, batch, temperature: float):
    """Log-probability of every next token, the order of SGLang's models/qwen3.py line by line."""
    device, size = tokens.device, config["head_dim"]
    norm = {n: w.to(ops.stream_dtype) for n, w in weights.items() if "norm" in n}
    table = rope_table(
        size, config["rope_theta"], config["max_position_embeddings"], device, ops.frequency_device
    )
    stream, h = weights["model.embed_tokens.weight"][tokens].to(ops.stream_dtype), None
    for number in range(config["num_hidden_layers"]):
        at = f"model.layers.{number}."
        gamma = norm[at + "input_layernorm.weight"]
        if h is None:
            h = ops.first_norm(stream, gamma)
        else:
            h, stream = ops.add_norm(h, stream, gamma)
        q, k, v = (
            linear(h, weights[f"{at}self_attn.{name}_proj.weight"]).unflatten(1, (-1, size))
            for name in "qkv"
        )
        q = apply_rope(
            ops.head_norm(q, norm[at + "self_attn.q_norm.weight"]), table, batch.positions
        )
        k = apply_rope(
            ops.head_norm(k, norm[at + "self_attn.k_norm.weight"]), table, batch.positions
        )
        out = attention(q, k, v.contiguous(), batch, kind).flatten(1)
        h = linear(out, weights[at + "self_attn.o_proj.weight"])
        h, stream = ops.add_norm(h, stream, norm[at + "post_attention_layernorm.weight"])
        gate_up = [linear(h, weights[f"{at}mlp.{name}_proj.weight"]) for name in ("gate", "up")]
        h = linear(ops.activation(torch.cat(gate_up, 1)), weights[at + "mlp.down_proj.weight"])
    h, _ = ops.add_norm(h, stream, norm["model.norm.weight"])
    return ops.logprobs(h[:-1], weights["lm_head.weight"], tokens[1:], temperature)


def _equals_the_assembled(profile: str, kind: str, ops, config: dict, device: str) -> None:
    """Log-probabilities, batches and gradients of the model of `profile`, sequence by sequence."""
    weights = {name: t.to(device).requires_grad_() for name, t in random_weights(config).items()}
    model = Model(weights, config, profile, attention_kind=kind)
    got = model.logprobs(PROMPTS, RESPONSES, 0.8)
    for prompt, response, each in zip(PROMPTS, RESPONSES, got, strict=True):
        tokens = torch.tensor([*prompt, *response], device=device)
        # The last token is scored, not run: its row is cut off with the last of the log-probabilities.
        batch = PackedBatch.of((len(prompt),), (len(tokens),), device)
        with torch.no_grad():
            want = _assembled(weights, config, ops, kind, tokens, batch, 0.8)
        assert torch.equal(each, want[len(prompt) - 1 :])
        (alone,) = model.logprobs([prompt], [response], 0.8)
        assert torch.equal(alone, each)
    torch.cat(got).sum().backward()
    for name, t in weights.items():
        assert t.grad is not None, name
        assert t.grad.isfinite().all(), name
        assert t.grad.any(), name


def test_model_is_the_forward_of_the_formulas():
    # Prevents: an operator of another profile in one place, a rounding between two of them.
    _equals_the_assembled("sglang_rl_fsdp", "fa3", _TorchOperators, SMALL, "cpu")


def test_dense_model_is_assembled_in_order():
    # Prevents: a dense model that takes a wrong weight, norm or order.
    _equals_the_assembled("sglang_det_bf16", "triton", _Operators, SMALL, "cpu")


def test_each_field_of_the_profile_is_read():
    # Prevents: a profile that says BF16 log-probabilities, or two roundings, and computes others.
    weights = random_weights(SMALL)
    prompts, responses = [list(range(20))], [list(range(20, 60))]

    def logprobs(profile) -> Tensor:
        with torch.no_grad():
            model = Model(weights, SMALL, profile, attention_kind="fa3")
            return model.logprobs(prompts, responses)[0]

    right = logprobs(RL)
    assert torch.equal(right, right.bfloat16().float())
    for change in (
        {"logprobs": "float32"},
        {"silu_roundings": 1},
        {"residual": "bfloat16", "norm_weight": "bfloat16"},
    ):
        other = logprobs(replace(RL, **change))
        assert not torch.equal(other, right), change
        assert (other - right).abs().max() < 0.3


def test_frequencies_come_from_where_the_profile_says(monkeypatch):
    # Prevents: a GPU's powers in the table where the sampler has the host's.
    seen = []
    monkeypatch.setattr(model_module, "rope_table", lambda *args: seen.append(args[-1]))
    for profile in ("sglang_rl_fsdp", "sglang_det_bf16"):
        Model(random_weights(SMALL), SMALL, profile, attention_kind="fa3")
    assert seen == ["cpu", None]
    plain, told = rope_table(64, 1e6, 50, "cpu"), rope_table(64, 1e6, 50, "cpu", "cpu")
    assert torch.equal(plain, told)


def test_fp32_weights_of_norms_and_embedding_are_multiplied_as_they_are():
    # Prevents: FP32 masters of norms that are rounded, a tied FP32 embedding that is no head.
    config = SMALL | {"tie_word_embeddings": True}
    weights = {n: w for n, w in random_weights(config).items() if n != "lm_head.weight"}
    rounded = Model(weights, config, RL, attention_kind="fa3")
    wide = {
        name: (w.float() * (1 + 2**-10) if "norm" in name or "embed" in name else w)
        for name, w in weights.items()
    }
    leaves = {name: t.requires_grad_() for name, t in wide.items()}
    model = Model(leaves, config, RL, attention_kind="fa3")
    assert model.head.dtype == torch.bfloat16
    with parity.capture() as outputs:
        got = model.logprobs(PROMPTS, RESPONSES)
    with parity.capture() as others:
        rounded.logprobs(PROMPTS, RESPONSES)
    assert outputs["embedding"].dtype == outputs["layers.0.q_norm"].dtype == torch.float32
    rows = torch.tensor([1, 2, 3, 7, 5, 0, 1, 9, 9])  # the last of a response is scored, not run
    assert torch.equal(outputs["embedding"], wide["model.embed_tokens.weight"][rows])
    assert outputs["layers.0.q_rope"].dtype == outputs["norm"].dtype == torch.bfloat16
    assert not torch.equal(outputs["layers.0.q_norm"], others["layers.0.q_norm"])
    torch.cat(got).sum().backward()
    assert leaves["model.embed_tokens.weight"].grad.dtype == torch.float32
    assert all(t.grad is not None for t in leaves.values())


@pytest.mark.gpu
@pytest.mark.parametrize("size", [128, 64])
def test_dense_model_on_a_gpu(size):
    # Prevents: a dense model, or heads of 64 dimensions, that were never run.
    config = DENSE | {"head_dim": size}
    _equals_the_assembled("sglang_det_bf16", "triton", _Operators, config, "cuda")


@pytest.mark.gpu
@NO_FA3
def test_rl_fsdp_model_on_a_gpu():
    # Prevents: a profile whose whole forward was never run where it is used.
    class Operators(_TorchOperators):
        """The package's norms and log-probabilities: on a GPU their order is not torch's."""

        first_norm = staticmethod(lambda x, w: rms_norm_fp32(x, w, EPS).bfloat16())
        head_norm = staticmethod(lambda x, w: rms_norm_fp32(x, w, EPS))
        add_norm = staticmethod(lambda x, stream, w: add_rms_norm(x, stream, w, EPS))
        logprobs = staticmethod(lambda *args: token_logprobs(*args, torch.bfloat16))

    _equals_the_assembled("sglang_rl_fsdp", "fa3", Operators, DENSE, "cuda")
