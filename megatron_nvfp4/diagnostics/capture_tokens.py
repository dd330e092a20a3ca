"""Which microbatch is running, and whose the rows of its tensors are."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .dump import DumpWriter


class Microbatches:
    """Follows the top-level module of one pipeline chunk through a step.

    A module that runs outside its forward is being recomputed for the backward: its microbatches come in
    order, so they are counted.
    """

    def __init__(self, writer: DumpWriter, coordinates: Mapping[str, Any]) -> None:
        self.writer, self.coordinates = writer, coordinates
        self.number, self.in_forward = -1, False
        self.routes: dict[tuple[int, str], Tensor] = {}
        self._again: dict[tuple[str, str], int] = {}
        self._tables: set[str] = set()
        self._shapes: dict[int, tuple[int, int]] = {}

    def begin(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Pre-hook of the top-level module."""
        self.number += 1
        self.in_forward = True
        ids = kwargs.get("input_ids", args[0] if args else None)
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        if _is_matrix(ids) and _is_matrix(positions):
            self._shapes[self.number] = tuple(ids.shape)
            self.writer.add_tokens(self.number, ids, positions.expand_as(ids))

    def end(self) -> None:
        self.in_forward = False

    def instance(self, name: str, site: str) -> tuple[int, bool]:
        """Microbatch of a call of the module `name`, and whether it is a repetition."""
        if self.in_forward:
            return self.number, False
        count = self._again.get((name, site), -1) + 1
        self._again[name, site] = count
        return count, True

    def rows_of(self, x: Tensor, instance: int) -> str | None:
        """Table of a tensor (S, B, ...) or (S*B, ...) of a microbatch, S/TP instead of S for a shard of
        sequence parallelism, or (B, S, ...); None for any other."""
        if instance not in self._shapes:
            return None
        batch, length = self._shapes[instance]
        if x.dim() > 2 and x.shape[:2] == (batch, length) and batch != length:
            return self.rows_by_batch(instance)
        parts, part = self.coordinates.get("tp_size", 1), self.coordinates.get("tp_rank", 0)
        if x.dim() > 2 and x.shape[1] == batch:
            num_steps = x.shape[0]
        elif x.dim() == 2 and x.shape[0] % batch == 0:
            num_steps = x.shape[0] // batch
        else:
            return None
        if num_steps == length:
            return self._by_position(instance, 0, length, "sb")
        if parts > 1 and num_steps * parts == length:
            return self._by_position(instance, part * num_steps, num_steps, f"sb.{part}")
        return None

    def rows_by_batch(self, instance: int) -> str | None:
        """Table of a tensor (B, S, ...)."""
        if instance not in self._shapes:
            return None
        batch, length = self._shapes[instance]
        return self._table(f"{instance}.bs", lambda: (torch.arange(batch * length), None))

    def rows_of_next(self, instance: int) -> str | None:
        """Table of what (B, S) says of the tokens behind; the last of a sequence speaks of none here."""
        if instance not in self._shapes:
            return None
        batch, length = self._shapes[instance]

        def table() -> tuple[Tensor, None]:
            following = torch.arange(1, batch * length + 1).view(batch, length)
            following[:, -1] = -1
            return following.flatten(), None

        return self._table(f"{instance}.next", table)

    def rows_of_experts(
        self, layer: str, instance: int, token: Tensor | None, expert: Tensor
    ) -> str | None:
        """Table of rows of the experts of the MoE layer `layer`.

        token: place of a row's token in (S, B) order, -1 for none; None where rows come from all ranks of the
        expert-parallel group, by local expert, then by rank. expert: its number in the model.
        """
        if instance not in self._shapes:
            return None
        if token is None:
            return self._table(f"{instance}.{layer}", lambda: (None, expert))
        batch, length = self._shapes[instance]
        by_batch = torch.where(token < 0, token, token % batch * length + token // batch)
        return self._table(f"{instance}.{layer}", lambda: (by_batch, expert))

    def _by_position(self, instance: int, first: int, num: int, suffix: str) -> str:
        batch, length = self._shapes[instance]

        def table() -> tuple[Tensor, None]:
            position = torch.arange(first, first + num)[:, None]
            return (torch.arange(batch) * length + position).flatten(), None

        return self._table(f"{instance}.{suffix}", table)

    def _table(self, name: str, make) -> str:
        if name not in self._tables:
            self._tables.add(name)
            self.writer.add_rows(name, *make())
        return name


def _is_matrix(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 2 and not x.is_floating_point()


def experts_of_map(routing_map: Tensor, probs: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Experts of every token in ascending order, their weights and rows: (T, top_k) each.

    routing_map: bool (T, E); probs (T, E). -1, 0 and -1 for a token with fewer experts. Rows are those of all
    choices ordered by expert, then by token.
    """
    ids = routing_map.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :top_k]
    is_chosen = routing_map.gather(1, ids)
    counts = routing_map.long().cumsum(dim=0)
    starts = counts[-1].cumsum(0) - counts[-1] if len(counts) else counts.new_zeros(ids.shape[1])
    rows = (starts + counts - 1).gather(1, ids) if len(counts) else ids
    weights = torch.where(is_chosen, probs.gather(1, ids), 0)
    return torch.where(is_chosen, ids, -1), weights, torch.where(is_chosen, rows, -1)
