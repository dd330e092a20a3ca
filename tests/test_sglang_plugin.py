"""The quantisation method for SGLang, against a stand-in of the names of SGLang that it touches."""

import types

import pytest
import sglang_stand_in
import torch

from megatron_nvfp4.checkpoint.formats import MODELOPT, quantization_config
from megatron_nvfp4.deterministic.ops.experts import experts
from megatron_nvfp4.deterministic.ops.linear import linear
from megatron_nvfp4.deterministic.ops.router import route
from megatron_nvfp4.quant import quantize
from megatron_nvfp4.recipes import BF16, RECIPES
from megatron_nvfp4.rollout import method as shared
from megatron_nvfp4.rollout import sglang_methods, sglang_plugin
from megatron_nvfp4.rollout.checkpoint import declared_operands

W4A4 = RECIPES["nvfp4_per_token"].fprop
NAMES = "model.layers.0."
EXPERTS = types.SimpleNamespace(
    activation="silu",
    is_gated=True,
    apply_router_weight_on_input=False,
    routed_scaling_factor=None,
    no_combine=False,
)


@pytest.fixture
def sglang(monkeypatch):
    made = (
        sglang_methods.config_class,
        sglang_methods.linear_method,
        sglang_methods.experts_method,
    )
    for each in made:
        each.cache_clear()
    for name in ("MINITE_RECIPE", "MINITE_CONFIG", "MINITE_BACKEND", "DISABLE_BACKWARD_QUANT"):
        monkeypatch.delenv(name, raising=False)
    yield sglang_stand_in.install(monkeypatch)
    for each in made:
        each.cache_clear()


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape, scale=1.0: (torch.randn(*shape, generator=generator) * scale).to(
        torch.bfloat16
    )


@pytest.fixture
def policy(tmp_path, monkeypatch):
    def write(text: str) -> None:
        file = tmp_path / "policy.yaml"
        file.write_text(text)
        monkeypatch.setenv("MINITE_CONFIG", str(file))

    return write


def _exported(recipe: str = "nvfp4_per_token", ignore: tuple[str, ...] = (), **changes) -> dict:
    """quantization_config of a checkpoint that export-nvfp4 wrote, as SGLang passes it on."""
    fprop = RECIPES[recipe].fprop
    activations = "none" if fprop.left == BF16 else "token"
    producer = {"activations": activations, "weights": str(fprop.right)}
    config = quantization_config(
        MODELOPT, activations=activations, ignore=ignore, fp8_kv_cache=False, producer=producer
    )
    return config | changes


def _config(checkpoint: dict | None = None):
    cls = sglang_methods.config_class()
    return cls() if checkpoint is None else cls.from_config(checkpoint)


def _linear_layer(method, num_rows: int, num_cols: int, parts: int = 1):
    layer = sglang_stand_in.LinearBase()
    sizes = [num_rows // parts] * parts
    method.create_weights(layer, num_cols, sizes, num_cols, num_rows, torch.bfloat16)
    return layer


def _experts_layer(method, num_experts: int, width: int, size: int):
    layer = sglang_stand_in.FusedMoE(num_experts)
    method.create_weights(
        layer, num_experts, size, width, torch.bfloat16, moe_intermediate_size=width
    )
    method.create_moe_runner(layer, EXPERTS)
    return layer


def test_registered_first_and_once(sglang):
    # Prevents: modelopt_fp4 claiming the checkpoint before us, and a second process-wide registration.
    sglang_plugin.register()
    sglang_plugin.register()
    assert list(sglang.methods) == ["minite_nvfp4", "modelopt_fp4"]
    assert sglang.choices[0] == "minite_nvfp4"
    claim = sglang.methods["minite_nvfp4"].override_quantization_method
    assert claim({"quant_method": "modelopt"}, "minite_nvfp4") == "minite_nvfp4"
    assert claim({"quant_method": "modelopt"}, "modelopt_fp4") is None  # not asked for
    assert claim({"quant_method": "fp8"}, "minite_nvfp4") is None


def test_without_a_selection_the_experts_alone(sglang):
    # Prevents: router, head or dense linears in NVFP4 that the learner's profile computes in BF16.
    config, dense = _config(), sglang_stand_in.LinearBase()
    for name in ("self_attn.qkv_proj", "mlp.gate", "mlp.down_proj"):
        method = config.get_quant_method(dense, f"model.layers.0.{name}")
        assert type(method) is sglang_stand_in.UnquantizedLinearMethod
    assert type(config.get_quant_method(dense, "lm_head")).__name__ == "UnquantizedLinearMethod"
    method = config.get_quant_method(sglang_stand_in.FusedMoE(4), "model.layers.3.mlp.experts")
    assert method.operands == W4A4
    assert config.get_quant_method(torch.nn.Embedding(2, 2), "model.embed_tokens") is None


def test_the_policy_decides_layer_by_layer(sglang, tmp_path, monkeypatch):
    # Prevents: a sampler that quantises layers which the learner's policy leaves in BF16.
    file = tmp_path / "policy.yaml"
    file.write_text(
        "recipe: nvfp4_per_token\nlayers:\n  - match: decoder.layers.1.**\n    recipe: bf16\n"
        "  - match: '**.linear_proj'\n    recipe: nvfp4_w4a16\n"
    )
    monkeypatch.setenv("MINITE_CONFIG", str(file))
    config, dense = _config(), sglang_stand_in.LinearBase()
    assert config.get_quant_method(dense, "model.layers.0.self_attn.qkv_proj").operands == W4A4
    proj = config.get_quant_method(dense, "model.layers.0.self_attn.o_proj")
    assert proj.operands == RECIPES["nvfp4_w4a16"].fprop
    plain = config.get_quant_method(dense, "model.layers.1.self_attn.qkv_proj")
    assert type(plain) is sglang_stand_in.UnquantizedLinearMethod
    experts_layer = sglang_stand_in.FusedMoE(4)
    assert config.get_quant_method(experts_layer, "model.layers.1.mlp.experts") is None
    assert config.get_quant_method(dense, "model.layers.0.mlp.gate").__class__.__name__ == (
        "UnquantizedLinearMethod"
    )


def test_experts_of_two_recipes_are_refused(sglang, tmp_path, monkeypatch):
    # Prevents: FC2 computed by FC1's recipe without a word.
    file = tmp_path / "policy.yaml"
    file.write_text(
        "recipe: nvfp4_per_token\nlayers:\n  - match: '**.experts.linear_fc2'\n    recipe: bf16\n"
    )
    monkeypatch.setenv("MINITE_CONFIG", str(file))
    with pytest.raises(ValueError, match="fc1 nvfp4_per_token and fc2 bf16"):
        _config().get_quant_method(sglang_stand_in.FusedMoE(4), "model.layers.1.mlp.experts")


def test_bf16_linear_gives_the_learners_bits(sglang, draw):
    # Prevents: another quantisation of the weight, or of the activations, than the learner's.
    method = sglang_methods.linear_method()("model.layers.0.self_attn.o_proj", W4A4, False)
    layer = _linear_layer(method, 48, 64)
    layer.weight.data.copy_(draw(48, 64))
    method.process_weights_after_loading(layer)
    x, bias = draw(2, 5, 64), draw(48)
    want = linear(x.flatten(0, 1), layer.weight.data, W4A4).view(2, 5, 48)
    assert torch.equal(method.apply(layer, x), want)
    assert not torch.equal(method.apply(layer, x, bias), want)


def test_bf16_experts_give_the_learners_bits_after_every_update(sglang, draw):
    # Prevents: values of the first weights after an update, a new tensor where a CUDA graph reads the old.
    method = sglang_methods.experts_method()("model.layers.0.mlp.experts", W4A4, False)
    layer = _experts_layer(method, 4, 32, 64)
    x = draw(7, 64)
    weights, ids = route(draw(7, 4), 2, True)
    chosen = types.SimpleNamespace(topk_weights=weights, topk_ids=ids)
    dispatched = types.SimpleNamespace(hidden_states=x, topk_output=chosen)
    addresses = set()
    for _ in range(3):
        layer.w13_weight.data.copy_(draw(4, 64, 64, scale=0.1))
        layer.w2_weight.data.copy_(draw(4, 64, 32, scale=0.1))
        method.process_weights_after_loading(layer)
        got = method.apply(layer, dispatched).hidden_states
        want = experts(x, weights, ids, layer.w13_weight.data, layer.w2_weight.data, W4A4)
        assert torch.equal(got, want)
        addresses.add(layer.minite_w13_weight.operand.codes.data_ptr())
    assert len(addresses) == 1


def test_padding_rows_do_not_move_the_others(sglang, draw):
    # Prevents: ids of -1, of rows that pad a CUDA graph, shifting every expert's rows.
    method = sglang_methods.experts_method()("model.layers.0.mlp.experts", W4A4, False)
    layer = _experts_layer(method, 4, 32, 64)
    layer.w13_weight.data.copy_(draw(4, 64, 64))
    layer.w2_weight.data.copy_(draw(4, 64, 32))
    method.process_weights_after_loading(layer)
    x = draw(7, 64)
    weights, ids = route(draw(7, 4), 2, True)
    want = shared.mix(x[:5], weights[:5], ids[:5], layer.minite_w13_weight, layer.minite_w2_weight)
    ids[5:], weights[5:] = -1, 0.0
    got = shared.mix(x, weights, ids, layer.minite_w13_weight, layer.minite_w2_weight)
    assert torch.equal(got[:5], want)
    assert not got[5:].any()


def _quantised(weight: torch.Tensor):
    q = quantize(weight, W4A4.right)
    return q.codes, q.block_scales, q.outer_scale


def test_fused_projections_of_a_checkpoint_are_excluded_by_their_parts(sglang):
    # Prevents: BF16 projections loaded into codes, where a file names q, k and v and SGLang their product.
    prefix = "model.layers.0.self_attn."
    ignored = [f"{prefix}{name}_proj" for name in "qkv"]
    config = _config(_exported(ignore=ignored))
    dense = sglang_stand_in.LinearBase()
    method = config.get_quant_method(dense, prefix + "qkv_proj")
    assert type(method) is sglang_stand_in.UnquantizedLinearMethod
    assert config.get_quant_method(dense, prefix + "o_proj").is_packed
    partly = _config(_exported(ignore=ignored[:2]))
    with pytest.raises(ValueError, match="some but not all"):
        partly.get_quant_method(dense, prefix + "qkv_proj")


def test_nvfp4_checkpoint_gives_the_bits_of_its_bf16_weights(sglang, draw):
    # Prevents: codes quantised again, block scales permuted, a scale inverted.
    config = _config(_exported(ignore=("lm_head", "*self_attn*")))
    dense = sglang_stand_in.LinearBase()
    plain = config.get_quant_method(dense, "model.layers.0.self_attn.o_proj")
    assert type(plain) is sglang_stand_in.UnquantizedLinearMethod
    method = config.get_quant_method(dense, "model.layers.0.mlp.gate_up_proj")
    layer = _linear_layer(method, 64, 32, parts=2)
    assert layer.weight.dtype == torch.uint8
    assert layer.weight_scale.dtype == torch.float8_e4m3fn
    assert layer.input_scale.tolist() == [1.0, 1.0]
    weight, x = draw(64, 32), draw(5, 32)
    codes, block_scales, scale = _quantised(weight)
    layer.weight.data.copy_(codes)
    layer.weight_scale.data.copy_(block_scales)
    layer.weight_scale_2.data.copy_(scale.expand(2))
    method.process_weights_after_loading(layer)
    assert torch.equal(method.apply(layer, x), linear(x, weight, W4A4))


def test_nvfp4_experts_checkpoint(sglang, draw):
    # Prevents: one expert's scale on another's codes.
    config = _config(_exported())
    layer = sglang_stand_in.FusedMoE(3)
    method = config.get_quant_method(layer, "model.layers.0.mlp.experts")
    layer = _experts_layer(method, 3, 32, 64)
    w13, w2 = draw(3, 64, 64), draw(3, 64, 32)
    for name, weights in (("w13_weight", w13), ("w2_weight", w2)):
        for expert, weight in enumerate(weights * torch.tensor([1.0, 3.0, 9.0])[:, None, None]):
            codes, block_scales, scale = _quantised(weight.bfloat16())
            getattr(layer, name).data[expert] = codes
            getattr(layer, name + "_scale").data[expert] = block_scales
            getattr(layer, name + "_scale_2").data[expert] = scale
        weights *= torch.tensor([1.0, 3.0, 9.0])[:, None, None]
    method.process_weights_after_loading(layer)
    x = draw(6, 64)
    weights, ids = route(draw(6, 3), 2, True)
    prepared = layer.minite_w13_weight, layer.minite_w2_weight
    want = experts(x, weights, ids, w13, w2, W4A4)
    assert torch.equal(shared.mix(x, weights, ids, *prepared), want)


def test_refusals(sglang, draw):
    # Prevents: shards, scales that differ and unknown experts computed as if they were what they are not.
    method = sglang_methods.linear_method()("model.layers.0.self_attn.o_proj", W4A4, False)
    with pytest.raises(ValueError, match=r"holds \(48, 16\) of \(48, 64\).*tp_size=2"):
        method.create_weights(sglang_stand_in.LinearBase(), 16, [48], 64, 48, torch.bfloat16)
    packed = sglang_methods.linear_method()("model.layers.0.self_attn.qkv_proj", W4A4, True)
    with pytest.raises(ValueError, match="K=24 is no multiple of 16"):
        _linear_layer(packed, 48, 24)
    layer = _linear_layer(packed, 48, 32, parts=3)
    layer.weight_scale_2.data.copy_(torch.tensor([1.0, 1.0, 2.0]))
    with pytest.raises(ValueError, match=r"qkv_proj: fused projections have outer scales \[1.0"):
        packed.process_weights_after_loading(layer)
    experts_method = sglang_methods.experts_method()("model.layers.0.mlp.experts", W4A4, False)
    wrong = types.SimpleNamespace(**vars(EXPERTS) | {"activation": "gelu"})
    with pytest.raises(ValueError, match="activation='gelu'; leave the layer in BF16"):
        experts_method.create_moe_runner(None, wrong)
    with pytest.raises(ValueError, match=r"holds \(2, 32\) of \(8, 32\).*ep_size=1 or 2"):
        experts_method.create_weights(sglang_stand_in.FusedMoE(8), 2, 64, 32, torch.bfloat16)


def test_outer_scales_that_no_amax_gives(sglang):
    # Prevents: a checkpoint's multiplier replaced by its neighbour where the GEMM derives it from an amax.
    method = sglang_methods.linear_method()("model.layers.0.mlp.down_proj", W4A4, True)
    layer = _linear_layer(method, 16, 32)
    layer.weight.data.zero_()
    layer.weight_scale.data.copy_(torch.ones(16, 2))
    amaxes = torch.linspace(1.0, 2.0, 4097)
    scales = amaxes / 2688  # as ModelOpt rounds
    taken = [_takes(method, layer, scale) for scale in scales[::64]]
    assert 0 < sum(taken) < len(taken)


def _takes(method, layer, scale: torch.Tensor) -> bool:
    """Whether the layer multiplies by exactly this outer scale, and not at all by another."""
    layer.weight_scale_2.data.fill_(scale)
    try:
        method.process_weights_after_loading(layer)
    except ValueError:
        return False
    assert layer.minite_weight.operand.outer_scale.item() == scale
    return True


def test_every_setting_that_changes_numbers_is_a_selection(sglang, policy):
    # Prevents: a policy without a recipe taken for none, and the experts alone quantised, in all layers.
    dense, name = sglang_stand_in.LinearBase(), NAMES + "mlp.down_proj"
    policy("shared_experts: bf16\n")
    assert _config().get_quant_method(dense, name).operands == W4A4
    policy("last_layers_bf16: 0.5\nlayers:\n  - layer_numbers: [1]\n    recipe: bf16\n")
    kept = _config().get_quant_method(sglang_stand_in.FusedMoE(4), NAMES + "mlp.experts")
    assert kept is None
    policy("backend: cpu\n")  # decides who computes, not what
    assert type(_config().get_quant_method(dense, name)).__name__ == "UnquantizedLinearMethod"


def test_the_policys_profile_decides(sglang, policy):
    # Prevents: NVFP4 experts for a learner whose profile computes in BF16; dense ones in NVFP4.
    policy("deterministic: sglang_det_bf16\n")
    with pytest.raises(ValueError, match="sglang_det_bf16 has nothing in NVFP4; leave the arg"):
        _config()
    policy("deterministic: sglang_minite_nvfp4\nrecipe: nvfp4_w4a16\n")
    with pytest.raises(ValueError, match="recipe beside deterministic: sglang_minite_nvfp4"):
        _config()
    policy("deterministic: sglang_minite_nvfp4\n")
    experts_layer, dense = sglang_stand_in.FusedMoE(4), sglang_stand_in.LinearBase()
    assert _config().get_quant_method(experts_layer, NAMES + "mlp.experts").operands == W4A4
    plain = _config().get_quant_method(dense, NAMES + "mlp.down_proj")
    assert type(plain) is sglang_stand_in.UnquantizedLinearMethod


def test_the_number_of_layers_that_is_not_known(sglang, policy):
    # Prevents: an error that leaves the user without a way on.
    policy("recipe: nvfp4_per_token\nlast_layers_bf16: 0.5\n")
    with pytest.raises(ValueError, match="give `layers` rules with layer_numbers instead"):
        _config().get_quant_method(sglang_stand_in.FusedMoE(4), NAMES + "mlp.experts")
    config = _config(_exported(hf_config=types.SimpleNamespace(num_hidden_layers=1)))
    with pytest.raises(ValueError, match=r"checkpoint has nvfp4.*the policy BF16"):
        config.get_quant_method(sglang_stand_in.FusedMoE(4), NAMES + "mlp.experts")


@pytest.mark.parametrize(
    "name",
    [
        "language_model.model.layers.0.mlp.down_proj",
        "model.language_model.layers.0.self_attn.qkv_proj",
        "model.layers.0.mlp.shared_experts.gate_up_proj",
        "model.layers.0.linear_attn.in_proj_qkvz",
    ],
)
def test_modules_that_no_policy_can_name(sglang, policy, name):
    # Prevents: modules that the learner quantises left in BF16 without a word.
    experts_layer, dense = sglang_stand_in.FusedMoE(4), sglang_stand_in.LinearBase()
    assert type(_config().get_quant_method(dense, name)).__name__ == "UnquantizedLinearMethod"
    other = "model.language_model.layers.0.mlp.experts"
    with pytest.raises(ValueError, match="experts of this name have no layer name"):
        _config().get_quant_method(experts_layer, other)
    policy("recipe: nvfp4_per_token\n")
    with pytest.raises(ValueError, match="linears of this name have no layer name"):
        _config().get_quant_method(dense, name)
    for never in ("lm_head", "model.layers.0.mlp.shared_expert_gate", "visual.merger"):
        method = _config().get_quant_method(dense, never)
        assert type(method) is sglang_stand_in.UnquantizedLinearMethod
    policy("recipe: bf16\n")
    assert type(_config().get_quant_method(dense, name)).__name__ == "UnquantizedLinearMethod"
    assert _config().get_quant_method(experts_layer, other) is None


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("nvfp4_per_tensor", "one activation scale per tensor: a token's bits would depend"),
        ("pretrain", "one activation scale per tensor"),
        ("mxfp8", "recipe mxfp8 has no sampler"),
        ("sweep_e2m1", "recipe sweep_e2m1 has no sampler"),
    ],
)
def test_recipes_that_no_sampler_computes(sglang, monkeypatch, recipe, words):
    # Prevents: a token's bits that depend on its batch; an AttributeError of a format without an amax.
    monkeypatch.setenv("MINITE_RECIPE", recipe)
    with pytest.raises(ValueError, match=words):
        _config().get_quant_method(sglang_stand_in.LinearBase(), NAMES + "mlp.down_proj")


def test_weights_of_another_type(sglang):
    # Prevents: FP32 or FP16 weights quantised otherwise than the learner's BF16.
    method = sglang_methods.linear_method()(NAMES + "mlp.down_proj", W4A4, False)
    layer = _linear_layer(method, 48, 64)
    layer.weight.data = torch.zeros(48, 64)
    with pytest.raises(ValueError, match=r"mlp\.down_proj: the weight is torch\.float32"):
        method.process_weights_after_loading(layer)
    method = sglang_methods.experts_method()(NAMES + "mlp.experts", W4A4, False)
    layer = _experts_layer(method, 4, 32, 64)
    layer.w13_weight.data = layer.w13_weight.data.half()
    with pytest.raises(ValueError, match=r"experts\.w13_weight: the weight is torch\.float16"):
        method.process_weights_after_loading(layer)


def test_a_checkpoints_activations(sglang, draw):
    # Prevents: activations per token by the plain rule, whatever the checkpoint was exported for.
    dense, name = sglang_stand_in.LinearBase(), NAMES + "mlp.down_proj"
    for recipe in ("nvfp4_per_token", "nvfp4_per_token_4over6", "nvfp4_w4a16"):
        method = _config(_exported(recipe)).get_quant_method(dense, name)
        assert method.operands == RECIPES[recipe].fprop
        layer, weight, x = _linear_layer(method, 48, 64), draw(48, 64), draw(5, 64)
        quantised = quantize(weight, method.operands.right)
        layer.weight.data.copy_(quantised.codes)
        layer.weight_scale.data.copy_(quantised.block_scales)
        layer.weight_scale_2.data.copy_(quantised.outer_scale)
        method.process_weights_after_loading(layer)
        assert torch.equal(method.apply(layer, x), linear(x, weight, RECIPES[recipe].fprop))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_algo": "FP8"}, "quant_algo is 'FP8', it takes NVFP4 or W4A16_NVFP4"),
        ({"quant_algo": "NVFP4_AWQ"}, "quant_algo is 'NVFP4_AWQ'"),
        ({"quant_algo": None}, "quant_algo is None"),
        ({"producer": {"activations": "static"}}, "producer.activations is 'static'"),
        ({"producer": {"activations": "token", "weights": "a, b"}}, "beside weights a, b"),
    ],
)
def test_checkpoints_of_other_formats(sglang, changes, words):
    # Prevents: bytes of another format decoded as NVFP4; other activations than the file declares.
    with pytest.raises(ValueError, match=words):
        _config(_exported(**changes))


def test_a_checkpoint_of_another_tool_has_activations_per_token(sglang, caplog):
    # Prevents: ModelOpt's own checkpoints refused, or served by other activations without a word.
    for config in (
        _exported(producer={"name": "modelopt", "version": "0.47.0"}),
        {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
    ):
        assert declared_operands(config) == RECIPES["nvfp4_per_token"].fprop
        assert "input scales are not read" in caplog.text
        caplog.clear()
    declared_operands(_exported())
    assert not caplog.text


def test_a_policy_that_contradicts_the_checkpoint(sglang, policy):
    # Prevents: a learner by the policy, a sampler by the checkpoint, and nobody who says so.
    experts_layer, dense = sglang_stand_in.FusedMoE(4), sglang_stand_in.LinearBase()
    policy("recipe: nvfp4_w4a16\n")
    with pytest.raises(ValueError, match=r"the checkpoint has nvfp4.*the policy bf16 x nvfp4"):
        _config(_exported()).get_quant_method(dense, NAMES + "mlp.down_proj")
    same = _config(_exported("nvfp4_w4a16"))
    assert same.get_quant_method(experts_layer, NAMES + "mlp.experts").is_packed
    shared_experts = same.get_quant_method(dense, NAMES + "mlp.shared_experts.down_proj")
    assert shared_experts.is_packed  # the checkpoint names it
    with pytest.raises(ValueError, match="the checkpoint has BF16, the policy bf16 x nvfp4"):
        _config(_exported("nvfp4_w4a16", ("*down_proj",))).get_quant_method(
            dense, NAMES + "mlp.down_proj"
        )


def test_experts_that_a_checkpoint_excludes_in_part(sglang):
    # Prevents: BF16 weights of some experts loaded into codes.
    layer, name = sglang_stand_in.FusedMoE(4), NAMES + "mlp.experts"
    every = [f"{name}.{e}.{p}_proj" for e in range(4) for p in ("gate", "up", "down")]
    for ignored in ([f"{name}.3.*"], ["*down_proj"], [f"{name}.3"], every[:-1]):
        with pytest.raises(ValueError, match=r"mlp\.experts: the checkpoint excludes \d+ of 12"):
            _config(_exported(ignore=ignored)).get_quant_method(layer, name)
    for ignored in (every, [name], ["*_proj"]):
        assert _config(_exported(ignore=ignored)).get_quant_method(layer, name) is None
    assert _config(_exported(ignore=[NAMES + "mlp"])).get_quant_method(layer, name).is_packed
