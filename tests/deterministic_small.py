"""Small Qwen3 checkpoints as dictionaries, the same bytes on every machine, for the deterministic tests."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from parity_model import DENSE, MOE, random_weights  # noqa: F401


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


FA3_MODULES = ("sgl_kernel.flash_attn", "flash_attn_interface")
NO_FA3 = pytest.mark.skipif(
    not any(map(_is_installed, FA3_MODULES)),
    reason="FlashAttention 3 (sgl_kernel.flash_attn or flash_attn_interface) is not installed",
)
