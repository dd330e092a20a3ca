"""Capture in a Megatron run on the CPU, and `compare` of two: end to end through the command line, and expert
parallelism beside none. Every `check_*` runs in child processes (megatron_runs.py).
"""

import json
from pathlib import Path

import pytest
from megatron_runs import (
    MINITE,
    MOE,
    Outcomes,
    World,
    every_check,
    require_megatron,
    run_world,
    train,
)

require_megatron()
pytest.importorskip("safetensors", reason="safetensors is not installed")
CAPTURE = """
out: {out}
steps: [1]
rules:
  - match: ["decoder.**", model, output_layer]
    what: [inputs, outputs, operands, weights, grads, routing, logprobs]
    tensors: true
"""
POLICY = """
recipe: nvfp4_per_token
layers:
  - match: decoder.layers.1.mlp.experts.linear_fc2
    recipe: nvfp4_per_token_4over6
"""


def _train(folder: Path, *arguments) -> Path:
    """The dump of the first step of a run."""
    folder.mkdir()
    file, out = folder / "capture.yaml", folder / "captured"
    file.write_text(CAPTURE.format(out=out))
    train(folder, *MINITE, *MOE, "--minite-capture", file, *arguments, steps=2)
    return out / "step-000001"


def test_two_recipes_differ_first_where_the_policies_do(tmp_path, capsys):
    """Prevents: a capture that the launcher's words never reach, a layer named that only passes on the
    difference; an option left for Megatron to refuse."""
    from megatron_nvfp4.__main__ import main

    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    left = _train(tmp_path / "left")
    right = _train(tmp_path / "right", "--minite-config", policy)
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    words = ["compare", left, right, "--html", page, "--json", figures, "--replay"]
    assert main([*map(str, words)]) == 1
    said = capsys.readouterr().out
    assert "compare: decoder.layers.1.mlp.experts.linear_fc2 input." in said
    assert "tokens:" not in said  # all are on both sides
    found = json.loads(figures.read_text())
    assert found["first"]["module"] == "decoder.layers.1.mlp.experts.linear_fc2"
    assert found["tokens"] == {"both": 256, "left_only": 0, "right_only": 0}
    differing = {each["module"] for each in found["operators"] if each["differs"]}
    gradients = {
        each["module"] for each in found["operators"] if each["differs"] and ".grad" in each["what"]
    }
    forward = {
        each["module"]
        for each in found["operators"]
        if each["differs"] and ".grad" not in each["what"]
    }
    assert gradients <= differing
    assert not any(".layers.0." in module for module in forward)
    verdicts = {each["module"]: each["verdict"] for each in found["replay"]}
    assert "the formats differ" in verdicts.pop("decoder.layers.1.mlp.experts.linear_fc2")
    # Norm and quantisation again from the hooks' tensors give the bits that the kernels read.
    assert set(verdicts.values()) == {"passes on its input"}
    assert len(verdicts) == 7
    assert "First difference: decoder.layers.1.mlp.experts.linear_fc2" in page.read_text()


def _captured(folder: Path, fused: str = "auto", **parallel) -> None:
    """The dump of a forward with the weights that canonical names give, whatever rank they are on."""
    import megatron_small as small
    import torch

    from megatron_nvfp4.checkpoint.atomic import AtomicFolder
    from megatron_nvfp4.diagnostics.capture import Capture
    from megatron_nvfp4.diagnostics.capture_config import WHAT, CaptureConfig, CaptureRule, Steps
    from megatron_nvfp4.mcore.capture_seams import MegatronSeams
    from megatron_nvfp4.recipes import resolve

    small.parallelise(**parallel)
    config = small.new_config("moe_grouped", moe_router_dtype="fp32", bias_activation_fusion=True)
    config.minite_policy, config.minite_moe_dataflow = resolve("nvfp4_per_token"), fused
    model = small.new_model(config)
    small.fill(model)
    for number, layer in enumerate(model.decoder.layers):
        experts = layer.mlp.experts
        for linear in (experts.linear_fc1, experts.linear_fc2):
            for index, weight in zip(layer.mlp.local_expert_indices, linear.weights, strict=True):
                generator = torch.Generator().manual_seed(10 * number + index)
                with torch.no_grad():
                    weight.copy_(0.05 * torch.randn(weight.shape, generator=generator))
    rule = CaptureRule(
        match=("decoder.**", "model"), what=frozenset(WHAT) - {"grads"}, tensors=True
    )
    capture = Capture(
        CaptureConfig(out=folder, steps=Steps(single=frozenset({1})), rules=(rule,)),
        seams=MegatronSeams(),
        open_folder=lambda path: AtomicFolder(path, force=True),
    )
    capture.begin_training([model], None, 1, 1)
    capture.begin_step(1)
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, small.VOCABULARY - 1, (2, 33), generator=generator)
    positions = torch.arange(32).expand(2, -1)
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool).triu(1)
    model(ids[:, :-1], positions, mask, labels=ids[:, 1:])
    capture.end_step(1)
    torch.distributed.barrier()


def _compare_on_first_rank(left: Path, right: Path):
    import torch

    from megatron_nvfp4.diagnostics.compare import compare_sides
    from megatron_nvfp4.diagnostics.compare_sides import read_side

    if torch.distributed.get_rank():
        return None
    return compare_sides(*(read_side(path, lambda name: None) for path in (left, right)))


def check_expert_parallelism(folder: Path) -> None:
    """Prevents: rows that came from the other rank given to this one's tokens, or left out; weights compared
    by their place on a rank. Both dataflows, each beside the fused one without expert parallelism."""
    _captured(folder / "ep1")
    for name, fused in (("fused", "auto"), ("unfused", "unfused")):
        _captured(folder / name, fused, ep=2)
    for name in ("fused", "unfused"):  # no rank waits for another any more
        result = _compare_on_first_rank(folder / "ep1", folder / name)
        if result is None:
            return
        assert result.tokens.num_both == 2 * 2 * 32
        stem = "decoder.layers.1.mlp.experts.linear_fc"
        by_key = {str(each.key): each for each in result.operators}
        for what in ("input", "input.codes", "input.block_scales", "input.amax", "output"):
            for number in (1, 2):
                found = by_key[f"{stem}{number} {what}"]
                assert found.num_rows == 2 * 2 * 32 * 2, (name, found)
                assert (found.num_left, found.num_right) == (0, 0)
        assert by_key[f"{stem}2 weight3.codes"].num_values == 64 * 96
        assert result.first is None, (name, result.first)


def check_a_row_of_the_other_rank(folder: Path) -> None:
    """Prevents: a table of rows under which everything is equal, whatever stands in them."""
    import torch
    from capture_cases import Edit

    _captured(folder / "again", ep=2)
    if torch.distributed.get_rank() == 0:
        with Edit(folder / "again" / "step-000001" / "rank-00001") as edit:
            edit.tensor("decoder.layers.1.mlp.experts.linear_fc2", "output")[0, 3] += 1
    torch.distributed.barrier()
    result = _compare_on_first_rank(folder / "ep1", folder / "again")
    if result is not None:
        assert str(result.first.key) == "decoder.layers.1.mlp.experts.linear_fc2 output"
        assert (result.first.place.expert, result.first.place.index) == (2, (3,))


WORLDS = {"capture": World((check_expert_parallelism, check_a_row_of_the_other_rank), num_ranks=2)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    return Outcomes(Path(__file__), WORLDS, tmp_path_factory.mktemp("capture"))


@every_check(WORLDS)
def test_in_child_processes(outcomes, world, check):
    outcomes.require(world, check)


if __name__ == "__main__":
    run_world(WORLDS)
