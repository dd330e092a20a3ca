"""Linear layers in SGLang's order: contraction upwards, one FP32 accumulator, one rounding.

The GEMM is the backend's (`megatron_nvfp4.backends`), which on compute capability 9.0 gives the bits of
SGLang 0.5.23's matmul_persistent and fused_moe kernels. With quantised operands the forward multiplies
NVFP4 codes, as the sampler plugin does; the backward is that of the unquantised layer (straight
through).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nvfp4 import backends
from megatron_nvfp4.backends import Matrices, Operand
from megatron_nvfp4.backends.packed import PackedWeights
from megatron_nvfp4.quant import QuantizedTensor
from megatron_nvfp4.quant.layout import dense_offsets
from megatron_nvfp4.quant.nvfp4 import decode_scale, encode_scale
from megatron_nvfp4.quant.tensor_versions import require_versions, versions_of
from megatron_nvfp4.recipes import BF16, FORWARD, Format, Operands, depends_on_token_alone

UNQUANTIZED = Operands()
UNIT = 8  # of the kernels' output columns


def linear(x: Tensor, weight: "Tensor | Weights", operands: Operands = UNQUANTIZED) -> Tensor:
    """x BF16 (M, K) times weight BF16 (N, K), or one as Weights, transposed: BF16 (M, N).

    operands: formats of x and weight in the forward. Raises ValueError for other dtypes or shapes that
    do not fit, RuntimeError where no backend has the GEMM.
    """
    check_matrix("linear", x, weight.shape[-1])
    if weight.dtype != torch.bfloat16 or (isinstance(weight, Tensor) and weight.dim() != 2):
        raise ValueError(
            f"linear: weight is {weight.dtype} {tuple(weight.shape)}; give BF16 (N, {x.shape[1]})"
        )
    weight = Weights.of(weight)
    return _Linear.apply(x, weight, operands, *weight.leaves)


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
    def of(cls, weights: Matrices, operands: Operands = UNQUANTIZED) -> "Prepared":
        """From BF16 (G, N, K) or G of (N, K), quantised with one amax per weight where operands.right says
        so.
        """
        shape = _shape_of(weights)
        num_groups, num_rows, _ = shape
        operand = weights
        if operands.right not in (BF16, FORWARD):
            rows = weights.flatten(0, 1) if isinstance(weights, Tensor) else torch.cat([*weights])
            bounds = torch.arange(num_groups + 1, device=rows.device) * num_rows
            operand = _quantized(rows, operands.right, bounds)
            operand = _gemm_backend(operands, operand, shape).pack_weights(operand, num_groups)
        elif num_rows % UNIT:  # a library would take these, in an order of its own
            stacked = weights if isinstance(weights, Tensor) else torch.stack([*weights])
            operand = torch.nn.functional.pad(stacked, (0, 0, 0, -num_rows % UNIT))
        return cls(operand, shape, operands)

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

    def rows_of(self, x: Tensor) -> Operand | Tensor:
        """x BF16 (M, K) as the product reads it, where every row has a scale of its own; else x itself.

        Rows may then be picked of the result, which is smaller, and one of several uses is quantised once.
        """
        left = self.operands.left
        return _quantized(x, left, None) if depends_on_token_alone(left) else x

    def times(
        self,
        x: Operand | Tensor,
        offsets: Tensor,
        out_dtype: torch.dtype,
        bias: Tensor | None = None,
        row_factors: Tensor | None = None,
    ) -> Tensor:
        """Row group g of x (M, K) times weight g, times row_factors FP32 (M,), plus bias (G, N): (M, N),
        rounded once.

        x: BF16, or rows of `rows_of`. A row's factor multiplies its outer scale, where it has one.
        """
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
        left = _quantized(x, self.operands.left, None) if isinstance(x, Tensor) else x
        y = backend.grouped_gemm(
            left, self.operand, offsets, bias=bias, out_dtype=out_dtype, row_factors=row_factors
        )
        return y[:, :num_rows].contiguous() if missing else y

    def copy_from(self, other: "Prepared") -> None:
        """Take the values of another of the same shape in place: a CUDA graph has kept the addresses."""
        if isinstance(self.operand, Tensor):
            self.operand.copy_(other.operand)
            return
        for name in (each.name for each in fields(self.operand)):
            value = getattr(self.operand, name)
            if isinstance(value, Tensor):
                value.copy_(getattr(other.operand, name))


def _amax_of(outer_scale: Tensor, e4m3_max: int) -> Tensor:
    """An amax that gives the outer scale, or the nearest to one where rounding leaves none."""
    nearest = outer_scale * (6.0 * e4m3_max)
    amax = nearest
    for step in (1, -1, 2, -2, 3, -3):
        is_exact = decode_scale(encode_scale(amax, e4m3_max)) == outer_scale
        other = (nearest.view(torch.int32) + step).view(torch.float32)
        amax = torch.where(is_exact, amax, other)
    return amax


class GradientStore(Protocol):
    """Where gradients of parameters are added past autograd, as Megatron's main_grad."""

    @property
    def leaves(self) -> Sequence[Tensor]:
        """The parameters that autograd is told of, the first ones."""

    def targets(self) -> Sequence[Tensor] | None:
        """What to add to, of every parameter; None where autograd takes the gradients."""

    def added(self) -> Sequence[Tensor | None]:
        """Called after the addition: what autograd gets for the leaves."""


@dataclass(frozen=True, eq=False)
class Weights:
    """G matrices BF16 (N, K) of a product where they lie, and where their gradients go.

    tensors: what gradients flow to: one of all matrices, or each by itself, whose rows from N on are padding.
    matrices: the same without gradients, as products read them.
    """

    tensors: tuple[Tensor, ...]
    matrices: Matrices
    store: GradientStore | None = None
    _kept: dict[tuple, Prepared] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, weights: "Tensor | Weights") -> "Weights":
        """Of one tensor (G, N, K) or (N, K), or those given."""
        if isinstance(weights, Weights):
            return weights
        matrices = weights.detach()
        return cls((weights,), matrices if weights.dim() == 3 else matrices[None])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, N, K)."""
        return _shape_of(self.matrices)

    @property
    def dtype(self) -> torch.dtype:
        return self.matrices[0].dtype

    @property
    def leaves(self) -> Sequence[Tensor]:
        """The tensors that autograd is told of."""
        return self.tensors if self.store is None else self.store.leaves

    def first_rows(self, num_rows: int) -> "Weights":
        """Of one matrix the rows before `num_rows`."""
        assert len(self.matrices) == 1, "rows of one matrix"
        return Weights(self.tensors, self.matrices[0][:num_rows][None], self.store)

    def prepared(self, operands: Operands) -> Prepared:
        """As the forward product reads them, made once for their present versions."""
        key = (operands, self.versions())
        if key not in self._kept:
            self._kept.clear()
            self._kept[key] = Prepared.of(self.matrices, operands)
        return self._kept[key]

    def versions(self) -> tuple[int, ...]:
        """quant.tensor_versions.versions_of the tensors."""
        return tuple(versions_of(self.tensors))

    def check(self, versions: tuple[int, ...]) -> None:
        """RuntimeError in a backward whose forward saw other versions."""
        require_versions(f"deterministic: weights {self.shape}", self.tensors, versions)


def _shape_of(matrices: Matrices) -> tuple[int, int, int]:
    return (len(matrices), *matrices[0].shape)


class GradientSum:
    """The gradient of Weights as a sum of one product or more, in FP32 between them, which a store in BF16
    gets at the end.

    needs: for which of the leaves autograd asks; of none, nothing is computed.
    """

    def __init__(self, weights: Weights, needs: Sequence[bool], num_products: int = 1) -> None:
        self._weights, self._is_begun, self._is_needed = weights, False, any(needs)
        if not self._is_needed:
            return
        store, (num_groups, num_rows, num_cols) = weights.store, weights.shape
        first = weights.tensors[0]
        is_cut = num_rows < first.shape[-2]
        self._targets = None if store is None else store.targets()
        if self._targets is not None and is_cut:
            self._targets = [target[:num_rows] for target in self._targets]
        self._is_stored = self._targets is not None and (
            num_products == 1 or self._targets[0].dtype == torch.float32
        )
        if self._is_stored:
            self._out = self._targets
            return
        dtype = first.dtype if num_products == 1 else torch.float32
        shape = (num_groups, first.shape[-2], num_cols)
        self._memory = torch.empty(shape, dtype=dtype, device=first.device)
        self._out = self._memory
        if is_cut:
            self._memory[:, num_rows:].zero_()
            self._out = self._memory[:, :num_rows]

    def add(self, grad: Tensor, x: Tensor, offsets: Tensor) -> None:
        """Row groups of grad BF16 (M, N), transposed, times those of x (M, K)."""
        if not self._is_needed:
            return
        shape = (grad.shape[1], x.shape[1], x.shape[0])
        backend = backends.select(
            "grouped_wgrad", (BF16, BF16), shape=shape, device=x.device, dtype=x.dtype
        )
        accumulate = self._is_stored or self._is_begun
        backend.grouped_wgrad(grad.t(), x.t(), offsets, out=self._out, accumulate=accumulate)
        self._is_begun = True

    def of_leaves(self) -> Sequence[Tensor | None]:
        """What autograd gets for the leaves."""
        leaves = self._weights.leaves
        if not self._is_needed:
            return [None] * len(leaves)
        if self._targets is not None:
            if not self._is_stored:
                for target, total in zip(self._targets, self._out, strict=True):
                    target.add_(total)
            return [*self._weights.store.added()]
        grads = self._memory.to(leaves[0].dtype)
        return [grads.view(leaves[0].shape)] if len(leaves) == 1 else grads.unbind()


def grouped_dgrad(grad: Tensor, weights: Weights, offsets: Tensor) -> Tensor:
    """Row group g of grad BF16 (M, N) times weight g: BF16 (M, K)."""
    _, num_rows, num_cols = weights.shape
    backend = _gemm_backend(UNQUANTIZED, grad, (1, num_cols, num_rows))
    return backend.grouped_gemm(
        grad.contiguous(), weights.matrices, offsets, out_dtype=grad.dtype, transposed=True
    )


def gradients(
    weights: Weights, grad: Tensor, x: Tensor, offsets: Tensor, needs: Sequence[bool]
) -> Sequence[Tensor | None]:
    """What autograd gets for the leaves of weights by which x was multiplied; see GradientSum."""
    total = GradientSum(weights, needs)
    total.add(grad, x, offsets)
    return total.of_leaves()


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
    def forward(ctx, x: Tensor, weight: Weights, operands: Operands, *_leaves) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.versions = weight, weight.versions()
        offsets = dense_offsets(x.shape[0], x.device)
        return weight.prepared(operands).times(x, offsets, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (x,), weight = ctx.saved_tensors, ctx.weight
        weight.check(ctx.versions)
        needs_x, _, _, *needs = ctx.needs_input_grad
        offsets = dense_offsets(x.shape[0], x.device)
        grad_x = grouped_dgrad(grad, weight, offsets) if needs_x else None
        return grad_x, None, None, *gradients(weight, grad, x, offsets, needs)
