"""Where the learner's tensor-parallel ranks meet: sums of two, and columns put side by side.

    sum_partials     out = bf16(x_0 + x_1), each rank's gradient that of out
    shared_input     out = x, which is whole on every rank; gradient the sum of the ranks' gradients
    gather_columns   out = [x_0 | x_1], each rank's gradient its columns

A sum of two has one rounding and no order, whichever algorithm adds; of more ranks the order is unknown.
Every rank of a group calls them alike, and runs their backward alike.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


def sum_partials(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the two ranks of `group`, in x's dtype."""
    return _SumPartials.apply(x, group)


def shared_input(x: Tensor, group: ProcessGroup) -> Tensor:
    """x itself, of which every rank of `group` uses its share: its gradient is the sum of theirs."""
    return _SharedInput.apply(x, group)


def gather_columns(x: Tensor, group: ProcessGroup) -> Tensor:
    """Columns of x (M, N) of all ranks side by side: (M, N times ranks)."""
    return _GatherColumns.apply(x, group)


def all_reduced(x: Tensor, group: ProcessGroup) -> Tensor:
    """A new tensor, the sum over the two ranks of `group`; no gradient."""
    assert group.size() == 2, f"the order of a sum over {group.size()} ranks is unknown"
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_gathered(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """x of all ranks of `group`, of one shape each, put together along `dim`; no gradient."""
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts, dim=dim)


class _SumPartials(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduced(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad, None


class _SharedInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return all_reduced(grad, ctx.group), None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.num_cols = group, x.shape[1]
        return all_gathered(x, group, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad.narrow(1, ctx.group.rank() * ctx.num_cols, ctx.num_cols), None
