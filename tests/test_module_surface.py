"""What Megatron and checkpoints see of the modules: constructors, names, attributes, state,
refusals.
"""

import contextlib
import copy
import inspect
import io
import logging
import pickle

import pytest
import torch
from layer_oracle import BUILDABLE, grid, outliers, params_of

from megatron_nvfp4.modules import (
    GroupedLinear,
    LayerNormLinear,
    Linear,
    QLinearParams,
    base,
    get_qlinear_params,
)
from megatron_nvfp4.recipes import RECIPES

CPU = {"params_dtype": torch.bfloat16, "device": "cpu"}
# Transformer Engine 2.20, pytorch/module/{linear,layernorm_linear,grouped_linear}.py.
TE_ARGUMENTS = {
    Linear: "in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size "
    "get_rng_state_tracker rng_tracker_name init_method bias return_bias params_dtype "
    "parallel_mode parameters_split device ub_overlap_ag ub_overlap_rs "
    "ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad ub_name delay_wgrad_compute "
    "symmetric_ar_type save_original_input name",
    LayerNormLinear: "in_features out_features eps sequence_parallel fuse_wgrad_accumulation "
    "tp_group tp_size get_rng_state_tracker init_method bias normalization return_bias "
    "params_dtype parallel_mode return_layernorm_output return_layernorm_output_gathered "
    "parameters_split zero_centered_gamma device ub_overlap_ag ub_overlap_rs "
    "ub_overlap_rs_dgrad ub_bulk_wgrad ub_bulk_dgrad ub_name delay_wgrad_compute "
    "symmetric_ar_type name",
    GroupedLinear: "num_gemms in_features out_features sequence_parallel fuse_wgrad_accumulation "
    "tp_group tp_size get_rng_state_tracker rng_tracker_name init_method bias return_bias "
    "params_dtype parallel_mode device ub_overlap_rs ub_overlap_ag ub_name "
    "delay_wgrad_compute save_original_input single_grouped_weight single_grouped_bias "
    "name use_grouped_tensor",
}
TE_DEFAULTS = {
    "eps": 1e-5,
    "normalization": "LayerNorm",
    "tp_size": 1,
    "bias": True,
}


def build(cls, *sizes: int, recipe: str = "nvfp4_per_token", **fields):
    """A BF16 layer on the CPU and the reference backend; sizes default to (2 experts,) 64, 32."""
    sizes = sizes or ((2, 64, 32) if cls is GroupedLinear else (64, 32))
    return cls(*sizes, qlinear_params=params_of(recipe), **(CPU | fields))


every_class = pytest.mark.parametrize("cls", TE_ARGUMENTS, ids=lambda cls: cls.__name__)


# --- constructors -----------------------------------------------------------------------------


@every_class
def test_constructor_is_te(cls):
    # Prevents: a positional argument of Megatron's landing in another parameter.
    parameters = inspect.signature(cls).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == TE_ARGUMENTS[cls].split()
    for parameter in positional:
        if parameter.default is not parameter.empty:
            expected = TE_DEFAULTS.get(parameter.name)
            assert parameter.default == expected or (expected is None and not parameter.default)
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters if p not in positional)


@pytest.mark.parametrize(
    ("sizes", "recipe", "parts"),
    [
        ((1560, 32), "nvfp4_per_token", ["in_features: K=1560 is not a multiple of 16"]),
        ((40, 32), "nvfp4_per_token_dequant_bwd", ["in_features: K=40 is not a multiple of 16"]),
        ((48, 32), "nvfp4_w4a8", ["in_features: K=48 is not a multiple of 32"]),
        ((64, 30), "nvfp4_per_token", ["out_features: N=30 is not a multiple of 32"]),
        ((64, 30), "nvfp4_per_token_dequant_bwd", ["out_features: N=30 is not a multiple of 8"]),
        (
            (40, 30),
            "nvfp4_per_token",
            ["K=40 is not a multiple of 16", "N=30 is not a multiple of 32"],
        ),
    ],
)
@every_class
def test_shapes_a_recipe_cannot_take(cls, sizes, recipe, parts):
    # Prevents: NaN from unchecked loads in the first step, or a message without layer and remedy.
    sizes = (2, *sizes) if cls is GroupedLinear else sizes
    with pytest.raises(ValueError, match=rf"linear_fc2: recipe {recipe} cannot take") as caught:
        build(cls, *sizes, recipe=recipe, name="linear_fc2")
    for part in (*parts, "Exclude it from quantisation", "pad the model dimension"):
        assert part in str(caught.value)
    build(cls, *sizes, recipe="bf16")


def test_unsupported_arguments_are_listed_together():
    # Prevents: a silent no-op for an option that changes results, or one error per attempt.
    options = {
        Linear: {"ub_overlap_ag": True, "ub_bulk_wgrad": True, "parameters_split": ["q", "k"]},
        LayerNormLinear: {
            "return_layernorm_output": True,
            "return_layernorm_output_gathered": True,
        },
        GroupedLinear: {"single_grouped_weight": True, "delay_wgrad_compute": True},
    }
    for cls, fields in options.items():
        with pytest.raises(ValueError, match="fc1: not supported") as caught:
            build(cls, name="fc1", **fields)
        for name, value in fields.items():
            assert f"{name}={value!r}" in str(caught.value)
    with pytest.raises(ValueError, match="sequence_parallel=True, parallel_mode='column'"):
        build(GroupedLinear, tp_size=2, sequence_parallel=True, parallel_mode="column")
    with pytest.raises(ValueError, match="Linear: not supported: fp8_output=True, fp8_grad=True"):
        build(Linear)(torch.zeros(1, 64), fp8_output=True, fp8_grad=True)


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (Linear, {"parallel_mode": "col"}, "fc: parallel_mode='col'; use column, row or None"),
        (
            Linear,
            {"parallel_mode": "row", "tp_size": 3},
            "in_features=64 does not divide over tp_size=3",
        ),
        (
            Linear,
            {"parallel_mode": "column", "tp_size": 5},
            "out_features=32 does not divide over tp_",
        ),
        (LayerNormLinear, {"normalization": "GroupNorm"}, "'GroupNorm'; use LayerNorm or RMSNorm"),
        (LayerNormLinear, {"parallel_mode": "row"}, "would split the norm; use column or None"),
    ],
)
def test_bad_constructor_values(cls, fields, message):
    # Prevents: a typo that builds an unsharded layer.
    with pytest.raises(ValueError, match=message):
        build(cls, name="fc", **fields)


def test_bad_grouped_inputs():
    # Prevents: rows read past the input, or dropped, when a dispatcher's counts are wrong.
    with pytest.raises(ValueError, match="num_gemms=0; give one or more"):
        build(GroupedLinear, 0, 64, 32)
    layer, x = build(GroupedLinear, name="experts"), torch.zeros(5, 64).bfloat16()
    with pytest.raises(ValueError, match=r"experts: m_splits=\[2, 2\] do not sum to the 5 rows"):
        layer(x, [2, 2])
    with pytest.raises(ValueError, match=r"m_splits=\[-1, 6\]"):
        layer(x, [-1, 6])
    with pytest.raises(ValueError, match="experts: 3 m_splits for 2 experts"):
        layer(x, [1, 2, 2])
    with pytest.raises(ValueError, match="experts: input has 48 features, the weights 64"):
        layer(x[:, :48], [2, 3])
    with pytest.raises(ValueError, match="fc: input has 48 features, the weight 64"):
        build(Linear, name="fc")(x[:, :48])


def test_tensor_parallel_group_is_checked():
    # Prevents: a sharded layer that runs alone and returns partial sums.
    layer = build(Linear, name="proj", parallel_mode="row", tp_size=2)
    assert layer.weight.shape == (32, 32)
    with pytest.raises(RuntimeError, match="proj: tp_size=2 without a tensor-parallel group"):
        layer(torch.zeros(1, 32).bfloat16())
    group = type("Group", (), {"size": lambda self: 4})()
    with pytest.raises(ValueError, match="proj: a group of 4 ranks for tp_size=2"):
        layer.set_tensor_parallel_group(group)


def test_initialisation():
    # Prevents: weights drawn outside the random state tracker, so that ranks differ or agree
    # wrongly.
    forks = []

    class Tracker:
        @contextlib.contextmanager
        def fork(self, name="default"):
            forks.append(name)
            yield

    fields = {"get_rng_state_tracker": Tracker, "init_method": lambda w: w.fill_(0.5)}
    for cls in (Linear, GroupedLinear):
        layer = build(cls, rng_tracker_name="expert", **fields)
        for name, parameter in layer.named_parameters():
            assert (parameter == (0.5 if "weight" in name else 0.0)).all()
            assert parameter.dtype == torch.bfloat16
    layer = build(LayerNormLinear, **fields)
    assert forks == ["expert"] * 3 + ["default"]
    assert (layer.layer_norm_weight == 1).all()
    assert not build(LayerNormLinear, zero_centered_gamma=True).layer_norm_weight.any()
    spread = build(Linear, 256, 256, params_dtype=torch.float32).weight.std().item()
    assert spread == pytest.approx(0.023, rel=0.05)  # TE's default; 65536 draws


# --- names and attributes ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "fields", "keys"),
    [
        (Linear, {}, {"weight", "bias"}),
        (Linear, {"bias": False}, {"weight"}),
        (LayerNormLinear, {}, {"layer_norm_weight", "layer_norm_bias", "weight", "bias"}),
        (LayerNormLinear, {"normalization": "RMSNorm"}, {"layer_norm_weight", "weight", "bias"}),
        (GroupedLinear, {}, {"weight0", "weight1", "bias0", "bias1"}),
        (GroupedLinear, {"bias": False}, {"weight0", "weight1"}),
    ],
)
def test_state_dict_keys(cls, fields, keys):
    # Prevents: checkpoints that neither TE nor we can read back.
    layer = build(cls, **fields)
    state = layer.state_dict()
    assert set(state) == keys | {"_extra_state"}
    assert {name for name, _ in layer.named_parameters()} == keys
    assert state["_extra_state"].dtype == torch.uint8
    assert state["_extra_state"].numel() == 0
    if not fields.get("bias", True) and cls is Linear:
        assert layer.bias.numel() == 0


def test_partition_attributes():
    # Prevents: gradients of sharded weights averaged as copies, norms counted once per rank.
    def marks(parameter):
        names = ("tensor_model_parallel", "partition_dim", "partition_stride")
        return tuple(getattr(parameter, name) for name in names)

    replicated = (False, -1, 1)
    for mode, weight, bias in (
        ("column", (True, 0, 1), (True, 0, 1)),
        ("row", (True, 1, 1), replicated),
        (None, replicated, replicated),
    ):
        layer = build(Linear, parallel_mode=mode)
        assert marks(layer.weight) == weight
        assert marks(layer.bias) == bias
        experts = build(GroupedLinear, parallel_mode=mode)
        assert marks(experts.weight1) == weight
        assert marks(experts.bias1) == bias
    parallel = build(Linear, parallel_mode="row", tp_size=2, sequence_parallel=True)
    assert parallel.bias.sequence_parallel is True
    fields = {"parallel_mode": "column", "tp_size": 2, "sequence_parallel": True}
    column = build(LayerNormLinear, 64, 64, **fields)
    assert column.layer_norm_weight.sequence_parallel is True
    assert column.layer_norm_bias.sequence_parallel is True
    assert column.bias.sequence_parallel is False
    assert column.weight.shape == (32, 64)
    assert (
        build(LayerNormLinear, sequence_parallel=True).layer_norm_weight.sequence_parallel is False
    )


def test_numerics_of_a_layer_are_visible_and_replaceable():
    # Prevents: a layer whose recipe cannot be told from its print, or that keeps the old recipe's
    # weights.
    layer = build(Linear)
    assert "recipe=nvfp4_per_token" in repr(layer)
    layer.set_qlinear_params(params_of("bf16"))
    assert "recipe=bf16" in repr(layer)
    assert "num_gemms=2" in repr(build(GroupedLinear))
    with pytest.raises(
        RuntimeError, match="recipe sweep_e2m1 needs simulated_float and cannot be built"
    ):
        layer.set_qlinear_params(QLinearParams(recipe=RECIPES["sweep_e2m1"], backend="te"))


def test_environment_names_the_recipe(monkeypatch):
    # Prevents: a module that reads the environment at import, or prefers it to an argument.
    monkeypatch.setenv("MINITE_RECIPE", "mxfp8")
    assert Linear(64, 32, **CPU).qlinear_params.recipe.name == "mxfp8"
    assert get_qlinear_params("nvfp4_per_tensor").recipe.name == "nvfp4_per_tensor"
    monkeypatch.setenv("MINITE_RECIPE", "nvfp4_per_token")
    monkeypatch.setenv("DISABLE_BACKWARD_QUANT", "1")
    params = get_qlinear_params()
    assert params.recipe == BUILDABLE["nvfp4_per_token+bypass"]
    assert params.recipe.backward == "bypass"
    assert params.gemm_backend == ("cuda", "torch")


# --- extra state ------------------------------------------------------------------------------


class _Payload:
    """Creates a file when unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def warnings_of(caplog, monkeypatch):
    """Number of warnings so far; the once-per-process memory starts empty."""
    monkeypatch.setattr(base, "_warned", set())
    caplog.set_level(logging.WARNING, logger=base.__name__)
    return lambda: len(caplog.records)


@every_class
@pytest.mark.parametrize("kind", ["missing", "none", "empty", "tensor", "bytes", "file"])
def test_foreign_extra_state_loads_and_is_never_unpickled(cls, kind, warnings_of, tmp_path):
    # Prevents: code from a checkpoint being run; a TE, FP8 or older checkpoint that does not load.
    sentinel = tmp_path / "executed"
    payload = pickle.dumps(_Payload(str(sentinel)))
    source, target = build(cls), build(cls)
    state = source.state_dict()
    foreign = {
        "none": None,
        "empty": torch.empty(0, dtype=torch.uint8),
        "tensor": torch.frombuffer(bytearray(payload), dtype=torch.uint8),
        "bytes": payload,
        "file": io.BytesIO(payload),
    }
    del state["_extra_state"]
    if kind != "missing":
        state["_extra_state"] = foreign[kind]
    for _ in range(2):
        target.load_state_dict(state)
    assert not sentinel.exists()
    assert warnings_of() == (0 if kind in ("none", "empty") else 1)
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, source.state_dict()[name])
    pickle.loads(payload).close()  # the payload does what the test fears
    assert sentinel.exists()


@every_class
def test_missing_weight_is_an_error(cls, warnings_of):
    # Prevents: leniency about extra state that also forgives a real weight.
    layer = build(cls)
    name = "weight0" if cls is GroupedLinear else "weight"
    state = layer.state_dict()
    del state[name], state["_extra_state"]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{name}"'):
        layer.load_state_dict(state)
    assert name not in state  # and the caller's dictionary is left alone
    assert "_extra_state" not in state


def test_grouped_checkpoints_in_other_shapes(warnings_of):
    # Prevents: TE's single grouped parameter, or one extra state per expert, refused or half
    # loaded.
    source, target = build(GroupedLinear), build(GroupedLinear)
    stacked = {
        "weight": torch.stack(source.weights).detach(),
        "bias": torch.stack(source.biases).detach() + 1,
        "_extra_state": None,
        "_extra_state1": None,
    }
    target.load_state_dict(stacked)
    assert torch.equal(target.weight1, source.weight1)
    assert torch.equal(target.bias0, source.bias0 + 1)
    with pytest.raises(ValueError, match="weight: 3 stacked experts for num_gemms=2"):
        target.load_state_dict({"weight": torch.zeros(3, 32, 64)})


# --- weight cache -----------------------------------------------------------------------------


@pytest.fixture(
    params=[(cls, grad) for cls in (Linear, GroupedLinear) for grad in (False, True)],
    ids=lambda param: f"{param[0].__name__}-{'inner' if param[1] else 'first'}-layer",
)
def cached(request, monkeypatch):
    """(call(is_first_microbatch), a weight, fresh result, number of quantisations so far) of one
    layer.
    """
    cls, input_has_grad = request.param
    layer, x, count = build(cls), outliers(4, 64, seed=1), [0]
    x.requires_grad_(input_has_grad)
    quantize = base.quantize_weights

    def counted(*args):
        count[0] += 1
        return quantize(*args)

    monkeypatch.setattr(base, "quantize_weights", counted)
    splits = ([2, 2],) if cls is GroupedLinear else ()
    weight = next(layer.parameters())

    def call(first):
        return layer(x, *splits, is_first_microbatch=first).detach()

    def fresh():
        twin = copy.deepcopy(layer)
        return twin(x, *splits).detach()

    return call, weight, fresh, lambda: count[0]


def test_weights_are_quantised_once_per_step(cached):
    # Prevents: a cache that is never hit, or that survives the next step's True.
    call, _, fresh, count = cached
    y = call(True)
    assert torch.equal(call(False), y)
    assert torch.equal(call(False), y)
    assert count() == 1
    assert torch.equal(call(True), y)
    assert count() == 2
    assert torch.equal(y, fresh())


def test_without_the_argument_nothing_is_kept(cached):
    # Prevents: stale weights in evaluation, in RL scoring and in every caller that knows no
    # microbatches.
    call, weight, fresh, count = cached
    before = call(None)
    weight.data.mul_(-2)  # as optimizers write: the version does not move
    assert torch.equal(call(None), fresh())
    assert not torch.equal(call(None), before)
    assert count() == 4


def test_a_changed_version_invalidates(cached):
    # Prevents: the previous step's weights when the schedule's flag and the optimizer disagree.
    call, weight, fresh, _ = cached
    before = call(True)
    with torch.no_grad():
        weight.mul_(-2)
    assert torch.equal(call(False), fresh())
    assert not torch.equal(call(False), before)
    weight.data = weight.data * 3  # other memory
    assert torch.equal(call(False), fresh())


def test_a_hidden_write_needs_true(cached):
    # Prevents: a silent change of what False means: it reuses, and only True sees a write through
    # .data.
    call, weight, fresh, _ = cached
    before = call(True)
    weight.data.mul_(-2)
    assert torch.equal(call(False), before)
    assert torch.equal(call(True), fresh())


def test_no_grad_neither_reads_nor_keeps(cached):
    # Prevents: an evaluation between two steps scoring with old weights, or leaving them for
    # training.
    call, weight, fresh, _ = cached
    call(True)
    weight.data.mul_(-2)
    with torch.no_grad():
        assert torch.equal(call(False), fresh())
        weight.data.mul_(-2)
        call(True)
        weight.data.mul_(-2)
        assert torch.equal(call(False), fresh())


def test_recomputation_sees_each_steps_weights(cached):
    # Prevents: with full recomputation True comes without gradients and False with them, so that
    # the first step's weights would serve every later one.
    call, weight, fresh, _ = cached
    for _ in range(2):
        weight.data.mul_(-2)
        with torch.no_grad():
            first = call(True)
        assert torch.equal(call(False), fresh())
        assert torch.equal(first, fresh())


def test_the_kept_weights_have_the_dtype_of_the_call():
    # Prevents: BF16 weights kept under autocast meeting FP32 activations outside of it.
    layer = build(Linear, recipe="bf16", params_dtype=torch.float32)
    x = grid(4, 64, seed=3).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x, is_first_microbatch=True).dtype == torch.bfloat16
    assert torch.equal(layer(x, is_first_microbatch=False), layer(x))


# --- strict mode ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@every_class
def test_strict_mode_names_layer_and_rows(cls, bad):
    # Prevents: NaN laundered into 6, which trains on for hours; a check that costs a sync by
    # default.
    strict = build(cls, name="linear_qkv")
    strict.set_qlinear_params(params_of("nvfp4_per_token", strict=True))
    args = ([4, 4],) if cls is GroupedLinear else ()
    x = grid(8, 64, seed=2)
    strict(x, *args)
    x[2, 3], x[5, 0] = bad, bad
    with pytest.raises(
        RuntimeError, match=r"linear_qkv: 2 of 8 input rows hold NaN or Inf \(strict mode"
    ):
        strict(x, *args)
    build(cls)(x, *args)
