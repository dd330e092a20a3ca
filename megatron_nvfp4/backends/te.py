"""Transformer Engine's NVFP4 kernels: its quantiser, to compare bits with, and its GEMM, for Blackwell.

Written against transformer-engine 2.20's API for compute capability 10.0 and up; compiled and read, never
run (its NVFP4 kernels refuse the Hopper GPUs this project is tested on). Chosen by name only.

TE's own per-token GEMM scales by products of amaxes, another last bit than this project's contract. So its
GEMM is called with the amaxes that make its scale exactly 1, for FP32 output, and scale, bias and rounding
are this project's: outputs differ from other backends' by the tensor core's order of summation alone. Its
GEMM takes one weight at a time: the groups are a loop, and the boundaries are read on the host.

Left at their defaults, as they should be: NVTE_USE_FAST_MATH and NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH, which
change TE's bits.
"""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_nvfp4.quant import QuantizedTensor
from megatron_nvfp4.quant.layout import dense_offsets, swizzled_shape
from megatron_nvfp4.recipes import Format, NVFP4Spec, format_needs

from . import Operand
from .blackwell import gemm_fault, outer_scales

_ROWS = 16  # rows of a TE tensor come in sixteens
_UNIT_AMAX = 448.0 * 6.0  # of both operands: RN(2688 * 2688 * RN(1 / 2688^2)) is 1


class TransformerEngineBackend:
    """See the module and `Backend`."""

    name = "te"
    features = frozenset({"nvfp4", "four_over_six"})

    def why_not(
        self,
        op: str,
        formats: Sequence[Format],
        shape: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> str | None:
        if importlib.util.find_spec("transformer_engine") is None:
            return "transformer-engine is not installed (pip install transformer-engine[pytorch])"
        if op not in ("quantize", "gemm", "grouped_gemm"):
            return f"TE's kernels for {op} are not offered; use backend='cuda'"
        fault = _format_fault(op, formats, shape)
        if fault:
            return fault
        if torch.device(device or "cuda").type != "cuda" or not torch.cuda.is_available():
            return "needs a CUDA GPU"
        capability = torch.cuda.get_device_capability(device)
        if capability < (10, 0):
            found = ".".join(map(str, capability))
            return (
                f"TE's NVFP4 kernels need compute capability 10.0, this GPU has {found}; "
                "use backend='cuda'"
            )
        return None

    def quantize(
        self,
        x: Tensor,
        spec: Format,
        *,
        amax: Tensor | None = None,
        offsets: Tensor | None = None,
        column_offsets: Tensor | None = None,
        rotated: bool = False,
        seed: int | None = None,
        offset: int = 0,
    ) -> Operand:
        if amax is not None or column_offsets is not None or rotated:
            raise ValueError(
                "te: no given amax, no groups of columns and no rotation; use backend='cuda'"
            )
        if offsets is None or offsets.numel() == 2 or spec.outer == "token":
            parts = [_quantize_alone(x, spec)]
        else:
            parts = [_quantize_alone(rows, spec) for rows in x.tensor_split(offsets[1:-1].cpu())]
        codes, block_scales, amax = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return QuantizedTensor(codes, block_scales, amax, spec, offsets)

    def pack_weights(self, weights: Operand, num_groups: int) -> Operand:
        return weights

    def gemm(
        self,
        a: QuantizedTensor,
        b: QuantizedTensor,
        *,
        bias: Tensor | None = None,
        out_dtype: torch.dtype,
        transposed: bool = False,
    ) -> Tensor:
        bias = None if bias is None else bias[None]
        offsets = dense_offsets(a.shape[0], a.device)
        return self.grouped_gemm(
            a, b, offsets, bias=bias, out_dtype=out_dtype, transposed=transposed
        )

    def grouped_gemm(
        self,
        a: QuantizedTensor,
        b: QuantizedTensor,
        offsets: Tensor,
        *,
        bias: Tensor | None = None,
        out_dtype: torch.dtype,
        transposed: bool = False,
    ) -> Tensor:
        assert not transposed, "only unquantised matrices lie transposed"
        bounds = offsets.tolist()
        num_groups = len(bounds) - 1
        num_cols = b.shape[0] // num_groups
        row_scale, group_scale = outer_scales(a, b, num_groups)
        out = torch.empty(a.shape[0], num_cols, dtype=out_dtype, device=a.device)
        for group in range(num_groups):
            rows = slice(bounds[group], bounds[group + 1])
            cols = slice(group * num_cols, (group + 1) * num_cols)
            if rows.start == rows.stop:
                continue
            scale = group_scale[group]
            if row_scale is not None:
                scale = row_scale[rows, None] * scale
            y = _product(a.codes[rows], a.block_scales[rows], b.codes[cols], b.block_scales[cols])
            y = y * scale
            if bias is not None:
                y = y + bias[group].float()
            out[rows] = y.to(out_dtype)
        return out


def _format_fault(op: str, formats: Sequence[Format], shape: Sequence[int] | None) -> str | None:
    missing = set().union(*(format_needs(spec) for spec in formats))
    missing -= TransformerEngineBackend.features
    if op != "quantize":  # the values decide what is multiplied, not how they were rounded
        missing.discard("stochastic_rounding")
    if missing or not all(isinstance(spec, NVFP4Spec) for spec in formats):
        return f"only NVFP4 with rounding to nearest, not {', '.join(map(str, formats))}"
    if op != "quantize":
        return gemm_fault(formats, shape)
    for spec in formats:
        if spec.four_over_six is None and spec.e4m3_max != 448:
            return f"TE quantises {spec} as if e4m3_max were 448; use backend='cuda'"
        if spec.four_over_six is not None and spec.error == "fast":
            return f"TE's error of {spec} hangs on an environment variable; use error='strict'"
    if shape is not None and (shape[0] % _ROWS or shape[1] % 16):
        return f"TE quantises whole 16-row blocks; shape {tuple(shape)} is not"
    return None


def _quantize_alone(x: Tensor, spec: NVFP4Spec) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, linear block scales and amax of x (M, K) as one tensor; without rows the amax is 0."""
    num_rows, num_cols = x.shape
    if num_rows == 0:
        codes = x.new_empty(0, num_cols // 2, dtype=torch.uint8)
        scales = x.new_empty(0, num_cols // 16, dtype=torch.float8_e4m3fn)
        return codes, scales, x.new_zeros(int(spec.outer == "tensor"), dtype=torch.float32)
    import transformer_engine_torch as tex
    from transformer_engine.pytorch import NVFP4Quantizer

    quantizer = NVFP4Quantizer(
        fp4_dtype=tex.DType.kFloat4E2M1,
        rowwise=True,
        columnwise=False,
        with_2d_quantization=spec.block == (16, 16),
        row_scaled_nvfp4=spec.outer == "token",
        nvfp4_use_4over6=spec.four_over_six is not None,
        nvfp4_e4m3_max=spec.e4m3_max,
        nvfp4_4over6_err_mode=(spec.four_over_six or "mae").upper(),
    )
    quantized = quantizer(x.contiguous())
    # TE completes its scales to 128x4 tiles and leaves those bytes as they were.
    scales = quantized._rowwise_scale_inv.view(torch.float8_e4m3fn)[:num_rows, : num_cols // 16]
    return quantized._rowwise_data.view(torch.uint8), scales, quantized._amax_rowwise


def _product(a_codes: Tensor, a_scales: Tensor, b_codes: Tensor, b_scales: Tensor) -> Tensor:
    """Codes (M, K/2) and scales (M, K/16) times (N, K) transposed, without outer scales: FP32 (M, N)."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    num_rows = a_codes.shape[0]
    missing = -num_rows % _ROWS
    a_codes, a_scales = (
        torch.nn.functional.pad(part.view(torch.uint8), (0, 0, 0, missing))
        for part in (a_codes, a_scales)
    )
    a, b = _storage(a_codes, a_scales), _storage(b_codes, b_scales)
    return general_gemm(b, a, out_dtype=torch.float32, layout="TN")[0][:num_rows]


def _storage(codes: Tensor, block_scales: Tensor):
    """TE's tensor of these bytes, whose outer scales cancel in a GEMM."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

    num_rows, num_cols = block_scales.shape
    shape = swizzled_shape(num_rows, num_cols)
    padded = torch.zeros(shape, dtype=torch.uint8, device=codes.device)
    padded[:num_rows, :num_cols] = block_scales.view(torch.uint8)
    return NVFP4TensorStorage(
        rowwise_data=codes,
        rowwise_scale_inv=padded,
        columnwise_data=None,
        columnwise_scale_inv=None,
        amax_rowwise=torch.full((1,), _UNIT_AMAX, device=codes.device),
        amax_columnwise=None,
        fp4_dtype=tex.DType.kFloat4E2M1,
        quantizer=None,
        with_gemm_swizzled_scales=False,
    )


BACKEND = TransformerEngineBackend()
