"""Whether a row's bits depend on its neighbours: what is right passes, what is planted is named."""

import json

import pytest
import sensitivity_cases as cases
import torch

from megatron_nvfp4.__main__ import main
from megatron_nvfp4.cli.decoder import set_recipe
from megatron_nvfp4.cli.sensitivity import _quantize
from megatron_nvfp4.diagnostics.sensitivity_swap import CONTEXTS, context_swap, in_context
from megatron_nvfp4.recipes import RECIPES

FC1 = "decoder.layers.1.mlp.linear_fc1"


@pytest.fixture(params=["llama", "qwen3_moe"])
def model(tmp_path, request):
    return cases.decoder(cases.write(tmp_path / "hf", request.param))


def run(model, recipe: str, quantize=_quantize, **options):
    changes = context_swap(
        model, cases.segments(), [RECIPES[recipe]], set_recipe, quantize, **options
    )[recipe]
    assert [change.context for change in changes] == list(CONTEXTS)
    return {change.context: change for change in changes}


def test_a_scale_per_tensor_depends_on_the_neighbours(model):
    # Prevents: a test that passes everything: this recipe is known to fail it.
    found = run(model, "nvfp4_per_tensor")
    assert found["position"].is_clean  # the same rows in another order have the same amax
    for context in CONTEXTS[1:]:
        assert found[context].scale == found[context].amax > 0, context
        assert found[context].codes > 0, context
        assert found[context].outputs > 0, context
        assert found[context].max_abs > 0, context
    assert found["outliers"].scale == len(model.linears)
    assert 1e-3 < found["outliers"].rel_l2 < 1


@pytest.mark.parametrize(
    "recipe", ["nvfp4_per_token", "nvfp4_per_token_4over6", "mxfp8", "sweep_e3m2"]
)
def test_a_scale_per_row_does_not(model, recipe):
    # Prevents: a false alarm, and a pass that comes from contexts that changed nothing.
    found = run(model, recipe)
    assert all(change.is_clean and change.elements == 0 for change in found.values())
    assert found["outliers"].amax == len(model.linears) == found["outliers"].linears
    assert found["alone"].num_elements > 0


def test_a_planted_product_is_caught(tmp_path):
    # Prevents: a fault in the product alone that the codes do not show.
    model = cases.decoder(cases.write(tmp_path / "hf"))
    module = model.linears[FC1]
    right = module.forward
    module.forward = lambda x: right(x) + x.abs().amax() * 2**-4
    found = run(model, "nvfp4_per_token")
    assert found["position"].is_clean
    for context in ("neighbours", "outliers", "alone"):
        change = found[context]
        assert (change.outputs, change.codes, change.scale) == (1, 0, 0), context
        assert not change.is_clean


def test_a_planted_quantiser_is_caught(tmp_path):
    # Prevents: a fault in the codes that a tolerance, or an equal output, hides.
    model = cases.decoder(cases.write(tmp_path / "hf"))

    def quantize(x, spec):
        operand = _quantize(x, spec)
        operand.codes[:, 0] ^= len(x) % 2  # the last bit of a column, by the number of rows
        return operand

    found = run(model, "nvfp4_per_token", quantize, num_target=15)
    assert found["alone"].codes == len(model.linears)  # 15 rows instead of 48
    assert found["alone"].outputs == 0
    assert not found["alone"].is_clean
    assert found["neighbours"].is_clean


@pytest.mark.parametrize("context", ["reference", *CONTEXTS])
def test_every_context_holds_the_target_unchanged(context):
    # Prevents: other rows compared than were meant.
    generator = torch.Generator().manual_seed(3)
    target, neighbours, others = (
        torch.randn(n, 32, generator=generator).bfloat16() for n in (4, 13, 13)
    )
    x, start = in_context(context, target, neighbours, others)
    assert torch.equal(x[start : start + 4], target)
    counts = {"alone": 4, "length": 56}
    assert len(x) == counts.get(context, 17)
    if context == "outliers":
        assert x[4:].abs().amax().item() == pytest.approx(
            100 * target.abs().amax().item(), rel=0.01
        )
    if context == "position":
        assert start % 2 == 1


@pytest.mark.parametrize(
    ("num", "options", "message"),
    [
        (1, {}, "one sequence of tokens: give a text of two"),
        (2, {"num_target": 25}, "--target-tokens 25: give 1 to 24"),
        (2, {"num_target": 0}, "--target-tokens 0: give 1 to 24"),
    ],
)
def test_what_cannot_be_swapped_is_refused(tmp_path, num, options, message):
    model = cases.decoder(cases.write(tmp_path / "hf"))
    recipes = [RECIPES["nvfp4_per_token"]]
    with pytest.raises(ValueError, match=message):
        context_swap(model, cases.segments(num), recipes, set_recipe, _quantize, **options)


def test_the_verb_says_it_by_its_status(tmp_path, capsys):
    # Prevents: a script that takes a recipe for context-free because the verb ran.
    folder, text = cases.write(tmp_path / "hf"), cases.write_ids(tmp_path / "ids.json")
    call = ["context-swap", str(folder), "--text", str(text), "--length", "48"]
    assert main(call) == 0
    assert "nvfp4_per_token: the same bits in all contexts" in capsys.readouterr().out
    out = tmp_path / "swap.json"
    assert main([*call, "--recipes", "per_token", "nvfp4_per_tensor", "--json", str(out)]) == 1
    shown = capsys.readouterr().out
    assert "nvfp4_per_tensor: changed by neighbours" in shown
    assert "nvfp4_per_token: the same bits" in shown
    data = json.loads(out.read_text())
    assert [each["context"] for each in data["nvfp4_per_tensor"]] == list(CONTEXTS)
    assert data["nvfp4_per_tensor"][4]["codes"] == 16
    assert main([*call, "--recipes", "bf16"]) == 2
    assert "nothing is quantised" in capsys.readouterr().err
