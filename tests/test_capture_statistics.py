"""Statistics of tensors and of what quantisation did to them, by hand."""

import pytest
import torch

from megatron_nvfp4.diagnostics import statistics
from megatron_nvfp4.quant import QuantizedTensor, quantize, quantize_mxfp8, quantize_simulated
from megatron_nvfp4.recipes import FloatSpec, NVFP4Spec

TOKEN = NVFP4Spec(outer="token")
INF, NAN = float("inf"), float("nan")


def _values(x: torch.Tensor) -> dict[str, float]:
    found = statistics.value_statistics(x)
    return dict(zip(statistics.VALUES, found.tolist(), strict=True))


def _errors(x: torch.Tensor, operand) -> torch.Tensor:
    return statistics.error_statistics(x, statistics.decode(operand))


def _codes(x: torch.Tensor, operand: QuantizedTensor) -> torch.Tensor:
    return statistics.code_statistics(x, operand, statistics.decode(operand))


def test_values_by_hand():
    # Prevents: a NaN that hides every other number, a norm that overflows FP32, rows counted as values.
    x = torch.tensor([[3.0, -4.0, 0.0, 1e30], [NAN, 2.0, INF, -0.0]])
    found = _values(x)
    assert found["min"] == -4.0
    assert found["max"] == found["amax"] == float(torch.tensor(1e30))
    assert found["num_values"] == 8
    assert found["num_zeros"] == 2
    assert found["nonfinite_rows"] == 1
    assert found["l2"] == pytest.approx(1e30)
    assert found["l1"] == pytest.approx(1e30)
    assert found["mean"] == pytest.approx(1e30 / 6)
    small = _values(torch.tensor([3.0, -4.0]))
    assert (small["l1"], small["l2"], small["mean"], small["amax"]) == (7.0, 5.0, -0.5, 4.0)


@pytest.mark.parametrize("x", [torch.empty(0, 4), torch.full((2, 3), NAN)])
def test_nothing_finite(x):
    # Prevents: an infinite minimum that looks like a measurement.
    found = _values(x)
    assert all(found[name] != found[name] for name in ("min", "max", "mean"))
    assert (found["l1"], found["l2"], found["amax"]) == (0, 0, 0)
    assert found["nonfinite_rows"] == (2 if x.numel() else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_do_not_depend_on_the_portions(monkeypatch, dtype):
    # Prevents: the last rows left out, or counted twice, where a tensor is taken in portions.
    x = torch.randn(37, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    operand = quantize(x, TOKEN)
    whole = (
        _values(x),
        _errors(x, operand),
        _codes(x, operand),
    )
    monkeypatch.setattr(statistics, "CHUNK", 16 * 5)
    assert _values(x) == pytest.approx(whole[0], rel=1e-12)
    torch.testing.assert_close(_errors(x, operand), whole[1], rtol=1e-12, atol=0)
    assert torch.equal(_codes(x, operand), whole[2])


def test_flushed_and_saturated_by_hand():
    # Prevents: a small block beside an outlier that decodes to 0 without a word; zeros counted as flushed;
    # a largest code counted as saturated where it stands for its value.
    x = torch.zeros(2, 48)
    x[0, :16], x[0, 16:32] = 1.0, 1e-6  # the second block is below what a scale can say
    x[1, 0] = 6.0  # exactly the largest code
    operand = quantize(x, TOKEN)
    found = dict(zip(statistics.CODES, _codes(x, operand).tolist(), strict=True))
    assert found["num_blocks"] == 6
    assert found["zero_blocks"] == 3
    assert found["flushed_blocks"] == 1
    decoded = statistics.decode(operand)
    largest = (operand.codes & 0x07 == 7).sum() + (operand.codes & 0x70 == 0x70).sum()
    assert found["max_codes"] == largest == 16 + 16 + 1
    clipped = (x[0].abs() > decoded[0].abs())[:32].sum()
    assert found["saturated_codes"] == clipped


def test_saturation_is_counted():
    # Prevents: a code that was clipped, as under another tensor's amax, passing for a rounded one.
    x = torch.full((1, 16), 2.0)
    operand = quantize(x, TOKEN, amax=torch.tensor([1.0]))
    assert statistics.decode(operand).unique().tolist() == [1.0]
    found = dict(zip(statistics.CODES, _codes(x, operand).tolist(), strict=True))
    assert found["max_codes"] == found["saturated_codes"] == 16


def test_errors_by_hand():
    # Prevents: an error measured against the decoded values, a decibel of power taken for one of amplitude.
    x = torch.full((1, 16), 3.0)
    x[0, 0], x[0, 1] = 6.0, 2.25
    operand = QuantizedTensor(
        quantize(x, TOKEN).codes,
        torch.ones(1, 1).to(torch.float8_e4m3fn),
        torch.tensor([2688.0]),
        TOKEN,
    )
    assert operand.outer_scale.item() == 1.0
    rel_l2, snr_db, mae = _errors(x, operand).tolist()
    lost = (statistics.decode(operand) - x).double()
    assert lost.abs().max() == 0.25
    size = x.double().norm()
    assert rel_l2 == pytest.approx(float(lost.norm() / size), rel=1e-12)
    assert snr_db == pytest.approx(
        10 * float(torch.log10(size.pow(2) / lost.pow(2).sum())), rel=1e-12
    )
    assert mae == pytest.approx(0.25 / 16)


@pytest.mark.parametrize(
    "make", [quantize_mxfp8, lambda x: quantize_simulated(x, FloatSpec(exponent=2, mantissa=3))]
)
def test_errors_of_other_formats(make):
    # Prevents: an outer scale left out of a simulated format's values, an error of 100 %.
    x = 100 * torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    rel_l2 = _errors(x, make(x))[0]
    assert 0.001 < rel_l2 < 0.1


def test_rows_that_are_not_finite_do_not_hide_the_error():
    # Prevents: one NaN in a batch, and no error of any other token is known.
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    alone = _errors(x[1:], quantize(x[1:], TOKEN))
    x[0, 3] = NAN
    assert torch.equal(_errors(x, quantize(x, TOKEN)), alone)
