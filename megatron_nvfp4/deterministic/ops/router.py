"""Experts and their weights from router logits.

    p = exp(l - max l) / sum(exp(l - max l))    the top_k largest l, lowest expert number first on ties
    w = p_k / sum(p of the chosen)              where renormalised; slots stay in that order

All in FP32 from BF16 logits. Formula: SGLang 0.5.23, kernels/ops/moe/moe_fused_gate.py with softmax
scores. Groups of experts, biases and scaling factors are left out.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Weights FP32 (M, top_k) and expert numbers int32 (M, top_k) of logits BF16 (M, E); slots by
    falling logit.

    Weights have a gradient. Raises ValueError for other logits or a top_k that E has not.
    """
    if logits.dim() != 2 or logits.dtype != torch.bfloat16:
        raise ValueError(
            f"route: logits are {logits.dtype} {tuple(logits.shape)}; give BF16 (M, E), as the gate returns"
        )
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"route: top_k={top_k} of {logits.shape[1]} experts; give 1 to that many")
    return _Route.apply(logits, top_k, renormalize)


def _route_ref(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    logit = logits.float()
    power = torch.exp(logit - logit.max(1, keepdim=True).values)
    probability = power / power.sum(1, keepdim=True)
    # A stable sort keeps the lower number first; a NaN comes last.
    order = (
        torch.where(logit.isnan(), -1e30, logit).sort(dim=1, descending=True, stable=True).indices
    )
    experts = order[:, :top_k]
    weights = probability.gather(1, experts)
    if renormalize:
        chosen = weights.sum(1, keepdim=True)
        weights = weights / torch.where(chosen > 0, chosen, 1.0)
    return weights, experts.int()


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, top_k: int, renormalize: bool):
        if logits.device.type == "cuda":
            from megatron_nvfp4.deterministic.kernels import router

            weights, experts = router.route(logits.contiguous(), top_k, renormalize)
        else:
            weights, experts = _route_ref(logits, top_k, renormalize)
        ctx.save_for_backward(logits, weights, experts)
        ctx.renormalize = renormalize
        ctx.mark_non_differentiable(experts)
        return weights, experts

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _):
        logits, weights, experts = ctx.saved_tensors
        grad_chosen = weights * (grad - (weights * grad).sum(1, keepdim=True))
        if ctx.renormalize:
            # Renormalised weights are a softmax over the chosen alone.
            grad_logits = torch.zeros_like(logits, dtype=torch.float32)
            return grad_logits.scatter(1, experts.long(), grad_chosen).to(logits.dtype), None, None
        probability = torch.softmax(logits.float(), dim=1)
        mean = (weights * grad).sum(1, keepdim=True)
        grad_logits = -probability * mean
        grad_logits = grad_logits.scatter(
            1, experts.long(), weights * (grad - mean)
        )  # chosen numbers are distinct: nothing is added
        return grad_logits.to(logits.dtype), None, None
