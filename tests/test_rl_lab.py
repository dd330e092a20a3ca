"""The mismatch laboratory: task and sampler, statistics and sentences, and the audit of one update."""

import json
import math
import multiprocessing
import operator
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import rl_lab  # noqa: E402
import rl_lab_audit as audit  # noqa: E402
import rl_lab_grpo as grpo  # noqa: E402
import rl_lab_policy as lab  # noqa: E402
import rl_lab_report as report  # noqa: E402

from megatron_nvfp4.rl import TriageConfig  # noqa: E402

SIZE = replace(audit.SIZE, prompts=8, group=8, updates=2)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(kept)


@pytest.fixture(scope="module")
def result():
    return audit.audit()


@pytest.fixture(scope="module")
def start() -> grpo.Learner:
    """A policy whose digits are still guesses, so that its answers have all lengths."""
    learner = grpo.Learner(SIZE, "bf16", "cpu", SIZE.supervised_lr)
    learner.policy.initialize(3)
    learner.load(learner.parameters)
    generator = grpo.generator_of("cpu", 3)
    for _ in range(25):
        prompts, answers = lab.problems(SIZE, 32, generator)
        logp = lab.response_logprobs(learner.policy, prompts, answers)
        valid = lab.valid_tokens(answers)
        learner.step(-torch.where(valid, logp, 0).sum() / valid.sum())
    return learner


def _policy(recipe: str, start: grpo.Learner) -> lab.Policy:
    policy = lab.Policy(SIZE, lab.quantized_linears(recipe, "cpu"), torch.bfloat16, "cpu")
    policy.copy_from(start.policy)
    return policy


# --- audit ----------------------------------------------------------------------------------------


def test_the_smooth_learner_keeps_its_prediction(result):
    # Prevents: an audit whose gradient, update or energy belongs to something else.
    assert len(result["smooth"]) == 6
    for row in result["smooth"]:
        assert row["faults"] == [], row
        assert row["whole"] * row["predicted"] > 0
        assert abs(row["whole"] / row["predicted"] - 1) <= row["tolerance"] < 0.25
    gated = {(row["method"], row["rule"]): row for row in result["smooth"]}
    for rule in ("sgd", "adam"):
        plain, gate, scaled = (gated[method, rule] for method in audit.METHODS)
        # Prevents: a gate that reaches nothing here, so that the comparison says nothing.
        assert 0 == plain["gated_tokens"] < gate["gated_tokens"] < scaled["gated_tokens"]
        # Not a theorem; on this batch the gate weakens the growth, in prediction and outcome alike.
        assert plain["predicted"] > gate["predicted"] > scaled["predicted"]
        assert plain["whole"] > gate["whole"] > scaled["whole"]


def test_the_audit_is_the_same_to_the_bit_in_another_process(result, tmp_path):
    # Prevents: figures of one run that the next cannot confirm.
    command = [sys.executable, str(EXAMPLES / "rl_lab.py"), "--audit", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "audit.json").read_text()) == json.loads(json.dumps(result))
    assert "| sgd | gate |" in done.stdout
    assert "FAULT" not in done.stdout


@pytest.mark.parametrize("wrong", ["sign", "scale", "step"])
def test_a_wrong_prediction_is_a_fault(result, wrong):
    # Prevents: bounds so wide, or so bound to the prediction, that nothing can violate them.
    row = next(row for row in result["smooth"] if row["method"] == "none")
    change = audit.Change(**{name: row[name] for name in audit.Change._fields})
    assert not change.faults()
    if wrong == "sign":
        assert len(change._replace(predicted=-change.predicted).faults()) == 2
    elif wrong == "scale":  # 0.1 %, a fraction of the curvature
        assert change._replace(predicted=change.predicted * 1.001).faults()
    else:  # so large that the second order is the first's size
        curved = change._replace(whole=change.whole + change.odd, back=change.back + change.odd)
        assert any("not small" in fault for fault in curved.faults())


def test_the_gradient_of_another_energy_is_a_fault(start):
    # Prevents: a check of the arithmetic of Change alone, which a wrong gradient would pass.
    batch = audit.roll_out(start.policy, 0)
    exact = lab.Policy(audit.SIZE, lab.exact_linears(torch.float64), torch.float64, "cpu")
    exact.copy_from(start.policy)
    grads, _ = audit.policy_gradient(exact, batch, None)
    update = audit.scaled(exact, grads)
    kept = [parameter.clone() for parameter in exact.parameters()]
    right = audit.energy_gradient(exact, batch)
    assert audit.change_of_energy(exact, batch, right, update).faults() == []
    assert all(map(torch.equal, kept, exact.parameters()))
    wrong = audit.gradients(exact, lambda: audit.gap(exact, batch).sum())
    assert audit.change_of_energy(exact, batch, wrong, update).faults()


# --- task and sampler -----------------------------------------------------------------------------


def test_problems_follow_the_rule_and_rewards_count_to_the_first_mistake():
    # Prevents: answers that cannot be derived from the prompt; credit for what follows a mistake.
    prompts, answers = lab.problems(SIZE, 200, grpo.generator_of("cpu", 1))
    for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True):
        num = (prompt[0] - lab.FIRST_COUNT + SIZE.lines[0]) * SIZE.digits
        line = prompt[1:]
        for _ in range(num):
            line.append((line[-1] + line[-SIZE.digits]) % 10)
        padding = [lab.PAD] * (SIZE.response_length - num - 1)
        assert answer == [*line[SIZE.digits :], lab.STOP, *padding]
    assert {int(prompt) for prompt in prompts[:, 0]} == set(
        range(lab.FIRST_COUNT, lab.FIRST_COUNT + 6)
    )
    answer = torch.tensor([[1, 2, 3, lab.STOP, lab.PAD]])
    for response, reward in (
        ([1, 2, 3, lab.STOP, lab.PAD], 1.0),
        ([1, 9, 3, lab.STOP, lab.PAD], 0.25),
        ([1, 2, 3, 4, 5], 0.75),
        ([1, 2, lab.STOP, lab.PAD, lab.PAD], 0.5),
        ([lab.STOP, lab.PAD, lab.PAD, lab.PAD, lab.PAD], 0.0),
    ):
        assert lab.rewards(torch.tensor([response]), answer).tolist() == [reward]


@pytest.mark.parametrize("recipe", ["bf16", rl_lab.PER_TOKEN])
def test_sampler_and_learner_of_one_recipe_agree(start, recipe):
    # Prevents: a cache, a position or a shifted token that looks like mismatch of the numerics.
    generator = grpo.generator_of("cpu", 2)
    prompts, _ = lab.problems(SIZE, 48, generator)
    sampler = lab.Sampler(SIZE, lab.quantized_linears(recipe, "cpu"), 48, "cpu")
    sampler.policy.copy_from(start.policy)
    responses, sampled = sampler(prompts, generator)
    valid = lab.valid_tokens(responses)
    assert 0 < valid.sum() < valid.numel()
    gaps = []
    for learner in (recipe, "nvfp4_per_tensor"):
        with torch.no_grad():
            logp = lab.response_logprobs(_policy(learner, start), prompts, responses)
        gaps.append(float((logp - sampled)[valid].abs().mean()))
    # Logits lie between 2 and 4, where half a step of BF16 is 2^-8; means stay below that.
    assert gaps[0] < 2**-8
    assert gaps[1] > 3 * gaps[0]
    # The next update's weights are what the next rollout samples with.
    with torch.no_grad():
        sampler.policy.head.mul_(2)
    again = sampler(prompts, grpo.generator_of("cpu", 2))[1]
    assert not torch.equal(again[:, 0], sampled[:, 0])


def test_padding_is_zero_in_every_linear_layer(start):
    # Prevents: a tensor's amax set by rows behind the stop, which no engine would compute.
    policy, seen = _policy("nvfp4_per_tensor", start), []
    prompts, answers = lab.problems(SIZE, 8, grpo.generator_of("cpu", 4))
    keep = torch.cat([torch.ones_like(prompts).bool(), lab.valid_tokens(answers)[:, 1:]], dim=1)
    for block in policy.blocks:
        for layer in (block.qkv, block.out, block.gate_up, block.down):
            layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    lab.response_logprobs(policy, prompts, answers)
    assert len(seen) == 4 * SIZE.layers
    assert not keep.all()
    for x in seen:
        assert not x[~keep].any()
        assert x[keep].any(dim=1).all()


# --- statistics -----------------------------------------------------------------------------------


def test_mismatch_of_a_hand_worked_batch():
    # Prevents: masked tokens in a mean; one weighting reported as the other; tiers counted twice.
    delta = torch.tensor([[-2.0, -1.0, -7.0, 1.0], [0.5, -0.5, 0.0, 0.0], [-0.6, -0.8, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]).bool()
    advantages = torch.tensor([[-1.0], [2.0], [-0.5]]).expand(3, 4)
    config = TriageConfig(gate_width=2, repair_width=4)
    found = {name: float(x) for name, x in grpo.mismatch(delta, advantages, mask, config).items()}
    expected = {
        "tokens": 8,
        "gap": 13.4 / 8,
        "gap_by_response": (11 / 4 + 0.5 + 0.7) / 3,
        "q05": -7.0,
        "small": 0.0,
        "energy": 0.5 * (4 + 1 + 49 + 1 + 0.25 + 0.25 + 0.36 + 0.64),
        "mass_low": 3 * 1.0 + 2 * 0.5,
        "mass_high": 2.0,
        "mass_low_by_response": 3 / 4 + 2 * 0.5 / 2,
        "mass_high_by_response": 1.0,
        "num_deep_tokens": 1,
        "num_eligible": 3,
        "num_mild": 2,  # of means -1.5, -3 and -0.7
        "num_deep": 1,
        "num_tail_one": 1,
        "num_tail_full": 0,
        "num_gated": 3,
    }
    assert found == pytest.approx(expected)


def test_ratios_are_of_sums_over_updates():
    # Prevents: a mean of ratios, which a single small denominator decides; a crash where it is 0.
    lines = [{"mass_low": 1.0, "mass_high": 100.0}, {"mass_low": 1.0, "mass_high": 0.0}]
    assert report.rho(lines) == pytest.approx(0.02)
    assert report.rho(lines[1:]) == math.inf
    assert math.isnan(report.rho([{"mass_low": 0.0, "mass_high": 0.0}]))


def test_sentences_say_what_the_interval_says():
    # Prevents: a difference claimed from noise or from one seed; a null result that is not called one.
    mean, low, high = report.interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert high - mean == pytest.approx(4.303 * 1 / 3**0.5)
    assert mean - low == pytest.approx(high - mean)
    assert "no difference shown" in report.verdict("x", [1.0, -1.0, 0.5])
    assert report.verdict("x", [1.0, 1.1, 0.9]).endswith("higher.")
    assert report.verdict("x", [-1.0, -1.1, -0.9]).endswith("lower.")
    assert "illustration" in report.verdict("x", [5.0])
    assert "no difference shown" in report.verdict("x", [0.0, 0.0])


def _line(update: int, **other: float) -> dict:
    line = dict.fromkeys(("reward", "right", "gap", "gap_by_response", "surprise", "energy"), 1.0)
    line |= {"q05": -1.0, "tokens": 10, "num_eligible": 4, "num_gated": 0}
    masses = ("mass_low", "mass_high", "mass_low_by_response", "mass_high_by_response")
    tiers = ("num_mild", "num_deep", "num_tail_one", "num_tail_full")
    return {"update": update} | line | dict.fromkeys((*masses, *tiers), 0) | other


def test_report_pairs_seeds_and_names_what_never_triggers():
    # Prevents: differences between seeds mixed into those between arms; a 0 % that is left out.
    def runs(shift: float) -> list:
        seeds = (0.0, 5.0, 9.0)  # must cancel
        return [[_line(i, reward=seed + shift) for i in range(8)] for seed in seeds]

    arms = {"bf16": runs(0.0), "tensor": runs(-0.5), "tensor+tis": runs(-0.5)}
    text = "\n".join(report.sentences(arms))
    assert "reward of tensor minus bf16: -0.5000 (-0.5000 to -0.5000): lower." in text
    assert "reward of tensor+tis minus tensor: +0.0000 (+0.0000 to +0.0000): no difference" in text
    assert "two or more 0 (0.000 %), of 96." in text
    assert "| tensor | 3 |" in report.table(arms)
    assert "0 (0.000 %)" in report.table(arms)
    never = {"bf16": [[_line(0, num_eligible=0)]]}
    assert "none eligible" in report.table(never)
    assert "no segment had a negative advantage" in "\n".join(report.sentences(never))


def test_plot_is_drawn_of_ratios_that_do_not_exist(tmp_path):
    # Prevents: a report that fails after hours of runs because an update had no mass.
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    runs = {"bf16": [[_line(i, num_eligible=i % 2) for i in range(6)]] * 2}
    report.plot(tmp_path / "plot.png", runs)
    assert (tmp_path / "plot.png").stat().st_size > 10_000


# --- runs -----------------------------------------------------------------------------------------


def test_arms_choose_sampler_and_learner_apart_and_name_their_faults():
    # Prevents: an arm that runs something else than it says.
    arm = rl_lab.Arm.parse("mxfp8:bf16+tis")
    assert (arm.sampler, arm.learner, arm.method) == ("mxfp8", "bf16", "tis")
    assert rl_lab.Arm.parse("rollout").learner == "bf16"
    assert rl_lab.Arm.parse("w4a16:w4a16").sampler == "nvfp4_w4a16"
    for name, fault in (
        ("tensor+nis", "no method 'nis'"),
        ("tensor+", "no method"),
        ("tenser", "no numerics 'tenser'"),
        ("mxfp9:bf16", "mxfp9"),
    ):
        with pytest.raises(ValueError, match=fault):
            rl_lab.Arm.parse(name)


@pytest.fixture
def folder(tmp_path, start) -> Path:
    (tmp_path / "runs").mkdir()
    torch.save(start.masters, rl_lab.start_path(tmp_path, 0))
    return tmp_path


def _lines(folder: Path, name: str) -> list[dict]:
    path = rl_lab.run_path(folder, rl_lab.Arm.parse(name), 0)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_methods_differ_only_after_the_first_update(folder):
    # Prevents: arms that meet different prompts or noise, whose differences are luck.
    for name in ("tensor", "tensor+tis", "tensor+triage"):
        text = rl_lab.train(folder, SIZE, "cpu", rl_lab.Arm.parse(name), 0)
        assert name in text
    plain, tis, triage = (_lines(folder, f"tensor{end}") for end in ("", "+tis", "+triage"))
    for name in ("reward", "gap", "energy", "num_gated"):
        assert plain[1][name] == tis[1][name] == triage[1][name]
    assert plain[1]["grad_norm"] != tis[1]["grad_norm"]
    assert plain[2]["gap"] != tis[2]["gap"]
    assert triage[1]["triage_num_gated_segments"] == triage[1]["num_gated"]
    assert "triage_num_gated_segments" not in plain[1]
    head = plain[0]
    assert head["arm"]["learner"] == "nvfp4_per_tensor"
    assert any("nvfp4(1x16, per-tensor)" in op["formats"] for op in head["backends"])


def test_the_calibrated_gate_waits_and_then_acts_on_what_it_measured(folder):
    # Prevents: a calibrated arm that silently runs the fixed thresholds, or never starts.
    size = replace(SIZE, updates=grpo.CALIBRATION_UPDATES + 2)
    rl_lab.train(folder, size, "cpu", rl_lab.Arm.parse("rollout+calibrated"), 0)
    head, *lines = _lines(folder, "rollout+calibrated")
    assert set(head["triage"]) > {"mean_reference", "tail_reference"}
    acted = ["triage_num_gated_segments" in line for line in lines]
    assert acted == [False] * grpo.CALIBRATION_UPDATES + [True] * 2


def test_runs_are_whole_kept_and_never_mixed(folder, monkeypatch, capsys):
    # Prevents: a run cut off halfway that counts as one; hours computed again; two settings in a table.
    monkeypatch.setitem(rl_lab.SIZES, "small", SIZE)
    monkeypatch.setattr(report, "plot", lambda *_: None)
    words = ["rl_lab.py", "--arms", "tensor", "tensor+tis", "--jobs", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(folder)])
    arm, update, calls = rl_lab.Arm.parse("tensor"), rl_lab.update, []

    def stops(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return update(*args)

    monkeypatch.setattr(rl_lab, "update", stops)
    with pytest.raises(KeyboardInterrupt):
        rl_lab.main()
    assert not rl_lab.run_path(folder, arm, 0).exists()
    assert rl_lab.main() == 0
    assert len(calls) == 2 + 2 * SIZE.updates
    first = rl_lab.run_path(folder, arm, 0).read_text()
    assert rl_lab.main() == 0
    assert len(calls) == 2 + 2 * SIZE.updates
    assert rl_lab.run_path(folder, arm, 0).read_text() == first
    assert "one seed: an illustration" in (folder / "table.txt").read_text()
    assert "tensor+tis" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(folder), "--lr", "0.5"])
    with pytest.raises(SystemExit, match="give another --out"):
        rl_lab.main()


def test_a_warm_up_that_teaches_nothing_is_an_error(monkeypatch):
    # Prevents: runs from a policy whose rewards are all 0, whose every advantage is 0.
    monkeypatch.setattr(grpo, "SUPERVISED_LIMIT", 2)
    with pytest.raises(RuntimeError, match=r"seed 0: after 2 supervised steps 0\.000"):
        grpo.supervised(SIZE, "cpu", 0)


def test_processes_report_results_and_faults(capsys):
    # Prevents: a run that failed in a process of its own and was not noticed, or left others running.
    rl_lab.in_parallel(pow, [(2, 3), (3, 2)], 2)
    assert sorted(capsys.readouterr().out.split()) == ["8", "9"]
    with pytest.raises(ZeroDivisionError):
        rl_lab.in_parallel(operator.truediv, [(1, 0), (1, 1), (1, 2)], 2)
    assert not multiprocessing.active_children()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", rl_lab.PER_TOKEN, "nvfp4_per_tensor"])
def test_a_captured_rollout_follows_the_weights(start, recipe):
    # Prevents: a graph that samples with the weights it was captured with, or reads stale prompts.
    sampler = lab.Sampler(SIZE, lab.quantized_linears(recipe, "cuda"), 48, "cuda")
    sampler.policy.copy_from(start.policy)
    results = []
    for scale, seed in ((1.0, 1), (1.0, 2), (2.0, 2), (0.5, 1)):
        with torch.no_grad():
            for block in sampler.policy.blocks:
                block.down.weight.mul_(scale)
        generator = grpo.generator_of("cuda", seed)
        prompts, _ = lab.problems(SIZE, 48, generator)
        responses, sampled = (x.clone() for x in sampler(prompts, generator))
        eager = sampler._generate()
        assert torch.equal(responses, eager[0])
        assert torch.equal(sampled, eager[1])
        results.append(sampled)
    assert torch.equal(results[0], results[3])
    assert not torch.equal(results[1], results[2])
