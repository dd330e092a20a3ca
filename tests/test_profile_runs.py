"""The profiler on runs: a small torch model, the verb, and Megatron on the CPU."""

import csv
import gzip
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from megatron_runs import MINITE, MODEL, MOE, ROOT, environment, require_megatron

from megatron_nvfp4.__main__ import main
from megatron_nvfp4.diagnostics import kernel_costs
from megatron_nvfp4.diagnostics.profile import StepProfiler
from megatron_nvfp4.diagnostics.trace import read_steps

require_megatron()

# --- StepProfiler -------------------------------------------------------------------------------------


class _Folder:
    """A folder that says what became of it."""

    def __init__(self, path: Path) -> None:
        self.path, self.state = path, "open"

    def publish(self) -> None:
        self.state = "published"

    def discard(self) -> None:
        self.state = "discarded"


def _train(profiler: StepProfiler, num_steps: int, fail_at: int = 0) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    step_before = optimizer.step
    profiler.begin_training([model], optimizer, 1, 6)
    error: BaseException | None = None
    try:
        for step in range(1, num_steps + 1):
            profiler.begin_step(step)
            model(torch.ones(2, 8)).sum().backward()
            if step == fail_at:
                raise KeyError("the run's own error")
            optimizer.step()
            profiler.end_step(step)
    except KeyError as caught:
        error = caught
    profiler.end_training(error)
    assert optimizer.step == step_before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return model


def _profiler(
    folder: _Folder, first: int, last: int, *, rank: int = 0
) -> tuple[StepProfiler, list]:
    reported: list = []
    profiler = StepProfiler(
        first, last, rank=rank, open_folder=lambda: folder, report=reported.extend
    )
    return profiler, reported


@pytest.mark.parametrize("first", [1, 3])
def test_the_chosen_steps_are_profiled(tmp_path, first):
    # Prevents: steps off by one, with and without a step to warm up; hooks left behind; a table whose sums
    # are not the trace's.
    folder = _Folder(tmp_path)
    profiler, steps = _profiler(folder, first, 4)
    _train(profiler, 6)
    assert folder.state == "published"
    assert [step.number for step in steps] == list(range(first, 5))
    for step in steps:
        assert sum(step.shares.values()) == pytest.approx(step.time)
        mm = [call for call in step.calls if call.name in ("aten::addmm", "aten::mm")]
        assert {(c.module, c.phase) for c in mm} >= {
            (n, p) for n in "02" for p in ("forward", "backward")
        }
        assert any(call.kind == "optimizer" for call in step.calls)
        assert all(call.cost.flops for call in mm)
    with (tmp_path / "kernels.csv").open() as file:
        rows = list(csv.DictReader(file))
    time = sum(step.time for step in steps)
    assert sum(float(row["share"]) for row in rows) == pytest.approx(
        sum(call.time for step in steps for call in step.calls) / time, abs=1e-3
    )


def test_a_run_that_ends_early_leaves_nothing(tmp_path):
    # Prevents: half a profile that passes for a whole one; a run that seems to have been profiled.
    folder = _Folder(tmp_path)
    with pytest.raises(
        RuntimeError, match=r"--steps 3:6: the run ended after profiling step 4 .* step 6"
    ):
        _train(_profiler(folder, 3, 6)[0], 4)
    assert folder.state == "discarded"


def test_an_error_of_the_run_stays_its_own(tmp_path):
    # Prevents: a crash of the training reported as a fault of the profiler, or the profiler left running.
    for fail_at in (2, 3):
        folder = _Folder(tmp_path)
        _train(_profiler(folder, 3, 4)[0], 6, fail_at)
        assert folder.state == "discarded"
    _train(_profiler(folder, 3, 4)[0], 6)
    assert folder.state == "published"


@pytest.mark.parametrize(
    ("steps", "rank", "part"),
    [
        ((0, 2), 0, "--steps 0:2: this run trains steps 1 to 6"),
        ((5, 7), 0, "--steps 5:7: this run trains steps 1 to 6"),
        ((2, 3), 1, "--rank 1: this run has ranks 0 to 0"),
    ],
)
def test_steps_and_ranks_that_are_not_there(tmp_path, steps, rank, part):
    # Prevents: hours of training until it turns out that nothing was recorded.
    with pytest.raises(ValueError, match=part):
        _train(_profiler(_Folder(tmp_path), *steps, rank=rank)[0], 1)


# --- the verb -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--steps", "2:3", "pretrain"], "nothing to run; put a script, or pretrain, behind --"),
        (["--steps", "2:3", "--"], "nothing to run behind --"),
        (["--steps", "3:2", "--", "pretrain"], "--steps 3:2: give A:B"),
        (["--steps", "0:2", "--", "pretrain"], "--steps 0:2: give A:B"),
        (["--steps", "5", "--", "pretrain"], "--steps 5: give A:B"),
        (["--rank", "-1", "--", "pretrain"], "--rank -1"),
        (
            ["--bf16", "--", "pretrain"],
            "--bf16 is no option of the profiler; put Megatron's behind --",
        ),
        (["--", "absent.py"], "absent.py is not a file"),
    ],
)
def test_wrong_use_is_one_line(words, part, capsys):
    # Prevents: a typing error that costs a training run, or a traceback.
    assert main(["profile", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert part in error
    assert error.count("\n") == 1


def test_the_folder_is_checked_first(tmp_path, capsys):
    # Prevents: a profile that cannot be written after the run, or written over another.
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("")
    for name, part in (("file/out", "file"), ("full", "not empty")):
        assert main(["profile", "--out", str(tmp_path / name), "--", "pretrain"]) == 2
        error = capsys.readouterr().err
        assert part in error
        assert "Traceback" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def test_no_tool_hides_a_module_of_the_standard_library():
    # Prevents: tools/profile.py, which torch would import as `profile` in every tool beside it.
    assert not {path.stem for path in (ROOT / "tools").glob("*.py")} & sys.stdlib_module_names


SCRIPT = """
from megatron_nvfp4.mcore.pretrain_gpt import main

if __name__ == "__main__":
    main()
"""
SMALL = (*MODEL, "--num-layers", "1", *MOE, *MINITE, "--minite-recipe", "nvfp4_per_token_bf16_bwd")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A profiled pretrain by the tool, and a script by the verb that exits before the profile is complete."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "mine.py").write_text(SCRIPT)
    tool, verb = (str(ROOT / "tools/profile_run.py"),), ("-m", "megatron_nvfp4", "profile")
    commands = [
        (
            *tool,
            "--steps",
            "2:3",
            "--out",
            folder / "out",
            "--",
            "pretrain",
            *SMALL,
            "--train-iters",
            3,
        ),
        (
            *(*verb, "--steps", "2:4", "--out", folder / "early", "--", folder / "mine.py", *SMALL),
            *("--train-iters", 4, "--exit-interval", 2),
        ),
    ]

    def start(command) -> subprocess.CompletedProcess:
        words = [sys.executable, *map(str, command)]
        return subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300)

    with ThreadPoolExecutor(2) as pool:
        return folder, *pool.map(start, commands)


def test_a_megatron_run_is_profiled(runs):
    # Prevents: hooks that miss Megatron's steps; kernels without module, backward or optimizer.
    folder, done, _ = runs
    assert done.returncode == 0, done.stderr[-3000:]
    assert "profile of step " in done.stdout
    assert "iteration        3/       3" in done.stdout
    out = folder / "out"
    names = {path.name for path in out.iterdir()}
    assert names >= {"kernels.csv", "kernels.md", "trace.json.gz"}
    assert ("steps.png" in names) != ("No plot" in (out / "kernels.md").read_text())
    with gzip.open(out / "trace.json.gz", "rt") as file:
        steps = read_steps(json.load(file)["traceEvents"])
    assert [step.number for step in steps] == [2, 3]
    with (out / "kernels.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {(row["operator"], row["module"], row["phase"], row["class"]) for row in rows}
    experts = "decoder.layers.*.mlp.experts"  # whose dataflow multiplies for its linears
    gemm = "megatron_nvfp4::grouped_gemm_decoded"
    if gemm in {row["operator"] for row in rows}:  # the reference computes by torch's operators
        assert {(gemm, experts, phase, "computation") for phase in ("forward", "backward")} <= found
        assert all(float(r["tflop_per_s"]) > 0 for r in rows if r["operator"] == gemm)
    assert {(row["module"], row["phase"]) for row in rows} >= {
        (experts, "forward"),
        (experts, "backward"),
        ("decoder.layers.*.self_attention.linear_qkv", "backward"),
        ("output_layer", "forward"),
        ("(outside modules)", "optimizer"),
    }
    assert {row["class"] for row in rows} == {*kernel_costs.CLASSES} - {"gaps"}


def test_a_megatron_run_that_exits_early_is_refused(runs):
    # Prevents: Megatron's sys.exit taking the profile along in silence, with status 0.
    folder, _, done = runs
    assert done.returncode == 2, done.stderr[-3000:]
    assert "error: --steps 2:4: the run ended after profiling step 2" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["mine.py", "out"]
