"""The C++ CPU backend: the reference's bits by vectorised, threaded kernels.

Its GEMMs are the reference's, which add in FP64: only the operands are decoded by the kernels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_nvfp4.quant import MXFP8Tensor, QuantizedTensor
from megatron_nvfp4.recipes import MXFP8, Format, NVFP4Spec

from . import Operand, ops
from .extension import why_not_cpu
from .reference import ReferenceBackend


class CpuBackend(ReferenceBackend):
    """See the module and `Backend`."""

    name = "cpu"
    features = frozenset({"nvfp4", "mxfp8", "four_over_six"})

    def why_not(
        self,
        op: str,
        formats: Sequence[Format],
        shape: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ) -> str | None:
        if device is not None and torch.device(device).type != "cpu":
            return f"it works on CPU tensors, these are on {device}; use backend='cuda'"
        return super().why_not(op, formats, shape, device) or why_not_cpu()

    def quantize(
        self, x: Tensor, spec: Format, *, amax: Tensor | None = None, offsets: Tensor | None = None
    ) -> Operand:
        if isinstance(spec, NVFP4Spec):
            return ops.quantize_nvfp4(x, spec, amax, offsets)
        if spec == MXFP8:
            return ops.quantize_mxfp8(x)
        return super().quantize(x, spec, amax=amax, offsets=offsets)

    def decode(self, operand: Operand) -> tuple[Tensor, Tensor | None]:
        if isinstance(operand, QuantizedTensor):
            return ops.decode_exact(operand)[0].double(), operand.row_scale()
        if isinstance(operand, MXFP8Tensor):
            return ops.decode_mxfp8(operand).double(), None
        return super().decode(operand)


BACKEND = CpuBackend()
