"""The CUDA kernels that turn, rotate or round at random, MXFP8 and simulated floats, byte for byte."""

import itertools

import pytest
import torch

from megatron_nvfp4 import backends, quant
from megatron_nvfp4.backends import cuda, ops
from megatron_nvfp4.backends.extension import why_not_cpu, why_not_cuda
from megatron_nvfp4.modules import GroupedLinear, Linear, QLinearParams
from megatron_nvfp4.modules.base import QLinearBase
from megatron_nvfp4.recipes import MXFP8, RECIPES, FloatSpec, NVFP4Spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not_cuda() is not None, reason=f"cuda: {why_not_cuda()}"),
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NEAREST, STOCHASTIC = NVFP4Spec(), NVFP4Spec(rounding="stochastic")
ROWS = [
    NVFP4Spec(outer=outer, e4m3_max=e4m3_max, rounding="stochastic")
    for outer, e4m3_max in itertools.product(("tensor", "token"), (448, 256))
]
FLOATS = [FloatSpec(exponent=e, mantissa=m) for e in (2, 3, 4, 5) for m in (1, 2, 3, 4)]
RANDOM = {"seed": 0x0123456789ABCDEF, "offset": 4}
# Transposed matrices (M, K) and whether they are rotated.
COLUMNS = list(itertools.product((NEAREST, STOCHASTIC, NVFP4Spec(e4m3_max=256)), (False, True)))


def special_rows(num_rows: int, num_cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Magnitudes from 2^-30 to 2^19 by blocks, with rows of zeros, subnormals, NaN, Inf and extremes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, num_cols, generator=generator)
    powers = torch.randint(-30, 20, (num_rows, -(-num_cols // 16)), generator=generator)
    x *= torch.exp2(powers.float()).repeat_interleave(16, 1)[:, :num_cols]
    if num_cols:
        x[3::41], x[5::41], x[7::41] = 0.0, -0.0, 1e-40
        x[11::173, num_cols // 2], x[13::173, num_cols // 2] = float("nan"), float("inf")
        x[17::173], x[19::173] = 3e38, -1e-38
    return x.to(dtype)


def poison(num_bytes: int) -> None:
    """Leaves freed blocks of NaN bytes where the next outputs are likely to lie."""
    blocks = [torch.full((num_bytes,), 0x7F, dtype=torch.uint8, device="cuda") for _ in range(4)]
    del blocks


def expected(x, spec, **options):
    name = "reference" if why_not_cpu() else "cpu"
    return backends.get(name).quantize(x, spec, **options)


def assert_same(x: torch.Tensor, spec, what: str = "", **options) -> None:
    """CUDA's bytes of x, given on the CPU, are the CPU's."""
    poison(x.numel() * 4 + 4096)
    moved = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    got = cuda.BACKEND.quantize(x.cuda(), spec, **moved)
    want = expected(x, spec, **options)
    for name in ("codes", "values", "block_scales", "amax"):
        if not hasattr(want, name):
            continue
        a, b = (getattr(q, name).cpu().contiguous().view(torch.uint8) for q in (got, want))
        assert a.shape == b.shape, f"{what} {spec}: {name} {tuple(a.shape)} != {tuple(b.shape)}"
        wrong = (a != b).nonzero()
        assert not len(wrong), f"{what} {spec}: {len(wrong)} bytes of {name}, {wrong[0].tolist()}"


def ragged(num_blocks: int, num_groups: int, seed: int = 1) -> torch.Tensor:
    """Boundaries of groups, many of them empty, at multiples of 16."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, num_blocks + 1, (num_groups - 1,), generator=generator)
    ends = torch.tensor([0, num_blocks])
    return torch.cat([ends, cuts]).sort().values * 16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", ROWS, ids=str)
def test_stochastic_rows(spec, dtype):
    """Prevents bits that depend on the launch, a 32-bit counter, or a group's amax from the next."""
    for shape in ((0, 64), (1, 16), (37, 80), (129, 2064), (3, 40000)):
        assert_same(special_rows(*shape, dtype), spec, f"{shape}", **RANDOM)
    x = special_rows(320, 96, dtype)
    for seed, offset in ((0, 0), (-1, -1), (2**63 - 1, 2**40)):
        assert_same(x, spec, seed=seed, offset=offset)
    amax = torch.rand(320 if spec.outer == "token" else 1) * 10
    assert_same(x, spec, amax=amax, **RANDOM)
    for offsets in (torch.tensor([0, 0, 5, 64, 64, 319, 320]), ragged(20, 200)):
        assert_same(x, spec, offsets=offsets, **RANDOM)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("spec", "rotated"), COLUMNS, ids=str)
def test_columns(spec, rotated, dtype):
    """Prevents a tile's edge, an odd number of columns or an empty matrix from going wrong."""
    options = {"rotated": rotated, **RANDOM}
    for shape in ((0, 64), (16, 1), (16, 64), (48, 65), (80, 130), (1040, 200), (4096, 7)):
        x = special_rows(*shape, dtype)
        assert_same(x.t(), spec, f"{shape}", **options)
        assert_same(x.t(), spec, f"{shape}", amax=torch.tensor([3.0]), **options)
        # Not a transposed view: turned in memory first.
        assert_same(x.t().contiguous(), spec, f"{shape} contiguous", **options)


@pytest.mark.parametrize(("spec", "rotated"), COLUMNS, ids=str)
def test_column_groups(spec, rotated):
    """Prevents runs of rows that cross an expert's end from losing a maximum."""
    x = special_rows(2048, 144, torch.bfloat16)
    x[11::173, 72], x[13::173, 72] = 1.0, 1.0  # an Inf would hide its whole group
    for offsets in (torch.tensor([0, 0, 16, 144, 144, 2048]), ragged(128, 300), ragged(128, 8)):
        for dtype in (torch.int32, torch.int64):
            options = {"column_offsets": offsets.to(dtype), "rotated": rotated, **RANDOM}
            assert_same(x.t(), spec, "groups", **options)
        amax = torch.rand(offsets.numel() - 1) * 5
        assert_same(x.t(), spec, "given amax", amax=amax, **options)


@pytest.mark.parametrize("position", range(0, 16, 5))
def test_every_bf16_pattern_in_columns(position):
    """Prevents one bit pattern (a NaN payload, a subnormal) from being rotated or encoded otherwise."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.randn(48, 65536, generator=torch.Generator().manual_seed(position)).bfloat16()
    x[16 + position] = patterns
    for spec, rotated in COLUMNS:
        options = {"rotated": rotated, "amax": torch.tensor([4.0]), **RANDOM}
        assert_same(x.t(), spec, "patterns", **options)
    x = torch.nn.functional.pad(x, (0, 0, 0, 16))
    assert_same(x.t(), MXFP8, "patterns")
    assert_same(x.t().contiguous(), MXFP8, "patterns")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mxfp8(dtype):
    """Prevents a block shared by two warps, an edge of a tile or a special value from going wrong."""
    for shape in ((0, 64), (1, 32), (37, 96), (129, 2080), (64, 40000)):
        assert_same(special_rows(*shape, dtype), MXFP8, f"{shape}")
    for shape in ((0, 5), (32, 1), (32, 64), (96, 65), (160, 130), (2080, 200)):
        assert_same(special_rows(*shape, dtype).t(), MXFP8, f"{shape} transposed")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mxfp8_decode_every_byte(dtype):
    """Prevents a code or an exponent that decodes otherwise, subnormal results above all."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(torch.float8_e4m3fn)
    scales = torch.arange(256, dtype=torch.uint8).clamp_max(254)[:, None].repeat(1, 8)
    want = quant.decode_mxfp8(quant.MXFP8Tensor(codes, scales), dtype)
    got = ops.decode_mxfp8(quant.MXFP8Tensor(codes.cuda(), scales.cuda()), dtype).cpu()
    both_nan = torch.isnan(want) & torch.isnan(got)
    integers = torch.int16 if dtype.itemsize == 2 else torch.int32
    assert ((want.view(integers) == got.view(integers)) | both_nan).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", FLOATS, ids=str)
def test_simulated_floats(spec, dtype):
    """Prevents a grid of another format, or a tie away from even."""
    for shape in ((0, 64), (1, 16), (37, 80), (129, 2064)):
        assert_same(special_rows(*shape, dtype), spec, f"{shape}")
    x = special_rows(64, 96, dtype)
    assert_same(x, spec, "given amax", amax=torch.rand(64) * 10)


def test_many_random_elements():
    """Prevents a mismatch rarer than small tests meet: 2^27 elements, rotated and rounded at random."""
    generator = torch.Generator("cuda").manual_seed(5)
    for draw in range(4):
        x = torch.randn(16384, 2048, device="cuda", generator=generator)
        x *= torch.exp2(torch.randint(-12, 12, (16384, 1), device="cuda", generator=generator))
        x = x.bfloat16()
        offsets = ragged(1024, 32, seed=draw)
        options = {"rotated": draw % 2 == 0, "column_offsets": offsets, "seed": draw}
        assert_same(x.cpu().t(), STOCHASTIC, "columns", **options)
        assert_same(x.cpu(), STOCHASTIC, "rows", seed=draw)
        assert_same(x.cpu().t(), MXFP8, "mxfp8")


def test_same_seed_whatever_the_shape_below():
    """Prevents bits that depend on how many rows follow, or on a second launch."""
    x = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16)
    amax = x.abs().amax().float()[None]
    whole = ops.quantize_nvfp4(x, STOCHASTIC, amax, **RANDOM)
    again = ops.quantize_nvfp4(x, STOCHASTIC, amax, **RANDOM)
    part = ops.quantize_nvfp4(x[:100], STOCHASTIC, amax, **RANDOM)
    other = ops.quantize_nvfp4(x, STOCHASTIC, amax, seed=RANDOM["seed"], offset=5)
    assert torch.equal(whole.codes, again.codes)
    assert torch.equal(whole.codes[:100], part.codes)
    assert not torch.equal(whole.codes, other.codes)


def test_unaligned_and_strided_inputs():
    """Prevents vector loads from an address that is not a multiple of 16, or of x as x.t()."""
    flat = torch.randn(64 * 96 + 1).bfloat16()
    for x in (
        flat[1:].view(64, 96),
        torch.randn(128, 96).bfloat16()[::2],
        flat[1:].view(96, 64).t(),
    ):
        device = (
            x.cuda()
            if x.is_contiguous()
            else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda").copy_(x)
        )
        for spec, options in (
            (STOCHASTIC, RANDOM),
            (NEAREST, {"rotated": True}),
            (MXFP8, {}),
            (FLOATS[5], {}),
        ):
            got = cuda.BACKEND.quantize(device, spec, **options)
            want = expected(x, spec, **options)
            a, b = (q.block_scales.view(torch.uint8) for q in (got, want))
            assert torch.equal(a.cpu(), b)
    offset = torch.empty(64 * 96 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(64, 96)
    offset.copy_(flat[1:].view(64, 96))
    got = cuda.BACKEND.quantize(offset.t(), STOCHASTIC, rotated=True, **RANDOM)
    want = expected(flat[1:].view(64, 96).t(), STOCHASTIC, rotated=True, **RANDOM)
    assert torch.equal(got.codes.cpu(), want.codes)


def test_graph_capture_of_column_groups_waits_for_nothing():
    """Prevents a host synchronisation, which capture forbids, and offsets frozen at capture."""
    x = special_rows(160, 272, torch.bfloat16, seed=3).cuda()
    x[:] = torch.nan_to_num(x, nan=1.0, posinf=1.0, neginf=1.0)
    offsets = torch.tensor([0, 16, 48, 160], device="cuda")
    options = {"rotated": True, **RANDOM}
    ops.quantize_nvfp4(x.t(), STOCHASTIC, column_offsets=offsets, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.quantize_nvfp4(x.t(), STOCHASTIC, column_offsets=offsets, **options)
    offsets.copy_(torch.tensor([0, 96, 96, 160]))
    x.neg_()
    graph.replay()
    torch.cuda.synchronize()
    want = expected(x.cpu().t(), STOCHASTIC, column_offsets=offsets.cpu(), **options)
    assert torch.equal(out.codes.cpu(), want.codes)
    assert torch.equal(out.amax.cpu(), want.amax)


def test_what_has_no_kernel_is_refused():
    """Prevents a silent fallback, and an input read out of bounds."""
    why_not = cuda.BACKEND.why_not
    assert "no kernel rounds" in why_not(
        "quantize", [NVFP4Spec(block=(16, 16), rounding="stochastic")], device="cuda"
    )
    assert "no kernel rotates" in why_not("quantize_rotated", [MXFP8], device="cuda")
    assert why_not("quantize_rotated", [STOCHASTIC], shape=(8, 64), device="cuda") is None
    x = torch.zeros(24, 64, device="cuda")
    for call, message in (
        (lambda: ops.quantize_nvfp4(x.t(), NEAREST, rotated=True), "M=24 is not a multiple of 16"),
        (lambda: ops.quantize_mxfp8(x.t()), "M=24 is not a multiple of 32"),
        (lambda: ops.quantize_nvfp4(x, STOCHASTIC), "give seed="),
        (lambda: ops.quantize_nvfp4(x, STOCHASTIC, torch.ones(1), seed=1), "on cuda"),
        (lambda: ops.quantize_simulated(x.double(), FLOATS[0]), "give BF16, FP16 or FP32"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("name", ["nvfp4_pretrain", "mxfp8", "sweep_e3m2"])
def test_training_step_is_the_cpus(name, monkeypatch):
    """Prevents a recipe whose gradients depend on the device: random bits, rotations, groups.

    The devices add in other orders, so a few outputs round to a neighbour; another operand would be off by
    the error of its format, a hundredth of the norm at the least.
    """
    # The devices' generators differ; on one seed the bits must not.
    monkeypatch.setattr(QLinearBase, "rounding_seed", lambda self, device: 7)
    params = QLinearParams(recipe=RECIPES[name])
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        fields = {"params_dtype": torch.bfloat16, "device": device, "qlinear_params": params}
        layers = [
            Linear(64, 96, bias=False, **fields),
            GroupedLinear(3, 64, 96, bias=False, **fields),
        ]
        found = []
        for layer, args in zip(layers, ((), ([10, 0, 40],)), strict=True):
            for parameter in layer.parameters():
                values = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(values)
            x = torch.randn(50, 64, generator=generator).bfloat16().to(device).requires_grad_()
            dy = torch.randn(50, 96, generator=generator).bfloat16().to(device)
            y = layer(x, *args)
            y.backward(dy)
            found += [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
        results.append([t.cpu() for t in found])
    for on_cpu, on_gpu in zip(*results, strict=True):
        difference = (on_cpu.double() - on_gpu.double()).norm()
        assert difference <= 2.0**-10 * on_cpu.double().norm()


def test_seed_follows_the_gpus_generator():
    """Prevents a resumed or recomputed step that rounds by other bits, and steps that share them."""
    params = QLinearParams(recipe=RECIPES["nvfp4_pretrain"])
    layer, device = Linear(64, 96, qlinear_params=params, device="cuda"), torch.device("cuda", 0)
    torch.manual_seed(3)
    first = layer.rounding_seed(device)
    state = torch.cuda.get_rng_state()
    torch.rand(5)  # what a data loader does to the CPU's generator
    second = layer.rounding_seed(device)
    torch.cuda.set_rng_state(state)
    assert layer.rounding_seed(device) == second != first
    torch.manual_seed(3)
    assert layer.rounding_seed(device) == first
