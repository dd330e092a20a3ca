"""The framework's own GEMMs, for unquantised operands: BF16 layers and the BF16 layer bypass.

Order of summation and batch invariance are the library's (cuBLAS, oneDNN), not ours. On a CPU, 16-bit
operands are multiplied in FP32 and rounded once: most CPUs have no 16-bit matrix units, and torch's own
16-bit path is some ten times slower there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_nvfp4.recipes import BF16, FORWARD, Format

from . import Matrices, Operand
from .packed import reverse_groups
from .reference import as_matrices


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
        dtype: torch.dtype | None = None,
    ) -> str | None:
        if op.startswith("quantize") and any(spec not in (BF16, FORWARD) for spec in formats):
            return "torch does not quantise"
        if any(spec not in (BF16, FORWARD) for spec in formats):
            return "torch multiplies unquantised operands only"
        return None

    def quantize(self, x: Tensor, spec: Format, **_) -> Operand:
        return x

    def pack_weights(
        self, weights: Operand, num_groups: int, *, is_reversed: bool = False
    ) -> Operand:
        return reverse_groups(weights, num_groups) if is_reversed else weights

    def round_along_rows(self, weights: Tensor, spec: Format) -> Matrices | None:
        return None

    def gemm(
        self,
        a: Tensor,
        b: Tensor | Matrices,
        *,
        bias: Tensor | None = None,
        out_dtype: torch.dtype,
        transposed: bool = False,
    ) -> Tensor:
        matrix = as_matrices(b, 1)[0]
        return _linear(a, matrix.t() if transposed else matrix, bias).to(out_dtype)

    def grouped_gemm(
        self,
        a: Tensor,
        b: Tensor | Matrices,
        offsets: Tensor,
        *,
        bias: Tensor | None = None,
        out_dtype: torch.dtype,
        transposed: bool = False,
    ) -> Tensor:
        num_groups = offsets.numel() - 1
        weights = as_matrices(b, num_groups)
        num_cols = weights[0].shape[1 if transposed else 0]
        if _has_grouped_mm(a, num_cols) and bias is None:
            stacked = weights if isinstance(weights, Tensor) else torch.stack(list(weights))
            stacked = stacked if transposed else stacked.transpose(1, 2)
            ends = offsets[1:].to(torch.int32)
            return torch._grouped_mm(a, stacked, offs=ends).to(out_dtype)
        out = torch.empty(a.shape[0], num_cols, dtype=out_dtype, device=a.device)
        bounds = offsets.tolist()
        for group in range(num_groups):
            rows = slice(bounds[group], bounds[group + 1])
            group_bias = None if bias is None else bias[group]
            matrix = weights[group].t() if transposed else weights[group]
            out[rows] = _linear(a[rows], matrix, group_bias)
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


def _has_grouped_mm(a: Tensor, num_cols: int) -> bool:
    """torch._grouped_mm takes BF16 on CUDA with rows of a multiple of 16 bytes, and no zero-row input."""
    return (
        a.device.type == "cuda"
        and a.dtype == torch.bfloat16
        and a.shape[0] > 0
        and a.shape[1] % 8 == 0
        and num_cols % 8 == 0
    )


BACKEND = TorchBackend()
