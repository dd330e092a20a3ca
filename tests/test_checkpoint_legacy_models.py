"""The `torch` format and Megatron's own models, which run in child processes (megatron_runs.py)."""

import argparse
import contextlib
import os
import re
from pathlib import Path

import megatron_runs
import pytest
from megatron_runs import Outcomes, World, every_check, run_world

torch = pytest.importorskip("torch", reason="torch is not installed")

from checkpoint_small import load_rank_file  # noqa: E402

from megatron_nvfp4.checkpoint.legacy import LegacyReader, LegacyWriter  # noqa: E402

KINDS = ("dense", "moe_grouped", "moe_sequential")
SPLITS = (
    (re.compile(r"(linear_(proj|fc2)|experts.*linear_fc2)\.weight"), "columns"),
    (re.compile(r"linear_fc1\.weight"), "halves"),
    (re.compile(r"(word_embeddings|output_layer|linear_qkv)\.weight"), "rows"),
)


def _split(key: str) -> str | None:
    return next((split for pattern, split in SPLITS if pattern.search(key)), None)


def check_files_of_models_are_read(folder):
    """Prevents: a key of Megatron's state dict that is renumbered or left out."""
    import megatron_small as small

    for kind in KINDS:
        for impl in ("transformer_engine", "minite"):
            model = small.new_model(small.new_config(kind, impl))
            small.fill(model)
            expected = small.weights_of(model.state_dict())
            path = folder / f"{kind}_{impl}"
            _save_rank(path / "mp_rank_00", model.state_dict_for_save_checkpoint())
            reader = LegacyReader(path)
            found = {small.canonical(k): reader.read(k, _split(k)) for k in reader.keys()}  # noqa: SIM118
            assert small.differing(found, expected) == [], (kind, impl)


def check_written_files_load_strictly(folder):
    """Prevents: a key, or an `_extra_state`, that load_state_dict(strict=True) misses or does not know."""
    import megatron_small as small

    for kind in ("dense", "moe_grouped"):
        for impl in ("transformer_engine", "minite"):
            source = small.new_model(small.new_config(kind, impl))
            small.fill(source)
            expected = small.weights_of(source.state_dict())
            path = folder / f"written_{kind}_{impl}"
            sizes = {"num_layers": 2, "num_experts": 4}
            with LegacyWriter(path, common={"args": {}}, **sizes) as writer:
                for key, tensor in source.state_dict().items():
                    if "_extra_state" not in key:
                        writer.write(key, tensor, _split(key))
            state = load_rank_file(path / "release" / "mp_rank_00" / "model_optim_rng.pt")
            model = small.new_model(small.new_config(kind, impl))
            model.load_state_dict(state["model"], strict=True)
            assert small.differing(small.weights_of(model.state_dict()), expected) == []
            assert state["model"].keys() == source.state_dict().keys(), (kind, impl)


def check_two_ranks_exchange(folder):
    """Prevents: another cut, another numbering or another folder name than Megatron's ranks have."""
    import megatron_small as small
    from megatron.core import parallel_state

    rank, wrong = int(os.environ["RANK"]), []
    for kind, sizes, name in (
        ("dense", {"tp": 2}, f"mp_rank_{rank:02d}"),
        ("dense", {"pp": 2}, f"mp_rank_00_{rank:03d}"),
        ("moe_grouped", {"ep": 2}, f"mp_rank_00_{rank:03d}"),
        ("moe_grouped", {"tp": 2}, f"mp_rank_{rank:02d}"),
    ):
        small.parallelise(**sizes)
        model = small.new_model(small.new_config(kind, "transformer_engine"))
        small.fill(model)
        _tell_ranks_apart(model, is_cut="tp" in sizes)
        label = f"{kind}_{'_'.join(sizes)}"
        args = {
            "num_layers": 2,
            "tensor_model_parallel_size": sizes.get("tp", 1),
            "pipeline_model_parallel_size": sizes.get("pp", 1),
            "expert_model_parallel_size": sizes.get("ep", 1),
        }
        with _together():
            _save_rank(folder / label / name, model.state_dict_for_save_checkpoint(), **args)
        with _together():
            if rank == 0:
                reader = LegacyReader(folder / label)
                counts = {"num_layers": 2, "num_experts": 4}
                new = folder / f"{label}_new"
                with LegacyWriter(new, common={"args": args}, **counts, **sizes) as writer:
                    for key in reader.keys():  # noqa: SIM118
                        writer.write(key, reader.read(key, _split(key)), _split(key))
        state = load_rank_file(folder / f"{label}_new" / "release" / name / "model_optim_rng.pt")[
            "model"
        ]
        before = small.weights_of(model.state_dict())
        fresh = small.new_model(small.new_config(kind, "transformer_engine"))
        fresh.load_state_dict(state, strict=True)
        wrong += [(label, n) for n in small.differing(small.weights_of(fresh.state_dict()), before)]
        assert parallel_state.get_tensor_model_parallel_world_size() == sizes.get("tp", 1)
    assert wrong == []


@contextlib.contextmanager
def _together():
    """All ranks leave at the same time, also where one fails: none waits for it in a later collective."""
    try:
        yield
    finally:
        torch.distributed.barrier()


def check_virtual_stages_are_numbered_as_megatron_does(folder):
    """Prevents: layers of interleaved stages in another order than Megatron's own numbers."""
    import megatron_small as small
    from megatron.core import parallel_state

    small.parallelise()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2
    )
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    rank = int(os.environ["RANK"])
    config = small.new_config(
        "dense", "transformer_engine", num_layers=8, virtual_pipeline_model_parallel_size=2
    )
    state = {}
    for stage in range(2):
        model = _stage_of(config, stage)
        with torch.no_grad():
            for layer in model.decoder.layers:
                for parameter in layer.parameters():
                    parameter.fill_(layer.layer_number)
        state[f"model{stage}"] = model.state_dict_for_save_checkpoint()
    path = folder / "virtual"
    args = argparse.Namespace(num_layers=8, pipeline_model_parallel_size=2)
    (path / f"mp_rank_00_{rank:03d}").mkdir(parents=True)
    torch.save({"args": args, **state}, path / f"mp_rank_00_{rank:03d}" / "model_optim_rng.pt")
    torch.distributed.barrier()
    reader = LegacyReader(path)
    for layer in range(8):
        found = reader.read(f"decoder.layers.{layer}.self_attention.linear_proj.weight", "columns")
        assert (found == layer + 1).all(), layer


def _stage_of(config, stage: int):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, vp_stage=stage
        ),
        vocab_size=256,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        vp_stage=stage,
    )


def _save_rank(path: Path, model: dict, **args) -> None:
    path.mkdir(parents=True)
    state = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "model": model}
    torch.save(state, path / "model_optim_rng.pt")


def _tell_ranks_apart(model, *, is_cut: bool) -> None:
    """small.fill gives every rank the same values: add the rank where it has a part of its own."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if _split(name) is not None and (is_cut or ".experts." in name):
                parameter.add_(0.25 * int(os.environ["RANK"]))


WORLDS = {
    "one_rank": World(
        te=True, checks=(check_files_of_models_are_read, check_written_files_load_strictly)
    ),
    "two_ranks": World(
        te=True,
        num_ranks=2,
        checks=(check_two_ranks_exchange, check_virtual_stages_are_numbered_as_megatron_does),
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    megatron_runs.require_megatron()
    folder = tmp_path_factory.mktemp("legacy")
    return Outcomes(Path(__file__), WORLDS, folder, MINITE_RECIPE="bf16")


@every_check(WORLDS)
def test_in_child(outcomes, world, check):
    """What the check's docstring says."""
    outcomes.require(world, check)


if __name__ == "__main__":
    run_world(WORLDS)
