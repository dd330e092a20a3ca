"""Hugging Face folders: what is written is read bit for bit, what is damaged is refused by name."""

import io
import json
import os

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

from megatron_nvfp4.checkpoint import safetensors_file, stored_tensor  # noqa: E402
from megatron_nvfp4.checkpoint.atomic import bytes_of  # noqa: E402
from megatron_nvfp4.checkpoint.hf import INDEX, HFReader, HFWriter  # noqa: E402
from megatron_nvfp4.checkpoint.hf_files import OriginalFiles  # noqa: E402
from megatron_nvfp4.checkpoint.progress import Progress  # noqa: E402

CONFIG = {"model_type": "llama", "note": "\u00e9"}


def _tensors() -> dict[str, "torch.Tensor"]:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    bytes_ = torch.randint(0, 256, (40, 24), generator=generator, dtype=torch.uint8)
    return {
        "a.weight": noise(96, 33).bfloat16(),
        "b.scale": noise(1)[0],
        "c.codes": bytes_,
        "d.e4m3": bytes_.view(torch.float8_e4m3fn),  # NaN bytes included
        "e.e8m0": bytes_.view(torch.float8_e8m0fnu),
        "f.fused": noise(4, 100, 64),
        "g.empty": noise(0, 4),
        "h.half": noise(17).half(),
        "i.mask": noise(5, 3) > 0,
        "j.count": torch.arange(9),
        "k.large": noise(300, 256),
    }


def _write(folder, tensors, **options):
    with HFWriter(folder, config=CONFIG, **options) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return folder


def _same_bits(a, b) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return bytes(bytes_of(a.contiguous())) == bytes(bytes_of(b.contiguous()))


@pytest.fixture
def folder(tmp_path):
    return _write(tmp_path / "model", _tensors())


@pytest.fixture
def sharded(tmp_path):
    return _write(tmp_path / "sharded", _tensors(), max_shard_bytes=60_000)


# --- round trip -----------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", [0, 1 << 25])
@pytest.mark.parametrize("max_shard_bytes", [5e9, 60_000, 1])
def test_every_dtype_and_shape_comes_back(tmp_path, monkeypatch, buffer, max_shard_bytes):
    # Prevents: bits changed or lost by sharding, by headers of unknown size, by odd shapes.
    monkeypatch.setattr(safetensors_file, "_BUFFER", buffer)
    tensors = _tensors()
    folder = _write(tmp_path / "model", tensors, max_shard_bytes=max_shard_bytes)
    reader = HFReader(folder)
    assert reader.names() == sorted(tensors)
    assert reader.config == CONFIG
    assert reader.num_bytes() == sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        assert reader.meta(name) == (tensor.dtype, tuple(tensor.shape))
        assert reader.num_bytes(name) == tensor.nbytes
        assert _same_bits(reader.read(name), tensor), name
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    if max_shard_bytes != 5e9:
        assert len(sizes) > 1
    if max_shard_bytes == 1:
        assert len(sizes) >= len(tensors) - 1  # an empty tensor may share one


@pytest.mark.parametrize("buffer", [0, 1 << 25])
def test_the_safetensors_library_reads_what_is_written(tmp_path, monkeypatch, buffer):
    # Prevents: files that only we can read.
    monkeypatch.setattr(safetensors_file, "_BUFFER", buffer)
    tensors = _tensors()
    del tensors["e.e8m0"]  # not known to every release of the library
    folder = _write(tmp_path / "model", tensors, max_shard_bytes=60_000)
    index = json.loads((folder / INDEX).read_text())
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = safetensors.load_file(path)
        assert {index["weight_map"][name] for name in part} == {path.name}
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        found |= part
    assert found.keys() == tensors.keys() == index["weight_map"].keys()
    assert all(_same_bits(found[name], tensors[name]) for name in tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())


def test_files_of_the_safetensors_library_are_read(tmp_path):
    # Prevents: a reader that knows our own padding and order only.
    tensors = {name: t.clone() for name, t in _tensors().items() if name != "e.e8m0"}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    reader = HFReader(tmp_path)
    assert all(_same_bits(reader.read(name), tensor) for name, tensor in tensors.items())
    with pytest.raises(ValueError, match=r"config\.json: is missing"):
        _ = reader.config


def test_file_names_are_those_of_transformers(folder, sharded):
    # Prevents: folders that loaders do not recognise, and left-overs of writing.
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", INDEX]
    shards = sorted(path.name for path in sharded.glob("*.safetensors"))
    count = len(shards)
    assert shards == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert sorted(os.listdir(sharded)) == ["config.json", *shards, INDEX]


def test_config_metadata_and_other_files_are_written(tmp_path):
    # Prevents: a config changed too late to count, tokenizer files lost or renamed.
    (tmp_path / "tokenizer.json").write_bytes(b"\x00\xff tokens")
    with HFWriter(tmp_path / "out", config={}, metadata={"producer": "x"}) as writer:
        writer.copy_file(tmp_path / "tokenizer.json")
        writer.write_json("hf_quant_config.json", {"a": [1]})
        writer.write("w", torch.ones(2))
        writer.config["added"] = True
        for name in ("config.json", INDEX, "model.safetensors"):
            with pytest.raises(ValueError, match="written by the writer itself"):
                writer.write_json(name, {})
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"\x00\xff tokens"
    assert json.loads((tmp_path / "out" / "hf_quant_config.json").read_text()) == {"a": [1]}
    assert HFReader(tmp_path / "out").config == {"added": True}
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"] == {"producer": "x", "total_size": 8}


@pytest.mark.parametrize("size", [1, 3, 8, 1000])
def test_data_starts_where_readers_may_map_it(tmp_path, monkeypatch, size):
    # Prevents: tensors at odd addresses, which some readers refuse and others copy.
    for buffer in (0, 1 << 25):
        monkeypatch.setattr(safetensors_file, "_BUFFER", buffer)
        folder = _write(tmp_path / f"{buffer}", {"n" * size: torch.ones(4)})
        data = (folder / "model.safetensors").read_bytes()
        assert int.from_bytes(data[:8], "little") % 8 == 0
        assert data[8:9] == b"{"


def test_a_header_too_long_for_its_room_opens_a_shard(tmp_path, monkeypatch):
    # Prevents: a header that runs over the tensors behind it.
    monkeypatch.setattr(safetensors_file, "_BUFFER", 0)
    tensors = {f"{'x' * 400}{i}": torch.tensor([i]) for i in range(400)}
    folder = _write(tmp_path / "model", tensors, max_shard_bytes=1e6)
    assert len(list(folder.glob("*.safetensors"))) > 1
    reader = HFReader(folder)
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in tensors.items())


def test_views_and_strides_are_written_as_values(tmp_path):
    # Prevents: a view's whole storage, or a transposed tensor's memory order, on disk.
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {"t": base.t(), "rows": base[1:3], "columns": base[:, 2:4], "grad": base.clone()}
    tensors["grad"].requires_grad_()
    reader = HFReader(_write(tmp_path / "model", tensors))
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in tensors.items())


def test_a_tensor_may_be_reused_after_it_was_written(tmp_path):
    # Prevents: bytes taken from a buffer that the caller has filled with the next layer.
    buffer = torch.zeros(8)
    with HFWriter(tmp_path / "model", config={}) as writer:
        for i in range(3):
            writer.write(f"w{i}", buffer.fill_(i))
    reader = HFReader(tmp_path / "model")
    assert [reader.read(f"w{i}")[0].item() for i in range(3)] == [0, 1, 2]


# --- rows -----------------------------------------------------------------------------------------


def test_rows_are_read(folder):
    # Prevents: an expert's or a rank's rows taken from the wrong place.
    reader, tensors = HFReader(folder), _tensors()
    for name, rows in (("a.weight", (0, 96)), ("a.weight", (5, 6)), ("k.large", (100, 299))):
        assert torch.equal(reader.read(name, *rows), tensors[name][slice(*rows)])
    assert torch.equal(reader.read("a.weight", 90), tensors["a.weight"][90:])
    assert torch.equal(reader.read("a.weight", stop=3), tensors["a.weight"][:3])
    assert reader.read("a.weight", 3, 3).shape == (0, 33)
    for index in range(4):
        whole = tensors["f.fused"][index]
        assert torch.equal(reader.read("f.fused", index=index), whole)
        assert torch.equal(reader.read("f.fused", 10, 20, index=index), whole[10:20])


@pytest.mark.parametrize(
    ("name", "rows", "index"),
    [
        ("a.weight", (0, 97), None),
        ("a.weight", (-1, 3), None),
        ("a.weight", (5, 4), None),
        ("f.fused", (0, 1), 4),
        ("f.fused", (0, 1), -1),
        ("f.fused", (0, 101), 0),
        ("b.scale", (0, 1), None),
        ("b.scale", (None, None), 0),
    ],
)
def test_rows_that_are_not_there_are_refused(folder, name, rows, index):
    # Prevents: Python's tolerant slices, which return fewer rows than asked for.
    with pytest.raises(ValueError, match=rf"^{name}: (rows|index)"):
        HFReader(folder).read(name, *rows, index=index)


def test_results_are_private(tmp_path):
    # Prevents: an in-place operation that changes the checkpoint or another result.
    large = torch.zeros(1 << 16)
    folder = _write(tmp_path / "model", {"w": large})
    before = (folder / "model.safetensors").read_bytes()
    reader = HFReader(folder)
    first = reader.read("w")
    first += 1
    assert torch.equal(reader.read("w"), large)
    assert (folder / "model.safetensors").read_bytes() == before


def test_many_results_at_once_do_not_exhaust_files(tmp_path):
    # Prevents: "too many open files" with every expert of a layer held at once.
    folder = _write(tmp_path / "model", {"w": torch.arange(1 << 15, dtype=torch.float32)})
    reader = HFReader(folder)
    num_open = len(os.listdir("/proc/self/fd"))
    held = [reader.read("w") for _ in range(400)]
    assert len(os.listdir("/proc/self/fd")) - num_open <= stored_tensor._MAX_MAPPINGS
    assert all(torch.equal(tensor, held[0]) for tensor in held)
    del held
    assert len(os.listdir("/proc/self/fd")) == num_open


# --- damage ---------------------------------------------------------------------------------------


def _edit_index(folder, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def _edit_header(path, change) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize("cut", [1, 100, 30_000])
def test_truncated_shards_are_refused(sharded, cut):
    # Prevents: zeros, or a crash in the middle, for a download that was cut short.
    path = sorted(sharded.glob("*.safetensors"))[1]
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    with pytest.raises(ValueError, match=rf"{path.name}: .*truncated"):
        HFReader(sharded)


@pytest.mark.parametrize("size", [0, 7, 8, 20])
def test_a_shard_without_a_whole_header_is_refused(folder, size):
    # Prevents: an obscure error for an empty or barely begun file.
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model\.safetensors: .*truncated, or not safetensors"):
        HFReader(folder)


def test_missing_shards_are_all_named(sharded):
    # Prevents: one error per run until the last missing file is found.
    paths = sorted(sharded.glob("*.safetensors"))
    for path in paths[:2]:
        path.unlink()
    with pytest.raises(
        ValueError, match=f"2 of {len(paths)} shards .*{paths[0].name}, {paths[1].name}"
    ):
        HFReader(sharded)


def test_an_index_that_disagrees_with_its_shards_is_refused(sharded):
    # Prevents: weights silently left out, or found later than at the start.
    original = (sharded / INDEX).read_text()
    shards = sorted(path.name for path in sharded.glob("*.safetensors"))
    for change, part in (
        (
            lambda m: m.update({"ghost.weight": shards[0]}),
            "names tensors that no shard holds: ghost",
        ),
        (lambda m: m.pop("a.weight"), r"does not name tensors in its shards: a\.weight"),
        (lambda m: m.update({"a.weight": shards[-1]}), r"the wrong shard for: a\.weight"),
        (lambda m: m.clear(), "has no weight_map"),
    ):
        (sharded / INDEX).write_text(original)
        _edit_index(sharded, change)
        with pytest.raises(ValueError, match=part):
            HFReader(sharded)
    for text in ("{", "[]", "\xff"):
        (sharded / INDEX).write_text(text)
        with pytest.raises(ValueError, match=INDEX):
            HFReader(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded):
    # Prevents: one of two different versions taken by chance.
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    second.write_bytes(first.read_bytes())
    with pytest.raises(
        ValueError, match=rf"a\.weight: stands in both {first.name} and {second.name}"
    ):
        HFReader(sharded)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda h: h["c.codes"].update(data_offsets=[0, 960]), "overlaps"),
        (lambda h: h.pop("c.codes"), "leaves a gap after b.scale"),
        (
            lambda h: h["a.weight"].update(shape=[96, 34]),
            r"a\.weight: 6336 bytes are not BF16 \[96, 34\]",
        ),
        (lambda h: h["a.weight"].update(dtype="F4"), r"a\.weight: dtype 'F4' is unknown; cast"),
        (
            lambda h: h["a.weight"].update(shape=[-96, -33]),
            r"a\.weight: its header entry is damaged",
        ),
        (lambda h: h["a.weight"].pop("data_offsets"), r"a\.weight: its header entry is damaged"),
        (lambda h: h.update({"a.weight": 3}), r"a\.weight: its header entry is damaged"),
        (lambda h: h.update({"a.weight": [1]}), r"a\.weight: its header entry is damaged"),
        (
            lambda h: h["a.weight"].update(dtype=["BF16"]),
            r"a\.weight: its header entry is damaged",
        ),
        (lambda h: h["a.weight"].update(shape={}), r"a\.weight: its header entry is damaged"),
        (lambda h: h.update(__metadata__=[1]), r"model\.safetensors: __metadata__ .* not a JSON"),
        (lambda h: h.pop("k.large"), "followed by foreign bytes"),
    ],
)
def test_damaged_headers_are_refused(folder, change, part):
    # Prevents: one tensor's bytes read as another's.
    _edit_header(folder / "model.safetensors", change)
    with pytest.raises(ValueError, match=part):
        HFReader(folder)


@pytest.mark.parametrize("text", ["[1,2]", "null", "12", '"{}"', "[" * 100_000])
def test_a_header_that_is_no_object_is_refused(tmp_path, text):
    # Prevents: a TypeError or a RecursionError that names no file.
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode())
    with pytest.raises(ValueError, match=r"model\.safetensors: its header is not .*copy the file"):
        HFReader(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "a\0.safetensors", "../x.safetensors", "a\\x.safetensors"),
        *("config.json", "tokenizer.json", INDEX, "shard-0.unfinished", "model.bin"),
        *("\ud800.safetensors", "x" * 244 + ".safetensors", "\u00e4" * 122 + ".safetensors", 3),
    ],
)
def test_an_index_that_names_no_shard_is_refused(sharded, name):
    # Prevents: a shard written over the tokenizer or outside of the folder, or an OSError at the end.
    _edit_index(sharded, lambda m: m.update({"a.weight": name}))
    for read in (HFReader, OriginalFiles.read):
        with pytest.raises(ValueError, match=rf"{INDEX}: names shards .*: rename it") as caught:
            read(sharded)
        assert repr(name)[:60] in str(caught.value)


@pytest.mark.parametrize("name", ["gewichte \u00e4.safetensors", "x" * 243 + ".safetensors"])
def test_an_unusual_shard_name_is_read(sharded, name):
    # Prevents: a name refused that every file system takes.
    first = min(sharded.glob("*.safetensors"))
    first.rename(sharded / name)
    _edit_index(sharded, lambda m: m.update({k: name for k, v in m.items() if v == first.name}))
    assert HFReader(sharded).meta("a.weight")[0] == torch.bfloat16


def test_a_header_that_names_a_tensor_twice_is_refused(tmp_path):
    # Prevents: JSON's last-one-wins.
    entry = '"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
    text = f"{{{entry}, {entry}}}".encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"x")
    with pytest.raises(ValueError, match="repeats w"):
        HFReader(tmp_path)


def test_folders_without_weights_are_refused(tmp_path, sharded):
    # Prevents: a set of shards whose index was lost being read as whichever stands first.
    with pytest.raises(ValueError, match="no such folder"):
        HFReader(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"no single safetensors file \(found: none\)"):
        HFReader(tmp_path)
    (sharded / INDEX).unlink()
    with pytest.raises(ValueError, match=r"found: model-00001-of"):
        HFReader(sharded)


def test_absent_tensors_are_named(folder):
    # Prevents: a KeyError that says nothing of the folder.
    reader = HFReader(folder)
    for call in (reader.read, reader.meta, reader.num_bytes):
        with pytest.raises(ValueError, match=r"model: holds no tensor lm_head\.weight"):
            call("lm_head.weight")


@pytest.mark.parametrize(
    ("write", "part"),
    [
        (lambda w: [w.write("w", torch.ones(1)) for _ in range(2)], "w: written twice"),
        (lambda w: w.write("w", torch.ones(1, dtype=torch.complex64)), "w: torch.complex64 has no"),
        (lambda w: None, "no tensor was written"),
    ],
)
def test_wrong_use_of_the_writer_is_refused(tmp_path, write, part):
    # Prevents: a folder published with less, or other, than it was given.
    with pytest.raises(ValueError, match=part), HFWriter(tmp_path / "m", config={}) as writer:
        write(writer)
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="max_shard_bytes=0"):
        HFWriter(tmp_path / "m", config={}, max_shard_bytes=0)


# --- progress -------------------------------------------------------------------------------------


def test_progress_in_a_log_is_a_few_lines():
    # Prevents: a log filled by one line per tensor, or with a terminal's control codes.
    stream = io.StringIO()
    with Progress("export", 3_000_000_000, stream=stream, seconds=1000) as progress:
        for _ in range(1000):
            progress.advance(3_000_000)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("export: 3.00 of 3.00 GB in ")
    assert lines[0].endswith(" GB/s")


def test_progress_reports_between_start_and_end():
    # Prevents: nothing in the log of a run that is still going, or that failed.
    stream = io.StringIO()
    progress = Progress("export", stream=stream, seconds=0)
    progress.advance(1_000_000_000)
    assert stream.getvalue().startswith("export: 1.00 GB in ")


def test_progress_on_a_terminal_is_a_bar():
    # Prevents: a silent terminal during a long conversion.
    pytest.importorskip("rich", reason="rich is not installed")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with Progress("export", 4_000_000, stream=stream) as progress:
        progress.advance(4_000_000)
    assert "export" in stream.getvalue()
    assert "MB" in stream.getvalue()
