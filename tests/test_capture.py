"""Capture of tensors: the file, what is entered and when, and that a run is not changed by it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from capture_cases import (
    EVERYTHING,
    NUM_LAYERS,
    Edit,
    Model,
    Seams,
    batch,
    capture_of,
    captured,
    config_of,
    run,
)

from megatron_nvfp4.cli.capture import take_capture
from megatron_nvfp4.diagnostics import statistics
from megatron_nvfp4.diagnostics.capture import module_names
from megatron_nvfp4.diagnostics.capture_config import (
    CaptureRule,
    Steps,
    load_capture_config,
    parse_steps,
)
from megatron_nvfp4.diagnostics.dump import Dump, dumps_below
from megatron_nvfp4.modules import moe
from megatron_nvfp4.quant import quantize
from megatron_nvfp4.recipes import NVFP4Spec

pytest.importorskip("safetensors", reason="safetensors is not installed")
TOKEN = NVFP4Spec(outer="token")


# --- the file -------------------------------------------------------------------------------------


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "capture.yaml"
    path.write_text(text)
    return path


def test_a_capture_file(tmp_path):
    # Prevents: a pattern that matches by substring; a later rule that undoes an earlier one.
    config = load_capture_config(
        _file(
            tmp_path,
            "out: here\nsteps: [3, '10:20', every 50]\nranks: [1]\nrules:\n"
            "- {match: decoder.layers.*.mlp, what: [outputs]}\n"
            "- {match: ['**.mlp', model], what: [outputs, grads], tensors: true}\n",
        )
    )
    assert config.out == Path("here")
    assert config.ranks == {1}
    steps = [n for n in range(1, 101) if n in config.steps]
    assert steps == [3, *range(10, 21), 50, 100]
    assert config.of("decoder.layers.0.mlp") == {"outputs": True, "grads": True}
    assert config.of("decoder.layers.0.mlp.router") == config.of("adecoder.layers.0.mlp.x") == {}
    assert config.of("model") == {"outputs": True, "grads": True}


def test_every_fault_of_a_file_is_named(tmp_path):
    # Prevents: one restart per fault.
    with pytest.raises(ValueError) as caught:
        load_capture_config(
            _file(
                tmp_path,
                "out: here\nstep: [1]\nsteps: [0, 5:3]\nranks: [-1]\nrules:\n"
                "- {match: a..b, what: [output], tensor: true}\n- {what: []}\n- 3\n",
            )
        )
    said = str(caught.value)
    for words in (
        "unknown key step; did you mean steps?",
        "steps: 0 is no step",
        "ranks=[-1]: whole numbers from 0",
        "rules[0].match='a..b'",
        "rules[0].what: output; use some of inputs",
        "unknown key rules[0].tensor; did you mean tensors?",
        "rules[1].match=None",
        "rules[1].what: nothing",
        "rules[2]: expected a mapping",
    ):
        assert words in said, (words, said)


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "out: x"])
def test_files_that_say_nothing(tmp_path, text):
    # Prevents: a run that captures nothing for hours.
    with pytest.raises(ValueError, match="--minite-capture"):
        load_capture_config(_file(tmp_path, text))
    with pytest.raises(ValueError, match="cannot read"):
        load_capture_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize("entry", [True, 0, "3", "a:b", "every 0", 2.0])
def test_steps_that_are_none(entry):
    # Prevents: YAML's 10:20, which is 620 without quotes in some parsers, or True, which is 1.
    with pytest.raises(ValueError, match="is no step"):
        parse_steps([entry])


# --- what is entered ------------------------------------------------------------------------------


def _entries(dump: Dump) -> set[tuple[str, str, str]]:
    return {(entry.module, entry.what, entry.provenance) for entry in dump.entries}


def test_the_fused_dataflow_shows_its_rows(tmp_path):
    # Prevents: experts of which nothing is seen, as hooks on their linears see no rows; what was computed
    # again passed off as what ran.
    dump = Dump(captured(tmp_path, Model(), batch(), backward=True))
    stem = "decoder.layers.1.mlp.experts"
    expected = {
        (f"{stem}.linear_fc1", "input", "actual"),
        (f"{stem}.linear_fc1", "input.codes", "actual"),
        (f"{stem}.linear_fc1", "input.block_scales", "actual"),
        (f"{stem}.linear_fc1", "input.amax", "actual"),
        (f"{stem}.linear_fc1", "weight2.codes", "replay"),
        (f"{stem}.linear_fc1", "output", "actual"),
        (f"{stem}.linear_fc1", "output.grad", "actual"),
        (f"{stem}.linear_fc2", "input.codes", "actual"),
        (f"{stem}.linear_fc2", "output", "actual"),
        (f"{stem}.linear_fc2", "output.grad", "actual"),
        (f"{stem}.linear_fc2", "weight3.grad", "actual"),
        (stem, "output", "hook"),
        ("decoder.layers.1.mlp.router", "routing.ids", "hook"),
        ("decoder.layers.1.mlp.router", "routing.slots", "replay"),
        ("decoder.layers.1.linear_proj", "input.codes", "replay"),
        ("decoder.layers.1.linear_proj", "output", "hook"),
        ("model", "logprobs", "hook"),
    }
    assert expected <= _entries(dump)
    orders = [entry.order for entry in dump.entries]
    assert orders == sorted(set(orders))
    assert dump.notes == []
    whats = [
        e.what for e in dump.entries if e.module == f"{stem}.linear_fc1" and "weight" not in e.what
    ]
    assert whats == [
        "input",
        "input.codes",
        "input.block_scales",
        "input.amax",
        "output",
        "output.grad",
    ]


def test_operands_are_those_that_ran(tmp_path):
    # Prevents: codes of other rows than the table says, statistics of another tensor than was dumped.
    dump = Dump(captured(tmp_path, Model(), batch()))
    by_name = {(e.module, e.what): e for e in dump.entries}
    fc1 = "decoder.layers.0.mlp.experts.linear_fc1"
    x = dump.load(by_name[fc1, "input"])
    again = quantize(x, TOKEN)
    assert torch.equal(dump.load(by_name[fc1, "input.codes"]), again.codes)
    token, expert = (dump.rows(by_name[fc1, "input"], part) for part in ("token", "expert"))
    mlp = dump.load(by_name["decoder.layers.0.mlp", "input"])
    batch_first = mlp.transpose(0, 1).reshape(-1, mlp.shape[2])
    assert torch.equal(x, batch_first[token])
    assert torch.equal(expert, expert.sort().values)
    lines = _lines(tmp_path)
    line = next(each for each in lines if (each["module"], each["what"]) == (fc1, "input"))
    assert line["amax"] == float(x.abs().max())
    line = next(each for each in lines if (each["module"], each["what"]) == (fc1, "input.operand"))
    assert line["provenance"] == "actual"
    assert line["rel_l2"] == float(statistics.error_statistics(x, statistics.decode(again))[0])


def _lines(folder: Path) -> list[dict]:
    text = (folder / "statistics.rank-00000.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_gradients_of_the_fused_dataflow(tmp_path):
    # Prevents: FC1's gradient given as FC2's, or rows of it in the tokens' order.
    dump = Dump(captured(tmp_path, Model(), batch(), backward=True))
    stem = "decoder.layers.2.mlp.experts"
    by_name = {(e.module, e.what): e for e in dump.entries}
    entry = by_name[f"{stem}.linear_fc2", "output.grad"]
    token = dump.rows(entry, "token")
    whole = dump.load(by_name[stem, "output.grad"])  # position by position
    whole = whole.view(-1, 2, whole.shape[1]).transpose(0, 1).reshape(whole.shape)
    assert whole.any()
    assert torch.equal(dump.load(entry), whole[token])
    shapes = [by_name[f"{stem}.linear_fc1", what].shape for what in ("output", "output.grad")]
    assert shapes[0] == shapes[1]


def test_microbatches_and_recomputation(tmp_path):
    # Prevents: the second pass of recomputation entered as another microbatch, gradients lost with it or
    # given to the wrong one.
    plain = Dump(captured(tmp_path / "a", Model(), batch(0), batch(1), backward=True))
    again = Dump(captured(tmp_path / "b", Model(recompute=True), batch(0), batch(1), backward=True))
    listed = [[(e.module, e.what, e.instance) for e in dump.entries] for dump in (plain, again)]
    names = [set(each) for each in listed]
    assert [len(each) for each in names] == [len(each) for each in listed]  # each once
    layers = {each for each in names[0] if each[0].startswith("decoder.layers.0.")}
    assert {instance for _, _, instance in layers} == {0, 1}
    # The first pass of recomputation makes nothing that has a gradient outside the layers.
    assert layers <= names[1]
    for module, what in (
        ("decoder.layers.0.mlp.experts.linear_fc2", "output.grad"),
        ("decoder.layers.2.linear_proj", "output.grad"),
        ("decoder.layers.1.mlp.experts.linear_fc1", "input.codes"),
    ):
        for instance in (0, 1):
            values = [
                d.load(e)
                for d in (plain, again)
                for e in d.entries
                if (e.module, e.what, e.instance) == (module, what, instance)
            ]
            assert torch.equal(*values), (module, instance)


def test_names_are_those_of_the_whole_model():
    # Prevents: layer 0 of every pipeline stage under one name, rules of the policy file that do not fit.
    model = Model()
    for layer in model.decoder.layers:
        layer.layer_number += 10
        for each in (layer.mlp.experts.linear_fc1, layer.mlp.experts.linear_fc2):
            del each.layer_name
    names = [name for name, _ in module_names(model)]
    assert names[0] == "model"
    assert "decoder.layers.10.mlp.experts.linear_fc1" in names
    assert not any(name.startswith("decoder.layers.0") for name in names)


def test_a_strange_rank_and_a_step_outside(tmp_path):
    # Prevents: files of ranks nobody asked for; a file of steps that never come, found after the run.
    capture = capture_of(config_of(tmp_path, ranks=frozenset({1})))
    capture.begin_training([Model()], None, 1, 1)
    capture.begin_step(1)
    capture.end_step(1)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="no step of the file is one of this run's, 2 to 9"):
        capture_of(config_of(tmp_path)).begin_training([Model()], None, 2, 9)
    rule = CaptureRule(match=("decoder.layers.*.mlp.fc1",), what=frozenset({"inputs"}))
    with pytest.raises(ValueError, match=r"decoder.layers.\*.mlp.fc1 is the name of no module"):
        capture_of(config_of(tmp_path, rule)).begin_training([Model()], None, 1, 1)


def test_tensorboard(tmp_path):
    # Prevents: scalars of one step under another, tags that say nothing.
    seams = Seams()
    seams.tags = []
    rule = CaptureRule(match=("**.linear_fc1",), what=frozenset({"operands", "outputs"}))
    capture = capture_of(config_of(tmp_path, rule, steps=Steps(single=frozenset({7}))), seams)
    model = Model()
    capture.begin_training([model], None, 1, 9)
    for step in (6, 7, 8):
        capture.begin_step(step)
        run(model, batch(), backward=False)
        capture.end_step(step)
    assert {step for _, _, step in seams.tags} == {7}
    tags = {tag: value for tag, value, _ in seams.tags}
    stem = "capture/decoder.layers.0.mlp.experts.linear_fc1"
    assert 0.01 < tags[f"{stem}/input.operand/rel_l2"] < 0.2
    assert tags[f"{stem}/output/nonfinite_rows"] == 0
    assert not (tmp_path / "step-000007").exists()  # statistics alone


# --- what it costs --------------------------------------------------------------------------------


def _hooks(model: Model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_off_nothing_is_installed(tmp_path):
    # Prevents: a run that is slower at every step for the sake of one; hooks left after an exception.
    model = Model()
    capture = capture_of(config_of(tmp_path, steps=Steps(single=frozenset({2}))))
    capture.begin_training([model], None, 1, 3)
    capture.begin_step(1)
    assert (_hooks(model), moe._observer) == (0, None)
    capture.end_step(1)
    capture.begin_step(2)
    assert _hooks(model) > NUM_LAYERS
    assert moe._observer is not None
    capture.end_training(KeyError())
    assert (_hooks(model), moe._observer) == (0, None)
    assert not list(tmp_path.iterdir())


def test_no_bit_of_the_run_changes(tmp_path):
    # Prevents: a measurement that changes what it measures.
    plain, observed = Model(), Model()
    expected = run(plain, batch(0), batch(1))
    capture = capture_of(config_of(tmp_path))
    capture.begin_training([observed], None, 1, 1)
    capture.begin_step(1)
    found = run(observed, batch(0), batch(1))
    capture.end_step(1)
    assert all(map(torch.equal, expected, found))
    for (name, p), q in zip(plain.named_parameters(), observed.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


# --- files ----------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
import capture_cases, safetensors.torch
original = safetensors.torch.save_file
def save_file(*args, **kw):
    original(*args, **kw)
    os.kill(os.getpid(), signal.SIGKILL)
safetensors.torch.save_file = save_file
capture_cases.captured(Path({out!r}), capture_cases.Model(), capture_cases.batch())
"""


def test_a_killed_writer_leaves_nothing_half_written(tmp_path):
    # Prevents: a dump of some of its tensors, taken for the whole one by the next comparison.
    tests = Path(__file__).parent
    code = KILLED.format(root=str(tests.parent), tests=str(tests), out=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert not list(tmp_path.glob("step-*/rank-*/*"))
    with pytest.raises(ValueError, match="no dump"):
        dumps_below(tmp_path)
    lines = _lines(tmp_path)  # whole lines
    assert lines
    folder = captured(tmp_path, Model(), batch())
    assert Dump(folder).entries
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch, caplog):
    # Prevents: the same of a full disk; a training run ended by its measurement.
    import safetensors.torch

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    captured(tmp_path, Model(), batch())
    assert "step 1 was not written: [Errno 28] No space left" in caplog.text
    assert not list(tmp_path.glob("step-*/*"))


def test_a_missing_package_is_told_before_training(tmp_path, monkeypatch):
    # Prevents: a dump that fails after the first step of a run that waited for its GPUs.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install safetensors"):
        captured(tmp_path, Model(), batch())
    captured(tmp_path, Model(), batch(), rules=(replace(EVERYTHING, tensors=False),))


def test_damaged_dumps_are_refused(tmp_path):
    # Prevents: a comparison of what happens to be left.
    folder = captured(tmp_path, Model(), batch())
    with Edit(folder) as edit:
        del edit.tensors[edit.entry("decoder.layers.0.mlp", "output")["key"]]
    with pytest.raises(ValueError, match=r"lacks .*decoder.layers.0.mlp/output.* \(1 in all\)"):
        Dump(folder)
    (folder / "tensors.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ValueError, match="cannot be read"):
        Dump(folder)
    (folder / "index.json").write_text('{"format": "other"}')
    with pytest.raises(ValueError, match="not of format minite-capture/1"):
        Dump(folder)


def test_several_steps_are_not_mixed(tmp_path):
    # Prevents: step 1 of one run compared with step 2 of another.
    model = Model()
    capture = capture_of(config_of(tmp_path, steps=Steps(single=frozenset({1, 2}))))
    capture.begin_training([model], None, 1, 2)
    for step in (1, 2):
        capture.begin_step(step)
        run(model, batch(), backward=False)
        capture.end_step(step)
    with pytest.raises(ValueError, match=r"holds 2 steps \(step-000001, step-000002\); name one"):
        dumps_below(tmp_path)
    assert [each.name for each in dumps_below(tmp_path / "step-000002")] == ["rank-00000"]


def test_rules_without_tensors_dump_nothing(tmp_path):
    # Prevents: gigabytes for somebody who asked for numbers.
    captured(tmp_path, Model(), batch(), rules=(replace(EVERYTHING, tensors=False),))
    assert [path.name for path in tmp_path.iterdir()] == ["statistics.rank-00000.jsonl"]
    whats = {line["what"] for line in _lines(tmp_path)}
    assert {"input", "output", "weight", "input.operand", "weight.operand", "routing"} <= whats


# --- the option -----------------------------------------------------------------------------------


def test_the_option_is_taken_out_of_megatrons_words(tmp_path):
    # Prevents: Megatron refusing a word it does not know; a value taken for a word of the script.
    file = _file(
        tmp_path,
        f"out: {tmp_path / 'out'}\nsteps: [1]\nrules: [{{match: model, what: [logprobs]}}]\n",
    )
    assert take_capture(["--bf16", "x"]) == (["--bf16", "x"], None)
    for words in (["--minite-capture", str(file)], [f"--minite-capture={file}"]):
        rest, capture = take_capture(["--bf16", *words, "--lr", "1"])
        assert rest == ["--bf16", "--lr", "1"]
        assert capture.config.of("model") == {"logprobs": False}
    with pytest.raises(ValueError, match="--minite-capture: give a YAML file"):
        take_capture(["--bf16", "--minite-capture"])
    file.write_text(f"out: {file}/below\nsteps: [1]\nrules: [{{match: model, what: [logprobs]}}]\n")
    with pytest.raises(ValueError, match="name a folder that can be written"):
        take_capture(["--minite-capture", str(file)])
