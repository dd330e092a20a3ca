"""Convert a Megatron checkpoint to Hugging Face's, with its config and tokenizer."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_nvfp4.__main__ import program

if __name__ == "__main__":
    program(["convert-megatron-to-hf", *sys.argv[1:]])
