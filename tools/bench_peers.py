"""Our CUDA quantisers against other projects' on the same tensors, in the same process.

Peers are FlashInfer's CUDA kernels and fouroversix's Triton kernels, each through a public function and only
if it can be imported. A peer is timed when most bytes it writes are ours: its formulas round differently
here and there, but a function that does other work, or none on this GPU, is named and left out.
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import bench
import torch

from megatron_nvfp4.quant import nvfp4
from megatron_nvfp4.recipes import NVFP4Spec

FIELDS = ("peer", "version", "computes", "ours_computes", "equal", "timing", "peer_us", "ratio")
SHAPES = ((32768, 2048), (131072, 2048), (32768, 768), (4096, 2048))
SEARCH = NVFP4Spec(e4m3_max=256, four_over_six="mse")
TOKEN_SEARCH = replace(SEARCH, outer="token")
GIVEN = "one given scale -> block scales, codes"
OWN = "tensor amax, block scales, codes"
ROWS = "row amax, block scales, codes"
MIN_EQUAL = 0.8

# A call returns (codes (M, K/2), block scales as it lays them out).
Call = Callable[[], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Comparison:
    """A peer's function and the cases of ours it stands beside.

    same: does the same work and must write (nearly) the same bytes. token: the per-token case that serves
    the same purpose and also finds each row's amax, or None where `same` is per token already.
    build(x, amax, swizzled): the peer's variants by name, of which the fastest counts.
    """

    peer: str
    computes: str
    same: bench.Case
    token: bench.Case | None
    build: Callable[[torch.Tensor, torch.Tensor, bool], dict[str, Call]]


def flashinfer_given(x: torch.Tensor, amax: torch.Tensor, swizzled: bool) -> dict[str, Call]:
    import flashinfer

    s_enc = nvfp4.encode_scale(amax)
    return {
        "fp4_quantize": lambda: flashinfer.fp4_quantize(x, s_enc, is_sf_swizzled_layout=swizzled)
    }


def flashinfer_token(x: torch.Tensor, amax: torch.Tensor, swizzled: bool) -> dict[str, Call]:
    import flashinfer

    layout = flashinfer.SfLayout.layout_128x4 if swizzled else flashinfer.SfLayout.layout_linear

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return flashinfer.nvfp4_quantize(x, 1 / 2688, sfLayout=layout, per_token_activation=True)[
            :2
        ]

    return {"nvfp4_quantize": call}


def flashinfer_append(x: torch.Tensor, amax: torch.Tensor, swizzled: bool) -> dict[str, Call]:
    """Half of each row as keys, half as values, written where our kernel would write them."""
    from flashinfer.page import nvfp4_quantize_append_paged_kv_cache_with_slot_mapping as append

    num_rows, num_cols = x.shape
    page = 16
    slots = torch.arange(num_rows, dtype=torch.int32, device=x.device)
    s_dec = nvfp4.decode_scale(nvfp4.encode_scale(amax))
    codes = torch.empty(num_rows, num_cols // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(num_rows, num_cols // 16, dtype=torch.float8_e4m3fn, device=x.device)

    def variant(head_dim: int) -> Call:
        def halves(matrix: torch.Tensor, per_head: int) -> tuple[torch.Tensor, ...]:
            return tuple(half.unflatten(1, (-1, per_head)) for half in matrix.chunk(2, dim=1))

        def pages(matrix: torch.Tensor, per_head: int) -> tuple[torch.Tensor, ...]:
            return tuple(half.unflatten(0, (-1, page)) for half in halves(matrix, per_head))

        key, value = halves(x, head_dim)
        cache, cache_scales = pages(codes, head_dim // 2), pages(scales, head_dim // 16)

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            append(key, value, slots, cache, cache_scales, s_dec, s_dec)
            return codes, scales

        return call

    heads = (head_dim for head_dim in (64, 128, 256, 512) if num_cols // 2 % head_dim == 0)
    name = "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
    return {f"{name} head_dim={head_dim}": variant(head_dim) for head_dim in heads}


def fouroversix_rule(rule: str, given: bool) -> Callable[..., dict[str, Call]]:
    def build(x: torch.Tensor, amax: torch.Tensor, swizzled: bool) -> dict[str, Call]:
        from fouroversix.kernels.triton import quantize
        from fouroversix.utils import ScaleRule

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            return quantize(x, amax if given else None, scale_rule=ScaleRule(rule))[:2]

        return {f"kernels.triton.quantize {rule}": call}

    return build


def case(spec: NVFP4Spec, *, swizzled: bool, given: bool = False) -> bench.Case:
    """`given`: the amax is an input; otherwise per-tensor specs read x twice."""
    op = f"per-{spec.outer}" + (" swizzled" if swizzled else "") + (" given amax" if given else "")
    reads = 2 if spec.outer == "tensor" and not given else 1
    return bench.Case(op, spec, SHAPES[0], reads=reads, swizzled=swizzled, given_amax=given)


def comparisons() -> Iterator[Comparison]:
    linear, swizzled = (
        (case(bench.TENSOR, swizzled=s, given=True), case(bench.TOKEN, swizzled=s))
        for s in (False, True)
    )
    yield Comparison("flashinfer", GIVEN, *linear, flashinfer_append)
    for rule, tensor, token in (
        ("static_6", bench.TENSOR, bench.TOKEN),
        ("mse", SEARCH, TOKEN_SEARCH),
    ):
        for given, computes in ((True, GIVEN), (False, OWN)):
            yield Comparison(
                "fouroversix",
                computes,
                case(tensor, swizzled=True, given=given),
                case(token, swizzled=True),
                fouroversix_rule(rule, given),
            )
    for given, token in (linear, swizzled):
        yield Comparison("flashinfer", GIVEN, given, token, flashinfer_given)
        yield Comparison("flashinfer", ROWS, token, None, flashinfer_token)


def rows(only: str) -> Iterator[dict[str, object]]:
    """One row per comparison, shape and case of ours; `only` selects cases of ours by op.

    ratio: the peer's time over ours. Each side's calls rotate over the same number of inputs; a peer that
    allocates its outputs finds them in the cache where ours are not.
    """
    fixed = bench.machine()
    torch.manual_seed(0)
    for one in comparisons():
        wanted = [c for c in (one.same, one.token) if c is not None and only in c.op]
        for shape in SHAPES if wanted else ():
            torch.cuda.empty_cache()
            try:
                peer = measure_peer(one, shape)
            except Exception as error:  # a peer may fail in any way; the others still count
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                what = f"{one.peer} ({one.computes}; ours: {one.same.op})"
                print(f"{what}, not measured: {text}", file=sys.stderr)
                break
            for case in wanted:
                yield fixed | beside(one, replace(case, shape=shape), peer)


def measure_peer(one: Comparison, shape: tuple[int, int]) -> dict[str, object]:
    """The peer's columns; RuntimeError if what it writes is not what ours does."""
    same = replace(one.same, shape=shape)
    sets = input_sets(same)
    peers = [one.build(x, amax, same.swizzled) for x, amax, _ in sets]
    variants = {name: [peer[name] for peer in peers] for name in peers[0]}
    equal = {name: equal_share(same, sets[0], calls[0]) for name, calls in variants.items()}
    worst = min(equal, key=equal.get)
    if equal[worst] < MIN_EQUAL:
        gpu = torch.cuda.get_device_name()
        raise RuntimeError(f"{worst}: {equal[worst]:.1%} of its bytes are ours on {gpu}")
    timing, times = time_variants(variants)
    best = min(times, key=times.get)
    return {
        "peer": f"{one.peer}.{best}",
        "version": sys.modules[one.peer].__version__,
        "computes": one.computes,
        "equal": round(equal[best], 4),
        "timing": timing,
        "peer_us": round(times[best], 2),
    }


def beside(one: Comparison, case: bench.Case, peer: dict[str, object]) -> dict[str, object]:
    """Our row of the table with the peer's columns."""
    row = bench.measure(case, with_reference=False)
    if peer["timing"] == "events":  # both sides by the same clock
        calls = [
            lambda x=x, out=out: bench.run(case, x, None, out) for x, _, out in input_sets(case)
        ]
        row |= {"us": round(events_us(calls), 2), "gb_per_s": "", "of_copy": ""}
    more = one.token is not None and case.spec.outer == "token"
    ratio = {"ratio": round(peer["peer_us"] / row["us"], 2)}
    return row | peer | {"ours_computes": ROWS if more else one.computes} | ratio


def input_sets(case: bench.Case) -> list[tuple[torch.Tensor, torch.Tensor, bench.cuda.Buffers]]:
    """(x, its amax, our output) often enough that no cache holds every x."""
    sets = []
    while not sets or len(sets) <= min(15, bench.CACHE_BYTES // sets[0][0].nbytes):
        x, _, out = bench.prepare(case)
        amax = nvfp4.tensor_amax(x)
        if case.given_amax:
            out.amax.copy_(amax)
        sets.append((x, amax, out))
    return sets


def equal_share(case: bench.Case, inputs: tuple, call: Call) -> float:
    """Share of the peer's bytes that are ours, of its codes or of its scales, whichever is smaller."""
    x, _, out = inputs
    bench.run(case, x, None, out)
    pairs = zip(call(), (out.codes, out.block_scales), strict=True)
    flat = [tuple(t.view(torch.uint8).flatten() for t in pair) for pair in pairs]
    return min((theirs == ours).float().mean().item() for theirs, ours in flat)


def time_variants(variants: dict[str, list[Call]]) -> tuple[str, dict[str, float]]:
    """("graph" or, if one cannot be captured, "events", microseconds a call by name)."""
    try:
        return "graph", {name: bench.graph_us(calls) for name, calls in variants.items()}
    except RuntimeError as error:
        print(f"not captured, timed by events: {error}".splitlines()[0], file=sys.stderr)
        torch.cuda.synchronize()
        return "events", {name: events_us(calls) for name, calls in variants.items()}


def events_us(calls: list[Callable[[], object]], rounds: int = 10) -> float:
    for call in calls:
        call()
    return statistics.median(bench.events_us(call) for _ in range(rounds) for call in calls)
