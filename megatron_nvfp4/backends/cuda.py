"""The CUDA backend: quantisers with the reference's bits at the speed of memory, and GEMMs on tensor cores.

Compiled for compute capability 8.0 and later; run and measured on 9.0 (H200). The code for 10.0 and 10.3 is
compiled and has never run.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_nvfp4.quant import QuantizedTensor
from megatron_nvfp4.quant.layout import dense_offsets, swizzled_shape
from megatron_nvfp4.quant.swiglu import TOKEN, check_swiglu
from megatron_nvfp4.recipes import BF16, FORWARD, MXFP8, Format, NVFP4Spec

from . import Matrices, Operand, cuda_gemm, dispatch, extension, ops
from .reference import ReferenceBackend, contraction_fault

# What check_numerics compares, in the order of the operator's counts.
NUMERICS_CHECKS = (
    "round to E2M1",
    "reciprocal",
    "divide by 6",
    "divide by 1536",
    "divide by 2688",
    "hardware E4M3",
    "hardware E2M1",
    "encoding scale",
)


class CudaBackend:
    """See the module and `Backend`."""

    name = "cuda"
    features = ReferenceBackend.features

    def why_not(
        self,
        op: str,
        formats: Sequence[Format],
        shape: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> str | None:
        if device is not None and torch.device(device).type != "cuda":
            return f"it works on CUDA tensors, these are on {device}; use backend='cpu'"
        fault = (
            next(filter(None, (_format_fault(op, spec) for spec in formats)), None)
            if op in ("quantize", "quantize_rotated")
            else cuda_gemm.fault(op, formats, shape, dtype)
        )
        return fault or contraction_fault(op, formats, shape) or extension.why_not_cuda()

    def quantize(self, x: Tensor, spec: Format, **options) -> Operand:
        return ops.quantize(x, spec, **options)

    def pack_weights(
        self, weights: Operand, num_groups: int, *, is_reversed: bool = False
    ) -> Operand:
        return cuda_gemm.pack_weights(weights, num_groups, is_reversed)

    def round_along_rows(self, weights: Tensor, spec: Format) -> Matrices | None:
        return cuda_gemm.round_along_rows(weights) if spec == MXFP8 else None

    def dequantize(self, operand: Operand, dtype: torch.dtype) -> Tensor:
        return cuda_gemm.dequantize(operand, dtype)

    def gemm(
        self,
        a: Operand,
        b: Operand | Matrices,
        *,
        bias: Tensor | None = None,
        out_dtype: torch.dtype,
        transposed: bool = False,
    ) -> Tensor:
        offsets = dense_offsets(a.shape[0], a.device)
        bias = None if bias is None else bias[None]
        return self.grouped_gemm(
            a, b, offsets, bias=bias, out_dtype=out_dtype, transposed=transposed
        )

    def grouped_gemm(
        self,
        a: Operand,
        b: Operand | Matrices,
        offsets: Tensor,
        *,
        bias: Tensor | None = None,
        out_dtype: torch.dtype,
        transposed: bool = False,
        row_factors: Tensor | None = None,
    ) -> Tensor:
        return cuda_gemm.grouped_gemm(
            a, b, offsets, bias, out_dtype, transposed, row_factors=row_factors
        )

    def grouped_wgrad(
        self,
        a: Operand,
        b: Operand,
        offsets: Tensor,
        *,
        out: Sequence[Tensor],
        accumulate: bool,
    ) -> None:
        cuda_gemm.grouped_wgrad(a, b, offsets, out, accumulate)


def _format_fault(op: str, spec: Format) -> str | None:
    if spec in (BF16, FORWARD):
        return f"{spec} is not quantised"
    if isinstance(spec, NVFP4Spec) and spec.block == (16, 16) and spec.rounding == "stochastic":
        return f"no kernel rounds {spec}; use 1x16 blocks, or backend='reference'"
    return ops.rotation_fault(spec) if op == "quantize_rotated" else None


@dataclass(frozen=True)
class Buffers:
    """Tensors that one quantisation of x (M, K) writes; all contiguous, 16-byte aligned, on x's device.

    codes: uint8 (M, K/2). block_scales: float8_e4m3fn (M, K/16), or swizzled to layout.swizzled_shape.
    amax: FP32 (M,) per token, (G,) for groups, else (1,).
    codes_t, block_scales_t: the same of x.t(), or None. decoded: q * s_b as BF16 (M, K), or None.
    """

    codes: Tensor
    block_scales: Tensor
    amax: Tensor
    codes_t: Tensor | None = None
    block_scales_t: Tensor | None = None
    decoded: Tensor | None = None

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int],
        spec: NVFP4Spec,
        *,
        num_groups: int = 1,
        swizzled: bool = False,
        transposed: bool = False,
        decoded: bool = False,
        device: torch.device | str = "cuda",
    ) -> "Buffers":
        """Uninitialised buffers for an x of `shape`; quantize_nvfp4_out writes every byte of them."""
        num_rows, num_cols = shape

        def codes(rows: int, cols: int) -> Tensor:
            return torch.empty(rows, cols // 2, dtype=torch.uint8, device=device)

        def scales(rows: int, cols: int) -> Tensor:
            size = swizzled_shape(rows, cols // 16) if swizzled else (rows, cols // 16)
            return torch.empty(size, dtype=torch.float8_e4m3fn, device=device)

        num_amax = num_rows if spec.outer == "token" else num_groups
        return cls(
            codes(num_rows, num_cols),
            scales(num_rows, num_cols),
            torch.empty(num_amax, dtype=torch.float32, device=device),
            codes(num_cols, num_rows) if transposed else None,
            scales(num_cols, num_rows) if transposed else None,
            torch.empty(shape, dtype=torch.bfloat16, device=device) if decoded else None,
        )


def quantize_nvfp4_out(
    x: Tensor,
    spec: NVFP4Spec,
    out: Buffers,
    *,
    offsets: Tensor | None = None,
    given_amax: bool = False,
    swizzled: bool = False,
) -> None:
    """quant.quantize, or with offsets (G+1,) quant.quantize_grouped, into `out`; waits for nothing.

    x: contiguous (M, K). given_amax: out.amax is read instead of written. swizzled: out's scales are in the
    128x4 layout, padding zeroed. The transposed form equals quantize(x.t(), spec, amax) and needs 16x16
    blocks and M % 16 == 0; `decoded` needs 1x16 blocks.
    With 16x16 blocks, a group that is not whole tiles gets NaN scales: looking at the offsets would wait.
    Raises ValueError for buffers that do not fit.
    """
    _ops().quantize_nvfp4_out(
        x,
        offsets,
        spec.block[0],
        spec.outer == "token",
        spec.e4m3_max,
        ops.METRICS.index(spec.four_over_six),
        spec.error == "fast",
        given_amax,
        swizzled,
        codes=out.codes,
        block_scales=out.block_scales,
        amax=out.amax,
        codes_t=out.codes_t,
        block_scales_t=out.block_scales_t,
        decoded=out.decoded,
    )


def swiglu_quantize(
    gate_up: Tensor, probs: Tensor, spec: NVFP4Spec = TOKEN, *, fast_math: bool = False
) -> QuantizedTensor:
    """quant.swiglu.swiglu_quantize, bit for bit on every GPU, in one pass; waits for nothing.

    gate_up: BF16 (M, 2K), K up to 12288. probs: FP32 (M,).
    fast_math: the GPU's own exponential and reciprocal instead of exact steps. CUDA does not define their
    bits; on the H200 they give the definition's for every finite gate.
    Raises ValueError for what the definition refuses and for a wider K.
    """
    check_swiglu(gate_up)
    return dispatch.weighted_activation_quantize(gate_up, probs, spec, fast_math=fast_math)[1]


def check_numerics(device: torch.device | str = "cuda") -> dict[str, int]:
    """Mismatches of the fast arithmetic with the definition, over all 2^32 floats, by NUMERICS_CHECKS.

    Takes well under a second. A check whose instruction this GPU lacks counts 0.
    """
    counts = torch.empty(len(NUMERICS_CHECKS), dtype=torch.int64, device=device)
    _ops().check_numerics_out(counts)
    return dict(zip(NUMERICS_CHECKS, counts.tolist(), strict=True))


@functools.cache
def _ops():
    """torch.ops.megatron_nvfp4 with the fakes of the operators that return nothing."""
    extension.load()
    for name in ("quantize_nvfp4_out", "check_numerics_out"):
        torch.library.register_fake(f"megatron_nvfp4::{name}", lambda *args, **kwargs: None)
    return torch.ops.megatron_nvfp4


BACKEND = CudaBackend()
