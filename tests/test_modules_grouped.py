"""Numbers of LayerNormLinear and GroupedLinear, forward and backward, in every recipe."""

import pytest
import torch
from layer_cases import EPS, K, N, assert_forward, assert_gradients, grouped, linear, recipes, run
from layer_oracle import (
    BUILDABLE,
    assert_close_as_torch,
    expected,
    grid,
    outliers,
    params_of,
)

from megatron_nvfp4.modules import LayerNormLinear, Linear
from megatron_nvfp4.modules.norm import normalize

# --- LayerNormLinear --------------------------------------------------------------------------


def _norm64(x, weight, bias, eps, normalization, zero_centered):
    gamma = weight.double() + 1 if zero_centered else weight.double()
    x = x.double()
    if normalization == "RMSNorm":
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gamma
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * gamma + bias.double()


@recipes
@pytest.mark.parametrize("zero_centered", [False, True], ids=["gamma", "gamma-1"])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_layernorm_linear(recipe, normalization, zero_centered):
    """Prevents: gamma off by one, a norm in BF16, a linear part with other numerics than Linear's.

    The norm is FP32 rounded once: 2^-8 of the value plus 2^-18 of its terms. Its output's bits then
    fix y and dW exactly; dx and the norm's gradients are the FP64 formula's under the exact dgrad.
    """
    fields = {"normalization": normalization, "zero_centered_gamma": zero_centered, "eps": EPS}
    layer = linear(recipe, LayerNormLinear, **fields)
    x, dy = outliers(19, K, seed=25), grid(19, N, seed=26)
    y, dx = run(layer, x, dy)
    gamma, beta = layer.layer_norm_weight.detach(), layer.layer_norm_bias
    beta = None if beta is None else beta.detach()
    ln = normalize(
        x, gamma, beta, EPS, normalization=normalization, zero_centered_gamma=zero_centered
    )
    leaves = [
        x.double(),
        gamma.double(),
        torch.zeros(K).double() if beta is None else beta.double(),
    ]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    ln64 = _norm64(*leaves, EPS, normalization, zero_centered)
    assert ((ln.double() - ln64).abs() <= 2.0**-8 * ln64.abs() + 2.0**-18 * (ln64.abs() + 8)).all()
    want = expected(recipe, ln, [layer.weight], dy, biases=[layer.bias])
    assert_forward(recipe, want, y)
    if not recipe.bypass:
        assert torch.equal(layer.weight.grad, want.dws[0].bfloat16())
    ln64.backward(want.dx.double())
    ours = [dx, layer.layer_norm_weight.grad]
    ours += [layer.layer_norm_bias.grad] if normalization == "LayerNorm" else []
    for grad, leaf in zip(ours, leaves, strict=False):
        # dx of the linear part is a BF16 number in both (the bypass may round it to a neighbour).
        assert (grad.double() - leaf.grad).norm() <= 2.0**-7 * leaf.grad.norm()


def test_norms_differ():
    # Prevents: the two formulas above agreeing because `normalization` is ignored.
    x = outliers(4, K, seed=27) + 3
    layers = [linear("bf16", LayerNormLinear, normalization=n) for n in ("LayerNorm", "RMSNorm")]
    for layer in layers:
        torch.nn.init.zeros_(layer.bias)
        torch.nn.init.ones_(layer.layer_norm_weight)
    layers[1].weight.data.copy_(layers[0].weight)
    torch.nn.init.zeros_(layers[0].layer_norm_bias)
    assert not torch.allclose(layers[0](x), layers[1](x), rtol=0.05)


# --- GroupedLinear ----------------------------------------------------------------------------


@recipes
@pytest.mark.parametrize("splits", [[16, 0, 32, 0], [3, 1, 0, 41], [0, 0, 0, 45]], ids=str)
def test_grouped_linear(recipe, splits):
    # Prevents: an empty expert shifting its neighbours, padding that leaks, an expert with
    # another's amax.
    layer, total = grouped(recipe), sum(splits)
    x, dy = outliers(total, K, seed=28), grid(total, 32, seed=29)
    y, dx = run(layer, x, dy, splits)
    want = expected(recipe, x, layer.weights, dy, splits=splits, biases=layer.biases)
    assert_forward(recipe, want, y)
    assert_gradients(recipe, want, dx, layer.weights)
    for size, weight, bias, dy_g in zip(
        splits, layer.weights, layer.biases, dy.split(splits), strict=True
    ):
        assert torch.equal(bias.grad, dy_g.double().sum(0).bfloat16())
        assert size > 0 or (weight.grad is not None and not weight.grad.any())


@recipes
@pytest.mark.parametrize("fused", [False, True])
def test_no_expert_has_rows(recipe, fused):
    # Prevents: an error, a None gradient or an untouched flag when a rank receives no token at all.
    layer = grouped(recipe, fuse_wgrad_accumulation=fused)
    start = [grid(32, K, seed=30 + index).float() for index in range(4)]
    for weight, value in zip(layer.weights, start, strict=True):
        weight.main_grad, weight.grad_added_to_main_grad = value.clone(), False
    y, dx = run(layer, torch.zeros(0, K).bfloat16(), torch.zeros(0, 32).bfloat16(), [0] * 4)
    assert y.shape == (0, 32)
    assert dx.shape == (0, K)
    for weight, value in zip(layer.weights, start, strict=True):
        assert torch.equal(weight.main_grad, value)
        assert weight.grad_added_to_main_grad is fused
        assert weight.grad is not None
        assert fused or not weight.grad.any()


@pytest.mark.parametrize("name", ["nvfp4_per_token", "nvfp4_per_token_dequant_bwd", "bf16"])
def test_grouped_fused_accumulation(name):
    # Prevents: main_grad of an expert without tokens set to zero, or a neighbour's gradient added
    # to it.
    recipe, splits = BUILDABLE[name], [16, 0, 32, 0]
    layer = grouped(recipe, fuse_wgrad_accumulation=True)
    x, dy = outliers(48, K, seed=34), grid(48, 32, seed=35)
    start = [grid(32, K, seed=36 + index).float() for index in range(4)]
    for weight, value in zip(layer.weights, start, strict=True):
        weight.main_grad = value.clone()
    run(layer, x, dy, splits)
    want = expected(recipe, x, layer.weights, dy, splits=splits)
    for index, (weight, value) in enumerate(zip(layer.weights, start, strict=True)):
        if recipe.bypass:
            dw = weight.main_grad - value
            assert_close_as_torch(dw, want.dws[index], want.dw_sizes[index] + value.abs(), 48)
        else:
            assert torch.equal(weight.main_grad, value + want.dws[index])
        assert splits[index] or torch.equal(weight.main_grad, value)


def test_grouped_equals_linear_per_expert():
    # Prevents: two implementations of one layer that drift apart.
    layer, splits = grouped("nvfp4_per_token"), [5, 0, 9, 2]
    x = outliers(16, K, seed=40)
    y = layer(x, torch.tensor(splits))
    for index, (x_g, y_g) in enumerate(zip(x.split(splits), y.split(splits), strict=True)):
        fields = {"params_dtype": torch.bfloat16, "device": "cpu"}
        alone = Linear(K, 32, qlinear_params=params_of("nvfp4_per_token"), **fields)
        alone.weight.data.copy_(layer.weights[index])
        alone.bias.data.copy_(layer.biases[index])
        assert torch.equal(alone(x_g), y_g)
