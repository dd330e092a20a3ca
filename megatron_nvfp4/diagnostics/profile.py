"""Profiles chosen steps of a training run by torch.profiler, and writes where their time went.

StepProfiler is told when training and each step begin and end; by whom does not matter. In the
profiled steps every module's forward and the optimizer's step are annotated. The device is drained
at both ends of a profiled step, so that its kernels lie in its window. That and the recording
(microseconds of host time an operator and a module) lengthen the gaps of a run that waits for its host.
"""

import functools
import gzip
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile, schedule

from .profile_report import write_report
from .trace import MODULE_MARK, OPTIMIZER_MARK, STEP_MARK, WHOLE_MODEL, Step, read_steps

TRACE = "trace.json.gz"


class Folder(Protocol):
    """A folder that appears whole: write below `path`, then publish or discard."""

    path: Path

    def publish(self) -> None: ...

    def discard(self) -> None: ...


class StepProfiler:
    """Profiles steps first..last, counted as the trainer's log counts them, on one rank.

    open_folder: gives the folder that the profile is written to, on that rank only. report: takes
    the steps once they are published. The step before `first`, where there is one, is the warm-up.
    Errors: ValueError for steps or a rank that the run does not have; RuntimeError for a run that
    ends too early.
    """

    def __init__(
        self,
        first: int,
        last: int,
        *,
        rank: int,
        open_folder: Callable[[], Folder],
        report: Callable[[Sequence[Step]], None],
    ) -> None:
        self.first, self.last, self.rank = first, last, rank
        self.open_folder, self.report = open_folder, report
        self.began = False
        self.done = False
        self._folder: Folder | None = None
        self._profiler: profile | None = None
        self._annotations: Annotations | None = None
        self._step: record_function | None = None
        self._seen = 0

    def begin_training(
        self, model: Sequence[torch.nn.Module], optimizer: Any, first_step: int, last_step: int
    ) -> None:
        """Before the first step: model, its chunks; the run's own steps."""
        if self.first < first_step or self.last > last_step:
            raise ValueError(
                f"--steps {self.first}:{self.last}: this run trains steps {first_step} to {last_step}; "
                "give steps among those, or train longer"
            )
        rank, world = 0, 1
        if torch.distributed.is_initialized():
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if self.rank >= world:
            raise ValueError(
                f"--rank {self.rank}: this run has ranks 0 to {world - 1}; give one of those"
            )
        self.began = True
        if rank != self.rank:
            self.done = True
            return
        self._folder = self.open_folder()
        self._annotations = Annotations(model, optimizer)
        devices = {p.device.type for chunk in model for p in chunk.parameters()}
        self._cuda = "cuda" in devices

    def begin_step(self, step: int) -> None:
        """Before step number `step`."""
        if self.done or not self.first - 1 <= step <= self.last:
            return
        if self._profiler is None:
            self._start(warmup=step < self.first)
        self._drain()
        self._step = record_function(f"{STEP_MARK}{step}")
        self._step.__enter__()

    def end_step(self, step: int) -> None:
        """After step number `step`; the last one writes and publishes the profile."""
        if self._step is None:
            return
        self._drain()
        self._step.__exit__(None, None, None)
        self._step = None
        self._seen = step
        self._profiler.step()
        if step == self.last:
            self._finish()

    def end_training(self, error: BaseException | None) -> None:
        """After the last step, or when `error` ended it: drops a profile that is not complete.

        Raises RuntimeError if the run ended in peace, or by exiting, before the last profiled step.
        """
        if self.done:
            return
        self._abandon()
        if error is None or isinstance(error, SystemExit):
            after = f"after profiling step {self._seen}" if self._seen else "too early"
            raise RuntimeError(
                f"--steps {self.first}:{self.last}: the run ended {after} and never finished step "
                f"{self.last}; nothing was written. Profile earlier steps, or let it run longer"
            )

    def _start(self, *, warmup: bool) -> None:
        activities = [ProfilerActivity.CPU]
        if self._cuda:
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(
            activities=activities,
            record_shapes=True,
            schedule=schedule(
                wait=0, warmup=int(warmup), active=self.last - self.first + 1, repeat=1
            ),
            on_trace_ready=lambda ready: ready.export_chrome_trace(str(self._folder.path / TRACE)),
        )
        self._annotations.install()
        self._profiler.start()

    def _finish(self) -> None:
        self._profiler.stop()
        self._annotations.remove()
        try:
            with gzip.open(self._folder.path / TRACE, "rt") as file:
                steps = read_steps(json.load(file)["traceEvents"])
            numbers = [step.number for step in steps]
            assert numbers == list(range(self.first, self.last + 1)), numbers
            device = torch.cuda.get_device_name() if self._cuda else "CPU"
            write_report(self._folder.path, steps, device)
            self._folder.publish()
        except BaseException:
            self._abandon()
            raise
        self.done = True
        self.report(steps)

    def _abandon(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        self._annotations.remove()
        if self._profiler is not None and not self.done:
            with suppress(RuntimeError):  # stopped already
                self._profiler.on_trace_ready = None
                self._profiler.stop()
        self._folder.discard()
        self.done = True

    def _drain(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


class Annotations:
    """Ranges around the forward of every module of `model` and around optimizer.step, while installed."""

    def __init__(self, model: Sequence[torch.nn.Module], optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self._handles: list = []
        self._open = threading.local()  # recomputation runs modules on the backward's thread
        self._step: Any = None

    def install(self) -> None:
        """Register the hooks."""
        for chunk in self.model:
            for path, module in chunk.named_modules():
                name = MODULE_MARK + module_name(path)
                self._handles += [
                    module.register_forward_pre_hook(functools.partial(self._enter, name)),
                    module.register_forward_hook(self._leave, always_call=True),
                ]
        if self.optimizer is not None:
            self._step = self.optimizer.step

            @functools.wraps(self._step)
            def step(*args, **kwargs):
                with record_function(OPTIMIZER_MARK):
                    return self._step(*args, **kwargs)

            self.optimizer.step = step

    def remove(self) -> None:
        """Leave the model and the optimizer as they were; safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._step is not None:
            self.optimizer.step, self._step = self._step, None

    def _enter(self, name: str, module: torch.nn.Module, inputs: tuple) -> None:
        annotation = record_function(name)
        annotation.__enter__()
        self._stack().append(annotation)

    def _leave(self, module: torch.nn.Module, inputs: tuple, output: Any) -> None:
        self._stack().pop().__exit__(None, None, None)

    def _stack(self) -> list[record_function]:
        if not hasattr(self._open, "stack"):
            self._open.stack = []
        return self._open.stack


def module_name(path: str) -> str:
    """A path of named_modules() without the data-parallel and 16-bit wrappers around the model."""
    while path.startswith("module."):
        path = path.removeprefix("module.")
    return WHOLE_MODEL if path in ("", "module") else path
