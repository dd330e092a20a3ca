"""torch's hooks on the modules that a captured step looks at."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_nvfp4.quant import offsets_from_splits

from .capture_record import Place, StepRecord, replay_operand, weight_operand
from .capture_tokens import Microbatches, experts_of_map

EXPERTS = ".experts."
MODEL = "model"


class ModuleHooks:
    """Hooks of one module.

    wanted: what to take of it, and whether to dump it. gemm_input: what the module's product reads, given
    the module and its input.
    """

    def __init__(
        self,
        record: StepRecord,
        batches: Microbatches,
        name: str,
        wanted: dict[str, bool],
        gemm_input: Callable[[torch.nn.Module, Tensor], Tensor],
    ) -> None:
        self.record, self.batches, self.name = record, batches, name
        self.wanted, self.gemm_input = wanted, gemm_input

    def install(self, module: torch.nn.Module) -> list[Any]:
        """The handles of the hooks that are needed."""
        handles = []
        if {"inputs", "operands"} & self.wanted.keys():
            handles.append(module.register_forward_pre_hook(self.before))
        if {"outputs", "grads"} & self.wanted.keys():
            handles.append(module.register_forward_hook(self.after))
        return handles

    def before(self, module: torch.nn.Module, args: tuple) -> None:
        x = _first_tensor(args)
        instance, again = self.batches.instance(self.name, "input")
        if x is None or again:
            return
        rows = self._rows(module, x, args, instance)
        if "inputs" in self.wanted:
            what = f"{self._permuted(args)}input"
            self.record.tensor(self._place("inputs", instance, rows), what, x, "hook")
        if "operands" in self.wanted and getattr(module, "qlinear_params", None) is not None:
            self._operands(module, x, args, self._place("operands", instance, rows))

    def after(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        y = _first_tensor(output)
        instance, again = self.batches.instance(self.name, "output")
        if y is None:
            return
        rows = self._rows(module, y, args, instance)
        if "outputs" in self.wanted and not again:
            what = f"{self._permuted(args)}output"
            self.record.tensor(self._place("outputs", instance, rows), what, y, "hook")
        if "grads" in self.wanted and y.requires_grad:
            place = self._place("grads", instance, rows)
            what = f"{self._permuted(args)}output.grad"
            y.register_hook(lambda grad: self.record.tensor(place, what, grad, "hook"))

    def _permuted(self, args: tuple) -> str:
        """Marks the experts as a whole outside the fused dataflow: they take rows of experts, not tokens."""
        is_whole = f".{self.name}".endswith(EXPERTS.rstrip("."))
        return "permuted_" if is_whole and _has_splits(args) else ""

    def _place(self, what: str, instance: int, rows: str | None) -> Place:
        return Place(self.name, instance, self.wanted[what], rows)

    def _operands(self, module, x: Tensor, args: tuple, place: Place) -> None:
        fault = input_fault(module)
        if fault:
            self.record.note(f"{self.name}: no input operand: {fault}")
        else:
            x = self.gemm_input(module, x)
            x = x.reshape(-1, x.shape[-1])
            groups = None
            if hasattr(module, "num_gemms"):
                groups = lambda: offsets_from_splits(args[1], x.device)  # noqa: E731
            operand = replay_operand(x, module.qlinear_params.recipe.fprop.left, groups)
            if operand is not None:
                self.record.operand(place, "input", x, operand, "replay")
        if place.instance:
            return
        if _is_sharded(module):
            self.record.note(
                f"{self.name}: no weight operand: the amax of all its shards is not here"
            )
            return
        spec = module.qlinear_params.recipe.fprop.right
        if hasattr(module, "num_gemms"):
            first = first_expert(module, self.batches.coordinates)
            weight_operand(self.record, place, module.weights, spec, first)
        else:
            weight_operand(self.record, place, (module.weight,), spec)

    def _rows(self, module: torch.nn.Module, x: Tensor, args: tuple, instance: int) -> str | None:
        """Whose the rows are; those of experts' linears by the routing that the layer's router gave."""
        if EXPERTS not in f"{self.name}.":
            return self.batches.rows_of(x, instance)
        layer = f"{self.name}.".split(EXPERTS)[0]
        is_permuted = _has_splits(args)
        if self.name == f"{layer}.experts" and not is_permuted:
            return self.batches.rows_of(x, instance)
        routing_map = self.batches.routes.get((instance, layer))
        if not is_permuted or routing_map is None or not hasattr(module, "num_gemms"):
            return None
        if not any(self.wanted.values()):
            return None  # a table takes a wait for the device, and only dumps have any
        if self.batches.coordinates.get("ep_size", 1) > 1:
            splits = torch.as_tensor(args[1])
            first = first_expert(module, self.batches.coordinates)
            experts = torch.arange(first, first + len(splits)).repeat_interleave(splits.cpu())
            return self.batches.rows_of_experts(layer, instance, None, experts)
        expert, token = routing_map.t().nonzero(as_tuple=True)
        if len(token) != x.shape[0]:
            self.record.note(
                f"{layer}: {x.shape[0]} rows for {len(token)} choices, whose is unknown"
            )
            return None
        return self.batches.rows_of_experts(layer, instance, token, expert)


def input_fault(module: torch.nn.Module) -> str | None:
    """Why the operand of a linear's input cannot be made of the input alone, or None."""
    operands = module.qlinear_params.recipe.fprop
    if operands.hadamard:
        return "it is rotated first"
    if getattr(operands.left, "rounding", "nearest") != "nearest":
        return "it is rounded stochastically"
    whole = getattr(module, "parallel_mode", None) != "row" and (
        getattr(operands.left, "outer", "token") == "token"
        or not getattr(module, "sequence_parallel", False)
    )
    return None if whole or not _is_sharded(module) else "its amax is taken over several ranks"


def first_expert(module: torch.nn.Module, coordinates: Mapping[str, Any]) -> int:
    """Number in the model of the first expert of a grouped linear on this rank."""
    return module.num_gemms * coordinates.get("ep_rank", 0)


def _is_sharded(module: torch.nn.Module) -> bool:
    return getattr(module, "tp_size", 1) > 1 or getattr(module, "amax_group", None) is not None


class RouterHook:
    """Keeps the routing map of a layer for its experts' rows, and enters it where it is wanted."""

    def __init__(
        self, record: StepRecord, batches: Microbatches, name: str, wanted: dict[str, bool]
    ) -> None:
        self.record, self.batches, self.name, self.wanted = record, batches, name, wanted

    def after(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        found = is_routing(output)
        if not found or self.batches.instance(self.name, "routing")[1]:
            return
        probs, routing_map = output
        layer = self.name.rpartition(".")[0]
        self.batches.routes[self.batches.number, layer] = routing_map
        if "routing" in self.wanted:
            top_k = getattr(module, "topk", routing_map.shape[1])
            rows = self.batches.rows_of(routing_map, self.batches.number)
            place = Place(self.name, self.batches.number, self.wanted["routing"], rows)
            chosen = experts_of_map(routing_map, probs.detach(), top_k)
            self.record.routing(place, *chosen, routing_map.shape[1])


def is_routing(output: Any) -> bool:
    """Whether a module's output is Megatron's (probabilities (T, E), routing map (T, E))."""
    if not (isinstance(output, tuple) and len(output) == 2):
        return False
    probs, routing_map = output
    return (
        isinstance(routing_map, Tensor)
        and routing_map.dtype == torch.bool
        and routing_map.dim() == 2
        and probs.shape == routing_map.shape
    )


class ModelHooks:
    """Hooks of the top-level module: microbatches, and log-probabilities of labels."""

    def __init__(self, record: StepRecord, batches: Microbatches, wanted: dict[str, bool]) -> None:
        self.record, self.batches, self.wanted = record, batches, wanted

    def install(self, model: torch.nn.Module) -> list[Any]:
        return [
            model.register_forward_pre_hook(self.batches.begin, with_kwargs=True),
            model.register_forward_hook(self.after, with_kwargs=True),
        ]

    def after(self, module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        self.batches.end()
        is_loss = isinstance(output, Tensor) and output.dim() == 2 and output.is_floating_point()
        if "logprobs" in self.wanted and is_loss and kwargs.get("labels") is not None:
            rows = self.batches.rows_of_next(self.batches.number)
            place = Place(MODEL, self.batches.number, self.wanted["logprobs"], rows)
            self.record.tensor(place, "logprobs", -output.detach(), "hook")


def _has_splits(args: tuple) -> bool:
    """Whether a call has its rows by expert, and their numbers as second argument."""
    return len(args) > 1 and isinstance(args[1], Tensor | list)


def _first_tensor(values: Any) -> Tensor | None:
    """A floating-point tensor, or the first one of a tuple if that is one."""
    first = values[0] if isinstance(values, tuple) and values else values
    return first if isinstance(first, Tensor) and first.is_floating_point() else None
