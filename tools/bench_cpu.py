"""NVFP4 quantisation on one CPU thread: ours, the torch reference, compressed-tensors."""

import importlib.metadata
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron_nvfp4
from megatron_nvfp4 import quant
from megatron_nvfp4.backends import ops
from megatron_nvfp4.recipes import NVFP4Spec

SHAPE = (4096, 2048)
TOKEN = NVFP4Spec(outer="token")
TENSOR = NVFP4Spec(outer="tensor")
FIELDS = (
    "cpu",
    "simd",
    "torch",
    "commit",
    "threads",
    "shape",
    "dtype",
    "by",
    "version",
    "computes",
    "runs",
    "median_us",
    "min_cpu_us",
    "times_median",
    "times_min",
)


@dataclass(frozen=True)
class Contender:
    """One call to time. computes: what goes in and what comes out."""

    by: str
    version: str
    computes: str
    call: Callable[[], object]


def rows(commit: str, num_runs: int = 15) -> Iterator[dict[str, object]]:
    """One row per contender; times_* is its time over that of our per-token quantiser.

    The contenders take turns, so that other work on the machine slows them alike. median_us is the wall
    clock; min_cpu_us is the process's CPU time in the quickest run, which other work disturbs least.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(SHAPE).bfloat16()
    _check(x)
    contenders = [*_ours(x), *_compressed_tensors(x)]
    times = {one: [] for one in contenders}
    for run in range(num_runs + 1):
        for one in contenders:
            wall, cpu = time.perf_counter(), time.process_time()
            one.call()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if run:  # the first warms up
                times[one].append((wall * 1e6, cpu * 1e6))
    fixed = {
        "cpu": _cpu_name(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "commit": commit,
        "threads": torch.get_num_threads(),
        "shape": "x".join(map(str, SHAPE)),
        "dtype": "bfloat16",
        "runs": num_runs,
    }
    medians = {one: statistics.median(wall for wall, _ in times[one]) for one in contenders}
    minima = {one: min(cpu for _, cpu in times[one]) for one in contenders}
    ours = contenders[0]
    for one in contenders:
        yield fixed | {
            "by": one.by,
            "version": one.version,
            "computes": one.computes,
            "median_us": round(medians[one]),
            "min_cpu_us": round(minima[one]),
            "times_median": round(medians[one] / medians[ours], 2),
            "times_min": round(minima[one] / minima[ours], 2),
        }


def _ours(x: torch.Tensor) -> list[Contender]:
    version = megatron_nvfp4.__version__
    token = "BF16 -> row amax, block scales, packed codes"
    tensor = "BF16 -> tensor amax, block scales, packed codes"
    return [
        Contender("megatron_nvfp4 C++", version, token, lambda: ops.quantize_nvfp4(x, TOKEN)),
        Contender("megatron_nvfp4 C++", version, tensor, lambda: ops.quantize_nvfp4(x, TENSOR)),
        Contender("torch reference", version, token, lambda: quant.quantize(x, TOKEN)),
        Contender("torch reference", version, tensor, lambda: quant.quantize(x, TENSOR)),
    ]


def _compressed_tensors(x: torch.Tensor) -> list[Contender]:
    """Its NVFP4 scheme for weights, by its public functions; one global scale, per token it has none."""
    try:
        from compressed_tensors.compressors.nvfp4.helpers import (
            pack_fp4_to_uint8,
            quantize_and_pack_fp4,
        )
        from compressed_tensors.quantization import preset_name_to_scheme
        from compressed_tensors.quantization.lifecycle.forward import quantize
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    except ImportError as error:
        print(f"compressed-tensors: not measured: {error}", file=sys.stderr)
        return []
    args = preset_name_to_scheme("NVFP4", ["Linear"]).weights

    def scales() -> tuple[torch.Tensor, torch.Tensor]:
        global_scale = generate_gparam(*torch.aminmax(x))
        blocks = x.unflatten(1, (-1, args.group_size))
        low, high = torch.aminmax(blocks, dim=-1)
        return calculate_qparams(low, high, args, global_scale)[0], global_scale

    def whole() -> torch.Tensor:
        block_scales, global_scale = scales()
        return quantize_and_pack_fp4(x, block_scales, global_scale)

    block_scales, global_scale = scales()
    rounded = quantize(x, block_scales, None, args, global_scale=global_scale)
    codes = ops.quantize_nvfp4(x, TENSOR).codes
    share = (whole() == codes).float().mean().item()
    if share < 0.95:
        raise RuntimeError(f"compressed-tensors: {share:.1%} of its codes are ours; not comparable")
    version = importlib.metadata.version("compressed-tensors")
    calls = {
        "BF16 -> tensor amax, block scales, packed codes (generate_gparam, calculate_qparams, "
        "quantize_and_pack_fp4)": whole,
        "BF16 and given scales -> packed codes (quantize_and_pack_fp4: what its compressor does)": (
            lambda: quantize_and_pack_fp4(x, block_scales, global_scale)
        ),
        "values already rounded to E2M1 -> packed codes (pack_fp4_to_uint8)": (
            lambda: pack_fp4_to_uint8(rounded)
        ),
    }
    return [Contender("compressed-tensors", version, *call) for call in calls.items()]


def _check(x: torch.Tensor) -> None:
    for spec in (TOKEN, TENSOR):
        ours, expected = ops.quantize_nvfp4(x, spec), quant.quantize(x, spec)
        pairs = (
            (ours.codes, expected.codes),
            (ours.block_scales.view(torch.uint8), expected.block_scales.view(torch.uint8)),
            (ours.amax, expected.amax),
        )
        if not all(torch.equal(*pair) for pair in pairs):
            raise RuntimeError(f"cpu {spec}: bytes differ from the definition; not timed")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
