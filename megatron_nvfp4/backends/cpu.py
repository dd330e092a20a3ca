"""The C++ CPU backend: the reference's codes by vectorised, threaded kernels, and GEMMs in FP32.

A GEMM walks the contraction upwards with one FP32 accumulator an output: instruction set, threads, batch and
grouping do not change its bits, which differ from the reference's (FP64 sums) by FP32 rounding.
The quantisers ran with SSE2, AVX2 and AVX-512.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_nvfp4.quant import MXFP8Tensor, QuantizedTensor, SimulatedTensor, decode_simulated
from megatron_nvfp4.recipes import BF16, FORWARD, Format

from . import Matrices, Operand, extension, ops
from .gemm_arguments import GEMM_DTYPES, group_scale, outer_scales, written
from .reference import ReferenceBackend, stack_matrices


class CpuBackend(ReferenceBackend):
    """See the module and `Backend`."""

    name = "cpu"

    def why_not(
        self,
        op: str,
        formats: Sequence[Format],
        shape: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> str | None:
        if device is not None and torch.device(device).type != "cpu":
            return f"it works on CPU tensors, these are on {device}; use backend='cuda'"
        if "quantize" not in op and dtype == torch.float64:
            return "it adds in FP32, the operands are FP64; use backend='reference'"
        if op == "quantize_rotated":
            for spec in formats:
                if ops.rotation_fault(spec):
                    return ops.rotation_fault(spec)
        return super().why_not(op, formats, shape, device, dtype) or extension.why_not_cpu()

    def quantize(self, x: Tensor, spec: Format, **options) -> Operand:
        if spec in (BF16, FORWARD):
            return x
        return ops.quantize(x, spec, **options)

    def dequantize(self, operand: Operand, dtype: torch.dtype) -> Tensor:
        if isinstance(operand, QuantizedTensor) and operand.column_offsets is None:
            return ops.dequantize(operand, dtype)
        if isinstance(operand, MXFP8Tensor):
            return ops.decode_mxfp8(operand, dtype)
        return super().dequantize(operand, dtype)

    def grouped_gemm(
        self,
        a: Operand,
        b: Operand | Matrices,
        offsets: Tensor,
        *,
        bias: Tensor | None = None,
        out_dtype: torch.dtype,
        transposed: bool = False,
        row_factors: Tensor | None = None,
    ) -> Tensor:
        b = stack_matrices(b, transposed)
        dtype = out_dtype if out_dtype in GEMM_DTYPES else torch.float32
        bias = bias.float() if bias is not None and bias.dtype not in GEMM_DTYPES else bias
        y = _ops().grouped_gemm_decoded(
            decode(a), decode(b), offsets, *outer_scales(a, b, row_factors), bias, dtype
        )
        return y.to(out_dtype)

    def grouped_wgrad(
        self,
        a: Operand,
        b: Operand,
        offsets: Tensor,
        *,
        out: Sequence[Tensor],
        accumulate: bool,
    ) -> None:
        with written(out) as targets:
            _ops().grouped_wgrad_decoded(
                decode(a), decode(b), offsets, None, group_scale(a, b), accumulate, out=targets
            )


def decode(operand: Operand) -> Tensor:
    """Exact values without the outer scale, BF16 or FP32 (M, K)."""
    if isinstance(operand, QuantizedTensor):
        return ops.decode(operand)
    if isinstance(operand, MXFP8Tensor):
        return ops.decode_mxfp8(operand)
    if isinstance(operand, SimulatedTensor):
        return decode_simulated(operand)
    return operand if operand.dtype in GEMM_DTYPES else operand.float()


@functools.cache
def _ops():
    """torch.ops.megatron_nvfp4 with the fakes of the GEMMs."""
    extension.load()
    torch.library.register_fake("megatron_nvfp4::grouped_gemm_decoded", _fake_grouped_gemm)
    torch.library.register_fake("megatron_nvfp4::grouped_wgrad_decoded", lambda *a, **k: None)
    return torch.ops.megatron_nvfp4


def _fake_grouped_gemm(a, b, offsets, row_scale, group_scale, col_scale, bias, out_dtype):
    num_cols = b.shape[0] // (offsets.shape[0] - 1)
    return a.new_empty(a.shape[0], num_cols, dtype=out_dtype)


BACKEND = CpuBackend()
