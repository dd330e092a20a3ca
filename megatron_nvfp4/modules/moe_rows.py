"""Where the rows of experts come from and go to, on this rank and on the others that hold experts."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_nvfp4.backends import dispatch
from megatron_nvfp4.quant.layout import expand_groups

from .moe_exchange import ExpertExchange, RowTrip


@dataclass(frozen=True)
class RowPlan:
    """Where every row comes from and goes to.

    send: token of this rank's rows in the order of all experts, -1 for none; rows_of_token (T, top_k) its
    inverse. choice: which element of the probabilities is a row's, the element behind the last for none.
    index, rows_of_source, offsets: as send and rows_of_token, of the rows that this rank's experts compute,
    whose sources are the tokens, or the received rows. trip: None if these are the same rows.
    """

    send: Tensor
    choice: Tensor
    rows_of_token: Tensor
    index: Tensor
    rows_of_source: Tensor
    offsets: Tensor
    trip: RowTrip | None

    @classmethod
    def make(
        cls, chosen: Tensor, num_experts: int, top_k: int | None, exchange: ExpertExchange | None
    ) -> "RowPlan":
        """chosen, top_k: as quant.dispatch.route. num_experts: of this rank.

        ValueError for a token with more than top_k experts, on a CPU; counting would wait for a GPU.
        """
        num_all = exchange.num_experts if exchange else num_experts
        if chosen.device.type == "cpu" and chosen.dtype == torch.bool:
            most = int(chosen.sum(dim=1).max()) if chosen.numel() else 0
            if most > top_k:
                raise ValueError(
                    f"routing map: a token has {most} experts, top_k is {top_k}; give the larger top_k"
                )
        routing = dispatch.route(chosen, num_all, top_k=top_k)
        if exchange is None and chosen.device.type == "cpu":
            # The host knows how many rows there are, and CPU GEMMs insist on it.
            num_rows = int(routing.offsets[-1])
            routing = replace(
                routing,
                token_of_row=routing.token_of_row[:num_rows],
                slot_of_row=routing.slot_of_row[:num_rows],
            )
        send, column, rows = routing.token_of_row, routing.slot_of_row, routing.rows_of_token
        if chosen.dtype == torch.bool:
            experts = torch.arange(num_all, device=chosen.device)
            column = expand_groups(experts, routing.offsets, send.shape[0])
        choice = torch.where(send >= 0, send * chosen.shape[1] + column, chosen.numel())
        if exchange is None:
            return cls(send, choice, rows, send, rows, routing.offsets, None)
        trip = exchange.plan(routing)
        # The rows of dropped choices lie behind these, and do not travel.
        send, choice = send[: sum(trip.sent)], choice[: sum(trip.sent)]
        order = torch.arange(trip.index.shape[0], device=trip.index.device)
        inverse = torch.empty_like(order).scatter_(0, trip.index, order)
        return cls(send, choice, rows, trip.index, inverse[:, None], trip.offsets, trip)

    def to_rows(self, probs: Tensor) -> Tensor:
        """FP32 probabilities in the shape of `chosen` to (rows sent,); 0 for a row of no token."""
        return torch.nn.functional.pad(probs.flatten(), (0, 1))[self.choice]

    def from_rows(self, values: Tensor, shape: torch.Size) -> Tensor:
        """The other way: FP32 (rows sent,) to `shape`; 0 for what is not a row."""
        flat = values.new_zeros(shape.numel() + 1)
        return flat.scatter_(0, self.choice, values)[:-1].view(shape)

    def tensors(self) -> list[Tensor]:
        """All but the trip, in the constructor's order."""
        return [getattr(self, name) for name in PLAN_TENSORS]


PLAN_TENSORS = ("send", "choice", "rows_of_token", "index", "rows_of_source", "offsets")
