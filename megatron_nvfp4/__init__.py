"""miniTE: NVFP4 training for Megatron-LM. Importing this costs nothing: names load on first use."""

import importlib

__version__ = "0.1.0"

_LAZY = {
    "Linear": "megatron_nvfp4.modules",
    "LayerNormLinear": "megatron_nvfp4.modules",
    "GroupedLinear": "megatron_nvfp4.modules",
    "get_qlinear_params": "megatron_nvfp4.modules",
    "NVFP4Spec": "megatron_nvfp4.recipes",
    "QuantizedTensor": "megatron_nvfp4.quant",
    "quantize": "megatron_nvfp4.quant",
    "quantize_grouped": "megatron_nvfp4.quant",
    "dequantize": "megatron_nvfp4.quant",
    "decode_exact": "megatron_nvfp4.quant",
}
__all__ = sorted(_LAZY)


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_LAZY]
