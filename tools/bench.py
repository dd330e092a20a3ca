"""Measures the kernels of this project on the machine at hand and prints CSV.

Every result is checked against the definition before it is timed. Times are medians over replays of
CUDA graphs whose calls rotate over enough tensors that no cache holds them. The ceiling is a copy of
as many bytes, the faster of a copy kernel in a graph and of a device-to-device memcpy timed by events.
"""

import argparse
import csv
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_nvfp4 import quant
from megatron_nvfp4.backends import cuda
from megatron_nvfp4.quant import swiglu
from megatron_nvfp4.recipes import NVFP4Spec

TOKEN = NVFP4Spec(outer="token")
TENSOR = NVFP4Spec(outer="tensor")
TILES = NVFP4Spec(block=(16, 16))
FAST = NVFP4Spec(outer="token", four_over_six="mse", error="fast")
STRICT = NVFP4Spec(outer="token", four_over_six="mae", error="strict")
SWIGLU_SHAPE = (32768, 768)
SWIGLU_OPS = ("swiglu portable", "swiglu fast math")
KINDS = (
    *("quantize", "quantize-cpu", "gemm", "module", "moe_ops", "moe_layer", "exchange", "convert"),
    *("rl", "deterministic"),
)
CACHE_BYTES = 400 << 20  # several times the L2
FIELDS = (
    "gpu",
    "torch",
    "cuda",
    "driver",
    "commit",
    "op",
    "spec",
    "dtype",
    "shape",
    "bytes",
    "us",
    "gb_per_s",
    "copy_us",
    "of_copy",
    "reference_us",
    "times_reference",
)


@dataclass(frozen=True)
class Case:
    """One quantisation to time. reads: passes over x that the byte count assumes."""

    op: str
    spec: NVFP4Spec
    shape: tuple[int, int]
    reads: int = 1
    num_groups: int = 1
    swizzled: bool = False
    transposed: bool = False
    decoded: bool = False
    given_amax: bool = False
    dtype: torch.dtype = torch.bfloat16


CASES = (
    *(
        Case("per-token", TOKEN, s)
        for s in ((32768, 2048), (131072, 2048), (32768, 768), (4096, 2048))
    ),
    *(Case("per-token swizzled", TOKEN, s, swizzled=True) for s in ((32768, 2048), (131072, 2048))),
    Case("per-token", TOKEN, (32768, 4096)),
    Case("per-token", TOKEN, (8192, 7168)),
    Case("per-token", TOKEN, (8192, 16384)),
    Case("per-token", TOKEN, (32768, 2048), dtype=torch.float16),
    Case("per-token", TOKEN, (32768, 2048), dtype=torch.float32),
    Case("per-token decoded", TOKEN, (32768, 2048), decoded=True),
    Case("per-token given amax", TOKEN, (32768, 2048), given_amax=True),
    Case("four-over-six fast", FAST, (32768, 2048)),
    Case("four-over-six fast", FAST, (131072, 2048)),
    Case("four-over-six strict", STRICT, (32768, 2048)),
    Case("per-tensor", TENSOR, (32768, 2048), reads=2),
    Case("per-expert", TENSOR, (32 * 1536, 2048), reads=2, num_groups=32),
    Case("per-expert", TENSOR, (128 * 1536, 2048), reads=2, num_groups=128),
    Case("tiles", TILES, (32 * 1536, 2048), reads=2, num_groups=32),
    Case("tiles transposed", TILES, (32 * 1536, 2048), reads=2, num_groups=32, transposed=True),
    Case(
        "tiles transposed given amax",
        TILES,
        (32 * 1536, 2048),
        num_groups=32,
        transposed=True,
        given_amax=True,
    ),
)


def graph_us(calls: list[Callable[[], None]], replays: int = 15) -> float:
    """Median microseconds a call, the calls captured one after another in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    rounds = -(-20 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    times = [events_us(graph.replay) for _ in range(replays)]
    return statistics.median(times) / (rounds * len(calls))


def events_us(call: Callable[[], None]) -> float:
    """Microseconds of one call between two events; includes the host's time where it is longer."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def copy_us(num_bytes: int) -> float:
    """Microseconds to read num_bytes/2 and write as many."""
    words = num_bytes // 8
    num = max(2, CACHE_BYTES // num_bytes + 1)
    pairs = [
        (
            torch.randint(1 << 30, (words,), dtype=torch.int32, device="cuda"),
            torch.empty(words, dtype=torch.int32, device="cuda"),
        )
        for _ in range(num)
    ]
    kernel = graph_us([lambda a=a, b=b: torch.bitwise_not(a, out=b) for a, b in pairs])
    memcpy = [events_us(lambda a=a, b=b: b.copy_(a)) for _ in range(5) for a, b in pairs]
    return min(kernel, statistics.median(memcpy))


def prepare(case: Case) -> tuple[torch.Tensor, torch.Tensor | None, cuda.Buffers]:
    """Random x, the groups' offsets or None, and poisoned outputs."""
    x = torch.randn(case.shape, device="cuda").to(case.dtype)
    offsets = None
    if case.num_groups > 1:
        rows = case.shape[0] // case.num_groups
        offsets = torch.arange(case.num_groups + 1, device="cuda") * rows
    out = cuda.Buffers.empty(
        case.shape,
        case.spec,
        num_groups=case.num_groups,
        swizzled=case.swizzled,
        transposed=case.transposed,
        decoded=case.decoded,
    )
    for tensor in vars(out).values():
        if tensor is not None:
            tensor.view(torch.uint8).fill_(0x7F)
    if case.given_amax:
        out.amax.fill_(5.0)
    return x, offsets, out


def run(case: Case, x: torch.Tensor, offsets: torch.Tensor | None, out: cuda.Buffers) -> None:
    cuda.quantize_nvfp4_out(
        x, case.spec, out, offsets=offsets, given_amax=case.given_amax, swizzled=case.swizzled
    )


def reference(case: Case, x: torch.Tensor, offsets: torch.Tensor | None, out: cuda.Buffers):
    amax = out.amax if case.given_amax else None
    if offsets is None:
        return quant.quantize(x, case.spec, amax)
    return quant.quantize_grouped(x, offsets, case.spec, amax)


def check(case: Case, rows: int = 4096) -> None:
    """Compares a smaller case of the same kind with the definition; RuntimeError if a byte differs."""
    small = Case(**vars(case) | {"shape": (min(rows, case.shape[0]), case.shape[1])})
    x, offsets, out = prepare(small)
    run(small, x, offsets, out)
    expected = reference(small, x, offsets, out)
    scales = expected.block_scales
    scales = quant.swizzle_scales(scales) if case.swizzled else scales
    same = torch.equal(out.codes, expected.codes) and torch.equal(out.amax, expected.amax)
    if not same or not torch.equal(out.block_scales.view(torch.uint8), scales.view(torch.uint8)):
        raise RuntimeError(f"{case.op} {case.spec}: bytes differ from the definition; not timed")


def random_swiglu(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates and ups, and probabilities."""
    gate_up = torch.randn(num_rows, 2 * SWIGLU_SHAPE[1], device="cuda")
    return gate_up.bfloat16(), torch.rand(num_rows, device="cuda")


def measure_swiglu(fast_math: bool, with_reference: bool) -> dict[str, object]:
    op = SWIGLU_OPS[fast_math]
    small = random_swiglu(4096)
    got = cuda.swiglu_quantize(*small, fast_math=fast_math)
    expected = swiglu.swiglu_quantize(*small)
    for name in ("codes", "block_scales", "amax"):
        ours, theirs = (getattr(q, name).view(torch.uint8) for q in (got, expected))
        if not torch.equal(ours, theirs):
            raise RuntimeError(f"{op}: {name} differ from the definition; not timed")
    sets = [random_swiglu(SWIGLU_SHAPE[0]) for _ in range(6)]
    outputs = []  # kept, so that no call writes where the cache still holds another's

    def call(x: tuple[torch.Tensor, torch.Tensor]) -> None:
        outputs.append(cuda.swiglu_quantize(*x, fast_math=fast_math))

    us = graph_us([lambda s=s: call(s) for s in sets])
    num_rows, num_cols = SWIGLU_SHAPE
    num_bytes = num_rows * (4 * num_cols + 4 + num_cols // 2 + num_cols // 16 + 4)
    return {
        "op": op,
        "spec": str(TOKEN),
        "dtype": "bfloat16",
        "shape": f"{num_rows}x2x{num_cols}",
        "bytes": num_bytes,
    } | compare(us, num_bytes, with_reference, lambda: swiglu.swiglu_quantize(*sets[0]))


def compare(
    us: float, num_bytes: int, with_reference: bool, slow: Callable[[], object]
) -> dict[str, object]:
    """The columns of a time, beside a copy and, on request, the reference."""
    ceiling = copy_us(num_bytes)
    row = {
        "us": round(us, 2),
        "gb_per_s": round(num_bytes / us / 1e3),
        "copy_us": round(ceiling, 2),
        "of_copy": round(ceiling / us, 3),
    }
    if with_reference:
        slow()
        # The reference makes tensors from host constants, which a graph cannot capture; its
        # milliseconds hide the host's time.
        reference_us = statistics.median(events_us(slow) for _ in range(3))
        row |= {
            "reference_us": round(reference_us, 1),
            "times_reference": round(reference_us / us, 1),
        }
    return row


def measure(case: Case, with_reference: bool) -> dict[str, object]:
    check(case)
    x, offsets, out = prepare(case)
    written = sum(t.numel() * t.element_size() for t in vars(out).values() if t is not None)
    num_bytes = case.reads * x.numel() * x.element_size() + written
    sets = [(x, offsets, out)]
    sets += [prepare(case) for _ in range(min(15, CACHE_BYTES // num_bytes))]
    us = graph_us([lambda s=s: run(case, *s) for s in sets])
    del sets
    return {
        "op": case.op,
        "spec": str(case.spec),
        "dtype": str(case.dtype).removeprefix("torch."),
        "shape": "x".join(map(str, case.shape))
        + (f" in {case.num_groups}" if offsets is not None else ""),
        "bytes": num_bytes,
    } | compare(us, num_bytes, with_reference, lambda: reference(case, x, offsets, out))


def ask(*command: str) -> str:
    """What a program prints, or "unknown"."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def commit() -> str:
    """The checkout's commit, or where there is none, that of the build."""
    here = Path(__file__).resolve().parents[1]
    found = ask("git", "-C", str(here), "rev-parse", "--short", "HEAD")
    if found != "unknown":
        return found
    try:
        from megatron_nvfp4._build_info import INFO
    except ImportError:  # never built
        return found
    return INFO["revision"][:7] or found


def machine() -> dict[str, object]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": ask(
            "nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"
        ),
        "commit": commit(),
    }


def rows(only: str, with_reference: bool) -> Iterator[dict[str, object]]:
    """A row for every case whose op contains `only`."""
    fixed = machine()
    for case in CASES:
        if only in case.op:
            torch.cuda.empty_cache()
            yield fixed | measure(case, with_reference)
    for fast_math, op in enumerate(SWIGLU_OPS):
        if only in op:
            torch.cuda.empty_cache()
            yield fixed | measure_swiglu(bool(fast_math), with_reference)


def chosen(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> tuple[tuple[str, ...], Iterator[dict[str, object]]]:
    """The columns and rows that the arguments ask for."""
    if args.what == "quantize-cpu":
        import bench_cpu

        return bench_cpu.FIELDS, bench_cpu.rows(commit())
    if args.what == "rl":
        import bench_rl

        return bench_rl.FIELDS, bench_rl.rows(commit())
    if args.what == "convert":
        import bench_convert

        return bench_convert.FIELDS, bench_convert.rows(commit(), args.only)
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU is visible")
    if args.peers:
        import bench_peers

        return FIELDS + bench_peers.FIELDS, bench_peers.rows(args.only)
    if args.what == "moe_ops":
        import bench_moe

        return bench_moe.FIELDS, bench_moe.rows(args.only)
    if args.what == "exchange":
        import bench_exchange

        return bench_exchange.FIELDS, bench_exchange.measurements()
    if args.what == "moe_layer":
        import bench_moe_layer

        return bench_moe_layer.FIELDS, bench_moe_layer.rows(args.only)
    if args.what == "deterministic":
        import bench_deterministic

        return bench_deterministic.FIELDS, bench_deterministic.rows(args.only, args.csv)
    if args.what in ("gemm", "module"):
        import bench_gemm

        if args.what == "module":
            return bench_gemm.MODULE_FIELDS, bench_gemm.module_rows(args.only)
        return bench_gemm.FIELDS, bench_gemm.rows(args.only)
    ops = sorted({case.op for case in CASES} | set(SWIGLU_OPS))
    if not any(args.only in op for op in ops):
        parser.error(f"--only {args.only!r}: no such op; ops: {ops}")
    return FIELDS, rows(args.only, not args.no_reference)


def main() -> None:
    if sys.argv[1:2] == ["learner"]:  # processes and options of its own
        import bench_learner

        sys.exit(bench_learner.main(sys.argv[2:]))
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="`bench.py learner` measures complete Megatron updates; it has its own --help",
    )
    parser.add_argument(
        "what",
        choices=KINDS,
        help="quantisers (on a CPU: quantize-cpu), GEMMs, GroupedLinear beside TE (module), kernels and "
        "layer of the expert dataflow, rows between GPUs (exchange), checkpoint conversion, TRIAGE (rl), the "
        "deterministic mode",
    )
    parser.add_argument("--only", default="", help="only cases whose op contains this text")
    parser.add_argument("--csv", type=Path, help="file to write; standard output has it anyway")
    parser.add_argument(
        "--no-reference", action="store_true", help="do not time the torch reference"
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="instead of the table, our quantisers beside those of the peers that can be imported",
    )
    args = parser.parse_args()
    fields, table = chosen(parser, args)
    writers = [csv.DictWriter(sys.stdout, fields, restval="")]
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        # Line-buffered: a run that is cut off keeps what it has measured.
        writers.append(csv.DictWriter(args.csv.open("w", buffering=1), fields, restval=""))
    for writer in writers:
        writer.writeheader()
    for row in table:
        for writer in writers:
            writer.writerow(row)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
