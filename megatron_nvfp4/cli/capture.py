"""The launcher's option --minite-capture FILE: tensors of a Megatron run, for `compare`."""

from pathlib import Path
from typing import Any

FLAG = "--minite-capture"


def take_capture(argv: list[str]) -> tuple[list[str], Any | None]:
    """The words without the option, and the diagnostics.capture.Capture it asks for; None without it.

    ValueError for an option without a file, or a file with faults.
    """
    rest, file = [], None
    words = iter(argv)
    for word in words:
        if word == FLAG:
            file = next(words, None)
            if file is None:
                raise ValueError(f"{FLAG}: give a YAML file (docs/capture.md)")
        elif word.startswith(FLAG + "="):
            file = word.removeprefix(FLAG + "=")
        else:
            rest.append(word)
    return rest, None if file is None else _open(file)


def _open(file: str) -> Any:
    from megatron_nvfp4.checkpoint.atomic import AtomicFolder
    from megatron_nvfp4.diagnostics.capture import Capture
    from megatron_nvfp4.diagnostics.capture_config import load_capture_config
    from megatron_nvfp4.mcore.capture_seams import MegatronSeams

    config = load_capture_config(file)
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{FLAG} {file}: out {config.out}: {error.strerror}; name a folder that can be written"
        ) from error

    def open_folder(path: Path) -> AtomicFolder:
        return AtomicFolder(path, force=True)

    return Capture(config, seams=MegatronSeams(), open_folder=open_folder)
