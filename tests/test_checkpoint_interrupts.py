"""Ctrl-C and SIGTERM in the middle of a checkpoint verb: one line, the signal's status, nothing left over."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from export_small import checkpoint, exported

from megatron_nvfp4 import __main__ as cli
from megatron_nvfp4.checkpoint import atomic, hf
from megatron_nvfp4.checkpoint.convert import megatron_from_hf
from megatron_nvfp4.checkpoint.hf import HFReader

ROOT = Path(__file__).parents[1]
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.fixture
def folders(tmp_path):
    source = checkpoint(tmp_path / "hf", "qwen3_moe")
    exported(source, tmp_path / "serve", recipe="nvfp4_per_token")
    megatron_from_hf(tmp_path / "hf", tmp_path / "megatron")
    return tmp_path


def _words(folder: Path) -> dict[str, list[str]]:
    hf, out = str(folder / "hf"), str(folder / "out")
    megatron = ["--megatron", str(folder / "megatron"), "--hf-config", hf]
    torch_format = ["--format", "torch", "--tp", "2"]
    return {
        "torch_dist": ["convert-hf-to-megatron", "--hf", hf, "--out", out],
        "torch": ["convert-hf-to-megatron", "--hf", hf, "--out", out, *torch_format],
        "back": ["convert-megatron-to-hf", *megatron, "--out", out],
        "export": ["export-nvfp4", "--in", hf, "--out", out, "--recipe", "te"],
        "verify": ["verify-checkpoint", str(folder / "serve")],
    }


def _interrupt(monkeypatch, owner: type, name: str, number: int, after: int) -> None:
    original, count = getattr(owner, name), 0

    def call(*args, **kwargs):
        nonlocal count
        count += 1
        if count == after:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("what", ["torch_dist", "torch", "back", "export", "verify"])
def test_a_signal_is_one_line_and_leaves_nothing(what, number, folders, monkeypatch, capsys):
    """Prevents: tracebacks, an error of the archive's writer in place of the interrupt, half a folder."""
    before = sorted(os.listdir(folders))
    if what == "verify":
        _interrupt(monkeypatch, hf.HFReader, "read", number, after=20)
    elif what == "export":  # a small one writes its only file when all is there
        _interrupt(monkeypatch, hf.HFWriter, "write", number, after=3)
    else:
        _interrupt(monkeypatch, atomic.OutputFile, "write", number, after=3)
    handlers = [signal.getsignal(each) for each in SIGNALS]
    assert cli.main(_words(folders)[what]) == SIGNALS[number]
    name = signal.Signals(number).name
    assert capsys.readouterr().err == f"error: stopped by {name}; no unfinished output is left\n"
    assert sorted(os.listdir(folders)) == before
    assert [signal.getsignal(each) for each in SIGNALS] == handlers


def test_a_signal_that_other_code_hides_is_still_told(folders, monkeypatch, capsys):
    """Prevents: status 2 and another error's words for an interrupt inside a library's callback."""
    original = HFReader.read

    def read(*args, **kwargs):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # the handler runs here at the latest
        except KeyboardInterrupt:
            raise RuntimeError("unexpected pos 64 vs 0") from None
        return original(*args, **kwargs)

    monkeypatch.setattr(HFReader, "read", read)
    assert cli.main(_words(folders)["export"]) == 130
    assert "stopped by SIGINT" in capsys.readouterr().err


def test_ignored_signals_and_other_threads_are_left_alone(folders, monkeypatch):
    """Prevents: a conversion under nohup that ends after all, and one in a thread that cannot start."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _interrupt(monkeypatch, atomic.OutputFile, "write", signal.SIGINT, after=3)
        assert cli.main(_words(folders)["torch_dist"]) == 0
    finally:
        signal.signal(signal.SIGINT, former)
    found = []
    thread = threading.Thread(target=lambda: found.append(cli.main(_words(folders)["verify"])))
    thread.start()
    thread.join()
    assert found == [0]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_script_that_is_stopped(number, folders):
    """Prevents: a script of tools/ that ends otherwise than its verb; here by a signal from outside."""
    code = (
        "import runpy, sys, time\n"
        "from megatron_nvfp4.checkpoint import atomic\n"
        "write = atomic.OutputFile.write\n"
        "def slow(*args):\n"
        "    print('writing', flush=True); time.sleep(30)\n"
        "atomic.OutputFile.write = slow\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    script = str(ROOT / "tools" / "convert_hf_to_megatron.py")
    words = [script, *_words(folders)["torch_dist"][1:]]
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert child.stdout.readline() == "writing\n"
    child.send_signal(number)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == SIGNALS[number], errors
    assert len(errors.splitlines()) == 1
    assert not [name for name in os.listdir(folders) if "out" in name]


def test_an_interrupt_after_publishing_says_what_is_complete(capsys):
    """Prevents: "no unfinished output is left" about a checkpoint that has just been put in place."""

    def call() -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)  # the handler runs here at the latest
        except KeyboardInterrupt:
            raise KeyboardInterrupt("out is complete") from None
        return 0

    assert cli._run(call) == 143
    assert capsys.readouterr().err == "error: stopped by SIGTERM; out is complete\n"
