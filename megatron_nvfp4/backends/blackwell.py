"""NVFP4 GEMMs on Blackwell's own FP4 tensor cores. Chosen by name only: compiled, never run.

Compiled for compute capability 10.0 and 10.3 and looked at as machine code; what surrounds the GEMM (scale
layout, group table, epilogue arithmetic) is tested on other GPUs. All but GEMMs of two NVFP4 operands is
the CUDA backend's: quantisation, weight gradients, GEMMs of other formats. A GEMM of two NVFP4 operands
that the tensor cores cannot take is refused, never handed on.

The tensor core adds in an order and width of its own: outputs equal the other backends' to the last bits of
FP32, not bit for bit. Scale, bias and rounding are theirs: acc * RN(S_dec_row * S_dec_weight) + bias.
"""

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megatron_nvfp4.quant import QuantizedTensor
from megatron_nvfp4.quant.layout import SCALE_ROWS, swizzled_shape
from megatron_nvfp4.recipes import Format, NVFP4Spec

from . import Matrices, Operand, extension
from .cuda import CudaBackend
from .packed import reverse_groups

_GEMMS = ("gemm", "grouped_gemm")


@dataclass(frozen=True)
class SwizzledWeights(QuantizedTensor):
    """NVFP4 weights (G*N, K) with their block scales in tensor core layout too: 5 bits a value.

    scales_128x4: float8_e4m3fn, every weight padded to whole 128x4 tiles; see swizzle_groups.
    """

    scales_128x4: Tensor | None = None


class BlackwellBackend(CudaBackend):
    """See the module and `Backend`."""

    name = "blackwell"

    def why_not(
        self,
        op: str,
        formats: Sequence[Format],
        shape: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> str | None:
        if op not in _GEMMS or not all(isinstance(spec, NVFP4Spec) for spec in formats):
            return super().why_not(op, formats, shape, device, dtype)
        if device is not None and torch.device(device).type != "cuda":
            return f"it works on CUDA tensors, these are on {device}; use backend='cpu'"
        return gemm_fault(formats, shape) or why_not_native()

    def pack_weights(
        self, weights: Operand, num_groups: int, *, is_reversed: bool = False
    ) -> Operand:
        if is_reversed:
            weights = reverse_groups(weights, num_groups)
        if not isinstance(weights, QuantizedTensor) or isinstance(weights, SwizzledWeights):
            return weights
        parts = {field.name: getattr(weights, field.name) for field in fields(weights)}
        scales = swizzle_groups(weights.block_scales, _weight_offsets(weights, num_groups))
        return SwizzledWeights(**parts, scales_128x4=scales)

    def grouped_gemm(
        self,
        a: Operand,
        b: Operand | Matrices,
        offsets: Tensor,
        *,
        bias: Tensor | None = None,
        out_dtype: torch.dtype,
        transposed: bool = False,
    ) -> Tensor:
        if not isinstance(a, QuantizedTensor) or not isinstance(b, QuantizedTensor):
            return super().grouped_gemm(
                a, b, offsets, bias=bias, out_dtype=out_dtype, transposed=transposed
            )
        num_groups = offsets.numel() - 1
        b = self.pack_weights(b, num_groups)
        row_scale, group_scale = outer_scales(a, b, num_groups)
        y = _native_ops().grouped_gemm_nvfp4_blackwell(
            a.codes,
            swizzle_groups(a.block_scales, offsets),
            b.codes,
            b.scales_128x4,
            offsets,
            b.shape[0] // num_groups,
            row_scale,
            group_scale,
            None if bias is None else bias.float().contiguous(),
            out_dtype if out_dtype == torch.bfloat16 else torch.float32,
        )
        return y.to(out_dtype)


def gemm_fault(formats: Sequence[NVFP4Spec], shape: Sequence[int] | None) -> str | None:
    """Why the tensor cores cannot multiply two NVFP4 operands (M, K) and (G*N, K), or None."""
    if formats[1].outer == "token":
        return f"{formats[1]} has a scale for each row of a weight; use outer='tensor' for weights"
    if shape is None:
        return None
    _, num_cols, num_k = shape
    for name, value, multiple in (("K", num_k, 32), ("N", num_cols, 8)):
        if value == 0 or value % multiple:
            return f"{name}={value} is not a positive multiple of {multiple}; use backend='cuda'"
    return None


def why_not_native() -> str | None:
    """Why the block-scaled GEMM cannot run on the current GPU, or None."""
    reason = extension.why_not_cuda()
    if reason:
        return reason
    capability = torch.cuda.get_device_capability()
    if capability not in ((10, 0), (10, 3)):
        found = ".".join(map(str, capability))
        return (
            f"FP4 tensor cores need compute capability 10.0 or 10.3, this GPU has {found}; "
            "use backend='cuda', which decodes NVFP4 for the tensor cores it has"
        )
    return _import_error()


@functools.cache
def _import_error() -> str | None:
    """Registers grouped_gemm_nvfp4_blackwell; what is wrong if that fails."""
    again = (
        "install again: MEGATRON_NVFP4_BLACKWELL=1 pip install --no-build-isolation --no-deps -e ."
    )
    if not importlib.import_module("megatron_nvfp4._build_info").INFO.get("blackwell"):
        return f"megatron_nvfp4._blackwell is not built; {again}"
    try:
        importlib.import_module("megatron_nvfp4._blackwell")
    except (ImportError, OSError) as error:
        return f"megatron_nvfp4._blackwell cannot be loaded ({error}); {again}"
    return None


def swizzle_groups(block_scales: Tensor, offsets: Tensor) -> Tensor:
    """Scales (M, K/16) of row groups in the 128x4 layout, every group padded to 128 rows; waits for nothing.

    block_scales: float8_e4m3fn or uint8 on a GPU, of any strides. offsets: (G+1,) integers on that GPU,
    trusted; rows from offsets[G] on are left out.
    Returns (R, C') of the same dtype, whose first rows are layout.swizzle_scales of group 0, of group 1 and
    so on. R is what the host knows to suffice, a multiple of 128; all padding is 0.
    """
    return _ops().swizzle_groups_128x4(block_scales, offsets)


def outer_scales(
    a: QuantizedTensor, b: QuantizedTensor, num_groups: int
) -> tuple[Tensor | None, Tensor]:
    """What the epilogue multiplies by: S_dec of every row (M,), or None, and of every group (G,), FP32.

    With one amax per tensor or group on both sides their product is the groups' scale: RN(S_dec * S_dec) is
    the one rounding of the contract either way.
    """
    group_scale = b.outer_scale
    row_scale = None
    if a.spec.outer == "token":
        row_scale = a.outer_scale
    else:
        group_scale = a.outer_scale * group_scale
    return row_scale, group_scale.expand(num_groups).contiguous()


def _weight_offsets(weights: QuantizedTensor, num_groups: int) -> Tensor:
    num_rows = weights.shape[0] // num_groups
    return torch.arange(num_groups + 1, device=weights.device) * num_rows


@functools.cache
def _ops():
    """torch.ops.megatron_nvfp4 with the extension loaded and the fake of the scale layout."""
    extension.load()
    torch.library.register_fake("megatron_nvfp4::swizzle_groups_128x4", _fake_swizzle_groups)
    return torch.ops.megatron_nvfp4


@functools.cache
def _native_ops():
    """The same with the block-scaled GEMM; RuntimeError if it cannot run here."""
    reason = why_not_native()
    if reason:
        raise RuntimeError(f"blackwell: {reason}")
    torch.library.register_fake(
        "megatron_nvfp4::grouped_gemm_nvfp4_blackwell", _fake_grouped_gemm_nvfp4_blackwell
    )
    return _ops()


def _fake_swizzle_groups(block_scales, offsets):
    num_rows, num_blocks = block_scales.shape
    used = min(offsets.shape[0] - 1, num_rows)
    rows = (num_rows + (SCALE_ROWS - 1) * used) // SCALE_ROWS * SCALE_ROWS
    return block_scales.new_empty(rows, swizzled_shape(0, num_blocks)[1])


def _fake_grouped_gemm_nvfp4_blackwell(
    a_codes, a_scales, b_codes, b_scales, offsets, num_cols, row_scale, group_scale, bias, out_dtype
):
    return a_codes.new_empty(a_codes.shape[0], num_cols, dtype=out_dtype)


BACKEND = BlackwellBackend()
