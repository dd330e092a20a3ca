"""Where in the responses the gap lies: segments with many tail tokens, against a shuffle within responses.

Definitions of the characterization published with TRIAGE, over segments whose mean advantage is negative
(with one advantage a response: responses of A < 0). Amplifying tail token: A < 0 and delta < tau_ana.
Tail-heavy segment: more than a tenth of its tokens are such. What is published with them holds here too: the
adjacency ratio does not exceed what the shuffle gives, so that it is no evidence of persistence by itself.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_nvfp4.rl.layout import count, fold, token_layout
from megatron_nvfp4.rl.triage import triage_advantages

from .mismatch import LOW_QUANTILE, SMALL_GAP, Gaps, Settings, divide, quantile
from .readers import Responses

HEAVY = 0.1  # share of tail tokens above which a segment is tail-heavy
TOP = 0.05  # share of the segments whose tail tokens C_tok counts
MAX_DRAWS = 499
MAX_ALLOCATIONS = 8_000_000  # segments x draws: beyond it draws are fewer
NUM_WORST = 20


@dataclass(frozen=True, kw_only=True)
class Tails:
    """Tail tokens of the segments (S,) of negative mean advantage, in their order.

    num_valid, num_tail: int64. response: int64, whose segment it is. follows: bool, whether the segment
    before it in the response is the one before it here.
    """

    num_valid: Tensor
    num_tail: Tensor
    response: Tensor
    follows: Tensor

    def of(self, chosen: Tensor) -> "Tails":
        """Those of the chosen responses, bool (N,)."""
        kept = chosen[self.response]
        return Tails(
            num_valid=self.num_valid[kept],
            num_tail=self.num_tail[kept],
            response=self.response[kept],
            follows=self.follows[kept],
        )

    @property
    def heavy(self) -> Tensor:
        return self.num_tail > HEAVY * self.num_valid


def tails(gaps: Gaps, tau: float, width: int) -> Tails:
    """The tail tokens of each segment of that many positions; tau: the gap below which a token is one."""
    responses = gaps.responses
    advantages = responses.advantages
    layout = token_layout(
        responses.offsets, gaps.valid, delta=responses.delta, advantages=advantages
    )
    segments = layout.segments(width)
    inside = segments.gather_mask(gaps.valid)
    negative = torch.where(inside, segments.gather(advantages), 0)
    tail = inside & (negative < 0) & (segments.gather(responses.delta) < tau)
    eligible = (fold(negative) < 0).nonzero().flatten()
    response = segments.row_response[eligible]
    follows = torch.zeros_like(eligible, dtype=torch.bool)
    follows[1:] = (eligible.diff() == 1) & (response.diff() == 0)
    return Tails(
        num_valid=count(inside)[eligible].long(),
        num_tail=count(tail)[eligible].long(),
        response=response,
        follows=follows,
    )


def concentration(found: Tails) -> dict[str, float | int]:
    """r_amp, H_seg, C_tok, P_adj of some segments.

    r_amp: tail tokens of all tokens. H_seg: share of tail-heavy segments. C_tok: share of the tail tokens in
    the TOP share of the segments, by their share of tail tokens, equal ones in their order. P_adj: how much
    likelier a segment behind a heavy one is heavy than any segment with one before it.
    """
    num = found.num_valid.numel()
    top, adjacent = _measure(found, found.num_tail[None])
    return {
        "segments": num,
        "tail_tokens": int(found.num_tail.sum()),
        "r_amp": divide(float(found.num_tail.sum()), float(found.num_valid.sum())),
        "h_seg": divide(float(found.heavy.sum()), num),
        "c_tok": float(top[0]),
        "p_adj": float(adjacent[0]),
    }


def _measure(found: Tails, num_tail: Tensor) -> tuple[Tensor, Tensor]:
    """(C_tok, P_adj), float64 (D,), of tail tokens (D, S) put where the rows say."""
    num_draws, num = num_tail.shape
    share = num_tail.double() / found.num_valid.clamp_min(1)
    order = share.sort(dim=1, descending=True, stable=True).indices[:, : math.ceil(TOP * num)]
    total = num_tail.sum(1).double()
    top = num_tail.gather(1, order).sum(1).double() / total
    heavy = num_tail > HEAVY * found.num_valid
    if num < 2:
        return top, torch.full((num_draws,), math.nan, dtype=torch.float64)
    pairs = found.follows[1:]
    before, after = heavy[:, :-1][:, pairs].double(), heavy[:, 1:][:, pairs].double()
    both = (before * after).sum(1) / before.sum(1)
    return top, both / after.mean(1)


def shuffled(found: Tails, seed: int) -> dict:
    """C_tok and P_adj where each response's tail tokens lie anywhere among its tokens of these segments.

    The exact null of shuffled labels: a multivariate hypergeometric draw over the segments. Medians and
    central 95 % intervals over the seeded draws, whose number is MAX_DRAWS or what MAX_ALLOCATIONS allows.
    None where there is no tail token.
    """
    import numpy as np

    num = found.num_valid.numel()
    if num == 0 or int(found.num_tail.sum()) == 0:
        return {"draws": 0, "c_tok": None, "p_adj": None}
    draws = max(19, min(MAX_DRAWS, MAX_ALLOCATIONS // num))
    _, owner = found.response.unique_consecutive(return_inverse=True)
    first = torch.searchsorted(owner, torch.arange(int(owner[-1]) + 1))
    ends = torch.cat([first[1:], torch.tensor([num])])
    zero = torch.zeros(first.numel(), dtype=torch.int64)
    tail = zero.index_add(0, owner, found.num_tail).numpy()
    rest = zero.index_add(0, owner, found.num_valid).numpy()
    good = np.repeat(tail[None], draws, 0)
    bad = np.repeat((rest - tail)[None], draws, 0)
    generator = np.random.default_rng(seed)
    placed = np.zeros((draws, num), dtype=np.int64)
    for step in range(int((ends - first).max())):
        has = (first + step < ends).numpy()
        where = (first + step).numpy()[has]
        size = found.num_valid.numpy()[where]
        got = generator.hypergeometric(good[:, has], bad[:, has], size)
        placed[:, where] = got
        good[:, has] -= got
        bad[:, has] -= size - got
    parts = [_measure(found, part) for part in torch.from_numpy(placed).split(16)]
    top, adjacent = (torch.cat(values) for values in zip(*parts, strict=True))
    return {"draws": draws, "c_tok": _central(top), "p_adj": _central(adjacent)}


def _central(values: Tensor) -> dict[str, float] | None:
    kept = values[torch.isfinite(values)]
    if not kept.numel():
        return None
    return {
        name: quantile(kept, q) for name, q in (("low", 0.025), ("median", 0.5), ("high", 0.975))
    }


# --- windows --------------------------------------------------------------------------------------


def windows(responses: Responses, size: int) -> list[tuple[str, Tensor]]:
    """(name, chosen responses) of the windows that end at 25, 50, 75 and 100 % of the steps.

    Each holds up to `size` steps, at most a quarter of them all; fewer than four steps are one window.
    """
    steps = responses.steps.unique()
    num = steps.numel()
    if num < 4:
        return [("all", torch.ones(responses.num_responses, dtype=torch.bool))]
    size = min(size, num // 4)
    result = []
    for part in (1, 2, 3, 4):
        end = -(-part * num // 4)
        first, last = int(steps[max(end - size, 0)]), int(steps[end - 1])
        chosen = (responses.steps >= first) & (responses.steps <= last)
        result.append((f"{first}..{last}", chosen))
    return result


def tau_of(gaps: Gaps, settings: Settings) -> float:
    """tau_ana: as set, or the 5 % quantile of delta over all tokens of the first window."""
    if settings.tau_ana is not None:
        return settings.tau_ana
    _, chosen = windows(gaps.responses, settings.window)[0]
    return quantile(gaps.delta[chosen[gaps.owner]], LOW_QUANTILE)


def segments(gaps: Gaps) -> dict:
    """Concentration at both widths with the shuffle, dilution in response means, and the windows."""
    settings = gaps.settings
    config, tau = settings.config, tau_of(gaps, settings)
    result: dict = {"tau_ana": tau, "widths": {}}
    for width in (config.gate_width, config.repair_width):
        found = tails(gaps, tau, width)
        null = shuffled(found, settings.seed)
        result["widths"][str(width)] = concentration(found) | {"shuffled": null}
        if width == config.gate_width:
            result["dilution"] = _dilution(gaps, found)
            result["windows"] = [
                {"steps": name} | concentration(found.of(chosen))
                for name, chosen in windows(gaps.responses, settings.window)
            ]
    return result


def _dilution(gaps: Gaps, found: Tails) -> dict[str, float | int]:
    """Among responses with a tail-heavy segment: those whose mean gap, or mean |gap|, looks benign."""
    affected = torch.zeros(gaps.responses.num_responses, dtype=torch.bool)
    affected[found.response[found.heavy]] = True
    num = gaps.num_valid.clamp_min(1)
    mean, size = gaps.total(gaps.delta) / num, gaps.total(gaps.size) / num
    return {
        "responses": int(affected.sum()),
        "mean_small": divide(
            float((mean[affected].abs() < SMALL_GAP).sum()), float(affected.sum())
        ),
        "mean_abs_small": divide(float((size[affected] < SMALL_GAP).sum()), float(affected.sum())),
    }


# --- the gate -------------------------------------------------------------------------------------


def gate(gaps: Gaps) -> dict:
    """What TRIAGE's gate would do to these responses at the given settings, and the lowest segments."""
    metrics, config = gate_metrics(gaps), gaps.settings.config
    found = gaps.gate
    num = found.num_valid.clamp_min(1)
    mean = torch.where(found.num_valid > 0, found.delta_sum / num, math.inf)
    eligible = int(metrics["num_eligible_segments"])
    return {
        "width": config.gate_width,
        "segments": int(metrics["num_segments"]),
        "eligible": eligible,
        "gated": int(metrics["num_gated_segments"]),
        "gated_share": divide(metrics["num_gated_segments"], eligible),
        "gated_tokens": int(metrics["num_gated_tokens"]),
        "deep_tokens": int(metrics["num_deep_tokens"]),
        "max_coefficient": metrics["max_coefficient"],
        "lowest": [
            {
                "response": response,
                "step": int(gaps.responses.steps[response]),
                "first_token": (row - int(found.segments.rows.offsets[response]))
                * config.gate_width,
                "tokens": int(found.num_valid[row]),
                "mean_gap": float(mean[row]),
                "deep_tokens": int(found.num_deep[row]),
                "mean_advantage": float(found.advantage_sum[row] / num[row]),
            }
            for row in mean.argsort(stable=True)[:NUM_WORST].tolist()
            if math.isfinite(mean[row])
            for response in [int(found.segments.row_response[row])]
        ],
    }


def gate_metrics(gaps: Gaps) -> dict[str, float]:
    """The metrics of rl.triage.triage_advantages without Repair."""
    responses, config = gaps.responses, replace(gaps.settings.config, repair_weight=0.0)
    _, metrics = triage_advantages(
        responses.delta, responses.advantages, gaps.valid, offsets=responses.offsets, config=config
    )
    return {name: float(value) for name, value in metrics.items()}
