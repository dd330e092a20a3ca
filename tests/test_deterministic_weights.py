"""Parameters of a Megatron model in the deterministic forward: read in place, their gradients in main_grad.

Every `check_*` runs in a child process (megatron_runs.py); its docstring says what it prevents.
"""

from pathlib import Path
from unittest import mock

import pytest
from deterministic_sequences import packed_sequences, padded
from megatron_runs import Outcomes, World, every_check, require_megatron, run_world

require_megatron()
SIZES = {"kv_channels": 64, "moe_aux_loss_coeff": 0.0}
KINDS = ("dense", "moe_grouped", "moe_sequential")
# Parameters that products read in place, by a part of their names.
FUSED = ("linear_proj", "linear_fc", "mlp.router", "output_layer")


def _model(
    kind: str,
    profile: str = "sglang_det_bf16",
    fuse: bool = True,
    ddp: bool = False,
    distributed: bool = False,
    reduce_in_fp32: bool = True,
    **changes,
):
    """A GPTModel with the profile, far from uniform probabilities, and what Megatron wraps around it."""
    import megatron_small as small
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_nvfp4.recipes import resolve

    config = small.new_config(kind, **SIZES | changes)
    config.minite_policy = resolve(environ={}, deterministic=profile)
    model = small.new_model(config)
    small.fill(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    # Set before, Megatron's own head would ask for a CUDA extension.
    config.gradient_accumulation_fusion = fuse
    if not ddp:
        return model, model
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=reduce_in_fp32, use_distributed_optimizer=distributed
    )
    wrapped = DistributedDataParallel(config, settings, model)
    wrapped.zero_grad_buffer()
    return model, wrapped


def _backward(wrapped, number: int) -> None:
    """One of two different microbatches."""
    if number:
        tokens, labels, packed = packed_sequences()
        losses = wrapped(tokens, None, None, labels=labels * 2 % 250, packed_seq_params=packed)
    else:
        tokens, labels = padded()
        losses = wrapped(tokens, None, None, labels=labels)
    losses.mean().backward()


def _main_grads(kind: str, *microbatches: int, **changes) -> dict:
    from megatron_nvfp4.mcore.layer_numerics import reset_first_microbatch

    model, wrapped = _model(kind, ddp=True, **changes)
    reset_first_microbatch(model)
    for number in microbatches:
        _backward(wrapped, number)
    assert all(p.grad is None for p in model.parameters())
    return {name: p.main_grad.clone() for name, p in model.named_parameters()}


def check_no_weight_is_copied(folder: Path) -> None:
    """Prevents: a stacked or cut copy of what the product could read in Megatron's memory."""
    from megatron_nvfp4.deterministic.ops.linear import UNQUANTIZED

    for kind, distributed in ((kind, flag) for kind in KINDS for flag in (False, True)):
        # A distributed optimizer's buffer holds the experts in another order.
        model, _ = _model(kind, ddp=True, distributed=distributed)
        built = model.forward._build(64)
        named = dict(model.named_parameters())
        sources = {p.data_ptr(): name for name, p in named.items()}
        products = [built.head, *(each for layer in built.layers for each in _products(layer))]
        read = [sources[matrix.data_ptr()] for weights in products for matrix in weights.matrices]
        assert sorted(read) == sorted(filter(_is_fused, named)), kind
        for weights in products:
            operand = weights.prepared(UNQUANTIZED).operand
            is_padded = weights.shape[1] % 8  # the router of four experts
            assert is_padded or operand is weights.matrices, kind


def _is_fused(name: str) -> bool:
    return any(part in name for part in FUSED) and "norm" not in name


def _products(layer):
    ((_, output),) = layer.attention
    (mlp,) = layer.mlp
    return [output, *mlp, *([layer.gate] if layer.gate else [])]


def check_parts_and_whole_weights_are_the_same(folder: Path) -> None:
    """Prevents: queries, keys or gates in another order than the sampler's, in values or in gradients."""
    import torch

    from megatron_nvfp4.mcore import deterministic_forward
    from megatron_nvfp4.mcore.deterministic_weights import own_weights

    original, sides = deterministic_forward.model_weights, []
    for kind in KINDS:
        for source in (lambda model, held: dict(own_weights(model)), original):
            deterministic_forward.model_weights = source
            model, _ = _model(kind, fuse=False)
            _backward(model, 0)
            sides.append({name: p.grad for name, p in model.named_parameters()})
        parts, whole = sides[-2:]
        assert all(torch.equal(whole[name], parts[name]) for name in parts), kind
        assert all(g.any() for name, g in parts.items() if "experts" not in name), kind


def check_main_grad_of_two_microbatches(folder: Path) -> None:
    """Prevents: a gradient added twice, not at all, rounded before it is added, or to another's memory."""
    import torch

    for kind in KINDS:
        first, second, both = (_main_grads(kind, *order) for order in ((0,), (1,), (0, 1)))
        apart = _main_grads(kind, 0, fuse=False)
        spread = _main_grads(kind, 0, 1, distributed=True)
        for name, total in both.items():
            assert torch.equal(total, first[name] + second[name]), (kind, name)
            assert torch.equal(total, spread[name]), (kind, name)
            assert first[name].any() or ".experts." in name, (kind, name)
            is_rounded = torch.equal(first[name], first[name].bfloat16().float())
            assert is_rounded is not (_is_fused(name) and bool(first[name].any())), (kind, name)
            # Passed by autograd it is rounded to BF16, once.
            assert torch.equal(first[name].bfloat16().float(), apart[name]), (kind, name)


def _awaited(awaited: bool):
    """Whether something of Megatron's waits for the gradients in autograd."""
    name = "megatron_nvfp4.mcore.deterministic_weights.gradients_are_awaited"
    return mock.patch(name, return_value=awaited)


def check_hidden_gradients(folder: Path) -> None:
    """Prevents: experts without their gradient where autograd is told of one of them for all, or with two of
    them where their layer is computed again."""
    import torch

    sides = []
    for awaited in (True, False):
        with _awaited(awaited):
            model, _ = _model("moe_grouped", ddp=True)
            ((experts, _),) = model.forward._build(64).layers[0].mlp
            assert len(experts.leaves) == (4 if awaited else 1)
            sides.append(_main_grads("moe_grouped", 0, 1))
    recompute = {"granularity": "full", "method": "uniform", "num_layers": 1}
    changes = {f"recompute_{name}": value for name, value in recompute.items()}
    sides.append(_main_grads("moe_grouped", 0, 1, **changes))
    for name, expected in sides[0].items():
        assert all(torch.equal(side[name], expected) for side in sides), name


def check_frozen_experts_get_nothing(folder: Path) -> None:
    """Prevents: main_grad written of a parameter that does not train, or of none because one does not."""
    import torch

    for awaited in (True, False):
        with _awaited(awaited):
            model, wrapped = _model("moe_grouped", ddp=True)
            named = dict(model.named_parameters())
            frozen = {n for n in named if "linear_fc1.weight1" in n or "layers.1.mlp.experts" in n}
            for name in frozen:
                named[name].requires_grad_(False)
            _backward(wrapped, 0)
            expected = _main_grads("moe_grouped", 0)
        for name, parameter in named.items():
            want = torch.zeros_like(parameter) if name in frozen else expected[name]
            assert torch.equal(parameter.main_grad, want), name


def check_nvfp4_is_prepared_once_a_step(folder: Path) -> None:
    """Prevents: experts quantised again in every microbatch, or kept beyond the step."""
    import torch

    from megatron_nvfp4.deterministic.ops import linear
    from megatron_nvfp4.mcore.layer_numerics import reset_first_microbatch
    from megatron_nvfp4.recipes import BF16

    original, made = linear.Prepared.of, []

    def counting(weights, operands=linear.UNQUANTIZED):
        made.extend([1] * (operands.right != BF16))
        return original(weights, operands)

    model, _ = _model("moe_grouped", "sglang_minite_nvfp4", fuse=False)
    seen = []
    with mock.patch.object(linear.Prepared, "of", counting):
        for step in (1, 2):
            reset_first_microbatch(model)
            for number in (0, 1, 0):
                _backward(model, number)
                assert len(made) == step * 2 * 2  # FC1 and FC2 of two layers
            expert = model.decoder.layers[0].mlp.experts.linear_fc1.weight0
            seen.append(expert.grad)
            expert.grad = None
            for parameter in model.parameters():
                parameter.data.mul_(1.1)
    assert not torch.equal(*seen)


def check_changes_within_a_step(folder: Path) -> None:
    """Prevents: a forward kept although a layer was replaced, or gradients withheld from what trains."""
    import torch

    from megatron_nvfp4.mcore.layer_numerics import reset_first_microbatch

    model, wrapped = _model("moe_grouped", ddp=True)
    reset_first_microbatch(model)
    named = dict(model.named_parameters())
    name = next(n for n in named if "layers.0" in n and n.endswith("linear_fc1.weight0"))
    _backward(wrapped, 0)
    before = {n: p.main_grad.clone() for n, p in named.items()}
    named[name].requires_grad_(False)
    _backward(wrapped, 1)
    second = _main_grads("moe_grouped", 1)
    for other, parameter in named.items():
        added = 0 if other == name else second[other]
        assert torch.equal(parameter.main_grad, before[other] + added), other

    model, _ = _model("dense")
    tokens, labels = padded()
    reset_first_microbatch(model)
    first = model(tokens, None, None, labels=labels).detach()
    model.decoder.layers[1] = model.decoder.layers[0]
    assert not torch.equal(model(tokens, None, None, labels=labels), first)


def check_portions_of_the_head(folder: Path) -> None:
    """Prevents: a main_grad in BF16 that is rounded once for every portion of the tokens."""
    import torch

    from megatron_nvfp4.deterministic.ops import logprobs

    whole = _main_grads("dense", 0)["output_layer.weight"]
    for in_fp32, tolerance in ((True, 2**-20), (False, 2**-8)):
        with mock.patch.object(logprobs, "PORTION", 8 * 256):
            grads = _main_grads("dense", 0, reduce_in_fp32=in_fp32)["output_layer.weight"]
        assert grads.dtype == (torch.float32 if in_fp32 else torch.bfloat16)
        # One rounding to BF16, or sums of FP32 in another order.
        atol = 2**-20 * float(whole.abs().max())
        torch.testing.assert_close(grads.float(), whole, rtol=tolerance, atol=atol)


def check_main_grad_taken_away(folder: Path) -> None:
    """Prevents: an attribute of None that is written to, or experts that lose their gradients."""
    import pytest

    for absent in (lambda p: setattr(p, "main_grad", None), lambda p: delattr(p, "main_grad")):
        with _awaited(False):
            model, wrapped = _model("moe_grouped", ddp=True)
            tokens, labels = padded()
            losses = wrapped(tokens, None, None, labels=labels)
        for parameter in model.parameters():
            absent(parameter)
        with pytest.raises(RuntimeError, match="main_grad each in the forward and have not"):
            losses.mean().backward()


def check_experts_that_are_one_parameter(folder: Path) -> None:
    """Prevents: a shared expert that is not found, or whose gradient is one of its two."""
    import torch

    sides = []
    for is_shared in (True, False):
        model, _ = _model("moe_grouped", fuse=False)
        for layer in model.decoder.layers:
            for fc in (layer.mlp.experts.linear_fc1, layer.mlp.experts.linear_fc2):
                if is_shared:
                    fc.weight1 = fc.weight0
                else:
                    fc.weight1.data.copy_(fc.weight0)
        _backward(model, 0)
        fc = model.decoder.layers[0].mlp.experts.linear_fc2
        sides.append(fc.weight0.grad.float())
    apart = sides[1] + fc.weight1.grad.float()
    torch.testing.assert_close(sides[0], apart, rtol=2**-7, atol=2**-8 * float(apart.abs().max()))


def check_inference_mode(folder: Path) -> None:
    """Prevents: evaluation refused because copies made under inference_mode have no versions."""
    import torch

    for kind, profile in (("moe_grouped", "sglang_minite_nvfp4"), ("dense", "sglang_det_bf16")):
        model, _ = _model(kind, profile)
        tokens, labels = padded()
        expected = model(tokens, None, None, labels=labels).detach()
        with torch.inference_mode():
            assert torch.equal(model(tokens, None, None, labels=labels), expected), kind


def check_weights_changed_before_the_backward(folder: Path) -> None:
    """Prevents: gradients by weights that are not the forward's, now that no copy stands between."""
    import pytest
    import torch

    for kind, part in (("dense", "linear_proj.weight"), ("moe_grouped", "linear_fc1.weight3")):
        model, _ = _model(kind)
        tokens, labels = padded()
        losses = model(tokens, None, None, labels=labels)
        with torch.no_grad():
            next(p for n, p in model.named_parameters() if n.endswith(part)).mul_(2)
        with pytest.raises(RuntimeError, match="modified in place between forward and backward"):
            losses.mean().backward()


def check_padding_of_the_head(folder: Path) -> None:
    """Prevents: gradients in rows of the head that are no tokens, or a head that is cut by a copy."""
    import torch

    grads = []
    for ddp in (False, True):
        model, wrapped = _model("dense", ddp=ddp)
        model.forward.vocab_size = 245
        weight = model.output_layer.weight
        if ddp:
            weight.main_grad.fill_(1)
        _backward(wrapped, 0)
        grads.append(weight.main_grad - 1 if ddp else weight.grad)
        assert not grads[-1][245:].any()
        assert grads[-1][:245].any(1).all()
        assert model.forward._build(64).head.matrices.data_ptr() == weight.data_ptr()
    torch.testing.assert_close(grads[0].float(), grads[1], rtol=2**-8, atol=1e-6)


WORLDS = {
    "deterministic weights": World(
        (
            check_no_weight_is_copied,
            check_parts_and_whole_weights_are_the_same,
            check_main_grad_of_two_microbatches,
            check_hidden_gradients,
            check_frozen_experts_get_nothing,
            check_nvfp4_is_prepared_once_a_step,
            check_changes_within_a_step,
            check_portions_of_the_head,
            check_main_grad_taken_away,
            check_experts_that_are_one_parameter,
            check_inference_mode,
            check_weights_changed_before_the_backward,
            check_padding_of_the_head,
        )
    )
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    return Outcomes(Path(__file__), WORLDS, tmp_path_factory.mktemp("weights"))


@every_check(WORLDS)
def test_in_child_processes(outcomes, world, check):
    outcomes.require(world, check)


if __name__ == "__main__":
    run_world(WORLDS)
