"""The C++ CPU backend: the reference's bits by vectorised, threaded kernels.

Its GEMMs are the reference's, which add in FP64: only the operands are decoded by the kernels.
Run with SSE2 and AVX2; the AVX-512 kernels are compiled and have never run.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_nvfp4.quant import MXFP8Tensor, QuantizedTensor
from megatron_nvfp4.recipes import BF16, FORWARD, Format

from . import Operand, ops
from .extension import why_not_cpu
from .reference import ReferenceBackend


class CpuBackend(ReferenceBackend):
    """See the module and `Backend`."""

    name = "cpu"

    def why_not(
        self,
        op: str,
        formats: Sequence[Format],
        shape: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ) -> str | None:
        if device is not None and torch.device(device).type != "cpu":
            return f"it works on CPU tensors, these are on {device}; use backend='cuda'"
        if op == "quantize_rotated":
            for spec in formats:
                if ops.rotation_fault(spec):
                    return ops.rotation_fault(spec)
        return super().why_not(op, formats, shape, device) or why_not_cpu()

    def quantize(self, x: Tensor, spec: Format, **options) -> Operand:
        if spec in (BF16, FORWARD):
            return x
        return ops.quantize(x, spec, **options)

    def decode(self, operand: Operand) -> Tensor:
        if isinstance(operand, QuantizedTensor):
            return ops.decode_exact(operand)[0].double()
        if isinstance(operand, MXFP8Tensor):
            return ops.decode_mxfp8(operand).double()
        return super().decode(operand)


BACKEND = CpuBackend()
