"""Convert a Hugging Face checkpoint to Megatron's, torch_dist or mp_rank files."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_nvfp4.__main__ import program

if __name__ == "__main__":
    program(["convert-hf-to-megatron", *sys.argv[1:]])
