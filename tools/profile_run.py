"""Profile steps of a Megatron run: the verb `profile`. Not profile.py: the tools beside it would find that
name before the standard library's module, which torch imports.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_nvfp4.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["profile", *sys.argv[1:]]))
