"""Loads the compiled extension `megatron_nvfp4._C`, or says why it cannot be used.

What the install left out and which torch it compiled for stand in `megatron_nvfp4/_build_info.py`,
written by setup.py. An extension is never loaded under another torch than that one: its C++
interface changes between versions, and loading may fail or, worse, not fail.
"""

import functools
import importlib
import re

_REBUILD = "rebuild with: pip install --no-build-isolation --no-deps -e ."


def load() -> None:
    """Registers the operators `torch.ops.megatron_nvfp4.*`; a second call does nothing.

    Raises RuntimeError with the text of `why_not_cpu` if the extension cannot be used.
    """
    reason = why_not_cpu()
    if reason:
        raise RuntimeError(f"megatron_nvfp4._C: {reason}")


@functools.cache
def functions():
    """The module `_C` itself, for functions that take Python objects and so are no operators, or None."""
    return None if why_not_cpu() else importlib.import_module("megatron_nvfp4._C")


def why_not_cpu(verbose: bool = False) -> str | None:
    """Why the C++ kernels cannot run here, or None; loads the extension to find out.

    `verbose` adds the loader's own message, mangled symbols included.
    """
    return _why_not_built("no_cpu") or _import_error(verbose)


def why_not_cuda(verbose: bool = False) -> str | None:
    """Why the CUDA kernels cannot run on the current GPU, or None. Does not run a kernel."""
    reason = _why_not_built("no_cuda") or _import_error(verbose)
    if reason:
        return reason
    import torch

    if not torch.cuda.is_available():
        return "no CUDA GPU is visible"
    archs = _build_info()["archs"].split(";")
    major, minor = torch.cuda.get_device_capability()
    if any(_covers(arch, major, minor) for arch in archs):
        return None
    return (
        f"built for {', '.join(archs)}, running on {major}.{minor}: "
        f"set MEGATRON_NVFP4_CUDA_ARCHS={major}.{minor} and {_REBUILD}"
    )


def _covers(arch: str, major: int, minor: int) -> bool:
    """Whether code for `arch` ("9.0a", "10.0f", "8.0", "8.0+PTX") runs on a GPU.

    Source: CUDA C++ programming guide, compute capability and binary compatibility.
    """
    match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", arch)
    if not match:
        return False
    target, exact, ptx = (int(match[1]), int(match[2])), match[3] == "a", bool(match[4])
    if exact:
        return target == (major, minor)
    if ptx and not match[3]:
        return target <= (major, minor)
    return target[0] == major and target[1] <= minor


def _build_info() -> dict[str, str | None] | None:
    try:
        return importlib.import_module("megatron_nvfp4._build_info").INFO
    except ModuleNotFoundError:
        return None


def _why_not_built(part: str) -> str | None:
    info = _build_info()
    if info is None:
        return f"not built (no record of a build; {_REBUILD})"
    if info[part]:
        return f"not built ({info[part]})"
    import torch

    if info["torch"] != torch.__version__:
        return f"built for torch {info['torch']}, running {torch.__version__}: {_REBUILD}"
    return None


def _import_error(verbose: bool) -> str | None:
    text = _load_once()
    if text is None:
        return None
    if not verbose:
        text = re.sub(r"undefined symbol: \S+", "undefined symbol", text.splitlines()[0])
        text = re.sub(r"^/.*?: ", "", text)  # the loader begins with the path of the file
    return f"cannot be loaded ({text}): {_REBUILD}"


@functools.cache
def _load_once() -> str | None:
    """Imports `_C`, which needs torch's libraries loaded; the loader's message if that fails."""
    import torch  # noqa: F401

    try:
        importlib.import_module("megatron_nvfp4._C")
    except (ImportError, OSError) as error:
        return str(error)
    return None
