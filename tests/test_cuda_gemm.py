"""The CUDA backend's products and the layers on them: formats, gradients, memory, no synchronisation."""

import itertools

import pytest
import torch

from megatron_nvfp4 import backends
from megatron_nvfp4.backends import PackedWeights, cuda_gemm
from megatron_nvfp4.backends.extension import why_not_cuda
from megatron_nvfp4.backends.reference import decode_fp64
from megatron_nvfp4.modules import GroupedLinear, LayerNormLinear, Linear, QLinearParams
from megatron_nvfp4.modules.base import QLinearBase
from megatron_nvfp4.quant.layout import offsets_from_splits
from megatron_nvfp4.recipes import BF16, MXFP8, RECIPES, FloatSpec, NVFP4Spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not_cuda() is not None, reason=f"cuda: {why_not_cuda()}"),
]
TOKEN, TENSOR, TILES = NVFP4Spec(outer="token"), NVFP4Spec(), NVFP4Spec(block=(16, 16))
SEARCHED = NVFP4Spec(outer="token", four_over_six="mse", error="fast")
FORWARD_PAIRS = [
    (TOKEN, TENSOR),
    (TENSOR, TENSOR),
    (TENSOR, TILES),
    (SEARCHED, NVFP4Spec(four_over_six="mse", error="fast")),
    (NVFP4Spec(outer="token", e4m3_max=256), NVFP4Spec(e4m3_max=256)),
    (BF16, TENSOR),
    (MXFP8, TENSOR),
    (MXFP8, MXFP8),
    (TOKEN, TOKEN),
    (TENSOR, TOKEN),
    (TOKEN, MXFP8),
    (BF16, BF16),
]
SPLITS = [0, 1, 130, 0, 17, 64, 300, 0]
NAMES = [name for name in RECIPES if not name.startswith("sweep")]
# FP32 sums of K products err by at most K 2^-24 of the sum of |products|, and tensor cores, which align
# and cut the addends of one instruction, by at most about four times as much.
TERM = 4 * 2.0**-24


def randn(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(*shape, generator=generator, device="cuda") * scale
    return x.bfloat16()


def operand(backend, x, spec, offsets):
    if spec == BF16:
        return x
    return backend.quantize(x, spec, offsets=offsets if isinstance(spec, NVFP4Spec) else None)


def bound_of(a, b, expected, num_terms: int, dtype: torch.dtype) -> torch.Tensor:
    """Of |result - exact|; a, b: decoded FP64 operands with their scales."""
    half_ulp = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-22  # scale, bias and output, rounded
    return half_ulp * expected.abs() + num_terms * TERM * (a.abs() @ b.abs().t()) + 1e-30


def scaled(x, rows: slice = slice(None)):
    exact, scale = decode_fp64(x), backends.reference.row_scale(x)
    values = exact if scale is None else exact * scale[:, None].double()
    return values[rows]


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("pair", FORWARD_PAIRS, ids=lambda pair: f"{pair[0]} x {pair[1]}")
def test_every_pair_of_formats(pair, out_dtype):
    # Prevents: a decoder, an outer scale, a bias or a group boundary that one pair gets wrong.
    cuda, (n, k) = backends.get("cuda"), (96, 160)
    offsets = offsets_from_splits(SPLITS, "cuda")
    groups, num_rows = len(SPLITS), sum(SPLITS)
    x, w = randn(num_rows, k, seed=1, scale=3), randn(groups * n, k, seed=2, scale=0.1)
    bias = randn(groups, n, seed=3)
    a, b = (
        operand(cuda, x, pair[0], offsets),
        operand(cuda, w, pair[1], torch.arange(groups + 1, device="cuda") * n),
    )
    assert cuda.why_not("grouped_gemm", pair, (num_rows, n, k), "cuda") is None
    y = cuda.grouped_gemm(a, b, offsets, bias=bias, out_dtype=out_dtype)
    again = cuda.grouped_gemm(
        a, cuda.pack_weights(b, groups), offsets, bias=bias, out_dtype=out_dtype
    )
    assert torch.equal(y, again)
    bounds = offsets.tolist()
    for group, (first, last) in enumerate(itertools.pairwise(bounds)):
        left = scaled(a, slice(first, last))
        right = scaled(unpacked(b), slice(group * n, (group + 1) * n))
        expected = left @ right.t() + bias[group].double()
        limit = (
            bound_of(left, right, expected, k, out_dtype) + 2.0**-22 * bias[group].abs().double()
        )
        assert ((y[first:last].double() - expected).abs() <= limit).all()
        alone = cuda.gemm(
            operand(cuda, x[first:last], pair[0], None),
            operand(cuda, w[group * n : (group + 1) * n], pair[1], None),
            bias=bias[group],
            out_dtype=out_dtype,
        )
        assert torch.equal(alone, y[first:last])  # a group does not see its neighbours


def unpacked(b):
    return cuda_gemm.unpack_weights(b) if isinstance(b, PackedWeights) else b


def test_simulated_floats_are_refused():
    # Prevents: values of nine significant bits rounded to BF16 without a word.
    spec = FloatSpec(exponent=3, mantissa=4)
    assert "do not fit BF16" in backends.get("cuda").why_not("gemm", (spec, spec), device="cuda")
    found = backends.find("gemm", (spec, spec), device="cuda")
    assert found.name == "reference"
    for shape in ((16, 30, 64), (16, 32, 60)):
        assert "multiples of 8" in backends.get("cuda").why_not("gemm", (BF16, BF16), shape, "cuda")
    fault = backends.get("cuda").why_not("gemm", (BF16, BF16), None, "cuda", torch.float32)
    assert "torch.float32" in fault


@pytest.mark.parametrize("shape", [(1536, 2048), (2048, 768)], ids=str)
def test_error_of_the_fp32_epilogue(shape):
    # Prevents: an epilogue that rounds before it scales: 3e-3 instead of 4e-5 of the norm.
    cuda, (n, k) = backends.get("cuda"), shape
    splits = [500, 0, 37, 487]
    offsets, groups = offsets_from_splits(splits, "cuda"), len(splits)
    x, w = randn(1024, k, seed=1), randn(groups * n, k, seed=2, scale=0.02)
    a = cuda.quantize(x, TOKEN)
    b = cuda.quantize(w, TENSOR, offsets=torch.arange(groups + 1, device="cuda") * n)
    y = cuda.grouped_gemm(a, b, offsets, out_dtype=torch.float32)
    expected = backends.get("reference").grouped_gemm(a, b, offsets, out_dtype=torch.float64)
    assert (y - expected).norm() / expected.norm() < 4e-5
    pure = backends.get("reference").grouped_gemm(x, w, offsets, out_dtype=torch.float64)
    cosine = torch.nn.functional.cosine_similarity(y.double().flatten(), pure.flatten(), dim=0)
    assert 0.985 < cosine < 0.997  # E2M1 costs what it costs; 0.991 is usual of normal values


def gradients(recipe: str, backend: str, x, dy, splits, weights, *, bypass: bool = False):
    chosen = RECIPES[recipe].with_bypass() if bypass else RECIPES[recipe]
    layer = GroupedLinear(
        len(splits),
        x.shape[1],
        dy.shape[1],
        params_dtype=torch.bfloat16,
        device="cuda",
        qlinear_params=QLinearParams(recipe=chosen, backend=backend),
    )
    with torch.no_grad():
        for index, weight in enumerate(weights):
            getattr(layer, f"weight{index}").copy_(weight)
            getattr(layer, f"bias{index}").copy_(weight[:, 0])
    x = x.clone().requires_grad_()
    y = layer(x, splits)
    y.backward(dy)
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("name", NAMES)
def test_layers_equal_the_reference_up_to_summation(name, monkeypatch):
    # Prevents: a gradient multiplied from other operands than the recipe names, which would differ by
    # the quantisation's error, a tenth of the norm; summation and rounding differ by far less.
    monkeypatch.setattr(QLinearBase, "rounding_seed", lambda self, device: 7)
    splits, (n, k) = [70, 0, 1, 200, 33], (128, 192)
    x, dy = randn(sum(splits), k, seed=1), randn(sum(splits), n, seed=2)
    weights = [randn(n, k, seed=10 + i, scale=0.1) for i in range(len(splits))]
    ours = gradients(name, "auto", x, dy, splits, weights)
    exact = gradients(name, "reference", x, dy, splits, weights)
    for got, want in zip(ours, exact, strict=True):
        if want.norm() == 0:
            assert not got.any()  # an expert without rows: exact zeros
        else:
            assert (got.double() - want.double()).norm() / want.double().norm() < 2.0**-9


def test_backward_errors_are_the_published_ones():
    # Prevents: a BF16 or MXFP8 backward less accurate than the path is known to be (relative L2 of BF16
    # 0.0017, of MXFP8 0.038 with 98.8 % of the signs agreeing).
    splits, (n, k) = [256, 0, 300, 468], (1536, 2048)
    x, dy = randn(1024, k, seed=1), randn(1024, n, seed=2)
    weights = [randn(n, k, seed=10 + i, scale=0.02) for i in range(len(splits))]
    exact = gradients(
        "nvfp4_per_token_bf16_bwd", "reference", x.double().bfloat16(), dy, splits, weights
    )
    for name, bypass, largest in (
        ("nvfp4_per_token_bf16_bwd", False, 0.002),
        ("nvfp4_per_token", True, 0.002),
        ("nvfp4_per_token", False, 0.045),
    ):
        ours = gradients(name, "auto", x, dy, splits, weights, bypass=bypass)
        for got, want in zip(ours[1:2] + ours[2::2], exact[1:2] + exact[2::2], strict=True):
            if not want.any():
                assert not got.any()
                continue
            error = (got.double() - want.double()).norm() / want.double().norm()
            assert error < largest
            agreement = (torch.sign(got) == torch.sign(want)).float().mean()
            assert agreement > (0.985 if largest > 0.01 else 0.999)


def contexts(target: torch.Tensor) -> dict[str, tuple[torch.Tensor, int]]:
    """Batches that hold the target rows, and where they begin."""
    k = target.shape[1]
    other, loud = randn(96, k, seed=5), randn(1024, k, seed=6, scale=1000)
    broken = other.clone()
    broken[7, 3], broken[9, 5] = float("nan"), float("inf")
    return {
        "alone": (target, 0),
        "other rows behind": (torch.cat((target, other)), 0),
        "other rows before": (torch.cat((other, target)), len(other)),
        "loud context": (torch.cat((loud, target)), len(loud)),
        "all zero context": (torch.cat((torch.zeros_like(loud), target)), len(loud)),
        "NaN and Inf beside": (torch.cat((broken[:40], target, broken[40:])), 40),
    }


@pytest.mark.parametrize("name", ["nvfp4_per_token", "nvfp4_per_token_4over6", "nvfp4_w4a16"])
def test_rows_do_not_see_their_context(name):
    # Prevents: log-probs that change with the batch, the padding or the number of experts.
    layer = Linear(
        256,
        384,
        params_dtype=torch.bfloat16,
        device="cuda",
        qlinear_params=QLinearParams(recipe=RECIPES[name]),
    )
    target = randn(33, 256, seed=4)
    with torch.no_grad():
        want = layer(target)
        for label, (batch, first) in contexts(target).items():
            got = layer(batch)[first : first + len(target)]
            assert torch.equal(got, want), label


@pytest.mark.parametrize("name", [n for n in NAMES if n != "nvfp4_pretrain"])
def test_extreme_inputs_stay_where_they_are(name):
    # Prevents: an Inf, a NaN or an outlier in one expert that reaches another expert's gradients.
    splits, (n, k) = [40, 24, 0, 64], (64, 128)
    x, dy = randn(128, k, seed=1), randn(128, n, seed=2)
    weights = [randn(n, k, seed=10 + i) for i in range(len(splits))]
    clean = gradients(name, "auto", x, dy, splits, weights)
    x[45, 3], x[46] = float("nan"), 3e38
    dy[50, 1] = float("inf")
    dirty = gradients(name, "auto", x, dy, splits, weights)
    rows = torch.ones(128, dtype=torch.bool)
    rows[40:64] = False
    for got, want in zip(dirty[:2], clean[:2], strict=True):
        assert torch.equal(got[rows], want[rows])
    for index, (got, want) in enumerate(zip(dirty[2:], clean[2:], strict=True)):
        if index // 2 != 1:
            assert torch.equal(got, want)


@pytest.mark.parametrize("device_splits", [False, True])
@pytest.mark.parametrize("name", [*NAMES, "bypass"])
def test_nothing_waits_for_the_gpu(name, device_splits, monkeypatch):
    # Prevents: a host synchronisation in a layer's step, which starves the GPU and forbids CUDA graphs.
    recipe = RECIPES["bf16"].with_bypass() if name == "bypass" else RECIPES[name]
    params = QLinearParams(recipe=recipe)
    experts = GroupedLinear(
        4, 128, 64, params_dtype=torch.bfloat16, device="cuda", qlinear_params=params
    )
    dense = Linear(128, 64, params_dtype=torch.bfloat16, device="cuda", qlinear_params=params)
    normed = LayerNormLinear(
        128, 64, params_dtype=torch.bfloat16, device="cuda", qlinear_params=params
    )
    splits = torch.tensor([30, 0, 50, 20])
    splits = splits.cuda() if device_splits else splits.tolist()
    x = randn(100, 128, seed=1).requires_grad_()

    def step() -> None:
        for layer, args in ((experts, (splits,)), (dense, ()), (normed, ())):
            layer(x, *args).sum().backward()

    step()  # loads modules and allocates
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["nvfp4_per_token_bf16_bwd", "nvfp4_per_token", "bf16"])
def test_a_captured_step_repeats(name):
    # Prevents: a step that cannot be captured in a CUDA graph, or whose replay reads old boundaries.
    layer = GroupedLinear(
        3,
        128,
        64,
        params_dtype=torch.bfloat16,
        device="cuda",
        qlinear_params=QLinearParams(recipe=RECIPES[name]),
    )
    splits, x = torch.tensor([30, 0, 34], device="cuda"), randn(64, 128, seed=1).requires_grad_()
    dy = randn(64, 64, seed=2)

    def step() -> list[torch.Tensor]:
        y = layer(x, splits)
        return [y.detach(), *torch.autograd.grad(y, (x, *layer.weights), dy)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    splits.copy_(torch.tensor([1, 60, 3]))
    x.data.copy_(randn(64, 128, seed=3))
    graph.replay()
    for got, want in zip(captured, step(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    "name", ["nvfp4_per_token_bf16_bwd", "nvfp4_per_token_dequant_bwd", "nvfp4_per_token"]
)
def test_main_grad_and_descending_weights(name):
    # Prevents: gradients that depend on where Megatron's optimizer has put parameters and main_grad.
    splits, (n, k) = [40, 0, 24], (64, 128)
    x, dy = randn(64, k, seed=1), randn(64, n, seed=2)
    weights = [randn(n, k, seed=10 + i) for i in range(3)]
    plain = gradients(name, "auto", x, dy, splits, weights)
    layer = GroupedLinear(
        3,
        k,
        n,
        bias=False,
        params_dtype=torch.bfloat16,
        device="cuda",
        fuse_wgrad_accumulation=True,
        qlinear_params=QLinearParams(recipe=RECIPES[name]),
    )
    memory = torch.empty(3, n, k, dtype=torch.bfloat16, device="cuda")
    for index, weight in enumerate(weights):
        parameter = getattr(layer, f"weight{index}")
        parameter.data = memory[2 - index].copy_(weight)
        parameter.main_grad = torch.ones(n, k, device="cuda")
    x = x.clone().requires_grad_()
    layer(x, splits).backward(dy)
    assert torch.equal(x.grad, plain[1])
    for index in range(3):
        main_grad, grad = getattr(layer, f"weight{index}").main_grad, plain[2 + 2 * index].float()
        # The gradient is BF16, main_grad FP32: they differ by that rounding.
        assert ((main_grad - 1 - grad).abs() <= 2.0**-8 * grad.abs() + 2.0**-20).all()
        assert bool(grad.any()) == bool(splits[index])


@pytest.mark.parametrize("name", [n for n in NAMES if n != "nvfp4_pretrain"])
def test_splits_on_the_device_give_the_same_gradients(name):
    # Prevents: groups padded to a bound, for want of the splits, that end up in another group.
    # Not nvfp4_pretrain: its random bits depend on the padded size.
    splits, (n, k) = [40, 0, 23, 1, 0], (64, 128)
    x, dy = randn(64, k, seed=1), randn(64, n, seed=2)
    weights = [randn(n, k, seed=10 + i) for i in range(len(splits))]
    on_host = gradients(name, "auto", x, dy, splits, weights)
    on_device = gradients(name, "auto", x, dy, torch.tensor(splits, device="cuda"), weights)
    for got, want in zip(on_device, on_host, strict=True):
        assert torch.equal(got, want)


def saved_bytes(layer, x, splits) -> int:
    """Bytes kept for the backward beside the parameters and row offsets."""
    parameters = {p.data_ptr() for p in layer.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.dtype != torch.int64 and tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x, splits)
    return sum(kept.values())


def test_state_kept_for_the_backward():
    # Prevents: BF16 kept where 4.5 bits are read; the bypass keeps what an unquantised layer keeps.
    splits, (n, k) = [512, 0, 512], (64, 2048)
    x = randn(1024, k, seed=1).requires_grad_()

    def of(recipe) -> int:
        layer = GroupedLinear(
            3,
            k,
            n,
            bias=False,
            params_dtype=torch.bfloat16,
            device="cuda",
            qlinear_params=QLinearParams(recipe=recipe),
        )
        return saved_bytes(layer, x, splits)

    activations, weights = x.nbytes, 3 * n * k * 2
    assert of(RECIPES["bf16"]) == activations
    assert of(RECIPES["nvfp4_per_token"].with_bypass()) == activations
    assert of(RECIPES["nvfp4_per_token_dequant_bwd"]) <= 0.30 * (activations + weights)
    assert of(RECIPES["nvfp4_per_token"]) <= 0.53 * activations


@pytest.mark.parametrize("shape", [(8, 16), (24, 48), (1000, 144), (136, 2080)], ids=str)
def test_sizes_that_are_not_whole_tiles(shape):
    # Prevents: reads past a row's end, and columns left unwritten.
    (n, k), cuda = shape, backends.get("cuda")
    for num_rows in (1, 7, 129):
        x, w = randn(num_rows, k, seed=num_rows), randn(n, k, seed=2)
        for pair in ((TOKEN, TENSOR), (BF16, TENSOR), (BF16, BF16)):
            a, b = operand(cuda, x, pair[0], None), operand(cuda, w, pair[1], None)
            y = cuda.gemm(a, b, out_dtype=torch.float32).double()
            left, right = scaled(a), scaled(b)
            expected = left @ right.t()
            assert ((y - expected).abs() <= bound_of(left, right, expected, k, torch.float32)).all()
