"""`token_logprobs` where every tensor-parallel rank of the learner has rows of the head.

Each rank multiplies by its own rows; the BF16 logits are put side by side and go through the formula of
logprobs.py whole, on every rank: its bits are those of one rank, for columns do not depend on each other and
the sum over chunks of 1024 columns has an order that crosses ranks. The backward takes each rank's own
columns; the gradient of hidden is the sum of the ranks' partial ones. Of a large vocabulary no more than
PORTION logits are put side by side at once.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_nvfp4.quant.layout import dense_offsets

from .collectives import all_gathered, all_reduced
from .linear import GradientSum, Weights, grouped_dgrad
from .logprobs import PORTION, checked_temperature, logits_of, portions, scores, slopes


def parallel_token_logprobs(
    hidden: Tensor,
    head: Tensor | Weights,
    tokens: Tensor,
    vocab_size: int,
    group: ProcessGroup,
    temperature: float | Tensor = 1.0,
    rounding: torch.dtype = torch.float32,
) -> Tensor:
    """Log-probability, FP32 (M,), of tokens int64 (M,) after hidden BF16 (M, H), equal on all of `group`.

    head: BF16, this rank's rows, as many on every rank; rows from `vocab_size` on are padding, without
    logits or gradient. The rest, and what is refused, as token_logprobs.
    """
    temperature = checked_temperature(
        "parallel_token_logprobs", hidden, head, tokens, temperature, rounding
    )
    head = Weights.of(head)
    return _ParallelTokenLogprobs.apply(
        hidden, head, tokens, vocab_size, group, temperature, rounding, *head.leaves
    )


class _ParallelTokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        head: Weights,
        tokens: Tensor,
        vocab_size: int,
        group: ProcessGroup,
        temperature: Tensor,
        rounding: torch.dtype,
        *_leaves,
    ) -> Tensor:
        ctx.portions = portions(hidden.shape[0], max(1, PORTION // vocab_size))
        ctx.vocab_size, ctx.group, ctx.rounding = vocab_size, group, rounding
        ctx.head, ctx.versions = head, head.versions()
        results = []
        for rows in ctx.portions:
            own = logits_of(hidden[rows], head)
            logits = all_gathered(own, group, dim=1)[:, :vocab_size].contiguous()
            args = temperature[rows].contiguous(), tokens[rows].contiguous()
            results.append(scores(logits, *args, rounding))
        result, top, log_sum = (torch.cat(parts) for parts in zip(*results, strict=True))
        kept = own if len(ctx.portions) == 1 else None
        ctx.save_for_backward(hidden, tokens, temperature, top, log_sum, kept)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        hidden, tokens, temperature, top, log_sum, kept = ctx.saved_tensors
        head = ctx.head
        head.check(ctx.versions)
        first = ctx.group.rank() * head.shape[1]
        needs = ctx.needs_input_grad[7:]
        grad_hidden, grad_head = [], GradientSum(head, needs, len(ctx.portions))
        for rows in ctx.portions:
            logits = logits_of(hidden[rows], head) if kept is None else kept
            args = [t[rows].contiguous() for t in (temperature, tokens - first, top, log_sum, grad)]
            slope = slopes(logits, *args, ctx.rounding)
            slope[:, max(0, ctx.vocab_size - first) :] = 0
            offsets = dense_offsets(slope.shape[0], hidden.device)
            grad_hidden.append(grouped_dgrad(slope, head, offsets))
            grad_head.add(slope, hidden[rows], offsets)
        grad_hidden = all_reduced(torch.cat(grad_hidden), ctx.group)
        return grad_hidden, *6 * [None], *grad_head.of_leaves()
