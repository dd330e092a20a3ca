"""Statistics of a tensor, and of what quantisation did to it, as vectors that stay on the tensor's device.

Nothing here waits for a GPU: the caller brings many vectors to the host at once.
"""

import torch
from torch import Tensor
from torch.linalg import vector_norm

from megatron_nvfp4.quant import (
    MXFP8Tensor,
    QuantizedTensor,
    SimulatedTensor,
    decode_mxfp8,
    decode_simulated,
    dequantize,
    unpack_codes,
)
from megatron_nvfp4.quant.nvfp4 import BLOCK, block_amax

Quantized = QuantizedTensor | MXFP8Tensor | SimulatedTensor
VALUES = ("min", "max", "mean", "l1", "l2", "amax", "num_values", "num_zeros", "nonfinite_rows")
ERRORS = ("rel_l2", "snr_db", "mae")
CODES = ("num_blocks", "zero_blocks", "flushed_blocks", "max_codes", "saturated_codes")
CHUNK = 1 << 24  # elements that are copied to FP64 at once


@torch.no_grad()
def value_statistics(x: Tensor) -> Tensor:
    """VALUES of a floating-point tensor of any shape, FP64 (9,).

    All but nonfinite_rows are taken over the finite values; min, max and mean are NaN where there are none.
    A row is what the last axis spans. Sums are FP64.
    """
    rows = x.detach().reshape(-1, x.shape[-1]) if x.dim() else x.detach().reshape(1, 1)
    zero = torch.zeros((), dtype=torch.float64, device=x.device)
    low, high, total, l1, l2, finite, zeros, bad = (zero.clone() for _ in range(8))
    low, high = low + float("inf"), high - float("inf")
    for part in _chunks(rows):
        is_finite = torch.isfinite(part)
        values = torch.where(is_finite, part, 0)
        low = torch.minimum(low, torch.where(is_finite, part, float("inf")).amin())
        high = torch.maximum(high, torch.where(is_finite, part, -float("inf")).amax())
        total = total + values.sum(dtype=torch.float64)
        l1 = l1 + vector_norm(values, 1, dtype=torch.float64)
        l2 = torch.hypot(l2, vector_norm(values, dtype=torch.float64))
        finite, zeros = finite + is_finite.sum(), zeros + (part == 0).sum()
        bad = bad + (~is_finite.all(dim=1)).sum()
    some, nan = finite > 0, float("nan")
    low, high = torch.where(some, low, nan), torch.where(some, high, nan)
    amax = torch.where(some, torch.maximum(low.abs(), high.abs()), 0)
    mean = torch.where(some, total / finite, nan)
    num_values = zero + rows.numel()
    return torch.stack((low, high, mean, l1, l2, amax, num_values, zeros, bad))


@torch.no_grad()
def error_statistics(x: Tensor, decoded: Tensor) -> Tensor:
    """ERRORS of an operand against the x (M, K) that it was made of, FP64 (3,); decoded: decode(operand).

    rel_l2 = |x - d| / |x|, snr_db = -20 log10(rel_l2), mae = mean |x - d|, over rows of finite x; 0, infinity
    and 0 where nothing is lost. Differences are FP32, sums FP64.
    """
    zero = torch.zeros((), dtype=torch.float64, device=x.device)
    error, signal, absolute, count = (zero.clone() for _ in range(4))
    for values, of_codes in zip(_chunks(x.detach()), _chunks(decoded), strict=True):
        counts = torch.isfinite(values).all(dim=1, keepdim=True)
        lost = torch.where(counts, of_codes - values.float(), 0)
        error = torch.hypot(error, vector_norm(lost, dtype=torch.float64))
        values = torch.where(counts, values, 0)
        signal = torch.hypot(signal, vector_norm(values, dtype=torch.float64))
        absolute = absolute + vector_norm(lost, 1, dtype=torch.float64)
        count = count + counts.sum() * x.shape[1]
    rel_l2 = torch.where(error > 0, error / signal, 0)
    mae = torch.where(count > 0, absolute / count, 0)
    return torch.stack((rel_l2, -20 * torch.log10(rel_l2), mae))


@torch.no_grad()
def code_statistics(x: Tensor, operand: QuantizedTensor, decoded: Tensor) -> Tensor:
    """CODES of an NVFP4 operand and the x (M, K) that it was made of, FP64 (5,).

    zero_blocks: blocks whose values are all 0. flushed_blocks: those with other values and a block scale of
    0, which decode to 0. max_codes: codes of +-6. saturated_codes: those of them whose value was larger
    than what they decode to. A 16x16 block counts once for each of its rows.
    """
    zero = torch.zeros((), dtype=torch.float64, device=x.device)
    zeros, flushed, largest, saturated = (zero.clone() for _ in range(4))
    parts = (x.detach(), operand.codes, operand.block_scales, decoded)
    rows = max(16, CHUNK // max(x.shape[1], 1) // 16 * 16)  # whole tiles
    for start in range(0, x.shape[0], rows):
        values, codes, scales, of_codes = (part[start : start + rows] for part in parts)
        amax = block_amax(values.float().reshape(len(values), -1, BLOCK), operand.spec.block)
        zeros = zeros + (amax == 0).sum()
        flushed = flushed + ((amax > 0) & (scales.float() == 0)).sum()
        is_largest = (unpack_codes(codes) & 7) == 7
        largest = largest + is_largest.sum()
        saturated = saturated + (is_largest & (values.abs() > of_codes.abs())).sum()
    return torch.stack((zero + operand.block_scales.numel(), zeros, flushed, largest, saturated))


def decode(operand: Quantized) -> Tensor:
    """The values of a quantised matrix, FP32 (M, K), by its format's own definition."""
    if isinstance(operand, QuantizedTensor):
        return dequantize(operand, torch.float32)
    if isinstance(operand, MXFP8Tensor):
        return decode_mxfp8(operand)
    return decode_simulated(operand) * operand.outer_scale[:, None]


def _chunks(rows: Tensor) -> list[Tensor]:
    size = max(1, CHUNK // max(rows.shape[1], 1))
    return list(rows.split(size)) if rows.numel() else []
