"""Checkpoint conversions against a plain copy of the same files, on the disk of $TMPDIR."""

import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_nvfp4.checkpoint.convert import ParallelSizes, hf_from_megatron, megatron_from_hf
from megatron_nvfp4.checkpoint.hf import HFReader, HFWriter
from megatron_nvfp4.checkpoint.plan import Architecture, hf_tensors

FIELDS = (
    "cpu",
    "folder",
    "torch",
    "commit",
    "model",
    "does",
    "bytes",
    "runs",
    "s",
    "gb_per_s",
    "of_copy",
)
_SHAPE = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
}
# Layers of Qwen3-1.7B and of Qwen3-30B-A3B, as many as make about one gigabyte.
MODELS = {
    "dense": _SHAPE | {"model_type": "qwen3", "num_hidden_layers": 8},
    "moe": _SHAPE
    | {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 1,
        "num_experts": 96,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}


def rows(commit: str, only: str = "", num_runs: int = 5) -> Iterator[dict[str, object]]:
    """One row per model and conversion; of_copy is its speed over that of the copy, both to the disk.

    The copy and the conversions take turns; all end with the data synced. What is read stands in the
    page cache. only: models whose name contains this text.
    """
    for model, config in MODELS.items():
        if only not in model:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _write(folder / "hf", config)
            num_bytes = HFReader(folder / "hf").num_bytes()
            seconds = _times(_contenders(folder), folder, num_runs)
            _check(folder)
        copy = seconds["plain copy"]
        for does, taken in seconds.items():
            yield {
                "cpu": platform.processor() or platform.machine(),
                "folder": tempfile.gettempdir(),
                "torch": torch.__version__,
                "commit": commit,
                "model": model,
                "does": does,
                "bytes": num_bytes,
                "runs": num_runs,
                "s": round(taken, 3),
                "gb_per_s": round(num_bytes / taken / 1e9, 3),
                "of_copy": round(copy / taken, 3),
            }


def _write(folder: Path, config: dict) -> None:
    block = torch.randn(1 << 20).bfloat16()
    with HFWriter(folder, config=config) as writer:
        for name, shape in hf_tensors(Architecture.from_hf_config(config)).items():
            numel = torch.Size(shape).numel()
            writer.write(name, block.repeat(-(-numel // block.numel()))[:numel].view(shape))


def _contenders(folder: Path) -> dict[str, Callable[[Path], None]]:
    hf, distributed, ranks = folder / "hf", folder / "torch_dist", folder / "torch"
    megatron_from_hf(hf, distributed)
    megatron_from_hf(hf, ranks, format="torch", sizes=ParallelSizes(tp=2))
    return {
        "plain copy": lambda out: _copy(hf, out),
        "HF to torch_dist": lambda out: megatron_from_hf(hf, out),
        "HF to torch, tp 2": lambda out: megatron_from_hf(
            hf, out, format="torch", sizes=ParallelSizes(tp=2)
        ),
        "torch_dist to HF": lambda out: hf_from_megatron(distributed, hf, out),
        "torch, tp 2, to HF": lambda out: hf_from_megatron(ranks, hf, out),
    }


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    for path in target.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _times(
    contenders: dict[str, Callable[[Path], None]], folder: Path, num_runs: int
) -> dict[str, float]:
    times: dict[str, list[float]] = {does: [] for does in contenders}
    for run in range(num_runs + 1):
        for does, call in contenders.items():
            out = folder / "out"
            begin = time.perf_counter()
            call(out)
            taken = time.perf_counter() - begin
            shutil.rmtree(out)
            if run:  # the first fills the page cache
                times[does].append(taken)
    return {does: statistics.median(taken) for does, taken in times.items()}


def _check(folder: Path) -> None:
    expected = HFReader(folder / "hf")
    for source in ("torch_dist", "torch"):
        hf_from_megatron(folder / source, folder / "hf", folder / "back")
        found = HFReader(folder / "back")
        for name in expected.names():
            if not torch.equal(
                found.read(name).view(torch.uint8), expected.read(name).view(torch.uint8)
            ):
                raise RuntimeError(f"{source}: {name} came back different; figures are void")
        del found
        shutil.rmtree(folder / "back")
