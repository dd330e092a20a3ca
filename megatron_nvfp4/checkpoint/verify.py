"""Is an NVFP4 checkpoint what its configuration says, and what a sampler will make of it?

Every tensor is looked at: presence, dtype, shape, finite numbers, equal scales where samplers fuse; with the
BF16 original at hand also what the weights decode to. Each fault names its tensor.
"""

import argparse
import json
import math
from pathlib import Path

import torch

from megatron_nvfp4.checkpoint.architecture import FAMILIES
from megatron_nvfp4.checkpoint.formats import (
    MODELOPT,
    PackedWeight,
    activations_of,
    format_of,
)
from megatron_nvfp4.checkpoint.hf import HFReader
from megatron_nvfp4.checkpoint.ignore import differences, fused_with, natural_order
from megatron_nvfp4.checkpoint.original import Original
from megatron_nvfp4.checkpoint.plan import (
    HF_EMBEDDING,
    HF_OUTPUT,
    Architecture,
    copies,
    hf_tensors,
)
from megatron_nvfp4.checkpoint.progress import Progress
from megatron_nvfp4.checkpoint.values import FLOATS, is_finite
from megatron_nvfp4.checkpoint.verify_config import (
    WrongUseError,
    architecture_of,
    declared,
    ignored,
    refuse_another_model,
    refuse_unquantised,
    second_config,
)
from megatron_nvfp4.checkpoint.verify_report import Report, lines_of
from megatron_nvfp4.quant.nvfp4 import BLOCK, E2M1_MAX, E4M3_MAX

_RECIPROCAL = 1e5  # 2688^2 / amax is what a scale upside down allows
_LARGEST_WEIGHT = 1e3  # beyond this an outer scale is more likely upside down
_KV_SCALES = (".k_scale", ".v_scale", ".k_proj.k_scale", ".v_proj.v_scale")


def verify(folder: str | Path, against: str | Path | None = None) -> Report:
    """Check an NVFP4 folder; against: the BF16 folder it was made from.

    What is wrong with the files is in the report, what is wrong with the call (no such folder, one that is
    not quantised, an original of another model) is a ValueError.
    """
    report = Report(str(folder))
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: no such folder; name an NVFP4 checkpoint's")
    original = None if against is None else HFReader(against)
    try:
        reader = HFReader(folder)
        refuse_unquantised(reader)
        if original is not None:
            refuse_another_model(reader, original)
        checked = _Checkpoint(reader, report)
    except WrongUseError:
        raise
    except ValueError as error:
        report.error(str(folder), str(error))
        return report
    checked.check_tensors()
    checked.check_shared_scales()
    checked.check_input_scales()
    checked.check_readers()
    checked.check_configurations()
    checked.check_values(
        Original(original, checked.arch, checked.form, report) if original is not None else None
    )
    return report


class _Checkpoint:
    """The folder under test, its declared format, and what each module turned out to be."""

    def __init__(self, reader: HFReader, report: Report):
        self.reader, self.report = reader, report
        self.names = set(reader.names())
        self.config = declared(reader, report)
        self.form = format_of(self.config)
        self.activations = activations_of(self.form, self.config)
        report.format, report.activations = self.form.name, self.activations
        report.producer = dict(self.config.get("producer") or {})
        self.arch = self._architecture()
        self.expected = self._expected()
        self.quantized: dict[str, tuple[int, int]] = {}  # module -> (N, K)
        self.kept: dict[str, tuple[int, ...]] = {}  # tensor -> shape
        self.sound: list[str] = []  # quantised modules whose tensors can be read

    def _architecture(self) -> Architecture | None:
        try:
            return architecture_of(self.reader)
        except (ValueError, TypeError, ArithmeticError) as error:
            what = f"{error}; which tensors are missing cannot be told"
            if self.reader.config.get("model_type") in FAMILIES:
                self.report.error("config.json", what)
            else:
                self.report.warn("config.json", what)
            return None

    def _expected(self) -> dict[str, tuple[int, ...]]:
        """Every weight and other tensor the unquantised model would hold, by name."""
        if self.arch is not None:
            plain = {self._plain(name) for name in self.names}
            expected = hf_tensors(self.arch, hf_names=plain)
            return expected | {n: expected[o] for n, o in copies(self.arch, hf_names=plain).items()}
        found = {}
        ends = tuple(f".{suffix}" for suffix in self.form.suffixes[1:])
        for name in self.names:
            dtype, shape = self.reader.meta(name)
            if name.endswith((*ends, *_KV_SCALES)):
                continue
            if dtype == torch.uint8 and len(shape) == 2:
                shape = (shape[0], shape[1] * 2)
            found[self._plain(name)] = shape
        return found

    def _plain(self, name: str) -> str:
        """The tensor of the unquantised model that `name` belongs to."""
        for suffix in self.form.suffixes:
            if name.endswith(f".{suffix}"):
                return f"{name.removesuffix(suffix)}weight"
        return name

    # --- what is there ----------------------------------------------------------------------------

    def check_tensors(self) -> None:
        """Sort every expected tensor into quantised and kept; report what is missing or unknown."""
        known = set()
        for name, shape in self.expected.items():
            module = name.removesuffix(".weight")
            parts = {suffix: f"{module}.{suffix}" for suffix in self.form.suffixes}
            present = {suffix for suffix, part in parts.items() if part in self.names}
            if not name.endswith(".weight") or len(shape) != 2 or self._is_plain(name, present):
                known.add(name)
                self._check_kept(name, shape)
                continue
            known |= set(parts.values())
            if name in self.names and name != parts[self.form.codes]:
                known.add(name)
                self.report.error(
                    name, f"stands beside {parts[self.form.codes]}; one of them is wrong"
                )
            self.quantized[module] = (shape[0], shape[1])
            self._check_module(module, present)
        for name in sorted(self.names - known, key=natural_order):
            if not name.endswith((*_KV_SCALES, "rotary_emb.inv_freq")):
                self.report.error(name, "is no tensor of this model or format")
        self._check_never_quantized()
        self.report.num_quantized, self.report.num_kept = len(self.quantized), len(self.kept)
        values = sum(math.prod(shape) for shape in self.quantized.values())
        suffixes = self.form.suffixes
        stored = sum(
            self.reader.num_bytes(f"{module}.{suffix}")
            for module in self.quantized
            for suffix in suffixes
            if f"{module}.{suffix}" in self.names
        )
        self.report.bits_per_weight = 8 * stored / values if values else 0.0
        if not self.quantized:
            self.report.error("config.json", "declares NVFP4, and no weight of the file is NVFP4")

    def _is_plain(self, name: str, present: set[str]) -> bool:
        """Whether a matrix is stored unquantised: as floats and without any scale."""
        if name not in self.names:
            return not present
        return present <= {"weight"} and self.reader.meta(name)[0] in FLOATS

    def _check_kept(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.names:
            self.report.error(name, "is missing")
            return
        found = self.reader.meta(name)[1]
        if found != shape:
            self.report.error(name, f"has shape {found}; config.json asks for {shape}")
        self.kept[name] = found

    def _check_module(self, module: str, present: set[str]) -> None:
        """dtype and shape of a quantised module's tensors."""
        form, (num_rows, num_columns) = self.form, self.quantized[module]
        wanted = {
            form.codes: (torch.uint8, (num_rows, num_columns // 2)),
            form.block_scales: (torch.float8_e4m3fn, (num_rows, num_columns // BLOCK)),
        }
        sound = num_columns % BLOCK == 0
        if not sound:
            self.report.error(
                f"{module}.{form.codes}", f"K={num_columns} is no multiple of {BLOCK}"
            )
        for suffix in (form.codes, form.block_scales, form.outer_scale, form.input_scale):
            name = f"{module}.{suffix}"
            if suffix not in present:
                if suffix != form.input_scale:
                    sound = False
                    self.report.error(name, "is missing")
                continue
            dtype, shape = self.reader.meta(name)
            right = wanted.get(suffix)
            if right is None:
                sound &= self._check_scalar(name, dtype, shape)
            elif (dtype, shape) != right:
                sound = False
                self.report.error(
                    name,
                    f"holds {_word(dtype)} {shape}; NVFP4 is {_word(right[0])} {right[1]} there",
                )
        if sound:
            self.sound.append(module)

    def _check_scalar(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        if dtype != torch.float32 or math.prod(shape) != 1:
            self.report.error(name, f"holds {_word(dtype)} {shape}; one FP32 number is wanted")
            return False
        value = self.scalar(name)
        if not math.isfinite(value) or value <= 0:
            self.report.error(name, f"is {value}; a scale is positive and finite")
            return False
        return True

    def scalar(self, name: str) -> float:
        return self.reader.read(name).float().reshape(()).item()

    def _check_never_quantized(self) -> None:
        for module in self.quantized:
            if module.endswith(("lm_head", "embed_tokens", ".mlp.gate", "shared_head.head")):
                name = f"{module}.{self.form.codes}"
                self.report.error(name, "is quantised; router, embedding and head never are")

    # --- what belongs together --------------------------------------------------------------------

    def check_shared_scales(self) -> None:
        """One outer scale, and one input scale, for what a sampler fuses."""
        for suffix in (self.form.outer_scale, self.form.input_scale):
            first: dict[str, str] = {}
            for module, fused in fused_with(self.sound).items():
                name = f"{module}.{suffix}"
                if name not in self.names or fused == module:
                    continue
                other = first.setdefault(fused, name)
                a, b = self.scalar(name), self.scalar(other)
                if a != b:
                    self.report.error(
                        name,
                        f"is {a:.6g}, {other} is {b:.6g}: a sampler uses one for both; ratio "
                        f"{min(a, b) / max(a, b):.4f}",
                    )

    def check_input_scales(self) -> None:
        """Activation scales are there for all modules or for none, as the configuration declares."""
        suffix = self.form.input_scale
        holding = {module for module in self.quantized if f"{module}.{suffix}" in self.names}
        if self.activations == "static" or 0 < len(holding) < len(self.quantized):
            for module in self.quantized:
                if module not in holding:
                    self.report.error(
                        f"{module}.{suffix}",
                        "is missing: the configuration declares static activation scales, and loaders "
                        "read one that is not there as noise, 0 or 1"
                        if self.activations == "static"
                        else "is missing, while other modules have one",
                    )
        elif holding:
            self.report.warn(
                f"{min(holding, key=natural_order)}.{suffix}",
                f"and {len(holding) - 1} more stand here, but activations are declared as "
                f"{self.activations}",
            )

    def check_readers(self) -> None:
        """What the ignore list says to each sampler, against what is stored."""
        kept = [
            name.removesuffix(".weight")
            for name, shape in self.kept.items()
            if len(shape) == 2
            and name.endswith(".weight")
            and not name.endswith("embed_tokens.weight")
        ]
        patterns = ignored(self.config)
        for difference in differences(self.form.name, self.quantized, kept, patterns):
            self.report.learner_minus_sampler.append(difference.module)
            self.report.error(
                difference.module,
                f"stored as {difference.stored}, {difference.reader} reads {difference.read} by the "
                "ignore list",
            )

    def check_configurations(self) -> None:
        """KV cache, tied head, and hf_quant_config.json beside config.json."""
        scales = [name for name in self.names if name.endswith(_KV_SCALES)]
        declared = self.config.get("kv_cache_scheme") or self.config.get("kv_cache_quant_algo")
        self.report.kv_cache = f"declared {declared}" if declared else "not declared"
        if declared and not scales:
            self.report.warn(
                "kv_cache_scheme",
                "declares a quantised KV cache, and the file holds no scales for it",
            )
        if scales and not declared:
            self.report.warn(min(scales), "is a KV cache scale, and none is declared")
        for name in scales:
            self._check_scalar(name, *self.reader.meta(name))
        tied = self.reader.config.get("tie_word_embeddings")
        both = HF_OUTPUT in self.kept and HF_EMBEDDING in self.kept
        if tied and both and not torch.equal(*map(self.reader.read, (HF_OUTPUT, HF_EMBEDDING))):
            self.report.error(HF_OUTPUT, f"differs from {HF_EMBEDDING} although the two are tied")
        if self.form is MODELOPT:
            self._check_second_config(bool(declared))

    def _check_second_config(self, has_kv_cache: bool) -> None:
        """hf_quant_config.json, where it is there, says what config.json says."""
        name = "hf_quant_config.json"
        try:
            other = second_config(self.reader.folder)
        except ValueError as error:
            self.report.error(name, str(error))
            return
        if other is None:
            return
        for key in ("quant_algo", "group_size"):
            if self.config.get(key, other.get(key)) != other.get(key):
                says = f"config.json says {self.config.get(key)!r}"
                self.report.error(name, f"{key}={other.get(key)!r}, {says}")
        if set(ignored(other)) != set(ignored(self.config)):
            self.report.error(name, "exclude_modules differ from the ignore list of config.json")
        if bool(other.get("kv_cache_quant_algo")) != has_kv_cache:
            self.report.error(name, "kv_cache_quant_algo differs from config.json's KV cache")

    # --- what the bytes say -----------------------------------------------------------------------

    def check_values(self, original: Original | None) -> None:
        """No NaN or Inf anywhere; with an original, what each weight decodes to."""
        total = self.reader.num_bytes()
        with Progress("verify", total) as progress:
            for name in self.kept:
                tensor = self.reader.read(name)
                if not is_finite(tensor):
                    self.report.error(name, "holds a NaN or an Inf")
                elif original is not None:
                    original.compare_kept(name, tensor)
                progress.advance(tensor.nbytes)
            for module in self.sound:
                packed = self.packed(module)
                if self._check_scales(module, packed) and original is not None:
                    original.compare(module, packed)
                progress.advance(packed.codes.nbytes + packed.block_scales.nbytes)

    def packed(self, module: str) -> PackedWeight:
        form = self.form
        return form.packed(
            *(self.reader.read(f"{module}.{suffix}") for suffix in form.suffixes[:3])
        )

    def _check_scales(self, module: str, packed: PackedWeight) -> bool:
        name = f"{module}.{self.form.block_scales}"
        data = packed.block_scales.view(torch.uint8)
        for what, wrong in (
            ("NaN (0x7F or 0xFF)", (data & 0x7F) == 0x7F),
            ("negative", data > 0x80),
        ):
            count = int(wrong.sum())
            if count:
                row, column = (int(i) for i in wrong.nonzero()[0])
                self.report.error(
                    name, f"{count} scale bytes are {what}, the first at row {row}, block {column}"
                )
                return False
        largest = packed.multiplier.item() * E2M1_MAX * E4M3_MAX
        is_zero = not bool((packed.codes & 0x77).any())  # then no scale says anything
        if largest > _LARGEST_WEIGHT and not is_zero:
            say = self.report.error if largest > _RECIPROCAL else self.report.warn
            say(
                f"{module}.{self.form.outer_scale}",
                f"allows weights up to {largest:.3g}, read as {self.form.convention}; is it the reciprocal?",
            )
        if not bool(data.any()) and not is_zero:
            self.report.error(name, "every block scale is 0 under codes that are not")
        return True


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- the command ----------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `main`."""
    parser.add_argument("folder", metavar="DIR", help="the NVFP4 checkpoint to check")
    parser.add_argument("--against", metavar="BF16_DIR", help="the checkpoint it was made from")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def main(options: argparse.Namespace) -> int:
    """Check, print, and return 0 without faults, else 1; a wrong call is a ValueError."""
    report = verify(options.folder, options.against)
    if options.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        print("\n".join(lines_of(report)))
    return 1 if report.errors else 0
