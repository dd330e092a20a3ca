"""Megatron's MoE layer on the fused expert dataflow beside the same layer on Megatron's own dispatch.

Every `check_*` runs in a child process (megatron_runs.py); its docstring says what it prevents. Two experts a
token, so that Megatron's BF16 sums over a token's experts are the dataflow's; probabilities in FP32.
"""

from pathlib import Path

import pytest
from megatron_runs import (
    MINITE,
    MOE,
    Outcomes,
    World,
    every_check,
    require_megatron,
    run_world,
    train,
)

require_megatron()
RECIPES = ("bf16", "nvfp4_per_token", "nvfp4_per_token_dequant_bwd", "nvfp4_per_tensor", "mxfp8")
# FP32 sums of 96 products in two orders.
PROBS_CLOSE = 1e-5


class _Layer:
    """One MoE layer behind a router that says what it is told."""

    def __init__(self, dataflow: str, recipe: str = "nvfp4_per_token", **changes) -> None:
        import megatron_small as small

        from megatron_nvfp4.recipes import resolve

        exact = {"moe_router_dtype": "fp32", "bias_activation_fusion": True}
        config = small.new_config("moe_grouped", **exact | changes)
        config.minite_policy, config.minite_moe_dataflow = resolve(recipe), dataflow
        model = small.new_model(config)
        small.fill(model)
        self.moe = model.decoder.layers[0].mlp
        self._fill_by_global_number()
        assert self.moe.describe_dataflow()["dataflow"] == dataflow.replace("auto", "fused")

    def _fill_by_global_number(self) -> None:
        """The weights that the expert has on one rank that holds all."""
        import torch

        experts = self.moe.experts
        for linear in (experts.linear_fc1, experts.linear_fc2):
            for index, weight in zip(self.moe.local_expert_indices, linear.weights, strict=True):
                generator = torch.Generator().manual_seed(index)
                with torch.no_grad():
                    weight.copy_(0.05 * torch.randn(weight.shape, generator=generator))

    def run(self, seed: int = 0, scores=None) -> dict:
        """Output and gradients of one step on 2 sequences of 16 tokens, by name; scores (32, E) choose."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(16, 2, 64, generator=generator).bfloat16()
        noise = torch.rand(32, 4, generator=generator)
        scores = noise if scores is None else scores
        dy = torch.randn(16, 2, 64, generator=generator).bfloat16()
        routing_map = torch.zeros(32, 4, dtype=torch.bool).scatter_(1, scores.topk(2).indices, True)
        x.requires_grad_()
        probs = (noise * routing_map).requires_grad_()
        # Not the leaf itself, as after a router.
        self.moe.route = lambda *_: (probs * 1.0, routing_map)
        self.moe.zero_grad()
        y, bias = self.moe(x)
        assert bias is None
        y.backward(dy)
        grads = {name: p.grad for name, p in self.moe.named_parameters() if p.grad is not None}
        return {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad, **grads}


def _assert_same(found: dict, expected: dict) -> None:
    import torch

    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name == "dprobs":
            assert (found[name] - value).abs().max() <= PROBS_CLOSE * value.abs().max()
        else:
            assert torch.equal(found[name], value), name


# --- one rank --------------------------------------------------------------------------------------------


def check_fused_equals_unfused(folder):
    """Prevents: another token, expert, weight or rounding than Megatron's own path has, in any dispatcher."""
    for recipe in RECIPES:
        expected = _Layer("unfused", recipe).run()
        assert sum(name.startswith("experts") for name in expected) == 8
        for dispatcher in ("alltoall", "allgather"):
            _assert_same(
                _Layer("fused", recipe, moe_token_dispatcher_type=dispatcher).run(), expected
            )


def check_activations(folder):
    """Prevents: SwiGLU where the model has another gated activation."""
    import torch
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    gelu, silu = torch.nn.functional.gelu, torch.nn.functional.silu
    for function, is_fused in ((quick_gelu, True), (gelu, False), (silu, False)):
        changes = {"activation_func": function, "bias_activation_fusion": is_fused}
        expected = _Layer("unfused", **changes).run()
        found = _Layer("fused", **changes).run()
        # Megatron's unfused activation rounds the gradient before it multiplies by act's derivative.
        exact = found.keys() if is_fused else ("y",)
        _assert_same({k: found[k] for k in exact}, {k: expected[k] for k in exact})


def check_empty_experts(folder):
    """Prevents: a layer that fails, or gives gradients to the wrong expert, when experts have no tokens."""
    import torch

    scores = torch.tensor([0.0, 3.0, 0.0, 2.0]).expand(32, 4)
    found, expected = _Layer("fused").run(scores=scores), _Layer("unfused").run(scores=scores)
    _assert_same(found, expected)
    assert not found["experts.linear_fc1.weight0"].any()
    assert found["experts.linear_fc1.weight1"].any()


def check_dropped_tokens(folder):
    """Prevents: a dropped choice that is computed, or weighs on another, under a capacity factor."""
    import torch

    outputs = []
    for dataflow in ("fused", "unfused"):
        layer = _Layer(dataflow, moe_expert_capacity_factor=0.5, moe_aux_loss_coeff=0.0)
        maps, route = [], layer.moe.router.forward

        def recording(*args, route=route, maps=maps):
            maps.append(route(*args))
            return maps[-1]

        layer.moe.router.forward = recording
        x = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        outputs.append(layer.moe(x)[0])
        assert maps[0][1].sum() < 64
    assert torch.equal(*outputs)


def check_shared_experts(folder):
    """Prevents: shared experts left out, or added twice."""
    changes = {"moe_shared_expert_intermediate_size": 64}
    found = _Layer("fused", **changes).run()
    _assert_same(found, _Layer("unfused", **changes).run())
    assert "shared_experts.linear_fc1.weight" in found


def check_whole_model(folder):
    """Prevents: a model whose loss depends on how its experts are dispatched."""
    import megatron_small as small

    from megatron_nvfp4.recipes import resolve

    losses, described = [], []
    for dataflow in ("fused", "unfused"):
        config = small.new_config("moe_grouped")
        config.minite_policy, config.minite_moe_dataflow = resolve("nvfp4_per_token"), dataflow
        model = small.new_model(config)
        small.fill(model)
        loss = small.loss_of(model)
        loss.backward()
        losses.append(loss.item())
        described.append(small.describe(model))
    assert losses[0] == losses[1]
    # Prevents also: checkpoints of one that the other cannot load.
    assert described[0] == described[1]


def check_recomputation(folder):
    """Prevents: a recomputed layer that differs, which a wrong key or a stale routing would make."""
    import megatron_small as small
    import torch

    from megatron_nvfp4.recipes import resolve

    modes = (
        {},
        {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    )
    for recipe in ("nvfp4_per_token", "nvfp4_per_token_dequant_bwd", "nvfp4_pretrain"):
        results = []
        for mode in modes:
            config = small.new_config("moe_grouped", moe_ffn_hidden_size=128, **mode)
            config.minite_policy = resolve(recipe)
            model = small.new_model(config)
            small.fill(model)
            described = model.decoder.layers[0].mlp.describe_dataflow()
            assert described["dataflow"] == "fused"
            assert described["recompute"] == (mode.get("recompute_modules") == ["moe_act"])
            torch.manual_seed(3)
            small.loss_of(model).backward()
            results.append({name: p.grad for name, p in model.named_parameters()})
        for found in results[1:]:
            assert small.differing(found, results[0]) == []


def check_hooks_and_weight_cache(folder):
    """Prevents: sharded parameters read before Megatron's hook has gathered them; weights quantised anew for
    every microbatch, or kept over a step."""
    from megatron_nvfp4.mcore.layer_numerics import reset_first_microbatch
    from megatron_nvfp4.modules import base

    layer, called, quantized = _Layer("fused"), [], []
    for name, module in layer.moe.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    original = base.quantize_weights

    def counting(*args):
        quantized.append(args)
        return original(*args)

    base.quantize_weights = counting
    try:
        reset_first_microbatch(layer.moe)
        layer.run()
        assert {"experts", "experts.linear_fc1", "experts.linear_fc2"} <= set(called)
        assert len(quantized) == 2
        layer.run()
        assert len(quantized) == 2
        reset_first_microbatch(layer.moe)
        layer.run()
        assert len(quantized) == 4
    finally:
        base.quantize_weights = original


UNFUSED = {
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "flex",
    "add_bias_linear": True,
    "gated_linear_unit": False,
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "moe_mlp_glu_interleave_size": 32,
    "activation_func_fp8_input_store": True,
    "moe_apply_probs_on_input": True,
    "moe_router_dtype": "fp64",
    "moe_pad_expert_input_to_capacity": True,
    "moe_shared_expert_overlap": True,
    "moe_latent_size": 32,
    "overlap_moe_expert_parallel_comm": True,
    "moe_expert_rank_capacity_factor": 1.5,
    "moe_paged_stash": True,
    "moe_pad_experts_for_cuda_graph_inference": True,
    "cuda_graph_impl": "local",
    "expert_tensor_parallel_size": 2,
    "hidden_size": 100,
    "moe_ffn_hidden_size": 36,
}


def check_reasons(folder):
    """Prevents: a configuration that runs fused although its result would differ, a reason that is not named,
    and a restart per reason."""
    import megatron_small as small
    import torch

    from megatron_nvfp4.mcore.arguments import config_faults
    from megatron_nvfp4.mcore.moe_support import unfused_reasons

    config = small.new_config("moe_grouped")
    assert unfused_reasons(config) == []
    for name, value in UNFUSED.items():
        changed = small.new_config("moe_grouped")
        setattr(changed, name, value)
        reasons = unfused_reasons(changed)
        assert len(reasons) == 1, (name, reasons)
        assert str(value) in reasons[0]
    for name, value in UNFUSED.items():
        setattr(config, name, value)
    config.gated_linear_unit, config.activation_func = True, torch.nn.functional.relu
    reasons = unfused_reasons(config)
    assert len(reasons) == len(UNFUSED)  # relu in the place of no gate
    assert any("relu" in reason for reason in reasons)
    config.minite_moe_dataflow = "fused"
    faults = [f for f in config_faults(config, have_te=False) if "--minite-moe-dataflow fused" in f]
    assert len(faults) == len(reasons)
    split = small.new_config("moe_grouped", moe_token_dispatcher_type="allgather")
    split.expert_model_parallel_size = 2
    assert len(unfused_reasons(split)) == 1


def check_fallback(folder):
    """Prevents: a fallback that does not run or does not say why, and 'fused' that gives way in silence."""
    import megatron_small as small

    config = small.new_config("moe_grouped", moe_router_dtype="fp64")
    model = small.new_model(config)
    small.loss_of(model).backward()
    (reason,) = model.decoder.layers[0].mlp.describe_dataflow()["reasons"]
    assert reason.startswith("--moe-router-dtype")
    config = small.new_config("moe_grouped", moe_router_dtype="fp64", moe_latent_size=32)
    config.minite_moe_dataflow = "fused"
    with pytest.raises(ValueError, match=r"--moe-router-dtype(.|\n)*--moe-latent-size") as caught:
        small.new_model(config)
    assert "--minite-moe-dataflow fused" in str(caught.value)
    small.new_model(small.new_config("moe_sequential"))


# --- two ranks -------------------------------------------------------------------------------------------


def _messages():
    """A list that collects (bytes a row, rows) of every all-to-all from now on."""
    import torch.distributed as dist

    original, found = dist.all_to_all_single, []

    def recording(output, message, *args, **kwargs):
        width = message[0].numel() * message.element_size() if message.shape[0] else 0
        found.append((width, message.shape[0]))
        return original(output, message, *args, **kwargs)

    dist.all_to_all_single = recording
    return found


def check_expert_parallel_equals_one_rank(folder):
    """Prevents: rows that reach another expert, or come back to another token; scales that change on the way.
    Forward: the bits of a rank that has all experts. Backward: those of Megatron's own exchange."""
    import megatron_small as small
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    found = _messages()
    for recipe in RECIPES:
        small.parallelise()
        expected_y = _Layer("fused", recipe).run(seed=rank)["y"]
        small.parallelise(ep=2)
        expected = _Layer("unfused", recipe).run(seed=rank)
        found.clear()
        layer = _Layer("fused", recipe)
        got = layer.run(seed=rank)
        # 64 columns: codes, block scales, amax; or BF16. A probability goes along.
        packed = 64 // 2 + 64 // 16 + 4 + 4
        keeps_packed = recipe == "nvfp4_per_token_dequant_bwd"
        widths = [packed if keeps_packed else 132, 128, 128, 132]
        assert [width for width, rows in found] == widths
        assert found[0][1] == 64
        # An amax per expert is that of the tokens of both ranks.
        assert torch.equal(got["y"], expected_y) == (recipe != "nvfp4_per_tensor")
        _assert_same(got, expected)
        travels = layer.moe.describe_dataflow()["travels"]
        assert travels.startswith("packed" if "per_token" in recipe else "originals")
        with torch.no_grad():
            found.clear()
            layer.moe(torch.zeros(16, 2, 64).bfloat16())
            assert found[0][0] == (packed if "per_token" in recipe else 132)


def check_ranks_without_rows(folder):
    """Prevents: a rank that waits for others because its experts have no tokens, or that has none to send."""
    import megatron_small as small
    import torch

    small.parallelise(ep=2)
    scores = torch.tensor([3.0, 2.0, 0.0, 0.0]).expand(32, 4)  # all on the first rank
    for recipe in RECIPES:
        found, expected = (_Layer(d, recipe).run(scores=scores) for d in ("fused", "unfused"))
        _assert_same(found, expected)


def check_expert_parallel_recomputation(folder):
    """Prevents: a second exchange by another plan than the first."""
    import megatron_small as small
    import torch.distributed as dist

    small.parallelise(ep=2)
    expected = _Layer("fused").run(seed=dist.get_rank())
    for modules in (["moe"], ["moe_act"]):
        changes = {"recompute_granularity": "selective", "recompute_modules": modules}
        _assert_same(_Layer("fused", **changes).run(seed=dist.get_rank()), expected)


def check_tensor_parallel_attention(folder):
    """Prevents: with whole experts over tensor-parallel ranks, each of which has its own tokens, a layer that
    exchanges nothing, or twice."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    for ep in (1, 2):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=2,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1,
        )
        model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        found, expected = (_Layer(d).run(seed=dist.get_rank()) for d in ("fused", "unfused"))
        _assert_same(found, expected)


WORLDS = {
    "one_rank": World(
        checks=(
            check_fused_equals_unfused,
            check_activations,
            check_empty_experts,
            check_dropped_tokens,
            check_shared_experts,
            check_whole_model,
            check_recomputation,
            check_hooks_and_weight_cache,
            check_reasons,
            check_fallback,
        )
    ),
    "two_ranks": World(
        num_ranks=2,
        checks=(
            check_expert_parallel_equals_one_rank,
            check_ranks_without_rows,
            check_expert_parallel_recomputation,
            check_tensor_parallel_attention,
        ),
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    folder = tmp_path_factory.mktemp("mcore_moe")
    return Outcomes(Path(__file__), WORLDS, folder, MINITE_RECIPE="nvfp4_per_token")


@every_check(WORLDS)
def test_in_child(outcomes, world, check):
    """What the check's docstring says."""
    outcomes.require(world, check)


# --- through the launcher --------------------------------------------------------------------------------


def test_run_record(tmp_path):
    """Prevents: a record that does not say which dataflow ran, or why not, for the layers of every rank; a
    switch that reaches no layer."""
    runs = {}
    for choice in ("auto", "unfused"):
        pipeline = ("--pipeline-model-parallel-size", 2, "--minite-recipe", "nvfp4_per_token")
        arguments = (*MOE, *MINITE, *pipeline, "--minite-moe-dataflow", choice)
        runs[choice] = train(tmp_path / choice, *arguments, steps=1, num_ranks=2)
    names = {f"decoder.layers.{index}.mlp" for index in range(2)}
    for choice, run in runs.items():
        assert run.meta["moe_layers"].keys() == names
        for layer in run.meta["moe_layers"].values():
            if choice == "auto":
                assert layer["dataflow"] == "fused"
                assert layer["quantized"] == "once per token"
            else:
                assert layer == {
                    "dataflow": "unfused",
                    "reasons": ["--minite-moe-dataflow unfused"],
                }
    assert runs["auto"].losses == runs["unfused"].losses


if __name__ == "__main__":
    run_world(WORLDS)
