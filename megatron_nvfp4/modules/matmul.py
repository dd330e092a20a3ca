"""The products of a layer, forward and backward, with the operands its recipe names.

A dense layer is a grouped one with a single group. Nothing is decided here: the recipe names the operands,
`backends.select` finds who computes, and the module says which groups share an amax.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nvfp4 import backends
from megatron_nvfp4.backends import Matrices, Operand
from megatron_nvfp4.quant import count_nonfinite, pad_groups
from megatron_nvfp4.quant.layout import dense_offsets
from megatron_nvfp4.quant.nvfp4 import group_amax, row_amax, tensor_amax
from megatron_nvfp4.recipes import BF16, FORWARD, MXFP8, FloatSpec, Format, NVFP4Spec

from .params import QLinearParams

# What an operand is to its layer, as the `offset` of its random bits: no two of a call are the same.
FPROP_LEFT, FPROP_RIGHT, DGRAD_LEFT, DGRAD_RIGHT, WGRAD_LEFT, WGRAD_RIGHT = range(6)


@dataclass(frozen=True, kw_only=True)
class MatmulSetup:
    """What stays the same for one call of one layer.

    input_amax_group: ranks that hold shards of the contraction, whose amax is one (row-parallel input).
    weight_amax_group: ranks that hold shards of the weight.
    splits: rows of every group, where the host knows them.
    fuse_wgrad: add the weight gradient to `weight.main_grad` and return none.
    seed: key of the call's stochastic rounding, which has been drawn in the forward.
    keep_for_backward: False in a gradient-free pass, which then quantises nothing for wgrad.
    """

    params: QLinearParams
    name: str
    dtype: torch.dtype
    input_amax_group: dist.ProcessGroup | None = None
    weight_amax_group: dist.ProcessGroup | None = None
    splits: tuple[int, ...] | None = None
    fuse_wgrad: bool = False
    seed: int | None = None
    keep_for_backward: bool = True


def quantize_weights(weights: Sequence[Tensor], setup: MatmulSetup) -> Operand | Matrices:
    """The forward operand of G weights (N, K), one amax per weight; unquantised, the weights themselves."""
    operands = setup.params.recipe.fprop
    if operands.right == BF16:
        return _matrices(weights, setup.dtype)
    (stacked, is_reversed), num_groups = stack_rows(weights), len(weights)
    num_rows = weights[0].shape[0]
    offsets = torch.arange(num_groups + 1, device=stacked.device) * num_rows
    # An amax per row has shards only where the contraction is split.
    is_per_row = _is_per_row(operands.right)
    group = setup.input_amax_group if is_per_row else setup.weight_amax_group
    operand = quantize_operand(
        stacked, operands.right, FPROP_RIGHT, setup, offsets=offsets, amax_group=group
    )
    op, formats = _gemm_op(num_groups), (operands.left, operands.right)
    shape = (0, num_rows, stacked.shape[1])  # of any number of rows
    backend = gemm_backend(op, formats, shape, stacked.device, setup)
    return backend.pack_weights(operand, num_groups, is_reversed=is_reversed)


def stack_rows(weights: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """G weights (N, K) as one matrix (G*N, K), and whether it holds the last one first.

    A view where they follow each other in memory, forwards or, as Megatron's distributed optimizer lays
    parameters out, backwards; else a copy in order.
    """
    num_rows, num_cols = weights[0].shape
    for is_reversed in (False, True):
        ordered = weights[::-1] if is_reversed else weights
        if _follow_each_other(ordered):
            size = (len(weights) * num_rows, num_cols)
            return ordered[0].detach().as_strided(size, (num_cols, 1)), is_reversed
    return torch.cat([weight.detach() for weight in weights]), False


def _follow_each_other(weights: Sequence[Tensor]) -> bool:
    first, addresses = weights[0], [weight.data_ptr() for weight in weights]
    num_bytes = first.numel() * first.element_size()
    end = addresses[0] + num_bytes * len(weights)
    storage = first.untyped_storage()
    return (
        addresses == list(range(addresses[0], end, num_bytes))
        and end <= storage.data_ptr() + storage.nbytes()
        and all(
            weight.is_contiguous() and weight.dtype == first.dtype and weight.shape == first.shape
            for weight in weights
        )
    )


def _matrices(weights: Sequence[Tensor], dtype: torch.dtype) -> Matrices:
    """Unquantised weights as a GEMM takes them: one (G, N, K) where they lie so, else each by itself."""
    if weights[0].dtype == dtype and _follow_each_other(weights):
        shape = (len(weights), *weights[0].shape)
        return weights[0].detach().as_strided(shape, (weights[0].numel(), shape[2], 1))
    return tuple(weight.detach().to(dtype) for weight in weights)


def check_finite(x: Tensor, setup: MatmulSetup) -> None:
    """In strict mode, which waits for the GPU, RuntimeError for a NaN or Inf in x (M, K)."""
    if not setup.params.strict:
        return
    num_bad = int(count_nonfinite(x))
    if num_bad:
        raise RuntimeError(
            f"{setup.name}: {num_bad} of {x.shape[0]} input rows hold NaN or Inf (strict mode); "
            "look at the layer before, or set strict: false"
        )


def versions_read(weights: Sequence[Tensor], setup: MatmulSetup) -> list[int]:
    """Versions of the weights if the backward reads them: what autograd would compare had it kept them.

    The parameters keep them already.
    """
    recipe = setup.params.recipe
    reads_weights = recipe.fprop.right == BF16 or recipe.dgrad.right != FORWARD
    return [weight._version for weight in weights] if reads_weights else []


def check_versions(weights: Sequence[Tensor], setup: MatmulSetup, versions: list[int]) -> None:
    """RuntimeError if a weight that the backward reads is not the forward's."""
    if versions_read(weights, setup) != versions:
        raise RuntimeError(
            f"{setup.name}: a weight was modified in place between forward and backward; "
            "run the backward before the optimizer's step"
        )


def input_gradient(
    grad_output: Tensor,
    offsets: Tensor,
    weights: Sequence[Tensor],
    weight_operand: Operand | Matrices | None,
    setup: MatmulSetup,
) -> Tensor:
    """grad_output (M, N) by groups times the weights: (M, K).

    weight_operand: the forward's, where the recipe reads it again.
    """
    dgrad = setup.params.recipe.dgrad
    left = quantize_operand(grad_output, dgrad.left, DGRAD_LEFT, setup, offsets=offsets)
    right, transposed = _dgrad_weight(weights, weight_operand, setup)
    return multiply(
        left, right, offsets, (dgrad.left, dgrad.right), setup, None, transposed=transposed
    )


def _is_per_row(spec: Format) -> bool:
    """Whether the outer scale is a row's own."""
    return isinstance(spec, FloatSpec) or (isinstance(spec, NVFP4Spec) and spec.outer == "token")


def quantize_operand(
    x: Tensor,
    spec: Format,
    role: int,
    setup: MatmulSetup,
    *,
    offsets: Tensor | None = None,
    column_offsets: Tensor | None = None,
    rotated: bool = False,
    amax: Tensor | None = None,
    amax_group: dist.ProcessGroup | None = None,
) -> Operand:
    """x (M, K) as an operand in the role `role`; amax: its own, or one over the shards of amax_group."""
    if spec in (BF16, FORWARD):
        return x
    if amax_group is not None and spec != MXFP8:
        if _is_per_row(spec):
            amax = row_amax(x)
        else:
            amax = tensor_amax(x) if offsets is None else group_amax(x, offsets)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=amax_group)
    op = "quantize_rotated" if rotated else "quantize"
    backend = backends.select(
        op, (spec,), shape=x.shape, device=x.device, backend=setup.params.backend
    )
    return backend.quantize(
        x,
        spec,
        amax=amax,
        offsets=offsets,
        column_offsets=column_offsets,
        rotated=rotated,
        seed=setup.seed,
        offset=role,
    )


def multiply(
    a: Operand,
    b: Operand | Matrices,
    offsets: Tensor,
    formats: tuple[Format, Format],
    setup: MatmulSetup,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Row group g of a times b_g, plus bias (G, N): (M, N) in out_dtype, else the layer's."""
    out_dtype = out_dtype or setup.dtype
    num_groups = offsets.numel() - 1
    op = _gemm_op(num_groups)
    if isinstance(b, Sequence) or len(b.shape) == 3:
        num_cols = b[0].shape[1 if transposed else 0]
    else:
        num_cols = b.shape[0] // num_groups
    backend = gemm_backend(op, formats, (*a.shape[:1], num_cols, a.shape[1]), a.device, setup)
    if num_groups == 1:
        bias = None if bias is None else bias[0]
        return backend.gemm(a, b, bias=bias, out_dtype=out_dtype, transposed=transposed)
    return backend.grouped_gemm(
        a, b, offsets, bias=bias, out_dtype=out_dtype, transposed=transposed
    )


def _gemm_op(num_groups: int) -> str:
    return "gemm" if num_groups == 1 else "grouped_gemm"


def gemm_backend(op, formats, shape, device, setup: MatmulSetup):
    formats = tuple(BF16 if spec == FORWARD else spec for spec in formats)
    unquantized = formats == (BF16, BF16)
    name = setup.params.gemm_backend if unquantized else setup.params.backend
    return backends.select(op, formats, shape=shape, device=device, dtype=setup.dtype, backend=name)


def bias_gradient(grad_output: Tensor, offsets: Tensor, setup: MatmulSetup) -> Tensor:
    """Sums (G, N) of the gradient's row groups: a weight gradient with ones for activations."""
    num_rows, num_cols = grad_output.shape
    ones = grad_output.new_ones(num_rows, 8)  # 8 columns: the least a tensor core's output may have
    sums = torch.empty(
        offsets.numel() - 1, num_cols, 8, dtype=torch.float32, device=grad_output.device
    )
    shape, formats = (num_cols, 8, num_rows), (BF16, BF16)
    backend = gemm_backend("grouped_wgrad", formats, shape, grad_output.device, setup)
    backend.grouped_wgrad(grad_output.t(), ones.t(), offsets, out=sums.unbind(), accumulate=False)
    return sums[:, :, 0].to(grad_output.dtype)


def activation_of_wgrad(
    x: Tensor, x_operand: Operand, offsets: Tensor, setup: MatmulSetup
) -> Operand:
    """What wgrad will need of the activations, in its own format and nothing more."""
    spec = setup.params.recipe.wgrad.right
    if spec == BF16:
        return x
    if spec == FORWARD:
        return x_operand
    return quantize_columns(x, spec, WGRAD_RIGHT, offsets, setup)[0]


def quantize_columns(
    x: Tensor, spec: Format, role: int, offsets: Tensor, setup: MatmulSetup
) -> tuple[Operand, Tensor]:
    """x^T (K, M') in blocks along the tokens of each group, and the padded group boundaries of M'.

    Rotated along the tokens if the recipe's wgrad is; each group is encoded under its own amax.
    """
    multiple = 32 if spec == MXFP8 else 16
    padded, padded_offsets = pad_groups(x, offsets, multiple, setup.splits)
    rotated = setup.params.recipe.wgrad.hadamard
    operand = quantize_operand(
        padded.t(), spec, role, setup, column_offsets=padded_offsets, rotated=rotated
    )
    return operand, padded_offsets


def _dgrad_weight(
    weights: Sequence[Tensor], saved_weight: Operand | Matrices | None, setup: MatmulSetup
) -> tuple[Operand | Matrices, bool]:
    """The weights as dgrad multiplies them, and whether they lie as in the forward, (N, K).

    Quantised along N they are turned, (G*K, N); unquantised they are read where they lie.
    """
    spec, (num_rows, num_cols) = setup.params.recipe.dgrad.right, weights[0].shape
    num_groups = len(weights)
    op, left = _gemm_op(num_groups), setup.params.recipe.dgrad.left
    if spec == BF16:
        return _matrices(weights, setup.dtype), True
    if spec == FORWARD:
        decoded = decode_operand(saved_weight, op, left, setup)
        return decoded.reshape(num_groups, num_rows, num_cols), True
    stacked, is_reversed = stack_rows(weights)
    stacked = stacked.reshape(num_groups, num_rows, num_cols)
    backend = gemm_backend(op, (left, spec), None, stacked.device, setup)
    rounded = backend.round_along_rows(stacked, spec)
    if rounded is not None:
        return (tuple(rounded)[::-1] if is_reversed else rounded), True
    transposed = stacked.transpose(1, 2)
    transposed = transposed.flip(0) if is_reversed else transposed
    transposed = transposed.reshape(num_groups * num_cols, num_rows)
    offsets = torch.arange(num_groups + 1, device=transposed.device) * num_cols
    group = setup.weight_amax_group
    operand = quantize_operand(
        transposed, spec, DGRAD_RIGHT, setup, offsets=offsets, amax_group=group
    )
    return operand, False


def weight_gradient(
    grad_output: Tensor,
    saved_x: Operand,
    offsets: Tensor,
    weights: Sequence[Tensor],
    setup: MatmulSetup,
) -> list[Tensor | None]:
    """Gradients of G weights (N, K); with setup.fuse_wgrad those that train get them in main_grad instead."""
    recipe = setup.params.recipe
    left, right = grad_output.t(), saved_x
    if recipe.wgrad.left not in (BF16, FORWARD):
        spec = recipe.wgrad.left
        left, offsets = quantize_columns(grad_output, spec, WGRAD_LEFT, offsets, setup)
    if recipe.wgrad.right == FORWARD:
        right = decode_operand(saved_x, "grouped_wgrad", recipe.wgrad.left, setup)
    if recipe.wgrad.right in (BF16, FORWARD):
        right = right.t()
    formats = (recipe.wgrad.left, recipe.wgrad.right)
    shape = (left.shape[0], right.shape[0], left.shape[1])
    backend = gemm_backend("grouped_wgrad", formats, shape, grad_output.device, setup)
    training = [weight for weight in weights if weight.requires_grad]
    # A weight that stands for several experts has a sum of gradients, which autograd makes.
    is_tied = len(set(map(id, weights))) < len(weights)
    if setup.fuse_wgrad and not is_tied and all(hasattr(w, "main_grad") for w in training):
        unread = None
        if len(training) < len(weights):
            unread = torch.empty_like(training[0].main_grad)
        out = [weight.main_grad if weight.requires_grad else unread for weight in weights]
        backend.grouped_wgrad(left, right, offsets, out=out, accumulate=True)
        return _mark_accumulated(weights)
    grads = weights[0].new_empty(len(weights), *weights[0].shape).unbind()
    backend.grouped_wgrad(left, right, offsets, out=grads, accumulate=False)
    return grads


def accumulate_weight_gradient(grad_output: Tensor, x: Tensor, main_grad: Tensor) -> None:
    """main_grad (N, K) += grad_output (M, N)^T x (M, K), unquantised; FP32 sums, rounded once."""
    num_rows, num_cols = grad_output.shape
    backend = backends.select(
        "grouped_wgrad",
        (BF16, BF16),
        shape=(num_cols, x.shape[1], num_rows),
        device=grad_output.device,
        dtype=grad_output.dtype,
        backend=("cuda", "torch"),
    )
    offsets = dense_offsets(num_rows, grad_output.device)
    backend.grouped_wgrad(grad_output.t(), x.t(), offsets, out=[main_grad], accumulate=True)


def _mark_accumulated(weights: Sequence[Tensor]) -> list[Tensor | None]:
    """Megatron's contract (distributed_data_parallel.py): flag the parameter, hand back a dummy gradient."""
    grads: list[Tensor | None] = [None] * len(weights)
    flagged = [
        index
        for index, weight in enumerate(weights)
        if weight.requires_grad and hasattr(weight, "grad_added_to_main_grad")
    ]
    if not flagged:
        return grads
    # All dummies are the same memory, as nobody writes to them.
    first = weights[0]
    is_read = any(getattr(weights[index], "zero_out_wgrad", False) for index in flagged)
    memory = first.new_zeros(first.shape) if is_read else first.new_empty(first.shape)
    for index, dummy in zip(
        flagged, memory.expand(len(flagged), *first.shape).unbind(), strict=True
    ):
        weights[index].grad_added_to_main_grad = True
        grads[index] = dummy
    return grads


def decode_operand(
    operand: Operand | Matrices, op: str, left: Format, setup: MatmulSetup
) -> Tensor:
    """The right operand of `op` as the forward GEMM saw it, rounded to the layer's dtype: (M, K)."""
    if isinstance(operand, tuple):
        return torch.cat(operand).to(setup.dtype)
    if isinstance(operand, Tensor):
        return operand.to(setup.dtype)
    backend = gemm_backend(op, (left, BF16), None, operand.device, setup)
    return backend.dequantize(operand, setup.dtype)
