"""How two tensors differ: by bits, in units of the last place, and in size."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_nvfp4.quant import unpack_codes
from megatron_nvfp4.quant.nvfp4 import E2M1_VALUES

from .dump import bits_of

NUM_BINS = 18  # distances 1, 2-3, 4-7, ..., from 2^17 on


@dataclass(frozen=True)
class ValueDifference:
    """index: of the first unequal value, with both. max_abs, rel_l2: over values finite on both sides.

    num_nonfinite: values that are finite on one side only. max_ulp: None where the values are no floats.
    histogram: of distances in ulp, in bins of powers of two.
    """

    num_values: int
    num_unequal: int
    num_rows: int
    index: tuple[int, ...]
    left: float | int
    right: float | int
    max_abs: float
    rel_l2: float
    max_ulp: int | None
    num_nonfinite: int
    histogram: tuple[int, ...]


@dataclass(frozen=True)
class Numbers:
    """A tensor in three views of one shape: bits, values FP64, and, of floats, places on a line on which
    neighbouring numbers of the format are one apart (int64)."""

    bits: Tensor
    values: Tensor
    line: Tensor | None

    @classmethod
    def of(cls, what: str, tensor: Tensor) -> "Numbers":
        """Of a captured tensor; packed E2M1 codes become one number each."""
        if _is_packed(what, tensor):
            codes = unpack_codes(tensor)
            table = torch.tensor((*E2M1_VALUES, *(-value for value in E2M1_VALUES)))
            magnitude = (codes & 7).long()
            line = torch.where(codes >= 8, -magnitude, magnitude)
            return cls(codes, table.double()[codes.int()], line)
        bits = bits_of(tensor)
        if not tensor.is_floating_point():
            return cls(bits, tensor.double(), None)
        width = 8 * tensor.element_size() - 1
        signed = bits.long() if width > 7 else bits.long() - 256 * (bits >= 128)
        # Sign and magnitude to a line.
        line = torch.where(signed < 0, -(signed & ((1 << width) - 1)), signed)
        return cls(bits, tensor.double(), line)


def num_values_of(what: str, tensor: Tensor) -> int:
    """How many values are compared: of packed codes two a byte."""
    return tensor.numel() * (2 if _is_packed(what, tensor) else 1)


def _is_packed(what: str, tensor: Tensor) -> bool:
    return what.endswith(".codes") and tensor.dtype == torch.uint8


def compare_values(left: Numbers, right: Numbers) -> ValueDifference | None:
    """None where all bits are equal, so that +0 and -0 differ and a NaN equals itself; of one shape."""
    assert left.bits.shape == right.bits.shape, (left.bits.shape, right.bits.shape)
    assert left.bits.dtype == right.bits.dtype, (left.bits.dtype, right.bits.dtype)
    unequal = left.bits != right.bits
    num_unequal = int(unequal.sum())
    if not num_unequal:
        return None
    index = tuple(int(i) for i in unequal.nonzero()[0])
    a, b = left.values, right.values
    finite = torch.isfinite(a) & torch.isfinite(b)
    delta = torch.where(finite, a - b, 0)
    size = float(torch.where(finite, a, 0).norm())
    steps = None
    if left.line is not None:
        steps = (left.line - right.line).abs()[unequal & finite]
    rows = unequal.flatten(1).any(dim=1) if unequal.dim() > 1 else unequal
    return ValueDifference(
        num_values=unequal.numel(),
        num_unequal=num_unequal,
        num_rows=int(rows.sum()),
        index=index,
        left=a[index].item(),
        right=b[index].item(),
        max_abs=float(delta.abs().max()),
        rel_l2=float(delta.norm()) / size if size else float(delta.norm() > 0),
        max_ulp=int(steps.max()) if steps is not None and len(steps) else None,
        num_nonfinite=int((torch.isfinite(a) != torch.isfinite(b)).sum()),
        histogram=_histogram(steps),
    )


def _histogram(steps: Tensor | None) -> tuple[int, ...]:
    if steps is None or not len(steps):
        return (0,) * NUM_BINS
    bins = steps.clamp(min=1).double().log2().floor().long().clamp(max=NUM_BINS - 1)
    return tuple(torch.bincount(bins, minlength=NUM_BINS).tolist())
