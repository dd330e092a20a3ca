"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file beside `path` to be written, which takes its place at the end, or is gone after an error."""
    partial = path.with_name(f".partial-{path.name}")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: str | Path, text: str) -> None:
    """Text, UTF-8."""
    with whole_file(Path(path)) as partial:
        partial.write_text(text, encoding="utf-8")
