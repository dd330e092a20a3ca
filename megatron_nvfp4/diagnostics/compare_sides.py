"""One side of a comparison: what a dump holds, by module and by what it is to the module.

Read from a capture, from SGLang's own tensor dump, or from a file of named outputs in order.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .align import Batch
from .dump import Dump, Entry, dumps_below, load_ordered

Owner = tuple[int, int]
GENERATED = ("routing.slots",)  # depends on the other tokens of the batch


@dataclass(frozen=True)
class Piece:
    """One tensor. owner: (data-parallel rank, microbatch) that computed it.

    token: place in the owner's microbatch of every row, -1 for none. travelled: where the rows came from
    several owners, each row's owner and its place there. Without either rows have no name. parameter: of one,
    so of no microbatch.
    """

    load: Callable[[], Tensor]
    owner: Owner
    order: int
    provenance: str
    shape: tuple[int, ...]
    dtype: str
    token: Callable[[], Tensor] | None = None
    expert: Callable[[], Tensor] | None = None
    travelled: "Callable[[], list[tuple[Owner, Tensor]]] | None" = None
    format: str = ""
    parameter: bool = False

    @property
    def is_named(self) -> bool:
        return self.token is not None or self.travelled is not None

    def numbers(self, of_owner: Mapping["Owner", Tensor]) -> Tensor:
        """Every row's token by the numbers of align.Tokens, -1 for none."""
        if self.travelled is not None:
            parts = [of_owner[owner][place] for owner, place in self.travelled()]
            return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        place = self.token()
        return torch.where(place < 0, place, of_owner[self.owner][place.clamp_min(0)])


@dataclass(frozen=True)
class Key:
    """Which quantity. part: what tells apart the pieces that are not one after the other: a shard's number,
    and without rows the microbatch and rank."""

    module: str
    what: str
    part: str = ""

    def __str__(self) -> str:
        return " ".join(word for word in (self.module, self.what, self.part) if word)


@dataclass
class Side:
    """Quantities in the order of execution. kind: capture, sglang, ordered, or learner, which is a file of
    named outputs beside SGLang's dump.

    model: sizes by which columns of fused projections are told apart, where they are known.
    """

    path: str
    kind: str
    quantities: dict[Key, list[Piece]] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    model: Mapping[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, key: Key, piece: Piece) -> None:
        self.quantities.setdefault(key, []).append(piece)


def read_sides(
    left: str | Path, right: str | Path, rename: Callable[[str], str | None]
) -> tuple[Side, Side]:
    """Both sides as read_side has them, but a file of named outputs beside SGLang's dump by SGLang's modules
    and by tokens."""
    from .dump_learner import read_learner, read_sampler

    paths = [Path(left), Path(right)]
    passes = [_passes_of_sglang(path) for path in paths]
    is_learner = [path.is_file() and not found for path, found in zip(paths, passes, strict=True)]
    for one, other in ((0, 1), (1, 0)):
        if is_learner[one] and passes[other]:
            learner = read_learner(paths[one], rename)
            sampler = read_sampler(paths[other], passes[other], rename, learner)
            return (sampler, learner) if one else (learner, sampler)
    return read_side(left, rename), read_side(right, rename)


def read_side(path: str | Path, rename: Callable[[str], str | None]) -> Side:
    """What stands at `path`; ValueError for anything else, FileNotFoundError for nothing.

    rename: model-wide name of a module of SGLang, None for one that has none.
    """
    from .dump_sglang import read_sglang

    path = Path(path)
    passes = _passes_of_sglang(path)
    if passes:
        return read_sglang(path, passes, rename)
    if path.is_dir():
        return _read_capture(path)
    side = Side(str(path), "ordered")
    for order, (name, tensor) in enumerate(load_ordered(path).items()):
        side.add(Key(name, ""), _whole(tensor, order))
    return side


def _passes_of_sglang(path: Path) -> list[Path]:
    """Files of passes at `path`, none for a capture or named outputs; FileNotFoundError for nothing."""
    from .dump_sglang import sglang_passes

    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file or folder")
    if path.is_dir():
        return sglang_passes(path)
    return [path] if path.suffix == ".pt" else []


def _whole(tensor: Tensor, order: int) -> Piece:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Piece(lambda: tensor, (0, 0), order, "actual", tuple(tensor.shape), dtype)


def _read_capture(path: Path) -> Side:
    side = Side(str(path), "capture")
    dumps = [Dump(folder) for folder in dumps_below(path)]
    named: set[tuple[int, int]] = set()
    for dump in dumps:
        side.model = side.model or dump.model
        side.notes += [f"rank {dump.rank}: {note}" for note in dump.notes]
        rank = dump.coordinates.get("dp_rank", dump.rank)
        for number in sorted({entry.instance for entry in dump.entries}):
            tokens = dump.tokens(number)
            if tokens is not None and (rank, number) not in named:
                named.add((rank, number))
                side.batches.append(Batch(number, *tokens, rank))
        for entry in dump.entries:
            key, piece = _of_entry(dump, entry, rank, dumps)
            side.add(key, piece)
    return side


def _of_entry(dump: Dump, entry: Entry, rank: int, dumps: list[Dump]) -> tuple[Key, Piece]:
    shards = dump.coordinates.get("tp_size", 1)
    parts = [f"shard {dump.coordinates['tp_rank']}"] if shards > 1 else []
    token = expert = travelled = None
    if entry.rows is not None:
        token, expert = (
            partial(dump.rows, entry, part) if dump.has_rows(entry, part) else None
            for part in ("token", "expert")
        )
        if token is None:
            travelled = _travelled(dump, entry, dumps)
    if token is None and travelled is None:
        # Ranks hold copies of a parameter; experts' are known by their number.
        is_copy = entry.parameter and not entry.what.endswith(".grad")
        parts += [f"rank {dump.rank}"] if dump.rank and not is_copy else []
        parts += [f"microbatch {entry.instance}"] if entry.instance else []
    piece = Piece(
        partial(dump.load, entry),
        (rank, entry.instance),
        entry.order,
        entry.provenance,
        entry.shape,
        entry.dtype,
        token,
        expert,
        travelled,
        entry.format,
        entry.parameter,
    )
    return Key(entry.module, entry.what, ", ".join(parts)), piece


def _travelled(
    dump: Dump, entry: Entry, dumps: list[Dump]
) -> Callable[[], list[tuple[Owner, Tensor]]] | None:
    """Where rows came from that the ranks of an expert-parallel group sent: by expert, then by rank, then in
    the order of that rank's routing. None where a rank's routing was not dumped."""
    router = entry.module.split(".experts.")[0] + ".router"
    by_rank = {each.rank: each for each in dumps}
    sources = []
    for rank in dump.coordinates.get("ep_ranks", [dump.rank]):
        found = by_rank.get(rank)
        routing = [
            each
            for each in (found.entries if found else ())
            if (each.module, each.what, each.instance) == (router, "routing.ids", entry.instance)
        ]
        if (
            not routing
            or not found.has_rows(routing[0], "token")
            or dump.coordinates.get("tp_size", 1) > 1
        ):
            return None
        sources.append((found, routing[0]))

    def rows() -> list[tuple[Owner, Tensor]]:
        expert_of_row = dump.rows(entry, "expert")
        parts = [
            (
                (found.coordinates.get("dp_rank", found.rank), entry.instance),
                found.rows(routing, "token")[(found.load(routing) == expert).any(dim=1)],
            )
            for expert in expert_of_row.unique().tolist()
            for found, routing in sources
        ]
        num_rows = sum(len(place) for _, place in parts)
        if num_rows != len(expert_of_row):
            raise ValueError(
                f"{dump.path}: {entry.key} has {len(expert_of_row)} rows, the routing of ranks "
                f"{[found.rank for found, _ in sources]} sends {num_rows}; capture them in one run"
            )
        return parts

    return rows


def in_order(side: Side) -> list[Key]:
    """The quantities that are compared, by where the first of their pieces came in the execution."""
    return sorted(
        (key for key in side.quantities if key.what not in GENERATED),
        key=lambda key: min(piece.order for piece in side.quantities[key]),
    )


def rows_of(pieces: list[Piece]) -> Tensor:
    """The pieces' rows (M, C), one after the other; of (S, B, ...) the first axes are one where the table of
    rows has their product."""
    found = []
    for piece in pieces:
        values = piece.load()
        num_rows = len(values) if piece.token is None else len(piece.token())
        width = values.numel() // num_rows if num_rows else math.prod(values.shape[1:])
        found.append(values.reshape(num_rows, width))
    return torch.cat(found)
