"""Dumps of tensors: one folder a step and rank, `tensors.safetensors` beside `index.json`.

    OUT/step-000003/rank-00000/index.json

index.json: {"format": "minite-capture/1", "step", "rank", "coordinates", "model", "entries", "notes"}. An
entry is one tensor:
    module, what     of which module, and what it is to it: input, output.grad, weight.codes, ...
    instance         the module's microbatch in the step, from 0
    order            place in the order of execution, over the whole rank
    provenance       actual: the bits that a kernel read or wrote; hook: what crossed a module's boundary;
                     replay: computed again from one of these by the format's definition
    parameter        whether it is a parameter, its operand or its gradient: of no microbatch
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path
from reprlib import repr as short
from typing import Any, Protocol

import torch
from torch import Tensor

FORMAT = "minite-capture/1"
PROVENANCES = ("actual", "hook", "replay")
TENSORS, INDEX = "tensors.safetensors", "index.json"
MAX_EXPERTS = 1 << 20
MODEL_SIZES = {"num_heads", "num_groups", "head_dim"}


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
    parameter: bool
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
        parameter: bool = False,
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
                parameter=parameter,
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

    Raises ValueError naming the file for a folder that is none, and for one whose parts do not fit.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            index = json.loads((self.path / INDEX).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: no dump of a capture: {error}") from error
        fault = _index_fault(index)
        if fault:
            raise ValueError(f"{self.path / INDEX}: {fault}; capture it again")
        self.step, self.rank = index["step"], index["rank"]
        self.coordinates, self.model = index["coordinates"], index["model"]
        self.notes = index["notes"]
        entries = [Entry(**entry | {"shape": tuple(entry["shape"])}) for entry in index["entries"]]
        self.entries = sorted(entries, key=lambda entry: entry.order)
        self._file, self.shapes = self._open()

    def _open(self) -> tuple[Any, dict[str, list[int]]]:
        from safetensors import SafetensorError, safe_open

        try:
            file = safe_open(str(self.path / TENSORS), "pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.path / TENSORS}: cannot be read: {error}") from error
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
        lost = [entry.key for entry in self.entries if entry.key not in shapes]
        if lost:
            raise ValueError(f"{self.path}: {TENSORS} lacks {lost[0]} ({len(lost)} in all)")
        for fault in (_shape_fault(entry, shapes) for entry in self.entries):
            if fault:
                raise ValueError(f"{self.path / TENSORS}: {fault}; capture it again")
        return file, shapes

    def load(self, entry: Entry) -> Tensor:
        """The tensor of an entry."""
        tensor = self._file.get_tensor(entry.key)
        if str(tensor.dtype) != f"torch.{entry.dtype}":
            raise ValueError(
                f"{self.path / TENSORS}: {entry.key} is {tensor.dtype}, {INDEX} says {entry.dtype}; "
                "capture it again"
            )
        return tensor

    def tokens(self, instance: int) -> tuple[Tensor, Tensor] | None:
        """Ids and positions of a microbatch, int64 (N,); None where it has none."""
        ids, positions = _token_keys(instance)
        return (self._numbers(ids), self._numbers(positions)) if ids in self.shapes else None

    def has_rows(self, entry: Entry, part: str) -> bool:
        """Whether the entry's table of rows tells the `token` or the `expert`."""
        return entry.rows is not None and _table_key(entry, part) in self.shapes

    def rows(self, entry: Entry, part: str) -> Tensor:
        """That part of the entry's table of rows, int64 (M,)."""
        key, low, end = _table_key(entry, part), 0, MAX_EXPERTS
        if part == "token":
            low, end = -1, self.shapes[_token_keys(entry.instance)[0]][0]
        numbers = self._numbers(key)
        wrong = numbers[(numbers < low) | (numbers >= end)]
        if len(wrong):
            raise ValueError(
                f"{self.path / TENSORS}: {key} holds {int(wrong[0])}, not a number from {low} to "
                f"{end - 1}; capture it again"
            )
        return numbers

    def _numbers(self, key: str) -> Tensor:
        tensor = self._file.get_tensor(key)
        if tensor.dtype != torch.int64:
            raise ValueError(
                f"{self.path / TENSORS}: {key} is {tensor.dtype}, not torch.int64; capture it again"
            )
        return tensor


def _token_keys(instance: int) -> tuple[str, str]:
    return f"tokens/{instance}.ids", f"tokens/{instance}.positions"


def _table_key(entry: Entry, part: str) -> str:
    return f"rows/{entry.rows}.{part}"


_INDEX_TYPES = {"step": int, "rank": int, "coordinates": dict, "model": dict, "notes": list}
_INDEX_TYPES |= {"entries": list}
_ENTRY_TYPES = {each.name: each.type for each in Entry.__dataclass_fields__.values()}
_ENTRY_TYPES |= {"shape": list}


def _index_fault(index: Any) -> str:
    """What is wrong with the content of an index, empty where nothing is."""
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        return f"is not of format {FORMAT}"
    for name, kind in _INDEX_TYPES.items():
        if type(index.get(name)) is not kind:
            return f"{name} is {short(index.get(name))}"
    coordinates, model = index["coordinates"], index["model"]
    numbers = [value for name, value in coordinates.items() if name != "ep_ranks"]
    is_whole = _are_sizes(numbers, coordinates.get("ep_ranks", []))
    if not is_whole or ("tp_rank" not in coordinates and coordinates.get("tp_size", 1) > 1):
        return f"coordinates are {short(coordinates)}"
    if model and not (
        model.keys() == MODEL_SIZES and _are_sizes([*model.values()]) and all(model.values())
    ):
        return f"model is {short(model)}"
    keys = set()
    for number, entry in enumerate(index["entries"]):
        if not _is_entry(entry) or entry["key"] in keys:
            return f"entries[{number}] is {short(entry)}"
        keys.add(entry["key"])
    return ""


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == _ENTRY_TYPES.keys()
        and all(isinstance(entry[name], kind) for name, kind in _ENTRY_TYPES.items())
        and _are_sizes(entry["shape"])
    )


def _are_sizes(*lists: Any) -> bool:
    """Whether all are lists of whole numbers from 0."""
    return all(
        isinstance(each, list) and all(type(size) is int and size >= 0 for size in each)
        for each in lists
    )


def _shape_fault(entry: Entry, shapes: Mapping[str, Sequence[int]]) -> str:
    """Why an entry, its table of rows and its microbatch's tokens do not fit, empty where they do."""
    if list(entry.shape) != shapes[entry.key]:
        return f"{entry.key} is {shapes[entry.key]}, {INDEX} says {list(entry.shape)}"
    ids, positions = (shapes.get(key) for key in _token_keys(entry.instance))
    if ids != positions or (ids is not None and len(ids) != 1):
        return f"tokens/{entry.instance} has ids {ids} and positions {positions}"
    if entry.rows is None:
        return ""
    tables = [
        shapes[key] for part in ("token", "expert") if (key := _table_key(entry, part)) in shapes
    ]
    if not tables or ids is None:
        return f"{entry.key} has rows of {entry.rows}, whose table or tokens are missing"
    # Of (S, B, ...) the first axes are one where the table has their product.
    if any(len(table) != 1 or table[0] not in accumulate(entry.shape, mul) for table in tables):
        return f"{entry.key} is {list(entry.shape)}, its table rows/{entry.rows} {tables}"
    if tables[0] != tables[-1]:
        return f"rows/{entry.rows} has parts of {tables}"
    return ""


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
            order = _order((file.metadata() or {}).get("order"), set(file.keys()))
            if order is not None:
                return {name: file.get_tensor(name) for name in order}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    raise ValueError(
        f"{path}: no dump of captured outputs; write it with deterministic.parity.save_dump"
    )


def _order(text: str | None, names: set[str]) -> list[str] | None:
    """The list that a file's `order` holds, None where it is not one of just its names."""
    try:
        order = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    is_list = isinstance(order, list) and all(isinstance(name, str) for name in order)
    return order if is_list and sorted(order) == sorted(names) else None


def bits_of(tensor: Tensor) -> Tensor:
    """The bits of every value, as integers of its size."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])
