"""The CUDA GEMM operators by their contract, in torch on a CPU, which check what they are given."""

from itertools import pairwise

import torch
from torch import Tensor

from megatron_nvfp4.quant import QuantizedTensor, decode_exact, quantize_mxfp8
from megatron_nvfp4.quant.mxfp8 import decode_mxfp8
from megatron_nvfp4.recipes import NVFP4Spec

OUT_DTYPES = (torch.bfloat16, torch.float32)


def decoded(codes: Tensor, scales: Tensor | None) -> Tensor:
    """FP64 values of NVFP4 codes (M, K/2) with scales, or of a BF16 matrix."""
    if scales is None:
        assert codes.dtype == torch.bfloat16
        return codes.double()
    assert codes.dtype == torch.uint8
    assert scales.dtype == torch.float8_e4m3fn
    assert scales.shape == (codes.shape[0], codes.shape[1] // 8)
    amax = torch.ones(1)
    return decode_exact(QuantizedTensor(codes, scales, amax, NVFP4Spec()))[0].double()


def factor(scale: Tensor | None, rows: slice) -> Tensor | float:
    if scale is None:
        return 1.0
    assert scale.dtype == torch.float32
    assert scale.dim() == 1
    return scale if scale.numel() == 1 else scale[rows]


class Kernels:
    """`torch.ops.megatron_nvfp4` with these in place of the CUDA kernels; `calls` counts them by name."""

    def __init__(self, real) -> None:
        self.real, self.calls = real, {}

    def __getattribute__(self, name: str):
        if name in ("real", "calls") or name.startswith("_"):
            return object.__getattribute__(self, name)
        try:
            found = object.__getattribute__(self, name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "real"), name)
        calls = object.__getattribute__(self, "calls")
        calls[name] = calls.get(name, 0) + 1
        return found

    def pack_weights_nvfp4(self, codes, block_scales, num_groups, is_reversed):
        parts = [t.view(torch.uint8).reshape(num_groups, -1) for t in (codes, block_scales)]
        packed = torch.cat(parts, dim=1)
        return packed.flip(0) if is_reversed else packed

    def unpack_weights_nvfp4(self, packed, num_rows, num_cols):
        size = num_rows // packed.shape[0] * num_cols
        codes, scales = packed.split([size // 2, size // 16], dim=1)
        scales = scales.reshape(-1, num_cols // 16).view(torch.float8_e4m3fn)
        return codes.reshape(-1, num_cols // 2), scales

    def grouped_gemm_w4(
        self, x, x_scales, packed, offsets, num_cols, row, group, bias, index, dtype, config=-1
    ):
        left = decoded(x, x_scales)
        if index is not None:
            left = left[index]
            row = row[index] if row is not None and row.numel() > 1 else row
        num_rows = (offsets.numel() - 1) * num_cols
        codes, scales = self.unpack_weights_nvfp4(packed, num_rows, left.shape[1])
        return self._multiply(
            left, decoded(codes, scales), offsets, (row, group, None), bias, dtype
        )

    def grouped_gemm_bf16(self, x, weights, transposed, offsets, row, group, col, bias, dtype):
        if len(weights) == 1 and weights[0].dim() == 3:
            weights = list(weights[0])
        assert len(weights) == offsets.numel() - 1
        assert {w.dtype for w in weights} == {torch.bfloat16}
        right = torch.cat([w.t() if transposed else w for w in weights]).double()
        return self._multiply(decoded(x, None), right, offsets, (row, group, col), bias, dtype)

    def grouped_gemm_generic(
        self, a, a_scales, b, b_scales, transposed, offsets, num_cols, row, group, col, bias, dtype
    ):
        num_groups, right = offsets.numel() - 1, decoded(b, b_scales)
        if transposed:
            assert b_scales is None
            right = right.reshape(num_groups, -1, num_cols).transpose(1, 2).flatten(0, 1)
        assert right.shape[0] == num_groups * num_cols
        scales = (row, group, col)
        return self._multiply(decoded(a, a_scales), right, offsets, scales, bias, dtype)

    def _multiply(self, left, right, offsets, scales, bias, dtype):
        row, group, col = scales
        assert dtype in OUT_DTYPES
        assert group is None or col is None
        num_groups = offsets.numel() - 1
        num_cols = right.shape[0] // num_groups
        assert bias is None or (bias.shape == (num_groups, num_cols) and bias.dtype in OUT_DTYPES)
        out = torch.zeros(left.shape[0], num_cols, dtype=dtype)
        for g, (first, last) in enumerate(pairwise(offsets.tolist())):
            rows, cols = slice(first, last), slice(g * num_cols, (g + 1) * num_cols)
            y = (left[rows] @ right[cols].t()).float()
            if row is not None or group is not None or col is not None:
                of_row = factor(row, rows)
                of_row = of_row[:, None] if isinstance(of_row, Tensor) else of_row
                y = y * (of_row * factor(group, slice(g, g + 1)) * factor(col, cols))
            out[rows] = (y if bias is None else y + bias[g].float()).to(dtype)
        return out

    def grouped_wgrad_bf16(self, a, b, token_major, offsets, group, accumulate, *, out):
        assert a.dtype == b.dtype == torch.bfloat16
        assert a.is_contiguous()
        assert b.is_contiguous()
        assert {t.dtype for t in out} <= {torch.bfloat16} or {t.dtype for t in out} <= {
            torch.float32
        }
        a, b = (a, b) if token_major else (a.t(), b.t())
        for g, (first, last) in enumerate(pairwise(offsets.tolist())):
            assert token_major or first % 16 == 0
            y = (a[first:last].double().t() @ b[first:last].double()).float()
            y = y * factor(group, slice(g, g + 1)) if group is not None else y
            assert out[g].is_contiguous()
            out[g].copy_(y + out[g].float() if accumulate else y)

    grouped_wgrad_generic = grouped_wgrad_bf16

    def grouped_wgrad_block(self, a, b, token_major, offsets, group, generic, *, out):
        assert out.is_contiguous()
        kernel = self.grouped_wgrad_generic if generic else self.grouped_wgrad_bf16
        kernel(a, b, token_major, offsets, group, False, out=out.unbind())

    def grouped_linear_w4(
        self, x, packed, offsets, num_cols, group, e4m3_max, four_over_six, fast_error
    ):
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        codes, scales, amax = self.real.quantize_nvfp4(
            x, None, None, 1, True, e4m3_max, four_over_six, fast_error
        )
        row = self.real.outer_scale(amax, e4m3_max)
        return self.grouped_gemm_w4(
            codes, scales, packed, offsets, num_cols, row, group, None, None, torch.bfloat16
        )

    def round_mxfp8_columns(self, x):
        return decode_mxfp8(quantize_mxfp8(x.t())).t().bfloat16().contiguous()
