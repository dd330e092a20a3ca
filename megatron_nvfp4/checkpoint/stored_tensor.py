"""A tensor's place in a file: what is read of it is loaded when it is used, and not before."""

import math
import mmap
import os
import weakref
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_nvfp4.checkpoint.atomic import bytes_of

_MAP_FROM = 1 << 16  # smaller reads are copied: a mapping costs more than it saves
_MAX_MAPPINGS = 256  # each holds a file descriptor; more live tensors than this are copied
_BLOCK = 1 << 20  # bytes summed at a time, so that a check needs no memory of its own


class Checksum:
    """The CRC-32 that a file records of some bytes of it, compared when they are first read."""

    def __init__(self, path: Path, name: str, start: int, num_bytes: int, crc: int):
        self._path, self._name, self._start = path, name, start
        self._num_bytes, self._crc = num_bytes, crc
        self._is_checked = False

    def __setstate__(self, state: Any) -> None:
        raise TypeError("a pickle must not say what a sum is")

    def check(self, loaded: torch.Tensor | None = None) -> None:
        """ValueError naming the file and the record where its bytes are not those that were written.

        loaded: what is read of them, which is looked at where it is all of them, else the file is.
        """
        if self._is_checked:
            return
        if loaded is not None and loaded.nbytes == self._num_bytes:
            found = zlib.crc32(bytes_of(loaded))
        else:
            found = self._sum()
        if found != self._crc:
            raise ValueError(
                f"{self._path}: {self._name} at byte {self._start} has CRC-32 {found:08x}, recorded is"
                f" {self._crc:08x}: the file is damaged; copy it again or take another checkpoint"
            )
        self._is_checked = True

    def _sum(self) -> int:
        found, buffer = 0, memoryview(bytearray(min(_BLOCK, self._num_bytes)))
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for at in range(0, self._num_bytes, _BLOCK):
                view = buffer[: min(_BLOCK, self._num_bytes - at)]
                _read_into(fd, view, self._start + at, self._path)
                found = zlib.crc32(view, found)
        finally:
            os.close(fd)
        return found


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place in a file; nothing of it is read until asked.

    stride: None where it is contiguous, else torch's, in values. checksum: of the storage it lies in, where
    the file has one; the whole storage is checked at the first read.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    stride: tuple[int, ...] | None = None
    checksum: Checksum | None = field(default=None, compare=False, repr=False)

    def __setstate__(self, state: Any) -> None:
        raise TypeError("a pickle must not say where a tensor lies")

    def read(self) -> torch.Tensor:
        """The whole tensor on the CPU.

        A large one is a private view of the file: only what is used of it is loaded, writing to it
        changes neither the file nor another result, and it is dropped with the tensor.
        Errors: ValueError where the file's checksum is another.
        """
        if self.stride is None:
            result = _load(self.path, self.dtype, self.start, self.shape)
            if self.checksum is not None:
                self.checksum.check(result)
            return result
        if self.checksum is not None:
            self.checksum.check()
        flat = _load(self.path, self.dtype, self.start, (self.num_bytes // self.dtype.itemsize,))
        return flat.as_strided(self.shape, self.stride)

    def slice(
        self, start: int | None = None, stop: int | None = None, *, index: int | None = None
    ) -> "StoredTensor":
        """Rows [start, stop), or those of the slice `index` along the leading dimension.

        Errors: ValueError for rows it does not have.
        """
        assert self.stride is None, "rows of a strided tensor"
        shape, offset = list(self.shape), self.start
        if index is not None:
            if not shape or not 0 <= index < shape[0]:
                raise ValueError(f"index {index} of shape {self.shape}; give one within")
            shape = shape[1:]
            offset += index * math.prod(shape) * self.dtype.itemsize
        if start is not None or stop is not None:
            first = 0 if start is None else start
            last = (shape[0] if shape else 0) if stop is None else stop
            if not shape or not 0 <= first <= last <= shape[0]:
                raise ValueError(
                    f"rows [{first}, {last}) of shape {tuple(shape)}; give rows inside"
                )
            offset += first * math.prod(shape[1:]) * self.dtype.itemsize
            shape[0] = last - first
        num_bytes = math.prod(shape) * self.dtype.itemsize
        return StoredTensor(
            self.path, self.dtype, tuple(shape), offset, num_bytes, None, self.checksum
        )


_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _load(path: Path, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        maps = size >= _MAP_FROM and offset % dtype.itemsize == 0
        if maps and len(_mappings) < _MAX_MAPPINGS:
            skip = offset % mmap.ALLOCATIONGRANULARITY
            mapping = mmap.mmap(fd, size + skip, access=mmap.ACCESS_COPY, offset=offset - skip)
            _mappings.add(mapping)
            flat = torch.frombuffer(mapping, dtype=torch.uint8, offset=skip)
            return flat.view(dtype).view(shape)
        result = torch.empty(shape, dtype=dtype)
        _read_into(fd, bytes_of(result), offset, path)
        return result
    finally:
        os.close(fd)


def _read_into(fd: int, view: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise ValueError(
                f"{path}: ends at byte {offset + done}; it changed while being read: stop whatever"
                " writes there and run again"
            )
        done += count
