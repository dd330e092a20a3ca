#!/usr/bin/env bash
# Makes .venv with the pinned dependencies and the built package, or does nothing if it is current.
#   make_venv.sh          make, repair or update .venv
#   make_venv.sh --find   print the Python 3.12 that would be used
# .venv/.stamp holds what the last complete run saw; no stamp means a run was cut short, and a
# half-made environment is made again from nothing (pip cannot tell which files are missing).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tried=()

works() { # a pyenv shim exists for versions that are not selected, and fails when run
    [ -n "$1" ] && command -v "$1" > /dev/null 2>&1 || return 1
    tried+=("$1")
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' \
        > /dev/null 2>&1
}

find_python() { # sets $python
    local root candidate
    local candidates=("${PYTHON:-}" python3.12)
    local roots=("${PYENV_ROOT:-}" "${HOME:-}/.pyenv")
    if command -v pyenv > /dev/null 2>&1; then
        roots+=("$(pyenv root 2> /dev/null || true)")
    fi
    for root in "${roots[@]}"; do
        for candidate in "$root"/versions/3.12*/bin/python3.12; do
            candidates+=("$candidate")
        done
    done
    if command -v uv > /dev/null 2>&1; then
        candidates+=("$(uv python find 3.12 2> /dev/null || true)")
    fi
    for candidate in "${candidates[@]}" python3; do
        if works "$candidate"; then
            python=$(command -v "$candidate")
            return
        fi
    done
    {
        echo "make venv: no working Python 3.12 (with the venv and ensurepip modules) was found."
        echo "  tried: ${tried[*]:-nothing: no python3.12, pyenv, uv or python3 on PATH}"
        echo "  remedy: one of 'apt-get install python3.12 python3.12-venv python3.12-dev'," \
            "'pyenv install 3.12', 'uv python install 3.12';"
        echo "  or name an interpreter: PYTHON=/path/to/python3.12 make venv"
    } >&2
    exit 1
}

checksum() { cat "$@" | cksum; }

dependencies_key() { # the path counts: scripts of a moved environment name the old one
    echo "dependencies: $PWD $(checksum pyproject.toml tools/make_venv.sh)"
}

build_key() {
    local sources tools
    sources=$(find csrc -type f -exec cksum {} + | sort | cksum)
    tools="$(command -v "${CXX:-c++}" || true) $(command -v nvcc || true) ${CUDA_HOME:-}"
    echo "build: $(checksum setup.py) $sources $tools" \
        "${MEGATRON_NVFP4_CUDA:-} ${MEGATRON_NVFP4_CUDA_ARCHS:-}" \
        "${MEGATRON_NVFP4_BLACKWELL:-} ${CUTLASS_HOME:-}"
}

requirements() { # build-system and the dev and demo extras, their references to each other resolved
    .venv/bin/python - << 'PYTHON'
import tomllib

with open("pyproject.toml", "rb") as file:
    config = tomllib.load(file)
name, extras = config["project"]["name"], config["project"]["optional-dependencies"]
wanted = {}
todo = [*config["build-system"]["requires"], f"{name}[dev]", f"{name}[demo]"]
todo += config["project"]["dependencies"]
while todo:
    requirement = todo.pop(0)
    if requirement.startswith(name + "["):
        todo += extras[requirement[len(name) + 1 : -1]]
    else:
        wanted[requirement] = None
print("\n".join(wanted))
PYTHON
}

if [ "${1:-}" = --find ]; then
    find_python
    echo "$python"
    exit
fi

# What the last build said of itself; another environment's install into this checkout changes it.
record() {
    cksum megatron_nvfp4/_build_info.py 2> /dev/null || echo "no build"
}

stamp=.venv/.stamp
dependencies=$(dependencies_key)
build=$(build_key)
seen=$(cat "$stamp" 2> /dev/null || true)
if [ "$seen" = "$dependencies"$'\n'"$build"$'\n'"$(record)" ] && .venv/bin/python -c '' 2> /dev/null; then
    exit
fi

here="dependencies: $PWD "
if [ "${seen#"$here"}" = "$seen" ] || ! .venv/bin/python -c 'import pip' 2> /dev/null; then
    find_python
    [ ! -e .venv ] || echo "make venv: .venv is incomplete or was made elsewhere; making it again"
    echo "make venv: $("$python" --version) at $python"
    rm -rf .venv
    "$python" -m venv .venv
    seen=
fi
pip=(.venv/bin/python -m pip --disable-pip-version-check)
if [ "${seen%%$'\n'*}" != "$dependencies" ]; then
    echo "make venv: installing pinned dependencies (about 5 GB with torch, once)"
    rm -f "$stamp"
    requirements > .venv/requirements.txt
    "${pip[@]}" install --quiet -r .venv/requirements.txt
    # CUTLASS's headers, to compile the Blackwell kernel with, in a folder of their own: the package
    # asks for Python packages that headers do not need, and `pip check` would miss them.
    "${pip[@]}" install --quiet --no-deps --upgrade --target .venv/cutlass nvidia-cutlass==4.2.0.0
fi
# A build that fails or is interrupted must not cost the dependencies again.
printf '%s\n' "$dependencies" > "$stamp"
echo "make venv: building megatron_nvfp4"
export CUTLASS_HOME="${CUTLASS_HOME:-$PWD/.venv/cutlass/cutlass_library/source}"
"${pip[@]}" install --quiet --no-build-isolation --no-deps -e .
"${pip[@]}" check
.venv/bin/python -c '
from megatron_nvfp4.backends import extension
print("make venv: kernels: cpu:", extension.why_not_cpu() or "built",
      "| cuda:", extension.why_not_cuda() or "built")'
printf '%s\n%s\n%s\n' "$dependencies" "$build" "$(record)" > "$stamp"
