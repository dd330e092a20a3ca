"""The command line as a user meets it: output, exit statuses, errors, and what passes through."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import megatron_nvfp4
from megatron_nvfp4.__main__ import main
from megatron_nvfp4.recipes import ALIASES, RECIPES, describe, resolve

ROOT = Path(__file__).parents[1]


def _run(*words: str, block: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess:
    """`python -m megatron_nvfp4 words` with the packages in `block` made impossible to import."""
    code = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({block!r}))\n"
        f"sys.argv = ['megatron_nvfp4', *{list(words)!r}]\n"
        "runpy.run_module('megatron_nvfp4', run_name='__main__', alter_sys=True)\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MINITE_")}
    environ.pop("DISABLE_BACKWARD_QUANT", None)
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_version_is_printed():
    done = _run("--version")
    assert (done.returncode, done.stdout) == (0, f"megatron-nvfp4 {megatron_nvfp4.__version__}\n")


NO_TORCH = ("torch", "megatron", "yaml", "rich")


@pytest.mark.parametrize("block", [("torch",), NO_TORCH])
@pytest.mark.parametrize("verb", ["recipes", "describe"])
def test_recipes_and_describe_need_no_torch(verb, block):
    # Prevents: having to install 5 GB to read a table.
    done = _run(verb, block=block)
    assert (done.returncode, done.stderr) == (0, "")
    assert "nvfp4_per_token" in done.stdout
    assert _run("describe", "sglang_det_bf16", block=block).returncode == 0
    data = json.loads(_run(verb, "--json", block=block).stdout)
    assert data == (
        {"recipes": data["recipes"], "aliases": ALIASES, "profiles": data["profiles"]}
        if verb == "recipes"
        else describe(resolve(environ={}), {})
        | {"foreign_environment": data["foreign_environment"]}
    )


def test_recipes_lists_each_with_what_it_needs():
    # Prevents: a recipe that exists and is not listed; needs that only the refusal names.
    lines = _run("recipes").stdout.splitlines()
    for recipe in RECIPES.values():
        (line,) = [line for line in lines if line.split()[:1] == [recipe.name]]
        assert recipe.backward in line
        assert str(recipe.fprop) in line
        assert all(need in line for need in recipe.requires)


def test_recipes_on_a_terminal(monkeypatch, capsys):
    # Prevents: the rich table, which no pipe ever prints, being broken.
    pytest.importorskip("rich", reason="rich is not installed")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["recipes"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in RECIPES)


@pytest.mark.parametrize("name", [*RECIPES, *ALIASES])
def test_describe_says_what_a_recipe_does(name, capsys):
    # Prevents: a description that leaves out a GEMM, the backward or what is saved.
    assert main(["describe", name]) == 0
    text = capsys.readouterr().out
    recipe = RECIPES[ALIASES.get(name, name)]
    for part in (
        f"recipe {recipe.name} ",
        *(f"{gemm}     {getattr(recipe, gemm)}" for gemm in ("fprop", "dgrad", "wgrad")),
        f"backward  {recipe.backward}",
        f"{recipe.saved['activations']:g} bits per activation",
        f"{recipe.saved['weight']:g} per weight",
        "recipe from explicit",
        "never quantised: router, embedding, output head",
    ):
        assert part in text


def test_describe_shows_the_policy_file(tmp_path, capsys):
    # Prevents: an exception for some layers that the description keeps to itself.
    pytest.importorskip("yaml", reason="pyyaml is not installed")
    file = tmp_path / "policy.yaml"
    file.write_text(
        "recipe: mxfp8\nlast_layers_bf16: 0.15\nshared_experts: bf16\nbackend: cpu\nlayers:\n"
        "- {match: '**.linear_fc2', layer_numbers: [1, 2], recipe: nvfp4_per_tensor}\n"
    )
    assert main(["describe", "--config", str(file)]) == 0
    text = capsys.readouterr().out
    for part in (
        "**.linear_fc2 in layers 1, 2: nvfp4_per_tensor, backward bf16",
        "shared experts: bf16",
        "last 0.15 of the layers, rounded up: bf16",
        "all others: mxfp8",
        "backend cpu",
        f"recipe from config file {file}",
        f"config from explicit: {file}",
    ):
        assert part in text


@pytest.mark.parametrize(
    "words",
    [("describe", "nvfp4_per_tokn"), ("doctor", "--recipe", "nvfp4_per_tokn")],
)
def test_a_users_mistake_is_one_line_and_status_2(words):
    # Prevents: a traceback for a typo.
    done = _run(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "did you mean nvfp4_per_token" in done.stderr
    assert "Traceback" not in done.stderr
    if words[0] == "doctor":
        assert "Traceback" in _run(*words, "--verbose").stderr


def test_missing_yaml_is_named(tmp_path):
    # Prevents: a traceback where a package is missing that only policy files need.
    file = tmp_path / "policy.yaml"
    file.write_text("recipe: bf16\n")
    done = _run("describe", "--config", str(file), block=("yaml",))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "yaml" in done.stderr
    assert "Traceback" not in done.stderr


def test_closed_pipe_is_no_traceback():
    # Prevents: `... describe | head -1` ending in BrokenPipeError.
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "megatron_nvfp4", "describe"]
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(command, cwd=ROOT, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.fixture
def launcher(monkeypatch):
    """A stand-in for the launcher that records its calls, or raises what it is told to."""
    calls = []
    module = types.ModuleType("megatron_nvfp4.mcore.launcher")
    package = types.ModuleType("megatron_nvfp4.mcore")
    package.launcher = module
    module.raises = None

    def record(*call):
        calls.append(call)
        if module.raises:
            raise module.raises

    module.pretrain = lambda argv: record("pretrain", argv)
    module.run = lambda script, argv: record("run", script, argv)
    module.calls = calls
    monkeypatch.setitem(sys.modules, "megatron_nvfp4.mcore", package)
    monkeypatch.setitem(sys.modules, "megatron_nvfp4.mcore.launcher", module)
    return module


@pytest.mark.parametrize(
    "flags",
    [[], ["--help"], ["-h"], ["--version"], ["--json", "--", "x"], ["--bf16", "-x", "--y=1"]],
)
def test_launchers_pass_everything_through(launcher, flags):
    # Prevents: --help, --version or "--" taken by our parser instead of Megatron's.
    assert main(["pretrain", *flags]) == 0
    assert main(["run", "pretrain_gpt.py", *flags]) == 0
    assert launcher.calls == [("pretrain", flags), ("run", "pretrain_gpt.py", flags)]


def test_run_without_a_script(launcher, capsys):
    # Prevents: an IndexError; a flag taken for a script.
    assert main(["run"]) == 2
    assert "run SCRIPT" in capsys.readouterr().err
    assert main(["run", "--help"]) == 0
    assert "run SCRIPT" in capsys.readouterr().out
    assert launcher.calls == []


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ("raise ValueError('K=40: pad it')", True),
        ("raise RuntimeError('K=40: pad it') from None", True),
        ("[].remove('K=40: pad it')", False),  # a ValueError out of C
        ("raise KeyError('K=40: pad it')", False),
        ("import no_such_module", False),
    ],
)
def test_only_a_refusal_of_ours_loses_the_traceback(launcher, capsys, body, refused):
    # Prevents: a crash in the middle of a training run reduced to one line; a wrong flag of ours
    # buried under one.
    exec(f"def pretrain(argv):\n    {body}", vars(launcher))
    if refused:
        assert main(["pretrain"]) == 2
        assert capsys.readouterr().err == "error: K=40: pad it\n"
    else:
        with pytest.raises((ValueError, KeyError, ModuleNotFoundError)):
            main(["pretrain"])


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_megatrons_own_errors_keep_their_traceback(launcher, error):
    # Prevents: the same for errors that code outside this package raises, here this file's.
    launcher.raises = error("out of memory")
    with pytest.raises(error, match="out of memory"):
        main(["run", "script.py"])


@pytest.mark.parametrize("missing", ["torch", "megatron"])
def test_launchers_name_what_is_not_installed(missing):
    # Prevents: a traceback that ends in "No module named ...".
    done = _run("pretrain", "--help", block=(missing,))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: pretrain: {missing} is not installed")
    assert "pip install 'megatron-nvfp4[megatron]'" in done.stderr


def test_doctor_works_without_torch():
    # Prevents: the tool that explains a broken installation needing an intact one.
    done = _run("doctor", block=("torch",))
    assert (done.returncode, done.stderr) == (1, "")
    assert "torch: not usable" in done.stdout
    assert "pip install 'megatron-nvfp4[megatron]'" in done.stdout
    report = json.loads(_run("doctor", "--json", block=("torch",)).stdout)
    assert report["ok"] is False
    assert report["recipes"] == []


def test_describe_lists_every_variable_that_changes_numbers():
    # Prevents: half a contract: NVTE has more switches than the two that people remember.
    text = _run("describe", NVTE_NVFP4_DISABLE_RHT="1", MINITE_RECIPE="nvfp4_pretrain").stdout
    assert "MINITE_RECIPE = 'nvfp4_pretrain'" in text
    assert "recipe from MINITE_RECIPE" in text
    assert "NVTE_NVFP4_DISABLE_RHT = '1': Transformer Engine modules only" in text
    for name in (
        "MINITE_CONFIG",
        "MINITE_BACKEND",
        "DISABLE_BACKWARD_QUANT",
        "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
        "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
        "NVTE_NVFP4_ROW_SCALED_ACTIVATION",
        "NVTE_NVFP4_4OVER6",
        "NVTE_BACKWARD_OVERRIDE",
        "NVTE_USE_FAST_MATH",
        "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH",
        "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION",
    ):
        assert f"{name} (unset)" in text or f"{name} = " in text


def test_a_misspelt_variable_is_an_error_with_the_near_name():
    # Prevents: MINITE_RECIPES ignored and the default recipe trained.
    done = _run("describe", MINITE_RECIPES="bf16", MINITE_BAKEND="cpu", DISABLE_BACKWARD_QUANT="2")
    assert done.returncode == 2
    assert "MINITE_RECIPES='bf16'; did you mean MINITE_RECIPE?" in done.stderr
    assert "MINITE_BAKEND='cpu'; did you mean MINITE_BACKEND?" in done.stderr
    assert "DISABLE_BACKWARD_QUANT='2'" in done.stderr
