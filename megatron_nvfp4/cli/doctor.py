"""The verb `doctor`: what this machine has, and whether what claims to run does.

Works without torch, and then says so.
"""

import importlib.metadata
import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_nvfp4.recipes import (
    FOREIGN_VARIABLES,
    NVFP4Spec,
    Policy,
    Recipe,
    describe,
    environment_faults,
    resolve,
)

TESTED_MEGATRON = "0.19.2"
INSTALL = "pip install 'megatron-nvfp4[megatron]'"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding. status: "ok", "warn", "fail", or "none" for what is absent and may be."""

    name: str
    status: str
    detail: str


def examine(
    recipe: str | None,
    config: str | Path | None,
    *,
    device: str = "auto",
    as_json: bool = False,
    verbose: bool = False,
) -> int:
    """Print the report; 0 only if each recipe of the policy, or its profile, can run and no claim failed.

    recipe, config: explicit selectors or None; ValueError for faults in them.
    device: "auto" (a GPU if there is one), "cpu" or "cuda".
    """
    from megatron_nvfp4.deterministic.profiles import PROFILES, require_names

    if recipe in PROFILES:
        raise ValueError(
            f"{recipe} is a profile of the deterministic mode, not a recipe; give a policy file of "
            f"`deterministic: {recipe}` by --config"
        )
    faults = environment_faults()
    policy = None if faults else resolve(recipe, config)
    if policy:
        require_names(policy)
    checks = [Check(name="environment", status="fail", detail=fault) for fault in faults]
    checks += software_checks(verbose)
    target, device_checks = _device_checks(device)
    checks += device_checks
    reports = []
    if policy and target and policy.deterministic is not None:
        reports = [_profile_report(policy, target, verbose)]
    elif policy and target:
        from megatron_nvfp4.modules.params import QLinearParams

        reports = [
            _recipe_report(
                QLinearParams(recipe=r, backend=policy.backend, strict=policy.strict),
                target,
                verbose,
            )
            for r in policy.all_recipes
        ]
    ok = all(c.status != "fail" for c in checks) and bool(reports)
    ok = ok and all(report["runs"] and not report["failed"] for report in reports)
    notes = sampler_notes(policy) if policy else []
    if as_json:
        found = {"ok": ok, "checks": [asdict(check) for check in checks]}
        kind = "profiles" if policy and policy.deterministic is not None else "recipes"
        print(json.dumps({**found, "recipes": [], kind: reports, "notes": notes}, indent=2))
    else:
        print("\n".join(_lines(checks, reports, notes, ok, verbose)))
    return 0 if ok else 1


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def software_checks(verbose: bool) -> list[Check]:
    """Python, torch, Megatron, the optional packages and the compiled extension."""
    checks = [Check(name="python", status="ok", detail=platform.python_version())]
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
        torch = None
        detail = f"not usable ({error}); {INSTALL}"
        checks.append(Check(name="torch", status="fail", detail=detail))
    else:
        cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        detail = f"{torch.__version__}, {cuda}"
        checks.append(Check(name="torch", status="ok", detail=detail))
    megatron = _version("megatron-core")
    if megatron == TESTED_MEGATRON:
        status, detail = "ok", megatron
    else:
        found = megatron or "not installed"
        status, detail = "warn", f"{found}; tested with {TESTED_MEGATRON}: {INSTALL}"
    checks.append(Check(name="megatron-core", status=status, detail=detail))
    for package in ("transformer-engine", "apex"):
        version = _version(package)
        status, detail = ("ok", version) if version else ("none", "not installed (optional)")
        checks.append(Check(name=package, status=status, detail=detail))
    return checks + (_extension_checks(verbose) if torch else [])


def _extension_checks(verbose: bool) -> list[Check]:
    from megatron_nvfp4.backends import extension

    reasons = {"cpu": extension.why_not_cpu(verbose), "cuda": extension.why_not_cuda()}
    checks = []
    for name, reason in reasons.items():
        status, detail = ("none", reason) if reason else ("ok", "compiled extension loads")
        checks.append(Check(name=f"extension {name}", status=status, detail=detail))
    return checks


def _device_checks(device: str) -> tuple[object | None, list[Check]]:
    """The torch.device to probe on, or None, and what GPUs there are."""
    try:
        import torch
    except (ImportError, OSError):
        return None, []
    present = torch.cuda.is_available()
    checks = []
    for index in range(torch.cuda.device_count() if present else 0):
        gpu = torch.cuda.get_device_properties(index)
        detail = f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
        checks.append(Check(name=f"GPU {index}", status="ok", detail=detail))
    if not present:
        asked = device == "cuda"
        detail = "torch sees no CUDA GPU" + ("; use --device cpu" if asked else "")
        checks.append(Check(name="GPU", status="fail" if asked else "none", detail=detail))
        if asked:
            return None, checks
    kind = ("cuda" if present else "cpu") if device == "auto" else device
    return torch.device(kind), checks


def _recipe_report(params, target, verbose: bool) -> dict:
    """Probe every path of a recipe; plain data."""
    from megatron_nvfp4.cli.probes import paths_of, probe
    from megatron_nvfp4.modules.params import require_backend

    why_not = None
    try:
        require_backend(params, target)
    except RuntimeError as error:
        why_not = str(error)
    rows, stuck = [], []
    for path in paths_of(params):
        outcomes = probe(path, target, verbose=verbose)
        rows += [
            {
                "path": str(path),
                "backend": outcome.backend,
                "K": outcome.contraction,
                "status": outcome.status,
                "detail": outcome.detail,
            }
            for outcome in outcomes
        ]
        works = {o.backend for o in outcomes} - {o.backend for o in outcomes if o.status != "ok"}
        if not works:
            stuck.append(str(path))
    if why_not is None and stuck:
        why_not = "no backend runs " + "; ".join(stuck)
    return {
        "recipe": params.recipe.name,
        "backward": params.recipe.backward,
        "device": str(target),
        "runs": why_not is None,
        "why_not": why_not,
        "failed": sum(row["status"] == "failed" for row in rows),
        "paths": rows,
    }


def _profile_report(policy: Policy, target, verbose: bool) -> dict:
    """Run a small model by the policy's profile; plain data."""
    from megatron_nvfp4.cli.probes import probe_profile
    from megatron_nvfp4.deterministic.profiles import PROFILES

    profile = PROFILES[policy.deterministic]
    attention, ranks = policy.deterministic_attention, policy.deterministic_sampler
    status, detail = probe_profile(profile, attention, ranks, target, verbose=verbose)
    return {
        "profile": profile.name,
        "attention": attention,
        "sampler": ranks,
        "device": str(target),
        "runs": status == "ok",
        "why_not": detail or None,
        "failed": int(status == "failed"),
    }


def sampler_notes(policy: Policy) -> list[str]:
    """What a sampler must be told to compute the same bits, by the profile or the recipes of the policy."""
    if policy.deterministic is not None:
        return [
            "the sampler's settings were not looked at; ask --sampler FILE, with the same --config"
        ]
    notes = []
    nvfp4 = {
        spec
        for recipe in policy.all_recipes
        for spec in (recipe.fprop.left, recipe.fprop.right)
        if isinstance(spec, NVFP4Spec)
    }
    if not nvfp4:
        return notes
    foreign = describe(policy)["foreign_environment"]
    for name, reader in FOREIGN_VARIABLES.items():
        per_token_only = name.endswith("PER_TOKEN_ACTIVATION")
        if not reader.startswith("the sampler") or foreign[name]["value"] == "1":
            continue
        if not per_token_only or any(spec.outer == "token" for spec in nvfp4):
            notes.append(f"{name} is not 1 here; read by {reader}")
    for spec in sorted({s for s in nvfp4 if s.four_over_six}, key=str):
        notes.append(f"four-over-six must be the same in the sampler: {spec}")
    for recipe in policy.all_recipes:
        notes += _layout_notes(recipe)
    return notes


def _layout_notes(recipe: Recipe) -> list[str]:
    notes = []
    left, right = recipe.fprop.left, recipe.fprop.right
    if isinstance(right, NVFP4Spec) and right.block == (16, 16):
        notes.append(
            f"{recipe.name}: weights are quantised in 16x16 tiles; a sampler that quantises BF16 "
            "weights online uses 1x16 blocks and other bits: serve an exported checkpoint"
        )
    if isinstance(left, NVFP4Spec) and left.outer == "token":
        notes.append(
            f"{recipe.name}: where tensor parallelism splits K (linear_proj, linear_fc2) the row amax is "
            "taken over all ranks here; --quantization minite_nvfp4 takes it share by share, as a "
            "deterministic profile does (deterministic_sampler): at TP > 1 it has not this recipe's bits"
        )
    return notes


_MARKS = {"ok": "[ok]  ", "warn": "[warn]", "fail": "[FAIL]", "none": "[--]  "}


def _lines(
    checks: list[Check], reports: list[dict], notes: list[str], ok: bool, verbose: bool
) -> list[str]:
    lines = [f"{_MARKS[check.status]} {check.name}: {check.detail}" for check in checks]
    for report in reports:
        if "profile" in report:
            lines += ["", *_profile_lines(report)]
            continue
        title = f"recipe {report['recipe']}, backward {report['backward']}, on {report['device']}"
        lines += ["", title, *_backend_lines(report["paths"], verbose)]
        why_not = (report["why_not"] or "").replace("\n", "\n    ")
        lines.append("  can run" if report["runs"] else f"  cannot run: {why_not}")
    if notes:
        lines += ["", "notes", *(f"  - {note}" for note in notes)]
    return [*lines, "", f"doctor: {'ok' if ok else 'FAILED'}"]


def _profile_lines(report: dict) -> list[str]:
    title = "profile {profile}, {attention} attention, a sampler of {sampler}, on {device}"
    why_not = (report["why_not"] or "").replace("\n", "\n    ")
    verdict = f"  claimed, failed: {why_not}" if report["failed"] else f"  cannot run: {why_not}"
    if report["runs"]:
        verdict = "  can run: forward and backward of a small model, bits not compared"
        if report["device"] == "cpu":
            verdict += "; on a CPU its formulas run in torch, no sampler has these bits"
    return [title.format(**report), verdict]


def _backend_lines(rows: list[dict], verbose: bool) -> list[str]:
    """One line for each backend and answer; the paths of a failure, or with verbose of any."""
    answers: dict[tuple[str, str, str], list[str]] = {}
    totals: dict[str, int] = {}
    for row in rows:
        place = f"{row['path']} at K={row['K']}"
        answers.setdefault((row["backend"], row["status"], row["detail"]), []).append(place)
        totals[row["backend"]] = totals.get(row["backend"], 0) + 1
    lines = []
    words = {"ok": "ok", "failed": "claimed, failed: ", "no": "no: "}
    order = list(totals)
    for answer in sorted(answers, key=lambda key: order.index(key[0])):
        (backend, status, detail), places = answer, answers[answer]
        count = f" ({len(places)} of {totals[backend]} cases)"
        lines.append(f"  {backend}: {words[status]}{detail}{count}")
        if verbose or status == "failed":
            lines += [f"    {place}" for place in places]
    return lines
