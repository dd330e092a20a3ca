"""The fused expert dataflow on a GPU: the bits of its parts, no wait for the host, CUDA graphs."""

import pytest
import torch
from layer_oracle import outliers
from moe_cases import (
    NUM_EXPERTS,
    assert_same_bits,
    fused,
    layers,
    random_experts,
    random_probs,
    step,
    unfused,
)

from megatron_nvfp4.modules import QLinearParams
from megatron_nvfp4.recipes import RECIPES

pytestmark = pytest.mark.gpu
NAMES = [name for name, recipe in RECIPES.items() if not name.startswith("sweep")]
SIZES = {"num_experts": NUM_EXPERTS, "device": "cuda", "hidden": 256, "ffn": 128}


def _case(name: str, num_tokens: int = 100):
    linears = layers(QLinearParams(recipe=RECIPES[name]), **SIZES)
    experts = random_experts(num_tokens).cuda()
    x = outliers(num_tokens, SIZES["hidden"], seed=1).cuda()
    return linears, x, experts, random_probs(experts).cuda()


@pytest.mark.parametrize("name", NAMES)
def test_equals_its_parts(name):
    """Prevents: the same as on the CPU, by the kernels that gather inside the GEMM."""
    linears, x, experts, probs = _case(name)
    expected = step(unfused, x, experts, probs, linears)
    found = step(fused, x, experts, probs, linears)
    if name == "nvfp4_pretrain":  # other padding, other random bits
        assert torch.equal(found["y"], expected["y"])
        return
    assert_same_bits(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_dropped_choices(name):
    """Prevents: rows past the last group, which hold anything, in an amax or in a sum."""
    linears, x, experts, probs = _case(name)
    experts = experts.masked_fill(random_experts(100, seed=5).cuda() < 2, -1)
    expected = step(unfused, x, experts, probs, linears)
    found = step(fused, x, experts, probs, linears)
    for key in ("y",) if name == "nvfp4_pretrain" else expected:
        assert torch.equal(found[key], expected[key]), key


def test_wide_experts():
    """Prevents: experts wider than a row that the fused kernel holds, which fail instead of taking two."""
    params = QLinearParams(recipe=RECIPES["nvfp4_per_token"])
    linears = layers(params, device="cuda", hidden=64, ffn=12304)
    experts = random_experts(8).cuda()
    x, probs = outliers(8, 64, seed=1).cuda(), random_probs(experts).cuda()
    with torch.no_grad():
        found, expected = (call(x, experts, probs, *linears) for call in (fused, unfused))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["bf16", "nvfp4_per_token", "nvfp4_per_token_dequant_bwd"])
@pytest.mark.parametrize("recompute", [False, True])
def test_no_wait_and_captured(name, recompute):
    """Prevents: a host wait hidden in the layer, and a graph whose replay does not read the new routing."""
    linears, x, experts, probs = _case(name)
    x.requires_grad_(), probs.requires_grad_()
    dy = torch.ones_like(x)

    def run():
        y = fused(x, experts, probs, *linears, recompute=recompute)
        leaves = [x, probs, *linears[0].weights, *linears[1].weights]
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        x.copy_(x.flip(0))
        experts.copy_(random_experts(100, seed=9))
    graph.replay()
    torch.cuda.synchronize()
    for found, expected in zip(captured, run(), strict=True):
        assert torch.equal(found, expected)
