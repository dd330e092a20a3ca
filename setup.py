"""Builds `megatron_nvfp4._C`, or leaves it out and says why; on request `_blackwell`. README.md, Build."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

# PTX for sm_80 runs on every later GPU; the "a" targets have one GPU's tensor core instructions.
DEFAULT_ARCHS, BLACKWELL_ARCHS = "8.0+PTX;9.0a;10.0a;10.3a", "10.0a;10.3a"
NO_TORCH = "torch is not visible to the build; kernels skipped; use --no-build-isolation"
NO_CUTLASS = "has no CUTLASS; set CUTLASS_HOME or pip install --no-deps nvidia-cutlass==4.2.0.0"
# One FP32 rounding per operation: no contraction to FMA, no fast math, subnormals kept.
CXX = "-O3 -ffp-contract=off -fno-fast-math".split()
NVCC = "-O3 -fmad=false -ftz=false -Xcompiler=-ffp-contract=off -DNDEBUG --compress-mode=size"
OMP = ["-fopenmp"] if sys.platform == "linux" else []


def find_cuda_home(env, default="/usr/local/cuda") -> str | None:
    """Toolkit root with nvcc and its headers (an nvcc on PATH may be a wrapper script)."""
    nvcc = shutil.which("nvcc", path=env.get("PATH", ""))
    on_path = nvcc and Path(nvcc).resolve().parents[1]
    for root in (env.get("CUDA_HOME"), env.get("CUDA_PATH"), on_path, default):
        if root and Path(root, "bin/nvcc").exists() and Path(root, "include/cuda.h").exists():
            return str(root)
    return None


def find_cutlass(env, no_cuda: str | None) -> str | None:
    """CUTLASS's headers if MEGATRON_NVFP4_BLACKWELL=1 asks for the GEMM that is built on them."""
    mode = env.get("MEGATRON_NVFP4_BLACKWELL") or "0"
    home = env.get("CUTLASS_HOME") or f"{sysconfig.get_path('purelib')}/cutlass_library/source"
    is_there = Path(home, "include/cutlass/cutlass.h").exists()
    reason = no_cuda or (None if is_there else f"{home} {NO_CUTLASS}")
    if mode not in ("0", "1") or (mode == "1" and reason):
        why = reason if mode == "1" else "use 1 (build), 0 (leave out) or unset it"
        raise SystemExit(f"MEGATRON_NVFP4_BLACKWELL={mode}: {why}")
    return f"{home}/include" if mode == "1" else None


def compare_toolkit(torch_cuda: str, nvcc: str) -> str | None:
    """A line if the minor versions differ; stops the build if the major versions do."""
    if torch_cuda.split(".")[0] != nvcc.split(".")[0]:
        raise SystemExit(
            f"nvcc is CUDA {nvcc} but torch was built for CUDA {torch_cuda}: point CUDA_HOME to a "
            f"CUDA {torch_cuda} toolkit, or leave CUDA out with MEGATRON_NVFP4_CUDA=0"
        )
    return f"building with CUDA {nvcc} for torch's {torch_cuda}" if torch_cuda != nvcc else None


def gencode(archs: str) -> list[str]:
    """nvcc's flags for a list such as "8.0+PTX;9.0a"."""
    split = [arch.replace(".", "").partition("+") for arch in archs.split(";")]
    code = {"": "sm_{0}", "PTX": "[sm_{0},compute_{0}]"}
    return [f"-gencode=arch=compute_{n},code={code[ptx].format(n)}" for n, _, ptx in split]


def max_jobs(cores: int, free_bytes: int, cuda: bool) -> int:
    """Compilers at once: an nvcc takes about 4 GB, a C++ compiler about 1."""
    return max(1, min(cores, free_bytes // ((4 if cuda else 1) << 30)))


def why_skipped(mode: str, torch, compiler, cuda_home, cu_files) -> tuple[str | None, str | None]:
    """Why the C++ part and why the CUDA part is left out; None for what is built."""
    if mode not in ("", "0", "1"):
        raise SystemExit(f"MEGATRON_NVFP4_CUDA={mode}: use 1 (require), 0 (leave out) or unset it")
    needs = {NO_TORCH: torch, "no C++ compiler with Python.h at install; kernels skipped": compiler}
    cpu = next((reason for reason, met in needs.items() if not met), None)
    needs["MEGATRON_NVFP4_CUDA=0 at install"] = mode != "0"
    needs["torch is a CPU build"] = torch and torch.version.cuda
    needs |= {"no nvcc at install": cuda_home, "no csrc/cuda/*.cu": cu_files}
    cuda = next((reason for reason, met in needs.items() if not met), None)
    if mode == "1" and cuda:
        raise SystemExit(f"MEGATRON_NVFP4_CUDA=1, but CUDA cannot be built: {cuda}")
    return cpu, cuda


class RecordBuild(build_py):
    def run(self) -> None:
        super().run()
        print(self.note or "kernels: C++ and CUDA", file=sys.stderr)
        package = Path("" if self.editable_mode else self.build_lib, "megatron_nvfp4")
        (package / "_build_info.py").write_text(f"INFO = {self.info}\n")


def main() -> None:
    env, home = os.environ, find_cuda_home(os.environ)
    try:
        import torch
    except ImportError:
        torch = None
    compiler = shutil.which(env.get("CXX", "c++").split()[0])
    compiler = compiler and Path(sysconfig.get_path("include"), "Python.h").exists()
    cpp, cu = sorted(glob("csrc/*.cpp") + glob("csrc/cpu/*.cpp")), sorted(glob("csrc/cuda/*.cu"))
    cpu, cuda = why_skipped(env.get("MEGATRON_NVFP4_CUDA", ""), torch, compiler, home, cu)
    cutlass, note = find_cutlass(env, cuda), f"CUDA skipped: {cuda}"
    archs = env.get("MEGATRON_NVFP4_CUDA_ARCHS", DEFAULT_ARCHS)
    if not cuda:
        nvcc = subprocess.check_output([f"{home}/bin/nvcc", "--version"], text=True)
        note = compare_toolkit(torch.version.cuda, re.search(r"release (\d+\.\d+)", nvcc)[1])
        env["CUDA_HOME"] = home  # torch's own guess follows PATH and stops at a wrapper script
        # torch's headers include cuBLAS's and cuSPARSE's, which a small toolkit may lack.
        found = [*glob(f"{torch.__path__[0]}/../nvidia/*/include"), env.get("CPLUS_INCLUDE_PATH")]
        env["CPLUS_INCLUDE_PATH"] = ":".join(filter(None, found))
    extensions, commands = [], {"build_py": RecordBuild}
    if not cpu:
        from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        env.setdefault("MAX_JOBS", str(max_jobs(os.cpu_count(), memory, not cuda)))
        flags = {"cxx": CXX + OMP, "nvcc": NVCC.split() + gencode(archs)}
        kind, sources = (CppExtension, cpp) if cuda else (CUDAExtension, cpp + cu)
        name, commands["build_ext"] = "megatron_nvfp4._C", BuildExtension
        extensions = [kind(name, sources, extra_compile_args=flags, extra_link_args=OMP)]
        if cutlass:
            flags = flags | {"nvcc": [*NVCC.split(), *gencode(BLACKWELL_ARCHS), f"-I{cutlass}"]}
            sources = sorted(glob("csrc/blackwell/*.cpp") + glob("csrc/blackwell/*.cu"))
            extensions += [kind("megatron_nvfp4._blackwell", sources, extra_compile_args=flags)]
    info = {"torch": torch and torch.__version__, "archs": archs, "no_cpu": cpu, "no_cuda": cuda}
    info["blackwell"] = bool(cutlass)
    info["revision"] = subprocess.getoutput("git rev-parse --verify -q HEAD 2> /dev/null")
    RecordBuild.note, RecordBuild.info = cpu or note, info
    # A folder that outlives pip's, for ninja; editable builds look options up by class name.
    options = {"BuildExtension": {"build_temp": "build/temp"}}
    setup(ext_modules=extensions, cmdclass=commands, options=options)


if __name__ == "__main__":
    main()
