"""Which numerics each Megatron layer takes, when its weight is quantised, and where its gradient goes.

The checks run in a child process (megatron_runs.py) without Transformer Engine; docstrings say what they
prevent.
"""

import contextlib
from pathlib import Path

import pytest
from megatron_runs import Outcomes, World, every_check, require_megatron, run_world

require_megatron()
POLICY = """
recipe: nvfp4_per_token
last_layers_bf16: 0.15
shared_experts: bf16
layers:
  - match: "**.self_attention.*"
    recipe: bf16
  - layer_numbers: [2]
    match: "**.experts.linear_fc2"
    recipe: mxfp8
"""


# --- what is refused -----------------------------------------------------------------------------------


def check_every_fault_at_once(folder):
    """Prevents: one restart per unsupported flag, and a refusal that does not say what to do."""
    import megatron_small as small

    from megatron_nvfp4.mcore.arguments import require_supported

    config = small.new_config("moe_grouped")
    require_supported(config, have_te=False)
    wanted = {
        "fp8": ("e4m3", "--fp8-format"),
        "fp4": ("e2m1", "--fp4-format"),
        "multi_latent_attention": (True, "--multi-latent-attention"),
        "tp_comm_overlap": (True, "--tp-comm-overlap"),
        "use_te_activation_func": (True, "--use-te-activation-func"),
        "moe_router_padding_for_quantization": (True, "--moe-router-padding-for-quantization"),
        "cuda_graph_impl": ("local", "--cuda-graph-impl"),
        "recompute_modules": (["moe_act"], "--recompute-modules moe_act"),
        "hidden_size": (72, "self_attention.linear_qkv"),
        "moe_ffn_hidden_size": (40, "mlp.experts.linear_fc2"),
    }
    for name, (value, _) in wanted.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match="cannot run this configuration") as caught:
        require_supported(config, have_te=False)
    faults = str(caught.value).split("\n  - ")[1:]
    for _, flag in wanted.values():
        lines = [fault for fault in faults if fault.startswith(flag)]
        assert lines, f"{flag} is not among {faults}"
        assert all(": " in line and len(line.split(": ", 1)[1]) > 5 for line in lines), lines
    assert any("K=72 is not a multiple of 16" in fault and "bf16" in fault for fault in faults)
    assert any("K=40 is not a multiple of 16" in fault for fault in faults)
    with pytest.raises(ValueError, match="--fp8-format"):
        small.block_spec(config)


def check_sizes_are_judged_per_rank_and_recipe(folder):
    """Prevents: a size that only breaks when split, or a refusal of what BF16 layers can take."""
    import megatron_small as small

    from megatron_nvfp4.mcore.arguments import config_faults
    from megatron_nvfp4.recipes import resolve

    config = small.new_config("dense", ffn_hidden_size=96)
    assert config_faults(config, have_te=False) == []
    config.tensor_model_parallel_size = 4
    faults = config_faults(config, have_te=False)
    assert [fault.split(";")[0] for fault in faults] == [
        "mlp.linear_fc1 (nvfp4_per_token): out_features: N=48 is not a multiple of 32",
        "mlp.linear_fc2 (nvfp4_per_token): in_features: K=24 is not a multiple of 16",
    ]
    config = small.new_config("dense", ffn_hidden_size=100)
    assert config_faults(config, have_te=False)
    config.minite_policy = resolve("bf16")
    assert config_faults(config, have_te=False) == []


def check_unbuildable_recipe_is_refused(folder):
    """Prevents: a recipe without kernels running as another one."""
    import megatron_small as small

    from megatron_nvfp4.recipes import resolve

    config = small.new_config()
    config.minite_policy = resolve("nvfp4_pretrain", backend="te")
    with pytest.raises(ValueError, match=r"nvfp4_pretrain needs .*random_hadamard_transform"):
        small.new_model(config)


def check_wrong_constructor_arguments(folder):
    """Prevents: gathered outputs, unsplit inputs or norms of experts that are silently not done."""
    import megatron_small as small

    from megatron_nvfp4.mcore import experts, parallel

    shared = {
        "config": small.new_config(),
        "init_method": lambda weight: None,
        "bias": False,
        "skip_bias_add": False,
    }
    column, row = parallel.MiniTEColumnParallelLinear, parallel.MiniTERowParallelLinear
    with pytest.raises(ValueError, match="gather_output=True"):
        column(64, 64, gather_output=True, **shared)
    with pytest.raises(ValueError, match="skip_weight_param_allocation=True"):
        column(64, 64, gather_output=False, skip_weight_param_allocation=True, **shared)
    with pytest.raises(ValueError, match="input_is_parallel=False"):
        row(64, 64, input_is_parallel=False, **shared)
    with pytest.raises(ValueError, match="is_expert must be True"):
        experts.MiniTEColumnParallelGroupedLinear(2, 64, 64, is_expert=False, **shared)
    with pytest.raises(ValueError, match="experts have no norm"):
        parallel.MiniTELayerNormColumnParallelLinear(
            64, 64, gather_output=False, is_expert=True, **shared
        )


# --- which recipe a layer takes --------------------------------------------------------------------------


def check_policy_reaches_every_layer(folder):
    """Prevents: a pattern, a layer number, the last layers or shared experts off by one or not read."""
    import megatron_small as small

    config = small.new_config("moe_grouped", num_layers=4, moe_shared_expert_intermediate_size=64)
    config.minite_policy = _policy(folder)
    found = _recipes(small.new_model(config))
    expected = {}
    for index in range(4):
        layer = f"decoder.layers.{index}"
        quantised = "bf16" if index == 3 else "nvfp4_per_token"
        for name in ("linear_qkv", "linear_proj"):
            expected[f"{layer}.self_attention.{name}"] = "bf16"
        for name in ("linear_fc1", "linear_fc2"):
            expected[f"{layer}.mlp.experts.{name}"] = quantised
            expected[f"{layer}.mlp.shared_experts.{name}"] = "bf16"
    expected["decoder.layers.1.mlp.experts.linear_fc2"] = "mxfp8"
    assert found == expected


def check_layer_numbers_count_from_one(folder):
    """Prevents: a rule for layer 4 hitting its neighbour, where name and number are off together."""
    import megatron_small as small

    from megatron_nvfp4.recipes import resolve

    file = folder / "number.yaml"
    file.write_text("recipe: bf16\nlayers: [{layer_numbers: [4], recipe: nvfp4_per_token}]\n")
    config = small.new_config("dense", num_layers=4)
    config.minite_policy = resolve(config=file)
    layers = small.new_model(config).decoder.layers
    recipes = [layer.mlp.linear_fc1.qlinear_params.recipe.name for layer in layers]
    assert recipes == ["bf16", "bf16", "bf16", "nvfp4_per_token"]


def check_precision_config_file(folder):
    """Prevents: Megatron's per-module file being ignored, or a Transformer Engine entry taken for ours."""
    import megatron_small as small
    from megatron.core.quantization.quant_config import RecipeConfig

    def recipe_config(payload: dict) -> RecipeConfig:
        matcher = {"type": "glob", "enabled": True, "pattern": "*.mlp.linear_fc1", "config": "mine"}
        return RecipeConfig.from_config_dict(
            {"configs": {"mine": payload}, "matchers": {"m": matcher}}
        )

    config = small.new_config(quant_recipe=recipe_config({"minite_recipe": "mxfp8"}))
    found = _recipes(small.new_model(config))
    assert {name for name, recipe in found.items() if recipe == "mxfp8"} == {
        f"decoder.layers.{index}.mlp.linear_fc1" for index in range(2)
    }
    assert set(found.values()) == {"mxfp8", "nvfp4_per_token"}
    payload = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    with pytest.raises(
        ValueError, match=r"decoder\.layers\.0\.mlp\.linear_fc1.*'mine'.*minite_recipe"
    ):
        small.new_model(small.new_config(quant_recipe=recipe_config(payload)))
    with pytest.raises(ValueError, match="unknown recipe 'nvfp5'"):
        small.new_model(small.new_config(quant_recipe=recipe_config({"minite_recipe": "nvfp5"})))


def check_layer_outside_a_gpt_model(folder):
    """Prevents: a crash, or BF16 in silence, where nobody calls finish_init."""
    import megatron_small as small
    import torch

    from megatron_nvfp4.mcore.parallel import MiniTEColumnParallelLinear

    layer = MiniTEColumnParallelLinear(
        64,
        32,
        config=small.new_config(),
        init_method=torch.nn.init.normal_,
        gather_output=False,
        bias=False,
        skip_bias_add=False,
    )
    assert layer.qlinear_params is None
    y, bias = layer(torch.randn(3, 64, dtype=torch.bfloat16))
    assert (tuple(y.shape), bias) == ((3, 32), None)
    assert layer.qlinear_params.recipe.name == "nvfp4_per_token"


# --- when a weight is quantised ----------------------------------------------------------------------------

NUM_DENSE_LINEARS = 8  # qkv, proj, fc1, fc2 in two layers


def check_without_the_hook_nothing_is_reused(folder):
    """Prevents: stale weights where no schedule ever says that a step begins."""
    import megatron_small as small

    model = _filled("dense")
    model.set_is_first_microbatch()  # Megatron's own, which knows nothing of minite
    for expected in (1, 2, 3):
        with _count_weights() as count:
            small.loss_of(model).backward()
            small.loss_of(model).backward()
        assert count() == 2 * NUM_DENSE_LINEARS, expected


def check_weights_are_quantised_once_a_step(folder):
    """Prevents: quantising a weight for every microbatch, or keeping it past the optimizer's step."""
    import megatron_small as small

    _install_hooks()
    model = _filled("dense")
    for _ in range(2):
        model.set_is_first_microbatch()
        with _count_weights() as count:
            for _ in range(3):
                small.loss_of(model).backward()
        assert count() == NUM_DENSE_LINEARS
        _update_through_data(model)
    for mode in (True, False):  # a scoring pass after the update, then training without a new step
        with _count_weights() as count, _no_grad_if(mode):
            fresh = small.loss_of(model)
        reference = _filled("dense")
        reference.load_state_dict(model.state_dict())
        if mode:
            assert count() == NUM_DENSE_LINEARS
            assert fresh == small.loss_of(reference)


def check_cached_training_equals_uncached(folder):
    """Prevents: any difference from caching, with gradient accumulation, evaluation and recomputation."""
    import megatron_small as small
    import torch

    _install_hooks()
    for kind in ("dense", "moe_grouped"):
        for recompute in ({}, _full_recompute()):
            runs = []
            for cached in (True, False):
                changes = {} if cached else {"disable_parameter_transpose_cache": True}
                model = small.new_model(small.new_config(kind, **recompute, **changes))
                small.fill(model)
                runs.append(_train(model))
            (losses, grads), (expected_losses, expected_grads) = runs
            assert losses == expected_losses, (kind, recompute)
            for found, expected in zip(grads, expected_grads, strict=True):
                assert torch.equal(found, expected), (kind, recompute)


# --- where the gradient goes ---------------------------------------------------------------------------


def check_fused_wgrad_in_ddp(folder):
    """Prevents: with --gradient-accumulation-fusion (the default on a GPU) gradients lost, doubled, or of
    uninitialised memory added by the data-parallel hook."""
    import torch

    for kind in ("dense", "moe_grouped", "moe_sequential"):
        fused = _main_grads(kind, fuse=True, num_microbatches=2)
        first = _main_grads(kind, fuse=False, num_microbatches=1)
        both = _main_grads(kind, fuse=False, num_microbatches=2)
        num_fused = 0
        for name, expected in both.items():
            if "linear_" not in name or "norm" in name:
                assert torch.equal(fused[name], expected), name
                continue
            num_fused += 1
            # Unfused, each of the two gradients is rounded to BF16 (at most 2^-8 of its size) before the
            # FP32 sum; both come from the same batch, hence twice the first. 2^-20: FP32 sums.
            bound = first[name].abs() * 2 * 2**-8 * (1 + 2**-7) + 2**-20 * expected.abs().max()
            assert ((fused[name] - expected).abs() <= bound).all(), name
            assert expected.abs().max() > 0, name
        assert num_fused >= NUM_DENSE_LINEARS


def check_hidden_gradients_in_ddp(folder):
    """Prevents: weights that miss their gradient, or have another one, where DDP waits for none of them and
    autograd is told of one of them for all; in the fused dataflow, in single layers, and recomputed."""
    import torch

    from megatron_nvfp4.mcore import experts
    from megatron_nvfp4.modules import GroupedLinear

    hidden = []
    original = GroupedLinear.hides_wgrad
    GroupedLinear.hides_wgrad = lambda self, weights: (
        hidden.append(original(self, weights)) or hidden[-1]
    )
    for changes in ({}, _full_recompute(), {"dataflow": "unfused"}):
        sides = []
        for awaited in (True, False):
            experts.gradients_are_awaited = lambda config, awaited=awaited: awaited
            hidden.clear()
            sides.append(_main_grads("moe_grouped", fuse=True, num_microbatches=2, **changes))
            assert any(hidden) is not awaited, changes
        for name, expected in sides[0].items():
            assert torch.equal(sides[1][name], expected), (name, changes)


# --- helpers ------------------------------------------------------------------------------------------------


def _policy(folder):
    from megatron_nvfp4.recipes import resolve

    file = folder / "policy.yaml"
    file.write_text(POLICY)
    return resolve(config=file)


def _recipes(model) -> dict[str, str]:
    from megatron_nvfp4.mcore.layer_numerics import MegatronLinear

    return {
        module.layer_name: module.qlinear_params.recipe.name
        for module in model.modules()
        if isinstance(module, MegatronLinear)
    }


def _filled(kind: str, **changes):
    import megatron_small as small

    model = small.new_model(small.new_config(kind, **changes))
    small.fill(model)
    return model


def _install_hooks() -> None:
    from megatron_nvfp4.mcore import hooks

    hooks.install()
    hooks.install()


def _full_recompute() -> dict:
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


def _no_grad_if(condition: bool):
    import torch

    return torch.no_grad() if condition else contextlib.nullcontext()


@contextlib.contextmanager
def _count_weights():
    """Number of forward weight operands quantised inside the block."""
    from megatron_nvfp4.modules import base

    original, calls = base.quantize_weights, []

    def counting(weights, setup):
        calls.append(setup.name)
        return original(weights, setup)

    base.quantize_weights = counting
    try:
        yield lambda: len(calls)
    finally:
        base.quantize_weights = original


def _update_through_data(model) -> None:
    """As Megatron's optimizers: through `.data`, which leaves the version counter as it is."""
    for parameter in model.parameters():
        versions = parameter._version
        if parameter.grad is not None:
            parameter.data.copy_(parameter.data - 0.1 * parameter.grad)
        assert parameter._version == versions
        parameter.grad = None


def _train(model) -> tuple[list[float], list]:
    """Three steps of two microbatches, a scoring pass after each: losses, and the last gradients."""
    import megatron_small as small
    import torch

    losses = []
    for step in range(3):
        model.set_is_first_microbatch()
        for _ in range(2):
            loss = small.loss_of(model)
            loss.backward()
            losses.append(loss.item())
        if step == 2:
            break
        _update_through_data(model)
        with torch.no_grad():
            losses.append(small.loss_of(model).item())
    return losses, [p.grad for p in model.parameters() if p.grad is not None]


def _main_grads(
    kind: str, *, fuse: bool, num_microbatches: int, dataflow: str = "auto", **changes
) -> dict:
    """FP32 main_grad of every parameter after some passes over the same batch under Megatron's DDP."""
    import megatron_small as small
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_nvfp4.mcore.layer_numerics import MegatronLinear

    config = small.new_config(kind, **changes)
    config.minite_moe_dataflow = dataflow
    model = small.new_model(config)
    small.fill(model)
    for module in model.modules():
        if isinstance(module, MegatronLinear):
            # The config's switch would also ask Megatron's own head for a CUDA extension.
            module.fuse_wgrad_accumulation = fuse
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(model.config, ddp_config, model)
    wrapped.zero_grad_buffer()
    for _ in range(num_microbatches):
        small.loss_of(wrapped).backward()
    return {name: p.main_grad.detach().clone() for name, p in model.named_parameters()}


WORLDS = {
    "numerics": World(
        checks=(
            check_every_fault_at_once,
            check_sizes_are_judged_per_rank_and_recipe,
            check_unbuildable_recipe_is_refused,
            check_wrong_constructor_arguments,
            check_policy_reaches_every_layer,
            check_layer_numbers_count_from_one,
            check_precision_config_file,
            check_layer_outside_a_gpt_model,
            check_without_the_hook_nothing_is_reused,
            check_weights_are_quantised_once_a_step,
            check_cached_training_equals_uncached,
            check_fused_wgrad_in_ddp,
            check_hidden_gradients_in_ddp,
        )
    )
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    return Outcomes(Path(__file__), WORLDS, tmp_path_factory.mktemp("numerics"))


@every_check(WORLDS)
def test_in_child(outcomes, world, check):
    """What the check's docstring says."""
    outcomes.require(world, check)


if __name__ == "__main__":
    run_world(WORLDS)
