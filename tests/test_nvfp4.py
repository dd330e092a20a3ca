"""quant/nvfp4.py: worked values, rounding tables, invariances, error bound, special values,
refusals.
"""

from bisect import bisect_left
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nvfp4.quant import (
    NVFP4Spec,
    QuantizedTensor,
    count_nonfinite,
    decode_exact,
    dequantize,
    quantize,
    quantize_grouped,
    unpack_codes,
)
from megatron_nvfp4.quant.nvfp4 import encode_e2m1, encode_e4m3

TOKEN = NVFP4Spec(outer="token")
TENSOR = NVFP4Spec(outer="tensor")
TILES = NVFP4Spec(block=(16, 16))
FOUR_SIX = NVFP4Spec(outer="token", four_over_six="mse", error="fast")
SPECS = (TOKEN, TENSOR, TILES, FOUR_SIX, NVFP4Spec(e4m3_max=256, four_over_six="mae"))
E2M1 = [Fraction(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
# Bytes 0x00..0x7E: exponent field 0 is mantissa * 2^-9, else (8 + mantissa) * 2^(field - 10).
E4M3 = [
    Fraction(byte % 8, 2**9) if byte < 8 else (8 + byte % 8) * Fraction(2) ** (byte // 8 - 10)
    for byte in range(0x7F)
]
fixed = settings(max_examples=60, deadline=None, derandomize=True)


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """All three parts equal bit for bit."""
    return (
        torch.equal(a.codes, b.codes)
        and torch.equal(scale_bytes(a), scale_bytes(b))
        and torch.equal(a.amax.view(torch.int32), b.amax.view(torch.int32))
    )


def scale_bytes(qt: QuantizedTensor) -> torch.Tensor:
    return qt.block_scales.view(torch.uint8)


def nearest_even(value: Fraction, table: list[Fraction]) -> int:
    """Index of the table's value nearest to `value`, ties to the even index, saturating."""
    upper = bisect_left(table, value)
    if upper == len(table):
        return upper - 1
    if upper == 0 or table[upper] == value:
        return upper
    below, above = value - table[upper - 1], table[upper] - value
    if below == above:
        return upper if upper % 2 == 0 else upper - 1
    return upper if above < below else upper - 1


@st.composite
def matrices(draw, max_rows: int = 5, exponents: int = 20):
    """A BF16 matrix of 1 to max_rows rows and 16 or 32 columns, values 0 or 2^+-exponents."""
    num_rows, num_cols = draw(st.integers(1, max_rows)), draw(st.sampled_from((16, 32)))
    element = st.tuples(
        st.sampled_from((-1.0, 1.0)), st.integers(0, 255), st.integers(-exponents, exponents)
    )
    size = num_rows * num_cols
    parts = draw(st.lists(element, min_size=size, max_size=size))
    # Mantissas of 0 to 255 over 128: below 1 they reach down to 0.
    values = [sign * mantissa / 128 * 2.0**exponent for sign, mantissa, exponent in parts]
    return torch.tensor(values, dtype=torch.bfloat16).reshape(num_rows, num_cols)


# --- worked by hand ---------------------------------------------------------------------------


def test_a_block_worked_by_hand():
    """Prevents: a rounding step, a nibble order or a code table other than the format's.

    amax 6: S_enc = 2688 / 6 = 448, S_dec = RN(1/448). First block: amax_b = 6, s_b = e4m3(6 *
    448/6) = 448 and the multiplier 1 / (448 * S_dec) is 1, so codes are the values rounded to E2M1.
    Second block: amax_b = 1, s_b = e4m3(74.67) = 72 (E4M3 has steps of 8 there), the multiplier is
    448 / 72 = 6.22: 1 -> 6.22 -> 6, 0.5 -> 3.11 -> 3, 0.375 -> 2.33 -> 2, 0.125 -> 0.78 -> 1, and
    decoded 6 * 72 / 448 = 0.9643, 3 * 72 / 448 = 0.4821 and so on.
    """
    first = [6, -4, 3, 2, 1.5, 1, 0.5, 0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5]
    second = [1, 0.5, 0.375, 0.125] + [0] * 12
    x = torch.tensor([first + second], dtype=torch.bfloat16)
    qt = quantize(x, TENSOR)
    assert qt.amax.tolist() == [6.0]
    assert qt.block_scales.float().tolist() == [[448.0, 72.0]]
    # Codes 0..7 are 0 .5 1 1.5 2 3 4 6; ties go to even codes; 8 is the sign.
    codes = [7, 14, 5, 4, 3, 2, 1, 0, 0, 2, 2, 4, 4, 6, 6, 14, 7, 5, 4, 2] + [0] * 12
    assert unpack_codes(qt.codes).tolist() == [codes]
    # Even column in the low nibble: (7, 14) is 0xE7.
    assert qt.codes[0, :4].tolist() == [0xE7, 0x45, 0x23, 0x01]
    assert qt.outer_scale.tolist() == [torch.tensor(1.0).div(torch.tensor(448.0)).item()]
    decoded = [6, -4, 3, 2, 1.5, 1, 0.5, 0, 0, 1, 1, 2, 2, 4, 4, -4]
    decoded += [v * 72 / 448 for v in (6, 3, 2, 1)] + [0] * 12
    assert torch.equal(dequantize(qt), torch.tensor([decoded], dtype=torch.bfloat16))


def test_four_over_six_worked_by_hand():
    """Prevents: choosing the candidate with the larger error, or scaling to 4 by another factor.

    E = 256, amax 6: S_enc = 256, base 256, so s6 = 256 (byte 0x78) and s4 = 384 (0x7C).
    Row [6, 4.5, ...]: at 256 4.5 falls to 4, error 0.5 each; at 384 they become 4 and 3, exact.
    Row [6, 1, ...]: at 256 exact; at 384 1 becomes 0.67, rounds to 0.5 and decodes to 0.75.
    """
    x = torch.tensor([[6] + [4.5] * 15, [6] + [1] * 15], dtype=torch.bfloat16)
    for error in ("strict", "fast"):
        for kind in ("mae", "mse"):
            qt = quantize(x, NVFP4Spec(e4m3_max=256, four_over_six=kind, error=error))
            assert scale_bytes(qt).tolist() == [[0x7C], [0x78]]
            assert unpack_codes(qt.codes).tolist() == [[6] + [5] * 15, [7] + [2] * 15]
            assert torch.equal(dequantize(qt), x)


# --- the two element formats, exhaustively ----------------------------------------------------


def test_e2m1_of_every_bf16_value():
    # Prevents: one wrong tie, a lost sign of zero, a NaN or Inf that becomes something else.
    bits = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    x = bits.view(torch.bfloat16).float()
    expected = []
    for value in x.tolist():
        if value != value:
            expected.append(7)
        elif value in (float("inf"), float("-inf")):
            expected.append(7 if value > 0 else 15)
        else:
            expected.append(nearest_even(abs(Fraction(value)), E2M1))
    expected = torch.tensor(expected, dtype=torch.uint8)
    negative = torch.signbit(x) & ~x.isnan() & ~x.isinf()
    expected[negative] += 8
    assert torch.equal(encode_e2m1(x), expected)


@pytest.mark.parametrize("tie", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
def test_e2m1_next_to_a_tie(tie):
    # Prevents: bounds that are off by one FP32 step, which no BF16 value shows.
    tie = torch.tensor(tie)
    below, above = torch.nextafter(tie, torch.tensor(0.0)), torch.nextafter(tie, torch.tensor(9.0))
    for value in (below, tie, above):
        expected = nearest_even(Fraction(value.item()), E2M1)
        assert encode_e2m1(value[None]).item() == expected
        assert encode_e2m1(-value[None]).item() == expected + 8


def test_e4m3_at_every_boundary():
    # Prevents: double rounding, NaN bytes from 465 up (torch's own cast), subnormals flushed.
    values = [float(v) for v in E4M3]
    middles = [(a + b) / 2 for a, b in pairwise(values)]
    x = torch.tensor(values + middles + [464.0, 465.0, 480.0, 1e9, 3e38, float("inf")])
    x = torch.cat((x, torch.nextafter(x, torch.zeros_like(x)), torch.nextafter(x, x + 1)))
    expected = [nearest_even(Fraction(v), E4M3) if v != float("inf") else 0x7E for v in x.tolist()]
    assert encode_e4m3(x).view(torch.uint8).tolist() == expected


def test_every_product_of_code_and_scale_is_exact_in_bf16():
    # Prevents: a software GEMM that decodes to BF16 and rounds there.
    codes = torch.arange(16, dtype=torch.uint8).repeat(0x7F, 1)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    scales = torch.arange(0x7F, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    qt = QuantizedTensor(packed, scales, torch.ones(1), TENSOR)
    decoded = decode_exact(qt)[0]
    assert decoded.dtype == torch.bfloat16
    for scale, row in zip(E4M3, decoded.tolist(), strict=True):
        signed = [sign * v for sign in (1, -1) for v in E2M1]
        assert [Fraction(v) for v in row] == [v * scale for v in signed]
    assert torch.signbit(decoded[:, 8:]).all()


# --- what must not matter ---------------------------------------------------------------------


@fixed
@given(matrices(), st.randoms(use_true_random=False))
def test_rows_do_not_influence_each_other(x, random):
    # Prevents: a token's bits that depend on the batch, which breaks learner-sampler equality.
    order = [random.randrange(x.shape[0]) for _ in range(x.shape[0] + 2)]  # repeats and omits rows
    for spec in (TOKEN, FOUR_SIX):
        whole, picked = quantize(x, spec), quantize(x[order], spec)
        assert torch.equal(picked.codes, whole.codes[order])
        assert torch.equal(scale_bytes(picked), scale_bytes(whole)[order])
        assert torch.equal(picked.amax, whole.amax[order])
        for index in range(x.shape[0]):
            alone = quantize(x[index : index + 1], spec)
            assert torch.equal(alone.codes[0], whole.codes[index])
            assert torch.equal(alone.block_scales.float()[0], whole.block_scales.float()[index])


@fixed
@given(matrices(max_rows=7), st.lists(st.integers(0, 7), max_size=4))
def test_grouped_equals_each_group_alone(x, cuts):
    # Prevents: an empty expert shifting its neighbours' amax, or reading one never written.
    bounds = [0, *sorted(min(cut, x.shape[0]) for cut in cuts), x.shape[0]]
    offsets = torch.tensor(bounds)
    for spec in (TENSOR, TOKEN, FOUR_SIX):
        grouped = quantize_grouped(x, offsets, spec)
        alone = [quantize(x[a:b], spec) for a, b in pairwise(bounds)]
        assert torch.equal(grouped.codes, torch.cat([qt.codes for qt in alone]))
        assert torch.equal(scale_bytes(grouped), torch.cat([scale_bytes(qt) for qt in alone]))
        assert torch.equal(grouped.amax, torch.cat([qt.amax for qt in alone]))
        assert torch.equal(dequantize(grouped), torch.cat([dequantize(qt) for qt in alone]))


def test_grouped_tiles_equal_each_group_alone():
    # Prevents: expert weights in 16x16 tiles that share an amax; a tile cut in two without a word.
    x = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
    x[16:] *= 7
    grouped = quantize_grouped(x, torch.tensor([0, 16, 16, 48]), TILES)
    alone = [quantize(x[:16], TILES), quantize(x[16:16], TILES), quantize(x[16:], TILES)]
    assert torch.equal(grouped.codes, torch.cat([qt.codes for qt in alone]))
    assert torch.equal(grouped.amax, torch.cat([qt.amax for qt in alone]))
    with pytest.raises(ValueError, match=r"offsets \[0, 8, 48\] cut 16x16 tiles.*multiple of 16"):
        quantize_grouped(x, torch.tensor([0, 8, 48]), TILES)


@fixed
@given(matrices(), st.integers(-40, 40))
def test_powers_of_two_scale_amax_alone(x, exponent):
    # Prevents: a constant added somewhere (an epsilon, a lower clamp) that only small tensors show.
    factor = 2.0**exponent
    for spec in SPECS:
        qt, scaled = quantize(x, spec), quantize(x * factor, spec)
        assert torch.equal(qt.codes, scaled.codes)
        assert torch.equal(scale_bytes(qt), scale_bytes(scaled))
        assert torch.equal(qt.amax * factor, scaled.amax)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_dtype_and_strides_do_not_matter(spec):
    # Prevents: an FP32 or transposed input taking other bits than the same values in BF16.
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected = quantize(x, spec)
    assert same(quantize(x.float(), spec), expected)
    assert same(quantize(x.t().contiguous().t(), spec), expected)
    half = x.half()  # BF16 normals between 2^-14 and 65504 with 8 bits fit FP16
    exact = half.float() == x.float()
    assert same(
        quantize(torch.where(exact, half, 0), spec), quantize(torch.where(exact, x, 0), spec)
    )


# --- how large an error can be ----------------------------------------------------------------


@fixed
@given(matrices())
def test_dequantisation_error_bound(x):
    """Prevents: clipping, a wrong scale, a code read with another row's scale.

    In units of u = s_b * S_dec the codes reach 6 and leave gaps of at most 2 (4 to 6), so up to 6
    the error is at most 1 unit. Above 6 it is |x| - 6 u <= amax_b - 6 u = 6 S_dec (base - s_b),
    where base is amax_b S_enc / 6 before E4M3. Rounding to E4M3 moves base by at most half a step:
    s_b / 16, or 2^-10 among subnormals. With four-over-six the larger scale leaves values below 6
    units. FP32 roundings add a few 2^-24, the result itself one.
    """
    for spec in SPECS:
        qt = quantize(x, spec)
        scale, s_dec = qt.block_scales.double(), qt.row_scale().double()[:, None]
        half_step = torch.clamp_min(scale / 16, 2.0**-10)
        bound = torch.maximum(scale, 6 * half_step) * s_dec * (1 + 2.0**-20)
        error = (dequantize(qt, torch.float32).double() - x.double()).abs()
        assert (error <= bound.repeat_interleave(16, dim=1)).all()


def test_given_amax_is_used():
    # Prevents: shards of one matrix with different outer scales because the reduced amax is
    # dropped.
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    whole = quantize(x, TENSOR)
    left = quantize(x[:, :32], TENSOR, amax=whole.amax)
    right = quantize(x[:, 32:], TENSOR, amax=whole.amax)
    assert torch.equal(torch.cat((left.codes, right.codes), 1), whole.codes)
    assert not same(left, quantize(x[:, :32], TENSOR)) or not same(
        right, quantize(x[:, 32:], TENSOR)
    )
    rows = quantize(x, TOKEN)
    half = quantize(x[:, :32], TOKEN, amax=rows.amax)
    assert torch.equal(half.codes, rows.codes[:, :16])
    assert torch.equal(half.amax, rows.amax)
    experts = quantize_grouped(x, torch.tensor([0, 8, 32]), TENSOR, amax=whole.amax.repeat(2))
    assert torch.equal(experts.codes, whole.codes)


def test_tiles_are_their_own_transpose():
    # Prevents: a weight that dgrad sees with other values than fprop.
    w = torch.randn(48, 80, generator=torch.Generator().manual_seed(4)).bfloat16()
    qt, transposed = quantize(w, TILES), quantize(w.t(), TILES)
    assert torch.equal(dequantize(qt).t(), dequantize(transposed))
    tiles = scale_bytes(qt).reshape(3, 16, 5)
    assert (tiles == tiles[:, :1]).all()
    assert torch.equal(scale_bytes(transposed)[::16], tiles[:, 0].t())
    # A last partial tile is the whole tile's first rows.
    padded = torch.cat((w[:20], w.new_zeros(12, 80)))
    assert torch.equal(quantize(w[:20], TILES).codes, quantize(padded, TILES).codes[:20])


# --- special values ---------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [TENSOR, TILES, TOKEN, FOUR_SIX], ids=str)
def test_zero_block_of_a_weight(spec):
    # Prevents: scale bytes 0x7F or 0xFF (NaN) for a block of zeros.
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(5)) * 0.1
    w[3, 16:32] = 0
    w[16:, 48:] = 0
    qt = quantize(w, spec)
    assert ((scale_bytes(qt) & 0x7F) != 0x7F).all()
    assert (dequantize(qt)[3, 16:32] == 0).all()
    assert (scale_bytes(qt)[16:, 3] == 0).all()


def test_zero_rows_stay_zero_and_leave_others_alone():
    # Prevents: 1/0 in a padding row that becomes Inf * 0 = NaN; a row amax of 0 handed in likewise.
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(6)).bfloat16()
    x[3], x[5] = 0.0, -0.0
    qt = quantize(x, TOKEN)
    assert same(qt, quantize(x, TOKEN, amax=qt.amax))
    assert qt.amax[[3, 5]].tolist() == [0, 0]
    assert qt.outer_scale[[3, 5]].tolist() == [1, 1]
    assert (scale_bytes(qt)[[3, 5]] == 0).all()
    assert (qt.codes[3] == 0).all()
    assert (qt.codes[5] == 0x88).all()
    decoded = dequantize(qt)
    assert torch.isfinite(decoded).all()
    assert torch.equal(torch.signbit(decoded[5]), torch.signbit(x[5]))
    others = [0, 1, 2, 4, 6, 7]
    assert torch.equal(qt.codes[others], quantize(x[others], TOKEN).codes)


@pytest.mark.parametrize("spec", [TOKEN, TENSOR], ids=str)
def test_nan_encodes_as_six_and_hides_from_the_amax(spec):
    # Prevents: one NaN turning a scale byte, and with it 16 values or a tensor, into NaN.
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(7))
    x[1, 5], x[1, 20], x[3] = float("nan"), -float("nan"), float("nan")
    nan = x.isnan()
    clean = quantize(torch.where(nan, 0.0, x), spec)
    qt = quantize(x, spec)
    assert torch.equal(qt.amax, clean.amax)
    assert torch.equal(scale_bytes(qt), scale_bytes(clean))
    codes = unpack_codes(qt.codes)
    assert (codes[nan] == 7).all()
    assert torch.equal(codes[~nan], unpack_codes(clean.codes)[~nan])
    assert count_nonfinite(x).item() == 2


def test_inf_saturates_its_row_only():
    # Prevents: Inf * 0 = NaN in the row, or another row's scale taken from the Inf.
    x = torch.ones(3, 32)
    x[1, 0] = float("inf")
    qt = quantize(x, TOKEN)
    assert qt.outer_scale[1] == 1
    decoded = dequantize(qt, torch.float32)
    assert decoded[1, 0] == 2688
    # S_enc = 1: beside the Inf (s_b 448) a 1 is 1/448 of a unit; in the next block s_b = e4m3(1/6).
    assert (decoded[1, 1:16] == 0).all()
    assert (decoded[1, 16:] == 6 * 0.171875).all()
    for row in (0, 2):
        assert torch.equal(qt.codes[row], quantize(x[:1], TOKEN).codes[0])
    assert count_nonfinite(x).item() == 1
    assert quantize(-x[1:2], TOKEN).codes[0, 0].item() & 0xF == 15


def test_both_ends_of_fp32():
    """Prevents: clipping of large rows, flush to zero of small ones.

    1e-38: S_enc is capped at FLT_MAX, S_dec = 2.9387e-39, s_b = e4m3(1e-38 * FLT_MAX / 6 = 0.567) =
    0.5625, the multiplier is capped too, 1e-38 * FLT_MAX = 3.4 -> 3, and 3 * 0.5625 * S_dec =
    4.96e-39.
    """
    x = torch.zeros(3, 16)
    x[0, 0], x[1, 0], x[2, 0] = 1e4, 3e38, 1e-38
    qt = quantize(x, TOKEN)
    assert qt.block_scales.float().flatten().tolist() == [448, 448, 0.5625]
    decoded = dequantize(qt, torch.float32)[:, 0]
    assert decoded[0].item() == pytest.approx(1e4, rel=2**-22)
    assert decoded[1].item() == torch.tensor(3.0000002e38).item()
    assert unpack_codes(qt.codes)[2, 0] == 5
    assert decoded[2].item() == pytest.approx(4.96e-39, rel=1e-3)


def test_small_blocks_beside_large_ones():
    """Prevents: an unstated floor under block scales.

    Beside amax 1 a block of amax 1/r gets the scale 448 / r: normal up to r = 28672 (2^-6), then
    subnormal, and 0 once it is at most half of 2^-9, at r = 458752 = 448 * 2^10.
    """
    ratios = (28672.0, 2.0**18, 458752.0, 1e6)
    x = torch.zeros(4, 32)
    x[:, 0] = 1
    x[:, 16] = 1 / torch.tensor(ratios)
    qt = quantize(x, TOKEN)
    assert qt.block_scales.float()[:, 1].tolist() == [2.0**-6, 2.0**-9, 0, 0]
    assert (dequantize(qt)[:, 16] != 0).tolist() == [True, True, False, False]
    assert unpack_codes(qt.codes)[3, 16] == 7  # saturated, on a scale of 0


# --- refusals and empty inputs ----------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_no_rows(spec):
    # Prevents: a crash for an expert, or a batch, without tokens.
    qt = quantize(torch.empty(0, 32), spec)
    assert qt.codes.shape == (0, 16)
    assert qt.block_scales.shape == (0, 2)
    assert qt.amax.tolist() == ([] if spec.outer == "token" else [0])
    assert dequantize(qt).shape == decode_exact(qt)[0].shape == (0, 32)
    grouped = quantize_grouped(torch.empty(0, 32), torch.tensor([0, 0, 0]), spec)
    assert grouped.amax.tolist() == ([] if spec.outer == "token" else [0, 0])
    assert dequantize(grouped).shape == (0, 32)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(4, 40), r"K=40 is not a multiple of 16; pad the columns or leave .* BF16"),
        (torch.zeros(4, 8), "K=8 is not a multiple of 16"),
        (torch.zeros(16), r"shape \(16,\); give a matrix"),
        (torch.zeros(2, 2, 16), r"shape \(2, 2, 16\); give a matrix"),
        (torch.zeros(4, 16, dtype=torch.float64), "torch.float64; give BF16, FP16 or FP32"),
        (torch.zeros(4, 16, dtype=torch.int32), "torch.int32; give BF16, FP16 or FP32"),
    ],
)
def test_bad_inputs_are_named(x, message):
    # Prevents: NaN from unchecked loads, or an error that speaks of an internal reshape.
    with pytest.raises(ValueError, match=message):
        quantize(x)
    with pytest.raises(ValueError, match=message):
        quantize_grouped(x, torch.tensor([0, 4]))


def test_bad_amax_is_named():
    # Prevents: a scalar amax broadcast over rows, an amax in BF16 that has lost bits.
    x = torch.ones(4, 16)
    with pytest.raises(ValueError, match=r"float32 \(1,\); give float32 \(4,\)"):
        quantize(x, TOKEN, amax=torch.ones(1))
    with pytest.raises(ValueError, match=r"bfloat16 \(1,\); give float32 \(1,\)"):
        quantize(x, TENSOR, amax=torch.ones(1, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"float32 \(4,\); give float32 \(2,\)"):
        quantize_grouped(x, torch.tensor([0, 2, 4]), TENSOR, amax=torch.ones(4))


def test_bad_specs_list_every_fault():
    # Prevents: a user who fixes one field to learn of the next.
    with pytest.raises(ValueError, match="NVFP4Spec:") as caught:
        NVFP4Spec(block=(1, 32), outer="column", e4m3_max=240, four_over_six="max", error="exact")
    text = str(caught.value)
    for part in ("block=(1, 32)", "outer='column'", "e4m3_max=240", "'max'", "error='exact'"):
        assert part in text
    with pytest.raises(ValueError, match=r"16, 16\) with outer='token'"):
        NVFP4Spec(block=(16, 16), outer="token")
    with pytest.raises(ValueError, match="four_over_six with rounding='stochastic'"):
        NVFP4Spec(four_over_six="mse", rounding="stochastic")
    with pytest.raises(ValueError, match=r"stochastic.* without a seed; give seed="):
        quantize(torch.zeros(1, 16), NVFP4Spec(rounding="stochastic"))
