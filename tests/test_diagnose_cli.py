"""`diagnose` as it is called: exit status, where JSON, table and page go, and what is refused."""

import json
import subprocess
import sys
import time
from pathlib import Path

import diagnose_cases as cases
import pytest

from megatron_nvfp4.__main__ import main
from megatron_nvfp4.diagnostics.readers import join, save


@pytest.fixture
def sound(tmp_path):
    save(cases.record(noise=0.01), tmp_path / "sound.pt")
    return str(tmp_path / "sound.pt")


@pytest.fixture
def unsound(tmp_path):
    save(cases.record(noise=0.5), tmp_path / "unsound.pt")
    return str(tmp_path / "unsound.pt")


def test_sound_is_zero_and_json_alone_on_standard_output(sound, capsys):
    # Prevents: a pipe that has to skip a table to find the JSON.
    assert main(["diagnose", sound]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["schema"] == "diagnose/1"
    assert found["verdict"] == "sound"
    assert found["sources"] == [{"file": sound, "format": "mismatch/1", "responses": 24}]
    assert captured.err == ""


def test_findings_are_one(unsound, capsys):
    # Prevents: a job that goes on behind a broken sampler.
    assert main(["diagnose", unsound]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "unsound"


def test_failed_checks_are_one(tmp_path, capsys):
    # Prevents: exit 0 for a dump in which nothing could be measured.
    cases.write_slime(tmp_path / "dump", cases.responses(), learner=False)
    assert main(["diagnose", str(tmp_path / "dump")]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["gap"] is None
    assert "no log-probs of the learner" in found["checks"][1]["found"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.pt"], "absent.pt: no such file or folder"),
        (["{sound}", "--tau-ana", "deep"], "--tau-ana deep: give a number below 0, or auto"),
        (["{sound}", "--tau-ana", "0.5"], "tau_ana=0.5 is not below 0"),
        (["{sound}", "--tis-cap", "0"], "tis_cap=0.0 is not above 0"),
        (["{sound}", "--window", "0"], "window=0 is not at least 1"),
        (["{sound}", "--html", "absent/page.html"], "--html absent/page.html: there is no folder"),
    ],
)
def test_wrong_use_is_two_and_one_line(sound, capsys, arguments, message):
    # Prevents: a traceback, or the status of a finding, for a mistyped option.
    assert main(["diagnose", *(word.format(sound=sound) for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_no_path_is_two():
    # Prevents: "sound" for nothing.
    with pytest.raises(SystemExit) as caught:
        main(["diagnose"])
    assert caught.value.code == 2


def test_json_and_page_in_files(unsound, tmp_path, capsys):
    # Prevents: half-written files, and no words for people beside the JSON.
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    assert main(["diagnose", unsound, "--json", str(out), "--html", str(page)]) == 1
    text = capsys.readouterr().out
    assert "mean |delta|, tokens alike" in text
    assert text.rstrip().splitlines()[-1].startswith("unsound: ")
    found = json.loads(out.read_text())
    assert found["advice"] in text
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "out.html",
        "out.json",
        "unsound.pt",
    ]


def test_options_reach_the_numbers(sound, capsys):
    # Prevents: options that are parsed and forgotten.
    main(["diagnose", sound, "--tau-ana", "-0.02", "--tis-cap", "1.01", "--seed", "3"])
    found = json.loads(capsys.readouterr().out)
    assert found["segments"]["tau_ana"] == -0.02
    assert found["clipping"]["tis_cap"] == 1.01
    assert found["clipping"]["tis_above"]["value"] > 0.05
    assert found["settings"]["seed"] == 3


def test_a_table_on_a_terminal(unsound, tmp_path, monkeypatch, capsys):
    # Prevents: rich failing on markup in what was found.
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["diagnose", unsound, "--json", str(tmp_path / "out.json")]) == 1
    assert "mean |delta|" in capsys.readouterr().out


def test_frameworks_are_not_imported(tmp_path):
    # Prevents: a diagnosis that needs the framework that wrote the dump.
    cases.write_miles(tmp_path / "dump", cases.responses(num=4, length=50))
    code = (
        "import sys\nfrom megatron_nvfp4.__main__ import main\n"
        f"status = main(['diagnose', {str(tmp_path / 'dump')!r}])\n"
        "names = ('megatron', 'slime', 'miles', 'nemo_rl', 'transformer_engine', 'matplotlib')\n"
        "print([name for name in names if name in sys.modules], file=sys.stderr)\nsys.exit(status)"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_a_million_tokens_take_seconds(tmp_path, capsys):
    # Prevents: a loop over tokens: 512 responses of 2000 tokens, a tenth of a real step.
    save(join(cases.responses(num=512, length=2000, steps=8)), tmp_path / "large.pt")
    start = time.monotonic()
    assert main(["diagnose", str(tmp_path / "large.pt"), "--html", str(tmp_path / "x.html")]) == 0
    assert time.monotonic() - start < 60
    assert json.loads(capsys.readouterr().out)["gap"]["tokens"] > 500_000
