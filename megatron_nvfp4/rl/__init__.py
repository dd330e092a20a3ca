"""TRIAGE, importance corrections and Score Centering as pure functions, and adapters for RL frameworks.

Importing this imports no torch: names load on first use. The adapters are modules of their own.
"""

import importlib

_LAZY = {
    "GateCalibration": "triage",
    "TriageConfig": "triage",
    "UpdateTotals": "triage",
    "calibrate_gate": "corrections",
    "check_finite": "layout",
    "geometric_weights": "corrections",
    "icepop_weights": "corrections",
    "mis_weights": "corrections",
    "recenter_lengths": "corrections",
    "score_centering_term": "score_centering",
    "sequence_mask": "corrections",
    "sequence_weights": "corrections",
    "tis_weights": "corrections",
    "triage_advantages": "triage",
    "triage_gate": "triage",
    "triage_repair_loss": "triage",
    "triage_totals": "triage",
}
__all__ = sorted(_LAZY)


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_LAZY]
