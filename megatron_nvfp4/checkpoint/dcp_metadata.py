"""`.metadata` of a torch_dist checkpoint: which chunk of which tensor lies where.

A pickle of torch.distributed.checkpoint's records (github.com/pytorch/pytorch, metadata.py), read without
running it.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_nvfp4.checkpoint.unpickle import Opaque, load_pickle


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, or an object (no offsets and sizes), and its bytes in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Key:
    """A stored tensor, with its stacked axes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass
class Written:
    """A tensor of which more chunks may come."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk]


def read_metadata(path: Path) -> tuple[dict[str, Key], dict[str, Chunk]]:
    """Tensors, and where objects lie. ValueError naming the file where it says something else."""
    state = _state(load_pickle(path))
    try:
        places = {}
        for index, info in state["storage_data"].items():
            index, info = _state(index), _state(info)
            if info.get("transform_descriptors"):
                raise ValueError(f"{path}: {index['fqn']} is stored compressed; save it plainly")
            offset = index.get("offset")
            place = (info["relative_path"], info["offset"], info["length"])
            places[index["fqn"], None if offset is None else tuple(offset)] = place
        keys, objects = {}, {}
        for name, value in state["state_dict_metadata"].items():
            if not value.qualified_name.endswith("TensorStorageMetadata"):
                objects[name] = Chunk((), (), *places[name, None])
                continue
            value = _state(value)
            dtype, chunks = _state(value["properties"])[0], []
            for chunk in map(_state, value["chunks"]):
                offsets = tuple(chunk["offsets"])
                if (name, offsets) not in places:
                    raise ValueError(
                        f"{path}: {name}: the chunk at {offsets} lies nowhere; save it again"
                    )
                chunks.append(Chunk(offsets, tuple(chunk["sizes"]), *places[name, offsets]))
            keys[name] = Key(dtype, tuple(value["size"]), tuple(chunks))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{path}: is not DCP metadata as torch writes it ({error!r}); copy it again"
        ) from error
    return keys, objects


def _state(value: Any) -> Any:
    return value.state if isinstance(value, Opaque) else value


def check_cover(what: str, shape: Sequence[int], chunks: Sequence[Any]) -> None:
    """ValueError unless chunks (with offsets and sizes) fill a tensor exactly: no overlap, no hole.

    Every chunk is counted in the cells of the grid that all chunks' edges make.
    """
    axes, edges = range(len(shape)), []
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or any(
            not 0 <= chunk.offsets[a] <= chunk.offsets[a] + chunk.sizes[a] <= shape[a] for a in axes
        ):
            raise ValueError(
                f"{what}: chunk {chunk.offsets}+{chunk.sizes} lies outside {shape}; copy it again"
            )
    for a in axes:
        both = {c.offsets[a] for c in chunks} | {c.offsets[a] + c.sizes[a] for c in chunks}
        edges.append({edge: number for number, edge in enumerate(sorted(both))})
    seen: set[tuple[int, ...]] = set()
    for chunk in chunks:
        ends = zip(edges, chunk.offsets, chunk.sizes, strict=True)
        for cell in itertools.product(*(range(at[o], at[o + s]) for at, o, s in ends)):
            if cell in seen:
                raise ValueError(
                    f"{what}: the chunk at {chunk.offsets} overlaps another one; copy it again"
                )
            seen.add(cell)
    filled, total = sum(math.prod(c.sizes) for c in chunks), math.prod(shape)
    if filled != total:
        raise ValueError(
            f"{what}: {total - filled} of {total} values are in no chunk; copy or write it again"
        )


def metadata_of(tensors: Mapping[str, Written], objects: Mapping[str, Any]) -> Metadata:
    """The record of what was written; objects: key -> (file, start, bytes)."""
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for key, written in tensors.items():
        chunks = []
        for number, chunk in enumerate(written.chunks):
            offsets = torch.Size(chunk.offsets)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
            info = _StorageInfo(chunk.file, chunk.start, chunk.num_bytes)
            places[MetadataIndex(key, offsets, number)] = info
        properties = TensorProperties(dtype=written.dtype)
        entries[key] = TensorStorageMetadata(properties, torch.Size(written.shape), chunks)
    for key, place in objects.items():
        entries[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _StorageInfo(*place)
    return Metadata(state_dict_metadata=entries, storage_data=places)
