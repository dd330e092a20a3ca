"""What ran: run_meta.json of a training process, and one JSON line per step."""

import functools
import json
import logging
import os
import resource
import subprocess
import time
from collections import Counter
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

logger = logging.getLogger(__name__)
PACKAGES = ("megatron-nvfp4", "megatron-core", "torch", "transformer-engine")


def install(*, meta: Path | None, steps: Path | None, argv: list[str], on_cpu: bool) -> None:
    """Hook megatron.training so that it writes the records it was asked for.

    The first rank writes `meta`; the last one writes `steps`, for it has the loss under pipeline parallelism.
    In any case the first rank says in one line what is about to train, on all ranks.
    """
    for flag, path in (("--minite-run-meta", meta), ("--minite-step-log", steps)):
        if path is not None:
            require_writable(flag, path)
    from megatron.training import training

    _announce_before(training)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if steps is not None and rank == world - 1:
        _log_steps(training, steps)
    if meta is not None:
        _write_meta_after(training, meta, argv, on_cpu)


def _announce_before(training) -> None:
    original = training.train

    @functools.wraps(original)
    def train(forward_step_func, model, *args, **kwargs):
        import torch.distributed as dist

        layers, moe_layers = _layers_of_all_ranks(model)
        if dist.get_rank() == 0:
            print(f"megatron_nvfp4: {headline(model, layers, moe_layers)}", flush=True)
        return original(forward_step_func, model, *args, **kwargs)

    training.train = train


def _layers_of_all_ranks(model) -> tuple[dict, dict]:
    """layers_of and moe_layers_of over all ranks, each layer once. Every rank calls it."""
    import torch.distributed as dist

    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (layers_of(model), moe_layers_of(model)))
    merged = ({}, {})
    for kinds in of_ranks:
        for layers, found in zip(merged, kinds, strict=True):
            layers |= found | layers
    return merged


def headline(model, layers: dict[str, dict[str, str]], moe_layers: dict[str, dict]) -> str:
    """What the layers of all ranks compute, in a line: how many have which recipe and backward."""
    deterministic = _deterministic_run_of(model[0])
    if deterministic:
        found = deterministic.describe()
        ranks = "" if found["sampler"] == "tp1" else f", a sampler of {found['sampler']}"
        return f"deterministic {found['profile']}, {found['attention']} attention{ranks}"
    if not layers:
        return "no layer of this package"
    kinds = Counter((each["recipe"], each["backward"]) for each in layers.values())
    parts = [f"{recipe} (backward {backward}) in {n}" for (recipe, backward), n in kinds.items()]
    flows = Counter(each["dataflow"] for each in moe_layers.values())
    parts += [f"{name} dataflow in {n} MoE layers" for name, n in flows.items()]
    return ", ".join(parts)


def require_writable(flag: str, path: Path) -> None:
    """Raise ValueError before training for a record that could not be written after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise ValueError(
            f"{flag} {path}: {error.strerror}; give a file that can be written"
        ) from error


@contextmanager
def _warn_instead_of_failing(what: str):
    """A record is never worth a training run: a fault in it is one warning."""
    try:
        yield
    except Exception as error:
        logger.warning("%s was not written: %s: %s", what, type(error).__name__, error)


def _log_steps(training, path: Path) -> None:
    """Append a line a step; a resumed run goes on in the same file."""
    original = training.training_log
    last = time.perf_counter()

    @functools.wraps(original)
    def training_log(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs):
        nonlocal last
        now = time.perf_counter()
        line = {
            "iteration": int(iteration),
            "losses": {name: float(value) for name, value in loss_dict.items()},
            "seconds": now - last,
        }
        last = now
        with _warn_instead_of_failing(f"step {iteration} of {path}"), path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return original(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs)

    training.training_log = training_log


def _write_meta_after(training, path: Path, argv: list[str], on_cpu: bool) -> None:
    original = training.train

    @functools.wraps(original)
    def train(forward_step_func, model, *args, **kwargs):
        import torch.distributed as dist

        # Now, while every rank is here; at the end some may have failed.
        layers, moe_layers = _layers_of_all_ranks(model)
        try:
            return original(forward_step_func, model, *args, **kwargs)
        finally:
            if dist.get_rank() == 0:
                with _warn_instead_of_failing(str(path)):
                    record = collect(model, argv, on_cpu)
                    record["layers"] = layers | record["layers"]
                    record["moe_layers"] = moe_layers | record["moe_layers"]
                    write_atomically(path, json.dumps(record, indent=2) + "\n")

    training.train = train


def layers_of(model) -> dict[str, dict[str, str]]:
    """Recipe and backward of every layer of this rank whose numerics are decided, by model-wide name.

    Layers of a model with a deterministic forward are not run, and left out.
    """
    from .layer_numerics import MegatronLinear

    return {
        module.layer_name: {
            "recipe": module.qlinear_params.recipe.name,
            "backward": module.qlinear_params.recipe.backward,
        }
        for chunk in model
        if _deterministic_run_of(chunk) is None
        for module in chunk.modules()
        if isinstance(module, MegatronLinear) and module.qlinear_params is not None
    }


def moe_layers_of(model) -> dict[str, dict]:
    """What runs between router and combination of every MoE layer of this rank, by model-wide name."""
    from .moe import MiniTEMoELayer

    return {
        module.layer_name: module.describe_dataflow()
        for chunk in model
        if _deterministic_run_of(chunk) is None
        for module in chunk.modules()
        if isinstance(module, MiniTEMoELayer)
    }


def _deterministic_run_of(chunk):
    from .deterministic_run import run_of

    return run_of(chunk)


def collect(model, argv: list[str], on_cpu: bool) -> dict:
    """The record of this rank: numerics asked for and taken, backends that computed, versions, memory."""
    import torch
    from megatron.core.utils import get_attr_wrapped_model

    from megatron_nvfp4 import recipes
    from megatron_nvfp4.modules import used_backends

    from .arguments import policy_of

    config, layers = get_attr_wrapped_model(model[0], "config"), layers_of(model)
    deterministic = _deterministic_run_of(model[0])
    cuda = not on_cpu and torch.cuda.is_available()
    return {
        "transformer_impl": config.transformer_impl,
        "policy": recipes.describe(policy_of(config)) if layers or deterministic else None,
        "deterministic": deterministic and deterministic.describe(),
        "layers": layers,
        "moe_layers": moe_layers_of(model),
        "backends": used_backends(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else _peak_rss(),
        "threads": torch.get_num_threads(),
        "versions": _versions(),
        "revision": _revision(),
        "argv": argv,
    }


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or none of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _revision() -> str | None:
    """Git revision of this package's source tree, with + for local changes; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(root)]
        revision = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return revision + ("+" if changed else "")
