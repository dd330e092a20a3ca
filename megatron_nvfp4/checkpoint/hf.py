"""Hugging Face checkpoints: safetensors shards read by rows and written as a stream."""

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megatron_nvfp4.checkpoint.atomic import (
    AtomicFolder,
    FolderWriter,
    copy_file,
    is_partial,
    json_bytes,
    write_bytes,
    write_json,
)
from megatron_nvfp4.checkpoint.hf_files import (
    INDEX,
    SINGLE,
    FilePlan,
    few,
    read_config,
    read_weight_map,
    single_file,
)
from megatron_nvfp4.checkpoint.safetensors_file import (
    GrowingShard,
    PlannedShard,
    Shard,
    dtype_name,
    read_header,
)
from megatron_nvfp4.checkpoint.stored_tensor import StoredTensor

MAX_SHARD_BYTES = 5e9

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
            raise ValueError(f"{self.folder}: no such folder; name a Hugging Face checkpoint's")
        if is_partial(self.folder):
            raise ValueError(f"{self.folder}: was left by an unfinished run; remove it")
        has_index = (self.folder / INDEX).exists()
        self._entries = self._read_index() if has_index else read_header(single_file(self.folder))

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json. Errors: ValueError where it is missing or not a JSON object."""
        return read_config(self.folder)

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
            raise ValueError(
                f"{self.folder}: holds no tensor {name}; is it of another model, or incomplete?"
            )
        return self._entries[name]

    def _read_index(self) -> dict[str, StoredTensor]:
        path = self.folder / INDEX
        wanted = read_weight_map(self.folder)
        shards = sorted(set(wanted.values()))
        missing = [name for name in shards if not (self.folder / name).is_file()]
        if missing:
            raise ValueError(
                f"{self.folder}: {len(missing)} of {len(shards)} shards are missing: "
                f"{few(missing)}; copy them again"
            )
        entries: dict[str, StoredTensor] = {}
        for shard in shards:
            for name, entry in read_header(self.folder / shard).items():
                if name in entries:
                    other = entries[name].path.name
                    raise ValueError(f"{name}: stands in both {other} and {shard}; remove one")
                entries[name] = entry
        again = "copy the index and the shards again"
        absent = [name for name in wanted if name not in entries]
        if absent:
            raise ValueError(f"{path}: names tensors that no shard holds: {few(absent)}; {again}")
        unnamed = [name for name in entries if name not in wanted]
        if unnamed:
            raise ValueError(
                f"{path}: does not name tensors in its shards: {few(unnamed)}; {again}"
            )
        wrong = [name for name in wanted if entries[name].path.name != wanted[name]]
        if wrong:
            raise ValueError(f"{path}: names the wrong shard for: {few(wrong)}; {again}")
        return entries


# --- writing --------------------------------------------------------------------------------------


class HFWriter(FolderWriter):
    """Streams tensors into safetensors shards; a context manager, complete or absent.

    The folder appears at the end of the `with` block, index last. `config` may be changed until
    then; its file is a copy of that of `like`, a folder, where that one says the same. `metadata` goes
    into the index beside total_size. `needed_bytes` is checked against the free space at the start. At
    most 32 MiB are held here; a shard holds `max_shard_bytes`, or one larger tensor. With a `plan` its
    files are written, and tensors come in its order. Errors: ValueError for a used folder (unless
    `force`), a name written twice, an unknown dtype, a size that is not positive and finite; RuntimeError
    for a full disk.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        config: dict[str, Any],
        max_shard_bytes: float = MAX_SHARD_BYTES,
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
        needed_bytes: int = 0,
        plan: FilePlan | None = None,
        like: Path | None = None,
    ):
        if not 1 <= max_shard_bytes < math.inf:
            raise ValueError(
                f"max_shard_bytes={max_shard_bytes}: give a positive, finite size (--max-shard-gb 5 is"
                " usual)"
            )
        self.config = config
        self._max = int(max_shard_bytes)
        self._metadata = dict(metadata or {})
        self._plan, self._like = plan, like
        self._output = AtomicFolder(folder, force=force, needed_bytes=needed_bytes)
        self._shards: list[list[str]] = []  # names, by finished shard
        self._seen: set[str] = set()
        self._shard: Shard | None = None
        self._total = 0

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append one tensor, any shape; it is copied or on its way to the disk on return."""
        if name in self._seen:
            raise ValueError(f"{name}: written twice; write each tensor once")
        dtype_name(name, tensor.dtype)
        self._seen.add(name)
        tensor = tensor.detach().cpu().contiguous()
        if self._shard is not None and not self._shard.has_room(name, tensor):
            self._finish_shard()
        if self._shard is None:
            self._shard = self._open_shard()
        self._shard.append(name, tensor)
        self._total += tensor.nbytes

    def _open_shard(self) -> Shard:
        number = len(self._shards)
        path = self._output.path / f"shard-{number}.unfinished"
        if self._plan is None:
            return GrowingShard(path, self._max)
        assert number < len(self._plan.files), "more tensors than are planned"
        file = self._plan.files[number]
        return PlannedShard(path, file.header, file.tensors)

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
            raise ValueError(f"{self._output.target}: no tensor was written; write one at least")
        folder, weight_map = self._output.path, {}
        for number, (names, file) in enumerate(zip(self._shards, self._files(), strict=True)):
            (folder / f"shard-{number}.unfinished").rename(folder / file)
            weight_map.update(dict.fromkeys(names, file))
        write_bytes(folder / "config.json", self._config_bytes())
        if self._plan is None:
            metadata = {**self._metadata, "total_size": self._total}
            index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
            write_json(folder / INDEX, index)
        elif self._plan.index is not None:
            write_bytes(folder / INDEX, self._plan.index)
        self._output.publish()

    def _files(self) -> list[str]:
        if self._plan is not None:
            return [file.name for file in self._plan.files]
        count = len(self._shards)
        return [
            SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            for number in range(count)
        ]

    def _config_bytes(self) -> bytes:
        if self._like is not None and read_config(self._like) == self.config:
            return (self._like / "config.json").read_bytes()
        return json_bytes(self.config)

    def _abandon(self) -> None:
        if self._shard is not None:
            self._shard.abandon()
