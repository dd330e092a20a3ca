"""What the compiled GEMMs take beside the decoded operands: outer scales, and outputs they can write."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_nvfp4.quant import QuantizedTensor, SimulatedTensor

from . import Matrices, Operand, ops
from .packed import PackedWeights

# Of outputs, and of operands that are not quantised.
GEMM_DTYPES = (torch.bfloat16, torch.float32)


def outer_scales(
    a: Operand, b: Operand | Matrices, row_factors: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """S_dec of rows (M,) or (1,), of groups (G,) or (1,), and of columns (G*N,), the last two exclusive.

    Two scales of one group are multiplied here: it is the one rounding of their product all the same.
    row_factors: FP32 (M,), multiplied by the rows' own scales, where they have any, with one rounding.
    """
    row_scale, col_scale, of_groups = None, None, []
    for operand in (a, b):
        if _is_per_row(operand):
            if operand is a:
                row_scale = _outer_scale(operand)
            else:
                col_scale = _outer_scale(operand)
        elif isinstance(operand, QuantizedTensor | PackedWeights):
            of_groups.append(_outer_scale(operand))
    if col_scale is not None and of_groups:
        row_scale, of_groups = a.row_scale().contiguous(), []
    if row_factors is not None:
        row_scale = row_factors if row_scale is None else row_scale * row_factors
    return row_scale, _product(of_groups), col_scale


def group_scale(a: Operand, b: Operand) -> Tensor | None:
    """S_dec of every group (G,), or of all (1,), of a weight gradient's two operands, multiplied."""
    return _product([_outer_scale(o) for o in (a, b) if isinstance(o, QuantizedTensor)])


def _outer_scale(operand: QuantizedTensor | PackedWeights | SimulatedTensor) -> Tensor:
    if isinstance(operand, QuantizedTensor):
        return ops.outer_scale(operand.amax, operand.spec)
    return operand.outer_scale


def _product(scales: list[Tensor]) -> Tensor | None:
    return functools.reduce(torch.mul, scales) if scales else None


def _is_per_row(operand: Operand | Matrices) -> bool:
    if isinstance(operand, SimulatedTensor):
        return True
    return isinstance(operand, QuantizedTensor) and operand.spec.outer == "token"


def aligned(x: Tensor) -> Tensor:
    """x itself where a kernel can read and write it by 16 bytes, else a copy."""
    is_fit = x.is_contiguous() and x.data_ptr() % 16 == 0
    return x if is_fit else x.clone(memory_format=torch.contiguous_format)


@contextmanager
def written(out: Matrices) -> Iterator[Sequence[Tensor]]:
    """The targets where a kernel can write them, else FP32 stand-ins that are copied back afterwards."""
    out = out.unbind() if isinstance(out, Tensor) else out
    are_alike = len({t.dtype for t in out}) == 1 and out[0].dtype in GEMM_DTYPES
    targets = [aligned(t if are_alike else t.float()) for t in out]
    yield targets
    for target, result in zip(out, targets, strict=True):
        if target is not result:
            target.copy_(result)
