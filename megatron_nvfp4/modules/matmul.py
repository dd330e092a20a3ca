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
from megatron_nvfp4.backends import Matrices, Operand, extension
from megatron_nvfp4.quant import count_nonfinite, pad_groups
from megatron_nvfp4.quant.layout import dense_offsets
from megatron_nvfp4.quant.nvfp4 import group_amax, row_amax, tensor_amax
from megatron_nvfp4.quant.tensor_versions import require_versions, versions_of
from megatron_nvfp4.recipes import (
    BF16,
    FORWARD,
    MXFP8,
    FloatSpec,
    Format,
    NVFP4Spec,
    Recipe,
    depends_on_token_alone,
)

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
    hides_wgrad: with it, autograd knows the first weight alone (see hides_gradients).
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
    hides_wgrad: bool = False
    seed: int | None = None
    keep_for_backward: bool = True


def is_quantized_once(recipe: Recipe) -> bool:
    """Whether fprop's left operand depends on the token alone, so that packed rows can be gathered."""
    return depends_on_token_alone(recipe.fprop.left)


def quantize_weights(weights: Sequence[Tensor], setup: MatmulSetup) -> Operand | Matrices:
    """The forward operand of G weights (N, K), one amax per weight; unquantised, the weights themselves."""
    operands = setup.params.recipe.fprop
    if operands.right == BF16:
        return _matrices(weights, setup.dtype)
    (stacked, is_reversed), num_groups = stack_rows(weights), len(weights)
    num_rows = weights[0].shape[0]
    offsets = _equal_groups(num_groups, num_rows, stacked.device)
    # An amax per row has shards only where the contraction is split.
    is_per_row = _is_per_row(operands.right)
    group = setup.input_amax_group if is_per_row else setup.weight_amax_group
    operand = quantize_operand(
        stacked, operands.right, FPROP_RIGHT, setup, offsets=offsets, amax_group=group
    )
    op, formats = gemm_op(num_groups), (operands.left, operands.right)
    shape = (0, num_rows, stacked.shape[1])  # of any number of rows
    backend = gemm_backend(op, formats, shape, stacked.device, setup)
    return backend.pack_weights(operand, num_groups, is_reversed=is_reversed)


def _equal_groups(num_groups: int, num_rows: int, device: torch.device) -> Tensor:
    """Boundaries (G+1,) of groups of num_rows each, by one launch."""
    return torch.arange(0, num_groups * num_rows + 1, num_rows, device=device)


def stack_rows(weights: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """G weights (N, K) as one matrix (G*N, K), and whether it holds the last one first.

    A view where they follow each other in memory, forwards or, as Megatron's distributed optimizer lays
    parameters out, backwards; else a copy in order.
    """
    block, is_reversed = _weight_block(weights)
    if block is None:
        return torch.cat([weight.detach() for weight in weights]), False
    return block.flatten(0, 1), is_reversed


def _matrices(weights: Sequence[Tensor], dtype: torch.dtype) -> Matrices:
    """Unquantised weights as a GEMM takes them: one (G, N, K) where they lie so, else each by itself."""
    block, is_reversed = _weight_block(weights)
    if block is not None and block.dtype == dtype:
        return block.unbind()[::-1] if is_reversed else block
    return tuple(weight.detach().to(dtype) for weight in weights)


def _weight_block(weights: Sequence[Tensor]) -> tuple[Tensor | None, bool]:
    """One (G, N, K) in the weights' memory and whether it begins with the last, or None."""
    functions = extension.functions()
    return functions.weight_block(weights) if functions else (None, False)


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
    """Versions of the weights if the backward reads them; the parameters keep them already."""
    recipe = setup.params.recipe
    reads_weights = recipe.fprop.right == BF16 or recipe.dgrad.right != FORWARD
    return versions_of(weights) if reads_weights else []


def check_versions(weights: Sequence[Tensor], setup: MatmulSetup, versions: list[int]) -> None:
    """RuntimeError if a weight that the backward reads is not the forward's."""
    require_versions(setup.name, weights if versions else (), versions)


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
    op = gemm_op(num_groups)
    shape = b[0].shape if isinstance(b, tuple) else b.shape
    if isinstance(b, tuple) or len(shape) == 3:
        num_cols = shape[-1 if transposed else -2]
    else:
        num_cols = shape[0] // num_groups
    backend = gemm_backend(op, formats, (*a.shape[:1], num_cols, a.shape[1]), a.device, setup)
    if num_groups == 1:
        bias = None if bias is None else bias[0]
        return backend.gemm(a, b, bias=bias, out_dtype=out_dtype, transposed=transposed)
    return backend.grouped_gemm(
        a, b, offsets, bias=bias, out_dtype=out_dtype, transposed=transposed
    )


def gemm_op(num_groups: int) -> str:
    return "gemm" if num_groups == 1 else "grouped_gemm"


def gemm_backend(op, formats, shape, device, setup: MatmulSetup):
    return select_gemm(op, formats, shape, device, setup.params, setup.dtype)


def select_gemm(
    op: str,
    formats: Sequence[Format],
    shape: Sequence[int] | None,
    device: torch.device,
    params: QLinearParams,
    dtype: torch.dtype,
) -> backends.Backend:
    """Who multiplies operands of these formats in a layer of these numerics; shape as Backend.why_not."""
    formats = tuple(BF16 if spec == FORWARD else spec for spec in formats)
    name = params.gemm_backend if formats == (BF16, BF16) else params.backend
    return backends.select(op, formats, shape=shape, device=device, dtype=dtype, backend=name)


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
    op, left = gemm_op(num_groups), setup.params.recipe.dgrad.left
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
    offsets = _equal_groups(num_groups, num_cols, transposed.device)
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
) -> Matrices | list[Tensor | None]:
    """Gradients of the `leaves` of G weights (N, K); with setup.fuse_wgrad those that train get them in
    main_grad instead.
    """
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
    if setup.fuse_wgrad and (out := main_grads(weights, setup)):
        backend.grouped_wgrad(left, right, offsets, out=out, accumulate=True)
        return mark_accumulated(weights, setup)
    grads = weights[0].new_empty(len(weights), *weights[0].shape)
    backend.grouped_wgrad(left, right, offsets, out=grads, accumulate=False)
    return grads


def main_grads(weights: Sequence[Tensor], setup: MatmulSetup) -> list[Tensor] | None:
    """Where to add the gradients, None unless every weight that trains has its own main_grad.

    RuntimeError where they had one in the forward and autograd was told of the first weight alone.
    """
    found = _main_grads(weights)
    if found is None and setup.hides_wgrad:
        raise RuntimeError(
            f"{setup.name}: the weights had a main_grad each in the forward and have not in the backward; "
            "take it away between steps only"
        )
    return found


def _main_grads(weights: Sequence[Tensor]) -> list[Tensor] | None:
    training = [weight for weight in weights if weight.requires_grad]
    # A weight that stands for several experts has a sum of gradients, which autograd makes.
    is_tied = len(set(map(id, weights))) < len(weights)
    if is_tied or any(getattr(weight, "main_grad", None) is None for weight in training):
        return None
    if len(training) == len(weights):
        return [weight.main_grad for weight in weights]
    unread = torch.empty_like(training[0].main_grad)
    return [weight.main_grad if weight.requires_grad else unread for weight in weights]


def hides_gradients(weights: Sequence[Tensor]) -> bool:
    """Whether the gradients of these weights need not pass through autograd, where nothing but hooks of
    torch's could wait for them: all of them go to main_grad, under Megatron's flag.

    A leaf costs autograd some 10 us of host time a backward, which is most of what many small experts cost.
    """
    return len(set(map(id, weights))) == len(weights) and all(
        weight.requires_grad
        and hasattr(weight, "main_grad")
        and hasattr(weight, "grad_added_to_main_grad")
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
        for weight in weights
    )


def leaves(weights: Sequence[Tensor], setup: MatmulSetup) -> Sequence[Tensor]:
    """The weights that autograd is told of."""
    return weights[:1] if setup.hides_wgrad else weights


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


def mark_accumulated(
    weights: Sequence[Tensor], setup: MatmulSetup
) -> Matrices | list[Tensor | None]:
    """Megatron's contract (distributed_data_parallel.py): flag all, hand the leaves dummy gradients."""
    flagged = [w for w in weights if w.requires_grad and hasattr(w, "grad_added_to_main_grad")]
    if not flagged:
        return [None] * len(weights)
    is_read = False
    for weight in flagged:
        weight.grad_added_to_main_grad = True
        is_read = is_read or getattr(weight, "zero_out_wgrad", False)
    # All dummies are the same memory, as nobody writes to them.
    first = weights[0]
    memory = first.new_zeros(first.shape) if is_read else first.new_empty(first.shape)
    dummies = memory.expand(len(leaves(weights, setup)), *first.shape)
    if len(flagged) == sum(weight.requires_grad for weight in weights):
        return dummies
    ours = set(map(id, flagged))
    return [d if id(w) in ours else None for w, d in zip(weights, dummies, strict=True)]


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
