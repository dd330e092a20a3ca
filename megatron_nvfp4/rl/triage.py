"""TRIAGE: a gate on segments of negative advantage, and repair of segments of positive advantage.

delta = z - s: the learner's log-probability of a token before the update minus the sampler's (natural log).
A: advantage, m: mask, both per token. The rules are those of "TRIAGE: Direction-Aware Mismatch
Stabilization of Native NVFP4 Reinforcement Learning" (arXiv 2610.07043) with the constants of the authors'
published configuration (https://github.com/EthanLI24/TRIAGE); docs/rl.md lists them with their sources.

Padded tensors are (N, T), ragged ones (T,) with int64 offsets (N + 1); the results have the same bits in
both. Masked tokens may hold anything, infinities and NaN included: they are replaced, not multiplied by 0.
At a valid token -Inf and +Inf count as such gaps; NaN makes the weights of an eligible segment NaN, so that
the loss shows it (layout.check_finite names the token). Sums are taken in float32, or float64 if an input
is. The host never waits for the device.
"""

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .layout import Segments, compute_dtype, count, fold, token_layout


@dataclass(frozen=True, kw_only=True)
class GateCalibration:
    """Thresholds of the calibrated gate, as calibrate_gate measures them; not a reported setting.

    Features of a segment: minus its mean gap, and the share of its tokens whose gap is below -deep_gap.
    Each rises from strength 0 at its reference to 1 at its full value; the weight is 1 - tail_strength *
    the larger of the two.
    """

    deep_gap: float
    mean_reference: float
    mean_full: float
    tail_reference: float
    tail_full: float

    def __post_init__(self) -> None:
        if not 0 < self.deep_gap < float("inf"):
            raise ValueError(f"GateCalibration: deep_gap={self.deep_gap} is not above 0 and finite")
        for name in ("mean", "tail"):
            low, full = getattr(self, f"{name}_reference"), getattr(self, f"{name}_full")
            if not low <= full:
                raise ValueError(
                    f"GateCalibration: {name}_full={full} is below {name}_reference={low}; "
                    "take both from calibrate_gate"
                )


@dataclass(frozen=True, kw_only=True)
class TriageConfig:
    """Settings of TRIAGE; the defaults are the reported ones. ValueError names a value out of range."""

    gate_width: int = 64
    """Positions of a gate segment."""
    mild_mean: float = -0.5
    """A segment whose mean gap is below this gets mild_weight."""
    mild_weight: float = 0.3
    deep_mean: float = -1.5
    """A segment whose mean gap is below this gets deep_weight."""
    deep_weight: float = 0.1
    tail_gap: float = -6.0
    """A token whose gap is below this is a deep-tail token."""
    tail_count: int = 2
    """Deep-tail tokens in a segment at which the tail rule is at full strength."""
    tail_strength: float = 0.9
    """What the tail rule at full strength takes from the weight 1."""
    norm: Literal["response", "token"] = "response"
    """Loss that the gate renormalises: mean over responses of token means, or mean over all tokens."""
    repair_width: int = 128
    """Positions of a repair segment, a multiple of gate_width."""
    repair_boundary: float = -0.03
    """Mean gap below which a segment is repaired."""
    repair_beta: float = 0.022360679775
    """Where the pseudo-Huber penalty turns from square to linear."""
    repair_weight: float = 0.015
    """Factor of the repair loss; 0 switches Repair off."""
    repair_start: int = 0
    """First update that repairs."""
    repair_norm: Literal["segment", "token"] = "segment"
    """Mean of the penalty over the update's segments, or over tokens, which needs no count of segments."""
    calibration: GateCalibration | None = None
    """A measured gate in place of the fixed tiers and tail rule (calibrate_gate); not a reported setting."""

    def __post_init__(self) -> None:
        for name, rule, holds in (
            ("gate_width", "at least 1", self.gate_width >= 1),
            ("mild_mean", "at most 0", self.mild_mean <= 0),
            ("deep_mean", "at most mild_mean", self.deep_mean <= self.mild_mean),
            ("mild_weight", "above 0 and at most 1", 0 < self.mild_weight <= 1),
            (
                "deep_weight",
                "above 0 and at most mild_weight",
                0 < self.deep_weight <= self.mild_weight,
            ),
            ("tail_gap", "below 0", self.tail_gap < 0),
            ("tail_count", "at least 1", self.tail_count >= 1),
            ("tail_strength", "at least 0 and below 1", 0 <= self.tail_strength < 1),
            ("norm", "'response' or 'token'", self.norm in ("response", "token")),
            (
                "repair_width",
                "a positive multiple of gate_width",
                self.repair_width >= 1 and self.repair_width % max(self.gate_width, 1) == 0,
            ),
            ("repair_boundary", "at most 0", self.repair_boundary <= 0),
            ("repair_beta", "above 0 and finite", 0 < self.repair_beta < float("inf")),
            ("repair_weight", "at least 0 and finite", 0 <= self.repair_weight < float("inf")),
            ("repair_start", "at least 0", self.repair_start >= 0),
            ("repair_norm", "'segment' or 'token'", self.repair_norm in ("segment", "token")),
        ):
            if not holds:
                default = next(field.default for field in fields(self) if field.name == name)
                raise ValueError(
                    f"TriageConfig: {name}={getattr(self, name)!r} is not {rule}; "
                    f"the reported setting is {default!r}"
                )


class UpdateTotals(NamedTuple):
    """Sums over an optimizer update, 0-d float64 tensors; they add over micro-batches and ranks."""

    num_responses: Tensor  # with a valid token
    num_tokens: Tensor  # valid
    weight_sum: Tensor  # gate weights of the valid tokens
    num_repair_segments: Tensor  # with a valid token


class _Repair(NamedTuple):
    """The repair segments, as runs of gate segments, and what was decided of each."""

    pair: Segments
    num_valid: Tensor
    positive: Tensor
    q: Tensor  # how far the mean gap is below the boundary; 0 where nothing is repaired


class Gate(NamedTuple):
    """The gate's segments, their tokens in the grid, and what was decided."""

    segments: Segments
    valid: Tensor  # grid, bool
    negative: Tensor  # grid, bool: valid and delta < 0
    advantages: Tensor  # grid, 0 where not valid
    num_valid: Tensor  # of each segment, like all below
    num_negative: Tensor
    num_deep: Tensor
    delta_sum: Tensor
    advantage_sum: Tensor
    eligible: Tensor
    weight: Tensor
    weight_sum: Tensor


def triage_gate(
    delta: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    offsets: Tensor | None = None,
    config: TriageConfig,
) -> Tensor:
    """The gate's weight of each token: in (0, 1] where it acts, 1 elsewhere and at masked tokens.

    delta, advantages, mask: (N, T), or (T,) with offsets; mask bool or 0 and 1. Returns the shape of delta
    in float32, or float64 if an input is; detached. A segment with mean advantage below 0 gets min(tier of
    its mean gap, tail rule); of its tokens those with delta < 0 get that weight. Means are over valid
    tokens. To be computed once per update from the pre-update log-probs. Does not renormalise:
    triage_advantages does. ValueError for tensors that do not belong together.
    """
    gate = diagnose(delta, advantages, mask, offsets, config)
    return gate.segments.scatter(torch.where(gate.negative, gate.weight[..., None], 1), 1.0)


def triage_totals(
    delta: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    offsets: Tensor | None = None,
    config: TriageConfig,
) -> UpdateTotals:
    """What the token form of the gate and the segment form of Repair need of the whole update.

    Arguments as of triage_gate. Where an update is split over micro-batches or ranks, add these over the
    parts and give the sums as `totals`; where it is one call, leave that out.
    """
    gate = diagnose(delta, advantages, mask, offsets, config)
    return _totals(gate, _repair_of(gate, config))


def triage_advantages(
    delta: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    offsets: Tensor | None = None,
    config: TriageConfig,
    tis_weights: Tensor | None = None,
    totals: UpdateTotals | None = None,
    step: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Advantages that make a policy loss compute TRIAGE, and metrics.

    Arguments as of triage_gate; tis_weights: the importance weights that the loss will multiply each token
    with, divided out of the repair term; step: the update's number, needed if config.repair_start > 0.
    Returns (advantages, metrics): the shape of delta in float32, or float64 if an input is, detached, 0 at
    masked tokens.

        A' = A * w * norm + push / tis     norm = (sum m) / (sum m w) over the response | over the update
        push = lambda phi'(q_R) * N * (sum m) / (S * n_R)    response form, sum over the response
        push = lambda phi'(q_R) * M / (S * n_R)              token form, M valid tokens in the update
        push = lambda phi'(q_R)                              repair_norm="token"

    The gate part is exact for every loss that is homogeneous in A (PPO-clip is), at any ratio. The repair
    part has the gradient of triage_repair_loss where the ratio is 1, that is with one update per rollout;
    with more, set repair_weight=0 here and add that loss. A push divided by a TIS weight of 0, or beyond the
    type's range, is dropped and counted: no advantage can carry it. N leaves out responses without a valid
    token.

    metrics: 0-d float64 tensors on the device, sums over what was given that add over micro-batches and
    ranks, except max_coefficient (the largest w * norm), of which the maximum is to be taken.
    """
    gate = diagnose(delta, advantages, mask, offsets, config)
    repair = _repair_of(gate, config)
    own = _totals(gate, repair)
    totals = own if totals is None else totals
    factor = _renormalisation(gate, config, totals)
    coefficient = torch.where(gate.negative, (gate.weight * factor)[..., None], factor[..., None])
    result = coefficient.mul_(gate.advantages)  # in place: the largest tensors of the call
    factor_k = _repair_factor(config, step)
    push = _push(gate, repair, config, totals) * factor_k if factor_k else torch.zeros_like(factor)
    lost = own.num_tokens.new_zeros(())
    if tis_weights is None:
        result.add_(push[..., None])
    else:
        token_layout(offsets, mask, delta=delta, tis_weights=tis_weights)
        divisor = gate.segments.gather(tis_weights.detach()).to(push.dtype)
        scaled = push[..., None] / divisor
        dropped = torch.isinf(scaled) | (divisor == 0)  # NaN stays
        lost = (gate.valid & dropped & (push[..., None] != 0)).sum().double()
        result.add_(scaled.masked_fill_(dropped, 0))
    result = gate.segments.scatter(result.masked_fill_(~gate.valid, 0), 0.0)
    return result, _metrics(gate, repair, own, factor, push) | {"num_repair_lost": lost}


def triage_repair_loss(
    learner_logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    offsets: Tensor | None = None,
    config: TriageConfig,
    step: int,
    totals: UpdateTotals | None = None,
) -> Tensor:
    """The repair loss, to be added to the policy loss; differentiable in learner_logprobs alone.

        lambda_k * (1 / S) * sum of phi(q_R) over segments R of repair_width with mean advantage above 0
        q = max(repair_boundary - mean gap, 0)      phi(q) = beta^2 (sqrt(1 + (q / beta)^2) - 1)
        lambda_k = repair_weight from update repair_start on, 0 before

    S: all segments with a valid token, of every advantage. With repair_norm="token" the mean is over
    tokens: each segment counts with its number of valid tokens, over those of its response and N (response
    form) or over those of the update (token form). Tensors as of triage_gate; learner_logprobs are the live
    ones. Returns a 0-d tensor in float32, or float64 if an input is. With totals it is this part's share:
    the shares add up. The gradient at a masked token is exactly 0; at a valid one it is at most
    repair_weight * beta / (S * n_R).
    """
    layout = token_layout(
        offsets,
        mask,
        learner_logprobs=learner_logprobs,
        sampler_logprobs=sampler_logprobs,
        advantages=advantages,
    )
    dtype = compute_dtype(learner_logprobs, sampler_logprobs, advantages)
    if _repair_factor(config, step) == 0:
        return learner_logprobs[..., :0].sum().to(dtype)  # 0, with a gradient of 0
    valid = layout.valid(mask)
    segments = layout.segments(config.gate_width)
    num_valid = count(segments.gather_mask(valid)).to(dtype)
    gap = learner_logprobs.to(dtype) - sampler_logprobs.detach().to(dtype)
    gap_sum = segments.sums(gap, valid)
    advantage_sum = segments.sums(advantages.detach().to(dtype), valid)
    repair = _repair_segments(segments, config, num_valid, gap_sum, advantage_sum)
    penalty = _PseudoHuber.apply(repair.q, config.repair_beta)
    per_response = segments.rows.sum_responses(num_valid)
    if totals is None:
        totals = _count(per_response, repair, per_response)
    divisor = totals.num_repair_segments
    if config.repair_norm == "token":
        penalty, divisor = penalty * repair.num_valid, totals.num_tokens
        if config.norm == "response":
            penalty = penalty / repair.pair.spread(per_response.clamp_min(1))
            divisor = totals.num_responses
    total = fold(repair.pair.rows.sum_responses(penalty))
    return config.repair_weight * total / divisor.clamp_min(1).to(dtype)


class _PseudoHuber(torch.autograd.Function):
    """phi_beta of q >= 0, without cancellation for small q, and with a finite derivative at infinity."""

    @staticmethod
    def forward(ctx, q: Tensor, beta: float) -> Tensor:
        ctx.save_for_backward(q)
        ctx.beta = beta
        return q / (1 / q + torch.sqrt(1 / q**2 + 1 / beta**2))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (q,) = ctx.saved_tensors
        return grad * _slope(q, ctx.beta), None


def _slope(q: Tensor, beta: float) -> Tensor:
    """phi'_beta(q) = q / sqrt(1 + (q / beta)^2) of non-negative q, in [0, beta]; beta at infinity."""
    return beta / torch.sqrt(1 + (beta / q) ** 2)


def diagnose(
    delta: Tensor, advantages: Tensor, mask: Tensor, offsets: Tensor | None, config: TriageConfig
) -> Gate:
    """Everything about the gate's segments, without gradients."""
    layout = token_layout(offsets, mask, delta=delta, advantages=advantages)
    dtype = compute_dtype(delta, advantages)
    segments = layout.segments(config.gate_width)
    valid = segments.gather_mask(layout.valid(mask))
    delta = torch.where(valid, segments.gather(delta.detach().to(dtype)), 0)
    advantages = torch.where(valid, segments.gather(advantages.detach().to(dtype)), 0)
    negative = delta < 0
    num_valid, num_negative = count(valid).to(dtype), count(negative).to(dtype)
    delta_sum, advantage_sum = fold(delta), fold(advantages)
    eligible = advantage_sum < 0
    deep_gap = config.tail_gap if config.calibration is None else -config.calibration.deep_gap
    num_deep = count(delta < deep_gap).to(dtype)
    mean = delta_sum / num_valid.clamp_min(1)
    weight = _segment_weight(mean, num_deep, num_valid, config)
    weight = torch.where(torch.isnan(mean), mean, weight)
    weight = torch.where(eligible, weight, 1)
    return Gate(
        segments=segments,
        valid=valid,
        negative=negative,
        advantages=advantages,
        num_valid=num_valid,
        num_negative=num_negative,
        num_deep=num_deep,
        delta_sum=delta_sum,
        advantage_sum=advantage_sum,
        eligible=eligible,
        weight=weight,
        weight_sum=(num_valid - num_negative) + weight * num_negative,
    )


def _segment_weight(
    mean: Tensor, num_deep: Tensor, num_valid: Tensor, config: TriageConfig
) -> Tensor:
    """The weight of a segment of negative advantage from its mean gap and its deep-tail tokens."""
    if config.calibration is not None:
        measured = config.calibration
        by_mean = _strength(-mean, measured.mean_reference, measured.mean_full)
        share = num_deep / num_valid.clamp_min(1)
        by_tail = _strength(share, measured.tail_reference, measured.tail_full)
        return 1 - config.tail_strength * torch.maximum(by_mean, by_tail)
    tier = torch.ones_like(mean)
    tier = tier.masked_fill_(mean < config.mild_mean, config.mild_weight)
    tier = tier.masked_fill_(mean < config.deep_mean, config.deep_weight)
    tail = 1 - config.tail_strength * (num_deep / config.tail_count).clamp_max(1)
    return torch.minimum(tier, tail)


def _strength(feature: Tensor, reference: float, full: float) -> Tensor:
    """0 up to the reference, 1 from the full value on, linear between; a step where the two are equal."""
    if full == reference:
        return (feature > reference).to(feature.dtype)
    return ((feature - reference) / (full - reference)).clamp(0, 1)


def _repair_segments(
    segments: Segments,
    config: TriageConfig,
    num_valid: Tensor,
    delta_sum: Tensor,
    advantage_sum: Tensor,
) -> _Repair:
    """Repair segments from the sums of the gate's; differentiable in delta_sum."""
    pair = segments.rows.segments(config.repair_width // config.gate_width)
    num = pair.total(num_valid)
    mean = pair.total(delta_sum) / num.clamp_min(1)
    positive = pair.total(advantage_sum) > 0
    short = config.repair_boundary - mean
    q = torch.where(positive & ~(short <= 0), short, 0)  # NaN stays, in the gradient too
    return _Repair(pair, num, positive, q)


def _repair_of(gate: Gate, config: TriageConfig) -> _Repair:
    return _repair_segments(
        gate.segments, config, gate.num_valid, gate.delta_sum, gate.advantage_sum
    )


def _repair_factor(config: TriageConfig, step: int | None) -> float:
    """lambda_k of update k = step."""
    if step is None and config.repair_start and config.repair_weight:
        raise ValueError(
            f"triage: repair_start={config.repair_start} needs the number of the update; give step=..."
        )
    return 0.0 if step is not None and step < config.repair_start else config.repair_weight


def _totals(gate: Gate, repair: _Repair) -> UpdateTotals:
    rows = gate.segments.rows
    return _count(rows.sum_responses(gate.num_valid), repair, rows.sum_responses(gate.weight_sum))


def _count(num_valid: Tensor, repair: _Repair, weight_sum: Tensor) -> UpdateTotals:
    """Totals from the valid tokens and the gate weights of each response."""
    return UpdateTotals(
        num_responses=(num_valid > 0).sum().double(),
        num_tokens=num_valid.sum(dtype=torch.float64),
        weight_sum=fold(weight_sum.double()),
        num_repair_segments=(repair.num_valid > 0).sum().double(),
    )


def _renormalisation(gate: Gate, config: TriageConfig, totals: UpdateTotals) -> Tensor:
    """At each segment: what restores the mass the gate took, from the response or from the update."""
    if config.norm == "token":
        factor = torch.where(totals.num_tokens > 0, totals.num_tokens / totals.weight_sum, 1)
        return factor.to(gate.weight.dtype).expand(gate.weight.shape)
    rows = gate.segments.rows
    num_valid = rows.sum_responses(gate.num_valid)
    weight_sum = rows.sum_responses(gate.weight_sum)
    return gate.segments.spread(torch.where(num_valid > 0, num_valid / weight_sum, 1))


def _push(gate: Gate, repair: _Repair, config: TriageConfig, totals: UpdateTotals) -> Tensor:
    """At each gate segment: what Repair adds to the advantages of its tokens, but for lambda."""
    slope = _slope(repair.q, config.repair_beta)
    if config.repair_norm == "segment":
        slope = slope / repair.num_valid.clamp_min(1)
        share = totals.num_repair_segments.clamp_min(1)
        if config.norm == "token":
            slope = slope * (totals.num_tokens / share).to(slope.dtype)
        else:
            per_response = gate.segments.rows.sum_responses(gate.num_valid)
            ratio = (totals.num_responses / share).to(slope.dtype)
            slope = slope * ratio * repair.pair.spread(per_response)
    pair = repair.pair
    return pair.scatter(slope[..., None].expand(*slope.shape, pair.width), 0.0)


def _metrics(
    gate: Gate, repair: _Repair, own: UpdateTotals, factor: Tensor, push: Tensor
) -> dict[str, Tensor]:
    """The sums that triage_advantages reports; own: of the tokens given, not of the whole update."""
    rows = gate.segments.rows
    gated = gate.eligible & (gate.weight != 1)
    some_untouched = gate.num_valid > gate.num_negative
    largest = torch.where(some_untouched, 1, gate.weight) * factor
    largest = torch.where(gate.num_valid > 0, largest, 0).double().flatten()
    zero = largest.new_zeros(1)
    return {
        "num_responses": own.num_responses,
        "num_tokens": own.num_tokens,
        "weight_sum": own.weight_sum,
        "num_segments": (gate.num_valid > 0).sum().double(),
        "num_eligible_segments": gate.eligible.sum().double(),
        "num_gated_segments": gated.sum().double(),
        "num_gated_tokens": torch.where(gated, gate.num_negative, 0).sum(dtype=torch.float64),
        "num_deep_tokens": gate.num_deep.sum(dtype=torch.float64),
        "delta_sum": fold(rows.sum_responses(gate.delta_sum).double()),
        "max_coefficient": torch.cat([largest, zero]).amax(),
        "num_repair_segments": own.num_repair_segments,
        "num_positive_segments": repair.positive.sum().double(),
        "num_low_segments": (repair.q > 0).sum().double(),
        "repair_push": fold(rows.sum_responses(push * gate.num_valid).double()),
    }
