"""Files that appear whole or not at all."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path


def check_outputs(outputs: Mapping[str, Path | None], inputs: Iterable[Path] = ()) -> None:
    """Refuse, before any work, outputs that could not be written behind it or would destroy something.

    outputs: the option that names each, and where it goes; None: nowhere. inputs: files that are read.
    ValueError names option, path and remedy.
    """
    taken = {os.path.realpath(path): "an input, which it would replace" for path in inputs}
    for option, path in outputs.items():
        target = None if path is None else _target(path, f"{option} {path}")
        if target is None:
            continue
        if str(target) in taken:
            raise ValueError(
                f"{option} {path}: is {taken[str(target)]}; give the name of another file"
            )
        taken[str(target)] = f"the output of {option}, too"


def _target(path: Path, said: str) -> Path | None:
    """The file that a new one is to replace: where links lead. None for a device, pipe or socket."""
    if path.is_dir():
        raise ValueError(f"{said}: is a folder; give the name of a file")
    if path.exists() and not path.is_file():
        return None
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise ValueError(f"{said}: there is no folder {target.parent}; make it, or name another")
    return target


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file beside `path` to be written, which takes its place at the end, or is gone after an error.

    A link stays, and what it leads to is replaced. A device or pipe is written itself. ValueError for a
    folder and where there is none to write in, OSError names `path`.
    """
    target = _target(path, str(path))
    # Its ending is that of `path`, by which some writers choose their format.
    partial = path if target is None else target.with_name(f".partial-{path.name}")
    try:
        yield partial
        if target is not None:
            os.replace(partial, target)
    except BaseException as error:
        if target is not None:
            with suppress(OSError):  # the first error is the one to tell
                partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            reason = error.strerror or str(error)
            raise OSError(
                f"{path}: could not be written ({reason}); make room or write elsewhere"
            ) from error
        raise


def write_whole(path: str | Path, text: str) -> None:
    """Text, UTF-8."""
    with whole_file(Path(path)) as partial:
        partial.write_text(text, encoding="utf-8")
