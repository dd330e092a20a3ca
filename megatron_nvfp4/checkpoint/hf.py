"""Hugging Face checkpoints: safetensors shards read by rows and written as a stream.

The file format (github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON
header {name: {dtype, shape, data_offsets}}, padded with spaces, then the tensors without gaps.
"""

import json
import math
import mmap
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from megatron_nvfp4.checkpoint.atomic import (
    AtomicFolder,
    OutputFile,
    bytes_of,
    copy_file,
    is_partial,
    write_json,
)

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # what the safetensors library accepts
_MAP_FROM = 1 << 16  # smaller reads are copied: a mapping costs more than it saves
_MAX_MAPPINGS = 256  # each holds a file descriptor; more live tensors than this are copied
_BUFFER = 1 << 25  # a shard smaller than this gets a header of its exact size


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place in a file; nothing of it is read until asked.

    stride: None where it is contiguous, else torch's, in values.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    stride: tuple[int, ...] | None = None

    def __setstate__(self, state: Any) -> None:
        raise TypeError("a pickle must not say where a tensor lies")

    def read(self) -> torch.Tensor:
        """The whole tensor on the CPU.

        A large one is a private view of the file: only what is used of it is loaded, writing to it
        changes neither the file nor another result, and it is dropped with the tensor.
        """
        if self.stride is None:
            return _load(self.path, self.dtype, self.start, self.shape)
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
                raise ValueError(f"index {index} of shape {self.shape}")
            shape = shape[1:]
            offset += index * math.prod(shape) * self.dtype.itemsize
        if start is not None or stop is not None:
            first = 0 if start is None else start
            last = (shape[0] if shape else 0) if stop is None else stop
            if not shape or not 0 <= first <= last <= shape[0]:
                raise ValueError(f"rows [{first}, {last}) of shape {tuple(shape)}")
            offset += first * math.prod(shape[1:]) * self.dtype.itemsize
            shape[0] = last - first
        num_bytes = math.prod(shape) * self.dtype.itemsize
        return StoredTensor(self.path, self.dtype, tuple(shape), offset, num_bytes)


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
            raise ValueError(f"{path}: ends at byte {offset + done}; it changed while being read")
        done += count


# --- reading --------------------------------------------------------------------------------------


class HFReader:
    """The tensors and the config of a checkpoint folder. Every shard's header is checked at once.

    Errors: ValueError naming the file or the tensor for a folder without weights, a missing or
    truncated shard, gaps or overlaps inside one, a tensor that the index names and its shard lacks
    (or the reverse), and a tensor that stands in two shards. It reads no tensor until asked.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder}: no such folder")
        if is_partial(self.folder):
            raise ValueError(f"{self.folder}: was left by an unfinished run; remove it")
        self._entries = (
            self._read_index() if (self.folder / INDEX).exists() else self._read_single()
        )

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json. Errors: ValueError where it is missing or not a JSON object."""
        return _read_json(self.folder / "config.json")

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return sorted(self._entries)

    def meta(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """A tensor's (dtype, shape). Errors: ValueError naming an absent tensor."""
        entry = self._entry(name)
        return entry.dtype, entry.shape

    def num_bytes(self, name: str | None = None) -> int:
        """Bytes of one tensor, or of all."""
        if name is not None:
            return self._entry(name).num_bytes
        return sum(entry.num_bytes for entry in self._entries.values())

    def read(
        self,
        name: str,
        start: int | None = None,
        stop: int | None = None,
        *,
        index: int | None = None,
    ) -> torch.Tensor:
        """Rows [start, stop) of a tensor, or of its slice `index` along the leading dimension.

        Only these bytes are touched. Large results are private views of the file (writing to one
        changes neither the file nor another result), dropped with the tensor.
        Errors: ValueError naming the tensor for an absent one or rows it does not have.
        """
        entry = self._entry(name)
        try:
            part = entry.slice(start, stop, index=index)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return part.read()

    def _entry(self, name: str) -> StoredTensor:
        if name not in self._entries:
            raise ValueError(f"{self.folder}: holds no tensor {name}")
        return self._entries[name]

    def _read_single(self) -> dict[str, StoredTensor]:
        files = sorted(self.folder.glob("*.safetensors"))
        single = self.folder / "model.safetensors"
        if single in files:
            files = [single]
        if len(files) != 1:
            found = ", ".join(path.name for path in files) or "none"
            raise ValueError(
                f"{self.folder}: no {INDEX} and no single safetensors file (found: {found}); "
                "is the copy complete, and are the weights safetensors?"
            )
        return _read_header(files[0])

    def _read_index(self) -> dict[str, StoredTensor]:
        path = self.folder / INDEX
        wanted = _read_json(path).get("weight_map")
        if not isinstance(wanted, dict) or not wanted:
            raise ValueError(f"{path}: has no weight_map")
        shards = sorted({str(name) for name in wanted.values()})
        unsafe = [name for name in shards if Path(name).name != name]
        if unsafe:
            raise ValueError(f"{path}: shard names with a folder: {_few(unsafe)}")
        missing = [name for name in shards if not (self.folder / name).is_file()]
        if missing:
            raise ValueError(
                f"{self.folder}: {len(missing)} of {len(shards)} shards are missing: "
                f"{_few(missing)}; copy them again"
            )
        entries: dict[str, StoredTensor] = {}
        for shard in shards:
            for name, entry in _read_header(self.folder / shard).items():
                if name in entries:
                    other = entries[name].path.name
                    raise ValueError(f"{name}: stands in both {other} and {shard}; remove one")
                entries[name] = entry
        absent = [name for name in wanted if name not in entries]
        if absent:
            raise ValueError(f"{path}: names tensors that no shard holds: {_few(absent)}")
        unnamed = [name for name in entries if name not in wanted]
        if unnamed:
            raise ValueError(f"{path}: does not name tensors in its shards: {_few(unnamed)}")
        wrong = [name for name in wanted if entries[name].path.name != wanted[name]]
        if wrong:
            raise ValueError(f"{path}: names the wrong shard for: {_few(wrong)}")
        return entries


def _few(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path}: is missing") from None
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"repeats {next(name for name in names if names.count(name) > 1)}")
    return result


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file; the data must be exactly what the header says, without gaps."""
    total = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if total < 8 or not 2 <= length <= min(_MAX_HEADER, total - 8):
            raise ValueError(
                f"{path}: {total} bytes with a header of {length}: truncated, or not safetensors"
            )
        try:
            header = json.loads(file.read(length), object_pairs_hook=_unique)
        except ValueError as error:
            raise ValueError(f"{path}: its header is not JSON ({error})") from error
    header.pop("__metadata__", None)
    data = 8 + length
    entries = {name: _entry_of(path, name, value, data) for name, value in header.items()}
    end, previous = data, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if entry.start != end:
            how = "overlaps" if entry.start < end else "leaves a gap after"
            raise ValueError(f"{path}: {name} {how} {previous}; the file is damaged")
        end, previous = entry.start + entry.num_bytes, name
    if end != total:
        how = "truncated" if end > total else "followed by foreign bytes"
        raise ValueError(f"{path}: is {total} bytes, its header describes {end}: {how}")
    return entries


def _entry_of(path: Path, name: str, value: Any, data: int) -> StoredTensor:
    try:
        dtype, shape = value["dtype"], tuple(value["shape"])
        start, end = value["data_offsets"]
        valid = all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise ValueError(f"{path}: {name}: its header entry is damaged: {value!r:.200}")
    if dtype not in DTYPES:
        raise ValueError(f"{path}: {name}: dtype {dtype!r}; known are {', '.join(DTYPES)}")
    if end - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{path}: {name}: {end - start} bytes are not {dtype} {list(shape)}")
    return StoredTensor(path, DTYPES[dtype], shape, data + start, end - start)


# --- writing --------------------------------------------------------------------------------------


class HFWriter:
    """Streams tensors into safetensors shards; a context manager, complete or absent.

    The folder appears at the end of the `with` block, index last. `config` may be changed until
    then. `metadata` goes into the index beside total_size. `needed_bytes` is checked against the
    free space at the start. At most 32 MiB are held here; a shard holds `max_shard_bytes`, or one
    larger tensor. Errors: ValueError for a used folder (unless `force`), a name written twice, an
    unknown dtype; RuntimeError for a full disk.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        config: dict[str, Any],
        max_shard_bytes: float = 5e9,
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
        needed_bytes: int = 0,
    ):
        self.config = config
        self._max = int(max_shard_bytes)
        if self._max <= 0:
            raise ValueError(f"max_shard_bytes={max_shard_bytes}: must be positive")
        self._metadata = dict(metadata or {})
        self._output = AtomicFolder(folder, force=force, needed_bytes=needed_bytes)
        self._shards: list[list[str]] = []  # names, by finished shard
        self._seen: set[str] = set()
        self._shard: _Shard | None = None
        self._total = 0

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append one tensor, any shape; it is copied or on its way to the disk on return."""
        if name in self._seen:
            raise ValueError(f"{name}: written twice")
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name}: {tensor.dtype} has no safetensors name")
        self._seen.add(name)
        tensor = tensor.detach().cpu().contiguous()
        if self._shard is not None and not self._shard.has_room(name, tensor):
            self._finish_shard()
        if self._shard is None:
            path = self._output.path / f"shard-{len(self._shards)}.unfinished"
            self._shard = _Shard(path, self._max)
        self._shard.append(name, tensor)
        self._total += tensor.nbytes

    def copy_file(self, path: Path | str) -> None:
        """Copy one file (tokenizer, generation config) under its own name."""
        source = Path(path)
        self._refuse_reserved(source.name)
        copy_file(source, self._output.path / source.name)

    def write_json(self, name: str, value: Any) -> None:
        """Add a JSON file, such as hf_quant_config.json."""
        self._refuse_reserved(name)
        write_json(self._output.path / name, value)

    def _refuse_reserved(self, name: str) -> None:
        if name in ("config.json", INDEX) or name.endswith((".safetensors", ".unfinished")):
            raise ValueError(f"{name}: is written by the writer itself; do not copy it")

    def _finish_shard(self) -> None:
        assert self._shard is not None
        self._shards.append(self._shard.finish())
        self._shard = None

    def _finish(self) -> None:
        if self._shard is not None:
            self._finish_shard()
        if not self._shards:
            raise ValueError(f"{self._output.target}: no tensor was written")
        folder, count = self._output.path, len(self._shards)
        weight_map = {}
        for number, names in enumerate(self._shards):
            file = "model.safetensors"
            if count > 1:
                file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (folder / f"shard-{number}.unfinished").rename(folder / file)
            weight_map.update(dict.fromkeys(names, file))
        write_json(folder / "config.json", self.config)
        metadata = {**self._metadata, "total_size": self._total}
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX, index)
        self._output.publish()

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
            if self._shard is not None:
                self._shard.abandon()
            self._output.discard()  # nothing is left to discard once published


class _Shard:
    """One file in the making.

    The header stands first and its size is known last: a small shard waits in memory; a larger one
    reserves room, which spaces fill up, as the format allows.
    """

    def __init__(self, path: Path, max_bytes: int):
        self._path = path
        self._max = max_bytes
        self._reserve = min(max(max_bytes // 8192 * 8, 1 << 16), 1 << 23)
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._header_size = len(json.dumps(self._header))
        self._size = 0
        self._waiting: list[bytes] = []
        self._file: OutputFile | None = None

    def has_room(self, name: str, tensor: torch.Tensor) -> bool:
        fits = self._size + tensor.nbytes <= self._max
        return fits and self._header_size + self._cost(name, tensor) <= self._reserve

    @staticmethod
    def _cost(name: str, tensor: torch.Tensor) -> int:
        """At least the bytes of a header entry: its text, and numbers of up to 20 digits."""
        return len(json.dumps(name)) + 80 + 22 * (2 + tensor.dim())

    def append(self, name: str, tensor: torch.Tensor) -> None:
        end = self._size + tensor.nbytes
        self._header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._size, end],
        }
        self._header_size += self._cost(name, tensor)
        self._size = end
        if self._file is None and end <= _BUFFER:
            self._waiting.append(bytes(bytes_of(tensor)))
            return
        if self._file is None:
            self._file = OutputFile(self._path)
            self._file.write(bytes(8 + self._reserve))
            self._drain()
        self._file.write(bytes_of(tensor))

    def _drain(self) -> None:
        assert self._file is not None
        for data in self._waiting:
            self._file.write(data)
        self._waiting.clear()

    def finish(self) -> list[str]:
        text = json.dumps(self._header, separators=(",", ":")).encode()
        # The tensors start at a multiple of 8, so that readers may map them.
        length = -(-len(text) // 8) * 8 if self._file is None else self._reserve
        header = length.to_bytes(8, "little") + text.ljust(length)
        if self._file is None:
            self._file = OutputFile(self._path)
            self._file.write(header)
            self._drain()
        else:
            self._file.write_at(0, header)
        self._file.close()
        return [name for name in self._header if name != "__metadata__"]

    def abandon(self) -> None:
        if self._file is not None:
            self._file.abandon()
