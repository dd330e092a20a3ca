"""Importance corrections, two options of TRIAGE and Score Centering, by hand and by their definitions."""

import math
from itertools import pairwise

import pytest
import rl_oracle as oracle
import torch
from rl_oracle import columns, offsets_of, padded, ragged, random_batch, unpadded

from megatron_nvfp4.rl import (
    GateCalibration,
    TriageConfig,
    calibrate_gate,
    geometric_weights,
    icepop_weights,
    mis_weights,
    recenter_lengths,
    score_centering_term,
    sequence_mask,
    sequence_weights,
    tis_weights,
    triage_gate,
)

NAN, INF = math.nan, math.inf
ONES = torch.ones(1, 4)
LN2 = math.log(2.0)
LEVELS, MODES = ("token", "sequence", "geometric"), ("truncate", "clip", "mask")
ALL = {
    "tis": tis_weights,
    "icepop": icepop_weights,
    "sequence": sequence_weights,
    "geometric": geometric_weights,
    "sequence mask": sequence_mask,
    **{
        f"mis {level} {mode}": lambda *a, _l=level, _m=mode, **k: mis_weights(
            *a, level=_l, mode=_m, veto=1e-4, normalize=True, **k
        )[0]
        for level in LEVELS
        for mode in MODES
    },
    "mis keep": lambda *a, **k: mis_weights(*a, level="sequence", mode="mask", veto=0.5, **k)[1],
}


def row(*values, dtype=torch.float64):
    return torch.tensor([values], dtype=dtype)


# --- importance corrections by hand ---------------------------------------------------------------


def test_tis():
    # Prevents: a cap on the gap instead of on the ratio; a floor that is ignored; infinite ratios.
    delta = row(math.log(0.25), 0.0, math.log(3.0), 800.0, -INF)
    assert tis_weights(delta, torch.ones(1, 5)).tolist()[0] == pytest.approx([0.25, 1, 2, 2, 0])
    floored = tis_weights(delta, torch.ones(1, 5), cap=1.5, floor=0.5)
    assert floored.tolist()[0] == pytest.approx([0.5, 1, 1.5, 1.5, 0.5])


def test_icepop():
    # Prevents: clipping where IcePop rejects; bounds that reject themselves; a renormalisation.
    delta = row(-LN2, math.log(0.49), LN2, math.log(5.01))
    assert icepop_weights(delta, ONES, high=5.0).tolist()[0] == pytest.approx([0.5, 0, 2, 0])
    zero = torch.zeros(1, 4)
    assert torch.equal(icepop_weights(zero, ONES, low=1.0, high=1.0), ONES)


def test_sequence_and_geometric():
    # Prevents: masked tokens in the sum; a mean over all positions; a sum beyond +-20 under the exponential.
    delta, mask = row(LN2, LN2, 9.0, -4 * LN2), torch.tensor([[1, 1, 0, 1]])
    got = sequence_weights(delta, mask)
    assert got.tolist()[0] == pytest.approx([0.25, 0.25, 1, 0.25])
    got = geometric_weights(delta, mask)
    assert got.tolist()[0] == pytest.approx([2 ** (-2 / 3)] * 2 + [1] + [2 ** (-2 / 3)])
    assert sequence_weights(-delta, mask, cap=3.0)[0, 0] == 3.0
    assert sequence_weights(row(-15.0, -15.0), torch.ones(1, 2))[0, 0].item() == math.exp(-20)


def test_sequence_mask():
    # Prevents: truncated weights in what is kept; a criterion on the sum.
    inside, outside = [3.0, -3.0, 0.0, 0.001], [0.002, 0.002, 0.004, 0.004]
    delta = torch.tensor([inside, outside], dtype=torch.float64)
    got = sequence_mask(delta, torch.ones(2, 4))
    assert got[0].tolist() == pytest.approx([math.exp(d) for d in inside])
    assert got[1].tolist() == [0.0] * 4


def test_mis_modes_by_hand():
    # Prevents: a mode that bounds where it should reject; weights zeroed where keep should say it.
    delta = row(math.log(0.25), 0.0, math.log(1.5), math.log(4.0))
    expected = {"truncate": [0.25, 1, 1.5, 2], "clip": [0.5, 1, 1.5, 2], "mask": [0.25, 1, 1.5, 4]}
    for mode, weights in expected.items():
        got, keep = mis_weights(delta, ONES, mode=mode)
        assert got.tolist()[0] == pytest.approx(weights)
        assert keep.tolist()[0] == ([False, True, True, False] if mode == "mask" else [True] * 4)


def test_mis_veto_by_hand():
    # Prevents: a veto on the response's ratio, or one that a masked token casts.
    delta = torch.tensor([[-9.3, 9.3], [-9.3, 9.3], [-9.2, 9.2]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [0, 1], [1, 1]])
    weights, keep = mis_weights(delta, mask, level="sequence", veto=1e-4)  # log 1e-4 = -9.21
    assert keep.tolist() == [[False, False], [False, True], [True, True]]
    assert weights[0].tolist() == [1.0, 1.0]  # the veto leaves the weights alone


def test_mis_normalisation_by_hand():
    # Prevents: a mean over padding, or the mean of response means.
    delta = torch.tensor([[LN2, -LN2, 9.0], [0.0, 0.0, -LN2]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    weights, _ = mis_weights(delta, mask, normalize=True)
    mean = (2 + 0.5 + 1 + 1 + 0.5) / 5
    assert weights[0].tolist() == pytest.approx([2 / mean, 0.5 / mean, 1])
    assert weights[mask.bool()].mean().item() == pytest.approx(1)


# --- against the definition, layouts, masks -------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_mis_equals_the_definition(level, mode):
    # Prevents: a slip of vectorising over ragged responses.
    batch = random_batch(1)
    deltas, _, masks = columns(batch)
    weights, keep = mis_weights(
        ragged(deltas),
        ragged(masks),
        offsets=offsets_of(batch),
        level=level,
        mode=mode,
        veto=math.exp(-6.5),
    )
    expected, kept = [], []
    for ratios, (delta, _, mask) in zip(oracle.log_ratios(batch, level), batch, strict=True):
        vetoed = any(d < -6.5 for d, m in zip(delta, mask, strict=True) if m)
        for log_ratio, m in zip(ratios, mask, strict=True):
            r = math.exp(log_ratio)
            bounded = {"truncate": min(r, 2.0), "clip": min(max(r, 0.5), 2.0), "mask": r}[mode]
            expected.append(bounded if m else 1.0)
            kept.append(bool(m) and not vetoed and (mode != "mask" or 0.5 <= r <= 2.0))
    expected = torch.tensor(expected, dtype=torch.float64)
    assert torch.allclose(weights, expected, rtol=1e-12)
    assert keep.tolist() == kept
    assert 0 < sum(kept) < sum(map(sum, masks))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_padded_equals_ragged_and_masked_tokens_have_no_effect(name, dtype):
    # Prevents: weights that depend on padding; 0 * inf from a masked token.
    call, batch = ALL[name], random_batch(12)
    deltas, _, masks = columns(batch)
    delta, mask = ragged(deltas, dtype), ragged(masks, torch.bool)
    clean = call(delta, mask, offsets=offsets_of(batch))
    wide = padded(deltas, NAN, None, dtype), padded(masks, 0, None, torch.bool)
    assert torch.equal(clean, unpadded(call(*wide), batch))
    for garbage in (NAN, INF, -INF):
        dirty = torch.where(mask, delta, garbage)
        assert torch.equal(call(dirty, mask, offsets=offsets_of(batch)), clean)
    if clean.dtype != torch.bool:
        assert clean.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.equal(clean[~mask], torch.ones_like(clean[~mask]))
        assert torch.isfinite(clean).all()


@pytest.mark.parametrize("name", ALL)
def test_edges_of_the_corrections(name):
    # Prevents: 0 / 0 in a fully masked response; failures on nothing; NaN that passes as a weight.
    call = ALL[name]
    for shape in ((0, 5), (3, 0)):
        assert call(torch.zeros(shape), torch.zeros(shape)).shape == shape
    empty = torch.zeros(3, dtype=torch.int64)
    assert call(torch.zeros(0), torch.zeros(0), offsets=empty).shape == (0,)
    masked = call(torch.full((2, 3), NAN), torch.zeros(2, 3))
    assert torch.equal(masked, torch.ones_like(masked) if name != "mis keep" else masked & False)
    if name != "mis keep":
        assert call(row(NAN, 0.0), torch.ones(1, 2))[0, 0].isnan()


def test_weights_carry_no_gradient():
    # Prevents: importance weights that are trained.
    delta = torch.zeros(1, 4, requires_grad=True)
    assert not any(call(delta, ONES).requires_grad for call in ALL.values())


@pytest.mark.parametrize(
    ("call", "settings", "text"),
    [
        (tis_weights, {"cap": 0.0}, "tis_weights: the bounds [0.0, 0.0] are not"),
        (tis_weights, {"floor": 3.0}, "tis_weights: the bounds [3.0, 2.0] are not"),
        (icepop_weights, {"low": -1.0}, "icepop_weights: the bounds [-1.0, 5.0] are not"),
        (sequence_weights, {"cap": -1.0}, "sequence_weights: the bounds [0.0, -1.0] are not"),
        (geometric_weights, {"cap": NAN}, "geometric_weights: the bounds [0.0, nan] are not"),
        (sequence_mask, {"low": 2.0}, "sequence_mask: the bounds [2.0, 1.002] are not"),
        (mis_weights, {"level": "word"}, "level='word'; give 'token', 'sequence' or 'geometric'"),
        (mis_weights, {"mode": "drop"}, "mode='drop'; give 'truncate', 'clip' or 'mask'"),
        (mis_weights, {"low": 3.0}, "mis_weights: the bounds [3.0, 2.0] are not"),
        (mis_weights, {"veto": 0.0}, "veto=0.0 is not above 0 and finite"),
    ],
)
def test_corrections_refuse(call, settings, text):
    # Prevents: bounds in the wrong order, which clamp everything to one value.
    with pytest.raises(ValueError) as caught:
        call(torch.zeros(1, 4), ONES, **settings)
    assert text in str(caught.value)
    with pytest.raises(ValueError, match=r"mask has shape \(2,\) and delta \(1, 4\)"):
        call(torch.zeros(1, 4), torch.ones(2))


# --- the calibrated gate --------------------------------------------------------------------------


def test_calibrated_gate_by_hand():
    # Prevents: the fixed tiers still acting beside the measured ones; strength from the sum of both.
    measured = GateCalibration(
        deep_gap=1.0, mean_reference=0.25, mean_full=1.25, tail_reference=0.25, tail_full=0.75
    )
    config = TriageConfig(gate_width=4, repair_width=4, calibration=measured)
    cases = {  # gaps of a segment: weight
        (-0.25, -0.25, -0.25, -0.25): 1.0,
        (-0.75, -0.75, -0.75, -0.75): 1 - 0.9 * 0.5,
        (-9.0, -9.0, -9.0, -9.0): 0.1,
        (-1.5, -1.5, 1.0, 1.0): 1 - 0.9 * 0.5,  # mean -0.25: strength of the tail share alone
        (-1.0, -1.0, 0.5, 0.5): 1.0,  # -1 itself is not deep
    }
    for gaps, weight in cases.items():
        delta = row(*gaps)
        got = triage_gate(delta, -torch.ones(1, 4), ONES, config=config)
        assert got[delta < 0].tolist() == pytest.approx([weight] * int((delta < 0).sum()))
        assert got[delta >= 0].tolist() == [1.0] * int((delta >= 0).sum())


def test_calibration_by_hand():
    # Prevents: quantiles of another kind, references cut off by different shares, a budget exceeded.
    # 20 segments of one token with gaps -1..-20 (A < 0), and one with A > 0 that only counts for deep_gap.
    delta = torch.tensor([[-float(i)] for i in range(1, 21)] + [[-100.0]])
    advantages = torch.tensor([[-1.0]] * 20 + [[1.0]])
    config = TriageConfig(gate_width=1, repair_width=1)
    got = calibrate_gate(delta, advantages, torch.ones(21, 1), config=config)
    # 21 gaps below 0: ceil(0.99 * 20) = 20, the largest. No segment is deep, so the mean has the whole
    # budget: 1 of 20 segments is 5 %, cut off by the second largest; the 0.999 quantile is the largest.
    assert got == GateCalibration(
        deep_gap=100.0, mean_reference=19.0, mean_full=20.0, tail_reference=0.0, tail_full=0.0
    )
    triggered = triage_gate(
        delta,
        advantages,
        torch.ones(21, 1),
        config=TriageConfig(gate_width=1, repair_width=1, calibration=got),
    )
    assert triggered.flatten().tolist() == [1.0] * 19 + [pytest.approx(0.1)] + [1.0]


@pytest.mark.parametrize("seed", range(3))
def test_calibration_keeps_its_budget_and_uses_it(seed):
    # Prevents: a union of the two features above the budget, or a cut that could have been larger.
    batch = random_batch(seed, lengths=(3000, 2000, 64, 0, 999), mixed=True)
    deltas, advantages, masks = columns(batch)
    tensors = ragged(deltas), ragged(advantages), ragged(masks)
    offsets = offsets_of(batch)
    config = TriageConfig(gate_width=16, repair_width=16)
    got = calibrate_gate(*tensors, offsets=offsets, config=config, max_trigger=0.1)
    features = []
    for delta, advantage, mask in batch:
        for positions in oracle.segments(mask, 16):
            if oracle.mean([advantage[t] for t in positions]) < 0:
                deep = sum(delta[t] < -got.deep_gap for t in positions) / len(positions)
                features.append((-oracle.mean([delta[t] for t in positions]), deep))
    means, tails = (sorted(column) for column in zip(*features, strict=True))
    num = len(features)

    def share(cut):
        first, second = means[num - 1 - cut], tails[num - 1 - cut]
        return sum(m > first or t > second for m, t in features) / num

    cut = max(cut for cut in range(num) if share(cut) <= 0.1 + 1e-12)
    assert got.mean_reference == pytest.approx(means[num - 1 - cut], rel=1e-12)
    assert got.tail_reference == pytest.approx(tails[num - 1 - cut], rel=1e-12)
    assert share(cut + 1) > 0.1
    assert got.mean_full == pytest.approx(means[math.ceil(0.999 * (num - 1))], rel=1e-12)


@pytest.mark.parametrize(
    ("delta", "advantage", "text"),
    [
        (1.0, -1.0, "no valid token has delta < 0"),
        (-1.0, 1.0, "no segment has a mean advantage below 0"),
        (NAN, -1.0, "delta of response 0, token 0, is nan and not masked"),
    ],
)
def test_calibration_refuses(delta, advantage, text):
    # Prevents: thresholds measured on nothing.
    with pytest.raises(ValueError, match=text):
        calibrate_gate(delta * ONES, advantage * ONES, ONES, config=TriageConfig())
    fields = {"deep_gap": 1.0, "mean_reference": 1.0, "mean_full": 1.5}
    fields |= {"tail_reference": 0.0, "tail_full": 0.0}
    with pytest.raises(ValueError, match=r"mean_full=0.5 is below mean_reference=1.0"):
        GateCalibration(**fields | {"mean_full": 0.5})
    with pytest.raises(ValueError, match=r"deep_gap=0.0 is not above 0"):
        GateCalibration(**fields | {"deep_gap": 0.0})


# --- recentring by length -------------------------------------------------------------------------


def test_recentring_by_hand():
    # Prevents: short responses or positive advantages scaled; a group mean that moves.
    # Lengths 1, 2, 4, 16: the 0.5 quantile is the next higher of rank 1.5, which is 4.
    lengths = [1, 2, 4, 16]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.repeat_interleave(
        torch.tensor([-1.0, 2.0, -3.0, -4.0], dtype=torch.float64), torch.tensor(lengths)
    )
    groups = torch.tensor([0, 0, 3, 3])
    got = recenter_lengths(values, torch.ones(23), groups, offsets=offsets, quantile=0.5, floor=0.5)
    scale = (4 / 16) ** 0.25
    shift = (-4 - -4 * scale) / 2
    expected = [-1.0] + [2.0] * 2 + [-3 + shift] * 4 + [-4 * scale + shift] * 16
    assert got.tolist() == pytest.approx(expected, rel=1e-14)
    assert (got[3] + got[7]).item() == pytest.approx(-7, rel=1e-14)
    floored = recenter_lengths(values, torch.ones(23), groups, offsets=offsets, quantile=0.0)
    assert floored[:3].tolist() == [-1.0, 2.0, 2.0]  # of length 1 and positive: nothing scaled
    assert (floored[3] - floored[7]).item() == pytest.approx(
        (1 / 4) ** 0.25 * -3 + 0.7 * 4, rel=1e-14
    )
    unchanged = recenter_lengths(values, torch.ones(23), groups, offsets=offsets, quantile=1.0)
    assert torch.equal(unchanged, values)


def test_recentring_ignores_masks_and_layout():
    # Prevents: lengths that count masked tokens; a fully masked response in the quantile or the mean.
    batch = random_batch(3)
    batch[1] = ([0.0] * 63, [-1.0] * 63, [0] * 63)
    _, advantages, masks = columns(batch)
    groups = torch.tensor([5, 5, 0, 0, 0, 5, 5, 0])
    values, mask = ragged(advantages), ragged(masks, torch.bool)
    offsets = offsets_of(batch)
    got = recenter_lengths(values, mask, groups, offsets=offsets, quantile=0.4)
    dirty = torch.where(mask, values, NAN)
    assert torch.equal(recenter_lengths(dirty, mask, groups, offsets=offsets, quantile=0.4), got)
    wide = recenter_lengths(padded(advantages, INF), padded(masks), groups, quantile=0.4)
    assert torch.equal(unpadded(wide, batch), got)
    assert not torch.count_nonzero(got[~mask])
    assert not torch.equal(got[mask], values[mask])
    for group in (0, 5):
        means = [[], []]
        for i, (begin, end) in enumerate(pairwise(offsets)):
            valid = mask[begin:end]
            if groups[i] == group and valid.any():
                for column, tensor in zip(means, (values, got), strict=True):
                    column.append(tensor[begin:end][valid].mean().item())
        assert sum(means[0]) == pytest.approx(sum(means[1]), rel=1e-12)
    assert recenter_lengths(torch.zeros(0, 3), torch.zeros(0, 3), groups[:0]).shape == (0, 3)


def test_recentring_refuses():
    # Prevents: group ids of another length paired with the wrong responses.
    with pytest.raises(ValueError, match=r"group_ids are torch.int64 \(2,\); give int64 \(1,\)"):
        recenter_lengths(ONES, ONES, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"quantile=1.5 is not from 0 to 1"):
        recenter_lengths(ONES, ONES, torch.zeros(1, dtype=torch.int64), quantile=1.5)


# --- Score Centering ------------------------------------------------------------------------------


def distributions(seed, vocabulary=12, shape=(3,)):
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(*shape, vocabulary, generator=generator).double() * 1.5 for _ in range(2)]
    return draw[0].log_softmax(-1), draw[1].log_softmax(-1)


def weight_of(ratio, weight, low, high):
    """f(r)."""
    if weight == "none":
        return 1.0
    return min(ratio, high) if weight == "tis" else ratio * (low <= ratio <= high)


@pytest.mark.parametrize("weight", ["none", "tis", "mask"])
def test_centering_equals_the_definition(weight):
    # Prevents: tail mass from the wrong side, f of the inverse ratio, a gradient through c.
    p_log, q_log = distributions(0)
    top = q_log.topk(5, dim=-1).indices
    learner = p_log.gather(-1, top).requires_grad_()
    sampler = q_log.gather(-1, top)
    got = score_centering_term(learner, sampler, torch.ones(3), weight=weight, low=0.6, high=1.7)
    for i in range(3):
        p, q = learner[i].exp().tolist(), sampler[i].exp().tolist()
        rho = (1 - sum(q)) / max(1 - sum(p), 1e-6)
        alpha = rho * weight_of(1 / rho, weight, 0.6, 1.7)
        c = [
            qv * weight_of(pv / qv, weight, 0.6, 1.7) - alpha * pv
            for pv, qv in zip(p, q, strict=True)
        ]
        expected = sum(cv * math.log(pv) for cv, pv in zip(c, p, strict=True))
        assert got[i].item() == pytest.approx(expected, rel=1e-12)
        (grad,) = torch.autograd.grad(got[i], learner, retain_graph=True)
        assert grad[i].tolist() == pytest.approx(c, rel=1e-12)


def test_centering_by_hand():
    # Prevents: a formula that only agrees with itself. H = {a, b}: q = (0.5, 0.25), p = (0.25, 0.5).
    learner, sampler = row(0.25, 0.5).log(), row(0.5, 0.25).log()
    got = score_centering_term(learner, sampler, torch.ones(1), weight="none")
    # rho = 0.25 / 0.25 = 1: c = (0.25, -0.25), term = 0.25 ln 0.25 - 0.25 ln 0.5 = -0.25 ln 2
    assert got.item() == pytest.approx(-0.25 * LN2)
    got = score_centering_term(learner, sampler, torch.ones(1), weight="tis", high=1.5)
    # min(p, 1.5 q) = (0.25, 0.375), alpha = min(1, 1.5) = 1: c = (0, -0.125)
    assert got.item() == pytest.approx(0.125 * LN2)


@pytest.mark.parametrize("weight", ["none", "tis", "mask"])
@pytest.mark.parametrize("head", ["all", "proportional tail"])
def test_the_centered_score_has_mean_zero(weight, head):
    # Prevents: a correction that does not remove what it is for: the sampler's mean of the weighted score.
    p_log, q_log = distributions(1, shape=())
    if head == "proportional tail":  # q = rho p outside the head
        scaled = torch.cat([q_log[:5].exp(), 0.3 * p_log[5:].exp()])
        scaled[:5] *= (1 - scaled[5:].sum()) / scaled[:5].sum()
        q_log = scaled.log()
    logits = p_log.clone().requires_grad_()
    p = logits.log_softmax(-1)
    num = 12 if head == "all" else 5
    term = score_centering_term(
        p[:num], q_log[:num], torch.ones(()), weight=weight, low=0.4, high=1.5
    )
    ratio = (p_log - q_log).exp()
    weights = torch.tensor(
        [weight_of(r, weight, 0.4, 1.5) for r in ratio.tolist()], dtype=torch.float64
    )
    score = (q_log.exp() * weights * p).sum()
    (biased,) = torch.autograd.grad(score, logits, retain_graph=True)
    (centered,) = torch.autograd.grad(score - term, logits)
    assert biased.abs().max() > 1e-2
    assert centered.abs().max() < 1e-14


def test_exact_ratios_need_no_correction():
    # Prevents: a correction of what is unbiased.
    p_log, q_log = distributions(2)
    heads = p_log[:, :4], q_log[:, :4], torch.ones(3)
    for weight in ("tis", "mask"):
        got = score_centering_term(*heads, weight=weight, low=0.0, high=1e30)
        assert torch.equal(got, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 7.0])
def test_centering_ignores_masked_tokens_and_missing_heads(garbage):
    # Prevents: 0 * inf; places that fill up a head counted as tokens.
    p_log, q_log = distributions(3)
    learner = torch.cat([p_log[:, :4], torch.full((3, 2), garbage)], -1)
    learner[1] = garbage
    learner.requires_grad_()
    sampler = torch.cat([q_log[:, :4], torch.full((3, 2), -INF)], -1)
    mask = torch.tensor([1, 0, 1])
    got = score_centering_term(learner, sampler, mask)
    expected = score_centering_term(p_log[:, :4], q_log[:, :4], torch.ones(3))
    assert torch.equal(got[[0, 2]], expected[[0, 2]])
    assert got[1] == 0
    got.sum().backward()
    assert not torch.count_nonzero(learner.grad[1])
    assert not torch.count_nonzero(learner.grad[:, 4:])
    assert torch.isfinite(learner.grad).all()


def test_centering_edges():
    # Prevents: 0 * -inf where the learner rules out a head token; failures on nothing.
    learner, sampler, one = row(-INF, -0.5), row(-1.0, -1.0), torch.ones(1)
    assert torch.isfinite(score_centering_term(learner, sampler, one)).all()
    half = score_centering_term(learner.bfloat16(), sampler.bfloat16(), one)
    assert half.dtype == torch.float32
    for shape in ((0, 4), (2, 0)):
        empty = torch.zeros(shape)
        assert score_centering_term(empty, empty, empty.sum(1)).tolist() == [0] * shape[0]
    above_one = row(0.25, 0.25).log(), row(0.6, 0.5).log()  # a head rounded to more than 1: no tail
    over = score_centering_term(*above_one, one, weight="none").item()
    assert over == pytest.approx(1.1 * math.log(0.25))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"sampler_logprobs": torch.zeros(3, 5)}, "sampler_logprobs (3, 5); give both (..., k)"),
        ({"mask": torch.ones(3, 4)}, "mask has shape (3, 4); give a value a token, (3,)"),
        ({"weight": "is"}, "weight='is'; give 'none', 'tis' or 'mask'"),
        ({"high": INF}, "the bounds [0.5, inf] are not 0 <= low <= high, 0 < high < inf"),
    ],
)
def test_centering_refuses(change, text):
    # Prevents: heads of different tokens being paired.
    head = torch.zeros(3, 4)
    arguments = {"learner_logprobs": head, "sampler_logprobs": head, "mask": torch.ones(3)}
    with pytest.raises(ValueError) as caught:
        score_centering_term(**arguments | change)
    assert text in str(caught.value)
