"""What an NVFP4 file's tensors decode to, against the BF16 checkpoint they were made from."""

import math

import torch
from torch import Tensor

from megatron_nvfp4.checkpoint.export import read_layer
from megatron_nvfp4.checkpoint.export_plan import Layer, is_fused_expert
from megatron_nvfp4.checkpoint.formats import PackedWeight, ServingFormat
from megatron_nvfp4.checkpoint.hf import HFReader
from megatron_nvfp4.checkpoint.plan import Architecture, parameters
from megatron_nvfp4.checkpoint.verify_report import Comparison, Report

# NVFP4 of weights has a relative error near 0.09, hence a cosine near 0.996 and a norm ratio near 1.
MIN_COSINE = 0.98
NORM_RATIOS = (0.9, 1.1)
_CHUNK = 1 << 20  # values compared at a time


class Original:
    """The BF16 checkpoint a file was made from, under the file's tensor names."""

    def __init__(
        self, reader: HFReader, arch: Architecture | None, form: ServingFormat, report: Report
    ):
        self.reader, self.form, self.report = reader, form, report
        self.names = set(reader.names())
        self.layers: dict[str, Layer] = {}
        if arch is not None:
            per_expert = {name for name in self.names if not is_fused_expert(name)}
            for source, target in zip(
                parameters(arch, hf_names=self.names),
                parameters(arch, hf_names=per_expert),
                strict=True,
            ):
                layer = Layer(source, target)
                self.layers |= dict.fromkeys(layer.names, layer)

    def tensor(self, name: str) -> Tensor | None:
        """The original of a tensor, None (and a finding) where there is none."""
        if name in self.names:
            return self.reader.read(name)
        layer = self.layers.get(name)
        if layer is None or any(rows.hf_name not in self.names for rows in layer.source.rows):
            self.report.error(name, f"{self.reader.folder} holds no such tensor")
            return None
        return read_layer(self.reader, layer)[name]

    def compare_kept(self, name: str, tensor: Tensor) -> None:
        original = self.tensor(name)
        if original is not None and (
            original.shape != tensor.shape or not torch.equal(original.to(tensor.dtype), tensor)
        ):
            self.report.error(name, f"is unquantised, and differs from {self.reader.folder}")

    def compare(self, module: str, packed: PackedWeight) -> None:
        name = f"{module}.{self.form.codes}"
        original = self.tensor(f"{module}.weight")
        if original is None:
            return
        shape = (packed.codes.shape[0], packed.codes.shape[1] * 2)
        if tuple(original.shape) != shape:
            self.report.error(name, f"decodes to {shape}, the original is {tuple(original.shape)}")
            return
        found = _compare(module, packed, original)
        self.report.comparisons.append(found)
        if not found.cosine >= MIN_COSINE:
            self.report.error(
                name,
                f"cosine {found.cosine:.4f} to the original (norm ratio {found.norm_ratio:.4g}); other "
                "weights, other rows, or damaged scales",
            )
        elif not NORM_RATIOS[0] <= found.norm_ratio <= NORM_RATIOS[1]:
            self.report.error(
                f"{module}.{self.form.outer_scale}",
                f"norm ratio {found.norm_ratio:.4g} at cosine {found.cosine:.4f}, read as "
                f"{self.form.convention}: the outer scale is wrong, perhaps its reciprocal",
            )


def _compare(module: str, packed: PackedWeight, original: Tensor) -> Comparison:
    dot = decoded_square = original_square = 0.0
    step = max(1, _CHUNK // max(original.shape[1], 1))
    for start in range(0, original.shape[0], step):
        a = packed.rows(start, start + step).exact().float()
        b = original[start : start + step].float()
        # FP32 along a row, FP64 over the rows: far below the rounding that is measured.
        dot += torch.linalg.vecdot(a, b).double().sum().item()
        decoded_square += torch.linalg.vecdot(a, a).double().sum().item()
        original_square += torch.linalg.vecdot(b, b).double().sum().item()
    if original_square == 0 or decoded_square == 0:
        equal = 1.0 if original_square == decoded_square else 0.0
        return Comparison(module, equal, equal)
    norms = math.sqrt(decoded_square) * math.sqrt(original_square)
    ratio = packed.multiplier.item() * math.sqrt(decoded_square / original_square)
    return Comparison(module, dot / norms, ratio)
