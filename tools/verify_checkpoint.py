"""Check an NVFP4 checkpoint before a sampler loads it; exit status 0: sound, 1: faults, 2: wrong use."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_nvfp4.__main__ import program

if __name__ == "__main__":
    program(["verify-checkpoint", *sys.argv[1:]])
