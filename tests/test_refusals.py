"""Inputs that once did something else in silence: each is refused by name, or does what was asked."""

import subprocess
import sys

import pytest
import torch

from megatron_nvfp4 import GroupedLinear, Linear, get_qlinear_params
from megatron_nvfp4.quant import NVFP4Spec, quantize, quantize_grouped
from megatron_nvfp4.recipes import load_config

BUILDABLE = ("bf16", "nvfp4_per_token", "nvfp4_per_token_dequant_bwd", "mxfp8")


@pytest.mark.parametrize("recipe", BUILDABLE)
def test_second_derivatives_are_refused(recipe):
    # Prevents: a gradient penalty whose gradient is silently zero or wrong.
    layer = Linear(64, 96, bias=False, qlinear_params=get_qlinear_params(recipe), device="cpu")
    x = torch.randn(4, 64, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.norm().backward()


def test_bf16_recipe_keeps_fp64():
    # Prevents: FP64 layers computed in FP32 on a CPU.
    params = get_qlinear_params("bf16")
    layer = Linear(64, 32, False, params_dtype=torch.float64, qlinear_params=params, device="cpu")
    x = torch.randn(5, 64, dtype=torch.float64)
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-14, atol=1e-14)


def test_integer_inputs_are_refused():
    # Prevents: token ids multiplied as if they were activations.
    layer = Linear(64, 32, qlinear_params=get_qlinear_params("bf16"), device="cpu")
    with pytest.raises(ValueError, match=r"input is torch\.int64; give a floating-point tensor"):
        layer(torch.ones(2, 64, dtype=torch.int64))


@pytest.mark.parametrize("splits", [[5.7, 0.2, 4.1], torch.tensor([5.0, 1.0, 4.0])])
def test_fractional_splits_are_refused(splits):
    # Prevents: rows dropped by truncation.
    layer = GroupedLinear(3, 64, 32, qlinear_params=get_qlinear_params("bf16"), device="cpu")
    with pytest.raises(ValueError, match="not whole numbers of rows"):
        layer(torch.randn(10, 64), splits)


@pytest.mark.parametrize("outer", ["tensor", "token"])
@pytest.mark.parametrize(
    "offsets", [[0, 20, 10, 32], [4, 32], [0, 48], [0, -16, 32], [0, 16], [], [0.0, 32.0]]
)
def test_offsets_that_are_no_row_boundaries_are_refused(offsets, outer):
    # Prevents: groups quantised under another group's amax.
    offsets = torch.tensor(offsets, dtype=None if offsets else torch.int64)
    with pytest.raises(ValueError, match="offsets"):
        quantize_grouped(torch.randn(32, 16), offsets, NVFP4Spec(outer=outer))


def test_quantising_keeps_no_graph_and_no_alias():
    # Prevents: a gradient through the amax alone, and a result that changes with the caller's tensor.
    amax = torch.full((1,), 3.0)
    qt = quantize(torch.randn(4, 16, requires_grad=True), amax=amax)
    amax.fill_(9)
    assert qt.amax.item() == 3.0
    assert not qt.amax.requires_grad


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("recipe: bf16\nrecipe: mxfp8\n", "the key 'recipe' stands twice"),
        ("layers:\n- {match: '', layer_numbers: [1], recipe: bf16}\n", "give match"),
        ("layers:\n- {match: a, layer_numbers: [], recipe: bf16}\n", "give match"),
    ],
)
def test_policy_files_that_would_lose_a_rule(tmp_path, text, fault):
    # Prevents: the second of two equal keys dropping the first; an empty selector meaning all or none.
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=fault):
        load_config(path)


def test_gradient_free_passes_quantise_nothing_for_the_backward(monkeypatch):
    # Prevents: scoring and the first pass of recomputation paying for a wgrad that never comes.
    from megatron_nvfp4.modules import autograd

    calls = []
    original = autograd.activation_of_wgrad
    monkeypatch.setattr(
        autograd, "activation_of_wgrad", lambda *args: calls.append(1) or original(*args)
    )
    params = get_qlinear_params("nvfp4_per_token")
    layer = Linear(64, 32, qlinear_params=params, device="cpu")
    x = torch.randn(4, 64)
    with torch.no_grad():
        layer(x)
    assert not calls
    layer(x)
    assert calls == [1]


def test_help_of_megatron_is_shown():
    # Prevents: a per cent sign in one of Megatron's help texts ending `pretrain --help` in a traceback.
    command = [sys.executable, "-m", "megatron_nvfp4", "pretrain", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--minite-recipe" in shown
    assert "--num-layers" in shown


def test_rules_for_no_layer_are_refused():
    # Prevents: a misspelt pattern leaving every layer quantised.
    script = """
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_nvfp4.mcore.arguments import rule_faults
from megatron_nvfp4.recipes import LayerRule, Policy, get_recipe

bf16 = get_recipe("bf16")
config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
rules = [LayerRule(recipe=bf16, match="decoder.layers.*.self_attention.*")]
rules += [LayerRule(recipe=bf16, match="decoder.layers.*.self_attn.*")]
rules += [LayerRule(recipe=bf16, layer_numbers=(17,))]
config.minite_policy = Policy(recipe=bf16, rules=tuple(rules))
print(*rule_faults(config), sep="\\n")
"""
    command = [sys.executable, "-c", script]
    faults = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [fault.split()[1] for fault in faults if "no layer" in fault] == [
        "layers[1]",
        "layers[2]",
    ]
