"""The head, and log-probabilities of given tokens.

    l = rounded(fp32(bf16(h w)) / temperature)
    logprob = rounded(l_token - max l - log(sum(exp(l - max l))))

The sum runs over chunks of 1024 columns in order, the division is a true one. `rounded` is to FP32, the
identity, or to BF16 as --rl-on-policy-target has it. Formulas: SGLang 0.5.23, layers/logits_processor.py
1193, layers/sampler.py 240 and srt/batch_invariant_ops/batch_invariant_ops.py 342. Its sampler rounds to
BF16 what it sampled at a temperature; where a whole batch is greedy, and for rescored prompts, it reports
FP32. Rows are taken in portions, so that of a large vocabulary no more than PORTION logits stand in memory
at once. Those of a single portion are kept for the backward, of several it makes them anew. The backward
is that of the formula without its roundings.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nvfp4.quant.layout import dense_offsets

from .linear import UNQUANTIZED, GradientSum, Weights, check_matrix, grouped_dgrad

CHUNK = 1024
PORTION = 1 << 30  # logits at a time, 2 GiB of BF16


def token_logprobs(
    hidden: Tensor,
    head: Tensor | Weights,
    tokens: Tensor,
    temperature: float | Tensor = 1.0,
    rounding: torch.dtype = torch.float32,
) -> Tensor:
    """Log-probability, FP32 (M,), of tokens int64 (M,) after hidden BF16 (M, H), by head BF16 (V, H), or as
    Weights of one such.

    temperature: of all rows, or FP32 (M,). rounding: torch.float32 or torch.bfloat16; with the second the
    FP32 tensor holds BF16 values. head holds the vocabulary alone: cut rows of padding off before.
    Raises ValueError for shapes or dtypes that do not fit or a temperature that is not positive; tokens
    and a tensor of temperatures are trusted.
    """
    temperature = checked_temperature("token_logprobs", hidden, head, tokens, temperature, rounding)
    head = Weights.of(head)
    return _TokenLogprobs.apply(hidden, head, tokens, temperature, rounding, *head.leaves)


def checked_temperature(
    op: str,
    hidden: Tensor,
    head: Tensor | Weights,
    tokens: Tensor,
    temperature: float | Tensor,
    rounding: torch.dtype,
) -> Tensor:
    """temperature as FP32 (M,); ValueError, which names `op`, for any argument that does not fit."""
    check_matrix(op, hidden, head.shape[-1])
    if head.dtype != torch.bfloat16 or (isinstance(head, Tensor) and head.dim() != 2):
        raise ValueError(
            f"{op}: head is {head.dtype} {tuple(head.shape)}; give BF16 (V, {hidden.shape[1]})"
        )
    if tokens.shape != hidden.shape[:1] or tokens.dtype != torch.int64:
        raise ValueError(
            f"{op}: tokens are {tokens.dtype} {tuple(tokens.shape)}; give int64 "
            f"({hidden.shape[0]},)"
        )
    if not isinstance(temperature, Tensor):
        if not temperature > 0:
            raise ValueError(f"{op}: temperature={temperature}; greedy samples are scored at 1.0")
        temperature = torch.full(
            tokens.shape, temperature, dtype=torch.float32, device=hidden.device
        )
    elif temperature.shape != tokens.shape or temperature.dtype != torch.float32:
        raise ValueError(
            f"{op}: temperature is {temperature.dtype} {tuple(temperature.shape)}; give FP32 "
            f"({tokens.shape[0]},)"
        )
    if rounding not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{op}: rounding={rounding}; give torch.float32 or torch.bfloat16")
    return temperature


def logits_of(hidden: Tensor, head: Weights) -> Tensor:
    """BF16 (M, V) of hidden BF16 (M, H) by head BF16 (V, H)."""
    offsets = dense_offsets(hidden.shape[0], hidden.device)
    return head.prepared(UNQUANTIZED).times(hidden, offsets, hidden.dtype)


def _rescaled(logits: Tensor, temperature: Tensor, rounding: torch.dtype) -> Tensor:
    # By a tensor: torch turns a division by a number into a multiplication.
    return (logits.float() / temperature[:, None]).to(rounding)


def _logprobs_ref(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype, logits = logits.dtype, logits.float()
    top = logits.amax(1)
    power = torch.exp(logits - top[:, None])
    total = torch.zeros_like(top)
    for chunk in power.split(CHUNK, dim=1):
        total = total + chunk.sum(1)
    log_sum = torch.log(total)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - top - log_sum
    return logprobs.to(dtype).float(), top, log_sum


def _grad_logits_ref(
    logits: Tensor,
    temperature: Tensor,
    tokens: Tensor,
    top: Tensor,
    log_sum: Tensor,
    grad: Tensor,
    rounding: torch.dtype,
) -> Tensor:
    rescaled = _rescaled(logits, temperature, rounding)
    factor = (grad / temperature)[:, None]
    slope = torch.exp(rescaled - top[:, None] - log_sum[:, None]).mul_(-factor)
    columns = torch.arange(logits.shape[1], device=logits.device)
    slope += torch.where(columns == tokens[:, None], factor, 0.0)
    return slope.to(logits.dtype)


def scores(
    logits: Tensor, temperature: Tensor, tokens: Tensor, rounding: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, maximum and log of the sum, FP32 (M,), of whole rows of logits BF16 (M, V)."""
    if logits.device.type == "cuda":
        from megatron_nvfp4.deterministic.kernels import logprobs

        return logprobs.token_logprobs(logits, temperature, tokens, rounding == torch.bfloat16)
    return _logprobs_ref(_rescaled(logits, temperature, rounding), tokens)


def slopes(
    logits: Tensor,
    temperature: Tensor,
    tokens: Tensor,
    top: Tensor,
    log_sum: Tensor,
    grad: Tensor,
    rounding: torch.dtype,
) -> Tensor:
    """Gradient of logits, or of some columns: tokens count from the first of them and may lie outside."""
    if logits.device.type == "cuda":
        from megatron_nvfp4.deterministic.kernels import logprobs

        args = (logits, temperature, tokens, top, log_sum, grad, rounding == torch.bfloat16)
        return logprobs.grad_logits(*args)
    return _grad_logits_ref(logits, temperature, tokens, top, log_sum, grad, rounding)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        head: Weights,
        tokens: Tensor,
        temperature: Tensor,
        rounding: torch.dtype,
        *_leaves,
    ) -> Tensor:
        ctx.portions = portions(hidden.shape[0], max(1, PORTION // head.shape[1]))
        ctx.rounding, ctx.head, ctx.versions = rounding, head, head.versions()
        results = []
        for rows in ctx.portions:
            logits = logits_of(hidden[rows], head)
            args = temperature[rows].contiguous(), tokens[rows].contiguous()
            results.append(scores(logits, *args, rounding))
        result, top, log_sum = (torch.cat(parts) for parts in zip(*results, strict=True))
        kept = logits if len(ctx.portions) == 1 else None
        ctx.save_for_backward(hidden, tokens, temperature, top, log_sum, kept)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        hidden, tokens, temperature, top, log_sum, kept = ctx.saved_tensors
        head = ctx.head
        head.check(ctx.versions)
        needs = ctx.needs_input_grad[5:]
        grad_hidden, grad_head = [], GradientSum(head, needs, len(ctx.portions))
        for rows in ctx.portions:
            logits = logits_of(hidden[rows], head) if kept is None else kept
            args = [t[rows].contiguous() for t in (temperature, tokens, top, log_sum, grad)]
            slope = slopes(logits, *args, ctx.rounding)
            offsets = dense_offsets(slope.shape[0], hidden.device)
            grad_hidden.append(grouped_dgrad(slope, head, offsets))
            grad_head.add(slope, hidden[rows], offsets)
        return torch.cat(grad_hidden), None, None, None, None, *grad_head.of_leaves()


def portions(num_rows: int, size: int) -> list[slice]:
    """Slices of at most `size` rows; one, empty, of no rows."""
    return [slice(first, first + size) for first in range(0, max(num_rows, 1), size)]
