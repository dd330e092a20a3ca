"""The verbs `sensitivity` and `teacher-forced` as they are called, and the texts that they take."""

import csv
import json
import math
import sys

import diagnose_cases
import pytest
import sensitivity_cases as cases
import torch

from megatron_nvfp4.__main__ import main
from megatron_nvfp4.diagnostics import sensitivity
from megatron_nvfp4.diagnostics.readers import read
from megatron_nvfp4.diagnostics.sensitivity import Measurement, Row
from megatron_nvfp4.diagnostics.sensitivity_forced import gap_figures
from megatron_nvfp4.diagnostics.sensitivity_text import read_segments

RECIPES = ("nvfp4_w4a16", "nvfp4_per_token")


@pytest.fixture
def folder(tmp_path):
    return cases.write(tmp_path / "hf")


@pytest.fixture
def text(tmp_path):
    return cases.write_ids(tmp_path / "ids.json")


def sweep(folder, text, out, *options: str) -> int:
    words = ("--length", "48", "--segments", "2", "--out", out, *options)
    return main(["sensitivity", *map(str, (folder, "--text", text, *words))])


# --- sensitivity ----------------------------------------------------------------------------------


def test_a_sweep_writes_its_tables_and_plot(folder, text, tmp_path, capsys):
    # Prevents: results that are only on a terminal, or a plot that needs a screen.
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    out = tmp_path / "out"
    options = ("--recipes", *RECIPES, "--per-layer", "--all-but-one", "kind")
    assert sweep(folder, text, out, *options) == 0
    captured = capsys.readouterr()
    assert captured.out == (out / "sensitivity.md").read_text()
    assert "hf, 96 tokens of ids.json in 2 sequences." in captured.out
    assert "[11/11] nvfp4_per_token without linear_fc2: NLL " in captured.err
    rows = list(csv.DictReader((out / "sweep.csv").open()))
    assert [row["row"] for row in rows[:4]] == [
        "bf16",
        *RECIPES,
        "nvfp4_w4a16 without linear_qkv",
    ]
    assert [row["linears"] for row in rows[:4]] == ["0", "16", "16", "12"]
    assert float(rows[2]["mean_abs_gap"]) > float(rows[1]["mean_abs_gap"]) > 0
    errors = list(csv.DictReader((out / "errors.csv").open()))
    assert len(errors) == 16 * 2 + 16 * 3  # W4A16 does not quantise activations
    assert (out / "sensitivity.png").read_bytes().startswith(b"\x89PNG")
    assert not list(out.rglob("*.partial"))


def test_a_sweep_that_was_cut_off_goes_on(folder, text, tmp_path, capsys, monkeypatch):
    # Prevents: hours lost to a stopped job, or a half-written row that is believed.
    options = ("--recipes", *RECIPES, "--one-at-a-time", "kind")
    assert sweep(folder, text, tmp_path / "whole", *options) == 0
    measured, right = [], sensitivity.measure

    def measure(model, row, *rest):
        if len(measured) == 3:
            raise RuntimeError("cut off")
        measured.append(row.label)
        return right(model, row, *rest)

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(sensitivity, "measure", measure)
        assert sweep(folder, text, out, *options) == 2
    assert len(list((out / "rows").iterdir())) == len(measured) == 3
    assert not (out / "sensitivity.md").exists()
    capsys.readouterr()
    assert sweep(folder, text, out, *options) == 0
    assert capsys.readouterr().err.count("from before") == 3
    names = ("sensitivity.md", "sweep.csv")
    assert all((out / n).read_bytes() == (tmp_path / "whole" / n).read_bytes() for n in names)
    # Another recipe joins the rows that are there.
    assert sweep(folder, text, out, "--recipes", *RECIPES, "mxfp8") == 0
    assert capsys.readouterr().err.count("from before") == 3


def test_a_sweep_that_was_cut_off_before_its_settings_goes_on(folder, text, tmp_path, capsys):
    # Prevents: an --out that no run takes any more, after one that was killed at once.
    out = tmp_path / "out"
    for name in ("rows", "errors"):
        (out / name).mkdir(parents=True)
    (out / ".partial-settings.json").write_text("{")
    assert sweep(folder, text, out, "--recipes", "mxfp8") == 0
    (out / "settings.json").write_text("[]")
    assert sweep(folder, text, out, "--recipes", "mxfp8") == 2
    assert "settings.json: holds no settings of a sweep; remove" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["text", "exclude", "weights"])
def test_rows_of_other_runs_are_not_mixed(folder, text, tmp_path, capsys, change):
    # Prevents: a table whose rows are of two texts or two models.
    out, options = tmp_path / "out", ["--recipes", "mxfp8"]
    assert sweep(folder, text, out, *options) == 0
    names = {"text": "tokens", "exclude": "exclude", "weights": "weights"}
    if change == "text":
        text.write_text(json.dumps(cases.ids(200, seed=5)))
    elif change == "exclude":
        options += ["--exclude", "**.linear_fc2"]
    else:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes())
    assert sweep(folder, text, out, *options) == 2
    assert f"holds a sweep with other {names[change]}; choose another" in capsys.readouterr().err


def test_a_damaged_row_is_named(folder, text, tmp_path, capsys):
    out = tmp_path / "out"
    assert sweep(folder, text, out, "--recipes", "mxfp8") == 0
    for content, message in (("{", "mxfp8.json: is no JSON"), ("{}", "is no row of a sweep")):
        (out / "rows" / "mxfp8.json").write_text(content)
        assert sweep(folder, text, out, "--recipes", "mxfp8") == 2
        assert message in capsys.readouterr().err
    other = tmp_path / "hf2"
    assert sweep(folder, text, folder, "--recipes", "mxfp8") == 2
    assert "is no folder of a sweep and not empty" in capsys.readouterr().err
    assert sweep(other, text, out) == 2
    assert "hf2: no such folder" in capsys.readouterr().err


def test_without_matplotlib_there_is_no_plot_and_a_word(
    folder, text, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert sweep(folder, text, tmp_path / "out", "--recipes", "mxfp8") == 0
    assert "sensitivity.png: pip install matplotlib" in capsys.readouterr().err
    assert (tmp_path / "out" / "sensitivity.md").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--recipes", "w4a5"), "unknown recipe 'w4a5'"),
        (("--exclude", "linear_fc2"), "--exclude linear_fc2: no linear matches"),
        (("--length", "0"), "--length 0: give 1 or more"),
        (("--length", "150"), "150 tokens in a sequence, max_position_embeddings=128"),
        (("--device", "cuda"), "--device cuda: torch sees no GPU"),
    ],
)
def test_wrong_use_is_two_and_writes_nothing(folder, text, tmp_path, capsys, options, message):
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("torch sees a GPU")
    assert sweep(folder, text, tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- texts ----------------------------------------------------------------------------------------


def test_ids_are_cut_into_sequences(tmp_path):
    # Prevents: tokens scored twice, or a first token of a piece that nobody scores.
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(list(range(100))))
    found = [tokens.tolist() for tokens in read_segments(path, tmp_path, 40, 9)]
    assert found == [list(range(41)), list(range(40, 81))]
    assert len(read_segments(path, tmp_path, 40, 1)) == 1
    assert len(read_segments(path, tmp_path, 512, 9)[0]) == 100
    path.write_text(json.dumps([[1, 2, 3], [4, 5, 6, 7]]))
    found = [tokens.tolist() for tokens in read_segments(path, tmp_path, 2, 9)]
    assert found == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"[1, 2", "is no JSON"),
        ("a.json", b'{"ids": [1]}', "is no list of token ids"),
        ("a.json", b"[1, 2.5]", "is no list of token ids"),
        ("a.json", b"[[1, 2], [3]]", "sequence 1 has 1 tokens"),
        ("a.json", b"[]", "is no list of token ids"),
        ("a.json", b'[""]', "is no list of token ids"),
        ("a.json", b'["ab"]', "is no list of token ids"),
        ("a.json", str([1, 10**30]).encode(), "is no list of token ids"),
        ("a.json", b"[1" + b"0" * 5000, "is no JSON"),
        ("a.json", b"[" * 100_000, "is no JSON"),
        ("a.txt", b"words", "tokenizer.json: is not there"),
        ("a.txt", b"\xff\xfe", "is no UTF-8 text"),
    ],
)
def test_files_that_are_no_text_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_segments(tmp_path / name, tmp_path, 10, 2)


def test_a_folder_is_no_text(tmp_path):
    # Prevents: an error of the file system without the option and a remedy.
    with pytest.raises(ValueError, match=r"--text .*: is a folder; give a file with text"):
        read_segments(tmp_path, tmp_path, 10, 2)


def test_text_is_tokenised_by_the_models_tokenizer(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = "the cat sat on a mat".split()
    vocab = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "text.txt"
    path.write_text("on the mat the cat sat")
    (found,) = read_segments(path, tmp_path, 10, 2)
    assert found.tolist() == [3, 0, 5, 0, 1, 2]
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"pip install tokenizers, or give .* as token ids"):
        read_segments(path, tmp_path, 10, 2)


# --- teacher-forced -------------------------------------------------------------------------------


def test_gaps_by_hand():
    # Prevents: the sign of a gap turned round, or a tail taken from one side.
    def side(logprobs, top):
        row = Row(recipe="mxfp8")
        return Measurement(row=row, logprobs=logprobs, top=top, num_quantized=0)

    learner = side([[-1.0, -2.0], [-5.0, -1.0]], [[1, 2], [3, 4]])
    sampler = side([[-1.5, -2.0], [-2.0, -1.25]], [[1, 2], [9, 4]])
    found = gap_figures(learner, sampler)  # 0.5, 0, -3, 0.25
    assert (found["tokens"], found["mean"], found["mean_abs"]) == (4, -0.5625, 0.9375)
    assert (found["p50"], found["p99"], found["max"]) == (0.25, 3.0, 3.0)
    assert (found["share_below_minus_1"], found["share_above_1"]) == (0.25, 0.0)
    assert (found["top1_flips"], found["num_top1_flips"]) == (0.25, 1)


def forced(folder, text, out, sampler, learner, *options):
    words = ("--length", "48", "--sampler", sampler, "--learner", learner, "--out", out, *options)
    return main(["teacher-forced", *map(str, (folder, "--text", text, *words))])


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_what_is_written_is_what_diagnose_reads(folder, text, tmp_path, capsys, ending):
    # Prevents: sides exchanged, or tokens one beside their log-probs.
    out, figures = tmp_path / f"gap.{ending}", tmp_path / "gap.json"
    assert forced(folder, text, out, "per_token", "bf16", "--json", figures) == 0
    shown = capsys.readouterr().out
    data = json.loads(figures.read_text())
    assert data["recipes"] == {"sampler": "nvfp4_per_token", "learner": "bf16"}
    assert f"of {data['gap']['tokens']} tokens: mean {data['gap']['mean']:+.5f}" in shown
    record = read([out])
    segments = read_segments(text, folder, 48, 4)
    assert record.tokens.tolist() == [t for each in segments for t in each[1:].tolist()]
    model = cases.decoder(folder)
    expected = torch.cat([model.scores(tokens).logprobs for tokens in segments])
    assert torch.equal(record.learner, expected.float().double())
    assert record.delta.abs().mean().item() == pytest.approx(data["gap"]["mean_abs"], rel=1e-4)
    assert math.isclose(-record.sampler.mean().item(), data["nll"]["sampler"], rel_tol=1e-6)
    assert main(["diagnose", str(out), "--json", str(tmp_path / "d.json")]) in (0, 1)
    checks = {
        each["name"]: each["status"]
        for each in json.loads((tmp_path / "d.json").read_text())["checks"]
    }
    assert checks["alignment"] == "passed"


def test_one_recipe_twice_has_no_gap(folder, text, tmp_path, capsys):
    # Prevents: noise of the tool itself that is taken for the recipes'.
    figures = tmp_path / "gap.json"
    assert forced(folder, text, tmp_path / "gap.pt", "mxfp8", "mxfp8", "--json", figures) == 0
    gap = json.loads(figures.read_text())["gap"]
    assert (gap["max"], gap["top1_flips"]) == (0, 0)
    assert forced(folder, text, tmp_path / "gap.npz", "mxfp8", "mxfp8") == 2
    assert "gap.npz: give a name that ends in .pt" in capsys.readouterr().err


def test_outputs_are_checked_before_the_model_runs(folder, text, tmp_path, capsys, monkeypatch):
    # Prevents: a checkpoint or a text replaced by the result, or minutes spent for a name that cannot be.
    monkeypatch.setattr(sensitivity, "measure", None)
    out = tmp_path / "gap.pt"
    weights = folder / "model.safetensors"
    held = weights.read_bytes()
    for target, options, message in (
        (weights, (), "model.safetensors: is an input, which it would replace"),
        (out, ("--json", text), "ids.json: is an input"),
        (out, ("--json", out), f"--json {out}: is the output of --out, too"),
        (tmp_path / "absent" / "gap.pt", (), "there is no folder"),
    ):
        assert forced(folder, text, target, "mxfp8", "mxfp8", *options) == 2
        assert message in capsys.readouterr().err
    assert weights.read_bytes() == held
    words = ("context-swap", folder, "--text", text, "--json", text)
    assert main([*map(str, words)]) == 2
    assert "--json" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_a_full_disk_is_two_and_named(folder, text, tmp_path, capsys, ending):
    # Prevents: a traceback of safetensors, or words of torch's zip writer, behind the whole run.
    with diagnose_cases.no_room():
        assert forced(folder, text, tmp_path / f"gap.{ending}", "mxfp8", "mxfp8") == 2
    said = capsys.readouterr().err
    assert f"gap.{ending}: could not be written (File too large); make room" in said
    assert not list(tmp_path.glob("*gap*"))
