"""Simulated floats ExMy, for studies of what bits of exponent and mantissa buy. Not a storage format.

A value is q * s_b * S_dec like NVFP4's, with one E4M3 scale per block of 16 and one FP32 outer scale per row,
and with |q| on the grid of ExMy (E exponent bits, M mantissa bits, bias = 2^(E-1) - 1):

    field 0:     |q| = m / 2^M * 2^(1 - bias)                m = 0 .. 2^M - 1 (zero and subnormals)
    field f > 0: |q| = (1 + m / 2^M) * 2^(f - bias)          f = 1 .. 2^E - 1

Every code is a number, there is no Inf and no NaN: MAX = (2 - 2^-M) * 2^(2^E - 1 - bias) is 6 for E2M1 and
480 for E4M3 (448 in the OCP format, whose last code is NaN). Rounding is to nearest, ties to even, saturating
at MAX; the sign of zero is kept and NaN becomes +MAX. The scales are nvfp4.py's with MAX for 6:

    S_enc = min(448 * MAX / amax_row, FLT_MAX), 1 if amax is 0 or Inf        S_dec = 1 / S_enc
    s_b   = e4m3(min(amax_b * (S_enc * fp32(1 / MAX)), FLT_MAX))
    q     = ExMy(x * min(1 / (s_b * S_dec), FLT_MAX))

so that E2M1 is NVFP4 per token, bit for bit. Up to E5M4 a product q * s_b has at most M + 5 significant bits
and is 0 or within 2^-27 .. 2^26: FP32 holds it exactly, BF16 up to M = 3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_nvfp4.recipes import FloatSpec

from .nvfp4 import (
    BLOCK,
    FLT_MAX,
    block_amax,
    check_amax,
    check_input,
    decode_scale,
    encode_e4m3,
    encode_scale,
    row_amax,
)


@dataclass(frozen=True)
class SimulatedTensor:
    """A matrix (M, K): values q FP32 (M, K), block_scales float8_e4m3fn (M, K/16), amax FP32 (M,)."""

    values: Tensor
    block_scales: Tensor
    amax: Tensor
    spec: FloatSpec

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.values.shape)

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def outer_scale(self) -> Tensor:
        """FP32 decode scale S_dec of every row (M,)."""
        return decode_scale(encode_scale(self.amax, code_max=largest(self.spec)))


def quantize_simulated(x: Tensor, spec: FloatSpec, amax: Tensor | None = None) -> SimulatedTensor:
    """Quantise a matrix (M, K) BF16, FP16 or FP32, K a multiple of 16, to a simulated float.

    amax: FP32 (M,), used instead of the rows' own. Raises ValueError for any other shape or dtype.
    """
    check_input(x)
    amax = row_amax(x) if amax is None else check_amax(amax, x.shape[0])
    blocks = x.float().reshape(x.shape[0], x.shape[1] // BLOCK, BLOCK)
    s_enc = encode_scale(amax, code_max=largest(spec))[:, None]
    inverse = torch.tensor(1 / largest(spec), dtype=torch.float32)
    scales = encode_e4m3(
        torch.clamp_max(block_amax(blocks, (1, BLOCK)) * (s_enc * inverse), FLT_MAX)
    )
    s_dec = decode_scale(s_enc)
    multiplier = torch.clamp_max(torch.reciprocal(scales.float() * s_dec), FLT_MAX)
    values = round_to_float(blocks * multiplier[..., None], spec)
    return SimulatedTensor(values.reshape(x.shape), scales, amax.contiguous(), spec)


def decode_simulated(st: SimulatedTensor) -> Tensor:
    """q * s_b as FP32 (M, K), exact; a row's value is this times its outer scale."""
    return st.values * st.block_scales.float().repeat_interleave(BLOCK, dim=1)


def largest(spec: FloatSpec) -> float:
    """MAX of the format."""
    bias = 2 ** (spec.exponent - 1) - 1
    return (2 - 2.0**-spec.mantissa) * 2.0 ** (2**spec.exponent - 1 - bias)


def round_to_float(x: Tensor, spec: FloatSpec) -> Tensor:
    """FP32 to the nearest value of the format, as FP32: ties to even, saturating, NaN to +MAX."""
    magnitude = x.abs()
    magnitude = torch.where(magnitude < largest(spec), magnitude, largest(spec))  # NaN too
    # Powers of two: below the first normal number the step stays what it is there.
    smallest = 2 - 2 ** (spec.exponent - 1)
    exponent = torch.clamp_min((magnitude.view(torch.int32) >> 23) - 127, smallest)
    step = ((exponent - spec.mantissa + 127) << 23).view(torch.float32)
    rounded = torch.round(magnitude / step) * step
    return torch.where(torch.isnan(x), rounded, torch.copysign(rounded, x))
