"""The deterministic Triton kernels on a GPU: rows that share a program, and gradients against the CPU's."""

import pytest
import torch
from torch import Tensor

from megatron_nvfp4.backends import dispatch
from megatron_nvfp4.deterministic.ops import activation, experts, logprobs, norm
from megatron_nvfp4.deterministic.ops.attention import PackedBatch, attention
from megatron_nvfp4.deterministic.ops.linear import Prepared, Weights, linear
from megatron_nvfp4.recipes import RECIPES

pytestmark = pytest.mark.gpu
EPS = 1e-6


@pytest.fixture
def draw():
    generator = torch.Generator("cuda").manual_seed(0)
    return lambda *shape, scale=1.0: (
        torch.randn(*shape, generator=generator, device="cuda") * scale
    ).to(torch.bfloat16)


def _close(got, want, tolerance: float = 6e-3) -> None:
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype
        a, b = a.double().cpu(), b.double()
        assert (a - b).norm() < tolerance * b.norm(), f"value {number}"


def _on_cpu(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.cpu() for t in tensors)


@pytest.mark.parametrize("heads", [(8, 2, 128), (32, 4, 128), (28, 4, 128), (4, 2, 64)])
def test_a_decoded_row_has_the_bits_it_has_alone(heads, draw):
    # Prevents: a row that reads the splits, or the masks, of the rows beside it in its program.
    num, num_kv, size = heads
    q, k, v = draw(600, num, size), draw(600, num_kv, size), draw(600, num_kv, size)
    whole = attention(q, k, v, PackedBatch.of((1,), (600,), "cuda"), "triton")
    for prompt, length in ((2, 31), (33, 64), (255, 257), (258, 600), (511, 513), (599, 600)):
        batch = PackedBatch.of((prompt,), (length,), "cuda")
        part = attention(q[:length], k[:length], v[:length], batch, "triton")
        assert torch.equal(part[prompt:], whole[prompt:length]), (prompt, length)
        alone = PackedBatch.of((length - 1,), (length,), "cuda")
        row = attention(q[:length], k[:length], v[:length], alone, "triton")[-1]
        assert torch.equal(row, whole[length - 1]), length


def test_a_prompt_row_does_not_depend_on_the_rows_behind_it(draw):
    # Prevents: other bits of a row whose tile of keys is walked without a mask.
    q, k, v = draw(700, 8, 128), draw(700, 2, 128), draw(700, 2, 128)
    whole = attention(q, k, v, PackedBatch.of((700,), (700,), "cuda"), "triton")
    for length in (1, 63, 64, 65, 127, 128, 129, 500):
        batch = PackedBatch.of((length,), (length,), "cuda")
        assert torch.equal(
            attention(q[:length], k[:length], v[:length], batch, "triton"), whole[:length]
        )


@pytest.mark.parametrize("size", [64, 128, 256])
def test_heads_side_by_side_have_the_bits_of_heads_apart(size, draw):
    # Prevents: bits of a norm that depend on where its rows lie, or on how many a program has.
    qkv, weight = draw(300, 12, size), draw(size)
    queries = qkv[:, :8]
    whole = norm.rms_norm(queries, weight, EPS)
    assert torch.equal(whole, norm.rms_norm(queries.contiguous(), weight, EPS))
    assert torch.equal(whole[7, 3], norm.rms_norm(queries[7, 3:4].clone(), weight, EPS)[0])


def test_gradients_of_norms_are_the_cpus(draw):
    # Prevents: rows, heads or columns left out of a weight's gradient.
    for shape in ((1000, 128), (70, 9, 128), (1500, 2048), (3, 5120), (40, 96)):
        x, grad, weight = draw(*shape), draw(*shape), draw(shape[-1])
        want = norm._gradients(*_on_cpu(grad, x, weight), EPS)
        _close(norm._gradients(grad, x, weight, EPS), want)
    for dtype in (torch.bfloat16, torch.float32):
        x, grad = draw(900, 2048), draw(900, 2048)
        residual, stream = (draw(900, 2048).to(dtype) for _ in range(2))
        args = grad, x, draw(2048).to(dtype)
        want = norm._gradients(*_on_cpu(*args), EPS, *_on_cpu(residual, stream))
        _close(norm._gradients(*args, EPS, residual, stream), want)


@pytest.mark.parametrize("rounding", [torch.float32, torch.bfloat16])
def test_gradients_of_logprobs_are_the_cpus(rounding, draw, monkeypatch):
    # Prevents: a token's own slope lost, temperatures of other rows, portions that do not add up.
    hidden, head = draw(70, 128), draw(5500, 128, scale=0.1)
    tokens, temperature = torch.arange(70).cuda() * 78, torch.rand(70, device="cuda") + 0.5
    grads = []
    for portion in (logprobs.PORTION, 32 * 5500):
        monkeypatch.setattr(logprobs, "PORTION", portion)
        for device in ("cuda", "cpu"):
            leaves = [t.detach().to(device).requires_grad_() for t in (hidden, head)]
            rest = tokens.to(device), temperature.to(device), rounding
            result = logprobs.token_logprobs(*leaves, *rest)
            weights = torch.linspace(-1, 1, 70, device=device)
            grads.append(torch.autograd.grad((result * weights).sum(), leaves))
    for got in (grads[0], grads[2]):
        _close(got, grads[1], 1e-2)


def test_gradients_between_products_of_experts_are_the_cpus(draw):
    # Prevents: a weight of another token's, rows of experts elsewhere, a width that is no power of two.
    ids = torch.stack([torch.randperm(16)[:4] for _ in range(100)])
    ids[::7, 1] = 16  # of an expert that stands elsewhere
    order, on_cpu = experts._Order.of(ids.cuda(), 16), experts._Order.of(ids, 16)
    assert torch.equal(order.tokens.cpu(), on_cpu.tokens)
    assert torch.equal(order.places.cpu(), on_cpu.places)
    num_rows = int(on_cpu.offsets[-1])
    for width in (96, 768, 1100):
        inner, h = draw(400, width), draw(400, 2 * width)
        weights = torch.rand(100, 4, device="cuda")
        got = experts._activation_backward(inner, h, weights, order)
        want = experts._activation_backward(*_on_cpu(inner, h, weights), on_cpu)
        _close((got[0][:num_rows], got[1][:num_rows]), (want[0][:num_rows], want[1][:num_rows]))
        _close(got[2:], want[2:])
        grad = activation.silu_and_mul_backward(inner, h)
        _close([grad], [activation.silu_and_mul_backward(*_on_cpu(inner, h))])


def test_a_row_of_a_product_has_the_bits_it_has_among_any_number_of_rows(draw):
    # Prevents: a tile, chosen by the number of rows, that adds in another order.
    for num_cols, depth in ((2048, 4096), (5120, 2048), (128, 512)):
        x, weight = draw(2048, depth), draw(num_cols, depth)
        whole = linear(x, weight)
        for num_rows in (1, 64, 65, 256, 700, 1024, 1100):
            assert torch.equal(linear(x[-num_rows:], weight), whole[-num_rows:]), num_rows


def _of_rows(weights, order):
    return weights[order.tokens.clamp_min(0), order.slots.clamp_min(0)][:, None]


def test_router_weights_inside_the_product_have_the_bits_of_those_behind_it(draw):
    # Prevents: a weight of another row's, or one that comes after the rounding or before the sum.
    ids = torch.stack([torch.randperm(16)[:4] for _ in range(300)]).cuda()
    ids[::7, 1] = 16  # of an expert that stands elsewhere
    order, weights = experts._Order.of(ids, 16), torch.rand(300, 4, device="cuda")
    x, w13, w2 = draw(300, 512), draw(16, 384, 512), draw(16, 512, 192)
    got, h, _ = experts.run_experts(x, weights, ids, Prepared.of(w13), Prepared.of(w2))
    a, of_rows = activation.silu_and_mul_forward(h), _of_rows(weights, order)
    y = (Prepared.of(w2).times(a, order.offsets, torch.float32) * of_rows).bfloat16()
    assert torch.equal(got, dispatch.combine_rows(y, order.places))
    apart = [Weights(tuple(w), tuple(w.clone() for w in w)) for w in (w13, w2)]
    assert torch.equal(got, experts.experts(x, weights, ids, *apart))


def test_router_weights_multiply_scales_of_rows(draw):
    # Prevents: a weight of another row's scale, or one that comes after the rounding.
    operands = RECIPES["nvfp4_per_token"].fprop
    ids = torch.stack([torch.randperm(16)[:4] for _ in range(300)]).cuda()
    order, weights = (
        experts._Order.of(ids, 16),
        2.0 ** torch.randint(-4, 1, (300, 4), device="cuda"),
    )
    prepared = [Prepared.of(draw(16, *size), operands) for size in ((384, 512), (512, 192))]
    got, h, _ = experts.run_experts(draw(300, 512), weights, ids, *prepared)
    a, of_rows = activation.silu_and_mul_forward(h), _of_rows(weights, order)
    # Of a power of two the product with the scale is exact.
    y = (prepared[1].times(a, order.offsets, torch.float32) * of_rows).bfloat16()
    assert torch.equal(got, dispatch.combine_rows(y, order.places))


def test_gradients_of_attention_repeat(draw):
    # Prevents: a sum over heads or tiles in an order of its own.
    batch = PackedBatch.of((100, 1, 300), (300, 190, 300), "cuda")
    tensors = [draw(790, heads, 128).requires_grad_() for heads in (32, 4, 4)]
    grad = draw(790, 32, 128)
    runs = [
        torch.autograd.grad(attention(*tensors, batch, "triton"), tensors, grad) for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
