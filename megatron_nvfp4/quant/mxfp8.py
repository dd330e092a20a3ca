"""MXFP8, the definition: E4M3 codes with one E8M0 scale per 32 elements along the contraction.

    e = e8m0_up(amax_b * fp32(1/448))        the power of two at or above, biased by 127
    q = e4m3(x * 2^(127 - e))

as TE's MXFP8BlockScaling (cvt.rp.satfinite.ue8m0x2 and cvt.rn.satfinite.e4m3x2); no outer scale. A value
decodes to q * 2^(e - 127), which BF16 holds exactly except where it falls below BF16's normal range.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import INPUT_DTYPES

BLOCK = 32
E4M3_MAX = 448.0


@dataclass(frozen=True)
class MXFP8Tensor:
    """An MXFP8 matrix (M, K): codes float8_e4m3fn (M, K), block_scales uint8 E8M0 (M, K/32)."""

    codes: Tensor
    block_scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.codes.shape)

    @property
    def device(self) -> torch.device:
        return self.codes.device


def quantize_mxfp8(x: Tensor) -> MXFP8Tensor:
    """Quantise a matrix (M, K), K a multiple of 32, with 1x32 blocks; columnwise is quantize_mxfp8(x.t()).

    NaN and Inf do not take part in a scale's amax beyond saturating it; a NaN stays NaN (code 0x7F).
    """
    if x.dim() != 2 or x.shape[1] % BLOCK:
        raise ValueError(
            f"quantize_mxfp8: shape {tuple(x.shape)}; give (M, K) with K a multiple of 32, "
            "or leave this layer in BF16"
        )
    if x.dtype not in INPUT_DTYPES:
        raise ValueError(f"quantize_mxfp8: x is {x.dtype}; give BF16, FP16 or FP32")
    blocks = x.float().reshape(x.shape[0], x.shape[1] // BLOCK, BLOCK)
    amax = torch.nan_to_num(blocks.abs(), nan=0.0, posinf=float("inf")).amax(dim=2)
    exponents = encode_e8m0(amax * torch.tensor(1 / 448, dtype=torch.float32))
    scaled = _scale_by_power(blocks, (127 - exponents.int())[..., None])
    # torch's cast keeps the sign of a NaN (0xFF), the hardware's does not.
    scaled = torch.where(torch.isnan(scaled), torch.nan, scaled)
    codes = torch.clamp(scaled, -E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return MXFP8Tensor(codes.reshape(x.shape), exponents)


def encode_e8m0(x: Tensor) -> Tensor:
    """FP32 >= 0 to the biased exponent of the power of two at or above it, uint8; Inf saturates at 254."""
    bits = x.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # A subnormal up to 2^-127 is covered by exponent 0, the value 2^-127.
    up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= 0x400000))
    return torch.clamp_max(exponent + up.int(), 254).to(torch.uint8)


def decode_mxfp8(qt: MXFP8Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(M, K) values q * 2^(e - 127) in `dtype`."""
    num_rows, num_cols = qt.shape
    blocks = qt.codes.float().reshape(num_rows, num_cols // BLOCK, BLOCK)
    exponents = (qt.block_scales.int() - 127)[..., None]
    return _scale_by_power(blocks, exponents).reshape(num_rows, num_cols).to(dtype)


def _scale_by_power(x: Tensor, exponent: Tensor) -> Tensor:
    """x * 2^exponent for int32 exponents -127..127, rounded once: FP32 holds all these powers exactly."""
    bits = torch.where(exponent > -127, (exponent + 127) << 23, 0x400000)  # 2^-127 is subnormal
    return x * bits.to(torch.int32).view(torch.float32)
