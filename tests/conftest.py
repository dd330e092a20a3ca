"""Settings of every test: threads, GPU tests, and a count of what was skipped and why."""

import collections
import os
import sys

import pytest

# Before torch is imported: with one thread per core the small shapes here run slower, and two
# ranks on one machine starve each other.
os.environ.setdefault("OMP_NUM_THREADS", "2")


def _num_gpus() -> tuple[int, str]:
    """Number of GPUs torch sees, and the reason if there is none."""
    try:
        import torch
    except ImportError:
        return 0, "torch is not installed"
    return torch.cuda.device_count(), "torch sees no CUDA GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` or `gpu(count)` where that many GPUs are missing."""
    marked = [(item, item.get_closest_marker("gpu")) for item in items]
    marked = [(item, marker) for item, marker in marked if marker]
    if not marked:
        return
    present, reason = _num_gpus()
    for item, marker in marked:
        count = marker.args[0] if marker.args else marker.kwargs.get("count", 1)
        if present < count:
            text = reason if present == 0 else f"needs {count} GPUs, torch sees {present}"
            item.add_marker(pytest.mark.skip(reason=text))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints each reason for skipping with the number of tests it took out."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = collections.Counter(
        report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        for report in skipped
    )
    if reasons:
        terminalreporter.section("skipped, by reason")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:5d}  {reason.removeprefix('Skipped: ')}")


@pytest.fixture(autouse=True)
def _backends_asked_anew():
    """A test that pretends a backend can or cannot run leaves no choice behind."""
    yield
    backends = sys.modules.get("megatron_nvfp4.backends")
    if backends:
        backends.forget_selected()
