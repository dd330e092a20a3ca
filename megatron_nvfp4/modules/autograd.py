"""The one autograd function of a layer by itself: fprop, then dgrad and wgrad as its recipe says.

The extension's node (csrc/product_node.cpp) does what costs host time once a weight, and launches the two
gradients itself where they are products of BF16 matrices on compute capability 9.0; all else is `_backward`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nvfp4 import backends
from megatron_nvfp4.backends import Matrices, Operand, PackedWeights, cuda_gemm, extension
from megatron_nvfp4.recipes import BF16, FORWARD, NVFP4Spec, Operands

from .matmul import (
    FPROP_LEFT,
    MatmulSetup,
    activation_of_wgrad,
    bias_gradient,
    check_finite,
    check_versions,
    gemm_op,
    input_gradient,
    is_quantized_once,
    leaves,
    main_grads,
    mark_accumulated,
    multiply,
    quantize_operand,
    select_gemm,
    versions_read,
    weight_gradient,
)
from .params import QLinearParams


@dataclass(frozen=True, slots=True)
class Kept:
    """What the backward has of its forward beside the tensors that autograd keeps.

    rests: of the activation and of the weights, see flatten; num_saved: tensors of the activation.
    """

    setup: MatmulSetup
    weights: tuple[Tensor, ...]
    versions: list[int]
    rests: tuple[object, object]
    num_saved: int


def grouped_matmul(
    x: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    weight_operand: Operand | Matrices,
    setup: MatmulSetup,
    weights: tuple[Tensor, ...],
) -> Tensor:
    """y = x_g @ weight_g^T + bias_g for every row group g of x.

    x (M, K), offsets (G+1,), bias (G, N) or None, weight_operand as quantize_weights, G weights.
    """
    functions = None if torch.compiler.is_compiling() else extension.functions()
    if functions is None:
        return GroupedMatmul.apply(
            x, offsets, bias, weight_operand, setup, weights, *leaves(weights, setup)
        )
    with torch.no_grad():
        y, saved, kept = _forward(x, offsets, bias, weight_operand, setup, weights)
    if setup.keep_for_backward:
        launches = _launched_gradients(
            setup.params, setup.dtype, x.device, len(weights), weights[0].shape
        )
        functions.record_product(
            GroupedMatmul.__name__,
            y,
            x,
            bias,
            weights,
            len(leaves(weights, setup)),
            saved,
            *launches,
            setup.fuse_wgrad,
            kept,
            _CALLS,
        )
    return y


@backends.remembered
def _launched_gradients(
    params: QLinearParams,
    dtype: torch.dtype,
    device: torch.device,
    num_groups: int,
    shape: tuple[int, int],
) -> tuple[bool, bool]:
    """Whether the extension's node may launch the gradients of x and of the weights (N, K) itself."""
    (num_rows, num_cols), originals = shape, (BF16, BF16)

    def is_launched(operands: Operands, op: str, sizes: tuple[int, int, int]) -> bool:
        is_plain = (operands.left, operands.right) == originals and dtype == torch.bfloat16
        if not is_plain or device.type != "cuda":
            return False
        backend = select_gemm(op, originals, sizes, device, params, dtype)
        return cuda_gemm.runs_wgmma(backend, device)

    recipe = params.recipe
    return (
        is_launched(recipe.dgrad, gemm_op(num_groups), (0, num_cols, num_rows)),
        is_launched(recipe.wgrad, "grouped_wgrad", (num_rows, num_cols, 0)),
    )


@backends.remembered
def _is_one_operator(
    params: QLinearParams,
    dtype: torch.dtype,
    device: torch.device,
    num_groups: int,
    shape: tuple[int, int],
) -> bool:
    """Whether cuda_gemm.grouped_linear computes the forward by weights (N, K)."""
    recipe, (num_rows, num_cols) = params.recipe, shape
    left, right = formats = (recipe.fprop.left, recipe.fprop.right)
    if dtype != torch.bfloat16 or recipe.wgrad.right == FORWARD:  # which keeps the quantised rows
        return False
    if formats != (BF16, BF16):
        if not is_quantized_once(recipe) or not isinstance(right, NVFP4Spec):
            return False
        quantizer = backends.select(
            "quantize", (left,), shape=(0, num_cols), device=device, backend=params.backend
        )
        if quantizer.name != "cuda":
            return False
    sizes = (0, num_rows, num_cols)
    backend = select_gemm(gemm_op(num_groups), formats, sizes, device, params, dtype)
    return cuda_gemm.runs_wgmma(backend, device)


def _forward(
    x: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    weight_operand: Operand | Matrices,
    setup: MatmulSetup,
    weights: tuple[Tensor, ...],
) -> tuple[Tensor, list[Tensor | None], Kept]:
    """The product, the tensors to save, and the rest."""
    recipe, group = setup.params.recipe, setup.input_amax_group
    check_finite(x, setup)
    is_plain = bias is None and group is None
    is_plain = is_plain and isinstance(weight_operand, PackedWeights | Tensor | tuple)
    layer = (setup.params, setup.dtype, x.device, len(weights), weights[0].shape)
    if is_plain and _is_one_operator(*layer):
        x_operand = x
        y = cuda_gemm.grouped_linear(x, recipe.fprop.left, weight_operand, offsets)
    else:
        x_operand = quantize_operand(
            x, recipe.fprop.left, FPROP_LEFT, setup, offsets=offsets, amax_group=group
        )
        formats = (recipe.fprop.left, recipe.fprop.right)
        y = multiply(x_operand, weight_operand, offsets, formats, setup, bias)
    saved_x = None
    if setup.keep_for_backward and any(weight.requires_grad for weight in weights):
        saved_x = activation_of_wgrad(x, x_operand, offsets, setup)
    saved_weight = weight_operand if recipe.dgrad.right == FORWARD and x.requires_grad else None
    x_tensors, x_rest = flatten(saved_x)
    weight_tensors, weight_rest = flatten(saved_weight)
    kept = Kept(
        setup, weights, versions_read(weights, setup), (x_rest, weight_rest), len(x_tensors)
    )
    return y, [offsets, *x_tensors, *weight_tensors], kept


def _backward(
    kept: Kept,
    grad_output: Tensor,
    saved: Sequence[Tensor | None],
    needs_x: bool,
    needs_bias: bool,
    needs_weights: bool,
) -> tuple[Tensor | None, Tensor | None, Matrices | None]:
    """Gradients of x, bias and the leaves among the weights."""
    setup, weights = kept.setup, kept.weights
    offsets, *tensors = saved
    saved_x = unflatten(tensors[: kept.num_saved], kept.rests[0])
    saved_weight = unflatten(tensors[kept.num_saved :], kept.rests[1])
    check_versions(weights, setup, kept.versions)
    grad_output = grad_output.to(setup.dtype).contiguous()
    grad_x = grad_bias = grads = None
    if needs_x:
        grad_x = input_gradient(grad_output, offsets, weights, saved_weight, setup)
    if needs_bias:
        grad_bias = bias_gradient(grad_output, offsets, setup)
    if needs_weights and saved_x is not None:
        grads = weight_gradient(grad_output, saved_x, offsets, weights, setup)
    return grad_x, grad_bias, grads


# What the extension's node asks of Python.
_CALLS = (
    _backward,
    lambda kept: main_grads(kept.weights, kept.setup),
    lambda kept: mark_accumulated(kept.weights, kept.setup),
)


class GroupedMatmul(torch.autograd.Function):
    """grouped_matmul where the extension's node cannot be used: not built, or under torch.compile."""

    @staticmethod
    def forward(ctx, x, offsets, bias, weight_operand, setup, weights, *_leaves):
        y, saved, ctx.kept = _forward(x, offsets, bias, weight_operand, setup, weights)
        ctx.save_for_backward(*saved)  # so that hooks (offload, version checks) see them
        return y

    @staticmethod
    @once_differentiable  # the gradients of a quantised product have no derivative
    def backward(ctx, grad_output):
        needs_x, _, needs_bias, _, _, _, *needs_weights = ctx.needs_input_grad
        grad_x, grad_bias, grads = _backward(
            ctx.kept, grad_output, ctx.saved_tensors, needs_x, needs_bias, any(needs_weights)
        )
        return (
            grad_x,
            None,
            grad_bias,
            None,
            None,
            None,
            *([None] * len(needs_weights) if grads is None else grads),
        )


def flatten(operand: Operand | Matrices | None) -> tuple[list[Tensor | None], object]:
    """An operand as the tensors autograd keeps, and what is left of it."""
    if operand is None or isinstance(operand, Tensor):
        return [operand], None
    if isinstance(operand, tuple):
        return list(operand), ()
    names = [f.name for f in fields(operand) if isinstance(getattr(operand, f.name), Tensor)]
    bare = replace(operand, **dict.fromkeys(names))
    return [getattr(operand, name) for name in names], (bare, names)


def unflatten(tensors: list[Tensor | None], rest: object) -> Operand | Matrices | None:
    if rest is None:
        return tensors[0]
    if rest == ():
        return tuple(tensors)
    bare, names = rest
    return replace(bare, **dict(zip(names, tensors, strict=True)))
