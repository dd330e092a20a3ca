"""Check an NVFP4 checkpoint before a sampler loads it; exit status 0: sound, 1: faults, 2: wrong use."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_nvfp4.checkpoint.verify import add_arguments, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    try:
        sys.exit(main(parser.parse_args()))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
