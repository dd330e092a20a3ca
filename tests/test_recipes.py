"""How a recipe is chosen, and which layer gets it."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_nvfp4.recipes import (
    ALIASES,
    BF16,
    DEFAULT_RECIPE,
    FORWARD,
    MXFP8,
    RECIPES,
    LayerRule,
    NVFP4Spec,
    Operands,
    Policy,
    Recipe,
    describe,
    environment_faults,
    get_recipe,
    load_config,
    resolve,
)

SELECTORS = ("MINITE_RECIPE", "MINITE_CONFIG", "MINITE_BACKEND", "DISABLE_BACKWARD_QUANT")


@pytest.fixture(autouse=True)
def _no_selectors(monkeypatch):
    for name in SELECTORS:
        monkeypatch.delenv(name, raising=False)


def _write(folder, text: str, name: str = "policy.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


# --- which selector wins --------------------------------------------------------------------------


def test_explicit_then_environment_then_file_then_default(tmp_path):
    # Prevents: a forgotten variable that overrides an argument, or a source reported wrongly.
    file = _write(tmp_path, "recipe: mxfp8\nbackend: cpu\nstrict: true\n")
    environ = {"MINITE_RECIPE": "nvfp4_per_tensor", "MINITE_BACKEND": "reference"}

    policy = resolve("bf16", file, backend="cuda", environ=environ)
    assert (policy.recipe.name, policy.backend) == ("bf16", "cuda")
    assert policy.sources["recipe"] == policy.sources["backend"] == "explicit"

    policy = resolve(None, file, environ=environ)
    assert (policy.recipe.name, policy.backend) == ("nvfp4_per_tensor", "reference")
    assert policy.sources["recipe"] == "MINITE_RECIPE"
    assert policy.sources["backend"] == "MINITE_BACKEND"

    policy = resolve(None, file, environ={})
    assert (policy.recipe.name, policy.backend, policy.strict) == ("mxfp8", "cpu", True)
    assert policy.sources["recipe"] == policy.sources["strict"] == f"config file {file}"

    policy = resolve(environ={})
    assert (policy.recipe.name, policy.backend, policy.strict) == (DEFAULT_RECIPE, "auto", False)
    assert set(policy.sources.values()) == {"default"}


def test_every_setting_has_a_source(tmp_path):
    # Prevents: a new setting whose origin `describe` and run_meta.json do not record.
    keys = {"recipe", "backend", "strict", "shared_experts", "last_layers_bf16"}
    keys |= {"disable_backward_quant", "moe_dataflow", "deterministic", "deterministic_attention"}
    keys |= {"deterministic_sampler"}
    assert set(resolve(environ={}).sources) == keys
    file = _write(tmp_path, "")
    sources = resolve(environ={"MINITE_CONFIG": file}).sources
    assert set(sources) == keys | {"config"}
    assert sources["config"] == f"MINITE_CONFIG: {file}"
    assert resolve(config=file, environ={}).sources["config"] == f"explicit: {file}"


@pytest.mark.parametrize(
    ("setting", "value"), [("deterministic_attention", "triton"), ("deterministic_sampler", "tp2")]
)
def test_a_profiles_setting_without_a_profile_is_refused(tmp_path, setting, value):
    # Prevents: a run that its user takes for bitwise, as he has named the sampler and forgotten the profile.
    file = _write(tmp_path, f"{setting}: {value}\n")
    for selectors, source in (({setting: value}, "explicit"), ({"config": file}, "config file")):
        with pytest.raises(ValueError, match=rf"{setting} \({source}.*no effect without a profile"):
            resolve(environ={}, **selectors)
        policy = resolve(environ={}, deterministic="sglang_det_bf16", **selectors)
        assert getattr(policy, setting) == value


def test_explicit_file_replaces_the_environments(tmp_path):
    # Prevents: two files merged, so that neither says what runs.
    ours = _write(tmp_path, "recipe: mxfp8\n", "ours.yaml")
    other = _write(tmp_path, "recipe: bf16\nstrict: true\n", "other.yaml")
    policy = resolve(config=ours, environ={"MINITE_CONFIG": other})
    assert (policy.recipe.name, policy.strict) == ("mxfp8", False)


def test_empty_variables_count_as_unset():
    # Prevents: `MINITE_RECIPE= command`, the usual way to clear a variable, being a fault.
    assert environment_faults(dict.fromkeys(SELECTORS, "")) == []
    assert resolve(environ=dict.fromkeys(SELECTORS, "")).recipe.name == DEFAULT_RECIPE


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_aliases(alias, name):
    # Prevents: an alias of a recipe that was renamed, or one that hides a real name.
    assert get_recipe(alias) is RECIPES[name]
    assert alias not in RECIPES


def test_unknown_name_proposes_the_nearest():
    # Prevents: a typo that trains for a day in the default recipe.
    with pytest.raises(ValueError, match=r"'nvfp4_per_tokn'; did you mean nvfp4_per_token"):
        get_recipe("nvfp4_per_tokn")
    with pytest.raises(ValueError, match="python -m megatron_nvfp4 recipes"):
        get_recipe("zzz")
    with pytest.raises(ValueError, match="backend='gpu'; use one of auto, reference"):
        resolve(backend="gpu", environ={})


def test_all_faults_of_all_selectors_in_one_error(tmp_path):
    # Prevents: fixing one selector after another, a job submission each.
    file = _write(tmp_path, "recipe: nvfp5\n")
    environ = {
        "MINITE_RECIPES": "bf16",
        "MINITE_RECIPE": "nvfp4_per_tokn",
        "MINITE_BACKEND": "gpu",
        "MINITE_CONFIG": str(tmp_path / "absent.yaml"),
        "DISABLE_BACKWARD_QUANT": "yes",
    }
    with pytest.raises(ValueError) as caught:
        resolve("mxfp9", file, backend="tpu", environ=environ)
    text = str(caught.value)
    for part in (
        "MINITE_RECIPES='bf16'; did you mean MINITE_RECIPE?",
        "MINITE_RECIPE: unknown recipe 'nvfp4_per_tokn'",
        "MINITE_BACKEND='gpu'",
        "absent.yaml' is not a file",
        "DISABLE_BACKWARD_QUANT='yes'",
        "recipe: unknown recipe 'mxfp9'",
        "backend='tpu'",
        f"policy file {file}",
        "recipe: unknown recipe 'nvfp5'",
    ):
        assert part in text


def test_missing_file_of_the_environment_is_named_once(tmp_path):
    # Prevents: one fault that reads like two.
    absent = str(tmp_path / "absent.yaml")
    with pytest.raises(ValueError) as caught:
        resolve(environ={"MINITE_CONFIG": absent})
    assert str(caught.value).count(absent) == 1


# --- DISABLE_BACKWARD_QUANT -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nvfp4_per_token", "mxfp8", "nvfp4_pretrain"])
def test_disable_backward_quant_keeps_the_forward(name):
    # Prevents: the switch changing the forward, or the backward staying quantised.
    policy = resolve(name, environ={"DISABLE_BACKWARD_QUANT": "1"})
    assert policy.recipe.fprop == RECIPES[name].fprop
    assert policy.recipe.backward == "bypass"
    assert policy.recipe.dgrad == policy.recipe.wgrad == RECIPES["bf16"].dgrad
    assert policy.recipe.saved["activations"] == 16
    assert policy.sources["disable_backward_quant"] == "DISABLE_BACKWARD_QUANT"
    assert describe(policy, {})["backward"] == "bypass"


@pytest.mark.parametrize("value", [None, "", "0"])
def test_disable_backward_quant_off(value):
    # Prevents: "0" taken for set, since a non-empty string is true.
    environ = {} if value is None else {"DISABLE_BACKWARD_QUANT": value}
    assert resolve("nvfp4_per_token", environ=environ).recipe is RECIPES["nvfp4_per_token"]


def test_disable_backward_quant_0_wins_over_the_file(tmp_path):
    # Prevents: a file's setting that the environment cannot switch off.
    file = _write(tmp_path, "disable_backward_quant: true\n")
    assert resolve(config=file, environ={}).recipe.backward == "bypass"
    environ = {"DISABLE_BACKWARD_QUANT": "0"}
    assert resolve(config=file, environ=environ).recipe.backward == "mxfp8"


@pytest.mark.parametrize(
    "name", ["nvfp4_per_token_bf16_bwd", "nvfp4_per_token_dequant_bwd", "nvfp4_w4a16"]
)
def test_disable_backward_quant_contradicts_an_unquantised_backward(name):
    # Prevents: asking for one backward by name and getting another by a variable.
    with pytest.raises(ValueError, match=rf"DISABLE_BACKWARD_QUANT=1 .*(?s:.*){name} has backward"):
        resolve(name, environ={"DISABLE_BACKWARD_QUANT": "1"})


def test_disable_backward_quant_reaches_the_rules(tmp_path):
    # Prevents: some layers keeping a quantised backward; a rule that contradicts without a word.
    environ = {"DISABLE_BACKWARD_QUANT": "1"}
    rules = "layers:\n- {layer_numbers: [1], recipe: mxfp8}\n- {layer_numbers: [2], recipe: bf16}\n"
    policy = resolve(config=_write(tmp_path, rules), environ=environ)
    assert [rule.recipe.backward for rule in policy.rules] == ["bypass", "bypass"]
    assert policy.rules[1].recipe is RECIPES["bf16"]
    rules += "- {layer_numbers: [3], recipe: nvfp4_per_token_4over6}\n"
    with pytest.raises(ValueError, match=r"layers\[2\] .*nvfp4_per_token_4over6 .*'dequantized'"):
        resolve(config=_write(tmp_path, rules), environ=environ)


# --- which layer gets which recipe ----------------------------------------------------------------


def _matches(pattern: str, name: str) -> bool:
    return LayerRule(recipe=RECIPES["bf16"], match=pattern).applies(name, None)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        # A substring match leaves the wrong tensors in BF16 on one side of an RL run.
        ("decoder.layers.0.mlp.gate", "decoder.layers.0.mlp.gate", True),
        ("decoder.layers.0.mlp.gate", "decoder.layers.0.mlp.gate_up_proj", False),
        ("mlp.gate", "decoder.layers.0.mlp.gate", False),
        ("**.mlp.gate", "decoder.layers.0.mlp.gate", True),
        ("**.mlp.gate", "decoder.layers.0.mlp.gate_up_proj", False),
        ("**.layers.1.**", "decoder.layers.1.mlp.linear_fc1", True),
        ("**.layers.1.**", "decoder.layers.10.mlp.linear_fc1", False),
        ("decoder.layers.1", "decoder.layers.1.mlp.linear_fc1", False),
        # "." is a dot, not any character.
        ("decoder.layers.1.mlp", "decoder.layers.1xmlp", False),
        # * stays inside one part ...
        ("decoder.layers.*.mlp.linear_fc1", "decoder.layers.12.mlp.linear_fc1", True),
        ("decoder.layers.*.linear_fc1", "decoder.layers.12.mlp.linear_fc1", False),
        ("decoder.layers.*.mlp.linear_*", "decoder.layers.3.mlp.linear_fc2", True),
        # ... ** spans any number, none included, and whole parts only.
        ("decoder.layers.3.**.linear_fc1", "decoder.layers.3.linear_fc1", True),
        ("decoder.layers.3.**.linear_fc1", "decoder.layers.3.mlp.linear_fc1", True),
        ("decoder.layers.3.**.linear_fc1", "decoder.layers.3.mlp.experts.linear_fc1", True),
        ("decoder.layers.3.**.linear_fc1", "decoder.layers.3.mlp.my_linear_fc1", False),
        ("decoder.layers.3.**", "decoder.layers.3.mlp.experts.linear_fc1", True),
        ("decoder.layers.3.**", "decoder.layers.3", False),
        ("**", "decoder.layers.3.mlp", True),
        # Other characters of regular expressions mean themselves.
        ("decoder.layers.[0-9].mlp", "decoder.layers.3.mlp", False),
        ("decoder.layers.3.mlp|**", "decoder.layers.3.mlp", False),
    ],
)
def test_patterns_are_anchored(pattern, name, expected):
    assert _matches(pattern, name) is expected


def _policy(tmp_path, text: str) -> Policy:
    return resolve(config=_write(tmp_path, text), environ={})


def test_layer_numbers_count_from_1(tmp_path):
    # Prevents: rules that are off by one, since names count from 0 and Megatron from 1.
    policy = _policy(tmp_path, "layers: [{layer_numbers: [1, 10], recipe: bf16}]")
    bf16 = [
        index
        for index in range(12)
        if policy.recipe_for(f"decoder.layers.{index}.mlp.linear_fc1").name == "bf16"
    ]
    assert bf16 == [0, 9]


def test_a_rule_with_both_selectors_needs_both(tmp_path):
    # Prevents: "or", which would take a whole layer or every layer's fc2.
    text = "layers: [{match: '**.linear_fc2', layer_numbers: [2], recipe: bf16}]"
    policy = _policy(tmp_path, text)
    names = [f"decoder.layers.{i}.mlp.linear_fc{j}" for i in range(3) for j in (1, 2)]
    bf16 = [name for name in names if policy.recipe_for(name).name == "bf16"]
    assert bf16 == ["decoder.layers.1.mlp.linear_fc2"]


def test_first_rule_wins_also_over_the_switches(tmp_path):
    # Prevents: a later, general rule overriding the exception written above it.
    policy = _policy(
        tmp_path,
        """
recipe: nvfp4_per_token
shared_experts: bf16
last_layers_bf16: 0.5
layers:
- {match: decoder.layers.3.mlp.shared_experts.linear_fc1, recipe: mxfp8}
- {match: decoder.layers.3.**, recipe: nvfp4_per_tensor}
- {match: '**.linear_fc1', recipe: bf16}
""",
    )
    expected = {
        "decoder.layers.3.mlp.shared_experts.linear_fc1": "mxfp8",
        "decoder.layers.3.mlp.shared_experts.linear_fc2": "nvfp4_per_tensor",
        "decoder.layers.0.mlp.linear_fc1": "bf16",
        "decoder.layers.0.mlp.shared_experts.linear_fc2": "bf16",
        "decoder.layers.2.mlp.linear_fc2": "bf16",
        "decoder.layers.1.mlp.linear_fc2": "nvfp4_per_token",
    }
    assert {name: policy.recipe_for(name, 4).name for name in expected} == expected
    assert {recipe.name for recipe in policy.all_recipes} == set(expected.values())


def test_shared_experts_are_a_whole_part_of_the_name():
    # Prevents: routed experts, or a module that merely ends alike, losing their quantisation.
    policy = Policy(recipe=RECIPES["mxfp8"], shared_experts_bf16=True)
    names = {
        "decoder.layers.0.mlp.shared_experts.linear_fc1": "bf16",
        "decoder.layers.0.mlp.experts.linear_fc1": "mxfp8",
        "decoder.layers.0.mlp.my_shared_experts.linear_fc1": "mxfp8",
    }
    assert {name: policy.recipe_for(name).name for name in names} == names
    # Prevents: a check of "every recipe in use" that never sees the BF16 layers.
    assert policy.all_recipes == (RECIPES["mxfp8"], RECIPES["bf16"])
    assert Policy(recipe=RECIPES["mxfp8"]).all_recipes == (RECIPES["mxfp8"],)


def _num_bf16(fraction: float, num_layers: int) -> int:
    policy = Policy(recipe=RECIPES["mxfp8"], last_layers_bf16=fraction)
    names = [
        policy.recipe_for(f"decoder.layers.{i}.mlp", num_layers).name for i in range(num_layers)
    ]
    count = names.count("bf16")
    assert names[num_layers - count :] == ["bf16"] * count  # the last ones, not the first
    return count


@pytest.mark.parametrize(
    ("fraction", "num_layers", "expected"),
    # 0.15 * 48 = 7.2; the products marked * come out above the integer in floating point:
    # 0.07 * 100 = 7.000000000000001, 0.28 * 25 = 7.000000000000001.
    [
        (0.15, 48, 8),
        (0.15, 20, 3),
        (0.15, 1, 1),
        (0.07, 100, 7),  # *
        (0.28, 25, 7),  # *
        (0.0, 48, 0),
        (1.0, 48, 48),
        (1 / 3, 3, 1),
        (2 / 3, 3, 2),
    ],
)
def test_last_layers_round_up(fraction, num_layers, expected):
    # Prevents: one layer too many because 0.07 has no exact float, or rounding down.
    assert _num_bf16(fraction, num_layers) == expected


@given(percent=st.integers(0, 100), num_layers=st.integers(1, 130))
def test_last_layers_equal_exact_arithmetic(percent, num_layers):
    # Prevents: the same for every whole percentage.
    exact = -(-Fraction(percent, 100) * num_layers // 1)
    assert _num_bf16(percent / 100, num_layers) == exact


def test_last_layers_need_the_number_of_layers():
    # Prevents: a fraction of an unknown whole silently meaning none.
    policy = Policy(recipe=RECIPES["mxfp8"], last_layers_bf16=0.15)
    with pytest.raises(ValueError, match=r"decoder\.layers\.0\.mlp: last_layers_bf16 needs"):
        policy.recipe_for("decoder.layers.0.mlp")


PART = st.one_of(
    st.sampled_from(("decoder", "mtp", "layers", "mlp", "experts", "shared_experts", "linear_fc1")),
    st.integers(0, 99).map(str),
    st.text("abc_019", min_size=1, max_size=4),
)
NAME = st.lists(PART, min_size=1, max_size=7).map(".".join)
PATTERN = st.lists(
    st.one_of(PART, st.sampled_from(("*", "**", "linear_*"))), min_size=1, max_size=5
)
RULE = st.builds(
    LayerRule,
    recipe=st.sampled_from(list(RECIPES.values())),
    match=st.one_of(st.none(), PATTERN.map(".".join)),
    layer_numbers=st.lists(st.integers(1, 100), max_size=3).map(tuple),
)


@given(
    name=NAME,
    num_layers=st.integers(1, 100),
    recipe=st.sampled_from(list(RECIPES.values())),
    rules=st.lists(RULE, max_size=4).map(tuple),
    shared=st.booleans(),
    fraction=st.floats(0, 1),
)
def test_recipe_for_is_total_and_deterministic(name, num_layers, recipe, rules, shared, fraction):
    # Prevents: a layer without a recipe; one that differs between training and export; a recipe
    # in use that all_recipes, hence every check before the run, does not know.
    def policy():
        return Policy(
            recipe=recipe, rules=rules, shared_experts_bf16=shared, last_layers_bf16=fraction
        )

    chosen = policy().recipe_for(name, num_layers)
    assert chosen == policy().recipe_for(name, num_layers)
    assert chosen in policy().all_recipes


# --- faults of a policy file ----------------------------------------------------------------------


def test_all_faults_of_a_file_at_once(tmp_path):
    # Prevents: a fault that hides the next one; a setting that is misspelt and therefore ignored.
    file = _write(
        tmp_path,
        """
recpie: bf16
recipe: nvfp4_per_tokn
shared_experts: no
last_layers_bf16: 15
backend: gpu
strict: "yes"
moe_dataflow: fast
layers:
- {match: '**.linear_fc1'}
- {recipe: bf16}
- {match: '**', recipe: fp8}
- {layer_numbers: [0, 1], recipe: bf16}
- {layer_numbers: 3, recipe: bf16}
- {math: '**', layer_numbers: [1], recipe: bf16}
- {match: decoder..mlp, recipe: bf16}
- bf16
""",
    )
    with pytest.raises(ValueError) as caught:
        load_config(file)
    text = str(caught.value)
    assert text.startswith(f"policy file {file}:")
    for part in (
        "unknown key recpie; did you mean recipe?",
        "recipe: unknown recipe 'nvfp4_per_tokn'",
        "shared_experts=False",
        "last_layers_bf16=15: a fraction from 0 to 1",
        "backend='gpu'",
        "strict='yes': expected bool",
        "moe_dataflow='fast': use one of auto, fused, unfused",
        "layers[0]: recipe is missing",
        "layers[1]: give match",
        "layers[2].recipe: unknown recipe 'fp8'",
        "layers[3].layer_numbers=[0, 1]: whole numbers from 1",
        "layers[4].layer_numbers=3: expected list",
        "unknown key layers[5].math; did you mean match?",
        "layers[6].match='decoder..mlp'",
        "layers[7]: expected a mapping",
    ):
        assert part in text
    with pytest.raises(ValueError, match="unknown key recpie"):
        resolve(config=file, environ={})


@pytest.mark.parametrize("value", [".nan", "-0.1", "true", "'0.15'", "1.01"])
def test_fraction_must_be_one(tmp_path, value):
    # Prevents: NaN, which is neither below 0 nor above 1, and YAML's true, which is 1.
    with pytest.raises(ValueError, match="last_layers_bf16"):
        load_config(_write(tmp_path, f"last_layers_bf16: {value}"))


@pytest.mark.parametrize("text", ["- bf16", "recipe: [", "recipe: !!python/name:os.system ''"])
def test_not_a_policy(tmp_path, text):
    # Prevents: a traceback of the parser; YAML that runs code.
    file = _write(tmp_path, text)
    with pytest.raises(ValueError, match=f"policy file {file}"):
        load_config(file)


def test_unreadable_file(tmp_path):
    # Prevents: a traceback of the operating system's error.
    with pytest.raises(ValueError, match=r"cannot read policy file .*absent"):
        load_config(tmp_path / "absent.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot read policy file"):
        load_config(binary)


@pytest.mark.parametrize("left", [MXFP8, NVFP4Spec()], ids=str)
@pytest.mark.parametrize("right", [BF16, FORWARD], ids=str)
def test_wgrad_operands_of_two_paddings_are_refused(left, right):
    # Prevents: a padded gradient multiplied by activations that are not, token against other token.
    with pytest.raises(ValueError, match="of two formats"):
        Recipe(name="x", group="common", summary="", wgrad=Operands(left=left, right=right))
