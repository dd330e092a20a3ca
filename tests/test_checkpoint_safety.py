"""No pickle is run, and no folder looks complete that is not: hostile files, kill -9, a full disk."""

import argparse
import errno
import io
import os
import pickle
import pickletools
import resource
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from megatron_nvfp4.checkpoint import atomic, unpickle  # noqa: E402
from megatron_nvfp4.checkpoint.dcp import TorchDistReader, TorchDistWriter  # noqa: E402
from megatron_nvfp4.checkpoint.hf import HFReader, HFWriter, StoredTensor  # noqa: E402
from megatron_nvfp4.checkpoint.legacy import LegacyReader, LegacyWriter  # noqa: E402

ROOT = Path(__file__).parents[1]


def _hf(folder, **options):
    return HFWriter(folder, config={}, **options)


def _dcp(folder, **options):
    return TorchDistWriter(folder, common={}, num_layers=0, **options)


def _legacy(folder, **options):
    return LegacyWriter(folder, common={}, num_layers=0, tp=2, **options)


WRITERS = {"hf": (_hf, HFReader), "dcp": (_dcp, TorchDistReader), "legacy": (_legacy, LegacyReader)}
every_writer = pytest.mark.parametrize("kind", WRITERS)


def _fill(kind, folder, value=1.0, **options) -> None:
    with WRITERS[kind][0](folder, **options) as writer:
        writer.write("w", torch.full((64, 4), value))


def _holds(kind, folder, value) -> bool:
    return bool((WRITERS[kind][1](folder).read("w") == value).all())


# --- pickles ----------------------------------------------------------------------------------------------


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
    _fill("dcp", tmp_path / "out")
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
        writer = unpickle.ArchiveWriter(tmp_path / f"{shape}{stride}{offset}")
        saved = writer.save(torch.zeros(8))
        moved = saved._replace(shape=shape, stride=stride)

        class Moved:
            def __reduce__(self, moved=moved, offset=offset):
                return torch._utils._rebuild_tensor_v2, (
                    (moved.storage, offset, moved.shape, moved.stride, False, {})
                )

        writer.finish(Moved())
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


# --- folders ----------------------------------------------------------------------------------------------


@every_writer
def test_existing_output_is_refused_unless_forced(tmp_path, kind):
    # Prevents: a finished checkpoint overwritten, or mixed with a new one.
    out = tmp_path / "out"
    _fill(kind, out, 1.0)
    before = sorted(path.name for path in out.rglob("*"))
    with pytest.raises(ValueError, match=rf"{out}: exists and is not empty; .*--force"):
        _fill(kind, out, 2.0)
    assert _holds(kind, out, 1.0)
    (out / "left_over").write_text("of the first")
    _fill(kind, out, 2.0, force=True)
    assert _holds(kind, out, 2.0)
    assert sorted(path.name for path in out.rglob("*")) == before
    assert os.listdir(tmp_path) == ["out"]


@every_writer
def test_a_failed_run_leaves_the_former_output(tmp_path, kind):
    # Prevents: --force that removes the old checkpoint before there is a new one.
    out = tmp_path / "out"
    _fill(kind, out, 1.0)
    for error in (KeyError, KeyboardInterrupt):
        with pytest.raises(error), WRITERS[kind][0](out, force=True) as writer:
            _write_and_raise(writer, error)
    assert _holds(kind, out, 1.0)
    assert os.listdir(tmp_path) == ["out"]


def _write_and_raise(writer, error) -> None:
    writer.write("w", torch.zeros(64, 4))
    raise error


@every_writer
def test_odd_targets(tmp_path, kind):
    # Prevents: an empty folder made by a job script refused; a file or a link replaced.
    (tmp_path / "empty").mkdir()
    _fill(kind, tmp_path / "empty")
    assert _holds(kind, tmp_path / "empty", 1.0)
    _fill(kind, tmp_path / "a" / "b" / "c")
    assert _holds(kind, tmp_path / "a" / "b" / "c", 1.0)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name in ("file", "link"):
        with pytest.raises(ValueError, match=f"{name}: exists and is not a folder"):
            _fill(kind, tmp_path / name, force=True)


def test_exchange_without_support_of_the_file_system(tmp_path, monkeypatch):
    # Prevents: --force that works on the developers' file system only.
    monkeypatch.setattr(atomic.ctypes, "CDLL", lambda *_, **__: argparse.Namespace())
    _fill("hf", tmp_path / "out", 1.0)
    _fill("hf", tmp_path / "out", 2.0, force=True)
    assert _holds("hf", tmp_path / "out", 2.0)
    assert os.listdir(tmp_path) == ["out"]


def test_two_writers_of_one_folder(tmp_path):
    # Prevents: a run that removes another's files as left-overs, or silently replaces its result.
    slow = _hf(tmp_path / "out")
    slow.write("w", torch.full((64, 4), 1.0))
    _fill("hf", tmp_path / "out", 2.0)
    slow.write("v", torch.ones(1))
    with pytest.raises(ValueError, match="exists and is not empty"):
        slow.__exit__(None, None, None)
    assert _holds("hf", tmp_path / "out", 2.0)
    assert os.listdir(tmp_path) == ["out"]


# --- kill -9 ----------------------------------------------------------------------------------------------

CHILD = """
import sys, time
import torch
from megatron_nvfp4.checkpoint import atomic
from megatron_nvfp4.checkpoint.dcp import TorchDistWriter
from megatron_nvfp4.checkpoint.hf import HFWriter
from megatron_nvfp4.checkpoint.legacy import LegacyWriter

def stop(*_):
    print("ready", flush=True)
    time.sleep(600)

kind, out, moment = sys.argv[1:]
if moment == "publishing":
    atomic.AtomicFolder.publish = stop
elif moment == "syncing":
    atomic.os.fsync = stop
if kind == "hf":
    writer = HFWriter(out, config={}, force=True)
elif kind == "dcp":
    writer = TorchDistWriter(out, common={}, num_layers=0, force=True)
else:
    writer = LegacyWriter(out, common={}, num_layers=0, tp=2, force=True)
with writer:
    for i in range(10):
        writer.write(f"w{i}", torch.full((1 << 20,), 3.0))
    if moment == "writing":
        stop()
"""


@pytest.mark.parametrize("moment", ["writing", "syncing", "publishing"])
@every_writer
def test_kill_9_leaves_nothing_that_looks_complete(tmp_path, kind, moment):
    # Prevents: half a checkpoint that loads, or one that blocks the next run.
    out = tmp_path / "out"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, kind, str(out), moment],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert child.stdout.readline() == "ready\n"
        living = os.listdir(tmp_path)
        if moment == "writing":
            _fill(kind, tmp_path / "other")  # the same parent: a living run's files are not stale
            _fill(kind, out)
            assert set(os.listdir(tmp_path)) == {*living, "other", "out"}
            for path in (tmp_path / "other", out):
                atomic.shutil.rmtree(path)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert not out.exists()
    assert len(living) == 1
    left = tmp_path / living[0]
    assert sum(path.stat().st_size for path in left.rglob("*") if path.is_file()) > 1 << 23
    with pytest.raises(ValueError, match="was left by an unfinished run; remove it"):
        WRITERS[kind][1](left)
    _fill(kind, out, 4.0)
    assert _holds(kind, out, 4.0)
    assert os.listdir(tmp_path) == ["out"]


# --- a full disk ------------------------------------------------------------------------------------------


def _write_many(writer, count, size) -> None:
    for i in range(count):
        writer.write(f"w{i}", torch.ones(size))


@every_writer
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_clear_error(tmp_path, monkeypatch, kind, code):
    # Prevents: a bare OSError without a file name, and gigabytes left behind on the full disk.
    write, room = os.write, 100_000

    def limited(fd, data):
        nonlocal room
        if room <= 0:
            raise OSError(code, os.strerror(code))
        count = write(fd, data[:room])
        room -= count
        return count

    monkeypatch.setattr(atomic.os, "write", limited)
    with (
        pytest.raises(
            RuntimeError, match=rf"out.*: {os.strerror(code)}; free space there or choose"
        ),
        WRITERS[kind][0](tmp_path / "out") as writer,
    ):
        _write_many(writer, 100, 1 << 18)
    assert os.listdir(tmp_path) == []


@every_writer
def test_a_limit_of_the_system_is_a_clear_error(tmp_path, kind):
    # Prevents: the same with a real refusal of the kernel, here the largest size of a file.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with (
            pytest.raises(RuntimeError, match="File too large; free space there or choose"),
            WRITERS[kind][0](tmp_path / "out") as writer,
        ):
            _write_many(writer, 12, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


@every_writer
def test_too_little_space_is_seen_before_the_first_byte(tmp_path, kind):
    # Prevents: hours of writing before the disk is full.
    with pytest.raises(RuntimeError, match=r"GB are free, about 1000000000\.00 GB are needed"):
        WRITERS[kind][0](tmp_path / "out", needed_bytes=10**18)
    assert os.listdir(tmp_path) == []


# --- memory -----------------------------------------------------------------------------------------------

STREAM = """
import sys, torch
from megatron_nvfp4.checkpoint.dcp import TorchDistReader, TorchDistWriter
from megatron_nvfp4.checkpoint.hf import HFReader, HFWriter
from megatron_nvfp4.checkpoint.legacy import LegacyReader, LegacyWriter

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

root = sys.argv[1]
num, size = 20, 1 << 22  # tensors of 16 MiB
with HFWriter(root + "/hf", config={}, max_shard_bytes=1 << 28) as writer:
    for i in range(num):
        writer.write(f"w{i:02d}", torch.full((size // 64, 64), float(i)))
base = peak()
hf = HFReader(root + "/hf")
with TorchDistWriter(root + "/dcp", common={}, num_layers=num) as writer:
    for i, name in enumerate(hf.names()):
        writer.write("decoder.layers.w", hf.read(name), layer=i)
dcp = TorchDistReader(root + "/dcp")
sizes = {"num_layers": num, "tp": 2}
with LegacyWriter(root + "/legacy", common={}, **sizes) as writer:
    for i in range(num):
        writer.write(f"decoder.layers.{i}.w", dcp.read("decoder.layers.w", layer=i), "columns")
legacy = LegacyReader(root + "/legacy")
with HFWriter(root + "/again", config={}) as writer:
    for i, name in enumerate(hf.names()):
        writer.write(name, legacy.read(f"decoder.layers.{i}.w", "columns"))
again = HFReader(root + "/again")
for name in hf.names():
    assert torch.equal(again.read(name), hf.read(name)), name
print(peak() - base)
"""


def test_memory_does_not_grow_with_the_model(tmp_path):
    # Prevents: a conversion that needs as much memory as the model has bytes. 320 MiB pass through here,
    # four times; a tensor has 16 MiB, the writer's own buffer 32.
    done = subprocess.run(
        [sys.executable, "-c", STREAM, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    grown = int(done.stdout)
    assert grown < 128 << 20, f"{grown >> 20} MiB"
