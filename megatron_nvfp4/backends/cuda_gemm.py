"""GEMMs on CUDA tensor cores: operands of any format, decoded without rounding, FP32 accumulation.

On compute capability 9.0 packed weights are decoded inside a wgmma kernel and unquantised matrices are read
where they lie; other GPUs from 8.0 on run one mma.sync kernel. Both walk the contraction upwards with one
FP32 accumulator per output, multiply once by RN(S_dec_row * S_dec_weight), add the bias and round once, so an
output depends on its row and its group's weight alone. Group boundaries stay on the device.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_nvfp4.quant import MXFP8Tensor, QuantizedTensor
from megatron_nvfp4.recipes import BF16, FORWARD, FloatSpec, Format

from . import Backend, Matrices, Operand, extension, ops
from .gemm_arguments import GEMM_DTYPES, aligned, group_scale, outer_scales, written
from .packed import PackedWeights, reverse_groups
from .reference import as_matrices

# Of every kernel here.
MAX_GROUPS = 1024


def fault(
    op: str,
    formats: Sequence[Format],
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
) -> str | None:
    """Why no kernel multiplies operands of these formats, or None; see Backend.why_not."""
    for spec in formats:
        if isinstance(spec, FloatSpec):
            return f"values of {spec} do not fit BF16 exactly; use backend='reference'"
        if spec in (BF16, FORWARD) and dtype not in (None, torch.bfloat16):
            return (
                f"tensor cores multiply BF16 here, the operand is {dtype}; use backend='reference'"
            )
    if shape is None:
        return None
    # Of wgrad (N, K, M): the output's dimensions; else the output's columns and the contraction.
    first, second = (shape[0], shape[1]) if op == "grouped_wgrad" else (shape[1], shape[2])
    if first % 8 or second % 8:
        return f"shape {tuple(shape)}: {first} x {second} are not multiples of 8; pad the layer"
    return None


def pack_weights(weights: Operand, num_groups: int, is_reversed: bool = False) -> Operand:
    """NVFP4 weights (G*N, K) with one amax each as PackedWeights, where the GPU has the kernel."""
    is_nvfp4 = isinstance(weights, QuantizedTensor) and weights.spec.outer == "tensor"
    if not is_nvfp4 or weights.amax.numel() != num_groups or not _is_hopper(weights.device):
        return reverse_groups(weights, num_groups) if is_reversed else weights
    num_rows, num_cols = weights.shape
    packed = _ops().pack_weights_nvfp4(weights.codes, weights.block_scales, num_groups, is_reversed)
    amax = weights.amax.flip(0) if is_reversed else weights.amax
    scale = ops.outer_scale(amax, weights.spec)
    return PackedWeights(packed, amax, scale, weights.spec, num_rows // num_groups, num_cols)


def round_along_rows(weights: Tensor) -> Tensor:
    """Weights (G, N, K), N a multiple of 32, rounded to MXFP8 along N: BF16 of the same shape."""
    return _ops().round_mxfp8_columns(weights.flatten(0, 1)).view(weights.shape)


def unpack_weights(weights: PackedWeights) -> QuantizedTensor:
    """The exact inverse of pack_weights."""
    num_groups = weights.packed.shape[0]
    codes, block_scales = _ops().unpack_weights_nvfp4(weights.packed, *weights.shape)
    offsets = torch.arange(num_groups + 1, device=weights.device) * weights.num_rows
    return QuantizedTensor(codes, block_scales, weights.amax, weights.spec, offsets)


def grouped_gemm(
    a: Operand,
    b: Operand | Matrices,
    offsets: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    transposed: bool,
    *,
    row_index: Tensor | None = None,
    row_factors: Tensor | None = None,
) -> Tensor:
    """Backend.grouped_gemm; with row_index (M,), row m of the product takes row row_index[m] of a."""
    num_groups = offsets.numel() - 1
    dtype = out_dtype if out_dtype in GEMM_DTYPES else torch.float32
    bias = bias.float() if bias is not None and bias.dtype not in GEMM_DTYPES else bias
    b = pack_weights(b, num_groups)
    scales = outer_scales(a, b, row_factors)
    if isinstance(b, PackedWeights):
        x, x_scales = _packed_or_decoded(a)
        y = _ops().grouped_gemm_w4(
            x,
            x_scales,
            b.packed,
            offsets,
            b.num_rows,
            *scales[:2],
            bias,
            row_index,
            dtype,
        )
    elif row_index is not None:
        raise ValueError("grouped_gemm: row_index without PackedWeights; gather the rows first")
    elif _is_hopper(a.device):
        matrices = as_matrices(b if not _is_quantized(b) else decode(b), num_groups)
        matrices = [aligned(m) for m in ((matrices,) if isinstance(matrices, Tensor) else matrices)]
        x = aligned(decode(a))
        y = _ops().grouped_gemm_bf16(x, matrices, transposed, offsets, *scales, bias, dtype)
    else:
        y = _generic_gemm(a, b, offsets, scales, bias, dtype, transposed)
    return y.to(out_dtype)


def runs_wgmma(backend: Backend, device: torch.device) -> bool:
    """Whether `backend` computes by the operators of compute capability 9.0."""
    return backend.name == "cuda" and _is_hopper(device)


def row_offsets(x: Tensor, splits: Sequence[int]) -> Tensor:
    """quant.offsets_from_splits of up to MAX_GROUPS splits of the host, on x's GPU, by one launch."""
    return _ops().row_offsets(x, splits)


def grouped_linear(
    x: Tensor, spec: Format, weights: PackedWeights | Matrices, offsets: Tensor
) -> Tensor:
    """grouped_gemm of x BF16 (M, K), for packed weights quantised per token to `spec`, in one operator.

    Returns BF16 (M, N).
    """
    x = aligned(x)
    if not isinstance(weights, PackedWeights):
        matrices = [weights] if isinstance(weights, Tensor) else [aligned(m) for m in weights]
        return _ops().grouped_gemm_bf16(
            x, matrices, False, offsets, None, None, None, None, torch.bfloat16
        )
    return _ops().grouped_linear_w4(
        x,
        weights.packed,
        offsets,
        weights.num_rows,
        weights.outer_scale,
        spec.e4m3_max,
        ops.METRICS.index(spec.four_over_six),
        spec.error == "fast",
    )


def _generic_gemm(a, b, offsets, scales, bias, dtype, transposed: bool) -> Tensor:
    num_groups = offsets.numel() - 1
    x, x_scales = _packed_or_decoded(a)
    if isinstance(b, QuantizedTensor):
        w, w_scales = b.codes, b.block_scales
        num_cols = b.shape[0] // num_groups
    else:
        matrices = as_matrices(decode(b) if _is_quantized(b) else b, num_groups)
        num_cols = matrices[0].shape[1 if transposed else 0]
        stacked = matrices if isinstance(matrices, Tensor) else torch.cat(list(matrices))
        w, w_scales = stacked.reshape(-1, stacked.shape[-1]), None
    return _ops().grouped_gemm_generic(
        x, x_scales, w, w_scales, transposed, offsets, num_cols, *scales, bias, dtype
    )


def grouped_wgrad(a: Operand, b: Operand, offsets: Tensor, out: Matrices, accumulate: bool) -> None:
    """Backend.grouped_wgrad."""
    scale = group_scale(a, b)
    # Quantised operands lie along the tokens, in groups of whole blocks; others as gradients and
    # activations do, whatever their strides: groups of any size are read right only by rows.
    token_major = not (_is_quantized(a) and _is_quantized(b))
    a, b = (aligned(decode(t).t() if token_major else decode(t)) for t in (a, b))
    is_hopper = _is_hopper(a.device)
    is_block = isinstance(out, Tensor) and out.dtype in GEMM_DTYPES and aligned(out) is out
    if is_block and not accumulate:
        _ops().grouped_wgrad_block(a, b, token_major, offsets, scale, not is_hopper, out=out)
        return
    kernel = _ops().grouped_wgrad_bf16 if is_hopper else _ops().grouped_wgrad_generic
    with written(out) as targets:
        kernel(a, b, token_major, offsets, scale, accumulate, out=targets)


def decode(operand: Operand) -> Tensor:
    """What the tensor cores multiply: BF16 (M, K) without the outer scale.

    Exact, but for MXFP8 values below BF16's normal range.
    """
    if isinstance(operand, PackedWeights):
        operand = unpack_weights(operand)
    if isinstance(operand, QuantizedTensor):
        return ops.decode(operand)
    if isinstance(operand, MXFP8Tensor):
        return ops.decode_mxfp8(operand, torch.bfloat16)
    return operand


def dequantize(operand: Operand, dtype: torch.dtype) -> Tensor:
    """Backend.dequantize."""
    if isinstance(operand, PackedWeights):
        operand = unpack_weights(operand)
    if isinstance(operand, QuantizedTensor):
        return ops.dequantize(operand, dtype)
    return ops.decode_mxfp8(operand, dtype)


def _packed_or_decoded(a: Operand) -> tuple[Tensor, Tensor | None]:
    if isinstance(a, QuantizedTensor):
        return a.codes, a.block_scales
    return aligned(decode(a)), None


def _is_quantized(operand: Operand | Matrices) -> bool:
    return isinstance(operand, QuantizedTensor | MXFP8Tensor | PackedWeights)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _ops():
    """torch.ops.megatron_nvfp4 with the fakes of the GEMM operators."""
    extension.load()
    fakes = {
        "pack_weights_nvfp4": _fake_pack_weights,
        "unpack_weights_nvfp4": _fake_unpack_weights,
        "grouped_gemm_w4": _fake_grouped_gemm_w4,
        "grouped_gemm_bf16": _fake_grouped_gemm_bf16,
        "grouped_gemm_generic": _fake_grouped_gemm_generic,
        "grouped_wgrad_bf16": lambda *args, **kwargs: None,
        "grouped_wgrad_generic": lambda *args, **kwargs: None,
        "row_offsets": lambda x, splits: x.new_empty(len(splits) + 1, dtype=torch.int64),
        "grouped_linear_w4": _fake_grouped_linear_w4,
        "grouped_wgrad_block": lambda *args, **kwargs: None,
        "round_mxfp8_columns": lambda x: x.new_empty(x.shape, dtype=torch.bfloat16),
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"megatron_nvfp4::{name}", fake)
    return torch.ops.megatron_nvfp4


def _fake_pack_weights(codes, block_scales, num_groups, reversed):
    num_rows, num_cols = codes.shape[0] // num_groups, codes.shape[1] * 2
    return codes.new_empty(num_groups, -(-num_cols // 64), -(-num_rows // 64), 2304)


def _fake_unpack_weights(packed, num_rows, num_cols):
    return (
        packed.new_empty(num_rows, num_cols // 2),
        packed.new_empty(num_rows, num_cols // 16, dtype=torch.float8_e4m3fn),
    )


def _fake_grouped_gemm_w4(
    x, x_scales, packed, offsets, num_cols, row_scale, group_scale, bias, row_index, out_dtype, *_
):
    num_rows = x.shape[0] if row_index is None else row_index.shape[0]
    return x.new_empty(num_rows, num_cols, dtype=out_dtype)


def _fake_grouped_linear_w4(x, packed, offsets, num_cols, *_):
    return x.new_empty(x.shape[0], num_cols)


def _fake_grouped_gemm_bf16(
    x, weights, transposed, offsets, row_scale, group_scale, col_scale, bias, out_dtype
):
    return x.new_empty(x.shape[0], weights[0].shape[-1 if transposed else -2], dtype=out_dtype)


def _fake_grouped_gemm_generic(
    a, a_scales, b, b_scales, transposed, offsets, num_cols, row, group, col, bias, out_dtype
):
    return a.new_empty(a.shape[0], num_cols, dtype=out_dtype)
