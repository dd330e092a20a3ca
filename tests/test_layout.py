"""quant/layout.py: code packing, the 128x4 scale layout and its padding, row groups."""

import pytest
import torch

from megatron_nvfp4.quant import (
    expand_groups,
    layout,
    offsets_from_splits,
    pack_codes,
    pad_groups,
    swizzle_scales,
    unpack_codes,
    unswizzle_scales,
)


def _scales(*shape: int) -> torch.Tensor:
    """Bytes 1..251: none is 0, so that padding cannot be mistaken for a scale."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 251 + 1).to(torch.uint8).reshape(shape)


def test_even_column_in_the_low_nibble():
    # Prevents: neighbours swapped, which every value test on symmetric data would miss.
    assert pack_codes(torch.tensor([[0x1, 0x2, 0xF, 0x0]], dtype=torch.uint8)).tolist() == [
        [0x21, 0x0F]
    ]


@pytest.mark.parametrize("shape", [(3, 32), (0, 16), (2, 3, 16)])
def test_unpack_inverts_pack(shape):
    # Prevents: lost high bits, rows mixed by a reshape.
    codes = (torch.arange(torch.Size(shape).numel()) % 16).to(torch.uint8).reshape(shape)
    packed = pack_codes(codes)
    assert packed.shape == (*shape[:-1], shape[-1] // 2)
    assert torch.equal(unpack_codes(packed), codes)


@pytest.mark.parametrize("shape", [(130, 5), (1, 1), (128, 4), (256, 12), (5, 9)])
def test_every_scale_lies_where_the_formula_says(shape):
    # Prevents: sizes taken unpadded in the offset (K=80 has 5 columns, the buffer 8), padding
    # unwritten.
    num_rows, num_cols = shape
    scales = _scales(*shape)
    swizzled = swizzle_scales(scales)
    tile_cols = -(-num_cols // 4)
    assert swizzled.shape == (-(-num_rows // 128) * 128, tile_cols * 4)
    flat = swizzled.flatten().tolist()
    expected = [0] * len(flat)
    for r in range(num_rows):
        for c in range(num_cols):
            offset = (
                ((r // 128 * tile_cols + c // 4) * 32 + r % 32) * 16 + r % 128 // 32 * 4 + c % 4
            )
            expected[offset] = scales[r, c].item()
    assert flat == expected
    assert torch.equal(unswizzle_scales(swizzled, num_rows, num_cols), scales)


def test_m130_k80():
    # Prevents: the buffer of 130 rows and 5 columns having any other size than 256x8.
    swizzled = swizzle_scales(_scales(130, 5))
    assert swizzled.shape == (256, 8)
    assert int((swizzled == 0).sum()) == 256 * 8 - 130 * 5


def test_experts_are_swizzled_one_by_one():
    # Prevents: a 3-D weight treated as one tall matrix, whose experts then share row tiles.
    scales = _scales(3, 130, 5).view(torch.float8_e4m3fn)
    swizzled = swizzle_scales(scales)
    assert swizzled.shape == (3, 256, 8)
    assert swizzled.dtype == torch.float8_e4m3fn
    for expert in range(3):
        alone = swizzle_scales(scales[expert]).view(torch.uint8)
        assert torch.equal(swizzled.view(torch.uint8)[expert], alone)
    back = unswizzle_scales(swizzled, 130, 5)
    assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))


def test_unswizzle_refuses_another_size():
    # Prevents: an inverse with the wrong sizes that returns shuffled scales without a word.
    with pytest.raises(ValueError, match=r"128x8 is not the padded form of 130x5.*\(256, 8\)"):
        unswizzle_scales(torch.zeros(128, 8, dtype=torch.uint8), 130, 5)


def test_offsets():
    # Prevents: a missing leading 0, int32 sums.
    for splits in ([16, 0, 32, 0], torch.tensor([16, 0, 32, 0], dtype=torch.int32)):
        offsets = offsets_from_splits(splits, "cpu")
        assert offsets.tolist() == [0, 16, 16, 48, 48]
        assert offsets.dtype == torch.int64
    assert offsets_from_splits([], "cpu").tolist() == [0]


@pytest.mark.parametrize(
    "splits", [[2, 0, 3, 0], [0, 0, 1], [0, 4], [5], [0, 0], [0, 1, 0, 0, 2, 0]]
)
def test_expand_groups_skips_empty_groups(splits):
    # Prevents: rows behind an empty expert taking that expert's scale.
    values = torch.arange(len(splits)) + 10
    expected = [10 + g for g, size in enumerate(splits) for _ in range(size)]
    offsets = offsets_from_splits(splits, "cpu")
    assert expand_groups(values, offsets, sum(splits)).tolist() == expected


def test_pad_groups():
    # Prevents: rows that land in a neighbour's padding, padding that is not zero, an empty group
    # that grows.
    x = torch.arange(1, 13).float().reshape(6, 2)
    padded, offsets = pad_groups(x, torch.tensor([0, 1, 1, 6, 6]), 4)
    assert offsets.tolist() == [0, 4, 4, 12, 12]
    assert torch.equal(padded[0], x[0])
    assert torch.equal(padded[4:9], x[1:])
    assert (padded[1:4] == 0).all()
    assert (padded[9:] == 0).all()
    same, unchanged = pad_groups(x, torch.tensor([0, 2, 6]), 2)
    assert torch.equal(same, x)
    assert unchanged.tolist() == [0, 2, 6]
    nothing, bounds = pad_groups(x[:0], torch.tensor([0, 0]), 16)
    assert nothing.shape == (0, 2)
    assert bounds.tolist() == [0, 0]


@pytest.mark.parametrize("splits", [[1, 0, 5, 0], [0, 0], [4, 4], [0, 3]])
def test_pad_groups_to_a_bound(splits, monkeypatch):
    # Prevents: what a GPU is padded to, for want of the splits on the host, in a group it is not of.
    x = torch.randn(sum(splits), 2)
    offsets = offsets_from_splits(splits, "cpu")
    exact, boundaries = pad_groups(x, offsets, 4, splits)
    monkeypatch.setattr(layout, "splits_of_host", lambda offsets: None)
    padded, same = pad_groups(x, offsets, 4)
    assert torch.equal(boundaries, same)
    assert torch.equal(padded[: len(exact)], exact)
    assert not padded[len(exact) :].any()
    assert len(padded) % 4 == 0
