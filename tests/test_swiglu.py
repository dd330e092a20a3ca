"""The definition of weighted SwiGLU: nearest silu, Megatron's steps and dtypes, the refusals."""

from decimal import Decimal, localcontext

import pytest
import torch

from megatron_nvfp4 import quant
from megatron_nvfp4.quant.swiglu import GATE_MIN, TOKEN, silu, swiglu, swiglu_quantize
from megatron_nvfp4.recipes import NVFP4Spec


def every_bf16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def case(num_rows: int, num_cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    gate_up = torch.randn(num_rows, 2 * num_cols, generator=generator) * 4
    return gate_up.bfloat16(), torch.rand(num_rows, generator=generator)


def test_silu_is_nearest():
    """A silu whose FP64 steps or double rounding reach the wrong neighbour: no kernel could match it."""
    gates = every_bf16()
    # Half of a subnormal gate is a tie to even to every precision of ours.
    gates = gates[gates.isfinite() & (gates.abs() > 2**-120)][::19]
    bits = silu(gates).view(torch.int16)
    near = [(bits + step).view(torch.bfloat16).tolist() for step in (-1, 0, 1)]
    with localcontext() as context:
        context.prec = 40
        for gate, below, got, above in zip(gates.tolist(), *near, strict=True):
            x = Decimal(max(gate, GATE_MIN))
            exact = x / (1 + (-x).exp())
            error = abs(Decimal(got) - exact)
            for other in (below, above):
                assert Decimal(other).is_nan() or error <= abs(Decimal(other) - exact), gate


def test_silu_of_what_is_no_number():
    """A NaN that the bound on the gate swallows; an Inf or zero that becomes something else."""
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0]).bfloat16()
    got = silu(special)
    assert got[0].isnan()
    assert got[1] == float("inf")
    assert got[2] == silu(torch.tensor([GATE_MIN]).bfloat16())[0]
    assert got[3:].view(torch.int16).tolist() == [0, -32768]


def test_swiglu_takes_megatrons_steps():
    """Gate and up exchanged, a rounding left out, or the probability applied in BF16 or before it."""
    gate_up, probs = case(64, 96)
    gate, up = gate_up[:, :96], gate_up[:, 96:]
    got = swiglu(gate_up, probs)
    steps = (silu(gate).float() * up.float()).bfloat16()
    assert torch.equal(got, (steps.float() * probs[:, None]).bfloat16())
    # As Megatron computes it; silu in FP32 may take the other neighbour.
    megatron = torch.nn.functional.silu(gate) * up
    megatron = (megatron * probs[:, None]).bfloat16()
    assert (got == megatron).float().mean() > 0.99
    torch.testing.assert_close(got, megatron, rtol=2**-6, atol=0)


def test_swiglu_quantize_is_both_steps():
    """An amax of the activation before its probability, or a spec that is not passed on."""
    gate_up, probs = case(32, 64)
    for spec in (TOKEN, NVFP4Spec(outer="token", e4m3_max=256)):
        got = swiglu_quantize(gate_up, probs, spec)
        expected = quant.quantize(swiglu(gate_up, probs), spec)
        assert got.spec == spec
        assert torch.equal(got.codes, expected.codes)
        assert torch.equal(got.amax, swiglu(gate_up, probs).float().abs().amax(1))


@pytest.mark.parametrize(
    ("gate_up", "probs", "spec", "message"),
    [
        (torch.zeros(2, 48).bfloat16(), torch.ones(2), TOKEN, "K a multiple of 16"),
        (torch.zeros(2, 64), torch.ones(2), TOKEN, "give BF16"),
        (torch.zeros(2, 64).bfloat16(), torch.ones(3), TOKEN, r"give float32 \(2,\)"),
        (torch.zeros(2, 64).bfloat16(), torch.ones(2).bfloat16(), TOKEN, "give float32"),
        (torch.zeros(2, 64).bfloat16(), torch.ones(2), NVFP4Spec(), "outer='token'"),
        (
            torch.zeros(2, 64).bfloat16(),
            torch.ones(2),
            NVFP4Spec(outer="token", four_over_six="mse"),
            "without four-over-six",
        ),
    ],
)
def test_refusals(gate_up, probs, spec, message):
    """Another shape, dtype or format taken in silence for what the kernel computes."""
    with pytest.raises(ValueError, match=message):
        swiglu_quantize(gate_up, probs, spec)
