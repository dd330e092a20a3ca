"""NVFP4, the definition: every bit the project produces is defined here.

x ~ q * s_b * S_dec with q an E2M1 code, s_b an E4M3 scale per block of 16 and S_dec an FP32 outer scale
derived from the stored amax of the tensor, the group (expert) or the token row:

    S_enc = min(E * 6 / amax, FLT_MAX), 1 if amax is 0 or Inf        S_dec = 1 / S_enc
    s_b   = e4m3(min(amax_b * (S_enc * fp32(1/6)), FLT_MAX))         (E = e4m3_max, 448 or 256)
    q     = e2m1(x * min(1 / (s_b * S_dec), FLT_MAX))

Every operation is one FP32 round-to-nearest-even: no FMA, no flush to zero, no fast math. The codes, scales
and amax are those of Transformer Engine 2.20 (common/cast/nvfp4, transpose/quantize_transpose_vector_
blockwise_fp4.cu), of FlashInfer with FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1, and with four_over_six of
TE's quantize_4over6_nvfp4.cuh. `csrc/numerics.h` mirrors this file function by function.

Special values, decided here:
- A scaled -0.0, and a negative that rounds to zero, keep their sign (code 8), as the hardware conversion
  does; TE's Python reference writes 0 for -0.0.
- NaN does not take part in an amax and encodes as +6 (code 7), as the kernels of both peers do.
- Inf makes amax Inf, hence S_enc = 1: it decodes to 2688, the finite rest of its row or tensor is encoded
  without an outer scale. Neither touches another row (outer="token"). `count_nonfinite` counts both, and
  callers in strict mode raise.
- A block whose scale underflows to 0 gets codes by saturation and decodes to 0.

With rounding="stochastic" the last step is encode_e2m1_stochastic on the bits of transforms.random_bits; amax
and scales stay rounded to nearest.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_nvfp4.recipes import NVFP4Spec

from .layout import INPUT_DTYPES, check_offsets, expand_groups, pack_codes, unpack_codes
from .transforms import RANDOM_BITS, random_bits

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
FLT_MAX = torch.finfo(torch.float32).max
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class QuantizedTensor:
    """An NVFP4 matrix of logical shape (M, K).

    codes: uint8 (M, K/2), two E2M1 codes a byte, even column in the low nibble.
    block_scales: float8_e4m3fn (M, K/16), linear (see layout.swizzle_scales); a 16x16 tile's scale stands
        in each of its rows.
    amax: FP32 (1,) for outer="tensor", (M,) for "token", (G,) for a grouped tensor.
    offsets: (G+1,) row boundaries of the groups of a grouped tensor, else None.
    column_offsets: the same of groups of columns, the contraction groups of a grouped weight gradient.
    """

    codes: Tensor
    block_scales: Tensor
    amax: Tensor
    spec: NVFP4Spec
    offsets: Tensor | None = None
    column_offsets: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return (self.codes.shape[0], self.codes.shape[1] * 2)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def outer_scale(self) -> Tensor:
        """FP32 decode scale S_dec, of amax's shape."""
        return decode_scale(encode_scale(self.amax, self.spec.e4m3_max))

    def row_scale(self, group: int | None = None) -> Tensor:
        """S_dec of every row, FP32 (M,); of groups of columns, in the columns of `group`."""
        if self.column_offsets is not None:
            assert group is not None, "a row of grouped columns has one scale per group"
            return self.outer_scale[group].expand(self.shape[0])
        if self.spec.outer == "token":
            return self.outer_scale
        if self.offsets is None:
            return self.outer_scale.expand(self.shape[0])
        return expand_groups(self.outer_scale, self.offsets, self.shape[0])


@torch.no_grad()
def quantize(
    x: Tensor,
    spec: NVFP4Spec | None = None,
    amax: Tensor | None = None,
    *,
    column_offsets: Tensor | None = None,
    seed: int | None = None,
    offset: int = 0,
) -> QuantizedTensor:
    """Quantise a matrix to NVFP4.

    x: (M, K) BF16, FP16 or FP32, M >= 0, K a multiple of 16; with 16x16 blocks a last partial tile is
        completed by zeros that are not stored.
    amax: FP32 (1,) or, with outer="token", (M,): used instead of x's own (a reduction over shards, say).
    column_offsets: (G+1,) boundaries from 0 to K of column groups, of whole blocks each (not looked at), with
        one amax each, FP32 (G,). Only with outer="tensor".
    seed, offset: what stochastic rounding is a function of, beside the element's index; see random_bits.
    Columnwise quantisation is quantize(x.t()), after a random Hadamard transform quantize(rht(x.t())).
    Raises ValueError for any other shape, dtype or spec, or a seed missing.
    """
    spec = spec or NVFP4Spec()
    check_input(x)
    bits = _bits_for(x, spec, seed, offset)
    if column_offsets is not None:
        if spec.outer == "token":
            raise ValueError("quantize: column_offsets with outer='token'; use outer='tensor'")
        num_groups = column_offsets.numel() - 1
        amax = group_amax(x.t(), column_offsets) if amax is None else check_amax(amax, num_groups)
        of_column = expand_groups(amax, column_offsets, x.shape[1])
        quantized = _quantize_rows(x, spec, amax, of_column[None, ::BLOCK], bits)
        return replace(quantized, column_offsets=column_offsets)
    num_amax = x.shape[0] if spec.outer == "token" else 1
    if amax is None:
        amax = row_amax(x) if spec.outer == "token" else tensor_amax(x)
    else:
        amax = check_amax(amax, num_amax)
    return _quantize_rows(x, spec, amax, amax[:, None], bits)


@torch.no_grad()
def quantize_grouped(
    x: Tensor,
    offsets: Tensor,
    spec: NVFP4Spec | None = None,
    amax: Tensor | None = None,
    *,
    seed: int | None = None,
    offset: int = 0,
) -> QuantizedTensor:
    """Quantise the row groups of a matrix, each as if alone: one amax per group (or per token).

    x: (M, K); offsets: (G+1,) integer row boundaries from 0 to M, on x's device; empty groups get amax 0.
    amax: FP32 (G,), or (M,) with outer="token", instead of x's own.
    seed, offset: as in quantize; an element's index is the one in all of x.
    Equals quantize() of every group bit for bit, but for the random bits. With 16x16 blocks every group must
    be whole tiles.
    """
    spec = spec or NVFP4Spec()
    check_input(x)
    check_offsets(offsets, x.shape[0])
    bits = _bits_for(x, spec, seed, offset)
    num_groups = offsets.numel() - 1
    if spec.outer == "token":
        amax = row_amax(x) if amax is None else check_amax(amax, x.shape[0])
        return replace(_quantize_rows(x, spec, amax, amax[:, None], bits), offsets=offsets)
    if spec.block == (16, 16) and bool((offsets % BLOCK != 0).any()):
        raise ValueError(
            f"quantize_grouped: offsets {offsets.tolist()} cut 16x16 tiles; "
            "pad every group to a multiple of 16 rows or use block=(1, 16)"
        )
    if amax is None:
        amax = group_amax(x, offsets)
    else:
        amax = check_amax(amax, num_groups)
    of_row = expand_groups(amax, offsets, x.shape[0])
    return replace(_quantize_rows(x, spec, amax, of_row[:, None], bits), offsets=offsets)


def decode_exact(qt: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """(q * s_b as BF16 (M, K), S_dec as FP32 of amax's shape): no rounding anywhere.

    q * s_b has at most 6 significant bits and lies in 2^-10 .. 2688, so BF16 holds it exactly.
    """
    return _code_times_scale(qt).to(torch.bfloat16), qt.outer_scale


def dequantize(qt: QuantizedTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """(M, K) values in `dtype`: RN(RN(q * s_b * S_dec) to dtype), the FP32 product rounded once.

    TE's dequantize kernel multiplies s_b by amax / 2688 instead, which overflows above 7.6e35 and differs
    in the last BF16 bit for 2e-5 of the elements.
    """
    if qt.column_offsets is None:
        scale = qt.row_scale()[:, None]
    else:
        scale = expand_groups(qt.outer_scale, qt.column_offsets, qt.shape[1])
    return (_code_times_scale(qt) * scale).to(dtype)


def count_nonfinite(x: Tensor) -> Tensor:
    """Number of rows of x (M, K) that hold a NaN or an Inf, an int64 scalar on x's device."""
    return (~torch.isfinite(x).all(dim=1)).sum()


def row_amax(x: Tensor) -> Tensor:
    """max |x| of every row, FP32 (M,); NaN does not take part."""
    return _magnitude(x).amax(dim=1) if x.shape[1] else x.new_zeros(x.shape[0]).float()


def tensor_amax(x: Tensor) -> Tensor:
    """max |x|, FP32 (1,); 0 for an empty matrix; NaN does not take part."""
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    return _magnitude(x).amax().reshape(1)


def group_amax(x: Tensor, offsets: Tensor) -> Tensor:
    """max |x| of every row group, FP32 (G,); 0 for an empty group; no host synchronisation."""
    num_groups = offsets.numel() - 1
    amax = torch.zeros(num_groups, dtype=torch.float32, device=x.device)
    if x.shape[0] == 0:
        return amax
    group = expand_groups(torch.arange(num_groups, device=x.device), offsets, x.shape[0])
    return amax.scatter_reduce(0, group, row_amax(x), reduce="amax", include_self=True)


def encode_scale(amax: Tensor, e4m3_max: int = 448, code_max: float = E2M1_MAX) -> Tensor:
    """S_enc of an FP32 amax: maps it to the largest block scale times the largest code."""
    scale = torch.clamp_max(_divide(e4m3_max * code_max, amax), FLT_MAX)
    return torch.where((amax == 0) | (scale == 0), torch.ones_like(scale), scale)


def decode_scale(s_enc: Tensor) -> Tensor:
    """S_dec = RN(1 / S_enc)."""
    return torch.reciprocal(s_enc)


def encode_e4m3(x: Tensor) -> Tensor:
    """FP32 >= 0 to float8_e4m3fn, ties to even, saturating at 448 (torch's own cast gives NaN from 465)."""
    return torch.clamp_max(x, E4M3_MAX).to(torch.float8_e4m3fn)


def encode_e2m1(x: Tensor) -> Tensor:
    """FP32 to E2M1 codes, uint8 0..15: ties to even, saturating, sign of zero kept, NaN to +6.

    Codes count upwards in steps of 0.5 below 2, of 1 below 4, of 2 above: on each stretch the code is a
    rounded multiple plus a constant, and the stretch that counts is the one with the smallest code.
    """
    magnitude = x.abs()
    # Not fmin: it keeps a signalling NaN, whose cast to an integer is undefined.
    magnitude = torch.where(magnitude < E2M1_MAX, magnitude, E2M1_MAX)
    halves, ones, twos = (torch.round(magnitude * factor) for factor in (2.0, 1.0, 0.5))
    code = torch.minimum(halves, torch.minimum(ones + 2, twos + 4)).to(torch.uint8)
    negative = torch.signbit(x) & ~torch.isnan(x)
    return code + negative.to(torch.uint8) * 8


def encode_e2m1_stochastic(x: Tensor, bits: Tensor) -> Tensor:
    """FP32 to E2M1 codes, uint8 0..15, up or down at random; `bits` as random_bits, of x's shape.

    t = |x| + u * step, rounded once to FP32, falls to the E2M1 value at or below it; u = (bits + 1/2) / 2^16
    and step the distance of the E2M1 values around |x|. An E2M1 value stays as it is; of any other |x| < 6
    the mean over all `bits` is off by at most 2^-17 of a step (and FP32's rounding of t). |x| above 6
    saturates, the sign of zero is kept, NaN goes to +6. Form of Transformer Engine's software rounder, which
    takes 8 bits.
    """
    magnitude = x.abs()
    magnitude = torch.where(magnitude < E2M1_MAX, magnitude, E2M1_MAX)
    half, one = torch.full_like(magnitude, 0.5), torch.full_like(magnitude, 1.0)
    step = torch.where(magnitude < 2.0, half, torch.where(magnitude < 4.0, one, 2 * one))
    t = magnitude + (bits.float() + 0.5) * 2.0**-RANDOM_BITS * step
    halves, ones, twos = (torch.floor(t * factor) for factor in (2.0, 1.0, 0.5))
    code = torch.minimum(halves, torch.minimum(ones + 2, twos + 4)).to(torch.uint8)
    negative = torch.signbit(x) & ~torch.isnan(x)
    return code + negative.to(torch.uint8) * 8


def _quantize_rows(
    x: Tensor, spec: NVFP4Spec, amax: Tensor, amax_of_block: Tensor, bits: Tensor | None
) -> QuantizedTensor:
    """amax_of_block: what blocks are encoded under, broadcastable to (M, K/16); bits: see encode_blocks."""
    num_rows, num_cols = x.shape
    blocks = x.float().reshape(num_rows, num_cols // BLOCK, BLOCK)
    s_enc = encode_scale(amax_of_block, spec.e4m3_max)
    s_dec = decode_scale(s_enc)
    amax_b = block_amax(blocks, spec.block)
    if spec.four_over_six is None:
        scales = encode_e4m3(
            torch.clamp_max(amax_b * (s_enc * torch.tensor(1 / 6, dtype=torch.float32)), FLT_MAX)
        )
        codes = encode_blocks(blocks, scales, s_dec, bits)
    else:
        base = _divide(amax_b, E2M1_MAX) * s_enc
        by_six, by_four = encode_e4m3(base), encode_e4m3(base * 1.5)
        codes_six = encode_blocks(blocks, by_six, s_dec)
        codes_four = encode_blocks(blocks, by_four, s_dec)
        outer = (amax_of_block, s_enc)
        error_six = block_error(blocks, codes_six, by_six, outer, spec)
        error_four = block_error(blocks, codes_four, by_four, outer, spec)
        four = error_four < error_six
        scales = torch.where(four, by_four.float(), by_six.float()).to(torch.float8_e4m3fn)
        codes = torch.where(four[..., None], codes_four, codes_six)
    packed = pack_codes(codes.reshape(num_rows, num_cols))
    return QuantizedTensor(packed, scales, amax.contiguous(), spec)


def block_amax(blocks: Tensor, block: tuple[int, int]) -> Tensor:
    """max |x| of every block, (M, K/16), NaN not taking part; a tile's value stands in each of its rows."""
    amax = _magnitude(blocks).amax(dim=2)
    return amax if block[0] == 1 else _over_tiles(amax, lambda tiles: tiles.amax(dim=1))


def encode_blocks(
    blocks: Tensor, scales: Tensor, s_dec: Tensor, bits: Tensor | None = None
) -> Tensor:
    """Codes of FP32 blocks (M, K/16, 16) under E4M3 scales (M, K/16) and S_dec, broadcastable to them.

    bits: random bits of every element (M, K) for stochastic rounding, else None.
    """
    multiplier = torch.clamp_max(torch.reciprocal(scales.float() * s_dec), FLT_MAX)
    scaled = blocks * multiplier[..., None]
    if bits is None:
        return encode_e2m1(scaled)
    return encode_e2m1_stochastic(scaled, bits.reshape(scaled.shape))


def block_error(
    blocks: Tensor,
    codes: Tensor,
    scales: Tensor,
    outer: tuple[Tensor, Tensor],
    spec: NVFP4Spec,
) -> Tensor:
    """Error of every block (M, K/16) under candidate codes and scales, FP32, elements 0..15 in sequence.

    outer: (amax, S_enc), each broadcastable to (M, K/16).
    strict: |q*s_b*amax/(6E) - x|. fast: |fp16(q*s_b) - x*S_enc|.
    A 16x16 tile adds its rows' errors as a tree with strides 8, 4, 2, 1.
    """
    amax, s_enc = outer
    scaled = _e2m1_values(codes.device)[codes.int()] * scales.float()[..., None]
    if spec.error == "strict":
        difference = _divide(scaled * amax[..., None], E2M1_MAX * spec.e4m3_max) - blocks
    else:
        difference = scaled - blocks * s_enc[..., None]
    terms = difference.abs() if spec.four_over_six == "mae" else difference * difference
    error = torch.zeros_like(terms[..., 0])
    for position in range(BLOCK):
        error = error + terms[..., position]
    return error if spec.block[0] == 1 else _over_tiles(error, _tree_sum)


def _tree_sum(tiles: Tensor) -> Tensor:
    stride = BLOCK // 2
    while stride:
        tiles = tiles[:, :stride] + tiles[:, stride : 2 * stride]
        stride //= 2
    return tiles[:, 0]


def _over_tiles(values: Tensor, reduce) -> Tensor:
    """Reduce (M, C) over groups of 16 rows (zeros complete the last) and repeat the result per row."""
    num_rows, num_cols = values.shape
    num_tiles = -(-num_rows // BLOCK)
    padded = values.new_zeros(num_tiles * BLOCK, num_cols)
    padded[:num_rows] = values
    reduced = reduce(padded.reshape(num_tiles, BLOCK, num_cols))
    return reduced.repeat_interleave(BLOCK, dim=0)[:num_rows]


def _code_times_scale(qt: QuantizedTensor) -> Tensor:
    num_rows, num_cols = qt.shape
    values = _e2m1_values(qt.device)[unpack_codes(qt.codes).int()]
    scaled = values.reshape(num_rows, num_cols // BLOCK, BLOCK) * qt.block_scales.float()[..., None]
    return scaled.reshape(num_rows, num_cols)


def _divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """RN(a / b) in FP32. torch multiplies by a rounded reciprocal when either side is a Python number."""
    device = a.device if isinstance(a, Tensor) else b.device
    # torch.full fills on the device; torch.as_tensor would copy from the host and wait.
    a, b = (
        v if isinstance(v, Tensor) else torch.full((), v, dtype=torch.float32, device=device)
        for v in (a, b)
    )
    return torch.div(*torch.broadcast_tensors(a, b))


def _magnitude(x: Tensor) -> Tensor:
    """|x| in FP32 with NaN as 0."""
    return torch.nan_to_num(x.float().abs(), nan=0.0, posinf=float("inf"))


def _e2m1_values(device: torch.device) -> Tensor:
    positive = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=device)
    return torch.cat((positive, -positive))


def _bits_for(x: Tensor, spec: NVFP4Spec, seed: int | None, offset: int) -> Tensor | None:
    """Random bits of every element of x if the spec takes any."""
    if spec.rounding == "nearest":
        return None
    if seed is None:
        raise ValueError(f"quantize: {spec} without a seed; give seed=, an integer")
    return random_bits(*x.shape, seed, offset, x.device)


def check_input(x: Tensor) -> None:
    """ValueError unless x is a BF16, FP16 or FP32 matrix (M, K), K a multiple of 16."""
    if x.dim() != 2:
        raise ValueError(f"quantize: x has shape {tuple(x.shape)}; give a matrix (M, K)")
    if x.dtype not in INPUT_DTYPES:
        raise ValueError(f"quantize: x is {x.dtype}; give BF16, FP16 or FP32")
    if x.shape[1] % BLOCK:
        raise ValueError(
            f"quantize: K={x.shape[1]} is not a multiple of 16; pad the columns or leave this layer in BF16"
        )


def check_amax(amax: Tensor, num: int) -> Tensor:
    """amax, if it is FP32 (num,); else ValueError."""
    if amax.shape != (num,) or amax.dtype != torch.float32:
        raise ValueError(
            f"quantize: amax is {amax.dtype} {tuple(amax.shape)}; give float32 ({num},) as the spec's outer"
        )
    return amax.clone()  # the result keeps it, whatever becomes of the caller's
