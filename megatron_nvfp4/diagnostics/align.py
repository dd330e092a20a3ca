"""The same token on both sides of a comparison, whatever the order of batches, experts and padding.

A token is known by the ids of its sequence up to itself: in a causal model these decide all that is computed
of it. Where one side has it several times (a prompt that is sampled more than once), the first is taken with
the first. A row of an expert is known by its token and the expert's number.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

UNKNOWN = -1


@dataclass(frozen=True)
class TokenPlace:
    """Where a side has a token, for people: microbatch, sequence in it, position, id."""

    microbatch: int
    sequence: int
    position: int
    id: int


@dataclass
class Batch:
    """One microbatch of one data-parallel rank: ids and positions (N,), sequence after sequence."""

    microbatch: int
    ids: Tensor
    positions: Tensor
    rank: int = 0

    def places(self) -> list[TokenPlace]:
        """Of every token, in order."""
        sequence, places = -1, []
        last = None
        for token, position in zip(self.ids.tolist(), self.positions.tolist(), strict=True):
            if last is None or position != last + 1:
                sequence += 1
            last = position
            places.append(TokenPlace(self.microbatch, sequence, position, token))
        return places

    def prefixes(self) -> list[tuple] | None:
        """What each token is known by; None where a sequence does not begin at position 0."""
        found, key, last = [], 0, None
        for token, position in zip(self.ids.tolist(), self.positions.tolist(), strict=True):
            if position == 0:
                key = 0
            elif last is None or position != last + 1:
                return None
            key, last = hash((key, token)), position
            found.append((position, key))
        return found


@dataclass
class Tokens:
    """Numbers of the tokens of both sides, equal where the tokens are: by (rank, microbatch), (N,) each.

    places: of every number, on the side that has it. num_both, num_left, num_right: tokens on both sides and
    on one. notes: what could not be told.
    """

    left: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    right: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    places: dict[int, TokenPlace] = field(default_factory=dict)
    num_both: int = 0
    num_left: int = 0
    num_right: int = 0
    notes: list[str] = field(default_factory=list)


def match_tokens(left: Sequence[Batch], right: Sequence[Batch]) -> Tokens:
    """Numbers of all tokens; those on the right alone come after those of the left."""
    tokens = Tokens()
    numbers: dict[tuple, int] = {}
    for batches, found in ((left, tokens.left), (right, tokens.right)):
        seen: Counter[tuple] = Counter()
        for batch in batches:
            keys = batch.prefixes()
            if keys is None:
                tokens.notes.append(
                    f"microbatch {batch.microbatch}: a sequence begins behind position 0, so its tokens are "
                    "taken in order"
                )
                keys = [("at", batch.rank, batch.microbatch, n) for n in range(len(batch.ids))]
            row = []
            for key, place in zip(keys, batch.places(), strict=True):
                of_key = (*key, seen[key])
                seen[key] += 1
                number = numbers.setdefault(of_key, len(numbers))
                tokens.places.setdefault(number, place)
                row.append(number)
            found[batch.rank, batch.microbatch] = torch.tensor(row, dtype=torch.int64)
    sides = [
        set(torch.cat([*found.values()]).tolist()) if found else set()
        for found in (tokens.left, tokens.right)
    ]
    tokens.num_both = len(sides[0] & sides[1])
    tokens.num_left, tokens.num_right = (len(side) - tokens.num_both for side in sides)
    return tokens


def row_numbers(token: Tensor, expert: Tensor | None, num_experts: int) -> Tensor:
    """One number of a token's number (-1 for none) and an expert's: -1 for a row of no token."""
    number = token if expert is None else token * num_experts + expert
    return torch.where(token < 0, UNKNOWN, number)


@dataclass(frozen=True)
class Pairs:
    """Which row of each side belong together, in order of their numbers; how many are on one side alone.

    num_padding: rows of no token, of both sides together.
    """

    left: Tensor
    right: Tensor
    numbers: Tensor
    num_left: int
    num_right: int
    num_padding: int


def pair_rows(left: Tensor, right: Tensor) -> Pairs:
    """Pairs of equal numbers; of several rows with one number on a side the first counts."""
    (left_numbers, left_index), (right_numbers, right_index) = _first_of(left), _first_of(right)
    shared = torch.isin(left_numbers, right_numbers)
    numbers = left_numbers[shared]
    found = torch.searchsorted(right_numbers, numbers) if len(right_numbers) else numbers
    return Pairs(
        left=left_index[shared],
        right=right_index[found],
        numbers=numbers,
        num_left=int((~shared).sum()),
        num_right=len(right_numbers) - len(numbers),
        num_padding=int((left < 0).sum() + (right < 0).sum()),
    )


def _first_of(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """(numbers from 0 on, each once and ascending; where each stands first)."""
    order = torch.argsort(numbers, stable=True)
    ordered = numbers[order]
    keep = ordered >= 0
    keep[1:] &= ordered[1:] != ordered[:-1]
    return ordered[keep], order[keep]


def qkv_columns(num_heads: int, num_groups: int, head_dim: int) -> Tensor:
    """Columns of Megatron's fused projection, group by group (queries, key, value), in the order that puts
    all queries first, then keys, then values."""
    per_group = num_heads // num_groups + 2
    columns = torch.arange(num_groups * per_group * head_dim).view(num_groups, per_group, head_dim)
    parts = columns.split([per_group - 2, 1, 1], dim=1)
    return torch.cat([part.flatten() for part in parts])
