"""Every backend's quantiser gives the same bytes: all specs, types, shapes and values."""

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from megatron_nvfp4 import backends, quant
from megatron_nvfp4.backends import ops
from megatron_nvfp4.backends.extension import why_not_cpu
from megatron_nvfp4.recipes import BF16, MXFP8, FloatSpec, NVFP4Spec

# Every backend that quantises, and where its tensors live.
DEVICES = {"reference": "cpu", "cpu": "cpu", "cuda": "cuda", "te": "cuda"}
PAIRS = list(itertools.combinations(DEVICES, 2))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAXIMA = (448, 256)
LAYOUTS = (((1, 16), "tensor"), ((1, 16), "token"), ((16, 16), "tensor"))
SEARCHES = ((None, "strict"), *itertools.product(("mae", "mse"), ("strict", "fast")))
SPECS = [
    NVFP4Spec(block=block, outer=outer, e4m3_max=e4m3_max, four_over_six=metric, error=error)
    for (block, outer), e4m3_max, (metric, error) in itertools.product(LAYOUTS, MAXIMA, SEARCHES)
]
STOCHASTIC = [
    NVFP4Spec(block=block, outer=outer, e4m3_max=e4m3_max, rounding="stochastic")
    for (block, outer), e4m3_max in itertools.product(LAYOUTS, MAXIMA)
]
FLOATS = [FloatSpec(exponent=e, mantissa=m) for e in (2, 3, 4, 5) for m in (1, 2, 3, 4)]
# What kernels take of a transposed matrix, rotated or not.
COLUMNS = [NVFP4Spec(e4m3_max=e, rounding=r) for e in MAXIMA for r in ("nearest", "stochastic")]
RANDOM = {"seed": 0x0123456789ABCDEF, "offset": 3}
needs_cpu_kernels = pytest.mark.skipif(why_not_cpu() is not None, reason=f"cpu: {why_not_cpu()}")


def backend_or_skip(name: str, spec, op: str = "quantize"):
    backend = backends.get(name)
    reason = backend.why_not(op, [spec], device=DEVICES[name])
    if reason:
        pytest.skip(f"{name}: {reason}")
    return backend


def as_bytes(operand) -> tuple[torch.Tensor, ...]:
    """The stored parts of a quantised matrix as integers, so that -0 is not 0 and NaN is NaN."""
    is_simulated = isinstance(operand, quant.SimulatedTensor)
    codes = operand.values.view(torch.int32) if is_simulated else operand.codes.view(torch.uint8)
    parts = [codes, operand.block_scales.view(torch.uint8)]
    if not isinstance(operand, quant.MXFP8Tensor):
        parts.append(operand.amax.view(torch.int32))
    return tuple(part.cpu() for part in parts)


def assert_same(left, right, what) -> None:
    names = ("codes", "block_scales", "amax")
    for name, a, b in zip(names, as_bytes(left), as_bytes(right), strict=False):
        assert a.shape == b.shape, f"{what}: {name} {tuple(a.shape)} != {tuple(b.shape)}"
        wrong = (a != b).nonzero()
        assert not len(wrong), f"{what}: {len(wrong)} of {name} differ, first {wrong[0].tolist()}"


def compare(pair, x, spec, what, **kwargs) -> None:
    op = "quantize_rotated" if kwargs.get("rotated") else "quantize"
    results = []
    for name in pair:
        backend = backend_or_skip(name, spec, op)
        moved = {
            key: value.to(DEVICES[name]) if isinstance(value, torch.Tensor) else value
            for key, value in kwargs.items()
        }
        results.append(backend.quantize(x.to(DEVICES[name]), spec, **moved))
    assert_same(*results, what)


def around(values: torch.Tensor) -> torch.Tensor:
    """Values and the FP32 neighbours of each."""
    bits = values.float().view(torch.int32)
    return torch.cat([(bits + step).view(torch.float32) for step in (-1, 0, 1)])


def midpoints(values: torch.Tensor) -> torch.Tensor:
    return (values[1:].double() + values[:-1].double()).div(2).float()


def e2m1_ties() -> torch.Tensor:
    """Rows whose outer scale is a power of two and whose blocks' maxima encode exactly: the scaled
    elements are E2M1's values, ties and their neighbours, both signs."""
    values = torch.tensor(quant.nvfp4.E2M1_VALUES)
    grid = torch.cat([around(torch.cat([values[1:], midpoints(values)])), torch.tensor([0.0])])
    grid = torch.cat([grid, -grid])
    blocks = torch.nn.functional.pad(grid, (0, -len(grid) % 15)).reshape(-1, 15)
    blocks = torch.cat([torch.full((len(blocks), 1), 6.0), blocks], dim=1)
    rows = [blocks * scale for scale in (1.0, 448.0, 2.0**-6, 2.0**-9, 3 * 2.0**-9)]
    return torch.cat([torch.stack(rows).reshape(len(rows), -1) * 2.0**k for k in (0, -20, 5)])


def e4m3_boundaries() -> torch.Tensor:
    """Blocks whose maxima ask for every E4M3 value, every midpoint and their neighbours."""
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    maxima = around(torch.cat([scales[1:], midpoints(scales)])) * 6
    maxima = torch.cat([maxima, maxima.div(4).mul(6), torch.tensor([2688.0])])
    blocks = torch.linspace(-1, 1, 16).repeat(len(maxima), 1) * maxima[:, None]
    blocks = torch.nn.functional.pad(blocks, (0, 0, 0, -len(blocks) % 8))
    return blocks.reshape(8, -1)


def extremes() -> torch.Tensor:
    """Rows of one order of magnitude each, from the smallest subnormal to the largest number, and
    rows whose blocks lie a million times below the row's maximum."""
    sizes = [1e-45, 1e-41, 1.2e-38, 1e-38, 7.8e-36, 1e-20, 6e-8, 1.0, 6e4, 1e19, 1e30, 3e38]
    x = torch.rand(len(sizes), 80, generator=torch.Generator().manual_seed(1)) * 2 - 1
    wide = x.clone()
    wide[:, 16:] *= 1e-6
    sizes = torch.tensor(sizes, dtype=torch.float64)[:, None]
    return torch.cat([(x * sizes).float(), (wide * sizes).float()])


def specials() -> torch.Tensor:
    """NaN, Inf and zeros of both signs: alone, among numbers, in whole blocks and rows."""
    x = torch.randn(19, 96, generator=torch.Generator().manual_seed(2))
    nan = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    inf = torch.inf
    x[0] = 0.0
    x[1] = -0.0
    x[2, :16] = -0.0
    x[2, 16:32] = 0.0
    x[3, 5], x[4, 7] = nan
    x[5, 3], x[6, 90] = inf, -inf
    x[7], x[8] = nan[:, None]
    x[9] = inf
    x[10, :16], x[11, 16:32] = nan[:, None]
    x[12, 3], x[12, 4] = nan[1], inf
    x[13] *= 1e-38
    x[13, ::3] = -0.0
    return x


def random_rows(num_rows: int, num_cols: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows * 1000 + num_cols)
    x = torch.randn(num_rows, num_cols, generator=generator)
    return x * torch.exp2(torch.randint(-30, 30, (num_rows, 1), generator=generator).float())


INPUTS = {
    "empty": lambda: random_rows(0, 64),
    "one_block": lambda: random_rows(1, 32),
    "odd_rows": lambda: random_rows(37, 288),
    "one_tile_and_a_row": lambda: random_rows(17, 544),
    "e2m1_ties": e2m1_ties,
    "e4m3_boundaries": e4m3_boundaries,
    "extremes": extremes,
    "specials": specials,
}


@functools.cache
def adversarial(name: str, dtype: torch.dtype) -> torch.Tensor:
    x = INPUTS[name]()
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [*SPECS, MXFP8], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_same_bytes(pair, spec, dtype):
    """A rounding, a tie, a special value or a tail that one backend treats otherwise."""
    for name in INPUTS:
        compare(pair, adversarial(name, dtype), spec, f"{name} {spec}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [*STOCHASTIC, *FLOATS], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_same_bytes_of_random_and_simulated(pair, spec, dtype):
    """Random bits that depend on who draws them; a grid or a tie of its own."""
    for name in INPUTS:
        compare(pair, adversarial(name, dtype), spec, f"{name} {spec}", **RANDOM)
    x = random_rows(48, 32).to(dtype)
    for seed, offset in ((0, 0), (-1, -1), (2**63 - 1, 2**40)):
        compare(pair, x, spec, f"seed {seed} {spec}", seed=seed, offset=offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("spec", [*COLUMNS, MXFP8], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_same_bytes_of_columns(pair, spec, rotated, dtype):
    """A transposed matrix turned, rotated or numbered otherwise, an amax from before the rotation."""
    if rotated and spec == MXFP8:
        pytest.skip("no recipe rotates to MXFP8")
    for name in INPUTS:
        x = adversarial(name, dtype)
        x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 32))
        # All columns, an odd number of them, and fewer than a vector.
        for columns in (x, x[:, :-1], x[:, :3]):
            turned = columns.contiguous().t()
            compare(pair, turned, spec, f"{name} {spec}", rotated=rotated, **RANDOM)


@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("spec", COLUMNS, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_same_bytes_of_column_groups(pair, spec, rotated):
    """An amax that leaks into the next expert's tokens, or that an empty expert makes up."""
    x = random_rows(112, 70).bfloat16().t()
    for bounds in ([0, 0, 16, 64, 64, 112, 112], [0, 112]):
        options = {"column_offsets": torch.tensor(bounds), "rotated": rotated, **RANDOM}
        compare(pair, x, spec, f"column groups {bounds}", **options)
        amax = torch.rand(len(bounds) - 1) * 100
        compare(pair, x, spec, f"column groups {bounds}, amax given", amax=amax, **options)
    with pytest.raises(ValueError, match=r"K=24|M=24"):
        backends.get(pair[1]).quantize(x[:, :24], spec, rotated=True, **RANDOM)


@pytest.mark.parametrize("spec", [STOCHASTIC[0], STOCHASTIC[2]], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_same_bytes_of_random_groups(pair, spec):
    """Random bits that start anew in every group on one backend only."""
    x, offsets = random_rows(112, 96).bfloat16(), torch.tensor([0, 0, 5, 64, 64, 111, 112])
    compare(pair, x, spec, "groups", offsets=offsets, **RANDOM)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_same_bytes_of_every_bfloat16(pair):
    """A bit pattern that one backend widens or rounds otherwise, in any position of a block."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for shift in (0, 5, 11):
        # Finite and special patterns apart: an Inf would set the outer scale of all others.
        for x in (patterns, torch.where(torch.isfinite(patterns), patterns, 0.0)):
            x = x.roll(shift).reshape(2048, 32)
            for spec in (SPECS[0], NVFP4Spec(outer="token"), SPECS[-1], MXFP8):
                compare(pair, x, spec, f"all patterns, shift {shift}, {spec}")


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(
    rows=st.integers(0, 40),
    blocks=st.integers(1, 24),
    spec=st.sampled_from([*SPECS, MXFP8]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1 << 30),
    spread=st.integers(0, 60),
)
def test_same_bytes_of_any_shape(pair, rows, blocks, spec, dtype, seed, spread):
    """A shape or a spread of magnitudes nobody thought of."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, blocks * 32, generator=generator)
    x = x * torch.exp2(torch.randint(-spread, spread + 1, x.shape, generator=generator).float())
    compare(pair, x.to(dtype), spec, f"{tuple(x.shape)} {spec}")


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_same_bytes_of_groups(pair, spec):
    """An amax that leaks into the next group, or that an empty group makes up."""
    x = random_rows(112, 96).bfloat16()
    for bounds in ([0, 0, 16, 64, 64, 112, 112], [0, 112]):
        offsets = torch.tensor(bounds)
        compare(pair, x, spec, f"groups {bounds}", offsets=offsets)
        amax = torch.rand(112 if spec.outer == "token" else len(bounds) - 1) * 100
        compare(pair, x, spec, f"groups {bounds}, amax given", offsets=offsets, amax=amax)
    amax = torch.rand(112 if spec.outer == "token" else 1)
    compare(pair, x, spec, "amax given", amax=amax)
    # Larger than any element, smaller (codes saturate), zero and Inf.
    for value in (1e30, 1e-30, 0.0, torch.inf):
        compare(pair, x, spec, f"amax {value}", amax=torch.full_like(amax, value))


@pytest.mark.parametrize("name", [name for name in DEVICES if name != "reference"])
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[3], SPECS[-1], MXFP8], ids=str)
def test_strided_input(name, spec):
    """A transposed or sliced matrix read as if it were contiguous."""
    backend, x = backend_or_skip(name, spec), random_rows(96, 128).bfloat16().to(DEVICES[name])
    flat = random_rows(1, 4097).bfloat16().to(DEVICES[name]).flatten()
    for view in (x.t(), x[::2, 32:96], x[:, ::2][:, :32], flat[1:].view(64, 64)):
        reference = backends.get("reference").quantize(view.cpu(), spec)
        assert_same(backend.quantize(view, spec), reference, f"strides {view.stride()}")


def equal_numbers(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Same bits, except that all NaN are one."""
    integers = torch.int16 if left.element_size() == 2 else torch.int32
    both_nan = torch.isnan(left) & torch.isnan(right)
    return bool(((left.view(integers) == right.view(integers)) | both_nan).all())


@needs_cpu_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_every_byte(dtype):
    """A code, a scale byte or an outer scale that a kernel decodes otherwise."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 256).repeat(256, 1)
    block_scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 32)
    amax = torch.rand(256) * torch.exp2(torch.linspace(-126, 126, 256))
    qt = quant.QuantizedTensor(
        codes, block_scales.view(torch.float8_e4m3fn), amax, NVFP4Spec(outer="token")
    )
    assert equal_numbers(ops.decode(qt), quant.decode_exact(qt)[0])
    assert equal_numbers(ops.dequantize(qt, dtype), quant.dequantize(qt, dtype))
    grouped = quant.QuantizedTensor(
        codes, qt.block_scales, amax[:3], NVFP4Spec(), torch.tensor([0, 7, 7, 256])
    )
    assert equal_numbers(ops.dequantize(grouped, dtype), quant.dequantize(grouped, dtype))
    mxfp8 = quant.MXFP8Tensor(codes.view(torch.float8_e4m3fn), block_scales[:, :8].contiguous())
    assert equal_numbers(ops.decode_mxfp8(mxfp8, dtype), quant.decode_mxfp8(mxfp8, dtype))


@needs_cpu_kernels
@pytest.mark.parametrize("formats", [(SPECS[5], SPECS[0]), (MXFP8, MXFP8), (BF16, SPECS[0])])
def test_cpu_gemms_equal_reference(formats):
    """A decoded operand or an outer scale that differs between the kernels and the definition."""
    cpu, reference = backends.get("cpu"), backends.get("reference")
    x, weight = random_rows(21, 64).bfloat16(), random_rows(36, 64).bfloat16()
    bias, offsets = torch.randn(3, 12).bfloat16(), torch.tensor([0, 5, 5, 21])
    results = []
    for backend in (cpu, reference):
        a, b = backend.quantize(x, formats[0]), backend.quantize(weight, formats[1])
        y = backend.gemm(a, b, bias=bias.flatten(), out_dtype=torch.bfloat16)
        grouped = backend.grouped_gemm(a, b, offsets, bias=bias, out_dtype=torch.float32)
        rows = torch.tensor([0, 16, 16, 64])
        out = [torch.ones(21, 36) for _ in range(3)]
        backend.grouped_wgrad(b, a, rows, out=[t.t() for t in out], accumulate=True)
        results.append((y, grouped, *out))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_cpu_kernels
def test_cpu_is_chosen_for_cpu_tensors_only():
    """A slow reference where kernels exist, or CPU kernels handed the memory of a GPU."""
    for formats in ([SPECS[0], SPECS[0]], [MXFP8, MXFP8], [BF16, BF16]):
        assert backends.select("gemm", formats, device="cpu").name == "cpu"
    assert "CPU tensors" in backends.get("cpu").why_not("quantize", [SPECS[0]], device="cuda:0")
    missing = backends.get("cpu").why_not("quantize_rotated", [MXFP8])
    assert "no kernel rotates to mxfp8" in missing


ISAS = ("default", "avx2", "avx512")


@needs_cpu_kernels
@pytest.mark.parametrize("isa", ISAS)
def test_same_bytes_on_every_instruction_set(isa):
    """A vector width whose tail, tie or rounding differs from the definition."""
    best = torch.backends.cpu.get_cpu_capability().lower().replace("no avx", "default")
    if best not in ISAS or ISAS.index(isa) > ISAS.index(best):
        pytest.skip(f"cpu: this machine has {best}, not {isa}")
    if isa == best:  # what the tests above ran on
        ops.quantize_nvfp4(torch.zeros(0, 16), NVFP4Spec())
        assert torch.ops.megatron_nvfp4.cpu_isa() == isa
        return
    program = f"import test_backends; test_backends.check_instruction_set({isa!r})"
    paths = [str(Path(__file__).parent), str(Path(backends.__file__).parents[2])]
    env = {**os.environ, "ATEN_CPU_CAPABILITY": isa, "PYTHONPATH": os.pathsep.join(paths)}
    child = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr


def check_instruction_set(isa: str) -> None:
    """Runs in a process of its own: torch reads ATEN_CPU_CAPABILITY once."""
    specs = [spec for spec in SPECS if spec.e4m3_max == 448]
    for name, dtype, spec in itertools.product(INPUTS, DTYPES, [*specs, MXFP8]):
        compare(("reference", "cpu"), adversarial(name, dtype), spec, f"{isa} {name} {spec}")
    for dtype in DTYPES:
        for spec in (STOCHASTIC[0], FLOATS[5]):
            test_same_bytes_of_random_and_simulated(("reference", "cpu"), spec, dtype)
        for spec, rotated in ((COLUMNS[0], True), (COLUMNS[1], True), (MXFP8, False)):
            test_same_bytes_of_columns(("reference", "cpu"), spec, rotated, dtype)
    for dtype in DTYPES:
        test_decode_every_byte(dtype)
    assert torch.ops.megatron_nvfp4.cpu_isa() == isa


@needs_cpu_kernels
def test_flushing_subnormals_does_not_reach_the_kernels():
    """Bits that change with torch.set_flush_denormal, on the calling thread alone at that."""
    x = adversarial("extremes", torch.float32)
    want = ops.quantize_nvfp4(x, NVFP4Spec(outer="token"))
    if not torch.set_flush_denormal(True):
        pytest.skip("cpu: this machine cannot flush subnormals")
    try:
        got = ops.quantize_nvfp4(x, NVFP4Spec(outer="token"))
    finally:
        torch.set_flush_denormal(False)
    assert_same(got, want, "flushing")


@needs_cpu_kernels
def test_number_of_threads_does_not_change_bytes():
    """A thread's share of rows that starts inside a tile or reads another's amax."""
    x, before = random_rows(1000, 256).bfloat16(), torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            results.append([ops.quantize_nvfp4(x, spec) for spec in (*SPECS[:6:5], SPECS[-1])])
        finally:
            torch.set_num_threads(before)
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert_same(got, want, f"threads {got.spec}")


@needs_cpu_kernels
def test_operators_pass_opcheck():
    """A fake whose shapes or types differ from the kernel's, an output that aliases an input."""
    ops.quantize_nvfp4(torch.zeros(1, 16), NVFP4Spec())  # registers the fakes
    lib, x = torch.ops.megatron_nvfp4, random_rows(32, 64).bfloat16()
    offsets = torch.tensor([0, 16, 32])
    for args in (
        (x, None, None, 1, False, 448, 0, False),
        (x, torch.ones(32), None, 1, True, 448, 2, True),
        (x, None, offsets, 16, False, 256, 1, False),
        (x[:0], None, None, 1, True, 448, 0, False),
    ):
        torch.library.opcheck(lib.quantize_nvfp4.default, args)
    torch.library.opcheck(lib.quantize_mxfp8.default, (x,))
    torch.library.opcheck(lib.quantize_mxfp8_columns.default, (x,))
    torch.library.opcheck(lib.quantize_simulated.default, (x, None, 3, 2))
    for args in ((x, None, offsets, 1, False, 448, 5, 6), (x, None, None, 16, False, 256, 5, 6)):
        torch.library.opcheck(lib.quantize_nvfp4_stochastic.default, args)
    for args in (
        (x, None, offsets, 448, True, True, 5, 6),
        (x, None, None, 256, False, False, 0, 0),
    ):
        torch.library.opcheck(lib.quantize_nvfp4_columns.default, args)
    # The schema test perturbs its inputs by arithmetic that torch lacks for float8.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    codes, scales, _ = lib.quantize_nvfp4(x, None, None, 1, True, 448, 0, False)
    for op, args in (
        (lib.decode_nvfp4.default, (codes, scales)),
        (lib.dequantize_nvfp4.default, (codes, scales, torch.ones(32), torch.float16)),
        (lib.dequantize_mxfp8.default, (*lib.quantize_mxfp8(x), torch.float32)),
    ):
        torch.library.opcheck(op, args, test_utils=tests)


@needs_cpu_kernels
@pytest.mark.parametrize(
    ("x", "kwargs", "spec", "message"),
    [
        (torch.zeros(2, 24), {}, NVFP4Spec(), "K=24 is not a multiple of 16"),
        (torch.zeros(2, 48), {}, MXFP8, "K=48 is not a multiple of 32"),
        (torch.zeros(2, 16, dtype=torch.float64), {}, NVFP4Spec(), "give BF16, FP16 or FP32"),
        (torch.zeros(32), {}, NVFP4Spec(), "give a matrix"),
        (torch.zeros(2, 16), {"amax": torch.ones(2)}, NVFP4Spec(), r"give float32 \(1,\)"),
        (torch.zeros(2, 16), {"amax": torch.ones(1)}, NVFP4Spec(outer="token"), r"\(2,\)"),
        (torch.zeros(32, 16), {"offsets": torch.tensor([0, 8, 32])}, SPECS[-1], "cut 16x16 tiles"),
        (torch.zeros(4, 16), {"offsets": torch.tensor([0, 5])}, NVFP4Spec(), "M=4"),
        (torch.zeros(4, 16), {"offsets": torch.tensor([0, 3, 2, 4])}, NVFP4Spec(), "do not rise"),
        (torch.zeros(4, 16), {"offsets": torch.tensor([0.0, 4.0])}, NVFP4Spec(), "give integers"),
        (torch.zeros(2, 16), {}, NVFP4Spec(rounding="stochastic"), "give seed="),
        (torch.zeros(2, 24), {"rotated": True}, NVFP4Spec(), "M=24 is not a multiple of 16"),
        (torch.zeros(2, 16), {"rotated": True}, NVFP4Spec(outer="token"), "no kernel for rotation"),
        (torch.zeros(2, 32), {"rotated": True}, MXFP8, "no kernel rotates to mxfp8"),
        (
            torch.zeros(2, 32),
            {"column_offsets": torch.tensor([0, 8, 32])},
            NVFP4Spec(),
            "cut 16x16",
        ),
    ],
)
def test_cpu_refuses(x, kwargs, spec, message):
    """An input that a kernel would read or write out of bounds, or quantise as something else."""
    with pytest.raises(ValueError, match=message):
        backends.get("cpu").quantize(x, spec, **kwargs)
