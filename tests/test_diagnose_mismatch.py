"""Statistics of the gap: against published sums, against sums by hand, and on every ragged shape."""

import json
import math
import random
from dataclasses import replace

import diagnose_cases as cases
import pytest
import rl_oracle as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nvfp4.diagnostics import mismatch, mismatch_segments, report
from megatron_nvfp4.diagnostics.mismatch import Gaps, Settings
from megatron_nvfp4.diagnostics.mismatch_segments import Tails, concentration, shuffled, tails
from megatron_nvfp4.diagnostics.readers import Response, join
from megatron_nvfp4.rl import TriageConfig, triage_advantages


def gaps_of(record, **kwargs):
    return Gaps(record, Settings(**kwargs))


# --- published numbers ------------------------------------------------------------------------------

# |A| sums of the published windows (https://github.com/EthanLI24/TRIAGE,
# b31788850663df2fa869ed7af375e96055e1d110, benchmarks/results/characterization): A<0 d<0, A>0 d>0, share of
# the first in all |A|, rho.
PUBLISHED = {
    "4b healthy": (877060.7629571557, 857493.9305729568, 0.2511261063633527, 1.0228186249331523),
    "4b drift": (1929467.8700878322, 1282627.6708336174, 0.289201176725768, 1.5043086267067778),
    "4b pre-terminal": (
        4483254.877340168,
        1933675.0878875852,
        0.36181581964219944,
        2.318515093576467,
    ),
    "30b healthy": (772933.8493082821, 578064.2261703312, 0.23982438885087176, 1.337107218049039),
    "30b terminal": (2284560.749386728, 673722.0723646879, 0.3113392949567607, 3.3909542867850226),
}


@pytest.mark.parametrize("window", PUBLISHED)
def test_rho_of_published_sums(window):
    # Prevents: the inverse ratio, means in place of sums, or a share of the wrong total.
    low, high, share, rho = PUBLISHED[window]
    rest = low / share - low - high
    record = cases.of_gaps(
        ([-1.0, 1.0, -1.0, 1.0], [-low, high, rest / 2, -rest / 2]), ([0.5, -2.0], [0.0, 0.0])
    )
    found = mismatch.regions(gaps_of(record))
    assert found["rho_asym"]["value"] == pytest.approx(rho, rel=1e-12)
    assert found["quadrants"]["A<0 d<0"]["mass"] == pytest.approx(share, rel=1e-12)
    assert found["zero_advantage"]["value"] == pytest.approx(2 / 6)


def test_both_weightings_of_the_published_healthy_window():
    # Prevents: one weighting reported as the other: the published ones lie on two sides of 1.
    low, high = 877060.7629571557, 857493.9305729568
    low_by_response, high_by_response = 601.2560308449974, 919.7450507181139
    lengths = round(low / low_by_response), round(high / high_by_response)
    record = cases.of_gaps(
        *(
            ([sign * 0.1] * n, [sign * mass / n] * n)
            for sign, mass, n in zip((-1, 1), (low, high), lengths, strict=True)
        )
    )
    found = mismatch.regions(gaps_of(record))
    assert found["rho_asym"]["value"] == pytest.approx(1.0228186249331523, rel=1e-9)
    assert found["rho_asym_by_response"]["value"] == pytest.approx(0.6537203221431328, rel=1e-3)


# --- by hand ----------------------------------------------------------------------------------------


def test_gap_by_hand():
    # Prevents: a mean of the wrong thing under the right name.
    record = cases.of_gaps(([0.0, -1.0], [1.0, 1.0]), ([2.0], [-1.0]), ([], []))
    found = mismatch.gap(gaps_of(record))
    assert found["tokens"] == 3
    assert found["mean_abs"]["value"] == 1.0
    assert found["mean_abs_by_response"]["value"] == (0.5 + 2.0) / 2
    assert found["mean"]["value"] == pytest.approx(1 / 3)
    assert found["share_small"]["value"] == pytest.approx(1 / 3)
    assert found["k1"]["value"] == pytest.approx(-1 / 3)
    k3 = (math.exp(-1) - 1 + 1) + (math.exp(2) - 1 - 2)
    assert found["k3"]["value"] == pytest.approx(k3 / 3)
    error = (1 + math.e + math.exp(2)) / 3
    assert found["mult_prob_error"]["value"] == pytest.approx(error)
    assert found["abs"]["p50"]["value"] == 1.0
    assert found["abs"]["max"]["value"] == 2.0
    assert found["delta"]["q05"]["value"] == -1.0


def test_clipping_by_hand():
    # Prevents: bounds of the ratio applied to the log-ratio.
    ratios = [0.79, 0.81, 1.0, 1.27, 1.29, 2.5]
    record = cases.of_gaps(([math.log(r) for r in ratios], [1.0] * 6))
    found = mismatch.clipping(gaps_of(record, tis_cap=2.0))
    assert found["ppo_below"]["value"] == pytest.approx(1 / 6)
    assert found["ppo_above"]["value"] == pytest.approx(2 / 6)
    assert found["tis_above"]["value"] == pytest.approx(1 / 6)
    assert found["tis_mean_weight"]["value"] == pytest.approx((sum(ratios[:5]) + 2) / 6)
    assert found["log_sequence_ratio"]["q50"] == pytest.approx(sum(map(math.log, ratios)))
    assert found["sequence_mask_keeps"]["value"] == 0


def test_regions_by_hand():
    # Prevents: tokens of A = 0 or delta = 0 counted into a quadrant.
    record = cases.of_gaps(
        ([-1.0, 1.0, -1.0, 1.0, 0.0, 1.0], [-2.0, -3.0, 5.0, 7.0, 11.0, 0.0]), ([-1.0], [-4.0])
    )
    found = mismatch.regions(gaps_of(record))
    quadrants = found["quadrants"]
    assert [quadrants[name]["abs_advantage"] for name in mismatch.REGIONS] == [6, 3, 5, 7]
    assert [quadrants[name]["tokens"] for name in mismatch.REGIONS] == [2, 1, 1, 1]
    assert quadrants["A<0 d<0"]["occupancy"] == 2 / 6
    assert quadrants["A<0 d<0"]["mass"] == 6 / 32
    assert found["rho_asym"]["value"] == 6 / 7
    assert found["rho_asym_by_response"]["value"] == pytest.approx((2 / 6 + 4) / (7 / 6))


def test_rho_without_an_upper_side():
    # Prevents: a division by zero where no token of A > 0 lies above.
    found = mismatch.regions(gaps_of(cases.of_gaps(([-1.0], [-1.0]))))
    assert found["rho_asym"]["value"] == math.inf
    diagnosis, _ = report.diagnose(cases.of_gaps(([-1.0], [-1.0])))
    assert diagnosis["regions"]["rho_asym"]["value"] == "inf"


@pytest.mark.parametrize("num", [1, 2, 99, 100, 1000])
def test_quantiles_are_samples(num):
    # Prevents: interpolated tails, which no token has.
    values = torch.randperm(num, dtype=torch.float64) + 1
    for q in (0.0, 0.01, 0.5, 0.99, 0.999, 1.0):
        expected = sorted(values.tolist())[max(math.ceil(q * num) - 1, 0)]
        assert mismatch.quantile(values, q) == expected


# --- intervals --------------------------------------------------------------------------------------


def test_intervals_hold_the_truth():
    # Prevents: intervals over tokens, which are too narrow where the tokens of a response go together.
    misses, narrow = 0, 0
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        levels = 0.1 * torch.randn(30, generator=draw, dtype=torch.float64)
        record = cases.of_gaps(*(([float(x)] * 50, [1.0] * 50) for x in levels))
        found = mismatch.gap(gaps_of(record, seed=seed))["mean"]
        misses += not found["low"] <= 0 <= found["high"]
        narrow += found["high"] - found["low"] < 2 * 1.96 * 0.1 / math.sqrt(30 * 50)
    assert misses <= 8
    assert narrow == 0


def test_tail_intervals_come_from_resampled_responses():
    # Prevents: a tail that one response makes shown as certain.
    record = cases.of_gaps(
        *(([0.01] * 100, [1.0] * 100) for _ in range(20)), ([5.0] * 40, [1.0] * 40)
    )
    found = mismatch.gap(gaps_of(record))["abs"]["p99"]
    assert (found["value"], found["low"], found["high"]) == (5.0, 0.01, 5.0)


def test_the_same_seed_gives_the_same_numbers():
    # Prevents: a diagnosis that cannot be compared with yesterday's.
    first, second = (json.dumps(report.diagnose(cases.record())[0]) for _ in range(2))
    assert first == second
    assert first != json.dumps(report.diagnose(cases.record(), Settings(seed=1))[0])


# --- segments ---------------------------------------------------------------------------------------


def test_concentration_by_hand():
    # Prevents: C_tok of the tokens in place of the tail tokens; pairs across responses in P_adj.
    found = Tails(
        num_valid=torch.tensor([10, 10, 10, 10, 10, 10]),
        num_tail=torch.tensor([4, 2, 1, 0, 5, 0]),
        response=torch.tensor([0, 0, 0, 0, 1, 1]),
        follows=torch.tensor([False, True, True, True, False, True]),
    )
    measured = concentration(found)
    assert measured["r_amp"] == 12 / 60
    assert measured["h_seg"] == 3 / 6  # 4, 2 and 5 of 10 are above a tenth, 1 is not
    assert measured["c_tok"] == 5 / 12  # ceil(5 % of 6) = 1 segment
    # Heavy with a successor: 4 -> 2 (heavy), 2 -> 1, 5 -> 0; successors: 2 1 0 0, one of four is heavy.
    assert measured["p_adj"] == pytest.approx((1 / 3) / (1 / 4))


def test_the_top_share_is_rounded_up():
    # Prevents: C_tok of fewer segments than the published definition takes.
    num = 21
    found = Tails(
        num_valid=torch.full((num,), 10),
        num_tail=torch.tensor([3, 2, *[1] * (num - 2)]),
        response=torch.zeros(num, dtype=torch.int64),
        follows=torch.arange(num) > 0,
    )
    assert concentration(found)["c_tok"] == 5 / 24


def test_a_token_of_positive_advantage_is_no_tail():
    # Prevents: the mean advantage of a segment deciding for its tokens.
    record = cases.of_gaps(([-1.0] * 4, [-1.0, -1.0, -1.0, 1.0]))
    assert tails(gaps_of(record), -0.5, 64).num_tail.tolist() == [3]


def test_tail_tokens_are_counted_in_place():
    # Prevents: masked tokens closed up, so that segments shift; positive advantages counted.
    length = 130
    gaps = [0.0] * length
    gaps[0] = gaps[63] = gaps[64] = gaps[129] = -1.0
    record = cases.of_gaps((gaps, [-1.0] * length), (gaps, [1.0] * length))
    mask = torch.ones(2 * length, dtype=torch.bool)
    mask[1:60] = False
    mask[129] = False
    found = tails(gaps_of(replace(record, mask=mask)), -0.5, 64)
    assert found.num_valid.tolist() == [5, 64, 1]
    assert found.num_tail.tolist() == [2, 1, 0]
    assert found.response.tolist() == [0, 0, 0]


def test_the_shuffle_keeps_what_it_must_and_has_its_mean():
    # Prevents: a null that moves tail tokens between responses, or fills segments beyond their size.
    num_valid = torch.tensor([64, 64, 8, 64, 20])
    num_tail = torch.tensor([30, 0, 8, 0, 5])
    response = torch.tensor([0, 0, 0, 1, 1])
    seen = []

    def watch(found, placed):
        seen.append(placed)
        num = placed.shape[0]
        return torch.zeros(num, dtype=torch.float64), torch.zeros(num, dtype=torch.float64)

    found = Tails(
        num_valid=num_valid,
        num_tail=num_tail,
        response=response,
        follows=torch.tensor([False, True, True, False, True]),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mismatch_segments, "_measure", watch)
        assert shuffled(found, 0)["draws"] == 499
    placed = torch.cat(seen)
    assert (placed[:, :3].sum(1) == 38).all()
    assert (placed[:, 3:].sum(1) == 5).all()
    assert (placed <= num_valid).all()
    expected = torch.tensor([38 * n / 136 for n in (64, 64, 8)] + [5 * n / 84 for n in (64, 20)])
    assert torch.allclose(placed.double().mean(0), expected.double(), atol=0.4)


def test_clusters_exceed_the_shuffle_and_scattered_tails_do_not():
    # Prevents: concentration that long responses make by themselves called clustering.
    draw = torch.Generator().manual_seed(3)
    for clustered in (False, True):
        parts = []
        for _ in range(40):
            gaps = torch.zeros(640)
            if clustered:
                gaps[64 : 64 + 40] = -1.0
            else:
                gaps[torch.randperm(640, generator=draw)[:40]] = -1.0
            parts.append((gaps.tolist(), [-1.0] * 640))
        found = mismatch_segments.segments(gaps_of(cases.of_gaps(*parts), tau_ana=-0.5))
        width = found["widths"]["64"]
        assert (width["c_tok"] > width["shuffled"]["c_tok"]["high"]) == clustered
        assert found["dilution"]["mean_small"] == 0.0 if clustered else True


def test_gate_numbers_are_the_gates_own():
    # Prevents: a second rule of the gate in the report.
    batch = oracle.random_batch(5)
    (delta, advantages, mask), offsets = oracle.as_ragged(batch)
    record = cases.of_gaps(*((d, a) for d, a, _ in batch))
    found = mismatch_segments.gate(gaps_of(replace(record, mask=mask)))
    _, metrics = triage_advantages(
        delta, advantages, mask, offsets=offsets, config=TriageConfig(repair_weight=0.0)
    )
    assert found["gated"] == metrics["num_gated_segments"] > 0
    assert found["gated_tokens"] == metrics["num_gated_tokens"]
    assert found["max_coefficient"] == pytest.approx(float(metrics["max_coefficient"]))
    weights = oracle.gate(batch, TriageConfig())
    assert found["gated_tokens"] == sum(w < 1 for ws in weights for w in ws)


def test_windows_and_tau():
    # Prevents: a threshold measured on the window that it judges.
    record = cases.record(num=64, steps=16)
    found = mismatch_segments.windows(record, 25)
    assert [name for name, _ in found] == ["0..3", "4..7", "8..11", "12..15"]
    assert next(name for name, _ in mismatch_segments.windows(record, 2)) == "2..3"
    healthy = record.select((record.steps < 4).nonzero().flatten())
    gaps = gaps_of(record)
    expected = mismatch.quantile(gaps_of(healthy).delta, 0.05)
    assert mismatch_segments.tau_of(gaps, gaps.settings) == expected
    assert [name for name, _ in mismatch_segments.windows(cases.record(steps=3), 25)] == ["all"]


# --- steps ------------------------------------------------------------------------------------------


def growing(per_step: float, steps: int = 30, tail: float = 0.0):
    draw = torch.Generator().manual_seed(0)
    parts = []
    for step in range(steps):
        gaps = (0.011 + per_step * step) * torch.randn(400, generator=draw, dtype=torch.float64)
        if tail:
            gaps[: step // 3] = tail
        for part in gaps.split(100):
            sampler = -3 * torch.rand(100, generator=draw, dtype=torch.float64) - 1
            parts.append(
                Response(
                    step=step,
                    mask=torch.ones(100, dtype=torch.bool),
                    learner=sampler + part,
                    sampler=sampler,
                    advantages=torch.full((100,), 1.0 if len(parts) % 2 else -1.0),
                )
            )
    return join(parts)


def test_a_gap_that_grows_is_found_with_slope_and_interval():
    # Prevents: a mean over a run in which the gap tripled.
    diagnosis, _ = report.diagnose(growing(0.025 / 30))
    trend = diagnosis["trends"]["mean_abs"]
    slope = 0.025 / 30 * math.sqrt(2 / math.pi)
    assert trend["low"] < slope < trend["high"]
    assert trend["low"] > 0
    assert [each["name"] for each in diagnosis["findings"]] == ["growth"]
    assert "grows" in diagnosis["advice"]


def test_a_gap_that_stays_is_sound():
    # Prevents: a trend found in noise.
    diagnosis, _ = report.diagnose(growing(0.0))
    assert diagnosis["findings"] == []
    assert diagnosis["verdict"] == "sound"
    trend = diagnosis["trends"]["mean_abs"]
    assert trend["low"] < 0 < trend["high"]


def test_the_sign_and_the_tail_are_shown_beside_the_mean():
    # Prevents: a one-sided tail that a mean of |delta| does not show.
    diagnosis, _ = report.diagnose(growing(0.0, tail=-3.0))
    assert diagnosis["trends"]["p99"]["low"] > 0
    assert diagnosis["gap"]["abs"]["p99"]["value"] == pytest.approx(3.0)
    assert diagnosis["gap"]["mean"]["high"] < 0
    assert diagnosis["gap"]["delta"]["q01"]["value"] == pytest.approx(-3.0)


def test_one_outlier_is_told_from_a_bulk_fault():
    # Prevents: one token that breaks a bound on the mean taken for a fault of the numerics, or hidden.
    record = growing(0.0)
    record.delta[17] = math.log(4e5)
    diagnosis, _ = report.diagnose(record)
    assert [each["name"] for each in diagnosis["findings"]] == ["outliers"]
    assert "few tokens" in diagnosis["advice"]
    bulk, _ = report.diagnose(cases.record(noise=0.3))
    assert "bulk" in [each["name"] for each in bulk["findings"]]


def test_an_unbalanced_direction_is_found():
    # Prevents: the precursor of a collapse passed because the gap is small.
    sides = [([-0.02] * n + [0.02] * (100 - n), [a] * 100) for n, a in ((70, -1.0), (60, 1.0))]
    diagnosis, _ = report.diagnose(cases.of_gaps(*(sides * 40)))
    assert diagnosis["regions"]["rho_asym"]["value"] == pytest.approx(70 / 40)
    assert [each["name"] for each in diagnosis["findings"]] == ["direction"]
    flat = [([-0.02] * 50 + [0.02] * 50, advantages) for _, advantages in sides]
    assert report.diagnose(cases.of_gaps(*(flat * 40)))[0]["verdict"] == "sound"


def test_a_ratio_of_two_responses_is_no_direction():
    # Prevents: an alarm from a sample too small to tell.
    record = cases.of_gaps(([-0.02] * 20, [-1.0] * 20), ([0.02] * 10, [1.0] * 10))
    diagnosis, _ = report.diagnose(record)
    assert diagnosis["regions"]["rho_asym"]["value"] == 2.0
    assert diagnosis["findings"] == []


def test_a_jumping_gap_is_no_growth():
    # Prevents: two high steps at the end, of many such, called a trend.
    sizes = [0.01, 0.01, 0.03, 0.03, 0.01, 0.01, 0.01, 0.03]
    steps = {"step": list(range(8)), "mean_abs": sizes}
    assert mismatch.trends(steps, 0)["mean_abs"]["growth"] == pytest.approx(2.0)
    made = [
        replace(x, step=step)
        for step, size in enumerate(sizes)
        for x in cases.responses(num=4, noise=size, seed=step)
    ]
    assert report.diagnose(join(made))[0]["findings"] == []


def test_without_advantages_the_rest_is_measured():
    # Prevents: a dump of log-probs alone refused, or a direction made of zeros.
    diagnosis, _ = report.diagnose(replace(cases.record(), advantages=None))
    assert diagnosis["gap"]["tokens"] > 0
    assert diagnosis["regions"] is None
    assert diagnosis["segments"] is None
    assert "no advantages" in diagnosis["advice"]


# --- every shape ------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 200), max_size=8), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_any_ragged_shape(lengths, seed):
    # Prevents: a crash, NaN in the JSON, or tokens lost at some length.
    draw = random.Random(seed)
    made = []
    for step, length in enumerate(lengths):
        sampler = torch.tensor([-draw.expovariate(1) for _ in range(length)])
        made.append(
            Response(
                step=step // 2,
                mask=torch.tensor([draw.random() < 0.7 for _ in range(length)], dtype=torch.bool),
                learner=sampler + torch.tensor([draw.gauss(0, 2) for _ in range(length)]),
                sampler=sampler,
                advantages=torch.full((length,), draw.choice([-1.0, 0.0, 1.0])),
            )
        )
    diagnosis, _ = report.diagnose(join(made))
    num = sum(int(x.mask.sum()) for x in made)
    assert json.loads(json.dumps(diagnosis, allow_nan=False)) == diagnosis
    if num:
        assert diagnosis["gap"]["tokens"] == num == sum(diagnosis["steps"]["tokens"])
        every = [
            abs(float(z) - float(s))
            for x in made
            for z, s, m in zip(x.learner.double(), x.sampler.double(), x.mask, strict=True)
            if m
        ]
        assert diagnosis["gap"]["mean_abs"]["value"] == pytest.approx(sum(every) / num)
        assert diagnosis["gap"]["abs"]["max"]["value"] == pytest.approx(max(every))
        quadrants = diagnosis["regions"]["quadrants"].values()
        assert sum(part["tokens"] for part in quadrants) <= num
