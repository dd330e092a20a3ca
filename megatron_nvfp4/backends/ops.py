"""The compiled operators as functions on quant's types, for every device they have kernels for.

torch dispatches on the device; the fakes below let torch.compile and FakeTensor see through them.
"""

import functools

import torch
from torch import Tensor

from megatron_nvfp4.quant import MXFP8Tensor, QuantizedTensor, SimulatedTensor
from megatron_nvfp4.quant.layout import expand_groups
from megatron_nvfp4.recipes import MXFP8, FloatSpec, Format, NVFP4Spec

from . import Operand, extension

METRICS = (None, "mae", "mse")


def quantize(x: Tensor, spec: Format, *, amax=None, offsets=None, **options) -> Operand:
    """x (M, K) in a quantised format, as Backend.quantize; MXFP8 and simulated floats take no groups."""
    if isinstance(spec, NVFP4Spec):
        return quantize_nvfp4(x, spec, amax, offsets, **options)
    if options.get("rotated"):
        raise ValueError(f"quantize: {rotation_fault(spec)}")
    return quantize_mxfp8(x) if spec == MXFP8 else quantize_simulated(x, spec, amax)


def rotation_fault(spec: Format) -> str | None:
    """Why no kernel quantises rht(x) to this format, or None."""
    if isinstance(spec, NVFP4Spec) and has_columns(spec):
        return None
    return f"no kernel rotates to {spec}; use nvfp4 1x16 per tensor, or backend='reference'"


def quantize_nvfp4(
    x: Tensor,
    spec: NVFP4Spec,
    amax: Tensor | None = None,
    offsets: Tensor | None = None,
    *,
    column_offsets: Tensor | None = None,
    rotated: bool = False,
    seed: int | None = None,
    offset: int = 0,
) -> QuantizedTensor:
    """quant.quantize, or with offsets (G+1,) quant.quantize_grouped, bit for bit; rotated: of quant.rht(x).

    x: (M, K) BF16, FP16 or FP32, of any strides; a transposed matrix is not turned in memory.
    Raises ValueError for what those functions refuse and for columns that has_columns lacks, and
    RuntimeError if the extension cannot be used.
    """
    if spec.rounding == "stochastic" and seed is None:
        raise ValueError(f"quantize: {spec} without a seed; give seed=, an integer")
    must_turn = rotated or column_offsets is not None
    if must_turn and (offsets is not None or not has_columns(spec)):
        raise ValueError(
            f"quantize: {spec} has no kernel for rotation or groups of columns"
            f"{' together with groups of rows' if offsets is not None else ''}; "
            "use 1x16 blocks, outer='tensor' without four-over-six, or backend='reference'"
        )
    if must_turn or (_is_transposed(x) and offsets is None and has_columns(spec)):
        stochastic = spec.rounding == "stochastic"
        parts = _ops().quantize_nvfp4_columns(
            x.t(),
            amax,
            column_offsets,
            spec.e4m3_max,
            rotated,
            stochastic,
            *_key(seed, offset if stochastic else 0),
        )
        return QuantizedTensor(*parts, spec, column_offsets=column_offsets)
    if spec.rounding == "stochastic":
        parts = _ops().quantize_nvfp4_stochastic(
            x,
            amax,
            None if spec.outer == "token" else offsets,
            spec.block[0],
            spec.outer == "token",
            spec.e4m3_max,
            *_key(seed, offset),
        )
        return QuantizedTensor(*parts, spec, offsets)
    codes, block_scales, amax_used = _ops().quantize_nvfp4(
        x,
        amax,
        None if spec.outer == "token" else offsets,
        spec.block[0],
        spec.outer == "token",
        spec.e4m3_max,
        METRICS.index(spec.four_over_six),
        spec.error == "fast",
    )
    return QuantizedTensor(codes, block_scales, amax_used, spec, offsets)


def has_columns(spec: NVFP4Spec) -> bool:
    """Whether the kernels take x.t() of a contiguous x, rotated and in groups on request, to this format."""
    return spec.block == (1, 16) and spec.outer == "tensor" and spec.four_over_six is None


def _is_transposed(x: Tensor) -> bool:
    return x.dim() == 2 and not x.is_contiguous() and x.t().is_contiguous()


def _key(seed: int | None, offset: int) -> list[int]:
    """Both modulo 2^64, as the operators' signed integers."""
    return [(value + 2**63) % 2**64 - 2**63 for value in (seed or 0, offset)]


def outer_scale(amax: Tensor, spec: NVFP4Spec) -> Tensor:
    """S_dec of an FP32 amax, as QuantizedTensor.outer_scale, bit for bit."""
    return _ops().outer_scale(amax, spec.e4m3_max)


def decode(qt: QuantizedTensor) -> Tensor:
    """q * s_b as BF16 (M, K), exact: the first part of quant.decode_exact."""
    return _ops().decode_nvfp4(qt.codes, qt.block_scales)


def dequantize(qt: QuantizedTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """quant.dequantize, bit for bit: (M, K) in BF16, FP16 or FP32."""
    if qt.column_offsets is not None:
        raise ValueError("dequantize: no kernel for groups of columns; use quant.dequantize")
    row_scale = outer_scale(qt.amax, qt.spec)
    if qt.offsets is not None and qt.spec.outer == "tensor":
        row_scale = expand_groups(row_scale, qt.offsets, qt.shape[0])
    return _ops().dequantize_nvfp4(qt.codes, qt.block_scales, row_scale, dtype)


def quantize_mxfp8(x: Tensor) -> MXFP8Tensor:
    """quant.quantize_mxfp8, bit for bit; x (M, K) BF16, FP16 or FP32, of any strides.

    A transposed matrix is not turned in memory.
    """
    if _is_transposed(x):
        return MXFP8Tensor(*_ops().quantize_mxfp8_columns(x.t()))
    return MXFP8Tensor(*_ops().quantize_mxfp8(x))


def quantize_simulated(x: Tensor, spec: FloatSpec, amax: Tensor | None = None) -> SimulatedTensor:
    """quant.quantize_simulated, bit for bit; x (M, K) BF16, FP16 or FP32, of any strides."""
    parts = _ops().quantize_simulated(x, amax, spec.exponent, spec.mantissa)
    return SimulatedTensor(*parts, spec)


def decode_mxfp8(qt: MXFP8Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """quant.decode_mxfp8, bit for bit: (M, K) in BF16, FP16 or FP32."""
    return _ops().dequantize_mxfp8(qt.codes, qt.block_scales, dtype)


@functools.cache
def _ops():
    """torch.ops.megatron_nvfp4 with the extension loaded and the fakes registered, once."""
    extension.load()
    fakes = (
        _fake_quantize_nvfp4,
        _fake_quantize_nvfp4_stochastic,
        _fake_quantize_nvfp4_columns,
        _fake_quantize_simulated,
        _fake_outer_scale,
        _fake_decode_nvfp4,
        _fake_dequantize_nvfp4,
        _fake_quantize_mxfp8,
        _fake_quantize_mxfp8_columns,
        _fake_dequantize_mxfp8,
    )
    for fake in fakes:
        name = fake.__name__.removeprefix("_fake_")
        torch.library.register_fake(f"megatron_nvfp4::{name}", fake)
    return torch.ops.megatron_nvfp4


def _fake_quantize_nvfp4(
    x, amax, offsets, block_rows, per_token, e4m3_max, four_over_six, fast_error
):
    num_rows, num_cols = x.shape
    num_amax = num_rows if per_token else 1 if offsets is None else offsets.shape[0] - 1
    return (
        x.new_empty(num_rows, num_cols // 2, dtype=torch.uint8),
        x.new_empty(num_rows, num_cols // 16, dtype=torch.float8_e4m3fn),
        x.new_empty(num_amax, dtype=torch.float32),
    )


def _fake_quantize_nvfp4_stochastic(
    x, amax, offsets, block_rows, per_token, e4m3_max, seed, offset
):
    return _fake_quantize_nvfp4(x, amax, offsets, block_rows, per_token, e4m3_max, 0, False)


def _fake_quantize_nvfp4_columns(x, amax, offsets, e4m3_max, rotated, stochastic, seed, offset):
    return _fake_quantize_nvfp4(x.t(), amax, offsets, 1, False, e4m3_max, 0, False)


def _fake_quantize_simulated(x, amax, exponent, mantissa):
    num_rows, num_cols = x.shape
    return (
        x.new_empty(num_rows, num_cols, dtype=torch.float32),
        x.new_empty(num_rows, num_cols // 16, dtype=torch.float8_e4m3fn),
        x.new_empty(num_rows, dtype=torch.float32),
    )


def _fake_outer_scale(amax, e4m3_max):
    return amax.new_empty(amax.shape)


def _fake_decode_nvfp4(codes, block_scales):
    return codes.new_empty(codes.shape[0], codes.shape[1] * 2, dtype=torch.bfloat16)


def _fake_dequantize_nvfp4(codes, block_scales, row_scale, dtype):
    return codes.new_empty(codes.shape[0], codes.shape[1] * 2, dtype=dtype)


def _fake_quantize_mxfp8(x):
    num_rows, num_cols = x.shape
    return (
        x.new_empty(num_rows, num_cols, dtype=torch.float8_e4m3fn),
        x.new_empty(num_rows, num_cols // 32, dtype=torch.uint8),
    )


def _fake_quantize_mxfp8_columns(x):
    return _fake_quantize_mxfp8(x.t())


def _fake_dequantize_mxfp8(codes, block_scales, dtype):
    return codes.new_empty(codes.shape, dtype=dtype)
