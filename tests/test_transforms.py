"""The random Hadamard transform, random bits, stochastic rounding, groups of columns and simulated floats."""

import pytest
import torch

from megatron_nvfp4 import quant
from megatron_nvfp4.quant import nvfp4, simulated, transforms
from megatron_nvfp4.recipes import FloatSpec, NVFP4Spec

STOCHASTIC = NVFP4Spec(rounding="stochastic")
FLOATS = [FloatSpec(exponent=e, mantissa=m) for e in (2, 3, 4, 5) for m in (1, 2, 3, 4)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- random bits ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    # Prevents: another number of rounds, a signed product. Random123 1.09, tests/kat_vectors.
    found = transforms.philox(tuple(torch.tensor([c]) for c in counter), tuple(key))
    assert [int(word) for word in found] == words


def test_bits_of_an_element_depend_on_its_index_alone():
    # Prevents: bits that change with the shape, or with how many are drawn.
    bits = quant.random_bits(6, 64, seed=9, offset=2)
    assert torch.equal(bits.flatten(), quant.random_bits(3, 128, seed=9, offset=2).flatten())
    assert torch.equal(bits[:2], quant.random_bits(2, 64, seed=9, offset=2))
    assert 0 <= int(bits.min()) < int(bits.max()) < 2**16


def test_key_and_counter_words():
    # Prevents: a half of the seed or of the offset that is ignored, or the two exchanged.
    key, counter = (0x89ABCDEF, 0x01234567), (1, 0, 0xFFFFFFFD, 0xFFFFFFFF)
    words = transforms.philox(tuple(torch.tensor([c]) for c in counter), key)
    words = [int(word) for word in words]
    bits = quant.random_bits(1, 16, seed=0x0123456789ABCDEF, offset=-3)[0, 8:].tolist()
    assert bits == [word >> shift & 0xFFFF for word in words for shift in (0, 16)]
    draws = [
        quant.random_bits(4, 64, seed=seed, offset=offset)
        for seed, offset in ((1, 0), (0, 1), (1 << 32, 0), (0, 1 << 32), (0, 0))
    ]
    for index, one in enumerate(draws):
        # Two draws of 256 agree in 256 / 65536 places on average.
        assert all(int((one == other).sum()) < 4 for other in draws[:index])


def test_bits_are_uniform_and_independent():
    """Prevents: a bit that is stuck, or neighbours that share one.

    Each of the 16 bits of n elements has mean 1/2 with deviation 1 / (2 sqrt(n)); so has the
    agreement of two different bits, or of the same bit of neighbours, rows or offsets apart.
    """
    bits = quant.random_bits(512, 1024, seed=3)
    planes = torch.stack([bits >> k & 1 for k in range(16)]).bool()
    bound = 6 / (2 * bits.numel() ** 0.5)
    assert ((planes.double().mean((1, 2)) - 0.5).abs() < bound).all()
    other = quant.random_bits(512, 1024, seed=3, offset=1)
    others = torch.stack([other >> k & 1 for k in range(16)]).bool()
    pairs = [(planes[..., 1:], planes[..., :-1]), (planes[:, 1:], planes[:, :-1])]
    pairs += [(planes[1:], planes[:-1]), (planes, others), (planes[..., 8:], planes[..., :-8])]
    for a, b in pairs:
        agreement = (a == b).double().mean((1, 2))
        assert ((agreement - 0.5).abs() < 6 / (2 * a[0].numel() ** 0.5)).all()


# --- stochastic rounding ----------------------------------------------------------------------


def test_mean_of_all_bits_is_the_value():
    """Prevents: a bias, above all towards zero; a step taken from the wrong binade.

    Over all 2^16 bits the mean is off by at most 2^-17 of the step, and FP32's rounding of t moves
    at most one of the 2^16 thresholds: 2^-16 of it.
    """
    values = torch.tensor(nvfp4.E2M1_VALUES)
    generator = torch.Generator().manual_seed(1)
    x = torch.cat(
        [torch.rand(40, generator=generator) * 6, values[1:] - 2.0**-12, values[:-1] + 1e-3]
    )
    x = torch.cat([x, -x])
    bits = torch.arange(2**16, dtype=torch.int32)
    codes = nvfp4.encode_e2m1_stochastic(x[:, None].expand(-1, len(bits)), bits.expand(len(x), -1))
    decoded = values[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)
    below = torch.searchsorted(values, x.abs(), right=True) - 1
    step = values[below + 1] - values[below]
    error = (decoded.double().mean(1) - x.double()).abs()
    assert (error <= step.double() * (2.0**-17 + 2.0**-16)).all()
    # Either neighbour, and nothing else.
    magnitude = decoded.abs()
    assert ((magnitude == values[below][:, None]) | (magnitude == values[below + 1][:, None])).all()
    assert (magnitude.amax(1) > magnitude.amin(1)).all()


def test_values_of_the_grid_stay():
    # Prevents: an exact value moved by noise, a sign of zero lost, NaN or Inf turned into noise.
    values = torch.tensor([*nvfp4.E2M1_VALUES, 6.5, 1e30, float("inf")])
    x = torch.cat([values, -values, torch.tensor([float("nan"), -float("nan")])])
    for bits in (0, 1, 2**15, 2**16 - 1):
        codes = nvfp4.encode_e2m1_stochastic(x, torch.full(x.shape, bits, dtype=torch.int32))
        assert torch.equal(codes, nvfp4.encode_e2m1(x))


@pytest.mark.parametrize(
    "spec", [STOCHASTIC, NVFP4Spec(outer="token", rounding="stochastic")], ids=str
)
def test_quantised_tensor_is_unbiased(spec):
    """Prevents: a scale chosen from the rounded values, seeds that round alike.

    Of S seeds the mean lies within 6 deviations, step / (2 sqrt(S)), of the value wherever the
    scaled value does not exceed 6 (scales are rounded to nearest: some do).
    """
    x, num_seeds = normal(64, 64, seed=2), 128
    total = torch.zeros(x.shape, dtype=torch.float64)
    for seed in range(num_seeds):
        qt = quant.quantize(x, spec, seed=seed)
        total += quant.dequantize(qt, torch.float32).double()
    unit = qt.block_scales.double().repeat_interleave(16, 1) * qt.row_scale().double()[:, None]
    inside = x.abs() < 6 * unit
    step = torch.where(x.abs() < 2 * unit, 0.5, torch.where(x.abs() < 4 * unit, 1.0, 2.0)) * unit
    error = (total / num_seeds - x).abs()
    assert inside.double().mean() > 0.9
    assert (error <= 6 * step / (2 * num_seeds**0.5))[inside].all()
    # Nearest rounding is far outside that bound: the test can fail.
    nearest = quant.dequantize(quant.quantize(x, NVFP4Spec(outer=spec.outer)), torch.float32)
    assert not ((nearest - x).abs() <= 6 * step / (2 * num_seeds**0.5))[inside].all()


def test_only_codes_are_random_and_the_same_seed_gives_the_same():
    # Prevents: random scales, hidden state, the missing seed replaced by a constant.
    x = normal(32, 64, seed=3).bfloat16()
    first, second = (quant.quantize(x, STOCHASTIC, seed=5, offset=1) for _ in range(2))
    nearest = quant.quantize(x, NVFP4Spec())
    assert torch.equal(first.codes, second.codes)
    assert not torch.equal(first.codes, nearest.codes)
    assert torch.equal(first.block_scales.float(), nearest.block_scales.float())
    assert torch.equal(first.amax, nearest.amax)
    assert not torch.equal(first.codes, quant.quantize(x, STOCHASTIC, seed=5).codes)
    with pytest.raises(ValueError, match="without a seed; give seed=, an integer"):
        quant.quantize_grouped(x, torch.tensor([0, 32]), STOCHASTIC)


# --- rotation ---------------------------------------------------------------------------------


def test_matrix_of_the_rotation():
    """Prevents: another order of signs or rows than Transformer Engine's (numbers are +-1/4, exact)."""
    rows = torch.arange(16)
    bits = rows[:, None] & rows[None]
    parity = torch.stack([bits >> k & 1 for k in range(4)]).sum(0) % 2
    signs = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]).double()
    matrix = signs[:, None] * (1 - 2 * parity.double()) / 4
    assert torch.equal(quant.rht(torch.eye(16)).double(), matrix)
    assert torch.equal(matrix @ matrix.t(), torch.eye(16).double())
    x = normal(8, 48, seed=4).bfloat16()
    exact = (x.double().reshape(-1, 16) @ matrix).reshape(8, 48)
    # 4 additions in FP32 of sums below 16 * max, then one rounding to BF16.
    bound = 2.0**-8 * exact.abs() + 4 * 2.0**-24 * 4 * x.double().abs().max()
    assert ((quant.rht(x).double() - exact).abs() <= bound).all()


def test_rotation_of_columns_and_odd_shapes():
    # Prevents: blocks that straddle rows of a transposed matrix, a silent tail.
    x = normal(48, 5, seed=5)
    assert torch.equal(quant.rht(x.t()), quant.rht(x.t().contiguous()))
    assert quant.rht(torch.zeros(0, 32)).shape == (0, 32)
    with pytest.raises(ValueError, match=r"rht: shape \(5, 24\).*multiple of 16"):
        quant.rht(torch.zeros(5, 24))


def test_product_of_rotated_operands():
    """Prevents: a weight gradient rotated on one side only, or by a matrix that is not orthogonal.

    Each rotated element is off by 2^-8 of itself, hence a product of rows by at most about twice
    2^-8 of the product of their norms.
    """
    a, b = normal(12, 64, seed=6), normal(20, 64, seed=10)
    exact = a.double() @ b.double().t()
    rotated = quant.rht(a).double() @ quant.rht(b).double().t()
    bound = 2.1 * 2.0**-8 * a.norm(dim=1)[:, None].double() * b.norm(dim=1).double()
    assert ((rotated - exact).abs() <= bound).all()
    one_sided = quant.rht(a).double() @ b.double().t()
    assert not ((one_sided - exact).abs() <= bound).all()


# --- groups of columns ------------------------------------------------------------------------


def test_column_groups_are_quantised_as_if_alone():
    # Prevents: an expert's gradient scaled by another expert's largest token.
    x = normal(10, 96, seed=7)
    x[:, 16:48] *= 1000
    offsets = torch.tensor([0, 16, 16, 48, 96])
    qt = quant.quantize(x, NVFP4Spec(), column_offsets=offsets)
    assert qt.amax.shape == (4,)
    assert qt.amax[1] == 0
    decoded = quant.dequantize(qt, torch.float32)
    for group, (a, b) in enumerate(((0, 16), (16, 16), (16, 48), (48, 96))):
        alone = quant.quantize(x[:, a:b], NVFP4Spec())
        assert torch.equal(qt.codes[:, a // 2 : b // 2], alone.codes)
        assert torch.equal(
            qt.block_scales[:, a // 16 : b // 16].float(), alone.block_scales.float()
        )
        assert torch.equal(qt.row_scale(group), alone.row_scale())
        assert torch.equal(decoded[:, a:b], quant.dequantize(alone, torch.float32))
    with pytest.raises(ValueError, match="column_offsets with outer='token'; use outer='tensor'"):
        quant.quantize(x, NVFP4Spec(outer="token"), column_offsets=offsets)


# --- simulated floats -------------------------------------------------------------------------


def values_of(spec: FloatSpec) -> torch.Tensor:
    """All magnitudes of the format, ascending, by its definition."""
    bias, steps = 2 ** (spec.exponent - 1) - 1, 2**spec.mantissa
    found = {m / steps * 2.0 ** (1 - bias) for m in range(steps)}
    for field in range(1, 2**spec.exponent):
        found |= {(1 + m / steps) * 2.0 ** (field - bias) for m in range(steps)}
    return torch.tensor(sorted(found))


@pytest.mark.parametrize("spec", FLOATS, ids=str)
def test_grid_of_a_simulated_float(spec):
    # Prevents: a binade too few, subnormals flushed, ties away from even, overflow instead of MAX.
    values = values_of(spec)
    assert simulated.largest(spec) == values[-1]
    middles = (values[1:] + values[:-1]) / 2
    even = torch.where(torch.arange(len(middles)) % 2 == 0, values[:-1], values[1:])
    for sign in (1, -1):
        for x, rounded in (
            (values, values),
            (middles, even),
            (torch.nextafter(middles, values[1:]), values[1:]),
            (torch.nextafter(middles, values[:-1]), values[:-1]),
            (values[-1:] * 1e6, values[-1:]),
        ):
            found = simulated.round_to_float(sign * x, spec)
            assert torch.equal(found, sign * rounded)
            assert torch.equal(torch.signbit(found), torch.signbit(sign * x))
    special = torch.tensor([float("nan"), float("-inf")])
    assert simulated.round_to_float(special, spec).tolist() == [values[-1], -values[-1]]


def test_e2m1_is_nvfp4_per_token():
    # Prevents: a sweep whose E2M1 end is not the format that trains.
    x = normal(40, 160, seed=8) * torch.exp2(torch.arange(-20.0, 20.0))[:, None]
    x[3], x[4] = 0.0, -0.0
    x[5, 7], x[6, 7] = float("nan"), float("inf")
    x[7] *= 1e-36
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        st = quant.quantize_simulated(x.to(dtype), FLOATS[0])
        qt = quant.quantize(x.to(dtype), NVFP4Spec(outer="token"))
        exact, scale = quant.decode_exact(qt)
        ours = quant.decode_simulated(st)
        assert torch.equal(ours.view(torch.int32), exact.float().view(torch.int32))
        assert torch.equal(st.outer_scale, scale)
        assert torch.equal(st.amax, qt.amax)


@pytest.mark.parametrize("spec", FLOATS, ids=str)
def test_decoded_products_are_exact(spec):
    # Prevents: a reference GEMM on rounded operands; BF16 claimed for more mantissa than it has.
    values = values_of(spec)
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    products = values.double()[:, None] * scales
    assert torch.equal(products.float().double(), products)
    assert torch.equal(products.bfloat16().double(), products) == (spec.mantissa <= 3)


@pytest.mark.parametrize("spec", FLOATS, ids=str)
def test_error_of_a_simulated_float_shrinks_with_its_bits(spec):
    """Prevents: a scale that wastes the format's range.

    Within a block, values within 2^-1 of its maximum are normal in every format here and off by at
    most 2^-(M+1) of their binade, plus 2^-4 of saturation where the E4M3 scale is rounded down.
    """
    x = normal(32, 64, seed=9)
    st = quant.quantize_simulated(x, spec)
    decoded = quant.decode_simulated(st) * st.outer_scale[:, None]
    block_max = x.abs().reshape(32, 4, 16).amax(2).repeat_interleave(16, 1)
    large = x.abs() > block_max / 2
    relative = ((decoded - x).abs() / x.abs())[large]
    assert (relative <= 2.0 ** -(spec.mantissa + 1) + 2.0**-4).all()
    with pytest.raises(ValueError, match="K=24 is not a multiple of 16"):
        quant.quantize_simulated(torch.zeros(2, 24), spec)
    with pytest.raises(ValueError, match=r"give float32 \(2,\)"):
        quant.quantize_simulated(torch.zeros(2, 32), spec, torch.ones(1))
