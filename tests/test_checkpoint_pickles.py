"""No pickle is run: hostile files in every place where a checkpoint keeps one."""

import argparse
import io
import os
import pickle
import pickletools
import sys
import zipfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from megatron_nvfp4.checkpoint import unpickle  # noqa: E402
from megatron_nvfp4.checkpoint.archive import ArchiveWriter  # noqa: E402
from megatron_nvfp4.checkpoint.atomic import OutputFile  # noqa: E402
from megatron_nvfp4.checkpoint.dcp import TorchDistReader, TorchDistWriter  # noqa: E402
from megatron_nvfp4.checkpoint.legacy import LegacyReader  # noqa: E402
from megatron_nvfp4.checkpoint.stored_tensor import StoredTensor  # noqa: E402


class _Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def _in_metadata(folder, bomb) -> Path:
    path = folder / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = bomb
    path.write_bytes(pickle.dumps(metadata))
    return path


def _in_object(folder, value) -> Path:
    """Put another object where the common state lies, at the end of the data file."""
    path = folder / "release" / "__0_0.distcp"
    start = path.stat().st_size
    with open(path, "ab") as file:
        torch.save(value, file)
    _move(folder, "common_state/shard_0_1", start, path.stat().st_size - start)
    return path


def _in_chunk(folder, value) -> Path:
    path = folder / "release" / "__0_0.distcp"
    start = path.stat().st_size
    with open(path, "ab") as file:
        torch.save(value, file)
    _move(folder, "w", start, path.stat().st_size - start)
    return path


def _move(folder, name, start, length) -> None:
    path = folder / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for index, place in metadata.storage_data.items():
        if index.fqn == name:
            place.offset, place.length = start, length
    path.write_bytes(pickle.dumps(metadata))


def _in_common_pt(folder, value) -> Path:
    path = folder / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    del metadata.state_dict_metadata["common_state/shard_0_1"]
    path.write_bytes(pickle.dumps(metadata))
    torch.save(value, folder / "release" / "common.pt")
    return folder / "release" / "common.pt"


PLACES = {
    "metadata": _in_metadata,
    "common_state": lambda folder, bomb: _in_object(folder, [{"args": bomb}]),
    "chunk": lambda folder, bomb: _in_chunk(folder, {"w": torch.ones(3), "x": bomb}),
    "common_pt": lambda folder, bomb: _in_common_pt(folder, {"args": argparse.Namespace(a=bomb)}),
}


@pytest.mark.parametrize("place", PLACES)
def test_hostile_pickles_in_torch_dist_are_refused(tmp_path, place):
    # Prevents: code of a downloaded checkpoint run on the user's machine.
    with TorchDistWriter(tmp_path / "out", common={}, num_layers=0) as writer:
        writer.write("w", torch.ones(64, 4))
    path = PLACES[place](tmp_path / "out", _Bomb(tmp_path / "executed"))
    with pytest.raises(
        ValueError, match=rf"{path.name}: its pickle asks for posix\.mkdir.*refused"
    ):
        TorchDistReader(tmp_path / "out").read("w")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("where", ["model", "args", "optimizer"])
def test_hostile_pickles_in_legacy_files_are_refused(tmp_path, where):
    # Prevents: the same, in the format that was made of pickles.
    path = tmp_path / "mp_rank_00"
    path.mkdir()
    state = {"args": argparse.Namespace(), "model": {"w": torch.ones(2)}, "optimizer": {}}
    bomb = _Bomb(tmp_path / "executed")
    if where == "args":
        state["args"].x = bomb
    else:
        state[where]["x"] = bomb
    torch.save(state, path / "model_optim_rng.pt")
    with pytest.raises(ValueError, match=r"model_optim_rng\.pt: its pickle asks for posix\.mkdir"):
        LegacyReader(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_the_bomb_would_have_gone_off(tmp_path):
    # Prevents: tests above that pass because the payload is a dud.
    pickle.loads(pickle.dumps(_Bomb(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"cbuiltins\neval\n(V1+1\ntR.", r"builtins\.eval"),
        (b"cbuiltins\nexec\n(V1\ntR.", r"builtins\.exec"),
        (b"cbuiltins\n__import__\n(Vos\ntR.", r"builtins\.__import__"),
        (b"csubprocess\nPopen\n(Vls\ntR.", r"subprocess\.Popen"),
        (b"ctorch.hub\nload\n(Vx\ntR.", r"torch\.hub\.load"),
        (b"ctorch\nload\n(Vx\ntR.", r"torch\.load"),
        (b"ctorch._utils\n_rebuild_wrapper_subclass\n.", r"_rebuild_wrapper_subclass"),
        (b"cbuiltins\ngetattr\n(cbuiltins\ndict\nVfromkeys\ntR.", r"builtins\.getattr"),
        (b"c_codecs\nencode\n(Vx\nVrot13\ntR.", r"_codecs\.encode to rot13"),
        (
            b"ctorch._utils\n_rebuild_tensor_v2\n(V/etc/passwd\nI0\n(I1\nt(I1\ntI00\n(dtR.",
            "without a storage",
        ),
        (b"Vpid\nQ.", "damaged"),
        (b"(Vmodule\nVos\nVx\nVcpu\nI1\ntQ.", "a persistent object"),
        # BUILD sets attributes: of a tensor's builder, of a class that all checkpoints share.
        (
            b"ctorch._utils\n_rebuild_tensor_v2\n(dV_function\ncbuiltins\nlist\nsb.",
            "to change a _Builder",
        ),
        (b"cargparse\nNamespace\n(N(dV__init__\ncbuiltins\nlist\nstb.", "damaged"),
        (b"cmegatron.core\nX\n(N(dV__init__\ncbuiltins\nlist\nstb.", "damaged"),
        (b"ctorch\nfloat32\n(dVx\nI1\nsb.", "damaged"),
        (b"", "damaged"),
        (b"\x80\x04", "damaged"),
        (b"I1\n", "damaged"),
    ],
)
def test_pickles_that_ask_for_more_than_data_are_refused(tmp_path, data, part):
    # Prevents: a way around the list of names: by attribute, by codec, by state, by a damaged stream.
    (tmp_path / "x").write_bytes(data)
    before = {name: vars(unpickle.Namespace).get(name) for name in ("__init__", "__setstate__")}
    with pytest.raises(ValueError, match=rf"x: its pickle .*{part}"):
        unpickle.load_pickle(tmp_path / "x")
    assert before == {name: vars(unpickle.Namespace).get(name) for name in before}


def test_a_pickle_cannot_say_where_a_tensor_lies(tmp_path):
    # Prevents: any file of the user's read into a model that is then published.
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 64)
    torch.save(torch.zeros(8), tmp_path / "x")
    with zipfile.ZipFile(tmp_path / "x") as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in records if name.endswith("data.pkl"))
    original = records[name]
    assert original.endswith(b".")
    setting = f"}}X\x04\x00\x00\x00pathX{chr(len(str(secret)))}\x00\x00\x00{secret}sb.".encode(
        "latin1"
    )
    records[name] = original[:-1] + setting
    pickletools.dis(records[name], out=io.StringIO())  # it is a well-formed program
    with zipfile.ZipFile(tmp_path / "y", "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    assert isinstance(unpickle.load_saved(tmp_path / "x"), StoredTensor)
    with pytest.raises(ValueError, match="must not say where a tensor lies"):
        unpickle.load_saved(tmp_path / "y")


def test_opaque_records_import_nothing(tmp_path):
    # Prevents: importing a package of the checkpoint's choice, whose import alone can do harm.
    package = tmp_path / "megatron_evil"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "x").write_bytes(b"cmegatron.evil\nThing\n(I1\ntR.")
    assert repr(unpickle.load_pickle(tmp_path / "x")) == "<megatron.evil.Thing(1,)>"
    assert "megatron.evil" not in sys.modules
    (tmp_path / "x").write_bytes(b"cmegatron_evil\nThing\n(I1\ntR.")
    with pytest.raises(ValueError, match=r"megatron_evil\.Thing"):
        unpickle.load_pickle(tmp_path / "x")


def test_tensors_outside_their_data_are_refused(tmp_path):
    # Prevents: a shape or a stride that reaches into the bytes of another tensor.
    for shape, stride, offset in (
        ((9,), (1,), 0),
        ((2,), (8,), 0),
        ((8,), (1,), 1),
        ((-1,), (1,), 0),
    ):
        file = OutputFile(tmp_path / f"{shape}{stride}{offset}")
        writer = ArchiveWriter(file)
        saved = writer.save(torch.zeros(8))
        moved = saved._replace(shape=shape)

        class Moved:
            def __reduce__(self, moved=moved, offset=offset, stride=stride):
                return torch._utils._rebuild_tensor_v2, (
                    (moved.storage, offset, moved.shape, stride, False, {})
                )

        writer.finish(Moved())
        file.close()
        with pytest.raises(ValueError, match="outside its storage"):
            unpickle.load_saved(tmp_path / f"{shape}{stride}{offset}")


def test_other_archives_are_refused(tmp_path):
    # Prevents: formats that the reader would misread.
    with zipfile.ZipFile(tmp_path / "compressed", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"N.")
        archive.writestr("archive/data/0", b"0" * 100)
    with pytest.raises(ValueError, match="compressed"):
        unpickle.load_saved(tmp_path / "compressed")
    with zipfile.ZipFile(tmp_path / "big", "w") as archive:
        archive.writestr("archive/byteorder", b"big")
    with pytest.raises(ValueError, match="big-endian"):
        unpickle.load_saved(tmp_path / "big")
    with zipfile.ZipFile(tmp_path / "empty", "w"):
        pass
    torch.save({"w": torch.ones(2)}, tmp_path / "old", _use_new_zipfile_serialization=False)
    for name in ("empty", "old"):
        with pytest.raises(ValueError, match=r"no zip archive of torch\.save.*torch before 1\.6"):
            unpickle.load_saved(tmp_path / name)
