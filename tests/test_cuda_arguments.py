"""What the CUDA backend hands its GEMM kernels, with the kernels' contract in their place, on a CPU."""

import pytest
import torch
from kernel_stand_in import Kernels

from megatron_nvfp4.backends import cuda, cuda_gemm, extension
from megatron_nvfp4.backends.extension import why_not_cpu
from megatron_nvfp4.modules import GroupedLinear, Linear, QLinearParams
from megatron_nvfp4.modules.base import QLinearBase
from megatron_nvfp4.modules.matmul import stack_rows
from megatron_nvfp4.quant.layout import dense_offsets, offsets_from_splits
from megatron_nvfp4.recipes import RECIPES, NVFP4Spec

pytestmark = pytest.mark.skipif(why_not_cpu() is not None, reason=f"cpu: {why_not_cpu()}")
NAMES = [name for name in RECIPES if not name.startswith("sweep")]
TOKEN, TENSOR = NVFP4Spec(outer="token"), NVFP4Spec()


@pytest.fixture(params=[True, False], ids=["compute capability 9.0", "another GPU"])
def kernels(request, monkeypatch):
    """CPU tensors taken for CUDA's, the GEMM kernels by their contract."""
    extension.load()
    stand_in = Kernels(torch.ops.megatron_nvfp4)
    monkeypatch.setattr(cuda_gemm, "_ops", lambda: stand_in)
    monkeypatch.setattr(cuda_gemm, "_is_hopper", lambda device: request.param)
    claims = cuda.CudaBackend.why_not

    def why_not(self, op, formats, shape=None, device=None, dtype=None):
        return claims(self, op, formats, shape, None, dtype)

    monkeypatch.setattr(cuda.CudaBackend, "why_not", why_not)
    monkeypatch.setattr(extension, "why_not_cuda", lambda verbose=False: None)
    stand_in.is_hopper = request.param
    return stand_in


def step(layer, backend: str, x, dy, args, weights, fused: bool):
    layer.set_qlinear_params(QLinearParams(recipe=layer.qlinear_params.recipe, backend=backend))
    for parameter, values in zip(layer.parameters(), weights, strict=True):
        parameter.data.copy_(values)
        parameter.grad, parameter.main_grad = None, torch.ones(parameter.shape)
    layer.fuse_wgrad_accumulation = fused
    x = x.clone().requires_grad_()
    y = layer(x, *args)
    y.backward(dy)
    grads = [p.main_grad if fused and p.dim() == 2 else p.grad for p in layer.parameters()]
    return [y.detach(), x.grad, *grads]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_layers_equal_the_reference(name, fused, kernels, monkeypatch):
    # Prevents: a wrong scale, layout, boundary or operand handed to a kernel: every one of them changes
    # bits, because the stand-in adds exactly, as the reference does.
    monkeypatch.setattr(QLinearBase, "rounding_seed", lambda self, device: 7)
    recipe, splits, n, k = RECIPES[name], [5, 0, 40, 19], 32, 64
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(64, d, generator=generator).bfloat16() for d in (k, n))
    fields = {"params_dtype": torch.bfloat16, "device": "cpu"}
    fields["qlinear_params"] = QLinearParams(recipe=recipe, backend="reference")
    for layer, args in (
        (GroupedLinear(4, k, n, **fields), (splits,)),
        (Linear(k, n, **fields), ()),
    ):
        weights = [torch.randn(p.shape, generator=generator) for p in layer.parameters()]
        want = step(layer, "reference", x, dy, args, weights, fused)
        got = step(layer, "cuda", x, dy, args, weights, fused)
        for a, b in zip(got, want, strict=True):
            if recipe.bypass:  # the reference's backend of a bypass is the framework
                assert torch.allclose(a.float(), b.float(), rtol=2**-6, atol=2**-6)
            else:
                assert torch.equal(a, b)
    names = set(kernels.calls)
    if kernels.is_hopper:
        assert not any("generic" in kernel for kernel in names)
        assert ("grouped_gemm_w4" in names) == isinstance(recipe.fprop.right, NVFP4Spec)
    else:
        allowed = {"grouped_gemm_generic", "grouped_wgrad_generic", "grouped_wgrad_block"}
        assert names <= allowed | {"round_mxfp8_columns"}


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2)], ids=["backwards", "mixed"])
@pytest.mark.parametrize("name", [n for n in NAMES if n != "nvfp4_pretrain"])
def test_weights_out_of_order_in_memory(name, order, kernels):
    # Prevents: Megatron's optimizer, which lays parameters out backwards, changing a layer's results.
    layer = GroupedLinear(
        3,
        64,
        32,
        bias=False,
        params_dtype=torch.bfloat16,
        device="cpu",
        qlinear_params=QLinearParams(recipe=RECIPES[name], backend="cuda"),
    )
    x = torch.randn(12, 64).bfloat16().requires_grad_()

    def step() -> list[torch.Tensor]:
        y = layer(x, [4, 3, 5])
        return [y, *torch.autograd.grad(y, (x, *layer.weights), torch.ones_like(y))]

    want, memory = step(), torch.empty(3, 32, 64, dtype=torch.bfloat16)
    for place, weight in zip(order, layer.weights, strict=True):
        weight.data = memory[place].copy_(weight)
    stacked, is_reversed = stack_rows(layer.weights)
    assert is_reversed == (order == (2, 1, 0))
    assert (
        stacked.data_ptr() == memory.data_ptr()
    ) == is_reversed  # no copy where there need be none
    for got, expected in zip(step(), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", NAMES)
def test_activations_of_any_strides(name, kernels, monkeypatch):
    # Prevents: a slice of a wider tensor taken for a transposed operand, whose groups are read in blocks
    # of 16 tokens: neighbours' tokens in a weight gradient.
    monkeypatch.setattr(QLinearBase, "rounding_seed", lambda self, device: 7)
    params = QLinearParams(recipe=RECIPES[name], backend="cuda")
    fields = {"params_dtype": torch.bfloat16, "device": "cpu", "qlinear_params": params}
    layer = GroupedLinear(3, 64, 32, bias=False, **fields)
    wide, dy = torch.randn(16, 96).bfloat16(), torch.randn(16, 64).bfloat16()
    results = []
    for turn in (lambda t: t, torch.Tensor.contiguous):
        x = turn(wide[:, :64]).detach().requires_grad_()
        y = layer(x, [5, 3, 8])
        gradients = torch.autograd.grad(y, (x, *layer.weights), turn(dy[:, :32]))
        results.append([y, *gradients])
    for strided, plain in zip(*results, strict=True):
        assert torch.equal(strided, plain)


def test_packing_is_undone_exactly(kernels):
    # Prevents: a dequantised backward on other weights than the forward's.
    w = torch.randn(96, 128).bfloat16()
    offsets = torch.arange(4) * 32
    quantized = cuda.BACKEND.quantize(w, TENSOR, offsets=offsets)
    packed = cuda.BACKEND.pack_weights(quantized, 3)
    assert packed.shape == quantized.shape
    assert torch.equal(
        cuda.BACKEND.dequantize(packed, torch.bfloat16),
        cuda.BACKEND.dequantize(quantized, torch.bfloat16),
    )


def test_rows_are_gathered_by_index(kernels):
    # Prevents: a row that takes another row's outer scale.
    if not kernels.is_hopper:
        pytest.skip("row_index needs packed weights, which only compute capability 9.0 has")
    x, w = torch.randn(7, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    offsets = offsets_from_splits([4, 6], "cpu")
    index = torch.tensor([6, 0, 0, 3, 5, 5, 1, 2, 4, 6])
    b = cuda.BACKEND.pack_weights(
        cuda.BACKEND.quantize(w, TENSOR, offsets=torch.tensor([0, 32, 64])), 2
    )
    gathered = cuda.BACKEND.grouped_gemm(
        cuda.BACKEND.quantize(x[index], TOKEN), b, offsets, out_dtype=torch.float32
    )
    indexed = cuda_gemm.grouped_gemm(
        cuda.BACKEND.quantize(x, TOKEN), b, offsets, None, torch.float32, False, row_index=index
    )
    assert torch.equal(gathered, indexed)
    with pytest.raises(ValueError, match="gather the rows first"):
        cuda_gemm.grouped_gemm(
            x, [w[:32], w[32:]], offsets, None, torch.float32, False, row_index=index
        )


def test_offsets_of_a_dense_layer():
    # Prevents: a host copy on every call of a dense layer, or boundaries that miss a row.
    assert dense_offsets(5, "cpu").tolist() == [0, 5]
    assert dense_offsets(0, "cpu").tolist() == [0, 0]
