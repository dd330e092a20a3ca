"""The decoder that recipes are compared on: its numbers are transformers', its names are Megatron's."""

import pytest
import sensitivity_cases as cases
import torch

from megatron_nvfp4.diagnostics import sensitivity_model
from megatron_nvfp4.recipes import RECIPES

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def reference(folder, tokens, dtype):
    """Log-probs and likeliest tokens of transformers."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        logprobs = model(tokens[None, :-1]).logits[0].double().log_softmax(-1)
    return logprobs.gather(1, tokens[1:, None])[:, 0], logprobs.argmax(1)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("llama_tied", {"rope_parameters": LLAMA3, "max_position_embeddings": 128}),
        ("qwen2", {}),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [1]}),
    ],
)
def test_log_probs_are_those_of_transformers(tmp_path, name, changes):
    # Prevents: a wrong rotation, norm, head order or routing, which would show as a recipe's cost.
    folder = cases.write(tmp_path / "hf", name, **changes)
    tokens = torch.tensor(cases.ids(60))
    expected, top = reference(folder, tokens, torch.float32)
    found = cases.decoder(folder, torch.float32).scores(tokens)
    assert (found.logprobs - expected).abs().max() < 2e-5
    assert torch.equal(found.top, top)
    assert expected.std() > 0.3  # the layers do something


def test_loss_in_bf16_is_that_of_transformers(tmp_path):
    # Prevents: a baseline that is not the model's BF16, from which every difference is taken.
    folder = cases.write(tmp_path / "hf")
    tokens = torch.tensor(cases.ids(120))
    exact, _ = reference(folder, tokens, torch.float32)
    expected, _ = reference(folder, tokens, torch.bfloat16)
    found = cases.decoder(folder).scores(tokens).logprobs
    assert abs(found.mean() - expected.mean()) < 0.01
    # Fewer roundings than transformers': not further from the model in FP32.
    assert (found - exact).abs().mean() < 1.1 * (expected - exact).abs().mean()


def test_linears_have_the_names_that_policies_select(tmp_path):
    model = cases.decoder(cases.write(tmp_path / "hf"))
    assert list(model.linears)[:5] == [
        "decoder.layers.0.self_attention.linear_qkv",
        "decoder.layers.0.self_attention.linear_proj",
        "decoder.layers.0.mlp.linear_fc1",
        "decoder.layers.0.mlp.linear_fc2",
        "decoder.layers.1.self_attention.linear_qkv",
    ]
    names = {module.layer_name for module in model.linears.values()}
    assert names == set(model.linears)
    assert {m.qlinear_params.recipe for m in model.linears.values()} == {RECIPES["bf16"]}


def test_logits_are_made_in_parts_without_a_difference(tmp_path, monkeypatch):
    # Prevents: a long text with a large vocabulary that takes all memory, or loses rows at a seam.
    model = cases.decoder(cases.write(tmp_path / "hf"), torch.float32)
    tokens = torch.tensor(cases.ids(60))
    whole = model.scores(tokens)
    monkeypatch.setattr(sensitivity_model, "LOGITS", 7 * 250)
    parts = model.scores(tokens)
    assert torch.equal(whole.top, parts.top)
    # A GEMM of other size may add in another order: 2^-24 of the logits' size for each of the sum's terms.
    bound = model.shape.hidden_size * 2**-24 * whole.logprobs.abs().max()
    assert (whole.logprobs - parts.logprobs).abs().max() < bound


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2_moe", {}, "model_type='qwen2_moe' is not computed here; take a model of llama"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not computed"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not computed"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True is not computed"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not computed"),
        ("llama", {"intermediate_size": 100}, r"0\.mlp\.linear_fc2: K=100 is not a multiple of 8"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, name, changes, message):
    # Prevents: the loss of another model than the folder's, without a word.
    folder = cases.write(tmp_path / "hf", name, **changes)
    with pytest.raises(ValueError, match=message):
        cases.decoder(folder)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1], "a text of 1 tokens: give two at least"),
        ([1, 250], "token 250 is outside the vocabulary of 250"),
        ([1, -1], "token -1 is outside the vocabulary of 250"),
        ([1] * 130, "129 tokens in a sequence, max_position_embeddings=128"),
    ],
)
def test_tokens_that_cannot_be_scored_are_refused(tmp_path, tokens, message):
    model = cases.decoder(cases.write(tmp_path / "hf"))
    with pytest.raises(ValueError, match=message):
        model.scores(torch.tensor(tokens))


def test_a_log_prob_that_is_no_number_is_refused(tmp_path):
    # Prevents: NaN in a table, where it compares false with everything.
    weights = cases.weights_of(cases.CONFIGS["llama"])
    weights["model.norm.weight"][:] = 3e38  # finite, but not what comes of it
    model = cases.decoder(cases.write(tmp_path / "hf", weights=weights))
    with pytest.raises(RuntimeError, match="a log-probability is not finite"):
        model.scores(torch.tensor(cases.ids(20)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused(tmp_path, value):
    # Prevents: finite losses of a model whose NaN a quantised product turned into numbers.
    weights = cases.weights_of(cases.CONFIGS["llama"])
    weights["model.layers.1.mlp.down_proj.weight"][2, 3] = value
    folder = cases.write(tmp_path / "hf", weights=weights)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.linear_fc2\.weight holds 1 values"):
        cases.decoder(folder)
