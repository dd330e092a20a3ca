"""torch_dist files without Megatron: chunks, types, older and damaged metadata, wrong uses."""

import argparse
import json
import os
import pickle
import subprocess
import sys
import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from megatron_nvfp4.checkpoint.dcp import (  # noqa: E402
    TorchDistReader,
    TorchDistWriter,
    has_extra_state,
)

NUM_LAYERS, NUM_EXPERTS = 2, 4


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
