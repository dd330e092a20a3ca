"""`python -m megatron_nvfp4 pretrain|run`: an unpatched Megatron with --transformer-impl minite.

Own options, all prefixed and taken out before Megatron parses the rest:
  --minite-device auto|cpu|cuda   auto: CUDA when there is a GPU, else the CPU shim (cpu_device.py)
  --minite-run-meta FILE          JSON record of what ran: recipe, layers, backends, versions, arguments
  --minite-step-log FILE          one JSON line per step: iteration, exact loss, seconds

An observer, where one is given, is told of every step (step_hooks.py): the verb `profile` is one, and
the option --minite-capture FILE, which the command line takes out before (cli/capture.py), is another.
"""

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .step_hooks import TrainingObserver

PROGRAM = "python -m megatron_nvfp4"


def pretrain(argv: list[str], *, observer: "TrainingObserver | None" = None) -> None:
    """Train a GPT model with megatron.training of the installed wheel; argv are Megatron's flags."""
    _prepare(f"{PROGRAM} pretrain", argv, observer)
    from .pretrain_gpt import main

    main()


def run(script: str, argv: list[str], *, observer: "TrainingObserver | None" = None) -> None:
    """Run any script of a Megatron-LM checkout, unpatched, as if started by itself."""
    path = Path(script).resolve()
    if not path.is_file():
        raise ValueError(f"run: {script} is not a file; give the path of a Megatron-LM script")
    # A script's own directory comes first, so that its checkout's megatron is the one that runs.
    sys.path.insert(0, str(path.parent))
    _prepare(str(path), argv, observer)
    if (path.parent / "gpt_builders.py").is_file():
        import gpt_builders

        from .hooks import wrap_gpt_builders

        wrap_gpt_builders(gpt_builders)
    runpy.run_path(str(path), run_name="__main__")


def _own_options() -> argparse.ArgumentParser:
    """In the order of the module's text. A capture is an observer here, so its option is only described."""
    parser = argparse.ArgumentParser(
        PROGRAM, "%(prog)s VERB ...", add_help=False, allow_abbrev=False
    )
    group = parser.add_argument_group("minite's launcher, beside Megatron's own options")
    group.add_argument(
        "--minite-device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto, the default: CUDA where torch sees a GPU, else the CPU",
    )
    group.add_argument(
        "--minite-run-meta", type=Path, metavar="FILE", help="JSON record of what ran"
    )
    group.add_argument(
        "--minite-step-log", type=Path, metavar="FILE", help="one JSON line per step"
    )
    group.add_argument(
        "--minite-capture",
        type=Path,
        metavar="FILE",
        help="YAML file: tensors and statistics of which modules, steps and ranks to write",
    )
    return parser


def _prepare(program: str, argv: list[str], observer: "TrainingObserver | None") -> None:
    """Device, process group variables, hooks and records; leaves Megatron's arguments in sys.argv."""
    own = _own_options()
    options, megatron_argv = own.parse_known_args(argv)
    if options.minite_capture is not None:
        raise ValueError(
            f"--minite-capture {options.minite_capture}: is an option of `pretrain` and `run` on the "
            "command line; give a function of this module a diagnostics.capture.Capture as observer"
        )
    if {"-h", "--help"} & {*megatron_argv}:
        own.print_help()  # Megatron's parser, which knows none of these, prints its own behind it
        print()
    _single_process_defaults()
    on_cpu = _choose_cpu(options.minite_device)
    if on_cpu:
        from . import cpu_device

        _limit_threads()
        cpu_device.install()
    sys.argv = [program, *megatron_argv]
    from . import hooks, run_record, step_hooks

    hooks.install()
    run_record.install(
        meta=options.minite_run_meta, steps=options.minite_step_log, argv=argv, on_cpu=on_cpu
    )
    if observer is not None:
        step_hooks.install(observer)


def _choose_cpu(device: str) -> bool:
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise RuntimeError(
            "--minite-device cuda: torch sees no GPU; check the driver, or use --minite-device cpu"
        )
    return device == "cpu" or not available


def _single_process_defaults() -> None:
    """What torchrun sets, for a single process started without it."""
    if "RANK" in os.environ:
        return
    defaults = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # whichever is free when it is bound: nobody else has to know it
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _limit_threads() -> None:
    """Share the cores among the ranks of this host; torch would give every rank all of them."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
