"""`doctor --sampler FILE`: whether a sampler's settings are those of a deterministic profile."""

import json
from pathlib import Path


def examine_sampler(
    path: str | Path | None,
    profile_name: str | None = None,
    ranks: str | None = None,
    *,
    config: str | Path | None = None,
    as_json: bool = False,
) -> int:
    """Print what contradicts the profile in FILE, the sampler's `env` and command line; 0 where nothing
    does, else 1.

    profile_name, ranks, and the learner's attention come from the policy (config, or the environment's)
    where they are not given, and without a profile there are sglang_det_bf16, tp1 and any attention that
    it has. ValueError without a file (path None), for an unknown profile, one that has no operators here,
    ranks that are none or a file that holds no settings, OSError for a file that cannot be read.
    """
    from megatron_nvfp4.deterministic.profiles import PROFILES, SamplerRanks
    from megatron_nvfp4.deterministic.sampler import SamplerSettings, sampler_faults
    from megatron_nvfp4.recipes import resolve

    if path is None:
        options = {"--profile": profile_name, "--sampler-ranks": ranks}
        given = " ".join(f"{option} {value}" for option, value in options.items() if value)
        raise ValueError(
            f"doctor {given}: says what a sampler must compute; give the sampler's environment and command "
            "line by --sampler FILE, or for the learner's side a policy of it (deterministic) by --config"
        )
    policy = resolve(config=config)
    is_learners = policy.deterministic is not None
    profile_name = profile_name or policy.deterministic or "sglang_det_bf16"
    ranks = ranks or policy.deterministic_sampler
    profile = PROFILES.get(profile_name)
    if profile is None or profile.missing:
        usable = ", ".join(p.name for p in PROFILES.values() if not p.missing)
        raise ValueError(f"doctor: profile {profile_name!r} cannot be run; use one of {usable}")
    try:
        settings = SamplerSettings.parse(Path(path).read_text(encoding="utf-8-sig"))
    except ValueError as error:  # of the bytes too
        raise ValueError(f"doctor --sampler {path}: {error}") from error
    faults = sampler_faults(profile, settings, ranks)
    attention = settings.arguments.get("attention_backend")
    if is_learners and policy.deterministic != profile_name:
        faults.append(
            f"the policy's learner computes {policy.deterministic}, not {profile_name}; give one of them"
        )
    if is_learners and SamplerRanks.parse(ranks) != SamplerRanks.parse(
        policy.deterministic_sampler
    ):
        faults.append(
            f"the policy's learner computes a sampler of {policy.deterministic_sampler}, not of {ranks}; "
            "give one of them (deterministic_sampler)"
        )
    if is_learners and attention not in (None, policy.deterministic_attention):
        faults.append(
            f"--attention-backend={attention}: the policy's learner has {policy.deterministic_attention}; "
            "give both the same (deterministic_attention)"
        )
    learner = learner_arguments(profile_name, attention, ranks)
    unjudged = settings.not_judged()
    if as_json:
        record = {"ok": not faults, "profile": profile.name, "ranks": ranks, "faults": faults}
        print(json.dumps(record | {"not_judged": unjudged, "learner": learner}, indent=2))
    else:
        print(f"sampler of {profile.name}, {ranks}: {profile.summary}")
        good = f"[ok]   no setting that is judged disagrees\n       the learner: {learner}"
        print("\n".join(f"[FAIL] {fault}" for fault in faults) or good)
        if unjudged:
            print(f"not judged: {', '.join(unjudged)}")
        print(f"doctor: {'FAILED' if faults else 'ok'}")
    return 1 if faults else 0


def learner_arguments(profile_name: str, attention: str | None, ranks: str) -> str:
    """What a Megatron run is started with, to compute what such a sampler does."""
    return (
        f"--minite-deterministic {profile_name} --minite-deterministic-attention {attention} "
        f"--minite-deterministic-sampler {ranks}"
    )
