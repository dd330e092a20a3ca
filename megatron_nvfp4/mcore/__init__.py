"""miniTE in Megatron-LM: spec provider, layers, arguments, launcher. Names load on first use."""

import importlib

_LAZY = {
    "MiniTESpecProvider": "megatron_nvfp4.mcore.spec_provider",
    "get_minite_layer_spec": "megatron_nvfp4.mcore.layer_specs",
    "get_minite_block_spec": "megatron_nvfp4.mcore.layer_specs",
    "gpt_spec": "megatron_nvfp4.mcore.layer_specs",
    "add_arguments": "megatron_nvfp4.mcore.arguments",
}
__all__ = sorted(_LAZY)


def __getattr__(name: str):
    if name in _LAZY:
        # Kept, because Megatron's --spec looks into vars() of the module.
        value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
