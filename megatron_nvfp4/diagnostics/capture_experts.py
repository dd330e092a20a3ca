"""What the fused expert dataflow shows of itself: FC1's and FC2's rows, operands and gradients.

`values` is modules.moe.ExpertValues; hooks on the experts' linears see none of this.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_nvfp4.quant import dequantize, expand_groups
from megatron_nvfp4.quant.dispatch import gather_rows
from megatron_nvfp4.quant.nvfp4 import QuantizedTensor
from megatron_nvfp4.quant.swiglu import weighted_activation

from .capture_record import Place, StepRecord, replay_operand, weight_operand
from .capture_tokens import Microbatches

SUFFIX = ".experts.linear_fc1"


class ExpertObserver:
    """Enters what the layers of one pipeline chunk compute. wanted: by the linears' names."""

    def __init__(
        self, record: StepRecord, batches: Microbatches, wanted: dict[str, dict[str, bool]]
    ) -> None:
        self.record, self.batches, self.wanted = record, batches, wanted

    def __call__(self, values: Any):
        """The observer of modules.moe.observe."""
        fc1, fc2 = values.fc1.setup.name, values.fc2.setup.name
        if not (self.wanted.get(fc1) or self.wanted.get(fc2)):
            return None
        instance, again = self.batches.instance(fc1, "dataflow")
        rows = self._rows(values, fc1, instance)
        if not again:
            self._fc1(values, fc1, instance, rows)
            self._fc2(values, fc2, instance, rows)
        places = [self._place(name, "grads", instance, rows) for name in (fc1, fc2)]
        if places == [None, None]:
            return None

        def show_grads(grad_h: Tensor, grad_out: Tensor) -> None:
            # The backward's order: FC2's output comes first.
            for place, grad in ((places[1], grad_out), (places[0], grad_h)):
                if place is not None:
                    self.record.tensor(place, "output.grad", grad, "actual")

        return show_grads

    def _place(self, name: str, what: str, instance: int, rows: str | None) -> Place | None:
        wanted = self.wanted.get(name, {})
        return Place(name, instance, wanted[what], rows) if what in wanted else None

    def _rows(self, values: Any, fc1: str, instance: int) -> str | None:
        layer = fc1.removesuffix(SUFFIX)
        plan, coordinates = values.plan, self.batches.coordinates
        num = len(values.fc1.weights)
        first = num * coordinates.get("ep_rank", 0)
        number = torch.arange(first, first + num, device=plan.offsets.device)
        expert = expand_groups(number, plan.offsets, plan.index.shape[0])
        token = plan.index if plan.trip is None else None
        return self.batches.rows_of_experts(layer, instance, token, expert)

    def _fc1(self, values: Any, name: str, instance: int, rows: str | None) -> None:
        spec, plan, place = values.fc1.recipe.fprop.left, values.plan, self._place
        inputs = place(name, "inputs", instance, rows)
        operands = place(name, "operands", instance, rows)
        tokens, packed = values.tokens, values.packed
        if (inputs or operands) is not None:
            if isinstance(tokens, QuantizedTensor):
                self.record.note(
                    f"{name}: tokens travelled packed, the input is what they decode to"
                )
                tokens = dequantize(tokens, values.fc1.setup.dtype)
            x = gather_rows(tokens, plan.index.clamp_min(0))
            if inputs is not None:
                self.record.tensor(inputs, "input", x, "actual")
            if operands is not None and isinstance(packed, QuantizedTensor):
                operand = gather_rows(packed, plan.index.clamp_min(0))
                self.record.operand(operands, "input", x, operand, "actual")
            elif operands is not None:
                operand = replay_operand(x, spec, lambda: plan.offsets)
                if operand is not None:
                    self.record.operand(operands, "input", x, operand, "replay")
        self._weights(values.fc1, operands)
        outputs = place(name, "outputs", instance, rows)
        if outputs is not None:
            self.record.tensor(outputs, "output", values.h, "actual")

    def _fc2(self, values: Any, name: str, instance: int, rows: str | None) -> None:
        inputs, operands, outputs = (
            self._place(name, what, instance, rows) for what in ("inputs", "operands", "outputs")
        )
        is_quantized = not isinstance(values.y_operand, Tensor)
        if (inputs or operands) is not None:
            y, provenance = values.y, "actual"
            if y is None and not is_quantized:
                y = values.y_operand
            elif y is None:
                before = values.flow.router_weight == "before_fc2"
                probs = values.prob_rows if before else None
                y = weighted_activation(values.h, probs, values.flow.activation)
                provenance = "replay"
            if inputs is not None:
                self.record.tensor(inputs, "input", y, provenance)
            if operands is not None and is_quantized:
                self.record.operand(operands, "input", y, values.y_operand, "actual")
        self._weights(values.fc2, operands)
        if outputs is not None:
            self.record.tensor(outputs, "output", values.out, "actual")

    def _weights(self, matmul: Any, place: Place | None) -> None:
        if place is not None and place.instance == 0:
            spec = matmul.recipe.fprop.right
            first = len(matmul.weights) * self.batches.coordinates.get("ep_rank", 0)
            weight_operand(self.record, place, matmul.weights, spec, first)
