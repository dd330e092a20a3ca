"""The Hopper GEMM on 4-bit weights, bit for bit: every tile, every activation, every split of rows."""

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_nvfp4.backends import extension
from megatron_nvfp4.backends.extension import why_not_cuda

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _why_not() -> str | None:
    if reason := why_not_cuda():
        return f"cuda: {reason}"
    capability = torch.cuda.get_device_capability()
    return None if capability == (9, 0) else f"needs compute capability 9.0, not {capability}"


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_why_not() is not None, reason=str(_why_not())),
]
CONFIGS = (-1, 0, 1, 2, 3, 4)
DENSE = (5, 6, 7, 8, 9, 10)  # of one group alone: a CTA a tile
# Whole tiles; ragged groups; features and K that fill no chunk of 64; one short group; one long.
CASES = (
    (1536, 768, (40, 0, 17, 300, 131)),
    (2048, 2048, (16, 0, 0, 48)),
    (136, 80, (1, 5, 0)),
    (64, 16, (33,)),
    (200, 1040, (0, 0, 129, 0)),
    (6144, 512, (250,)),
    (72, 208, tuple((7 * i * i + 3 * i) % 40 for i in range(70))),
)
# As CASES, of one group; tiles that end inside a quarter, a half and a whole of their width.
ONE_GROUP = (
    (64, 16, (33,)),
    (136, 80, (5,)),
    (200, 1040, (129,)),
    (6144, 512, (250,)),
    (1536, 144, (300,)),
    (2048, 768, (16,)),
    (192, 2048, (70,)),
)
every_config = pytest.mark.parametrize("config", CONFIGS)
every_dense = pytest.mark.parametrize("config", [-1, *DENSE])
one_group = pytest.mark.parametrize("case", ONE_GROUP, ids=lambda c: f"{c[0]}x{c[1]}x{c[2][0]}")
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}x{case[1]}")


def ops():
    extension.load()
    return torch.ops.megatron_nvfp4


def operand(num_rows: int, k: int, seed: int, low: int = 0, high: int = 0x7F):
    """Random codes and block scales, scale bytes from low to high (0x7F, NaN, excluded)."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    options = {"dtype": torch.uint8, "device": "cuda", "generator": g}
    codes = torch.randint(0, 256, (num_rows, k // 2), **options)
    scales = torch.randint(low, high, (num_rows, k // 16), **options)
    return codes, scales.view(torch.float8_e4m3fn)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """q * s_b in FP32, by a table."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)
    table = torch.cat([table, -table])
    q = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1).flatten(-2)
    blocks = q.view(len(codes), -1, 16) * scales.float()[..., None]
    return blocks.view(len(codes), -1)


def offsets_of(rows, dtype=torch.int64) -> Tensor:
    return torch.tensor([0, *rows], device="cuda").cumsum(0).to(dtype)


def expected(x: Tensor, w: Tensor, rows, row_scale=None, group_scale=None, bias=None) -> Tensor:
    """cuBLAS on BF16 operands with FP32 sums, then one rounding an operation, FP32."""
    out = torch.zeros(len(x), w.shape[1], device=x.device)
    start = 0
    for group, count in enumerate(rows):
        part = slice(start, start + count)
        if count:
            y = torch.mm(x[part].to(BF16), w[group].to(BF16).t(), out_dtype=FP32)
            if row_scale is not None:
                y = y * (row_scale[part, None] * group_scale[group])
            out[part] = y if bias is None else y + bias[group].float()
        start += count
    return out


def assert_bits(got: Tensor, reference: Tensor, what: str = "") -> None:
    assert got.shape == reference.shape
    assert got.dtype == reference.dtype
    size = torch.int32 if got.dtype == FP32 else torch.int16
    wrong = (got.view(size) != reference.view(size)).nonzero()
    assert not len(wrong), (
        f"{what}: {len(wrong)} of {got.numel()} differ, first {wrong[0].tolist()}"
    )


def gemm(x, packed, rows, n, *, scales=None, row_scale=None, group_scale=None, bias=None, index=None,
         out_dtype=FP32, config=-1, offsets=None):  # fmt: skip
    offsets = offsets_of(rows) if offsets is None else offsets
    return ops().grouped_gemm_w4(
        x, scales, packed, offsets, n, row_scale, group_scale, bias, index, out_dtype, config
    )


@functools.cache
def problem(case, low: int = 0, high: int = 0x7F):
    n, k, rows = case
    codes, scales = operand(len(rows) * n, k, 1, low, high)
    x = operand(sum(rows), k, 2, low, high)
    packed = ops().pack_weights_nvfp4(codes, scales, len(rows), False)
    return x, decode(*x), decode(codes, scales).view(len(rows), n, k), packed


def epilogue(case):
    n, _, rows = case
    g = torch.Generator(device="cuda").manual_seed(3)
    rand = functools.partial(torch.rand, device="cuda", generator=g)
    return rand(sum(rows)) + 0.5, rand(len(rows)) + 0.5, (rand(len(rows), n) * 100).to(BF16)


def test_the_table_here_is_the_definition():
    """An oracle that repeats a mistake of the kernels, or makes its own."""
    codes, scales = operand(64, 256, 5)
    reference = ops().decode_nvfp4(codes, scales).cpu()
    assert torch.equal(decode(codes, scales).cpu(), reference.float())


@every_case
def test_packing_is_undone_exactly(case):
    """A nibble, a scale or a padded row that the order of fragments loses or moves."""
    n, k, rows = case
    codes, scales = operand(len(rows) * n, k, 1, 0, 256)
    packed = ops().pack_weights_nvfp4(codes, scales, len(rows), False)
    got = ops().unpack_weights_nvfp4(packed, len(rows) * n, k)
    assert torch.equal(got[0], codes)
    assert torch.equal(got[1].view(torch.uint8), scales.view(torch.uint8))


def test_reversed_packing_mirrors_the_groups():
    """Parameters that lie in memory backwards, packed for the wrong expert."""
    codes, scales = operand(5 * 72, 208, 1)
    plain = ops().pack_weights_nvfp4(codes, scales, 5, False)
    assert torch.equal(ops().pack_weights_nvfp4(codes, scales, 5, True), plain.flip(0))


@pytest.mark.parametrize("config", [*CONFIGS, *DENSE])
def test_every_code_under_every_scale(config):
    """A code or a scale (subnormal ones too) that the decoders of weights or activations get wrong:
    the other operand is a unit matrix, so that outputs are the decoded values."""
    k, n = 256, 128
    pairs = torch.arange(256, dtype=torch.uint8, device="cuda").view(16, 16).repeat(8, 1)
    codes = pairs.flatten().repeat(n).view(-1)[: n * k // 2].view(n, k // 2)
    scales = torch.arange(n, device="cuda").clamp(max=126).to(torch.uint8)[:, None]
    scales = scales.expand(n, k // 16).contiguous().view(torch.float8_e4m3fn)
    values = decode(codes, scales)
    packed = ops().pack_weights_nvfp4(codes, scales, 1, False)
    unit = torch.eye(k, dtype=FP16, device="cuda")
    got = gemm(unit, packed, (k,), n, config=config)
    assert torch.equal(got, values.t() + 0.0)
    got = gemm(unit.to(BF16), packed, (k,), n, config=config)
    assert torch.equal(got, values.t() + 0.0)
    one = torch.full((k, k // 2), 0, dtype=torch.uint8, device="cuda")
    rows = torch.arange(k, device="cuda")
    one[rows, rows // 2] = torch.where(rows % 2 == 0, 2, 32).to(torch.uint8)  # code 2 is 1.0
    ones = torch.ones(k, k // 16, device="cuda").to(torch.float8_e4m3fn)
    unit_packed = ops().pack_weights_nvfp4(one, ones, 1, False)
    got = gemm(codes, unit_packed, (n,), k, scales=scales, config=config)
    assert torch.equal(got, values + 0.0)


@every_config
@every_case
@pytest.mark.parametrize("scale_bytes", [(0, 0x7F), (0x60, 0x7F), (0, 0x20)], ids=str)
def test_bits_of_packed_activations(case, config, scale_bytes):
    """A sum in another order, a rounding too many, a tile whose bits differ from another's."""
    n, _, rows = case
    (codes, scales), x, w, packed = problem(case, *scale_bytes)
    row_scale, group_scale, bias = epilogue(case)
    assert_bits(gemm(codes, packed, rows, n, scales=scales, config=config), expected(x, w, rows))
    got = gemm(
        codes, packed, rows, n, scales=scales, config=config, row_scale=row_scale,
        group_scale=group_scale, bias=bias, out_dtype=BF16, offsets=offsets_of(rows, torch.int32),
    )  # fmt: skip
    assert_bits(got, expected(x, w, rows, row_scale, group_scale, bias).to(BF16), "epilogue")


@every_config
@every_case
def test_bits_of_decoded_and_of_bf16_activations(case, config):
    """FP16 operands that change bits; a BF16 activation beyond FP16 that overflows or is flushed."""
    n, _, rows = case
    _, x, w, packed = problem(case)
    assert_bits(gemm(x.to(FP16), packed, rows, n, config=config), expected(x, w, rows), "fp16")
    for factor in (1e9, 1e-9):
        wide = (torch.randn(x.shape, device="cuda") * factor).to(BF16)
        assert_bits(gemm(wide, packed, rows, n, config=config), expected(wide, w, rows), "bf16")


@every_case
def test_unscaled_bits_are_torchs(case):
    """Bits that agree with cuBLAS alone."""
    n, _, rows = case
    (codes, scales), x, w, packed = problem(case)
    got = gemm(codes, packed, rows, n, scales=scales, out_dtype=BF16)
    weights = w.to(BF16).transpose(-2, -1)
    reference = torch._grouped_mm(x.to(BF16), weights, offs=offsets_of(rows, torch.int32)[1:])
    assert_bits(got, reference)


@every_config
@every_case
def test_row_index_equals_gathering_first(case, config):
    """A row's codes, scales or outer scale taken from the wrong row."""
    n, _, rows = case
    (codes, scales), x, w, packed = problem(case)
    row_scale, group_scale, _ = epilogue(case)
    index = torch.randint(0, len(x), (len(x),), device="cuda")
    reference = expected(x[index], w, rows, row_scale[index], group_scale)
    common = {"row_scale": row_scale, "group_scale": group_scale, "config": config}
    for i in (index, index.int()):
        got = gemm(codes, packed, rows, n, scales=scales, index=i, **common)
        assert_bits(got, reference, str(i.dtype))
    assert_bits(gemm(x.to(FP16), packed, rows, n, index=index, **common), reference, "fp16")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, 200), min_size=1, max_size=40), st.sampled_from(CONFIGS))
def test_any_split_of_rows(rows, config):
    """A boundary, an empty group or an order of groups that sends a row to the wrong weights."""
    n, k = 72, 144
    if not sum(rows):
        rows[0] = 1
    codes, scales = operand(len(rows) * n, k, 1)
    xc, xs = operand(sum(rows), k, 2)
    packed = ops().pack_weights_nvfp4(codes, scales, len(rows), False)
    got = gemm(xc, packed, rows, n, scales=xs, config=config)
    assert_bits(got, expected(decode(xc, xs), decode(codes, scales).view(-1, n, k), rows))


@pytest.mark.parametrize("config", [*CONFIGS, *DENSE])
@pytest.mark.parametrize("num_rows", [17, 40, 72, 513, 4096])
def test_one_group_in_tiles_of_any_size(num_rows, config):
    """Tiles chosen to fill the GPU: rows lost or repeated where they are no multiple of 16."""
    n, k = (6144, 64) if num_rows == 4096 else (1536, 144)
    codes, scales = operand(n, k, 1)
    packed = ops().pack_weights_nvfp4(codes, scales, 1, False)
    xc, xs = operand(num_rows, k, 2)
    row_scale, one = torch.rand(num_rows, device="cuda") + 0.5, torch.ones(1, device="cuda")
    got = gemm(
        xc, packed, (num_rows,), n, scales=xs, config=config, row_scale=row_scale,
        group_scale=one, out_dtype=BF16,
    )  # fmt: skip
    x, w = decode(xc, xs), decode(codes, scales)[None]
    assert_bits(got, expected(x, w, (num_rows,), row_scale, one).to(BF16))


@every_dense
@one_group
@pytest.mark.parametrize("scale_bytes", [(0, 0x7F), (0x60, 0x7F), (0, 0x20)], ids=str)
def test_bits_of_one_group(case, config, scale_bytes):
    """Another order of K in a stage, weights behind the end of K, a tile of features or rows that
    two CTAs compute or none, a scale or bias of the wrong tile."""
    n, _, rows = case
    (codes, scales), x, w, packed = problem(case, *scale_bytes)
    row_scale, group_scale, bias = epilogue(case)
    assert_bits(gemm(codes, packed, rows, n, scales=scales, config=config), expected(x, w, rows))
    got = gemm(
        codes, packed, rows, n, scales=scales, config=config, row_scale=row_scale,
        group_scale=group_scale, bias=bias, out_dtype=BF16, offsets=offsets_of(rows, torch.int32),
    )  # fmt: skip
    assert_bits(got, expected(x, w, rows, row_scale, group_scale, bias).to(BF16), "epilogue")
    index = torch.randint(0, len(x), (len(x),), device="cuda")
    got = gemm(
        codes, packed, rows, n, scales=scales, index=index, row_scale=row_scale,
        group_scale=group_scale, config=config,
    )  # fmt: skip
    assert_bits(got, expected(x[index], w, rows, row_scale[index], group_scale), "row_index")
    if scale_bytes == (0, 0x7F):
        assert_bits(gemm(x.to(FP16), packed, rows, n, config=config), expected(x, w, rows), "fp16")
        wide = (torch.randn(x.shape, device="cuda") * 1e9).to(BF16)
        assert_bits(gemm(wide, packed, rows, n, config=config), expected(wide, w, rows), "bf16")


@every_dense
@pytest.mark.parametrize("end", [0, 1, 16, 77, 150])
def test_one_group_ends_where_its_offset_says(end, config):
    """Padding rows, whatever they hold, that reach the output or their neighbours."""
    n, k = 136, 208
    codes, scales = operand(n, k, 1)
    packed = ops().pack_weights_nvfp4(codes, scales, 1, False)
    x = torch.randn(150, k, device="cuda").to(BF16)
    reference = expected(x[:end], decode(codes, scales)[None], (end,))
    x[end:] = float("nan")
    bias = torch.randn(1, n, device="cuda")
    for out_dtype in (FP32, BF16):
        torch.full((150, n), float("nan"), dtype=out_dtype, device="cuda")  # what the output gets
        got = gemm(x, packed, (end,), n, bias=bias, out_dtype=out_dtype, config=config)
        assert not got[end:].any()
        assert_bits(got[:end], (reference + bias).to(out_dtype), str(out_dtype))


@every_dense
def test_a_graph_replays_calls_that_follow_each_other(config):
    """Kernels that start beside the one before: activations decoded into memory still read, weights
    or an offset taken before they are written."""
    n, k, num_rows = 1536, 512, 100
    x = [operand(num_rows, k, seed) for seed in (1, 2, 3)]
    w = [operand(n, k, seed) for seed in (4, 5, 6)]
    offsets = offsets_of((num_rows,))
    buffer = torch.empty_like(ops().pack_weights_nvfp4(*w[0], 1, False))
    packed = [ops().pack_weights_nvfp4(*each, 1, False) for each in w]

    def run():
        results = []
        for (codes, scales), weights in zip(x, packed, strict=True):
            buffer.copy_(weights)  # in the same memory each time
            results.append(
                gemm(codes, buffer, None, n, scales=scales, offsets=offsets, config=config)
            )
        return results

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for end in (num_rows, 40):
        offsets.copy_(offsets_of((end,)))
        for _ in range(20):
            graph.replay()
        for got, activations, weights in zip(out, x, w, strict=True):
            reference = expected(decode(*activations), decode(*weights)[None], (end,))
            assert_bits(got, reference, str(end))


@every_config
@pytest.mark.parametrize("first_row", [1, 2, 3, 5])
def test_row_scales_from_any_row_on(first_row, config):
    """Row scales are copied in 16-byte units: those of a tile that starts or ends inside one."""
    n, k, rows = 136, 80, (first_row, 30, 1)
    codes, scales = operand(3 * n, k, 1)
    packed = ops().pack_weights_nvfp4(codes, scales, 3, False)
    xc, xs = operand(sum(rows), k, 2)
    row_scale, group_scale = torch.rand(2, sum(rows), device="cuda").add(0.5).unbind()
    args = {"row_scale": row_scale, "group_scale": group_scale[:3].contiguous()}
    got = gemm(xc, packed, rows, n, scales=xs, config=config, **args)
    w = decode(codes, scales).view(3, n, k)
    assert_bits(got, expected(decode(xc, xs), w, rows, row_scale, group_scale))


@every_config
@pytest.mark.parametrize("num_groups", [33, 128, 1024])
def test_many_groups(num_groups, config):
    """More groups than a warp has lanes, or than the tables have room for; all rows in the last."""
    n, k = 64, 64
    codes, scales = operand(num_groups * n, k, 1)
    packed = ops().pack_weights_nvfp4(codes, scales, num_groups, False)
    w = decode(codes, scales).view(-1, n, k)
    for rows in ([3] * num_groups, [0] * (num_groups - 1) + [500], [500] + [0] * (num_groups - 1)):
        xc, xs = operand(sum(rows), k, 2)
        got = gemm(xc, packed, rows, n, scales=xs, config=config)
        assert_bits(got, expected(decode(xc, xs), w, rows))


@every_config
def test_rows_past_the_last_offset_are_zero(config):
    """Padding rows of a buffer that hold what lay in memory."""
    n, k, rows = 136, 80, (5, 0, 11)
    codes, scales = operand(3 * n, k, 1)
    packed = ops().pack_weights_nvfp4(codes, scales, 3, False)
    xc, xs = operand(50, k, 2)
    for out_dtype in (FP32, BF16):
        # Its memory is what the output gets.
        torch.full((50, n), float("nan"), dtype=out_dtype, device="cuda")
        got = gemm(xc, packed, rows, n, scales=xs, out_dtype=out_dtype, config=config)
        assert not got[16:].any()
        assert got[:16].any()


@every_config
def test_a_row_depends_on_itself_and_its_group_alone(config):
    """NaN or Inf of a neighbour, of another group or of padding that leaks; bits that depend on the
    batch."""
    n, k = 136, 144
    codes, scales = operand(2 * n, k, 1)
    packed = ops().pack_weights_nvfp4(codes, scales, 2, False)
    x = torch.randn(40, k, device="cuda").to(BF16)
    reference = gemm(x, packed, (20, 20), n, config=config)
    poisoned = x.clone()
    poisoned[7], poisoned[20], poisoned[39] = float("nan"), float("inf"), -float("inf")
    got = gemm(poisoned, packed, (20, 20), n, config=config)
    clean = torch.ones(40, dtype=torch.bool, device="cuda")
    clean[[7, 20, 39]] = False
    assert_bits(got[clean], reference[clean], "neighbours")
    assert not got[~clean].isfinite().all(1).any()
    assert_bits(gemm(x[3:4], packed, (1, 0), n, config=config), reference[3:4], "alone")
    # The second group's rows, now first of a larger batch.
    again = gemm(torch.cat([x[:1], x[20:], x]), packed, (1, 60), n, config=config)
    assert_bits(again[1:21], reference[20:], "another batch")


def test_extreme_scales():
    """A product of scales that overflows because a factor of the decoding was folded into it."""
    n, k = 64, 64
    codes, scales = operand(n, k, 1, 0, 0x20)
    xc, xs = operand(40, k, 2, 0, 0x20)
    packed = ops().pack_weights_nvfp4(codes, scales, 1, False)
    row_scale = torch.logspace(-38, 38, 40, device="cuda")
    group_scale = torch.ones(1, device="cuda")
    got = gemm(xc, packed, (40,), n, scales=xs, row_scale=row_scale, group_scale=group_scale)
    reference = expected(decode(xc, xs), decode(codes, scales)[None], (40,), row_scale, group_scale)
    assert_bits(got, reference)


def test_one_scale_for_all_and_a_missing_one():
    """A (1,) scale read beyond its end; a missing scale taken for something else than absent."""
    case = CASES[0]
    n, _, rows = case
    (codes, scales), x, w, packed = problem(case)
    row_scale, group_scale, _ = epilogue(case)
    one, ones = row_scale[:1], torch.ones_like(group_scale)
    got = gemm(codes, packed, rows, n, scales=scales, row_scale=one, group_scale=group_scale[:1])
    everywhere = group_scale[:1].expand(len(rows)).contiguous()
    assert_bits(got, expected(x, w, rows, one.expand(len(x)), everywhere), "one")
    got = gemm(codes, packed, rows, n, scales=scales, row_scale=row_scale)
    assert_bits(got, expected(x, w, rows, row_scale, ones), "rows")
    got = gemm(codes, packed, rows, n, scales=scales, group_scale=group_scale)
    assert_bits(got, expected(x, w, rows, torch.ones_like(row_scale), group_scale), "groups")


def test_a_graph_replays_new_boundaries():
    """Boundaries read on the host, or work left behind in a counter: a replay would be stale."""
    case = CASES[0]
    n, _, rows = case
    (codes, scales), x, w, packed = problem(case)
    offsets = offsets_of(rows)
    run = functools.partial(gemm, codes, packed, rows, n, scales=scales, offsets=offsets)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for split in (rows, rows[::-1], (sum(rows), 0, 0, 0, 0)):
        offsets.copy_(offsets_of(split))
        out.fill_(float("nan"))
        graph.replay()
        assert_bits(out, expected(x, w, split), str(split))


def test_no_rows_and_views():
    """A launch of nothing; a stride or an unaligned start ignored."""
    case = CASES[0]
    n, k, rows = case
    (codes, scales), _, _, packed = problem(case)
    assert gemm(codes[:0], packed, (0,) * 5, n, scales=scales[:0]).shape == (0, n)
    wide = torch.cat([codes, codes], 1)
    reference = gemm(codes, packed, rows, n, scales=scales)
    assert_bits(gemm(wide[:, : k // 2], packed, rows, n, scales=scales), reference, "strides")
    shifted = torch.cat([codes.flatten()[:4], codes.flatten()])[4:].view(codes.shape)
    assert_bits(gemm(shifted, packed, rows, n, scales=scales), reference, "start")


def test_refusals():
    """A shape or type taken for what the kernel computes."""
    case = CASES[0]
    n, _, rows = case
    (codes, scales), _, _, packed = problem(case)
    with pytest.raises(ValueError, match="N=1530 is not a positive multiple of 8"):
        gemm(codes, packed, rows, 1530, scales=scales)
    with pytest.raises(ValueError, match="without x_scales"):
        gemm(codes, packed, rows, n)
    with pytest.raises(ValueError, match="give float8_e4m3fn"):
        gemm(codes, packed, rows, n, scales=scales[:, 1:])
    with pytest.raises(ValueError, match="give pack_weights_nvfp4 of 4 groups"):
        gemm(codes, packed, rows[1:], n, scales=scales)
    with pytest.raises(ValueError, match="row_scale"):
        gemm(codes, packed, rows, n, scales=scales, row_scale=torch.ones(3, device="cuda"))
    with pytest.raises(ValueError, match="give bfloat16 or float32"):
        gemm(codes, packed, rows, n, scales=scales, out_dtype=FP16)
    with pytest.raises(ValueError, match="config=9 for 5 groups"):
        gemm(codes, packed, rows, n, scales=scales, config=9)
    with pytest.raises(ValueError, match="num_groups=7"):
        ops().pack_weights_nvfp4(codes, scales, 7, False)
