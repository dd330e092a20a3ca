"""Tokens of responses, padded or ragged, and sums over their segments and responses.

Padded: (N, T), one response a row. Ragged: (T,) with offsets (N + 1), response i at offsets[i]:offsets[i +
1]. A segment is a run of W positions of one response, counted from its first token; masked tokens keep
their position, the last segment may be short, and no segment crosses from one response to the next.

Sums add halves onto halves until one value is left, at fixed positions. The bits of a sum therefore depend
on the response alone: not on the layout, on padding, on the other responses or on the device. Nothing here
reads a tensor on the host, except `check_offsets` offsets that lie on the CPU and `check_finite` what it is
given.
"""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

SUM_WIDTH = 64  # values added at a time where segments are summed to responses


class Layout:
    """Where the responses lie: shape (N, T) without offsets, or (T,) with int64 offsets (N + 1).

    complete: whether every token is known to belong to a response.
    """

    def __init__(
        self, shape: tuple[int, ...], offsets: Tensor | None = None, complete: bool = True
    ) -> None:
        self.shape, self.offsets, self.complete = shape, offsets, complete
        self._segments: dict[int, Segments] = {}

    @property
    def num_responses(self) -> int:
        return self.shape[0] if self.offsets is None else self.offsets.numel() - 1

    def valid(self, mask: Tensor) -> Tensor:
        """The mask as bool; False where a token belongs to no response."""
        valid = mask if mask.dtype == torch.bool else mask != 0
        if self.complete:
            return valid
        return valid & (torch.arange(self.shape[0], device=mask.device) < self.offsets[-1])

    def segments(self, width: int) -> "Segments":
        """The segments of that width, made once."""
        if width not in self._segments:
            self._segments[width] = Segments(self.shape, self.offsets, self.complete, width)
        return self._segments[width]

    def sum_responses(self, values: Tensor) -> Tensor:
        """(N,): the sum of each response's values; 0 for a response without any."""
        layout, longest = self, self.shape[-1]
        while longest > 1:
            segments = layout.segments(SUM_WIDTH)
            values = segments.total(values)
            layout, longest = segments.rows, -(-longest // SUM_WIDTH)
        if longest == 0 or layout.num_responses == 0:
            return values.new_zeros(self.num_responses)
        if layout.offsets is None:
            return values[:, 0]
        first, end = layout.offsets[:-1], layout.offsets[1:]
        picked = values[first.clamp(0, values.numel() - 1)]
        return torch.where(end > first, picked, 0)


class Segments:
    """The segments of a layout and the grid of their tokens.

    rows: the layout of one value a segment, shape R. inside: None, or bool R + (W,), False where a place of
    the grid holds no token of its segment. A ragged layout has room for more segments than it may
    hold, since how many there are is known on the device only; the spare ones hold no token.
    """

    def __init__(
        self, shape: tuple[int, ...], offsets: Tensor | None, complete: bool, width: int
    ) -> None:
        # Not the layout itself, which keeps its segments: a cycle would hold the index until a collection.
        self.shape, self.offsets, self.complete, self.width = shape, offsets, complete, width
        self.inside: Tensor | None = None
        if offsets is None:
            self.rows = Layout((shape[0], -(-shape[1] // width)))
        else:
            self._place_ragged(offsets, width)

    def _place_ragged(self, offsets: Tensor, width: int) -> None:
        total, num = self.shape[0], offsets.numel() - 1
        num_rows = min(total, total // width + num) if num else 0
        row_offsets = torch.zeros_like(offsets)
        row_offsets[1:] = (offsets.diff() + (width - 1)).div(width, rounding_mode="floor").cumsum(0)
        self.rows = Layout((num_rows,), row_offsets, complete=False)
        row = torch.arange(num_rows, device=offsets.device)
        response = (
            torch.searchsorted(row_offsets, row, right=True).sub_(1).clamp_(0, max(num - 1, 0))
        )
        self.row_response = response
        start = offsets[response] + (row - row_offsets[response]) * width
        length = torch.where(row < row_offsets[-1], offsets[response + 1] - start, 0)
        place = torch.arange(width, device=offsets.device)
        self.inside = place < length[:, None]
        self._index = (start[:, None] + place).clamp_(0, max(total - 1, 0)).flatten()

    @cached_property
    def _slot(self) -> Tensor:
        """Where in the flat grid each token lies: a constant away from its index within a response."""
        offsets, total = self.offsets, self.shape[0]
        shift = self.rows.offsets[:-1] * self.width - offsets[:-1]
        steps = torch.zeros(total + 1, dtype=torch.int64, device=offsets.device)
        first = torch.zeros_like(shift[:1])
        steps.index_add_(0, offsets[:-1].clamp(0, total), shift.diff(prepend=first))
        slot = steps[:total].cumsum(0).add_(torch.arange(total, device=offsets.device))
        return slot.clamp_(0, max(self._index.numel() - 1, 0))

    def gather(self, values: Tensor) -> Tensor:
        """R + (W,): the tokens' values in the grid; what stands outside `inside` is arbitrary."""
        if self.offsets is not None:
            return values.index_select(0, self._index).view(*self.rows.shape, self.width)
        missing = self.rows.shape[1] * self.width - self.shape[1]
        padded = F.pad(values, (0, missing)) if missing else values
        return padded.reshape(*self.rows.shape, self.width)

    def gather_mask(self, valid: Tensor) -> Tensor:
        """R + (W,): the mask in the grid, False where there is no token."""
        grid = self.gather(valid)
        return grid if self.inside is None else grid & self.inside

    def scatter(self, grid: Tensor, fill: float) -> Tensor:
        """The grid's values at the tokens; `fill` where a token belongs to no response."""
        num_tokens = self.shape[-1]
        if self.offsets is None:
            num, per_response = self.rows.shape
            return grid.reshape(num, per_response * self.width)[:, :num_tokens]
        if grid.numel() == 0:
            return grid.new_full((num_tokens,), fill)
        values = grid.reshape(-1).index_select(0, self._slot)
        if self.complete:
            return values
        place = torch.arange(num_tokens, device=grid.device)
        return torch.where(place < self.offsets[-1], values, fill)

    def spread(self, per_response: Tensor) -> Tensor:
        """R: at each segment the value (N,) of its response; arbitrary at spare segments."""
        if self.offsets is None:
            return per_response[:, None].expand(self.rows.shape)
        return per_response.index_select(0, self.row_response)

    def total(self, values: Tensor) -> Tensor:
        """R: the sum of all values of each segment."""
        grid = self.gather(values)
        return fold(grid if self.inside is None else torch.where(self.inside, grid, 0))

    def sums(self, values: Tensor, valid: Tensor) -> Tensor:
        """R: the sum of the valid tokens' values in each segment, differentiable in them."""
        return _SegmentSum.apply(values, valid, self)


class _SegmentSum(torch.autograd.Function):
    """Segments.sums: a masked token gets the gradient 0, whatever it or its segment holds."""

    @staticmethod
    def forward(ctx, values: Tensor, valid: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        ctx.save_for_backward(valid)
        return fold(torch.where(segments.gather_mask(valid), segments.gather(values), 0))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (valid,) = ctx.saved_tensors
        segments = ctx.segments
        grid = grad[..., None].expand(*grad.shape, segments.width)
        return torch.where(valid, segments.scatter(grid, 0.0), 0), None, None


def fold(grid: Tensor) -> Tensor:
    """Sums the last dimension by adding its second half onto its first until one value is left."""
    width = grid.shape[-1]
    if width == 0:
        return grid.new_zeros(grid.shape[:-1])
    while width > 1:
        half = -(-width // 2)
        folded = grid[..., : width - half] + grid[..., half:width]
        if width % 2:
            folded = torch.cat([folded, grid[..., width - half : half]], -1)
        grid, width = folded, half
    return grid[..., 0]


def count(mask: Tensor) -> Tensor:
    """Number of True values in the last dimension: uint8 up to 255 of them, else int32."""
    small = mask.shape[-1] <= 255
    return fold(mask.view(torch.uint8) if small else mask.to(torch.int32))


def token_layout(offsets: Tensor | None, mask: Tensor, **values: Tensor) -> Layout:
    """Checks that the tensors describe the same tokens and returns their layout.

    values and mask: (N, T), or (T,) with offsets; values floating point, mask bool or 0 and 1.
    offsets: int64 or int32 (N + 1) from 0 to T, not falling. On the CPU its values are checked. On a
    device they are trusted, so that the host need not wait; tokens past offsets[N] then count as masked.
    Raises ValueError naming the tensor, what it is and the remedy.
    """
    num_dims = 2 if offsets is None else 1
    name, first = next(iter(values.items()))
    if first.dim() != num_dims:
        form = "(N, T), or (T,) together with offsets" if offsets is None else "(T,) with offsets"
        raise ValueError(f"{name} has shape {tuple(first.shape)}; give {form}")
    for other, tensor in {**values, "mask": mask}.items():
        if tensor.shape != first.shape:
            raise ValueError(
                f"{other} has shape {tuple(tensor.shape)} and {name} {tuple(first.shape)}; give one value "
                "a token (a value per response: expand it, or repeat_interleave it by the lengths)"
            )
        if tensor.device != first.device:
            raise ValueError(
                f"{other} is on {tensor.device} and {name} on {first.device}; move one of them"
            )
        if other != "mask" and not tensor.is_floating_point():
            raise ValueError(f"{other} is {tensor.dtype}; give float32, bfloat16 or float64")
    if offsets is None:
        return Layout(tuple(first.shape))
    check_offsets(offsets, first.numel())
    complete = offsets.device.type == "cpu"
    offsets = offsets.to(device=first.device, dtype=torch.int64, non_blocking=True)
    return Layout(tuple(first.shape), offsets, complete)


def check_offsets(offsets: Tensor, num_tokens: int) -> None:
    """Raises ValueError unless offsets are 1-D integers that, if on the CPU, rise from 0 to num_tokens."""
    if (
        offsets.dim() != 1
        or offsets.numel() == 0
        or offsets.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(
            f"offsets are {offsets.dtype} {tuple(offsets.shape)}; give int64 (N + 1), "
            "0 followed by the cumulative lengths"
        )
    if offsets.device.type != "cpu":
        return
    ends = offsets[0].item(), offsets[-1].item()
    if ends != (0, num_tokens):
        raise ValueError(
            f"offsets go from {ends[0]} to {ends[1]} over {num_tokens} tokens; "
            f"give offsets from 0 to {num_tokens}"
        )
    falls = (offsets.diff() < 0).nonzero()
    if falls.numel():
        i = int(falls[0])
        raise ValueError(
            f"offsets[{i + 1}]={offsets[i + 1]} is below offsets[{i}]={offsets[i]}; "
            "give 0 followed by the cumulative lengths"
        )


def check_finite(mask: Tensor, *, offsets: Tensor | None = None, **values: Tensor) -> None:
    """Raises ValueError naming response and token of the first NaN or infinity at a valid token.

    Layouts as token_layout takes them. Masked tokens may hold anything. Reads the tensors on the host,
    which waits for the device: meant for once per update, where log-probs enter; the functions of this
    package do not call it.
    """
    layout = token_layout(offsets, mask, **values)
    valid = layout.valid(mask)
    for name, tensor in values.items():
        bad = valid & ~torch.isfinite(tensor)
        if not bad.any():
            continue
        where = bad.nonzero()[0]
        if layout.offsets is None:
            response, token = where.tolist()
        else:
            response = int(torch.searchsorted(layout.offsets, where[0], right=True)) - 1
            token = int(where[0] - layout.offsets[response])
        raise ValueError(
            f"{name} of response {response}, token {token}, is {tensor[tuple(where)].item()} and not "
            f"masked ({int(bad.sum())} such values); mask the token or fix where the value comes from"
        )


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any of the tensors is, else float32: the type in which segments are summed."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32
