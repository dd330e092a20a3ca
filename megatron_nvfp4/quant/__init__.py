"""Number formats: NVFP4, MXFP8 and simulated floats, their layouts, transforms and exact decode."""

from megatron_nvfp4.recipes import NVFP4Spec

from .layout import (
    expand_groups,
    offsets_from_splits,
    pack_codes,
    pad_groups,
    swizzle_scales,
    unpack_codes,
    unswizzle_scales,
)
from .mxfp8 import MXFP8Tensor, decode_mxfp8, quantize_mxfp8
from .nvfp4 import (
    QuantizedTensor,
    count_nonfinite,
    decode_exact,
    dequantize,
    quantize,
    quantize_grouped,
)
from .simulated import SimulatedTensor, decode_simulated, quantize_simulated
from .transforms import random_bits, rht

__all__ = [
    "MXFP8Tensor",
    "NVFP4Spec",
    "QuantizedTensor",
    "SimulatedTensor",
    "count_nonfinite",
    "decode_exact",
    "decode_mxfp8",
    "decode_simulated",
    "dequantize",
    "expand_groups",
    "offsets_from_splits",
    "pack_codes",
    "pad_groups",
    "quantize",
    "quantize_grouped",
    "quantize_mxfp8",
    "quantize_simulated",
    "random_bits",
    "rht",
    "swizzle_scales",
    "unpack_codes",
    "unswizzle_scales",
]
