"""Recipes as data: what each GEMM operand of each layer is. Standard library only."""

from .formats import (
    BF16,
    FORWARD,
    MXFP8,
    BF16Spec,
    FloatSpec,
    Format,
    ForwardSpec,
    MXFP8Spec,
    NVFP4Spec,
    depends_on_token_alone,
)
from .policy import ALIASES, LayerRule, Policy, get_recipe, load_config
from .recipe import GROUPS, RECIPES, Operands, Recipe, format_needs
from .registry import (
    DEFAULT_RECIPE,
    FOREIGN_VARIABLES,
    describe,
    describe_recipe,
    environment_faults,
    resolve,
)

__all__ = [
    "ALIASES",
    "BF16",
    "DEFAULT_RECIPE",
    "FOREIGN_VARIABLES",
    "FORWARD",
    "GROUPS",
    "MXFP8",
    "RECIPES",
    "BF16Spec",
    "FloatSpec",
    "Format",
    "ForwardSpec",
    "LayerRule",
    "MXFP8Spec",
    "NVFP4Spec",
    "Operands",
    "Policy",
    "Recipe",
    "depends_on_token_alone",
    "describe",
    "describe_recipe",
    "environment_faults",
    "format_needs",
    "get_recipe",
    "load_config",
    "resolve",
]
