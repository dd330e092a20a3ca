"""Linear modules with TE's constructors, names and extra state, in any recipe."""

from .grouped_linear import GroupedLinear
from .layernorm_linear import LayerNormLinear
from .linear import Linear
from .params import QLinearParams, get_qlinear_params

__all__ = ["GroupedLinear", "LayerNormLinear", "Linear", "QLinearParams", "get_qlinear_params"]
