"""What surrounds Blackwell's GEMM and runs on any GPU: scale layout, group table, epilogue arithmetic."""

import pytest
import torch
from blackwell_oracle import epilogue_ref, gemm_operands, group_plan_ref, swizzle_groups_ref

from megatron_nvfp4 import quant
from megatron_nvfp4.backends import blackwell
from megatron_nvfp4.backends.extension import why_not_cuda
from megatron_nvfp4.quant.layout import offsets_from_splits
from megatron_nvfp4.recipes import NVFP4Spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not_cuda() is not None, reason=f"cuda: {why_not_cuda()}"),
]
TOKEN, TENSOR = NVFP4Spec(outer="token"), NVFP4Spec()
SPLITS = [
    [1],
    [128],
    [129, 0, 1],
    [0, 0, 300],
    [7, 128, 256, 0, 31],
    [0] * 9,
    [3] * 40,
    [0, 1, 127] * 500,  # more groups than one round of the scan takes
]


def _scales(num_rows: int, num_blocks: int) -> torch.Tensor:
    """Bytes 1..251: none is 0, so that padding cannot be mistaken for a scale."""
    count = torch.arange(num_rows * num_blocks) % 251 + 1
    return count.to(torch.uint8).reshape(num_rows, num_blocks)


@pytest.mark.parametrize("splits", SPLITS, ids=lambda s: f"{len(s)}x{sum(s)}")
@pytest.mark.parametrize("num_blocks", [4, 5, 96, 130])
def test_scales_of_groups_lie_as_the_definition_says(splits, num_blocks):
    # Prevents: a group that begins inside a tile, padding that holds what was in memory before (a
    # NaN scale times zero codes is NaN), empty groups that shift the next.
    scales, offsets = _scales(sum(splits), num_blocks), offsets_from_splits(splits, "cpu")
    expected = swizzle_groups_ref(scales, offsets)
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        for index_dtype in (torch.int64, torch.int32):
            poison = torch.full((expected.numel() + 512,), 0x7F, dtype=torch.uint8, device="cuda")
            del poison  # its memory is likely what the output gets
            given = scales.view(dtype).cuda()
            swizzled = blackwell.swizzle_groups(given, offsets.to("cuda", index_dtype))
            assert swizzled.dtype == dtype
            assert torch.equal(swizzled.view(torch.uint8).cpu(), expected)


def test_scales_of_any_strides_and_rows_past_the_groups():
    # Prevents: a column slice read as if it were contiguous; rows of no group that end up in one.
    scales = _scales(200, 12)
    offsets = torch.tensor([0, 70, 150])  # 50 rows of padding
    swizzled = blackwell.swizzle_groups(scales.cuda()[:, 3:10], offsets.cuda()).cpu()
    expected = swizzle_groups_ref(scales[:150, 3:10], offsets)
    assert torch.equal(swizzled[: expected.shape[0]], expected)
    assert not swizzled[expected.shape[0] :].any()
    off_a_word = torch.zeros(200 * 8 + 1, dtype=torch.uint8, device="cuda")
    off_a_word[1:] = _scales(200, 8).flatten().cuda()
    swizzled = blackwell.swizzle_groups(off_a_word[1:].reshape(200, 8), offsets.cuda()).cpu()
    assert torch.equal(swizzled[:256], swizzle_groups_ref(_scales(200, 8)[:150], offsets)[:256])


def test_scales_of_groups_in_a_graph():
    # Prevents: boundaries read on the host, or a size that follows them.
    scales, offsets = _scales(300, 8).cuda(), torch.tensor([0, 100, 300], device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        blackwell.swizzle_groups(scales, offsets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        swizzled = blackwell.swizzle_groups(scales, offsets)
    for bounds in ([0, 0, 300], [0, 129, 300], [0, 300, 300]):
        offsets.copy_(torch.tensor(bounds))
        graph.replay()
        expected = swizzle_groups_ref(scales.cpu(), torch.tensor(bounds))
        assert torch.equal(swizzled.cpu(), expected)


def test_the_scale_layout_has_a_fake_and_names_faults():
    # Prevents: torch.compile with other sizes than the kernel's; a fault without a remedy.
    scales, offsets = _scales(300, 9).cuda(), torch.tensor([0, 100, 300], device="cuda")
    blackwell.swizzle_groups(scales, offsets)  # registers the fake
    operator = torch.ops.megatron_nvfp4.swizzle_groups_128x4.default
    for given in ((scales, offsets), (scales[:0], offsets * 0), (scales, offsets[::2])):
        torch.library.opcheck(operator, given)
    with pytest.raises(ValueError, match=r"offsets are .*; give integers \(G\+1,\)"):
        blackwell.swizzle_groups(scales, offsets.float())
    with pytest.raises(ValueError, match=r"block_scales are .*; give a matrix"):
        blackwell.swizzle_groups(scales.float(), offsets)


@pytest.mark.parametrize("splits", SPLITS, ids=lambda s: f"{len(s)}x{sum(s)}")
@pytest.mark.parametrize(("num_cols", "num_k"), [(8, 32), (1536, 2048), (200, 1056)])
def test_the_group_table(splits, num_cols, num_k):
    # Prevents: pointers into a neighbour's rows or scales, from the first group of a second round
    # of the scan on; 32-bit products.
    offsets = offsets_from_splits(splits, "cuda")
    blackwell._ops()
    plan = torch.ops.megatron_nvfp4.blackwell_group_plan(offsets, num_cols, num_k)
    assert plan.tolist() == group_plan_ref(offsets, num_cols, num_k)


def test_the_group_table_beyond_32_bits():
    # Prevents: a pointer that wraps in a model with large experts.
    offsets = torch.tensor([0, 1 << 20, (1 << 20) + 5], device="cuda")
    blackwell._ops()
    plan = torch.ops.megatron_nvfp4.blackwell_group_plan(offsets, 1 << 16, 1 << 14)
    assert plan.tolist() == group_plan_ref(offsets, 1 << 16, 1 << 14)
    assert plan.max() > 1 << 33


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has", range(8), ids=lambda has: f"{has:03b}")
def test_epilogue_arithmetic(dtype, has):
    # Prevents: two multiplications in a row, a fused multiply-add, subnormals flushed, and an absent
    # bias that turns -0 into +0.
    generator = torch.Generator().manual_seed(3)
    offsets = offsets_from_splits([0, 513, 1, 0, 300], "cpu")
    num_rows, num_cols = 830, 40  # 16 rows of padding
    magnitude = 2.0 ** torch.randint(-60, 60, (num_rows, 1), generator=generator)
    acc = torch.randn(num_rows, num_cols, generator=generator) * magnitude
    acc[::7, ::3] = -0.0
    acc[5, :4] = torch.tensor([float("inf"), float("-inf"), 3e38, 1e-44])
    row_scale = torch.rand(num_rows, generator=generator) / magnitude[:, 0]
    row_scale[3], row_scale[5] = 1e-40, 1.0
    group_scale = torch.rand(5, generator=generator)
    bias = torch.randn(5, num_cols, generator=generator)
    given = [
        tensor if has >> bit & 1 else None
        for bit, tensor in enumerate((row_scale, group_scale, bias))
    ]
    expected = epilogue_ref(acc, offsets, *given, dtype)
    on_device = [None if tensor is None else tensor.cuda() for tensor in given]
    blackwell._ops()
    y = torch.ops.megatron_nvfp4.blackwell_epilogue(acc.cuda(), offsets.cuda(), *on_device, dtype)
    integers = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(y.cpu().view(integers), expected.view(integers))


def test_this_gpu_is_refused_by_its_capability():
    # Prevents: a Hopper GPU being told to install something that would not help.
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU is a Blackwell")
    major, minor = torch.cuda.get_device_capability()
    reason = blackwell.BACKEND.why_not("grouped_gemm", (TOKEN, TENSOR), (64, 64, 64), "cuda")
    assert f"this GPU has {major}.{minor}" in reason
    a, b, _, offsets = gemm_operands([4], 16, 64, TOKEN, TENSOR)
    a, b = (
        quant.QuantizedTensor(
            part.codes.cuda(), part.block_scales.cuda(), part.amax.cuda(), part.spec
        )
        for part in (a, b)
    )
    with pytest.raises(RuntimeError, match=f"this GPU has {major}.{minor}"):
        blackwell.BACKEND.grouped_gemm(a, b, offsets.cuda(), out_dtype=torch.bfloat16)
