"""The reference backend: torch on any device, slow, and the definition of the right answer.

GEMMs add the exact products in FP64: decoded NVFP4 and MXFP8 values have few significant bits, so for
practical K the sum is exact and the result does not depend on order, batch, padding or grouping. It is
rounded once to FP32, multiplied by RN(S_dec_row * S_dec_group), biased in FP32 and rounded to the output.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_nvfp4.quant import (
    MXFP8Tensor,
    QuantizedTensor,
    SimulatedTensor,
    decode_exact,
    decode_mxfp8,
    decode_simulated,
    dequantize,
    quantize,
    quantize_grouped,
    quantize_mxfp8,
    quantize_simulated,
    rht,
)
from megatron_nvfp4.recipes import (
    BF16,
    FORWARD,
    MXFP8,
    FloatSpec,
    Format,
    NVFP4Spec,
    format_needs,
)

from . import Matrices, Operand
from .packed import reverse_groups


class ReferenceBackend:
    """See the module and `Backend`."""

    name = "reference"
    features = frozenset(
        {
            "nvfp4",
            "mxfp8",
            "four_over_six",
            "stochastic_rounding",
            "random_hadamard_transform",
            "simulated_float",
        }
    )

    def why_not(
        self,
        op: str,
        formats: Sequence[Format],
        shape: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> str | None:
        return missing_feature(op, formats, self.features) or contraction_fault(op, formats, shape)

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
        x = rht(x) if rotated else x
        random = {"seed": seed, "offset": offset}
        if isinstance(spec, NVFP4Spec):
            if offsets is None:
                return quantize(x, spec, amax, column_offsets=column_offsets, **random)
            return quantize_grouped(x, offsets, spec, amax, **random)
        if spec == MXFP8:
            return quantize_mxfp8(x)
        if isinstance(spec, FloatSpec):
            return quantize_simulated(x, spec, amax)
        if spec in (BF16, FORWARD):
            return x
        raise ValueError(f"reference: cannot quantise to {spec}")

    def dequantize(self, operand: Operand, dtype: torch.dtype) -> Tensor:
        if isinstance(operand, QuantizedTensor):
            return dequantize(operand, dtype)
        if isinstance(operand, MXFP8Tensor):
            return decode_mxfp8(operand, dtype)
        return (decode_simulated(operand) * operand.outer_scale[:, None]).to(dtype)

    def decode(self, operand: Operand) -> Tensor:
        """What the GEMMs multiply: decode_fp64, or a faster decoder of the same values."""
        return decode_fp64(operand)

    def pack_weights(
        self, weights: Operand, num_groups: int, *, is_reversed: bool = False
    ) -> Operand:
        return reverse_groups(weights, num_groups) if is_reversed else weights

    def round_along_rows(self, weights: Tensor, spec: Format) -> Matrices | None:
        return None

    def gemm(
        self,
        a: Operand,
        b: Operand | Matrices,
        *,
        bias: Tensor | None = None,
        out_dtype: torch.dtype,
        transposed: bool = False,
    ) -> Tensor:
        offsets = torch.tensor([0, a.shape[0]], device=a.device)
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
        bounds = offsets.tolist()
        num_groups = len(bounds) - 1
        b = stack_matrices(b, transposed)
        num_cols = b.shape[0] // num_groups
        a_exact, b_exact = self.decode(a), self.decode(b)
        a_scale, b_scale = row_scale(a), row_scale(b)
        if row_factors is not None:
            a_scale = row_factors if a_scale is None else a_scale * row_factors
        out = torch.zeros(a.shape[0], num_cols, dtype=out_dtype, device=a.device)
        for group in range(num_groups):
            rows = slice(bounds[group], bounds[group + 1])
            cols = slice(group * num_cols, (group + 1) * num_cols)
            y = (a_exact[rows] @ b_exact[cols].t()).float()
            scale = outer_product_scale(a_scale, b_scale, rows, cols)
            if scale is not None:
                y = y * scale
            if bias is not None:
                y = y + bias[group].float()
            out[rows] = y.to(out_dtype)
        return out

    def grouped_wgrad(
        self,
        a: Operand,
        b: Operand,
        offsets: Tensor,
        *,
        out: Sequence[Tensor],
        accumulate: bool,
    ) -> None:
        bounds = offsets.tolist()
        a_exact, b_exact = self.decode(a), self.decode(b)
        for group, target in enumerate(out):
            rows = slice(bounds[group], bounds[group + 1])
            y = (a_exact[:, rows] @ b_exact[:, rows].t()).float()
            scale = outer_product_scale(
                row_scale(a, group), row_scale(b, group), slice(None), slice(None)
            )
            if scale is not None:
                y = y * scale
            if accumulate:
                y = y + target.float()
            target.copy_(y)


def stack_matrices(b: Operand | Matrices, transposed: bool = False) -> Operand:
    """Matrices (N, K), or (K, N) if transposed, as one operand (G*N, K); an operand as it is."""
    if isinstance(b, list | tuple) or (isinstance(b, Tensor) and b.dim() == 3):
        return torch.cat([matrix.t() if transposed else matrix for matrix in b])
    assert not transposed, "only matrices lie transposed"
    return b


def as_matrices(b: Tensor | Matrices, num_groups: int) -> Matrices:
    """An unquantised operand (G*N, K) as matrices, one (G, N, K); matrices as they are."""
    if isinstance(b, Tensor) and b.dim() == 2:
        return b.reshape(num_groups, -1, b.shape[1])
    return b


def missing_feature(op: str, formats: Sequence[Format], features: frozenset[str]) -> str | None:
    """Which kernel features `op` on these formats takes and `features` lacks, or None."""
    needs = set().union(*(format_needs(spec) for spec in formats))
    if op == "quantize_rotated":
        needs.add("random_hadamard_transform")
    missing = needs - features
    return f"{', '.join(sorted(missing))} is not implemented" if missing else None


def contraction_fault(
    op: str, formats: Sequence[Format], shape: Sequence[int] | None
) -> str | None:
    """Why these formats do not divide the contraction length shape[-1], or None."""
    if shape is None or op == "grouped_wgrad":  # wgrad contracts tokens, which are padded
        return None
    for spec in formats:
        multiple = 32 if spec == MXFP8 else 1 if spec in (BF16, FORWARD) else 16
        if shape[-1] % multiple:
            return (
                f"K={shape[-1]} is not a multiple of {multiple}, the block of {spec}; "
                "leave this layer in BF16"
            )
    return None


def decode_fp64(operand: Operand) -> Tensor:
    """Exact values without the outer scale, FP64 (M, K)."""
    if isinstance(operand, QuantizedTensor):
        return decode_exact(operand)[0].double()
    if isinstance(operand, MXFP8Tensor):
        return decode_mxfp8(operand).double()
    if isinstance(operand, SimulatedTensor):
        return decode_simulated(operand).double()
    return operand.double()


def row_scale(operand: Operand, group: int | None = None) -> Tensor | None:
    """FP32 outer scale of every row (M,), in the columns of `group` where columns are grouped, or None."""
    if isinstance(operand, QuantizedTensor):
        return operand.row_scale(group)
    return operand.outer_scale if isinstance(operand, SimulatedTensor) else None


def outer_product_scale(
    a_scale: Tensor | None, b_scale: Tensor | None, rows: slice, cols: slice
) -> Tensor | None:
    """RN(S_dec of the row * S_dec of the column), FP32, broadcastable to (M, N); None for no scale."""
    if a_scale is None and b_scale is None:
        return None
    if b_scale is None:
        return a_scale[rows, None]
    if a_scale is None:
        return b_scale[None, cols]
    return a_scale[rows, None] * b_scale[None, cols]


BACKEND = ReferenceBackend()
