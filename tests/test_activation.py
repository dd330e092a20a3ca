"""Gated activations on a CPU: Megatron's steps, the gradients, and the kernels bit for bit."""

import itertools

import pytest
import torch
from dispatch_cases import assert_bits, every_bf16, generator, values
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nvfp4 import quant
from megatron_nvfp4.backends import dispatch as kernels
from megatron_nvfp4.quant import swiglu
from megatron_nvfp4.recipes import NVFP4Spec

TOKEN, KINDS = swiglu.TOKEN, swiglu.KINDS
needs_kernels = pytest.mark.skipif(
    kernels.why_not("cpu") is not None, reason=f"cpu: {kernels.why_not('cpu')}"
)
with_and_without_probs = pytest.mark.parametrize("weighted", [True, False])


def test_activations_are_torchs():
    """An activation of another name, or a bound that reaches into ordinary gates."""
    gates = every_bf16()
    gates = gates[gates.isfinite() & (gates > -80)]
    assert torch.equal(swiglu.activation(gates, "swiglu"), torch.nn.functional.silu(gates))
    # The sum 1 + erf loses digits below -2.
    upper = gates[gates > -2]
    assert torch.equal(swiglu.activation(upper, "geglu"), torch.nn.functional.gelu(upper))
    lower = gates[gates > -12].double()
    exact = lower * torch.special.log_ndtr(lower).exp()
    torch.testing.assert_close(
        swiglu.gelu(lower.bfloat16()).double(), exact, rtol=2**-8, atol=1e-30
    )
    upper = gates[gates > -50]
    quick = upper * torch.sigmoid(1.702 * upper)
    assert torch.equal(swiglu.activation(upper, "quick_geglu"), quick)


def megatron_backward(kind, g, h, probs):
    """Gradients by fused_bias_swiglu.py and fused_bias_geglu.py's formulas, eagerly."""
    gate, up = h.chunk(2, dim=1)
    g = g if probs is None else g * probs[:, None]
    scaled = gate if kind == "swiglu" else 1.702 * gate
    s = torch.sigmoid(scaled)
    first = g * s * (1 + scaled * (1 - s)) * up
    second = g * torch.nn.functional.silu(gate) if kind == "swiglu" else g * gate * s
    return torch.cat([first, second], 1).to(h.dtype)


@with_and_without_probs
@pytest.mark.parametrize("kind", ["swiglu", "quick_geglu"])
def test_steps_are_megatrons(kind, weighted):
    """A rounding left out or added, the probability in BF16, gate and up exchanged."""
    h, g = values(48, 160), values(48, 80, seed=1)
    probs = torch.rand(48, generator=generator(2)) if weighted else None
    gate, up = h.chunk(2, dim=1)
    act = torch.nn.functional.silu(gate) if kind == "swiglu" else gate * torch.sigmoid(1.702 * gate)
    y = act * up
    expected = y if probs is None else (y * probs[:, None]).bfloat16()
    assert torch.equal(swiglu.weighted_activation(h, probs, kind), expected)
    grad_h, grad_probs = swiglu.weighted_activation_backward(g, h, probs, kind)
    assert torch.equal(grad_h, megatron_backward(kind, g, h, probs))
    if weighted:
        torch.testing.assert_close(grad_probs, (y.float() * g.float()).sum(1), rtol=1e-4, atol=1e-3)
    else:
        assert grad_probs is None


@pytest.mark.parametrize("kind", KINDS)
def test_backward_is_the_gradient(kind):
    """A wrong derivative, which no comparison of bits between implementations can find."""
    h = values(8, 64, dtype=torch.float32, spread=2.0)
    probs = torch.rand(8, generator=generator(3))
    g = values(8, 32, dtype=torch.float32, seed=4)
    exact, weight = h.double().requires_grad_(), probs.double().requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    act = {
        "swiglu": torch.nn.functional.silu,
        "geglu": torch.nn.functional.gelu,
        "quick_geglu": lambda x: x * torch.sigmoid(1.702 * x),
    }[kind](gate)
    (act * up * weight[:, None]).backward(g.double())
    grad_h, grad_probs = swiglu.weighted_activation_backward(g, h, probs, kind)
    torch.testing.assert_close(grad_h.double(), exact.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad_probs.double(), weight.grad, rtol=1e-4, atol=1e-5)


@needs_kernels
@with_and_without_probs
@pytest.mark.parametrize("kind", KINDS)
def test_activation_kernels_of_every_gate(kind, weighted):
    """A table entry of another gate, or a step with another rounding."""
    gate = every_bf16().reshape(-1, 16)
    up, g = values(*gate.shape, seed=5), values(*gate.shape, seed=6)
    h = torch.cat([gate, up], 1)
    probs = torch.rand(len(h), generator=generator(7)) if weighted else None
    assert_bits(
        [kernels.weighted_activation(h, probs, kind)], [swiglu.weighted_activation(h, probs, kind)]
    )
    got = kernels.weighted_activation_backward(g, h, probs, kind)
    expected = swiglu.weighted_activation_backward(g, h, probs, kind)
    assert_bits(got[: 1 + weighted], expected[: 1 + weighted])


@needs_kernels
@settings(deadline=None, max_examples=25)
@given(
    num_rows=st.integers(0, 9),
    num_cols=st.sampled_from([0, 16, 48, 272, 768]),
    kind=st.sampled_from(KINDS),
    weighted=st.booleans(),
    e4m3_max=st.sampled_from([448, 256]),
    seed=st.integers(0, 99),
)
def test_fused_quantiser(num_rows, num_cols, kind, weighted, e4m3_max, seed):
    """Codes of another product than the one that is kept, or kept when nobody asked."""
    spec = NVFP4Spec(outer="token", e4m3_max=e4m3_max)
    h = values(num_rows, 2 * num_cols, seed=seed)
    probs = torch.rand(num_rows, generator=generator(seed)) if weighted else None
    expected = quant.quantize(swiglu.weighted_activation(h, probs, kind), spec)
    for module, keep in itertools.product((swiglu, kernels), (True, False)):
        y, got = module.weighted_activation_quantize(h, probs, spec, kind, keep)
        assert got.spec == spec
        assert_bits(*([q.codes, q.block_scales, q.amax] for q in (got, expected)))
        if keep:
            assert_bits([y], [swiglu.weighted_activation(h, probs, kind)])
        else:
            assert y is None


def test_other_dtypes_take_the_definition():
    """FP32 activations refused, or computed in BF16."""
    h, probs = values(3, 32, dtype=torch.float32), torch.rand(3)
    got = kernels.weighted_activation(h, probs)
    assert got.dtype == torch.float32
    torch.testing.assert_close(
        got, torch.nn.functional.silu(h[:, :16]) * h[:, 16:] * probs[:, None]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 24).bfloat16(), None, "swiglu"), "multiple of 8"),
        ((torch.zeros(2, 32).bfloat16(), torch.ones(3), "swiglu"), r"give float32 \(2,\)"),
        ((torch.zeros(2, 32).bfloat16(), None, "relu"), "kind='relu'"),
    ],
)
def test_activations_refuse(arguments, message):
    """A shape, dtype or name taken for another in silence."""
    for module in (swiglu, kernels):
        with pytest.raises(ValueError, match=message):
            module.weighted_activation(*arguments)
        h, probs, kind = arguments
        grad = torch.zeros(2, h.shape[1] // 2).bfloat16()
        with pytest.raises(ValueError, match=message):
            module.weighted_activation_backward(grad, h, probs, kind)


@needs_kernels
def test_activation_operators_have_consistent_schemas():
    """A schema that hides a mutation or a fake whose shapes are wrong (torch.compile)."""
    ops, h, g = torch.ops.megatron_nvfp4, values(4, 64), values(4, 32)
    kernels.weighted_activation(h, None)
    for probs in (None, torch.rand(4)):
        torch.library.opcheck(ops.weighted_activation.default, (h, probs, 0))
        torch.library.opcheck(ops.weighted_activation_backward.default, (g, h, probs, 0))
        for keep in (True, False):
            torch.library.opcheck(
                ops.weighted_activation_quantize.default, (h, probs, 1, 448, False, keep)
            )
