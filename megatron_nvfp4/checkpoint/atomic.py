"""Folders and files that appear whole or not at all, and clear words when the disk refuses.

A writer fills a hidden sibling of the wanted folder; a rename publishes it once every byte is on
the disk. A process killed in between leaves only the hidden sibling, which the next run removes; so
does one killed while it removes a folder that it has replaced.
"""

import ctypes
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

_MARK = ".partial-"
_ASIDE = "-old"
_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100  # fcntl.h
_RANGE_WRITE = 2  # linux/fs.h
_PORTION = 1 << 23  # bytes after which the disk is told to begin
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _find_start_range() -> Any:
    """Linux's sync_file_range, which starts writing and does not wait; None where it is absent."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_start_range = _find_start_range()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor of any dtype, without a copy.

    The view does not keep the tensor alive: hold the tensor while the view is in use.
    """
    assert tensor.device.type == "cpu", tensor.device
    assert tensor.is_contiguous(), "bytes_of wants a contiguous tensor"
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def is_partial(folder: Path) -> bool:
    """Whether a folder is one that a writer had not finished."""
    return _MARK in Path(folder).absolute().name


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn a full disk into a RuntimeError that names `what` and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise RuntimeError(
            f"{what}: {error.strerror}; free space there or choose another output folder "
            "(nothing was published, the unfinished files are removed)"
        ) from error


class OutputFile:
    """A new file, written front to back; `close` returns once its bytes are on the disk.

    Errors: RuntimeError naming the file where the disk is full.
    """

    def __init__(self, path: Path):
        self.path = path
        self.size = self._started = 0
        with disk_errors(str(path)):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append bytes; returns how many (all of them), as the stream protocol wants."""
        view = memoryview(data).cast("B")
        with disk_errors(f"{self.path} (after {self.size} bytes)"):
            done = 0
            while done < len(view):  # a call may write less than it is given
                count = os.write(self._fd, view[done : done + _PORTION])
                done += count
                self.size += count
                self._start_writing()
        return len(view)

    def _start_writing(self) -> None:
        """Have the disk begin with what it was given, so that `close` has little left to wait for."""
        if self.size - self._started >= _PORTION and _start_range is not None:
            _start_range(self._fd, self._started, self.size - self._started, _RANGE_WRITE)
            self._started = self.size

    def write_at(self, offset: int, data: bytes) -> None:
        """Overwrite bytes that were reserved earlier."""
        assert offset + len(data) <= self.size, "only what was reserved may be overwritten"
        with disk_errors(str(self.path)):
            assert os.pwrite(self._fd, data, offset) == len(data)

    def flush(self) -> None:
        """Nothing to do: writes are not buffered here."""

    def close(self) -> None:
        """Wait for the disk and close. Safe to call twice."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            with disk_errors(str(self.path)):
                os.fsync(fd)
        finally:
            os.close(fd)

    def abandon(self) -> None:
        """Close without waiting for the disk; the folder is about to be removed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def check_apart(out: Path | str, *inputs: Path | str | None) -> None:
    """ValueError where writing `out`, with --force, would remove an input: it is one, or holds one."""
    if not str(out):
        raise ValueError("output folder '': give the name of a folder to create")
    target = Path(out).resolve()
    for source in filter(None, inputs):
        path = Path(source).resolve()
        if path == target or target in path.parents:
            raise ValueError(f"{out}: is or holds the input {source}; choose another output folder")


class AtomicFolder:
    """A folder that appears at `target` complete, or not at all.

    Write below `path`; call `publish` when all is there, `discard` otherwise (as a context manager
    it does so by itself). Stale siblings that a killed run of this machine left are removed first.
    `needed_bytes`, where known, is checked against the free space before anything is written.
    With `force` an existing folder is replaced, in one exchange where the file system has it.
    Errors: ValueError where `target` exists and `force` is off; RuntimeError for too little space.
    """

    def __init__(self, target: Path | str, *, force: bool = False, needed_bytes: int = 0):
        self.target = Path(target).absolute()
        self.force = force
        self._refuse_existing()
        parent = self.target.parent
        parent.mkdir(parents=True, exist_ok=True)
        self._remove_stale()
        free = shutil.disk_usage(parent).free
        if needed_bytes > free:
            raise RuntimeError(
                f"{parent}: {free / 1e9:.2f} GB are free, about {needed_bytes / 1e9:.2f} GB are "
                "needed; free space there or choose another output folder"
            )
        for _ in range(3):  # another run may take the folder for a stale one until it is locked
            unique = f"{_host()}-{os.getpid()}-{secrets.token_hex(4)}"
            self.path = parent / f".{self.target.name}{_MARK}{unique}"
            self.path.mkdir()
            self._lock = _lock(self.path)
            if self._lock is not None and self.path.exists():
                break
            self.discard()
        else:  # the file system has no locks, and so no run removes another's folder
            self.path.mkdir()
        self._identity = self.path.stat()

    def _refuse_existing(self) -> None:
        if not os.path.lexists(self.target):
            return
        if not self.target.is_dir() or self.target.is_symlink():
            raise ValueError(f"{self.target}: exists and is not a folder; choose another output")
        if any(self.target.iterdir()) and not self.force:
            raise ValueError(
                f"{self.target}: exists and is not empty; choose another folder, or say --force "
                "to replace it"
            )

    def _remove_stale(self) -> None:
        # The lock of a killed process is gone; a living one holds it. Other machines' locks may
        # not be visible here, so their folders are left alone.
        prefix = re.escape(f".{self.target.name}{_MARK}{_host()}-")
        pattern = re.compile(rf"{prefix}\d+-[0-9a-f]{{8}}({re.escape(_ASIDE)})?")
        for path in self.target.parent.iterdir():
            found = pattern.fullmatch(path.name)
            # Without a target, what was put aside may be the only checkpoint there is.
            is_stale = found is not None and (found[1] is None or _holds_files(self.target))
            if is_stale and path.is_dir() and not path.is_symlink():
                lock = _lock(path)
                if lock is not None:
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(lock)

    def publish(self) -> None:
        """Rename to `target`: the last step, after which a replaced folder is removed.

        Errors: as the class, and nothing is published; a KeyboardInterrupt or a RuntimeError (what was
        replaced cannot be removed) that comes once `target` is complete says so.
        """
        with disk_errors(str(self.path)):
            _sync_folders(self.path)
        self._refuse_existing()  # another writer may have been faster
        try:
            if _holds_files(self.target):
                self._replace()
            else:
                self.path.rename(self.target)
                _sync_folder(self.target.parent)
        except KeyboardInterrupt:
            if not self._is_published():
                raise
            raise KeyboardInterrupt(f"{self.target} is complete") from None
        self._unlock()

    def _replace(self) -> None:
        """Exchange the folder with what stands at `target`, and remove that."""
        lock = _lock(self.target)  # else another run may take it for a stale one
        try:
            _exchange(self.path, self.target)
            _sync_folder(self.target.parent)
            shutil.rmtree(self.path)
        except OSError as error:
            if not self._is_published():
                raise
            raise RuntimeError(
                f"{self.path}: the folder that {self.target} replaces cannot be removed ({error}); remove"
                f" it by hand, {self.target} is complete"
            ) from error
        finally:
            if lock is not None:
                os.close(lock)

    def _is_published(self) -> bool:
        return self.target.exists() and os.path.samestat(self.target.stat(), self._identity)

    def discard(self) -> None:
        """Remove the unfinished folder; once published, what is left of the one it replaced."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            try:
                self.publish()
            except BaseException:
                self.discard()
                raise
        else:
            self.discard()


class FolderWriter(ABC):
    """A writer of one folder: complete when its `with` block ends, gone where anything failed."""

    _output: AtomicFolder

    @abstractmethod
    def _finish(self) -> None:
        """Write what is left, and publish."""

    @abstractmethod
    def _abandon(self) -> None:
        """Close the files that are open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._abandon()
            self._output.discard()  # nothing is left to discard once published


def write_bytes(path: Path, data: bytes) -> None:
    """Write a new file and wait for the disk."""
    file = OutputFile(path)
    try:
        file.write(data)
    finally:
        file.close()


def write_json(path: Path, value: Any) -> None:
    """Write a new JSON file, indented, with a final newline, and wait for the disk."""
    write_bytes(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """A JSON file's text, indented, with a final newline."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def copy_file(source: Path, target: Path) -> None:
    """Copy one regular file's bytes to a new file and wait for the disk."""
    file = OutputFile(target)
    try:
        with open(source, "rb") as stream:
            while block := stream.read(1 << 22):
                file.write(block)
    finally:
        file.close()


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())[:64] or "host"


def _lock(path: Path) -> int | None:
    """An open, locked descriptor of a folder, or None where another holds it or locks are absent.

    The system drops the lock with the process, however it ends.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_folders(path: Path) -> None:
    for folder, _, _ in os.walk(path):
        _sync_folder(Path(folder))


def _holds_files(folder: Path) -> bool:
    return folder.exists() and any(folder.iterdir())


def _exchange(new: Path, target: Path) -> None:
    """Put `new` at `target` and the former `target` at `new`; at no time is `target` absent.

    Where the file system cannot exchange names, renames do it, with a moment between them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    names = (os.fsencode(new), os.fsencode(target))
    if hasattr(libc, "renameat2") and not libc.renameat2(
        _AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE
    ):
        return
    aside = new.with_name(new.name + _ASIDE)
    try:
        target.rename(aside)
        new.rename(target)
    finally:  # an interrupt may come in between
        if aside.exists():
            aside.rename(new if target.exists() else target)
