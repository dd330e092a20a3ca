"""The one autograd function of a layer by itself: fprop, then dgrad and wgrad as its recipe says."""

from dataclasses import fields, replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nvfp4.backends import Matrices, Operand
from megatron_nvfp4.recipes import FORWARD

from .matmul import (
    FPROP_LEFT,
    MatmulSetup,
    activation_of_wgrad,
    bias_gradient,
    check_finite,
    check_versions,
    input_gradient,
    multiply,
    quantize_operand,
    versions_read,
    weight_gradient,
)


class GroupedMatmul(torch.autograd.Function):
    """y = x_g @ weight_g^T + bias_g for every row group g of x."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        offsets: Tensor,
        bias: Tensor | None,
        weight_operand: Operand | Matrices,
        setup: MatmulSetup,
        *weights: Tensor,
    ) -> Tensor:
        """x (M, K), offsets (G+1,), bias (G, N) or None, weight_operand as quantize_weights, G weights."""
        recipe = setup.params.recipe
        check_finite(x, setup)
        group = setup.input_amax_group
        x_operand = quantize_operand(
            x, recipe.fprop.left, FPROP_LEFT, setup, offsets=offsets, amax_group=group
        )
        formats = (recipe.fprop.left, recipe.fprop.right)
        y = multiply(x_operand, weight_operand, offsets, formats, setup, bias)
        ctx.setup, ctx.weights = setup, weights
        ctx.versions = versions_read(weights, setup)
        ctx.has_bias = bias is not None
        saved_x = None
        if setup.keep_for_backward and any(weight.requires_grad for weight in weights):
            saved_x = activation_of_wgrad(x, x_operand, offsets, setup)
        saved_weight = weight_operand if recipe.dgrad.right == FORWARD and x.requires_grad else None
        _save(ctx, offsets, saved_x, saved_weight)
        return y

    @staticmethod
    @once_differentiable  # the gradients of a quantised product have no derivative
    def backward(ctx, grad_output: Tensor):
        setup = ctx.setup
        offsets, saved_x, saved_weight = _load(ctx)
        check_versions(ctx.weights, setup, ctx.versions)
        grad_output = grad_output.to(setup.dtype).contiguous()
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = input_gradient(grad_output, offsets, ctx.weights, saved_weight, setup)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = bias_gradient(grad_output, offsets, setup)
        grads = [None] * len(ctx.weights)
        if saved_x is not None:
            grads = weight_gradient(grad_output, saved_x, offsets, ctx.weights, setup)
        return (grad_x, None, grad_bias, None, None, *grads)


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


def _save(ctx, offsets, saved_x, saved_weight) -> None:
    """Keep tensors through save_for_backward, so that hooks (offload, version checks) see them."""
    x_tensors, x_rest = flatten(saved_x)
    weight_tensors, weight_rest = flatten(saved_weight)
    ctx.num_saved = len(x_tensors)
    ctx.rests = (x_rest, weight_rest)
    ctx.save_for_backward(offsets, *x_tensors, *weight_tensors)


def _load(ctx):
    offsets, *tensors = ctx.saved_tensors
    saved_x = unflatten(tensors[: ctx.num_saved], ctx.rests[0])
    saved_weight = unflatten(tensors[ctx.num_saved :], ctx.rests[1])
    return offsets, saved_x, saved_weight
