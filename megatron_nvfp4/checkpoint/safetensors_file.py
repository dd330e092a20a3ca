"""The safetensors file: its header read and checked, and files written as a stream.

The format (github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON
header {name: {dtype, shape, data_offsets}}, padded with spaces, then the tensors without gaps.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_nvfp4.checkpoint.atomic import OutputFile, bytes_of
from megatron_nvfp4.checkpoint.stored_tensor import StoredTensor

# In the order in which the safetensors library lays out a file; within a dtype it goes by name.
DTYPES = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RANKS = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}
_MAX_HEADER = 100_000_000  # what the safetensors library accepts
_BUFFER = 1 << 25  # a shard smaller than this gets a header of its exact size

Meta = tuple[torch.dtype, tuple[int, ...]]


# --- reading --------------------------------------------------------------------------------------


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file, as the header lists them.

    Errors: ValueError naming the file, and the tensor, unless the data are exactly what the header says,
    without gaps and overlaps.
    """
    header, data = parse_header(path)
    total = path.stat().st_size
    header.pop("__metadata__", None)
    entries = {name: _entry_of(path, name, value, data) for name, value in header.items()}
    end, previous = data, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if entry.start != end:
            how = "overlaps" if entry.start < end else "leaves a gap after"
            raise ValueError(f"{path}: {name} {how} {previous}; the file is damaged, copy it again")
        end, previous = entry.start + entry.num_bytes, name
    if end != total:
        how = "truncated" if end > total else "followed by foreign bytes"
        raise ValueError(
            f"{path}: is {total} bytes, its header describes {end}: {how}; copy it again"
        )
    return entries


def _entry_of(path: Path, name: str, value: Any, data: int) -> StoredTensor:
    try:
        dtype, shape = value["dtype"], value["shape"]
        start, end = value["data_offsets"]
        valid = isinstance(dtype, str) and isinstance(shape, list)
        valid = valid and all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise ValueError(
            f"{path}: {name}: its header entry is damaged ({value!r:.200}); copy it again"
        )
    if dtype not in DTYPES:
        raise ValueError(
            f"{path}: {name}: dtype {dtype!r} is unknown; cast it to one of {', '.join(DTYPES)}"
        )
    if end - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(
            f"{path}: {name}: {end - start} bytes are not {dtype} {shape}; copy it again"
        )
    return StoredTensor(path, DTYPES[dtype], tuple(shape), data + start, end - start)


def parse_header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header of a file as it stands, and where the data begin. Errors: as `read_header`."""
    total = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if total < 8 or not 2 <= length <= min(_MAX_HEADER, total - 8):
            raise ValueError(
                f"{path}: {total} bytes with a header of {length}: truncated, or not safetensors; copy it"
                " again"
            )
        try:
            header = json.loads(file.read(length), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}: its header is not JSON ({error}); copy the file again"
            ) from error
    if not isinstance(header, dict):
        raise ValueError(
            f"{path}: its header is not a JSON object ({header!r:.80}); copy the file again"
        )
    metadata = header.get("__metadata__")
    if metadata is not None and not isinstance(metadata, dict):
        raise ValueError(
            f"{path}: __metadata__ of its header is not a JSON object ({metadata!r:.80}); copy the file"
            " again"
        )
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"repeats {next(name for name in names if names.count(name) > 1)}: name each once"
        )
    return result


# --- writing --------------------------------------------------------------------------------------


def canonical_order(tensors: Mapping[str, Meta], names: Sequence[str]) -> list[str]:
    """Names in the order in which the safetensors library writes them: by dtype, then by name."""
    return sorted(names, key=lambda name: (_RANKS[tensors[name][0]], name.encode()))


def header_of(
    tensors: Mapping[str, Meta], names: Sequence[str], metadata: Mapping[str, str] | None
) -> dict[str, Any]:
    """The JSON header of a file that holds `names` in this order."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        dtype, shape = tensors[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": dtype_name(name, dtype),
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    return header


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """The format's word for a dtype. ValueError naming the tensor where it has none."""
    if dtype not in _NAMES:
        known = ", ".join(str(each).removeprefix("torch.") for each in _NAMES)
        raise ValueError(f"{name}: {dtype} has no safetensors name; cast it to one of {known}")
    return _NAMES[dtype]


def encoded(header: Mapping[str, Any], length: int | None = None) -> bytes:
    """A header's length, its text, and spaces up to `length`, or up to the next multiple of 8."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # The tensors start at a multiple of 8, so that readers may map them.
    length = -(-len(text) // 8) * 8 if length is None else length
    assert len(text) <= length, "a header longer than its room"
    return length.to_bytes(8, "little") + text.ljust(length)


class Shard(Protocol):
    """One file in the making."""

    def has_room(self, name: str, tensor: torch.Tensor) -> bool: ...

    def append(self, name: str, tensor: torch.Tensor) -> None: ...

    def finish(self) -> list[str]: ...

    def abandon(self) -> None: ...


class PlannedShard:
    """A file whose tensors, and so its header, are known before the first of them comes.

    header: the bytes in front of the data, as `encoded`. tensors: what lies in it, in this order.
    """

    def __init__(self, path: Path, header: bytes, tensors: Mapping[str, Meta]):
        self._tensors = list(tensors.items())
        self._num_written = 0
        self._file = OutputFile(path)
        self._file.write(header)

    def has_room(self, name: str, tensor: torch.Tensor) -> bool:
        return self._num_written < len(self._tensors)

    def append(self, name: str, tensor: torch.Tensor) -> None:
        wanted = self._tensors[self._num_written]
        found = (name, (tensor.dtype, tuple(tensor.shape)))
        assert found == wanted, f"{found} comes where {wanted} is planned"
        self._file.write(bytes_of(tensor))
        self._num_written += 1

    def finish(self) -> list[str]:
        missing = self._tensors[self._num_written :]
        assert not missing, f"{self._file.path}: {missing[0]} was not written"
        self._file.close()
        return [name for name, _ in self._tensors]

    def abandon(self) -> None:
        self._file.abandon()


class GrowingShard:
    """A file that takes tensors until it holds `max_bytes`.

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
            "dtype": dtype_name(name, tensor.dtype),
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
        header = encoded(self._header, None if self._file is None else self._reserve)
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
