"""Export a BF16 checkpoint, Hugging Face or Megatron, to NVFP4 for SGLang, vLLM and TensorRT-LLM."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_nvfp4.__main__ import program

if __name__ == "__main__":
    program(["export-nvfp4", *sys.argv[1:]])
