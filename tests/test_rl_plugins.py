"""The TRIAGE losses of verl and NeMo-RL, on stand-ins and, where installed, on the real packages."""

import importlib
import importlib.util
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import rl_stand_in as stand_in
import torch
from rl_stand_in import make_batch

from megatron_nvfp4.rl import adapter
from megatron_nvfp4.rl.triage import (
    TriageConfig,
    triage_advantages,
    triage_gate,
    triage_repair_loss,
)

TOKENS = TriageConfig(repair_norm="token")
GATE = TriageConfig(repair_norm="token", repair_weight=0.0)

# --- verl -------------------------------------------------------------------------------------------


@pytest.fixture(params=["stand-in", "package"])
def verl(request, monkeypatch):
    """verl's core_algos with our names registered."""
    if request.param == "stand-in":
        core = stand_in.install_verl(monkeypatch)
    elif importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed (pip install verl==0.9.1)")
    else:
        core = importlib.import_module("verl.trainer.ppo.core_algos")
        monkeypatch.setattr(core, "POLICY_LOSS_REGISTRY", dict(core.POLICY_LOSS_REGISTRY))
    plugin = importlib.import_module("megatron_nvfp4.rl.verl")
    importlib.reload(plugin)  # registers, since verl is loaded
    return SimpleNamespace(core=core, plugin=plugin, real=request.param == "package")


def verl_config(verl, **info):
    if verl.real:
        from verl.workers.config import ActorConfig

        config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)
        config.global_batch_info.update(info)
        return config
    return SimpleNamespace(clip_ratio=0.2, global_batch_info=info)


def padded(batch):
    """The batch as (B, R) tensors in verl's form; masked tokens have the ratio 0."""
    pad = torch.nn.utils.rnn.pad_sequence
    names = ("log_probs", "rollout_log_probs", "advantages", "loss_masks")
    rows = {name: pad(batch[name], batch_first=True) for name in names}
    mask = rows["loss_masks"] != 0
    ratio = torch.exp((rows["log_probs"] - rows["rollout_log_probs"]).clamp(-20, 20)) * mask
    return rows | {"mask": mask, "ratio": ratio}


def verl_run(verl, rows, mode, *, keep=slice(None), name="triage", config=None, live=None):
    """(loss, metrics, gradient) of the registered loss on some of the rows."""
    live = rows["log_probs"] if live is None else live
    live = live.clone().requires_grad_()
    bypass = name == "triage_bypass"
    loss, metrics = verl.core.POLICY_LOSS_REGISTRY[name](
        old_log_prob=rows["rollout_log_probs" if bypass else "log_probs"][keep],
        log_prob=live[keep],
        advantages=rows["advantages"][keep],
        response_mask=rows["mask"][keep],
        loss_agg_mode=mode,
        config=config or verl_config(verl),
        rollout_is_weights=None if bypass else rows["ratio"][keep],
    )
    return loss.detach(), metrics, torch.autograd.grad(loss, live)[0]


def test_verl_knows_both_names(verl):
    """verl only debug-logs a plugin that fails; the run would then stop at an unknown loss mode."""
    assert set(verl.plugin.MODES) == {"triage", "triage_bypass"}
    assert set(verl.plugin.MODES) <= set(verl.core.POLICY_LOSS_REGISTRY)


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "token-mean"])
@pytest.mark.parametrize("name", ["triage", "triage_bypass"])
def test_verl_loss_is_stock_on_gated_advantages_plus_repair(verl, mode, name):
    """A lost factor between verl's aggregation and Repair's, or TIS applied twice or never."""
    rows = padded(make_batch())
    delta = rows["log_probs"] - rows["rollout_log_probs"]
    live = rows["log_probs"].clone().requires_grad_()
    bypass = name == "triage_bypass"
    gated, _ = triage_advantages(delta, rows["advantages"], rows["mask"], config=GATE)
    stock, _ = verl.core.compute_policy_loss_vanilla(
        old_log_prob=rows["rollout_log_probs" if bypass else "log_probs"],
        log_prob=live,
        advantages=gated,
        response_mask=rows["mask"],
        loss_agg_mode=mode,
        config=verl_config(verl),
        rollout_is_weights=None if bypass else rows["ratio"].clamp_max(2.0),
    )
    form = "token" if mode == "token-mean" else "response"
    repair = triage_repair_loss(
        live,
        rows["rollout_log_probs"],
        rows["advantages"],
        rows["mask"],
        config=replace(TOKENS, norm=form),
        step=0,
    )
    (expected,) = torch.autograd.grad(stock + repair, live)
    loss, metrics, grad = verl_run(verl, rows, mode, name=name)
    torch.testing.assert_close(loss, (stock + repair).detach(), rtol=1e-7, atol=0)
    torch.testing.assert_close(grad, expected, rtol=1e-7, atol=1e-12)
    assert repair > 0
    torch.testing.assert_close(metrics["actor/triage/repair_loss"], repair.item())
    assert {f"actor/{name}" for name in adapter.TOKEN_METRICS} < set(metrics)
    assert all(isinstance(value, float) for value in metrics.values())


def test_verl_metrics_are_token_means(verl):
    """A mean that counts padding, where the weight is 1, would hide how much is gated."""
    rows = padded(make_batch())
    _, metrics, _ = verl_run(verl, rows, "token-mean")
    delta = rows["log_probs"] - rows["rollout_log_probs"]
    weights = triage_gate(delta, rows["advantages"], rows["mask"], config=GATE)[rows["mask"]]
    assert metrics["actor/triage/gate_weight"] == pytest.approx(weights.mean().item())
    assert metrics["actor/triage/gated"] == pytest.approx((weights < 1).double().mean().item())
    deep = (delta < -6)[rows["mask"]].double().mean()
    assert metrics["actor/triage/deep_tail"] == pytest.approx(deep.item())


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "token-mean"])
def test_verl_micro_batches_add_up(verl, mode):
    """A mean over the micro-batch instead of the update would weigh small micro-batches too much."""
    rows = padded(make_batch())
    info = {"dp_size": 1, "batch_num_tokens": int(rows["mask"].sum()), "global_batch_size": 4}
    config = verl_config(verl, **info)
    whole = verl_run(verl, rows, mode, config=config)
    parts = [
        verl_run(verl, rows, mode, config=config, keep=keep) for keep in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0], rtol=1e-7, atol=0)
    torch.testing.assert_close(parts[0][2] + parts[1][2], whole[2], rtol=1e-7, atol=1e-12)


def test_verl_repair_follows_the_live_policy(verl):
    """With several updates per rollout the push must end once the policy is back."""
    rows = padded(make_batch(signs=(1.0, 1.0, 1.0, 1.0)))
    moved = rows["log_probs"] + 5.0  # every segment is back above the boundary
    before = verl_run(verl, rows, "token-mean")[1]["actor/triage/repair_loss"]
    after = verl_run(verl, rows, "token-mean", live=moved)[1]["actor/triage/repair_loss"]
    assert before > 0
    assert after == 0


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("loss_mode=triage without rollout_is_weights", lambda rows: None),
        ("rollout_is_weights of 0", lambda rows: rows["ratio"].where(rows["ratio"] > 0.5, 0)),
        ("equal at all tokens", lambda rows: rows["mask"] * torch.full((4, 1), 0.7)),
    ],
)
def test_verl_refuses_weights_that_lost_the_gap(verl, text, weights):
    """Truncated, erased or summed ratios would be read as gaps and gate the wrong tokens."""
    rows = padded(make_batch())
    with pytest.raises(ValueError, match=f"verl: .*{text}.*; set algorithm"):
        verl.plugin.policy_loss(
            rows["log_probs"],
            rows["log_probs"],
            rows["advantages"],
            rows["mask"],
            "token-mean",
            verl_config(verl),
            weights(rows),
        )


def test_verl_register_takes_settings_and_refuses_forms(verl):
    """A second configuration under its own name is how verl users change settings."""
    verl.plugin.register("gate_only", config=GATE, tis_cap=5.0)
    rows = padded(make_batch())
    default = verl_run(verl, rows, "token-mean")
    changed = verl_run(verl, rows, "token-mean", name="gate_only")
    assert changed[1]["actor/triage/repair_loss"] == 0
    assert not torch.equal(changed[0], default[0])
    with pytest.raises(ValueError, match="verl: norm='token' is not supported"):
        verl.plugin.register("x", config=TriageConfig(norm="token", repair_norm="token"))
    assert "x" not in verl.core.POLICY_LOSS_REGISTRY


def test_verl_package_loads_the_entry_point(tmp_path, monkeypatch):
    """The plugin is imported while verl itself is half imported; a circular import would be swallowed."""
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed (pip install verl==0.9.1)")
    from megatron_nvfp4.rl.verl import check_registered

    info = tmp_path / "triage_entry-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: triage-entry\nVersion: 1\n")
    entry = "[verl.plugins]\nmegatron_nvfp4 = megatron_nvfp4.rl.verl\n"
    (info / "entry_points.txt").write_text(entry)
    root = str(Path(__file__).parent.parent)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), root, *filter(None, sys.path)])
    )
    check_registered()
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    with pytest.raises(RuntimeError, match=r"\(triage triage_bypass\); install megatron-nvfp4"):
        check_registered()


# --- NeMo-RL ----------------------------------------------------------------------------------------


@pytest.fixture(params=["stand-in", "package"])
def nemo(request, monkeypatch):
    """megatron_nvfp4.rl.nemo_rl with its class made from the stand-in or the real base."""
    module = importlib.import_module("megatron_nvfp4.rl.nemo_rl")
    vars(module).pop("TriageLossFn", None)
    if request.param == "stand-in":
        stand_in.install_nemo_rl(monkeypatch)
    else:
        pytest.importorskip(
            "nemo_rl.algorithms.loss.loss_functions",
            reason="NeMo-RL and what its loss imports are not installed",
            exc_type=ImportError,
        )
    yield module
    vars(module).pop("TriageLossFn", None)


def nemo_config(**changed):
    given = {
        "token_level_loss": True,
        "sequence_level_importance_ratios": False,
        "force_on_policy_ratio": False,
        **changed,
    }
    if "nemo_rl.algorithms.loss.loss_functions" in sys.modules:
        losses = sys.modules["nemo_rl.algorithms.loss.loss_functions"]
        if hasattr(losses, "ClippedPGLossConfig"):
            given |= {
                "reference_policy_kl_penalty": 0.0,
                "use_importance_sampling_correction": True,
            }
            return losses.ClippedPGLossConfig(**given)
    return SimpleNamespace(**given)


class Data(dict):
    def copy(self):
        return Data(self)


def nemo_data(prompts=(9, 4, 1, 2)):
    """(B, S) rows of a prompt, a response and padding."""
    batch = make_batch()
    width = max(p + n for p, n in zip(prompts, batch["response_lengths"], strict=True))
    names = {
        "prev_logprobs": "log_probs",
        "generation_logprobs": "rollout_log_probs",
        "advantages": "advantages",
        "token_mask": "loss_masks",
    }
    data = Data(sample_mask=torch.ones(4, dtype=torch.float64))
    for ours, theirs in names.items():
        rows = torch.zeros(4, width, dtype=torch.float64)
        for i, values in enumerate(batch[theirs]):
            rows[i, prompts[i] : prompts[i] + len(values)] = values
        data[ours] = rows
    # The response begins at its first token in the loss.
    for i, start in enumerate(prompts):
        data["token_mask"][i, start] = 1.0
    data["token_mask"][0, -1] = 1.0  # nothing stands behind the longest row
    return data


def nemo_run(loss_fn, data, keep=slice(None), seqs=4.0, toks=None):
    data = Data({name: values[keep] for name, values in data.items()})
    toks = data["token_mask"].sum() if toks is None else toks
    live = data["prev_logprobs"][:, 1:].clone().requires_grad_()
    loss, metrics = loss_fn(
        next_token_logprobs=live,
        data=data,
        global_valid_seqs=torch.tensor(seqs),
        global_valid_toks=toks,
    )
    return loss.detach(), metrics, torch.autograd.grad(loss, live)[0]


@pytest.mark.parametrize("token_level", [True, False])
def test_nemo_loss_is_stock_on_gated_advantages_plus_repair(nemo, token_level):
    """Prompts of different lengths stand in front: counted from the row, segments would be cut elsewhere."""
    loss_fn = nemo.TriageLossFn(nemo_config(token_level_loss=token_level))
    data = nemo_data()
    got = nemo_run(loss_fn, data)

    prompts, lengths = (9, 4, 1, 2), (200, 70, 130, 1)
    changed = data.copy()
    changed["advantages"] = torch.zeros_like(data["advantages"])
    rows = {"delta": [], "live": [], "sampler": [], "advantages": [], "mask": []}
    for i, (start, n) in enumerate(zip(prompts, lengths, strict=True)):
        take = slice(start, start + n)
        rows["live"].append(data["prev_logprobs"][i, take])
        rows["sampler"].append(data["generation_logprobs"][i, take])
        rows["delta"].append(rows["live"][i] - rows["sampler"][i])
        rows["advantages"].append(data["advantages"][i, take])
        rows["mask"].append(data["token_mask"][i, take])
    ragged = {name: torch.cat(values) for name, values in rows.items()}
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    gated, _ = triage_advantages(
        ragged["delta"], ragged["advantages"], ragged["mask"], offsets=offsets, config=GATE
    )
    for i, part in enumerate(gated.split(lengths)):
        changed["advantages"][i, prompts[i] : prompts[i] + lengths[i]] = part
    base = type(loss_fn).__mro__[1](nemo_config(token_level_loss=token_level))
    stock = nemo_run(base, changed)
    live = ragged["live"].clone().requires_grad_()
    repair = triage_repair_loss(
        live,
        ragged["sampler"],
        ragged["advantages"],
        ragged["mask"],
        offsets=offsets,
        config=replace(TOKENS, norm="token" if token_level else "response"),
        step=0,
    )
    (push,) = torch.autograd.grad(repair, live)
    expected = stock[2].clone()
    for i, part in enumerate(push.split(lengths)):
        expected[i, prompts[i] - 1 : prompts[i] - 1 + lengths[i]] += part
    assert push.abs().max() > 0
    torch.testing.assert_close(got[0], stock[0] + repair.detach(), rtol=1e-7, atol=0)
    torch.testing.assert_close(got[2], expected, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("token_level", [True, False])
def test_nemo_micro_batches_add_up(nemo, token_level):
    """NeMo-RL adds loss and metrics over micro-batches; a local mean would be counted once for each."""
    loss_fn = nemo.TriageLossFn(nemo_config(token_level_loss=token_level))
    data = nemo_data()
    toks = data["token_mask"].sum()
    whole = nemo_run(loss_fn, data, toks=toks)
    parts = [nemo_run(loss_fn, data, keep, toks=toks) for keep in (slice(0, 3), slice(3, 4))]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0], rtol=1e-7, atol=0)
    torch.testing.assert_close(torch.cat([p[2] for p in parts]), whole[2], rtol=1e-7, atol=1e-12)
    for name in (*adapter.TOKEN_METRICS, "triage/repair_loss"):
        summed = parts[0][1][name] + parts[1][1][name]
        torch.testing.assert_close(summed, whole[1][name], rtol=1e-6, atol=1e-12)


def test_nemo_metrics_are_token_means(nemo):
    """A sum that counts the prompt and padding, where the weight is 1, would log shares above 1."""
    data = nemo_data()
    _, metrics, _ = nemo_run(nemo.TriageLossFn(nemo_config()), data)
    mask = data["token_mask"] != 0
    deep = (data["prev_logprobs"] - data["generation_logprobs"] < -6)[mask].double().mean()
    assert metrics["triage/deep_tail"] == pytest.approx(deep.item())
    assert 0.1 < metrics["triage/gate_weight"] < 1
    ungated = 1 - metrics["triage/gated"]
    assert ungated < metrics["triage/gate_weight"] <= ungated + 0.55 * metrics["triage/gated"]


def test_nemo_excluded_samples_do_not_count(nemo):
    """A sample with sample_mask 0 is padding of the batch; its tokens must move nothing."""
    data = nemo_data()
    data["sample_mask"][1] = 0.0
    _, _, grad = nemo_run(nemo.TriageLossFn(nemo_config()), data)
    assert grad[1].abs().max() == 0
    assert torch.isfinite(grad).all()


def test_nemo_metrics_say_what_they_are_divided_by(nemo):
    """Without an entry NeMo-RL's split trainers rescale a metric by the loss's denominator."""
    loss_fn = nemo.TriageLossFn(nemo_config(token_level_loss=False))
    kinds = loss_fn.metric_normalizations
    names = {name: getattr(kind, "value", kind) for name, kind in kinds.items()}
    assert all(names[name] == "tokens" for name in adapter.TOKEN_METRICS)
    assert names["triage/repair_loss"] == names["loss"] == "sequences"


def test_nemo_forced_ratio_needs_no_prev_logprobs(nemo):
    """NeMo-RL does not compute prev_logprobs then; the gap is that of the live policy."""
    loss_fn = nemo.TriageLossFn(nemo_config(force_on_policy_ratio=True))
    data = nemo_data()
    live = data.pop("prev_logprobs")[:, 1:].clone().requires_grad_()
    toks = data["token_mask"].sum()
    loss, metrics = loss_fn(live, data, torch.tensor(4.0), toks)
    loss.backward()
    assert metrics["triage/gated"] > 0
    assert torch.isfinite(live.grad).all()


def test_nemo_loss_travels_to_workers(nemo):
    """Ray pickles the loss function; a class made inside a function is lost unless found by name."""
    loss_fn = nemo.TriageLossFn(nemo_config(), triage=GATE)
    copy = pickle.loads(pickle.dumps(loss_fn))
    assert type(copy) is nemo.TriageLossFn
    assert copy.triage == GATE


def test_nemo_refuses_by_name(nemo):
    """Settings given twice, a sequence ratio and missing log-probs would each train something else."""
    with pytest.raises(ValueError, match="NeMo-RL: sequence_level_importance_ratios=True"):
        nemo.TriageLossFn(
            nemo_config(sequence_level_importance_ratios=True, token_level_loss=False)
        )
    with pytest.raises(ValueError, match="unknown setting tau=1; known: gate_width"):
        nemo.TriageLossFn(nemo_config(triage={"tau": 1}))
    with pytest.raises(ValueError, match="give one of them"):
        nemo.TriageLossFn(nemo_config(triage={"repair_weight": 0}), triage=GATE)
    with pytest.raises(ValueError, match="repair_norm='segment' is not supported"):
        nemo.TriageLossFn(nemo_config(), triage=TriageConfig())
    data = nemo_data()
    del data["generation_logprobs"]
    with pytest.raises(ValueError, match="data without generation_logprobs"):
        nemo_run(nemo.TriageLossFn(nemo_config(triage={"repair_weight": 0})), data)
