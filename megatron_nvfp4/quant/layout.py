"""Where the bytes lie: code packing, the 128x4 scale layout of tensor cores, row groups and their padding."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALE_ROWS, SCALE_COLS = 128, 4


def pack_codes(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 (M, K) to bytes (M, K/2), even column in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """Inverse of pack_codes."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).reshape(
        *packed.shape[:-1], packed.shape[-1] * 2
    )


def swizzled_shape(num_rows: int, num_cols: int) -> tuple[int, int]:
    """(rows, columns) of a scale matrix padded to whole 128x4 tiles."""
    rows = -(-num_rows // SCALE_ROWS) * SCALE_ROWS
    return rows, -(-num_cols // SCALE_COLS) * SCALE_COLS


def swizzle_scales(scales: Tensor) -> Tensor:
    """Scales (..., R, C), any 1-byte dtype, to the 128x4 layout; padding is 0.

    Returns (..., R', C') with R', C' the padded sizes, whose flat memory holds scale (r, c) at
    ((r/128 * C'/4 + c/4) * 32 + r%32) * 16 + (r%128)/32 * 4 + c%4 (cuBLAS and CUTLASS block-scaled GEMMs).
    """
    *lead, num_rows, num_cols = scales.shape
    rows, cols = swizzled_shape(num_rows, num_cols)
    padded = torch.zeros(*lead, rows, cols, dtype=torch.uint8, device=scales.device)
    padded[..., :num_rows, :num_cols] = scales.view(torch.uint8)
    tiles = padded.reshape(*lead, rows // 128, 4, 32, cols // 4, 4)
    # (row tile, row/32, row%32, column tile, column) -> (row tile, column tile, row%32, row/32, column)
    swizzled = tiles.movedim((-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1))
    return swizzled.reshape(*lead, rows, cols).view(scales.dtype)


def unswizzle_scales(swizzled: Tensor, num_rows: int, num_cols: int) -> Tensor:
    """Inverse of swizzle_scales: (..., R', C') back to (..., num_rows, num_cols)."""
    *lead, rows, cols = swizzled.shape
    if (rows, cols) != swizzled_shape(num_rows, num_cols):
        raise ValueError(
            f"unswizzle_scales: {rows}x{cols} is not the padded form of {num_rows}x{num_cols}, "
            f"which is {swizzled_shape(num_rows, num_cols)}"
        )
    tiles = swizzled.view(torch.uint8).reshape(*lead, rows // 128, cols // 4, 32, 4, 4)
    padded = tiles.movedim((-5, -4, -3, -2, -1), (-5, -2, -3, -4, -1)).reshape(*lead, rows, cols)
    return padded[..., :num_rows, :num_cols].contiguous().view(swizzled.dtype)


def offsets_from_splits(splits: Sequence[int] | Tensor, device: torch.device | str) -> Tensor:
    """Rows per group (G,) to row boundaries (G+1,), int64 on `device`, without waiting for a GPU.

    ValueError for splits of the host while a CUDA graph is captured: its replays would read host memory.
    """
    device = torch.device(device)
    if isinstance(splits, Tensor) and splits.device.type != "cpu":
        offsets = torch.zeros(splits.numel() + 1, dtype=torch.int64, device=device)
        torch.cumsum(splits, 0, out=offsets[1:])
        return offsets
    is_cuda = device.type == "cuda"
    if is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "offsets_from_splits: splits of the host in a CUDA graph; give a GPU tensor"
        )
    sizes = splits.tolist() if isinstance(splits, Tensor) else splits
    bounds = [0, *accumulate(sizes)]
    offsets = torch.tensor(bounds, dtype=torch.int64, pin_memory=is_cuda)
    return offsets.to(device, non_blocking=True)


def dense_offsets(num_rows: int, device: torch.device | str) -> Tensor:
    """Boundaries (2,) of one group that holds all rows, to be read only; nothing is copied from the host.

    On a GPU a row of a table where it has one: a launch takes a tenth of a small product's time. The first
    call waits until the table is there.
    """
    device = torch.device(device)
    if device.type == "cuda" and num_rows < _TABLED_ROWS and not torch.compiler.is_compiling():
        table = _table(torch.cuda.current_device() if device.index is None else device.index)
        if table is not None:
            return table[num_rows]
    if num_rows == 0:
        return torch.zeros(2, dtype=torch.int64, device=device)
    return torch.arange(0, num_rows + 1, num_rows, device=device)


_TABLED_ROWS = 1 << 16
_tables: dict[int, Tensor] = {}  # by GPU, kept: graphs have their addresses


def _table(index: int) -> Tensor | None:
    """Row n is (0, n); None while it cannot be made: a graph under capture would fill it when it is replayed,
    and modes of torch that compute nothing have tensors of their own.
    """
    if index not in _tables:
        with torch.inference_mode(False), torch.cuda.device(index):
            if torch.cuda.is_current_stream_capturing():
                return None
            ends = torch.arange(_TABLED_ROWS, device="cuda")
            table = torch.stack([torch.zeros_like(ends), ends], 1)
            if type(table) is not Tensor:
                return None
            torch.cuda.current_stream().synchronize()  # other streams read it too
        _tables.setdefault(index, table)  # of two threads' the first
    return _tables[index]


def check_offsets(offsets: Tensor, num_rows: int) -> None:
    """ValueError unless offsets are integers (G+1,) that rise from 0 to num_rows.

    Values on a GPU are trusted: reading them would synchronise.
    """
    fits = offsets.dim() == 1 and offsets.numel() > 0
    if not fits or offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise ValueError(
            f"offsets are {offsets.dtype} {tuple(offsets.shape)}; give integers (G+1,) from 0 to M"
        )
    if offsets.device.type == "cpu":
        bounds = offsets.tolist()
        if bounds[0] != 0 or bounds[-1] != num_rows or bounds != sorted(bounds):
            raise ValueError(f"offsets {bounds} do not rise from 0 to the {num_rows} rows")


def expand_groups(values: Tensor, offsets: Tensor, num_rows: int) -> Tensor:
    """One value per group (G,) to one per row (num_rows,), without host synchronisation.

    Rows behind the last group get its value.
    """
    rows = torch.arange(num_rows, device=values.device)
    # Right-sided search skips empty groups: row r belongs to the last group that starts at or before r.
    group = torch.searchsorted(offsets[1:].contiguous(), rows, right=True)
    return values[group.clamp_max_(values.shape[0] - 1)]


def pad_groups(
    x: Tensor, offsets: Tensor, multiple: int, splits: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Complete every row group of x (M, K) by zero rows to a multiple of `multiple` rows.

    splits: rows of every group, where the host knows them.
    Returns (padded (M', K), offsets (G+1,)). An empty group stays empty. On a GPU without splits M' is the
    most it can be, to spare a synchronisation: the rows behind the last group are zeros of no group.
    """
    num_groups = offsets.numel() - 1
    splits = splits_of_host(offsets) if splits is None else splits
    sizes = offsets[1:] - offsets[:-1]
    padded_sizes = (sizes + (multiple - 1)).div(multiple, rounding_mode="floor") * multiple
    padded_offsets = offsets_from_splits(padded_sizes, x.device)
    if splits is None:
        num_padded = _round_up(x.shape[0] + num_groups * (multiple - 1), multiple)
    else:
        num_padded = sum(_round_up(size, multiple) for size in splits)
        if num_padded == x.shape[0]:
            return x, padded_offsets
    if x.shape[0] == 0:
        return x.new_zeros(num_padded, x.shape[1]), padded_offsets
    rows = torch.arange(num_padded, device=x.device)
    shift = expand_groups(offsets[:-1] - padded_offsets[:-1], padded_offsets, num_padded)
    end = expand_groups(offsets[1:], padded_offsets, num_padded)
    source = rows + shift
    padded = x[source.clamp_max(x.shape[0] - 1)]
    return padded.masked_fill_((source >= end)[:, None], 0), padded_offsets


def splits_of_host(offsets: Tensor) -> list[int] | None:
    """Rows of every group, None where asking would wait for a GPU."""
    return (offsets[1:] - offsets[:-1]).tolist() if offsets.device.type == "cpu" else None


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
