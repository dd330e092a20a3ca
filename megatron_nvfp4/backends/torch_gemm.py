"""The framework's own GEMMs, for unquantised operands: BF16 layers and the BF16 layer bypass.

Order of summation and batch invariance are the library's (cuBLAS, oneDNN), not ours. On a CPU, 16-bit
operands are multiplied in FP32 and rounded once: most CPUs have no 16-bit matrix units, and torch's own
16-bit path is some ten times slower there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_nvfp4.recipes import BF16, FORWARD, Format

from . import Operand


class TorchBackend:
    """See the module and `Backend`."""

    name = "torch"
    features: frozenset[str] = frozenset()

    def why_not(
        self,
        op: str,
        formats: Sequence[Format],
        shape: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ) -> str | None:
        if op.startswith("quantize") and any(spec not in (BF16, FORWARD) for spec in formats):
            return "torch does not quantise"
        if any(spec not in (BF16, FORWARD) for spec in formats):
            return "torch multiplies unquantised operands only"
        return None

    def quantize(self, x: Tensor, spec: Format, **_) -> Operand:
        return x

    def gemm(
        self, a: Tensor, b: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype
    ) -> Tensor:
        return _linear(a, b, bias).to(out_dtype)

    def grouped_gemm(
        self,
        a: Tensor,
        b: Tensor,
        offsets: Tensor,
        *,
        bias: Tensor | None = None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        num_groups = offsets.numel() - 1
        weights = b.reshape(num_groups, -1, b.shape[1])
        if _has_grouped_mm(a, b) and bias is None:
            ends = offsets[1:].to(torch.int32)
            return torch._grouped_mm(a, weights.transpose(1, 2), offs=ends).to(out_dtype)
        out = torch.empty(a.shape[0], weights.shape[1], dtype=out_dtype, device=a.device)
        bounds = offsets.tolist()
        for group in range(num_groups):
            rows = slice(bounds[group], bounds[group + 1])
            group_bias = None if bias is None else bias[group]
            out[rows] = _linear(a[rows], weights[group], group_bias)
        return out

    def grouped_wgrad(
        self,
        a: Tensor,
        b: Tensor,
        offsets: Tensor,
        *,
        out: Sequence[Tensor],
        accumulate: bool,
    ) -> None:
        bounds = offsets.tolist()
        for group, target in enumerate(out):
            rows = slice(bounds[group], bounds[group + 1])
            grad = _wgrad(a[:, rows], b[:, rows], target.dtype)
            if accumulate:
                target.add_(grad)
            else:
                target.copy_(grad)


def _linear(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """a times b transposed plus bias, in a's dtype, but FP32 for 16-bit operands on a CPU."""
    if a.device.type == "cpu" and a.itemsize == 2:
        a, b = a.float(), b.float()
        bias = None if bias is None else bias.float()
    with torch.autocast(a.device.type, enabled=False):  # it would undo the choice of dtype
        return torch.nn.functional.linear(a, b, bias)


def _wgrad(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a times b transposed for a target of `dtype`: no rounding to 16 bits before an FP32 main_grad."""
    if a.device.type == "cuda" and a.itemsize == 2 and dtype == torch.float32:
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    return _linear(a, b, None)


def _has_grouped_mm(a: Tensor, b: Tensor) -> bool:
    """torch._grouped_mm takes BF16 on CUDA with rows of a multiple of 16 bytes, and no zero-row input."""
    aligned = a.shape[1] % 8 == 0 and (b.shape[1] % 8 == 0)
    return (
        a.device.type == "cuda"
        and a.dtype == b.dtype == torch.bfloat16
        and a.shape[0] > 0
        and aligned
    )


BACKEND = TorchBackend()
