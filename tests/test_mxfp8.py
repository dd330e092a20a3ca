"""quant/mxfp8.py: the shared exponent by integers, worked values, special values, refusals."""

import pytest
import torch

from megatron_nvfp4.quant import MXFP8Tensor, decode_mxfp8, quantize_mxfp8
from megatron_nvfp4.quant.mxfp8 import encode_e8m0

NUM_AMAX = 0x7F80  # non-negative finite BF16 values, by bit pattern


def _expected_exponent(bits: int) -> int:
    """Biased exponent of the power of two at or above RN32(amax / 448), from the amax's BF16 bits.

    amax = m * 2^p exactly; fp32(1/448) = 0x924925 * 2^-32. FP32 keeps 24 bits of the product, and
    none below 2^-149. 0 and all up to 2^-127 give 0.
    """
    field, fraction = bits >> 7, bits & 0x7F
    mantissa, power = (fraction, -133) if field == 0 else (fraction | 0x80, field - 134)
    product, power = mantissa * 0x924925, power - 32
    shift = max(product.bit_length() - 24, -149 - power, 0)
    rounded, rest = product >> shift, product & ((1 << shift) - 1)
    half = 1 << shift >> 1
    if rest > half or (rest and rest == half and rounded % 2):
        rounded += 1
    if rounded == 0:
        return 0
    ceiling = (rounded - 1).bit_length() + power + shift  # smallest e with rounded <= 2^e
    return max(ceiling + 127, 0)


def test_constant_of_the_integer_formula():
    # Prevents: the formula below proving another constant than the one in use.
    assert torch.tensor(1 / 448).item() == 0x924925 * 2.0**-32


def test_exponent_of_every_bf16_amax():
    # Prevents: an exponent one too small (the block's maximum clips) or too large (a bit is lost).
    bits = torch.arange(NUM_AMAX, dtype=torch.int32)
    amax = bits.to(torch.uint16).view(torch.bfloat16)
    x = torch.zeros(NUM_AMAX, 32, dtype=torch.bfloat16)
    x[:, 7] = -amax
    ours = quantize_mxfp8(x).block_scales.flatten().tolist()
    assert ours == [_expected_exponent(b) for b in range(NUM_AMAX)]


def test_e8m0_rounds_up():
    # Prevents: a power of two that is rounded up again, a subnormal that starts one too high.
    two = torch.tensor(2.0)
    x = torch.tensor([0.0, 2.0**-149, 2.0**-127, 2.0**-126, 1.0, 2.0, 3e38, float("inf")])
    assert encode_e8m0(x).tolist() == [0, 0, 0, 1, 127, 128, 254, 254]
    just_above = torch.nextafter(torch.stack((two**-127, two**-126, two, two / 2)), two * 2)
    assert encode_e8m0(just_above).tolist() == [1, 2, 129, 128]


def test_blocks_worked_by_hand():
    """Prevents: a scale of another direction, blocks of another size, ties away from even.

    Block 0: amax 448, 448 * fp32(1/448) = 1 -> e = 127, codes are E4M3 of the values: 17 (steps of
    2 there) is a tie between 16 and 18 and goes to 16, 19 to 20. Block 1: amax 1, 1/448 = 2^-8.8 ->
    e = 119, values times 2^8: 256, 0.3 * 256 = 76.8 -> 80 (steps of 8), decoded 80 / 256.
    """
    x = torch.zeros(1, 64)
    x[0, :4] = torch.tensor([448.0, 17.0, 19.0, -0.0])
    x[0, 32:35] = torch.tensor([1.0, 0.3, -0.3])
    qt = quantize_mxfp8(x)
    assert qt.block_scales.tolist() == [[127, 119]]
    assert qt.codes.float()[0, :4].tolist() == [448, 16, 20, 0]
    assert torch.signbit(qt.codes.float())[0, 3]
    assert qt.codes.float()[0, 32:35].tolist() == [256, 80, -80]
    decoded = decode_mxfp8(qt)
    assert decoded.dtype == torch.float32
    assert decoded[0, 32:35].tolist() == [1, 0.3125, -0.3125]


def test_decoded_values_are_within_half_an_e4m3_step():
    """Prevents: a clipped maximum, a code read with its neighbour's scale.

    The scale is at least amax / 448, up to FP32's rounding, so nothing exceeds 448 by more than
    that; an E4M3 value of 3 mantissa bits is off by at most 1/16 of its power of two, 2^-10 below
    2^-6.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=generator) * 2.0 ** torch.randint(
        -30, 30, (64, 1), generator=generator
    )
    qt = quantize_mxfp8(x)
    unit = torch.ldexp(torch.ones(64, 4).double(), qt.block_scales.int() - 127)
    unit = unit.repeat_interleave(32, dim=1)
    step = torch.ldexp(torch.ones_like(unit), torch.frexp(x.double() / unit).exponent - 1) / 16
    error = (decode_mxfp8(qt).double() - x.double()).abs()
    assert (error <= unit * torch.clamp_min(step, 2.0**-10) * (1 + 2.0**-20)).all()
    assert (error > 0).any()


def test_rows_are_independent_and_columns_are_the_transpose():
    # Prevents: scales along the wrong axis.
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[4] *= 1000
    qt = quantize_mxfp8(x)
    assert torch.equal(quantize_mxfp8(x[3:4]).codes.float()[0], qt.codes.float()[3])
    columns = quantize_mxfp8(x.t())
    assert columns.shape == (64, 32)
    assert columns.block_scales.shape == (64, 1)
    assert torch.equal(columns.codes.float(), quantize_mxfp8(x.t().contiguous()).codes.float())


def test_special_values():
    """Prevents: 0 * Inf in a block of zeros, an Inf that wraps, a NaN that vanishes.

    Zeros: e = 0 and zero codes. Inf: e = 254 and code 448 (0x7E); it decodes to Inf again, beyond
    FP32. NaN: its code is NaN (0x7F), and the scale comes from the rest. Subnormals: 2^-133 / 448
    rounds to a value below 2^-127, e = 0, and 2^-133 * 2^127 = 2^-6 is an E4M3 value.
    """
    x = torch.zeros(4, 32)
    x[1, 0], x[1, 1] = float("inf"), 1.0
    x[2, 0], x[2, 1] = float("nan"), 1.0
    x[3, 0] = 2.0**-133
    qt = quantize_mxfp8(x)
    assert qt.block_scales.flatten().tolist() == [0, 254, 119, 0]
    codes = qt.codes.view(torch.uint8)
    assert (codes[0] == 0).all()
    assert codes[1, :2].tolist() == [0x7E, 0]
    assert codes[2, :2].tolist() == [0x7F, 0x78]
    decoded = decode_mxfp8(qt)
    assert decoded[1, 0] == float("inf")
    assert decoded[2, 0].isnan()
    assert decoded[2, 1] == 1
    assert decoded[3, 0] == 2.0**-133


def test_decode_of_every_code():
    # Prevents: a table of E4M3 with a wrong entry, a sign lost, one rounding too many.
    codes = torch.arange(256, dtype=torch.uint8)
    finite = (codes & 0x7F) != 0x7F
    codes = torch.cat((codes[finite], codes[:2]))[None]  # 254 codes, completed to whole blocks
    for exponent in (0, 100, 127, 200):
        scales = torch.full((1, codes.shape[1] // 32), exponent, dtype=torch.uint8)
        decoded = decode_mxfp8(MXFP8Tensor(codes.view(torch.float8_e4m3fn), scales))
        for code, value in zip(codes[0].tolist(), decoded[0].tolist(), strict=True):
            field, fraction = code >> 3 & 0xF, code & 7
            magnitude = fraction * 2.0**-9 if field == 0 else (8 + fraction) * 2.0 ** (field - 10)
            assert value == (-1) ** (code >> 7) * magnitude * 2.0 ** (exponent - 127)


def test_no_rows_and_no_columns():
    # Prevents: a crash of the weight gradient of an expert without tokens, whose K is 0.
    assert decode_mxfp8(quantize_mxfp8(torch.empty(0, 64))).shape == (0, 64)
    empty = quantize_mxfp8(torch.empty(64, 0))
    assert empty.codes.shape == empty.block_scales.shape == (64, 0)


@pytest.mark.parametrize("shape", [(4, 16), (4, 48), (32,), (2, 2, 32)])
def test_bad_shapes_are_named(shape):
    # Prevents: a block that is half of the next row.
    with pytest.raises(ValueError, match=r"quantize_mxfp8: shape .* multiple of 32.*BF16"):
        quantize_mxfp8(torch.zeros(shape))
