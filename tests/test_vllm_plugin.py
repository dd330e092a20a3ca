"""The quantisation method for vLLM 0.26: against a stand-in of the names that it touches, and against vLLM's
own layers and weight loaders where vLLM is installed.
"""

import gc
import inspect
import pickle
import tomllib
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import vllm_stand_in

from megatron_nvfp4.deterministic.ops.experts import experts
from megatron_nvfp4.deterministic.ops.linear import linear
from megatron_nvfp4.deterministic.ops.router import route
from megatron_nvfp4.recipes import RECIPES
from megatron_nvfp4.rollout import vllm_methods, vllm_plugin

W4A4 = RECIPES["nvfp4_per_token"].fprop
ALL = "recipe: nvfp4_per_token\n"
EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture
def fresh(monkeypatch):
    """No class made for another vLLM, no selection, no name taken."""
    made = vllm_methods.config_class, vllm_methods.linear_method, vllm_methods.experts_method
    for name in ("MINITE_RECIPE", "MINITE_CONFIG", "MINITE_BACKEND", "DISABLE_BACKWARD_QUANT"):
        monkeypatch.delenv(name, raising=False)
    for each in made:
        each.cache_clear()
    vllm_methods._PREPARED.clear()
    yield
    for each in made:
        each.cache_clear()


@pytest.fixture
def vllm(fresh, monkeypatch):
    return vllm_stand_in.install(monkeypatch)


@pytest.fixture
def policy(tmp_path, monkeypatch):
    def write(text: str) -> None:
        file = tmp_path / "policy.yaml"
        file.write_text(text)
        monkeypatch.setenv("MINITE_CONFIG", str(file))

    return write


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape, scale=1.0: (torch.randn(*shape, generator=generator) * scale).to(
        torch.bfloat16
    )


def _config():
    return vllm_methods.config_class()()


def _linear_layer(config, name: str, num_rows: int = 48, num_cols: int = 64):
    return vllm_stand_in.LinearBase(num_rows, num_cols, config, f"model.layers.0.{name}")


def _experts_layer(config, prefix: str = EXPERTS, **facts):
    return vllm_stand_in.RoutedExperts((4, 32, 64), config, prefix, **facts)


def test_registered_in_every_process(vllm):
    # Prevents: a second call, of another of vLLM's processes' entry points, that raises.
    vllm_plugin.register()
    vllm_plugin.register()
    assert list(vllm.methods) == ["minite_nvfp4"]
    assert vllm.methods["minite_nvfp4"]().get_name() == "minite_nvfp4"


def test_the_package_declares_its_entry_point():
    # Prevents: a plugin that vLLM never finds.
    file = Path(__file__).parents[1] / "pyproject.toml"
    declared = tomllib.loads(file.read_text())["project"]["entry-points"]["vllm.general_plugins"]
    assert EntryPoint("x", declared["megatron_nvfp4"], "vllm.general_plugins").load() is (
        vllm_plugin.register
    )


def test_without_a_selection_the_experts_alone(vllm):
    # Prevents: router or dense linears in NVFP4 that nobody asked for, experts in BF16 without a word.
    config = _config()
    for name in ("self_attn.qkv_proj", "mlp.gate", "mlp.down_proj"):
        method = _linear_layer(config, name).quant_method
        assert type(method) is vllm_stand_in.UnquantizedLinearMethod
    assert _experts_layer(config).quant_method.operands == W4A4
    assert config.get_quant_method(torch.nn.Embedding(2, 2), "lm_head") is None
    with pytest.raises(ValueError, match=r"block_sparse_moe.experts: experts of this name have no"):
        _experts_layer(config, "model.layers.0.block_sparse_moe.experts")


def test_the_policy_decides_layer_by_layer(vllm, policy):
    # Prevents: layers quantised that the learner's policy leaves in BF16; the last ones uncounted.
    policy(
        ALL
        + "last_layers_bf16: 0.5\nlayers:\n  - match: '**.linear_proj'\n    recipe: nvfp4_w4a16\n"
    )
    config = _config()
    text = types.SimpleNamespace(num_hidden_layers=2)
    config.maybe_update_config("model", hf_config=types.SimpleNamespace(text_config=text))
    assert _linear_layer(config, "self_attn.qkv_proj").quant_method.operands == W4A4
    proj = _linear_layer(config, "self_attn.o_proj").quant_method
    assert proj.operands == RECIPES["nvfp4_w4a16"].fprop
    assert _experts_layer(config, "model.layers.1.mlp.experts").quant_method is None
    gate = _linear_layer(config, "mlp.gate").quant_method
    assert type(gate) is vllm_stand_in.UnquantizedLinearMethod


def test_a_policy_is_part_of_the_key_of_compiled_graphs(vllm, policy):
    # Prevents: a cached graph of another policy, whose layers multiply in BF16 what this one quantises.
    keys = set()
    for text in (ALL, ALL + "layers:\n  - match: '**.linear_proj'\n    recipe: bf16\n"):
        policy(text)
        _linear_layer(_config(), "self_attn.o_proj")
        keys.add(vllm.config.additional_config["minite_nvfp4"])
    assert len(keys) == 2


def test_the_configuration_reaches_other_processes(vllm, policy, monkeypatch):
    # Prevents: vLLM's engine process that cannot be sent its configuration, or reads another policy.
    policy(ALL)
    config = _config()
    config.num_layers = 7
    data = pickle.dumps(config)
    monkeypatch.delenv("MINITE_CONFIG")
    other = pickle.loads(data)
    assert (type(other), other.num_layers) == (type(config), 7)
    assert _linear_layer(other, "self_attn.o_proj").quant_method.operands == W4A4


def test_quantised_checkpoints_are_refused(vllm):
    # Prevents: codes of a checkpoint loaded as BF16 weights; a checkpoint claimed that nobody gave to us.
    cls = vllm_methods.config_class()
    claim = cls.override_quantization_method
    assert claim({"quant_method": "modelopt"}, "minite_nvfp4", hf_config=None) == "minite_nvfp4"
    assert claim({"quant_method": "modelopt"}, None, hf_config=None) is None
    with pytest.raises(ValueError, match=r"quantised \(modelopt\); serve the BF16 checkpoint"):
        cls.from_config({"quant_method": "modelopt"})


def test_linear_gives_the_operators_bits_after_every_update(vllm, policy, draw):
    # Prevents: another quantisation than the operator's, the first weights after an update, a new tensor
    # where a CUDA graph reads the old.
    policy(ALL)
    layer = _linear_layer(_config(), "self_attn.o_proj")
    x, bias, addresses = draw(2, 5, 64), draw(48), set()
    for _ in range(2):
        layer.weight.weight_loader(layer.weight, draw(48, 64))
        layer.quant_method.process_weights_after_loading(layer)
        want = linear(x.flatten(0, 1), layer.weight.data, W4A4).view(2, 5, 48)
        assert torch.equal(layer(x), want)
        assert not torch.equal(layer(x, bias), want)
        addresses.add(layer.minite_weight.operand.codes.data_ptr())
    assert len(addresses) == 1


def test_compiles_without_breaks(vllm, policy, draw):
    # Prevents: vLLM's torch.compile, which allows none, stopping at the choice of a backend.
    policy(ALL)
    layer = _linear_layer(_config(), "self_attn.o_proj")
    layer.weight.data.copy_(draw(48, 64))
    layer.quant_method.process_weights_after_loading(layer)
    compiled = torch.compile(layer.forward, fullgraph=True, backend="aot_eager", dynamic=True)
    for num_rows in (5, 9):
        x = draw(num_rows, 64)
        assert torch.equal(compiled(x), layer(x))


def test_two_models_of_one_process_are_not_confused(vllm, policy, draw):
    # Prevents: a layer multiplying by the weight of another model's layer of the same name.
    policy(ALL)
    config = _config()
    first, second = (_linear_layer(config, "self_attn.o_proj") for _ in range(2))
    for layer in (first, second):
        layer.weight.data.copy_(draw(48, 64))
    first.quant_method.process_weights_after_loading(first)
    with pytest.raises(ValueError, match="o_proj: two layers of this process have this name"):
        second.quant_method.process_weights_after_loading(second)
    del first, layer
    gc.collect()  # a layer and its weight loader hold each other
    third = _linear_layer(config, "self_attn.o_proj")
    third.weight.data.copy_(draw(48, 64))
    third.quant_method.process_weights_after_loading(third)


def test_weights_and_names_that_are_refused(vllm, policy):
    # Prevents: FP32 weights quantised otherwise than the learner's; linears in BF16 that no policy can name.
    policy(ALL)
    layer = _linear_layer(_config(), "self_attn.o_proj")
    layer.weight.data = torch.zeros(48, 64)
    with pytest.raises(ValueError, match=r"o_proj: the weight is torch\.float32"):
        layer.quant_method.process_weights_after_loading(layer)
    with pytest.raises(ValueError, match="linears of this name have no layer name"):
        _linear_layer(_config(), "mlp.shared_experts.down_proj")
    policy("deterministic: sglang_det_bf16\n")
    with pytest.raises(ValueError, match="has nothing in NVFP4"):
        _config()


def _loaded_experts(config, draw, **facts):
    layer = _experts_layer(config, **facts)
    layer.w13_weight.data.copy_(draw(4, 64, 64, scale=0.1))
    layer.w2_weight.data.copy_(draw(4, 64, 32, scale=0.1))
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def test_experts_give_the_operators_bits(vllm, draw):
    # Prevents: another order of gate and up, other weights of the sum; ids of vLLM's type refused.
    layer = _loaded_experts(_config(), draw)
    x = draw(7, 64)
    weights, ids = route(draw(7, 4), 2, True)
    want = experts(x, weights, ids, layer.w13_weight.data, layer.w2_weight.data, W4A4)
    assert torch.equal(layer.forward_modular(x, weights, ids.int()), want)


def test_experts_of_other_ranks_add_zero(vllm, draw):
    # Prevents: an expert's id of the whole model taken for this rank's.
    there = torch.tensor([-1, -1, -1, -1, 0, 1, 2, 3], dtype=torch.int32)
    layer = _loaded_experts(_config(), draw, expert_map=there)
    x = draw(3, 64)
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]])
    ids = torch.tensor([[1, 6], [0, 2], [4, 7]], dtype=torch.int32)
    got = layer.forward_modular(x, weights, ids)
    w13, w2 = layer.w13_weight.data, layer.w2_weight.data
    alone = experts(x[:1], weights[:1, 1:], torch.tensor([[2]]), w13, w2, W4A4)
    assert torch.equal(got[:1], alone)
    assert not got[1].any()
    both = experts(x[2:], weights[2:], torch.tensor([[0, 3]]), w13, w2, W4A4)
    assert torch.equal(got[2:], both)


@pytest.mark.parametrize(
    ("facts", "attributes", "match"),
    [
        ({"activation": vllm_stand_in.MoEActivation.GELU}, {}, "activation='gelu'"),
        ({"has_bias": True, "swiglu_limit": 7.0}, {}, "has_bias=True, swiglu_limit=7.0"),
        ({"dp_size": 2}, {}, "dp_size=2"),
        ({}, {"apply_router_weight_on_input": True}, "apply_router_weight_on_input=True"),
    ],
)
def test_experts_that_are_not_computed_are_refused(vllm, facts, attributes, match):
    # Prevents: experts of another formula, or rows of other ranks, computed as if they were not.
    moe_config = vllm_stand_in.FusedMoEConfig(**facts)
    with pytest.raises(ValueError, match=match):
        _experts_layer(_config(), moe_config=moe_config, **attributes)


# --- vLLM's own ------------------------------------------------------------------------------------


@pytest.fixture
def real(fresh, policy):
    """A model's worth of vLLM: one rank, on the CPU, everything quantised."""
    reason = "vLLM is not installed"
    config = pytest.importorskip("vllm.config", reason=reason, exc_type=ImportError)
    distributed = pytest.importorskip("vllm.distributed", reason=reason, exc_type=ImportError)
    from vllm.model_executor.layers.quantization import get_quantization_config

    policy(ALL)
    vllm_plugin.register()
    vllm_config = config.VllmConfig(device_config=config.DeviceConfig(device="cpu"))
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with config.set_current_vllm_config(vllm_config):
        store = torch.distributed.HashStore()  # of one rank: needs no port
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        distributed.init_distributed_environment(1, 0, "env://", 0, backend="gloo")
        distributed.initialize_model_parallel(1, 1)
        yield get_quantization_config("minite_nvfp4")()
    torch.set_default_dtype(dtype)
    distributed.destroy_model_parallel()
    distributed.destroy_distributed_environment()


def _finish(model: torch.nn.Module) -> None:
    """What vLLM does once a model's weights are loaded."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model_config = types.SimpleNamespace(quantization="minite_nvfp4", dtype=torch.bfloat16)
    process_weights_after_loading(model, model_config, torch.device("cpu"))


def test_the_stand_in_has_vllms_signatures(real):
    # Prevents: tests against a stand-in that vLLM has left behind.
    from vllm.model_executor.layers import fused_moe, linear, quantization
    from vllm.model_executor.layers.quantization import base_config

    for module, name in (
        (linear, "LinearMethodBase"),
        (fused_moe, "FusedMoEMethodBase"),
        (base_config, "QuantizationConfig"),
    ):
        theirs, ours = getattr(module, name), getattr(vllm_stand_in, name)
        assert ours.__abstractmethods__ == theirs.__abstractmethods__
        for each in vars(ours):
            if inspect.isroutine(getattr(ours, each)) and each in vars(theirs):
                names = [
                    list(inspect.signature(getattr(c, each)).parameters) for c in (ours, theirs)
                ]
                assert names[0] == names[1], (name, each)
    assert list(inspect.signature(quantization.register_quantization_config).parameters) == [
        "quantization"
    ]


def test_vllms_linear_layers(real, draw):
    # Prevents: fused projections loaded in another order, rows of a shard loaded elsewhere.
    from vllm.model_executor.layers import linear as layers

    at = "model.layers.0."
    model = torch.nn.ModuleDict(
        {
            "qkv": layers.QKVParallelLinear(
                64, 16, 4, 2, bias=False, quant_config=real, prefix=at + "self_attn.qkv_proj"
            ),
            "gate_up": layers.MergedColumnParallelLinear(
                64, [32, 32], bias=False, quant_config=real, prefix=at + "mlp.gate_up_proj"
            ),
            "down": layers.RowParallelLinear(
                32, 64, bias=True, quant_config=real, prefix=at + "mlp.down_proj"
            ),
        }
    )
    parts = {
        "qkv": {"q": draw(64, 64), "k": draw(32, 64), "v": draw(32, 64)},
        "gate_up": {0: draw(32, 64), 1: draw(32, 64)},
        "down": {None: draw(64, 32)},
    }
    for name, each in parts.items():
        weight = model[name].weight
        for shard, part in each.items():
            weight.weight_loader(weight, part, *([] if shard is None else [shard]))
    model["down"].bias.data.copy_(draw(64))
    _finish(model)
    for name, each in parts.items():
        weight = torch.cat([*each.values()])
        x = draw(5, weight.shape[1])
        bias = model[name].bias
        want = linear(x, weight, W4A4)
        got = model[name](x)[0]
        if bias is None:
            assert torch.equal(got, want)
        else:
            near = (want.float() + bias.float()).to(torch.bfloat16)
            torch.testing.assert_close(got, near)
            assert not torch.equal(got, want)


def _experts_of_vllm(config, draw):
    """vLLM's layer, and a checkpoint's tensors of it: (name, weight)."""
    from vllm.model_executor.layers.fused_moe import FusedMoE

    layer = FusedMoE(
        num_experts=4, top_k=2, hidden_size=64, intermediate_size=32, quant_config=config, prefix=EXPERTS
    )  # fmt: skip
    shapes = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
    make = lambda: [  # noqa: E731
        (f"{expert}.{name}.weight", draw(*shape, scale=0.1))
        for expert in range(4)
        for name, shape in shapes.items()
    ]
    return layer, make


def _stacked(tensors) -> tuple[torch.Tensor, torch.Tensor]:
    by_name = dict(tensors)
    of = lambda name: [by_name[f"{expert}.{name}.weight"] for expert in range(4)]  # noqa: E731
    w13 = [torch.cat(pair) for pair in zip(of("gate_proj"), of("up_proj"), strict=True)]
    return torch.stack(w13), torch.stack(of("down_proj"))


def test_vllms_experts_and_its_weight_update(real, draw):
    # Prevents: experts loaded elsewhere than read; an update of vLLM's own that leaves the old codes.
    from vllm.model_executor.model_loader import reload

    layer, make = _experts_of_vllm(real, draw)
    reload.record_metadata_for_reloading(layer)
    x, logits = draw(7, 64), draw(7, 4)
    weights, ids = route(logits, 2, True)
    addresses = set()
    for is_update in (False, True):
        tensors = make()
        if is_update:
            reload.initialize_layerwise_reload(layer)
        assert {*layer.load_weights(tensors)} == {"w13_weight", "w2_weight"}
        if is_update:
            reload.finalize_layerwise_reload(layer, types.SimpleNamespace(dtype=torch.bfloat16))
        else:
            _finish(layer)
        got = layer.routed_experts.forward_modular(x, weights, ids.int())
        assert torch.equal(got, experts(x, weights, ids, *_stacked(tensors), W4A4))
        addresses.add(layer.routed_experts.minite_w13_weight.operand.codes.data_ptr())
    assert len(addresses) == 1


def test_vllms_configuration_and_other_processes(real):
    # Prevents: an engine process that cannot be started; a policy that its compiled graphs are not keyed by.
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.linear import ReplicatedLinear

    vllm_config = get_current_vllm_config()
    before = vllm_config.compute_hash()
    gate = ReplicatedLinear(64, 4, bias=False, quant_config=real, prefix="model.layers.0.mlp.gate")
    assert type(gate.quant_method).__name__ == "UnquantizedLinearMethod"
    assert vllm_config.compute_hash() != before
    vllm_config.quant_config = real
    assert pickle.loads(pickle.dumps(vllm_config)).quant_config.policy == real.policy
