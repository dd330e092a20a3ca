"""What the page's sliders need: the loaded gaps as sums over segments, exact for every slider position.

The gate asks of a segment its mean gap, how many of its tokens are below the tail threshold, and its sums; of
the lowest gaps the first MAX_TAIL_COUNT decide, since the tail rule is at full strength there. Importance
weights are sums over bins whose edges are the positions of the slider C. assets/whatif.js applies the rules
to these; a test holds its numbers to those of rl/ on the gaps themselves.
"""

import math

import torch
from torch import Tensor

from megatron_nvfp4.rl.layout import Segments

from .mismatch import Gaps, amplifying
from .readers import Responses

MAX_SEGMENTS = 200_000
MAX_RESPONSES = 20_000
MAX_TAIL_COUNT = 8
MAX_TAIL_GAP = -0.5
CAPS = 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0


def thin(responses: Responses, width: int) -> tuple[Responses, int]:
    """(every k-th response, k): k = 1, or what leaves about MAX_SEGMENTS segments and MAX_RESPONSES."""
    num = int(torch.ceil(responses.offsets.diff() / width).sum())
    stride = max(math.ceil(num / MAX_SEGMENTS), math.ceil(responses.num_responses / MAX_RESPONSES))
    if stride <= 1:
        return responses, 1
    return responses.select(torch.arange(0, responses.num_responses, stride)), stride


def caps(gaps: Gaps) -> list[float]:
    """Positions of the slider C: CAPS and the cap in use, if it is at least 1."""
    own = gaps.settings.tis_cap
    return sorted({*CAPS, own} if own >= 1 else CAPS)


def tables(gaps: Gaps) -> dict[str, Tensor]:
    """Sums of the segments (S,) of gate_width, of the responses (N,), and of all tokens.

    segment_offsets (N + 1): segments of each response. num_valid, num_negative, mean, eligible: of each
    segment. low_mass, low_weighted: sums of |A| and of |A| exp(delta) over its tokens of A < 0, delta < 0.
    deep_offsets (S + 1), deep: the lowest gaps of the eligible segments, ascending, those below
    MAX_TAIL_GAP and at most MAX_TAIL_COUNT of each. high_mass, high_weighted (N, B): sums of |A| and of
    |A| exp(delta) over a response's tokens of A > 0, delta > 0, in the bins of exp(delta) between `caps`.
    ratio_count, ratio_sum (B,): all tokens and their exp(delta) in these bins.
    """
    assert gaps.advantages is not None
    gate, responses = gaps.gate, gaps.responses
    real = int(gate.segments.rows.offsets[-1])
    weight = gaps.advantages.abs()
    low, high = amplifying(gaps.delta, gaps.advantages)
    ratio = gaps.delta.exp()
    where = _segment_of_token(gaps, gate.segments)

    def of_segment(values: Tensor) -> Tensor:
        return torch.zeros(real, dtype=torch.float64).index_add_(0, where, values.double())

    num = gate.num_valid[:real]
    deep_offsets, deep = _deepest(gaps, where, real)
    edges = torch.tensor(caps(gaps), dtype=torch.float64)
    cell = torch.searchsorted(edges, ratio)  # the bin b holds edges[b - 1] < exp(delta) <= edges[b]
    num_bins = edges.numel() + 1
    flat = gaps.owner * num_bins + cell

    def of_response(values: Tensor) -> Tensor:
        size = responses.num_responses * num_bins
        total = torch.zeros(size, dtype=torch.float64).index_add_(0, flat, values)
        return total.view(responses.num_responses, num_bins)

    return {
        "segment_offsets": gate.segments.rows.offsets,
        "num_valid": num,
        "num_negative": gate.num_negative[:real],
        "mean": gate.delta_sum[:real] / num.clamp_min(1),
        "eligible": gate.eligible[:real],
        "low_mass": of_segment(torch.where(low, weight, 0)),
        "low_weighted": of_segment(torch.where(low, weight * ratio, 0)),
        "deep_offsets": deep_offsets,
        "deep": deep,
        "high_mass": of_response(torch.where(high, weight, 0)),
        "high_weighted": of_response(torch.where(high, weight * ratio, 0)),
        "ratio_count": torch.bincount(cell, minlength=num_bins).double(),
        "ratio_sum": torch.bincount(cell, ratio, minlength=num_bins),
    }


def _segment_of_token(gaps: Gaps, segments: Segments) -> Tensor:
    """int64 (V,): the segment of each usable token."""
    place = gaps.valid.nonzero().flatten() - gaps.responses.offsets[gaps.owner]
    return segments.rows.offsets[gaps.owner] + place // segments.width


def _deepest(gaps: Gaps, where: Tensor, num: int) -> tuple[Tensor, Tensor]:
    kept = (gaps.delta < MAX_TAIL_GAP) & gaps.gate.eligible[where]
    values, segment = gaps.delta[kept], where[kept]
    order = values.sort(stable=True).indices
    order = order[segment[order].sort(stable=True).indices]
    values, segment = values[order], segment[order]
    first = torch.searchsorted(segment, segment)
    lowest = torch.arange(segment.numel()) - first < MAX_TAIL_COUNT
    counts = torch.bincount(segment[lowest], minlength=num)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]), values[lowest]
