"""Cheap checks of a dump, before any statistic is worth reading: most complaints end here.

Each check looks for one mistake that passes for a numeric mismatch: log-probs that are missing, shifted by a
token or taken from a truncated distribution, advantages that are no numbers, and responses that several
versions of the weights sampled.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from .readers import Responses

POSITIVE = 1e-4  # above what rounding makes of a log-prob of 0
MIN_PAIRS = 16  # tokens of a response below which its correlation says nothing
SHIFT_MARGIN = 0.2  # by which a shifted correlation must beat the aligned one
SHIFT_LEVEL = 0.8  # and what it must reach: two sides that agree correlate above it
ONE_SIDED = 0.8  # share of negative gaps among those that are not small
SMALL_GAP = 0.01
MASS_BOUND = 0.99  # mean ratio below which a sampler has left tokens out
SCALE_BAND = 0.8, 1.25  # ratio of spreads that numerics do not leave at such a correlation
SCALE_CORRELATION = 0.95
LAGS = -1, 0, 1
UNRELATED = 0.1  # pooled correlation below which two sides are not of the same tokens, if
UNRELATED_GAP = 0.25  # their mean gap is no rounding either, in nats: sure policies hardly vary


@dataclass(frozen=True, kw_only=True)
class Check:
    """What one check found: a sentence with its numbers, and the remedy where it failed."""

    name: str
    status: Literal["passed", "failed", "not run"]
    found: str
    values: dict[str, float | int | list] = field(default_factory=dict)


def check(responses: Responses) -> list[Check]:
    """All checks, in the order in which a failed one makes the later ones doubtful."""
    checks: tuple[Callable[[Responses], Check], ...] = (
        lengths,
        log_probs,
        advantages,
        alignment,
        renormalisation,
        weight_versions,
    )
    return [run(responses) for run in checks]


def usable(responses: Responses) -> Tensor:
    """bool (T,): tokens in the loss with a finite gap; all False where there are no gaps."""
    if responses.delta is None:
        return torch.zeros_like(responses.mask)
    return responses.mask & torch.isfinite(responses.delta)


def lengths(responses: Responses) -> Check:
    """Whether there is anything to measure."""
    length = responses.offsets.diff()
    num_valid = torch.zeros_like(length).index_add_(
        0, responses.response_of_token(), responses.mask.long()
    )
    values = {
        "responses": responses.num_responses,
        "steps": int(responses.steps.unique().numel()),
        "tokens": int(length.sum()),
        "tokens_in_loss": int(num_valid.sum()),
        "longest": int(length.max()) if length.numel() else 0,
        "empty": int((length == 0).sum()),
        "all_masked": int(((length > 0) & (num_valid == 0)).sum()),
    }
    text = (
        f"{values['responses']} responses of {values['steps']} steps, {values['tokens_in_loss']} of "
        f"{values['tokens']} tokens in the loss, longest {values['longest']}; {values['empty']} responses "
        f"are empty and {values['all_masked']} wholly masked"
    )
    if values["tokens_in_loss"]:
        return Check(name="lengths", status="passed", found=text, values=values)
    text += "; give a dump with a token in the loss"
    return Check(name="lengths", status="failed", found=text, values=values)


def log_probs(responses: Responses) -> Check:
    """Missing, infinite, positive or constant log-probs at tokens in the loss."""
    name = "log-probs"
    if responses.delta is None:
        absent = [side for side in ("learner", "sampler") if getattr(responses, side) is None]
        return Check(
            name=name,
            status="failed",
            found=(
                f"no log-probs of the {' and of the '.join(absent) or 'two sides'} in some file, so there is "
                "no gap; a rollout dump has the sampler's alone: give train_data, written with "
                "--save-debug-train-data or --dump-details"
            ),
        )
    faults, values = [], {}
    columns = {"learner": responses.learner, "sampler": responses.sampler}
    columns = {side: column for side, column in columns.items() if column is not None}
    for side, column in (columns or {"gap": responses.delta}).items():
        faults += _column_faults(side, column[responses.mask], values)
    if faults:
        return Check(name=name, status="failed", found="; ".join(faults), values=values)
    text = "all finite" + (" and none above 0" if columns else "; the files hold gaps alone")
    valid = responses.delta[responses.mask]
    if valid.numel() and not valid.any():
        text += "; every gap is exactly 0: both sides agree to the bit, or one column is a copy"
    return Check(name=name, status="passed", found=text, values=values)


def _column_faults(side: str, values: Tensor, counts: dict) -> list[str]:
    finite = torch.isfinite(values)
    num_bad = int((~finite).sum())
    counts[f"{side}_not_finite"] = num_bad
    faults = []
    if num_bad:
        faults.append(
            f"{num_bad} of {values.numel()} values of the {side} are NaN or infinite; mask these tokens or "
            "record their log-probs (the statistics leave them out)"
        )
    if side == "gap":
        return faults
    positive = values[finite & (values > POSITIVE)]
    num_positive = positive.numel()
    counts[f"{side}_positive"] = num_positive
    if num_positive:
        faults.append(
            f"{num_positive} log-probs of the {side} are above 0, up to {float(positive.max()):.4g}; "
            "these are no log-probabilities: look for logits, probabilities or -log p"
        )
    if values.numel() >= MIN_PAIRS and bool((values == values[0]).all()):
        faults.append(
            f"the {side} has {float(values[0]):g} at every token; its log-probs were not recorded (in SGLang "
            "ask for return_logprob)"
        )
    return faults


def advantages(responses: Responses) -> Check:
    """NaN or infinite advantages at tokens in the loss."""
    name = "advantages"
    if responses.advantages is None:
        return Check(name=name, status="not run", found="the files hold none")
    values = responses.advantages[responses.mask]
    num_bad = int((~torch.isfinite(values)).sum())
    counts = {"advantages_not_finite": num_bad}
    if not num_bad:
        return Check(name=name, status="passed", found="all finite", values=counts)
    text = (
        f"{num_bad} of {values.numel()} advantages are NaN or infinite; look for groups whose rewards are "
        "all alike, divided by their spread of 0 (the statistics of direction take these tokens as A = 0)"
    )
    return Check(name=name, status="failed", found=text, values=counts)


def alignment(responses: Responses) -> Check:
    """Whether the learner's log-probs match the sampler's at the same token, and not one before or behind."""
    name = "alignment"
    learner, sampler = responses.learner, responses.sampler
    if learner is None or sampler is None:
        return Check(name=name, status="not run", found="needs the log-probs of both sides")
    per_response, pooled = {}, {}
    valid = usable(responses)
    for lag in LAGS:
        pairs = _pairs(responses, valid, lag)
        per_response[lag], pooled[lag] = _correlations(learner, sampler, pairs, lag, responses)
    values = {f"lag_{lag:+d}" if lag else "lag_0": pooled[lag] for lag in LAGS}
    aligned = per_response[0]
    shifted = {lag: _beats(per_response[lag], aligned) for lag in LAGS if lag}
    num_tested = int(torch.isfinite(aligned).sum())
    counts = {lag: int(found.sum()) for lag, found in shifted.items()}
    values |= {"tested": num_tested, "shifted": sum(counts.values())}
    if num_tested == 0:
        return Check(
            name=name,
            status="not run",
            found=f"no response has {MIN_PAIRS} neighbouring tokens in the loss whose log-probs vary",
            values=values,
        )
    mean_gap = float((learner[valid] - sampler[valid]).abs().mean())
    if not any(counts.values()) and pooled[0] < UNRELATED and mean_gap > UNRELATED_GAP:
        return Check(
            name=name,
            status="failed",
            found=f"correlation {pooled[0]:.4f} at the same token: the sides are not of the same tokens; "
            "look for responses in another order, or another checkpoint on one side",
            values=values,
        )
    if not any(counts.values()):
        return Check(
            name=name,
            status="passed",
            found=f"correlation {pooled[0]:.4f} at the same token, {pooled[-1]:.4f} and {pooled[1]:.4f} "
            "a token apart",
            values=values,
        )
    lag = max(counts, key=counts.__getitem__)
    which = shifted[lag].nonzero().flatten()[:5].tolist()
    way = "before" if lag < 0 else "behind"
    there, in_place = (float(x[which[0]]) for x in (per_response[lag], aligned))
    return Check(
        name=name,
        status="failed",
        found=(
            f"{sum(counts.values())} of {num_tested} responses are shifted: the learner's log-probs fit the "
            f"sampler's one token {way} (responses {which}; correlation {there:.3f} there, {in_place:.3f} in "
            "place); position t of the logits predicts token t + 1"
        ),
        values=values,
    )


def _pairs(responses: Responses, valid: Tensor, lag: int) -> Tensor:
    """int64: tokens t of which both t and t + lag are usable and of one response."""
    place = torch.arange(valid.numel())
    other = place + lag
    inside = (other >= 0) & (other < valid.numel())
    other = other.clamp(0, max(valid.numel() - 1, 0))
    owner = responses.response_of_token()
    return (inside & valid & valid[other] & (owner == owner[other])).nonzero().flatten()


def _correlations(
    learner: Tensor, sampler: Tensor, pairs: Tensor, lag: int, responses: Responses
) -> tuple[Tensor, float]:
    """Correlation of learner[t] with sampler[t + lag]: of each response (NaN if too few), of all together."""
    x, y = learner[pairs], sampler[pairs + lag]
    owner = responses.response_of_token()[pairs]
    num = responses.num_responses

    def total(values: Tensor) -> Tensor:
        return torch.zeros(num, dtype=torch.float64).index_add_(0, owner, values)

    count = total(torch.ones_like(x))
    few = count < MIN_PAIRS
    count = count.clamp_min(1)
    dx, dy = x - (total(x) / count)[owner], y - (total(y) / count)[owner]
    xx, yy, xy = total(dx * dx), total(dy * dy), total(dx * dy)
    own = xy / (xx * yy).sqrt()
    own[few | ~torch.isfinite(own)] = float("nan")
    return own, float(xy.sum() / (xx.sum() * yy.sum()).sqrt())


def _beats(other: Tensor, aligned: Tensor) -> Tensor:
    return (other >= SHIFT_LEVEL) & (other > aligned + SHIFT_MARGIN)


def renormalisation(responses: Responses) -> Check:
    """Whether the sampler's log-probs are of another distribution: top-p or top-k, or a temperature.

    A sampler that draws from the distribution whose log-probs it reports has E[exp(delta)] = the learner's
    mass on the tokens that it can draw: 1, unless some are cut off. Then the gaps are those of the kept mass,
    negative almost everywhere. A temperature on one side alone changes the spread of its log-probs instead.
    """
    name = "renormalisation"
    valid = usable(responses)
    delta = responses.delta[valid] if responses.delta is not None else valid[:0]
    large = delta[delta.abs() > SMALL_GAP] if delta.numel() else delta
    if large.numel() < MIN_PAIRS:
        return Check(
            name=name,
            status="passed" if delta.numel() else "not run",
            found=f"{large.numel()} gaps above {SMALL_GAP}: too few to be of another distribution",
        )
    negative = float((large < 0).double().mean())
    ratio = delta.clamp_max(20).exp()
    mean = float(ratio.mean())
    spread = float(ratio.std() / ratio.numel() ** 0.5)
    values = {"negative_share": negative, "mean_ratio": mean, "mean_ratio_error": spread}
    if negative >= ONE_SIDED and mean + 2 * spread < MASS_BOUND:
        return Check(
            name=name,
            status="failed",
            found=(
                f"{100 * negative:.1f} % of the gaps beyond {SMALL_GAP} are negative and the mean ratio is "
                f"{mean:.4f} where drawing from the reported distribution gives 1: the sampler's log-probs "
                f"are renormalised over the kept {100 * mean:.1f} % of the mass (top-p, top-k or min-p); "
                "record them over the whole vocabulary, or sample with top_p=1, top_k=-1"
            ),
            values=values,
        )
    found = (
        f"{100 * negative:.1f} % of the gaps beyond {SMALL_GAP} are negative, mean ratio {mean:.4f}"
    )
    if responses.learner is not None and responses.sampler is not None:
        scale, correlation = _spreads(responses.learner[valid], responses.sampler[valid])
        values |= {"spread_ratio": scale, "correlation": correlation}
        low, high = SCALE_BAND
        if correlation > SCALE_CORRELATION and not low <= scale <= high:
            return Check(
                name=name,
                status="failed",
                found=(
                    f"the learner's log-probs spread {scale:.3f} times as far as the sampler's and correlate "
                    f"at {correlation:.4f}: one side has a temperature that the other lacks; compute both at "
                    "the sampling temperature"
                ),
                values=values,
            )
    return Check(name=name, status="passed", found=found, values=values)


def _spreads(learner: Tensor, sampler: Tensor) -> tuple[float, float]:
    x, y = learner - learner.mean(), sampler - sampler.mean()
    xx, yy, xy = float((x * x).sum()), float((y * y).sum()), float((x * y).sum())
    if xx == 0 or yy == 0:
        return float("nan"), float("nan")
    return (xx / yy) ** 0.5, xy / (xx * yy) ** 0.5


def weight_versions(responses: Responses) -> Check:
    """Whether one version of the weights sampled each response, and each step."""
    name = "weight versions"
    known = [
        (step, versions)
        for step, versions in zip(responses.steps.tolist(), responses.versions, strict=False)
        if versions
    ]
    if not known:
        return Check(name=name, status="not run", found="the files name no weight versions")
    num_mixed = sum(len(set(versions)) > 1 for _, versions in known)
    of_step: dict[int, Counter] = {}
    for step, versions in known:
        of_step.setdefault(step, Counter()).update(set(versions))
    mixed_steps = [step for step, versions in of_step.items() if len(versions) > 1]
    values = {"known": len(known), "mixed_responses": num_mixed, "mixed_steps": len(mixed_steps)}
    if not mixed_steps:
        return Check(
            name=name,
            status="passed",
            found=f"one version a step, {len(known)} responses",
            values=values,
        )
    step = mixed_steps[0]
    return Check(
        name=name,
        status="failed",
        found=(
            f"{num_mixed} of {len(known)} responses were sampled by more than one version of the weights and "
            f"{len(mixed_steps)} of {len(of_step)} steps hold several (step {step}: "
            f"{', '.join(sorted(of_step[step]))}): their gaps hold weight changes, not numerics alone; "
            "measure on responses of one version"
        ),
        values=values,
    )
