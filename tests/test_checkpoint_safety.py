"""No folder looks complete that is not: what exists, kill -9, a full disk; and memory stays small."""

import argparse
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from megatron_nvfp4.checkpoint import atomic  # noqa: E402
from megatron_nvfp4.checkpoint.dcp import TorchDistReader, TorchDistWriter  # noqa: E402
from megatron_nvfp4.checkpoint.hf import HFReader, HFWriter  # noqa: E402
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


@pytest.fixture(params=["exchange", "renames"])
def file_system(request, monkeypatch):
    """The system's own, and one that cannot exchange two names."""
    if request.param == "renames":
        monkeypatch.setattr(atomic.ctypes, "CDLL", lambda *_, **__: argparse.Namespace())


def _once(monkeypatch, owner, name, error, *, after=False) -> None:
    """The function fails at its first call, before or after it has done its work."""
    original = getattr(owner, name)

    def call(*args, **kwargs):
        monkeypatch.setattr(owner, name, original)
        if after:
            original(*args, **kwargs)
        raise error

    monkeypatch.setattr(owner, name, call)


@every_writer
@pytest.mark.usefixtures("file_system")
def test_an_interrupt_that_comes_after_publishing_says_so(tmp_path, monkeypatch, kind):
    # Prevents: the replaced folder left for ever; a complete checkpoint reported as an unfinished one.
    out = tmp_path / "out"
    _fill(kind, out, 1.0)
    for owner, name, after in ((atomic.shutil, "rmtree", False), (atomic, "_exchange", True)):
        _once(monkeypatch, owner, name, KeyboardInterrupt, after=after)
        with pytest.raises(KeyboardInterrupt, match=f"{out} is complete"):
            _fill(kind, out, 2.0, force=True)
        assert _holds(kind, out, 2.0)
        assert os.listdir(tmp_path) == ["out"]
        _fill(kind, out, 1.0, force=True)


@pytest.mark.parametrize("moment", ["before", "first", "second"])
def test_an_interrupt_between_two_renames(tmp_path, monkeypatch, moment):
    # Prevents: neither the former nor the new checkpoint at the output's name, and one of them left over.
    monkeypatch.setattr(atomic.ctypes, "CDLL", lambda *_, **__: argparse.Namespace())
    out, original, calls = tmp_path / "out", Path.rename, []
    _fill("legacy", out, 1.0)

    def rename(self, target):
        calls.append(target)
        if moment == "before":
            raise KeyboardInterrupt
        result = original(self, target)
        if len(calls) == (1 if moment == "first" else 2):
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt) as caught:
        _fill("legacy", out, 2.0, force=True)
    assert ("is complete" in str(caught.value)) == (moment == "second")
    assert _holds("legacy", out, 2.0 if moment == "second" else 1.0)
    assert os.listdir(tmp_path) == ["out"]


def test_a_replaced_folder_that_cannot_be_removed_is_named(tmp_path, monkeypatch):
    # Prevents: an error that reads as if the new checkpoint were not there.
    out = tmp_path / "out"
    _fill("hf", out, 1.0)
    _once(monkeypatch, atomic.shutil, "rmtree", PermissionError(errno.EPERM, "not permitted"))
    with pytest.raises(RuntimeError, match=rf"partial-.* by hand, {out} is complete"):
        _fill("hf", out, 2.0, force=True)
    assert _holds("hf", out, 2.0)


def test_what_was_put_aside_is_removed_only_beside_its_successor(tmp_path):
    # Prevents: the former checkpoint lost that a kill -9 between two renames left, or kept for ever.
    out = tmp_path / "out"
    aside = tmp_path / f".out.partial-{atomic._host()}-1-0123abcd-old"
    aside.mkdir()
    _fill("hf", out, 1.0)
    assert aside.exists()
    _fill("hf", out, 2.0, force=True)
    assert os.listdir(tmp_path) == ["out"]


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
elif moment == "replacing":
    atomic.shutil.rmtree = stop
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


@contextmanager
def _child(kind, out, moment) -> Iterator[None]:
    """A process that stands at `moment` within the block, and is killed at its end."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, kind, str(out), moment],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert child.stdout.readline() == "ready\n"
        yield
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()


@pytest.mark.parametrize("moment", ["writing", "syncing", "publishing"])
@every_writer
def test_kill_9_leaves_nothing_that_looks_complete(tmp_path, kind, moment):
    # Prevents: half a checkpoint that loads, or one that blocks the next run.
    out = tmp_path / "out"
    with _child(kind, out, moment):
        living = os.listdir(tmp_path)
        if moment == "writing":
            _fill(kind, tmp_path / "other")  # the same parent: a living run's files are not stale
            _fill(kind, out)
            assert set(os.listdir(tmp_path)) == {*living, "other", "out"}
            for path in (tmp_path / "other", out):
                atomic.shutil.rmtree(path)
    assert not out.exists()
    assert len(living) == 1
    left = tmp_path / living[0]
    assert sum(path.stat().st_size for path in left.rglob("*") if path.is_file()) > 1 << 23
    with pytest.raises(ValueError, match="was left by an unfinished run; remove it"):
        WRITERS[kind][1](left)
    _fill(kind, out, 4.0)
    assert _holds(kind, out, 4.0)
    assert os.listdir(tmp_path) == ["out"]


def test_kill_9_while_the_replaced_folder_is_removed(tmp_path):
    # Prevents: the former checkpoint beside the new one for ever, under a hidden name; and a run that
    # removes it under another's hands.
    out = tmp_path / "out"
    _fill("hf", out, 1.0)
    with _child("hf", out, "replacing"):
        living = os.listdir(tmp_path)
        assert len(living) == 2
        atomic.AtomicFolder(out, force=True).discard()
        assert os.listdir(tmp_path) == living
    assert (HFReader(out).read("w0") == 3.0).all()
    _fill("hf", out, 4.0, force=True)
    assert _holds("hf", out, 4.0)
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
