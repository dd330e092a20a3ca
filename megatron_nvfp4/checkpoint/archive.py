"""Writes files as torch.save makes them, as a stream: each tensor as it comes."""

import io
import itertools
import math
import operator
import pickle
import zipfile
from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from megatron_nvfp4.checkpoint.atomic import OutputFile, bytes_of
from megatron_nvfp4.checkpoint.rows import Rows
from megatron_nvfp4.checkpoint.unpickle import LOCAL_HEADER, STORAGES

_ALIGNMENT = 64  # of tensors in an archive, as torch has it, so that readers may map them
_PORTION = 1 << 18
_UNTYPED = "UntypedStorage"


class _StorageId(NamedTuple):
    number: int
    dtype: torch.dtype
    num_values: int


class _Saved(NamedTuple):
    """A tensor whose bytes are in the archive already."""

    storage: _StorageId
    shape: tuple[int, ...]

    @property
    def stride(self) -> tuple[int, ...]:
        sizes = itertools.accumulate(reversed(self.shape[1:]), operator.mul, initial=1)
        return tuple(reversed([*sizes])) if self.shape else ()


class ArchiveWriter:
    """An archive as torch.save makes it, with the tensors first, each as it comes, and the pickle last.

    It begins where `file` ends, and leaves it open. `save` appends a tensor and returns what stands for it
    in the object given to `finish`.
    """

    def __init__(self, file: OutputFile):
        self._file = file
        self._archive = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)  # type: ignore[arg-type]
        self._num_storages = 0

    def save(self, value: torch.Tensor | Rows, shape: tuple[int, ...] | None = None) -> Any:
        """Append a tensor, or one that lies in pieces; shape: under which it is read, None: its own."""
        rows = Rows.of(value)
        shape = rows.shape if shape is None else shape
        storage = _StorageId(self._num_storages, rows.dtype, math.prod(shape))
        self._num_storages += 1
        self._record(f"data/{storage.number}", rows)
        return _Saved(storage, shape)

    def finish(self, value: Any) -> None:
        """Write the pickle of `value`, which may hold what `save` returned, and the archive's end."""
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=2).dump(value)
        self._record("data.pkl", buffer.getbuffer())
        self._record("byteorder", b"little")
        self._record("version", b"3\n")
        self._archive.close()

    def abandon(self) -> None:
        """Do not complete the archive. Safe after `finish`."""
        self._archive.fp = None  # else it would be completed when it is collected

    def _record(self, name: str, value: bytes | memoryview | Rows) -> None:
        entry = zipfile.ZipInfo(f"archive/{name}", (1980, 1, 1, 0, 0, 0))
        entry.file_size = value.nbytes if isinstance(value, Rows) else len(value)
        is_large = entry.file_size > zipfile.ZIP64_LIMIT // 2
        # In front of the data stand the header, the name, a large entry's sizes, and the padding.
        start = self._file.size + LOCAL_HEADER + len(entry.filename) + 20 * is_large + 4
        padding = -start % _ALIGNMENT
        entry.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
        with self._archive.open(entry, "w", force_zip64=is_large) as stream:
            for piece in value.pieces if isinstance(value, Rows) else (value,):
                tensor = piece.contiguous() if isinstance(piece, torch.Tensor) else None
                data = piece if tensor is None else bytes_of(tensor)
                # Summed, then written while it is in the cache.
                for at in range(0, len(data), _PORTION):
                    stream.write(data[at : at + _PORTION])


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _StorageId):
            return None
        name = _storage_name(value.dtype)
        count = value.num_values * (value.dtype.itemsize if name == _UNTYPED else 1)
        return "storage", getattr(torch, name), str(value.number), "cpu", count

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _Saved):
            return NotImplemented
        arguments = (value.storage, 0, value.shape, value.stride, False, OrderedDict())
        dtype = value.storage.dtype
        if _storage_name(dtype) == _UNTYPED:
            return torch._utils._rebuild_tensor_v3, (*arguments, dtype)
        return torch._utils._rebuild_tensor_v2, arguments


def _storage_name(dtype: torch.dtype) -> str:
    """torch's class of a storage; FP8 has none of its own."""
    return next((name for name, own in STORAGES.items() if own == dtype), _UNTYPED)
