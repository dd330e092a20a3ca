"""Two ranks through Megatron on gloo: every way to split the model computes what one rank computes.

All runs start from a torch_dist checkpoint that one rank has written, so that reading it into other splits is
part of each test. A dense and an MoE model, recipes nvfp4_per_token and bf16, four steps.

Bounds. Splitting adds roundings, it may not change what is quantised: per-token scales belong to a token, and
amax is reduced over the ranks that share a tensor. What remains: partial sums of row-parallel layers are
rounded to BF16 per rank (TP), weight gradients of two microbatches are made in one GEMM instead of two, with
other blocks of 32 tokens in MXFP8 (EP), FP32 sums in another order. A rounding that flips an FP4 code makes
this visible in the loss. CLOSE is at least twice the largest difference measured over four steps (1.1e-3 for
nvfp4_per_token, 8.3e-5 for bf16); the two recipes differ by 7e-3. Finer faults do not show in a loss:
that shards share their amax, and how parameters are marked, is checked in test_mcore.py.
"""

import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from megatron_runs import MINITE, MOE, Training, require_megatron, train

require_megatron()
NUM_STEPS = 4
CLOSE = {"nvfp4_per_token": 2.5e-3, "bf16": 2.5e-4}
# Nothing but the order of FP32 sums differs.
EQUAL = 2e-6
# Printed with three digits; a missing or doubled reduction changes it by tens of percent.
GRAD_NORM_CLOSE = 5e-3
MODELS = {"dense": MINITE, "moe": (*MOE, *MINITE)}
SPLITS = {
    "dp2": "--use-distributed-optimizer",
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "ep2": "--expert-model-parallel-size 2",
}
POLICY = "recipe: nvfp4_per_token\nlayers:\n  - {layer_numbers: [2], recipe: bf16}\n"


class Runs:
    """Runs from the common checkpoints, each made when first asked for; those of one rank in pairs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.done = folder, {}
        self.policy = folder / "policy.yaml"
        self.policy.write_text(POLICY)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self._save, MODELS))
            one_rank = [(model, recipe) for model in MODELS for recipe in CLOSE]
            list(pool.map(lambda pair: self(*pair), [*one_rank, ("moe", "policy")]))

    def _save(self, model: str) -> None:
        saving = ("--save", self.folder / model, "--save-interval", 1)
        train(self.folder / f"write_{model}", *MODELS[model], *saving, steps=1)

    def __call__(self, model: str, recipe: str, split: str | None = None) -> Training:
        key = f"{model}-{recipe}-{split}"
        if key not in self.done:
            numerics = ("--minite-recipe", recipe)
            if recipe == "policy":
                numerics = ("--minite-config", self.policy)
            loading = (
                "--load",
                self.folder / model,
                "--finetune",
                "--no-load-optim",
                "--no-load-rng",
            )
            self.done[key] = train(
                self.folder / key,
                *MODELS[model],
                *numerics,
                *loading,
                *(SPLITS[split].split() if split else ()),
                steps=NUM_STEPS,
                num_ranks=2 if split else 1,
            )
        return self.done[key]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("distributed"))


def _differences(found: Training, expected: Training) -> list[float]:
    """|loss difference| of every step, after checking that both runs train."""
    for run in (found, expected):
        assert len(run.losses) == NUM_STEPS
        assert all(map(math.isfinite, run.losses))
        assert run.losses[-1] < run.losses[0] - 0.1
    return [abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)]


def _assert_same_gradient(found: Training, expected: Training) -> None:
    """Of the first step, where the weights are still the same."""
    assert found.grad_norms
    assert abs(found.grad_norms[0] / expected.grad_norms[0] - 1) < GRAD_NORM_CLOSE


def test_bounds_can_fail(runs):
    # Prevents: bounds so wide that another quantisation, or none, would pass.
    for model in MODELS:
        differences = _differences(runs(model, "bf16"), runs(model, "nvfp4_per_token"))
        assert max(differences) > 2 * CLOSE["nvfp4_per_token"]


@pytest.mark.parametrize("recipe", CLOSE)
def test_data_parallel_with_distributed_optimizer(runs, recipe):
    # Prevents: gradients of ours that miss the sharded reduction, or weights that miss the gather.
    found, expected = runs("dense", recipe, "dp2"), runs("dense", recipe)
    assert max(_differences(found, expected)) < EQUAL
    _assert_same_gradient(found, expected)


@pytest.mark.parametrize(
    ("model", "recipe"), [("dense", "nvfp4_per_token"), ("moe", "nvfp4_per_token"), ("moe", "bf16")]
)
def test_tensor_and_sequence_parallel(runs, model, recipe):
    # Prevents: partial sums not added, gate and up rows split in the wrong order. (That shards share their
    # amax and norms are marked for summation, test_mcore.py shows: a loss does not.)
    found, expected = runs(model, recipe, "tp2"), runs(model, recipe)
    assert max(_differences(found, expected)) < CLOSE[recipe]
    _assert_same_gradient(found, expected)
    assert found.meta["layers"] == expected.meta["layers"]


@pytest.mark.parametrize("recipe", CLOSE)
def test_expert_parallel_alltoall(runs, recipe):
    # Prevents: experts in another order than in the checkpoint, expert gradients averaged over the wrong
    # ranks. No token is quantised otherwise than on one rank: the first loss is the same.
    found, expected = runs("moe", recipe, "ep2"), runs("moe", recipe)
    differences = _differences(found, expected)
    assert differences[0] < EQUAL
    assert max(differences) < CLOSE[recipe]
    _assert_same_gradient(found, expected)


def test_pipeline_parallel_with_a_policy_by_layer_number(runs):
    # Prevents: a stage that counts layers from its own first, so that the policy hits another layer, and a
    # record that holds rank 0's layers only.
    found, expected = runs("moe", "policy", "pp2"), runs("moe", "policy")
    assert max(_differences(found, expected)) < EQUAL
    _assert_same_gradient(found, expected)
    assert found.meta["layers"] == expected.meta["layers"]
    said, alone = (re.findall("^megatron_nvfp4: .*", r.outputs[0], re.M) for r in (found, expected))
    assert said == alone  # of all layers, not the first rank's
    recipes = {name: layer["recipe"] for name, layer in found.meta["layers"].items()}
    assert len(recipes) == 8
    for name, recipe in recipes.items():
        assert recipe == ("bf16" if name.startswith("decoder.layers.1.") else "nvfp4_per_token")
    assert expected.losses[0] not in (
        runs("moe", "bf16").losses[0],
        runs("moe", "nvfp4_per_token").losses[0],
    )
