"""What a recipe costs: rows of a sweep, errors of linears, tables."""

import csv
import io
import math

import pytest
import sensitivity_cases as cases
import torch

from megatron_nvfp4.cli.decoder import set_recipe
from megatron_nvfp4.diagnostics import sensitivity_report as report
from megatron_nvfp4.diagnostics.capture_record import replay_operand
from megatron_nvfp4.diagnostics.sensitivity import (
    DEFAULT_RECIPES,
    ErrorSums,
    Measurement,
    Row,
    choose_recipes,
    layer_errors,
    measure,
    plan,
)
from megatron_nvfp4.diagnostics.statistics import ERRORS, decode, error_statistics
from megatron_nvfp4.recipes import RECIPES, FloatSpec, NVFP4Spec

FC2 = "decoder.layers.0.mlp.linear_fc2"


@pytest.fixture
def model(tmp_path):
    return cases.decoder(cases.write(tmp_path / "hf"))


@pytest.fixture
def bad_model(tmp_path):
    weights = cases.with_outliers(cases.weights_of(cases.CONFIGS["llama"]))
    return cases.decoder(cases.write(tmp_path / "bad", weights=weights))


# --- errors ---------------------------------------------------------------------------------------


def test_errors_of_one_linear_by_hand(tmp_path):
    # Prevents: an error taken against the wrong reference, or in another norm.
    weights = cases.weights_of(cases.CONFIGS["llama"])
    # In every block one 6 and fifteen 0.625: the block scale is 1, 0.625 becomes 0.5.
    planted = torch.full((64, 96), 0.625)
    planted[:, ::16] = 6.0
    weights["model.layers.0.mlp.down_proj.weight"] = planted.bfloat16()
    model = cases.decoder(cases.write(tmp_path / "hf", weights=weights))
    inputs = []
    hook = model.linears[FC2].register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    for tokens in cases.segments():
        model.scores(tokens)
    hook.remove()
    lines = layer_errors(model, "nvfp4_w4a16", cases.segments(), set_recipe)
    found = {line["what"]: line for line in lines if line["module"] == FC2}
    assert set(found) == {"weight", "output"}  # activations are not quantised
    rel_l2 = math.sqrt(15 * 0.125**2 / (36 + 15 * 0.625**2))
    assert found["weight"]["rel_l2"] == pytest.approx(rel_l2, rel=1e-6)
    assert found["weight"]["snr_db"] == pytest.approx(-20 * math.log10(rel_l2), rel=1e-6)
    assert found["weight"]["mae"] == pytest.approx(15 * 0.125 / 16, rel=1e-5)
    x, decoded = torch.cat(inputs).double(), torch.where(planted == 6, 6.0, 0.5).double()
    y, other = x @ planted.double().t(), x @ decoded.t()
    expected = ((other - y).norm() / y.norm()).item()
    # Both outputs were rounded to BF16, 2^-9 of a value at most.
    assert found["output"]["rel_l2"] == pytest.approx(expected, abs=0.003)
    assert expected > 0.02


@pytest.mark.parametrize("spec", [NVFP4Spec(outer="token"), FloatSpec(exponent=3, mantissa=2)])
def test_error_sums_are_the_statistics_of_a_capture(spec):
    # Prevents: two tools that call different numbers by one name.
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    operand = replay_operand(x, spec)
    sums = ErrorSums()
    for rows, decoded in zip(x.split(20), decode(operand).split(20), strict=True):
        sums.add(rows, decoded)
    expected = error_statistics(x, decode(operand)).tolist()
    assert list(sums.figures().values()) == pytest.approx(expected)
    assert tuple(sums.figures()) == ERRORS
    assert ErrorSums().figures() == {"rel_l2": None, "snr_db": None, "mae": 0.0}


def test_a_layer_with_outliers_is_ranked_first(bad_model, model):
    # Prevents: a ranking that does not lead to the layer that has to be excluded.
    tokens = cases.segments()
    bad = f"decoder.layers.{cases.BAD_LAYER}.mlp.linear_fc2"
    for recipe in ("nvfp4_per_token", "nvfp4_per_tensor", "nvfp4_w4a16"):
        lines = layer_errors(bad_model, recipe, tokens, set_recipe)
        outputs = {line["module"]: line["rel_l2"] for line in lines if line["what"] == "output"}
        assert max(outputs, key=outputs.get) == bad, recipe
    text = report.as_markdown([_row(bad_model, "bf16")], {"nvfp4_w4a16": lines}, "")
    first = text.partition("of each recipe\n\n")[2].splitlines()[2]
    assert first.startswith(f"| nvfp4_w4a16 | {bad} |")
    # Beside the same model without outliers: random layers differ in how much they matter.
    rows = plan(["nvfp4_w4a16"], list(bad_model.linears), one_at_a_time="layer")
    ours, theirs = (
        report.sweep_rows([measure(m, row, tokens, set_recipe) for row in rows])
        for m in (bad_model, model)
    )
    ratios = {
        a["unit"]: a["mean_abs_gap"] / b["mean_abs_gap"]
        for a, b in zip(ours, theirs, strict=True)
        if a["unit"]
    }
    worst = f"layer {cases.BAD_LAYER + 1}"
    assert ratios.pop(worst) > 2
    assert max(ratios.values()) < 1.2
    # The fault is in the numbers of the weights alone: in BF16 both are one model.
    ours, theirs = (_row(m, "bf16").nll for m in (model, bad_model))
    assert ours == pytest.approx(theirs, abs=0.01)


def test_errors_are_measured_on_the_bf16_models_inputs(model):
    # Prevents: errors that add up from layer to layer, so that the last one is always the worst.
    lines = layer_errors(model, "nvfp4_w4a16", cases.segments(), set_recipe)
    again = layer_errors(
        model, "nvfp4_w4a16", cases.segments(), set_recipe, ["decoder.layers.0.**"]
    )
    assert again == [line for line in lines if ".layers.0." not in line["module"]]
    assert {m.qlinear_params.recipe.name for m in model.linears.values()} == {"bf16"}


def test_errors_of_experts(tmp_path):
    # Prevents: experts judged under one amax, or a tool that cannot take them.
    model = cases.decoder(cases.write(tmp_path / "hf", "qwen3_moe"))
    lines = layer_errors(model, "nvfp4_per_tensor", cases.segments(), set_recipe)
    found = {
        line["what"]: line for line in lines if line["module"].endswith("0.mlp.experts.linear_fc1")
    }
    assert all(0.05 < found[what]["rel_l2"] < 0.2 for what in ("weight", "activation", "output"))


# --- rows -----------------------------------------------------------------------------------------


def _row(model, recipe: str, exclude=(), **unit) -> Measurement:
    row = Row(recipe=recipe, **unit)
    return measure(model, row, cases.segments(), set_recipe, exclude)


def _quantized(model) -> set[str]:
    return {n for n, m in model.linears.items() if m.qlinear_params.recipe.quantized}


def test_rows_quantise_what_they_say(model):
    # Prevents: "all but one" that leaves out another one.
    names = set(model.linears)
    layer2 = {name for name in names if ".layers.1." in name}
    fc2 = {name for name in names if name.endswith("linear_fc2")}
    for unit, expected in (("layer 2", layer2), ("linear_fc2", fc2), (FC2, {FC2})):
        found = _row(model, "nvfp4_w4a16", mode="only", unit=unit)
        assert _quantized(model) == expected
        assert found.num_quantized == len(expected)
        _row(model, "nvfp4_w4a16", mode="without", unit=unit)
        assert _quantized(model) == names - expected
        _row(model, "nvfp4_w4a16", ["**.linear_proj"], mode="without", unit=unit)
        assert _quantized(model) == {n for n in names - expected if not n.endswith("proj")}


def test_bf16_comes_first_and_every_row_has_its_file():
    names = [f"decoder.layers.{i}.mlp.linear_fc{j}" for i in range(12) for j in (1, 2)]
    recipes = choose_recipes(["per_token", "sweep_e2*", "nvfp4_per_token", "bf16"])
    assert recipes == ["nvfp4_per_token", *(f"sweep_e2m{m}" for m in (1, 2, 3, 4))]
    rows = plan(recipes, names, one_at_a_time="layer", all_but_one="module")
    assert rows[0] == Row(recipe="bf16")
    assert len(rows) == 1 + 5 + 5 * 12 + 5 * 24
    assert len({row.file_name for row in rows}) == len(rows)
    assert len(plan(recipes, names, one_at_a_time="kind")) == 1 + 5 + 5 * 2
    forwards = [RECIPES[name].fprop for name in DEFAULT_RECIPES]
    assert len(set(forwards)) == len(forwards)  # none is measured twice


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: choose_recipes(["w4a5"]), "unknown recipe 'w4a5'; did you mean"),
        (lambda: choose_recipes(["sweep_e9*"]), r"--recipes sweep_e9\*: no recipe matches"),
        (
            lambda: plan(["mxfp8"], [FC2], exclude=["linear_fc2"]),
            f"--exclude linear_fc2: no linear matches.*there is {FC2}",
        ),
    ],
)
def test_wrong_names_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_linear_that_cannot_take_the_recipe_stays_in_bf16(tmp_path):
    # Prevents: a sweep that ends at the first odd dimension, or hides what was not quantised.
    model = cases.decoder(cases.write(tmp_path / "hf", intermediate_size=104))
    found = _row(model, "nvfp4_w4a16")
    assert found.num_quantized == 12
    assert set(found.kept) == {name for name in model.linears if name.endswith("linear_fc2")}
    text = report.as_markdown([_row(model, "bf16"), found], {}, "")
    assert f"{FC2}: recipe nvfp4_w4a16 cannot take this layer: in_features: K=104" in text
    assert report.sweep_rows([_row(model, "bf16"), found])[1]["kept_bf16"] == 4
    with pytest.raises(ValueError, match=r"nvfp4_w4a16 only linear_fc2: no linear takes.*K=104"):
        _row(model, "nvfp4_w4a16", mode="only", unit="linear_fc2")
    with pytest.raises(ValueError, match="no linear takes the recipe; --exclude leaves none"):
        _row(model, "nvfp4_w4a16", ["**"])


def test_more_bits_are_nearer_to_bf16(model):
    # Prevents: columns that do not follow the numbers they are named for.
    recipes = ("bf16", "sweep_e2m4", "sweep_e2m3", "sweep_e2m2", "sweep_e2m1")
    lines = report.sweep_rows([_row(model, recipe) for recipe in recipes])
    gaps = [line["mean_abs_gap"] for line in lines]
    assert gaps == sorted(gaps)
    assert gaps[0] == 0 == lines[0]["minus_bf16"] == lines[0]["top1_flips"]
    assert 2 * gaps[1] < gaps[4]


def test_tables_by_hand():
    # Prevents: a difference or standard error of other sequences than those of the row.
    def row(recipe, *logprobs, top=((1, 2), (3,))):
        return Measurement(
            row=Row(recipe=recipe),
            logprobs=[list(each) for each in logprobs],
            top=[list(each) for each in top],
            num_quantized=0,
        )

    found = [row("bf16", (-1, -3), (-2,)), row("mxfp8", (-2, -4), (-5,), top=((1, 9), (3,)))]
    line = report.sweep_rows(found)[1]
    assert (line["nll"], line["minus_bf16"]) == (pytest.approx(11 / 3), pytest.approx(5 / 3))
    assert line["perplexity"] == pytest.approx(math.exp(11 / 3))
    assert line["standard_error"] == pytest.approx(1.0)  # differences 1 and 3 of two sequences
    assert line["mean_abs_gap"] == pytest.approx(5 / 3)
    assert line["top1_flips"] == pytest.approx(1 / 3)
    read = list(csv.DictReader(io.StringIO(report.as_csv(report.SWEEP, report.sweep_rows(found)))))
    assert float(read[1]["minus_bf16"]) == line["minus_bf16"]
    one = [row("bf16", (-1.0, -2.0), top=((1, 2),))]
    assert report.sweep_rows(one)[0]["standard_error"] is None
    assert Measurement.from_data(found[1].as_data()) == found[1]
