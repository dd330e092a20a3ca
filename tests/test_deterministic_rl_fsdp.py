"""The profile sglang_rl_fsdp: FP32 residual and norms' weights, two roundings of silu, FP32 heads under the
rotation, BF16 log-probabilities."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deterministic_small import DENSE
from torch import Tensor
from torch.nn import functional

from megatron_nvfp4.deterministic.model import run_facts
from megatron_nvfp4.deterministic.ops.activation import silu_and_mul
from megatron_nvfp4.deterministic.ops.logprobs import token_logprobs
from megatron_nvfp4.deterministic.ops.norm import add_rms_norm, rms_norm_fp32
from megatron_nvfp4.deterministic.ops.rope import apply_rope, rope_table
from megatron_nvfp4.deterministic.profiles import PROFILES, faults, require
from megatron_nvfp4.deterministic.sampler import SamplerSettings, sampler_faults

EPS = 1e-6
RL = PROFILES["sglang_rl_fsdp"]
ROWS = (1, 7, 31, 32, 33, 64, 128, 300, 4096)
SAMPLER = (
    "SGLANG_ENABLE_JIT_DEEPGEMM=0\nSGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM=0\n"
    "serve --rl-on-policy-target fsdp --attention-backend fa3\n"
)


@pytest.fixture
def draw():
    return _drawer("cpu")


def _drawer(device: str):
    generator = torch.Generator(device).manual_seed(0)
    return lambda *shape, scale=1.0, dtype=torch.bfloat16: (
        torch.randn(*shape, generator=generator, device=device) * scale
    ).to(dtype)


def _bf16(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


# --- which runs -----------------------------------------------------------------------------------


def test_the_profile_runs_with_fa3_alone():
    # Prevents: operators that stay refused, an attention whose order is that of another sampler.
    assert RL.missing == ()
    assert faults(RL, run_facts(DENSE, "fa3", "cpu")) == []
    with pytest.raises(ValueError, match=r"attention=triton: its order is unknown; use fa3"):
        require(RL, run_facts(DENSE, "triton", "cpu"))
    with pytest.raises(ValueError, match="model_type=qwen3_moe: it is defined for qwen3"):
        require(RL, replace(run_facts(DENSE, "fa3", "cpu"), model_type="qwen3_moe"))


def test_what_the_sampler_of_the_profile_is_started_with():
    # Prevents: a deterministic sampler without the target, whose residual is BF16.
    assert sampler_faults(RL, SamplerSettings.parse(SAMPLER)) == []
    other = SAMPLER.replace("--rl-on-policy-target fsdp", "--enable-deterministic-inference")
    (fault,) = sampler_faults(RL, SamplerSettings.parse(other))
    assert "give --rl-on-policy-target fsdp" in fault
    unrounded = SAMPLER.strip() + " --enable-fp32-lm-head"
    (fault,) = sampler_faults(RL, SamplerSettings.parse(unrounded))
    assert "not rounded to BF16" in fault


# --- values worked by hand ------------------------------------------------------------------------


def test_heads_round_before_an_fp32_weight():
    # Prevents: one rounding at the end, the weight's lower bits dropped.
    # mean(1, 4) = 2.5; 1/sqrt(2.5) = 0.63246 and 1.26491, in BF16 81/128 and 162/128.
    weight = torch.tensor([1 + 2**-9, 1 + 2**-12])
    y = rms_norm_fp32(_bf16(1.0, 2.0)[None], weight, 0.0)
    assert y.dtype == torch.float32
    assert y.tolist() == [[81 / 128 * (1 + 2**-9), 162 / 128 * (1 + 2**-12)]]
    # The stream is FP32, whose own rounding is none.
    y = rms_norm_fp32(torch.tensor([[1.0, 2.0]]), weight, 0.0)
    assert y[0, 0] == torch.rsqrt(torch.tensor(2.5)) * weight[0]
    assert y[0, 0] != 81 / 128 * (1 + 2**-9)


def test_an_fp32_residual_keeps_what_bf16_drops():
    # Prevents: a stream that loses every addend below half a step: 256 + 0.5, eight times.
    streams = []
    for dtype in (torch.float32, torch.bfloat16):
        stream, weight = torch.full((1, 2), 256.0, dtype=dtype), torch.ones(2, dtype=dtype)
        for _ in range(8):
            y, stream = add_rms_norm(_bf16(0.5, 0.5)[None], stream, weight, EPS)
        assert y.dtype == torch.bfloat16
        assert stream.dtype == dtype
        streams.append(stream.tolist())
    assert streams == [[[260.0, 260.0]], [[256.0, 256.0]]]


def test_silu_rounds_by_itself():
    # Prevents: silu(1) = 0.731059 multiplied before it is rounded to 187/256.
    # 0.731059 * 1.0078125 = 0.736770 -> 189/256, 187/256 * 1.0078125 = 0.736176 -> 188/256.
    x = _bf16(1.0, 1.0078125)[None]
    assert silu_and_mul(x, 2).item() == 188 / 256
    assert silu_and_mul(x).item() == 189 / 256


def test_rotation_of_fp32_heads():
    # Prevents: heads rounded before the rotation, a product rounded on the wrong side of the sum.
    positions = torch.zeros(1, dtype=torch.int64)
    # (1 + 2^-10) (0.5 + 2^-9) lies above the tie between 0.5 and 0.5 + 2^-8; 1 (0.5 + 2^-9) on it.
    table = torch.tensor([[0.5 + 2**-9, 0.0]])
    head = torch.tensor([1 + 2**-10, 0.0]).view(1, 1, 2)
    assert apply_rope(head, table, positions)[0, 0, 0] == 0.5 + 2**-8
    assert apply_rope(head.bfloat16(), table, positions)[0, 0, 0] == 0.5
    # a = b and cos = sin: only the rounding of b * sin is left.
    third = torch.tensor(1 / 3)
    exact = third.double() * third.double()
    left = (exact - (third * third).double()).bfloat16()
    got = apply_rope(third.expand(1, 1, 2), third.expand(1, 2), positions)
    assert got[0, 0, 0] == left
    assert left != 0


def test_logits_and_result_round_to_bf16():
    # Prevents: FP32 log-probabilities compared with BF16 ones.
    # 2 / 0.7 = 2.857143 -> 2.859375; -2.859375 - log(1 + exp(-2.859375)) = -2.915098 -> -2.921875.
    # Without the first rounding -2.912987 -> -2.90625.
    hidden, head = _bf16(1.0)[None], _bf16(0.0, 2.0)[:, None]
    tokens = torch.zeros(1, dtype=torch.int64)
    got = token_logprobs(hidden, head, tokens, 0.7, torch.bfloat16)
    assert got.dtype == torch.float32
    assert got.item() == -2.921875
    exact = token_logprobs(hidden, head, tokens, 0.7)
    assert exact.item() == pytest.approx(-2.912987, abs=1e-6)
    assert exact.bfloat16().item() == -2.90625


# --- gradients and independence -------------------------------------------------------------------


def _norm64(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def _silu64(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=1)
    return functional.silu(gate) * up


def _rope64(x: Tensor) -> Tensor:
    cos, sin = rope_table(16, 1e4, 50, "cpu").double()[7:12, None].chunk(2, dim=2)
    a, b = x.chunk(2, dim=2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=2)


def _cases(draw):
    """name: (operator, the same in FP64, inputs with gradients)."""
    float32 = torch.float32
    table, positions = rope_table(16, 1e4, 50, "cpu"), torch.arange(7, 12)
    tokens, t = torch.tensor([0, 77, 199, 3, 3]), 0.8
    gather = torch.arange(5), tokens
    return {
        "norm_of_heads": (
            lambda *a: rms_norm_fp32(*a, EPS), _norm64, (draw(5, 3, 64), draw(64, dtype=float32)),
        ),
        "norm_of_the_stream": (
            lambda *a: rms_norm_fp32(*a, EPS),
            _norm64,
            (draw(9, 1500, dtype=float32), draw(1500, dtype=float32)),
        ),
        "add_rms_norm": (
            lambda x, r, w: torch.cat([t.float() for t in add_rms_norm(x, r, w, EPS)]),
            lambda x, r, w: torch.cat([_norm64(x + r, w), x + r]),
            (draw(5, 96), draw(5, 96, dtype=float32), draw(96, dtype=float32)),
        ),
        "silu_and_mul": (lambda x: silu_and_mul(x, 2), _silu64, (draw(5, 64, scale=3),)),
        "rope": (
            lambda x: apply_rope(x, table, positions), _rope64, (draw(5, 3, 16, dtype=float32),)
        ),
        "logprobs": (
            lambda h, w: token_logprobs(h, w, tokens, t, torch.bfloat16),
            lambda h, w: (h @ w.T / t).log_softmax(1)[gather],
            (draw(5, 32), draw(200, 32, scale=0.2)),
        ),
    }  # fmt: skip


OPERATORS = list(_cases(lambda *shape, scale=1.0, dtype=None: torch.zeros(shape)))


@pytest.mark.parametrize("name", OPERATORS)
def test_values_and_gradients_agree_with_fp64(name, draw):
    # Prevents: a backward that is not that of the forward, an FP32 gradient that is rounded or dropped.
    operator, exact, inputs = _cases(draw)[name]
    inputs = [t.requires_grad_() for t in inputs]
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    result, right = operator(*inputs), exact(*doubles)
    grad = torch.randn(right.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    grads = torch.autograd.grad(result, inputs, grad.to(result.dtype))
    exact_grads = torch.autograd.grad(right, doubles, grad.double())
    assert [t.dtype for t in grads] == [t.dtype for t in inputs]
    for got, want in zip((result, *grads), (right, *exact_grads), strict=True):
        error = (got.double() - want).norm() / want.norm()
        assert error < 1e-2, f"{name}: relative error {error:.2e}"  # BF16 rounds to 4e-3
    for got, want in zip(grads, exact_grads, strict=True):
        if name == "norm_of_the_stream":  # no rounding to BF16 anywhere
            assert (got.double() - want).norm() < 1e-6 * want.norm()


def test_an_fp32_residual_has_an_fp32_gradient(draw):
    # Prevents: the stream's gradient rounded to BF16 in every layer.
    x, weight = draw(5, 96).requires_grad_(), draw(96, dtype=torch.float32)
    residual = draw(5, 96, dtype=torch.float32).requires_grad_()
    _, stream = add_rms_norm(x, residual, weight, EPS)
    grad = torch.full_like(stream, 1 + 2**-20)
    grads = torch.autograd.grad(stream, (x, residual), grad)
    assert torch.equal(grads[1], grad)
    assert torch.equal(grads[0], torch.ones_like(x))


@pytest.mark.parametrize("num_rows", [1, 7, 32, 33])
def test_a_row_does_not_depend_on_its_batch(num_rows, draw):
    # Prevents: bits that change with the number of tokens beside a token.
    x, gates = draw(33, 96), draw(33, 128)
    stream, weight = draw(33, 96, dtype=torch.float32), draw(96, dtype=torch.float32)
    head, tokens, rows = draw(200, 96, scale=0.2), torch.arange(33), slice(0, num_rows)
    for operator in (
        lambda at: rms_norm_fp32(x[at], weight, EPS),
        lambda at: rms_norm_fp32(stream[at], weight, EPS),
        lambda at: add_rms_norm(x[at], stream[at], weight, EPS)[0],
        lambda at: silu_and_mul(gates[at], 2),
        lambda at: token_logprobs(x[at], head, tokens[at], 0.8, torch.bfloat16),
    ):
        assert torch.equal(operator(slice(None))[rows], operator(rows))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda b, f: rms_norm_fp32(b(2, 8), b(8), EPS), "the weight in torch.float32"),
        (lambda b, f: rms_norm_fp32(b(2, 8).half(), f(8), EPS), "x is torch.float16"),
        (lambda b, f: rms_norm_fp32(b(2, 8), f(4), EPS), r"give \(8,\)"),
        (lambda b, f: add_rms_norm(b(2, 8), f(2, 8), b(8), EPS), "beside an FP32 residual"),
        (lambda b, f: add_rms_norm(b(2, 8), b(2, 8), f(8), EPS), "give both in torch.bfloat16"),
        (lambda b, f: add_rms_norm(b(2, 8), f(2, 4), f(8), EPS), "carry the residual"),
        (lambda b, f: add_rms_norm(b(2, 8), b(2, 8).half(), b(8), EPS), "carry the residual"),
        (lambda b, f: silu_and_mul(b(2, 8), 3), "roundings=3; give 1 or 2"),
        (lambda b, f: apply_rope(b(2, 1, 8).half(), f(4, 8), b(2)), "BF16 or FP32"),
        (
            lambda b, f: token_logprobs(b(2, 8), b(4, 8), f(2).long(), 1.0, torch.float16),
            "rounding=torch.float16",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, text):
    # Prevents: promotion to FP32 of a formula that rounds, in the place of an error.
    with pytest.raises(ValueError, match=text):
        call(lambda *s: torch.zeros(s, dtype=torch.bfloat16), lambda *s: torch.zeros(s))


def test_kernels_in_the_interpreter():
    # Prevents: a Triton kernel that computes something else than the formula beside it.
    pytest.importorskip("triton", reason="triton is not installed")
    script = Path(__file__).parent / "deterministic_rl_fsdp_interpreted.py"
    ran = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == "4 forms agree"


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", ROWS)
def test_rows_have_the_bits_of_sglangs_kernels(num_rows):
    # Prevents: another order of addition than the sampler's mean and log_softmax.
    name = "sglang.srt.batch_invariant_ops.batch_invariant_ops"
    sglang_ops = pytest.importorskip(name, reason="sglang is not installed")
    draw = _drawer("cuda")
    for size in (128, 512, 2048, 2560):
        x, weight = draw(num_rows, size), draw(size, dtype=torch.float32)
        stream = draw(num_rows, size, scale=3, dtype=torch.float32)
        stream[0], stream[-1, ::3] = 0, stream[-1, ::3] * 1e4

        def normalized(total: Tensor) -> Tensor:
            mean = sglang_ops.mean_dim(total.pow(2), -1, keepdim=True)
            return total * torch.rsqrt(mean + EPS)

        assert torch.equal(rms_norm_fp32(stream, weight, EPS), weight * normalized(stream))
        want = weight * normalized(x.float()).bfloat16()
        assert torch.equal(rms_norm_fp32(x, weight, EPS), want)
        total = x.float() + stream
        y, new = add_rms_norm(x, stream, weight, EPS)
        assert torch.equal(new, total)
        assert torch.equal(y, (weight * normalized(total)).bfloat16())
    for vocab in (2048, 2500, 151936):
        hidden, head = draw(num_rows, 64), draw(vocab, 64, scale=0.3)
        tokens = torch.arange(num_rows, device="cuda") % vocab
        temperature = torch.full((num_rows, 1), 0.8, device="cuda")
        logits = sglang_ops.matmul_persistent(hidden, head.t()).div(temperature).bfloat16()
        want = sglang_ops.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]
        got = token_logprobs(hidden, head, tokens, 0.8, torch.bfloat16)
        assert torch.equal(got, want.float())


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", ROWS)
def test_rope_has_the_bits_of_the_compiled_formula(num_rows):
    # Prevents: another contraction than the one of torch.compile, which the sampler runs.
    draw = _drawer("cuda")

    def formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    compiled = torch.compile(formula, dynamic=True)
    for size, heads in ((128, 16), (128, 8), (64, 14)):
        table = rope_table(size, 1e6, 8192, "cuda", "cpu")
        positions = torch.randint(0, 8192, (num_rows,), device="cuda")
        x = draw(num_rows, heads, size, scale=3, dtype=torch.float32)
        cos, sin = table.index_select(0, positions).chunk(2, dim=-1)
        want = compiled(x, cos, sin).bfloat16()
        assert torch.equal(apply_rope(x, table, positions), want)


@pytest.mark.gpu
def test_gpu_and_cpu_agree():
    # Prevents: a kernel whose axes or dtypes are not the definition's.
    draw = _drawer("cuda")
    x, stream = draw(70, 8, 128), draw(70, 2048, dtype=torch.float32)
    weights = draw(128, dtype=torch.float32), draw(2048, dtype=torch.float32)
    table, positions = rope_table(128, 1e6, 80, "cuda", "cpu"), torch.arange(70, device="cuda")
    for operator, inputs in (
        (lambda x, w: rms_norm_fp32(x, w, EPS), (x, weights[0])),
        (lambda x, w: rms_norm_fp32(x, w, EPS), (stream, weights[1])),
        (lambda x, r, w: add_rms_norm(x, r, w, EPS)[0], (draw(70, 2048), stream, weights[1])),
        (lambda x: silu_and_mul(x, 2), (draw(70, 2048, scale=3),)),
        (lambda x: apply_rope(x, table.to(x.device), positions.to(x.device)), (x.float(),)),
    ):
        runs = []
        for device in ("cuda", "cpu"):
            leaves = [t.to(device).requires_grad_() for t in inputs]
            out = operator(*leaves)
            runs.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
        for got, want in zip(*runs, strict=True):
            assert got.dtype == want.dtype
            error = (got.cpu().float() - want.float()).norm() / want.float().norm()
            assert error < 1e-2
