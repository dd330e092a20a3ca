"""Reads what torch and Megatron pickled without running any of it.

A pickle is a program that may name any function. Only the names below are known here. Those that
build data are answered by this module's own functions, tensors by their place in the file; enums and
records of Megatron and its kin by an `Opaque` that keeps their values. Any other name is refused.
"""

import argparse
import io
import pickle
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from megatron_nvfp4.checkpoint.stored_tensor import Checksum, StoredTensor

LOCAL_HEADER = 30  # bytes of a zip entry's header in front of its name
# Their objects are kept as names and values. No module of these is imported.
_OPAQUE_PACKAGES = (
    "megatron.",
    "transformer_engine.",
    "transformer_engine_torch.",
    "modelopt.",
    "nemo.",
    "nvidia_resiliency_ext.",
    "torch.distributed.checkpoint.",
    "torch.distributed._shard.",
    "numpy.",
)
_OPAQUE = {
    ("_io", "BytesIO"),
    ("datetime", "timedelta"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("signal", "Signals"),
    ("torch", "Tensor"),
    ("torch", "device"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.serialization", "_get_layout"),
}
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}


class Opaque:
    """Stands for an object whose class is not imported: its name, arguments and state."""

    qualified_name: ClassVar[str] = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> "Opaque":
        self = super().__new__(cls)
        self.args, self.state = args, None
        return self

    def __init__(self, *_: Any, **__: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Pickles of dict subclasses set items; they are not kept."""

    def extend(self, values: Any) -> None:
        """Pickles of list subclasses extend; the values are not kept."""

    append = extend

    def __repr__(self) -> str:
        return f"<{self.qualified_name}{self.args}>"


class Namespace(argparse.Namespace):
    """An argparse.Namespace, or a record like it, of a checkpoint."""

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state)


def load_pickle(path: Path | str, *, limit: int = 1 << 32) -> Any:
    """The contents of a file that is one bare pickle, such as `.metadata`.

    Errors: ValueError naming the file where it is damaged, or holds a name that is not allowed (the
    message has the name), and where it exceeds `limit` bytes.
    """
    path = Path(path)
    if path.stat().st_size > limit:
        raise ValueError(
            f"{path}: {path.stat().st_size} bytes are too many for a bare pickle; is it another file?"
        )
    return _unpickle(path.read_bytes(), path, {})


def load_saved(path: Path | str, offset: int = 0, length: int | None = None) -> Any:
    """What torch.save put into a file, or into `length` bytes of it from `offset` on.

    Tensors come as StoredTensor and are not loaded; reading one checks its record's CRC-32, which the
    pickle's has passed by then. Errors: as `load_pickle`; also ValueError for the format of torch before
    1.6, compressed or big-endian files, and tensors outside their data.
    """
    path = Path(path)
    size = path.stat().st_size
    length = size - offset if length is None else length
    if offset < 0 or length < 0 or offset + length > size:
        raise ValueError(
            f"{path}: is {size} bytes, {offset} + {length} are needed: truncated; copy it again"
        )
    with open(path, "rb", buffering=0) as file:
        try:
            archive = zipfile.ZipFile(io.BufferedReader(_Part(file, offset, length)))
            with archive:
                _forget_absent_sums(archive)
                root, storages = _storage_places(archive, file, offset, path)
                data = archive.read(f"{root}/data.pkl")
        except (zipfile.BadZipFile, KeyError, EOFError) as error:
            raise ValueError(
                f"{path}: {length} bytes at {offset} are no zip archive of torch.save ({error}): "
                "truncated or damaged (copy it again), or written by torch before 1.6 (load and save it "
                "again there)"
            ) from error
    return _unpickle(data, path, storages)


def plain(value: Any) -> Any:
    """Records of a checkpoint as dicts, at any depth; everything else as it is."""
    if isinstance(value, Namespace):
        return plain(vars(value))
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


class _Part(io.RawIOBase):
    """A range of a file as a file."""

    def __init__(self, file: io.FileIO, offset: int, length: int):
        super().__init__()
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("seek before the start")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._offset + self._at)
        read = self._file.readinto(memoryview(buffer)[:count]) or 0
        self._at += read
        return read


def _forget_absent_sums(archive: zipfile.ZipFile) -> None:
    """torch.serialization.set_crc32_options(False) writes zeros for sums, which say nothing."""
    entries = archive.infolist()
    if all(entry.CRC == 0 for entry in entries):
        for entry in entries:
            del entry.CRC  # as zipfile has it for entries that are not to be checked


def _storage_places(
    archive: zipfile.ZipFile, file: io.FileIO, offset: int, path: Path
) -> tuple[str, dict[str, "_Place"]]:
    """The archive's root folder, and where each storage is."""
    entries = archive.infolist()
    if not entries:
        raise zipfile.BadZipFile("it is empty")
    root = entries[0].filename.partition("/")[0]
    order = f"{root}/byteorder"
    if order in archive.namelist() and archive.read(order) != b"little":
        raise ValueError(
            f"{path}: was written on a big-endian machine; load and save it on another"
        )
    found = {}
    prefix = f"{root}/data/"
    for entry in entries:
        if not entry.filename.startswith(prefix):
            continue
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(
                f"{path}: {entry.filename} is compressed, which torch.save never does; load and save it "
                "again"
            )
        file.seek(offset + entry.header_offset)
        header = file.read(LOCAL_HEADER)
        if len(header) != LOCAL_HEADER or header[:4] != b"PK\x03\x04":
            raise zipfile.BadZipFile(f"no header of {entry.filename}")
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = offset + entry.header_offset + LOCAL_HEADER + names
        checksum = None
        if hasattr(entry, "CRC"):
            checksum = Checksum(path, entry.filename, start, entry.file_size, entry.CRC)
        found[entry.filename.removeprefix(prefix)] = _Place(start, entry.file_size, checksum)
    return root, found


class _Place(NamedTuple):
    start: int
    num_bytes: int
    checksum: Checksum | None


# --- what a pickle may ask for --------------------------------------------------------------------


class _RefusedError(Exception):
    pass


def _no_state(self: Any, state: Any) -> None:
    # Pickle sets attributes of anything without a __setstate__: a tensor's path, a class's method.
    raise _RefusedError(f"to change a {type(self).__name__}")


class _Storage:
    """A storage of a file: where it is and of which dtype."""

    __setstate__ = _no_state

    def __init__(self, path: Path, dtype: torch.dtype, place: _Place):
        self.path, self.dtype = path, dtype
        self.start, self.num_bytes, self.checksum = place


class _Builder:
    """A function that a pickle may call and can do nothing else with."""

    __setstate__ = _no_state

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


@_Builder
def _tensor(storage: Any, offset: int, shape: Any, stride: Any, *rest: Any) -> StoredTensor:
    """_rebuild_tensor, _v2 and _v3 (whose seventh argument is a dtype) of torch._utils."""
    if not isinstance(storage, _Storage):
        raise _RefusedError("a tensor without a storage of this file")
    dtype = next((value for value in rest if isinstance(value, torch.dtype)), storage.dtype)
    shape, stride = tuple(shape), tuple(stride)
    numbers = (offset, *shape, *stride)
    valid = len(shape) == len(stride) and all(type(n) is int and n >= 0 for n in numbers)
    used = 0
    if valid and 0 not in shape:
        used = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if not valid or (offset + used) * dtype.itemsize > storage.num_bytes:
        raise _RefusedError(f"a tensor of shape {shape} outside its storage")
    start = storage.start + offset * dtype.itemsize
    contiguous, step = True, 1
    for size, actual in zip(reversed(shape), reversed(stride), strict=True):
        contiguous &= size == 1 or actual == step
        step *= size
    is_plain = contiguous or used == 0
    return StoredTensor(
        storage.path,
        dtype,
        shape,
        start,
        used * dtype.itemsize,
        None if is_plain else stride,
        storage.checksum,
    )


@_Builder
def _parameter(data: Any, *_: Any) -> Any:
    return data


@_Builder
def _typed(build: Any, _type: Any, args: tuple[Any, ...], _state: Any) -> Any:
    """_rebuild_from_type_v2: a tensor with attributes, which are not kept."""
    if build not in (_tensor, _parameter):
        raise _RefusedError("a tensor subclass")
    return build(*args)


@_Builder
def _member(owner: Any, name: str) -> Opaque:
    """getattr as some versions of Python pickle enum members; nothing else."""
    if not (isinstance(owner, type) and issubclass(owner, Opaque)):
        raise _RefusedError("builtins.getattr")
    return owner(name)


@_Builder
def _encode(text: str, encoding: str = "latin1") -> bytes:
    """_codecs.encode as protocol 2 pickles bytes."""
    if encoding != "latin1":
        raise _RefusedError(f"_codecs.encode to {encoding}")
    return text.encode("latin1")


@cache
def _opaque(module: str, name: str) -> type[Opaque]:
    qualified = f"{module}.{name}"
    return type(name.rpartition(".")[2], (Opaque,), {"qualified_name": qualified})


_ALLOWED: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): Namespace,
    ("types", "SimpleNamespace"): Namespace,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "int"): int,
    ("builtins", "slice"): slice,
    ("builtins", "complex"): complex,
    ("builtins", "getattr"): _member,
    ("_codecs", "encode"): _encode,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _typed,
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, path: Path, storages: dict[str, _Place]):
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._path, self._storages = path, storages

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        if (module, name) in _OPAQUE or f"{module}.".startswith(_OPAQUE_PACKAGES):
            return _opaque(module, name)
        raise _RefusedError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _location, count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise _RefusedError(f"a persistent object {kind!r:.80}")
        if key not in self._storages:
            raise _RefusedError(f"a storage {key!r:.80} that is not in the file")
        place = self._storages[key]
        if place.num_bytes != count * dtype.itemsize:
            raise _RefusedError(
                f"storage {key}: {place.num_bytes} bytes are not {count} of {dtype}"
            )
        return _Storage(self._path, dtype, place)


def _unpickle(data: bytes, path: Path, storages: dict[str, _Place]) -> Any:
    try:
        return _Unpickler(data, path, storages).load()
    except _RefusedError as error:
        raise ValueError(
            f"{path}: its pickle asks for {error}, which no checkpoint needs; refused, and nothing "
            "of it was run"
        ) from None
    except Exception as error:  # a damaged pickle fails in as many ways as there are opcodes
        raise ValueError(
            f"{path}: its pickle is damaged ({type(error).__name__}: {error}); copy the file again"
        ) from error
