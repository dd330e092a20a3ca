"""Gradients that go to main_grad behind autograd's back: who may, what then happens, and what must not."""

from types import SimpleNamespace

import pytest
import torch

from megatron_nvfp4.backends import extension
from megatron_nvfp4.modules import GroupedLinear, QLinearParams
from megatron_nvfp4.modules.expert_matmul import ExpertMatmul
from megatron_nvfp4.modules.moe import ExpertDataflow
from megatron_nvfp4.recipes import RECIPES

K, F, SPLITS = 64, 32, [5, 0, 19]
NAMES = ["bf16", "nvfp4_per_token_bf16_bwd", "nvfp4_per_token_dequant_bwd", "nvfp4_per_token"]


class Private(GroupedLinear):
    """Nobody waits for its gradients."""

    def gradients_are_awaited(self) -> bool:
        return False


def layer_of(kind: type, name: str, k: int = K, n: int = F) -> GroupedLinear:
    torch.manual_seed(1)
    params = QLinearParams(recipe=RECIPES[name])
    layer = kind(
        len(SPLITS), k, n, bias=False, params_dtype=torch.bfloat16, device="cpu",
        qlinear_params=params, fuse_wgrad_accumulation=True,
    )  # fmt: skip
    for weight in layer.weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones(n, k), False
    return layer


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).bfloat16()


def leaves_reached(y: torch.Tensor) -> set[int]:
    found, todo = set(), [y.grad_fn]
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        todo += [each for each, _ in node.next_functions if each is not None]
    return found


def alone(layers) -> torch.Tensor:
    x = normal(sum(SPLITS), K).requires_grad_()
    return layers[0](x, SPLITS)


def in_the_dataflow(layers) -> torch.Tensor:
    x = normal(11, K).requires_grad_()
    chosen = torch.arange(22).reshape(11, 2) % 2 * 2  # nobody goes to the second expert
    probs = torch.linspace(0.1, 1.0, 22).reshape(11, 2)
    return ExpertDataflow()(x, chosen, probs, *(ExpertMatmul.of(layer, x) for layer in layers))


CALLS = {
    "alone": (alone, ((K, F),)),
    "dataflow": (in_the_dataflow, ((K, 2 * F), (F, K))),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", NAMES)
def test_main_grads_are_the_same(name, call):
    # Prevents: a weight forgotten, written twice, or not flagged, once autograd knows one weight of a layer.
    product, shapes = CALLS[call]
    sides = []
    for kind in (GroupedLinear, Private):
        layers = [layer_of(kind, name, *shape) for shape in shapes]
        y = product(layers)
        weights = [weight for layer in layers for weight in layer.weights]
        known = leaves_reached(y) & set(map(id, weights))
        assert len(known) == (len(weights) if kind is GroupedLinear else len(layers))
        y.backward(torch.ones_like(y))
        assert all(weight.grad_added_to_main_grad for weight in weights)
        sides.append([y.detach(), *(weight.main_grad for weight in weights)])
    for ordinary, hidden in zip(*sides, strict=True):
        assert torch.equal(ordinary, hidden)
    assert not torch.equal(sides[0][1], torch.ones_like(sides[0][1]))


SPOILERS = {
    "a hook": lambda weight: weight.register_hook(lambda grad: None),
    "a hook after accumulation": lambda weight: weight.register_post_accumulate_grad_hook(
        lambda weight: None
    ),
    "a frozen weight": lambda weight: weight.requires_grad_(False),
    "no flag": lambda weight: delattr(weight, "grad_added_to_main_grad"),
    "no main_grad": lambda weight: delattr(weight, "main_grad"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("spoiler", SPOILERS)
def test_whoever_looks_is_served(spoiler, call):
    # Prevents: a hook that never fires, or a gradient lost, because one weight is unlike the others.
    product, shapes = CALLS[call]
    layers = [layer_of(Private, "bf16", *shape) for shape in shapes]
    weight = layers[0].weights[-1]
    SPOILERS[spoiler](weight)
    known = leaves_reached(product(layers))
    assert {id(w) for w in layers[0].weights if w.requires_grad} <= known


def test_no_gradient_mode_and_no_fusion_hide_nothing():
    # Prevents: hidden weights where gradients are returned and not accumulated.
    layer = layer_of(Private, "bf16")
    with torch.no_grad():
        assert not layer.hides_wgrad(layer.weights)
    assert layer.hides_wgrad(layer.weights)
    layer.fuse_wgrad_accumulation = False
    assert not layer.hides_wgrad(layer.weights)


@pytest.mark.parametrize("call", CALLS)
def test_a_main_grad_that_went_away(call):
    # Prevents: gradients of all but the first weight lost without a word.
    product, shapes = CALLS[call]
    layers = [layer_of(Private, "bf16", *shape) for shape in shapes]
    y = product(layers)
    del layers[0].weights[1].main_grad
    with pytest.raises(RuntimeError, match="a main_grad each in the forward"):
        y.backward(torch.ones_like(y))


@pytest.mark.parametrize(
    ("changes", "awaited"),
    [
        ({}, False),
        ({"overlap_grad_reduce": True}, True),
        ({"overlap_grad_reduce": None}, True),
        ({"use_megatron_fsdp": True}, True),
        ({"use_torch_fsdp2": True}, True),
        ({"no_sync_func": print}, True),
        ({"cuda_graph_impl": "local"}, True),
    ],
    ids=str,
)
def test_what_megatron_waits_for(changes, awaited, monkeypatch):
    # Prevents: a reduction that overlaps the backward and never hears of a gradient; without Megatron's
    # arguments (None) nobody can say that there is none.
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron_nvfp4.mcore import arguments

    args = {"overlap_grad_reduce": False} | changes
    monkeypatch.setattr(arguments, "_argument", args.get)
    config = SimpleNamespace(
        no_sync_func=changes.get("no_sync_func"),
        cuda_graph_impl=changes.get("cuda_graph_impl", "none"),
    )
    assert arguments.gradients_are_awaited(config) is awaited


@pytest.mark.skipif(extension.why_not_cpu() is not None, reason=f"cpu: {extension.why_not_cpu()}")
@pytest.mark.parametrize("kind", [GroupedLinear, Private])
def test_dataflow_asked_for_tokens_alone(kind):
    # Prevents: main_grad written where only the tokens' gradient is asked for. Torch's own node, without
    # the extension, is not told.
    layers = [layer_of(kind, "nvfp4_per_token_bf16_bwd", *shape) for shape in CALLS["dataflow"][1]]
    x = normal(11, K).requires_grad_()
    chosen, probs = torch.zeros(11, 1, dtype=torch.int64), torch.ones(11, 1)

    def product():
        return ExpertDataflow()(x, chosen, probs, *(ExpertMatmul.of(layer, x) for layer in layers))

    y = product()
    (alone,) = torch.autograd.grad(y, x, torch.ones_like(y))
    weights = [weight for layer in layers for weight in layer.weights]
    assert all((weight.main_grad == 1).all() for weight in weights)
    product().backward(torch.ones_like(y))
    assert torch.equal(x.grad, alone)
    assert not all((weight.main_grad == 1).all() for weight in weights)


def test_reference_dataflow_too(monkeypatch):
    # Prevents: the way without an extension handing a hidden weight's gradient to another input.
    monkeypatch.setattr(extension, "functions", lambda: None)
    sides = []
    for kind in (GroupedLinear, Private):
        layers = [layer_of(kind, "bf16", *shape) for shape in CALLS["dataflow"][1]]
        y = in_the_dataflow(layers)
        y.backward(torch.ones_like(y))
        sides.append([weight.main_grad for layer in layers for weight in layer.weights])
    assert all(map(torch.equal, *sides))
