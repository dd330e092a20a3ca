"""The first operator that two dumps differ in, and by how much each differs.

Rows are paired first (align.py): by token, and for experts by token and expert, so that another order of the
batch, another permutation and padding are no differences. Then all bits are compared, quantity by quantity in
the left side's order of execution. Three views are kept apart:
    natural      every row that both sides have
    conditioned  inside an MoE layer, only tokens that the layer's router sends to the same experts
    replay       one side's input through the other's operator, offline (compare_replay.py)
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .align import Pairs, TokenPlace, Tokens, match_tokens, pair_rows, qkv_columns, row_numbers
from .compare_sides import Key, Owner, Piece, Side, in_order, rows_of
from .compare_values import Numbers, ValueDifference, compare_values, num_values_of
from .dump import MAX_EXPERTS

ROUTER, EXPERTS, QKV = ".router", ".experts", ".linear_qkv"


@dataclass(frozen=True)
class Place:
    """Of one value: its token, None where rows have no name; its expert, None outside; its index in a row."""

    token: TokenPlace | None
    expert: int | None
    index: tuple[int, ...]

    def __str__(self) -> str:
        if self.token is None:
            words = [] if self.expert is None else [f"expert {self.expert}"]
            return f"[{', '.join([*words, *map(str, self.index)])}]"
        token, column = self.token, ", ".join(map(str, self.index))
        words = [
            f"microbatch {token.microbatch}, sequence {token.sequence}, position {token.position}"
        ]
        words.append(f"token id {token.id}")
        words += [] if self.expert is None else [f"expert {self.expert}"]
        return f"[{', '.join(words)}, column {column}]"


@dataclass(frozen=True)
class Operator:
    """One quantity of one module on both sides.

    reason: why it differs, empty where it does not. natural, conditioned: None where no bit differs.
    num_rows: rows that were compared; conditioned_rows: of these in the second view, None outside MoE layers.
    num_left, num_right: rows on one side alone. place: of the first difference.
    """

    key: Key
    reason: str = ""
    natural: ValueDifference | None = None
    conditioned: ValueDifference | None = None
    place: Place | None = None
    num_values: int = 0
    num_rows: int = 0
    conditioned_rows: int | None = None
    num_left: int = 0
    num_right: int = 0
    num_padding: int = 0
    provenances: tuple[str, str] = ("", "")

    @property
    def differs(self) -> bool:
        return bool(self.reason)

    @property
    def differs_conditioned(self) -> bool:
        """In the second view, of which routers are no part."""
        if self.conditioned_rows is not None:
            return self.conditioned is not None
        return self.differs and not self.key.module.endswith(ROUTER)


@dataclass
class Comparison:
    """All quantities that both sides have, in order, and what only one has."""

    left: Side
    right: Side
    tokens: Tokens
    operators: list[Operator] = field(default_factory=list)
    only_left: list[Key] = field(default_factory=list)
    only_right: list[Key] = field(default_factory=list)
    not_compared: list[Key] = field(default_factory=list)

    @property
    def same_batches(self) -> bool:
        """Whether both sides cut the tokens into microbatches alike; else rows without a name, of
        attention's scores, say, cannot be paired."""
        sizes = [
            [(batch.rank, batch.microbatch, batch.positions.tolist()) for batch in side.batches]
            for side in (self.left, self.right)
        ]
        return sizes[0] == sizes[1]

    @property
    def first(self) -> Operator | None:
        """The first operator that differs."""
        return next((operator for operator in self.operators if operator.differs), None)

    @property
    def first_conditioned(self) -> Operator | None:
        """The same where routing agrees."""
        return next((each for each in self.operators if each.differs_conditioned), None)


def compare_sides(left: Side, right: Side) -> Comparison:
    """Compare what both sides hold.

    ValueError where they have no token, or nothing at all, in common; for files of named outputs also where
    one lacks a name, for these are of one forward.
    """
    if "ordered" in (left.kind, right.kind):
        _require_same_names(left, right)
    tokens = match_tokens(left.batches, right.batches)
    if left.batches and right.batches and not tokens.num_both:
        raise ValueError(
            f"compare: {left.path} and {right.path} have no token in common (of {tokens.num_left} and "
            f"{tokens.num_right}); dump the same sequences"
        )
    result = Comparison(left, right, tokens)
    result.only_left = [key for key in in_order(left) if key not in right.quantities]
    result.only_right = [key for key in in_order(right) if key not in left.quantities]
    agreeing: dict[str, Tensor] = {}
    same_batches = result.same_batches
    faults = {**permutation_faults(left, 0), **permutation_faults(right, 1)}
    for key in in_order(left):
        layer, is_of_parameter = _layer_of(key.module), left.quantities[key][0].parameter
        # Behind the router's choice, which a permutation is judged by.
        if layer in faults and EXPERTS in key.module and not is_of_parameter:
            result.operators.append(faults.pop(layer))
        if key not in right.quantities:
            continue
        if not same_batches and _is_unnamed(left, key) and not is_of_parameter:
            result.not_compared.append(key)
            continue
        result.operators.append(_Pair(result, key).compare(agreeing))
    result.operators += faults.values()
    if not result.operators:
        raise ValueError(
            f"compare: {left.path} and {right.path} have no quantity in common, such as "
            f"{next(iter(left.quantities), 'none')} and {next(iter(right.quantities), 'none')}"
        )
    return result


def _is_unnamed(side: Side, key: Key) -> bool:
    return not all(piece.is_named for piece in side.quantities[key])


def _require_same_names(left: Side, right: Side) -> None:
    for one, other, which in ((left, right, "second"), (right, left, "first")):
        missing = [str(key) for key in one.quantities if key not in other.quantities]
        if missing:
            raise ValueError(
                f"compare: the {which} dump lacks {', '.join(missing[:5])} ({len(missing)} in all); "
                "dump the same forward"
            )


class _Pair:
    """The pieces of one quantity on both sides."""

    def __init__(self, comparison: Comparison, key: Key) -> None:
        self.key, self.tokens = key, comparison.tokens
        self.sides = (comparison.left, comparison.right)
        self.pieces = [side.quantities[key] for side in self.sides]
        self.is_one_kind = comparison.left.kind == comparison.right.kind
        self.provenances = tuple(pieces[0].provenance for pieces in self.pieces)

    def compare(self, agreeing: dict[str, Tensor]) -> Operator:
        """agreeing: by MoE layer, numbers of the tokens with the same experts; a router adds its own."""
        dtypes = [pieces[0].dtype for pieces in self.pieces]
        if dtypes[0] != dtypes[1] and self.is_one_kind:
            return self._unlike(self.pieces[0][0], self.pieces[1][0])
        if not all(piece.is_named for pieces in self.pieces for piece in pieces):
            return self._whole()
        return self._by_rows(agreeing)

    def _unlike(self, *pair: Piece) -> Operator:
        texts = [f"torch.{piece.dtype} {piece.shape}" for piece in pair]
        return Operator(self.key, f"{texts[0]} against {texts[1]}", provenances=self.provenances)

    def _whole(self) -> Operator:
        """Tensors whose rows have no name, value against value; of a parameter every rank's copy."""
        reason, place = "", None
        for number, pair in enumerate(self._copies()):
            if pair[0].shape != pair[1].shape:
                return self._unlike(*pair)
            tensors = [piece.load() for piece in pair]
            found = self._difference(*tensors)
            if found is not None:
                ranks = [piece.owner[0] for piece in pair]
                reason = _reason(found) + (
                    f" (data-parallel ranks {ranks[0]} and {ranks[1]})" if number else ""
                )
                place = self._place_of_weight(found.index)
                break
        return Operator(
            self.key,
            reason,
            natural=found,
            place=place,
            num_values=num_values_of(self.key.what, tensors[0]),
            num_rows=len(tensors[0]) if tensors[0].dim() else 1,
            provenances=self.provenances,
        )

    def _copies(self) -> Iterator[tuple[Piece, Piece]]:
        """The first of each side, then every further one beside the other side's first."""
        left, right = self.pieces
        yield left[0], right[0]
        yield from ((copy, right[0]) for copy in left[1:])
        yield from ((left[0], copy) for copy in right[1:])

    def _place_of_weight(self, index: tuple[int, ...]) -> Place:
        """weight3 belongs to the expert with that number."""
        digits = self.key.what.partition(".")[0].removeprefix("weight")
        if EXPERTS in self.key.module and digits.isdigit():
            return Place(None, int(digits), index)
        return Place(None, None, index)

    def _by_rows(self, agreeing: dict[str, Tensor]) -> Operator:
        rows = [
            self._columns(side, rows_of(pieces))
            for side, pieces in zip(self.sides, self.pieces, strict=True)
        ]
        if rows[0].shape[1] != rows[1].shape[1]:
            return self._unlike(self.pieces[0][0], self.pieces[1][0])
        numbers = [
            torch.cat([self._numbers(piece, of_owner) for piece in pieces])
            for pieces, of_owner in zip(
                self.pieces, (self.tokens.left, self.tokens.right), strict=True
            )
        ]
        pairs = pair_rows(*numbers)
        left, right = rows[0][pairs.left], rows[1][pairs.right]
        found, experts = self._difference(left, right), self._has_experts()
        token = pairs.numbers // MAX_EXPERTS if experts else pairs.numbers
        layer = _layer_of(self.key.module)
        if self.key.what == "routing.ids":
            agreeing[layer] = token[(left == right).all(dim=1)]
        counts, conditioned = None, None
        if layer in agreeing and not self.key.module.endswith(ROUTER):
            keep = torch.isin(token, agreeing[layer])
            counts = int(keep.sum())
            conditioned = self._difference(left[keep], right[keep])
        place = None
        if found is not None:
            row = int(found.index[0])
            number = int(pairs.numbers[row])
            place = Place(
                self.tokens.places[int(token[row])],
                number % MAX_EXPERTS if experts else None,
                self._column(found.index[1]),
            )
        return Operator(
            self.key,
            _reason(found) or self._unpaired(pairs),
            natural=found,
            conditioned=conditioned,
            place=place,
            num_values=num_values_of(self.key.what, left),
            num_rows=len(left),
            conditioned_rows=counts,
            num_left=pairs.num_left,
            num_right=pairs.num_right,
            num_padding=pairs.num_padding,
            provenances=self.provenances,
        )

    def _columns(self, side: Side, rows: Tensor) -> Tensor:
        """SGLang's fused projection holds all queries first, Megatron's each group's."""
        if self.is_one_kind or side.kind == "sglang" or not self.key.module.endswith(QKV):
            return rows
        if not side.model:
            return rows
        columns = qkv_columns(**side.model)
        return rows[:, columns] if len(columns) == rows.shape[1] else rows

    def _unpaired(self, pairs: Pairs) -> str:
        """Rows of experts of shared tokens on one side only, where the routing differs, are no news."""
        return "" if len(pairs.numbers) else "no row is on both sides"

    def _has_experts(self) -> bool:
        return all(pieces[0].expert is not None for pieces in self.pieces)

    def _numbers(self, piece: Piece, of_owner: Mapping[Owner, Tensor]) -> Tensor:
        expert = piece.expert() if self._has_experts() else None
        return row_numbers(piece.numbers(of_owner), expert, MAX_EXPERTS)

    def _column(self, column: int) -> tuple[int, ...]:
        """A flattened column as an index into the row's own shape: of attention heads, say."""
        piece = self.pieces[0][0]
        shape, size = list(piece.shape), 1
        trailing: list[int] = []
        num_rows = shape[0] if piece.token is None else len(piece.token())
        width = max(1, math.prod(shape) // max(1, num_rows))
        while shape and size < width:
            size *= shape[-1]
            trailing.insert(0, shape.pop())
        if size != width or len(trailing) < 2:
            return (column,)
        return tuple(int(i) for i in torch.unravel_index(torch.tensor(column), tuple(trailing)))

    def _difference(self, left: Tensor, right: Tensor) -> ValueDifference | None:
        if left.dtype != right.dtype:  # of two programs: by value
            left, right = left.double(), right.double()
        return compare_values(*(Numbers.of(self.key.what, each) for each in (left, right)))


def _reason(found: ValueDifference | None) -> str:
    return "" if found is None else f"{found.left!r} against {found.right!r}"


def _layer_of(module: str) -> str:
    """The MoE layer that a router, or something of experts, belongs to."""
    if module.endswith(ROUTER):
        return module.removesuffix(ROUTER)
    return f"{module}.".split(f"{EXPERTS}.")[0].removesuffix(".")


def permutation_faults(side: Side, which: int) -> dict[str, Operator]:
    """MoE layers whose rows of experts are not those that the router chose, in expert order.

    By layer, the first such row. Only where rows say whose they are by what ran (provenance `actual`).
    """
    faults = {}
    for layer, pieces in _expert_pieces(side):
        routing = {
            (piece.owner, what): piece
            for what in ("routing.ids", "routing.slots")
            for piece in side.quantities.get(Key(layer + ROUTER, what), [])
        }
        for piece in pieces:
            ids = routing.get((piece.owner, "routing.ids"))
            slots = routing.get((piece.owner, "routing.slots"))
            known = piece.token is not None and piece.provenance == "actual"
            if layer in faults or ids is None or ids.token is None or slots is None or not known:
                continue
            row = _first_wrong_row(piece, ids, slots)
            if row is None:
                continue
            name, (at, token, expert) = ("left", "right")[which], row
            held = f"is none of {len(piece.token())}"
            if at < len(piece.token()):
                held = f"holds token {piece.token()[at]} for expert {piece.expert()[at]}"
            reason = (
                f"on the {name} side row {at} {held}; the router sends token {token} to expert {expert} "
                "there"
            )
            faults[layer] = Operator(Key(layer + EXPERTS, "permutation"), reason)
    return faults


def _expert_pieces(side: Side) -> Iterator[tuple[str, list[Piece]]]:
    for key, pieces in side.quantities.items():
        if key.module.endswith(EXPERTS + ".linear_fc1") and pieces[0].expert is not None:
            yield _layer_of(key.module), pieces


def _first_wrong_row(piece: Piece, ids: Piece, slots: Piece) -> tuple[int, int, int] | None:
    """(row, token, expert that belong there) of the first row that holds another."""
    row, expert = slots.load().flatten(), ids.load().flatten()
    token = ids.token().repeat_interleave(ids.shape[1])
    kept = row >= 0
    row, expert, token = row[kept], expert[kept], token[kept]
    wrong = row >= len(piece.token())
    held = row.masked_fill(wrong, 0)
    if len(piece.token()):
        wrong |= (piece.token()[held] != token) | (piece.expert()[held] != expert)
    if not wrong.any():
        return None
    at = row[wrong].argmin()
    return int(row[wrong][at]), int(token[wrong][at]), int(expert[wrong][at])
