"""torch_dist checkpoints against megatron-core itself: what it writes is read, what is written it loads.

Megatron runs in child processes (megatron_runs.py); the readers and writers under test import none of it.
"""

import argparse
import os
import re
from pathlib import Path

import megatron_runs
import pytest
from megatron_runs import Outcomes, World, every_check, run_world

torch = pytest.importorskip("torch", reason="torch is not installed")

from megatron_nvfp4.checkpoint.dcp import (  # noqa: E402
    TorchDistReader,
    TorchDistWriter,
)

KINDS = ("dense", "moe_grouped", "moe_sequential")
LAYOUTS = {
    "homogeneous": {},
    "non_homogeneous": {"non_homogeneous_layers": True},
    "singleton": {"singleton_local_shards": True},
}
NUM_LAYERS, NUM_EXPERTS = 2, 4


# --- in the child: megatron-core writes, we read ----------------------------------------------------------


def check_every_layout_reads_back_equal(folder):
    """Prevents: a layout that is misread: layers or experts permuted, gate and up swapped, keys missed."""
    import megatron_small as small

    for kind in KINDS:
        model = small.new_model(small.new_config(kind, "transformer_engine"))
        small.fill(model)
        expected = small.weights_of(model.state_dict())
        for layout in LAYOUTS:
            path = folder / f"{kind}_{layout}"
            _save(model, path, layout)
            reader = TorchDistReader(path)
            assert reader.layout == layout, (kind, layout)
            assert reader.common["args"]["num_layers"] == NUM_LAYERS
            assert reader.common["iteration"] == 7
            found = _parameters(reader)
            assert small.differing(found, expected) == [], (kind, layout)
            assert {t.dtype for t in found.values()} == {torch.bfloat16}


def check_two_ranks_read_back_equal(folder):
    """Prevents: chunks of other ranks lost, or gate and up of two ranks joined as one rank's halves."""
    import megatron_small as small

    for kind, sizes in (
        ("dense", {"tp": 2}),
        ("moe_grouped", {"ep": 2}),
        ("moe_grouped", {"pp": 2}),
    ):
        small.parallelise(**sizes)
        model = small.new_model(small.new_config(kind, "transformer_engine"))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(_numbered(name, parameter, model))
        path = folder / f"ranks_{kind}_{'_'.join(sizes)}"
        for layout in ("homogeneous", "non_homogeneous"):
            _save(model, Path(f"{path}_{layout}"), layout)
            found = _parameters(TorchDistReader(Path(f"{path}_{layout}")))
            for name, tensor in model.state_dict().items():
                if "_extra_state" in name:
                    continue
                ours = _own_part(found[small.canonical(_global_name(name, model))], name)
                assert torch.equal(ours, tensor), (kind, layout, name)
        torch.distributed.barrier()


def check_one_layers_rows_are_read(folder):
    """Prevents: rows of another layer, and whole chunks loaded where some rows were asked for."""

    reader = TorchDistReader(folder / "moe_grouped_homogeneous")
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    whole = reader.read(key)
    assert whole.shape == reader.meta(key)[1] == (NUM_LAYERS, NUM_EXPERTS, 192, 64)
    for rows in ((0, 192), (10, 20), (90, 100), (96, 192), (5, 5)):
        part = reader.read(key, layer=1, expert=3, rows=rows)
        assert torch.equal(part, whole[1, 3, slice(*rows)]), rows
    assert torch.equal(reader.read(key, layer=0), whole[0])
    for wrong in (
        {"layer": 2},
        {"layer": 0, "expert": -1},
        {"layer": 0, "expert": 0, "rows": (0, 193)},
    ):
        with pytest.raises(ValueError, match=r"linear_fc1\.weight: layer="):
            reader.read(key, **wrong)
    with pytest.raises(ValueError, match="no tensor decoder"):
        reader.read("decoder.layers.gone")


# --- in the child: we write, megatron-core loads ----------------------------------------------------------


def check_written_checkpoints_load(folder):
    """Prevents: a key, a shape or an `_extra_state` that Megatron misses, or that it does not know."""
    import megatron_small as small
    from megatron.core import dist_checkpointing

    for impl in ("transformer_engine", "minite"):
        for kind in KINDS:
            source = small.new_model(small.new_config(kind, impl))
            small.fill(source)
            expected = small.weights_of(source.state_dict())
            for layout in ("homogeneous", "non_homogeneous"):
                path = folder / f"written_{impl}_{kind}_{layout}"
                _write(path, expected, layout)
                model = small.new_model(small.new_config(kind, impl))
                assert small.differing(small.weights_of(model.state_dict()), expected)
                state, missing, unexpected = dist_checkpointing.load(
                    _sharded(model, layout), str(path / "release"), strict="return_all"
                )
                assert (missing, unexpected) == (set(), set()), (impl, kind, layout)
                _check_common(state)
                weights = {name: state[name] for name in model.state_dict() if name in state}
                model.load_state_dict(weights)
                found = small.weights_of(model.state_dict())
                assert small.differing(found, expected) == [], (impl, kind, layout)


def check_written_checkpoints_load_on_two_ranks(folder):
    """Prevents: chunks that only one rank can load, such as gate and up in one."""
    import megatron_small as small
    from megatron.core import dist_checkpointing

    for kind, sizes in (("dense", {"tp": 2}), ("moe_grouped", {"ep": 2})):
        small.parallelise(**sizes)
        path = folder / f"written_transformer_engine_{kind}_homogeneous"
        model = small.new_model(small.new_config(kind, "transformer_engine"))
        state, missing, unexpected = dist_checkpointing.load(
            _sharded(model, "homogeneous"), str(path / "release"), strict="return_all"
        )
        assert (missing, unexpected) == (set(), set()), kind
        found = _parameters(TorchDistReader(path))
        for name, tensor in model.state_dict().items():
            if "_extra_state" not in name:
                ours = _own_part(found[small.canonical(_global_name(name, model))], name)
                assert ours.shape == tensor.shape, name
                assert torch.equal(ours, state[name]), (kind, name)


# --- helpers of the checks --------------------------------------------------------------------------------


def _sharded(model, layout: str):
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "singleton_local_shards": False, **LAYOUTS[layout]}
    return model.sharded_state_dict(metadata=metadata)


def _save(model, path: Path, layout: str) -> None:
    from megatron.core import dist_checkpointing

    if os.environ["RANK"] == "0":
        path.mkdir()
    torch.distributed.barrier()
    state = _sharded(model, layout)
    state |= {
        "args": argparse.Namespace(num_layers=NUM_LAYERS, params_dtype=torch.bfloat16),
        "iteration": 7,
        "checkpoint_version": 3.0,
    }
    metadata = {"singleton_local_shards": layout == "singleton"}
    dist_checkpointing.save(state, str(path), content_metadata=metadata)


def _parameters(reader) -> dict:
    """Canonical sequential names -> tensors, of any layout."""
    found, halves = {}, {}
    for key in reader.keys():  # noqa: SIM118 - not a dict
        shape = list(reader.meta(key)[1])
        stacked = re.match(r"decoder\.layers\.(?!\d)", key)
        for layer in range(shape[0]) if stacked else [None]:
            name = key if layer is None else key.replace("layers.", f"layers.{layer}.", 1)
            if not re.search(r"experts\.experts\.linear", key):
                name = name.replace("experts.experts.", "experts.local_experts.")
                tensor = reader.read(key, layer=layer)
                if name.endswith(("_w", "_v")):
                    halves.setdefault(name[:-2], {})[name[-1]] = tensor
                else:
                    found[name] = tensor
                continue
            for expert in range(shape[0 if layer is None else 1]):
                new = name.replace("experts.experts.", f"experts.local_experts.{expert}.")
                found[new] = reader.read(key, layer=layer, expert=expert)
    return found | {name: torch.cat([two["w"], two["v"]]) for name, two in halves.items()}


def _write(path: Path, weights: dict, layout: str) -> None:
    """Write weights under sequential names, one by one."""
    common = {"args": argparse.Namespace(num_layers=NUM_LAYERS)}
    sizes = {"num_layers": NUM_LAYERS, "num_experts": NUM_EXPERTS}
    with TorchDistWriter(path, common=common, max_chunk_bytes=8192, **sizes) as writer:
        for name, tensor in weights.items():
            at = {}
            if layout == "homogeneous" and (match := re.match(r"decoder\.layers\.(\d+)\.", name)):
                at["layer"] = int(match[1])
                name = name.replace(f"layers.{match[1]}.", "layers.")
            if match := re.search(r"local_experts\.(\d+)\.", name):
                at["expert"] = int(match[1])
                name = name.replace(match[0], "experts.")
            writer.write(name, tensor, halves="linear_fc1.weight" in name, **at)


def _check_common(state: dict) -> None:
    assert state["args"].num_layers == NUM_LAYERS
    assert state["iteration"] == 0
    assert state["checkpoint_version"] == 3.0
    assert state["content_metadata"]["singleton_local_shards"] is False


def _global_name(name: str, model) -> str:
    """A local name with the layer's and the expert's numbers in the whole model."""
    from megatron.core import parallel_state

    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    if match:
        layer = model.decoder.layers[int(match[1])].layer_number - 1
        name = name.replace(match[0], f"decoder.layers.{layer}.")
    ep, rank = (
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    first = rank * NUM_EXPERTS // ep
    return re.sub(
        r"(experts\.linear_fc\d\.weight)(\d+)$", lambda m: f"{m[1]}{int(m[2]) + first}", name
    )


def _own_part(tensor, name: str):
    """What this tensor parallel rank holds of a whole parameter."""
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    if size == 1 or tensor.dim() == 1 or "router" in name:
        return tensor
    if "linear_fc1" in name:
        return torch.cat([half.chunk(size)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(size, dim=int(bool(re.search("linear_(proj|fc2)", name))))[rank]


def _numbered(name: str, parameter, model):
    """Values that tell parameters and tensor parallel ranks apart; equal where ranks hold copies."""
    import zlib

    from megatron.core import parallel_state

    is_copy = parameter.dim() == 1 or "router" in name
    rank = 0 if is_copy else parallel_state.get_tensor_model_parallel_rank()
    seed = zlib.crc32(_global_name(name, model).encode()) + rank
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))


WORLDS = {
    "te": World(
        te=True,
        checks=(
            check_every_layout_reads_back_equal,
            check_one_layers_rows_are_read,
            check_written_checkpoints_load,
        ),
    ),
    "two_ranks": World(
        te=True,
        num_ranks=2,
        checks=(check_two_ranks_read_back_equal, check_written_checkpoints_load_on_two_ranks),
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    megatron_runs.require_megatron()
    folder = tmp_path_factory.mktemp("dcp")
    return Outcomes(Path(__file__), WORLDS, folder, MINITE_RECIPE="bf16")


@every_check(WORLDS)
def test_in_child(outcomes, world, check):
    """What the check's docstring says."""
    outcomes.require(world, check)


if __name__ == "__main__":
    run_world(WORLDS)
