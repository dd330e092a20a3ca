"""What the tests of TRIAGE share: configurations, and the gate of a batch in ragged form."""

import math

import torch
from rl_oracle import as_ragged

from megatron_nvfp4.rl import TriageConfig, triage_gate

REPORTED = TriageConfig()
FORMS = [(norm, repair) for norm in ("response", "token") for repair in ("segment", "token")]
NAN, INF = math.nan, math.inf


def form(norm, repair_norm, **changes):
    return TriageConfig(norm=norm, repair_norm=repair_norm, **changes)


def gate_of(batch, config=REPORTED, dtype=torch.float64):
    tensors, offsets = as_ragged(batch, dtype)
    return triage_gate(*tensors, offsets=offsets, config=config)
