"""Statistics of the gap between learner and sampler, with intervals by resampling responses.

delta = learner - sampler log-prob (natural log), A: advantage, over the tokens in the loss. Regions, rho_asym
and segment statistics follow "TRIAGE: Direction-Aware Mismatch Stabilization of Native NVFP4 Reinforcement
Learning" (arXiv 2610.07043) and the definitions of its published characterization
(https://github.com/EthanLI24/TRIAGE); the gate's rules are rl/triage.py's and the
importance weights rl/corrections.py's. Quantiles are samples: the ceil(q n)-th smallest.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from megatron_nvfp4.rl.corrections import sequence_mask, tis_weights
from megatron_nvfp4.rl.triage import Gate, TriageConfig, diagnose

from .checks import usable
from .readers import Responses

SMALL_GAP = 0.05  # the published bound of a benign gap
LOW_QUANTILE = 0.05  # of delta; over the healthy window it is tau_ana
QUANTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}  # of |delta|
TOP_GAPS = 0.01  # share of the largest gaps that the bulk leaves out
CLIP = 0.2, 0.28  # PPO-clip below and above 1 in the reported runs
REGIONS = ("A<0 d<0", "A<0 d>0", "A>0 d<0", "A>0 d>0")
NUM_RESAMPLES = 200
NUM_BINS = 1024
MAX_CELLS = 32_000_000  # of the responses x bins histogram: beyond it bins are fewer


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured against what; config: the gate's settings, tis_cap and clip the loss's."""

    config: TriageConfig = field(default_factory=TriageConfig)
    tis_cap: float = 2.0
    clip: tuple[float, float] = CLIP
    tau_ana: float | None = None
    """Gap below which a token of A < 0 is an amplifying tail; None: LOW_QUANTILE of the first window."""
    window: int = 25
    """Updates of a window, at most."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.tis_cap < math.inf:
            raise ValueError(f"tis_cap={self.tis_cap} is not above 0 and finite; 2 is usual")
        if self.window < 1:
            raise ValueError(f"window={self.window} is not at least 1; 25 is usual")
        if self.tau_ana is not None and not -math.inf < self.tau_ana < 0:
            raise ValueError(f"tau_ana={self.tau_ana} is not below 0 and finite; None measures it")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} is not from 0 to 2**63 - 1; 0 is usual")


class Gaps:
    """The usable tokens of some responses with what every statistic needs of them.

    delta, size (its absolute value), advantages: float64 (V,) of the V tokens in the loss with a finite gap;
    owner: int64 (V,), their response; num_valid: float64 (N,) of each response. An advantage that is NaN or
    infinite is 0 here and in `responses`: of no direction, so in no quadrant and of no weight in a segment.
    """

    def __init__(self, responses: Responses, settings: Settings) -> None:
        assert responses.delta is not None
        if responses.advantages is not None:
            finite = responses.advantages.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            responses = replace(responses, advantages=finite)
        self.responses, self.settings = responses, settings
        self.valid = usable(responses)
        self.owner = responses.response_of_token()[self.valid]
        self.delta = responses.delta[self.valid]
        self.size = self.delta.abs()
        known = responses.advantages
        self.advantages = None if known is None else known[self.valid]
        self.num_valid = self.total(torch.ones_like(self.delta))

    def total(self, values: Tensor) -> Tensor:
        """float64 (N,): sums over each response of values (V,)."""
        zero = torch.zeros(self.responses.num_responses, dtype=torch.float64)
        return zero.index_add_(0, self.owner, values.double())

    @cached_property
    def gate(self) -> Gate:
        """The gate's segments by rl/triage.py; advantages of 0 where the files have none."""
        responses = self.responses
        advantages = responses.advantages
        if advantages is None:
            advantages = torch.zeros_like(responses.delta)
        return diagnose(
            responses.delta, advantages, self.valid, responses.offsets, self.settings.config
        )

    @cached_property
    def resamples(self) -> Tensor:
        """float64 (R, N): how often each response is drawn in each of the seeded resamples."""
        num = self.responses.num_responses
        generator = torch.Generator().manual_seed(self.settings.seed)
        drawn = torch.randint(num, (NUM_RESAMPLES, num), generator=generator)
        counts = torch.zeros(NUM_RESAMPLES, num, dtype=torch.float64)
        return counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))

    def ratio(self, top: Tensor, bottom: Tensor) -> dict[str, float | None]:
        """Sum over sum of per-response values (N,), with the 95 % interval over resampled responses."""
        value = divide(float(top.sum()), float(bottom.sum()))
        if top.numel() < 2:
            return {"value": value, "low": None, "high": None}
        ratios = (self.resamples @ top) / (self.resamples @ bottom)
        return _with_interval(value, ratios)

    def quantiles(self, values: Tensor, wanted: Mapping[str, float]) -> dict[str, dict]:
        """Quantiles of values (V,) with intervals, whose ends are bin edges: samples, dense in the tails."""
        ordered = values.sort().values
        num = ordered.numel()
        if self.responses.num_responses < 2:
            return {
                name: {"value": float(ordered[rank(q, num)]), "low": None, "high": None}
                for name, q in wanted.items()
            }
        edges = ordered[_edge_places(num, self.responses.num_responses)].unique()
        cell = self.owner * edges.numel() + torch.searchsorted(edges, values)
        shape = self.responses.num_responses, edges.numel()
        histogram = torch.bincount(cell, minlength=shape[0] * shape[1]).view(shape)
        cumulative = (self.resamples.float() @ histogram.float()).double().cumsum(1)
        result = {}
        for name, q in wanted.items():
            place = (cumulative < q * cumulative[:, -1:]).sum(1).clamp_max(edges.numel() - 1)
            result[name] = _with_interval(float(ordered[rank(q, num)]), edges[place])
        return result


def rank(q: float, num: int) -> int:
    """Place of the q quantile among num ascending samples: the ceil(q num)-th."""
    return min(max(math.ceil(q * num) - 1, 0), num - 1)


def quantile(values: Tensor, q: float) -> float:
    """The ceil(q n)-th smallest of the values; NaN of none."""
    if not values.numel():
        return math.nan
    return float(values.kthvalue(rank(q, values.numel()) + 1).values)


def divide(top: float, bottom: float) -> float:
    """top / bottom; infinity for x / 0, NaN for 0 / 0."""
    if bottom == 0:
        return math.inf if top > 0 else math.nan
    return top / bottom


def _edge_places(num: int, num_responses: int) -> Tensor:
    """Places among num ascending samples: all if few, else evenly spread and by powers into both tails."""
    num_bins = min(NUM_BINS, max(64, MAX_CELLS // max(num_responses, 1)))
    if num <= num_bins:
        return torch.arange(num)
    third = num_bins // 3
    tail = torch.logspace(0, math.log10(num), third, dtype=torch.float64).long().clamp_max(num)
    even = torch.linspace(0, num - 1, third, dtype=torch.float64).long()
    return torch.cat([even, tail - 1, num - tail, torch.tensor([num - 1])]).unique()


def _with_interval(value: float, resampled: Tensor) -> dict[str, float | None]:
    """value with the 2.5 % and 97.5 % quantiles of the resampled ones; none where these are not numbers."""
    kept = resampled[~torch.isnan(resampled)]
    low = high = None
    if kept.numel():
        low, high = quantile(kept, 0.025), quantile(kept, 0.975)
    return {"value": value, "low": low, "high": high}


# --- the gap --------------------------------------------------------------------------------------


def gap(gaps: Gaps) -> dict:
    """Size, tails, sign and KL estimates of the gap.

    mean_abs: over tokens; mean_abs_by_response: over responses of their means, as slime and miles log it. k1,
    k3: means of -delta and of exp(delta) - 1 - delta, estimates of KL(sampler || learner). mult_prob_error:
    mean of exp|delta|, NeMo-RL's token_mult_prob_error; without_top: the same without the TOP_GAPS share of
    the largest gaps.
    """
    delta, size, num = gaps.delta, gaps.size, gaps.num_valid
    has_tokens = num > 0
    mean_of = gaps.total(size) / num.clamp_min(1)
    ratio = delta.exp()
    error = size.exp()
    bulk = size <= quantile(size, 1 - TOP_GAPS)
    return {
        "tokens": delta.numel(),
        "mean_abs": gaps.ratio(gaps.total(size), num),
        "mean_abs_by_response": gaps.ratio(mean_of, has_tokens.double()),
        "mean": gaps.ratio(gaps.total(delta), num),
        "share_small": gaps.ratio(gaps.total(size < SMALL_GAP), num),
        "share_deep": gaps.ratio(gaps.total(delta < gaps.settings.config.tail_gap), num),
        "abs": gaps.quantiles(size, QUANTILES) | {"max": {"value": float(size.max())}},
        "delta": gaps.quantiles(delta, {"q01": 0.01, "q05": LOW_QUANTILE, "q95": 0.95}),
        "k1": gaps.ratio(gaps.total(-delta), num),
        "k3": gaps.ratio(gaps.total(torch.expm1(delta) - delta), num),
        "mean_ratio": gaps.ratio(gaps.total(ratio), num),
        "mult_prob_error": gaps.ratio(gaps.total(error), num),
        "mult_prob_error_without_top": divide(float(error[bulk].sum()), float(bulk.sum())),
    }


def clipping(gaps: Gaps) -> dict:
    """What would be clipped: by PPO's bounds if exp(delta) were its ratio, by TIS, by sequence rules."""
    settings, responses = gaps.settings, gaps.responses
    low, high = math.log1p(-settings.clip[0]), math.log1p(settings.clip[1])
    num = gaps.num_valid
    used = num > 0
    weights = tis_weights(
        responses.delta, gaps.valid, offsets=responses.offsets, cap=settings.tis_cap
    )
    kept = sequence_mask(responses.delta, gaps.valid, offsets=responses.offsets)
    kept_responses = gaps.total(kept[gaps.valid] > 0) > 0
    summed = gaps.total(gaps.delta)
    mean = summed / num.clamp_min(1)
    return {
        "ppo_below": gaps.ratio(gaps.total(gaps.delta < low), num),
        "ppo_above": gaps.ratio(gaps.total(gaps.delta > high), num),
        "tis_cap": settings.tis_cap,
        "tis_above": gaps.ratio(gaps.total(gaps.delta.exp() > settings.tis_cap), num),
        "tis_mean_weight": gaps.ratio(gaps.total(weights[gaps.valid]), num),
        "sequence_mask_keeps": gaps.ratio(kept_responses.double(), used.double()),
        "log_sequence_ratio": _spread(summed[used]),
        "log_geometric_ratio": _spread(mean[used]),
    }


def _spread(values: Tensor) -> dict[str, float]:
    return {
        name: quantile(values, q)
        for name, q in (("q05", 0.05), ("q50", 0.5), ("q95", 0.95), ("max", 1.0))
    }


# --- direction ------------------------------------------------------------------------------------


def amplifying(delta: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """bool masks of A < 0, delta < 0 and of A > 0, delta > 0: where an update along A widens the gap."""
    return (advantages < 0) & (delta < 0), (advantages > 0) & (delta > 0)


def region_sums(gaps: Gaps) -> dict[str, dict[str, Tensor]]:
    """For each quadrant of sign(A) x sign(delta): per-response (N,) counts, |A| and |A| / n_i.

    n_i: the usable tokens of the response. A = 0 and delta = 0 belong to no quadrant.
    """
    assert gaps.advantages is not None
    weight = gaps.advantages.abs()
    signs = gaps.advantages.sign(), gaps.delta.sign()
    result = {}
    for name, (a, d) in zip(REGIONS, ((-1, -1), (-1, 1), (1, -1), (1, 1)), strict=True):
        inside = (signs[0] == a) & (signs[1] == d)
        mass = gaps.total(torch.where(inside, weight, 0))
        result[name] = {
            "count": gaps.total(inside),
            "mass": mass,
            "mass_by_response": mass / gaps.num_valid.clamp_min(1),
        }
    return result


def regions(gaps: Gaps) -> dict:
    """Occupancy and |A| mass of the quadrants, and rho_asym in both weightings.

    occupancy: of the tokens with A != 0. mass: of all |A|; by_response weights each token by 1 / n_i.
    rho_asym = mass(A<0, d<0) / mass(A>0, d>0): the two regions where an update widens the gap; sums over
    everything given first, then the ratio.
    """
    assert gaps.advantages is not None
    sums = region_sums(gaps)
    weight = gaps.advantages.abs()
    nonzero, mass = gaps.total(weight != 0), gaps.total(weight)
    by_response = mass / gaps.num_valid.clamp_min(1)
    result: dict = {
        "zero_advantage": gaps.ratio(gaps.total(weight == 0), gaps.num_valid),
        "quadrants": {
            name: {
                "tokens": int(part["count"].sum()),
                "abs_advantage": float(part["mass"].sum()),
                "occupancy": divide(float(part["count"].sum()), float(nonzero.sum())),
                "mass": divide(float(part["mass"].sum()), float(mass.sum())),
                "mass_by_response": divide(
                    float(part["mass_by_response"].sum()), float(by_response.sum())
                ),
            }
            for name, part in sums.items()
        },
    }
    low, high = sums["A<0 d<0"], sums["A>0 d>0"]
    result["rho_asym"] = gaps.ratio(low["mass"], high["mass"])
    result["rho_asym_by_response"] = gaps.ratio(low["mass_by_response"], high["mass_by_response"])
    return result


# --- steps ----------------------------------------------------------------------------------------


def per_step(gaps: Gaps) -> dict[str, list]:
    """Columns over the steps: tokens, mean_abs, p99, p999, q05, k3, share_deep, both rho."""
    steps, place = gaps.responses.steps.unique(return_inverse=True)
    of_token = place[gaps.owner]
    num = torch.bincount(of_token, minlength=steps.numel())
    bounds = torch.cat([num.new_zeros(1), num.cumsum(0)]).tolist()
    result: dict[str, list] = {"step": steps.tolist(), "tokens": num.tolist()}
    parts = [slice(*ends) for ends in pairwise(bounds)]

    def column(name: str, of: Callable[[Tensor], float]) -> None:
        result[name] = [
            of(gaps.delta[part]) if num[i] else math.nan for i, part in enumerate(parts)
        ]

    column("mean_abs", lambda delta: float(delta.abs().mean()))
    for name in ("p99", "p999"):
        column(name, lambda delta, q=QUANTILES[name]: quantile(delta.abs(), q))
    column("q05", lambda delta: quantile(delta, LOW_QUANTILE))
    column("k3", lambda delta: float((torch.expm1(delta) - delta).mean()))
    column("share_deep", lambda d: float((d < gaps.settings.config.tail_gap).double().mean()))
    if gaps.advantages is not None:
        sums = region_sums(gaps)
        for name, key in (("rho_asym", "mass"), ("rho_asym_by_response", "mass_by_response")):
            of_step = [
                torch.zeros(steps.numel(), dtype=torch.float64).index_add_(
                    0, place, sums[region][key]
                )
                for region in ("A<0 d<0", "A>0 d>0")
            ]
            pairs = zip(*(values.tolist() for values in of_step), strict=True)
            result[name] = [divide(low, high) for low, high in pairs]
    return result


def trends(steps: Mapping[str, list], seed: int) -> dict[str, dict]:
    """Least-squares slopes a step of the columns of per_step, with 95 % intervals over resampled steps.

    growth: mean of the last quarter of the steps over that of the first. Fewer than 8 steps have no trend.
    """
    number = torch.tensor(steps["step"], dtype=torch.float64)
    if number.numel() < 8:
        return {}
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(number.numel(), (NUM_RESAMPLES, number.numel()), generator=generator)
    result = {}
    for name in ("mean_abs", "p99", "p999", "q05", "rho_asym", "rho_asym_by_response"):
        values = torch.tensor(steps.get(name, []), dtype=torch.float64)
        if values.shape != number.shape or not torch.isfinite(values).all():
            continue
        slopes = _slope(number[drawn], values[drawn])
        quarter = -(-number.numel() // 4)
        first, last = float(values[:quarter].mean()), float(values[-quarter:].mean())
        slope = float(_slope(number[None], values[None])[0])
        result[name] = _with_interval(slope, slopes) | {
            "first_quarter": first,
            "last_quarter": last,
            "growth": divide(last, first) if first > 0 else math.nan,
        }
    return result


def _slope(x: Tensor, y: Tensor) -> Tensor:
    x = x - x.mean(1, keepdim=True)
    return (x * y).sum(1) / (x * x).sum(1)
