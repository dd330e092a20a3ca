"""Planted faults: each one that passes for a numeric mismatch is found and named, and nothing else is."""

from dataclasses import replace
from itertools import pairwise

import diagnose_cases as cases
import pytest
import torch

from megatron_nvfp4.diagnostics import checks
from megatron_nvfp4.diagnostics.readers import Response, join
from megatron_nvfp4.diagnostics.report import diagnose


def results(made):
    return {each.name: each for each in checks.check(join(made))}


def failed(made):
    return [name for name, each in results(made).items() if each.status == "failed"]


def shifted(response: Response, by: int) -> Response:
    return replace(response, learner=torch.roll(response.learner, by))


def test_sound_responses_pass_every_check():
    # Prevents: checks that fail on noise, which nobody would read.
    found = results(cases.responses(noise=0.05))
    assert {name: each.status for name, each in found.items()} == {
        "lengths": "passed",
        "log-probs": "passed",
        "advantages": "passed",
        "alignment": "passed",
        "renormalisation": "passed",
        "weight versions": "passed",
    }


@pytest.mark.parametrize(("by", "way"), [(1, "before"), (-1, "behind")])
def test_log_probs_shifted_by_a_token(by, way):
    # Prevents: an off-by-one in a loss taken for a large mismatch.
    found = results([shifted(x, by) for x in cases.responses()])["alignment"]
    assert found.status == "failed"
    assert f"one token {way}" in found.found
    assert found.values["shifted"] == found.values["tested"] == 24


def test_one_shifted_response_is_named():
    # Prevents: a fault of some responses, multi-turn ones say, hidden by the others' correlation.
    made = cases.responses()
    made[5] = shifted(made[5], 1)
    found = results(made)["alignment"]
    assert found.status == "failed"
    assert "1 of 24 responses are shifted" in found.found
    assert "responses [5]" in found.found


def test_a_large_gap_is_no_shift():
    # Prevents: a real mismatch, in which the aligned correlation is low, blamed on the alignment.
    assert "alignment" not in failed(cases.responses(noise=3.0))


def test_responses_in_another_order():
    # Prevents: one side's rows of other responses, by a shuffle or a filter, taken for a numeric mismatch.
    made = cases.responses()
    length = min(response.mask.numel() for response in made)

    def cut(response: Response, learner: torch.Tensor) -> Response:
        columns = ("sampler", "mask", "advantages", "tokens")
        short = {name: getattr(response, name) for name in columns}
        short = {name: x if x is None else x[:length] for name, x in short.items()}
        return replace(response, learner=learner[:length], **short)

    assert "alignment" not in failed([cut(x, x.learner) for x in made])
    rolled = [*made[1:], made[0]]
    found = results([cut(x, y.learner) for x, y in zip(made, rolled, strict=True)])["alignment"]
    assert found.status == "failed"
    assert "responses in another order" in found.found


def test_slowly_varying_log_probs_are_no_shift():
    # Prevents: a shift found where neighbouring tokens are nearly as alike as the two sides are.
    draw = torch.Generator().manual_seed(0)
    made = []
    for _ in range(50):
        slow = -torch.rand(5, generator=draw).repeat_interleave(40) * 3
        noise = 0.3 * torch.randn(2, 200, generator=draw)
        mask = torch.ones(200, dtype=torch.bool)
        made.append(
            Response(step=0, mask=mask, learner=slow + noise[0] - 2, sampler=slow + noise[1] - 2)
        )
    found = results(made)["alignment"]
    assert found.status == "passed"
    assert found.values["lag_+1"] > checks.SHIFT_LEVEL


def test_pairs_stay_within_a_response():
    # Prevents: the last token of a response compared with the first one of the next.
    made = cases.responses(num=3, length=4, steps=1)
    record = join([replace(x, mask=torch.ones_like(x.mask)) for x in made])
    ends = record.offsets.tolist()
    inner = [t for a, b in pairwise(ends) for t in range(a, b - 1)]
    assert checks._pairs(record, record.mask, 1).tolist() == inner
    assert checks._pairs(record, record.mask, -1).tolist() == [t + 1 for t in inner]


@pytest.mark.parametrize("side", ["learner", "sampler"])
def test_missing_log_probs(side):
    # Prevents: gaps made of a column that is not there.
    found = results([replace(x, **{side: None}) for x in cases.responses()])
    assert found["log-probs"].status == "failed"
    assert f"no log-probs of the {side}" in found["log-probs"].found
    assert found["alignment"].status == "not run"
    assert found["renormalisation"].status == "not run"


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite(value):
    # Prevents: one NaN that turns every statistic into NaN, or is counted as a gap of 0.
    made = cases.responses()
    place = int(made[3].mask.nonzero()[0])
    made[3].sampler[place] = value
    found = results(made)["log-probs"]
    assert found.status == "failed"
    assert found.values["sampler_not_finite"] == 1
    diagnosis, _ = diagnose(join(made))
    assert diagnosis["gap"]["tokens"] == sum(int(x.mask.sum()) for x in made) - 1
    assert diagnosis["gap"]["mean_abs"]["value"] < 0.1


def test_masked_values_may_be_anything():
    # Prevents: filler at tool tokens reported as a fault.
    made = cases.responses()
    for x in made:
        x.sampler[~x.mask] = float("nan")
        x.learner[~x.mask] = 7.0
    assert failed(made) == []


def test_positive_log_probs():
    # Prevents: logits or -log p read as log-probabilities.
    made = [replace(x, sampler=-x.sampler) for x in cases.responses()]
    found = results(made)["log-probs"]
    assert found.status == "failed"
    assert "above 0" in found.found


def test_log_probs_that_were_not_recorded():
    # Prevents: a column of zeros taken for a certain sampler.
    made = [replace(x, sampler=torch.zeros_like(x.sampler)) for x in cases.responses()]
    found = results(made)["log-probs"]
    assert found.status == "failed"
    assert "the sampler has 0 at every token" in found.found


def test_equal_columns_are_said_and_sound():
    # Prevents: bit-exact runs called unsound; a copied column passed without a word.
    found = results([replace(x, learner=x.sampler) for x in cases.responses()])["log-probs"]
    assert found.status == "passed"
    assert "every gap is exactly 0" in found.found


def drawn(top_p: float = 1.0, temperature: float = 1.0, noise: float = 0.01) -> list[Response]:
    """Tokens drawn from a random softmax, cut at top_p; the learner's log-probs are of all of it."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for _ in range(20):
        logits = 2 * torch.randn(200, 50, generator=draw, dtype=torch.float64)
        learner = logits.log_softmax(-1)
        sampler = (logits / temperature).log_softmax(-1)
        ordered, order = sampler.exp().sort(-1, descending=True)
        kept = ordered.cumsum(-1) - ordered < top_p
        cut = torch.zeros_like(kept).scatter_(-1, order, kept)
        sampler = sampler.masked_fill(~cut, -torch.inf).log_softmax(-1)
        tokens = torch.multinomial(sampler.exp(), 1, generator=draw)
        z, s = (x.gather(-1, tokens)[:, 0] for x in (learner, sampler))
        z = z + noise * torch.randn(z.shape, generator=draw, dtype=torch.float64)
        mask = torch.ones(200, dtype=torch.bool)
        made.append(Response(step=0, mask=mask, learner=z.clamp_max(0), sampler=s))
    return made


@pytest.mark.parametrize("top_p", [0.7, 0.9, 0.95])
def test_renormalised_log_probs(top_p):
    # Prevents: the bias of top-p sampling, which no correction removes, taken for a numeric gap.
    found = results(drawn(top_p))["renormalisation"]
    assert found.status == "failed"
    assert "top-p, top-k or min-p" in found.found
    assert top_p <= found.values["mean_ratio"] <= top_p + 0.1


@pytest.mark.parametrize("noise", [0.01, 0.3])
def test_the_whole_vocabulary_is_no_renormalisation(noise):
    # Prevents: every gap called renormalised.
    assert results(drawn(1.0, noise=noise))["renormalisation"].status == "passed"


def test_a_negative_tail_is_no_renormalisation():
    # Prevents: a mismatch with a deep tail on one side explained away as top-p.
    made = cases.responses(noise=0.03)
    for x in made:
        x.learner[::20] -= 4.0
    found = results(made)["renormalisation"]
    assert found.values["mean_ratio"] < checks.MASS_BOUND
    assert found.status == "passed"


@pytest.mark.parametrize("temperature", [0.5, 1.6])
def test_a_temperature_on_one_side(temperature):
    # Prevents: log-probs of another distribution taken for a numeric gap.
    found = results(drawn(temperature=temperature))["renormalisation"]
    assert found.status == "failed"
    assert "temperature" in found.found


def test_a_response_of_two_weight_versions():
    # Prevents: gaps that hold a weight update measured as numerics.
    made = cases.responses(steps=3)
    made[2] = replace(made[2], versions=("0", "1"))
    found = results(made)["weight versions"]
    assert found.status == "failed"
    assert found.values == {"known": 24, "mixed_responses": 1, "mixed_steps": 1}
    assert "step 0: 0, 1" in found.found


def test_a_batch_of_two_weight_versions():
    # Prevents: a stale sampler in a batch, each of whose responses is of one version.
    made = cases.responses(steps=3)
    made[2] = replace(made[2], versions=("9",))
    found = results(made)["weight versions"]
    assert found.status == "failed"
    assert found.values["mixed_responses"] == 0


def test_unknown_versions_are_not_run():
    # Prevents: "passed" for what nobody could look at.
    made = [replace(x, versions=()) for x in cases.responses()]
    assert results(made)["weight versions"].status == "not run"


@pytest.mark.parametrize("lengths", [[], [0, 0], [3, 0]])
def test_nothing_to_measure(lengths):
    # Prevents: a crash, or "sound", where there is no token.
    made = [
        Response(
            step=0,
            mask=torch.zeros(length, dtype=torch.bool),
            learner=torch.zeros(length),
            sampler=torch.zeros(length),
            advantages=torch.zeros(length),
        )
        for length in lengths
    ]
    assert failed(made) == ["lengths"]
    diagnosis, gaps = diagnose(join(made))
    assert gaps is None
    assert diagnosis["verdict"] == "unsound"
    assert "Nothing can be measured" in diagnosis["advice"]
