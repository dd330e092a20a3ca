"""`bench.py learner`: complete Megatron updates of a Qwen3-30B-A3B slice, ours beside Megatron on TE in BF16.

    python tools/bench.py learner [--layers 8] [--experts 128] [--runs 3] [--routing balanced] [--out DIR]

Every measurement is a process of its own that trains on mock data: forward, backward, optimizer, data
loading. A run's throughput is tokens of an update over the median update after warm-up. Two estimators are
reported: the mean of the ratios of runs of equal number, the extremes left out from four runs on, and the
ratio of the mean throughputs. Writes learner.csv, updates.jsonl and learner.png.
"""

import argparse
import csv
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRETRAIN = ("-m", "megatron_nvfp4", "pretrain")
SEQUENCE = 4096
TIMEOUT = 600.0  # seconds a process may take
# Standard deviation of a fixed bias on random router logits, by the coefficient of variation of tokens per
# expert that it gives 4096 tokens, top-8 of 128 (simulated, 8 draws).
ROUTINGS = {"balanced": 0.0, "cv 0.19": 0.092, "cv 0.66": 0.34}
MODEL = f"""
    --hidden-size 2048 --num-attention-heads 32 --group-query-attention --num-query-groups 4
    --kv-channels 128 --ffn-hidden-size 6144 --qk-layernorm --swiglu --disable-bias-linear
    --normalization RMSNorm --position-embedding-type rope --rotary-base 1000000
    --untie-embeddings-and-output-weights --moe-router-topk 8 --moe-ffn-hidden-size 768
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type none --seq-length {SEQUENCE}
    --max-position-embeddings {SEQUENCE} --micro-batch-size 1 --bf16 --use-distributed-optimizer
    --attention-dropout 0 --hidden-dropout 0 --lr 1e-5 --min-lr 1e-5 --clip-grad 1.0
    --weight-decay 0.1 --mock-data --tokenizer-type NullTokenizer --vocab-size 151935
    --split 99,1,0 --eval-iters 0 --eval-interval 100000 --log-interval 1 --num-workers 2
    --seed 1234
"""


@dataclass(frozen=True)
class Learner:
    """What is trained. policy: YAML of --minite-config; None is Megatron on Transformer Engine.

    program: Python's words before Megatron's flags.
    """

    name: str
    policy: str | None
    program: tuple[str, ...] = PRETRAIN


PEER = Learner("TE BF16", None)
LEARNERS = (
    PEER,
    Learner("bf16", "recipe: bf16"),
    # The same dataflow, but the experts multiplied by the framework.
    Learner("bf16 by torch._grouped_mm", "recipe: bf16", ("tools/bench_learner_torch.py",)),
    Learner(
        "nvfp4_per_token, BF16 backward",
        "{recipe: nvfp4_per_token, disable_backward_quant: true}",
    ),
    Learner("nvfp4_per_token_dequant_bwd", "recipe: nvfp4_per_token_dequant_bwd"),
)
FIELDS = (
    *("routing", "learner", "experts", "layers", "tokens", "runs", "ms", "tokens_per_s"),
    *("peak_gib", "loss", "paired_ratio", "ratio_of_means"),
)


def main(argv: Sequence[str]) -> int:
    # An exit, so that the process that trains is ended too and leaves the GPU.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args = parse(argv)
    out = Path(args.out)
    chosen = [learner for learner in LEARNERS if not args.only or learner.name in args.only]
    results: dict[tuple[str, str], list[dict]] = {}
    total = args.runs * len(args.routing) * len(chosen)
    # Runs outermost: what drifts with time meets every learner alike.
    cells = [(n, r, lr) for n in range(args.runs) for r in args.routing for lr in chosen]
    for done, (number, routing, learner) in enumerate(cells, 1):
        begin = time.perf_counter()
        run = measure(learner, routing, args)
        results.setdefault((routing, learner.name), []).append(run)
        with (out / "updates.jsonl").open("a") as file:
            file.write(
                json.dumps({"run": number, "routing": routing, "learner": learner.name} | run)
                + "\n"
            )
        print(
            f"[{done}/{total}] {routing}, {learner.name}: {run['ms']:.0f} ms an update "
            f"(process {time.perf_counter() - begin:.0f} s)",
            file=sys.stderr,
            flush=True,
        )
    table = list(rows(results, args))
    with (out / "learner.csv").open("w", newline="") as file:
        for target in (file, sys.stdout):
            writer = csv.DictWriter(target, FIELDS, restval="")
            writer.writeheader()
            writer.writerows(table)
    plot(table, out / "learner.png")
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.py learner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=8, help="of 4096 tokens, an update")
    parser.add_argument("--updates", type=int, default=9, help="after the warm-up")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--runs", type=int, default=3, help="processes per learner and routing")
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=["balanced"])
    parser.add_argument("--only", nargs="+", choices=[learner.name for learner in LEARNERS])
    parser.add_argument("--flags", default="", help="more of Megatron's flags, for every learner")
    parser.add_argument("--out", default="runs/learner")
    args = parser.parse_args(argv)
    for name in ("layers", "experts", "microbatches", "updates", "runs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: give 1 or more")
    if args.warmup < 0:
        parser.error(f"--warmup {args.warmup}: give 0 or more")
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror}; give a folder that can be written")
    return args


def measure(learner: Learner, routing: str, args: argparse.Namespace) -> dict:
    """Train in a process of its own; RuntimeError with its last lines if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        steps, meta = Path(folder, "steps.jsonl"), Path(folder, "meta.json")
        flags = ["--transformer-impl", "transformer_engine"]
        if learner.policy is not None:
            policy = Path(folder, "policy.yaml")
            policy.write_text(learner.policy)
            flags = ["--transformer-impl", "minite", "--minite-config", str(policy)]
        command = [
            *(sys.executable, *learner.program, *flags),
            *("--minite-step-log", str(steps), "--minite-run-meta", str(meta)),
            *MODEL.split(),
            *("--num-layers", str(args.layers), "--num-experts", str(args.experts)),
            *("--global-batch-size", str(args.microbatches)),
            *("--train-iters", str(args.warmup + args.updates)),
            *routing_flags(routing),
            *args.flags.split(),
        ]
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        lines = steps.read_text().splitlines() if steps.exists() else []
        if done.returncode or len(lines) < args.warmup + args.updates:
            tail = "\n".join(done.stdout.splitlines()[-40:])
            raise RuntimeError(f"{learner.name}, {routing}: exit {done.returncode}\n{tail}")
        record = json.loads(meta.read_text())
    updates = [json.loads(line) for line in lines]
    seconds = [update["seconds"] for update in updates[args.warmup :]]
    return {
        "ms": statistics.median(seconds) * 1e3,
        "seconds": seconds,
        "loss": updates[-1]["losses"]["lm loss"],
        "peak_gib": record["peak_memory_bytes"] / 2**30,
    }


def routing_flags(routing: str) -> list[str]:
    std = ROUTINGS[routing]
    if std:  # negative: one draw for the whole run
        return ["--moe-router-force-biased", str(-std)]
    return ["--moe-router-force-load-balancing"]


def rows(results: dict[tuple[str, str], list[dict]], args: argparse.Namespace):
    """One line for every routing and learner, with both estimators against TE where that ran."""
    tokens = args.microbatches * SEQUENCE
    for (routing, name), runs in results.items():
        speeds = [tokens / run["ms"] * 1e3 for run in runs]
        row = {
            "routing": routing,
            "learner": name,
            "experts": args.experts,
            "layers": args.layers,
            "tokens": tokens,
            "runs": len(runs),
            "ms": round(statistics.fmean(run["ms"] for run in runs), 1),
            "tokens_per_s": round(statistics.fmean(speeds)),
            "peak_gib": round(max(run["peak_gib"] for run in runs), 1),
            "loss": round(runs[-1]["loss"], 4),
        }
        peers = [tokens / run["ms"] * 1e3 for run in results.get((routing, PEER.name), [])]
        if peers:
            row["paired_ratio"] = round(
                trimmed([a / b for a, b in zip(speeds, peers, strict=True)]), 3
            )
            row["ratio_of_means"] = round(statistics.fmean(speeds) / statistics.fmean(peers), 3)
        yield row


def trimmed(values: Sequence[float]) -> float:
    """The mean without the largest and the smallest, where four or more are there."""
    kept = sorted(values)[1:-1] if len(values) >= 4 else values
    return statistics.fmean(kept)


def plot(table: Sequence[dict], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print(f"no {path.name}: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(table) + 1.2), layout="constrained")
    labels = [f"{row['learner']}\n{row['routing']}" for row in table]
    bars = axes.barh(labels, [row["tokens_per_s"] for row in table], color="tab:blue")
    axes.bar_label(bars, [f" {row.get('ratio_of_means', '')}" for row in table])
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second, whole update (ratio to TE BF16)")
    axes.margins(x=0.12)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
