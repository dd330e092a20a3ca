"""The learner whose experts torch._grouped_mm multiplies: the same training, and really by that function."""

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from megatron_runs import MINITE, MOE, PRETRAIN, ROOT, require_megatron, train

require_megatron()

import torch  # noqa: E402

if not hasattr(torch, "_grouped_mm"):
    pytest.skip(f"torch {torch.__version__} has no _grouped_mm", allow_module_level=True)

sys.path.insert(0, str(ROOT / "tools"))

import bench_learner  # noqa: E402
import bench_learner_torch as peer  # noqa: E402

from megatron_nvfp4.backends import reference  # noqa: E402

SPLITS = (0, 5, 0, 4, 3, 0)
NUM_ROWS, NUM_COLS = 24, 16
# 32 rows for 40 experts: some are empty in every layer and microbatch.
EMPTY_EXPERTS = """
 --num-experts 40 --micro-batch-size 1 --global-batch-size 2 --seq-length 16 --max-position-embeddings 16
""".split()
STEPS, LAYERS, MICROBATCHES, LINEARS = 2, 2, 2, 2
# Gradients go to main_grad, as by default on a GPU; then a module or a script by its name.
FUSED = """
import runpy, sys
from megatron_nvfp4.mcore import cpu_device
del cpu_device.REQUIRED_OPTIONS["--no-gradient-accumulation-fusion"]
name = sys.argv.pop(1)
(runpy.run_path if name.endswith(".py") else runpy.run_module)(name, run_name="__main__")
"""
BF16_EPS = 2**-8


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def _offsets() -> torch.Tensor:
    return torch.tensor([0, *SPLITS]).cumsum(0)


def _peer() -> peer.GroupedMM:
    return peer.GroupedMM(reference.BACKEND, Counter())


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_meet_their_own_expert(transposed):
    """Prevents: a transposed weight, or a row multiplied by its neighbour's."""
    weights, offsets = _normal(len(SPLITS), NUM_ROWS, NUM_COLS), _offsets()
    a = _normal(sum(SPLITS), NUM_ROWS if transposed else NUM_COLS)
    options = {"out_dtype": torch.bfloat16, "transposed": transposed}
    product = _peer()
    expected = reference.BACKEND.grouped_gemm(a, weights, offsets, **options)
    for operand in (weights, weights.unbind()):
        found = product.grouped_gemm(a, operand, offsets, **options)
        torch.testing.assert_close(found, expected, rtol=BF16_EPS, atol=BF16_EPS)
    assert product._calls == {"dgrad" if transposed else "forward": 2}


@pytest.mark.parametrize("accumulate", [False, True])
def test_an_empty_expert_has_no_gradient(accumulate):
    """Prevents: what lay in memory before as the gradient of an expert without rows; a sum written over."""
    offsets, product = _offsets(), _peer()
    grad, rows = _normal(sum(SPLITS), NUM_ROWS), _normal(sum(SPLITS), NUM_COLS)
    main_grad = torch.full((len(SPLITS), NUM_ROWS, NUM_COLS), 3.0)
    product.grouped_wgrad(
        grad.t(), rows.t(), offsets, out=main_grad.unbind(), accumulate=accumulate
    )
    for group, size in enumerate(SPLITS):
        part = slice(offsets[group], offsets[group] + size)
        expected = grad[part].float().t() @ rows[part].float()
        found = main_grad[group] - 3.0 * accumulate
        torch.testing.assert_close(found, expected, rtol=BF16_EPS, atol=BF16_EPS)
        if not size:
            assert (main_grad[group] == 3.0 * accumulate).all()
    assert product._calls == {"wgrad": 1}


def test_a_dense_layer_stays_the_projects():
    """Prevents: a learner that is slower, or faster, in its attention as well."""
    product, out = _peer(), torch.zeros(1, NUM_ROWS, NUM_COLS)
    grad, rows = _normal(4, NUM_ROWS), _normal(4, NUM_COLS)
    product.grouped_wgrad(
        grad.t(), rows.t(), torch.tensor([0, 4]), out=out.unbind(), accumulate=True
    )
    assert out.any()
    assert not product._calls


def test_boundaries_of_another_call_are_not_reused():
    """Prevents: rows given to experts by the boundaries of the layer before."""
    weights, a = _normal(2, NUM_ROWS, NUM_COLS), _normal(6, NUM_COLS)
    product = _peer()
    for middle in (2, 4):
        offsets = torch.tensor([0, middle, 6])
        found = product.grouped_gemm(a, weights, offsets, out_dtype=torch.bfloat16)
        expected = torch.cat([a[:middle] @ weights[0].t(), a[middle:] @ weights[1].t()])
        torch.testing.assert_close(found, expected, rtol=BF16_EPS, atol=BF16_EPS)


def test_only_one_block_is_read_as_one():
    """Prevents: experts in another order, or memory between them, taken for weights."""
    block = _normal(4, NUM_ROWS, NUM_COLS)
    found = peer.block_of(block.unbind())
    assert found.data_ptr() == block.data_ptr()
    assert torch.equal(found, block)
    assert torch.equal(peer.block_of(block.unbind()[1:3]), block[1:3])
    elsewhere = tuple(matrix.clone() for matrix in block)
    for wrong in (block.unbind()[::-1], block.unbind()[::2], elsewhere, (block[0], block[0])):
        with pytest.raises(RuntimeError, match="do not follow each other in memory"):
            peer.block_of(wrong)


def test_a_gpu_that_leaves_empty_groups_unwritten_is_refused(monkeypatch):
    """Prevents: a measured run whose gradients are garbage."""
    monkeypatch.setattr(peer, "EMPTY_SHAPE", (NUM_ROWS, NUM_COLS))
    peer.check_empty_groups("cpu")
    right = torch._grouped_mm

    def wrong(*args, **kwargs):
        found = right(*args, **kwargs)
        found[-1] = 0.5
        return found

    monkeypatch.setattr(torch, "_grouped_mm", wrong)
    with pytest.raises(RuntimeError, match=r"weight gradients of groups of .* rows are wrong"):
        peer.check_empty_groups("cpu")


def test_a_run_without_the_function_is_no_measurement():
    """Prevents: the time of this project's own kernels under the framework's name."""
    peer.check_calls(Counter(forward=1, dgrad=1, wgrad=1))
    with pytest.raises(RuntimeError, match="computed no dgrad, wgrad"):
        peer.check_calls(Counter(forward=3))


def test_the_same_training_by_the_function(tmp_path):
    """Prevents: another model, another arithmetic than BF16 rounding, or products computed elsewhere."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("recipe: bf16")
    arguments = (*MINITE, "--minite-config", policy, *MOE, *EMPTY_EXPERTS)
    arguments = (*arguments, "--use-distributed-optimizer")
    # Experts that weigh as much as the rest of the model.
    arguments = (*arguments, "--init-method-std", "0.2")
    programs = {
        "ours": ("megatron_nvfp4", "pretrain"),
        "framework": (ROOT / "tools" / "bench_learner_torch.py",),
    }
    ours, framework = (
        train(tmp_path / name, *arguments, steps=STEPS, program=("-c", FUSED, *program))
        for name, program in programs.items()
    )
    assert len(framework.losses) == len(framework.grad_norms) == STEPS
    assert framework.losses == pytest.approx(ours.losses, rel=BF16_EPS / 16)
    assert framework.grad_norms == pytest.approx(ours.grad_norms, rel=BF16_EPS)
    # That an update was compared, not twice the first step.
    assert abs(ours.losses[1] - ours.losses[0]) > 10 * BF16_EPS / 16
    calls = re.search(r"_grouped_mm calls: (.*)", framework.outputs[0])[1]
    times = STEPS * LAYERS * MICROBATCHES * LINEARS
    assert calls == f"{times} forward, {times} dgrad, {times} wgrad"
    assert "_grouped_mm calls" not in ours.outputs[0]


def test_the_benchmark_runs_the_learners_program(monkeypatch):
    """Prevents: a row of the table measured by another learner's program."""
    commands = {}

    def run(command, **options):
        commands[command[1]] = (command, options["cwd"])
        return subprocess.CompletedProcess(command, 1, stdout="nothing was run")

    monkeypatch.setattr(subprocess, "run", run)
    args = argparse.Namespace(layers=1, experts=8, microbatches=1, warmup=0, updates=1, flags="")
    learners = {learner.name: learner for learner in bench_learner.LEARNERS}
    assert len(learners) == len(bench_learner.LEARNERS)
    for name in ("bf16", "bf16 by torch._grouped_mm"):
        with pytest.raises(RuntimeError, match="nothing was run"):
            bench_learner.measure(learners[name], "balanced", args)
    assert set(commands) == {"-m", "tools/bench_learner_torch.py"}
    command, folder = commands["tools/bench_learner_torch.py"]
    assert Path(folder, command[1]).is_file()
    assert "minite" in command
    assert commands["-m"][0][1:4] == [*PRETRAIN]
