"""Importance corrections for sampler and learner that disagree, and two options of TRIAGE.

delta = z - s: the learner's log-probability of a token before the update minus the sampler's. The ratio
exp(delta) is that of the update's policy to the one that sampled; it is not the PPO ratio of the live
policy, which is clipped by itself. Tensors are (N, T), or (T,) with int64 offsets (N + 1). Weights come
back detached in the shape of delta, in float32, or float64 if delta is; they multiply the token's policy
loss before it is reduced. At a masked token, which may hold anything, a weight is 1. A weight of 0 rejects:
it takes the token out of the numerator of a mean and leaves the denominator alone. NaN at a valid token
gives NaN. The host never waits for the device.

calibrate_gate and recenter_lengths are options of TRIAGE's published code that the reported runs leave off.
"""

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from .layout import Layout, check_finite, compute_dtype, fold, token_layout
from .triage import GateCalibration, TriageConfig, diagnose

MAX_EXPONENT = 20.0  # bound of a log-ratio before exp, as in slime, miles and verl


def tis_weights(
    delta: Tensor,
    mask: Tensor,
    *,
    offsets: Tensor | None = None,
    cap: float = 2.0,
    floor: float = 0.0,
) -> Tensor:
    """Truncated importance sampling: clamp(exp(delta), floor, cap). TRIAGE reports cap 2 and floor 0.

    As `--use-tis` of slime and miles (loss.py, corrections.py). Bounds as the errors say.
    """
    _check_bounds("tis_weights", floor, cap)
    layout = token_layout(offsets, mask, delta=delta)
    weights = torch.exp(_wide(delta)).clamp(floor, cap)
    return torch.where(layout.valid(mask), weights, 1)


def icepop_weights(
    delta: Tensor,
    mask: Tensor,
    *,
    offsets: Tensor | None = None,
    low: float = 0.5,
    high: float = 5.0,
) -> Tensor:
    """IcePop: exp(delta) where it lies in [low, high], else 0; nothing is renormalised.

    The defaults are those of verl's "0.5_5.0". ValueError unless 0 <= low <= high, high > 0.
    """
    _check_bounds("icepop_weights", low, high)
    layout = token_layout(offsets, mask, delta=delta)
    weights = torch.exp(_wide(delta))
    rejected = (weights < low) | (weights > high)
    return torch.where(layout.valid(mask), weights.masked_fill(rejected, 0.0), 1)


def sequence_weights(
    delta: Tensor, mask: Tensor, *, offsets: Tensor | None = None, cap: float = 2.0
) -> Tensor:
    """min(exp(sum of the response's valid delta), cap) at each of its tokens: the ratio of whole responses.

    The sum is bounded to +-20 first, as verl does for `rollout_is: sequence`. ValueError unless cap > 0.
    """
    _check_bounds("sequence_weights", 0.0, cap)
    return _per_response(delta, mask, offsets, "sequence", 0.0, cap)


def geometric_weights(
    delta: Tensor, mask: Tensor, *, offsets: Tensor | None = None, cap: float = 2.0
) -> Tensor:
    """min(exp(mean of the response's valid delta), cap) at each of its tokens. ValueError unless cap > 0."""
    _check_bounds("geometric_weights", 0.0, cap)
    return _per_response(delta, mask, offsets, "geometric", 0.0, cap)


def sequence_mask(
    delta: Tensor,
    mask: Tensor,
    *,
    offsets: Tensor | None = None,
    low: float = 0.999,
    high: float = 1.002,
) -> Tensor:
    """exp(delta), untruncated, where the response's exp(mean delta) lies in [low, high]; 0 elsewhere.

    As `seq-mask-tis` of NeMo-RL and OpenRLHF, with its defaults. ValueError unless 0 <= low <= high, high >
    0.
    """
    _check_bounds("sequence_mask", low, high)
    layout = token_layout(offsets, mask, delta=delta)
    ratio = torch.exp(_log_ratio(layout, delta, mask, "geometric"))
    weights = torch.exp(_wide(delta)).masked_fill((ratio < low) | (ratio > high), 0.0)
    return torch.where(layout.valid(mask), weights, 1)


def mis_weights(
    delta: Tensor,
    mask: Tensor,
    *,
    offsets: Tensor | None = None,
    level: Literal["token", "sequence", "geometric"] = "token",
    mode: Literal["truncate", "clip", "mask"] = "truncate",
    low: float = 0.5,
    high: float = 2.0,
    veto: float | None = None,
    normalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """The corrections of slime's and miles' train_infer_mismatch_helper: (weights, keep).

    level: exp of the token's delta, of the response's sum or of its mean, each bounded to +-20 first. mode:
    truncate caps at high; clip keeps within [low, high]; mask leaves the weight and drops from keep what
    lies outside. veto: drops from keep every response with a valid token whose own ratio is below it (1e-4
    in the published example). normalize: divides the weights by their mean over the valid tokens given.
    keep: bool, the shape of delta, False at masked tokens. It is the caller's to apply, to numerators alone
    or to denominators too: slime and miles keep the denominators of the unmodified mask. TRL's default is
    level="sequence", mode="mask", low=0, high=3. ValueError names an option or bound out of range. Source:
    https://github.com/THUDM/slime/blob/main/examples/train_infer_mismatch_helper/mis.py
    """
    if level not in ("token", "sequence", "geometric"):
        raise ValueError(f"mis_weights: level={level!r}; give 'token', 'sequence' or 'geometric'")
    if mode not in ("truncate", "clip", "mask"):
        raise ValueError(f"mis_weights: mode={mode!r}; give 'truncate', 'clip' or 'mask'")
    _check_bounds("mis_weights", low, high)
    layout = token_layout(offsets, mask, delta=delta)
    keep = valid = layout.valid(mask)
    weights = torch.exp(_log_ratio(layout, delta, mask, level))
    if mode == "truncate":
        weights = weights.clamp_max(high)
    elif mode == "clip":
        weights = weights.clamp(low, high)
    else:
        keep = keep & ~((weights < low) | (weights > high))
    if veto is not None:
        if not 0 < veto < float("inf"):
            raise ValueError(f"mis_weights: veto={veto} is not above 0 and finite; 1e-4 is usual")
        vetoed = valid & (_wide(delta) < math.log(veto))
        num_vetoed = layout.sum_responses(vetoed.to(weights.dtype))
        keep = keep & (_at_tokens(layout, num_vetoed) == 0)
    weights = torch.where(valid, weights, 1)
    if normalize:
        total = fold(layout.sum_responses(torch.where(valid, weights, 0)).double())
        mean = total / valid.sum().clamp_min(1)
        weights = torch.where(valid, weights / mean.to(weights.dtype), 1)
    return weights, keep


def calibrate_gate(
    delta: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    offsets: Tensor | None = None,
    config: TriageConfig,
    max_trigger: float = 0.05,
) -> GateCalibration:
    """Measures the calibrated gate on a healthy window, to be frozen in TriageConfig(calibration=...).

    Tensors as of triage_gate. deep_gap: the 0.99 quantile of -delta over valid tokens with delta < 0. The
    references cut off the same share of the eligible segments in both features, the largest for which at
    most max_trigger of them exceed either one; the full values are the 0.999 quantiles. Quantiles are the
    next higher sample. Reads the tensors on the host. ValueError if a value is not finite or no segment is
    eligible.
    """
    check_finite(mask, offsets=offsets, delta=delta, advantages=advantages)
    valid = token_layout(offsets, mask, delta=delta, advantages=advantages).valid(mask)
    gaps = -delta.detach()[valid & (delta < 0)].to(compute_dtype(delta, advantages))
    if not gaps.numel():
        raise ValueError(
            "calibrate_gate: no valid token has delta < 0; give a window that has some"
        )
    first = GateCalibration(
        deep_gap=_quantile(gaps.sort().values, 0.99),
        mean_reference=0.0,
        mean_full=0.0,
        tail_reference=0.0,
        tail_full=0.0,
    )
    gate = diagnose(delta, advantages, mask, offsets, replace(config, calibration=first))
    num = gate.num_valid[gate.eligible]
    if not num.numel():
        raise ValueError(
            "calibrate_gate: no segment has a mean advantage below 0; give a longer window"
        )
    features = {
        "mean": -gate.delta_sum[gate.eligible] / num,
        "tail": gate.num_deep[gate.eligible] / num,
    }
    ordered = {name: x.sort().values for name, x in features.items()}
    low, high = 0, num.numel() - 1  # how many segments each reference cuts off
    while low < high:
        cut = (low + high + 1) // 2
        above = [x > ordered[name][-1 - cut] for name, x in features.items()]
        few = (above[0] | above[1]).double().mean() <= max_trigger
        low, high = (cut, high) if few else (low, cut - 1)
    measured = {}
    for name, x in ordered.items():
        measured[f"{name}_reference"] = float(x[-1 - low])
        measured[f"{name}_full"] = max(float(x[-1 - low]), _quantile(x, 0.999))
    return GateCalibration(deep_gap=first.deep_gap, **measured)


def recenter_lengths(
    advantages: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    *,
    offsets: Tensor | None = None,
    quantile: float = 0.7,
    power: float = 0.25,
    floor: float = 0.7,
) -> Tensor:
    """Weakens negative advantages of long responses, then restores the mean of each group.

    advantages, mask: (N, T), or (T,) with offsets. group_ids: int64 (N,) from 0 to N - 1, the prompt of
    each response. A response with n valid tokens, P the given quantile of n over responses that have any
    (the next higher sample), scales its negative advantages by clamp((P / n)^power, floor, 1). Each valid
    token of a group then gets the same amount added, so that the mean over its responses of their mean
    advantage is what it was. Returns the shape of advantages in float32, or float64 if they are, 0 at
    masked tokens. An option of the authors' code that is off in the reported configuration. ValueError
    names a tensor or bound out of range.
    """
    for name, value in (("quantile", quantile), ("power", power), ("floor", floor)):
        if not 0 <= value <= 1:
            raise ValueError(f"recenter_lengths: {name}={value} is not from 0 to 1")
    layout = token_layout(offsets, mask, advantages=advantages)
    num_responses = layout.num_responses
    if group_ids.shape != (num_responses,) or group_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"group_ids are {group_ids.dtype} {tuple(group_ids.shape)}; give int64 ({num_responses},)"
        )
    valid = layout.valid(mask)
    values = torch.where(valid, _wide(advantages), 0)
    if not values.numel():
        return values
    num = layout.sum_responses(valid.to(values.dtype))
    ordered = num.sort().values  # responses without tokens come first
    num_used = (num > 0).sum()
    rank = num_responses - num_used + torch.ceil(quantile * (num_used - 1).double()).long()
    pivot = ordered.gather(0, rank.clamp(0, num_responses - 1)[None])
    scale = ((pivot / num.clamp_min(1)) ** power).clamp(floor, 1)
    scaled = torch.where(values < 0, values * _at_tokens(layout, scale), values)
    lost = (layout.sum_responses(values) - layout.sum_responses(scaled)) / num.clamp_min(1)
    shift = _group_mean(lost, num > 0, group_ids.long())
    return torch.where(valid, scaled + _at_tokens(layout, shift), 0)


def _quantile(ordered: Tensor, q: float) -> float:
    """The q quantile of ascending values: the next higher sample."""
    return float(ordered[math.ceil(q * (ordered.numel() - 1))])


def _group_mean(values: Tensor, used: Tensor, group_ids: Tensor) -> Tensor:
    """At each response: the mean of its group over the used ones; values of the others are 0."""
    order = torch.sort(group_ids, stable=True).indices
    edges = torch.arange(values.numel() + 1, device=values.device)
    groups = Layout(tuple(values.shape), torch.searchsorted(group_ids[order], edges))
    total = groups.sum_responses(values[order])
    num = groups.sum_responses(used.to(values.dtype)[order])
    return (total / num.clamp_min(1))[group_ids]


def _per_response(
    delta: Tensor, mask: Tensor, offsets: Tensor | None, level: str, low: float, high: float
) -> Tensor:
    layout = token_layout(offsets, mask, delta=delta)
    weights = torch.exp(_log_ratio(layout, delta, mask, level)).clamp(low, high)
    return torch.where(layout.valid(mask), weights, 1)


def _log_ratio(layout: Layout, delta: Tensor, mask: Tensor, level: str) -> Tensor:
    """At each token: its delta, or its response's sum or mean of valid ones, within +-MAX_EXPONENT."""
    delta = _wide(delta)
    if level != "token":
        valid = layout.valid(mask)
        total = layout.sum_responses(torch.where(valid, delta, 0))
        if level == "geometric":
            total = total / layout.sum_responses(valid.to(delta.dtype)).clamp_min(1)
        delta = _at_tokens(layout, total)
    return delta.clamp(-MAX_EXPONENT, MAX_EXPONENT)


def _at_tokens(layout: Layout, per_response: Tensor) -> Tensor:
    """At each token: the value (N,) of its response."""
    segments = layout.segments(64)
    rows = segments.spread(per_response)[..., None]
    return segments.scatter(rows.expand(*rows.shape[:-1], segments.width), 0.0)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(compute_dtype(tensor))


def _check_bounds(name: str, low: float, high: float) -> None:
    if not (0 <= low <= high and high > 0):
        raise ValueError(
            f"{name}: the bounds [{low}, {high}] are not 0 <= low <= high with high above 0"
        )
