"""The ways into Megatron: `pretrain`, `run`, a patched tree, --spec; and what they must leave alone.

All training runs are of one rank and start together, two at a time, with the first test that needs one.
MEGATRON_LM=DIR (a checkout of core_v0.19.0) adds the runs of its own pretrain_gpt.py.
"""

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron_runs import (
    MINITE,
    MODEL,
    MOE,
    PRETRAIN,
    ROOT,
    Outcomes,
    Training,
    World,
    every_check,
    require_megatron,
    run_ranks,
    run_world,
    train,
)

require_megatron()
NUM_STEPS = 4
SMALL_MOE = (*MOE, *MINITE, "--minite-recipe", "nvfp4_per_token")
CHECKOUT = os.environ.get("MEGATRON_LM")
SCRIPTS = ("pretrain_gpt.py", "gpt_builders.py", "model_provider.py")
needs_checkout = pytest.mark.skipif(
    not CHECKOUT, reason="MEGATRON_LM is not set to a Megatron-LM checkout of core_v0.19.0"
)

# A user's script: imports by name, a module beside it, its own layer spec through Megatron's function.
SCRIPT = """
import sys
import gpt_builders
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron_nvfp4.mcore import pretrain_gpt as library


def layer_spec(config, vp_stage=None):
    single = gpt_builders._get_transformer_layer_spec(False, config.transformer)
    assert isinstance(single, TransformerBlockSubmodules), single
    return get_gpt_decoder_block_spec(config.transformer, use_transformer_engine=False, vp_stage=vp_stage)


if __name__ == "__main__":
    assert sys.argv[0] == __file__, sys.argv
    args = parse_and_validate_args()
    config = gpt_config_from_args(args)
    config.transformer_layer_spec = layer_spec
    library.build_datasets.is_distributed = True
    pretrain(
        pretrain_cfg_container_from_args(args, config),
        library.build_datasets,
        ModelType.encoder_or_decoder,
        library.forward_step,
    )
"""
BUILDERS = """
def _get_transformer_layer_spec(use_te, config):
    raise AssertionError("the launcher did not take over gpt_builders.py")
"""
# A program that knows the CPU shim alone: argv[1:] is a script and its arguments, or --wheel and arguments.
PLAIN = """
import runpy
import sys
from pathlib import Path

from megatron_nvfp4.mcore import cpu_device, launcher, run_record

cpu_device.install()
options, rest = launcher._own_options().parse_known_args(sys.argv[1:])
script, *arguments = rest
for flag, value in cpu_device.REQUIRED_OPTIONS.items():
    arguments += [flag] if value is None else [flag, str(value)]
sys.argv = [script, *arguments]
if script != "--wheel":
    sys.path.insert(0, str(Path(script).parent))
from megatron.core.datasets import utils

if not (Path(utils.__file__).parent / "Makefile").exists():
    utils.compile_helpers = lambda: None
run_record.install(meta=options.minite_run_meta, steps=options.minite_step_log, argv=[], on_cpu=True)
if script == "--wheel":
    from megatron_nvfp4.mcore.pretrain_gpt import main

    main()
else:
    runpy.run_path(script, run_name="__main__")
"""


# --- the runs --------------------------------------------------------------------------------------------


class Runs:
    """Training runs by name, in a pool of two."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = ThreadPoolExecutor(2)
        self.futures: dict[str, Future] = {}
        (folder / "plain.py").write_text(PLAIN)
        script = folder / "script" / "mine.py"
        script.parent.mkdir()
        script.write_text(SCRIPT)
        (script.parent / "gpt_builders.py").write_text(BUILDERS)
        patched = _patched_wheel(folder / "patched")
        saved = folder / "saved"
        plain = (folder / "plain.py", "--wheel")
        self._start(
            "pretrain", *SMALL_MOE, "--save", saved, "--save-interval", 2, after=self._resume
        )
        self._start("run", *SMALL_MOE, program=("-m", "megatron_nvfp4", "run", script))
        self._start("patched_plain", *SMALL_MOE, program=plain, PYTHONPATH=patched)
        self._start("patched_hooks", *SMALL_MOE, PYTHONPATH=patched)
        self._start("local", *MOE, "--transformer-impl", "local")
        self._start("local_plain", *MOE, "--transformer-impl", "local", program=plain)
        self._start("spec", *SMALL_MOE, "--transformer-impl", "local", *_words(SPEC_FLAGS))
        self._start("everything", *SMALL_MOE, *_words(HARD_FLAGS))
        if CHECKOUT:
            self._start_checkout(patched=False)
            self._start_checkout(patched=True)

    def __getitem__(self, name: str) -> Training:
        return self.futures[name].result()

    def _start(
        self, name: str, *arguments, steps=NUM_STEPS, program=PRETRAIN, after=None, **changes
    ):
        def work() -> Training:
            done = train(self.folder / name, *arguments, steps=steps, program=program, **changes)
            if after is not None:
                after()
            return done

        self.futures[name] = self.pool.submit(work)

    def _resume(self) -> None:
        saved = self.folder / "saved"
        self._start("resumed", *SMALL_MOE, "--load", saved, "--ckpt-step", 2)

    def _start_checkout(self, *, patched: bool) -> None:
        tree = self.folder / ("checkout_patched" if patched else "checkout")
        tree.mkdir()
        for name in SCRIPTS:
            shutil.copy(Path(CHECKOUT) / name, tree)
        _copy_megatron(Path(CHECKOUT) / "megatron", tree)
        for helpers in (_megatron() / "core/datasets").glob("helpers_cpp*.so"):
            shutil.copy(helpers, tree / "megatron/core/datasets")
        # Built for this Python already; `make` would ask whatever python3-config comes first.
        (tree / "megatron/core/datasets/Makefile").unlink()
        script = tree / SCRIPTS[0]
        if patched:
            _patch(tree)
            self._start("checkout_patched", *SMALL_MOE, program=(self.folder / "plain.py", script))
        else:
            program = ("-m", "megatron_nvfp4", "run", script)
            self._start("checkout", *SMALL_MOE, program=program, PYTHONPATH=f"{ROOT}")


SPEC_FLAGS = "--spec megatron_nvfp4.mcore gpt_spec"
HARD_FLAGS = (
    "--deterministic-mode --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)


def _words(flags: str) -> list[str]:
    return flags.split()


def _megatron() -> Path:
    """Folder of the installed megatron package (a namespace: it has no __init__.py)."""
    return Path(next(iter(importlib.util.find_spec("megatron").submodule_search_locations)))


def _copy_megatron(source: Path, target: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, target / "megatron", ignore=ignored)


def _patch(tree: Path) -> None:
    tool = (sys.executable, ROOT / "tools/apply_patches.py", "--megatron", tree)
    subprocess.run(list(map(str, tool)), check=True, capture_output=True)


def _patched_wheel(tree: Path) -> str:
    """A patched copy of the installed wheel; the search path that puts it first."""
    _copy_megatron(_megatron(), tree)
    _patch(tree)
    return f"{tree}{os.pathsep}{ROOT}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    started = Runs(tmp_path_factory.mktemp("runs"))
    yield started
    started.pool.shutdown(cancel_futures=True)


# --- pretrain ----------------------------------------------------------------------------------------------


def test_pretrain_trains_and_says_what_ran(runs):
    # Prevents: a run that does not learn, or whose record cannot be trusted to say what computed it.
    run = runs["pretrain"]
    assert len(run.losses) == NUM_STEPS
    assert all(map(math.isfinite, run.losses))
    assert run.losses[-1] < run.losses[0] - 0.1
    meta = run.meta
    assert meta["transformer_impl"] == "minite"
    assert meta["device"] == "cpu"
    assert set(meta["layers"]) == {
        f"decoder.layers.{index}.{name}"
        for index in range(2)
        for name in (
            "self_attention.linear_qkv",
            "self_attention.linear_proj",
            "mlp.experts.linear_fc1",
            "mlp.experts.linear_fc2",
        )
    }
    assert {layer["recipe"] for layer in meta["layers"].values()} == {"nvfp4_per_token"}
    assert {layer["backward"] for layer in meta["layers"].values()} == {"mxfp8"}
    operations = {entry["op"] for entry in meta["backends"]}
    assert {"quantize", "gemm", "grouped_gemm", "grouped_wgrad"} <= operations
    assert meta["peak_memory_bytes"] > 1 << 20
    assert "torch" in meta["versions"]
    assert "--transformer-impl" in meta["argv"]


def test_resumed_run_repeats_the_losses(runs):
    # Prevents: a torch_dist checkpoint that loses weights, optimizer, random state or data position.
    first = runs["pretrain"]
    assert runs["resumed"].losses == first.losses[2:]


def test_deterministic_recompute_and_overlap_change_nothing(runs):
    # Prevents: stale weights in the recomputed forward, gradients reduced before they are whole, or a
    # parameter read before it is gathered. The reduced sums are the same on one rank: equal to the digit.
    assert runs["everything"].losses == runs["pretrain"].losses


def test_wrong_configuration_is_one_error_without_traceback():
    # Prevents: a traceback through Megatron for a user's mistake, or one mistake per start.
    sizes = ("--moe-ffn-hidden-size", "40", "--kv-channels", "20", "--hidden-size", "72")
    (output,) = run_ranks((*PRETRAIN, *MODEL, "--train-iters", 1, *SMALL_MOE, *sizes), check=False)
    assert "Traceback" not in output
    error = output[output.index("error: ") :]
    for named in ("linear_qkv", "linear_proj", "K=72", "experts.linear_fc2", "K=40"):
        assert named in error, error


def test_absent_gpu_is_said():
    # Prevents: training on the CPU when a GPU was asked for.
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU, so --minite-device cuda is no error here")
    (output,) = run_ranks((*PRETRAIN, *MODEL, *SMALL_MOE, "--minite-device", "cuda"), check=False)
    assert "torch sees no GPU" in output


def test_help_names_the_launchers_options():
    # Prevents: options that only the documentation knows, as Megatron's parser never sees them.
    (output,) = run_ranks((*PRETRAIN, "--help"))
    own, _, megatrons = output.partition("usage: python -m megatron_nvfp4 pretrain [-h]")
    for option in ("--minite-device", "--minite-run-meta", "--minite-step-log", "--minite-capture"):
        assert option in own, option
        assert option not in megatrons, option
    assert "--minite-recipe" in megatrons


def test_a_capture_is_refused_where_nothing_reads_it():
    # Prevents: a run that captures nothing, as the option was given to the function and not to the command.
    from megatron_nvfp4.mcore.launcher import pretrain

    with pytest.raises(ValueError, match=r"--minite-capture c\.yaml: is an option of"):
        pretrain(["--minite-capture", "c.yaml"])


# --- run, patched trees, local ----------------------------------------------------------------------------


def test_a_run_says_what_its_layers_compute(runs):
    # Prevents: a run of another recipe than was meant, which only a record would have told.
    (line,) = re.findall(r"^megatron_nvfp4: (.*)", runs["pretrain"].outputs[0], re.MULTILINE)
    assert line.startswith("nvfp4_per_token (backward mxfp8) in 8, "), line
    assert line.endswith("dataflow in 2 MoE layers")
    assert "megatron_nvfp4: no layer of this package\n" in runs["local"].outputs[0]


def test_run_equals_pretrain(runs):
    # Prevents: hooks after the script's imports, or another model from a script than from `pretrain`.
    assert runs["run"].losses == runs["pretrain"].losses
    assert runs["run"].meta["layers"] == runs["pretrain"].meta["layers"]


def test_patched_tree_needs_no_launcher(runs):
    # Prevents: patch and hooks drifting apart.
    assert runs["patched_plain"].losses == runs["pretrain"].losses
    assert runs["patched_plain"].meta["layers"] == runs["pretrain"].meta["layers"]


def test_hooks_do_no_harm_on_a_patched_tree(runs):
    # Prevents: options added twice, or specs built twice, where users patch and use the launcher.
    assert runs["patched_hooks"].losses == runs["pretrain"].losses


def test_local_is_left_alone(runs):
    # Prevents: the launcher changing what other values of --transformer-impl compute.
    assert runs["local"].losses == runs["local_plain"].losses
    assert runs["local"].meta["layers"] == {}
    assert runs["local"].losses != runs["pretrain"].losses


def test_spec_flag_on_local(runs):
    # Prevents: no route for frameworks that only offer --spec. The final norm is Megatron's own there,
    # rounded differently: a few BF16 steps (2^-8) of a logit, hence a loss within 2^-7.
    spec, minite = runs["spec"], runs["pretrain"]
    assert spec.meta["transformer_impl"] == "local"
    assert spec.meta["layers"] == minite.meta["layers"]
    for found, expected in zip(spec.losses, minite.losses, strict=True):
        assert abs(found - expected) < 2**-7
    assert spec.losses != runs["local"].losses


@needs_checkout
def test_unpatched_checkout(runs):
    # Prevents: the launcher working with the wheel only.
    assert runs["checkout"].losses == runs["pretrain"].losses


@needs_checkout
def test_patched_checkout(runs):
    # Prevents: the patch working with the wheel only.
    assert runs["checkout_patched"].losses == runs["pretrain"].losses


# --- pure functions -----------------------------------------------------------------------------------------


def test_what_the_cpu_needs_gives_way_to_the_user():
    # Prevents: our choice overriding a flag that was given, or reaching a parser that is not Megatron's.
    import argparse

    from megatron_nvfp4.mcore.cpu_device import set_parser_defaults

    parser = argparse.ArgumentParser()
    set_parser_defaults(parser)
    assert vars(parser.parse_args([])) == {}
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--distributed-backend", default="nccl")
    parser.add_argument("--no-rope-fusion", dest="rope_fusion", action="store_false")
    set_parser_defaults(parser)
    wanted = {"num_workers": 0, "distributed_backend": "gloo", "rope_fusion": False}
    assert vars(parser.parse_args([])) == wanted
    assert parser.parse_args(["--num-workers=3"]).num_workers == 3


def test_a_record_that_cannot_be_written_is_refused_before_training(tmp_path):
    # Prevents: hours of training that end in an error of the record instead of a checkpoint.
    from megatron_nvfp4.mcore.run_record import install

    with pytest.raises(ValueError, match=r"--minite-run-meta .*Is a directory"):
        install(meta=tmp_path, steps=None, argv=[], on_cpu=True)


# --- --spec in its calling conventions, and hooks, in a child process --------------------------------------


def check_spec_conventions(folder):
    """Prevents: a --spec function that only one framework can call."""
    import megatron_small as small
    import torch
    from megatron.core.transformer.module import MegatronModule

    from megatron_nvfp4.mcore import gpt_spec

    config = small.new_config("moe_grouped", moe_layer_freq=[0, 1])
    model_config = SimpleNamespace(transformer=config)  # stands for a GPTModelConfig
    specs = {
        "models/gpt.py": gpt_spec(model_config, vp_stage=None),
        "models/gpt.py, by position": gpt_spec(model_config, 0),
        "without vp_stage": gpt_spec(model_config),
        "args, config, vp_stage": gpt_spec(SimpleNamespace(), config, None),
        "a TransformerConfig": gpt_spec(config),
        "as it is": gpt_spec,
    }
    expected = small.new_model(small.new_config("moe_grouped", moe_layer_freq=[0, 1]))
    small.fill(expected)
    for convention, spec in specs.items():
        model = small.new_model(config, spec)
        small.fill(model)
        assert isinstance(model.decoder.layers[0], MegatronModule)
        names = {name for name, _ in model.named_parameters()}
        assert names == {name for name, _ in expected.named_parameters()}, convention
        found, wanted = small.loss_of(model), small.loss_of(expected)
        if spec is gpt_spec:  # the final norm is Megatron's: BF16 roundings
            assert torch.isclose(found, wanted, rtol=0, atol=2**-7), convention
        else:
            assert found == wanted, convention
    with pytest.raises(ValueError, match="gpt_spec: called with int"):
        gpt_spec(3)


def check_hooks_are_idempotent(folder):
    """Prevents: wrappers around wrappers, or a value added to --transformer-impl twice."""
    from typing import get_args

    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_nvfp4.mcore import MiniTESpecProvider, hooks

    field = TransformerConfig.__dataclass_fields__["transformer_impl"]
    before = get_args(field.type)
    assert "minite" not in before
    hooks.install()
    first = (field.type, backends.get_backend, gpt_layer_specs.get_gpt_decoder_block_spec)
    hooks.install()
    assert (field.type, backends.get_backend, gpt_layer_specs.get_gpt_decoder_block_spec) == first
    assert get_args(field.type) == (*before, "minite")
    assert isinstance(backends.get_backend("minite"), MiniTESpecProvider)
    assert isinstance(backends.get_backend("local"), backends.LocalSpecProvider)


WORLDS = {"specs": World(checks=(check_spec_conventions, check_hooks_are_idempotent))}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    return Outcomes(Path(__file__), WORLDS, tmp_path_factory.mktemp("specs"))


@every_check(WORLDS)
def test_in_child(outcomes, world, check):
    """What the check's docstring says."""
    outcomes.require(world, check)


if __name__ == "__main__":
    run_world(WORLDS)
