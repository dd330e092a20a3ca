"""A sampler of two ranks and a Megatron learner: the policy's word for it, and what it must not be.

Every `check_*` runs in a child process (megatron_runs.py); its docstring says what it prevents.
"""

from pathlib import Path

import pytest
from deterministic_sequences import PROMPTS, RESPONSES, padded
from megatron_runs import Outcomes, World, every_check, require_megatron, run_world

require_megatron()
PROFILE = "sglang_det_bf16"


def _model(kind: str, sampler: str, **changes):
    """A GPTModel with the profile, far from uniform probabilities."""
    import megatron_small as small
    import torch

    from megatron_nvfp4.recipes import resolve

    config = small.new_config(kind, kv_channels=64, moe_aux_loss_coeff=0.0, **changes)
    config.minite_policy = resolve(environ={}, deterministic=PROFILE, deterministic_sampler=sampler)
    model = small.new_model(config)
    small.fill(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    return model


def check_the_policys_sampler(folder: Path) -> None:
    """Prevents: ranks that the run does not take, a share of the parameters without its gradient."""
    import torch

    from megatron_nvfp4.mcore.deterministic_forward import deterministic_model
    from megatron_nvfp4.mcore.deterministic_run import sampled
    from megatron_nvfp4.mcore.run_record import headline

    tokens, labels = padded()
    for kind, sampler in (("dense", "tp2"), ("moe_grouped", "tp2"), ("moe_grouped", "tp2ep2")):
        model = _model(kind, sampler)
        with sampled([len(prompt) for prompt in PROMPTS]):
            losses = model(tokens, None, None, labels=labels)
        two, one = (
            torch.cat(
                deterministic_model(model, PROFILE, vocab_size=256, sampler=ranks).logprobs(
                    PROMPTS, RESPONSES
                )
            )
            for ranks in (sampler, "tp1")
        )
        assert torch.equal(-losses[labels >= 0], two)
        assert not torch.equal(one, two)
        losses.sum().backward()
        assert not [name for name, p in model.named_parameters() if p.grad is None]
        assert model.forward.describe()["sampler"] == sampler
        assert headline([model], {}, {}) == (
            f"deterministic {PROFILE}, triton attention, a sampler of {sampler}"
        )


def check_other_samplers_are_refused(folder: Path) -> None:
    """Prevents: an order of sums that is made up."""
    import pytest

    for sampler, words in (
        ("tp4", r"a sampler of 4 ranks \(tp4\)"),
        ("two", "'two' names no ranks; use tp1, tp2 or tp2ep2"),
        ("tp2ep2", "0 experts on a sampler of tp2ep2"),
    ):
        with pytest.raises(ValueError, match=words):
            _model("dense", sampler)
    mixed = {"moe_layer_freq": [0, 1], "ffn_hidden_size": 112}
    for sampler in ("tp2", "tp2ep2"):
        with pytest.raises(ValueError, match="112 columns of a dense layer's MLP on a sampler of"):
            _model("moe_grouped", sampler, **mixed)
    assert _model("moe_grouped", "tp2", moe_layer_freq=[0, 1]).forward.describe()


WORLDS = {"one_rank": World((check_the_policys_sampler, check_other_samplers_are_refused))}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    return Outcomes(Path(__file__), WORLDS, tmp_path_factory.mktemp("deterministic_tp"))


@every_check(WORLDS)
def test_in_child_processes(outcomes, world, check):
    outcomes.require(world, check)


if __name__ == "__main__":
    run_world(WORLDS)
