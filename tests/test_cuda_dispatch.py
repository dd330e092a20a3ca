"""The CUDA kernels for rows of experts and gated activations against the definition, byte for byte."""

import itertools

import pytest
import torch
from dispatch_cases import assert_bits, choices, every_bf16, generator, values

from megatron_nvfp4 import quant
from megatron_nvfp4.backends import dispatch as kernels
from megatron_nvfp4.quant import dispatch, swiglu
from megatron_nvfp4.recipes import NVFP4Spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        kernels.why_not("cuda") is not None, reason=f"cuda: {kernels.why_not('cuda')}"
    ),
]
TOKEN, KINDS = swiglu.TOKEN, swiglu.KINDS
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def on_gpu(*tensors):
    return [t.cuda() if isinstance(t, torch.Tensor) else t for t in tensors]


def same(got, expected) -> None:
    assert_bits([t.cpu() for t in got], expected)


def parts(q: quant.QuantizedTensor) -> list[torch.Tensor]:
    return [q.codes, q.block_scales, q.amax]


# ---- routing ----


@pytest.mark.parametrize("multiple", [1, 16, 128])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "dropped"),
    [
        *((0, 4, 2, 0.0), (1, 1, 1, 0.0), (1, 1024, 8, 0.0), (33, 7, 3, 1.0)),
        *((300, 128, 8, 0.2), (4096, 128, 8, 0.0), (5000, 1000, 6, 0.1), (9000, 2, 1, 0.5)),
    ],
)
def test_route(num_tokens, num_experts, top_k, dropped, multiple):
    """A choice ranked out of order in or between CTAs, experts past a CTA's threads, padding."""
    chosen = choices(num_tokens, num_experts, top_k, dropped=dropped)
    expected = vars(dispatch.route(chosen, num_experts, multiple)).values()
    for form in (chosen, chosen.int()):
        same(vars(kernels.route(form.cuda(), num_experts, multiple)).values(), expected)


def test_route_of_one_expert():
    """All rows in one group, the last: ranks that count other experts' choices."""
    chosen = torch.full((2000, 1), 63)
    same(
        vars(kernels.route(chosen.cuda(), 64, 8)).values(),
        vars(dispatch.route(chosen, 64, 8)).values(),
    )


def test_experts_that_do_not_exist_are_dropped():
    """Memory of others marked, or a row for an expert that has no group."""
    chosen = torch.tensor([[0, 7], [2**40, 1], [-9, 2]])
    expected = dispatch.route(torch.tensor([[0, -1], [-1, 1], [-1, 2]]), 3)
    same(vars(kernels.route(chosen.cuda(), 3)).values(), vars(expected).values())


@pytest.mark.parametrize("num_experts", [1, 31, 128, 300])
def test_route_of_a_map(num_experts):
    """Experts of a map listed out of order, too many of them, a token without any."""
    routing_map = torch.rand(513, num_experts, generator=generator()) < 4 / num_experts
    got = kernels.route(routing_map.cuda(), num_experts, 16, top_k=3)
    same(vars(got).values(), vars(dispatch.route(routing_map, num_experts, 16, top_k=3)).values())


# ---- rows ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_cols", "multiple"),
    [
        *((0, 2, 64, 16), (1, 1, 8, 1), (37, 3, 24, 4), (50, 10, 264, 1)),
        *((65, 8, 768, 16), (40, 4, 2048, 1), (9, 2, 7168, 8), (5, 12, 4104, 2)),
    ],
)
def test_rows(num_tokens, top_k, num_cols, multiple, dtype):
    """A tail of columns or rows, more slots than warps or loads in flight, a row of no token, other bits."""
    num_experts = 16
    routing = dispatch.route(choices(num_tokens, num_experts, top_k), num_experts, multiple)
    tokens, slots = routing.token_of_row, routing.rows_of_token
    x = values(num_tokens, num_cols, dtype=dtype)
    rows = values(len(tokens), num_cols, dtype=dtype, seed=1)
    weights = torch.rand(num_tokens, top_k, generator=generator(2))
    for index in (tokens, tokens.int()):
        same([kernels.gather_rows(*on_gpu(x, index))], [dispatch.gather_rows(x, index)])
        same(kernels.gather_rows_amax(*on_gpu(x, index)), dispatch.gather_rows_amax(x, index))
    for factors in (weights, None):
        got = kernels.combine_rows(*on_gpu(rows, slots, factors))
        same([got], [dispatch.combine_rows(rows, slots, factors)])
    expected = dispatch.combine_rows_backward(x, rows, slots, weights)
    operands = on_gpu(x, rows, slots, weights)
    same(kernels.combine_rows_backward(*operands), expected)
    same(kernels.combine_rows_backward(*operands, token_of_row=tokens.cuda()), expected)


@pytest.mark.parametrize("num_cols", [0, 16, 48, 272, 768, 2048, 7168])
def test_packed_rows(num_cols):
    """A row of scales that is no multiple of 16 or 4 bytes, an amax of another row, padding not zero."""
    x = values(70, num_cols)
    x[3] = 0
    index = torch.randint(-1, 70, (333,), generator=generator())
    packed = quant.quantize(x, TOKEN)
    on_device = quant.QuantizedTensor(*on_gpu(*parts(packed)), TOKEN)
    got = kernels.gather_rows(on_device, index.cuda())
    same(parts(got), parts(dispatch.gather_rows(packed, index)))
    after = kernels.gather_rows(x.cuda(), index.cuda())
    same(parts(got), parts(quant.quantize(after.cpu(), TOKEN)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_rows(dtype):
    """A NaN that reaches an amax, an Inf that does not, subnormals flushed."""
    x = values(12, 520, dtype=dtype)
    x[0, 519], x[1, 0], x[2, 7], x[2, 9] = (float(v) for v in ("nan", "inf", "nan", "-inf"))
    x[3] = float("nan")
    x[4] *= 1e-30
    x[5] = torch.finfo(dtype).smallest_normal / 4
    index = torch.arange(12).flip(0)
    same(kernels.gather_rows_amax(*on_gpu(x, index)), dispatch.gather_rows_amax(x, index))
    slots = torch.arange(12).view(6, 2)
    weights = torch.tensor([0.0, 1e-30, float("inf"), 1.0, 0.3, -2.0]).repeat(2).view(6, 2)
    same(
        [kernels.combine_rows(*on_gpu(x, slots, weights))],
        [dispatch.combine_rows(x, slots, weights)],
    )
    back = dispatch.combine_rows_backward(x[:6], x, slots, weights)
    same(kernels.combine_rows_backward(*on_gpu(x[:6], x, slots, weights)), back)


def test_outputs_larger_than_the_cache():
    """The kernels' other stores, for outputs above 64 MB; an offset of bytes in 32 bits."""
    num_tokens, num_cols, top_k = 3000, 4096, 3
    x, chosen = values(num_tokens, num_cols).cuda(), choices(num_tokens, 16, top_k).cuda()
    routing = kernels.route(chosen, 16, 8)
    rows = kernels.gather_rows(x, routing.token_of_row)
    assert rows.numel() * 2 > 64 << 20
    same_rows, amax = kernels.gather_rows_amax(x, routing.token_of_row)
    expected = dispatch.gather_rows_amax(x, routing.token_of_row)
    for got in ((rows, amax), (same_rows, amax)):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    weights = torch.rand(num_tokens, top_k, generator=generator()).cuda()
    operands = (x, rows, routing.rows_of_token, weights)
    got = kernels.combine_rows_backward(*operands, token_of_row=routing.token_of_row)
    expected = dispatch.combine_rows_backward(*operands)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    many = kernels.gather_rows(x[:8], torch.arange(600_000, device="cuda") % 8)
    assert torch.equal(many[-8:], x[:8])


def test_views_are_read_in_place_or_copied():
    """Strides or a misaligned start ignored."""
    x, index = values(20, 64).cuda(), torch.tensor([1, -1, 7]).cuda()
    wide = torch.cat([x, x], 1)
    for view in (wide[:, 64:], x.flatten()[4 : 4 + 19 * 64].view(19, 64), x.t().contiguous().t()):
        expected = dispatch.gather_rows(view.cpu(), index.cpu())
        same([kernels.gather_rows(view, index)], [expected])
        same(
            kernels.gather_rows_amax(view, index),
            dispatch.gather_rows_amax(view.cpu(), index.cpu()),
        )


# ---- activations ----


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_gate(kind, weighted):
    """An approximation that rounds one BF16 gate, or its derivative, to the other neighbour."""
    gate = every_bf16().reshape(-1, 16)
    h = torch.cat([gate, values(*gate.shape, seed=5)], 1)
    g = values(*gate.shape, seed=6)
    probs = torch.rand(len(h), generator=generator(7)) if weighted else None
    y = swiglu.weighted_activation(h, probs, kind)
    same([kernels.weighted_activation(*on_gpu(h, probs), kind)], [y])
    got = kernels.weighted_activation_backward(*on_gpu(g, h, probs), kind)
    expected = swiglu.weighted_activation_backward(g, h, probs, kind)
    same(got[: 1 + weighted], expected[: 1 + weighted])
    for fast_math in (True, False):
        kept, q = kernels.weighted_activation_quantize(
            *on_gpu(h, probs), TOKEN, kind, True, fast_math=fast_math
        )
        finite = gate.isfinite().all(1)
        same([kept[finite.cuda()]], [y[finite]])
        same(
            [t.view(torch.uint8)[finite.cuda()] for t in parts(q)[:2]],
            [t.view(torch.uint8)[finite] for t in parts(quant.quantize(y, TOKEN))[:2]],
        )


@pytest.mark.parametrize(
    "shape", [(33, 768), (5, 16), (64, 272), (17, 1024), (3, 7168), (2, 12288)]
)
def test_fused_quantiser(shape):
    """Codes of another product than the one that is kept; a kept row that is cut or shifted."""
    for kind, weighted, e4m3_max in itertools.product(KINDS, (True, False), (448, 256)):
        spec = NVFP4Spec(outer="token", e4m3_max=e4m3_max)
        h = values(shape[0], 2 * shape[1])
        probs = torch.rand(shape[0], generator=generator()) if weighted else None
        y = swiglu.weighted_activation(h, probs, kind)
        expected = quant.quantize(y, spec)
        for keep in (True, False):
            kept, got = kernels.weighted_activation_quantize(*on_gpu(h, probs), spec, kind, keep)
            same(parts(got), parts(expected))
            assert (kept is not None) == keep
            if keep:
                same([kept], [y])


@pytest.mark.parametrize("shape", [(0, 64), (7, 0), (1, 8), (35, 264), (19, 768), (4, 7168)])
def test_activations_of_any_shape(shape):
    """A tail of columns or rows, a row that ends in another's sum, nothing to do."""
    h, g = values(shape[0], 2 * shape[1]), values(*shape, seed=1)
    probs = torch.rand(shape[0], generator=generator())
    for kind in KINDS:
        same(
            [kernels.weighted_activation(*on_gpu(h, probs), kind)],
            [swiglu.weighted_activation(h, probs, kind)],
        )
        same(
            kernels.weighted_activation_backward(*on_gpu(g, h, probs), kind),
            swiglu.weighted_activation_backward(g, h, probs, kind),
        )


# ---- all ----


def layer(chosen, x, weights, w1, w2):
    """Router to combine with everything on the device."""
    routing = kernels.route(chosen, w1.shape[0], 16)
    rows = kernels.gather_rows(x, routing.token_of_row)
    h = torch._grouped_mm(rows, w1, offs=routing.offsets[1:].int())
    y, packed = kernels.weighted_activation_quantize(h, None, keep=True)
    out = torch._grouped_mm(y, w2, offs=routing.offsets[1:].int())
    back = kernels.combine_rows_backward(
        x, out, routing.rows_of_token, weights, token_of_row=routing.token_of_row
    )
    grad = kernels.weighted_activation_backward(y, h, None)[0]
    combined = kernels.combine_rows(out, routing.rows_of_token, weights)
    return [combined, packed.codes, *back, grad[: len(x)]]


def test_a_graph_follows_its_inputs():
    """A host wait, which a capture refuses, or a shape or offset that the capture froze."""
    x, weights = values(64, 128).cuda(), torch.rand(64, 4).cuda()
    w1, w2 = values(8, 128, 64, seed=1).cuda(), values(8, 32, 128, seed=2).cuda()
    chosen = choices(64, 8, 4).cuda()
    eager = layer(chosen, x, weights, w1, w2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(chosen, x, weights, w1, w2)
    for seed in (0, 1):
        chosen.copy_(choices(64, 8, 4, seed=seed))
        graph.replay()
        expected = eager if seed == 0 else layer(chosen, x, weights, w1, w2)
        same(captured[:1], [expected[0].cpu()])
        same(captured[2:4], [t.cpu() for t in expected[2:4]])


def test_nothing_waits_for_the_gpu():
    """A synchronisation hidden in a check or a shape."""
    x, weights = values(64, 128).cuda(), torch.rand(64, 4).cuda()
    w1, w2 = values(8, 128, 64, seed=1).cuda(), values(8, 32, 128, seed=2).cuda()
    chosen = choices(64, 8, 4).cuda()
    layer(chosen, x, weights, w1, w2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(chosen, x, weights, w1, w2)
        kernels.route(torch.zeros(4, 8, dtype=torch.bool, device="cuda"), 8, top_k=2)
        kernels.gather_rows(x.float(), torch.arange(3, device="cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_repeated_calls_give_the_same_bits():
    """An order that depends on timing."""
    routing = kernels.route(choices(4096, 128, 8).cuda(), 128)
    rows, grad = values(32768, 264).cuda(), values(4096, 264, seed=1).cuda()
    weights = torch.rand(4096, 8).cuda()
    first = kernels.combine_rows_backward(grad, rows, routing.rows_of_token, weights)
    for _ in range(5):
        again = kernels.route(choices(4096, 128, 8).cuda(), 128)
        assert torch.equal(again.token_of_row, routing.token_of_row)
        got = kernels.combine_rows_backward(grad, rows, routing.rows_of_token, weights)
        same(got, [t.cpu() for t in first])


def test_operators_have_consistent_schemas():
    """A schema that hides a mutation or a fake whose shapes are wrong (torch.compile)."""
    ops, x, index = torch.ops.megatron_nvfp4, values(4, 64).cuda(), torch.tensor([1, -1, 3]).cuda()
    kernels.gather_rows(x, index)
    slots, weights = torch.tensor([[0, 2], [1, 3]]).cuda(), torch.rand(2, 2).cuda()
    owners, probs, g = torch.tensor([0, 1, 0, 1]).cuda(), torch.rand(4).cuda(), values(4, 32).cuda()
    cases = (
        (ops.route, (slots, 4, 16, 2)),
        (ops.gather_rows, (x, index)),
        (ops.gather_rows_amax, (x, index)),
        (ops.combine_rows, (x, slots, weights)),
        (ops.combine_rows_backward, (x[:2].clone(), x, slots, weights, owners)),
        (ops.weighted_activation, (x, probs, 0)),
        (ops.weighted_activation_backward, (g, x, probs, 0)),
        (ops.weighted_activation_quantize, (x, probs, 0, 448, False, True)),
    )
    for op, arguments in cases:
        torch.library.opcheck(op.default, arguments)


def test_refusals():
    """Operands of another device or size taken for what the kernel computes."""
    x, index = values(4, 64).cuda(), torch.tensor([1, 0])
    with pytest.raises(ValueError, match="index is on cpu; give it on cuda"):
        kernels.gather_rows(x, index)
    with pytest.raises(ValueError, match="K=60 of x"):
        kernels.gather_rows(x[:, :60].contiguous(), index.cuda())
    with pytest.raises(ValueError, match="probs is on cpu"):
        kernels.weighted_activation(x, torch.ones(4))
    with pytest.raises(ValueError, match="give 1 to 1024 experts"):
        kernels.route(index.cuda()[:, None], 1025)
    with pytest.raises(ValueError, match="F=12304 exceeds 12288"):
        kernels.weighted_activation_quantize(values(1, 24608).cuda(), None)
