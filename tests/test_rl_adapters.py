"""The adapters of TRIAGE: signatures, settings, and the hooks of miles and slime on stand-ins of them."""

import ast
import importlib
import importlib.util
import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import rl_stand_in as stand_in
import torch
from rl_stand_in import make_batch

from megatron_nvfp4.rl import adapter
from megatron_nvfp4.rl.triage import TriageConfig, triage_advantages, triage_repair_loss

TOKENS = TriageConfig(repair_norm="token")
GATE = TriageConfig(repair_norm="token", repair_weight=0.0)
LISTS = ("miles", "slime")


def hook(framework: str, name: str):
    return getattr(importlib.import_module(f"megatron_nvfp4.rl.{framework}"), name)


def flat(batch):
    """(delta, advantages, mask, offsets) of the whole batch."""
    join = torch.cat
    delta = join(batch["log_probs"]) - join(batch["rollout_log_probs"])
    offsets = torch.tensor([0, *batch["response_lengths"]]).cumsum(0)
    return delta, join(batch["advantages"]), join(batch["loss_masks"]), offsets


def run(function, args, batch, live=None):
    """(loss, metrics, gradient in the live log-probs) of a loss hook."""
    live = torch.cat(batch["log_probs"]) if live is None else live
    live = live.clone().requires_grad_()
    loss, metrics = function(args, batch, live, stand_in.sample_mean_sum(args, batch))
    (grad,) = torch.autograd.grad(loss, live)
    return loss.detach(), metrics, grad


@pytest.fixture(params=LISTS)
def framework(request, monkeypatch):
    """miles and slime as stand-ins."""
    stand_in.install_megatron_style(monkeypatch)
    return request.param


# --- signatures -------------------------------------------------------------------------------------


def parameters(tree: ast.Module, name: str) -> str:
    """The parameter names of a function or method of a module's source."""
    body = tree.body
    for part in name.split("."):
        node = next(n for n in body if getattr(n, "name", None) == part)
        body = node.body
    a = node.args
    names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return " ".join(names + ([a.kwarg.arg] if a.kwarg else []))


@pytest.mark.parametrize("name", stand_in.SIGNATURES)
def test_recorded_signatures_are_those_of_the_source(name):
    """A framework that renames a parameter would break the adapter at the first update of a run."""
    record = stand_in.SIGNATURES[name]
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(
            f"{name} is not installed; recorded at {record['commit']} of {record['origin']}"
        )
    root = Path(next(iter(spec.submodule_search_locations))).parent
    for path, functions in record["functions"].items():
        tree = ast.parse((root / path).read_text())
        for function, expected in functions.items():
            assert parameters(tree, function) == expected, f"{path}: {function}"


def test_stand_ins_have_the_recorded_signatures(monkeypatch):
    """A stand-in that accepts other arguments would let a wrong call pass every test below."""
    stand_in.install_megatron_style(monkeypatch)
    stand_in.install_verl(monkeypatch)
    stand_in.install_nemo_rl(monkeypatch)
    for record in stand_in.SIGNATURES.values():
        for path, functions in record["functions"].items():
            module = sys.modules[path.removesuffix(".py").replace("/", ".")]
            for name, expected in functions.items():
                target = module
                for part in name.split("."):
                    target = getattr(target, part)
                assert " ".join(inspect.signature(target).parameters) == expected, name


@pytest.mark.parametrize("framework", LISTS)
def test_hooks_take_what_the_frameworks_pass(framework):
    """A hook with another parameter list fails inside a training run, not at start."""
    loss = inspect.signature(hook(framework, "policy_loss"))
    assert list(loss.parameters) == ["args", "batch", "logits", "sum_of_sample_mean"]
    inspect.signature(hook(framework, "tis_triage")).bind(
        **dict.fromkeys(stand_in.TIS_KEYWORDS[framework].split())
    )
    verl = hook("verl", "policy_loss")
    given = stand_in.SIGNATURES["verl"]["functions"]["verl/trainer/ppo/core_algos.py"]
    names = list(inspect.signature(verl).parameters)
    assert " ".join(names[:7]) == given["compute_policy_loss_vanilla"]


def test_adapters_import_no_framework():
    """A framework imported with the adapter would make one framework's adapter need all of them."""
    code = (
        "import sys, megatron_nvfp4.rl.miles, megatron_nvfp4.rl.slime, megatron_nvfp4.rl.verl\n"
        "import megatron_nvfp4.rl.nemo_rl\n"
        "bad = {'miles', 'slime', 'verl', 'nemo_rl', 'megatron', 'ray'} & set(sys.modules)\n"
        "sys.exit(', '.join(bad) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- miles and slime --------------------------------------------------------------------------------


def test_gate_by_hand(framework):
    """Weights or their renormalisation wrong: the gradient of each token would have another coefficient.

    One response of 128 tokens, A = -1: 64 with gap -2 (weight 0.1) and 64 with gap +0.5 (1), so that
    norm = 128 / (6.4 + 64) and the coefficients are 0.1 * norm and norm.
    """
    batch = make_batch(lengths=(128,), signs=(-1.0,))
    gap = torch.cat([torch.full((64,), -2.0), torch.full((64,), 0.5)]).double()
    batch["log_probs"] = [batch["rollout_log_probs"][0] + gap]
    batch["loss_masks"] = [torch.ones(128, dtype=torch.int32)]
    args = stand_in.default_args()
    _, metrics, grad = run(hook(framework, "policy_loss"), args, batch)
    norm = 128 / 70.4
    torch.testing.assert_close(grad[:64], torch.full((64,), 0.1 * norm / 128).double())
    torch.testing.assert_close(grad[64:], torch.full((64,), norm / 128).double())
    assert metrics["triage/gated"] == 0.5
    torch.testing.assert_close(metrics["triage/gate_weight"], torch.tensor(0.55).double())
    torch.testing.assert_close(
        metrics["triage/shift_negative"], torch.tensor((1 - 0.1 * norm + norm - 1) / 2).double()
    )
    assert metrics["triage/shift_positive"] == 0


def test_no_gap_is_the_stock_loss_bit_for_bit(framework):
    """An adapter that touched a run without mismatch would make every comparison against a baseline wrong."""
    batch = make_batch()
    batch["rollout_log_probs"] = [x.clone() for x in batch["log_probs"]]
    live = torch.cat(batch["log_probs"]) + 0.3
    args = stand_in.default_args(use_tis=True)
    ours = run(hook(framework, "policy_loss"), args, batch, live)
    stock = run(stand_in.policy_loss_function, args, batch, live)
    assert torch.equal(ours[0], stock[0])
    assert torch.equal(ours[2], stock[2])
    assert all(torch.equal(ours[1][name], value) for name, value in stock[1].items())


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("tis", [None, "vanilla", "icepop"])
def test_repair_has_the_gradient_of_the_live_loss(framework, per_token, tis):
    """Repair in the wrong reduction, or not divided by the TIS weight, would act with another strength."""
    config = TriageConfig(repair_norm="token", repair_weight=0.5, norm="response")
    args = stand_in.default_args(
        use_tis=tis is not None,
        custom_tis_function_path="stand_in.icepop_function" if tis == "icepop" else None,
        tis_clip_low=1e-6 if tis == "icepop" else 0.0,  # so that no token is rejected
        tis_clip=50.0 if tis == "icepop" else 2.0,
        calculate_per_token_loss=per_token,
        triage_repair_weight=0.5,
    )
    batch = make_batch()
    delta, advantages, mask, offsets = flat(batch)
    _, _, grad = run(hook(framework, "policy_loss"), args, batch)

    gate = replace(config, repair_weight=0.0)
    gated, _ = triage_advantages(delta, advantages, mask, offsets=offsets, config=gate)
    by_hand = {**batch, "advantages": list(gated.split(batch["response_lengths"]))}
    _, _, expected = run(stand_in.policy_loss_function, args, by_hand)
    live = torch.cat(batch["log_probs"]).requires_grad_()
    repair = triage_repair_loss(
        live,
        torch.cat(batch["rollout_log_probs"]),
        advantages,
        mask,
        offsets=offsets,
        config=replace(config, norm="token" if per_token else "response"),
        step=0,
    )
    # The frameworks divide by the number of responses or tokens after the hook.
    num = mask.sum() if per_token else sum(bool(m.any()) for m in batch["loss_masks"])
    (push,) = torch.autograd.grad(repair * num, live)
    assert push.abs().max() > 1e-5
    torch.testing.assert_close(grad, expected + push, rtol=1e-9, atol=1e-15)


def test_repair_is_dropped_where_the_loss_rejects_the_token(framework):
    """IcePop's weight 0: dividing by it would put infinities into the advantages and NaN into the loss."""
    args = stand_in.default_args(
        use_tis=True, custom_tis_function_path="stand_in.icepop_function", tis_clip_low=0.5
    )
    loss, _, grad = run(hook(framework, "policy_loss"), args, make_batch())
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()


def test_cispo_is_exact_through_the_advantages(framework):
    """CISPO's token loss has the log-prob's sign in it; a gate reading it there would act on A > 0."""
    batch = make_batch()
    args = stand_in.default_args(advantage_estimator="cispo", triage_repair_weight=0.0)
    _, _, grad = run(hook(framework, "policy_loss"), args, batch)
    delta, advantages, mask, offsets = flat(batch)
    gated, _ = triage_advantages(delta, advantages, mask, offsets=offsets, config=GATE)
    by_hand = {**batch, "advantages": list(gated.split(batch["response_lengths"]))}
    _, _, expected = run(stand_in.policy_loss_function, args, by_hand)
    _, _, stock = run(stand_in.policy_loss_function, args, batch)
    assert torch.equal(grad, expected)
    assert not torch.equal(grad, stock)


def test_batch_is_left_alone(framework):
    """A changed batch would gate twice where the loss is recomputed in the backward pass."""
    batch = make_batch()
    before = {name: [x.clone() for x in batch[name]] for name in ("advantages", "log_probs")}
    first = run(hook(framework, "policy_loss"), stand_in.default_args(), batch)
    second = run(hook(framework, "policy_loss"), stand_in.default_args(), batch)
    for name, values in before.items():
        assert all(torch.equal(a, b) for a, b in zip(values, batch[name], strict=True))
    assert torch.equal(first[2], second[2])


def test_masked_tokens_may_hold_anything(framework):
    """Tool tokens carry filler; 0 * inf or NaN from them would destroy the whole update."""
    batch, poisoned = make_batch(), make_batch()
    for name in ("rollout_log_probs", "advantages"):
        for i, values in enumerate(poisoned[name]):
            values[poisoned["loss_masks"][i] == 0] = (
                torch.nan if name == "advantages" else -torch.inf
            )
    args = stand_in.default_args()
    clean, dirty = (run(hook(framework, "policy_loss"), args, b) for b in (batch, poisoned))
    assert torch.equal(clean[2], dirty[2])
    assert all(torch.equal(dirty[1][f], clean[1][f]) for f in adapter.TOKEN_METRICS)


def test_fully_masked_response_contributes_nothing(framework):
    """A response without valid tokens: a division by its 0 tokens would give NaN."""
    batch = make_batch()
    batch["loss_masks"][0] = torch.zeros_like(batch["loss_masks"][0])
    loss, metrics, grad = run(hook(framework, "policy_loss"), stand_in.default_args(), batch)
    assert torch.isfinite(loss)
    assert grad[:200].abs().max() == 0
    assert all(torch.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("per_token", [False, True])
def test_metrics_follow_the_reduction_of_the_framework(framework, per_token):
    """Sums where the framework expects means of samples would be off by the batch size in the log."""
    batch = make_batch()
    args = stand_in.default_args(calculate_per_token_loss=per_token)
    _, metrics, _ = run(hook(framework, "policy_loss"), args, batch)
    delta, _, mask, _ = flat(batch)
    deep = (delta < -6) & (mask != 0)
    parts = zip(deep.split(batch["response_lengths"]), batch["loss_masks"], strict=True)
    mean = sum(d.sum() / m.sum().clamp_min(1) for d, m in parts)
    expected = deep.sum() if per_token else mean
    torch.testing.assert_close(metrics["triage/deep_tail"], expected.double())
    assert expected > 0
    assert set(adapter.TOKEN_METRICS) < set(metrics)
    assert all(value.dim() == 0 and not value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("updates", [1, 4])
def test_tis_hook_is_tis_and_the_gate(framework, updates):
    """The lighter hook sees no advantages; a wrong sign would gate the positive ones or miss TIS."""
    batch = make_batch()
    path = f"megatron_nvfp4.rl.{framework}.tis_triage"
    args = stand_in.default_args(
        use_tis=True, custom_tis_function_path=path, num_steps_per_rollout=updates
    )
    drift = torch.randn(401, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    live = torch.cat(batch["log_probs"]) + (0.4 * drift if updates > 1 else 0)
    ours = run(stand_in.policy_loss_function, args, batch, live)
    reference = stand_in.default_args(
        use_tis=True, triage_repair_weight=0.0, num_steps_per_rollout=updates
    )
    expected = run(hook(framework, "policy_loss"), reference, batch, live)
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(ours[2], expected[2], rtol=1e-12, atol=1e-18)
    for name in ("tis", "triage/gate_weight", "triage/gated", "triage/deep_tail"):
        torch.testing.assert_close(ours[1][name], expected[1][name], rtol=1e-12, atol=0)


POLICY_REFUSALS = {
    "use-rollout-logprobs": ({"use_rollout_logprobs": True}, {}),
    "gspo": ({"advantage_estimator": "gspo"}, {}),
    "batch without rollout_log_probs": ({}, {"rollout_log_probs": None}),
    "batch without log_probs": ({}, {"log_probs": None}),
    "Repair with 4 updates per rollout": ({"num_steps_per_rollout": 4}, {}),
    "Repair with 2 updates per rollout": ({"global_batch_size": 2}, {}),
    "custom-tis-function-path my.own": (
        {"use_tis": True, "custom_tis_function_path": "my.own"},
        {},
    ),
    "function-path my.helper": (
        {"get_mismatch_metrics": True, "custom_tis_function_path": "my.helper"},
        {},
    ),
    "tis_triage together with policy_loss": (
        {
            "use_tis": True,
            "custom_tis_function_path": "megatron_nvfp4.rl.miles.tis_triage",
            "triage_repair_weight": 0.0,
        },
        {},
    ),
    "norm='token'": ({"triage_norm": "token"}, {}),
    "repair_norm='segment'": ({"triage_repair_norm": "segment"}, {}),
    "repair_start=300": ({"triage_repair_start": 300}, {}),
}


@pytest.mark.parametrize("text", POLICY_REFUSALS)
def test_policy_loss_refuses_by_name(framework, text):
    """A combination that is wrong but runs would be noticed after days of training, if at all."""
    changed, batch = POLICY_REFUSALS[text]
    args = stand_in.default_args(**changed)
    with pytest.raises(ValueError, match=f"{framework}: .*{text}.* is not supported.*; ."):
        run(hook(framework, "policy_loss"), args, {**make_batch(), **batch}, torch.zeros(401))


def test_gate_alone_is_allowed_with_several_updates(framework):
    """The refusal of Repair must not take the gate with it, which is exact at any ratio."""
    batch = make_batch()
    args = stand_in.default_args(num_steps_per_rollout=4, triage_repair_weight=0)
    live = torch.cat(batch["log_probs"]) + 0.1
    delta, advantages, mask, offsets = flat(batch)
    gated, _ = triage_advantages(delta, advantages, mask, offsets=offsets, config=GATE)
    by_hand = {**batch, "advantages": list(gated.split(batch["response_lengths"]))}
    ours = run(hook(framework, "policy_loss"), args, batch, live)
    assert torch.equal(ours[2], run(stand_in.policy_loss_function, args, by_hand, live)[2])


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("cispo in tis_triage", {"advantage_estimator": "cispo"}),
        ("gspo", {"advantage_estimator": "gspo"}),
        ("triage_repair_weight=0.1 in tis_triage", {"triage_repair_weight": 0.1}),
        (
            "estimator ppo in tis_triage with 2 updates",
            {"advantage_estimator": "ppo", "num_steps_per_rollout": 2},
        ),
    ],
)
def test_tis_hook_refuses_by_name(framework, text, changed):
    """In each of these the sign or size of the token loss is not that of the advantage."""
    path = f"megatron_nvfp4.rl.{framework}.tis_triage"
    args = stand_in.default_args(use_tis=True, custom_tis_function_path=path, **changed)
    with pytest.raises(ValueError, match=f"{framework}: .*{text}.* is not supported.*; ."):
        run(stand_in.policy_loss_function, args, make_batch())


def test_lists_of_the_wrong_length_are_named(framework):
    """Log-probs of another response length would shift every gap behind them."""
    batch = make_batch()
    batch["log_probs"][1] = batch["log_probs"][1][:-1]
    with pytest.raises(ValueError, match=r"log_probs of sample 1 holds \[69\] .* has 70"):
        run(hook(framework, "policy_loss"), stand_in.default_args(), batch, torch.zeros(401))


def test_mixed_dtypes_are_gathered_in_the_wide_one(framework):
    """miles may keep the sampler's log-probs in float64; rounding them would move gaps over a tier."""
    batch = make_batch()
    narrow = {**batch, "advantages": [x.float() for x in batch["advantages"]]}
    wide = run(hook(framework, "policy_loss"), stand_in.default_args(), batch)
    mixed = run(hook(framework, "policy_loss"), stand_in.default_args(), narrow)
    torch.testing.assert_close(mixed[2], wide[2], rtol=1e-6, atol=1e-9)
    assert torch.equal(mixed[1]["triage/gated"], wide[1]["triage/gated"])


# --- settings ---------------------------------------------------------------------------------------


def test_settings_reach_the_config():
    """YAML reads 0 as an integer and 1e-3 as a string; dropping either would train with another setting."""
    given = {"repair_weight": 0, "repair_beta": "1e-3", "gate_width": 32, "repair_width": 64}
    config = adapter.read_config(given, "slime")
    assert config == TriageConfig(
        repair_norm="token", repair_weight=0.0, repair_beta=1e-3, gate_width=32, repair_width=64
    )
    assert isinstance(config.repair_weight, float)
    assert adapter.read_config({}, "slime") == TOKENS


def test_calibration_is_read_from_a_mapping():
    """A calibrated gate that was ignored would silently run the fixed tiers."""
    keys = ("deep_gap", "mean_reference", "mean_full", "tail_reference", "tail_full")
    given = dict(zip(keys, (0.5, 0, 0.1, 0.2, 0.5), strict=True))
    assert adapter.read_config({"calibration": given}, "verl").calibration.tail_full == 0.5
    with pytest.raises(ValueError, match=r"calibration=.*; take them from calibrate_gate"):
        adapter.read_config({"calibration": {"deep_gap": 0.5}}, "verl")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"repair_wieght": 1.0}, "unknown setting repair_wieght=1.0; did you mean 'repair_weight'"),
        ({"gate_width": 64.5}, "gate_width=64.5 is a float; give a int"),
        ({"gate_width": True}, "gate_width=True is a bool"),
        ({"repair_beta": "small"}, "repair_beta='small' is a str; give a float"),
        ({"deep_weight": 2.0}, "deep_weight=2.0 is not above 0"),
    ],
)
def test_settings_are_refused_by_name(given, text):
    """A misspelt setting would train with the default."""
    with pytest.raises(ValueError, match=text):
        adapter.read_config(given, "miles")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"num_steps_per_rollout": 3}, 3),
        ({"global_batch_size": None}, 1),
        ({"global_batch_size": 3}, 2),
        ({"global_batch_size": 8}, 1),
        ({"global_batch_size": 2, "use_dynamic_global_batch_size": True}, 1),
    ],
)
def test_updates_per_rollout(changed, expected):
    """A miscounted update would let Repair run where it is not exact, or refuse it where it is."""
    assert adapter.updates_per_rollout(stand_in.default_args(**changed)) == expected
