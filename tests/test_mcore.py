"""What others see of miniTE's Megatron layers: checkpoint names and shards, parameter attributes.

Every `check_*` runs in a child process (the CPU shim and the Transformer Engine stand-in change a process for
good); its docstring says what it prevents. Checks of one world share a process and run in order, because
checkpoints of one world are read in the next.
"""

import io
import json
import logging
import os
import pickle
from pathlib import Path

import pytest
from megatron_runs import Outcomes, World, every_check, require_megatron, run_world

require_megatron()
KINDS = ("dense", "moe_grouped", "moe_sequential")
MOE_KINDS = KINDS[1:]
KEYS = Path(__file__).parent / "te_keys"


# --- in a world with the stand-in: Megatron's own TE wrappers ----------------------------------------


def check_te_wrappers_have_the_recorded_keys(folder):
    """Prevents: comparing our keys with a record that Megatron's TE wrappers do not have."""
    for kind in KINDS:
        model = _filled(kind, "transformer_engine")
        _assert_recorded_keys(model, kind)
        _save_both_formats(model, folder / f"te_{kind}")


def check_te_norm_and_attention_as_fallback(folder):
    """Prevents: other names or attributes once Transformer Engine is there and lends norm and attention."""
    import megatron_small as small

    for kind in KINDS:
        assert small.describe(_filled(kind, "minite")) == small.describe(
            _filled(kind, "transformer_engine")
        )


def check_own_layers_equal_te_wrappers(folder):
    """Prevents: any difference in shard positions, axes, replicas, dtypes or parameter attributes."""
    import megatron_small as small

    small.without_te_fallback()
    for kind in KINDS:
        assert small.describe(_filled(kind, "minite")) == small.describe(
            _filled(kind, "transformer_engine")
        )


def check_layernorm_and_biases_equal_te_wrappers(folder):
    """Prevents: names and attributes that hold for RMSNorm without biases only."""
    import megatron_small as small

    small.without_te_fallback()
    changes = {"normalization": "LayerNorm", "layernorm_zero_centered_gamma": True}
    for kind in KINDS:
        # SwiGLU and a bias in grouped experts, as TE: bias0.. beside weight0..
        found, expected = (
            small.describe(
                small.new_model(small.new_config(kind, impl, add_bias_linear=True, **changes))
            )
            for impl in ("minite", "transformer_engine")
        )
        assert found == expected


def check_mixed_layers_equal_te_wrappers(folder):
    """Prevents: other keys for models of dense and MoE layers, whose layers are not stacked in torch_dist."""
    import megatron_small as small

    small.without_te_fallback()
    found, expected = (
        small.describe(
            small.new_model(small.new_config("moe_grouped", impl, moe_layer_freq=[0, 1]))
        )
        for impl in ("minite", "transformer_engine")
    )
    assert found == expected
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight0" in found["state_dict"]
    assert "decoder.layers.0.mlp.linear_fc1.weight" in found["state_dict"]


# --- the same at two ranks -----------------------------------------------------------------------------


def check_two_ranks_equal_te_wrappers(folder):
    """Prevents: wrong split axis, stride, reduction group or replica under DP2, TP2 with SP, EP2 and PP2."""
    import megatron_small as small

    small.without_te_fallback()
    for sizes in ({}, {"tp": 2}, {"ep": 2}, {"pp": 2}):
        small.parallelise(**sizes)
        for kind in KINDS:
            if kind == "dense" and "ep" in sizes:
                continue
            found, expected = (
                small.describe(small.new_model(small.new_config(kind, impl)))
                for impl in ("minite", "transformer_engine")
            )
            assert found == expected, (sizes, kind)
            if "tp" in sizes and kind == "dense":
                # That the comparison sees sequence parallelism and gated strides at all.
                attributes = found["attributes"]
                name = "decoder.layers.0.mlp.linear_fc1."
                assert attributes[name + "weight"]["partition_stride"] == 2
                assert attributes[name + "layer_norm_weight"]["sequence_parallel"] is True
            if "ep" in sizes:
                experts = [v for k, v in found["attributes"].items() if ".experts." in k]
                assert experts
                assert not any(attributes["allreduce"] for attributes in experts)


def check_tensor_parallel_shards_share_their_amax(folder):
    """Prevents: a shard with scales of its own, so that a split model is quantised otherwise."""
    import megatron_small as small
    import torch

    from megatron_nvfp4.modules import autograd, matmul, moe
    from megatron_nvfp4.quant import QuantizedTensor
    from megatron_nvfp4.recipes import resolve

    small.without_te_fallback()
    original, found = matmul.quantize_operand, []

    def recording(*args, **kwargs):
        operand = original(*args, **kwargs)
        if isinstance(operand, QuantizedTensor):
            found.append(operand.amax.flatten())
        return operand

    for module in (matmul, autograd, moe):
        module.quantize_operand = recording
    try:
        for kind in KINDS:
            small.parallelise(tp=2)
            config = small.new_config(kind)
            config.minite_policy = resolve("nvfp4_per_token")
            model = small.new_model(config)  # weights of the two ranks differ by their random state
            found.clear()
            small.loss_of(model)
            assert len(found) >= 16, kind  # two operands of eight layers
            amax = torch.cat(found)
            others = [torch.empty_like(amax) for _ in range(2)]
            torch.distributed.all_gather(others, amax)
            assert torch.equal(*others), kind
    finally:
        for module in (matmul, autograd, moe):
            module.quantize_operand = original


def check_cpu_initialisation_equals_te_wrappers(folder):
    """Prevents: --use-cpu-initialization giving every rank the same slice, or another model than TE's."""
    import megatron_small as small
    import torch

    small.parallelise(tp=2)
    found, expected = {}, {}
    for impl, weights in (("minite", found), ("transformer_engine", expected)):
        torch.manual_seed(5)
        config = small.new_config("dense", impl, use_cpu_initialization=True)
        weights.update(small.weights_of(small.new_model(config).state_dict()))
    assert small.differing(found, expected) == []
    qkv = found["decoder.layers.0.self_attention.linear_qkv.weight"]
    slices = [torch.empty_like(qkv) for _ in range(2)]
    torch.distributed.all_gather(slices, qkv)
    assert not torch.equal(*slices)


# --- without Transformer Engine ---------------------------------------------------------------------------


def check_own_keys(folder):
    """Prevents: a checkpoint that Transformer Engine users cannot load, or a key that only we have."""
    for kind in KINDS:
        _assert_recorded_keys(_filled(kind, "minite"), kind)


def check_te_checkpoints_load(folder):
    """Prevents: weights lost, swapped or rounded between TE's wrappers and ours, in both formats."""
    import megatron_small as small
    import torch

    for kind in KINDS:
        expected = small.weights_of(_torch_load(folder / f"te_{kind}.pt"))
        for load in (_load_torch_dist, _load_torch):
            model = small.new_model(small.new_config(kind))
            assert small.differing(small.weights_of(model.state_dict()), expected)
            load(model, folder / f"te_{kind}")
            found = small.weights_of(model.state_dict_for_save_checkpoint())
            assert small.differing(found, expected) == []
            assert torch.isfinite(small.loss_of(model))


def check_grouped_and_sequential_experts_exchange(folder):
    """Prevents: experts permuted when a grouped checkpoint is loaded one by one, or the other way."""
    import megatron_small as small

    for written, read in (MOE_KINDS, MOE_KINDS[::-1]):
        expected = small.weights_of(_torch_load(folder / f"te_{written}.pt"))
        model = small.new_model(small.new_config(read))
        small.load_distributed(model, folder / f"te_{written}")
        assert small.differing(small.weights_of(model.state_dict()), expected) == []


def check_own_checkpoints_are_written(folder):
    """Prevents: saving that fails; what was saved is read by the next world."""
    for kind in KINDS:
        _save_both_formats(_filled(kind, "minite"), folder / f"own_{kind}")


def check_extra_state_is_never_an_obstacle(folder):
    """Prevents: refusing a checkpoint for its `_extra_state`, or running what a foreign one holds."""
    import megatron_small as small
    import torch

    from megatron_nvfp4.modules import base

    executed = folder / "executed"

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(executed),)

    payload = pickle.dumps(Payload())
    forms = {
        "absent": lambda: None,
        "none": lambda: None,
        "empty": lambda: torch.empty(0, dtype=torch.uint8),
        "pickle": lambda: torch.frombuffer(bytearray(payload), dtype=torch.uint8),
        "stream": lambda: io.BytesIO(payload),
    }
    for kind in KINDS:
        expected = _torch_load(folder / f"te_{kind}.pt")
        weights = small.weights_of(expected)
        for form, new in forms.items():
            state = {
                name: new() if "_extra_state" in name else tensor
                for name, tensor in expected.items()
                if form != "absent" or "_extra_state" not in name
            }
            base._warned.clear()
            warnings = _count_warnings()
            model = small.new_model(small.new_config(kind))
            # Megatron's own output_layer reports its missing key to non-strict loading only.
            state.setdefault("output_layer._extra_state", None)
            model.load_state_dict(state, strict=True)
            assert small.differing(small.weights_of(model.state_dict()), weights) == [], form
            assert len(warnings()) == (form in ("absent", "pickle", "stream")), (form, warnings())
    assert not executed.exists()
    pickle.loads(payload)  # the trap would have sprung
    executed.rmdir()


def check_missing_weight_is_an_error(folder):
    """Prevents: training on a random weight because leniency for extra state reached real weights."""
    import megatron_small as small
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint import CheckpointException

    for kind in KINDS:
        state = _torch_load(folder / f"te_{kind}.pt")
        name = next(name for name in state if "linear_fc2.weight" in name)
        del state[name]
        model = small.new_model(small.new_config(kind))
        with pytest.raises(RuntimeError, match=name.replace(".", r"\.")):
            model.load_state_dict(state, strict=True)
        entries = small.sharded(model)
        for key in [key for key in entries if key.endswith("linear_proj.weight")]:
            entries[key].key = entries[key].key.replace("linear_proj", "linear_gone")
        with pytest.raises(CheckpointException, match="linear_gone"):
            dist_checkpointing.load(entries, str(folder / f"te_{kind}"))


def check_torch_dist_without_extra_state(folder):
    """Prevents: a distributed checkpoint written without `_extra_state` that no flag can load."""
    import megatron_small as small
    from megatron.core import dist_checkpointing

    model = _filled("moe_grouped", "minite")
    expected = small.weights_of(model.state_dict())
    entries = small.sharded(model)
    bare = folder / "bare"
    bare.mkdir()
    dist_checkpointing.save(
        {name: entry for name, entry in entries.items() if "_extra_state" not in name}, str(bare)
    )
    fresh = small.new_model(small.new_config("moe_grouped"))
    state = dist_checkpointing.load(small.sharded(fresh), str(bare), strict="log_all")
    fresh.load_state_dict(state)
    assert small.differing(small.weights_of(fresh.state_dict()), expected) == []


# --- back with the stand-in -----------------------------------------------------------------------------


def check_own_checkpoints_load_in_te(folder):
    """Prevents: no way back to Transformer Engine."""
    import megatron_small as small

    for kind in KINDS:
        expected = small.weights_of(_torch_load(folder / f"own_{kind}.pt"))
        for load in (_load_torch_dist, _load_torch):
            model = small.new_model(small.new_config(kind, "transformer_engine"))
            load(model, folder / f"own_{kind}")
            assert small.differing(small.weights_of(model.state_dict()), expected) == []
    for written, read in (MOE_KINDS, MOE_KINDS[::-1]):
        expected = small.weights_of(_torch_load(folder / f"own_{written}.pt"))
        model = small.new_model(small.new_config(read, "transformer_engine"))
        small.load_distributed(model, folder / f"own_{written}")
        assert small.differing(small.weights_of(model.state_dict()), expected) == []


# --- helpers of the checks --------------------------------------------------------------------------------


def _filled(kind: str, impl: str):
    import megatron_small as small

    model = small.new_model(small.new_config(kind, impl))
    small.fill(model)
    return model


def _assert_recorded_keys(model, kind: str) -> None:
    import megatron_small as small

    expected, found = json.loads((KEYS / f"{kind}.json").read_text()), small.describe(model)
    assert found["state_dict"] == expected["state_dict"], kind
    assert found["sharded"] == expected["sharded"], kind


def _save_both_formats(model, path: Path) -> None:
    import megatron_small as small
    import torch

    small.save_distributed(model, path)
    torch.save(model.state_dict_for_save_checkpoint(), path.with_suffix(".pt"))


def _torch_load(path: Path) -> dict:
    import torch

    return torch.load(path, weights_only=True)


def _load_torch(model, path: Path) -> None:
    model.load_state_dict(_torch_load(path.with_suffix(".pt")), strict=True)


def _load_torch_dist(model, path: Path) -> None:
    import megatron_small as small

    small.load_distributed(model, path)


def _count_warnings():
    """A function that tells the warnings our modules have logged since now."""
    messages = []

    class Keep(logging.Handler):
        def emit(self, record) -> None:
            messages.append(record.getMessage())

    logger = logging.getLogger("megatron_nvfp4.modules.base")
    logger.handlers, logger.propagate = [Keep(level=logging.WARNING)], False
    return lambda: messages


# --- the processes ----------------------------------------------------------------------------------------

# A world reads the checkpoints that the worlds before it have written.
WORLDS = {
    "te": World(
        te=True,
        checks=(
            check_te_wrappers_have_the_recorded_keys,
            check_te_norm_and_attention_as_fallback,
            check_own_layers_equal_te_wrappers,
            check_layernorm_and_biases_equal_te_wrappers,
            check_mixed_layers_equal_te_wrappers,
        ),
    ),
    "own": World(
        checks=(
            check_own_keys,
            check_te_checkpoints_load,
            check_grouped_and_sequential_experts_exchange,
            check_own_checkpoints_are_written,
            check_extra_state_is_never_an_obstacle,
            check_missing_weight_is_an_error,
            check_torch_dist_without_extra_state,
        ),
    ),
    "te_again": World(te=True, checks=(check_own_checkpoints_load_in_te,)),
    "two_ranks": World(
        te=True,
        num_ranks=2,
        checks=(
            check_two_ranks_equal_te_wrappers,
            check_tensor_parallel_shards_share_their_amax,
            check_cpu_initialisation_equals_te_wrappers,
        ),
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    folder = tmp_path_factory.mktemp("mcore")
    return Outcomes(Path(__file__), WORLDS, folder, MINITE_RECIPE="bf16")


@every_check(WORLDS)
def test_in_child(outcomes, world, check):
    """What the check's docstring says."""
    outcomes.require(world, check)


if __name__ == "__main__":
    run_world(WORLDS)
