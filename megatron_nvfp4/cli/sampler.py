"""`doctor --sampler FILE`: whether a sampler's settings are those of a deterministic profile."""

import json
from pathlib import Path


def examine_sampler(
    path: str | Path, profile_name: str, ranks: str = "tp1", *, as_json: bool = False
) -> int:
    """Print what contradicts the profile in FILE, the sampler's `env` and command line; 0 where nothing
    does, else 1.

    ranks: what the learner is told of the sampler, its deterministic_sampler. ValueError for an unknown
    profile, one that has no operators here, ranks that are none or a file that holds no settings, OSError
    for a file that cannot be read.
    """
    from megatron_nvfp4.deterministic.profiles import PROFILES
    from megatron_nvfp4.deterministic.sampler import SamplerSettings, sampler_faults

    profile = PROFILES.get(profile_name)
    if profile is None or profile.missing:
        usable = ", ".join(p.name for p in PROFILES.values() if not p.missing)
        raise ValueError(f"doctor: profile {profile_name!r} cannot be run; use one of {usable}")
    try:
        settings = SamplerSettings.parse(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # of the bytes too
        raise ValueError(f"doctor --sampler {path}: {error}") from error
    faults = sampler_faults(profile, settings, ranks)
    if as_json:
        print(
            json.dumps(
                {"ok": not faults, "profile": profile.name, "ranks": ranks, "faults": faults},
                indent=2,
            )
        )
    else:
        print(f"sampler of {profile.name}, {ranks}: {profile.summary}")
        print("\n".join(f"[FAIL] {fault}" for fault in faults) or "[ok]   every setting agrees")
        print(f"doctor: {'FAILED' if faults else 'ok'}")
    return 1 if faults else 0
