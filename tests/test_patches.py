"""The Megatron-LM patches and tools/apply_patches.py, on the files of the installed wheel.

Every outcome must have its own message and exit code and, unless it is a success, must leave every
byte of the tree as it was. No test here imports torch or Megatron.
"""

import ast
import fcntl
import importlib
import importlib.util
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
TOOLS = REPOSITORY / "tools"
PATCHES = REPOSITORY / "patches" / "megatron-lm" / "core_v0.19.0"
FIRST, SECOND = "0001-transformer-impl-minite.patch", "0002-minite-arguments.patch"
CONFIG = "megatron/core/transformer/transformer_config.py"
BACKENDS = "megatron/core/models/backends.py"
SPECS = "megatron/core/models/gpt/gpt_layer_specs.py"
ARGUMENTS = "megatron/training/arguments.py"
FIELD = "transformer_impl"
OUTSIDE = "gpt_builders.py"  # In a checkout only.

sys.path.insert(0, str(TOOLS))  # It is not a package.
tool = importlib.import_module("apply_patches")
sys.path.pop(0)
PARTS = tool.load_patches(PATCHES).files


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """Return a copy of the touched files of the wheel, in a wheel's layout."""
    pytest.importorskip("megatron", reason="megatron-core is not installed: its files are patched")
    source = Path(importlib.util.find_spec("megatron.core").origin).parents[2]  # Imports nothing.
    root = tmp_path / "site packages"
    extra = ["megatron/core/__init__.py", "megatron/core/package_info.py"]
    for path in [*extra, *dict.fromkeys(part.path for part in PARTS)]:
        if path != OUTSIDE:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / path, root / path)
    if "MINOR = 19\n" not in (root / extra[1]).read_text():
        pytest.skip("the installed megatron-core is not 0.19: the patches are not for it")
    tool.run(root, PATCHES, "revert")  # The installed files may be patched.
    return root


@pytest.fixture
def checkout(wheel: Path) -> Path:
    """Return the same with the scripts of a checkout; gpt_builders.py has only the hunks' lines."""
    (wheel / "pretrain_gpt.py").write_text("# a script\n")
    builders = [part for part in PARTS if part.path == OUTSIDE]
    blocks = [hunk.before for part in builders for hunk in part.hunks]
    (wheel / OUTSIDE).write_bytes(b"# between\n".join([b"", *blocks, b""]))
    return wheel


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    """Return content and mode of every file below `root`."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(p.relative_to(root)): (p.read_bytes(), p.stat().st_mode) for p in files}


def outcome(capsys: pytest.CaptureFixture[str], root: Path, *options: str) -> tuple[int, str]:
    """Run the tool in this process; return its exit code and its message."""
    code = tool.main(["--megatron", str(root), *options])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_successes_have_their_own_messages(wheel, capsys):
    # Prevents: a second run failing, or patching twice, or one message for two outcomes; and a
    # revert that is not the original bit for bit.
    before = snapshot(wheel)
    steps = [
        (["--revert"], "nothing to revert: core_v0.19.0"),
        (["--check"], "check: not applied, applies cleanly: core_v0.19.0"),
        ([], "applied: core_v0.19.0 (2 patches, 13 hunks, 6 files)"),
        ([], "already applied: core_v0.19.0"),
        (["--check"], "check: applied: core_v0.19.0"),
        (["--revert"], "reverted: core_v0.19.0"),
        (["--check"], "check: not applied, applies cleanly"),
    ]
    for options, message in steps:
        code, text = outcome(capsys, wheel, *options)
        assert (code, text.startswith(message)) == (0, True), text
    assert snapshot(wheel) == before


def test_check_changes_nothing(wheel, capsys):
    # Prevents: --check leaving a lock, a staging directory or a changed time stamp.
    before = {p: p.stat().st_mtime_ns for p in [wheel, *wheel.rglob("*")]}
    assert outcome(capsys, wheel, "--check")[0] == 0
    assert {p: p.stat().st_mtime_ns for p in [wheel, *wheel.rglob("*")]} == before


def test_patched_files_compile_and_know_minite(wheel, tmp_path, capsys):
    # Prevents: a hunk that lands in a place where it is not Python, or a field without the value.
    outcome(capsys, wheel)
    for path in snapshot(wheel):
        py_compile.compile(str(wheel / path), cfile=str(tmp_path / "out.pyc"), doraise=True)
    nodes = ast.walk(ast.parse((wheel / CONFIG).read_text()))
    (node,) = [n for n in nodes if getattr(getattr(n, "target", None), "id", "") == FIELD]
    values = ast.literal_eval(node.annotation.slice)
    assert values == ("local", "transformer_engine", "inference_optimized", "minite")


def test_minite_is_tested_first(wheel, capsys):
    # Prevents: callers that always pass use_transformer_engine=True getting TE's layers.
    outcome(capsys, wheel)
    nodes = ast.parse((wheel / SPECS).read_text()).body
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    for name in ("decoder_layer_specs", "decoder_block_spec", "mtp_block_spec"):
        chains = [n for n in functions[f"get_gpt_{name}"].body if isinstance(n, ast.If)]
        tests = [ast.unparse(chain.test) for chain in chains]
        assert "config.transformer_impl == 'minite'" in tests
        assert "use_transformer_engine" not in tests


class Missing:
    """A finder for which megatron_nvfp4 cannot be imported because `name` is missing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron_nvfp4":
            raise ModuleNotFoundError(f"No module named {self.name}", name=self.name)


def test_megatron_without_our_package(wheel, monkeypatch, capsys):
    # Prevents: a patched Megatron failing without megatron_nvfp4, or failing unexplained when it is
    # asked for, or hiding an error from within an installed megatron_nvfp4.
    outcome(capsys, wheel)
    nodes = [*ast.walk(ast.parse((wheel / BACKENDS).read_text()))]
    (backend,) = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == "get_backend"]
    backend.returns = backend.args.args[0].annotation = None
    nodes = ast.walk(ast.parse((wheel / ARGUMENTS).read_text()))
    tries = [ast.unparse(node) for node in nodes if isinstance(node, ast.Try)]
    (options,) = [code for code in tries if "megatron_nvfp4" in code]
    names: dict = {}
    exec(ast.unparse(backend), names)
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron_nvfp4"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing("megatron_nvfp4"), *sys.meta_path])
    exec(options, {})
    with pytest.raises(ImportError, match=r"transformer_impl='minite' needs the package") as raised:
        names["get_backend"]("minite")
    assert type(raised.value) is ImportError
    monkeypatch.setattr(sys, "meta_path", [Missing("yaml"), *sys.meta_path[1:]])
    with pytest.raises(ModuleNotFoundError, match="No module named yaml"):
        exec(options, {})
    with pytest.raises(ModuleNotFoundError, match="No module named yaml"):
        names["get_backend"]("minite")


@pytest.mark.skipif(shutil.which("git") is None, reason="git, the second opinion, is not installed")
def test_git_agrees(wheel, tmp_path, capsys):
    # Prevents: our reading of a patch differing from git's, byte by byte.
    other = shutil.copytree(wheel, tmp_path / "other")
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    for name in (FIRST, SECOND):
        command = ["git", "apply", f"--exclude={OUTSIDE}", str(PATCHES / name)]
        subprocess.run(command, cwd=other, env=environment, check=True)
    assert outcome(capsys, wheel)[0] == 0
    assert snapshot(wheel) == snapshot(other)


def test_half_applied(wheel, capsys):
    # Prevents: a tree with one patch of two being called applied, or getting that one twice.
    one = wheel.parent / "one"
    one.mkdir()
    shutil.copy(PATCHES / FIRST, one)
    before = snapshot(wheel)
    assert outcome(capsys, wheel, "--patches", str(one))[0] == 0
    half = snapshot(wheel)
    for options in ([], ["--check"]):
        code, text = outcome(capsys, wheel, *options)
        assert code == tool.Exit.HALF_APPLIED == 4
        assert "half applied" in text
        assert "run --revert" in text
        assert f"{ARGUMENTS} hunk 1 ({SECOND}): pending" in text
        assert snapshot(wheel) == half
    assert outcome(capsys, wheel, "--revert")[0] == 0
    assert snapshot(wheel) == before


def test_half_applied_within_one_file(wheel, capsys):
    # Prevents: a decision by file where single hunks were taken back or edited by hand.
    outcome(capsys, wheel)
    hunk = next(part for part in PARTS if part.path == BACKENDS).hunks[0]
    text = (wheel / BACKENDS).read_bytes()
    (wheel / BACKENDS).write_bytes(text.replace(hunk.after, hunk.before))
    assert outcome(capsys, wheel)[0] == 4
    (wheel / BACKENDS).write_bytes(text.replace(hunk.after, b"# edited\n"))
    edited = snapshot(wheel)
    for options in ([], ["--check"], ["--revert"]):
        code, message = outcome(capsys, wheel, *options)
        assert code == 4
        assert f"{BACKENDS} hunk 1 ({FIRST}): does not fit" in message
        assert "restore these files" in message
        assert snapshot(wheel) == edited


@pytest.mark.parametrize("option", ["--check", "--revert", None])
def test_wrong_revision(wheel, capsys, option):
    # Prevents: hunks that do not fit being taken for "already applied", and a partial apply.
    path = wheel / SPECS
    path.write_bytes(path.read_bytes().replace(b"use_transformer_engine", b"use_te"))
    before = snapshot(wheel)
    code, text = outcome(capsys, wheel, *([option] if option else []))
    assert code == tool.Exit.WRONG_REVISION == 3
    assert "wrong revision" in text
    assert f"{SPECS} hunk 2 ({FIRST}): does not fit" in text
    assert snapshot(wheel) == before


def test_ambiguous_place_is_refused(wheel, capsys):
    # Prevents: choosing the nearest of two equal places, as line numbers would.
    hunk = next(part for part in PARTS if part.path == BACKENDS).hunks[0]
    path = wheel / BACKENDS
    path.write_bytes(path.read_bytes() + hunk.before)
    code, text = outcome(capsys, wheel)
    assert code == 3
    assert f"{BACKENDS} hunk 1 ({FIRST}): fits in 2 places" in text


DAMAGES = {
    "count": (FIRST, "@@ -216,2 +216,14 @@", "@@ -216,2 +216,13 @@"),
    "sign": (FIRST, "+    elif transformer_impl ==", "*    elif transformer_impl =="),
    "number of hunks": (FIRST, "Hunks: 14", "Hunks: 15"),
    "added line": (FIRST, "+        return MiniTESpec", "+        return MiniTESpek"),
    "context line": (SECOND, "     parser = _add_fault", "     parser = _bdd_fault"),
    "path": (SECOND, "a/megatron/training/arguments.py", "a/../arguments.py"),
    "index": (SECOND, "\nindex fd30984b", "\nindex fd30984"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_corrupt_patch(wheel, tmp_path, capsys, damage):
    # Prevents: a damaged patch being applied, or being reported as another revision of Megatron.
    before = snapshot(wheel)
    name, old, new = DAMAGES[damage]
    patches = shutil.copytree(PATCHES, tmp_path / "patches")
    good = (patches / name).read_text()
    (patches / name).write_text(good.replace(old, new, 1))
    assert (patches / name).read_text() != good
    code, text = outcome(capsys, wheel, "--patches", str(patches))
    assert code == tool.Exit.CORRUPT == 5
    assert "corrupt patch: " in text
    assert name in text
    assert snapshot(wheel) == before


def test_patch_cut_anywhere_is_corrupt(wheel, tmp_path, capsys):
    # Prevents: a patch cut at a hunk or file boundary, still well formed, being applied in part.
    before = snapshot(wheel)
    patches = shutil.copytree(PATCHES, tmp_path / "patches")
    lines = (PATCHES / FIRST).read_bytes().splitlines(keepends=True)
    for num in range(1, len(lines)):
        (patches / FIRST).write_bytes(b"".join(lines[:num]))
        assert outcome(capsys, wheel, "--patches", str(patches))[0] == 5, num
    assert snapshot(wheel) == before


@pytest.mark.parametrize("data", [b"\0" * 64, b"\xff\xfe#"], ids=["nul", "bytes"])
def test_corrupt_file(wheel, capsys, data):
    # Prevents: a file lost to a disk fault being reported as another revision.
    (wheel / BACKENDS).write_bytes(data)
    code, text = outcome(capsys, wheel)
    assert (code, f"corrupt file: {BACKENDS}" in text) == (5, True)


def test_missing_files(checkout, capsys):
    # Prevents: a checkout without a file, or a wheel without a module, being patched in part.
    assert outcome(capsys, checkout, "--check")[0] == 0
    (checkout / OUTSIDE).unlink()
    code, text = outcome(capsys, checkout)
    assert (code, f"{OUTSIDE}: file is missing" in text) == (3, True)
    (checkout / "pretrain_gpt.py").unlink()  # Now it is a wheel.
    code, text = outcome(capsys, checkout, "--check")
    assert (code, f"skipped: {OUTSIDE}" in text) == (0, True)
    (checkout / ARGUMENTS).unlink()
    code, text = outcome(capsys, checkout)
    assert (code, f"{ARGUMENTS}: file is missing" in text) == (3, True)


def test_checkout_with_local_edits(checkout, capsys):
    # Prevents: unrelated edits or moved lines stopping a patch, or being lost by --revert.
    for path in (BACKENDS, SPECS, CONFIG):
        text = (checkout / path).read_bytes()
        (checkout / path).write_bytes(b"# mine\n" * 40 + text + b"# mine")
    before = snapshot(checkout)
    code, text = outcome(capsys, checkout)
    assert (code, "(2 patches, 15 hunks, 7 files)" in text) == (0, True)
    assert snapshot(checkout)[BACKENDS][0].endswith(b"# mine")
    assert outcome(capsys, checkout, "--revert")[0] == 0
    assert snapshot(checkout) == before


def test_crlf_and_modes_are_kept(wheel, capsys):
    # Prevents: LF lines mixed into a CRLF file, and a lost mode; read-only files are patched.
    path = wheel / BACKENDS
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    (wheel / SPECS).chmod(0o444)
    (wheel / CONFIG).chmod(0o750)
    before = snapshot(wheel)
    assert outcome(capsys, wheel)[0] == 0
    data = path.read_bytes()
    assert data.count(b"\n") == data.count(b"\r\n") == before[BACKENDS][0].count(b"\n") + 12
    assert [mode for _, mode in snapshot(wheel).values()] == [mode for _, mode in before.values()]
    assert outcome(capsys, wheel, "--revert")[0] == 0
    assert snapshot(wheel) == before


def test_links(wheel, tmp_path, capsys):
    # Prevents: patching a package cache through a link, replacing a link by a file, and changing
    # the other name of a hard link.
    tree = tmp_path / "link"
    tree.symlink_to(wheel)
    inner = wheel / "megatron" / "real.py"
    (wheel / BACKENDS).rename(inner)
    (wheel / BACKENDS).symlink_to(inner)
    os.link(wheel / SPECS, tmp_path / "cached.py")
    cached = (tmp_path / "cached.py").read_bytes()
    assert outcome(capsys, tree)[0] == 0
    assert (wheel / BACKENDS).is_symlink()
    assert b"minite" in inner.read_bytes()
    assert (tmp_path / "cached.py").read_bytes() == cached
    assert outcome(capsys, tree, "--revert")[0] == 0
    outside = tmp_path / "outside.py"
    inner.rename(outside)
    (wheel / BACKENDS).unlink()
    (wheel / BACKENDS).symlink_to(outside)
    before = outside.read_bytes()
    code, text = outcome(capsys, tree)
    assert (code, f"{BACKENDS} is a link to {outside}" in text) == (2, True)
    assert outside.read_bytes() == before


def test_usage(wheel, tmp_path, capsys):
    # Prevents: a wrong directory or an empty patch directory reading as success.
    code, text = outcome(capsys, tmp_path)
    assert (code, "not a Megatron-LM tree" in text) == (2, True)
    code, text = outcome(capsys, wheel / "megatron")
    assert (code, f"pass its parent: --megatron {wheel}" in text) == (2, True)
    code, text = outcome(capsys, wheel, "--patches", str(tmp_path))
    assert (code, "holds no patch files" in text) == (2, True)
    with pytest.raises(SystemExit, match="2"):
        tool.main(["--megatron", str(wheel), "--check", "--revert"])


def fail_at(function, *numbers: int):
    """Wrap `function` so that its calls with these numbers raise and the others work."""
    calls = iter(range(1, 1000))

    def wrapper(*args, **kwargs):
        if next(calls) in numbers:
            raise OSError(28, "No space left on device")
        return function(*args, **kwargs)

    return wrapper


FAILURES = [("fsync", 1), ("fsync", 12), ("replace", 1), ("replace", 4), ("replace", 6)]


@pytest.mark.parametrize(("name", "number"), FAILURES)
@pytest.mark.parametrize("direction", ["apply", "revert"])
def test_io_failure_leaves_every_file(wheel, monkeypatch, capsys, name, number, direction):
    # Prevents: a full disk, while staging or while replacing, leaving half a patch or rubbish.
    if direction == "revert":
        outcome(capsys, wheel)
    before = snapshot(wheel)
    options = ["--revert"] if direction == "revert" else []
    with monkeypatch.context() as patch:
        patch.setattr(tool.os, name, fail_at(getattr(os, name), number))
        code, text = outcome(capsys, wheel, *options)
    assert code == tool.Exit.IO_FAILURE == 6
    assert "nothing was changed" in text
    assert "No space left" in text
    assert snapshot(wheel) == before
    assert not (wheel / tool.STAGING).exists()
    assert outcome(capsys, wheel, *options)[0] == 0


def test_failed_rollback_says_where_the_originals_are(wheel, monkeypatch, capsys):
    # Prevents: a claim that nothing changed when putting back failed too.
    before = snapshot(wheel)
    with monkeypatch.context() as patch:
        patch.setattr(tool.os, "replace", fail_at(os.replace, *range(3, 20)))
        code, text = outcome(capsys, wheel)
    assert code == 6
    assert "could not put back" in text
    assert "nothing was changed" not in text
    first = PARTS[1].path
    assert (wheel / tool.STAGING / "old" / first).read_bytes() == before[first][0]
    assert outcome(capsys, wheel, "--check")[0] == 4
    assert outcome(capsys, wheel, "--revert")[0] == 0
    assert snapshot(wheel) == before


def test_only_one_run_at_a_time(wheel, capsys):
    # Prevents: two ranks or two builds patching one shared tree at once.
    (wheel / tool.STAGING).mkdir()
    with (wheel / tool.STAGING / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = snapshot(wheel)
        code, text = outcome(capsys, wheel)
        assert (code, "another run is patching" in text) == (6, True)
        assert snapshot(wheel) == before
    assert outcome(capsys, wheel)[0] == 0


def test_edit_during_a_run(wheel, monkeypatch, capsys):
    # Prevents: an edit that was saved between reading and replacing being lost.
    stage = tool.stage

    def edit_and_stage(*args):
        (wheel / ARGUMENTS).write_text("# mine\n")
        stage(*args)

    before = snapshot(wheel)
    monkeypatch.setattr(tool, "stage", edit_and_stage)
    code, text = outcome(capsys, wheel)
    assert (code, f"{ARGUMENTS} was edited meanwhile" in text) == (6, True)
    assert snapshot(wheel) == before | {ARGUMENTS: (b"# mine\n", before[ARGUMENTS][1])}


KILL = """
import os, sys
sys.path.insert(0, sys.argv[1])
import apply_patches as tool
replace, left = os.replace, [int(sys.argv[2])]
def killed(source, target):
    if not left[0]:
        os._exit(137)
    left[0] -= 1
    replace(source, target)
tool.os.replace = killed
tool.shutil.rmtree = lambda *a, **k: None if left[0] else os._exit(137)
sys.exit(tool.main(sys.argv[3:]))
"""


@pytest.mark.parametrize("num_replaced", [0, 1, 5, 6])
@pytest.mark.parametrize("direction", ["apply", "revert"])
def test_kill_between_replacements(wheel, capsys, num_replaced, direction):
    # Prevents: a killed run leaving a tree that neither direction can be completed from.
    before = snapshot(wheel)
    if direction == "revert":
        outcome(capsys, wheel)
    options = ["--megatron", str(wheel)] + (["--revert"] if direction == "revert" else [])
    command = [sys.executable, "-c", KILL, str(TOOLS), str(num_replaced), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 137, done.stderr
    assert (wheel / tool.STAGING).exists()
    code, text = outcome(capsys, wheel, "--check")
    if 0 < num_replaced < 6:
        assert (code, "run --revert" in text) == (4, True)
    else:
        is_applied = (num_replaced == 6) == (direction == "apply")
        assert code == 0
        assert text.startswith("check: applied" if is_applied else "check: not applied")
    assert outcome(capsys, wheel, "--revert")[0] == 0
    assert snapshot(wheel) == before
    assert outcome(capsys, wheel)[0] == 0
    assert outcome(capsys, wheel, "--check")[1].startswith("check: applied")


def test_help_and_readme_list_every_exit_code(capsys):
    # Prevents: a code without documentation, or a documented one that is never used.
    with pytest.raises(SystemExit):
        tool.main(["--help"])
    listed = capsys.readouterr().out
    readme = (REPOSITORY / "patches" / "README.md").read_text()
    for code in tool.Exit:
        assert f"\n  {code.value}  " in listed
        assert f"\n| {code.value} | " in readme


def test_patches_have_headers_and_a_row():
    # Prevents: a patch whose base, reason, origin or end of life nobody wrote down.
    readme = (REPOSITORY / "patches" / "README.md").read_text()
    for patch in sorted((REPOSITORY / "patches").rglob("*.patch")):
        header = patch.read_text().partition("\ndiff --git ")[0]
        for name in ("Base", "Reason", "Upstream", "Remove when", "Hunks"):
            assert f"\n{name}: " in header, (patch.name, name)
        base = header.partition("\nBase: ")[2].partition("\n")[0]
        assert base == f"{patch.parent.name} (5be9626709af2722333bf54797c954c09edeada3)"
        rows = [line for line in readme.splitlines() if patch.name in line]
        assert len(rows) == 1
        assert rows[0].count("|") == 6
