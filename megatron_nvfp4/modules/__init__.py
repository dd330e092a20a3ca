"""Linear modules with TE's constructors, names and extra state, in any recipe."""

from megatron_nvfp4.backends import used as used_backends

from .grouped_linear import GroupedLinear
from .layernorm_linear import LayerNormLinear
from .linear import Linear
from .params import QLinearParams, get_qlinear_params

__all__ = [
    "GroupedLinear",
    "LayerNormLinear",
    "Linear",
    "QLinearParams",
    "get_qlinear_params",
    "used_backends",
]
