"""`deterministic: PROFILE` in Megatron's training: its steps are those of the profile's forward."""

import json

import pytest
from megatron_runs import MINITE, MODEL, MOE, PRETRAIN, require_megatron, run_ranks, train

require_megatron()
PROFILE = "sglang_det_bf16"
# The same training around the forward that is called by hand.
LOOP = """
import sys
from functools import partial
from megatron_nvfp4.mcore import launcher
launcher._prepare("loop", sys.argv[1:], None)
from megatron_nvfp4.deterministic.ops.attention import PackedBatch
from megatron_nvfp4.deterministic.ops.logprobs import token_logprobs
from megatron_nvfp4.mcore import pretrain_gpt
from megatron_nvfp4.mcore.deterministic_forward import deterministic_model

def forward_step(data_iterator, model):
    batch = pretrain_gpt.get_batch(data_iterator, None)
    tokens, labels = batch["tokens"], batch["labels"]
    lengths = [tokens.shape[1]] * tokens.shape[0]
    forward = deterministic_model(model, "sglang_det_bf16", vocab_size=255)
    hidden = forward.hidden(tokens.flatten(), PackedBatch.of(lengths, lengths, tokens.device))
    losses = -token_logprobs(hidden, forward.head, labels.flatten()).view_as(labels)
    return losses, partial(pretrain_gpt.loss_func, batch["loss_mask"])

pretrain_gpt.forward_step = forward_step
pretrain_gpt.main()
"""
# What counts preparations of the weights.
COUNTED = """
import sys
from megatron_nvfp4.mcore import launcher
launcher._prepare("counted", sys.argv[1:], None)
from megatron_nvfp4.mcore import deterministic_run, pretrain_gpt

counted = []
build = deterministic_run.build
deterministic_run.build = lambda *args: counted.append(args) or build(*args)
pretrain_gpt.main()
print("prepared", len(counted), "times")
"""
HEADS = ("--kv-channels", "64")
FULL = (
    "--recompute-granularity",
    "full",
    "--recompute-method",
    "uniform",
    "--recompute-num-layers",
    "1",
)


def test_training(tmp_path):
    # Prevents: a run that trains on Megatron's numbers, on stale weights, or otherwise the second time.
    flag = ("--minite-deterministic", PROFILE)
    first = train(tmp_path / "flag", *HEADS, *MINITE, *flag, steps=3)
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"deterministic: {PROFILE}\ndeterministic_sampler: tp2\n")
    one_rank = ("--minite-deterministic-sampler", "tp1")  # over the file's
    arguments = (*HEADS, *MINITE, "--minite-config", policy, *one_rank, *FULL)
    again = train(tmp_path / "file", *arguments, steps=3, program=("-c", COUNTED))
    assert "prepared 3 times" in again.outputs[0]  # of two microbatches a step
    arguments = (*HEADS, *MINITE, "--minite-recipe", "bf16")
    loop = train(tmp_path / "loop", *arguments, steps=3, program=("-c", LOOP))
    ordinary = train(tmp_path / "ordinary", *arguments, steps=3)
    assert first.losses == again.losses == loop.losses
    assert first.grad_norms == again.grad_norms == loop.grad_norms
    assert len(set(first.losses)) == 3
    assert first.losses != ordinary.losses
    assert first.losses == pytest.approx(ordinary.losses, abs=0.01)
    assert first.meta["deterministic"] == {
        "profile": PROFILE,
        "attention": "triton",
        "sampler": "tp1",
        "dense": ["bf16", "bf16"],
        "experts": ["bf16", "bf16"],
        "vocab_size": 255,
        "recompute": False,
    }
    assert again.meta["deterministic"]["recompute"] is True
    assert first.meta["policy"]["deterministic"] == PROFILE
    assert first.meta["policy"]["sources"]["deterministic"] == "explicit"
    assert first.meta["layers"] == first.meta["moe_layers"] == {}
    assert ordinary.meta["deterministic"] is None


def test_training_of_experts_on_two_ranks(tmp_path):
    # Prevents: gradients that Megatron's DDP or distributed optimizer never gets, or waits for.
    arguments = (*HEADS, *MINITE, *MOE, "--moe-aux-loss-coeff", "0")
    more = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--global-batch-size", "8")
    flag = ("--minite-deterministic", PROFILE)
    plain = train(tmp_path / "plain", *arguments, *more, *flag, steps=3, num_ranks=2)
    loop = train(
        tmp_path / "loop",
        *arguments,
        *more,
        *("--minite-recipe", "bf16"),
        steps=3,
        num_ranks=2,
        program=("-c", LOOP),
    )
    assert plain.losses == loop.losses
    assert plain.grad_norms == loop.grad_norms
    assert len(set(plain.losses)) == 3


def test_refusals_of_a_run(tmp_path):
    # Prevents: reasons that only Megatron's own arguments hold being found after those of the model.
    arguments = (*HEADS, *MINITE, "--minite-deterministic", PROFILE, "--train-iters", "1")
    more = ("--rotary-percent", "0.5", "--reset-position-ids", "--hidden-dropout", "0.1")
    more += ("--vocab-size", "300", "--padded-vocab-size", "256")
    (output,) = run_ranks((*PRETRAIN, *MODEL, *arguments, *more), check=False)
    for words in (
        "rotary_percent=0.5",
        "reset_position_ids=True",
        "hidden_dropout=0.1",
        "--vocab-size 300",
    ):
        assert words in output, output[-3000:]


@pytest.mark.parametrize("by", ["flag", "variable"])
def test_a_profile_on_other_layers_is_refused(tmp_path, by):
    # Prevents: a run that is called bitwise and trains on Megatron's own layers.
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"deterministic: {PROFILE}\n")
    flags = ("--minite-deterministic", PROFILE) if by == "flag" else ()
    variables = {} if by == "flag" else {"MINITE_CONFIG": str(policy)}
    command = (*PRETRAIN, *MODEL, *HEADS, "--transformer-impl", "local", "--train-iters", "1")
    (output,) = run_ranks((*command, *flags), check=False, **variables)
    asked = {"flag": f"--minite-deterministic {PROFILE}", "variable": str(policy)}[by]
    assert "Traceback" not in output, output[-3000:]
    error = output[output.index("error: --transformer-impl local: ") :]
    assert asked in error, error
    assert "use --transformer-impl minite, or leave the profile out" in error


def test_the_policy_keeps_what_was_asked():
    # Prevents: a file's profile that its flag does not override, or one that a sampler would resolve.
    from megatron_nvfp4.recipes import describe, resolve

    policy = resolve(
        environ={}, deterministic="a", deterministic_attention="fa3", deterministic_sampler="tp2"
    )
    described = json.loads(json.dumps(describe(policy, {})))
    keys = ("deterministic", "deterministic_attention", "deterministic_sampler")
    assert [described[key] for key in keys] == ["a", "fa3", "tp2"]
    assert policy.recipe == resolve(environ={}).recipe
