"""SGLang's own engine beside the learner, by examples/parity.py: no log-probability differs."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from deterministic_small import NO_FA3

PARITY = Path(__file__).parents[1] / "examples" / "parity.py"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="sglang is not installed"
    ),
]
NVFP4 = ("--profile", "sglang_minite_nvfp4")
FA3 = ("--attention", "fa3")
UPDATES = ("--updates", "3")
CASES = {
    "bf16": UPDATES,
    "nvfp4": (*NVFP4, *UPDATES),
    "nvfp4 checkpoint": (*NVFP4, "--exported"),
    "outliers": (*NVFP4, "--weights", "outliers", "--cuda-graph"),
    "dense": ("--model", "dense"),
    "fa3": (*FA3, "--model", "dense", *UPDATES),
    "fsdp": (*FA3, "--model", "dense", "--profile", "sglang_rl_fsdp"),
    "two ranks": ("--sampler", "tp2", *UPDATES),
    "two ranks, experts whole": (*NVFP4, "--sampler", "tp2ep2"),
}


def _marks(options: tuple[str, ...]) -> list:
    import torch

    marks = [NO_FA3] if "fa3" in options else []
    if "--sampler" in options:
        few = torch.cuda.device_count() < 2
        marks.append(pytest.mark.skipif(few, reason="two GPUs are needed"))
    return marks


@pytest.mark.parametrize(
    "options", [pytest.param(o, id=name, marks=_marks(o)) for name, o in CASES.items()]
)
def test_no_gap_to_the_engine(options, tmp_path):
    # Prevents: any gap, in what the engine decoded, after steps of the optimizer, or hidden by a
    # comparison that would not see one: the same model without the profile has gaps.
    out = tmp_path / "parity.json"
    sizes = ("--responses", "16", "--tokens", "64", "--update-responses", "8")
    command = [sys.executable, str(PARITY), "--out", str(out), *sizes, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    lines = json.loads(out.read_text())["lines"]
    assert len(lines) == 2 + (3 if UPDATES[0] in options else 0)
    assert all(line["profile"]["tokens"] > 0 == line["profile"]["unequal"] for line in lines)
    assert lines[0]["ordinary"]["unequal"] > 0
