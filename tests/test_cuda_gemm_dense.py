"""Hopper's BF16 grouped GEMM and weight gradient, bit for bit against torch's GEMMs, on poisoned outputs."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_nvfp4.backends.extension import why_not_cuda


def why_not_hopper() -> str | None:
    reason = why_not_cuda()
    if reason is None and torch.cuda.get_device_capability()[0] != 9:
        reason = "no Hopper GPU (compute capability 9.0)"
    return reason


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not_hopper() is not None, reason=f"cuda: {why_not_hopper()}"),
]
OPS = torch.ops.megatron_nvfp4
BF16, FP32 = torch.bfloat16, torch.float32
RAGGED = [40, 0, 17, 300, 131, 0, 1, 600]
# Rows a group, N, K: each tile size and what lies across its edges.
PROBLEMS = [
    (RAGGED, 512, 256),
    ([256, 500, 3], 1536, 2048),
    ([5, 0, 70], 8, 16),
    ([33, 16, 257, 0], 200, 72),
    ([16] * 40, 2048, 768),
    ([1], 136, 1544),
    ([0, 0, 1100, 0], 264, 520),
    ([24, 0, 700], 1152, 264),  # of the last pair of blocks one has no rows of the weight gradient
    ([256], 2048, 72),  # small tiles though the rows are many
    ([250], 5120, 264),  # half of a large tile
    ([130, 0, 129], 5000, 72),
    ([2000], 1288, 72),  # large tiles; not transposed, in pairs of blocks
    ([700, 3, 800, 0], 2568, 72),
    ([0, 0], 64, 64),
]
IDS = [f"{len(rows)}x{sum(rows)}x{n}x{k}" for rows, n, k in PROBLEMS]
hypothesis_settings = settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck)
)


def offsets_of(rows: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=dtype, device="cuda")


def groups_of(rows: list[int]):
    """(group, slice of its rows), empty groups left out."""
    start = 0
    for group, count in enumerate(rows):
        if count:
            yield group, slice(start, start + count)
        start += count


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def assert_bits(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, not {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)} != {tuple(expected.shape)}"
    integers = {BF16: torch.int16, FP32: torch.int32}[got.dtype]
    wrong = (got.view(integers) != expected.view(integers)).nonzero()
    assert not len(wrong), f"{what}: {len(wrong)} values differ, first at {wrong[0].tolist()}"


def gemm(x, weights, offsets, transposed=False, out_dtype=BF16, **scales):
    names = ("row_scale", "group_scale", "col_scale", "bias")
    assert set(scales) <= set(names)
    weights = weights if isinstance(weights, list) else [weights]
    optional = [scales.get(name) for name in names]
    return OPS.grouped_gemm_bf16(x, weights, transposed, offsets, *optional, out_dtype)


def gemm_ref(x, weights, rows, transposed=False):
    """cuBLAS's FP32 result of each group; NaN in rows of no group."""
    num_cols = weights.shape[2 if transposed else 1]
    out = torch.full((len(x), num_cols), float("nan"), device="cuda")
    for group, part in groups_of(rows):
        w = weights[group] if transposed else weights[group].t()
        out[part] = torch.mm(x[part], w, out_dtype=FP32)
    return out


def problem(rows, num_cols, depth, transposed, padding=0):
    shape = (depth, num_cols) if transposed else (num_cols, depth)
    return normal(sum(rows) + padding, depth), normal(len(rows), *shape)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "num_cols", "depth"), PROBLEMS, ids=IDS)
def test_gemm_has_the_bits_of_cublas(rows, num_cols, depth, transposed):
    """A tile, edge or empty group that reads or writes elsewhere, or sums in another order."""
    x, weights = problem(rows, num_cols, depth, transposed)
    expected = gemm_ref(x, weights, rows, transposed)
    for dtype in (torch.int64, torch.int32):
        offsets = offsets_of(rows, dtype)
        got = gemm(x, weights, offsets, transposed, FP32)
        assert_bits(got, expected, f"FP32 with {dtype} offsets")
        assert_bits(gemm(x, weights, offsets, transposed), expected.to(BF16), f"BF16, {dtype}")


@pytest.mark.parametrize("transposed", [False, True])
def test_gemm_has_the_bits_of_grouped_mm(transposed):
    """A model that changes its numbers when the experts move from torch's kernel to this one."""
    rows = [64, 0, 208, 16, 400, 144]
    x, weights = problem(rows, 2560, 1024, transposed)
    w = weights if transposed else weights.transpose(-2, -1)
    expected = torch._grouped_mm(x, w, offs=offsets_of(rows, torch.int32)[1:])
    assert_bits(gemm(x, weights, offsets_of(rows), transposed), expected, "grouped_mm")


@pytest.mark.parametrize("num_cols", [328, 2056])  # small tiles and large ones
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_epilogue_rounds_each_step_once(transposed, out_dtype, num_cols):
    """Scales multiplied one after the other, an FMA with the bias, or a rounding in between."""
    rows, depth = RAGGED, 256
    x, weights = problem(rows, num_cols, depth, transposed)
    num_rows, offsets = sum(rows), offsets_of(rows)
    acc = gemm_ref(x, weights, rows, transposed)
    group = torch.repeat_interleave(torch.tensor(rows, device="cuda"))
    row_scale = torch.rand(num_rows, device="cuda") + 0.5
    group_scale = torch.rand(len(rows), device="cuda") + 0.5
    col_scale = torch.rand(len(rows) * num_cols, device="cuda") + 0.5
    bias = normal(len(rows), num_cols, dtype=FP32)
    by_col = col_scale.view(-1, num_cols)[group]
    one = torch.tensor([0.7], device="cuda")
    cases = {
        "row and group": (
            {"row_scale": row_scale, "group_scale": group_scale},
            acc * (row_scale * group_scale[group])[:, None],
        ),
        "row and group and bias": (
            {"row_scale": row_scale, "group_scale": group_scale, "bias": bias},
            acc * (row_scale * group_scale[group])[:, None] + bias[group],
        ),
        "one row scale and one group scale": (
            {"row_scale": one, "group_scale": one + 1},
            acc * (one * (one + 1)),
        ),
        "row": ({"row_scale": row_scale}, acc * row_scale[:, None]),
        "group": ({"group_scale": group_scale}, acc * group_scale[group][:, None]),
        "row and column": (
            {"row_scale": row_scale, "col_scale": col_scale},
            acc * (row_scale[:, None] * by_col),
        ),
        "column and bias": ({"col_scale": col_scale, "bias": bias}, acc * by_col + bias[group]),
        "bias": ({"bias": bias}, acc + bias[group]),
        "BF16 bias": ({"bias": bias.to(BF16)}, acc + bias.to(BF16).float()[group]),
    }
    for name, (scales, expected) in cases.items():
        got = gemm(x, weights, offsets, transposed, out_dtype, **scales)
        assert_bits(got, expected.to(out_dtype), name)


@given(
    rows=st.lists(st.integers(0, 420) | st.just(0), min_size=1, max_size=9),
    num_cols=st.integers(1, 48).map(lambda n: 8 * n),
    depth=st.integers(1, 40).map(lambda k: 8 * k),
    transposed=st.booleans(),
    padding=st.integers(0, 40),
)
@hypothesis_settings
def test_gemm_of_any_groups(rows, num_cols, depth, transposed, padding):
    """A split of tokens over tiles that loses, repeats or moves a row."""
    x, weights = problem(rows, num_cols, depth, transposed, padding)
    expected = gemm_ref(x, weights, rows, transposed)
    got = gemm(x, weights, offsets_of(rows), transposed, FP32)
    count = sum(rows)
    assert_bits(got[:count], expected[:count], "rows of groups")


def test_rows_past_the_groups_are_left_alone():
    """Padding rows that take part, or a store that runs over into them from the last group."""
    rows, padding = [40, 21], 75
    x, weights = problem(rows, 128, 64, False, padding)
    x[sum(rows) :] = float("nan")
    offsets = offsets_of(rows)
    gemm(x, weights, offsets)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gemm(x, weights, offsets)
    got.fill_(7.0)  # the replay writes into this memory again
    graph.replay()
    assert_bits(got[: sum(rows)], gemm_ref(x, weights, rows)[: sum(rows)].to(BF16), "rows")
    assert (got[sum(rows) :] == 7.0).all()


def evenly_spaced(groups: int, shape: tuple[int, int], gap: int, reverse: bool):
    """Weights as views into one buffer, `gap` elements apart, first group last if reversed."""
    size = shape[0] * shape[1]
    buffer = normal(groups * (size + gap))
    parts = [buffer[i * (size + gap) :][:size].view(shape) for i in range(groups)]
    return parts[::-1] if reverse else parts


@pytest.mark.parametrize("transposed", [False, True])
def test_addresses_of_weights_do_not_matter(transposed):
    """Groups mirrored, or the padding between parameters read as weights, under an optimizer's layout."""
    rows, shape = [40, 0, 33, 300], (136, 136)
    x, offsets = normal(sum(rows), 136), offsets_of(rows)
    layouts = {
        "ascending": evenly_spaced(4, shape, 0, False),
        "descending": evenly_spaced(4, shape, 0, True),
        "descending with gaps": evenly_spaced(4, shape, 64, True),
        "gap no multiple of a row": evenly_spaced(4, shape, 8, False),
        "anywhere": [evenly_spaced(4, shape, 8, False)[i] for i in (2, 0, 3, 1)],
        "one for all": [normal(*shape)] * 4,
    }
    for name, weights in layouts.items():
        expected = gemm_ref(x, torch.stack(weights), rows, transposed).to(BF16)
        assert_bits(gemm(x, weights, offsets, transposed), expected, name)


@pytest.mark.parametrize("transposed", [False, True])
def test_row_bits_depend_on_the_row_alone(transposed):
    """A row that changes with its neighbours, its place in the batch or the split into groups."""
    rows = [7, 513, 100]
    x, weights = problem(rows, 256, 512, transposed)
    whole = gemm(x, weights, offsets_of(rows), transposed)
    for group, part in groups_of(rows):
        w = weights[group : group + 1].contiguous()
        alone = gemm(x[part].contiguous(), w, offsets_of([rows[group]]), transposed)
        assert_bits(alone, whole[part], f"group {group} alone")
        row = part.stop - 1
        one = gemm(x[row : row + 1].contiguous(), w, offsets_of([1]), transposed)
        assert_bits(one, whole[row : row + 1], f"last row of group {group} alone")
    same = weights[:1].expand_as(weights).contiguous()
    first = gemm(x, same, offsets_of(rows), transposed)
    assert_bits(gemm(x, same, offsets_of([0, 620, 0]), transposed), first, "regrouped")
    assert_bits(gemm(x, same, offsets_of(rows), transposed), first, "a second time")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_specials_stay_in_their_rows(bad):
    """A NaN that leaks through a padded tile into a row or a group that never saw it."""
    rows = [5, 18, 1, 40]
    for transposed in (False, True):
        x, weights = problem(rows, 72, 64, transposed)
        clean = gemm(x, weights, offsets_of(rows), transposed)
        x[[4, 22, 23]] = bad
        got = gemm(x, weights, offsets_of(rows), transposed)
        spared = [row for row in range(sum(rows)) if row not in (4, 22, 23)]
        assert_bits(got[spared], clean[spared], "other rows")
        assert not got[[4, 22, 23]].isfinite().any()


def wgrad(a, b, offsets, out, token_major=True, accumulate=False, group_scale=None):
    OPS.grouped_wgrad_bf16(a, b, token_major, offsets, group_scale, accumulate, out=out)
    return torch.stack(list(out))


def wgrad_ref(gradients, inputs, rows):
    out = torch.zeros(len(rows), gradients.shape[1], inputs.shape[1], device="cuda")
    for group, part in groups_of(rows):
        out[group] = torch.mm(gradients[part].t(), inputs[part], out_dtype=FP32)
    return out


def operands(gradients, inputs, token_major):
    if token_major:
        return gradients, inputs
    return gradients.t().contiguous(), inputs.t().contiguous()


def poisoned(groups, num_rows, num_cols, dtype):
    return list(torch.full((groups, num_rows, num_cols), float("nan"), device="cuda", dtype=dtype))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("token_major", [True, False])
@pytest.mark.parametrize(("rows", "num_rows", "num_cols"), PROBLEMS, ids=IDS)
def test_wgrad_has_the_bits_of_cublas(rows, num_rows, num_cols, token_major, dtype):
    """A token lost or counted twice at the end of a group; an empty group that keeps the poison."""
    if not token_major:
        rows = [-(-count // 16) * 16 for count in rows]
    gradients, inputs = normal(sum(rows), num_rows), normal(sum(rows), num_cols)
    a, b = operands(gradients, inputs, token_major)
    acc = wgrad_ref(gradients, inputs, rows)
    group_scale = torch.rand(len(rows), device="cuda") + 0.5
    scaled = acc * group_scale[:, None, None]
    out = poisoned(len(rows), num_rows, num_cols, dtype)
    offsets = offsets_of(rows)
    assert_bits(wgrad(a, b, offsets, out, token_major), acc.to(dtype), "written")
    old = normal(len(rows), num_rows, num_cols, dtype=dtype)
    got = wgrad(
        a, b, offsets_of(rows, torch.int32), list(old.clone()), token_major, True, group_scale
    )
    expected = (scaled + old.float()).to(dtype)
    for group, count in enumerate(rows):
        if count == 0:
            expected[group] = old[group]  # untouched, not old + 0: -0.0 keeps its sign
    assert_bits(got, expected, "accumulated")


def test_wgrad_has_the_bits_of_grouped_mm():
    """A model that changes its numbers when the gradient moves from torch's kernel to this one."""
    rows = [64, 16, 208, 400]
    gradients, inputs = normal(sum(rows), 256), normal(sum(rows), 512)
    expected = torch._grouped_mm(gradients.t(), inputs, offs=offsets_of(rows, torch.int32)[1:])
    out = poisoned(len(rows), 256, 512, BF16)
    assert_bits(wgrad(gradients, inputs, offsets_of(rows), out), expected, "grouped_mm")


@given(
    rows=st.lists(st.integers(0, 200) | st.just(0), min_size=1, max_size=9),
    num_rows=st.integers(1, 40).map(lambda n: 8 * n),
    num_cols=st.integers(1, 70).map(lambda k: 8 * k),
    dtype=st.sampled_from([BF16, FP32]),
    accumulate=st.booleans(),
)
@hypothesis_settings
def test_wgrad_of_any_groups(rows, num_rows, num_cols, dtype, accumulate):
    """Rows of the next group in a group's last step, or columns past the edge of a tile."""
    gradients, inputs = normal(sum(rows) + 3, num_rows), normal(sum(rows) + 3, num_cols)
    gradients[sum(rows) :] = float("nan")
    expected = wgrad_ref(gradients, inputs, rows)
    out = poisoned(len(rows), num_rows, num_cols, dtype)
    if accumulate:
        out = list(normal(len(rows), num_rows, num_cols, dtype=dtype))
        expected += torch.stack(out).float()
    got = wgrad(gradients, inputs, offsets_of(rows), out, accumulate=accumulate)
    assert_bits(got, expected.to(dtype), "wgrad")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["gradients", "inputs"])
def test_wgrad_keeps_specials_in_their_group(bad, where):
    """0 * Inf: a neighbour's special value that enters through the rows which fill up a step."""
    rows = [5, 18, 1, 40]
    gradients, inputs = normal(sum(rows), 136), normal(sum(rows), 264)
    clean = wgrad_ref(gradients, inputs, rows)
    for group, part in groups_of(rows):
        g, x = gradients.clone(), inputs.clone()
        {"gradients": g, "inputs": x}[where][part] = bad
        out = poisoned(len(rows), 136, 264, FP32)
        got = wgrad(g, x, offsets_of(rows), out)
        others = [i for i in range(len(rows)) if i != group]
        assert_bits(got[others], clean[others], f"groups beside {group}")
        assert not got[group].isfinite().any()


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
@pytest.mark.parametrize("gap", [0, 8, 136])
def test_wgrad_writes_to_any_addresses(dtype, order, gap):
    """Groups mirrored, or a store into the gaps: main gradients lie where the optimizer put them."""
    rows, size = [40, 0, 33, 300], 136 * 136
    gradients, inputs = normal(sum(rows), 136), normal(sum(rows), 136)
    expected = wgrad_ref(gradients, inputs, rows).to(dtype)
    buffer = torch.full((4 * (size + gap) + 32,), 7.0, device="cuda", dtype=dtype)
    out = [buffer[32 + i * (size + gap) :][:size].view(136, 136) for i in order]
    assert_bits(wgrad(gradients, inputs, offsets_of(rows), out), expected, "out")
    assert buffer[:32].eq(7).all()
    for i in range(4):
        assert buffer[32 + i * (size + gap) + size :][:gap].eq(7).all()


def test_wgrad_error_against_fp64():
    """Terms dropped or partial sums rounded to BF16 on the way: cuBLAS might share such a flaw.

    Each of the T products is exact in FP32. The tensor core keeps at least 2^-22 of its largest
    operand, so T/16 steps of 17 terms err by at most (T + T/16) 2^-22 sum|g x|; the rounding of the
    result adds 2^-24 of it.
    """
    count = 300
    gradients, inputs = normal(count, 64), normal(count, 128)
    got = wgrad(gradients, inputs, offsets_of([count]), poisoned(1, 64, 128, FP32))[0]
    g, x = gradients.double(), inputs.double()
    bound = (count * 17 / 16 * 2**-22 + 2**-24) * (g.abs().t() @ x.abs())
    error = (got.double() - g.t() @ x).abs()
    assert (error <= bound).all()
    assert error.norm() <= 1e-6 * (g.t() @ x).norm()


def test_no_tokens():
    """M = 0 is no tensor map; the gradients of a step without tokens are zeros, or stay."""
    x, offsets = normal(0, 64), offsets_of([0, 0])
    assert gemm(x, normal(2, 32, 64), offsets).shape == (0, 32)
    out = poisoned(2, 64, 64, FP32)
    assert wgrad(x, x, offsets, out).eq(0).all()
    kept = [t.fill_(3.0) for t in out]
    assert wgrad(x, x, offsets, kept, accumulate=True).eq(3).all()


def test_captured_in_a_graph():
    """A host synchronisation, or offsets read at capture instead of at replay."""
    rows, others = [40, 100, 3], [3, 0, 140]
    x, weights = problem(rows, 128, 64, False)
    offsets, out = offsets_of(rows), poisoned(3, 128, 64, FP32)
    gradients = normal(sum(rows), 128)
    gemm(x, weights, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gemm(x, weights, offsets)
        OPS.grouped_wgrad_bf16(gradients, x, True, offsets, None, False, out=out)
    for split in (rows, others):
        offsets.copy_(offsets_of(split))
        graph.replay()
        assert_bits(y, gemm_ref(x, weights, split).to(BF16), "y")
        assert_bits(torch.stack(out), wgrad_ref(gradients, x, split), "gradients")


def test_many_groups():
    """More groups than one warp counts at a time, and the argument space of 1024 outputs."""
    rows = torch.randint(0, 4, (1024,)).tolist()
    x, weights = problem(rows, 16, 24, True)
    expected = gemm_ref(x, weights, rows, True)
    assert_bits(gemm(x, weights, offsets_of(rows), True, FP32), expected, "gemm")
    gradients = normal(sum(rows), 16)
    out = poisoned(1024, 16, 24, FP32)
    assert_bits(wgrad(gradients, x, offsets_of(rows), out), wgrad_ref(gradients, x, rows), "wgrad")


@pytest.mark.parametrize("token_major", [True, False])
@pytest.mark.parametrize("groups", [256, 257, 1024])
def test_wgrad_of_many_groups(groups, token_major):
    """Row starts that run over the end of shared memory, where a smaller tile must be taken."""
    rows = (torch.randint(0, 7, (groups,)) * 16).tolist()
    gradients, inputs = normal(sum(rows), 264), normal(sum(rows), 72)
    a, b = operands(gradients, inputs, token_major)
    out = poisoned(groups, 264, 72, BF16)
    expected = wgrad_ref(gradients, inputs, rows).to(BF16)
    assert_bits(wgrad(a, b, offsets_of(rows), out, token_major), expected, "wgrad")
    out = poisoned(groups, 256, 72, BF16)
    got = wgrad(
        gradients[:, :256].contiguous() if token_major else a[:256],
        b,
        offsets_of(rows),
        out,
        token_major,
    )
    assert_bits(got, expected[:, :256], "wgrad in pairs of blocks")


def test_refusals():
    """A wrong operand that reaches the kernel instead of an error that names it."""
    x, weights, offsets = normal(32, 64), normal(2, 32, 64), offsets_of([16, 16])
    odd = normal(32, 68)
    wrong = {
        "x is": lambda: gemm(x.float(), weights, offsets),
        "x has strides": lambda: gemm(normal(64, 32).t(), weights, offsets),
        "weights have K=64": lambda: gemm(normal(32, 72), weights, offsets),
        "K=68 is not": lambda: gemm(odd, normal(2, 32, 68), offsets),
        "N=36 is not": lambda: gemm(x, normal(2, 36, 64), offsets),
        "2 weights for 3 groups": lambda: gemm(x, weights, offsets_of([16, 8, 8])),
        "offsets are": lambda: gemm(x, weights, offsets.float()),
        "row_scale is": lambda: gemm(x, weights, offsets, row_scale=x[0].float()),
        "bias is": lambda: gemm(x, weights, offsets, bias=x.float()),
        "out_dtype is": lambda: gemm(x, weights, offsets, out_dtype=torch.float16),
        "a has M=32, b has M=31": lambda: wgrad(x, x[:31], offsets, poisoned(2, 64, 64, FP32)),
        "out holds": lambda: wgrad(x, x, offsets, poisoned(2, 64, 32, FP32)),
        "one more than outputs": lambda: wgrad(x, x, offsets, poisoned(1, 64, 64, FP32)),
        "group_scale is": lambda: wgrad(
            x, x, offsets, poisoned(2, 64, 64, FP32), group_scale=x[0, :3].float()
        ),
        "N=68 is not": lambda: wgrad(odd, x, offsets, poisoned(2, 68, 64, FP32)),
    }
    for text, call in wrong.items():
        with pytest.raises(ValueError, match=text):
            call()
