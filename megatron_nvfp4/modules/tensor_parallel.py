"""Collectives of tensor and sequence parallelism, as autograd functions over rows (axis 0).

The four conjugate pairs of Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022): what one direction
gathers, the other reduces. With a group of one rank, or none, each is the identity.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


def copy_to_ranks(x: Tensor, group: Group) -> Tensor:
    """Identity; the gradient is summed over the ranks."""
    return _apply(x, group, _identity, _all_reduce)


def reduce_from_ranks(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks; the gradient passes."""
    return _apply(x, group, _all_reduce, _identity)


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """Concatenate the ranks' rows; the gradient is summed and each rank keeps its rows."""
    return _apply(x, group, _all_gather, _reduce_scatter)


def reduce_scatter_rows(x: Tensor, group: Group) -> Tensor:
    """Sum over the ranks, each keeping its rows; the gradient is gathered."""
    return _apply(x, group, _reduce_scatter, _all_gather)


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group, forward_op: Callable, backward_op: Callable) -> Tensor:
        ctx.group, ctx.backward_op = group, backward_op
        return forward_op(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.backward_op(grad, ctx.group), None, None, None


def _apply(x: Tensor, group: Group, forward_op: Callable, backward_op: Callable) -> Tensor:
    if group is None or group.size() == 1:
        return x
    return _Collective.apply(x, group, forward_op, backward_op)


def _identity(x: Tensor, group: Group) -> Tensor:
    return x


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    out = x.contiguous().clone()
    dist.all_reduce(out, group=group)
    return out


def _all_gather(x: Tensor, group: Group) -> Tensor:
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _reduce_scatter(x: Tensor, group: Group) -> Tensor:
    if x.shape[0] % group.size():
        raise ValueError(
            f"sequence parallelism: {x.shape[0]} rows do not divide over {group.size()} ranks; "
            "pad the sequence to a multiple of the tensor-parallel size"
        )
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out
