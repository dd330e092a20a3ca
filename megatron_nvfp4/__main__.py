"""The command line: `python -m megatron_nvfp4 VERB`.

Each layer is imported inside the verb that needs it.
"""

import argparse
import dis
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megatron_nvfp4 import __version__

VERBS = (
    "recipes",
    "describe",
    "doctor",
    "convert-hf-to-megatron",
    "convert-megatron-to-hf",
    "export-nvfp4",
    "verify-checkpoint",
    "compare",
    "diagnose",
    "sensitivity",
    "context-swap",
    "teacher-forced",
    "pretrain",
    "run",
    "profile",
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
# Everything behind these belongs to Megatron, --help included, so argparse never sees it; of
# profile's words, those behind a bare --.
LAUNCHERS = ("pretrain", "run", "profile")
RUN_USAGE = "usage: python -m megatron_nvfp4 run SCRIPT [arguments of the script ...]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status: 0 done, 1 a check found a fault, 2 wrong use.

    130 and 143 say that SIGINT or SIGTERM stopped it; those of training are Megatron's to handle.
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
    with _stop_signals() as received:
        try:
            status = call()
            sys.stdout.flush()
            return status
        except BaseException as error:
            if received:  # whatever else the code in between made of it
                return _stopped(received[0], error)
            if isinstance(error, BrokenPipeError):
                # `... | head`: nobody reads on, and the exit must not write again
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 1
            refused = isinstance(error, ValueError | RuntimeError | ModuleNotFoundError | OSError)
            if verbose or not refused:
                raise
            return _report(error)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM end the block by a KeyboardInterrupt, and stand in the list; a second one kills."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # signals are the main thread's
        return

    def stop(number: int, frame: object) -> None:
        received.append(number)
        for each in former:
            signal.signal(each, signal.SIG_DFL)
        raise KeyboardInterrupt

    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # What the caller ignores stays ignored, as under nohup.
    former = {number: handler for number, handler in former.items() if handler != signal.SIG_IGN}
    for number in former:
        signal.signal(number, stop)
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _stopped(number: int, error: BaseException) -> int:
    """One line, and the status by which a shell knows the signal."""
    name = signal.Signals(number).name
    said = (
        str(error) if isinstance(error, KeyboardInterrupt) else ""
    )  # of an output that is complete
    print(f"error: stopped by {name}; {said or 'no unfinished output is left'}", file=sys.stderr)
    return 128 + number


def _report(error: BaseException) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2


def _launch(verb: str, argv: list[str]) -> int:
    """Hand `argv` to Megatron. A refusal of ours is one line; what crashes keeps its traceback."""
    if verb == "run" and (not argv or argv[0] in ("-h", "--help")):
        print(RUN_USAGE, file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    try:
        from megatron_nvfp4.cli.capture import take_capture
        from megatron_nvfp4.cli.profile import main as profile
        from megatron_nvfp4.mcore.launcher import pretrain, run

        if verb == "profile":
            profile(argv)
            return 0
        argv, capture = take_capture(argv)
        observer = {} if capture is None else {"observer": capture}
        if verb == "run":
            run(argv[0], argv[1:], **observer)
        else:
            pretrain(argv, **observer)
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
    doctor.add_argument(
        "--sampler",
        metavar="FILE",
        help="check an SGLang's `env` and command line, and nothing else",
    )
    doctor.add_argument(
        "--profile",
        metavar="NAME",
        help="with --sampler, what it must compute; default: the policy's, else sglang_det_bf16",
    )
    doctor.add_argument(
        "--sampler-ranks",
        metavar="RANKS",
        help="with --sampler, what the learner is told of it: tp1, tp2 or tp2ep2; default: the policy's",
    )
    doctor.set_defaults(run=_doctor)

    for verb in (describe, doctor):
        verb.add_argument("--config", metavar="FILE", help="YAML policy; default $MINITE_CONFIG")
    for verb in (recipes, describe, doctor):
        verb.add_argument("--json", action="store_true", help="machine-readable output")

    for verb, (_, purpose) in CHECKPOINT_VERBS.items():
        verbs.add_parser(verb, add_help=False, help=purpose)
    compare = verbs.add_parser("compare", help="find the first operator that two dumps differ in")
    compare.add_argument(
        "left",
        metavar="A",
        help="a capture, SGLang's tensor dump, or a file of deterministic.capture",
    )
    compare.add_argument("right", metavar="B", help="the other side's")
    compare.add_argument("--html", metavar="FILE", help="write one self-contained page")
    compare.add_argument("--json", metavar="FILE", help="write all figures")
    compare.add_argument(
        "--common", action="store_true", help="what one side lacks is no difference"
    )
    compare.add_argument(
        "--replay", action="store_true", help="run captured inputs through captured weights again"
    )
    compare.set_defaults(run=_compare)
    _add_diagnose(verbs)
    _add_sensitivity(verbs)
    verbs.add_parser("pretrain", add_help=False, help="train a GPT; all flags are Megatron's")
    verbs.add_parser("run", add_help=False, help="run a script of a Megatron-LM checkout")
    verbs.add_parser("profile", add_help=False, help="say where the time of a Megatron run goes")
    return parser


def _add_diagnose(verbs: argparse._SubParsersAction) -> None:
    from megatron_nvfp4.cli.diagnose import add_arguments

    diagnose = verbs.add_parser("diagnose", help="say whether the log-probs of an RL dump agree")
    add_arguments(diagnose)
    diagnose.set_defaults(run=_diagnose)


def _add_sensitivity(verbs: argparse._SubParsersAction) -> None:
    from megatron_nvfp4.cli.sensitivity import add_verbs

    add_verbs(verbs)


def _recipes(options: argparse.Namespace) -> int:
    from megatron_nvfp4.cli.show import show_recipes

    show_recipes(as_json=options.json)
    return 0


def _describe(options: argparse.Namespace) -> int:
    from megatron_nvfp4.cli.show import show_policy

    show_policy(options.recipe, options.config, as_json=options.json)
    return 0


def _compare(options: argparse.Namespace) -> int:
    from megatron_nvfp4.cli.compare import compare

    return compare(
        options.left,
        options.right,
        html=options.html,
        json_file=options.json,
        common=options.common,
        replay=options.replay,
    )


def _diagnose(options: argparse.Namespace) -> int:
    from megatron_nvfp4.cli.diagnose import main as diagnose

    return diagnose(options)


def _doctor(options: argparse.Namespace) -> int:
    if options.sampler or options.profile or options.sampler_ranks:
        from megatron_nvfp4.cli.sampler import examine_sampler

        return examine_sampler(
            options.sampler,
            options.profile,
            options.sampler_ranks,
            config=options.config,
            as_json=options.json,
        )
    from megatron_nvfp4.cli.doctor import examine

    return examine(
        options.recipe,
        options.config,
        device=options.device,
        as_json=options.json,
        verbose=options.verbose,
    )


def program(argv: Sequence[str] | None = None) -> None:
    """`main` as a whole process: its status is that of the process, whatever comes while it ends."""
    argv = sys.argv[1:] if argv is None else list(argv)
    status = main(argv)
    if not argv or argv[0] not in LAUNCHERS:  # training's own signals are Megatron's to handle
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    sys.exit(status)


if __name__ == "__main__":
    program()
