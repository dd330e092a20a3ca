"""The CUDA quantisers against the reference and the CPU kernels, byte for byte, on poisoned outputs."""

import itertools

import pytest
import torch

from megatron_nvfp4 import backends, quant
from megatron_nvfp4.backends import cpu, cuda, ops
from megatron_nvfp4.backends.extension import why_not_cpu, why_not_cuda
from megatron_nvfp4.quant.layout import expand_groups
from megatron_nvfp4.recipes import NVFP4Spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not_cuda() is not None, reason=f"cuda: {why_not_cuda()}"),
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = (((1, 16), "tensor"), ((1, 16), "token"), ((16, 16), "tensor"))
SEARCHES = ((None, "strict"), *itertools.product(("mae", "mse"), ("strict", "fast")))
SPECS = [
    NVFP4Spec(block=block, outer=outer, e4m3_max=e4m3_max, four_over_six=metric, error=error)
    for (block, outer), e4m3_max, (metric, error) in itertools.product(
        LAYOUTS, (448, 256), SEARCHES
    )
]
TILES = [spec for spec in SPECS if spec.block == (16, 16)]
ROWS = [spec for spec in SPECS if spec.block == (1, 16)]
TOKEN = NVFP4Spec(outer="token")
TENSOR = NVFP4Spec(outer="tensor")
POISON = 0x7F


def special_rows(num_rows: int, num_cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Ordinary values with, every 16 rows, one row of each kind that has broken a quantiser."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, num_cols, generator=generator)
    middle = num_cols // 2
    changes = {
        0: lambda row: row.zero_(),
        1: lambda row: row.fill_(-0.0),
        2: lambda row: row.mul_(1e-38),
        3: lambda row: row.mul_(1e36),
        4: lambda row: row[middle].fill_(float("inf")),
        5: lambda row: row[middle].fill_(float("nan")),
        6: lambda row: row.zero_()[3].fill_(1e-40),
        7: lambda row: row.mul_(3e-28),
        8: lambda row: row[middle:].zero_(),
        9: lambda row: row.abs_().neg_(),
        10: lambda row: row[0].fill_(3.3e38),
        11: lambda row: row[:16].fill_(1e-9),
        12: lambda row: row.fill_(float("nan")),
        13: lambda row: row.mul_(1e-6)[-1].fill_(1.0),
    }
    for row in range(num_rows):
        if row % 16 in changes:
            changes[row % 16](x[row])
    return x.to(dtype)


def wide_range(num_rows: int, num_cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Blocks from 2^-30 to 2^19 in one row: scales that underflow, and ties by few mantissa bits."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, num_cols // 16, 16, generator=generator)
    powers = torch.randint(-30, 20, (num_rows, num_cols // 16, 1), generator=generator)
    return (x * torch.exp2(powers.float())).reshape(num_rows, num_cols).to(dtype)


def poisoned(buffers: cuda.Buffers) -> cuda.Buffers:
    for tensor in vars(buffers).values():
        if tensor is not None:
            tensor.view(torch.uint8).fill_(POISON)
    return buffers


def run(x, spec, *, offsets=None, amax=None, swizzled=False, transposed=False, decoded=False):
    """The CUDA kernels' result for x on the CPU, as CPU buffers; outputs are poisoned before."""
    groups = 1 if offsets is None else offsets.numel() - 1
    out = cuda.Buffers.empty(
        tuple(x.shape),
        spec,
        num_groups=groups,
        swizzled=swizzled,
        transposed=transposed,
        decoded=decoded,
    )
    poisoned(out)
    if amax is not None:
        out.amax.copy_(amax)
    cuda.quantize_nvfp4_out(
        x.cuda(),
        spec,
        out,
        offsets=None if offsets is None else offsets.cuda(),
        given_amax=amax is not None,
        swizzled=swizzled,
    )
    return cuda.Buffers(*(None if t is None else t.cpu() for t in vars(out).values()))


def assert_bytes(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    got, expected = (t.contiguous().view(torch.uint8) for t in (got, expected))
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)} != {tuple(expected.shape)}"
    wrong = (got != expected).nonzero()
    assert not len(wrong), f"{what}: {len(wrong)} bytes differ, first at {wrong[0].tolist()}"


def assert_same(got: cuda.Buffers, expected: quant.QuantizedTensor, swizzled=False) -> None:
    scales = expected.block_scales
    assert_bytes(got.amax, expected.amax, "amax")
    assert_bytes(got.block_scales, quant.swizzle_scales(scales) if swizzled else scales, "scales")
    assert_bytes(got.codes, expected.codes, "codes")


def by_cpu(x, spec, **kwargs) -> quant.QuantizedTensor:
    """The CPU kernels' result where they are built, else the reference's (slower, same bits)."""
    name = "reference" if why_not_cpu() else "cpu"
    return backends.get(name).quantize(x, spec, **kwargs)


def test_fast_arithmetic_equals_the_definition_for_every_float():
    """Prevents a shortcut (E2M1 by subtraction, Newton reciprocal, division by remainder) that is
    wrong for some float that the random tests do not meet."""
    assert cuda.check_numerics() == dict.fromkeys(cuda.NUMERICS_CHECKS, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_equals_the_reference(spec, dtype):
    """Prevents any byte that is not the definition's, on the rows that break quantisers."""
    for x in (special_rows(33, 272, dtype), wide_range(40, 144, dtype)):
        assert_same(run(x, spec), quant.quantize(x, spec))


@pytest.mark.parametrize("num_cols", [16, 48, 768, 2048, 4112, 8208, 20000, 33008])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 129])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_shape_equals_the_cpu(spec, num_rows, num_cols):
    """Prevents a tail, a row split over warps, or a row too long for the chip from going wrong."""
    dtype = DTYPES[(num_rows + num_cols // 16) % 3]
    x = wide_range(num_rows, num_cols, dtype, seed=num_cols)
    assert_same(run(x, spec), by_cpu(x, spec))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_cols", [8192, 16384, 32768, 65536])
def test_long_rows_of_every_type(num_cols, dtype):
    """Prevents the widest row on chip, or the first beyond it, from losing part of its amax."""
    for spec in (TOKEN, NVFP4Spec(outer="token", four_over_six="mae")):
        x = wide_range(3, num_cols, dtype)
        x[1, -1] = 60000.0
        assert_same(run(x, spec), by_cpu(x, spec))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_given_amax_is_used_and_kept(spec):
    """Prevents an amax reduced over shards from being replaced by the shard's own, and one smaller
    than the data, zero or Inf from leaving the exact path."""
    num_rows = 48
    x = wide_range(num_rows, 80, torch.float16)
    for value in (0.37, 1e4, 0.0, 1e-30, float("inf")):
        amax = torch.full((num_rows if spec.outer == "token" else 1,), value)
        assert_same(run(x, spec, amax=amax), quant.quantize(x, spec, amax))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_groups_equal_separate_tensors(spec, dtype):
    """Prevents a group from taking a neighbour's amax, and empty groups from shifting the others."""
    offsets = torch.tensor([0, 0, 16, 48, 48, 48, 144, 160, 160], dtype=dtype)
    x = special_rows(160, 272, torch.bfloat16)
    assert_same(run(x, spec, offsets=offsets), quant.quantize_grouped(x, offsets, spec))


def test_many_ragged_groups():
    """Prevents runs of rows that cross group ends from losing a maximum."""
    generator = torch.Generator().manual_seed(3)
    splits = torch.randint(0, 97, (300,), generator=generator)
    offsets = quant.offsets_from_splits(splits, "cpu")
    x = wide_range(int(offsets[-1]), 48, torch.bfloat16)
    for spec in (TENSOR, NVFP4Spec(four_over_six="mse", error="fast")):
        assert_same(run(x, spec, offsets=offsets), by_cpu(x, spec, offsets=offsets))


def test_cut_tiles_are_loud():
    """Prevents groups that cut 16x16 tiles from being quantised with a neighbour's rows in silence."""
    x = special_rows(64, 64, torch.bfloat16, seed=1)
    out = run(x, NVFP4Spec(block=(16, 16)), offsets=torch.tensor([0, 16, 40, 64]))
    scales = out.block_scales.view(torch.uint8)
    assert (scales[16:] == 0x7F).all()
    assert (scales[:16] != 0x7F).all()


@pytest.mark.parametrize("shape", [(1, 16), (130, 80), (128, 256), (257, 2064)], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_swizzled_scales_and_their_padding(spec, shape):
    """Prevents padding bytes left as garbage (0x7F is NaN) and scales at the wrong place."""
    x = special_rows(*shape, torch.bfloat16)
    assert_same(run(x, spec, swizzled=True), by_cpu(x, spec), swizzled=True)


@pytest.mark.parametrize("swizzled", [False, True], ids=["linear", "swizzled"])
@pytest.mark.parametrize("spec", TILES, ids=str)
def test_transposed_form(spec, swizzled):
    """Prevents W and its transpose from disagreeing with quantize(w) and quantize(w.t())."""
    for dtype, shape in itertools.product(DTYPES, ((16, 16), (80, 144), (272, 320))):
        for x in (special_rows(*shape, dtype), wide_range(*shape, dtype)):
            out = run(x, spec, transposed=True, swizzled=swizzled)
            rows = quant.quantize(x, spec)
            cols = quant.quantize(x.t().contiguous(), spec, rows.amax)
            assert_same(out, rows, swizzled)
            turned = cuda.Buffers(out.codes_t, out.block_scales_t, out.amax)
            assert_same(turned, cols, swizzled)


def test_transposed_form_of_groups():
    """Prevents a strip of the transposed form from taking another group's amax."""
    offsets = torch.tensor([0, 16, 16, 64, 144])
    x = wide_range(144, 80, torch.bfloat16)
    out = run(x, NVFP4Spec(block=(16, 16)), offsets=offsets, transposed=True)
    for g in range(4):
        rows = slice(int(offsets[g]), int(offsets[g + 1]))
        if rows.start == rows.stop:
            continue
        expected = quant.quantize(
            x[rows].t().contiguous(), NVFP4Spec(block=(16, 16)), out.amax[g : g + 1]
        )
        assert_bytes(out.codes_t[:, rows.start // 2 : rows.stop // 2], expected.codes, "codes_t")
        scales = out.block_scales_t[:, rows.start // 16 : rows.stop // 16]
        assert_bytes(scales, expected.block_scales, "block_scales_t")


@pytest.mark.parametrize("spec", ROWS, ids=str)
def test_decoded_output_is_exact(spec):
    """Prevents the BF16 operand of a software GEMM from being rounded, or of another scale."""
    x = special_rows(40, 272, torch.bfloat16)
    out = run(x, spec, decoded=True)
    assert_bytes(out.decoded, quant.decode_exact(quant.quantize(x, spec))[0], "decoded")


@pytest.mark.parametrize("spec", [TENSOR, TOKEN], ids=str)
def test_dequantize_equals_the_reference(spec):
    """Prevents a dequantised backward that differs from the definition in a last bit."""
    x = wide_range(48, 272, torch.bfloat16)
    offsets = torch.tensor([0, 20, 20, 48])
    on_cpu = quant.quantize_grouped(x, offsets, spec)
    on_gpu = ops.quantize_nvfp4(x.cuda(), spec, offsets=offsets.cuda())
    assert_bytes(ops.decode(on_gpu).cpu(), quant.decode_exact(on_cpu)[0], "decoded")
    for dtype in DTYPES:
        got = ops.dequantize(on_gpu, dtype).cpu()
        assert_bytes(got, quant.dequantize(on_cpu, dtype), str(dtype))


@pytest.mark.parametrize("position", range(16))
def test_every_bf16_pattern_in_every_position(position):
    """Prevents one bit pattern (a NaN payload, a subnormal) in one lane from being mishandled."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.randn(65536, 48, generator=torch.Generator().manual_seed(position)).bfloat16()
    x[:, 16 + position] = patterns
    for spec in (TOKEN, NVFP4Spec(outer="token", four_over_six="mse", error="fast")):
        assert_same(run(x, spec), by_cpu(x, spec))
    amax = torch.tensor([4.0])
    assert_same(run(x, TENSOR, amax=amax), by_cpu(x, TENSOR, amax=amax))


def test_a_billion_random_elements():
    """Prevents a mismatch rarer than what small tests meet: 16 draws of 64 million elements."""
    generator = torch.Generator("cuda").manual_seed(11)
    for draw in range(16):
        x = torch.randn(32768, 2048, device="cuda", generator=generator)
        x *= torch.exp2(torch.randint(-20, 20, (32768, 1), device="cuda", generator=generator))
        if draw % 2:  # heavy tails
            x /= torch.rand(32768, 2048, device="cuda", generator=generator) + 1e-4
        x = x.to(DTYPES[0] if draw % 4 else torch.float32)
        spec = TOKEN if draw % 3 else NVFP4Spec(outer="token", four_over_six="mse", error="fast")
        out = poisoned(cuda.Buffers.empty(tuple(x.shape), spec))
        cuda.quantize_nvfp4_out(x, spec, out)
        got = cuda.Buffers(out.codes.cpu(), out.block_scales.cpu(), out.amax.cpu())
        assert_same(got, by_cpu(x.cpu(), spec))


def test_backend_answers_and_takes_strides():
    """Prevents the selection from passing the CUDA kernels by, and x.t() from being read as x."""
    x = special_rows(64, 48, torch.bfloat16)
    backend = backends.select("quantize", [TENSOR], shape=(48, 64), device="cuda")
    assert backend.name == "cuda"
    got = backend.quantize(x.cuda().t(), TENSOR)
    expected = quant.quantize(x.t(), TENSOR)
    out = cuda.Buffers(got.codes.cpu(), got.block_scales.cpu(), got.amax.cpu())
    assert_same(out, expected)
    assert cpu.BACKEND.why_not("quantize", [TENSOR], device="cuda") is not None


def test_what_does_not_fit_is_refused():
    """Prevents silent copies and out-of-bounds writes where the caller gave the tensors."""
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    out = cuda.Buffers.empty((32, 64), TENSOR)
    with pytest.raises(ValueError, match="strides"):
        cuda.quantize_nvfp4_out(torch.empty(64, 32, device="cuda").bfloat16().t(), TENSOR, out)
    flat = torch.empty(32 * 64 + 1, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        cuda.quantize_nvfp4_out(flat[1:].view(32, 64), TENSOR, out)
    with pytest.raises(ValueError, match="codes is"):
        cuda.quantize_nvfp4_out(x[:16], TENSOR, out)
    with pytest.raises(ValueError, match="block_scales is"):
        cuda.quantize_nvfp4_out(x, TENSOR, out, swizzled=True)
    with pytest.raises(ValueError, match="amax is"):
        cuda.quantize_nvfp4_out(x, TOKEN, out)
    turned = cuda.Buffers.empty((32, 64), TENSOR, transposed=True)
    with pytest.raises(ValueError, match="no transposed form"):
        cuda.quantize_nvfp4_out(x, TENSOR, turned)
    with pytest.raises(ValueError, match="K=40"):
        ops.quantize_nvfp4(torch.empty(8, 40, device="cuda"), TENSOR)
    with pytest.raises(ValueError, match="give BF16, FP16 or FP32"):
        ops.quantize_nvfp4(torch.empty(8, 48, device="cuda", dtype=torch.float64), TENSOR)


def test_graph_capture_of_groups_waits_for_nothing():
    """Prevents a host synchronisation, which capture forbids, and offsets frozen at capture."""
    x = wide_range(160, 272, torch.bfloat16).cuda()
    offsets = torch.tensor([0, 16, 48, 160], device="cuda")
    out = cuda.Buffers.empty((160, 272), TENSOR, num_groups=3)
    cuda.quantize_nvfp4_out(x, TENSOR, out, offsets=offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.quantize_nvfp4_out(x, TENSOR, out, offsets=offsets)
    offsets.copy_(torch.tensor([0, 100, 100, 160]))
    x.neg_()
    poisoned(out)
    graph.replay()
    got = cuda.Buffers(out.codes.cpu(), out.block_scales.cpu(), out.amax.cpu())
    assert_same(got, quant.quantize_grouped(x.cpu(), offsets.cpu(), TENSOR))
    assert expand_groups(out.amax, offsets, 160).shape == (160,)


def test_operators_have_consistent_schemas():
    """Prevents a schema that hides a mutation or a fake whose shapes are wrong (torch.compile)."""
    ops.quantize_nvfp4(torch.empty(16, 16, device="cuda"), TENSOR)
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    schema = torch.ops.megatron_nvfp4.quantize_nvfp4.default
    torch.library.opcheck(schema, (x, None, None, 1, True, 448, 2, True))
    out = cuda.Buffers.empty((32, 64), NVFP4Spec(block=(16, 16)), transposed=True)
    cuda.quantize_nvfp4_out(x, NVFP4Spec(block=(16, 16)), out)
    # The schema test perturbs its inputs by arithmetic that torch lacks for float8.
    torch.library.opcheck(
        torch.ops.megatron_nvfp4.quantize_nvfp4_out.default,
        (x, None, 16, False, 448, 0, False, False, False),
        vars(out),
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
