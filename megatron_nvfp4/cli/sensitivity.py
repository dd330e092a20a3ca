"""The verbs that run a checkpoint on a text: sensitivity, context-swap, teacher-forced."""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_nvfp4.cli.whole_file import check_outputs, whole_file, write_whole

VERBS = {
    "sensitivity": "say what each recipe costs a checkpoint on a text",
    "context-swap": "say whether a row's bits depend on the rows beside it",
    "teacher-forced": "compare two recipes' log-probs of a text, for diagnose",
}
UNITS = ("kind", "layer", "module")
SCHEMA = "sensitivity/1"
STEM = "sensitivity"  # of the Markdown and the plot


def add_verbs(verbs: argparse._SubParsersAction) -> None:
    """Declare the three verbs."""
    runs = {"sensitivity": sweep, "context-swap": swap, "teacher-forced": forced}
    for verb, purpose in VERBS.items():
        parser = verbs.add_parser(verb, help=purpose)
        parser.add_argument("model", metavar="MODEL_DIR", type=Path, help="Hugging Face checkpoint")
        parser.add_argument(
            "--text",
            metavar="FILE",
            type=Path,
            required=True,
            help="text, or *.json with token ids: one list, or a list for each sequence",
        )
        parser.add_argument("--length", type=int, default=512, help="tokens scored of a sequence")
        parser.add_argument(
            "--segments", type=int, default=4, metavar="N", help="sequences at most"
        )
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        if verb != "teacher-forced":
            parser.add_argument(
                "--recipes",
                nargs="+",
                metavar="NAME",
                help="names, aliases, or patterns such as 'sweep_e2*'",
            )
        parser.set_defaults(run=runs[verb])
    _add_sweep(verbs.choices["sensitivity"])
    _add_swap(verbs.choices["context-swap"])
    _add_forced(verbs.choices["teacher-forced"])


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    _add_exclude(parser)
    parser.add_argument(
        "--per-layer", action="store_true", help="measure the error of every linear, too"
    )
    parser.add_argument(
        "--one-at-a-time", choices=UNITS, metavar="UNIT", help="quantise one kind, layer or module"
    )
    parser.add_argument(
        "--all-but-one", choices=UNITS, metavar="UNIT", help="leave one kind, layer or module out"
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, required=True, help="results; a second run goes on there"
    )


def _add_swap(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target-tokens", type=int, default=16, metavar="N", help="rows compared")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures")


def _add_forced(parser: argparse.ArgumentParser) -> None:
    _add_exclude(parser)
    for side in ("sampler", "learner"):
        parser.add_argument(f"--{side}", metavar="RECIPE", required=True)
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        required=True,
        help="log-probs for diagnose, mismatch/1: *.pt, or *.safetensors",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures")


def _add_exclude(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--exclude",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="linears in BF16 in every row, as in a policy file: decoder.layers.29.** or **.linear_fc2",
    )


def _open(options: argparse.Namespace) -> tuple[Any, list]:
    """The decoder and the sequences of tokens of a verb, checked before anything runs."""
    from megatron_nvfp4.cli.decoder import open_decoder
    from megatron_nvfp4.diagnostics.sensitivity_model import check_tokens
    from megatron_nvfp4.diagnostics.sensitivity_text import read_segments

    segments = read_segments(options.text, options.model, options.length, options.segments)
    model = open_decoder(options.model, options.device)
    for tokens in segments:
        check_tokens(tokens.tolist(), model.shape.vocab_size, model.max_length)
    return model, segments


def _inputs(options: argparse.Namespace) -> list[Path]:
    """The files that a verb reads."""
    return [options.text, *options.model.glob("*")]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- sensitivity ----------------------------------------------------------------------------------


def sweep(options: argparse.Namespace) -> int:
    """Measure all rows that --out lacks, and write its tables and plot; 0."""
    from megatron_nvfp4.cli.decoder import set_recipe
    from megatron_nvfp4.diagnostics import sensitivity, sensitivity_report

    recipes = sensitivity.choose_recipes(options.recipes or sensitivity.DEFAULT_RECIPES)
    model, segments = _open(options)
    rows = sensitivity.plan(
        recipes,
        list(model.linears),
        exclude=options.exclude,
        one_at_a_time=options.one_at_a_time,
        all_but_one=options.all_but_one,
    )
    _claim(options.out, _settings(options, segments))
    found: list[sensitivity.Measurement] = []
    for number, row in enumerate(rows):

        def measure(row: sensitivity.Row = row) -> dict[str, Any]:
            return sensitivity.measure(model, row, segments, set_recipe, options.exclude).as_data()

        path = options.out / "rows" / row.file_name
        data, seconds = _kept_or_made(path, measure)
        found.append(_measurement(path, data))
        gap = found[-1].nll - found[0].nll
        where = f"[{number + 1}/{len(rows)}] {row.label}: NLL {found[-1].nll:.4f} ({gap:+.4f})"
        _say(f"{where}, {'from before' if seconds is None else f'{seconds:.0f} s'}")
    errors = {}
    for recipe in recipes if options.per_layer else ():

        def errors_of(recipe: str = recipe) -> list[dict[str, Any]]:
            return sensitivity.layer_errors(model, recipe, segments, set_recipe, options.exclude)

        path = options.out / "errors" / f"{recipe}.json"
        errors[recipe], seconds = _kept_or_made(path, errors_of)
        _say(f"errors of {recipe}: {'from before' if seconds is None else f'{seconds:.0f} s'}")
    num_tokens = sum(len(tokens) - 1 for tokens in segments)
    title = f"{options.model.name}, {num_tokens} tokens of {options.text.name} in {len(segments)} sequences."
    text = sensitivity_report.as_markdown(found, errors, title)
    _write_tables(options.out, found, errors, text)
    print(text, end="")
    return 0


def _write_tables(out: Path, found: Sequence[Any], errors: dict, text: str) -> None:
    from megatron_nvfp4.diagnostics import sensitivity_report as report

    write_whole(out / f"{STEM}.md", text)
    write_whole(out / "sweep.csv", report.as_csv(report.SWEEP, report.sweep_rows(found)))
    if errors:
        lines = [{"recipe": recipe} | line for recipe in errors for line in errors[recipe]]
        write_whole(out / "errors.csv", report.as_csv(report.ERRORS, lines))
    try:
        with whole_file(out / f"{STEM}.png") as partial:
            report.plot(partial, found, errors)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        _say(f"no {out / STEM}.png: pip install matplotlib, and run this again")


def _settings(options: argparse.Namespace, segments: Sequence[Any]) -> dict[str, Any]:
    """What rows must have in common to stand in one table."""
    files = sorted(options.model.glob("*.safetensors"))
    return {
        "schema": SCHEMA,
        "config": hashlib.sha256((options.model / "config.json").read_bytes()).hexdigest(),
        "weights": {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files},
        "tokens": [tokens.tolist() for tokens in segments],
        "exclude": list(options.exclude),
        "device": options.device,
    }


def _claim(out: Path, settings: dict[str, Any]) -> None:
    """Make the folder of a sweep, or make sure that it is of this one."""
    path = out / "settings.json"
    if path.exists():
        held = _read(path)
        if not isinstance(held, dict):
            raise ValueError(
                f"{path}: holds no settings of a sweep; remove {out}, or choose another"
            )
        differ = [name for name in settings if held.get(name) != settings[name]]
        if differ:
            raise ValueError(
                f"{out}: holds a sweep with other {', '.join(differ)}; choose another --out, or remove it"
            )
        return
    # What a run that was killed before this file leaves: folders, and the file's beginning.
    held = (each for each in out.rglob("*") if not each.is_dir())
    if out.exists() and (not out.is_dir() or any(x.name != ".partial-settings.json" for x in held)):
        raise ValueError(f"{out}: is no folder of a sweep and not empty; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(settings) + "\n")


def _kept_or_made(path: Path, make: Callable[[], Any]) -> tuple[Any, float | None]:
    """What a file holds, or what `make` gives, then kept there, and the seconds that took."""
    if path.exists():
        return _read(path), None
    started = time.perf_counter()
    data = make()
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps(data, allow_nan=False) + "\n")
    return data, time.perf_counter() - started


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON ({error}); remove it") from error


def _measurement(path: Path, data: Any) -> Any:
    """The sensitivity.Measurement in a row's file."""
    from megatron_nvfp4.diagnostics.sensitivity import Measurement

    try:
        return Measurement.from_data(data)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: is no row of a sweep ({error}); remove it") from error


# --- context-swap ---------------------------------------------------------------------------------


def swap(options: argparse.Namespace) -> int:
    """Print what each context changes; 0 where no bit of any target is another, else 1."""
    from megatron_nvfp4.cli.decoder import set_recipe
    from megatron_nvfp4.diagnostics.sensitivity import choose_recipes
    from megatron_nvfp4.diagnostics.sensitivity_swap import context_swap
    from megatron_nvfp4.recipes import DEFAULT_RECIPE, RECIPES

    recipes = choose_recipes(options.recipes or [DEFAULT_RECIPE])
    if not recipes:
        raise ValueError("--recipes bf16: nothing is quantised; name a recipe that quantises")
    check_outputs({"--json": options.json}, _inputs(options))
    model, segments = _open(options)
    found = context_swap(
        model,
        segments,
        [RECIPES[name] for name in recipes],
        set_recipe,
        _quantize,
        num_target=options.target_tokens,
        progress=_say,
    )
    if options.json:
        data = {name: [each.as_data() for each in changes] for name, changes in found.items()}
        write_whole(options.json, json.dumps(data, indent=1, allow_nan=False) + "\n")
    clean = True
    for name, changes in found.items():
        print(f"{name}: {options.target_tokens} rows in {changes[0].linears} linears\n")
        print(_swap_table(changes))
        changed = [each.context for each in changes if not each.is_clean]
        verdict = f"changed by {', '.join(changed)}" if changed else "the same bits in all contexts"
        print(f"{name}: {verdict}\n")
        clean = clean and not changed
    return 0 if clean else 1


def _swap_table(changes: Sequence[Any]) -> str:
    from megatron_nvfp4.diagnostics.profile_report import table

    header = ["context", "amax of all rows", "outer scale", "codes", "outputs", "of outputs"]
    header += ["largest", "relative L2"]
    rows = [
        [
            each.context,
            *(str(value) for value in (each.amax, each.scale, each.codes, each.outputs)),
            f"{each.elements / max(each.num_elements, 1):.1%}",
            f"{each.max_abs:.3g}",
            f"{each.rel_l2:.2e}",
        ]
        for each in changes
    ]
    return "linears in which it is another, and by how much:\n\n" + table(header, rows)


def _quantize(x: Any, spec: Any) -> Any:
    """A matrix as the linears quantise it."""
    from megatron_nvfp4 import backends
    from megatron_nvfp4.quant.layout import dense_offsets

    backend = backends.select("quantize", (spec,), shape=x.shape, device=x.device, backend="auto")
    return backend.quantize(x, spec, offsets=dense_offsets(x.shape[0], x.device))


# --- teacher-forced -------------------------------------------------------------------------------


def forced(options: argparse.Namespace) -> int:
    """Write both recipes' log-probs of the text, and print how far they are apart; 0."""
    from megatron_nvfp4.cli.decoder import set_recipe
    from megatron_nvfp4.diagnostics.readers import save
    from megatron_nvfp4.diagnostics.sensitivity import Row, measure, plan
    from megatron_nvfp4.diagnostics.sensitivity_forced import gap_figures, mismatch
    from megatron_nvfp4.recipes import get_recipe

    sides = {side: get_recipe(getattr(options, side)).name for side in ("sampler", "learner")}
    if options.out.suffix not in (".pt", ".safetensors"):
        raise ValueError(f"--out {options.out}: give a name that ends in .pt or .safetensors")
    check_outputs({"--out": options.out, "--json": options.json}, _inputs(options))
    model, segments = _open(options)
    plan(list(sides.values()), list(model.linears), exclude=options.exclude)  # checks the patterns
    found = {}
    for side, recipe in sides.items():
        started = time.perf_counter()
        found[side] = measure(model, Row(recipe=recipe), segments, set_recipe, options.exclude)
        seconds = time.perf_counter() - started
        _say(f"{side} {recipe}: NLL {found[side].nll:.4f}, {seconds:.0f} s")
    learner, sampler = found["learner"], found["sampler"]
    figures = gap_figures(learner, sampler)
    nll = {side: each.nll for side, each in found.items()}
    with whole_file(options.out) as partial:
        save(mismatch(learner, sampler, segments), partial)
    if options.json:
        data = {"recipes": sides, "nll": nll, "gap": figures}
        write_whole(options.json, json.dumps(data, indent=1, allow_nan=False) + "\n")
    print(f"learner {sides['learner']}: NLL {nll['learner']:.4f}")
    print(f"sampler {sides['sampler']}: NLL {nll['sampler']:.4f}")
    print(
        f"delta, learner minus sampler, of {figures['tokens']} tokens: mean {figures['mean']:+.5f}, "
        f"mean size {figures['mean_abs']:.5f}, P50 {figures['p50']:.4f}, P99 {figures['p99']:.4f}, "
        f"P99.9 {figures['p999']:.4f}, largest {figures['max']:.4f}"
    )
    print(
        f"below -1: {figures['share_below_minus_1']:.2%}, above 1: {figures['share_above_1']:.2%}; "
        f"likeliest token differs: {figures['num_top1_flips']} ({figures['top1_flips']:.1%})"
    )
    print(f"next: python -m megatron_nvfp4 diagnose {options.out}")
    return 0
