"""TRIAGE against its definition token by token, and what can be proved of it."""

import math
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import rl_oracle as oracle
import torch
from rl_cases import FORMS, INF, NAN, REPORTED, form, gate_of
from rl_oracle import as_ragged, columns, one_segment, ragged, random_batch

from megatron_nvfp4.rl import (
    TriageConfig,
    triage_advantages,
    triage_gate,
    triage_repair_loss,
)

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    torch.manual_seed(0)


# --- the gate by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gap", "weight"),
    [
        (-0.25, 1.0),
        (-0.5, 1.0),
        (-0.5 - 2**-20, 0.3),
        (-1.5, 0.3),
        (-1.5 - 2**-20, 0.1),
        (-5.0, 0.1),
    ],
)
def test_tier_of_the_mean(gap, weight):
    # Prevents: boundaries that belong to the wrong tier; both are strict from above.
    for dtype in (torch.float32, torch.float64):
        weights = gate_of(one_segment(gap), dtype=dtype)
        assert torch.equal(weights, torch.full((64,), weight, dtype=dtype))


def test_bfloat16_gaps_use_the_same_boundaries():
    # Prevents: means taken in bfloat16, where 64 gaps of -0.5 and one of -0.502 are the same.
    delta = torch.full((1, 64), -0.5, dtype=torch.bfloat16)
    advantages, mask = -torch.ones_like(delta), torch.ones(1, 64)
    assert torch.equal(triage_gate(delta, advantages, mask, config=REPORTED), torch.ones(1, 64))
    delta[0, 5] = -0.50390625
    weights = triage_gate(delta, advantages, mask, config=REPORTED)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, torch.full((1, 64), 0.3))


@pytest.mark.parametrize(
    ("deep", "weight"),
    [
        ([-6.0, -6.0, -6.0], 1.0),
        ([-6.0, math.nextafter(-6.0, -7)], 0.55),
        ([-9.0], 0.55),
        ([-9.0, -9.0], 0.1),
        ([-9.0, -9.0, -9.0], 0.1),
    ],
)
def test_tail_rule(deep, weight):
    # Prevents: -6 itself counted; more than the full count weakening further.
    weights = gate_of(one_segment(-0.45, deep))
    negative = ragged(columns(one_segment(-0.45, deep))[0]) < 0
    assert torch.allclose(weights[negative], torch.tensor(weight, dtype=torch.float64), atol=1e-15)


def test_the_smaller_of_tier_and_tail_wins():
    # Prevents: a product of the two, or the tail alone.
    assert gate_of(one_segment(-1.0, [-9.0]))[0] == 0.3  # tier 0.3, tail 0.55
    assert gate_of(one_segment(-1.0, [-9.0, -9.0]))[0] == pytest.approx(0.1, abs=1e-15)


@pytest.mark.parametrize("advantage", [0.0, -0.0, 1.0])
def test_only_negative_advantage_is_gated(advantage):
    # Prevents: A = 0 segments treated as negative; positive ones weakened.
    assert torch.equal(
        gate_of(one_segment(-9.0, advantage=advantage)), torch.ones(64, dtype=torch.float64)
    )


def test_only_tokens_below_zero_are_weakened():
    # Prevents: the contracting tokens of a risky segment being gated too; delta = 0 among them.
    delta = [0.0, -0.0, 1.0, 2.0, *[-9.0] * 60]
    weights = gate_of([(delta, [-1.0] * 64, [1] * 64)])
    assert weights[:4].tolist() == [1.0] * 4
    assert weights[4:].unique().numel() == 1
    assert weights[4] < 0.11


def test_masked_tokens_keep_their_position():
    # Prevents: segments cut after masked tokens were removed, which moves every later boundary.
    delta = [-9.0] * 64 + [-0.1] * 64
    mask = [0] * 63 + [1] + [1] * 64
    weights = gate_of([(delta, [-1.0] * 128, mask)])
    assert weights[:63].tolist() == [1.0] * 63  # masked: nothing to weigh
    assert weights[63] == 0.1  # its segment has one valid token, with a mean of -9
    assert weights[64:].tolist() == [1.0] * 64  # reindexing would put 63 of them beside it


def test_no_segment_crosses_responses():
    # Prevents: the tail of one response and the head of the next averaged together.
    bad, good = ([-9.0] * 3, [-1.0] * 3, [1] * 3), ([-0.1] * 3, [-1.0] * 3, [1] * 3)
    weights = gate_of([bad, good, bad])
    assert weights.tolist() == pytest.approx([0.1] * 3 + [1.0] * 3 + [0.1] * 3, abs=1e-15)


def test_the_documented_example_prints_what_it_says():
    # Prevents: a document that the code has left behind.
    text = (ROOT / "docs" / "rl.md").read_text()
    code, printed = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL).groups()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (printed, "")


def test_the_documented_example_by_hand():
    # Prevents: an example whose output nobody has derived. Two responses of 4 tokens, width 2.
    config = TriageConfig(gate_width=2, repair_width=2)
    delta = torch.tensor([[-2.0, -2.0, -0.25, 0.5], [-0.5, -0.25, 0.0, 0.0]], dtype=torch.float64)
    advantages = torch.tensor([[-1.0] * 4, [1.0] * 4], dtype=torch.float64)
    mask = torch.ones(2, 4)
    weights = triage_gate(delta, advantages, mask, config=config)
    assert weights.tolist() == [[0.1, 0.1, 1.0, 1.0], [1.0] * 4]
    result, metrics = triage_advantages(delta, advantages, mask, config=config)
    factor = 4 / 2.2
    assert result[0].tolist() == pytest.approx([-0.1 * factor] * 2 + [-factor] * 2, rel=1e-15)
    q = 0.375 - 0.03
    slope = q / math.sqrt(1 + (q / 0.022360679775) ** 2)
    push = 0.015 * slope * 2 * 4 / (4 * 2)
    assert result[1].tolist() == pytest.approx([1 + push] * 2 + [1.0] * 2, rel=1e-15)
    assert push == pytest.approx(3.347e-4, rel=1e-3)
    assert metrics["num_gated_tokens"] == 2
    assert metrics["num_low_segments"] == 1


# --- against the definition token by token --------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mixed", [False, True])
def test_gate_equals_the_definition(seed, mixed):
    # Prevents: any slip of vectorising: ragged ends, empty responses, mixed signs within a response.
    batch = random_batch(seed, mixed=mixed)
    expected = ragged(oracle.gate(batch, REPORTED))
    assert torch.equal(gate_of(batch), expected)
    assert len(expected.unique()) >= 3  # the batch reaches several tiers
    assert torch.allclose(gate_of(batch, dtype=torch.float32), expected.float(), rtol=1e-6)


@pytest.mark.parametrize("width", [1, 3, 100, 256, 300])
def test_any_width(width):
    # Prevents: sums for powers of two only; counts of more than 255 tokens that wrap around.
    config = TriageConfig(gate_width=width, repair_width=2 * width, tail_count=260)
    batch = [([-7.0] * 300 + [-0.1] * 300, [-1.0] * 600, [1] * 600), *random_batch(1)]
    (delta, advantages, mask), offsets = as_ragged(batch)
    expected = ragged(oracle.gate(batch, config))
    assert torch.allclose(gate_of(batch, config), expected, rtol=1e-14)
    got, _ = triage_advantages(delta, advantages, mask, offsets=offsets, config=config)
    ones = [[1.0] * len(m) for m in columns(batch)[2]]
    assert torch.allclose(got, ragged(oracle.advantages(batch, config, ones)), rtol=1e-12)


@pytest.mark.parametrize(("norm", "repair_norm"), FORMS)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("with_tis", [False, True])
def test_advantages_equal_the_definition(norm, repair_norm, mixed, with_tis):
    # Prevents: a normalisation over the wrong tokens; a TIS weight that is not divided out.
    config = form(norm, repair_norm, repair_weight=15.0)  # visible beside the advantages
    batch = random_batch(7, mixed=mixed)
    (delta, advantages, mask), offsets = as_ragged(batch)
    tis = [[min(math.exp(d), 2.0) if with_tis else 1.0 for d in ds] for ds in columns(batch)[0]]
    got, metrics = triage_advantages(
        delta,
        advantages,
        mask,
        offsets=offsets,
        config=config,
        tis_weights=ragged(tis) if with_tis else None,
    )
    expected = ragged(oracle.advantages(batch, config, tis))
    assert torch.allclose(got, expected, rtol=1e-13, atol=1e-13)
    assert metrics["num_low_segments"] > 0
    assert metrics["num_gated_segments"] > 0
    flat = ragged(oracle.coefficients(batch, config))[mask]
    assert metrics["max_coefficient"] == pytest.approx(flat.max().item(), rel=1e-14)
    assert metrics["weight_sum"] == pytest.approx(
        ragged(oracle.gate(batch, config))[mask].sum().item(), rel=1e-14
    )


@pytest.mark.parametrize(("norm", "repair_norm"), FORMS)
def test_repair_loss_and_gradient_equal_the_definition(norm, repair_norm):
    # Prevents: a penalty or a divisor that differs from the text; gradients through what is detached.
    config = form(norm, repair_norm)
    batch = random_batch(3)
    (delta, advantages, mask), offsets = as_ragged(batch)
    naive = delta.clone().requires_grad_()
    tokens = iter(naive)
    scalars = [([next(tokens) for _ in ds], a, m) for ds, a, m in batch]
    expected = oracle.repair_loss(scalars, config)
    expected.backward()
    sampler = torch.randn_like(delta).requires_grad_()
    learner = (sampler.detach() + delta).requires_grad_()
    advantages.requires_grad_()
    loss = triage_repair_loss(
        learner, sampler, advantages, mask, offsets=offsets, config=config, step=0
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(learner.grad, naive.grad, rtol=1e-9, atol=1e-18)
    assert (learner.grad < 0).any()
    assert sampler.grad is None
    assert advantages.grad is None


# --- what can be proved ---------------------------------------------------------------------------


def test_without_a_trigger_nothing_changes():
    # Prevents: a renormalisation that rounds where there is nothing to renormalise.
    delta = torch.rand(4, 200) * 0.02
    advantages = torch.randn(4, 1).expand(4, 200)
    mask = torch.rand(4, 200) < 0.7
    for norm in ("response", "token"):
        config = TriageConfig(norm=norm)
        got, metrics = triage_advantages(delta, advantages, mask, config=config)
        assert torch.equal(got[mask], advantages[mask])
        assert metrics["max_coefficient"] == 1
        assert metrics["num_gated_segments"] == 0
        assert metrics["repair_push"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_properties_of_the_response_form(seed):
    # Prevents: a gate that loses mass, touches A >= 0, or strengthens the tokens it weakens most.
    batch = random_batch(seed)
    (delta, advantages, mask), offsets = as_ragged(batch)
    weights = gate_of(batch)
    config = TriageConfig(repair_weight=0.0)
    got, _ = triage_advantages(delta, advantages, mask, offsets=offsets, config=config)
    for begin, end in pairwise(offsets):
        part = slice(begin, end)
        valid, own = mask[part], weights[part]
        if not valid.any():
            continue
        alpha = got[part][valid] / advantages[part][valid]
        assert alpha.sum().item() == pytest.approx(valid.sum().item(), rel=1e-13)
        lowest = own[valid] == own[valid].min()
        assert (alpha[lowest] <= 1 + 1e-15).all()
        if advantages[begin] >= 0:
            assert torch.equal(got[part][valid], advantages[part][valid])


def test_mass_is_conserved_in_the_token_form():
    # Prevents: a token form that renormalises by response.
    batch = random_batch(8)
    (delta, advantages, mask), offsets = as_ragged(batch)
    config = TriageConfig(norm="token", repair_weight=0.0)
    got, _ = triage_advantages(delta, advantages, mask, offsets=offsets, config=config)
    alpha = (got / advantages)[mask]
    assert alpha.sum().item() == pytest.approx(mask.sum().item(), rel=1e-13)
    assert alpha.max() > 1  # untouched tokens of the whole update take the mass


@pytest.mark.parametrize(("norm", "repair_norm"), FORMS)
@pytest.mark.parametrize("with_tis", [False, True])
def test_the_transform_has_the_gradient_of_the_loss(norm, repair_norm, with_tis):
    # Prevents: transformed advantages that train something else than gate and repair do together.
    config = form(norm, repair_norm, repair_weight=1.5)
    batch = random_batch(21, lengths=(130, 65, 1, 0, 64, 200))
    (delta, advantages, mask), offsets = as_ragged(batch)
    deltas, _, masks = columns(batch)
    tis = [[min(math.exp(d), 2.0) if with_tis else 1.0 for d in ds] for ds in deltas]

    def loss(advantage, weights, repair):
        live = torch.zeros_like(delta).requires_grad_()
        tokens, values = iter(live), iter(advantage)
        losses = [
            [oracle.token_loss(next(tokens), 0.0, float(next(values)), w) for w in ws] for ws in tis
        ]
        total = oracle.weighted_mean(losses, weights, batch, config.norm)
        if repair:  # z = 0 and s = -delta
            total = total + triage_repair_loss(
                live, -delta, advantages, mask, offsets=offsets, config=config, step=0
            )
        total.backward()
        return live.grad

    direct = loss(advantages, oracle.gate(batch, config), repair=True)
    transformed, _ = triage_advantages(
        delta,
        advantages,
        mask,
        offsets=offsets,
        config=config,
        tis_weights=ragged(tis) if with_tis else None,
    )
    through = loss(transformed, [[1.0] * len(m) for m in masks], repair=False)
    difference = (direct - through).norm() / direct.norm()
    assert difference < 1e-15
    plain = loss(advantages, [[1.0] * len(m) for m in masks], repair=False)
    assert (direct - plain).norm() / direct.norm() > 1e-3  # TRIAGE did something


def test_the_gate_part_is_exact_at_any_ratio():
    # Prevents: a claim that holds at ratio 1 only. PPO-clip is homogeneous in A, clipped or not.
    config = TriageConfig(repair_weight=0.0)
    batch = random_batch(9, lengths=(70, 64, 10))
    (delta, advantages, mask), offsets = as_ragged(batch)
    transformed, _ = triage_advantages(delta, advantages, mask, offsets=offsets, config=config)
    shift = torch.randn_like(delta) * 0.5
    grads = []
    for advantage, weights in (
        (advantages, oracle.gate(batch, config)),
        (transformed, [[1.0] * len(m) for m in columns(batch)[2]]),
    ):
        live = shift.clone().requires_grad_()
        tokens, values = iter(live), iter(advantage)
        losses = [
            [oracle.token_loss(next(tokens), 0.0, float(next(values)), 1.0) for _ in ws]
            for ws in weights
        ]
        oracle.weighted_mean(losses, weights, batch, "response").backward()
        grads.append(live.grad)
    assert torch.allclose(*grads, rtol=1e-13, atol=1e-18)
    assert (grads[0][mask] == 0).any()  # some tokens are clipped


# --- repair ---------------------------------------------------------------------------------------


def test_repair_by_hand():
    # Prevents: S counting active segments only, or n_R counting masked tokens.
    # Three segments of 128: mean gaps -0.05 with A > 0, 0 with A > 0, and -1 with A < 0; S = 3.
    learner = torch.zeros(1, 384, dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor([[0.05] * 128 + [0.0] * 128 + [1.0] * 128], dtype=torch.float64)
    advantages = torch.tensor([[1.0] * 256 + [-1.0] * 128], dtype=torch.float64)
    mask = torch.ones(1, 384)
    mask[0, :28] = 0
    loss = triage_repair_loss(learner, sampler, advantages, mask, config=REPORTED, step=0)
    u = 0.02 / 0.022360679775
    assert loss.item() == pytest.approx(
        0.015 / 3 * 0.022360679775**2 * (math.sqrt(1 + u * u) - 1), rel=1e-12
    )
    loss.backward()
    each = -0.015 / 3 * 0.02 / math.sqrt(1 + u * u) / 100
    assert learner.grad[0, :28].tolist() == [0.0] * 28
    assert learner.grad[0, 28:128].tolist() == pytest.approx([each] * 100, rel=1e-12)
    assert not learner.grad[0, 128:].any()


@pytest.mark.parametrize("gap", [-0.03, -0.02, 0.0, 5.0])
def test_nothing_is_repaired_above_the_boundary(gap):
    # Prevents: a boundary that repairs itself; positive gaps pulled down.
    learner = torch.full((1, 128), gap, dtype=torch.float64, requires_grad=True)
    loss = triage_repair_loss(
        learner,
        torch.zeros(1, 128),
        torch.ones(1, 128),
        torch.ones(1, 128),
        config=REPORTED,
        step=0,
    )
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-30)
    assert learner.grad.abs().max() < 1e-15


@pytest.mark.parametrize("advantage", [0.0, -1.0])
def test_only_positive_advantage_is_repaired(advantage):
    # Prevents: A = 0 segments pulled up, or negative ones against their own gradient.
    learner = torch.full((1, 64), -0.4, requires_grad=True)
    advantages, ones = torch.full((1, 64), advantage), torch.ones(1, 64)
    loss = triage_repair_loss(
        learner, torch.zeros(1, 64), advantages, ones, config=REPORTED, step=0
    )
    loss.backward()
    assert loss == 0
    assert not learner.grad.any()
    got, _ = triage_advantages(learner, advantages, ones, config=REPORTED)
    assert torch.equal(got, advantages)


def test_the_push_is_bounded_and_equal_within_a_segment():
    # Prevents: an unbounded pull by one -Inf; coefficients that differ by token.
    learner = torch.randn(4, 300, dtype=torch.float64) - 1
    learner[0, 3] = -INF
    learner.requires_grad_()
    mask = torch.rand(4, 300) < 0.8
    mask[0, 3] = True
    advantages = torch.ones(4, 300, dtype=torch.float64)
    loss = triage_repair_loss(
        learner, torch.zeros(4, 300), advantages, mask, config=REPORTED, step=0
    )
    loss.backward()
    assert loss == INF
    psi = -learner.grad
    for i in range(4):
        for begin in range(0, 300, 128):
            valid = mask[i, begin : begin + 128]
            values = psi[i, begin : begin + 128][valid]
            assert values.unique().numel() == 1
            assert 0 <= values[0] <= 0.015 * 0.022360679775 / (12 * int(valid.sum())) * (1 + 1e-12)
    got, _ = triage_advantages(learner, advantages, mask, config=REPORTED)
    assert torch.isfinite(got).all()


@pytest.mark.parametrize(("step", "active"), [(0, False), (299, False), (300, True), (301, True)])
def test_the_schedule_is_inclusive(step, active):
    # Prevents: repair one update late; a loss without a graph before it starts.
    config = TriageConfig(repair_start=300)
    learner = torch.full((1, 128), -1.0, requires_grad=True)
    ones = torch.ones(1, 128)
    loss = triage_repair_loss(learner, torch.zeros(1, 128), ones, ones, config=config, step=step)
    loss.backward()
    assert bool(loss) is active
    assert bool(learner.grad.any()) is active
    got, metrics = triage_advantages(learner, ones, ones, config=config, step=step)
    assert (got != 1).all().item() is active
    assert bool(metrics["repair_push"]) is active
    with pytest.raises(
        ValueError, match=r"repair_start=300 needs the number of the update; give step"
    ):
        triage_advantages(learner, ones, ones, config=config)


def test_a_push_that_no_advantage_can_carry_is_counted():
    # Prevents: a division by a TIS weight of 0 that makes the advantage infinite.
    delta = torch.full((1, 128), -1.0)
    ones, tis = torch.ones(1, 128), torch.ones(1, 128)
    tis[0, :5] = 0
    mask = torch.ones(1, 128)
    mask[0, 4] = 0
    got, metrics = triage_advantages(delta, ones, mask, config=REPORTED, tis_weights=tis)
    assert torch.equal(got[0, :4], torch.ones(4))
    assert got[0, 4] == 0
    assert (got[0, 5:] > 1).all()
    assert metrics["num_repair_lost"] == 4
    _, metrics = triage_advantages(delta, -ones, mask, config=REPORTED, tis_weights=tis)
    assert metrics["num_repair_lost"] == 0  # nothing was to be pushed


def test_nan_at_a_valid_token_is_not_hidden():
    # Prevents: a segment that passes as healthy because comparisons with NaN are false.
    delta = torch.zeros(2, 64)
    delta[0, 3] = NAN
    delta[0, 5] = -0.1
    ones = torch.ones(2, 64)
    weights = triage_gate(delta, -ones, ones, config=REPORTED)
    assert weights[0, 5].isnan()
    assert torch.equal(weights[1], torch.ones(64))
    got, _ = triage_advantages(delta, -ones, ones, config=REPORTED)
    assert got[0].isnan().all()
    assert torch.equal(got[1], -torch.ones(64))
    live, mask = delta.clone().requires_grad_(), ones.clone()
    mask[0, 7] = 0
    loss = triage_repair_loss(live, 0 * ones, ones, mask, config=REPORTED, step=0)
    loss.backward()
    assert loss.isnan()
    assert live.grad[0, :7].isnan().all()
    assert live.grad[0, 7] == 0
    for tis in (None, ones):
        got, _ = triage_advantages(delta, ones, ones, config=REPORTED, tis_weights=tis)
        assert got[0].isnan().all()
        assert torch.equal(got[1], ones[1])


def test_minus_infinity_at_a_valid_token_is_a_deep_gap():
    # Prevents: NaN weights where the learner rules out a sampled token.
    delta = torch.zeros(1, 64)
    delta[0, 3] = -INF
    weights = triage_gate(delta, -torch.ones(1, 64), torch.ones(1, 64), config=REPORTED)
    assert weights[0, 3] == pytest.approx(0.1)
    assert weights[0, 4] == 1
