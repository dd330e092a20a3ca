"""Numbers of Linear, forward and backward, in every recipe."""

import copy

import pytest
import torch
from layer_cases import K, N, assert_forward, assert_gradients, grouped, linear, recipes, run
from layer_oracle import (
    BUILDABLE,
    SEED,
    assert_close_as_torch,
    dequantized,
    expected,
    grid,
    outliers,
    params_of,
    product,
)
from layer_oracle import decoded as decode_for_oracle
from torch.utils.checkpoint import checkpoint

from megatron_nvfp4.modules import QLinearParams
from megatron_nvfp4.modules.params import require_backend
from megatron_nvfp4.recipes import RECIPES


def test_the_list_of_recipes_is_complete():
    # Prevents: a recipe that builds and that nothing below runs; one that builds without its
    # kernels.
    for name, recipe in RECIPES.items():
        require_backend(params_of(recipe))
        assert name in BUILDABLE or name.startswith("sweep_")
        if recipe.quantized:
            with pytest.raises(RuntimeError, match=f"recipe {name} needs .* cannot be built"):
                require_backend(QLinearParams(recipe=recipe, backend="te"))


# --- Linear -----------------------------------------------------------------------------------


@recipes
def test_linear(recipe):
    # Prevents: an operand in another format than the recipe's, a transpose, a second rounding, a
    # lost bias.
    layer = linear(recipe)
    x, dy = outliers(19, K, seed=1), grid(19, N, seed=2)
    y, dx = run(layer, x, dy)
    want = expected(recipe, x, [layer.weight], dy, biases=[layer.bias])
    assert y.dtype == dx.dtype == torch.bfloat16
    assert_forward(recipe, want, y)
    assert_gradients(recipe, want, dx, [layer.weight])
    assert torch.equal(layer.bias.grad, dy.double().sum(0).bfloat16())


@recipes
@pytest.mark.parametrize("num_rows", [1, 7, 129])
def test_any_number_of_rows(recipe, num_rows):
    # Prevents: tokens that must fill a tile; rows whose result depends on the rows beside them.
    layer = linear(recipe)
    x, dy = outliers(num_rows, K, seed=3), grid(num_rows, N, seed=4)
    y, dx = run(layer, x.reshape(num_rows, 1, K), dy.reshape(num_rows, 1, N))
    want = expected(recipe, x, [layer.weight], dy, biases=[layer.bias])
    assert y.shape == (num_rows, 1, N)
    assert dx.shape == (num_rows, 1, K)
    assert_forward(recipe, want, y.reshape(num_rows, N))
    assert_gradients(recipe, want, dx.reshape(num_rows, K), [layer.weight])
    if recipe.quantized and getattr(recipe.fprop.left, "outer", "token") == "token":
        assert torch.equal(layer(x[-1:]), y[-1])


def test_no_rows():
    # Prevents: a crash, or gradients that stay None, for a batch without tokens.
    for recipe in BUILDABLE.values():
        layer = linear(recipe)
        y, dx = run(layer, torch.zeros(0, K).bfloat16(), torch.zeros(0, N).bfloat16())
        assert y.shape == (0, N)
        assert dx.shape == (0, K)
        assert not layer.weight.grad.any()
        assert not layer.bias.grad.any()


def test_return_bias():
    # Prevents: the bias added twice, once here and once by the caller.
    plain, returning = (
        linear("nvfp4_per_token", bias=False),
        linear("nvfp4_per_token", return_bias=True),
    )
    x = outliers(5, K, seed=5)
    y, bias = returning(x)
    assert bias is returning.bias
    assert torch.equal(y, plain(x))
    experts, dry = (
        grouped("nvfp4_per_token", return_bias=True),
        grouped("nvfp4_per_token", bias=False),
    )
    for index in range(4):
        getattr(dry, f"weight{index}").data.copy_(getattr(experts, f"weight{index}"))
    y, biases = experts(x, [5, 0, 0, 0])
    assert all(a is b for a, b in zip(biases, experts.biases, strict=True))
    assert torch.equal(y, dry(x, [5, 0, 0, 0]))


def test_fp32_parameters_under_autocast():
    # Prevents: FP32 activations multiplied as such, or master weights rounded to BF16 before
    # quantisation.
    for name in (
        "nvfp4_per_token",
        "nvfp4_per_token_bf16_bwd",
        "nvfp4_per_token_dequant_bwd",
        "bf16",
    ):
        recipe = BUILDABLE[name]
        layer = linear(recipe, params_dtype=torch.float32)
        x, dy = outliers(19, K, seed=6), grid(19, N, seed=7)
        x_leaf = x.float().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x_leaf)
        y.backward(dy)
        want = expected(recipe, x, [layer.weight], dy, biases=[layer.bias.bfloat16()])
        assert y.dtype == torch.bfloat16
        assert_forward(recipe, want, y.detach())
        assert layer.weight.grad.dtype == x_leaf.grad.dtype == torch.float32
        assert_gradients(recipe, want, x_leaf.grad.bfloat16(), [layer.weight])


def test_fp32_throughout():
    """Prevents: a rounding to BF16 on the way when everything is FP32.

    The operands' sum is rounded once to FP32, then two multiplications and one addition: 4 * 2^-24.
    """
    recipe = BUILDABLE["nvfp4_per_token_dequant_bwd"]
    layer = linear(recipe, params_dtype=torch.float32)
    x, dy = (
        torch.randn(9, K, generator=torch.Generator().manual_seed(8)),
        grid(9, N, seed=9).float(),
    )
    y, _ = run(layer, x, dy)
    want = expected(recipe, x, [layer.weight], dy, biases=[layer.bias])
    assert y.dtype == torch.float32
    assert torch.equal(y, want.y)
    exact = (
        dequantized(x, recipe.fprop.left, torch.float32).double()
        @ dequantized(layer.weight.detach(), recipe.fprop.right, torch.float32).double().t()
    )
    assert ((y - exact - layer.bias).abs() <= 8 * 2.0**-24 * (want.y_size + 10)).all()


# --- backward modes ---------------------------------------------------------------------------


def test_backward_modes_use_the_operands_they_name():
    """Prevents: a saved original overriding `dequantized`, or the reverse; both would train.

    The activations' outliers make the quantisation error large, so that each mode's gradients
    differ from every other's by far more than rounding; `bf16` and the bypass share operands and
    differ in who adds up.
    """
    modes = {
        "bf16": BUILDABLE["nvfp4_per_token_bf16_bwd"],
        "dequantized": BUILDABLE["nvfp4_per_token_dequant_bwd"],
        "mxfp8": BUILDABLE["nvfp4_per_token"],
        "bypass": BUILDABLE["nvfp4_per_token+bypass"],
    }
    x, dy = outliers(32, K, seed=11), grid(32, N, seed=12)
    results = {}
    for mode, recipe in modes.items():
        layer = linear(recipe)
        _, dx = run(layer, x, dy)
        results[mode] = (dx.double(), layer.weight.grad.double())
        assert recipe.backward == mode  # what `describe` and run records print
        assert layer.qlinear_params.gemm_backend == ("torch" if mode == "bypass" else "reference")
    weight = linear("bf16").weight.detach()
    x_hat = dequantized(x, modes["dequantized"].fprop.left, torch.bfloat16)
    w_hat = dequantized(weight, modes["dequantized"].fprop.right, torch.bfloat16)
    for mode, (w_used, x_used) in {"bf16": (weight, x), "dequantized": (w_hat, x_hat)}.items():
        dx = product(decode_for_oracle(dy), decode_for_oracle(w_used.t()))[0]
        dw = product(decode_for_oracle(dy.t()), decode_for_oracle(x_used.t()))[0]
        assert torch.equal(results[mode][0], dx.bfloat16().double())
        assert torch.equal(results[mode][1], dw.bfloat16().double())

    def distance(a: str, b: str) -> list[float]:
        pairs = zip(results[a], results[b], strict=True)
        return [float((p - q).norm() / q.norm()) for p, q in pairs]

    for a, b in (("bf16", "dequantized"), ("bf16", "mxfp8"), ("dequantized", "mxfp8")):
        assert min(distance(a, b)) > 0.01, (a, b)
    assert max(distance("bypass", "bf16")) < 2**-8


def test_bypass_and_dedicated_add_up_differently():
    # Prevents: `bypass` running our operator or the reverse: only ours has exact sums on a CPU.
    x, dy = outliers(32, K, seed=13), grid(32, N, seed=14)
    grads = {}
    for name in ("nvfp4_per_token_bf16_bwd", "nvfp4_per_token+bypass"):
        layer = linear(name, fuse_wgrad_accumulation=True)
        layer.weight.main_grad = torch.zeros(N, K)
        run(layer, x, dy)
        grads[name] = layer.weight.main_grad
    dw, size = product(decode_for_oracle(dy.t()), decode_for_oracle(x.t()))
    assert torch.equal(grads["nvfp4_per_token_bf16_bwd"], dw)
    assert not torch.equal(grads["nvfp4_per_token+bypass"], dw)
    assert_close_as_torch(grads["nvfp4_per_token+bypass"], dw, size, 32)


def saved_bytes(layer, x, *args) -> tuple[int, list[torch.Tensor]]:
    """Bytes of everything kept for backward but row offsets, and those tensors."""
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x, *args)
    saved = [tensor for tensor in saved if tensor.dtype != torch.int64]
    return sum(tensor.nbytes for tensor in saved), saved


@pytest.mark.parametrize(
    ("name", "activations", "weight"),
    [
        ("nvfp4_per_token_bf16_bwd", 2.0, 0),
        ("nvfp4_per_token+bypass", 2.0, 0),
        ("nvfp4_per_token", 1 + 1 / 32, 0),
        ("nvfp4_per_token_dequant_bwd", 1 / 2 + 1 / 16, 1 / 2 + 1 / 16),
    ],
)
def test_only_what_backward_reads_is_saved(name, activations, weight):
    # Prevents: 16 bits a value kept beside the 4.5 that are used, or a frozen layer keeping its
    # input. A weight that is read as it is belongs to the layer and is not kept a second time.
    num_rows, is_packed = 32, weight > 0
    layer, x = linear(name, bias=False), outliers(num_rows, K, seed=15).requires_grad_()
    total, saved = saved_bytes(layer, x)
    amaxes = 4 * (num_rows + 1) if is_packed else 0
    assert total == activations * num_rows * K + weight * N * K + amaxes
    addresses = {tensor.data_ptr() for tensor in saved}
    assert (x.data_ptr() in addresses) == (activations == 2.0)
    assert layer.weight.data_ptr() not in addresses
    layer.weight.requires_grad_(False)
    frozen, _ = saved_bytes(layer, x)
    assert frozen == weight * N * K + (4 if is_packed else 0)


@pytest.mark.parametrize(
    ("name", "is_read"),
    [("bf16", True), ("nvfp4_per_token", True), ("nvfp4_per_token_dequant_bwd", False)],
)
def test_weights_changed_before_the_backward(name, is_read):
    # Prevents: gradients of other weights than the forward's, in silence.
    layer, x = linear(name, bias=False), outliers(32, K, seed=15).requires_grad_()
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    if is_read:
        with pytest.raises(RuntimeError, match="modified in place between forward and backward"):
            y.sum().backward()
    else:
        y.sum().backward()


def test_inputs_without_gradient():
    # Prevents: a weight copy kept, or a dgrad GEMM run, for the first layer of a model.
    layer, x = linear("nvfp4_per_token_dequant_bwd", bias=False), outliers(32, K, seed=16)
    total, _ = saved_bytes(layer, x)
    assert total == (1 / 2 + 1 / 16) * 32 * K + 4 * 32
    y = layer(x)
    y.backward(grid(32, N, seed=17))
    assert layer.weight.grad is not None


@pytest.mark.parametrize("name", ["nvfp4_per_token", "nvfp4_pretrain"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_gives_the_same_gradients(name, use_reentrant):
    # Prevents: a forward with hidden state, or random bits drawn anew, when activation
    # checkpointing runs it twice.
    x, dy = outliers(16, K, seed=18), grid(16, N, seed=19)
    layer = linear(name)
    twin = copy.deepcopy(layer)
    _, dx = run(layer, x, dy)
    x = x.clone().requires_grad_()
    torch.manual_seed(SEED)
    checkpoint(twin, x, use_reentrant=use_reentrant).backward(dy)
    assert torch.equal(x.grad, dx)
    assert torch.equal(layer.weight.grad, twin.weight.grad)


def test_stochastic_gradients_follow_the_seed():
    # Prevents: gradients rounded alike in every step, layer or expert; a forward that is random;
    # draws from the generator by recipes, or in evaluation, that need none.
    x, dy = outliers(32, K, seed=60), grid(32, N, seed=61)
    layer, plain = linear("nvfp4_pretrain"), linear("nvfp4_per_token")
    y, dx = run(layer, x, dy)
    dw, layer.weight.grad = layer.weight.grad, None
    again = run(layer, x, dy)
    assert torch.equal(again[1], dx)
    assert torch.equal(layer.weight.grad, dw)
    layer.weight.grad = None
    leaf = x.clone().requires_grad_()  # the generator has moved on
    other = layer(leaf)
    other.backward(dy)
    assert torch.equal(other, y)
    assert not torch.equal(leaf.grad, dx)
    assert not torch.equal(layer.weight.grad, dw)
    state = torch.get_rng_state()
    plain(x)
    with torch.no_grad():
        layer.eval()(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_stochastic_gradients_are_right_on_average():
    """Prevents: a rotation of one operand only, random bits shared with the activations' rounding.

    The mean of dx over seeds tends to the gradient of the decoded weight applied to dy itself, which
    E2M1 with a scale per block represents but for the rounding: of S samples each within `step` of
    it, the mean stays within 6 standard deviations, step / (2 sqrt(S)), summed over N terms.
    """
    dy, num_samples = grid(16, N, seed=63) / 4, 200
    layer = linear("nvfp4_pretrain", bias=False)
    x = outliers(16, K, seed=62)
    weight = dequantized(
        layer.weight.detach(), layer.qlinear_params.recipe.fprop.right, torch.float32
    )
    total = torch.zeros(16, K, dtype=torch.float64)
    for seed in range(num_samples):
        torch.manual_seed(seed)
        leaf = x.clone().requires_grad_()
        layer(leaf).backward(dy)
        total += leaf.grad.double()
    exact = dy.double() @ weight.double()
    # The largest distance of E2M1 values is 2/6 of a block's maximum; 2^-9 for the BF16 outputs.
    step = dy.double().abs().max() / 3
    deviation = step / 2 * weight.double().square().sum(0).sqrt() / num_samples**0.5
    assert ((total / num_samples - exact).abs() <= 6 * deviation + 2.0**-8 * exact.abs()).all()
    assert deviation.max() < exact.abs().mean()


# --- gradient accumulation --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["nvfp4_per_token", "nvfp4_per_token_dequant_bwd"])
def test_fused_accumulation(name, dtype):
    # Prevents: main_grad overwritten, rounded before it is added, or added a second time through
    # .grad.
    layer, recipe = linear(name, fuse_wgrad_accumulation=True), BUILDABLE[name]
    x, dy = outliers(19, K, seed=20), grid(19, N, seed=21)
    start = torch.randn(N, K, generator=torch.Generator().manual_seed(22)).to(dtype)
    layer.weight.main_grad = start.clone()
    layer.weight.grad_added_to_main_grad = False
    run(layer, x, dy)
    dw = expected(recipe, x, [layer.weight], dy).dws[0]
    assert torch.equal(layer.weight.main_grad, (start.float() + dw).to(dtype))
    assert layer.weight.grad_added_to_main_grad is True
    assert layer.weight.grad.shape == layer.weight.shape  # Megatron's hooks wait for a gradient
    layer.weight.grad, layer.weight.zero_out_wgrad = None, True
    run(layer, x, dy)
    assert not layer.weight.grad.any()
    del layer.weight.grad_added_to_main_grad
    layer.weight.grad = None
    run(layer, x, dy)
    assert layer.weight.grad is None


def test_without_main_grad_the_gradient_is_returned():
    # Prevents: fused accumulation that loses gradients outside Megatron's buffers.
    layer, plain = (
        linear("nvfp4_per_token", fuse_wgrad_accumulation=True),
        linear("nvfp4_per_token"),
    )
    x, dy = outliers(8, K, seed=23), grid(8, N, seed=24)
    run(layer, x, dy)
    run(plain, x, dy)
    assert torch.equal(layer.weight.grad, plain.weight.grad)
