"""The files of a Hugging Face checkpoint folder: config, index, which tensor lies where, and how to
write the same files again with other values in them.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_nvfp4.checkpoint.atomic import json_bytes
from megatron_nvfp4.checkpoint.safetensors_file import (
    Meta,
    canonical_order,
    encoded,
    header_of,
    parse_header,
    read_header,
)
from megatron_nvfp4.checkpoint.stored_tensor import StoredTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_ENDING = ".safetensors"  # of every shard, and of none of the files that go along
_MAX_NAME = 255  # of a file, in bytes
METADATA = {"format": "pt"}  # without it, transformers refuses a file


def few(names: Iterable[str], limit: int = 4) -> str:
    """The first names, and how many more there are; "none" of none."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more if names else "none"


def read_json(path: Path) -> dict[str, Any]:
    """A file that is one JSON object. ValueError naming the file where it is missing or something else."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"{path}: is missing; name the model's folder, or copy it there again"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error}); copy it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is not a JSON object; copy it again")
    return value


def read_config(folder: Path | str) -> dict[str, Any]:
    """The parsed config.json of a folder. Errors: as `read_json`."""
    return read_json(Path(folder) / "config.json")


def read_weight_map(folder: Path) -> dict[str, str]:
    """The index's weight_map: tensor -> file. ValueError where it has none, or names what is no shard."""
    path = folder / INDEX
    found = read_json(path).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{path}: has no weight_map; copy it again")
    unfit = sorted({f"{name!r:.60}" for name in found.values() if not _is_shard_name(name)})
    if unfit:
        raise ValueError(
            f"{path}: names shards {few(unfit)}; a shard has a plain name, without a folder, that ends in"
            f" {_ENDING} and has at most {_MAX_NAME} bytes: rename it beside the index, and in it"
        )
    return found


def _is_shard_name(name: Any) -> bool:
    """Whether a file may be called so, and nothing else of a checkpoint's folder is."""
    if not isinstance(name, str) or not name.endswith(_ENDING) or set(name) & {"/", "\\", "\0"}:
        return False
    try:
        return len(name.encode()) <= _MAX_NAME
    except UnicodeEncodeError:  # half a surrogate pair
        return False


def single_file(folder: Path) -> Path:
    """The one file of a folder without an index. ValueError where there is none, or more than one."""
    files = sorted(folder.glob("*.safetensors"))
    if folder / SINGLE in files:
        return folder / SINGLE
    if len(files) != 1:
        raise ValueError(
            f"{folder}: no {INDEX} and no single safetensors file (found: "
            f"{few(path.name for path in files)}); is the copy complete, and are the weights safetensors?"
        )
    return files[0]


@dataclass(frozen=True)
class PlannedFile:
    """One file to write: the bytes in front of the data, and what lies in it, in order."""

    name: str
    header: bytes
    tensors: dict[str, Meta]


@dataclass(frozen=True)
class FilePlan:
    """All files to write; index: None where a single file has none."""

    files: tuple[PlannedFile, ...]
    index: bytes | None

    @property
    def names(self) -> list[str]:
        """Every tensor, in the order in which it is written."""
        return list(chain.from_iterable(file.tensors for file in self.files))


@dataclass(frozen=True)
class OriginalFiles:
    """Which tensors each file of an existing checkpoint holds; the index may stand there without shards."""

    folder: Path
    files: dict[str, tuple[str, ...]]
    has_index: bool

    @classmethod
    def read(cls, folder: Path) -> "OriginalFiles | None":
        """Those of a folder, None where neither an index nor weights stand in it. Errors: as the readers."""
        files: dict[str, list[str]] = {}
        if (folder / INDEX).exists():
            for name, file in read_weight_map(folder).items():
                files.setdefault(file, []).append(name)
            return cls(folder, {file: tuple(files[file]) for file in sorted(files)}, True)
        if any(folder.glob("*.safetensors")):
            path = single_file(folder)
            return cls(folder, {path.name: tuple(read_header(path))}, False)
        return None

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        return frozenset(chain.from_iterable(self.files.values()))

    def plan(self, tensors: Mapping[str, Meta]) -> FilePlan | None:
        """The same files with `tensors` in them; None where the original lacks one of those.

        A file of the same tensors, dtypes and shapes gets the original's header, byte for byte; another, or
        one that is not there, the order of the safetensors library.
        """
        if not self.names.issuperset(tensors):
            return None
        planned, is_same = [], True
        for file, names in self.files.items():
            kept = [name for name in names if name in tensors]
            if kept:
                planned.append(self._file(file, kept, tensors))
            is_same &= bool(kept) and self._is_same(file, tensors)
        index = self._index(planned, tensors, is_same=is_same) if self.has_index else None
        return FilePlan(tuple(planned), index)

    def _stored(self, file: str) -> dict[str, StoredTensor]:
        """What a shard's header says; nothing where it is absent, or a stand-in as of Git LFS."""
        try:
            return read_header(self.folder / file)
        except (FileNotFoundError, ValueError):
            return {}

    def _is_same(self, file: str, tensors: Mapping[str, Meta]) -> bool:
        stored = self._stored(file)
        return stored.keys() == set(self.files[file]) and all(
            tensors.get(name) == (tensor.dtype, tensor.shape) for name, tensor in stored.items()
        )

    def _file(self, file: str, kept: list[str], tensors: Mapping[str, Meta]) -> PlannedFile:
        path = self.folder / file
        if self._is_same(file, tensors):
            stored = self._stored(file)
            order = sorted(stored, key=lambda name: (stored[name].start, stored[name].num_bytes))
            with open(path, "rb") as stream:
                header = stream.read(parse_header(path)[1])
            return PlannedFile(file, header, {name: tensors[name] for name in order})
        metadata = METADATA
        if self._stored(file):
            metadata = parse_header(path)[0].get("__metadata__", METADATA)
        order = canonical_order(tensors, kept)
        header = encoded(header_of(tensors, order, metadata))
        return PlannedFile(file, header, {name: tensors[name] for name in order})

    def _index(
        self, planned: list[PlannedFile], tensors: Mapping[str, Meta], *, is_same: bool
    ) -> bytes:
        path = self.folder / INDEX
        original = read_json(path)
        weight_map = {name: file.name for file in planned for name in file.tensors}
        size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in tensors.values())
        metadata = original.get("metadata") or {}
        if weight_map == original["weight_map"] and (is_same or metadata.get("total_size") == size):
            return path.read_bytes()
        metadata = {**metadata, "total_size": size}
        return json_bytes({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
