"""The extension's autograd node: what it must share with torch's own, and its launches against Python's."""

import gc
import weakref

import pytest
import torch
from kernel_stand_in import Kernels

from megatron_nvfp4.backends import cuda, cuda_gemm, extension
from megatron_nvfp4.modules import GroupedLinear, QLinearParams, autograd
from megatron_nvfp4.quant import offsets_from_splits
from megatron_nvfp4.recipes import RECIPES

pytestmark = pytest.mark.skipif(
    extension.why_not_cpu() is not None, reason=f"cpu: {extension.why_not_cpu()}"
)
K, N, SPLITS = 64, 32, [5, 0, 19]
NAMES = ["bf16", "nvfp4_per_token_bf16_bwd", "nvfp4_per_token_dequant_bwd", "nvfp4_per_token"]


def layer_of(name: str, **fields) -> GroupedLinear:
    torch.manual_seed(1)
    params = QLinearParams(recipe=RECIPES[name], backend=fields.pop("backend", "auto"))
    fields = {"bias": False, "params_dtype": torch.bfloat16, "device": "cpu"} | fields
    return GroupedLinear(len(SPLITS), K, N, qlinear_params=params, **fields)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(sum(SPLITS), size, generator=generator).bfloat16() for size in (K, N))
    return x.requires_grad_(), dy


@pytest.fixture
def python_node(monkeypatch):
    """A call makes layers use torch's node instead."""
    return lambda: monkeypatch.setattr(extension, "functions", lambda: None)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_equals_torchs_node(name, bias, python_node):
    # Prevents: gradients that depend on whether the extension is built.
    results = []
    for turn in (lambda: None, python_node):
        turn()
        layer, (x, dy) = layer_of(name, bias=bias), inputs()
        y = layer(x, SPLITS)
        y.backward(dy)
        assert ("CppFunction" in type(y.grad_fn).__name__) == (turn is not python_node)
        results.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for ours, torchs in zip(*results, strict=True):
        assert torch.equal(ours, torchs)


def test_gradients_of_some_inputs(monkeypatch):
    # Prevents: weight gradients computed, or main_grad written, where only the input's are asked for.
    layer, (x, dy) = layer_of("bf16", fuse_wgrad_accumulation=True), inputs()
    for weight in layer.weights:
        weight.main_grad = torch.zeros(N, K)
    want = torch.autograd.grad(layer(x, SPLITS), (x, *layer.weights), dy, allow_unused=True)
    assert all(
        weight.main_grad.any() for weight, size in zip(layer.weights, SPLITS, strict=True) if size
    )
    for weight in layer.weights:
        weight.main_grad.zero_()
    (grad,) = torch.autograd.grad(layer(x, SPLITS), x, dy)
    assert torch.equal(grad, want[0])
    assert not any(weight.main_grad.any() for weight in layer.weights)


def test_retained_graph_and_second_backward():
    # Prevents: a graph that is usable after it was freed, or freed although it was to be retained.
    layer, (x, dy) = layer_of("nvfp4_per_token_dequant_bwd"), inputs()
    y = layer(x, SPLITS)
    first = torch.autograd.grad(y, (x, *layer.weights), dy, retain_graph=True)
    second = torch.autograd.grad(y, (x, *layer.weights), dy)
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x, dy)


def test_second_derivative_is_refused():
    # Prevents: a silent zero, as if the gradient were a constant.
    layer, (x, dy) = layer_of("bf16"), inputs()
    (grad,) = torch.autograd.grad(layer(x, SPLITS), x, dy.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.float().sum().backward()


def test_forward_derivative_is_refused():
    # Prevents: a tangent that is lost without a word.
    layer, (x, _) = layer_of("bf16"), inputs()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        with pytest.raises(RuntimeError, match="forward derivative"):
            layer(dual, SPLITS)


def test_hooks_see_what_they_saw():
    # Prevents: hooks of weights, of their accumulation, or of saved tensors that are passed by.
    layer, (x, dy) = layer_of("bf16"), inputs()
    seen, packed = [], []
    for index, weight in enumerate(layer.weights):
        weight.register_hook(lambda grad, index=index: seen.append(("gradient", index)))
        weight.register_post_accumulate_grad_hook(
            lambda weight, index=index: seen.append(("accumulated", index))
        )
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t.shape) or t, lambda t: t
    ):
        y = layer(x, SPLITS)
    y.backward(dy)
    assert sorted(seen) == sorted((k, i) for k in ("gradient", "accumulated") for i in range(3))
    assert sorted(packed) == [torch.Size([4]), torch.Size([24, K])]


def test_input_changed_before_the_backward():
    # Prevents: a weight gradient of activations that the forward never saw.
    layer, (x, dy) = layer_of("bf16"), inputs()
    y = layer(x, SPLITS)
    with torch.no_grad():
        x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_errors_of_python_arrive():
    # Prevents: an exception of the backward that the engine swallows or turns into another.
    layer, (x, dy) = layer_of("bf16"), inputs()
    y = layer(x, SPLITS)
    with torch.no_grad():
        layer.weight1.zero_()
    with pytest.raises(RuntimeError, match="GroupedLinear: a weight was modified in place"):
        y.backward(dy)


def test_nothing_outlives_the_graph():
    # Prevents: a cycle through C++, which no garbage collector sees: activations of every step kept.
    layer, (x, dy) = layer_of("bf16"), inputs()
    y = layer(x, SPLITS)
    kept = weakref.ref(x)
    del x
    y.backward(dy)
    del y
    gc.collect()
    assert kept() is None


@pytest.fixture
def launches(monkeypatch):
    """CPU tensors taken for those of compute capability 9.0, with its kernels' contract in torch's tables."""
    extension.load()
    stand_in = Kernels(torch.ops.megatron_nvfp4)
    claims = cuda.CudaBackend.why_not
    monkeypatch.setattr(cuda_gemm, "_is_hopper", lambda device: True)
    monkeypatch.setattr(extension, "why_not_cuda", lambda verbose=False: None)
    monkeypatch.setattr(
        cuda.CudaBackend,
        "why_not",
        lambda self, op, formats, shape=None, device=None, dtype=None: claims(
            self, op, formats, shape, None, dtype
        ),
    )
    library = torch.library.Library("megatron_nvfp4", "IMPL")
    for name in ("grouped_gemm_bf16", "grouped_wgrad_bf16", "grouped_gemm_w4"):
        library.impl(name, getattr(stand_in, name), "CPU")
    library.impl("pack_weights_nvfp4", stand_in.pack_weights_nvfp4, "CPU")
    asked = []
    backward = autograd._CALLS[0]
    calls = (lambda *args: asked.append(args[3:]) or backward(*args), *autograd._CALLS[1:])
    monkeypatch.setattr(autograd, "_CALLS", calls)

    def set_launches(are_launched: bool) -> list:
        found = lambda *layer: (are_launched,) * 2  # noqa: E731
        monkeypatch.setattr(autograd, "_launched_gradients", found)
        asked.clear()
        return asked

    yield set_launches
    library._destroy()


def step(layer: GroupedLinear, turn) -> list[torch.Tensor]:
    x, dy = inputs()
    for weight in layer.weights:
        weight.grad, weight.main_grad = None, torch.ones(N, K)
        weight.grad_added_to_main_grad = False
    y = layer(turn(x), SPLITS)
    y.backward(turn(dy))
    fused = layer.fuse_wgrad_accumulation
    assert all(w.grad_added_to_main_grad == (fused and w.requires_grad) for w in layer.weights)
    grads = [w.main_grad if fused else w.grad for w in layer.weights if w.requires_grad]
    return [y.detach(), x.grad, *grads]


STRIDED = lambda t: torch.cat([t, t], 1)[:, : t.shape[1]]  # noqa: E731


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", NAMES[:2])
def test_launches_equal_python(name, fused, order, launches):
    # Prevents: an operand, boundary or order that differs where the node launches the kernels itself, or
    # a launch that never happens.
    layer = layer_of(name, fuse_wgrad_accumulation=fused, backend="cuda")
    memory = torch.empty(3, N, K, dtype=torch.bfloat16)
    for place, weight in zip(order, layer.weights, strict=True):
        weight.data = memory[place].copy_(weight)
    for is_frozen in (False, True):
        layer.weight1.requires_grad_(not is_frozen)
        asked = launches(False)
        want = step(layer, torch.clone)
        assert asked == [(True, False, True)]
        asked = launches(True)
        got = step(layer, torch.clone)
        assert asked == []
        for ours, pythons in zip(got, want, strict=True):
            assert torch.equal(ours, pythons)


@pytest.mark.parametrize("case", ["strided", "version", "main_grad", "tied"])
def test_what_is_not_plain_is_left_to_python(case, launches):
    # Prevents: a kernel handed memory it cannot read or write, or a changed weight, without a look.
    layer = layer_of("bf16", fuse_wgrad_accumulation=case in ("main_grad", "tied"), backend="cuda")
    x, dy = inputs()
    asked = launches(True)
    if case == "tied":
        layer.weight1 = layer.weight0
    for weight in layer.weights:
        weight.main_grad = torch.zeros(N, K, dtype=torch.float64)
    y = layer(STRIDED(x) if case == "strided" else x, SPLITS)
    if case == "version":
        with torch.no_grad():
            layer.weight0.zero_()
        with pytest.raises(RuntimeError, match="modified in place"):
            y.backward(dy)
    else:
        y.backward(STRIDED(dy) if case == "strided" else dy)
    needs_x = case in ("strided", "version")
    assert asked == [(needs_x, False, True)]


@pytest.mark.gpu
def test_row_offsets():
    # Prevents: boundaries cut off at the launch's arguments, and splits baked into a graph's replays.
    x = torch.empty(1, 8, device="cuda")
    for splits in ((5,), (0, 0, 7), tuple(range(1024))):
        want = offsets_from_splits(splits, "cuda")
        assert torch.equal(cuda_gemm.row_offsets(x, splits), want)
    for splits in ((), (1,) * 1025, (4, -1), (2**31 - 1, 1)):
        with pytest.raises(ValueError, match="row_offsets"):
            cuda_gemm.row_offsets(x, splits)
    with (
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        pytest.raises(ValueError, match="in a CUDA graph"),
    ):
        cuda_gemm.row_offsets(x, (3, 4))
