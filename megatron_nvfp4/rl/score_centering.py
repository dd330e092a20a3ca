"""Score Centering: removes the mean that truncated importance weights leave in the score function.

Marek & Ryabinin, arXiv 2609.20807. Per position, p: the learner's probabilities, q: the sampler's, both
over the whole vocabulary at the sampling temperature; H: the sampler's top-k tokens; f: the weight as a
function of p / q.

    rho = (1 - sum_H q) / max(1 - sum_H p, 1e-6)     alpha = rho f(1 / rho)
    c_v = q_v f(p_v / q_v) - alpha p_v               loss = -A (w log p(y) - sum_H c_v log p_v)

alpha treats what lies outside H as if q were rho p there. With exact ratios, f(r) = r, every c is 0:
nothing is biased.
"""

from typing import Literal

import torch
from torch import Tensor

from .layout import compute_dtype

MIN_TAIL = 1e-6  # bound of the learner's mass outside H


def score_centering_term(
    learner_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    weight: Literal["none", "tis", "mask"] = "tis",
    low: float = 0.5,
    high: float = 2.0,
) -> Tensor:
    """sum over H of c_v log p_v at each token, to be added to the policy loss times the advantage.

    learner_logprobs, sampler_logprobs: (..., k), log-probabilities of the sampler's top-k tokens under the
    live learner and under the sampler, full-vocabulary ones at the sampling temperature, without penalties.
    mask: (...), bool or 0 and 1. A head with fewer than k tokens is filled with a sampler log-probability
    of -Inf; such places are not in H and may hold anything in learner_logprobs. weight: "none" f(r) = 1,
    "tis" min(r, high), "mask" r within [low, high] and 0 outside. Returns (...) in float32, or float64 if
    an input is, differentiable in learner_logprobs through log p_v alone (c is detached); 0 at masked
    tokens, whatever they hold. The sampled token's own term w log p(y) is the policy loss's. ValueError
    names a shape or option.
    """
    if learner_logprobs.shape != sampler_logprobs.shape or learner_logprobs.dim() == 0:
        raise ValueError(
            f"learner_logprobs has shape {tuple(learner_logprobs.shape)} and sampler_logprobs "
            f"{tuple(sampler_logprobs.shape)}; give both (..., k) for the same tokens"
        )
    if mask.shape != learner_logprobs.shape[:-1]:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}; give a value a token, "
            f"{tuple(learner_logprobs.shape[:-1])}"
        )
    if weight not in ("none", "tis", "mask"):
        raise ValueError(f"score_centering_term: weight={weight!r}; give 'none', 'tis' or 'mask'")
    if not 0 <= low <= high or not 0 < high < float("inf"):
        raise ValueError(
            f"score_centering_term: the bounds [{low}, {high}] are not 0 <= low <= high, 0 < high < inf"
        )
    dtype = compute_dtype(learner_logprobs, sampler_logprobs)
    in_head = (mask != 0)[..., None] & (sampler_logprobs != -float("inf"))
    learner = torch.where(in_head, learner_logprobs.to(dtype), 0)
    with torch.no_grad():
        p = torch.where(in_head, learner.exp(), 0)
        q = torch.where(in_head, sampler_logprobs.to(dtype).exp(), 0)
        rho = (1 - q.sum(-1)).clamp_min(0) / (1 - p.sum(-1)).clamp_min(MIN_TAIL)
        weighted_q, alpha = _weighted(p, q, rho, weight, low, high)
        c = weighted_q - alpha[..., None] * p
    # p log p goes to 0 with p: a head token that the learner excludes has no share in the term.
    used = in_head & (p > 0)
    return torch.where(used, c * torch.where(used, learner, 0), 0).sum(-1)


def _weighted(
    p: Tensor, q: Tensor, rho: Tensor, weight: str, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """(q f(p / q), rho f(1 / rho)) without dividing, so that q = 0 and rho = 0 have their limits."""
    if weight == "none":
        return q, rho
    if weight == "tis":
        return torch.minimum(p, high * q), (high * rho).clamp_max(1)
    kept = (p >= low * q) & (p <= high * q)
    tail_kept = (low * rho <= 1) & (high * rho >= 1)
    return torch.where(kept, p, 0), tail_kept.to(p.dtype)
