"""NVFP4 on disk: tensor names, scale conventions and configuration of the two serving formats.

Common to both: E2M1 codes, uint8 (N, K/2), even column in the low nibble; E4M3 block scales (N, K/16), in
rows, not swizzled; one FP32 outer scale per weight. They differ in names and in what the outer scale is:
`modelopt` stores the multiplier, w = code * weight_scale * weight_scale_2; `compressed-tensors` stores its
reciprocal, w = code * weight_scale / weight_global_scale. Activation scales follow the same rule.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_nvfp4 import backends
from megatron_nvfp4.quant import QuantizedTensor, pack_codes
from megatron_nvfp4.quant.nvfp4 import (
    BLOCK,
    E2M1_MAX,
    E4M3_MAX,
    block_amax,
    decode_scale,
    encode_e2m1,
    encode_scale,
)
from megatron_nvfp4.recipes import NVFP4Spec

# How a file says activations are quantised: one scale per input written in the file, one per token found
# by the sampler, or not at all.
ACTIVATIONS = ("static", "token", "none")
_CHUNK = 1 << 18  # elements that quantize_modelopt holds in FP32 at a time
_E4M3_MIN = 2.0**-9  # smallest positive E4M3


@dataclass(frozen=True)
class PackedWeight:
    """One weight (N, K) as stored: codes, block_scales, and the FP32 outer scale both ways round.

    multiplier, divisor: FP32 scalars; w = code * block_scale * multiplier, and divisor is its reciprocal
    as the quantiser that made the codes computed it.
    """

    codes: Tensor
    block_scales: Tensor
    multiplier: Tensor
    divisor: Tensor

    def rows(self, start: int, stop: int) -> "PackedWeight":
        """Rows start..stop, under the same outer scale."""
        return PackedWeight(
            self.codes[start:stop], self.block_scales[start:stop], self.multiplier, self.divisor
        )

    def exact(self) -> Tensor:
        """(N, K) of q * s_b, BF16 and exact; the outer scale is left to the caller."""
        unit = torch.tensor([E2M1_MAX * E4M3_MAX])  # the amax whose outer scale is 1
        quantized = QuantizedTensor(self.codes, self.block_scales, unit, NVFP4Spec())
        shape = quantized.shape
        chosen = backends.select("quantize", (quantized.spec,), shape=shape, device="cpu")
        return chosen.dequantize(quantized, torch.bfloat16)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(N, K) values: RN(q * s_b * multiplier) in FP32, rounded once to `dtype`."""
        return (self.exact().float() * self.multiplier).to(dtype)


def pack_quantized(quantized: QuantizedTensor) -> PackedWeight:
    """A matrix with one amax, as quant.quantize made it, ready to be stored."""
    assert quantized.amax.shape == (1,), "a stored weight has one outer scale"
    divisor = encode_scale(quantized.amax[0], quantized.spec.e4m3_max)
    return PackedWeight(quantized.codes, quantized.block_scales, decode_scale(divisor), divisor)


def quantize_modelopt(x: Tensor, amax: Tensor) -> PackedWeight:
    """A weight (N, K) by the formula of nvidia-modelopt 0.47, which divides where ours multiplies.

    s2 = amax / 2688; s_b = e4m3(amax_b / (6 * s2)), at least 2^-9, and 1 where amax_b is 0;
    q = e2m1(x / (s_b * s2)), a zero without its sign. Bits of its NVFP4QTensor.quantize on a CPU
    (github.com/NVIDIA/Model-Optimizer, torch/quantization/qtensor/nvfp4_tensor.py), but for a weight of
    zeros, whose s2 is 1 here: ModelOpt's 0 makes NaN scales.
    amax: FP32 (1,), of the weight or of all weights that share an outer scale.
    """
    s2 = torch.div(amax[0], torch.tensor(E2M1_MAX * E4M3_MAX))
    s2 = torch.where(amax[0] == 0, torch.ones_like(s2), s2)
    codes = torch.empty(x.shape[0], x.shape[1] // 2, dtype=torch.uint8)
    scales = torch.empty(x.shape[0], x.shape[1] // BLOCK, dtype=torch.float8_e4m3fn)
    step = max(1, _CHUNK // max(x.shape[1], 1))
    for start in range(0, x.shape[0], step):
        rows = slice(start, start + step)
        blocks = x[rows].to(torch.float32, copy=True).reshape(-1, x.shape[1] // BLOCK, BLOCK)
        wanted = torch.div(block_amax(blocks, (1, BLOCK)), E2M1_MAX * s2)
        wanted = torch.where(wanted == 0, torch.ones_like(wanted), wanted)
        scales[rows] = wanted.clamp(_E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)
        scaled = blocks.div_((scales[rows].float() * s2)[..., None])
        scaled.add_(0.0)  # -0.0 becomes 0.0
        codes[rows] = pack_codes(encode_e2m1(scaled).reshape(-1, x.shape[1]))
    return PackedWeight(codes, scales, s2, decode_scale(s2))


@dataclass(frozen=True)
class ServingFormat:
    """Names and conventions of one format; the suffixes stand behind a module's name and a dot."""

    name: str
    codes: str
    block_scales: str
    outer_scale: str
    input_scale: str
    stores_divisor: bool
    scale_shape: tuple[int, ...]

    @property
    def suffixes(self) -> tuple[str, ...]:
        return (self.codes, self.block_scales, self.outer_scale, self.input_scale)

    def tensors(
        self, module: str, packed: PackedWeight, input_amax: float | None = None
    ) -> dict[str, Tensor]:
        """The tensors of one module, by full name; input_amax: of static activations, or None."""
        outer = packed.divisor if self.stores_divisor else packed.multiplier
        found = {
            f"{module}.{self.codes}": packed.codes,
            f"{module}.{self.block_scales}": packed.block_scales,
            f"{module}.{self.outer_scale}": outer.reshape(self.scale_shape),
        }
        if input_amax is not None:
            largest = torch.tensor(E2M1_MAX * E4M3_MAX)
            amax = torch.tensor(input_amax, dtype=torch.float32)
            scale = largest / amax if self.stores_divisor else amax / largest
            found[f"{module}.{self.input_scale}"] = scale.reshape(self.scale_shape)
        return found

    def packed(self, codes: Tensor, block_scales: Tensor, stored: Tensor) -> PackedWeight:
        """What stored tensors of this format mean."""
        scale = stored.reshape(()).float()
        turned = torch.reciprocal(scale)
        multiplier, divisor = (turned, scale) if self.stores_divisor else (scale, turned)
        return PackedWeight(codes, block_scales, multiplier, divisor)

    @property
    def convention(self) -> str:
        """The formula of a weight, for messages."""
        sign = "/" if self.stores_divisor else "*"
        return f"w = {self.codes} * {self.block_scales} {sign} {self.outer_scale}"


MODELOPT = ServingFormat(
    "modelopt", "weight", "weight_scale", "weight_scale_2", "input_scale", False, ()
)
COMPRESSED_TENSORS = ServingFormat(
    "compressed-tensors",
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    "input_global_scale",
    True,
    (1,),
)
FORMATS = {form.name: form for form in (MODELOPT, COMPRESSED_TENSORS)}


def quantization_config(
    form: ServingFormat,
    *,
    activations: str,
    ignore: Iterable[str],
    fp8_kv_cache: bool,
    producer: Mapping[str, Any],
) -> dict[str, Any]:
    """`quantization_config` of config.json.

    activations: one of ACTIVATIONS; compressed-tensors has no word for "token". A KV cache scheme appears
    only where fp8_kv_cache asks for one: a sampler that finds it quantises the cache.
    """
    assert activations in ACTIVATIONS
    number: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": BLOCK}
    found: dict[str, Any] = {"quant_method": form.name}
    if form is MODELOPT:
        group: dict[str, Any] = {"weights": {"dynamic": False, **number}, "targets": ["Linear"]}
        if activations != "none":
            group["input_activations"] = {"dynamic": activations == "token", **number}
        found |= {"quant_algo": quant_algo(activations), "group_size": BLOCK}
    else:
        assert activations != "token"
        number |= {"strategy": "tensor_group", "symmetric": True}
        inputs = {"dynamic": "local", **number} if activations == "static" else None
        group = {
            "targets": ["Linear"],
            "weights": {"dynamic": False, **number},
            "input_activations": inputs,
        }
        found |= {"format": "nvfp4-pack-quantized", "quantization_status": "compressed"}
    found |= {"config_groups": {"group_0": group}, "ignore": list(ignore)}
    if fp8_kv_cache:
        scheme: dict[str, Any] = {"dynamic": False, "num_bits": 8, "type": "float"}
        if form is COMPRESSED_TENSORS:
            scheme |= {"strategy": "tensor", "symmetric": True}
        found["kv_cache_scheme"] = scheme
    return found | {"producer": dict(producer)}


def quant_algo(activations: str) -> str:
    """ModelOpt's word for the whole file."""
    return "W4A16_NVFP4" if activations == "none" else "NVFP4"


def hf_quant_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """hf_quant_config.json of a modelopt file, saying what its quantization_config says.

    vLLM and older readers take this one; all four entries must be there, null where nothing is meant.
    """
    return {
        "producer": config["producer"],
        "quantization": {
            "quant_algo": config["quant_algo"],
            "kv_cache_quant_algo": "FP8" if "kv_cache_scheme" in config else None,
            "group_size": BLOCK,
            "exclude_modules": config["ignore"],
        },
    }


def format_of(config: Mapping[str, Any]) -> ServingFormat:
    """The format a quantization_config declares.

    ValueError naming what it says instead of NVFP4 in one of FORMATS.
    """
    method = config.get("quant_method", MODELOPT.name if "quant_algo" in config else None)
    if method not in FORMATS:
        raise ValueError(
            f"quantization_config.quant_method={method!r}: is not checked here; give a file of "
            + " or ".join(FORMATS)
        )
    form = FORMATS[method]
    key = "quant_algo" if form is MODELOPT else "format"
    known = ("NVFP4", "W4A16_NVFP4") if form is MODELOPT else ("nvfp4-pack-quantized",)
    if config.get(key) not in known:
        raise ValueError(
            f"quantization_config.{key}={config.get(key)!r}: is not NVFP4; give a file of "
            + " or ".join(known)
        )
    return form


def activations_of(form: ServingFormat, config: Mapping[str, Any]) -> str:
    """Which of ACTIVATIONS a quantization_config declares."""
    groups = config.get("config_groups") or {}
    if form is MODELOPT and config.get("quant_algo") == "W4A16_NVFP4":
        return "none"
    if not groups:
        return "static"
    inputs = [group.get("input_activations") for group in groups.values()]
    if not any(inputs):
        return "none"
    return "token" if any(entry and entry.get("dynamic") is True for entry in inputs) else "static"


def modules_of(form: ServingFormat, names: Collection[str]) -> list[str]:
    """Modules that hold block scales: those a file stores in NVFP4."""
    end = f".{form.block_scales}"
    return [name.removesuffix(end) for name in names if name.endswith(end)]
