"""Megatron's torch_dist checkpoints, read and written by chunks, without Megatron and without a model.

A folder holds data files, each a row of torch.save archives, and `.metadata`, a pickle that says for
every tensor which chunk of it lies where. Megatron stacks layers and experts on leading axes
(github.com/NVIDIA/Megatron-LM, megatron/core/dist_checkpointing). What other layouts do differently is
in the keys; a key is read and written here as it stands.
"""

import argparse
import itertools
import math
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_nvfp4.checkpoint.archive import ArchiveWriter
from megatron_nvfp4.checkpoint.atomic import (
    AtomicFolder,
    FolderWriter,
    OutputFile,
    is_partial,
    write_bytes,
)
from megatron_nvfp4.checkpoint.dcp_metadata import (
    Chunk,
    Key,
    Written,
    check_cover,
    metadata_of,
    read_metadata,
)
from megatron_nvfp4.checkpoint.rows import Rows
from megatron_nvfp4.checkpoint.stored_tensor import StoredTensor
from megatron_nvfp4.checkpoint.unpickle import load_saved, plain

TRACKER = "latest_checkpointed_iteration.txt"
_COMMON = "common_state/shard_0_1"
_OPTIMIZER = re.compile(r"^(module\.|model\.)*(optimizer|chained_\d+\.optimizer)\.")

Layout = Literal["homogeneous", "non_homogeneous", "singleton"]


def iteration_folder(folder: Path | str) -> Path:
    """The folder with the weights: `folder` itself, or the one that its tracker file names.

    Errors: ValueError for a folder that is absent, unfinished, or without a Megatron checkpoint.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; name what Megatron's --save named")
    if is_partial(folder):
        raise ValueError(f"{folder}: was left by an unfinished run; remove it")
    if (folder / ".metadata").exists() or any(folder.glob("mp_rank_*")):
        return folder
    tracker = folder / TRACKER
    if not tracker.is_file():
        raise ValueError(
            f"{folder}: holds neither {TRACKER} nor .metadata nor mp_rank_* folders; it is no "
            "Megatron checkpoint, or its saving was cut short: take another"
        )
    text = tracker.read_text().strip()
    if text != "release" and not text.isdecimal():
        raise ValueError(
            f"{tracker}: {text!r:.40} is neither a number nor 'release'; write the iteration there"
        )
    found = folder / (text if text == "release" else f"iter_{int(text):07d}")
    if not found.is_dir():
        raise ValueError(f"{found}: is missing, but {tracker} names it; copy it again")
    return found


# --- reading --------------------------------------------------------------------------------------


class TorchDistReader:
    """A torch_dist checkpoint: the folder of one iteration, or the one above with its tracker file.

    `folder` is the iteration's; `layout` tells how the keys are made ("homogeneous": layers stacked;
    "non_homogeneous": a key a layer; "singleton": a key an expert, gate and up apart); `common` is the
    state beside tensors, with "args" as a dict ({} where there are none).
    Errors: ValueError naming the key or the file for missing and truncated files, chunks that overlap
    or leave a hole, and for any pickle in it that asks for more than data. No tensor is read yet.
    Does not read optimizer state that is cut by flat ranges.
    """

    def __init__(self, folder: Path | str):
        self.folder = iteration_folder(folder)
        path = self.folder / ".metadata"
        if not path.exists():
            raise ValueError(
                f"{path}: is missing; not torch_dist, or its saving was cut short: take another"
            )
        self._keys, self._objects = read_metadata(path)
        self._check_files()
        for key, value in self._keys.items():
            if not _OPTIMIZER.match(key):
                check_cover(f"{self.folder}: {key}", value.shape, value.chunks)
        self._index: dict[tuple[str, int], dict[tuple[int, ...], list[Chunk]]] = {}
        self._stored: dict[tuple[str, int], Any] = {}
        self.common: dict[str, Any] = self._read_common()
        self.layout: Layout = _layout_of(self._keys)

    def keys(self) -> list[str]:
        """Every tensor's key as the checkpoint spells it, optimizer state included, sorted."""
        return sorted(self._keys)

    def meta(self, key: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """The (dtype, global shape) of a key, with its stacked axes. ValueError: an absent key."""
        found = self._key(key)
        return found.dtype, found.shape

    def read(
        self,
        key: str,
        *,
        layer: int | None = None,
        expert: int | None = None,
        rows: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """One tensor: `layer`, then `expert`, index leading axes; of the rest rows [start, stop).

        Where one chunk holds all of it the result is a view of the file, else a copy.
        Errors: ValueError for indices that the key does not have and for damaged chunks.
        """
        found = self._key(key)
        lead = tuple(i for i in (layer, expert) if i is not None)
        rest = found.shape[len(lead) :]
        start, stop = (0, rest[0] if rest else 0) if rows is None else rows
        inside = len(lead) <= len(found.shape) and all(
            0 <= i < size for i, size in zip(lead, found.shape, strict=False)
        )
        if not inside or (rows is not None and not (rest and 0 <= start <= stop <= rest[0])):
            raise ValueError(
                f"{key}: layer={layer} expert={expert} rows={rows} of {found.shape}; give what is inside"
            )
        low = (*lead, start, *(0 for _ in rest[1:])) if rest else lead
        high = (*(i + 1 for i in lead), stop, *rest[1:]) if rest else tuple(i + 1 for i in lead)
        shape = (stop - start, *rest[1:]) if rest else ()
        return self._region(key, found, low, high, len(lead)).view(shape)

    def _region(
        self, key: str, found: Key, low: tuple[int, ...], high: tuple[int, ...], num_lead: int
    ) -> torch.Tensor:
        shape = [b - a for a, b in zip(low, high, strict=True)]
        result = None
        for chunk in self._chunks(key, num_lead).get(low[:num_lead], ()):
            wanted = zip(low, high, chunk.offsets, chunk.sizes, strict=True)
            spans = [(max(a, o), min(b, o + s)) for a, b, o, s in wanted]
            if any(a >= b for a, b in spans):
                continue
            inside = [slice(a - o, b - o) for (a, b), o in zip(spans, chunk.offsets, strict=True)]
            part = self._load(key, found, chunk)[tuple(inside)]
            if list(part.shape) == shape:
                return part.contiguous()
            if result is None:
                result = torch.empty(shape, dtype=found.dtype)
            target = [slice(a - c, b - c) for (a, b), c in zip(spans, low, strict=True)]
            result[tuple(target)] = part
        return torch.empty(shape, dtype=found.dtype) if result is None else result

    def _chunks(self, key: str, num_lead: int) -> dict[tuple[int, ...], list[Chunk]]:
        """The chunks of a key by the leading indices that they touch."""
        if (key, num_lead) not in self._index:
            index: dict[tuple[int, ...], list[Chunk]] = {}
            for chunk in self._keys[key].chunks:
                extents = zip(chunk.offsets[:num_lead], chunk.sizes[:num_lead], strict=True)
                for lead in itertools.product(*(range(o, o + s) for o, s in extents)):
                    index.setdefault(lead, []).append(chunk)
            self._index[key, num_lead] = index
        return self._index[key, num_lead]

    def _load(self, key: str, found: Key, chunk: Chunk) -> torch.Tensor:
        path = self.folder / chunk.file
        place = (chunk.file, chunk.start)
        if place not in self._stored:  # once: its checksum too is compared once
            self._stored[place] = load_saved(path, chunk.start, chunk.num_bytes)
        stored = self._stored[place]
        is_tensor = isinstance(stored, StoredTensor) and stored.dtype == found.dtype
        if not is_tensor or math.prod(stored.shape) != math.prod(chunk.sizes):
            raise ValueError(
                f"{path}: at {chunk.start} is not the chunk of {key} that it should be; copy the folder again"
            )
        return stored.read().reshape(chunk.sizes)

    def _key(self, key: str) -> Key:
        if key not in self._keys:
            raise ValueError(f"{self.folder}: holds no tensor {key}; take one of `keys`")
        return self._keys[key]

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        chunks = itertools.chain.from_iterable(key.chunks for key in self._keys.values())
        for chunk in itertools.chain(chunks, self._objects.values()):
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.num_bytes)
        for file, end in sorted(ends.items()):
            path = self.folder / file
            if Path(file).name != file:
                raise ValueError(
                    f"{self.folder}/.metadata: names {file!r:.80}, not a file of it; copy it again"
                )
            if not path.is_file():
                raise ValueError(f"{path}: is missing, but .metadata names it; copy it again")
            if path.stat().st_size < end:
                raise ValueError(
                    f"{path}: is {path.stat().st_size} bytes, {end} needed: truncated; copy it again"
                )

    def _read_common(self) -> dict[str, Any]:
        legacy = self.folder / "common.pt"
        if _COMMON in self._objects:
            where = self._objects[_COMMON]
            value = load_saved(self.folder / where.file, where.start, where.num_bytes)
            value = value[0] if isinstance(value, list) and len(value) == 1 else value
        elif legacy.exists():
            value = load_saved(legacy)
        else:
            value = {}
        if not isinstance(value, dict):
            raise ValueError(
                f"{self.folder}: its common state is {type(value).__name__}, not a dict; copy it again"
            )
        value = plain(value)
        value.setdefault("args", {})
        return value


def _layout_of(keys: Mapping[str, Any]) -> Layout:
    layers = [key for key in keys if "decoder.layers." in key and not _OPTIMIZER.match(key)]
    if any(re.search(r"\.experts\.experts\.\d+\.|\.(weight|bias)_[wv]$", key) for key in layers):
        return "singleton"
    if any(re.search(r"decoder\.layers\.\d+\.", key) for key in layers):
        return "non_homogeneous"
    return "homogeneous"


# --- writing --------------------------------------------------------------------------------------


class TorchDistWriter(FolderWriter):
    """Streams tensors into a torch_dist checkpoint; a context manager, complete or absent.

    The result is `folder` with a tracker file and one iteration ("release" where `iteration` is None),
    as --load wants it. `common` is the state beside tensors: "args" (a dict or a Namespace),
    "checkpoint_version" and more; "iteration" and "content_metadata" are added where absent.
    `num_layers` and `num_experts` are the lengths of stacked axes. `extra_state` adds the empty objects
    that Transformer Engine's modules, and ours, look for. A chunk holds one layer's, one expert's,
    one half's rows, at most `max_chunk_bytes`, because readers load whole chunks.
    Errors: ValueError for a used folder (unless `force`), parts written twice, of unlike shapes or
    never written; RuntimeError for a full disk.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        common: Mapping[str, Any],
        num_layers: int,
        num_experts: int = 0,
        iteration: int | None = None,
        extra_state: bool = True,
        max_chunk_bytes: int = 1 << 28,
        max_file_bytes: float = 5e9,
        force: bool = False,
        needed_bytes: int = 0,
    ):
        self._common = dict(common)
        self._iteration = iteration
        self._num_layers, self._num_experts = num_layers, num_experts
        self._extra_state = extra_state
        self._max_chunk, self._max_file = max_chunk_bytes, int(max_file_bytes)
        self._written: dict[str, Written] = {}
        self._states: set[str] = set()
        self._file: OutputFile | None = None
        self._num_files = 0
        self._output = AtomicFolder(folder, force=force, needed_bytes=needed_bytes)
        self._name = "release" if iteration is None else f"iter_{iteration:07d}"
        self._path = self._output.path / self._name
        self._path.mkdir()

    def write(
        self,
        key: str,
        tensor: torch.Tensor | Rows,
        *,
        layer: int | None = None,
        expert: int | None = None,
        halves: bool = False,
    ) -> None:
        """Append one tensor, whole or in pieces: all of `key`, or its part at `layer`, `expert` or both.

        halves: the rows are gate above up, which go to chunks of their own.
        """
        axes = ((layer, self._num_layers), (expert, self._num_experts))
        lead = tuple(index for index, _ in axes if index is not None)
        sizes = tuple(size for index, size in axes if index is not None)
        if not all(0 <= index < size for index, size in zip(lead, sizes, strict=True)):
            raise ValueError(f"{key}: layer={layer} expert={expert}, of {sizes}; give one within")
        rows = Rows.of(tensor)
        if halves and (not rows.shape or rows.shape[0] % 2):
            raise ValueError(f"{key}: {rows.shape} has no two halves; write it whole")
        written = self._entry(key, rows, sizes)
        for start, stop in self._cuts(rows, halves):
            part = rows.slice(start, stop) if rows.shape else rows
            offsets = (*lead, start, *(0 for _ in rows.shape[1:])) if rows.shape else lead
            shape = (*(1 for _ in lead), *part.shape)
            place = self._save(lambda archive, part=part, shape=shape: archive.save(part, shape))
            written.chunks.append(Chunk(offsets, shape, *place))
        if self._extra_state and has_extra_state(key):
            module = key.rpartition(".")[0]
            at = ".".join(map(str, lead or (0,)))
            self._states.add(
                f"{module}._extra_state/shard_{at}_{'.'.join(map(str, sizes or (1,)))}"
            )

    def _entry(self, key: str, tensor: Rows, sizes: tuple[int, ...]) -> Written:
        shape = (*sizes, *tensor.shape)
        written = self._written.setdefault(key, Written(tensor.dtype, shape, []))
        if (written.dtype, written.shape) != (tensor.dtype, shape):
            raise ValueError(
                f"{key}: {tensor.dtype} {shape} beside {written.dtype} {written.shape}; parts of one "
                "key are alike: give layers that differ a key each"
            )
        return written

    def _cuts(self, tensor: Rows, halves: bool) -> Iterator[tuple[int, int]]:
        if not tensor.shape:
            yield 0, 1
            return
        num_rows, middle = tensor.shape[0], tensor.shape[0] // 2 if halves else 0
        step = max(1, self._max_chunk * num_rows // max(tensor.nbytes, 1))
        for low, high in ((0, middle), (middle, num_rows)):
            yield from ((at, min(at + step, high)) for at in range(low, high, step))

    def _save(self, value_in: Callable[[ArchiveWriter], Any]) -> tuple[str, int, int]:
        """An archive of what `value_in` makes of it: the file, the place in it, and the bytes."""
        if self._file is not None and self._file.size >= self._max_file:
            self._file.close()
            self._file = None
        if self._file is None:
            self._file = OutputFile(self._path / f"__0_{self._num_files}.distcp")
            self._num_files += 1
        start = self._file.size
        archive = ArchiveWriter(self._file)
        try:
            archive.finish(value_in(archive))
        finally:
            archive.abandon()
        return self._file.path.name, start, self._file.size - start

    def _finish(self) -> None:
        if not self._written:
            raise ValueError(f"{self._output.target}: no tensor was written; write one at least")
        for key, written in self._written.items():
            check_cover(key, written.shape, written.chunks)
        # What Transformer Engine saves of a module without a state; all share one object's bytes.
        nothing = self._save(lambda archive: [archive.save(torch.empty(0, dtype=torch.uint8))])
        objects = dict.fromkeys(sorted(self._states), nothing)
        objects[_COMMON] = self._save(lambda archive: [self._full_common()])
        assert self._file is not None
        self._file.close()
        write_bytes(self._path / ".metadata", pickle.dumps(metadata_of(self._written, objects)))
        backend = b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
        write_bytes(self._path / "metadata.json", backend)
        tracker = "release" if self._iteration is None else str(self._iteration)
        write_bytes(self._output.path / TRACKER, tracker.encode())
        self._output.publish()

    def _full_common(self) -> dict[str, Any]:
        args = self._common.get("args", {})
        args = argparse.Namespace(**args) if isinstance(args, Mapping) else args
        defaults = {
            "checkpoint_version": 3.0,
            "iteration": self._iteration or 0,
            "content_metadata": {
                "singleton_local_shards": False,
                "chained_optim_avoid_prefix": True,
            },
        }
        return {**defaults, **self._common, "args": args}

    def _abandon(self) -> None:
        if self._file is not None:
            self._file.abandon()


def has_extra_state(key: str) -> bool:
    """Whether the module of a parameter is one of Transformer Engine's, which keep `_extra_state`.

    They are the linears and the norms; embeddings, the head, routers and gates are not.
    """
    module = key.rpartition(".")[0].rpartition(".")[2]
    return module.startswith("linear_") or module.endswith(("norm", "eh_proj"))
