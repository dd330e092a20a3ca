"""The deterministic forward on Megatron models: where parameters stand, gradients, updates, refusals.

Every `check_*` runs in a child process (megatron_runs.py); its docstring says what it prevents.
"""

from pathlib import Path

import pytest
from megatron_runs import Outcomes, World, every_check, require_megatron, run_world

require_megatron()
PROMPTS, RESPONSES = [[1, 2, 3], [5, 6]], [[7, 200], [0, 1, 2]]
SIZES = {"kv_channels": 64, "moe_aux_loss_coeff": 0.0}


def _megatron(kind: str, **changes):
    import megatron_small as small
    import torch

    from megatron_nvfp4.recipes import resolve

    config = small.new_config(kind, **SIZES | changes)
    config.minite_policy = resolve("bf16", environ={})
    model = small.new_model(config)
    small.fill(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)  # far from uniform probabilities
    return model


def _forward(model, profile: str = "sglang_det_bf16"):
    from megatron_nvfp4.mcore.deterministic_forward import deterministic_model

    return deterministic_model(model, profile, vocab_size=250)


def check_parameters_stand_where_hf_has_them(folder: Path) -> None:
    """Prevents: queries of one group taken for another's, gates for ups, experts in another order.

    Output rows of a projection do not depend on each other, so Megatron's own BF16 forward is close.
    """
    import megatron_small as small
    import torch

    for kind in small.KINDS:
        model = _megatron(kind)
        tokens = torch.tensor([[*PROMPTS[0], *RESPONSES[0]]])
        length = tokens.shape[1] - 1
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        with torch.no_grad():
            positions = torch.arange(length)[None]
            losses = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float()
            # The head of all 256 rows, as Megatron's loss has it.
            from megatron_nvfp4.mcore.deterministic_forward import deterministic_model

            forward = deterministic_model(model, "sglang_det_bf16", vocab_size=256)
            (got,) = forward.logprobs(PROMPTS[:1], RESPONSES[:1])
        error = (got + losses[0, -2:]).abs().max()
        assert error < 0.05, f"{kind}: {got} against {-losses[0, -2:]}"


def check_grouped_and_sequential_experts_agree(folder: Path) -> None:
    """Prevents: a form of the experts that is read in another order."""
    import torch

    results = [
        torch.cat(_forward(_megatron(kind)).logprobs(PROMPTS, RESPONSES))
        for kind in ("moe_grouped", "moe_sequential")
    ]
    assert torch.equal(*results)


def check_gradients_reach_megatrons_parameters(folder: Path) -> None:
    """Prevents: weights copied out of the graph, so that a step trains nothing."""
    import torch

    for kind in ("dense", "moe_grouped"):
        model = _megatron(kind)
        torch.cat(_forward(model).logprobs(PROMPTS, RESPONSES)).sum().backward()
        missing = [name for name, p in model.named_parameters() if p.grad is None]
        assert not missing, missing
        zero = [name for name, p in model.named_parameters() if not p.grad.any()]
        assert all(".experts." in name for name in zero), zero  # of no token


def check_every_step_takes_the_present_weights(folder: Path) -> None:
    """Prevents: a gap that grows with the updates, from values that were kept of the first."""
    import torch

    model = _megatron("moe_grouped")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    for _ in range(3):
        got = torch.cat(_forward(model).logprobs(PROMPTS, RESPONSES))
        again = torch.cat(_forward(model).logprobs(PROMPTS, RESPONSES))
        assert torch.equal(got, again)
        seen.append(got.detach())
        optimizer.zero_grad()
        (-got.mean()).backward()
        optimizer.step()
    assert not torch.equal(seen[0], seen[1])
    assert seen[2].mean() > seen[0].mean()


def check_quantised_profile(folder: Path) -> None:
    """Prevents: the NVFP4 profile on a Megatron model that computes BF16."""
    import torch

    model = _megatron("moe_grouped")
    plain, rounded = (
        torch.cat(_forward(model, name).logprobs(PROMPTS, RESPONSES))
        for name in ("sglang_det_bf16", "sglang_minite_nvfp4")
    )
    assert not torch.equal(plain, rounded)
    assert (plain - rounded).abs().max() < 1


def check_refusals_name_everything(folder: Path) -> None:
    """Prevents: one restart per reason, and a model whose formula is another."""
    import pytest

    model = _megatron("moe_grouped")
    model.config.hidden_dropout = 0.1
    model.config.moe_router_dtype = "fp32"
    model.config.normalization = "LayerNorm"
    model.config.pipeline_model_parallel_size = 2
    model.rotary_percent = 0.5
    with pytest.raises(ValueError, match="cannot honour sglang_det_bf16") as caught:
        _forward(model)
    said = str(caught.value)
    for words in (
        "hidden_dropout=0.1",
        "moe_router_dtype=fp32",
        "normalization=LayerNorm: use --normalization RMSNorm",
        "pipeline_model_parallel_size=2",
        "rotary_percent=0.5",
    ):
        assert words in said, said


WORLDS = {
    "deterministic": World(
        (
            check_parameters_stand_where_hf_has_them,
            check_grouped_and_sequential_experts_agree,
            check_gradients_reach_megatrons_parameters,
            check_every_step_takes_the_present_weights,
            check_quantised_profile,
            check_refusals_name_everything,
        )
    )
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    return Outcomes(Path(__file__), WORLDS, tmp_path_factory.mktemp("deterministic"))


@every_check(WORLDS)
def test_in_child_processes(outcomes, world, check):
    outcomes.require(world, check)


if __name__ == "__main__":
    run_world(WORLDS)
