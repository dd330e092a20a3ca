"""Layers of fixed weights, one step of them, and what their results are held to."""

import pytest
import torch
from layer_oracle import (
    BUILDABLE,
    SEED,
    assert_close_as_torch,
    params_of,
)

from megatron_nvfp4.modules import GroupedLinear, Linear
from megatron_nvfp4.recipes import Recipe

K, N = 64, 96
EPS = 4.0  # large enough beside the mean square of outliers(), about 70, to be seen
recipes = pytest.mark.parametrize("recipe", BUILDABLE.values(), ids=BUILDABLE)


def linear(recipe: Recipe | str, cls=Linear, **fields) -> Linear:
    """A BF16 layer (96, 64) on the reference backend with reproducible weights and biases."""
    fields = {"params_dtype": torch.bfloat16, "device": "cpu"} | fields
    layer = cls(K, N, qlinear_params=params_of(recipe), **fields)
    _fill(layer)
    return layer


def grouped(recipe: Recipe | str, num_experts: int = 4, **fields) -> GroupedLinear:
    """Experts (32, 64), as linear()."""
    fields = {"params_dtype": torch.bfloat16, "device": "cpu"} | fields
    layer = GroupedLinear(num_experts, K, 32, qlinear_params=params_of(recipe), **fields)
    _fill(layer)
    return layer


def _fill(layer: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(10)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(layer.named_parameters()):
            values = torch.randn(parameter.shape, generator=generator)
            if "weight" in name and parameter.dim() == 2:
                values *= 0.1 * (index + 1)
            parameter.copy_(values)


def run(layer, x, dy, *args):
    """(y, dx) of one step; the parameters' gradients stay on them."""
    torch.manual_seed(SEED)
    x = x.clone().requires_grad_()
    y = layer(x, *args)
    y.backward(dy)
    return y.detach(), x.grad


def assert_gradients(recipe: Recipe, want, dx, weights) -> None:
    """Bits where the project adds up, the library's accumulation error where torch does."""
    for weight, dw, size in zip(weights, want.dws, want.dw_sizes, strict=True):
        if recipe.bypass:
            assert_close_as_torch(weight.grad, dw, size, K)
        else:
            assert torch.equal(weight.grad, dw.to(weight.dtype))
    if recipe.bypass:
        assert_close_as_torch(dx, want.dx, want.dx_size, N)
    else:
        assert torch.equal(dx, want.dx)


def assert_forward(recipe: Recipe, want, y) -> None:
    if recipe.quantized:
        assert torch.equal(y, want.y)
    else:
        assert_close_as_torch(y, want.y, want.y_size, K)
