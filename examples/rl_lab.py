"""Reinforcement learning with a sampler and a learner that compute in different numerics, on a small scale.

    pip install matplotlib
    python examples/rl_lab.py                                    # CPU minutes: one seed, ten arms
    python examples/rl_lab.py --size large --device cuda --seeds 0 1 2 --jobs 4 --out runs/rl_lab_large
    python examples/rl_lab.py --audit                            # one update, predicted and realised

A small transformer, warmed up on right answers, is trained by GRPO on a task whose answers can be checked.
An arm names the numerics of sampler and learner, and what is done about their mismatch:

    bf16 | token | tensor | rollout | SAMPLER:LEARNER (recipes)      [+tis | +triage | +calibrated]

token, tensor: NVFP4 on both sides, activations scaled per token or per tensor. rollout: NVFP4 per token in
the sampler alone. tis: importance weights up to 2. triage: these, TRIAGE's gate and Repair at the reported
settings, but for segments in proportion to the answers. calibrated: the same with the gate measured on the
run's first updates. Every arm of a seed starts from the same weights and meets the same prompts and noise.

Writes runs/*.jsonl (a line an update), table.txt and rl_lab.png. Finished runs are kept and skipped, so that
a run that was interrupted goes on. docs/rl_lab.md has the figures of some runs.
"""

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path

import torch
from rl_lab_grpo import Learner, Method, generator_of, supervised, triage_config, update
from rl_lab_policy import SIZES, Sampler, Size, quantized_linears
from rl_lab_report import report, write

from megatron_nvfp4 import backends
from megatron_nvfp4.recipes import get_recipe

PER_TOKEN, PER_TENSOR = "nvfp4_per_token_bf16_bwd", "nvfp4_per_tensor"
PAIRS = {
    "bf16": ("bf16", "bf16"),
    "token": (PER_TOKEN, PER_TOKEN),
    "tensor": (PER_TENSOR, PER_TENSOR),
    "rollout": (PER_TOKEN, "bf16"),
}
METHODS = ("", "tis", "triage", "calibrated")
ARMS = (
    "bf16",
    *(
        f"{pair}{method}"
        for pair in ("token", "tensor", "rollout")
        for method in ("", "+tis", "+triage")
    ),
)


@dataclass(frozen=True)
class Arm:
    """Numerics of the sampler and of the learner, and the method."""

    name: str
    sampler: str
    learner: str
    method: str

    @classmethod
    def parse(cls, name: str) -> "Arm":
        pair, _, method = name.partition("+")
        sampler, learner = PAIRS[pair] if pair in PAIRS else pair.partition(":")[::2]
        if method not in METHODS or name.endswith("+"):
            raise ValueError(f"arm {name!r}: no method {method!r}; use {', '.join(METHODS[1:])}")
        if not learner:
            raise ValueError(
                f"arm {name!r}: no numerics {pair!r}; use {', '.join(PAIRS)} or SAMPLER:LEARNER"
            )
        return cls(name, get_recipe(sampler).name, get_recipe(learner).name, method)


def main() -> int:
    args = parse_arguments()
    out = Path(args.out)
    if args.audit:
        import rl_lab_audit

        return rl_lab_audit.run(out)
    size = replace(SIZES[args.size], updates=args.updates or SIZES[args.size].updates)
    size = replace(size, lr=args.lr or size.lr)
    keep_settings(out, {"device": args.device} | asdict(size))
    arms = [Arm.parse(name) for name in args.arms]
    pairs = [(arm, seed) for seed in args.seeds for arm in arms]
    todo = [pair for pair in pairs if not run_path(out, *pair).exists()]
    seeds = sorted({seed for _, seed in todo if not start_path(out, seed).exists()})
    in_parallel(partial(warm_up, out, size, args.device), [(seed,) for seed in seeds], args.jobs)
    in_parallel(partial(train, out, size, args.device), todo, args.jobs)
    paths = {arm.name: [run_path(out, arm, seed) for seed in args.seeds] for arm in arms}
    report(out, paths)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", default=ARMS, metavar="ARM")
    parser.add_argument("--updates", type=int, help="of each run; the size has a default")
    parser.add_argument("--lr", type=float, help="the learner's rate; the size has a default")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count()), help="runs at a time")
    parser.add_argument("--out", default="runs/rl_lab", help="folder for everything")
    parser.add_argument("--audit", action="store_true", help="audit one update on the CPU instead")
    args = parser.parse_args()
    for name in ("updates", "lr", "jobs"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser.error(f"--{name} {value}: give a number above 0")
    if len(set(args.seeds)) < len(args.seeds) or len(set(args.arms)) < len(args.arms):
        parser.error("--seeds and --arms: each only once")
    try:
        list(map(Arm.parse, args.arms))
    except ValueError as error:
        parser.error(str(error))
    return args


def keep_settings(out: Path, settings: dict) -> None:
    """Refuse to mix results of two settings in one folder."""
    path = out / "settings.json"
    settings = json.loads(json.dumps(settings))
    if not path.exists():
        (out / "runs").mkdir(parents=True, exist_ok=True)
        write(path, json.dumps(settings))
    if (kept := json.loads(path.read_text())) != settings:
        raise SystemExit(f"error: {out} was made with {kept}: give another --out")


def start_path(out: Path, seed: int) -> Path:
    return out / "runs" / f"start.seed{seed}.pt"


def run_path(out: Path, arm: Arm, seed: int) -> Path:
    return out / "runs" / f"{arm.name.replace(':', '-')}.seed{seed}.jsonl"


def in_parallel(function: Callable[..., str], calls: Sequence[tuple], jobs: int) -> None:
    """Call it with each tuple, `jobs` at a time, in processes of their own; print what it returns."""
    if min(jobs, len(calls)) < 2:
        for call in calls:
            print(function(*call), flush=True)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            for future in as_completed([pool.submit(function, *call) for call in calls]):
                print(future.result(), flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()
                process.join()
            raise


def warm_up(out: Path, size: Size, device: str, seed: int) -> str:
    """Supervised steps in BF16, until the policy is expected to answer some prompts right."""
    torch.set_num_threads(1)  # the bits of a run do not depend on the machine's cores
    begin = time.perf_counter()
    learner = supervised(size, device, seed)
    path = start_path(out, seed)
    partial_path = path.with_name(path.name + ".partial")
    torch.save([master.cpu() for master in learner.masters], partial_path)
    os.replace(partial_path, path)
    return f"seed {seed}: warmed up in {time.perf_counter() - begin:.0f} s"


def train(out: Path, size: Size, device: str, arm: Arm, seed: int) -> str:
    """One run: its updates as lines of a file, behind a line that says what ran."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    learner = Learner(size, arm.learner, device, size.lr)
    learner.load(torch.load(start_path(out, seed), weights_only=True))
    num = size.prompts * size.group
    sampler = Sampler(size, quantized_linears(arm.sampler, device), num, device)
    method = Method(arm.method, triage_config(size))
    names, values = [], []
    for number in range(size.updates):
        metrics = update(size, learner, sampler, method, generator_of(device, seed, number, 7))
        metrics |= {name: math.nan for name in names if name not in metrics}
        names = [*names, *(name for name in metrics if name not in names)]
        row = [torch.as_tensor(metrics[name], dtype=torch.float64) for name in names]
        # Kept on the device: reading them would make every update wait.
        values.append(torch.stack([value.to(device) for value in row]))
    lines = [dict(zip(names, value.tolist(), strict=False)) for value in values]
    calibration = method.config.calibration
    head = {
        "arm": asdict(arm),
        "seed": seed,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - begin, 1),
        "triage": asdict(method.config) if calibration is None else asdict(calibration),
        "backends": backends.used(),
    }
    texts = [json.dumps(head)]
    for number, line in enumerate(lines):
        finite = {name: x if math.isfinite(x) else None for name, x in line.items()}
        texts.append(json.dumps({"update": number} | finite))
    write(run_path(out, arm, seed), "\n".join(texts) + "\n")
    reward = sum(line["reward"] for line in lines[-10:]) / len(lines[-10:])
    return f"{arm.name}, seed {seed}: reward {reward:.3f} at the end, {head['seconds']:.0f} s"


if __name__ == "__main__":
    # So that no process outlives the laboratory.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("error: interrupted")
