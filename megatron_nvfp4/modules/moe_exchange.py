"""Rows of experts between the ranks of an expert-parallel group: one message each way, of bytes.

A row travels as the bytes of all that belongs to it side by side: codes, block scales, amax and probability,
or a BF16 gradient. The sizes of messages are the host's to know, so a plan waits for the GPU once.
"""

from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nvfp4.quant.dispatch import Routing


@dataclass(frozen=True)
class ExpertExchange:
    """The ranks of `group` hold equal shares of `num_experts` experts, in order of rank."""

    group: dist.ProcessGroup
    num_experts: int

    def plan(self, routing: Routing) -> "RowTrip":
        """The trip of rows in the order of `routing`: this rank's tokens, the experts of all ranks.

        A collective call, as both ways of the trip are: every rank of the group makes it, also without rows.
        """
        num_ranks = dist.get_world_size(self.group)
        num_local = self.num_experts // num_ranks
        counts = routing.offsets.diff()
        gathered = counts.new_empty(num_ranks, self.num_experts)
        dist.all_gather_into_tensor(gathered.view(-1), counts, group=self.group)
        first = dist.get_rank(self.group) * num_local
        rows_to = counts.view(num_ranks, num_local).sum(dim=1)
        # [rank, local expert]: the rows that this rank receives, in the order of their arrival.
        arriving = gathered[:, first : first + num_local]
        sizes = torch.cat([rows_to, arriving.flatten()]).tolist()
        sent, arrived = sizes[:num_ranks], sizes[num_ranks:]
        received = [sum(arrived[r * num_local : (r + 1) * num_local]) for r in range(num_ranks)]
        offsets = torch.nn.functional.pad(arriving.sum(dim=0).cumsum(0), (1, 0))
        return RowTrip(self.group, sent, received, offsets, _by_expert(arriving, sum(received)))


def _by_expert(arriving: Tensor, num_rows: int) -> Tensor:
    """Which arriving row stands where when ordered by expert, then by rank: int64 (num_rows,)."""
    start = (arriving.flatten().cumsum(0) - arriving.flatten()).view(arriving.shape)
    sizes = arriving.t().flatten()
    shift = start.t().flatten() - (sizes.cumsum(0) - sizes)
    rows = torch.arange(num_rows, device=arriving.device)
    return rows + torch.repeat_interleave(shift, sizes, output_size=num_rows)


@dataclass(frozen=True)
class RowTrip:
    """The way of one layer's rows to the ranks that hold their experts, and back.

    sent, received: rows to and from every rank. offsets: (G+1,) of this rank's experts. index: (M,) which
    received row stands where in their order.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    offsets: Tensor
    index: Tensor

    def there(self, *columns: Tensor) -> tuple[Tensor, ...]:
        """Each (rows sent, ...) to (rows received, ...), as one message.

        From the order of this rank's routing, without the rows of no token, to that of their arrival.
        """
        return self._carry(columns, self.sent, self.received)

    def back(self, *columns: Tensor) -> tuple[Tensor, ...]:
        """The other way."""
        return self._carry(columns, self.received, self.sent)

    def _carry(self, columns, sent: list[int], received: list[int]) -> tuple[Tensor, ...]:
        num_rows = sum(sent)
        parts = [_as_bytes(column[:num_rows]) for column in columns]
        message = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        arrived = message.new_empty(sum(received), message.shape[1])
        dist.all_to_all_single(arrived, message, received, sent, group=self.group)
        return tuple(
            part.contiguous().view(column.dtype).view(-1, *column.shape[1:])
            for part, column in zip(
                arrived.split([part.shape[1] for part in parts], dim=1), columns, strict=True
            )
        )


def _as_bytes(column: Tensor) -> Tensor:
    return column.reshape(column.shape[0], prod(column.shape[1:])).view(torch.uint8)
