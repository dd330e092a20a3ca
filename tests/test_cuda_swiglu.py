"""The CUDA kernel for weighted SwiGLU and its NVFP4 form against the definition, byte for byte."""

import pytest
import torch

from megatron_nvfp4.backends import cuda
from megatron_nvfp4.backends.extension import why_not_cuda
from megatron_nvfp4.quant import swiglu
from megatron_nvfp4.recipes import NVFP4Spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not_cuda() is not None, reason=f"cuda: {why_not_cuda()}"),
]
# One cut for 48 blocks a row, one for others: part of a warp, a warp, several; the widest.
SHAPES = ((33, 768), (5, 16), (64, 272), (17, 1024), (9, 2048), (3, 7168), (2, 12288))
both_variants = pytest.mark.parametrize("fast_math", [False, True], ids=("portable", "fast_math"))


def case(num_rows: int, num_cols: int, spread: float = 4.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows + num_cols)
    gate_up = torch.randn(num_rows, 2 * num_cols, generator=generator) * spread
    return gate_up.bfloat16(), torch.rand(num_rows, generator=generator)


def assert_same(gate_up, probs, fast_math, spec=swiglu.TOKEN) -> None:
    got = cuda.swiglu_quantize(gate_up.cuda(), probs.cuda(), spec, fast_math=fast_math)
    expected = swiglu.swiglu_quantize(gate_up, probs, spec)
    for name in ("amax", "block_scales", "codes"):
        ours, theirs = (getattr(q, name).cpu().view(torch.uint8) for q in (got, expected))
        assert ours.shape == theirs.shape, name
        assert int((ours != theirs).sum()) == 0, f"{name}: bytes differ"


@both_variants
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_definition(shape, fast_math):
    """A rounding step left out, gate and up of the wrong block, a row's amax over part of it."""
    assert_same(*case(*shape), fast_math)
    assert_same(*case(*shape, spread=300.0), fast_math, NVFP4Spec(outer="token", e4m3_max=256))


@both_variants
def test_every_gate(fast_math):
    """A polynomial or an approximation that rounds one BF16 gate to the other neighbour."""
    gates = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    gates = gates[gates.isfinite()].reshape(-1, 1)
    # The amax of a row of one gate is the activation itself.
    gate = torch.zeros(len(gates), 16, dtype=torch.bfloat16)
    gate[:, :1] = gates
    x = torch.cat([gate, torch.ones_like(gate)], 1)
    got = cuda.swiglu_quantize(x.cuda(), torch.ones(len(x)).cuda(), fast_math=fast_math).amax.cpu()
    wrong = (got != swiglu.silu(gates)[:, 0].float().abs()).nonzero()
    assert not len(wrong), f"{len(wrong)} gates, the first {gates[wrong[0]].item()}"


@both_variants
def test_special_rows(fast_math):
    """NaN, Inf, zeros and extremes in gate, up or probability that leave the path of exact bits."""
    gate_up, probs = case(48, 768)
    up = gate_up[:, 768:]
    gate_up[0] = 0
    gate_up[1, 5] = float("nan")
    gate_up[2, 800] = float("nan")
    gate_up[3, 7] = float("inf")
    gate_up[4, 7] = -float("inf")
    up[5, 9] = float("inf")
    gate_up[6] = float("nan")
    up[7] *= 1e-38
    up[8] *= 1e36
    gate_up[9] *= 1e-20
    probs[10], probs[11], probs[12] = 0.0, 1e-30, float("inf")
    probs[13] = float("nan")
    assert_same(gate_up, probs, fast_math)


@both_variants
def test_no_rows_and_no_columns(fast_math):
    """A launch of nothing, which CUDA refuses, or an amax that nothing writes."""
    assert_same(torch.zeros(0, 64).bfloat16(), torch.ones(0), fast_math)
    assert_same(torch.zeros(4, 0).bfloat16(), torch.ones(4), fast_math)


def test_views_are_read_in_place_or_copied():
    """Strides or a misaligned start ignored."""
    gate_up, probs = case(32, 64)
    wide = torch.cat([gate_up, gate_up], 1).cuda()
    for view in (wide[:, :128], wide.flatten()[4 : 4 + 31 * 128].view(31, 128)):
        got = cuda.swiglu_quantize(view, probs.cuda()[: len(view)])
        expected = swiglu.swiglu_quantize(view.cpu(), probs[: len(view)])
        assert torch.equal(got.codes.cpu(), expected.codes)


def test_refusals():
    """A row too wide, or a format, taken for what the kernel computes."""
    gate_up, probs = (t.cuda() for t in case(2, 12304))
    with pytest.raises(ValueError, match="F=12304 exceeds 12288"):
        cuda.swiglu_quantize(gate_up, probs)
    with pytest.raises(ValueError, match="outer='token'"):
        cuda.swiglu_quantize(gate_up, probs, NVFP4Spec())
    with pytest.raises(ValueError, match="probs is on cpu"):
        cuda.swiglu_quantize(gate_up[:, :64], probs.cpu())
