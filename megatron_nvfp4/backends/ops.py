"""The compiled operators as functions on quant's types, for every device they have kernels for.

torch dispatches on the device; the fakes below let torch.compile and FakeTensor see through them.
"""

import functools

import torch
from torch import Tensor

from megatron_nvfp4.quant import MXFP8Tensor, QuantizedTensor
from megatron_nvfp4.quant.layout import expand_groups
from megatron_nvfp4.recipes import NVFP4Spec

from . import extension

_METRICS = (None, "mae", "mse")


def quantize_nvfp4(
    x: Tensor, spec: NVFP4Spec, amax: Tensor | None = None, offsets: Tensor | None = None
) -> QuantizedTensor:
    """quant.quantize, or with offsets (G+1,) quant.quantize_grouped, bit for bit.

    x: (M, K) BF16, FP16 or FP32, of any strides. Raises ValueError for what those functions refuse,
    and RuntimeError if the extension cannot be used.
    """
    if spec.rounding != "nearest":
        raise ValueError(f"quantize: {spec} has no kernel here; use rounding='nearest'")
    codes, block_scales, amax_used = _ops().quantize_nvfp4(
        x,
        amax,
        None if spec.outer == "token" else offsets,
        spec.block[0],
        spec.outer == "token",
        spec.e4m3_max,
        _METRICS.index(spec.four_over_six),
        spec.error == "fast",
    )
    return QuantizedTensor(codes, block_scales, amax_used, spec, offsets)


def decode_exact(qt: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """quant.decode_exact, bit for bit: (q * s_b as BF16 (M, K), S_dec as FP32 of amax's shape)."""
    return _ops().decode_nvfp4(qt.codes, qt.block_scales), qt.outer_scale


def dequantize(qt: QuantizedTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """quant.dequantize, bit for bit: (M, K) in BF16, FP16 or FP32."""
    row_scale = qt.outer_scale
    if qt.offsets is not None and qt.spec.outer == "tensor":
        row_scale = expand_groups(row_scale, qt.offsets, qt.shape[0])
    return _ops().dequantize_nvfp4(qt.codes, qt.block_scales, row_scale, dtype)


def quantize_mxfp8(x: Tensor) -> MXFP8Tensor:
    """quant.quantize_mxfp8, bit for bit; x (M, K) BF16, FP16 or FP32, of any strides."""
    return MXFP8Tensor(*_ops().quantize_mxfp8(x))


def decode_mxfp8(qt: MXFP8Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """quant.decode_mxfp8, bit for bit: (M, K) in BF16, FP16 or FP32."""
    return _ops().dequantize_mxfp8(qt.codes, qt.block_scales, dtype)


@functools.cache
def _ops():
    """torch.ops.megatron_nvfp4 with the extension loaded and the fakes registered, once."""
    extension.load()
    fakes = (
        _fake_quantize_nvfp4,
        _fake_decode_nvfp4,
        _fake_dequantize_nvfp4,
        _fake_quantize_mxfp8,
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


def _fake_dequantize_mxfp8(codes, block_scales, dtype):
    return codes.new_empty(codes.shape, dtype=dtype)
