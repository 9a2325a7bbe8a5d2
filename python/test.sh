#!/usr/bin/env bash
# python/test.sh [BUILD [ARGUMENTS]]: installs the Python package into a virtual environment of its
# own, over the library that BUILD (default: build/default) holds already, and runs its tests.
# ARGUMENTS go to pytest. The environment is made once, in BUILD/venv, from packages of PyPI. Tests
# that need torch run where it is installed; LONGSPAN_PYTHON_TORCH=1 installs it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:-build/default}
mkdir -p "$build"
build=$(cd "$build" && pwd)
shift $(($# > 0))
venv=$build/venv

packages=(scikit-build-core nanobind numpy ml_dtypes pytest pytest-xdist hypothesis)
! command -v mpirun >/dev/null || packages+=(mpi4py)
[ -z "${LONGSPAN_PYTHON_TORCH:-}" ] || packages+=(torch transformers accelerate)
fail() {
  printf 'longspan: %s\n' "$*" >&2
  exit 1
}
[ -x "$venv/bin/pip" ] || python3 -m venv "$venv" ||
  fail 'python3 makes no virtual environment: install the package python3-venv'
if ! "$venv/bin/pip" install --quiet --disable-pip-version-check --no-index "${packages[@]}" 2>/dev/null
then
  "$venv/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}" ||
    fail "pip cannot get ${packages[*]}; LONGSPAN_PYTHON=OFF leaves the Python package out"
fi

options=(-C "cmake.define.LONGSPAN_PREBUILT=$build/prefix" -C "build-dir=$build/python")
! command -v ccache >/dev/null || options+=(-C cmake.define.CMAKE_CXX_COMPILER_LAUNCHER=ccache)
cmake --install "$build" --prefix "$build/prefix" >/dev/null
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
  --force-reinstall . "${options[@]}"

# Files that tests write go with this folder; BUILD keeps what makes the next run faster, and cases
# that failed.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work HYPOTHESIS_STORAGE_DIRECTORY=$build/hypothesis PYTHONDONTWRITEBYTECODE=1
export TORCHINDUCTOR_CACHE_DIR=$build/inductor
# Several processes share the cores. Threads of OpenMP that wait for a core make a small product
# take a hundred times as long.
export OMP_NUM_THREADS=1
# All tests run on all cores; chosen tests run in one process.
[ $# -gt 0 ] || set -- --numprocesses "$(nproc)" --dist loadfile
"$venv/bin/python" -m pytest --quiet python/tests "$@"
