"""The one autograd function: quantised fprop, then dgrad and wgrad with the operands the recipe names.

A dense layer is a grouped one with a single group. Nothing is decided here: the recipe names the operands,
`backends.select` finds who computes, and the module says which groups share an amax.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nvfp4 import backends
from megatron_nvfp4.backends import Operand
from megatron_nvfp4.quant import (
    MXFP8Tensor,
    QuantizedTensor,
    count_nonfinite,
    decode_mxfp8,
    dequantize,
    pad_groups,
)
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
    fuse_wgrad: add the weight gradient to `weight.main_grad` and return none.
    seed: key of the call's stochastic rounding, which has been drawn in the forward.
    keep_for_backward: False in a gradient-free pass, which then quantises nothing for wgrad.
    """

    params: QLinearParams
    name: str
    dtype: torch.dtype
    input_amax_group: dist.ProcessGroup | None = None
    weight_amax_group: dist.ProcessGroup | None = None
    fuse_wgrad: bool = False
    seed: int | None = None
    keep_for_backward: bool = True


def quantize_weights(weights: Sequence[Tensor], setup: MatmulSetup) -> Operand:
    """The forward weight operand (G*N, K) of G weights (N, K), one amax per weight."""
    spec = setup.params.recipe.fprop.right
    stacked = _stack(weights, setup.dtype if spec == BF16 else None)
    num_rows = weights[0].shape[0]
    offsets = torch.arange(len(weights) + 1, device=stacked.device) * num_rows
    # An amax per row has shards only where the contraction is split.
    group = setup.input_amax_group if _is_per_row(spec) else setup.weight_amax_group
    return _quantize(stacked, spec, FPROP_RIGHT, setup, offsets=offsets, amax_group=group)


class GroupedMatmul(torch.autograd.Function):
    """y = x_g @ weight_g^T + bias_g for every row group g of x."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        offsets: Tensor,
        bias: Tensor | None,
        weight_operand: Operand,
        setup: MatmulSetup,
        *weights: Tensor,
    ) -> Tensor:
        """x (M, K), offsets (G+1,), bias (G, N) or None, weight_operand as quantize_weights, G weights."""
        recipe = setup.params.recipe
        if setup.params.strict:
            num_bad = int(count_nonfinite(x))
            if num_bad:
                raise RuntimeError(
                    f"{setup.name}: {num_bad} of {x.shape[0]} input rows hold NaN or Inf (strict mode); "
                    "look at the layer before, or set strict: false"
                )
        group = setup.input_amax_group
        x_operand = _quantize(
            x, recipe.fprop.left, FPROP_LEFT, setup, offsets=offsets, amax_group=group
        )
        formats = (recipe.fprop.left, recipe.fprop.right)
        y = _grouped_gemm(x_operand, weight_operand, offsets, formats, setup, bias)
        ctx.setup, ctx.params, ctx.num_rows = setup, weights, x.shape[0]
        ctx.has_bias = bias is not None
        saved_x = None
        if setup.keep_for_backward and any(weight.requires_grad for weight in weights):
            saved_x = _saved_activation(x, x_operand, offsets, setup)
        saved_weight = weight_operand if recipe.dgrad.right == FORWARD and x.requires_grad else None
        originals = () if recipe.dgrad.right == FORWARD else weights
        _save(ctx, offsets, saved_x, saved_weight, originals)
        return y

    @staticmethod
    @once_differentiable  # the gradients of a quantised product have no derivative
    def backward(ctx, grad_output: Tensor):
        setup, recipe = ctx.setup, ctx.setup.params.recipe
        offsets, saved_x, saved_weight, originals = _load(ctx)
        grad_output = grad_output.to(setup.dtype).contiguous()
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            left = _quantize(grad_output, recipe.dgrad.left, DGRAD_LEFT, setup, offsets=offsets)
            right = _dgrad_weight(originals, saved_weight, ctx.params, setup)
            formats = (recipe.dgrad.left, recipe.dgrad.right)
            grad_x = _grouped_gemm(left, right, offsets, formats, setup, None)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            sums = [grad_output[a:b].float().sum(0) for a, b in pairwise(offsets.tolist())]
            grad_bias = torch.stack(sums).to(grad_output.dtype)
        grads = [None] * len(ctx.params)
        if saved_x is not None:
            grads = _wgrad(grad_output, saved_x, offsets, ctx.params, setup)
        return (grad_x, None, grad_bias, None, None, *grads)


def _is_per_row(spec: Format) -> bool:
    """Whether the outer scale is a row's own."""
    return isinstance(spec, FloatSpec) or (isinstance(spec, NVFP4Spec) and spec.outer == "token")


def _quantize(
    x: Tensor,
    spec: Format,
    role: int,
    setup: MatmulSetup,
    *,
    offsets: Tensor | None = None,
    column_offsets: Tensor | None = None,
    rotated: bool = False,
    amax_group: dist.ProcessGroup | None = None,
) -> Operand:
    if spec in (BF16, FORWARD):
        return x
    amax = None
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


def _grouped_gemm(
    a: Operand,
    b: Operand,
    offsets: Tensor,
    formats: tuple[Format, Format],
    setup: MatmulSetup,
    bias: Tensor | None,
) -> Tensor:
    num_groups = offsets.numel() - 1
    op = "gemm" if num_groups == 1 else "grouped_gemm"
    shape = (a.shape[0], b.shape[0] // num_groups, b.shape[1])
    backend = _gemm_backend(op, formats, shape, a.device, setup)
    if num_groups == 1:
        bias = None if bias is None else bias[0]
        return backend.gemm(a, b, bias=bias, out_dtype=setup.dtype)
    return backend.grouped_gemm(a, b, offsets, bias=bias, out_dtype=setup.dtype)


def _gemm_backend(op, formats, shape, device, setup: MatmulSetup):
    formats = tuple(BF16 if spec == FORWARD else spec for spec in formats)
    unquantized = formats == (BF16, BF16)
    name = setup.params.gemm_backend if unquantized else setup.params.backend
    return backends.select(op, formats, shape=shape, device=device, backend=name)


def _saved_activation(
    x: Tensor, x_operand: Operand, offsets: Tensor, setup: MatmulSetup
) -> Operand:
    """What wgrad will need of the activations, in its own format and nothing more."""
    spec = setup.params.recipe.wgrad.right
    if spec == BF16:
        return x
    if spec == FORWARD:
        return x_operand
    return _quantize_columns(x, spec, WGRAD_RIGHT, offsets, setup)[0]


def _quantize_columns(
    x: Tensor, spec: Format, role: int, offsets: Tensor, setup: MatmulSetup
) -> tuple[Operand, Tensor]:
    """x^T (K, M') in blocks along the tokens of each group, and the padded group boundaries of M'.

    Rotated along the tokens if the recipe's wgrad is; each group is encoded under its own amax.
    """
    padded, padded_offsets = pad_groups(x, offsets, 32 if spec == MXFP8 else 16)
    rotated = setup.params.recipe.wgrad.hadamard
    operand = _quantize(
        padded.t(), spec, role, setup, column_offsets=padded_offsets, rotated=rotated
    )
    return operand, padded_offsets


def _dgrad_weight(
    originals: Sequence[Tensor],
    saved_weight: Operand | None,
    params: Sequence[Tensor],
    setup: MatmulSetup,
) -> Operand:
    """The weights transposed, (G*K, N), in the format dgrad names."""
    spec = setup.params.recipe.dgrad.right
    if spec == FORWARD:
        stacked = _decode(saved_weight, setup.dtype)
    else:
        stacked = _stack(originals, setup.dtype if spec == BF16 else None)
    num_groups, (num_rows, num_cols) = len(params), params[0].shape
    transposed = stacked.reshape(num_groups, num_rows, num_cols).transpose(1, 2)
    transposed = transposed.reshape(num_groups * num_cols, num_rows)
    offsets = torch.arange(num_groups + 1, device=transposed.device) * num_cols
    group = setup.weight_amax_group
    return _quantize(transposed, spec, DGRAD_RIGHT, setup, offsets=offsets, amax_group=group)


def _wgrad(
    grad_output: Tensor,
    saved_x: Operand,
    offsets: Tensor,
    weights: Sequence[Tensor],
    setup: MatmulSetup,
) -> list[Tensor | None]:
    recipe = setup.params.recipe
    left, right = grad_output.t(), saved_x
    if recipe.wgrad.left not in (BF16, FORWARD):
        spec = recipe.wgrad.left
        left, offsets = _quantize_columns(grad_output, spec, WGRAD_LEFT, offsets, setup)
    if recipe.wgrad.right == FORWARD:
        right = _decode(saved_x, setup.dtype)
    if recipe.wgrad.right in (BF16, FORWARD):
        right = right.t()
    formats = (recipe.wgrad.left, recipe.wgrad.right)
    shape = (left.shape[0], right.shape[0], left.shape[1])
    backend = _gemm_backend("grouped_wgrad", formats, shape, grad_output.device, setup)
    fused = setup.fuse_wgrad and all(hasattr(weight, "main_grad") for weight in weights)
    if fused:
        out = [weight.main_grad for weight in weights]
        backend.grouped_wgrad(left, right, offsets, out=out, accumulate=True)
        return [_mark_accumulated(weight) for weight in weights]
    grads = [torch.empty_like(weight) for weight in weights]
    backend.grouped_wgrad(left, right, offsets, out=grads, accumulate=False)
    return grads


def _mark_accumulated(weight: Tensor) -> Tensor | None:
    """Megatron's contract (distributed_data_parallel.py): flag the parameter, hand back a dummy gradient."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.empty_like(weight)


def _decode(operand: Operand, dtype: torch.dtype) -> Tensor:
    """The operand as the forward GEMM saw it, rounded to `dtype`."""
    if isinstance(operand, QuantizedTensor):
        return dequantize(operand, dtype)
    if isinstance(operand, MXFP8Tensor):
        return decode_mxfp8(operand, dtype)
    return operand.to(dtype)


def _stack(weights: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
    """G weights (N, K) as one matrix (G*N, K); a single one is not copied."""
    stacked = weights[0] if len(weights) == 1 else torch.cat([w.detach() for w in weights])
    return stacked.detach().to(dtype or stacked.dtype)


def _tensors_of(operand: Operand | None) -> list[Tensor | None]:
    if isinstance(operand, QuantizedTensor):
        offsets = [operand.offsets, operand.column_offsets]
        return [operand.codes, operand.block_scales, operand.amax, *offsets]
    if isinstance(operand, MXFP8Tensor):
        return [operand.codes, operand.block_scales]
    return [operand]


def _operand_from(template: Operand | None, tensors: list[Tensor | None]) -> Operand | None:
    if isinstance(template, NVFP4Spec):
        codes, block_scales, amax, *offsets = tensors
        return QuantizedTensor(codes, block_scales, amax, template, *offsets)
    if template is MXFP8Tensor:
        return MXFP8Tensor(*tensors)
    return tensors[0]


def _template_of(operand: Operand | None):
    if isinstance(operand, QuantizedTensor):
        return operand.spec
    return MXFP8Tensor if isinstance(operand, MXFP8Tensor) else None


def _save(ctx, offsets, saved_x, saved_weight, weights) -> None:
    """Keep tensors through save_for_backward, so that hooks (offload, version checks) see them."""
    x_tensors, weight_tensors = _tensors_of(saved_x), _tensors_of(saved_weight)
    ctx.num_saved = (len(x_tensors), len(weight_tensors))
    ctx.templates = (_template_of(saved_x), _template_of(saved_weight))
    ctx.save_for_backward(offsets, *x_tensors, *weight_tensors, *weights)


def _load(ctx):
    offsets, *tensors = ctx.saved_tensors
    num_x, num_weight = ctx.num_saved
    saved_x = _operand_from(ctx.templates[0], tensors[:num_x])
    saved_weight = _operand_from(ctx.templates[1], tensors[num_x : num_x + num_weight])
    return offsets, saved_x, saved_weight, tensors[num_x + num_weight :]
