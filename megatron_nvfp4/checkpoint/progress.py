"""How far a conversion is: bytes and rate; a bar on a terminal, log lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any, Self, TextIO


class Progress:
    """Counts bytes under a label; a context manager.

    On a terminal, and where rich is installed, a bar; otherwise one line each `seconds`, and one at
    the end, so that a log stays short. `total_bytes` 0 means unknown. It never raises for output.
    """

    def __init__(
        self,
        label: str,
        total_bytes: int = 0,
        *,
        stream: TextIO | None = None,
        seconds: float = 10.0,
    ):
        self.label = label
        self.total_bytes = total_bytes
        self.num_bytes = 0
        self._stream = sys.stderr if stream is None else stream
        self._seconds = seconds
        self._start = self._last = time.monotonic()
        self._bar, self._task = self._make_bar()

    def _make_bar(self) -> tuple[Any, Any]:
        if not self._stream.isatty():
            return None, None
        try:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
        except ImportError:
            return None, None
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(file=self._stream),
        )
        return bar, bar.add_task(self.label, total=self.total_bytes or None)

    def advance(self, num_bytes: int) -> None:
        """Count bytes that are done."""
        self.num_bytes += num_bytes
        if self._bar is not None:
            self._bar.update(self._task, advance=num_bytes)
            return
        now = time.monotonic()
        if now - self._last >= self._seconds:
            self._last = now
            self._line(now)

    def _line(self, now: float) -> None:
        elapsed = max(now - self._start, 1e-9)
        of = f" of {self.total_bytes / 1e9:.2f}" if self.total_bytes else ""
        rate = self.num_bytes / elapsed / 1e9
        done = f"{self.num_bytes / 1e9:.2f}{of} GB in {elapsed:.1f} s"
        print(f"{self.label}: {done}, {rate:.2f} GB/s", file=self._stream, flush=True)

    def __enter__(self) -> Self:
        self._start = self._last = time.monotonic()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None:
            self._line(time.monotonic())
