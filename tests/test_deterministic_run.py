"""`deterministic: PROFILE`: Megatron's own call computes the profile's numbers.

Every `check_*` runs in a child process (megatron_runs.py); its docstring says what it prevents.
"""

from itertools import pairwise
from pathlib import Path

import pytest
from deterministic_sequences import PROMPTS, RESPONSES, packed_sequences, padded
from megatron_runs import (
    Outcomes,
    World,
    every_check,
    require_megatron,
    run_world,
)

require_megatron()
PROFILE = "sglang_det_bf16"
SIZES = {"kv_channels": 64, "moe_aux_loss_coeff": 0.0}


def _policy(**changes):
    from dataclasses import replace

    from megatron_nvfp4.recipes import resolve

    return replace(resolve(environ={}, deterministic=PROFILE), **changes)


def _model(kind: str = "dense", spec=None, **changes):
    """A GPTModel far from uniform probabilities, by default with the profile."""
    import megatron_small as small
    import torch

    policy = changes.pop("policy", None) or _policy()
    config = small.new_config(kind, **SIZES | changes)
    config.minite_policy = policy
    model = small.new_model(config, spec)
    small.fill(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    return model


def _expected(model, temperature: float = 1.0):
    """Log-probabilities of all responses, by the forward that is called by hand."""
    import torch

    from megatron_nvfp4.mcore.deterministic_forward import deterministic_model

    forward = deterministic_model(model, PROFILE, vocab_size=256)
    return torch.cat(forward.logprobs(PROMPTS, RESPONSES, temperature))


def _losses(model, packed: bool = False, temperature: float = 1.0, decoded: bool = True):
    """Losses (B, S) of the call that frameworks make, and where the responses are."""
    from megatron_nvfp4.mcore.deterministic_run import sampled

    prompts = [len(prompt) for prompt in PROMPTS] if decoded else []
    with sampled(prompts, temperature):
        if packed:
            tokens, labels, params = packed_sequences()
            losses = model(tokens, None, None, labels=labels, packed_seq_params=params)
        else:
            tokens, labels = padded()
            losses = model(tokens, None, None, labels=labels)
    assert losses.shape == labels.shape
    return losses, labels >= 0


def check_the_call_scores_as_the_forward_by_hand(folder: Path) -> None:
    """Prevents: other bits from padding, packing, or a temperature that is not the sampler's."""
    import torch

    for kind in ("dense", "moe_grouped"):
        model = _model(kind)
        for temperature in (1.0, 0.8):
            expected = _expected(model, temperature)
            for packed in (False, True):
                losses, scored = _losses(model, packed, temperature)
                assert losses.dtype == torch.float32
                assert torch.equal(-losses[scored], expected), f"{kind} {packed} {temperature}"
                assert not losses[~scored].any()


def check_decoded_rows_are_told(folder: Path) -> None:
    """Prevents: prompt lengths that nobody reads, or that stay behind after their block."""
    import torch

    model = _model()
    told, scored = _losses(model)
    untold, _ = _losses(model, decoded=False)
    assert not torch.equal(told, untold)
    assert torch.equal(told[1], untold[1])  # 13 rows: one tile in either order
    assert torch.equal(
        _losses(model, packed=True, decoded=False)[0][scored_packed()], untold[scored]
    )


def scored_packed():
    return packed_sequences()[1] >= 0


def check_fa3_needs_no_prompt_lengths(folder: Path) -> None:
    """Prevents: deterministic_attention that the model does not take."""
    import torch

    model = _model(policy=_policy(deterministic_attention="fa3"))
    assert torch.equal(_losses(model)[0], _losses(model, decoded=False)[0])
    assert model.forward.describe()["attention"] == "fa3"


def check_logits_are_those_of_the_losses(folder: Path) -> None:
    """Prevents: logits in FP32 that were never rounded, columns of padding, rows of another token."""
    import torch

    from megatron_nvfp4.deterministic.ops.logprobs import _logprobs_ref

    model = _model()
    model.forward.vocab_size = 250
    tokens, labels = padded()
    logits = model(tokens, None, None)
    assert (logits.shape, logits.dtype) == ((3, 64, 250), torch.bfloat16)
    scored = labels >= 0
    expected, *_ = _logprobs_ref(logits[scored].float(), labels[scored])
    assert torch.equal(-_losses(model, decoded=False)[0][scored], expected)
    packed_tokens, packed_labels, packed = packed_sequences()
    found = model(packed_tokens, None, None, packed_seq_params=packed)
    assert torch.equal(found[packed_labels >= 0], logits[scored])
    assert not found[0, -5:].any()


def check_labels_outside_the_vocabulary(folder: Path) -> None:
    """Prevents: memory read behind the logits, and a token the sampler cannot have that costs nothing."""
    import torch

    model = _model()
    model.forward.vocab_size = 250
    tokens, labels = torch.ones(1, 4, dtype=torch.int64), torch.tensor([[3, -1, 250, 10**6]])
    losses = model(tokens, None, None, labels=labels)
    assert losses[0, 0].isfinite()
    assert losses[0, 1:].tolist() == [0.0, float("inf"), float("inf")]


def check_tied_head(folder: Path) -> None:
    """Prevents: a tied model scored by a head of its own, or without the head's gradient."""
    import megatron_small as small
    import torch
    from megatron.core.models.gpt import GPTModel

    config = small.new_config("dense", **SIZES)
    config.minite_policy = _policy()
    model = GPTModel(
        config=config,
        transformer_layer_spec=small.block_spec(config),
        vocab_size=256,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    losses, scored = _losses(model)
    assert torch.equal(-losses[scored], _expected(model))
    losses.sum().backward()
    assert (model.embedding.word_embeddings.weight.grad != 0).any(1).all()


def _gradients(model) -> dict:
    found = {name: p.grad for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return found


def check_gradients_of_microbatches(folder: Path) -> None:
    """Prevents: weights prepared once whose second backward fails, or adds something else than the first."""
    import torch

    from megatron_nvfp4.mcore.layer_numerics import reset_first_microbatch

    for kind in ("dense", "moe_grouped"):
        model, built = _model(kind), []
        build = model.forward._build
        model.forward._build = lambda *args, build=build, to=built: to.append(1) or build(*args)
        for _ in range(3):
            _losses(model)[0].sum().backward()
        expected = _gradients(model)
        assert len(built) == 3
        missing = [name for name, gradient in expected.items() if gradient is None]
        assert not missing, missing
        reset_first_microbatch(model)
        for _ in range(3):
            _losses(model)[0].sum().backward()
        found = _gradients(model)
        assert len(built) == 4
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def check_no_stale_weights(folder: Path) -> None:
    """Prevents: numbers of the step before, whichever way the weights were changed."""
    import torch

    from megatron_nvfp4.mcore.layer_numerics import reset_first_microbatch

    model = _model("moe_grouped")
    weight = model.decoder.layers[0].self_attention.linear_qkv.weight

    def scored():
        losses, where = _losses(model)
        assert torch.equal(-losses[where], _expected(model))
        return losses.detach()

    reset_first_microbatch(model)
    seen = [scored()]
    with torch.no_grad():
        weight.mul_(1.5)  # between microbatches: a new version
    seen.append(scored())
    weight.data.mul_(1.5)  # no new version, as some optimizers: a new step
    reset_first_microbatch(model)
    seen.append(scored())
    weight.data = weight.data * 1.5  # other memory
    seen.append(scored())
    weight.data.mul_(1.5)
    with torch.no_grad():  # scoring outside the schedule
        seen.append(scored())
    assert not any(torch.equal(a, b) for a, b in pairwise(seen))


def check_longer_sequences_than_the_model_names(folder: Path) -> None:
    """Prevents: angles read behind their table."""
    import torch

    from megatron_nvfp4.mcore.layer_numerics import reset_first_microbatch

    model = _model()
    tokens = torch.arange(100)[None]
    reset_first_microbatch(model)
    model(tokens[:, :20], None, None, labels=tokens[:, :20])
    losses = model(tokens, None, None, labels=tokens)
    assert losses.isfinite().all()
    model.forward._kept = None
    assert torch.equal(losses, model(tokens, None, None, labels=tokens))


def check_recomputation(folder: Path) -> None:
    """Prevents: a flag that keeps everything after all, or that changes a bit."""
    import torch

    from megatron_nvfp4.deterministic.model import Model

    plain = _model("moe_grouped")
    recomputed = _model(
        "moe_grouped",
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    results, calls, saved = [], [], []
    attend = Model._attend
    Model._attend = lambda *args: calls.append(1) or attend(*args)
    try:
        for model in (plain, recomputed):
            sizes = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
            ):
                losses, _ = _losses(model)
            losses.sum().backward()
            results.append({"losses": losses} | _gradients(model))
            saved.append(sum(sizes))
    finally:
        Model._attend = attend
    assert len(calls) == 2 + 4
    assert saved[1] < saved[0] / 2, saved
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def check_evaluation_keeps_nothing(folder: Path) -> None:
    """Prevents: a scoring pass with other numbers, or one that leaves a copy of the weights behind."""
    import torch

    from megatron_nvfp4.mcore.layer_numerics import reset_first_microbatch

    model = _model()
    expected = _losses(model)[0]
    model.eval()
    reset_first_microbatch(model)
    with torch.no_grad():
        assert torch.equal(_losses(model)[0], expected)
    assert model.forward._kept is None


def check_every_seam_gets_the_forward(folder: Path) -> None:
    """Prevents: --spec, which builds its layers itself, training without the profile, or others with it."""
    import megatron_small as small
    import torch

    from megatron_nvfp4.mcore.layer_specs import gpt_spec
    from megatron_nvfp4.recipes import resolve

    model = _model()
    bare = small.new_config("dense", **SIZES)
    bare.minite_policy = _policy()
    by_spec = small.new_model(bare, gpt_spec)
    small.fill(by_spec)
    with torch.no_grad():
        for ours, theirs in zip(by_spec.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
    assert torch.equal(_losses(by_spec)[0], _losses(model)[0])
    without = _model(policy=resolve("bf16", environ={}))
    assert "forward" not in vars(without)


def check_a_model_that_keeps_its_forward_is_refused(folder: Path) -> None:
    """Prevents: a Megatron that never calls finish_init training on other numbers in silence."""
    import pytest
    import torch

    model = _model()
    del model.forward
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool).triu(1)
    tokens, labels = padded()
    with pytest.raises(RuntimeError, match=f"layer 1: deterministic: {PROFILE} takes the place"):
        model(tokens, torch.arange(64)[None], mask, labels=labels)


def check_checkpoints_are_the_same(folder: Path) -> None:
    """Prevents: entries that a model without the profile lacks, and loaded weights that are not taken."""
    import megatron_small as small
    import torch

    from megatron_nvfp4.mcore.layer_numerics import reset_first_microbatch
    from megatron_nvfp4.recipes import resolve

    model, without = _model(), _model(policy=resolve("bf16", environ={}))
    assert small.describe(model) == small.describe(without)
    reset_first_microbatch(model)
    expected = _losses(model)[0]
    small.save_distributed(model, folder / "checkpoint")
    for loaded in (without, small.new_model(model.config)):
        small.load_distributed(loaded, folder / "checkpoint")
        assert not small.differing(
            small.weights_of(loaded.state_dict()), small.weights_of(model.state_dict())
        )
    assert torch.equal(_losses(loaded)[0], expected)


def check_refusals_name_everything(folder: Path) -> None:
    """Prevents: one restart per reason."""
    import megatron_small as small
    import pytest

    from megatron_nvfp4.recipes import resolve

    policy = resolve("nvfp4_pretrain", environ={}, deterministic=PROFILE)
    changes = {
        "hidden_dropout": 0.1,
        "moe_aux_loss_coeff": 1e-3,
        "moe_z_loss_coeff": 1e-3,
        "qk_layernorm": False,
        "softmax_scale": 0.5,
    }
    config = small.new_config("moe_grouped", **SIZES | changes)
    config.minite_policy, config.use_kitchen = policy, True
    with pytest.raises(ValueError, match="cannot run this configuration") as caught:
        small.new_model(config)
    said = str(caught.value)
    for words in (
        "use_kitchen",
        "this run cannot honour sglang_det_bf16",
        "hidden_dropout=0.1",
        "moe_aux_loss_coeff=0.001",
        "moe_z_loss_coeff=0.001",
        "qk_layernorm=False: use --qk-layernorm",
        "softmax_scale=0.5",
        "recipe of the policy",
    ):
        assert words in said, said
    for wrong, words in (
        (_policy(deterministic="sglang"), "'sglang' is no profile; use one of sglang_det_bf16"),
        (_policy(deterministic_attention="flash"), "attention=flash"),
        (resolve("bf16", environ={}, deterministic="sglang_minite_nvfp4"), "recipe of the policy"),
    ):
        with pytest.raises(ValueError, match=words):
            _model(policy=wrong)
    config = small.new_config("dense", **SIZES)
    config.minite_policy = _policy()
    config.rotary_base, config.position_embedding_type = 10000, "none"
    with pytest.raises(ValueError, match="scaled rope"):
        small.new_model(config)


def check_calls_that_ask_for_more_are_refused(folder: Path) -> None:
    """Prevents: an argument dropped in silence, hooks that never run, a critic scored as a language model."""
    import pytest
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_nvfp4.mcore.deterministic_run import sampled

    model = _model()
    tokens = torch.ones(2, 8, dtype=torch.int64)
    model(tokens, None, None, extra_block_kwargs={}, loss_mask=tokens, padding_mask=tokens == 0)
    with pytest.raises(ValueError, match="decoder_input, output_processor of the model's call"):
        model(tokens, None, None, tokens, output_processor=print)
    with pytest.raises(ValueError, match="format sbhd"):
        model(tokens, None, None, packed_seq_params=PackedSeqParams(qkv_format="sbhd"))
    far = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 9]))
    with pytest.raises(ValueError, match=r"\[0, 9\] of packed_seq_params do not fit 8 tokens"):
        model(tokens[:1], None, None, packed_seq_params=far)
    with sampled([1, 2, 3]), pytest.raises(ValueError, match="3 prompt lengths for 2 sequences"):
        model(tokens, None, None)
    handle = model.decoder.layers[1].self_attention.linear_proj.register_forward_pre_hook(print)
    with pytest.raises(ValueError, match=r"decoder.layers.1.self_attention.linear_proj has hooks"):
        model(tokens, None, None)
    handle.remove()
    model.output_layer = torch.nn.Linear(64, 1)
    with pytest.raises(ValueError, match="output layer has 1 rows for 256 tokens"):
        model(tokens, None, None)


def check_other_profiles(folder: Path) -> None:
    """Prevents: a run that computes sglang_det_bf16 whatever its profile is."""
    import torch

    from megatron_nvfp4.mcore.deterministic_forward import deterministic_model

    for kind, profile, attention in (
        ("moe_grouped", "sglang_minite_nvfp4", "triton"),
        ("dense", "sglang_rl_fsdp", "fa3"),
    ):
        policy = _policy(deterministic=profile, deterministic_attention=attention)
        model = _model(kind, policy=policy)
        losses, scored = _losses(model, temperature=0.8)
        assert not torch.equal(-losses[scored], _expected(model, 0.8))
        forward = deterministic_model(model, profile, vocab_size=256, attention_kind=attention)
        assert torch.equal(-losses[scored], torch.cat(forward.logprobs(PROMPTS, RESPONSES, 0.8)))
        losses.sum().backward()
        assert not [name for name, p in model.named_parameters() if p.grad is None]
        described = model.forward.describe()
        assert described["profile"] == profile
        assert ("nvfp4" in str(described["experts"]).lower()) == ("nvfp4" in profile)


WORLDS = {
    "run": World(
        (
            check_the_call_scores_as_the_forward_by_hand,
            check_decoded_rows_are_told,
            check_fa3_needs_no_prompt_lengths,
            check_logits_are_those_of_the_losses,
            check_labels_outside_the_vocabulary,
            check_tied_head,
            check_gradients_of_microbatches,
            check_no_stale_weights,
            check_longer_sequences_than_the_model_names,
            check_recomputation,
            check_evaluation_keeps_nothing,
            check_every_seam_gets_the_forward,
            check_a_model_that_keeps_its_forward_is_refused,
            check_checkpoints_are_the_same,
            check_refusals_name_everything,
            check_calls_that_ask_for_more_are_refused,
            check_other_profiles,
        )
    )
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    return Outcomes(Path(__file__), WORLDS, tmp_path_factory.mktemp("deterministic_run"))


@every_check(WORLDS)
def test_in_child_processes(outcomes, world, check):
    outcomes.require(world, check)


if __name__ == "__main__":
    run_world(WORLDS)
