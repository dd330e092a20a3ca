"""Captures that cannot be written, files that ask for nothing, dumps that are damaged, and parameters on
several ranks: what capture and compare must say of them."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from capture_cases import Edit, Model, Seams, batch, capture_of, captured, config_of
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_nvfp4.__main__ import main
from megatron_nvfp4.diagnostics.capture import _append
from megatron_nvfp4.diagnostics.capture_config import CaptureRule, Steps, load_capture_config
from megatron_nvfp4.diagnostics.compare import compare_sides
from megatron_nvfp4.diagnostics.compare_sides import read_side

STATISTICS = "statistics.rank-00000.jsonl"
MLP = "decoder.layers.1.mlp"


@pytest.fixture(scope="module")
def left(tmp_path_factory) -> Path:
    """One side of every comparison, left as it is."""
    return captured(tmp_path_factory.mktemp("left"), Model(), batch())


@pytest.fixture
def right(left, tmp_path) -> Path:
    """The same dump, to be edited."""
    return Path(shutil.copytree(left, tmp_path / "right"))


# --- what cannot be written -----------------------------------------------------------------------


def test_no_error_of_a_dump_ends_training(tmp_path, monkeypatch, caplog):
    # Prevents: a training run killed by a full disk, which safetensors reports by an error of its own, or by
    # something else that stands where the dump goes.
    stands = tmp_path / "file" / "step-000001" / "rank-00000"
    stands.parent.mkdir(parents=True)
    stands.write_text("x")
    captured(tmp_path / "file", Model(), batch())
    assert "step 1 was not written" in caplog.text
    assert "exists and is not a folder" in caplog.text
    caplog.clear()

    def full(*_):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    captured(tmp_path / "full", Model(), batch())
    assert "step 1 was not written: I/O error: No space left" in caplog.text
    assert not list(tmp_path.glob("full/step-*/*"))


def test_a_disk_that_takes_a_part(tmp_path):
    # Prevents: lines that are lost without a word where a call writes less than it is given.
    path, (soft, hard) = tmp_path / "s", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        with pytest.raises(OSError):
            _append(path, b"12345678\n" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size == 4000
    _append(path, b"next\n")
    assert path.read_bytes().endswith(b"\n1234\nnext\n")


def test_a_torn_line_does_not_take_the_next_with_it(tmp_path):
    # Prevents: the first line of a resumed run glued to the one at which the former run was killed.
    (tmp_path / STATISTICS).write_text('{"step": 1, "ra')
    captured(tmp_path, Model(), batch())
    captured(tmp_path, Model(), batch())
    first, *lines = (tmp_path / STATISTICS).read_text().splitlines()
    assert first == '{"step": 1, "ra'
    assert {json.loads(line)["step"] for line in lines} == {1}


# --- files that ask for nothing -------------------------------------------------------------------


def test_every_pattern_must_match(tmp_path):
    # Prevents: a misspelt name beside a good one, missed after the run.
    rule = CaptureRule(match=("**.router", "**.linear_fc3"), what=frozenset({"outputs"}))
    with pytest.raises(ValueError, match=r"match \*\*\.linear_fc3 is the name of no module"):
        capture_of(config_of(tmp_path, rule)).begin_training([Model()], None, 1, 1)


def _config(tmp_path: Path, steps: str, more: str = ""):
    file = tmp_path / "capture.yaml"
    rules = "rules: [{match: model, what: [logprobs]}]"
    file.write_text(f"out: {tmp_path / 'out'}\nsteps: {steps}\n{rules}\n{more}\n")
    return load_capture_config(file)


def test_no_rank(tmp_path):
    # Prevents: an empty list taken for all ranks by a reader of the file, for none by the run.
    with pytest.raises(ValueError, match=r"ranks=\[\]: is no rank; leave ranks out for all"):
        _config(tmp_path, "[1]", "ranks: []")


def test_a_range_without_quotes(tmp_path, caplog):
    # Prevents: YAML's 10:20, the number 620, behind the end of a run, with nothing said of it.
    hint = 'without quotes 10:20 is 620, write "10:20"'
    with pytest.raises(
        ValueError, match="no step of the file is one of this run's, 1 to 90; " + hint
    ):
        capture_of(_config(tmp_path, "[10:20]")).begin_training([Model()], None, 1, 90)
    capture_of(_config(tmp_path, "[3, 10:20]")).begin_training([Model()], None, 1, 90)
    assert hint in caplog.text
    assert Steps(single=frozenset({620, 621})).unquoted_ranges(620) == [
        'without quotes 10:21 is 621, write "10:21"'
    ]
    assert Steps(single=frozenset({60, 100, 605})).unquoted_ranges(90) == [
        'without quotes 1:40 is 100, write "1:40"'
    ]


# --- parameters -----------------------------------------------------------------------------------


def _with_norm(scale: float = 1.0) -> Model:
    """A model with a parameter that is not called weight."""
    model = Model()
    model.embedding.layer_norm_weight = torch.nn.Parameter(torch.full((4,), scale))
    return model


def _on_two_ranks(folder: Path, model: Model, *microbatches: torch.Tensor) -> Path:
    """The folder of a step that two data-parallel ranks captured, each all microbatches."""
    first = captured(folder, model, *microbatches)
    second = shutil.copytree(first, first.with_name("rank-00001"))
    with Edit(Path(second)) as edit:
        edit.index["rank"] = edit.index["coordinates"]["rank"] = 1
    return first.parent


def test_a_parameter_of_any_name_is_compared(tmp_path, capsys):
    # Prevents: "the same bits" over a norm's weight that differs, where microbatches are cut differently.
    ids = batch()
    one = captured(tmp_path / "one", _with_norm(), ids)
    same = captured(tmp_path / "same", _with_norm(), ids[:1], ids[1:])
    other = captured(tmp_path / "other", _with_norm(3.0), ids[:1], ids[1:])
    assert main(["compare", str(one), str(same)]) == 0
    assert main(["compare", str(one), str(other), "--common"]) == 1
    said = capsys.readouterr().out
    assert "embedding layer_norm_weight differs at [0]: 1.0 against 3.0" in said


def test_copies_of_a_parameter_are_one_quantity(tmp_path):
    # Prevents: a parameter of the second rank reported as one that only this side has; a copy that differs
    # from the first rank's and is never looked at.
    one = captured(tmp_path / "one", _with_norm(), batch())
    two = _on_two_ranks(tmp_path / "two", _with_norm(), batch())
    assert main(["compare", str(one), str(two)]) == 0
    with Edit(two / "rank-00001") as edit:
        edit.tensor("embedding", "layer_norm_weight")[2] = 5
    for sides in ((one, two), (two, one)):
        first = compare_sides(*(read_side(path, lambda name: None) for path in sides)).first
        assert str(first.key) == "embedding layer_norm_weight"
        assert first.place.index == (2,)
        assert first.reason.endswith(
            "(data-parallel ranks 0 and 1)" if sides[1] == two else "(data-parallel ranks 1 and 0)"
        )


def test_what_cannot_be_compared_counts(left, tmp_path, capsys):
    # Prevents: exit status 0 for quantities of which nobody knows whether they differ.
    ids = batch()
    right = captured(tmp_path, Model(), ids[:1], ids[1:])
    assert main(["compare", str(left), str(right)]) == 0
    for folder in (shutil.copytree(left, tmp_path / "left"), right):
        with Edit(Path(folder)) as edit:
            for entry in edit.index["entries"]:
                if (entry["module"], entry["what"]) == ("decoder.layers.0.linear_proj", "output"):
                    entry["rows"] = None
    capsys.readouterr()
    words = ["compare", str(tmp_path / "left"), str(right)]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "compared outputs have the same bits" in said
    assert "not comparable, as microbatches are cut differently: 1, such as" in said
    assert "(--common leaves them out of the verdict)" in said
    assert main([*words, "--common"]) == 0


# --- routing --------------------------------------------------------------------------------------


def test_the_routers_choice_comes_before_a_permutation(left, right):
    # Prevents: a router that chose otherwise reported as rows in the wrong place, before the choice itself
    # was compared.
    with Edit(right) as edit:
        ids = edit.tensor(f"{MLP}.router", "routing.ids")
        ids[0, 0] = next(n for n in range(4) if n not in ids[0])
    result = compare_sides(*(read_side(path, lambda name: None) for path in (left, right)))
    names = [str(each.key) for each in result.operators if each.differs]
    assert names == [f"{MLP}.router routing.ids", f"{MLP}.experts permutation"]


def test_a_row_that_is_not_there(left, right):
    # Prevents: a traceback for a choice that is sent behind the last row.
    with Edit(right) as edit:
        edit.tensor(f"{MLP}.router", "routing.slots")[0, 0] += 1 << 20
    first = compare_sides(*(read_side(path, lambda name: None) for path in (left, right))).first
    assert str(first.key) == f"{MLP}.experts permutation"
    assert "is none of 20; the router sends token 0 to expert" in first.reason


def test_experts_without_a_row(left, tmp_path):
    # Prevents: a traceback where no token came to a rank's experts.
    for folder in (shutil.copytree(left, tmp_path / name) for name in "ab"):
        with Edit(Path(folder)) as edit:
            entry = edit.entry(f"{MLP}.experts.linear_fc1", "output")
            edit.tensors["rows/none.token"] = edit.tensors["rows/none.expert"] = torch.zeros(
                0
            ).long()
            edit.tensors[entry["key"]] = torch.zeros(0, 64, dtype=torch.bfloat16)
            entry["rows"], entry["shape"] = "none", [0, 64]
    sides = [read_side(tmp_path / name, lambda name: None) for name in "ab"]
    found = {str(each.key): each for each in compare_sides(*sides).operators}
    assert found[f"{MLP}.experts.linear_fc1 output"].num_rows == 0


# --- damaged dumps --------------------------------------------------------------------------------


def _each(part: str, change):
    """All tensors of the file whose key ends so, changed."""

    def plant(edit: Edit) -> None:
        for key in [key for key in edit.tensors if key.endswith(part)]:
            edit.tensors[key] = change(edit.tensors[key]).clone()

    return plant


def _index(change):
    return lambda edit: change(edit.index)


DAMAGES = {
    "no step": (_index(lambda i: i.pop("step")), "index.json: step is None"),
    "no rank": (_index(lambda i: i.pop("rank")), "index.json: rank is None"),
    "coordinates": (_index(lambda i: i.update(coordinates=None)), "coordinates is None"),
    "a size": (_index(lambda i: i["coordinates"].update(tp_size="2")), "coordinates are {"),
    "no shard": (_index(lambda i: i["coordinates"].update(tp_size=2)), "coordinates are {"),
    "model": (_index(lambda i: i.update(model={"num_heads": 3})), "model is {'num_heads': 3}"),
    "notes": (_index(lambda i: i.update(notes=None)), "notes is None"),
    "entries": (_index(lambda i: i.update(entries="abc")), "entries is 'abc'"),
    "a key more": (_index(lambda i: i["entries"][3].update(foo=1)), r"entries[3] is {"),
    "a key less": (_index(lambda i: i["entries"][3].pop("shape")), r"entries[3] is {"),
    "twice": (_index(lambda i: i["entries"].append(i["entries"][0])), r"is {"),
    "shape": (_index(lambda i: i["entries"][0].update(shape=[1])), "index.json says [1]"),
    "no table": (_index(lambda i: i["entries"][0].update(rows="x")), "has rows of x, whose table"),
    "short table": (_each(".token", lambda t: t[:1]), "its table rows/"),
    "a token": (_each(".token", lambda t: t + 999), "holds 999, not a number from -1 to 9"),
    "an expert": (_each(".expert", lambda t: t - 5), "holds -5, not a number from 0 to"),
    "no positions": (lambda e: e.tensors.pop("tokens/0.positions"), "ids [10] and positions None"),
    "lengths": (_each("0.ids", lambda t: t[:3]), "tokens/0 has ids [3] and positions [10]"),
    "ids": (_each("0.ids", lambda t: t.double()), "tokens/0.ids is torch.float64, not torch.int64"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_dumps(left, right, damage, capsys):
    # Prevents: a traceback, or torch's words, for a file that another program wrote or changed.
    plant, said = DAMAGES[damage]
    with Edit(right) as edit:
        plant(edit)
    assert main(["compare", str(left), str(right)]) == 2
    error = capsys.readouterr().err
    assert str(right) in error
    assert said in error
    assert "capture it again" in error


def test_an_index_that_is_no_text(left, right, capsys):
    # Prevents: a codec's error without the file that it is of.
    (right / "index.json").write_bytes(b"\xff\xfe")
    assert main(["compare", str(left), str(right)]) == 2
    assert f"{right}: no dump of a capture" in capsys.readouterr().err


@pytest.mark.parametrize("order", ["xx", "5", '["b"]', "[1]", '["a", "a"]', '["a"]'])
def test_an_order_that_is_none(tmp_path, order, capsys):
    # Prevents: a JSON error without a file, a traceback, and outputs outside the order never compared.
    file = tmp_path / "outputs.safetensors"
    save_file({"a": torch.zeros(2), "1": torch.zeros(2)}, file, metadata={"order": order})
    assert main(["compare", str(file), str(file)]) == 2
    assert f"{file}: no dump of captured outputs" in capsys.readouterr().err


BATCH = "model.forward_batch_info."
IDS = {BATCH + "input_ids": torch.arange(5), BATCH + "positions": torch.arange(5)}
PASSES = {
    "lengths": (IDS | {BATCH + "positions": torch.arange(3)}, "input_ids torch.int64 (5,), positions"),
    "positions": (IDS | {BATCH + "positions": torch.full((5,), torch.nan)}, "torch.float32 (5,)"),
    "keys": (IDS | {1: torch.zeros(3)}, "holds a dict of other keys than names"),
    "no choice": (IDS | {"model.layers.0.mlp.topk": [None, None]}, "mlp.topk holds no weights and ids"),
    "other choices": (
        IDS | {"model.layers.0.mlp.topk": [torch.zeros(5, 2), torch.zeros(5, 3).long()]},
        "mlp.topk holds no weights and ids (T, top_k)",
    ),
    "empty": (b"", "cannot be read"),
    "torn": (b"PK\3\4" + b"\0" * 40, "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("damage", PASSES)
def test_damaged_passes(left, tmp_path, damage, capsys):
    # Prevents: the same of a sampler's files.
    content, said = PASSES[damage]
    file = tmp_path / "pass.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    assert main(["compare", str(left), str(file)]) == 2
    error = capsys.readouterr().err
    assert str(file) in error
    assert said in error


def test_modules_without_a_forward_are_refused_before_the_first_step(tmp_path):
    # Prevents: a run that dies at its captured step, hours later, or a capture that is empty.
    class Bypassed(Seams):
        def bypassed(self, model):
            return "something else computes the model"

    for what, refused in (("weights", False), ("outputs", True)):
        rule = CaptureRule(match=("decoder.**",), what=frozenset({what}), tensors=False)
        capture = capture_of(config_of(tmp_path / what, rule), Bypassed())
        if refused:
            with pytest.raises(ValueError, match="else computes the model; capture their weights"):
                capture.begin_training([Model()], None, 1, 1)
        else:
            capture.begin_training([Model()], None, 1, 1)
