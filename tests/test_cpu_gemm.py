"""The C++ matrix products on CPU tensors: their order of addition, and what must not change it."""

import ctypes
import ctypes.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from megatron_nvfp4 import backends
from megatron_nvfp4.backends.extension import why_not_cpu

pytestmark = pytest.mark.skipif(why_not_cpu() is not None, reason=f"cpu: {why_not_cpu()}")
BF16, FP32 = torch.bfloat16, torch.float32
NAN, INF = float("nan"), float("inf")
ISAS = ("default", "avx2", "avx512")
# Around the register tiles (6 x 16, 14 x 32, 6 x 8), the cached blocks (168 rows, 256 deep) and a
# task (512 columns).
SHAPES = [(1, 1, 1), (7, 33, 19), (13, 31, 64), (170, 9, 257), (5, 514, 40), (29, 70, 530)]


def operators():
    return torch.ops.megatron_nvfp4


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def factor(num: int, seed: int) -> Tensor:
    return torch.rand(num, generator=torch.Generator().manual_seed(seed)) + 0.5


def offsets_of(counts: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(dtype)


def gemm(a, b, offsets, *, out_dtype=FP32, **options) -> Tensor:
    names = ("row_scale", "group_scale", "col_scale", "bias")
    chosen = [options.get(name) for name in names]
    return operators().grouped_gemm_decoded(a, b, offsets, *chosen, out_dtype)


def wgrad(a, b, offsets, out, *, row_scale=None, group_scale=None, accumulate=False):
    operators().grouped_wgrad_decoded(
        a, b, offsets, row_scale, group_scale, accumulate, out=list(out)
    )
    return out


def in_order(a: Tensor, b: Tensor) -> Tensor:
    """a b^T in FP32, k ascending, a multiply and an add each: exact products assumed."""
    a, b = a.float(), b.float()
    total = torch.zeros(a.shape[0], b.shape[0])
    for k in range(a.shape[1]):
        total = total + a[:, k, None] * b[None, :, k]
    return total


def fused_in_order(a: Tensor, b: Tensor) -> Tensor:
    """a b^T in FP32 by the C library's fmaf, which rounds once."""
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    out = torch.empty(a.shape[0], b.shape[0])
    for i, j in itertools.product(range(a.shape[0]), range(b.shape[0])):
        total = 0.0
        for x, y in zip(a[i].tolist(), b[j].tolist(), strict=True):
            total = fmaf(x, y, total)
        out[i, j] = total
    return out


def assert_same_bits(got: Tensor, want: Tensor, what: object) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    as_integers = torch.int32 if got.dtype == FP32 else torch.int16
    wrong = (got.view(as_integers) != want.view(as_integers)).nonzero()
    assert not len(wrong), (
        f"{what}: {len(wrong)} of {got.numel()} differ, first {wrong[0].tolist()}"
    )


def fused_cases() -> tuple[Tensor, Tensor]:
    """FP32 rows (32, 3) against (1, 3) whose sums a rounded product or a second rounding gets wrong."""
    near_one = 1.0 + 2.0**-12  # its square lies halfway between two floats
    large = 3.0e38
    rows = []
    for sign, tiny in itertools.product((1.0, -1.0), (0.0, 2.0**-80, -(2.0**-80), 2.0**-149)):
        rows.append([tiny, sign * near_one, 0.0])
        rows.append([tiny, sign * near_one * 2.0**-130, 0.0])  # subnormal sums
        rows.append([-large, large * sign, tiny])  # the product overflows, the sum may not
        rows.append([tiny, INF * sign, NAN if tiny else 0.0])
    a = torch.tensor(rows, dtype=FP32)
    return a, torch.tensor([[1.0, near_one, 1.0]], dtype=FP32)


def check_order() -> None:
    """Sums of BF16 and of FP32 operands, and of weight gradients, are those of the plain loops."""
    for m, n, k in SHAPES:
        a, b, offsets = normal(m, k, seed=1), normal(n, k, seed=2), offsets_of([m])
        want = in_order(a, b)
        for x, y in itertools.product((a, a.float()), (b, b.float())):
            assert_same_bits(gemm(x, y, offsets), want, (m, n, k, x.dtype, y.dtype))
        out = wgrad(a, b, offsets_of([k]), [torch.full((m, n), NAN)])[0]
        assert_same_bits(out, want, (m, n, k, "wgrad"))
        token_major = (a.t().contiguous().t(), b.t().contiguous().t())
        out = wgrad(*token_major, offsets_of([k]), [torch.full((m, n), NAN)])[0]
        assert_same_bits(out, want, (m, n, k, "wgrad of transposes"))
    a, b = normal(9, 50, seed=3, dtype=FP32), normal(19, 50, seed=4, dtype=FP32)
    want = fused_in_order(a, b)
    assert bool((want != in_order(a, b)).any()), "these operands cannot tell the two apart"
    assert_same_bits(gemm(a, b, offsets_of([9])), want, "fused")
    a, b = fused_cases()
    got, want = gemm(a, b, offsets_of([len(a)])), fused_in_order(a, b)
    assert 0 < int(want.isnan().sum()) < len(a)
    assert bool(want.isinf().any())
    want[want.isnan()] = NAN  # the positive quiet NaN
    assert_same_bits(got, want, "fused at the edges")


@pytest.mark.parametrize("isa", ISAS)
def test_order_on_every_instruction_set(isa):
    """A vector width that adds in another order or rounds a product: bits that depend on the machine."""
    best = torch.backends.cpu.get_cpu_capability().lower().replace("no avx", "default")
    if best not in ISAS or ISAS.index(isa) > ISAS.index(best):
        pytest.skip(f"cpu: this machine has {best}, not {isa}")
    program = (
        "import torch, test_cpu_gemm; test_cpu_gemm.check_order(); "
        f"assert torch.ops.megatron_nvfp4.cpu_isa() == {isa!r}"
    )
    paths = [str(Path(__file__).parent), str(Path(backends.__file__).parents[2])]
    env = {**os.environ, "ATEN_CPU_CAPABILITY": isa, "PYTHONPATH": os.pathsep.join(paths)}
    child = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr


@pytest.mark.parametrize(("m", "n", "k"), [(64, 96, 2048), (300, 600, 768)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_error_bound(m, n, k, dtype):
    """An addend left out or taken twice at a size that no loop checks.

    Each of K fused steps rounds its result once, at 2^-24 of a partial sum, which is at most
    (1 + 2^-24)^K sum |ab|: together less than 1.01 K 2^-24 sum |ab| for K < 2^17.
    """
    a, b = normal(m, k, seed=1, dtype=dtype), normal(n, k, seed=2, dtype=dtype)
    size = a.double().abs() @ b.double().abs().t()
    error = (gemm(a, b, offsets_of([m])).double() - a.double() @ b.double().t()).abs()
    assert bool((error <= 1.01 * k * 2.0**-24 * size).all())
    assert bool((error > 0).any())


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 5, 14, 40, 180]), min_size=1, max_size=8),
    n=st.sampled_from([1, 8, 47]),
    k=st.sampled_from([0, 3, 48]),
    padding=st.sampled_from([0, 3]),
    wide=st.booleans(),
    accumulate=st.booleans(),
)
def test_any_groups(counts, n, k, padding, wide, accumulate):
    """Rows of a neighbour group or of padding in a sum; an empty group not zeroed, or touched."""
    rows = sum(counts)
    x, dy = normal(rows + padding, k, seed=1), normal(rows + padding, n, seed=2)
    x[rows:], dy[rows:] = NAN, INF
    w = normal(len(counts), n, k, seed=3)
    offsets = offsets_of(counts, torch.int64 if wide else torch.int32)
    y = gemm(x, w.flatten(0, 1), offsets)
    assert y.shape == (rows + padding, n)
    assert not y[rows:].any()
    start = normal(len(counts), n, k, seed=4, dtype=FP32)
    out = list(start.clone() if accumulate else torch.full_like(start, NAN))
    wgrad(dy.t(), x.t(), offsets, out, accumulate=accumulate)
    for group, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
        assert_same_bits(y[begin:end], in_order(x[begin:end], w[group]), (counts, group))
        want = in_order(dy[begin:end].t(), x[begin:end].t())
        if accumulate:
            want = start[group] if begin == end else want + start[group]
        assert_same_bits(out[group], want, (counts, group, "wgrad"))


@pytest.mark.parametrize("out_dtype", [BF16, FP32])
@pytest.mark.parametrize(
    "scales", ["none", "row", "group", "row*group", "one*one", "col", "row*col"]
)
@pytest.mark.parametrize("bias", [None, BF16, FP32])
def test_epilogue(out_dtype, scales, bias):
    """Factors applied one after the other, an FMA with the bias, or more than one rounding."""
    counts, n, k = [20, 0, 35], 37, 32
    x, w, offsets = normal(55, k, seed=1), normal(3 * n, k, seed=2), offsets_of(counts)
    group = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    options, total = {}, torch.ones(55, n)
    if scales.startswith(("row", "one")):
        options["row_scale"] = factor(1 if scales == "one*one" else 55, 3)
        total = options["row_scale"].expand(55)[:, None] * total
    if scales.endswith(("group", "*one")):
        options["group_scale"] = factor(1 if scales == "one*one" else 3, 4)
        total = total * options["group_scale"].expand(3)[group][:, None]
    if scales.endswith("col"):
        options["col_scale"] = factor(3 * n, 5)
        total = total * options["col_scale"].view(3, n)[group]
    want = gemm(x, w, offsets) * total
    if bias:
        options["bias"] = normal(3, n, seed=6, dtype=bias)
        want = want + options["bias"].float()[group]
    got = gemm(x, w, offsets, out_dtype=out_dtype, **options)
    assert_same_bits(got, want.to(out_dtype), (out_dtype, scales, bias))


@pytest.mark.parametrize("out_dtype", [BF16, FP32])
@pytest.mark.parametrize("accumulate", [True, False])
def test_wgrad_epilogue(out_dtype, accumulate):
    """A gradient rounded before it is added, a scale on an empty group's zeros, or NaN kept there."""
    counts, n, k = [17, 0, 30], 21, 40
    dy, x = normal(47, n, seed=1), normal(47, k, seed=2)
    rows, groups = factor(n, 3), torch.tensor([0.7, NAN, 1.3])
    old = normal(3, n, k, seed=4).to(out_dtype)
    out = list(old.clone() if accumulate else torch.full_like(old, NAN))
    wgrad(
        dy.t(), x.t(), offsets_of(counts), out,
        row_scale=rows, group_scale=groups, accumulate=accumulate,
    )  # fmt: skip
    for group, (begin, end) in enumerate(itertools.pairwise(offsets_of(counts).tolist())):
        want = in_order(dy[begin:end].t(), x[begin:end].t()) * (rows * groups[group])[:, None]
        if begin == end:
            want = torch.zeros(n, k)
        want = want + old[group].float() if accumulate else want
        assert_same_bits(out[group], want.to(out_dtype), group)


def test_number_of_threads_does_not_change_bits():
    """A thread's piece that starts inside a tile, or a sum split between threads."""
    x, w, dy = normal(700, 300, seed=1), normal(2 * 530, 300, seed=2), normal(700, 90, seed=3)
    offsets, before, results = offsets_of([150, 550]), torch.get_num_threads(), []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        try:
            out = [torch.empty(90, 300), torch.empty(90, 300)]
            results.append([gemm(x, w, offsets), *wgrad(dy.t(), x.t(), offsets, out)])
        finally:
            torch.set_num_threads(before)
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            assert_same_bits(got, want, "threads")


def test_rows_depend_on_themselves_alone():
    """Bits that change with the batch or the grouping, or NaN and Inf from another row."""
    x, w = normal(200, 96, seed=1), normal(50, 96, seed=2)
    whole = gemm(x, w, offsets_of([200]))
    for first, count in ((0, 1), (17, 1), (100, 99)):
        part = gemm(x[first : first + count], w, offsets_of([count]))
        assert_same_bits(part, whole[first : first + count], (first, count))
    assert_same_bits(gemm(x, w.repeat(3, 1), offsets_of([5, 0, 195])), whole, "three groups")
    x[33], x[170, 3] = NAN, INF
    clean = torch.ones(200, dtype=torch.bool)
    clean[[33, 170]] = False
    again = gemm(x, w, offsets_of([200]))
    assert_same_bits(again[clean], whole[clean], "beside NaN")
    assert bool(again[33].isnan().all())
    assert not again[170].isfinite().any()


def test_any_strides():
    """Memory read as if contiguous: rows apart, depth apart, backwards columns, shared rows."""
    x, w = normal(40, 96, seed=1), normal(30, 96, seed=2)
    offsets = offsets_of([20])
    for a, b in (
        (x[::2, ::3], w[:, ::3]),
        (x[:20, 32:], w[:, 32:]),
        (x[:1].expand(20, 96), w.t().contiguous().t()),
        (x[:20, 1:34].t().contiguous().t(), w[:, 1:34]),
    ):
        assert_same_bits(gemm(a, b, offsets), in_order(a, b), (a.stride(), b.stride()))
        same = [torch.empty(20, 30)]
        wgrad(a, b, offsets_of([a.shape[1]]), same)
        assert_same_bits(same[0], in_order(a, b), (a.stride(), b.stride(), "wgrad"))


def test_flushing_subnormals_does_not_reach_the_kernels():
    """Bits that change with torch.set_flush_denormal."""
    x, w = normal(8, 16, seed=1) * 2.0**-70, normal(8, 16, seed=2) * 2.0**-70
    want = gemm(x, w, offsets_of([8]))
    assert bool(want.any())
    if not torch.set_flush_denormal(True):
        pytest.skip("cpu: this machine cannot flush subnormals")
    try:
        got = gemm(x, w, offsets_of([8]))
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(got, want, "flushing")


def test_refusals_name_the_thing_its_value_and_the_remedy():
    """A shape or type that would be read wrongly, taken in silence."""
    x, w, offsets = normal(4, 8), normal(6, 8), offsets_of([4])
    cases = {
        "a is Half; give BF16 or FP32": lambda: gemm(x.half(), w, offsets),
        "out_dtype is Double": lambda: gemm(x, w, offsets, out_dtype=torch.float64),
        r"give b \(G\*N, K\) of G=1 groups and K=8": lambda: gemm(x, w[:, :7], offsets),
        r"offsets \[0, 5\] do not rise from 0 to at most M=4": lambda: gemm(x, w, offsets_of([5])),
        "offsets are Float": lambda: gemm(x, w, offsets.float()),
        r"row_scale is Float \[3\]; give float32 \(4,\)": lambda: gemm(
            x, w, offsets, row_scale=factor(3, 1)
        ),
        "multiply them into col_scale": lambda: gemm(
            x, w, offsets, group_scale=factor(1, 1), col_scale=factor(6, 1)
        ),
        r"bias has shape \[6\]; give \(1, 6\)": lambda: gemm(x, w, offsets, bias=factor(6, 1)),
        "out holds 0 tensors; give one for each of G=1": lambda: wgrad(x.t(), x.t(), offsets, []),
        r"give contiguous \(8, 8\)": lambda: wgrad(x.t(), x.t(), offsets, [torch.zeros(8, 9)]),
    }
    for text, call in cases.items():
        with pytest.raises(ValueError, match=text):
            call()
