"""The verb `profile`: a Megatron run whose chosen steps are profiled."""

import argparse
import re
from pathlib import Path

USAGE = (
    "python -m megatron_nvfp4 profile [--steps A:B] [--out DIR] [--rank R] [--force] "
    "-- (SCRIPT | pretrain) [arguments ...]"
)


def main(argv: list[str]) -> None:
    """Train as `run SCRIPT` or `pretrain` would, and write DIR with the profile of steps A to B.

    DIR holds trace.json.gz (for chrome://tracing or Perfetto), kernels.csv, its digest in Markdown and
    steps.png, or does not appear.
    Errors: ValueError for wrong options, a folder that cannot be written, steps that the run does not have;
    RuntimeError for a run that ends before step B is done.
    """
    if "--" not in argv and not {"-h", "--help"} & {*argv}:
        raise ValueError(f"profile: nothing to run; put a script, or pretrain, behind --: {USAGE}")
    split = argv.index("--") if "--" in argv else len(argv)
    options = _options(argv[:split])
    run = argv[split + 1 :]
    if not run:
        raise ValueError(f"profile: nothing to run behind --; give a script, or pretrain: {USAGE}")
    if run[0] != "pretrain" and not Path(run[0]).is_file():
        raise ValueError(
            f"profile: {run[0]} is not a file; give a script of Megatron-LM, or pretrain"
        )

    def open_folder():
        from megatron_nvfp4.checkpoint.atomic import AtomicFolder

        try:
            return AtomicFolder(options.out, force=options.force)
        except OSError as error:
            raise ValueError(
                f"--out {options.out}: {error.strerror}; give a folder that can be written"
            ) from error

    def report(steps) -> None:
        from megatron_nvfp4.diagnostics.profile_report import middle_of, summary

        print(
            f"profile of {summary(middle_of(steps))}\nprofile written to {options.out}", flush=True
        )

    open_folder().discard()  # before minutes of loading and training
    from megatron_nvfp4.diagnostics.profile import StepProfiler
    from megatron_nvfp4.mcore import launcher

    first, last = options.steps
    profiler = StepProfiler(first, last, rank=options.rank, open_folder=open_folder, report=report)
    if run[0] == "pretrain":
        launcher.pretrain(run[1:], observer=profiler)
    else:
        launcher.run(run[0], run[1:], observer=profiler)
    if not profiler.began:
        raise RuntimeError(
            f"profile: {run[0]} ended without training by megatron.training; nothing was written. "
            "Give a script that trains, without --skip-train"
        )


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_nvfp4 profile",
        usage=USAGE,
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--steps",
        metavar="A:B",
        default="3:5",
        help="from step A to step B, as Megatron's log counts; default 3:5",
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("profile"), help="default: profile"
    )
    parser.add_argument("--rank", type=int, default=0, help="the one that is profiled; default 0")
    parser.add_argument("--force", action="store_true", help="replace the folder if it is there")
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ValueError(
            f"profile: {' '.join(unknown)} is no option of the profiler; "
            "put Megatron's behind --, after the script"
        )
    match = re.fullmatch(r"([0-9]+):([0-9]+)", options.steps)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(
            f"--steps {options.steps}: give A:B, the first and the last step, 1 <= A <= B"
        )
    if options.rank < 0:
        raise ValueError(f"--rank {options.rank}: ranks are counted from 0")
    options.steps = int(match[1]), int(match[2])
    return options
