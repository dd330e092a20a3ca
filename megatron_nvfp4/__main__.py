"""The command line: `python -m megatron_nvfp4 VERB`.

Each layer is imported inside the verb that needs it.
"""

import argparse
import dis
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from megatron_nvfp4 import __version__

VERBS = (
    "recipes",
    "describe",
    "doctor",
    "convert-hf-to-megatron",
    "convert-megatron-to-hf",
    "export-nvfp4",
    "verify-checkpoint",
    "pretrain",
    "run",
)
# Verb: the module that declares its arguments and runs it, and what it is for.
CHECKPOINT_VERBS = {
    "convert-hf-to-megatron": (
        "megatron_nvfp4.checkpoint.to_megatron",
        "write a Hugging Face checkpoint as Megatron's",
    ),
    "convert-megatron-to-hf": (
        "megatron_nvfp4.checkpoint.to_hf",
        "write a Megatron checkpoint as Hugging Face's",
    ),
    "export-nvfp4": ("megatron_nvfp4.checkpoint.export", "quantise a checkpoint for a sampler"),
    "verify-checkpoint": (
        "megatron_nvfp4.checkpoint.verify",
        "check an NVFP4 checkpoint before a sampler loads it",
    ),
}
# Everything behind these belongs to Megatron, --help included, so argparse never sees it.
LAUNCHERS = ("pretrain", "run")
RUN_USAGE = "usage: python -m megatron_nvfp4 run SCRIPT [arguments of the script ...]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status: 0 done, 1 a check found a fault, 2 wrong use.

    argv: the words behind the program's name; None takes sys.argv's.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv and argv[0] in LAUNCHERS:
        return _launch(argv[0], argv[1:])
    if argv and argv[0] in CHECKPOINT_VERBS:
        return _run(lambda: _checkpoint(argv[0], argv[1:]))
    options = _parser().parse_args(argv)
    return _run(lambda: options.run(options), verbose=getattr(options, "verbose", False))


def _run(call: Callable[[], int], *, verbose: bool = False) -> int:
    """The call's exit status; a refusal is one line and status 2, or its traceback if verbose."""
    try:
        status = call()
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `... | head`: nobody reads on, and the exit must not write again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, RuntimeError, ModuleNotFoundError, OSError) as error:
        if verbose:
            raise
        return _report(error)


def _report(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2


def _launch(verb: str, argv: list[str]) -> int:
    """Hand `argv` to Megatron. A refusal of ours is one line; what crashes keeps its traceback."""
    if verb == "run" and (not argv or argv[0] in ("-h", "--help")):
        print(RUN_USAGE, file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    try:
        from megatron_nvfp4.mcore.launcher import pretrain, run

        if verb == "run":
            run(argv[0], argv[1:])
        else:
            pretrain(argv)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in ("torch", "megatron") or not _innermost(error)[1]:
            raise
        remedy = "pip install 'megatron-nvfp4[megatron]'"
        return _report(RuntimeError(f"{verb}: {package} is not installed; {remedy}"))
    except (ValueError, RuntimeError) as error:
        opcode, ours = _innermost(error)
        # A call that failed below our frame, in a kernel say, is a crash and no refusal.
        if not ours or opcode != dis.opmap["RAISE_VARARGS"]:
            raise
        return _report(error)
    return 0


def _checkpoint(verb: str, argv: list[str]) -> int:
    """Run a checkpoint verb. Its arguments are declared beside it, so that its script has the same."""
    module = importlib.import_module(CHECKPOINT_VERBS[verb][0])
    parser = argparse.ArgumentParser(
        prog=f"python -m megatron_nvfp4 {verb}", description=module.__doc__
    )
    module.add_arguments(parser)
    return module.main(parser.parse_args(argv))


def _innermost(error: BaseException) -> tuple[int, bool]:
    """Where the innermost frame left (an opcode), and whether it is a frame of this package."""
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "")
    return trace.tb_frame.f_code.co_code[trace.tb_lasti], module.split(".")[0] == "megatron_nvfp4"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_nvfp4", description="NVFP4 training for Megatron-LM."
    )
    parser.add_argument("--version", action="version", version=f"megatron-nvfp4 {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    recipes = verbs.add_parser("recipes", help="list the recipes and what each needs")
    recipes.set_defaults(run=_recipes)

    describe = verbs.add_parser("describe", help="say what a recipe or policy does, and why")
    describe.add_argument("recipe", nargs="?", metavar="NAME", help="default: what is selected")
    describe.set_defaults(run=_describe)

    doctor = verbs.add_parser("doctor", help="check this machine and run every path a recipe takes")
    doctor.add_argument("--recipe", metavar="NAME", help="default: what is selected")
    doctor.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    doctor.add_argument("--verbose", action="store_true", help="every path, with tracebacks")
    doctor.set_defaults(run=_doctor)

    for verb in (describe, doctor):
        verb.add_argument("--config", metavar="FILE", help="YAML policy; default $MINITE_CONFIG")
    for verb in (recipes, describe, doctor):
        verb.add_argument("--json", action="store_true", help="machine-readable output")

    for verb, (_, purpose) in CHECKPOINT_VERBS.items():
        verbs.add_parser(verb, add_help=False, help=purpose)
    verbs.add_parser("pretrain", add_help=False, help="train a GPT; all flags are Megatron's")
    verbs.add_parser("run", add_help=False, help="run a script of a Megatron-LM checkout")
    return parser


def _recipes(options: argparse.Namespace) -> int:
    from megatron_nvfp4.cli.show import show_recipes

    show_recipes(as_json=options.json)
    return 0


def _describe(options: argparse.Namespace) -> int:
    from megatron_nvfp4.cli.show import show_policy

    show_policy(options.recipe, options.config, as_json=options.json)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from megatron_nvfp4.cli.doctor import examine

    return examine(
        options.recipe,
        options.config,
        device=options.device,
        as_json=options.json,
        verbose=options.verbose,
    )


if __name__ == "__main__":
    sys.exit(main())
