"""Matrices that lie in pieces, one above the other, and how tensor parallelism cuts them; no copies."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

import torch
from torch import Tensor

Split = Literal["rows", "halves", "columns"] | None


@dataclass(frozen=True, eq=False)
class Rows:
    """Tensors of one dtype, alike but in their number of rows; a single one may have any shape."""

    pieces: tuple[Tensor, ...]

    @classmethod
    def of(cls, value: "Tensor | Rows | Iterable[Tensor]") -> "Rows":
        """A tensor, or pieces of it from top to bottom, on the CPU."""
        if isinstance(value, Rows):
            return value
        pieces = (value,) if isinstance(value, Tensor) else tuple(value)
        pieces = tuple(piece.detach().cpu() for piece in pieces)
        assert pieces, "rows of nothing"
        assert len({(piece.dtype, piece.shape[1:]) for piece in pieces}) == 1, "pieces differ"
        return cls(pieces)

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].dtype

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        if len(self.pieces) == 1:
            return tuple(self.pieces[0].shape)
        return sum(piece.shape[0] for piece in self.pieces), *self.pieces[0].shape[1:]

    @cached_property
    def nbytes(self) -> int:
        """Of the whole."""
        return sum(piece.nbytes for piece in self.pieces)

    def slice(self, start: int, stop: int) -> "Rows":
        """Rows start..stop of the whole."""
        found, at = [], 0
        for piece in self.pieces:
            first, last = max(start - at, 0), min(stop - at, piece.shape[0])
            if first < last:
                found.append(piece[first:last])
            at += piece.shape[0]
        return Rows(tuple(found) or (self.pieces[0][:0],))

    def columns(self, start: int, stop: int) -> "Rows":
        """Columns start..stop of the whole."""
        return Rows(tuple(piece[:, start:stop] for piece in self.pieces))

    def above(self, other: Self) -> "Rows":
        """These rows and `other` below them."""
        return Rows(self.pieces + other.pieces)


def split_rows(
    num_rows: int, num_ranks: int, split: Split
) -> Iterator[tuple[int, int, int]]:  # rank, first and last row in its part
    """The rows of a whole tensor from top to bottom, as rows of the ranks' parts of `num_rows` each.

    "halves": every rank's part is its rows of the upper half above those of the lower half.
    """
    ranks = range(num_ranks if split in ("rows", "halves") else 1)
    step = num_rows // 2 if split == "halves" else num_rows
    for half in range(2 if split == "halves" else 1):
        yield from ((rank, half * step, (half + 1) * step) for rank in ranks)


def part_of(key: str, rows: Rows, split: Split, rank: int, num_ranks: int) -> Rows:
    """One rank's part of a whole parameter."""
    if split is None or num_ranks == 1:
        return rows
    axis, halves = (1 if split == "columns" else 0), (2 if split == "halves" else 1)
    if len(rows.shape) <= axis or rows.shape[axis] % (halves * num_ranks):
        raise ValueError(
            f"{key}: {rows.shape} cannot be cut by {split} into {num_ranks}; choose other sizes"
        )
    step = rows.shape[axis] // (halves * num_ranks)
    first, last = rank * step, (rank + 1) * step
    if split == "columns":
        return rows.columns(first, last)
    if split == "rows":
        return rows.slice(first, last)
    middle = rows.shape[0] // 2
    return rows.slice(first, last).above(rows.slice(middle + first, middle + last))
