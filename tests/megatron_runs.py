"""Child processes of the Megatron tests: one or more ranks on this machine, on the CPU."""

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
TIMEOUT = 300
PRETRAIN = ("-m", "megatron_nvfp4", "pretrain")

MODEL = """
 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2
 --kv-channels 16 --ffn-hidden-size 128 --swiglu --disable-bias-linear --normalization RMSNorm --qk-layernorm
 --position-embedding-type rope --untie-embeddings-and-output-weights --seq-length 64
 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --min-lr 1e-3
 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer
 --vocab-size 255 --mock-data --split 99,1,0 --eval-iters 0 --eval-interval 1000 --log-interval 1 --seed 1234
 --bf16 --minite-device cpu
""".split()
MOE = """
 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96 --moe-router-load-balancing-type aux_loss
 --moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall --moe-grouped-gemm
""".split()
MINITE = ("--transformer-impl", "minite")


def require_megatron() -> None:
    """Skip the calling module, with the reason, where torch or megatron-core is missing; imports neither."""
    for package, distribution in (("torch", "torch"), ("megatron", "megatron-core")):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{distribution} is not installed", allow_module_level=True)


def environment(**changes: str) -> dict[str, str]:
    """This process's, without its numerics selectors and torchrun variables; one thread per rank."""
    torchrun = {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MINITE_")
        and name not in torchrun
        and name not in ("DISABLE_BACKWARD_QUANT", "PYTHONPATH")
    }
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **changes}


def run_ranks(command, num_ranks: int = 1, *, check: bool = True, **changes: str) -> list[str]:
    """Run `python *command` on every rank; the combined output of each. Fails with it when one fails."""
    port = "0" if num_ranks == 1 else _free_port()
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(num_ranks)]
        failed = _wait(_start(command, files, port, changes))
        for file in files:
            file.seek(0)
        outputs = [file.read() for file in files]
    if check and failed:
        text = "\n".join(
            f"rank {rank}, {failed[rank]}:\n{outputs[rank][-3000:]}" for rank in failed
        )
        pytest.fail(f"{' '.join(map(str, command))[:200]}\n{text}", pytrace=False)
    return outputs


# Below those that connections are given, from a place of this process's own, and each once in a long time:
# between this look and the bind, another thread or process looks too.
_FIRST_PORT, _PORTS_END = 10000, 32768
_ports = itertools.count(os.getpid() * 53)


def _free_port() -> str:
    for number in itertools.islice(_ports, _PORTS_END):
        port = _FIRST_PORT + number % (_PORTS_END - _FIRST_PORT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)
    raise RuntimeError(f"no free port from {_FIRST_PORT} to {_PORTS_END - 1}")


def _start(command, files, port: str, changes: dict[str, str]) -> list[subprocess.Popen]:
    """One process per file, which takes its output."""
    processes = []
    for rank, file in enumerate(files):
        world = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(files)),
            "LOCAL_WORLD_SIZE": str(len(files)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        environ = environment(**world, **changes)
        words = [sys.executable, *map(str, command)]
        processes.append(
            subprocess.Popen(words, env=environ, stdout=file, stderr=subprocess.STDOUT)
        )
    return processes


def _wait(processes) -> dict[int, str]:
    """Rank -> why it failed. The others are ended with the first: they would wait for it in a collective."""
    deadline, failed = time.monotonic() + TIMEOUT, {}
    while not failed and any(process.poll() is None for process in processes):
        time.sleep(0.1)
        for rank, process in enumerate(processes):
            if process.poll():
                failed[rank] = f"exit status {process.returncode}"
        if time.monotonic() > deadline:
            failed |= {
                rank: f"no end after {TIMEOUT} s"
                for rank, process in enumerate(processes)
                if process.poll() is None
            }
    for rank, process in enumerate(processes):
        if process.poll():
            failed.setdefault(rank, f"exit status {process.returncode}")
        process.kill()
        process.wait()
    return failed


@dataclasses.dataclass(frozen=True)
class World:
    """Checks that share one child process per rank, in order; te: with the Transformer Engine stand-in."""

    checks: tuple[Callable[[Path], None], ...]
    num_ranks: int = 1
    te: bool = False


class Outcomes:
    """What the checks of a test file's worlds came to; each world runs once, after those before it."""

    def __init__(
        self, script: Path, worlds: dict[str, World], folder: Path, **changes: str
    ) -> None:
        self.script, self.worlds, self.folder = script, worlds, folder
        self.changes = changes | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(TESTS)))}
        self.done: dict[str, list[dict]] = {}

    def require(self, world: str, check: str) -> None:
        """Fail with the traceback of every rank on which the check failed."""
        for name in self.worlds:
            if name not in self.done:
                self.done[name] = self._run(name)
            if name == world:
                break
        for rank, outcome in enumerate(self.done[world]):
            if outcome[check] is not None:
                pytest.fail(f"rank {rank} of {world}:\n{outcome[check]}", pytrace=False)

    def _run(self, world: str) -> list[dict]:
        num_ranks = self.worlds[world].num_ranks
        run_ranks((self.script, world, self.folder), num_ranks, **self.changes)
        return [
            json.loads((self.folder / f"{world}.{rank}.json").read_text())
            for rank in range(num_ranks)
        ]


def every_check(worlds: dict[str, World]):
    """Parametrise a test with (world, check)."""
    return pytest.mark.parametrize(
        ("world", "check"),
        [
            pytest.param(name, check.__name__, id=check.__name__.removeprefix("check_"))
            for name, world in worlds.items()
            for check in world.checks
        ],
    )


def run_world(worlds: dict[str, World]) -> None:
    """In the child: run the checks of the world that the command line names, and write what they came to."""
    import megatron_small as small

    name, folder = sys.argv[1], Path(sys.argv[2])
    small.start(te=worlds[name].te)
    outcome = {}
    for check in worlds[name].checks:
        small.parallelise()
        try:
            check(folder)
        except (
            BaseException
        ):  # torch's CheckpointException is one, and the next check must still run
            outcome[check.__name__] = traceback.format_exc()
        else:
            outcome[check.__name__] = None
    (folder / f"{name}.{os.environ['RANK']}.json").write_text(json.dumps(outcome))
    # The threads of process groups that Megatron has dropped can abort the interpreter's orderly end;
    # without it, Megatron's checkpoint workers have to be ended by hand.
    for worker in multiprocessing.active_children():
        worker.kill()
    sys.stdout.flush()
    os._exit(0)


class Training:
    """A finished run of Megatron: exact losses, gradient norms, run_meta.json, output of every rank."""

    def __init__(self, folder: Path, outputs: list[str]) -> None:
        self.folder, self.outputs = folder, outputs
        steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
        self.losses = [step["losses"]["lm loss"] for step in steps]
        self.meta = json.loads((folder / "meta.json").read_text())
        text = "\n".join(outputs)
        self.grad_norms = [
            float(norm) for norm in re.findall(r"grad norm: ([0-9.eE+-]+|nan)", text)
        ]


def train(folder: Path, *arguments, steps: int, num_ranks: int = 1, program=PRETRAIN, **changes):
    """Train the small model through the launcher; `arguments` go to Megatron behind the model's."""
    folder.mkdir(parents=True, exist_ok=True)
    records = (
        "--minite-run-meta",
        folder / "meta.json",
        "--minite-step-log",
        folder / "steps.jsonl",
    )
    command = (*program, *MODEL, "--train-iters", steps, *records, *arguments)
    return Training(folder, run_ranks(command, num_ranks, **changes))
