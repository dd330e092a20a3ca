"""The fused expert dataflow beside its parts: permuted rows through two GroupedLinears, then combined."""

import dataclasses

import pytest
import torch
from layer_oracle import BUILDABLE, SEED, outliers, params_of
from moe_cases import (
    FFN,
    HIDDEN,
    NUM_EXPERTS,
    TOP_K,
    assert_same_bits,
    fused,
    layers,
    random_experts,
    random_probs,
    routing_of,
    step,
    unfused,
)

from megatron_nvfp4.modules import GroupedLinear, QLinearParams, moe
from megatron_nvfp4.modules.expert_matmul import ExpertMatmul
from megatron_nvfp4.modules.moe import ExpertDataflow
from megatron_nvfp4.quant import dispatch, swiglu
from megatron_nvfp4.recipes import BF16, FORWARD, RECIPES, Operands

recipes = pytest.mark.parametrize("recipe", BUILDABLE.values(), ids=BUILDABLE)

CASES = {
    "usual": random_experts(21),
    "top1": random_experts(9, 1),
    "all_experts": random_experts(4, NUM_EXPERTS),
    "empty_experts": torch.tensor([[1, 3]]).expand(17, 2).contiguous(),
    "one_expert_has_all": torch.full((40, 1), 2),
    "dropped": random_experts(21).masked_fill(random_experts(21, seed=5) < 2, -1),
    "all_dropped": torch.full((3, 2), -1),
    "no_tokens": torch.empty(0, TOP_K, dtype=torch.int64),
}


@recipes
def test_equals_its_parts(recipe):
    """Prevents: a row quantised by another scale because it was quantised before the permutation, a
    gradient of another token or expert, an operand of the backward that is not the forward's."""
    linears = layers(params_of(recipe))
    experts = CASES["usual"]
    x, probs = outliers(21, HIDDEN, seed=1), random_probs(experts)
    expected = step(unfused, x, experts, probs, linears)
    assert_same_bits(step(fused, x, experts, probs, linears), expected)
    assert expected["dprobs"].abs().min() > 0
    assert all(expected[name].abs().max() > 0 for name in expected)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["bf16", "nvfp4_per_token", "nvfp4_per_token_dequant_bwd"])
def test_routings(name, case):
    """Prevents: wrong rows for experts without tokens, for choices that were dropped, for no tokens at all;
    duplicate probabilities mixed up, which a search by value would do."""
    linears, experts = layers(QLinearParams(recipe=RECIPES[name])), CASES[case]
    x, probs = outliers(max(len(experts), 1), HIDDEN, seed=2)[: len(experts)], random_probs(experts)
    probs[::2] = 0.25
    expected = step(unfused, x, experts, probs, linears)
    found = step(fused, x, experts, probs, linears)
    assert_same_bits(found, expected)
    dropped = experts < 0
    assert not found["dprobs"][dropped].any()
    assert not found["y"][dropped.all(dim=1)].any()


@pytest.mark.parametrize("case", CASES)
def test_routing_maps(case):
    """Prevents: a map, whose slots are experts in ascending order, read by other experts or probabilities."""
    linears, experts = layers(QLinearParams(recipe=RECIPES["nvfp4_per_token"])), CASES[case]
    if case == "one_expert_has_all":  # and 2 where the map says that there may be
        experts = torch.cat((experts, torch.full_like(experts, -1)), dim=1)
    experts = torch.where(experts < 0, NUM_EXPERTS, experts).sort(dim=1).values
    dense = torch.zeros(len(experts), NUM_EXPERTS + 1, dtype=torch.bool).scatter_(1, experts, True)
    dense, experts = dense[:, :NUM_EXPERTS], torch.where(experts < NUM_EXPERTS, experts, -1)
    x, probs = outliers(max(len(experts), 1), HIDDEN, seed=2)[: len(experts)], random_probs(dense)
    of_slots = probs.gather(1, experts.clamp_min(0))
    expected = step(fused, x, experts, of_slots, linears)
    found = step(fused, x, dense, probs, linears, top_k=experts.shape[1])
    of_slots = expected.pop("dprobs")
    of_map = found.pop("dprobs")
    assert_same_bits(found, expected)
    assert torch.equal(of_map.gather(1, experts.clamp_min(0))[experts >= 0], of_slots[experts >= 0])
    assert not of_map[~dense].any()


@pytest.mark.parametrize("name", ["bf16", "nvfp4_per_token"])
@pytest.mark.parametrize("kind", swiglu.KINDS)
def test_activations(name, kind):
    """Prevents: SwiGLU computed for another gated activation."""
    linears, experts = layers(QLinearParams(recipe=RECIPES[name])), CASES["usual"]
    x, probs = outliers(21, HIDDEN, seed=1), random_probs(experts)
    expected = step(unfused, x, experts, probs, linears, kind=kind)
    assert_same_bits(step(fused, x, experts, probs, linears, activation=kind), expected)


@recipes
def test_recomputation_changes_no_bit(recipe):
    """Prevents: FC1 or the activation computed a second time from other operands or other random bits."""
    linears, experts = layers(params_of(recipe)), CASES["dropped"]
    x, probs = outliers(21, HIDDEN, seed=1), random_probs(experts)
    expected = step(fused, x, experts, probs, linears)
    assert_same_bits(step(fused, x, experts, probs, linears, recompute=True), expected)


def test_forward_operands_that_belong_to_a_group():
    """Prevents: a dequantised backward on tokens quantised by the wrong amax, in a recipe of one's own
    whose activations have a scale per expert."""
    backward = Operands(left=BF16, right=FORWARD)
    recipe = dataclasses.replace(RECIPES["nvfp4_per_tensor"], dgrad=backward, wgrad=backward)
    linears, experts = layers(QLinearParams(recipe=recipe)), CASES["usual"]
    x, probs = outliers(21, HIDDEN, seed=1), random_probs(experts)
    expected = step(unfused, x, experts, probs, linears)
    for recompute in (False, True):
        found = step(fused, x, experts, probs, linears, recompute=recompute)
        assert_same_bits(found, expected)


def test_wide_experts(monkeypatch):
    """Prevents: other bits for experts wider than a row that the fused kernel holds."""
    linears, experts = (
        layers(QLinearParams(recipe=RECIPES["nvfp4_per_token_dequant_bwd"])),
        CASES["usual"],
    )
    x, probs = outliers(21, HIDDEN, seed=1), random_probs(experts)
    expected = step(fused, x, experts, probs, linears)
    monkeypatch.setattr(moe.dispatch, "MAX_QUANTIZED_COLS", FFN - 1)
    monkeypatch.setattr(moe.dispatch, "weighted_activation_quantize", None)
    assert_same_bits(step(fused, x, experts, probs, linears), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype):
    """Prevents: a layer that only works in BF16, or rounds to it."""
    linears = layers(QLinearParams(recipe=RECIPES["nvfp4_per_token"]), params_dtype=dtype)
    experts = CASES["usual"]
    x, probs = outliers(21, HIDDEN, seed=1).to(dtype), random_probs(experts)
    expected = step(unfused, x, experts, probs, linears)
    assert expected["y"].dtype == dtype
    assert_same_bits(step(fused, x, experts, probs, linears), expected)


# --- the router's weight on FC2's accumulator ------------------------------------------------------


def test_router_weight_on_the_accumulator():
    """Prevents: a weight that multiplies what has been rounded to BF16 or quantised with it."""
    linears, experts = layers(QLinearParams(recipe=RECIPES["nvfp4_per_token"])), CASES["usual"]
    x, probs = outliers(21, HIDDEN, seed=1), random_probs(experts)
    found = fused(x, experts, probs, *linears, router_weight="after_fc2")
    routing, rows = routing_of(experts), []
    splits = routing.offsets.diff()
    h = linears[0](dispatch.gather_rows(x, routing.token_of_row), splits)
    y = swiglu.weighted_activation(h.detach(), None)
    for expert, part in enumerate(y.split(splits.tolist())):
        # An FP32 layer of BF16 values on BF16-exact operands gives the accumulator itself.
        single = GroupedLinear(
            1, FFN, HIDDEN, bias=False, device="cpu", qlinear_params=linears[1].qlinear_params
        )
        with torch.no_grad():
            single.weight0.copy_(linears[1].weights[expert])
            rows.append(single(part.float(), [part.shape[0]]))
    weighted = torch.cat(rows) * probs[routing.token_of_row, routing.slot_of_row, None]
    assert torch.equal(found, dispatch.combine_rows(weighted.bfloat16(), routing.rows_of_token))
    assert not torch.equal(found, fused(x, experts, probs, *linears))


def test_gradients_with_the_router_weight_on_the_accumulator():
    """Prevents: a weight missing from, or twice in, one of the four gradients."""
    linears, experts = (
        layers(QLinearParams(recipe=RECIPES["bf16"]), params_dtype=torch.float32),
        CASES["usual"],
    )
    x, probs = (
        torch.randn(21, HIDDEN, generator=torch.Generator().manual_seed(1)),
        random_probs(experts),
    )
    before = step(fused, x, experts, probs, linears)
    after = step(fused, x, experts, probs, linears, router_weight="after_fc2")
    for name, expected in before.items():
        bound = 1e-5 * expected.abs().max()
        assert (after[name] - expected).abs().max() < bound, name
    assert not torch.equal(after["y"], before["y"])


# --- what is kept -------------------------------------------------------------------------------------


def kept_bytes(call, inputs=(), parameters=()) -> int:
    """Bytes of the storages that autograd keeps, each once, without those given."""
    known = {t.untyped_storage().data_ptr() for t in (*inputs, *parameters)}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call()
    del out
    return sum(storage.nbytes() for storage in storages.values())


def packed_bytes(num_rows: int, num_cols: int) -> int:
    return num_rows * (num_cols // 2 + num_cols // 16 + 4)


INDEX = 8
# Bytes kept for T tokens of H columns and M rows: of the tokens, and of FC2's operand.
KEPT = {
    "bf16": (0, lambda m: 2 * FFN * m),
    "nvfp4_per_token": (0, lambda m: 0),
    "nvfp4_per_token_bf16_bwd": (0, lambda m: 2 * FFN * m),
    "nvfp4_per_token_dequant_bwd": (packed_bytes(1, HIDDEN), lambda m: packed_bytes(m, FFN)),
    "nvfp4_pretrain": (0, lambda m: 0),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", KEPT)
def test_kept_bytes(name, recompute):
    """Prevents: gathered copies kept for the backward, tokens kept in two forms, FC1's output kept although
    it is computed again."""
    linears = layers(QLinearParams(recipe=RECIPES[name]))
    experts = random_experts(200)
    x, probs = outliers(200, HIDDEN, seed=1).requires_grad_(), random_probs(experts)
    weights = [weight for linear in linears for weight in linear.weights]
    found = kept_bytes(
        lambda: fused(x, experts, probs, *linears, recompute=recompute), [x], weights
    )
    num_rows = 200 * TOP_K
    of_tokens, of_activation = KEPT[name]
    expected = 200 * of_tokens
    if not recompute:
        expected += 2 * 2 * FFN * num_rows + of_activation(num_rows)
    # FP32 probability, token and choice of a row; the row of a choice; boundaries.
    expected += num_rows * (4 + 2 * INDEX) + num_rows * INDEX + (NUM_EXPERTS + 1) * INDEX
    if RECIPES[name].dgrad.right == FORWARD:
        expected += sum(
            packed_bytes(linear.out_features * NUM_EXPERTS, linear.in_features)
            - 4 * (linear.out_features - 1) * NUM_EXPERTS  # one amax a weight
            for linear in linears
        )
        expected += 2 * (NUM_EXPERTS + 1) * INDEX  # their boundaries
    assert found == expected


def test_nothing_is_kept_without_gradients():
    """Prevents: a scoring pass that holds activations."""
    linears, experts = layers(QLinearParams(recipe=RECIPES["nvfp4_per_token"])), CASES["usual"]
    x, probs = outliers(21, HIDDEN, seed=1), random_probs(experts)
    with torch.no_grad():
        out = []
        assert kept_bytes(lambda: out.append(fused(x, experts, probs, *linears))) == 0
    assert torch.equal(out[0], fused(x, experts, probs, *linears))


# --- the contract of the layers ----------------------------------------------------------------------


def test_gradients_into_main_grad():
    """Prevents: Megatron's gradient buffers missed, or overwritten instead of added to."""
    params, experts = QLinearParams(recipe=RECIPES["nvfp4_per_token_dequant_bwd"]), CASES["usual"]
    x, probs = outliers(21, HIDDEN, seed=1), random_probs(experts)
    found = []
    for call in (unfused, fused):
        linears = layers(params, fuse_wgrad_accumulation=True)
        weights = [weight for linear in linears for weight in linear.weights]
        for weight in weights:
            weight.main_grad = torch.ones(weight.shape)
            weight.grad_added_to_main_grad = False
        torch.manual_seed(SEED)
        call(x, experts, probs, *linears).backward(torch.ones_like(x))
        assert all(weight.grad_added_to_main_grad for weight in weights)
        found.append([weight.main_grad for weight in weights])
    assert all(map(torch.equal, *found))
    assert not any((grad == 1).all() for grad in found[0])


@pytest.mark.parametrize("recompute", [False, True])
def test_frozen_parts(recompute):
    """Prevents: gradients for what asks for none, or none for the rest, when some weights are frozen."""
    linears, experts = layers(QLinearParams(recipe=RECIPES["nvfp4_per_token"])), CASES["usual"]
    x, probs = outliers(21, HIDDEN, seed=1), random_probs(experts)
    expected = step(fused, x, experts, probs, linears)
    for frozen in (0, 1):
        for index, linear in enumerate(linears):
            linear.requires_grad_(index != frozen)
        found = step(fused, x, experts, probs, linears, recompute=recompute)
        for name, value in expected.items():
            if name.startswith(f"fc{frozen + 1}."):
                assert found[name] is None
            else:
                assert torch.equal(found[name], value)
    linears[1].requires_grad_(True)
    linears[0].requires_grad_(True)
    fused(x, experts, probs, *linears, recompute=recompute).backward(torch.ones_like(x))


def test_weight_changed_before_the_backward():
    """Prevents: a gradient by weights that the forward did not see."""
    linears, experts = layers(QLinearParams(recipe=RECIPES["nvfp4_per_token"])), CASES["usual"]
    y = fused(outliers(21, HIDDEN, seed=1), experts, random_probs(experts), *linears)
    with torch.no_grad():
        linears[1].weights[0].add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        y.sum().backward()


def test_strict_mode_looks_at_both_inputs():
    """Prevents: a NaN that strict mode misses because it entered, or arose, inside the dataflow."""
    params = QLinearParams(recipe=RECIPES["nvfp4_per_token"], strict=True)
    linears, experts = layers(params), CASES["usual"]
    x, probs = outliers(21, HIDDEN, seed=1), random_probs(experts)
    fused(x, experts, probs, *linears)
    bad = x.clone()
    bad[3, 7] = float("nan")
    with pytest.raises(RuntimeError, match="1 of 21 input rows hold NaN"):
        fused(bad, experts, probs, *linears)
    probs[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match="1 of 63 input rows hold NaN"):
        fused(x, experts, probs, *linears)
    with torch.no_grad():
        for weight in linears[0].weights:
            weight.mul_(1e38)  # gates of -Inf have a finite activation
    with pytest.raises(RuntimeError, match="of 63 input rows hold NaN"):
        fused(x, experts, random_probs(experts), *linears)


def test_maps_with_more_experts_than_top_k_are_refused():
    """Prevents: choices dropped in silence, those of the highest experts."""
    params = QLinearParams(recipe=RECIPES["bf16"])
    chosen = torch.ones(21, NUM_EXPERTS, dtype=torch.bool)
    probs = torch.rand(21, NUM_EXPERTS)
    with pytest.raises(ValueError, match=f"a token has {NUM_EXPERTS} experts, top_k is 2"):
        fused(outliers(21, HIDDEN, seed=1), chosen, probs, *layers(params), top_k=2)


def test_refusals():
    """Prevents: shapes that broadcast, and layers whose bias or shards would be ignored."""
    params = QLinearParams(recipe=RECIPES["bf16"])
    (fc1, fc2), experts = layers(params), CASES["usual"]
    x, probs = outliers(21, HIDDEN, seed=1), random_probs(experts)
    one, two = (ExpertMatmul.of(linear, x) for linear in (fc1, fc2))
    flow = ExpertDataflow()
    with pytest.raises(ValueError, match="tokens are"):
        flow(x[:, :32], experts, probs, one, two)
    with pytest.raises(ValueError, match="no gated experts"):
        flow(x, experts, probs, one, one)
    with pytest.raises(ValueError, match="of the choices' shape"):
        flow(x, experts, probs[:, :2], one, two)
    with pytest.raises(ValueError, match="float32"):
        flow(x, experts, probs.bfloat16(), one, two)
    with pytest.raises(ValueError, match="activation='relu'"):
        ExpertDataflow(activation="relu")
    with pytest.raises(ValueError, match="router_weight='late'"):
        ExpertDataflow(router_weight="late")
    biased = layers(params, bias=True)[0]
    with pytest.raises(ValueError, match="bias=True"):
        ExpertMatmul.of(biased, x)
