"""Number formats: NVFP4 and MXFP8, their layouts and their exact decode."""

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

__all__ = [
    "MXFP8Tensor",
    "NVFP4Spec",
    "QuantizedTensor",
    "count_nonfinite",
    "decode_exact",
    "decode_mxfp8",
    "dequantize",
    "expand_groups",
    "offsets_from_splits",
    "pack_codes",
    "pad_groups",
    "quantize",
    "quantize_grouped",
    "quantize_mxfp8",
    "swizzle_scales",
    "unpack_codes",
    "unswizzle_scales",
]
