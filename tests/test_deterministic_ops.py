"""The deterministic operators on a CPU: formulas, gradients against FP64, and independence of the batch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deterministic_small import DENSE, MOE, random_weights
from torch import Tensor

from megatron_nvfp4 import backends
from megatron_nvfp4.deterministic.model import Model
from megatron_nvfp4.deterministic.ops.activation import silu_and_mul
from megatron_nvfp4.deterministic.ops.attention import PackedBatch, attention
from megatron_nvfp4.deterministic.ops.experts import experts
from megatron_nvfp4.deterministic.ops.linear import Prepared, linear
from megatron_nvfp4.deterministic.ops.logprobs import token_logprobs
from megatron_nvfp4.deterministic.ops.norm import add_rms_norm, rms_norm
from megatron_nvfp4.deterministic.ops.parallel_logprobs import parallel_token_logprobs
from megatron_nvfp4.deterministic.ops.rope import apply_rope, rope_table
from megatron_nvfp4.deterministic.ops.router import route
from megatron_nvfp4.recipes import BF16, RECIPES, NVFP4Spec

BATCH = PackedBatch.of((3, 70, 1), (5, 70, 40), "cpu")
EPS = 1e-6


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape, scale=1.0: (torch.randn(*shape, generator=generator) * scale).to(
        torch.bfloat16
    )


def _norm64(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def _attention64(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group, outs = q.shape[1] // k.shape[1], []
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    for one in zip(*(t.split(BATCH.lengths) for t in (q, k, v)), strict=True):
        query, key, value = (t.transpose(0, 1) for t in one)
        score = query @ key.transpose(1, 2) * q.shape[2] ** -0.5
        hidden = torch.ones_like(score, dtype=torch.bool).triu(1)
        outs.append((score.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(0, 1))
    return torch.cat(outs)


def _rope64(x: Tensor) -> Tensor:
    cos, sin = rope_table(x.shape[2], 1e4, 50, "cpu").double()[7:12, None].chunk(2, dim=2)
    a, b = x.chunk(2, dim=2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=2)


def _experts64(x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, ids: Tensor) -> Tensor:
    outs = []
    for row, weight, chosen in zip(x, weights, ids, strict=True):
        gate, up = torch.einsum("h,kfh->kf", row, w13[chosen.long()]).chunk(2, dim=1)
        y = torch.einsum("kf,khf->kh", torch.nn.functional.silu(gate) * up, w2[chosen.long()])
        outs.append((y * weight[:, None]).sum(0))
    return torch.stack(outs)


def _silu64(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def _route64(logits: Tensor, top_k: int, renormalize: bool) -> Tensor:
    chosen = logits.softmax(1).topk(top_k, 1).values
    return chosen / chosen.sum(1, keepdim=True) if renormalize else chosen


def _cases(draw):
    """name: (operator, the same in FP64, inputs with gradients)."""
    ids = torch.tensor([[3, 0], [1, 3], [3, 1], [0, 1], [3, 0]], dtype=torch.int32)  # 2: no token
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(1))
    weights[1, 0] = 0.0  # an expert of no weight has a gradient all the same
    table, positions = rope_table(16, 1e4, 50, "cpu"), torch.arange(7, 12)
    tokens, t = torch.tensor([0, 77, 199, 3, 3]), 0.8
    gather = torch.arange(5), tokens
    logits = draw(6, 12, scale=2)
    return {
        "rms_norm": (lambda *a: rms_norm(*a, EPS), _norm64, (draw(9, 1500), draw(1500))),
        "add_rms_norm": (
            lambda x, r, w: torch.cat(add_rms_norm(x, r, w, EPS)),
            lambda x, r, w: torch.cat([_norm64(x + r, w), x + r]),
            (draw(5, 96), draw(5, 96), draw(96)),
        ),
        "linear": (linear, lambda x, w: x @ w.T, (draw(5, 64), draw(48, 64))),
        "silu_and_mul": (silu_and_mul, _silu64, (draw(5, 64, scale=3),)),
        "rope": (lambda x: apply_rope(x, table, positions), _rope64, (draw(5, 3, 16),)),
        "route": (
            lambda x: route(x, 3, True)[0], lambda x: _route64(x, 3, True), (logits,)
        ),
        "route_plain": (
            lambda x: route(x, 3, False)[0], lambda x: _route64(x, 3, False), (logits,)
        ),
        "experts": (
            lambda x, w, w13, w2: experts(x, w, ids, w13, w2),
            lambda x, w, w13, w2: _experts64(x, w, w13, w2, ids),
            (draw(5, 32), weights, draw(4, 48, 32, scale=0.2), draw(4, 32, 24, scale=0.2)),
        ),
        "attention": (
            lambda *a: attention(*a, BATCH, "triton"),
            _attention64,
            (draw(115, 4, 64), draw(115, 2, 64), draw(115, 2, 64)),
        ),
        "logprobs": (
            lambda h, w: token_logprobs(h, w, tokens, t),
            lambda h, w: (h @ w.T / t).log_softmax(1)[gather],
            (draw(5, 32), draw(200, 32, scale=0.2)),
        ),
    }  # fmt: skip


OPERATORS = list(_cases(lambda *shape, scale=1.0: torch.zeros(shape)))


def test_a_vocabulary_that_is_no_multiple_of_eight_has_the_columns_of_a_padded_one():
    # Prevents: a product that no kernel takes, left to a library and its order of addition.
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (5, 13))
    prepared = Prepared.of(weight[None])
    assert prepared.operand.shape == (1, 16, 64)
    assert not prepared.operand[0, 13:].any()
    padded = torch.nn.functional.pad(weight, (0, 0, 0, 3))
    assert torch.equal(linear(x, weight), linear(x, padded)[:, :13])
    whole = Prepared.of(padded[None]).operand
    assert whole.data_ptr() == padded.data_ptr()  # no copy where none is needed


def _gemm_kernels(backend: str):
    kernel = backends.get(backend)
    reason = kernel.why_not("grouped_gemm", (BF16, BF16), device="cpu")
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")
    return kernel


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_factors_of_rows_multiply_the_sums(backend, draw):
    # Prevents: a router weight that multiplies what was rounded to BF16, or the rows of another expert.
    kernel = _gemm_kernels(backend)
    x, weights = draw(9, 64), draw(3, 16, 64)
    factors, offsets = torch.rand(9), torch.tensor([0, 4, 4, 9])
    sums = kernel.grouped_gemm(x, weights, offsets, out_dtype=torch.float32)
    got = kernel.grouped_gemm(x, weights, offsets, out_dtype=torch.bfloat16, row_factors=factors)
    assert torch.equal(got, (sums * factors[:, None]).bfloat16())
    assert not torch.equal(got, sums.bfloat16() * factors[:, None].bfloat16())


@pytest.mark.parametrize("is_quantised", [True, False])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_factors_of_rows_multiply_their_scales(backend, is_quantised, draw):
    # Prevents: one more rounding of the sum, in one of the backends alone.
    kernel = _gemm_kernels(backend)
    offsets, factors = torch.tensor([0, 4, 4, 9]), torch.rand(9)
    a = draw(9, 64)
    if is_quantised:
        a = kernel.quantize(a, NVFP4Spec(outer="token"))
    b = kernel.quantize(draw(48, 64), NVFP4Spec(), offsets=torch.arange(4) * 16)
    rows = a.row_scale() if is_quantised else torch.ones(9)
    per_value = (rows * factors)[:, None] * b.outer_scale.repeat_interleave(offsets.diff())[:, None]
    alone = _gemm_kernels("reference").decode(a) @ _gemm_kernels("reference").decode(b).t()
    alone = torch.cat([alone[:4, :16], alone[4:, 32:]]).float()
    got = kernel.grouped_gemm(a, b, offsets, out_dtype=torch.float32, row_factors=factors)
    torch.testing.assert_close(got, alone * per_value, rtol=2**-21, atol=1e-6)
    rounded = kernel.grouped_gemm(a, b, offsets, out_dtype=torch.bfloat16, row_factors=factors)
    assert torch.equal(rounded, got.bfloat16())
    if backend == "cpu":
        again = backends.get("reference").grouped_gemm(
            a, b, offsets, out_dtype=torch.bfloat16, row_factors=factors
        )
        assert torch.equal(rounded, again)


def test_tokens_are_quantised_once_for_all_of_their_experts(draw, monkeypatch):
    # Prevents: a row quantised anew, or with another's scale, for each of its experts.
    operands = RECIPES["nvfp4_per_token"].fprop
    w13, w2 = draw(8, 64, 32), draw(8, 32, 32)
    x = draw(9, 32)
    weights, ids = route(draw(9, 8), 4, True)
    quantised = []
    original = Prepared.rows_of
    monkeypatch.setattr(
        Prepared, "rows_of", lambda self, x: quantised.append(x) or original(self, x)
    )
    once = experts(x, weights, ids, w13, w2, operands)
    assert [len(each) for each in quantised] == [9]
    monkeypatch.setattr(Prepared, "rows_of", lambda self, x: x)
    assert torch.equal(experts(x, weights, ids, w13, w2, operands), once)


@pytest.mark.parametrize("name", OPERATORS)
def test_values_and_gradients_agree_with_fp64(name, draw):
    # Prevents: a backward that is not that of the forward, a wrong axis, a gradient that is dropped.
    operator, exact, inputs = _cases(draw)[name]
    inputs = [t.requires_grad_() for t in inputs]
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    result, right = operator(*inputs), exact(*doubles)
    grad = torch.randn(right.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    grads = torch.autograd.grad(result, inputs, grad.to(result.dtype))
    exact_grads = torch.autograd.grad(right, doubles, grad.double())
    for got, want in zip((result, *grads), (right, *exact_grads), strict=True):
        error = (got.double() - want).norm() / want.norm()
        assert error < 1e-2, f"{name}: relative error {error:.2e}"  # BF16 rounds to 4e-3


@pytest.mark.parametrize("name", OPERATORS)
def test_a_second_run_has_the_same_bits(name, draw):
    # Prevents: a sum in an order of its own each time.
    operator, _, inputs = _cases(draw)[name]
    inputs = [t.requires_grad_() for t in inputs]
    runs = []
    for _ in range(2):
        result = operator(*inputs)
        runs.append((result, *torch.autograd.grad(result.float().square().sum(), inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("num_rows", [1, 7, 32, 33])
def test_a_row_does_not_depend_on_its_batch(num_rows, draw):
    # Prevents: bits that change with the number of tokens beside a token, which a sampler chooses freely.
    x, residual, weight = draw(33, 96), draw(33, 96), draw(96)
    w13, w2 = draw(8, 64, 96, scale=0.1), draw(8, 96, 32, scale=0.1)
    weights, ids = route(draw(33, 8), 2, True)
    rows = slice(0, num_rows)
    for operator in (
        lambda at: add_rms_norm(x[at], residual[at], weight, EPS)[0],
        lambda at: linear(x[at], w13[0]),
        lambda at: experts(x[at], weights[at], ids[at], w13, w2),
        lambda at: experts(x[at], weights[at], ids[at], w13, w2, RECIPES["nvfp4_per_token"].fprop),
        lambda at: token_logprobs(x[at], w13.flatten(0, 1), ids[at, 0].long()),
    ):
        assert torch.equal(operator(slice(None))[rows], operator(rows))


def test_a_sequence_does_not_depend_on_its_batch(draw):
    # Prevents: keys of a neighbour in the softmax, splits counted from the start of the batch.
    q, k, v = draw(115, 4, 64), draw(115, 2, 64), draw(115, 2, 64)
    whole = attention(q, k, v, BATCH, "triton")
    start = 0
    for prompt, length in zip(BATCH.prompt_lengths, BATCH.lengths, strict=True):
        rows = slice(start, start + length)
        alone = PackedBatch.of((prompt,), (length,), "cpu")
        assert torch.equal(whole[rows], attention(q[rows], k[rows], v[rows], alone, "triton"))
        start += length


def test_response_rows_walk_in_splits(draw):
    # Prevents: a learner that scores decoded tokens in a prefill's order.
    q, k, v = draw(300, 4, 64), draw(300, 2, 64), draw(300, 2, 64)
    prefill = PackedBatch.of((300,), (300,), "cpu")
    decode = PackedBatch.of((1,), (300,), "cpu")
    one, other = (attention(q, k, v, batch, "triton") for batch in (prefill, decode))
    assert not torch.equal(one, other)
    assert torch.allclose(one.float(), other.float(), atol=2e-2)
    # FlashAttention's order does not know the difference.
    assert torch.equal(*(attention(q, k, v, batch, "fa3") for batch in (prefill, decode)))


def test_the_mean_is_of_the_sum_before_its_rounding(draw):
    # Prevents: Megatron's order, which adds in BF16 and normalises the rounded sum.
    x, residual, weight = draw(64, 96), draw(64, 96, scale=2**-6), draw(96)
    y, stream = add_rms_norm(x, residual, weight, EPS)
    total = x.float() + residual.float()
    assert torch.equal(stream, total.bfloat16())
    inverse = torch.rsqrt(total.square().sum(1, keepdim=True) / 96 + EPS)
    assert torch.equal(y, (total * inverse * weight.float()).bfloat16())
    assert not torch.equal(y, rms_norm(stream, weight, EPS))


def test_ties_of_the_router_take_the_lowest_expert():
    # Prevents: an order of ties that is the sorting routine's.
    logits = torch.zeros(2, 16, dtype=torch.bfloat16)
    logits[1, 5] = logits[1, 9] = 1.0
    weights, ids = route(logits, 4, True)
    assert ids.tolist() == [[0, 1, 2, 3], [5, 9, 0, 1]]
    assert weights[0].tolist() == [0.25] * 4


def test_router_weight_is_applied_before_fc2_rounds():
    # Prevents: a rounding of FC2's output before the weight is multiplied.
    one = torch.ones(1, 8, dtype=torch.bfloat16)
    w13 = torch.zeros(1, 16, 8, dtype=torch.bfloat16)
    w13[0, :8, 0], w13[0, 8:, 0] = 100.0, 0.01  # silu(100) * 0.01 = 1, rounded once
    w2 = torch.zeros(1, 8, 8, dtype=torch.bfloat16)
    w2[0, 0, :2] = torch.tensor([1.0, 3 * 2**-9])
    weight = torch.full((1, 1), 3.0)
    ids = torch.zeros(1, 1, dtype=torch.int32)
    a = silu_and_mul(linear(one, w13[0]))[0, 0].float()
    got = experts(one, weight, ids, w13, w2)[0, 0]
    assert got == (a * (1 + 3 * 2**-9) * 3).bfloat16()
    assert got != ((a * (1 + 3 * 2**-9)).bfloat16().float() * 3).bfloat16()


def test_temperature_divides():
    # Prevents: a multiplication by 1 / T, whose last bit is another.
    hidden = torch.eye(8, dtype=torch.bfloat16)
    head = torch.arange(64, dtype=torch.float32).view(8, 8).bfloat16()
    tokens, t = torch.zeros(8, dtype=torch.int64), 0.7
    logits = head.float().T / torch.tensor(t)
    top = logits.amax(1)
    want = logits[:, 0] - top - torch.log(torch.exp(logits - top[:, None]).sum(1))
    assert torch.equal(token_logprobs(hidden, head, tokens, t), want)


def test_quantised_experts_multiply_nvfp4_codes(draw):
    # Prevents: a profile that says NVFP4 and computes BF16.
    x, w13, w2 = draw(6, 64), draw(4, 64, 64, scale=0.1), draw(4, 64, 32, scale=0.1)
    weights, ids = route(draw(6, 4), 2, True)
    exact = experts(x, weights, ids, w13, w2)
    rounded = experts(x, weights, ids, w13, w2, RECIPES["nvfp4_per_token"].fprop)
    error = (rounded.float() - exact.float()).norm() / exact.float().norm()
    assert 0.02 < error < 0.5


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda b: rms_norm(torch.zeros(2, 8), b(8), EPS), "give both in torch.bfloat16"),
        (lambda b: rms_norm(b(2, 8), b(4), EPS), r"give \(8,\)"),
        (lambda b: add_rms_norm(b(2, 8), b(2, 4), b(8), EPS), "carry the residual"),
        (lambda b: linear(b(2, 8), b(4, 16)), r"give BF16 \(M, 16\)"),
        (lambda b: silu_and_mul(b(2, 7)), r"\(M, 2F\)"),
        (lambda b: apply_rope(b(2, 1, 8), rope_table(16, 1e4, 4, "cpu"), b(2)), "16 columns"),
        (lambda b: route(b(2, 4), 5, True), "top_k=5 of 4 experts"),
        (lambda b: route(torch.zeros(2, 4), 2, True), "as the gate returns"),
        (lambda b: attention(*3 * [b(115, 2, 64)], BATCH, "triton"), "grouped queries"),
        (lambda b: attention(*3 * [b(115, 2, 64)], BATCH, "fa2"), "use 'triton' or 'fa3'"),
        (lambda b: token_logprobs(b(2, 8), b(4, 8), torch.zeros(2).long(), 0.0), "greedy"),
        (lambda b: PackedBatch.of((3,), (2,), "cpu"), "a prompt of 3 of 2 rows"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call, text):
    # Prevents: a broadcast, or another dtype's rounding, in the place of an error.
    with pytest.raises(ValueError, match=text):
        call(lambda *shape: torch.zeros(*shape, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", ["triton", "fa3"])
@pytest.mark.parametrize("family", [DENSE, MOE], ids=["dense", "moe"])
def test_model_is_trained_through(family, kind):
    # Prevents: a weight whose gradient is cut off, a sequence that reads its neighbour's tokens.
    config = family | {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 96, "head_dim": 64}
    if "num_experts" in config:
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    weights = {name: t.requires_grad_() for name, t in random_weights(config).items()}
    model = Model(weights, config, "sglang_det_bf16", attention_kind=kind)
    prompts, responses = [[1, 2, 3], [5]], [[7, 95], [0, 1, 2]]
    logprobs = model.logprobs(prompts, responses)
    assert [len(t) for t in logprobs] == [2, 3]
    torch.cat(logprobs).sum().backward()
    used = {name for name, t in weights.items() if t.grad is not None and t.grad.abs().sum() > 0}
    unused = set(weights) - used
    assert all(".experts." in name for name in unused), unused  # of no token
    alone = model.logprobs(prompts[1:], responses[1:])
    assert torch.equal(alone[0], logprobs[1])


def test_tied_and_padded_heads():
    # Prevents: a log-probability normalised over rows that pad the vocabulary, a second head of tied weights.
    config = DENSE | {"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 88, "head_dim": 64}
    weights = random_weights(config)
    plain = Model(weights, config, "sglang_det_bf16").logprobs([[1, 2]], [[3, 4]])[0]
    padded = {name: torch.cat([w, w[:8] * 9]) for name, w in weights.items() if w.shape[0] == 88}
    got = Model(weights | padded, config, "sglang_det_bf16").logprobs([[1, 2]], [[3, 4]])[0]
    assert torch.equal(got, plain)
    tied = {name: w for name, w in weights.items() if name != "lm_head.weight"}
    model = Model(tied, config | {"tie_word_embeddings": True}, "sglang_det_bf16")
    assert model.head.data_ptr() == model.embedding.data_ptr()


def test_what_the_forward_leaves_out_is_refused():
    # Prevents: a model whose biases, or whose attention, are silently another model's.
    config = MOE | {"num_hidden_layers": 0}
    weights = random_weights(config)
    with pytest.raises(ValueError, match=r"q_proj.bias: 1 biases"):
        Model(weights | {"q_proj.bias": torch.zeros(1)}, config, "sglang_det_bf16")
    config |= {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4},
        "attention_dropout": 0.1,
    }
    with pytest.raises(ValueError, match=r"(?s)scaled rope.*attention_dropout=0.1"):
        Model(weights, config, "sglang_det_bf16")


def _process_state() -> tuple:
    return (
        dict(os.environ),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.get_float32_matmul_precision(),
        [torch._C._dispatch_dump(f"aten::{name}") for name in ("mm", "addmm", "_log_softmax")],
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, r"tokens are torch.int64 \(3,\)"),
        ({"tokens": torch.zeros(2, dtype=torch.int32)}, "tokens are torch.int32"),
        ({"head": torch.zeros(96, 64)}, "head is torch.float32"),
        ({"temperature": 0.0}, "greedy samples are scored at 1.0"),
        ({"temperature": torch.ones(1)}, r"temperature is torch.float32 \(1,\)"),
        ({"rounding": torch.float16}, "give torch.float32 or torch.bfloat16"),
    ],
)
def test_scores_of_one_rank_and_of_two_refuse_alike(change, words):
    # Prevents: arguments read past their end, or broadcast, on two ranks alone.
    given = {"hidden": torch.zeros(2, 64, dtype=torch.bfloat16)}
    given |= {"head": torch.zeros(96, 64, dtype=torch.bfloat16)}
    given |= {"tokens": torch.zeros(2, dtype=torch.int64)} | change
    with pytest.raises(ValueError, match=f"^token_logprobs: .*{words}"):
        token_logprobs(**given)
    with pytest.raises(ValueError, match=f"^parallel_token_logprobs: .*{words}"):
        parallel_token_logprobs(**given, vocab_size=96, group=None)


def test_a_step_leaves_the_process_as_it_was():
    # Prevents: a mode that patches aten, sets flags or variables, and stays for the rest of the process.
    config = MOE | {"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 96, "head_dim": 64}
    config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    weights = {name: t.requires_grad_() for name, t in random_weights(config).items()}
    before = _process_state()
    model = Model(weights, config, "sglang_det_bf16")
    model.logprobs([[1]], [[2, 3]])[0].sum().backward()
    with pytest.raises(ValueError, match="response 0 is empty"):
        model.logprobs([[1]], [[]])
    with pytest.raises(ValueError, match="0 prompts and 0 responses"):
        model.logprobs([], [])
    assert _process_state() == before


def test_kernels_in_the_interpreter():
    # Prevents: a Triton kernel that computes something else than the formula beside it.
    pytest.importorskip("triton", reason="triton is not installed")
    script = Path(__file__).parent / "deterministic_interpreted.py"
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == "14 kernels agree"
