#!/usr/bin/env bash
# Installs what is missing (packages of Debian or Ubuntu), configures and builds. test.sh and
# demo.sh begin with it; a second run finds nothing to do. Switches, all from the environment:
#
#   LONGSPAN_BUILD_DIR=DIR    where to build (default: build/default)
#   LONGSPAN_CUDA=ON|OFF      default AUTO: the CUDA part is built where nvcc is found
#   LONGSPAN_SKIP_INSTALL=1   install nothing: what the build needs is here already
#   LONGSPAN_SKIP_SETUP=1     install and build nothing: DIR was built beforehand, maybe elsewhere
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
build=${LONGSPAN_BUILD_DIR:-build/default}

# Package, the command that shows it is there (or -), what it is.
packages='
g++                 g++      the C++ compiler
cmake               cmake    the build system, 3.25 or newer
ninja-build         ninja    runs the build
python3             python3  runs a few checks of the sources
openmpi-bin         mpirun   Open MPI: starts the ranks
libopenmpi-dev      -        Open MPI, for compiling
libhwy-dev          -        Highway: SIMD
libfmt-dev          -        fmt: text
libcli11-dev        -        CLI11: options of the command
nlohmann-json3-dev  -        JSON for Modern C++: reports
libeigen3-dev       -        Eigen: the float64 reference
librandom123-dev    -        Random123: inputs that do not depend on the ranks
libgtest-dev        -        GoogleTest
libgmock-dev        -        GoogleTest, its matchers
librapidcheck-dev   -        RapidCheck: tests of laws
libblis-dev         -        BLIS: matrix products of an example'

say() { printf 'longspan: %s\n' "$*"; }
fail() { say "$*" >&2; exit 1; }

is_here() { # package, command
  if [ "$2" != - ]; then command -v "$2" >/dev/null; return; fi
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

install_missing() {
  local missing=() apt=() lost=0 package probe what
  while read -r package probe what; do
    [ -z "$package" ] || is_here "$package" "$probe" || missing+=("$package")
  done <<<"$packages"
  [ ${#missing[@]} -gt 0 ] || return 0

  say "installing ${missing[*]}"
  command -v apt-get >/dev/null ||
    fail 'there is no apt-get here: install these by other means, then set LONGSPAN_SKIP_INSTALL=1'
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || fail 'installing needs root: run as root, or install sudo'
    apt=(sudo)
  fi
  apt+=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0)
  "${apt[@]}" update || say 'the list of packages could not be renewed; trying the old one'
  "${apt[@]}" install -y --no-install-recommends "${missing[@]}" >/dev/null && return

  while read -r package probe what; do # one by one, to name those that cannot be had
    if [ -z "$package" ] || is_here "$package" "$probe"; then continue; fi
    "${apt[@]}" install -y --no-install-recommends "$package" >/dev/null && continue
    say "cannot install $package ($what)" >&2
    lost=1
  done <<<"$packages"
  [ $lost -eq 0 ] || fail 'Debian 12 and Ubuntu 24.04 have all of these (Ubuntu in its component' \
    'universe: add-apt-repository universe). Elsewhere install them from their own projects, then' \
    'set LONGSPAN_SKIP_INSTALL=1.'
}

build_all() {
  local found options=()
  found=$(cmake --version | sed -n '1s/[^0-9]*//p')
  [ "$(printf '3.25\n%s\n' "$found" | sort -V | head -n 1)" = 3.25 ] ||
    fail "CMake is $found and 3.25 is needed; python3 -m pip install cmake gets a newer one"
  ! command -v ccache >/dev/null ||
    options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
  cmake --preset default -B "$build" -DLONGSPAN_CUDA="${LONGSPAN_CUDA:-AUTO}" "${options[@]}"
  cmake --build "$build"
}

# A folder that was built elsewhere and carried here names its old place in the lists of tests.
settle_in() {
  local cache=$build/CMakeCache.txt old_build old_source here
  [ -f "$cache" ] || fail "LONGSPAN_SKIP_SETUP is set, and $build holds no build"
  old_build=$(sed -n 's/^CMAKE_CACHEFILE_DIR:INTERNAL=//p' "$cache")
  old_source=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$cache")
  here=$(cd "$build" && pwd)
  if [ "$old_build" = "$here" ] && [ "$old_source" = "$PWD" ]; then return; fi
  find "$build" \( -name CTestTestfile.cmake -o -name CMakeCache.txt -o -name '*_tests*.cmake' \) \
    -exec sed -i "s|$old_build|$here|g; s|$old_source|$PWD|g" {} +
}

# Open MPI lets root start ranks only when told twice; containers deny it the copy across processes.
if [ "$(id -u)" -eq 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
export OMPI_MCA_btl_vader_single_copy_mechanism=none

if [ -n "${LONGSPAN_SKIP_SETUP:-}" ]; then
  settle_in
else
  [ -n "${LONGSPAN_SKIP_INSTALL:-}" ] || install_missing
  build_all
fi
