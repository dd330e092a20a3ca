"""The deterministic operators on a GPU: bits of SGLang's engine and kernels, and gradients.

`golden/sglang_qwen3_moe.json` holds what SGLang 0.5.23's own engine (unmodified,
--enable-deterministic-inference, one H200) answered for the weights of `deterministic_small`: prompts,
seeded samples, log-probabilities when the tokens were decoded, and when the whole was prefilled again.
"""

import json
from pathlib import Path

import pytest
import torch
from deterministic_small import MOE, NO_FA3, random_weights

from megatron_nvfp4.deterministic.model import Model
from megatron_nvfp4.deterministic.ops.activation import silu_and_mul
from megatron_nvfp4.deterministic.ops.attention import PackedBatch, attention
from megatron_nvfp4.deterministic.ops.experts import experts
from megatron_nvfp4.deterministic.ops.linear import Prepared, linear
from megatron_nvfp4.deterministic.ops.logprobs import token_logprobs
from megatron_nvfp4.deterministic.ops.norm import add_rms_norm, rms_norm
from megatron_nvfp4.deterministic.ops.rope import apply_rope, rope_table
from megatron_nvfp4.deterministic.ops.router import route
from megatron_nvfp4.recipes import RECIPES

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).parent / "golden" / "sglang_qwen3_moe.json"
ROWS = (1, 7, 31, 32, 33, 64, 128, 300, 4096)
EPS = 1e-6


@pytest.fixture(scope="module")
def weights():
    return {name: t.cuda() for name, t in random_weights(MOE).items()}


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())


@pytest.fixture
def draw():
    generator = torch.Generator("cuda").manual_seed(0)
    return lambda *shape, scale=1.0: (
        torch.randn(*shape, generator=generator, device="cuda") * scale
    ).to(torch.bfloat16)


def _harsh(x):
    """A row of zeros first, large values in the last."""
    x[0] = 0
    x[-1, ::3] *= 1e4
    return x


# --- the engine's log-probabilities ---------------------------------------------------------------


def _unequal(got, want) -> int:
    flat = torch.tensor([value for each in want for value in each])
    return int((torch.cat(got).cpu() != flat).sum())


@pytest.mark.parametrize(("suffix", "temperature"), [("", 1.0), ("_t08", 0.8)])
def test_decoded_tokens_have_the_engines_logprobs(suffix, temperature, weights, golden):
    # Prevents: any gap at all between the sampler that decoded a token and the learner.
    model = Model(weights, MOE, "sglang_det_bf16")
    prompts = [s["prompt"] for s in golden["sequences"]]
    responses = [s["response" + suffix] for s in golden["sequences"]]
    with torch.no_grad():
        got = model.logprobs(prompts, responses, temperature)
    assert sum(len(r) for r in responses) == 512
    assert _unequal(got, [s["decoded" + suffix] for s in golden["sequences"]]) == 0


def test_prefilled_tokens_have_the_engines_logprobs(weights, golden):
    # Prevents: prompt rows in another order than the engine's prefill.
    model = Model(weights, MOE, "sglang_det_bf16")
    for each in golden["sequences"]:
        tokens = torch.tensor([*each["prompt"], *each["response"]]).cuda()
        length = len(tokens) - 1
        batch = PackedBatch.of((length,), (length,), "cuda")
        scored = slice(len(each["prompt"]) - 1, length)
        with torch.no_grad():
            hidden = model.hidden(tokens[:-1], batch)[scored]
            got = token_logprobs(hidden, model.head, tokens[len(each["prompt"]) :])
        assert _unequal([got], [each["prefilled"]]) == 0


@NO_FA3
@pytest.mark.parametrize(("suffix", "temperature"), [("", 1.0), ("_t08", 0.8)])
def test_fa3_has_the_engines_logprobs(suffix, temperature, weights, golden):
    # Prevents: another call of FlashAttention than the engine's.
    model = Model(weights, MOE, "sglang_det_bf16", attention_kind="fa3")
    prompts = [s["prompt"] for s in golden["sequences"]]
    responses = [s["response" + suffix] for s in golden["fa3"]]
    with torch.no_grad():
        got = model.logprobs(prompts, responses, temperature)
    assert _unequal(got, [s["decoded" + suffix] for s in golden["fa3"]]) == 0


def test_whole_model_trains_the_same_twice(weights, golden):
    # Prevents: a backward in an order of its own, through atomics or a scatter.
    some = golden["sequences"][:4]
    runs = []
    for _ in range(2):
        leaves = {name: t.clone().requires_grad_() for name, t in weights.items()}
        model = Model(leaves, MOE, "sglang_det_bf16")
        got = model.logprobs([s["prompt"] for s in some], [s["response"] for s in some])
        torch.cat(got).sum().backward()
        runs.append([t.grad for t in leaves.values()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# --- SGLang's kernels -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sglang_ops():
    name = "sglang.srt.batch_invariant_ops.batch_invariant_ops"
    return pytest.importorskip(name, reason="sglang is not installed")


@pytest.mark.parametrize("num_rows", ROWS)
def test_rows_have_the_bits_of_sglangs_kernels(num_rows, sglang_ops, draw):
    # Prevents: another order of addition, another reciprocal, a contraction.
    for size in (128, 512, 2048, 2560):
        x, residual = _harsh(draw(num_rows, size)), draw(num_rows, size, scale=3)
        weight = draw(size)
        assert torch.equal(rms_norm(x, weight, EPS), sglang_ops.rms_norm(x, weight, EPS))
        total = x.float() + residual.float()
        mean = sglang_ops.mean_dim(total.pow(2), -1, keepdim=True)
        want = (total * torch.rsqrt(mean + EPS) * weight).bfloat16()
        y, stream = add_rms_norm(x, residual, weight, EPS)
        assert torch.equal(y, want)
        assert torch.equal(stream, total.bfloat16())
    for num_cols, depth in ((16, 512), (2500, 512), (1536, 2048), (2048, 768), (2048, 4096)):
        x, weight = _harsh(draw(num_rows, depth)), draw(num_cols, depth)
        assert torch.equal(linear(x, weight), sglang_ops.matmul_persistent(x, weight.t()))
    head, tokens = draw(151936, 64), torch.arange(num_rows, device="cuda")
    hidden = draw(num_rows, 64)
    logits = sglang_ops.matmul_persistent(hidden, head.t()).float()
    want = sglang_ops.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]
    assert torch.equal(token_logprobs(hidden, head, tokens), want)


@pytest.mark.parametrize("num_rows", ROWS)
def test_router_has_the_bits_of_sglangs_kernel(num_rows, draw):
    # Prevents: other experts on ties, weights normalised in another order.
    name = "sglang.kernels.ops.moe.moe_fused_gate"
    gate = pytest.importorskip(name, reason="sglang is not installed").moe_fused_gate
    for num_experts, top_k in ((16, 4), (60, 4), (128, 8)):
        logits = draw(num_rows, num_experts)
        logits[0], logits[:, 3] = 0, logits[:, 5]
        want = gate(logits, None, top_k, scoring_func="softmax", renormalize=True)
        for got, right in zip(route(logits, top_k, True), want, strict=True):
            assert torch.equal(got, right)


# --- the GPU against the definitions --------------------------------------------------------------


def test_silu_of_every_gate(draw):
    # Prevents: an approximation that is off by more than its instructions are.
    bits = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(torch.bfloat16)
    gates = bits[bits.isfinite() & (bits.abs() > 1e-30)]
    gates = gates[: gates.numel() // 8 * 8]
    x = torch.cat([gates, torch.ones_like(gates)])[None]
    got, want = silu_and_mul(x)[0].float(), torch.nn.functional.silu(gates.double())
    seen = want.abs() > 1e-30
    assert ((got.double() - want).abs()[seen] <= want.abs()[seen] * 2**-8).all()


def test_rope_and_attention_agree_with_the_cpu(draw):
    # Prevents: a kernel whose masks, heads or positions are not the definition's.
    batch, other = (PackedBatch.of((3, 70, 1), (5, 70, 600), device) for device in ("cuda", "cpu"))
    q, k, v = draw(675, 8, 128), draw(675, 2, 128), draw(675, 2, 128)
    table = rope_table(128, 1e6, 700, "cuda")
    rotated = apply_rope(q, table, batch.positions)
    want = apply_rope(q.cpu(), table.cpu(), other.positions)
    assert (rotated.cpu() != want).sum() < 5  # ties of the double rounding
    tensors = [t.requires_grad_() for t in (q, k, v)]
    on_cpu = [t.detach().cpu().requires_grad_() for t in tensors]
    grad = draw(675, 8, 128)
    out, want = attention(*tensors, batch, "triton"), attention(*on_cpu, other, "triton")
    grads = torch.autograd.grad(out, tensors, grad)
    for got, right in zip(
        (out, *grads), (want, *torch.autograd.grad(want, on_cpu, grad.cpu())), strict=True
    ):
        error = (got.cpu().float() - right.float()).norm() / right.float().norm()
        assert error < 1e-2


def test_a_checkpoints_outer_scale_is_multiplied_as_it_is(draw):
    # Prevents: the multiplier of an NVFP4 checkpoint replaced by one that an amax gives.
    operands = RECIPES["nvfp4_per_token"].fprop
    scales = torch.linspace(1.0, 2.0, 64, device="cuda") / 2688  # most are none that an amax gives
    codes = torch.randint(0, 256, (64, 128, 32), dtype=torch.uint8, device="cuda")
    block_scales = torch.rand(64, 128, 4, device="cuda").to(torch.float8_e4m3fn)
    prepared = Prepared.of_codes(codes, block_scales, scales, operands)
    assert torch.equal(prepared.operand.outer_scale, scales)
    offsets = torch.arange(65, device="cuda") * 2
    x = draw(128, 64)
    single = prepared.times(x, offsets, torch.float32)
    twice = Prepared.of_codes(codes, block_scales, scales * 2, operands)
    assert torch.equal(twice.times(x, offsets, torch.float32), single * 2)


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4_per_token"])
def test_a_row_of_experts_does_not_depend_on_its_batch(recipe, draw):
    # Prevents: a sampler and a learner whose batches differ computing other bits.
    operands = RECIPES[recipe].fprop
    w13, w2 = draw(16, 512, 512, scale=0.05), draw(16, 512, 256, scale=0.05)
    x = draw(300, 512)
    weights, ids = route(draw(300, 16), 4, True)
    whole = experts(x, weights, ids, w13, w2, operands)
    for rows in (slice(0, 1), slice(7, 40), slice(299, 300)):
        assert torch.equal(
            whole[rows], experts(x[rows], weights[rows], ids[rows], w13, w2, operands)
        )
