"""Deterministic mode: the learner computes what SGLang's deterministic engine computes, bit for bit.

`profiles` says what is computed and which runs can honour it, `ops` holds the operators, `model`
assembles them, `parity` stops a step whose log-probabilities are not the sampler's. Importing this
imports no torch; names load on first use.
"""

import importlib

_LAZY = {
    "PROFILES": "profiles",
    "ParityError": "parity",
    "Profile": "profiles",
    "RunFacts": "profiles",
    "capture": "parity",
    "check_parity": "parity",
    "faults": "profiles",
    "require": "profiles",
}
__all__ = sorted(_LAZY)


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_LAZY]
