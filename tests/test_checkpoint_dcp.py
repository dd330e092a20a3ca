"""torch_dist checkpoints against megatron-core itself: what it writes is read, what is written it loads.

Megatron runs in child processes (megatron_runs.py); the readers and writers under test import none of it.
"""

import argparse
import json
import os
import pickle
import re
import subprocess
import sys
import types
from pathlib import Path

import megatron_runs
import pytest
from megatron_runs import Outcomes, World, every_check, run_world

torch = pytest.importorskip("torch", reason="torch is not installed")

from megatron_nvfp4.checkpoint.dcp import (  # noqa: E402
    TorchDistReader,
    TorchDistWriter,
    has_extra_state,
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


# --- without Megatron -------------------------------------------------------------------------------------


def _small(folder, **options) -> dict:
    """A checkpoint of every kind of key; (key, layer, expert) -> tensor."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        ("embedding.word_embeddings.weight", None, None): torch.randn(40, 8, generator=generator)
    }
    for layer in range(3):
        tensors["decoder.layers.mlp.router.weight", layer, None] = torch.randn(2, 8).bfloat16()
        for expert in range(2):
            key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
            tensors[key, layer, expert] = torch.randn(12, 8, generator=generator).half()
    options = {"common": {"args": {"hidden_size": 8}}, **options}
    with TorchDistWriter(folder, num_layers=3, num_experts=2, **options) as writer:
        for (key, layer, expert), tensor in tensors.items():
            writer.write(key, tensor, layer=layer, expert=expert, halves="fc1" in key)
    return tensors


def _edit_metadata(folder, change) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def _places(metadata, key):
    return [(i, p) for i, p in metadata.storage_data.items() if i.fqn == key]


@pytest.mark.parametrize("max_file_bytes", [5e9, 1000])
@pytest.mark.parametrize("max_chunk_bytes", [1 << 28, 64])
@pytest.mark.parametrize("iteration", [None, 12])
def test_what_is_written_is_read(tmp_path, max_file_bytes, max_chunk_bytes, iteration):
    # Prevents: parts of a key put back in another order, files of one name.
    sizes = {"max_file_bytes": max_file_bytes, "max_chunk_bytes": max_chunk_bytes}
    tensors = _small(tmp_path / "out", iteration=iteration, **sizes)
    folder = tmp_path / "out" / ("release" if iteration is None else "iter_0000012")
    num_files = len(list(folder.glob("*.distcp")))
    assert (num_files == 1) if max_file_bytes == 5e9 else (num_files > 3)
    for path in (tmp_path / "out", folder):
        reader = TorchDistReader(path)
        assert reader.folder == folder
        assert reader.layout == "homogeneous"
        assert reader.common["iteration"] == (iteration or 0)
        assert reader.common["args"] == {"hidden_size": 8}
        assert reader.keys() == sorted({key for key, _, _ in tensors})
        for (key, layer, expert), tensor in tensors.items():
            assert torch.equal(reader.read(key, layer=layer, expert=expert), tensor), key
            for rows in ((0, len(tensor)), (1, len(tensor) - 1), (1, 1)):
                part = reader.read(key, layer=layer, expert=expert, rows=rows)
                assert torch.equal(part, tensor[slice(*rows)]), (key, rows)
    config = json.loads((folder / "metadata.json").read_text())
    assert config == {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


def test_chunks_are_one_layers_experts_half(tmp_path):
    # Prevents: a reader of one expert loading all of them, which no machine can at 38 GB a key.
    _small(tmp_path / "out")
    metadata = pickle.loads((tmp_path / "out" / "release" / ".metadata").read_bytes())
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    chunks = metadata.state_dict_metadata[key].chunks
    assert {tuple(chunk.sizes) for chunk in chunks} == {(1, 1, 6, 8)}
    assert len(chunks) == 3 * 2 * 2
    states = {name for name in metadata.state_dict_metadata if "_extra_state" in name}
    module = key.removesuffix("weight")
    expected = {f"{module}_extra_state/shard_{i}.{e}_3.2" for i in range(3) for e in range(2)}
    assert states == expected
    _small(tmp_path / "bare", extra_state=False)
    metadata = pickle.loads((tmp_path / "bare" / "release" / ".metadata").read_bytes())
    assert not any("_extra_state" in name for name in metadata.state_dict_metadata)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("decoder.layers.self_attention.linear_qkv.layer_norm_weight", True),
        ("decoder.layers.3.pre_mlp_layernorm.weight", True),
        ("decoder.final_layernorm.weight", True),
        ("mtp.layers.0.eh_proj.weight", True),
        ("mtp.layers.0.enorm.weight", True),
        ("decoder.layers.mlp.router.weight", False),
        ("decoder.layers.mlp.shared_experts.gate_weight", False),
        ("embedding.word_embeddings.weight", False),
        ("output_layer.weight", False),
    ],
)
def test_which_modules_keep_extra_state(key, expected):
    # Prevents: objects that Megatron does not ask for, or asks for in vain.
    assert has_extra_state(key) is expected


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "uint8", "int64", "bool"],
)
def test_every_dtype_comes_back(tmp_path, dtype):
    # Prevents: values converted on the way, scalars and empty tensors lost.
    dtype = getattr(torch, dtype)
    raw = torch.randint(0, 2, (4, 6), dtype=torch.uint8) * 17
    tensors = {
        "plain": raw.to(dtype) if dtype.is_floating_point else (raw > 0).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.empty(0, 3).to(dtype),
        "view": (raw.to(dtype) if dtype != torch.bool else raw > 0).t()[1:5],
    }
    with TorchDistWriter(tmp_path / "out", common={}, num_layers=0) as writer:
        for key, tensor in tensors.items():
            writer.write(key, tensor)
    reader = TorchDistReader(tmp_path / "out")
    for key, tensor in tensors.items():
        found = reader.read(key)
        assert (found.dtype, found.shape) == (dtype, tensor.shape)
        assert torch.equal(
            found.reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)
        )


def test_torch_reads_what_is_written(tmp_path):
    # Prevents: metadata that only we and Megatron understand.
    import torch.distributed.checkpoint as dcp

    tensors = _small(tmp_path / "out", max_chunk_bytes=64)
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    state = {key: torch.empty(3, 2, 12, 8).half()}
    dcp.load(state, checkpoint_id=tmp_path / "out" / "release", no_dist=True)
    for (name, layer, expert), tensor in tensors.items():
        if name == key:
            assert torch.equal(state[key][layer, expert], tensor)


def test_older_metadata_and_common_pt_are_read(tmp_path, monkeypatch):
    # Prevents: refusing what Megatron of a year ago wrote: its classes in pickles, common.pt beside.
    tensors = _small(tmp_path / "out")
    folder = tmp_path / "out" / "release"

    class AttnBackend:
        def __reduce__(self):
            return AttnBackend, (5,)

    names = ["megatron", "megatron.core", "megatron.core.transformer"]
    AttnBackend.__module__ = f"{names[-1]}.enums"
    AttnBackend.__qualname__ = "AttnBackend"
    with monkeypatch.context() as context:  # pickle wants to find the class where it says it is
        for name in names:
            context.setitem(sys.modules, name, types.ModuleType(name))
        enums = argparse.Namespace(AttnBackend=AttnBackend)
        context.setitem(sys.modules, AttnBackend.__module__, enums)
        plan = AttnBackend()
        _edit_metadata(folder, lambda m: m.state_dict_metadata.pop("common_state/shard_0_1"))
        _edit_metadata(folder, lambda m: setattr(m, "planner_data", [plan]))
        args = argparse.Namespace(num_layers=3, attention_backend=plan, params_dtype=torch.bfloat16)
        torch.save({"args": args, "iteration": 5, "rng": torch.ones(3)}, folder / "common.pt")
    reader = TorchDistReader(folder)
    assert reader.common["iteration"] == 5
    assert reader.common["args"]["num_layers"] == 3
    assert reader.common["args"]["params_dtype"] == torch.bfloat16
    backend = reader.common["args"]["attention_backend"]
    assert repr(backend) == "<megatron.core.transformer.enums.AttnBackend(5,)>"
    assert torch.equal(reader.common["rng"].read(), torch.ones(3))
    for (key, layer, expert), tensor in tensors.items():
        assert torch.equal(reader.read(key, layer=layer, expert=expert), tensor)
    (folder / "common.pt").unlink()
    assert TorchDistReader(folder).common == {"args": {}}


KEY = "decoder.layers.mlp.experts.experts.linear_fc1.weight"


def _shift(metadata) -> None:
    """The second chunk lies where the first does."""
    entry = metadata.state_dict_metadata[KEY]
    first, second = _places(metadata, KEY)[:2]
    entry.chunks[1].offsets = entry.chunks[0].offsets
    metadata.storage_data.pop(second[0])
    assert first[0] in metadata.storage_data


def _compress(metadata) -> None:
    _places(metadata, KEY)[0][1].transform_descriptors = ["zstd"]


def _outside(metadata) -> None:
    metadata.state_dict_metadata[KEY].size = torch.Size((3, 2, 11, 8))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (_shift, rf"{KEY}: the chunk at \(0, 0, 0, 0\) overlaps another one"),
        (
            lambda m: m.state_dict_metadata[KEY].chunks.pop(3),
            f"{KEY}: 48 of 576 values are in no chunk",
        ),
        (_outside, f"{KEY}: chunk .* lies outside"),
        (
            lambda m: m.storage_data.pop(_places(m, KEY)[2][0]),
            f"{KEY}: the chunk at .* lies nowhere",
        ),
        (_compress, f"{KEY} is stored compressed"),
        (lambda m: m.__dict__.pop("storage_data"), "not DCP metadata"),
        (
            lambda m: setattr(_places(m, KEY)[0][1], "relative_path", "../x"),
            "names '../x', not a file",
        ),
        (lambda m: setattr(_places(m, KEY)[0][1], "relative_path", "x"), "release/x: is missing"),
        (lambda m: setattr(_places(m, KEY)[0][1], "length", 10**9), "truncated"),
    ],
)
def test_damaged_metadata_is_refused(tmp_path, change, part):
    # Prevents: values never filled, filled twice, or read from another place.
    _small(tmp_path / "out")
    folder = tmp_path / "out" / "release"
    _edit_metadata(folder, change)
    with pytest.raises(ValueError, match=part):
        TorchDistReader(folder)


@pytest.mark.parametrize("text", [b"", b"garbage", pickle.dumps({"a": 1}), pickle.dumps(7)])
def test_foreign_metadata_is_refused(tmp_path, text):
    # Prevents: a traceback out of the pickle module.
    _small(tmp_path / "out")
    (tmp_path / "out" / "release" / ".metadata").write_bytes(text)
    with pytest.raises(ValueError, match=r"\.metadata: "):
        TorchDistReader(tmp_path / "out")


def test_damaged_files_are_refused(tmp_path):
    # Prevents: one chunk read as another, or zeros for what was not copied.
    _small(tmp_path / "out")
    folder = tmp_path / "out" / "release"
    path = folder / "__0_0.distcp"
    data = path.read_bytes()

    def swap(metadata):
        first, second = (
            _places(metadata, KEY)[0][1],
            _places(metadata, "decoder.layers.mlp.router.weight")[0][1],
        )
        for name in ("offset", "length"):
            a, b = getattr(first, name), getattr(second, name)
            setattr(first, name, b)
            setattr(second, name, a)

    original = (folder / ".metadata").read_bytes()
    _edit_metadata(folder, swap)
    with pytest.raises(ValueError, match=f"is not the chunk of {KEY}"):
        TorchDistReader(folder).read(KEY, layer=0, expert=0, rows=(0, 6))
    (folder / ".metadata").write_bytes(original)
    place = _places(pickle.loads(original), KEY)[0][1]
    middle = place.offset + place.length - 30
    path.write_bytes(data[:middle] + bytes(30) + data[middle + 30 :])
    with pytest.raises(ValueError, match=r"__0_0\.distcp: .* no zip archive of torch\.save"):
        TorchDistReader(folder).read(KEY, layer=0, expert=0)
    path.write_bytes(data[:-5])
    with pytest.raises(ValueError, match=r"__0_0\.distcp: is .* truncated"):
        TorchDistReader(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"__0_0\.distcp: is missing"):
        TorchDistReader(folder)


def test_folders_without_a_checkpoint_are_refused(tmp_path):
    # Prevents: an empty model, or a guess at which iteration is meant.
    with pytest.raises(ValueError, match="no such folder"):
        TorchDistReader(tmp_path / "absent")
    with pytest.raises(ValueError, match="holds neither"):
        TorchDistReader(tmp_path)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for text, part in (("x", "neither a number nor"), ("7", "iter_0000007: is missing")):
        tracker.write_text(text)
        with pytest.raises(ValueError, match=part):
            TorchDistReader(tmp_path)
    (tmp_path / "iter_0000007" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"\.metadata: is missing; not torch_dist"):
        TorchDistReader(tmp_path)


@pytest.mark.parametrize(
    ("write", "part"),
    [
        (lambda w: w.write("k", torch.ones(2), layer=3), r"k: layer=3 expert=None, of \(3,\)"),
        (lambda w: w.write("k", torch.ones(2), layer=0, expert=2), "k: layer=0 expert=2"),
        (lambda w: w.write("k", torch.ones(3), halves=True), r"k: \(3,\) has no two halves"),
        (lambda w: [w.write("k", torch.ones(2)) for _ in range(2)], "k: the chunk at .* overlaps"),
        (lambda w: w.write("k", torch.ones(2), layer=0), "k: 4 of 6 values are in no chunk"),
        (
            lambda w: [w.write("k", torch.ones(2 + i), layer=i) for i in range(2)],
            r"k: torch\.float32 \(3, 3\) beside torch\.float32 \(3, 2\)",
        ),
        (lambda w: None, "no tensor was written"),
    ],
)
def test_wrong_use_of_the_writer_is_refused(tmp_path, write, part):
    # Prevents: a checkpoint published with less, or other, than the model has.
    with (
        pytest.raises(ValueError, match=part),
        TorchDistWriter(tmp_path / "out", common={}, num_layers=3, num_experts=2) as writer,
    ):
        write(writer)
    assert os.listdir(tmp_path) == []


def test_no_megatron_is_imported():
    # Prevents: a conversion that needs a GPU stack.
    code = (
        "import sys\n"
        "from megatron_nvfp4.checkpoint import dcp, hf, legacy, progress, unpickle\n"
        "print([n for n in ('megatron', 'transformers', 'transformer_engine') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


if __name__ == "__main__":
    run_world(WORLDS)
