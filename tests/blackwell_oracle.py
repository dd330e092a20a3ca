"""What the operators around Blackwell's GEMM mean, in torch on the CPU, and operands for them."""

from itertools import pairwise

import torch

from megatron_nvfp4 import quant
from megatron_nvfp4.quant.layout import offsets_from_splits, swizzle_scales, unswizzle_scales


def swizzle_groups_ref(scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """swizzle_scales of each group in turn; zeros up to the size the host knows."""
    num_rows, num_blocks = scales.shape
    parts = [swizzle_scales(scales[a:b]) for a, b in pairwise(offsets.tolist())]
    used = min(offsets.numel() - 1, num_rows)
    rows = (num_rows + 127 * used) // 128 * 128
    missing = rows - sum(part.shape[0] for part in parts)
    parts.append(scales.new_zeros(missing, -(-num_blocks // 4) * 4))
    return torch.cat(parts)


def grouped_gemm_ref(
    a_codes, a_scales, b_codes, b_scales, offsets, num_cols, row_scale, group_scale, bias, dtype
):
    """The operator's meaning, from the layouts it is given."""
    out = torch.zeros(a_codes.shape[0], num_cols, dtype=dtype)
    num_blocks, tile = a_codes.shape[1] // 8, 0  # tile: row tiles of the groups before
    tiles_of_b = -(-num_cols // 128)

    def decode(codes, scales):
        scales = unswizzle_scales(scales, codes.shape[0], num_blocks)
        return quant.decode_exact(
            quant.QuantizedTensor(codes, scales, torch.ones(1), quant.NVFP4Spec())
        )[0]

    for group, (start, end) in enumerate(pairwise(offsets.tolist())):
        num_tiles = -(-(end - start) // 128)
        a = decode(a_codes[start:end], a_scales[128 * tile : 128 * (tile + num_tiles)])
        rows = slice(128 * group * tiles_of_b, 128 * (group + 1) * tiles_of_b)
        b = decode(b_codes[group * num_cols : (group + 1) * num_cols], b_scales[rows])
        tile += num_tiles
        scale = group_scale[group]
        y = (a.double() @ b.double().t()).float()
        y = y * (scale if row_scale is None else row_scale[start:end, None] * scale)
        out[start:end] = (y if bias is None else y + bias[group]).to(dtype)
    return out


def group_plan_ref(offsets: torch.Tensor, num_cols: int, num_k: int) -> list[list[int]]:
    """Fields of GroupPlan (csrc/blackwell/group_plan.h) in its order."""
    plans, tile = [], 0
    col_tiles, b_tiles = -(-num_k // 64), -(-num_cols // 128)
    for group, (start, end) in enumerate(pairwise(offsets.tolist())):
        a_tiles = -(-(end - start) // 128)
        begins = [start * num_k // 2, group * num_cols * num_k // 2]
        begins += [tile * col_tiles * 512, group * b_tiles * col_tiles * 512, start * num_cols]
        sizes = [end - start, num_cols, num_k]
        plans.append([*sizes, *begins, start, group * num_cols, a_tiles, b_tiles, col_tiles])
        tile += a_tiles
    return plans


def epilogue_ref(acc, offsets, row_scale, group_scale, bias, dtype):
    """The contract: one product of scales, one multiplication, one addition, one rounding."""
    y = torch.zeros_like(acc)
    for group, (start, end) in enumerate(pairwise(offsets.tolist())):
        rows = acc[start:end]
        scale = None if group_scale is None else group_scale[group]
        if row_scale is not None:
            of_rows = row_scale[start:end, None]
            scale = of_rows if scale is None else of_rows * scale
        rows = rows if scale is None else rows * scale
        y[start:end] = rows if bias is None else rows + bias[group]
    return y.to(dtype)


def gemm_operands(splits, num_cols, num_k, a_spec, b_spec, dense=False):
    """Quantised activations and weights, BF16 bias (G, N) and offsets; dense: of one weight, ungrouped."""
    generator = torch.Generator().manual_seed(1)
    offsets = offsets_from_splits(splits, "cpu")
    num_rows, num_groups = sum(splits), len(splits)
    x = torch.randn(num_rows, num_k, generator=generator) * torch.rand(
        num_rows, 1, generator=generator
    )
    w = torch.randn(num_groups * num_cols, num_k, generator=generator)
    w *= torch.arange(1, num_groups + 1).repeat_interleave(num_cols)[:, None]
    bias = torch.randn(num_groups, num_cols, generator=generator).bfloat16()
    of_weights = torch.arange(num_groups + 1) * num_cols
    if dense:
        return quant.quantize(x, a_spec), quant.quantize(w, b_spec), bias, offsets
    a = quant.quantize_grouped(x, offsets, a_spec)
    return a, quant.quantize_grouped(w, of_weights, b_spec), bias, offsets
