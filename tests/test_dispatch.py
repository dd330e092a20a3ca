"""Rows of experts on a CPU: the definition by other means, and the kernels bit for bit."""

import itertools

import pytest
import torch
from dispatch_cases import assert_bits, choices, generator, values
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nvfp4 import quant
from megatron_nvfp4.backends import dispatch as kernels
from megatron_nvfp4.quant import dispatch, swiglu
from megatron_nvfp4.recipes import NVFP4Spec

TOKEN = swiglu.TOKEN
needs_kernels = pytest.mark.skipif(
    kernels.why_not("cpu") is not None, reason=f"cpu: {kernels.why_not('cpu')}"
)


# ---- routing ----


@pytest.mark.parametrize(("multiple", "dropped"), [(1, 0.0), (1, 0.3), (8, 0.3), (16, 1.0)])
def test_rows_are_ordered_by_expert_token_and_slot(multiple, dropped):
    """Rows of an expert out of token order, a group cut short, padding at the wrong end or with a token."""
    chosen = choices(40, 12, 4, dropped=dropped)
    chosen[:, 1] = torch.where(chosen[:, 1] == 5, -1, chosen[:, 1])
    got = dispatch.route(chosen, 12, multiple)
    token, slot, offsets = got.token_of_row.tolist(), got.slot_of_row.tolist(), [0]
    for expert in range(12):
        members = [
            (t, k) for t, k in itertools.product(range(40), range(4)) if chosen[t, k] == expert
        ]
        first = offsets[-1]
        assert list(zip(token, slot, strict=True))[first : first + len(members)] == members
        offsets.append(first + -(-len(members) // multiple) * multiple)
        assert set(token[first + len(members) : offsets[-1]]) <= {-1}
    assert got.offsets.tolist() == offsets
    assert set(token[offsets[-1] :]) <= {-1}
    assert len(token) % multiple == 0
    assert len(token) >= offsets[-1]


def test_the_two_directions_of_a_routing_agree():
    """rows_of_token that names another row than token_of_row and slot_of_row, or one for a dropped choice."""
    chosen = choices(33, 7, 3)
    got = dispatch.route(chosen, 7, 4)
    assert torch.equal(got.rows_of_token < 0, chosen < 0)
    t, k = torch.where(chosen >= 0)
    rows = got.rows_of_token[t, k]
    assert torch.equal(got.token_of_row[rows], t)
    assert torch.equal(got.slot_of_row[rows], k)
    assert rows.unique().numel() == rows.numel() == int((got.token_of_row >= 0).sum())
    assert torch.equal(
        dispatch.rows_to_tokens(got.rows_of_token, len(got.token_of_row)), got.token_of_row
    )


def test_a_map_lists_experts_upwards():
    """Slots of a map in another order, experts beyond top_k kept, a token without experts."""
    routing_map = torch.zeros(5, 9, dtype=torch.bool)
    routing_map[0, [8, 1, 3]] = True
    routing_map[2, :] = True
    routing_map[4, 7] = True
    got = dispatch.route(routing_map, 9, top_k=4)
    listed = torch.tensor([[1, 3, 8, -1], [-1] * 4, [0, 1, 2, 3], [-1] * 4, [7, -1, -1, -1]])
    assert_bits(vars(got).values(), vars(dispatch.route(listed, 9)).values())


@pytest.mark.parametrize(
    ("chosen", "arguments", "message"),
    [
        (torch.zeros(4), {}, "give int64 or int32 experts"),
        (torch.zeros(4, 2).bool(), {}, "and top_k"),
        (torch.zeros(4, 3).bool(), {"top_k": 2}, "of 2 experts"),
        (torch.zeros(4, 3).long(), {"top_k": 2}, "leave top_k out"),
        (torch.zeros(4, 2).long(), {"multiple": 0}, "multiple=0"),
    ],
)
def test_route_refuses(chosen, arguments, message):
    """A shape or argument taken for something else in silence."""
    for module in (dispatch, kernels):
        with pytest.raises(ValueError, match=message):
            module.route(chosen, 2, **{"multiple": 1} | arguments)


@needs_kernels
@settings(deadline=None, max_examples=60)
@given(
    num_tokens=st.integers(0, 70),
    num_experts=st.integers(1, 40),
    top_k=st.integers(1, 8),
    multiple=st.sampled_from([1, 2, 16, 128]),
    seed=st.integers(0, 99),
    dropped=st.sampled_from([0.0, 0.3, 1.0]),
    form=st.sampled_from(["int64", "int32", "map"]),
)
def test_route_kernel(num_tokens, num_experts, top_k, multiple, seed, dropped, form):
    """Another order than the definition's for some shape: no tokens, one expert, all dropped."""
    top_k = min(top_k, num_experts)
    chosen = choices(num_tokens, num_experts, top_k, seed, dropped)
    arguments = {}
    if form == "int32":
        chosen = chosen.int()
    if form == "map":
        spread = torch.zeros(num_tokens, num_experts + 1, dtype=torch.bool)
        chosen = spread.scatter(1, torch.where(chosen < 0, num_experts, chosen), True)[:, :-1]
        arguments = {"top_k": max(1, top_k - seed % 2)}
    got = kernels.route(chosen, num_experts, multiple, **arguments)
    assert_bits(
        vars(got).values(),
        vars(dispatch.route(chosen, num_experts, multiple, **arguments)).values(),
    )


# ---- rows ----


def test_gathered_rows_quantise_to_gathered_codes():
    """Packed rows that differ from quantising after the permutation, which is what they replace."""
    x = values(20, 64)
    index = torch.tensor([3, 3, -1, 19, 0, -1])
    packed = dispatch.gather_rows(quant.quantize(x, TOKEN), index)
    after = quant.quantize(dispatch.gather_rows(x, index), TOKEN)
    for name in ("codes", "block_scales", "amax"):
        got, expected = (getattr(q, name).view(torch.uint8) for q in (packed, after))
        assert torch.equal(got, expected), name
    assert packed.shape == (6, 64)


def test_gather_amax_leaves_nan_out():
    """A NaN that takes part, an Inf that does not, or a padded row with an amax."""
    x = values(4, 16)
    x[0, 3], x[1, 2], x[1, 5] = float("nan"), float("inf"), float("nan")
    x[2] = float("nan")
    rows, amax = dispatch.gather_rows_amax(x, torch.tensor([0, 1, 2, -1]))
    assert amax.tolist() == [x[0].nan_to_num(0).abs().max(), float("inf"), 0.0, 0.0]
    assert torch.equal(rows[3], torch.zeros(16).bfloat16())


@pytest.mark.parametrize("weighted", [True, False])
def test_combine_is_a_weighted_sum_and_gather_its_transpose(weighted):
    """A slot left out or taken twice, a weight of another slot; a backward that is not the transpose."""
    chosen = choices(30, 8, 4)
    routing = dispatch.route(chosen, 8, 4)
    rows = torch.randn(len(routing.token_of_row), 24, generator=generator(1)).double()
    weights = torch.rand(30, 4, generator=generator(2))
    dense = torch.zeros(30, len(rows)).double()
    t, k = torch.where(chosen >= 0)
    dense[t, routing.rows_of_token[t, k]] = weights[t, k].double() if weighted else 1.0
    got = dispatch.combine_rows(rows.float(), routing.rows_of_token, weights if weighted else None)
    torch.testing.assert_close(got.double(), dense @ rows, rtol=1e-5, atol=1e-5)
    if not weighted:
        x = torch.randn(30, 24, generator=generator(3)).double()
        gathered = dispatch.gather_rows(x.float(), routing.token_of_row).double()
        torch.testing.assert_close(
            (gathered * rows).sum(), (x * (dense @ rows)).sum(), rtol=1e-5, atol=0
        )


def test_combine_adds_rounded_products_upwards():
    """A fused product, FP64 sums, or slots added in another order: other bits."""
    rows = torch.tensor([[2.0**24], [1.0], [1.0]]).expand(3, 8).contiguous()
    order = torch.tensor([[0, 1, 2], [1, 2, 0], [-1, 1, 2]])
    got = dispatch.combine_rows(rows, order)[:, 0].tolist()
    assert got == [2.0**24, 2.0**24 + 2, 2.0]
    third = torch.full((1, 8), 1.0 + 2.0**-23)
    weight = torch.tensor([[1.0 + 2.0**-23, -1.0]])
    two = torch.cat([third, torch.full((1, 8), 1.0 + 2.0**-22)])
    assert dispatch.combine_rows(two, torch.tensor([[0, 1]]), weight)[0, 0] == 0.0  # FMA: 2^-46


def test_combine_backward_is_the_gradient():
    """A gradient of another row, of a dropped choice, or left unwritten for a padded row."""
    chosen = choices(25, 6, 3)
    routing = dispatch.route(chosen, 6, 8)
    rows = torch.randn(len(routing.token_of_row), 40, generator=generator(4)).requires_grad_()
    weights = torch.rand(25, 3, generator=generator(5)).requires_grad_()
    picked = rows[routing.rows_of_token.clamp_min(0)] * weights[..., None]
    out = torch.where((chosen >= 0)[..., None], picked, 0.0).sum(1)
    grad = torch.randn(25, 40, generator=generator(6))
    out.backward(grad)
    got = dispatch.combine_rows_backward(
        grad, rows.detach(), routing.rows_of_token, weights.detach()
    )
    torch.testing.assert_close(got[0], rows.grad, rtol=0, atol=0)
    torch.testing.assert_close(got[1], weights.grad, rtol=1e-4, atol=1e-5)


def test_ordered_sum_is_a_warps_order():
    """Another order than lanes upwards, then strides 16 to 1: the kernels' bits would differ."""
    terms = torch.randn(3, 520, generator=generator(7))
    for row, got in zip(terms.tolist(), dispatch.ordered_sum(terms), strict=True):
        lanes = torch.zeros(32)
        for i, term in enumerate(row):
            lanes[i // 8 % 32] += term
        for stride in (16, 8, 4, 2, 1):
            lanes = torch.stack([lanes[i] + lanes[i + stride] for i in range(stride)])
        assert got == lanes[0]


@needs_kernels
@settings(deadline=None, max_examples=40)
@given(
    num_tokens=st.integers(0, 20),
    top_k=st.integers(1, 5),
    num_cols=st.sampled_from([0, 8, 16, 24, 256, 264, 520]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    multiple=st.sampled_from([1, 16]),
    seed=st.integers(0, 99),
)
def test_row_kernels(num_tokens, top_k, num_cols, dtype, multiple, seed):
    """Bits that depend on the kernel: a tail, a dropped slot, an empty side, another dtype."""
    routing = dispatch.route(choices(num_tokens, 6, top_k, seed), 6, multiple)
    slots, num_rows = routing.rows_of_token, len(routing.token_of_row)
    x = values(num_tokens, num_cols, dtype=dtype, seed=seed)
    rows = values(num_rows, num_cols, dtype=dtype, seed=seed + 1)
    weights = torch.rand(num_tokens, top_k, generator=generator(seed))
    for index in (routing.token_of_row, routing.token_of_row.int()):
        assert_bits([kernels.gather_rows(x, index)], [dispatch.gather_rows(x, index)])
        assert_bits(kernels.gather_rows_amax(x, index), dispatch.gather_rows_amax(x, index))
    for factors in (weights, None):
        got = kernels.combine_rows(rows, slots, factors)
        assert_bits([got], [dispatch.combine_rows(rows, slots, factors)])
    expected = dispatch.combine_rows_backward(x, rows, slots, weights)
    assert_bits(kernels.combine_rows_backward(x, rows, slots, weights), expected)
    given_tokens = kernels.combine_rows_backward(
        x, rows, slots, weights, token_of_row=routing.token_of_row
    )
    assert_bits(given_tokens, expected)
    if num_cols % 16 == 0:
        packed = quant.quantize(x, TOKEN)
        got = kernels.gather_rows(packed, routing.token_of_row)
        expected = dispatch.gather_rows(packed, routing.token_of_row)
        assert_bits(*([q.codes, q.block_scales, q.amax] for q in (got, expected)))


@needs_kernels
def test_row_kernels_keep_subnormals_and_nan():
    """Subnormals flushed where torch.set_flush_denormal was called; a NaN row with another amax."""
    x = (values(6, 48, dtype=torch.float32) * 1e-40).contiguous()
    x[2, 5] = float("nan")
    slots = torch.tensor([[0, 1], [2, 5], [4, 3]])
    weights = torch.tensor([[1.0, 0.5], [1.0, 1e-3], [3.0, 2.0]])
    expected = dispatch.combine_rows(x, slots, weights)
    torch.set_flush_denormal(True)
    try:
        got = kernels.combine_rows(x, slots, weights)
        amax = kernels.gather_rows_amax(x, torch.arange(6))[1]
    finally:
        torch.set_flush_denormal(False)
    assert_bits([got, amax], [expected, quant.nvfp4.row_amax(x)])
    assert 0 < float(expected[0].abs().max()) < 2**-126


@needs_kernels
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.gather_rows(torch.zeros(2, 12), torch.zeros(1).long()), "K=12 of x"),
        (lambda m: m.gather_rows(torch.zeros(2, 16), torch.zeros(1)), "give int64 or int32"),
        (lambda m: m.gather_rows(torch.zeros(2, 16).long(), torch.zeros(1).long()), "give BF16"),
        (
            lambda m: m.gather_rows(
                quant.quantize(torch.ones(2, 16), NVFP4Spec()), torch.zeros(1).long()
            ),
            "outer='token'",
        ),
        (
            lambda m: m.combine_rows(torch.zeros(2, 16), torch.zeros(1, 2).int()),
            "rows_of_token is",
        ),
        (
            lambda m: m.combine_rows(
                torch.zeros(2, 16), torch.zeros(1, 2).long(), torch.zeros(1, 3)
            ),
            "weights are",
        ),
        (
            lambda m: m.combine_rows_backward(
                torch.zeros(1, 8), torch.zeros(2, 16), torch.zeros(1, 2).long(), torch.zeros(1, 2)
            ),
            "grad is",
        ),
    ],
)
def test_rows_refuse(call, message):
    """A shape or dtype taken for another in silence, by the definition or by the kernels."""
    for module in (dispatch, kernels):
        with pytest.raises(ValueError, match=message):
            call(module)


@needs_kernels
def test_cpu_kernels_refuse_rows_that_are_not_there():
    """A read outside the tensor."""
    with pytest.raises(ValueError, match="index 2 of 2 rows"):
        kernels.gather_rows(torch.zeros(2, 16), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="index 9 of 2 rows"):
        kernels.combine_rows(torch.zeros(2, 16), torch.tensor([[0, 9]]))
    with pytest.raises(ValueError, match="expert 3 of 3"):
        kernels.route(torch.tensor([[0, 3]]), 3)


@needs_kernels
@pytest.mark.parametrize("name", ["route", "gather", "packed", "amax", "combine", "back"])
def test_row_operators_have_consistent_schemas(name):
    """A schema that hides a mutation or a fake whose shapes are wrong (torch.compile)."""
    ops, x, index = torch.ops.megatron_nvfp4, values(4, 32), torch.tensor([1, -1, 3])
    kernels.gather_rows(x, index)
    slots, weights = torch.tensor([[0, 2], [1, 3]]), torch.rand(2, 2)
    packed = quant.quantize(x, TOKEN)
    cases = {
        "route": (ops.route, (torch.tensor([[0, 2], [1, -1]]), 3, 4, 2)),
        "gather": (ops.gather_rows, (x, index)),
        "packed": (ops.gather_rows_nvfp4, (packed.codes, packed.block_scales, packed.amax, index)),
        "amax": (ops.gather_rows_amax, (x, index)),
        "combine": (ops.combine_rows, (x, slots, weights)),
        "back": (
            ops.combine_rows_backward,
            (x[:2].clone(), x, slots, weights, torch.tensor([0, 1, 0, 1])),
        ),
    }
    op, arguments = cases[name]
    # The first of them cannot compare FP8 inputs on a CPU.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.default, arguments, test_utils=checks[name == "packed" :])


@needs_kernels
def test_torch_compile_sees_one_graph():
    """A choice of kernels that breaks the graph, or a fake with another shape."""

    def expert_rows(x, chosen, h):
        routing = kernels.route(chosen, 4, 8)
        rows = kernels.gather_rows(x, routing.token_of_row)
        kept, packed = kernels.weighted_activation_quantize(h, None, keep=True)
        return kernels.combine_rows(rows, routing.rows_of_token), kept, packed.codes

    operands = values(6, 16), torch.tensor([[0, 1]] * 6), values(5, 64)
    compiled = torch.compile(expert_rows, fullgraph=True, backend="aot_eager")
    assert_bits(compiled(*operands), expert_rows(*operands))
