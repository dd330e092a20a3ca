"""`bench.py deterministic`: its arithmetic, and that no wrong model and no wrong bit goes unsaid.

Every `check_*` runs in a child process (megatron_runs.py); its docstring says what it prevents.
"""

import sys
from pathlib import Path

import pytest
from megatron_runs import Outcomes, World, every_check, require_megatron, run_world

require_megatron()
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

TINY = {
    "LAYERS": 2,
    "HIDDEN": 64,
    "FFN": 96,
    "EXPERTS": 4,
    "TOP_K": 2,
    "HEADS": 4,
    "KV_HEADS": 2,
    "HEAD_DIM": 64,
    "VOCABULARY": 64,
}


def _tiny():
    import bench_deterministic_model as bench

    vars(bench).update(TINY)
    return bench


def _sides(profile: str = "sglang_det_bf16", recipe: str = "bf16"):
    bench = _tiny()
    sides: dict = {}
    case = bench.ModelCase((2, 12), 8, profile, "triton", recipe)
    ours = bench.side_of(sides, "ours", bench.profile_policy(case))
    ordinary = bench.side_of(sides, "ordinary", bench.ordinary_policy(recipe))
    return bench, ours, ordinary, (*bench.random_tokens(case.shape), case.prompt)


def check_two_sides_of_one_model(folder: Path) -> None:
    """Prevents: the time of another model, of another arithmetic, or of a backward that leaves nothing."""
    import torch

    for names in (("sglang_det_bf16", "bf16"), ("sglang_minite_nvfp4", "nvfp4_per_token")):
        bench, ours, ordinary, batch = _sides(*names)
        assert 0 < bench.check_model(ours, ordinary, *batch) < bench.LOSS_ERROR
        quantized = {
            name.split(".")[4]
            for name, module in ordinary.model.named_modules()
            if "nvfp4" in str(getattr(getattr(module, "qlinear_params", None), "recipe", ""))
        }
        assert quantized == ({"experts"} if names[1] != "bf16" else set())
        gradients = []
        for side in (ours, ordinary):
            bench.prepare_step(side, True)
            side.losses(*batch).mean().backward()
            gradients.append([p.main_grad.clone() for p in side.model.parameters()])
        for (name, _), a, b in zip(ours.model.named_parameters(), *gradients, strict=True):
            assert (a - b).norm() < 0.35 * b.norm(), name
        bench.prepare_step(ours, False)
        assert not any(p.main_grad.any() for p in ours.model.parameters())
        assert torch.equal(*(m.output_layer.weight for m in (ours.model, ordinary.model)))


def check_a_side_of_another_model_is_refused(folder: Path) -> None:
    """Prevents: a fast time of a forward that lost a layer, or whose losses do not repeat."""
    import torch

    bench, ours, ordinary, batch = _sides()
    with torch.no_grad():
        ours.model.output_layer.weight.data = ours.model.output_layer.weight * 2
        ours.model.output_layer.weight.mul_(20)
    with pytest.raises(RuntimeError, match="from the ordinary path's; not timed"):
        bench.check_model(ours, ordinary, *batch)
    noisy = ours.losses
    ours.losses = lambda *args: noisy(*args) + torch.rand(())
    with pytest.raises(RuntimeError, match="24 losses differ the second time; not timed"):
        bench.check_model(ours, ordinary, *batch)


def check_torchs_attention_is_megatrons(folder: Path) -> None:
    """Prevents: an ordinary side with a faster attention that computes something else."""
    import torch

    *_, ordinary, (tokens, labels, prompt) = _sides()
    fast = ordinary.losses(tokens, labels, prompt)
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
    seen = []
    for layer in ordinary.model.decoder.layers:
        attention = layer.self_attention.core_attention
        assert type(attention).__name__ == "TorchAttention"
        attention.forward = lambda q, k, v, _, *args, a=attention, **kwargs: (
            seen.append(1) or DotProductAttention.forward(a, q, k, v, mask, **kwargs)
        )
    slow = ordinary.losses(tokens, labels, prompt)
    assert len(seen) == TINY["LAYERS"]
    assert (fast - slow).abs().max() < 0.02


WORLDS = {
    "one": World(
        (
            check_two_sides_of_one_model,
            check_a_side_of_another_model_is_refused,
            check_torchs_attention_is_megatrons,
        )
    )
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return Outcomes(Path(__file__), WORLDS, tmp_path_factory.mktemp("bench"))


@every_check(WORLDS)
def test_models(world, check, outcomes):
    outcomes.require(world, check)


def test_ratios_by_hand():
    # Prevents: a ratio turned over, or one of the other peer.
    import bench_deterministic as bench

    row = {"us": 2.0, "sglang_us": 5.0, "torch_us": 1.0}
    assert bench.ratios(row) == {"ratio": 2.5, "torch_ratio": 0.5}
    assert bench.ratios({"us": 4.0, "ordinary_us": 3.0}) == {"ratio": 0.75}
    assert bench.ratios({"us": 4.0}) == {}


def test_other_bits_are_counted():
    # Prevents: a difference in the second output, or a NaN, that nobody counts.
    import torch
    from bench_deterministic import compare_bits

    a, b = torch.tensor([1.0, torch.nan, 3.0]), torch.tensor([1.0, torch.nan, 4.0])
    assert compare_bits(a, b) == {"values": 3, "n_diff": 1}
    assert compare_bits((a, a), (a, b)) == {"values": 6, "n_diff": 1}
    assert compare_bits(torch.tensor([torch.nan]), torch.ones(1)) == {"values": 1, "n_diff": 1}
    assert compare_bits(None, b) == {}


def test_a_failed_row_does_not_end_the_table(monkeypatch, tmp_path):
    # Prevents: an hour of GPU lost to one case, and a failure that leaves an exit status of 0.
    import bench_deterministic as bench
    import bench_deterministic_model as models

    def trials(peer, draw):
        yield bench.Trial("good", [lambda: None])
        yield bench.Trial("bad", [lambda: None])
        raise ValueError("no third case")

    def measure(trial, reason):
        if trial.case == "bad":
            raise RuntimeError("out of\nmemory")
        return {"us": 1.0, "note": reason}

    monkeypatch.setattr(bench, "OPS", {"linear": trials})
    monkeypatch.setattr(bench, "_draw", lambda generator: None)
    monkeypatch.setattr(
        bench.torch, "Generator", lambda device: type("G", (), {"manual_seed": int})
    )
    monkeypatch.setattr(bench, "machine", lambda: {"gpu": "none"})
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(models, "model_rows", lambda only, kernels: [{"n_diff": 3}])
    table = bench.rows("linear", tmp_path / "a" / "t.csv")
    found = [next(table) for _ in range(4)]
    with pytest.raises(SystemExit, match="3 rows failed"):
        next(table)
    assert [row.get("note", "") for row in found[1:3]] == [
        "FAILED: RuntimeError: out of memory",
        "FAILED: ValueError: no third case",
    ]
    assert all(set(row) <= set(bench.FIELDS) for row in found)
    assert (tmp_path / "a" / "t_kernels.csv").read_text().startswith("op,case,side,kernel")


def test_shares_of_kernels_by_hand(monkeypatch):
    # Prevents: shares of the shown kernels alone.
    import bench_deterministic_model as models

    monkeypatch.setattr(models, "NUM_KERNELS", 1)
    lines = models.kernel_lines({"a": [1.0], "b": [2.0, 4.0], "c": [1.0]})
    assert [(line["kernel"], line["calls"], line["share"]) for line in lines] == [
        ("b", 2, 0.75),
        ("others", 2, 0.25),
    ]


if __name__ == "__main__":
    run_world(WORLDS)


def test_an_op_that_does_not_exist_is_named():
    # Prevents: an empty table that looks like a finished measurement.
    import bench_deterministic

    with pytest.raises(SystemExit, match="'nosuch': no such op; ops: linear, "):
        list(bench_deterministic.rows("nosuch", None))
