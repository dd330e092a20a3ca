"""Dumps of tensors: one folder a step and rank, `tensors.safetensors` beside `index.json`.

    OUT/step-000003/rank-00000/index.json

index.json: {"format": "minite-capture/1", "step", "rank", "coordinates", "model", "entries", "notes"}. An
entry is one tensor:
    module, what     of which module, and what it is to it: input, output.grad, weight.codes, ...
    instance         the module's microbatch in the step, from 0
    order            place in the order of execution, over the whole rank
    provenance       actual: the bits that a kernel read or wrote; hook: what crossed a module's boundary;
                     replay: computed again from one of these by the format's definition
    rows             name of the table that says whose the rows are, or null
    key, shape, dtype
A table is up to two int64 tensors, rows/NAME.token and rows/NAME.expert, with a number for every row: the
token's place in tokens/INSTANCE.ids (batch by batch, position by position; -1 for padding), the expert's
number in the model. tokens/INSTANCE.positions are the positions. Rows that came from several ranks have no
token: they stand by expert, then by rank in the order of coordinates.ep_ranks, then as in that rank's
routing.

A folder appears whole or not at all; who opens it sees to that.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

FORMAT = "minite-capture/1"
PROVENANCES = ("actual", "hook", "replay")
TENSORS, INDEX = "tensors.safetensors", "index.json"


class Folder(Protocol):
    """A folder that appears whole: write below `path`, then publish or discard."""

    path: Path

    def publish(self) -> None: ...

    def discard(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a dump; see the module. format: of a quantised operand, else empty."""

    module: str
    what: str
    instance: int
    order: int
    provenance: str
    rows: str | None
    key: str
    shape: tuple[int, ...]
    dtype: str
    format: str = ""


@dataclass
class DumpWriter:
    """Tensors of one step on one rank, held on the CPU until they are written."""

    step: int
    rank: int
    coordinates: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(
        self,
        module: str,
        what: str,
        tensor: Tensor,
        *,
        instance: int,
        order: int,
        provenance: str,
        rows: str | None = None,
        format: str = "",
    ) -> None:
        """Copy a tensor to the CPU and enter it."""
        assert provenance in PROVENANCES, provenance
        key = f"{order:06d}/{module}/{what}/{instance}"
        self.entries.append(
            Entry(
                module=module,
                what=what,
                instance=instance,
                order=order,
                provenance=provenance,
                rows=rows,
                key=key,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                format=format,
            )
        )
        self.tensors[key] = _on_cpu(tensor)

    def add_tokens(self, instance: int, ids: Tensor, positions: Tensor) -> None:
        """Ids and positions of a microbatch, one after the other."""
        self.tensors[f"tokens/{instance}.ids"] = _on_cpu(ids.flatten().long())
        self.tensors[f"tokens/{instance}.positions"] = _on_cpu(positions.flatten().long())

    def add_rows(self, name: str, token: Tensor | None, expert: Tensor | None = None) -> None:
        """A table: token, and for rows of experts expert, int64 (M,)."""
        if token is not None:
            self.tensors[f"rows/{name}.token"] = _on_cpu(token)
        if expert is not None:
            self.tensors[f"rows/{name}.expert"] = _on_cpu(expert)

    def write(self, folder: Folder) -> None:
        """Write and publish; on any error nothing is left. Needs the package safetensors."""
        from safetensors.torch import save_file

        try:
            save_file(self.tensors, str(folder.path / TENSORS))
            entries = [asdict(entry) for entry in self.entries]
            index = {"format": FORMAT, "step": self.step, "rank": self.rank}
            index |= {"coordinates": dict(self.coordinates), "model": dict(self.model)}
            index |= {"notes": self.notes, "entries": entries}
            (folder.path / INDEX).write_text(json.dumps(index, indent=1) + "\n")
            folder.publish()
        except BaseException:
            folder.discard()
            raise


def dump_folder(out: Path, step: int, rank: int) -> Path:
    """Where the dump of a step and rank stands."""
    return out / f"step-{step:06d}" / f"rank-{rank:05d}"


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


class Dump:
    """A dump that was written: its entries in order, and tensors when they are asked for.

    Raises ValueError for a folder that is none.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            index = json.loads((self.path / INDEX).read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: no dump of a capture: {error}") from error
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            raise ValueError(f"{path}: {INDEX} is not of format {FORMAT}; capture it again")
        self.step, self.rank = index["step"], index["rank"]
        self.coordinates, self.model = index["coordinates"], index["model"]
        self.notes = index["notes"]
        entries = [Entry(**entry | {"shape": tuple(entry["shape"])}) for entry in index["entries"]]
        self.entries = sorted(entries, key=lambda entry: entry.order)
        self._file = self._open()

    def _open(self) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            file = safe_open(str(self.path / TENSORS), "pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.path / TENSORS}: cannot be read: {error}") from error
        keys = set(file.keys())
        lost = [entry.key for entry in self.entries if entry.key not in keys]
        if lost:
            raise ValueError(f"{self.path}: {TENSORS} lacks {lost[0]} ({len(lost)} in all)")
        self.keys = keys
        return file

    def tensor(self, key: str) -> Tensor:
        """The tensor called `key` in the file."""
        return self._file.get_tensor(key)

    def get(self, key: str) -> Tensor | None:
        """The same, None where there is none."""
        return self.tensor(key) if key in self.keys else None


def dumps_below(path: str | Path) -> list[Path]:
    """Folders of dumps: `path` itself, or those of the one step below it; ValueError where there are none
    or several steps."""
    path = Path(path)
    if (path / INDEX).is_file():
        return [path]
    found = sorted(index.parent for index in path.glob(f"rank-*/{INDEX}"))
    if found:
        return found
    steps = sorted({index.parents[1] for index in path.glob(f"step-*/rank-*/{INDEX}")})
    if len(steps) > 1:
        names = ", ".join(step.name for step in steps[:4])
        raise ValueError(f"{path}: holds {len(steps)} steps ({names}); name one, as {steps[0]}")
    if not steps:
        raise ValueError(f"{path}: no dump; give a folder of --minite-capture, or a file")
    return sorted(index.parent for index in steps[0].glob(f"rank-*/{INDEX}"))


def load_ordered(path: str | Path) -> dict[str, Tensor]:
    """What deterministic.parity.save_dump wrote, in its order; ValueError for a file without an order."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            order = (file.metadata() or {}).get("order")
            if order is not None:
                return {name: file.get_tensor(name) for name in json.loads(order)}
    except SafetensorError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    raise ValueError(
        f"{path}: no dump of captured outputs; write it with deterministic.parity.save_dump"
    )


def bits_of(tensor: Tensor) -> Tensor:
    """The bits of every value, as integers of its size."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])
