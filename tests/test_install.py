"""What an install builds, says and repairs. Needs no network: dependencies are never fetched."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from megatron_nvfp4.backends import extension

ROOT = Path(__file__).parents[1]
_PART = "csrc/cuda/quantize.cu"


def _load_setup() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("setup_under_test", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SETUP = _load_setup()
TORCH = types.SimpleNamespace(version=types.SimpleNamespace(cuda="13.0"))


def _skipped(mode="", torch=TORCH, compiler=True, cuda_home="/cuda", cu_files=(_PART,)):
    return SETUP.why_skipped(mode, torch, compiler, cuda_home, list(cu_files))


def _toolkit(folder: Path) -> Path:
    for name in ("bin/nvcc", "include/cuda.h"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755)
    return folder


# --- what setup.py decides -------------------------------------------------------------------


def test_other_cuda_major_stops_before_compiling():
    # Prevents: minutes of compiling that end in an extension which cannot load.
    with pytest.raises(SystemExit, match=r"nvcc is CUDA 13\.0 .* CUDA 12\.8.*CUDA_HOME"):
        SETUP.compare_toolkit("12.8", "13.0")


def test_other_cuda_minor_is_one_line():
    # Prevents: refusing a pair that works, which users answer by deleting the check.
    line = SETUP.compare_toolkit("12.8", "12.9")
    assert "12.8" in line
    assert "12.9" in line
    assert "\n" not in line
    assert SETUP.compare_toolkit("13.0", "13.0") is None


def test_toolkit_needs_its_headers(tmp_path):
    # Prevents: taking /usr/local for a toolkit because a wrapper script stands in /usr/local/bin.
    wrapper = tmp_path / "usr/bin/nvcc"
    wrapper.parent.mkdir(parents=True)
    wrapper.touch(mode=0o755)
    env = {"PATH": str(wrapper.parent)}
    assert SETUP.find_cuda_home(env, default=str(tmp_path / "none")) is None
    default = _toolkit(tmp_path / "default")
    assert SETUP.find_cuda_home(env, default=str(default)) == str(default)
    chosen = _toolkit(tmp_path / "chosen")
    env["CUDA_HOME"] = str(chosen)
    assert SETUP.find_cuda_home(env, default=str(default)) == str(chosen)


def test_no_toolkit_leaves_cuda_out_and_says_so():
    # Prevents: a failing install, or a silent one, on a machine without nvcc.
    home = SETUP.find_cuda_home({"CUDA_HOME": "", "PATH": ""}, default="/nonexistent")
    assert _skipped(cuda_home=home) == (None, "no nvcc at install")


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ({"torch": None}, "torch is not visible to the build"),
        ({"compiler": False}, "no C++ compiler"),
        ({"torch": types.SimpleNamespace(version=types.SimpleNamespace(cuda=None))}, "CPU build"),
        ({"cuda_home": None}, "no nvcc at install"),
        ({"cu_files": ()}, "no csrc/cuda"),
    ],
)
def test_forced_cuda_fails_with_the_reason_that_would_have_been_a_line(missing, reason):
    # Prevents: a release built without kernels although they were demanded.
    assert reason in _skipped(**missing)[1]
    with pytest.raises(SystemExit, match=rf"MEGATRON_NVFP4_CUDA=1.*{re.escape(reason)}"):
        _skipped(mode="1", **missing)


def test_modes():
    # Prevents: "=0" still building CUDA; "=yes" meaning nothing without a word.
    assert _skipped() == (None, None)
    assert _skipped("1") == (None, None)
    assert _skipped("0") == (None, "MEGATRON_NVFP4_CUDA=0 at install")
    with pytest.raises(SystemExit, match="MEGATRON_NVFP4_CUDA=yes"):
        _skipped("yes")


def test_no_compiler_is_a_python_install():
    # Prevents: a laptop without a compiler that cannot install at all.
    cpu, cuda = _skipped(compiler=False)
    assert cpu == cuda == "no C++ compiler with Python.h at install; kernels skipped"


def test_archs():
    # Prevents: an "a" target built without its suffix, which lacks the FP4 instructions.
    assert SETUP.gencode("9.0a;10.0a;8.0+PTX") == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_100a,code=sm_100a",
        "-gencode=arch=compute_80,code=[sm_80,compute_80]",
    ]


@pytest.mark.parametrize(
    ("cores", "gigabytes", "cuda", "jobs"),
    [(2, 24, True, 2), (64, 16, True, 4), (8, 2, True, 1), (8, 2, False, 2), (4, 64, False, 4)],
)
def test_jobs_fit_in_memory(cores, gigabytes, cuda, jobs):
    # Prevents: 64 nvcc processes of 4 GB each on a machine with many cores.
    assert SETUP.max_jobs(cores, gigabytes << 30, cuda) == jobs


# --- a real build that cannot see torch ------------------------------------------------------


@pytest.fixture(scope="module")
def no_torch(tmp_path_factory) -> Path:
    """A folder for PYTHONPATH that makes `import torch` fail as if it were not installed."""
    folder = tmp_path_factory.mktemp("no_torch")
    text = 'raise ModuleNotFoundError("No module named \'torch\'", name="torch")\n'
    (folder / "torch.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The source tree as a release holds it, without anything built."""
    folder = tmp_path_factory.mktemp("a source") / "tree"
    folder.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    built = shutil.ignore_patterns("*.so", "__pycache__", "_build_info.py")
    for name in ("megatron_nvfp4", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=built)
    return folder


def _pip_install(source: Path, target: Path, no_torch: Path, **env: str):
    command = [sys.executable, "-m", "pip", "install", "-v", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--target", str(target), str(source)]
    env = {**os.environ, "PYTHONPATH": str(no_torch), **env}
    run = subprocess.run(command, env=env, stdout=-1, stderr=-2, text=True, timeout=300)
    return run.returncode, run.stdout


def test_build_without_torch_succeeds_and_says_so_once(source, no_torch, tmp_path):
    # Prevents: a traceback, or a silent install without kernels, under build isolation.
    code, output = _pip_install(source, tmp_path, no_torch)
    assert code == 0, output
    assert output.count(SETUP.NO_TORCH) == 1
    assert "Traceback" not in output
    assert not list(tmp_path.glob("megatron_nvfp4/_C*"))
    program = (
        "import runpy, megatron_nvfp4, megatron_nvfp4.recipes\n"
        "extension = runpy.run_path('megatron_nvfp4/backends/extension.py')\n"
        "reasons = [extension[f'why_not_{part}']() for part in ('cpu', 'cuda')]\n"
        "print(megatron_nvfp4.__file__, *reasons, sep='|')\n"
    )
    command = [sys.executable, "-c", program]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{no_torch}"}
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    place, *reasons = run.stdout.strip().split("|")
    assert place.startswith(str(tmp_path))
    assert reasons == [f"not built ({SETUP.NO_TORCH})"] * 2


def test_forced_build_without_torch_fails_with_the_same_sentence(source, no_torch, tmp_path):
    # Prevents: MEGATRON_NVFP4_CUDA=1 being ignored exactly where kernels go missing.
    code, output = _pip_install(source, tmp_path, no_torch, MEGATRON_NVFP4_CUDA="1")
    assert code != 0
    assert SETUP.NO_TORCH in output
    assert "Traceback" not in output


# --- an extension that does not fit ----------------------------------------------------------


@pytest.fixture
def stamped(monkeypatch):
    """Replaces the record of the build, and `_C` by a module that fails to import."""
    mangled = "/x/_C.so: undefined symbol: _ZN3c1017RegisterOperators9checkNameEv"

    def stamp(**changes):
        import torch

        info = {"torch": torch.__version__, "archs": "9.0a", "no_cpu": None, "no_cuda": None}
        module = types.SimpleNamespace(INFO=info | changes)
        monkeypatch.setitem(sys.modules, "megatron_nvfp4._build_info", module)

    def find_spec(name, path=None, target=None):
        if name == "megatron_nvfp4._C":
            raise ImportError(mangled)

    monkeypatch.setattr(sys, "meta_path", [types.SimpleNamespace(find_spec=find_spec)])
    monkeypatch.delitem(sys.modules, "megatron_nvfp4._C", raising=False)
    extension._load_once.cache_clear()
    yield stamp
    extension._load_once.cache_clear()


def test_other_torch_is_named_and_nothing_is_loaded(stamped):
    # Prevents: "undefined symbol: _ZN..." as the only answer after an update of torch.
    import torch

    stamped(torch="1.0.0+cu999")
    expected = f"built for torch 1.0.0+cu999, running {torch.__version__}: rebuild"
    assert extension.why_not_cpu().startswith(expected)
    assert extension.why_not_cuda().startswith(expected)
    assert extension._load_once.cache_info().misses == 0
    with pytest.raises(RuntimeError, match="built for torch"):
        extension.load()


def test_mangled_symbols_only_when_asked_for(stamped):
    # Prevents: a wall of C++ names in a table; and the opposite, no way to see them.
    stamped()
    short = extension.why_not_cpu()
    assert short.startswith("cannot be loaded (undefined symbol): rebuild")
    assert "_ZN3c10" in extension.why_not_cpu(verbose=True)
    assert "_ZN3c10" in extension.why_not_cuda(verbose=True)


def test_missing_toolkit_is_the_reason_for_cuda(stamped):
    # Prevents: "no GPU visible" on a GPU machine whose install had no nvcc.
    stamped(no_cuda="no nvcc at install")
    assert extension.why_not_cuda() == "not built (no nvcc at install)"


@pytest.mark.parametrize(
    ("arch", "runs_on", "not_on"),
    [
        ("8.0", [(8, 0), (8, 9)], [(7, 5), (9, 0)]),
        ("8.0+PTX", [(8, 6), (9, 0), (12, 0)], [(7, 5)]),
        ("8.6", [(8, 6), (8, 9)], [(8, 0)]),
        ("9.0a", [(9, 0)], [(10, 0)]),
        ("10.0a", [(10, 0)], [(10, 3), (12, 0)]),
        ("10.0f", [(10, 0), (10, 3)], [(12, 0)]),
    ],
)
def test_archs_cover_the_gpus_they_run_on(arch, runs_on, not_on):
    # Prevents: "no kernel image" at the first launch, or refusing a GPU that works.
    assert all(extension._covers(arch, *gpu) for gpu in runs_on)
    assert not any(extension._covers(arch, *gpu) for gpu in not_on)


def test_the_extension_of_this_environment_loads():
    # Prevents: `make venv` ending well with an extension that was left out or cannot load.
    if not shutil.which(os.environ.get("CXX", "c++")):
        pytest.skip("no C++ compiler")
    assert extension.why_not_cpu() is None
    import torch

    extension.load()
    assert torch.__version__.split("+")[0] == torch.ops.megatron_nvfp4.build_info()


@pytest.mark.gpu
def test_cuda_kernels_of_this_environment_load():
    # Prevents: a GPU machine with nvcc that silently runs without CUDA kernels.
    if SETUP.find_cuda_home(os.environ) is None:
        pytest.skip("no nvcc")
    assert extension.why_not_cuda() is None


# --- make venv -------------------------------------------------------------------------------

_BASH = shutil.which("bash")


def _script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{_BASH}\n{text}\n")
    path.chmod(0o755)
    return path


def _find(tmp_path: Path, **env: str) -> subprocess.CompletedProcess:
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    if not (tools / "dirname").exists():
        (tools / "dirname").symlink_to(shutil.which("dirname"))
    env = {"PATH": str(tools), "HOME": str(tmp_path), **env}
    command = [_BASH, str(ROOT / "tools/make_venv.sh"), "--find"]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_shim_that_fails_is_passed_over(tmp_path):
    # Prevents: stopping at pyenv's python3.12 shim, which exists though 3.12 is not selected.
    _script(tmp_path / "bin/python3.12", "echo 'pyenv: python3.12: command not found'; exit 127")
    real = _script(tmp_path / ".pyenv/versions/3.12.9/bin/python3.12", f'"{sys.executable}" "$@"')
    run = _find(tmp_path)
    assert (run.returncode, run.stdout.strip()) == (0, str(real)), run.stderr


def test_pyenv_and_uv_are_asked(tmp_path):
    # Prevents: a Python that only `pyenv root` or `uv python find` knows being missed.
    real = _script(tmp_path / "place/versions/3.12.1/bin/python3.12", f'"{sys.executable}" "$@"')
    pyenv = _script(tmp_path / "bin/pyenv", f'echo "{tmp_path}/place"')
    assert _find(tmp_path).stdout.strip() == str(real)
    pyenv.unlink()
    _script(tmp_path / "bin/uv", f'[ "$*" = "python find 3.12" ] && echo "{real}"')
    assert _find(tmp_path).stdout.strip() == str(real)


def test_named_python_comes_first(tmp_path):
    # Prevents: PYTHON=... make venv using another interpreter without a word.
    named = _script(tmp_path / "named/python", f'"{sys.executable}" "$@"')
    _script(tmp_path / "bin/python3.12", f'"{sys.executable}" "$@"')
    assert _find(tmp_path, PYTHON=str(named)).stdout.strip() == str(named)


def test_no_python_names_what_was_tried_and_the_remedy(tmp_path):
    # Prevents: "command not found" as the first thing a new user sees.
    _script(tmp_path / "bin/python3.12", "exit 127")
    _script(tmp_path / "bin/python3", "exit 1")
    run = _find(tmp_path)
    assert run.returncode == 1
    assert run.stdout == ""
    assert "tried: python3.12 python3" in run.stderr
    for remedy in ("apt-get install", "pyenv install 3.12", "uv python install 3.12", "PYTHON="):
        assert remedy in run.stderr


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A small checkout below a name with a space, and a Python that only notes what it is asked."""
    folder = tmp_path / "a b"
    for name in ("tools/make_venv.sh", "pyproject.toml", "setup.py", "csrc/bindings.cpp"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "megatron_nvfp4").mkdir()
    log = tmp_path / "log"
    fake = f"""case "$*" in
  "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo venv >> "{log}" ;;
  *"-r .venv/requirements.txt") echo dependencies >> "{log}"; [ -z "${{FAIL:-}}" ] ;;
  *"-e .") echo build >> "{log}"; touch megatron_nvfp4/_build_info.py ;;
  -) exec "{sys.executable}" - ;;
esac"""
    _script(tmp_path / "python", fake)
    log.touch()
    return folder


def _make_venv(checkout: Path, **env: str) -> list[str]:
    """Steps that one run took."""
    log = checkout.parent / "log"
    log.write_text("")
    env = {**os.environ, "PYTHON": str(checkout.parent / "python"), **env}
    command = [_BASH, str(checkout / "tools/make_venv.sh")]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (run.returncode != 0) == ("FAIL" in env), run.stderr
    return log.read_text().split()


def test_second_run_does_nothing_and_changes_redo_their_step(checkout):
    # Prevents: minutes of pip before each `make test`; and tests run against an old build.
    assert _make_venv(checkout) == ["venv", "dependencies", "build"]
    assert _make_venv(checkout) == []
    (checkout / "csrc/new.cpp").write_text("int x;\n")
    assert _make_venv(checkout) == ["build"]
    assert _make_venv(checkout, MEGATRON_NVFP4_CUDA_ARCHS="9.0a") == ["build"]
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert _make_venv(checkout) == ["dependencies", "build"]
    requirements = (checkout / ".venv/requirements.txt").read_text().split()
    assert "torch==2.11.0" in requirements
    assert not [line for line in requirements if line.startswith("megatron-nvfp4")]


def test_interrupted_or_moved_environment_is_made_again(checkout):
    # Prevents: a half-installed package that pip takes for installed; scripts of another path.
    assert _make_venv(checkout, FAIL="1") == ["venv", "dependencies"]
    assert _make_venv(checkout) == ["venv", "dependencies", "build"]
    moved = checkout.with_name("moved")
    checkout.rename(moved)
    assert _make_venv(moved) == ["venv", "dependencies", "build"]
    _script(moved / ".venv/bin/python", "exit 1")
    assert _make_venv(moved) == ["venv", "dependencies", "build"]


# --- README ----------------------------------------------------------------------------------


def test_make_targets_in_the_readme_exist():
    # Prevents: a first command that answers "No rule to make target".
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    targets = re.findall(r"^(?:\w+=\S+ )*make (\w+)", "\n".join(blocks), re.MULTILINE)
    assert targets[:2] == ["demo", "test"]
    defined = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(targets) <= set(defined)
