"""Captures chosen steps of a training run: statistics of tensors, and dumps to compare runs by.

Capture is told when training and each step begin and end; by whom does not matter. Between captured steps
no hook is installed. A captured step costs its statistics, a wait for the device at its end, and a wait for
each tensor that is dumped.
"""

import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_nvfp4.recipes.policy import name_pattern

from .capture_config import CaptureConfig
from .capture_experts import ExpertObserver
from .capture_hooks import MODEL, ModelHooks, ModuleHooks, RouterHook, first_expert
from .capture_record import Place, StepRecord, json_lines, scalars
from .capture_tokens import Microbatches
from .dump import DumpWriter, Folder, dump_folder

logger = logging.getLogger(__name__)


class Seams(Protocol):
    """What a capture needs of the trainer around it."""

    def coordinates(self) -> dict[str, Any]:
        """rank, and tp_rank, tp_size, ... of whatever parallelism there is."""
        ...

    def model(self, model: Sequence[torch.nn.Module]) -> dict[str, int]:
        """Sizes that a comparison needs: num_heads, num_groups, head_dim."""
        ...

    def bypassed(self, model: Sequence[torch.nn.Module]) -> str | None:
        """Why the modules below the model run no forward, None where they do."""
        ...

    def tensorboard_writer(self) -> Any | None: ...

    def observe_experts(self, observer: Callable[[Any], Any] | None) -> None:
        """modules.moe.observe."""
        ...

    def gemm_input(self, module: torch.nn.Module, x: Tensor) -> Tensor:
        """What the product of a linear module reads, of the module's input."""
        ...


class Capture:
    """Captures what the config names, on the ranks it names.

    open_folder: gives the folder of a dump, to be written whole. A resumed run goes on in the same files; a
    step that is captured again replaces its dump.
    Errors: ValueError for steps that the run does not have, or a rule that matches no module; RuntimeError
    where dumps are asked for and the package safetensors is missing. What cannot be written is a warning.
    """

    def __init__(
        self, config: CaptureConfig, *, seams: Seams, open_folder: Callable[[Path], Folder]
    ) -> None:
        self.config, self.seams, self.open_folder = config, seams, open_folder
        self._coordinates: dict[str, Any] = {"rank": 0}
        self._chunks: list[torch.nn.Module] = []
        self._wanted: list[list[tuple[str, torch.nn.Module, dict[str, bool]]]] = []
        self._record: StepRecord | None = None
        self._handles: list[Any] = []

    @property
    def rank(self) -> int:
        return self._coordinates["rank"]

    def begin_training(
        self, model: Sequence[torch.nn.Module], optimizer: Any, first_step: int, last_step: int
    ) -> None:
        """Before the first step: model, its chunks; the run's own steps."""
        steps = self.config.steps
        hint = "".join(f"; {note}" for note in steps.unquoted_ranges(last_step))
        if not steps.any_in(first_step, last_step):
            raise ValueError(
                f"--minite-capture: no step of the file is one of this run's, {first_step} to {last_step}"
                + hint
            )
        if hint:
            logger.warning(
                "--minite-capture: a step is behind the run's last, %d%s", last_step, hint
            )
        dumps = any(rule.tensors for rule in self.config.rules)
        if dumps and importlib.util.find_spec("safetensors") is None:
            raise RuntimeError(
                "--minite-capture: tensors: true needs the package safetensors; pip install safetensors"
            )
        self._coordinates = self.seams.coordinates()
        self._chunks = [_unwrapped(chunk) for chunk in model]
        names = [[*module_names(chunk)] for chunk in self._chunks]
        self._wanted = [
            [(name, module, self.config.of(name)) for name, module in chunk] for chunk in names
        ]
        self._require_forwards()
        self._require_matches([name for chunk in names for name, _ in chunk])
        if self._is_mine():
            self.config.out.mkdir(parents=True, exist_ok=True)

    def begin_step(self, step: int) -> None:
        """Install the hooks and take the weights, if the step is one of the file's."""
        if step not in self.config.steps or not self._is_mine():
            return
        writer = DumpWriter(step, self.rank, self._coordinates, self.seams.model(self._chunks))
        self._record = StepRecord(step, self.rank, writer)
        observers = [
            self._install(chunk, wanted)
            for chunk, wanted in zip(self._chunks, self._wanted, strict=True)
        ]
        self.seams.observe_experts(lambda values: _first(observers, values))
        self._parameters("weight", lambda parameter: parameter)

    def end_step(self, step: int) -> None:
        """Take the weights' gradients, remove the hooks, and write."""
        if self._record is None:
            return
        self._parameters("weight.grad", _gradient)
        record = self._remove()
        try:
            self._write(record)
        except (
            Exception
        ) as error:  # whatever a full disk makes of it: no dump is worth a training run
            logger.warning("--minite-capture: step %d was not written: %s", step, error)

    def _write(self, record: StepRecord) -> None:
        lines = record.flush()
        _append(self.config.out / f"statistics.rank-{self.rank:05d}.jsonl", json_lines(lines))
        writer = self.seams.tensorboard_writer()
        if writer is not None:
            for line in lines:
                for tag, value in scalars(line).items():
                    writer.add_scalar(tag, value, record.step)
        if record.writer.entries:
            folder = dump_folder(self.config.out, record.step, self.rank)
            record.writer.write(self.open_folder(folder))

    def end_training(self, error: BaseException | None) -> None:
        """Drop a step that did not end."""
        if self._record is not None:
            self._remove()

    def _is_mine(self) -> bool:
        return self.config.ranks is None or self.rank in self.config.ranks

    def _require_forwards(self) -> None:
        reason = self.seams.bypassed(self._chunks)
        asked = [
            name
            for chunk in self._wanted
            for name, _, wanted in chunk
            if name != MODEL and set(wanted) - {"weights"}
        ]
        if reason and asked:
            raise ValueError(
                f"--minite-capture: {asked[0]} and {len(asked) - 1} more run no forward here: {reason}; "
                "capture their weights alone, and logprobs of `model`"
            )

    def _require_matches(self, names: list[str]) -> None:
        """Every pattern of every rule; on one rank of a pipeline one may well match nothing."""
        if self._coordinates.get("pp_size", 1) > 1:
            return
        for pattern in (each for rule in self.config.rules for each in rule.match):
            if not any(map(name_pattern(pattern).fullmatch, names)):
                shown = [name for name in names if name.count(".") > 2]
                raise ValueError(
                    f"--minite-capture: match {pattern} is the name of no module; names are "
                    f"like {(shown or names)[0]}"
                )

    def _install(self, chunk: torch.nn.Module, wanted) -> ExpertObserver:
        record = self._record
        assert record is not None
        batches = Microbatches(record.writer, self._coordinates)
        by_name = {name: of for name, _, of in wanted}
        self._handles += ModelHooks(record, batches, by_name[MODEL]).install(chunk)
        for name, module, of in wanted:
            if name == MODEL:
                continue
            if name.rpartition(".")[2] == "router":
                hook = RouterHook(record, batches, name, of)
                self._handles.append(module.register_forward_hook(hook.after))
            if of:
                hooks = ModuleHooks(record, batches, name, of, self.seams.gemm_input)
                self._handles += hooks.install(module)
        return ExpertObserver(record, batches, by_name)

    def _parameters(self, what: str, value_of: Callable[[Tensor], Tensor | None]) -> None:
        """Enter the parameters that lie in the wanted modules themselves, or something of each."""
        category = "weights" if what == "weight" else "grads"
        for name, module, of in (each for chunk in self._wanted for each in chunk):
            if category not in of:
                continue
            for key, parameter in module.named_parameters(recurse=False):
                value = value_of(parameter)
                number = key.removeprefix("weight")
                if hasattr(module, "num_gemms") and number.isdigit():
                    key = f"weight{first_expert(module, self._coordinates) + int(number)}"
                if value is not None:
                    place = Place(name, 0, of[category], parameter=True)
                    self._record.tensor(place, what.replace("weight", key), value, "actual")

    def _remove(self) -> StepRecord:
        record, self._record = self._record, None
        assert record is not None
        record.is_open = False
        self.seams.observe_experts(None)
        while self._handles:
            self._handles.pop().remove()
        return record


def module_names(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Model-wide names, as the policy file has them: the top-level module is `model`, a layer is numbered
    in the whole model, not in its pipeline stage."""
    renamed: dict[str, str] = {}
    for path, module in model.named_modules():
        if not path:
            yield MODEL, module
            continue
        stem, _, last = path.rpartition(".")
        stem = renamed.get(stem, stem)
        number = getattr(module, "layer_number", None)
        if last.isdigit() and type(number) is int and not stem.startswith("mtp"):
            last = str(number - 1)
        name = getattr(module, "layer_name", None)
        renamed[path] = (
            name if isinstance(name, str) and "." in name else f"{stem}.{last}".lstrip(".")
        )
        yield renamed[path], module


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside wrappers, which call what they wrap `module`."""
    while isinstance(getattr(module, "module", None), torch.nn.Module):
        module = module.module
    return module


def _gradient(parameter: Tensor) -> Tensor | None:
    """What the optimizer took its step with; Megatron accumulates in main_grad."""
    return getattr(parameter, "main_grad", parameter.grad)


def _first(observers: list[ExpertObserver], values: Any):
    """Of the chunks the one that has the layer."""
    name = values.fc1.setup.name
    for observer in observers:
        if name in observer.wanted:
            return observer(values)
    return None


def _append(path: Path, data: bytes) -> None:
    """Lines at the end of a file. One that a full disk or a killed process tore stays a line of its own."""
    with path.open("a+b", buffering=0) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            data = data if file.read(1) == b"\n" else b"\n" + data
        rest = memoryview(data)
        while rest:  # a nearly full disk takes a part, and only the next call fails
            rest = rest[file.write(rest) :]


class PlainSeams:
    """Seams of a model outside Megatron, on one rank."""

    def coordinates(self) -> dict[str, Any]:
        return {"rank": 0}

    def model(self, model: Sequence[torch.nn.Module]) -> dict[str, int]:
        return {}

    def bypassed(self, model: Sequence[torch.nn.Module]) -> str | None:
        return None

    def tensorboard_writer(self) -> None:
        return None

    def observe_experts(self, observer) -> None:
        pass

    def gemm_input(self, module: torch.nn.Module, x: Tensor) -> Tensor:
        return x
