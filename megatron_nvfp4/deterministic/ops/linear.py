"""Linear layers in SGLang's order: contraction upwards, one FP32 accumulator, one rounding.

The GEMM is the backend's (`megatron_nvfp4.backends`), which on compute capability 9.0 gives the bits of
SGLang 0.5.23's matmul_persistent and fused_moe kernels. With quantised operands the forward multiplies
NVFP4 codes, as the sampler plugin does; the backward is that of the unquantised layer (straight
through).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nvfp4 import backends
from megatron_nvfp4.backends import Matrices, Operand
from megatron_nvfp4.backends.packed import PackedWeights
from megatron_nvfp4.quant import QuantizedTensor
from megatron_nvfp4.quant.layout import dense_offsets
from megatron_nvfp4.quant.nvfp4 import decode_scale, encode_scale
from megatron_nvfp4.recipes import BF16, FORWARD, Format, Operands

UNQUANTIZED = Operands()
UNIT = 8  # of the kernels' output columns


def linear(x: Tensor, weight: Tensor, operands: Operands = UNQUANTIZED) -> Tensor:
    """x BF16 (M, K) times weight BF16 (N, K) transposed: BF16 (M, N).

    operands: formats of x and weight in the forward. Raises ValueError for other dtypes or shapes that
    do not fit, RuntimeError where no backend has the GEMM.
    """
    check_matrix("linear", x, weight.shape[-1])
    if weight.dim() != 2 or weight.dtype != torch.bfloat16:
        raise ValueError(
            f"linear: weight is {weight.dtype} {tuple(weight.shape)}; give BF16 (N, {x.shape[1]})"
        )
    return _Linear.apply(x, weight, operands)


def add_partials(partials: Sequence[Tensor]) -> Tensor:
    """Sum of the products that the sampler's ranks have of their shares of K: one, or two BF16 (M, N), added
    with one rounding, whichever comes first.

    What an all-reduce of two ranks does, by NCCL's ring as by its tree. Of more ranks the order is
    unknown: ValueError.
    """
    if len(partials) > 2:
        raise ValueError(
            f"add_partials: {len(partials)} products; the order of more than 2 is unknown"
        )
    return partials[0] if len(partials) == 1 else partials[0] + partials[1]


def check_matrix(op: str, x: Tensor, num_cols: int) -> None:
    """ValueError unless x is BF16 (M, num_cols)."""
    if x.dim() != 2 or x.dtype != torch.bfloat16 or x.shape[1] != num_cols:
        raise ValueError(f"{op}: x is {x.dtype} {tuple(x.shape)}; give BF16 (M, {num_cols})")


@dataclass(frozen=True)
class Prepared:
    """G weights (N, K) as the forward product reads them, and the formats of both its operands."""

    operand: Operand | Matrices
    shape: tuple[int, int, int]
    operands: Operands

    @classmethod
    def of(cls, weights: Tensor, operands: Operands = UNQUANTIZED) -> "Prepared":
        """From BF16 (G, N, K), quantised with one amax per weight where operands.right says so."""
        num_groups, num_rows, _ = weights.shape
        operand = weights
        if num_rows % UNIT:  # a library would take these, in an order of its own
            operand = torch.nn.functional.pad(weights, (0, 0, 0, -num_rows % UNIT))
        if operands.right not in (BF16, FORWARD):
            bounds = torch.arange(num_groups + 1, device=weights.device) * num_rows
            operand = _quantized(weights.flatten(0, 1), operands.right, bounds)
            operand = _gemm_backend(operands, operand, weights.shape).pack_weights(
                operand, num_groups
            )
        return cls(operand, tuple(weights.shape), operands)

    @classmethod
    def of_codes(
        cls, codes: Tensor, block_scales: Tensor, outer_scale: Tensor, operands: Operands
    ) -> "Prepared":
        """From NVFP4 as a checkpoint holds it: uint8 (G, N, K/2), E4M3 (G, N, K/16), multipliers FP32 (G,).

        Raises ValueError where the GEMM of this device derives multipliers from an amax, and none gives
        one of these.
        """
        shape = (*codes.shape[:2], 2 * codes.shape[2])
        bounds = torch.arange(shape[0] + 1, device=codes.device) * shape[1]
        amax = _amax_of(outer_scale, operands.right.e4m3_max)
        parts = codes.flatten(0, 1), block_scales.flatten(0, 1)
        tensor = QuantizedTensor(*parts, amax, operands.right, bounds)
        packed = _gemm_backend(operands, tensor, shape).pack_weights(tensor, shape[0])
        if isinstance(packed, PackedWeights):
            packed = replace(packed, outer_scale=outer_scale)
        elif not torch.equal(tensor.outer_scale, outer_scale):
            raise ValueError(
                f"NVFP4 weights {shape}: outer scales {outer_scale.tolist()[:4]} are none that an amax "
                "gives; export with export-nvfp4, or run on a Hopper GPU"
            )
        return cls(packed, shape, operands)

    def times(
        self, x: Tensor, offsets: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """Row group g of x BF16 (M, K) times weight g, plus bias (G, N): (M, N), rounded once."""
        num_groups, num_rows, num_cols = self.shape
        missing = -num_rows % UNIT if isinstance(self.operand, Tensor) else 0
        shape = (num_groups, num_rows + missing, num_cols)
        backend = _gemm_backend(self.operands, x, shape)
        if x.device.type == "cuda" and backend.name != "cuda":
            raise RuntimeError(
                f"linear: weights of {num_rows} x {num_cols} on {x.device} have the backend "
                f"{backend.name} alone, which adds in an order of its own; use a model whose sizes are "
                "multiples of 8, or 16 in NVFP4, and the extension's CUDA kernels"
            )
        if missing and bias is not None:
            bias = torch.nn.functional.pad(bias, (0, missing))
        left = _quantized(x, self.operands.left, None)
        y = backend.grouped_gemm(left, self.operand, offsets, bias=bias, out_dtype=out_dtype)
        return y[:, :num_rows].contiguous() if missing else y

    def copy_from(self, other: "Prepared") -> None:
        """Take the values of another of the same shape in place: a CUDA graph has kept the addresses."""
        if isinstance(self.operand, Tensor):
            self.operand.copy_(other.operand)
            return
        for field in fields(self.operand):
            value = getattr(self.operand, field.name)
            if isinstance(value, Tensor):
                value.copy_(getattr(other.operand, field.name))


def _amax_of(outer_scale: Tensor, e4m3_max: int) -> Tensor:
    """An amax that gives the outer scale, or the nearest to one where rounding leaves none."""
    nearest = outer_scale * (6.0 * e4m3_max)
    amax = nearest
    for step in (1, -1, 2, -2, 3, -3):
        is_exact = decode_scale(encode_scale(amax, e4m3_max)) == outer_scale
        other = (nearest.view(torch.int32) + step).view(torch.float32)
        amax = torch.where(is_exact, amax, other)
    return amax


def grouped_dgrad(grad: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Row group g of grad BF16 (M, N) times weights[g] (N, K): BF16 (M, K)."""
    _, num_rows, num_cols = weights.shape
    backend = _gemm_backend(UNQUANTIZED, grad, (1, num_cols, num_rows))
    return backend.grouped_gemm(
        grad.contiguous(), weights, offsets, out_dtype=grad.dtype, transposed=True
    )


def grouped_wgrad(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Row groups of grad BF16 (M, N), transposed, times those of x (M, K): BF16 (G, N, K)."""
    shape = (grad.shape[1], x.shape[1], x.shape[0])
    out = torch.empty(offsets.numel() - 1, *shape[:2], dtype=x.dtype, device=x.device)
    backend = backends.select(
        "grouped_wgrad", (BF16, BF16), shape=shape, device=x.device, dtype=x.dtype
    )
    backend.grouped_wgrad(grad.t(), x.t(), offsets, out=out.unbind(0), accumulate=False)
    return out


def _quantized(x: Tensor, spec: Format, offsets: Tensor | None) -> Operand | Tensor:
    """x (M, K) in format `spec`, row groups of `offsets` (G+1,) each as if alone; BF16 is x itself."""
    if spec in (BF16, FORWARD):
        return x
    backend = backends.select("quantize", (spec,), shape=x.shape, device=x.device, dtype=x.dtype)
    return backend.quantize(x.contiguous(), spec, offsets=offsets)


def _gemm_backend(
    operands: Operands, x: Tensor | QuantizedTensor, shape: tuple[int, int, int]
) -> backends.Backend:
    """Who multiplies rows by weights of `shape` (G, N, K)."""
    return backends.select(
        "grouped_gemm",
        (operands.left, operands.right),
        shape=(x.shape[0], *shape[1:]),
        device=x.device,
        dtype=torch.bfloat16,
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, operands: Operands) -> Tensor:
        ctx.save_for_backward(x, weight)
        offsets = dense_offsets(x.shape[0], x.device)
        return Prepared.of(weight[None], operands).times(x, offsets, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        offsets = dense_offsets(x.shape[0], x.device)
        grad_x = grouped_dgrad(grad, weight[None], offsets)
        return grad_x, grouped_wgrad(grad, x, offsets)[0], None
