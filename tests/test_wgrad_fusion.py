"""The output layer's fused gradient accumulation where apex is missing."""

import sys

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_nvfp4.mcore import wgrad_fusion
from megatron_nvfp4.mcore.layer_specs import get_minite_layer_spec


@pytest.fixture
def without_apex(monkeypatch):
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", None)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", None, raising=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_products_of_integers_are_exact(dtype, device):
    # Prevents: operands or factors exchanged, the old gradient lost. Sums of small integers have one value
    # whatever their order; BF16 holds those below 256.
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-1, 2, (40, 24), generator=generator).bfloat16().to(device)
    dy = torch.randint(-2, 3, (40, 16), generator=generator).bfloat16().to(device)
    main_grad = torch.randint(-9, 9, (16, 24), generator=generator).to(device, dtype)
    want = main_grad.double() + dy.t().double() @ x.double()
    wgrad_fusion.WgradAccumulation.wgrad_gemm_accum_fp32(x, dy, main_grad)
    assert torch.equal(main_grad.double(), want)


def config(fusion: bool) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        gradient_accumulation_fusion=fusion,
        normalization="RMSNorm",
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("fusion", [True, False])
def test_layer_specs_bring_it(fusion, without_apex):
    # Prevents: Megatron's refusal of its own default on a machine without apex, or a stand-in nobody needs.
    get_minite_layer_spec(config(fusion), moe=False)
    assert layers._grad_accum_fusion_available == fusion


def test_apex_is_left_alone(monkeypatch):
    # Prevents: apex's own kernel replaced.
    apex = object()
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", apex, raising=False)
    wgrad_fusion.install()
    assert layers.fused_weight_gradient_mlp_cuda is apex
