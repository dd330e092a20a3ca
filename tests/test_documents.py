"""What the texts of the project say: README's commands and links, and what no file may hold."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron_nvfp4.__main__ import VERBS
from megatron_nvfp4.recipes import RECIPES

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def _texts() -> list[Path]:
    """Source and documentation files of the project: tracked and new ones, not ignored ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        paths = [ROOT / line for line in done.stdout.splitlines()]
    else:  # an unpacked archive
        folders = ("megatron_nvfp4", "csrc", "tools", "tests", "patches", "examples", ".ci")
        paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
        paths += [path for path in ROOT.iterdir() if path.is_file()]
    endings = (".py", ".md", ".toml", ".h", ".cuh", ".cpp", ".cu", ".sh", ".yaml", ".yml", "")
    texts = [path for path in paths if path.suffix in endings and path.is_file()]
    assert len(texts) > 30
    return [path for path in texts if path != Path(__file__) and path.name != "LICENSE"]


FORBIDDEN = {
    "a path of one machine": r"(?<![\w.$}])/(?:work|root|home|Users|tmp/[a-z])[\w.]*/",
    "a registry's host": r"pypi\.org|pythonhosted\.org|crates\.io|registry\.npmjs",
    "unfinished work": r"\b(?:TODO|FIXME|XXX|HACK)\b|NotImplementedError",
    "a character outside ASCII": r"[^\x00-\x7f]",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_text_holds(what):
    # Prevents: names that mean something on one machine only; placeholders shipped as features.
    pattern = re.compile(FORBIDDEN[what])
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in _texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("what", "text", "found"),
    [
        ("a path of one machine", "see " + "/ho" + "me/ann/x.py", True),
        ("a path of one machine", "cd '" + "/ro" + "ot/x'", True),
        ("a path of one machine", "a https://host/home/x, tests" + "/wo" + "rk/x", False),
        ("unfinished work", "# TO" + "DO later", True),
        ("a character outside ASCII", "caf\u00e9", True),
    ],
)
def test_the_text_check_sees_what_it_should(what, text, found):
    # Prevents: a check that holds the texts to nothing.
    assert bool(re.search(FORBIDDEN[what], text)) is found


def test_mentioned_documents_exist():
    # Prevents: comments that send the reader to a file nobody ships.
    missing = []
    for path in _texts():
        if path.suffix not in (".py", ".md", ".h", ".cuh", ".cpp", ".cu") or "tests" in path.parts:
            continue
        text = re.sub(r"https?://\S+", "", path.read_text())
        for name in re.findall(r"(?<![\w*<{/.-])[\w./-]*\w\.md\b", text):
            if not any((base / name).exists() for base in (ROOT, path.parent)):
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert not missing


# --- README ---------------------------------------------------------------------------------------


# Commands of the system; what they do with their arguments is not checked.
SYSTEM = {"git", "cd", "pip", "uv", "source", "export", "cat", "mkdir", "cp"}


def _readme() -> str:
    if not README.exists():
        pytest.skip("README.md is not there")
    return README.read_text()


def _commands(text: str) -> list[str]:
    blocks = re.findall(r"```(?:bash|sh|shell|console)\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in (line.strip() for line in lines) if line and not line.startswith("#")]


def _command_fault(line: str) -> str | None:
    """What a documented command names that does not exist, or None."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words.pop(0)
    if not words or words[0] in SYSTEM:
        return None
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        wanted = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        return next((f"no make target {word}" for word in wanted if word not in targets), None)
    for index, word in enumerate(words[:-1]):
        if word == "-m" and words[index + 1] == "megatron_nvfp4":
            verb = words[index + 2] if index + 2 < len(words) else ""
            return None if verb in VERBS or verb.startswith("--") else f"no verb {verb!r}"
        if word == "-m":
            return None
    files = [word for word in words if re.fullmatch(r"(?:[\w.-]+/)*[\w.-]+\.(?:py|sh)", word)]
    if not files and re.search(r"[./]", words[0]):
        files = [words[0]]
    if not files and not re.search(r"\$\w+/\S+\.py", line):  # a script of the user's checkout
        return "not a command this test knows"
    return next((f"no file {name}" for name in files if not (ROOT / name).exists()), None)


def test_readme_commands_exist():
    # Prevents: a README whose first command fails.
    faults = [
        f"{line}: {fault}" for line in _commands(_readme()) if (fault := _command_fault(line))
    ]
    assert not faults
    assert len(_commands(_readme())) >= 2
    inline = re.findall(r"`python -m megatron_nvfp4 ([\w-]+)", _readme())
    assert inline
    assert set(inline) <= set(VERBS)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("make dmeo", "no make target dmeo"),
        ("A=1 make clean B=2", None),
        ("python -m megatron_nvfp4 recipies", "no verb 'recipies'"),
        ("torchrun --nproc-per-node 2 -m megatron_nvfp4 pretrain --bf16", None),
        ("python tools/absent.py --x", "no file tools/absent.py"),
        ("python setup.py --version  # comment", None),
        ("torchrun $MEGATRON/pretrain_gpt.py --transformer-impl minite", None),
        ("frobnicate", "not a command this test knows"),
    ],
)
def test_the_readme_check_sees_what_it_should(line, fault):
    # Prevents: a check that holds the README to nothing.
    assert _command_fault(line) == fault


def test_readme_links_exist():
    # Prevents: links to files that moved.
    for path in [README, *sorted((ROOT / "patches").rglob("*.md"))]:
        if not path.exists():
            continue
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
            if not re.match(r"\w+:", target):
                assert (path.parent / target).exists(), f"{path.relative_to(ROOT)}: {target}"


def test_readme_names_every_recipe_and_path():
    # Prevents: a table that lags behind the registry; folders that were renamed.
    text = _readme()
    named = set(re.findall(r"`((?:nvfp4|mxfp8|bf16)\w*)`", text))
    listed = {name for name in RECIPES if not name.startswith("sweep")}
    assert listed <= named
    assert "sweep_e" in text
    for name in re.findall(
        r"`((?:megatron_nvfp4|csrc|tools|tests|patches|examples)/[\w./]*)`", text
    ):
        assert (ROOT / name).exists(), name
