"""Weights of a grouped layer as one block of memory: what may not be read or written as one."""

import pickle

import pytest
import torch

from megatron_nvfp4 import backends
from megatron_nvfp4.modules import GroupedLinear, QLinearParams
from megatron_nvfp4.modules.matmul import stack_rows
from megatron_nvfp4.recipes import BF16, RECIPES

K, N, SPLITS = 32, 32, [5, 7, 9]


def layer_of(name: str, **fields) -> GroupedLinear:
    torch.manual_seed(1)
    params = QLinearParams(recipe=RECIPES[name])
    fields = {"bias": False, "params_dtype": torch.bfloat16, "device": "cpu"} | fields
    return GroupedLinear(len(SPLITS), K, N, qlinear_params=params, **fields)


def step(layer: GroupedLinear) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(sum(SPLITS), K, generator=torch.Generator().manual_seed(2)).bfloat16()
    x.requires_grad_()
    y = layer(x, SPLITS)
    y.sum().backward()
    return y.detach(), x.grad


RECIPE_NAMES = ["bf16", "nvfp4_per_token_bf16_bwd", "nvfp4_per_token_dequant_bwd"]


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_frozen_weights_keep_their_main_grad(name):
    # Prevents: an expert that is frozen after its gradient buffer was made, trained all the same.
    layer = layer_of(name, fuse_wgrad_accumulation=True)
    for index, weight in enumerate(layer.weights):
        weight.main_grad = torch.zeros(N, K)
        weight.grad_added_to_main_grad = False
        weight.requires_grad_(index != 1)
    step(layer)
    assert [bool(w.main_grad.any()) for w in layer.weights] == [True, False, True]
    assert [w.grad_added_to_main_grad for w in layer.weights] == [True, False, True]


@pytest.mark.parametrize("name", RECIPE_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tied_experts_sum_their_gradients(name, dtype):
    # Prevents: one of two experts' gradients lost where both are one parameter.
    apart, tied = layer_of(name), layer_of(name, fuse_wgrad_accumulation=True)
    with torch.no_grad():
        apart.weight1.copy_(apart.weight0)
    tied.load_state_dict(apart.state_dict())
    tied.weight1 = tied.weight0
    for weight in tied.weights:
        weight.main_grad = torch.zeros(N, K, dtype=dtype)
    step(apart)
    step(tied)
    want = apart.weight0.grad.double() + apart.weight1.grad.double()
    found = tied.weight0.main_grad.double() + tied.weight0.grad.double()
    assert (found - want).norm() <= 2.0**-7 * want.norm()


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_weights_of_two_dtypes_are_no_block(name):
    # Prevents: FP16 read as BF16 because it lies where the next BF16 weight would.
    layer, apart = layer_of(name), layer_of(name)
    block = torch.empty(len(SPLITS), N, K, dtype=torch.bfloat16)
    for index, weight in enumerate(layer.weights):
        values = apart.weights[index].detach()
        memory = block[index].view(torch.float16) if index == 1 else block[index]
        memory.copy_(values)
        weight.data = memory
        apart.weights[index].data = memory.clone()
    stacked, _ = stack_rows(layer.weights)
    assert torch.equal(stacked.double(), torch.cat([w.detach().double() for w in apart.weights]))
    for got, want in zip(step(layer), step(apart), strict=True):
        assert torch.equal(got, want)


def test_reversed_and_single_weights():
    # Prevents: the distributed optimizer's order of parameters read backwards, or one weight as reversed.
    block = torch.randn(3, N, K)
    ordered = list(block)
    assert stack_rows(ordered)[1] is False
    stacked, is_reversed = stack_rows(ordered[::-1])
    assert is_reversed
    assert stacked.data_ptr() == block.data_ptr()
    assert stack_rows(ordered[:1])[1] is False


def test_pickles_leave_quantised_weights_behind():
    # Prevents: a checkpointed module that carries a second, quantised, copy of its weights.
    layer = layer_of("nvfp4_per_token")
    x = torch.randn(sum(SPLITS), K).bfloat16()
    layer(x, SPLITS, is_first_microbatch=True)
    assert layer._weight_cache is not None
    assert pickle.loads(pickle.dumps(layer))._weight_cache is None


def test_selection_tells_empty_sizes_from_whole_blocks():
    # Prevents: the answer kept for 128 columns given for none.
    asked = []

    def why_not(self, op, formats, shape=None, device=None, dtype=None):
        asked.append(tuple(shape))

    reference = backends.get("reference")
    original = type(reference).why_not
    try:
        type(reference).why_not = why_not
        for size in (128, 256, 0, 130, 258, 2):
            backends.select("gemm", (BF16, BF16), shape=(size, 128, 128), backend="reference")
    finally:
        type(reference).why_not = original
    assert [shape[0] for shape in asked] == [128, 0, 130, 2]
