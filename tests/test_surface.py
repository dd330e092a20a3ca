"""What users and other files may rely on: names, verbs, import directions, variables, README.

Runs without torch; what needs it says so in its skip.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_nvfp4
from megatron_nvfp4.__main__ import VERBS, main
from megatron_nvfp4.recipes import ALIASES, GROUPS, RECIPES, describe, resolve

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_nvfp4"
SOURCES = sorted(PACKAGE.rglob("*.py"))
README = ROOT / "README.md"


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# --- frozen names ---------------------------------------------------------------------------------


def test_recipe_names_are_frozen():
    # Prevents: a rename that breaks everybody's scripts and checkpoints' records.
    sweep = [f"sweep_e{e}m{m}" for e in (2, 3, 4, 5) for m in (1, 2, 3, 4)]
    groups = {
        "common": [
            "bf16",
            "nvfp4_per_token",
            "nvfp4_per_token_bf16_bwd",
            "nvfp4_per_token_dequant_bwd",
            "nvfp4_per_token_4over6",
        ],
        "reference": [
            "nvfp4_per_tensor",
            "nvfp4_pretrain",
            "nvfp4_w4a16",
            "nvfp4_w4a8",
            "mxfp8",
        ],
        "experimental": sweep,
    }
    assert tuple(groups) == GROUPS
    assert [name for names in groups.values() for name in names] == list(RECIPES)
    for group, names in groups.items():
        assert [r.name for r in RECIPES.values() if r.group == group] == names


def test_aliases_are_frozen():
    assert ALIASES == {
        "nvfp4": "nvfp4_per_token",
        "per_token": "nvfp4_per_token",
        "mini_nvfp4_per_token": "nvfp4_per_token",
        "4over6": "nvfp4_per_token_4over6",
        "pretrain": "nvfp4_pretrain",
        "w4a16": "nvfp4_w4a16",
        "w4a8": "nvfp4_w4a8",
    }


def test_verbs_are_frozen(capsys):
    assert VERBS == (
        "recipes",
        "describe",
        "doctor",
        "convert-hf-to-megatron",
        "convert-megatron-to-hf",
        "export-nvfp4",
        "verify-checkpoint",
        "compare",
        "diagnose",
        "sensitivity",
        "context-swap",
        "teacher-forced",
        "pretrain",
        "run",
        "profile",
    )
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    shown = [verb for verb in VERBS if re.search(rf"^    {verb}(?: |$)", text, re.MULTILINE)]
    assert shown == [*VERBS]


def test_public_names_are_frozen_and_load():
    # Prevents: a lazy name that points to nothing, found by the first user of it.
    assert sorted(megatron_nvfp4.__all__) == [
        "GroupedLinear",
        "LayerNormLinear",
        "Linear",
        "NVFP4Spec",
        "QuantizedTensor",
        "decode_exact",
        "dequantize",
        "get_qlinear_params",
        "quantize",
        "quantize_grouped",
    ]
    assert set(megatron_nvfp4.__all__) <= set(dir(megatron_nvfp4))
    with pytest.raises(AttributeError, match="has no attribute 'quantise'"):
        _ = megatron_nvfp4.quantise
    pytest.importorskip("torch", reason="torch is not installed")
    for name in megatron_nvfp4.__all__:
        assert getattr(megatron_nvfp4, name).__name__ == name


# --- import directions ----------------------------------------------------------------------------


LAYERS = {  # layer: layers it may import
    "recipes": set(),
    "quant": {"recipes"},
    "backends": {"quant", "recipes"},
    "modules": {"backends", "quant", "recipes"},
    "deterministic": {"backends", "quant", "recipes"},
    "mcore": {"modules", "deterministic", "recipes"},
    "rollout": {"backends", "quant", "recipes", "deterministic"},
    "checkpoint": {"backends", "quant", "recipes"},  # the quantisers a CPU has
    "sync": {"quant", "recipes"},
    "diagnostics": {"quant", "recipes", "rl"},  # the gate's rules are rl's
    "rl": set(),
    "cli": {"recipes"},  # stdlib only, like itself; the rest inside verbs
}
THIRD_PARTY = {  # layer: packages it may import at module level
    "recipes": set(),
    "quant": {"torch"},
    "backends": {"torch"},
    "modules": {"torch"},
    "deterministic": {"torch", "triton"},
    "mcore": {"torch", "megatron"},
    "rollout": {"torch"},
    "checkpoint": {"torch", "safetensors"},
    "sync": {"torch"},
    "diagnostics": {"torch"},
    "rl": {"torch"},
    "cli": set(),
}
INSIDE_FUNCTIONS = {  # layer: more packages, where only the function that needs them imports them
    "recipes": {"yaml"},
    "backends": {"transformer_engine", "transformer_engine_torch", "flashinfer", "sglang"},
    "deterministic": {"sglang", "sgl_kernel", "flashinfer", "flash_attn_interface", "safetensors"},
    "mcore": {"transformer_engine", "gpt_builders"},  # the latter stands in a Megatron checkout
    "rollout": {"sglang", "vllm", "flashinfer"},
    "rl": {"miles", "slime", "verl", "nemo_rl", "megatron"},
    "diagnostics": {"matplotlib", "numpy", "safetensors", "tokenizers"},
    "sync": {"sglang"},
    "checkpoint": {"rich"},
    "cli": {"torch", "rich"},
}


def _layer(module: str) -> str | None:
    """The layer a module of ours belongs to; None for the package itself, which imports nothing."""
    parts = module.split(".")
    if len(parts) == 1:
        return None
    return "cli" if parts[1] == "__main__" else parts[1]


def _imports(path: Path) -> Iterator[tuple[str, bool, int]]:
    """(absolute module, whether inside a function, line) of every import, importlib's included."""

    def visit(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool, int]]:
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for name in _names(child, path):
                yield name, inside, child.lineno
            yield from visit(child, inside or is_function)

    yield from visit(ast.parse(path.read_text()), False)


def _names(node: ast.AST, path: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = _module(path).split(".")
        if node.level:
            keep = len(base) - node.level + (path.name == "__init__.py")
            base = base[:keep]
            module = ".".join([*base, *(node.module or "").split(".")]).rstrip(".")
        else:
            module = node.module or ""
        return [f"{module}.{alias.name}" for alias in node.names]
    is_call = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module"
    if is_call and node.args and isinstance(node.args[0], ast.Constant):
        return [str(node.args[0].value)]
    return []


def _import_faults(path: Path) -> list[str]:
    layer = _layer(_module(path))
    faults = []
    for name, inside, line in _imports(path):
        root = name.split(".")[0]
        where = (
            f"{path.relative_to(ROOT)}:{line}: {'function' if inside else 'module'} level {name}"
        )
        if root == "megatron_nvfp4":
            target = name.split(".")[1] if "." in name else None
            # probes.py runs kernels; only the verb doctor imports it, inside its function.
            free = layer == "cli" and (inside or path.name == "probes.py")
            if target in LAYERS and target != layer and not free and target not in LAYERS[layer]:
                faults.append(f"{where}: {layer} must not import {target}")
            elif target in ("_C", "_build_info") and layer != "backends":
                faults.append(f"{where}: only backends may load the extension")
        elif root not in sys.stdlib_module_names:
            allowed = THIRD_PARTY.get(layer, set()) | (
                INSIDE_FUNCTIONS.get(layer, set()) if inside else set()
            )
            if root not in allowed and not (path.name == "probes.py" and root == "torch"):
                faults.append(f"{where}: {layer} must not import {root} there")
    return faults


def test_every_file_belongs_to_a_layer():
    # Prevents: a new folder that no rule below holds; files named for nothing they hold.
    unknown = {_layer(_module(path)) for path in SOURCES} - {None, *LAYERS}
    unknown -= {"_build_info"}  # written by setup.py
    assert not unknown
    vague = [path for path in SOURCES if path.stem in ("utils", "common", "helpers", "misc")]
    assert not vague


def test_imports_go_one_way():
    # Prevents: a kernel that asks for a recipe's name, a checkpoint tool that needs a GPU stack.
    faults = [fault for path in SOURCES for fault in _import_faults(path)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("file", "code", "part"),
    [
        ("quant/x.py", "from megatron_nvfp4.backends import get", "quant must not import backends"),
        ("quant/x.py", "from ..modules import Linear", "quant must not import modules"),
        ("recipes/x.py", "from .. import quant", "recipes must not import quant"),
        ("recipes/x.py", "import torch", "recipes must not import torch"),
        ("recipes/x.py", "import yaml", "recipes must not import yaml"),
        ("recipes/x.py", "def f():\n    import yaml", None),
        ("recipes/__init__.py", "from .registry import resolve", None),
        ("backends/x.py", "import sglang.srt", "backends must not import sglang"),
        ("backends/x.py", "def f():\n    import sglang.srt", None),
        ("checkpoint/x.py", "import megatron.core", "checkpoint must not import megatron"),
        ("modules/x.py", "import megatron_nvfp4._C", "only backends may load"),
        (
            "modules/x.py",
            "import importlib\nimportlib.import_module('megatron_nvfp4.mcore')",
            "mcore",
        ),
        (
            "rl/x.py",
            "def f():\n    from megatron_nvfp4.quant import quantize",
            "rl must not import",
        ),
        ("__main__.py", "import torch", "cli must not import torch"),
        ("__main__.py", "from megatron_nvfp4.modules import Linear", "cli must not import modules"),
        ("__main__.py", "def f():\n    from megatron_nvfp4.modules import Linear", None),
    ],
)
def test_the_import_check_sees_what_it_should(tmp_path, monkeypatch, file, code, part):
    # Prevents: a check that holds the tree to nothing.
    path = tmp_path / "megatron_nvfp4" / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    faults = _import_faults(path)
    assert (not faults) if part is None else (len(faults) == 1 and part in faults[0])


def test_importing_the_package_imports_nothing_heavy():
    # Prevents: `import megatron_nvfp4` taking seconds, or failing without torch.
    code = (
        "import sys, megatron_nvfp4, megatron_nvfp4.recipes, megatron_nvfp4.__main__\n"
        "heavy = ['torch', 'yaml', 'numpy', 'rich', 'megatron', 'argparse_never']\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


# --- variables ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_foreign_variables_are_listed_and_change_nothing(monkeypatch, value):
    # Prevents: a variable of another library deciding what our modules compute.
    baseline = resolve("nvfp4_pretrain", environ={})
    environ = {"MINITE_RECIPE": "nvfp4_pretrain"}
    if value is not None:
        environ["NVTE_NVFP4_DISABLE_RHT"] = value
    policy = resolve(environ=environ)
    assert policy.recipe == baseline.recipe
    assert policy.rules == baseline.rules
    foreign = describe(policy, environ)["foreign_environment"]["NVTE_NVFP4_DISABLE_RHT"]
    assert foreign == {"value": value, "read_by": "Transformer Engine modules only"}


def test_a_variable_changed_after_import_is_seen(monkeypatch):
    # Prevents: values frozen at import, which tests and notebooks then change in vain.
    monkeypatch.setenv("MINITE_RECIPE", "mxfp8")
    assert resolve().recipe.name == "mxfp8"
    monkeypatch.setenv("MINITE_RECIPE", "bf16")
    assert resolve().recipe.name == "bf16"
    monkeypatch.delenv("MINITE_RECIPE")
    assert resolve().recipe.name != "bf16"


READERS = {"megatron_nvfp4/recipes/registry.py", "setup.py"}
# What torchrun tells a process about its place, and how many threads it may use: no numerics.
PLACEMENT = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"}
LAUNCHING = {f"megatron_nvfp4/mcore/{name}.py" for name in ("launcher", "cpu_device", "run_record")}


def _environment_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, what) for every use of os.environ and its kin: "set", the name read, or "anything"."""
    whats: dict[int, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            is_set = isinstance(node.ctx, ast.Store | ast.Del)
            whats[id(node.value)] = "set" if is_set else _constant(node.slice)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            whats[id(node.comparators[0])] = _constant(node.left)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = _constant(node.args[0]) if node.args else "anything"
            is_set = node.func.attr in ("setdefault", "update")
            whats[id(node.func.value)] = "set" if is_set else name
            whats[id(node.func)] = name
    for node in ast.walk(tree):
        kin = ("environ", "environb", "getenv", "getenvb")
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            if any(alias.name in kin for alias in node.names):
                yield node.lineno, "anything"
        elif isinstance(node, ast.Attribute) and node.attr in kin:
            yield node.lineno, whats.get(id(node), "anything")


def _constant(node: ast.AST) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "anything"


def test_the_environment_is_read_in_one_place():
    # Prevents: hidden inputs: numbers that depend on a variable no description lists.
    faults = []
    for path in [*SOURCES, ROOT / "setup.py", *sorted((ROOT / "tools").rglob("*.py"))]:
        name = path.relative_to(ROOT).as_posix()
        allowed = PLACEMENT | {"set"} if name in LAUNCHING else set()
        for line, what in _environment_uses(ast.parse(path.read_text())):
            if name not in READERS and what not in allowed:
                faults.append(f"{name}:{line} reads {what}")
    assert not faults


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("os.environ['A']", ["A"]),
        ("os.environ[name]", ["anything"]),
        ("os.environ.get('A', '1')", ["A"]),
        ("os.getenv('A')", ["A"]),
        ("os.getenv(name)", ["anything"]),
        ("'A' in os.environ", ["A"]),
        ("dict(os.environ)", ["anything"]),
        ("from os import environ", ["anything"]),
        ("f(env=os.environ)", ["anything"]),
        ("os.environ['A'] = '1'", ["set"]),
        ("os.environ.setdefault('A', '1')", ["set"]),
        ("def f(environ):\n    return environ.get('A')", []),
    ],
)
def test_the_environment_check_sees_what_it_should(code, expected):
    # Prevents: a check that holds the tree to nothing.
    assert [what for _, what in _environment_uses(ast.parse(code))] == expected
