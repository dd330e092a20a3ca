"""Two recipes on the same weights and the same tokens: how far apart their log-probs are."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .readers import Response, Responses, join
from .sensitivity import Measurement


def gap_figures(learner: Measurement, sampler: Measurement) -> dict[str, Any]:
    """Of delta = learner - sampler log-prob, over all tokens: mean, size, tails; and the top-1 flips.

    Quantiles are samples, the ceil(q n)-th smallest. top1_flips: share of tokens before which the two
    models' likeliest next tokens differ.
    """
    delta = _flat(learner.logprobs) - _flat(sampler.logprobs)
    size = delta.abs().sort().values
    flips = _flat(learner.top) != _flat(sampler.top)
    quantiles = {
        name: size[-(-share * len(size) // 1000) - 1].item()
        for name, share in (("p50", 500), ("p99", 990), ("p999", 999))
    }
    return {
        "tokens": len(delta),
        "mean": delta.mean().item(),
        "mean_abs": size.mean().item(),
        **quantiles,
        "max": size[-1].item(),
        "share_below_minus_1": (delta < -1).double().mean().item(),
        "share_above_1": (delta > 1).double().mean().item(),
        "top1_flips": flips.double().mean().item(),
        "num_top1_flips": int(flips.sum()),
    }


def _flat(sequences: list[list]) -> Tensor:
    """All sequences behind each other, FP64 (T,); token ids are exact in it."""
    return torch.tensor([value for each in sequences for value in each], dtype=torch.float64)


def mismatch(learner: Measurement, sampler: Measurement, tokens: Sequence[Tensor]) -> Responses:
    """The pair as a record for `diagnose`: a response for each sequence, every token in the loss.

    tokens: the sequences themselves, whose first tokens are left out. There are no advantages and no
    rewards: nobody sampled this text.
    """
    responses = [
        Response(
            step=0,
            learner=torch.tensor(ours, dtype=torch.float64),
            sampler=torch.tensor(theirs, dtype=torch.float64),
            mask=torch.ones(len(ours), dtype=torch.bool),
            tokens=ids[1:],
        )
        for ours, theirs, ids in zip(learner.logprobs, sampler.logprobs, tokens, strict=True)
    ]
    return join(responses)
