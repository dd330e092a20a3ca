"""The mma.sync GEMMs against torch's, per group on decoded operands: bits, groups, and isolation."""

import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from megatron_nvfp4.backends.extension import why_not_cuda
from megatron_nvfp4.quant import NVFP4Spec, QuantizedTensor, decode_exact

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not_cuda() is not None, reason=f"cuda: {why_not_cuda()}"),
]
BF16, FP32 = torch.bfloat16, torch.float32
NAN = float("nan")
# (a packed, b packed or lying along N); NVFP4 is read along the contraction only.
FORMS = [(a, b) for a in ("bf16", "nvfp4") for b in ("bf16", "nvfp4", "transposed")]


def operators():
    return torch.ops.megatron_nvfp4


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


def factor(num: int, seed: int) -> Tensor:
    return torch.rand(num, generator=torch.Generator().manual_seed(seed)).cuda() + 0.5


def nvfp4(num_rows: int, num_cols: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random codes, and finite block scales from the whole range of E4M3."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (num_rows, num_cols // 2), generator=generator).byte()
    scales = torch.randint(0, 0x7F, (num_rows, num_cols // 16), generator=generator).byte()
    return codes.cuda(), scales.cuda().view(torch.float8_e4m3fn)


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """q * s_b by the reference, exact in BF16."""
    matrix = QuantizedTensor(codes, scales, torch.ones(1, device="cuda"), NVFP4Spec())
    return decode_exact(matrix)[0]


def offsets_of(counts: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(dtype).cuda()


def bits(t: Tensor) -> Tensor:
    return t.view(torch.int32 if t.dtype == FP32 else torch.int16)


def assert_same_bits(got: Tensor, want: Tensor, what: object) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    wrong = (bits(got) != bits(want)).nonzero()
    assert not len(wrong), (
        f"{what}: {len(wrong)} of {got.numel()} differ, first {wrong[0].tolist()}"
    )


def product(a: Tensor, b: Tensor) -> Tensor:
    """FP32 a b^T of BF16 matrices by cuBLAS, which adds blocks of 16 in order at these sizes.

    The contraction is filled up with zeros: cuBLAS has other kernels for odd lengths.
    """
    if a.shape[1] == 0 or a.shape[0] == 0:
        return torch.zeros(a.shape[0], b.shape[0], device=a.device)
    a, b = (torch.nn.functional.pad(t, (0, -t.shape[1] % 16)) for t in (a, b))
    return torch.mm(a, b.t(), out_dtype=FP32)


def assert_product(got: Tensor, a: Tensor, b: Tensor, what: object) -> None:
    """FP32 sums a b^T: torch's bits on compute capability 9.0, and everywhere the FP64 bound.

    A step of 16 products aligns 17 addends and truncates each, and its result, at 2^-23 of the
    largest at worst: at most 18 * 2^-23 * sum |ab| a step, K / 16 steps.
    """
    if torch.cuda.get_device_capability() == (9, 0):
        assert_same_bits(got, product(a, b), what)
    size = a.double().abs() @ b.double().abs().t()
    error = (got.double() - a.double() @ b.double().t()).abs()
    steps = -(-a.shape[1] // 16)
    assert bool((error <= steps * 18 * 2.0**-23 * size).all()), what


def gemm(a, b, offsets, num_cols, *, transposed=False, out_dtype=FP32, **scales) -> Tensor:
    """grouped_gemm_generic of BF16 matrices, or of pairs (codes, block scales)."""
    a, a_scales = a if isinstance(a, tuple) else (a, None)
    b, b_scales = b if isinstance(b, tuple) else (b, None)
    names = ("row_scale", "group_scale", "col_scale", "bias")
    return operators().grouped_gemm_generic(
        a, a_scales, b, b_scales, transposed, offsets, num_cols,
        *(scales.get(name) for name in names), out_dtype,
    )  # fmt: skip


def operand(form: str, groups: int, n: int, k: int, seed: int):
    """(what the kernel reads, its groups as BF16 (groups, n, k))."""
    if form == "nvfp4":
        packed = nvfp4(groups * n, k, seed)
        return packed, decoded(*packed).view(groups, n, k)
    matrix = normal(groups, n, k, seed=seed)
    flat = matrix.transpose(1, 2) if form == "transposed" else matrix
    return flat.reshape(-1, flat.shape[-1]).contiguous(), matrix


def wgrad(a, b, offsets, out, *, token_major=True, group_scale=None, accumulate=False):
    operators().grouped_wgrad_generic(
        a, b, token_major, offsets, group_scale, accumulate, out=list(out)
    )
    return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), [(8, 16), (136, 48), (256, 2048), (392, 80)])
def test_sums_of_every_form(form, n, k):
    """A fragment, swizzle, tail or decoder that is wrong for one way an operand lies."""
    counts = [1, 0, 130, 7, 128, 0, 300]
    a, x = operand(form[0], 1, sum(counts), k, seed=1)
    b, w = operand(form[1], len(counts), n, k, seed=2)
    offsets = offsets_of(counts)
    got = gemm(a, b, offsets, n, transposed=form[1] == "transposed")
    for group, rows in enumerate(torch.split(got, counts)):
        start = int(offsets[group])
        assert_product(rows, x[0, start : start + counts[group]], w[group], (form, group))


def test_depth_that_only_bf16_may_have():
    """K that is a multiple of 8, not of 16: half a block read from beyond the row."""
    x, w = normal(100, 24, seed=1), normal(72, 24, seed=2)
    assert_product(gemm(x, w, offsets_of([100]), 72), x, w, "K=24")
    got = gemm(x, w.t().contiguous(), offsets_of([100]), 72, transposed=True)
    assert_product(got, x, w, "K=24 transposed")


def test_every_code_under_every_scale():
    """One of 16 x 256 decoded values off, NaN scales included."""
    every = torch.arange(256, dtype=torch.uint8, device="cuda")
    scales = every[:, None].view(torch.float8_e4m3fn)
    # (codes 0..15) x identity gives each decoded value alone.
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    packed = (codes.cuda().expand(256, 8).contiguous(), scales)
    identity = torch.eye(16, device="cuda").bfloat16()
    got = gemm(packed, identity, offsets_of([256]), 16)
    want = decoded(*packed).float()
    nan = want.isnan().any(dim=1)
    assert nan.nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert bool(got[nan].isnan().all())
    assert_same_bits(got[~nan] + 0.0, want[~nan] + 0.0, "values")  # a sum has no -0
    got = gemm(identity, packed, offsets_of([16]), 256).t().contiguous()
    assert_same_bits(got[~nan] + 0.0, want[~nan] + 0.0, "values of b")


@pytest.mark.parametrize("out_dtype", [BF16, FP32])
@pytest.mark.parametrize("scales", ["none", "row", "group", "row*group", "one*one", "row*col"])
@pytest.mark.parametrize("bias", [None, BF16, FP32])
def test_epilogue(out_dtype, scales, bias):
    """Factors applied one after the other, an FMA with the bias, or more than one rounding."""
    counts, n, k = [60, 0, 140], 136, 64
    x, w = normal(200, k, seed=1), normal(3 * n, k, seed=2)
    options = {}
    if scales.startswith(("row", "one")):
        options["row_scale"] = factor(1 if scales == "one*one" else 200, 3)
    if scales.endswith(("group", "*one")):
        options["group_scale"] = factor(1 if scales == "one*one" else 3, 4)
    if scales.endswith("col"):
        options["col_scale"] = factor(3 * n, 5)
    if bias:
        options["bias"] = normal(3, n, seed=6).to(bias)
    offsets = offsets_of(counts)
    got = gemm(x, w, offsets, n, out_dtype=out_dtype, **options)
    want = gemm(x, w, offsets, n)
    group = torch.repeat_interleave(torch.arange(3), torch.tensor(counts)).cuda()
    total = None
    if "row_scale" in options:
        total = options["row_scale"].expand(200)[:, None].expand(200, n)
    if "group_scale" in options:
        second = options["group_scale"].expand(3)[group][:, None].expand(200, n)
        total = second if total is None else total * second
    if "col_scale" in options:
        second = options["col_scale"].view(3, n)[group]
        total = second if total is None else total * second
    want = want if total is None else want * total
    want = want if bias is None else want + options["bias"].float()[group]
    assert_same_bits(got, want.to(out_dtype), (out_dtype, scales, bias))


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 15, 127, 128, 129, 260]), min_size=1, max_size=9),
    padding=st.sampled_from([0, 1, 200]),
    wide=st.booleans(),
    accumulate=st.booleans(),
)
def test_any_groups(counts, padding, wide, accumulate):
    """A tile that crosses a boundary, an empty group, padding that holds NaN and must not count."""
    n, k, rows = 136, 64, sum(counts)
    x, dy = normal(rows + padding, k, seed=1), normal(rows + padding, n, seed=2)
    x[rows:], dy[rows:] = NAN, float("inf")
    w = normal(len(counts), n, k, seed=3)
    offsets = offsets_of(counts, torch.int64 if wide else torch.int32)
    y = gemm(x, w.view(-1, k), offsets, n)
    assert not y[rows:].any(), "rows behind the last group are not zeros"
    start = normal(len(counts), n, k, seed=4).float()
    grads = wgrad(dy, x, offsets, start.clone(), accumulate=accumulate)
    ends = offsets.tolist()
    for group, (begin, end) in enumerate(itertools.pairwise(ends)):
        assert_product(y[begin:end], x[begin:end], w[group], (counts, group))
        want = product(dy[begin:end].t().contiguous(), x[begin:end].t().contiguous())
        if torch.cuda.get_device_capability() == (9, 0):
            want = want + start[group] if accumulate else want
            assert_same_bits(grads[group], want, (counts, group, "wgrad"))
        elif begin == end:
            assert_same_bits(grads[group], start[group] if accumulate else want, (counts, group))


def test_many_groups():
    """The scan over group sizes beyond one warp's, and the most groups there may be."""
    counts = [(7 * g) % 5 for g in range(1024)]
    x, w = normal(sum(counts), 32, seed=1), normal(1024 * 8, 32, seed=2)
    got = gemm(x, w, offsets_of(counts), 8)
    group = torch.repeat_interleave(torch.arange(1024), torch.tensor(counts)).cuda()
    dy, out = normal(sum(counts), 8, seed=3), torch.full((1024, 8, 32), NAN, device="cuda")
    wgrad(dy, x, offsets_of(counts), out)
    assert not got.isnan().any()
    assert not out.isnan().any()
    for g in (0, 1, 31, 32, 33, 511, 1022, 1023):
        rows = group == g
        assert_product(got[rows], x[rows], w.view(1024, 8, 32)[g], g)
        assert_product(out[g], dy[rows].t().contiguous(), x[rows].t().contiguous(), g)


def test_rows_depend_on_themselves_alone():
    """Bits that change with the batch, the grouping or the launch, or NaN from a neighbour row."""
    x, w = normal(400, 256, seed=1), normal(136, 256, seed=2)
    whole = gemm(x, w, offsets_of([400]), 136)
    for first, count in ((0, 1), (17, 1), (100, 129), (399, 1)):
        part = gemm(x[first : first + count].contiguous(), w, offsets_of([count]), 136)
        assert_same_bits(part, whole[first : first + count], (first, count))
    cut = gemm(x, w.repeat(3, 1), offsets_of([5, 0, 395]), 136)
    assert_same_bits(cut, whole, "three groups")
    x[33], x[170, 3] = NAN, float("inf")
    clean = torch.ones(400, dtype=torch.bool)
    clean[[33, 170]] = False
    again = gemm(x, w, offsets_of([400]), 136)
    assert_same_bits(again[clean], whole[clean], "beside NaN")
    assert bool(again[33].isnan().all())
    assert not again[170].isfinite().any()


@pytest.mark.parametrize("out_dtype", [BF16, FP32])
@pytest.mark.parametrize("token_major", [True, False])
@pytest.mark.parametrize("accumulate", [True, False])
def test_wgrad(out_dtype, token_major, accumulate):
    """The next group's rows in a sum, old values rounded away, an empty group not left or zeroed."""
    counts = [32, 0, 16, 144, 0] if not token_major else [33, 0, 1, 145, 0]
    rows, n, k = sum(counts), 136, 264
    dy, x, scale = normal(rows, n, seed=1), normal(rows, k, seed=2), factor(5, 3)
    dy[counts[0]] = NAN  # the first row of the second group that has any
    offsets = offsets_of(counts)
    old = normal(5, n, k, seed=4).to(out_dtype)
    out = list(old.clone() if accumulate else torch.full_like(old, NAN))
    a, b = (dy, x) if token_major else (dy.t().contiguous(), x.t().contiguous())
    wgrad(a, b, offsets, out, token_major=token_major, group_scale=scale, accumulate=accumulate)
    begin = 0
    for group, count in enumerate(counts):
        part = slice(begin, begin + count)
        begin += count
        sums = torch.full((n, k), NAN, device="cuda")
        one = offsets_of([count])
        wgrad(dy[part].contiguous(), x[part].contiguous(), one, [sums])
        if group != 2:
            assert_product(sums, dy[part].t().contiguous(), x[part].t().contiguous(), group)
        want = sums * scale[group] + old[group].float() if accumulate else sums * scale[group]
        if count == 0:
            want = old[group].float() if accumulate else torch.zeros_like(sums)
        assert bool(want.isnan().all()) == (group == 2)
        if group == 2:
            assert bool(out[group].isnan().all())
        else:
            assert_same_bits(out[group], want.to(out_dtype), (group, counts))


@pytest.mark.parametrize("rows", [0, 5])
def test_empty_products(rows):
    """No rows, no depth: an output that nobody wrote."""
    w = normal(2 * 16, 0 if rows else 32, seed=1)
    got = gemm(normal(rows, w.shape[1], seed=2), w, offsets_of([rows, 0]), 16)
    assert got.shape == (rows, 16)
    assert not got.any()
    out = torch.full((2, 16, 8), NAN, device="cuda")
    wgrad(normal(0, 16, seed=3), normal(0, 8, seed=4), offsets_of([0, 0]), out)
    assert not out.any()


def test_any_strides_and_addresses():
    """Memory read as if contiguous, or from an address that 16-byte copies cannot take."""
    x, w = normal(64, 48, seed=1), normal(40, 48, seed=2)
    want = gemm(x, w, offsets_of([64]), 40)
    shifted = torch.empty(64 * 48 + 1, dtype=BF16, device="cuda")[1:].view(64, 48).copy_(x)
    assert_same_bits(gemm(shifted, w, offsets_of([64]), 40), want, "address")
    strided = x.t().contiguous().t()
    assert_same_bits(gemm(strided, w, offsets_of([64]), 40), want, "strides")


def test_graph_follows_offsets():
    """A host synchronisation, which capture forbids, or offsets frozen at capture."""
    x, w, dy = normal(300, 64, seed=1), normal(3 * 24, 64, seed=2), normal(300, 24, seed=3)
    offsets, out = offsets_of([100, 100, 100]), torch.zeros(3, 24, 64, device="cuda")
    scale = factor(300, 4)

    def step() -> Tensor:
        wgrad(dy, x, offsets, out)
        return gemm(x, w, offsets, 24, row_scale=scale, out_dtype=BF16)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for counts in ([300, 0, 0], [1, 200, 50]):
        offsets.copy_(offsets_of(counts))
        graph.replay()
        got = (y.clone(), out.clone())
        want = step()
        assert_same_bits(got[0], want, counts)
        assert_same_bits(got[1], out, counts)


def test_refusals_name_the_thing_its_value_and_the_remedy():
    """A shape the kernel cannot read, taken in silence."""
    x, w, offsets = normal(16, 32, seed=1), normal(16, 32, seed=2), offsets_of([16])
    packed = nvfp4(16, 32, 3)
    cases = {
        "K=20 is not a multiple of 8": lambda: gemm(x[:, :20], w[:, :20], offsets, 16),
        "N=12 is not a multiple of 8": lambda: gemm(x, w[:12], offsets, 12),
        r"b is \(16, 32\); give \(16, 16\)": lambda: gemm(x[:, :16], w, offsets, 16),
        "give the codes of b's transpose": lambda: gemm(x, packed, offsets, 32, transposed=True),
        "row_scale is Float": lambda: gemm(x, w, offsets, 16, row_scale=factor(3, 1)),
        "multiply them into col_scale": lambda: gemm(
            x, w, offsets, 16, group_scale=factor(1, 1), col_scale=factor(16, 1)
        ),
        "offsets are Double": lambda: gemm(x, w, offsets.double(), 16),
        "G=1025 groups; give 1 to 1024": lambda: gemm(
            x, normal(1025 * 8, 32, seed=1), offsets_of([0] * 1025), 8
        ),
        "a is Float": lambda: gemm(x.float(), w, offsets, 16),
        "out holds 0 tensors": lambda: wgrad(x, x, offsets, []),
        "give contiguous": lambda: wgrad(x, x, offsets, [torch.zeros(32, 16, device="cuda")]),
    }
    for text, call in cases.items():
        with pytest.raises(ValueError, match=text):
            call()
