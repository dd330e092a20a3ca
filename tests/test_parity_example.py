"""examples/parity.py without an engine: counting, packing, and weights on their way through Megatron."""

import subprocess
import sys
from pathlib import Path

import deterministic_small  # noqa: F401  puts the examples on the path
import pytest
from megatron_runs import Outcomes, World, every_check, require_megatron, run_world

require_megatron()
EXAMPLES = Path(__file__).parents[1] / "examples"


def _samples(**changes):
    import parity_learner
    import torch

    prompts, responses = [[1, 2, 3], [4], [5, 6]], [[7, 8], [9, 10, 11], [12]]
    values = {"logprobs": torch.zeros(6), "temperature": 1.0} | changes
    return parity_learner.Samples(prompts, responses, **values)


def check_a_gap_is_counted(folder: Path) -> None:
    """Prevents: zero reported of values that differ in the last bit, or are not numbers."""
    import parity
    import torch

    found = torch.tensor([1.0, 1.0, torch.nan])
    wanted = torch.tensor([1.0, 1.0 + 2**-23, torch.nan])
    gap = parity.Gap.of(found, wanted)
    assert (gap.tokens, gap.unequal) == (3, 2)
    assert parity.Gap.of(found[:2], wanted[:2]).largest == 2**-23


def check_packed_rows_predict_the_responses(folder: Path) -> None:
    """Prevents: labels off by one, a prompt's tokens scored, sequences dropped at a batch's edge."""
    from itertools import pairwise

    import parity_learner
    import torch

    parity_learner.ROWS_AT_ONCE = 9
    samples, seen = _samples(), []
    for batch in parity_learner._batches(samples):
        tokens, labels, packed = parity_learner._packed(batch)
        assert packed.cu_seqlens_q[-1] == tokens.shape[1] <= 9
        spans = pairwise(packed.cu_seqlens_q.tolist())
        for (start, stop), (prompt, response) in zip(spans, batch, strict=True):
            assert tokens[0, start:stop].tolist() == [*prompt, *response[:-1]]
            assert labels[0, stop - len(response) : stop].tolist() == response
        seen.append(labels[labels >= 0])
    assert len(seen) == 2
    assert torch.cat(seen).tolist() == [t for response in samples.responses for t in response]


def check_weights_pass_through_megatron(folder: Path) -> None:
    """Prevents: a learner and a sampler that start from other weights, or updates under wrong names."""
    _check_weights(folder)


def _check_weights(folder: Path, **policy: str) -> None:
    import parity_model
    import torch
    from megatron.core import parallel_state

    from megatron_nvfp4.mcore.deterministic_forward import hf_weights
    from megatron_nvfp4.recipes import resolve

    rank = parallel_state.get_tensor_model_parallel_rank()
    for kind in (parity_model.DENSE, parity_model.MOE):
        config = kind | {"num_hidden_layers": 2, "hidden_size": 128, "vocab_size": 256}
        config |= {"num_attention_heads": 4, "intermediate_size": 256, "head_dim": 64}
        weights = parity_model.with_outliers(parity_model.random_weights(config))
        target = folder / f"{config['model_type']}-{rank}"
        parity_model.write_checkpoint(target, config, weights)
        chosen = resolve(environ={}, deterministic="sglang_det_bf16", **policy)
        model = parity_model.megatron_model(target, chosen, max_positions=64)
        assert model.forward.profile.name == "sglang_det_bf16"
        found = dict(hf_weights(model))
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def check_weights_are_cut_by_ranks(folder: Path) -> None:
    """Prevents: a rank with the other's heads, or gates where its ups belong."""
    import megatron_small as small

    small.parallelise(tp=2)
    _check_weights(folder, deterministic_sampler="tp2")


WORLDS = {
    "parity": World(
        (
            check_a_gap_is_counted,
            check_packed_rows_predict_the_responses,
            check_weights_pass_through_megatron,
        )
    ),
    "two ranks": World((check_weights_are_cut_by_ranks,), num_ranks=2),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    return Outcomes(Path(__file__), WORLDS, tmp_path_factory.mktemp("parity"))


@every_check(WORLDS)
def test_in_a_child_process(outcomes, world, check):
    outcomes.require(world, check)


def test_a_folder_that_is_no_checkpoint_is_named():
    # Prevents: a stack trace of SGLang's after half a minute.
    command = [sys.executable, str(EXAMPLES / "parity.py"), "--model", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "--model nowhere: no config.json there" in done.stderr


def test_what_would_fail_behind_the_engine_is_said_before_it(tmp_path):
    # Prevents: minutes of starting an engine for a stack trace.
    wrong = ("--responses", "0", "--temperatures", "0", "--engine", "tp", "--context", "40")
    wrong += ("--exported", "--sampler", "tp2x", "--out", str(tmp_path))
    command = [sys.executable, str(EXAMPLES / "parity.py"), *wrong]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    for words in (
        "--responses 0: give 1 or more",
        "--context 40: prompts and responses need 70",
        "--temperatures 0.0: give more than 0",
        "--engine tp: give NAME=VALUE",
        "a folder; give a file",
        "--exported: give an NVFP4 profile",
        "'tp2x' names no ranks",
    ):
        assert words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


if __name__ == "__main__":
    run_world(WORLDS)
