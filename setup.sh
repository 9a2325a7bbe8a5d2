#!/usr/bin/env bash
# Installs missing packages (of Debian or Ubuntu), configures, and builds for this machine: the CUDA
# part where a GPU is found, only for its architecture, or else only for CPUs. test.sh and demo.sh
# begin with it; a second run has nothing to do. Arguments: the targets to build (default: all).
# Switches, all from the environment:
#
#   LONGSPAN_BUILD_DIR=DIR    where to build (default: build/default)
#   LONGSPAN_CUDA=ON|OFF      build the CUDA part also without a GPU, or never (default: AUTO)
#   LONGSPAN_CUDA_ARCHITECTURES=LIST   for these ("80-real;90a-real"), which implies CUDA;
#                             default: for the GPUs found, or without one for those of
#                             CMakeLists.txt
#   LONGSPAN_HOST_TARGETS=all kernels for every x86 CPU, for a build that runs elsewhere
#                             (default: native, without the instructions that this one lacks)
#   LONGSPAN_SKIP_INSTALL=1   install nothing: the build's dependencies are here already
#   LONGSPAN_SKIP_SETUP=1     install and build nothing: DIR was built beforehand, maybe elsewhere
#   LONGSPAN_DRY_RUN=1        print what would be installed and run, and end
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
build=${LONGSPAN_BUILD_DIR:-build/default} dry=${LONGSPAN_DRY_RUN:-}

# Package, the command that shows that it is installed (or -), its purpose.
packages='
g++                 g++      the C++ compiler
cmake               cmake    the build system, 3.25 or newer
ninja-build         ninja    runs the build
python3             python3  runs a few checks of the sources
python3-dev         -        the headers of Python, for its package
python3-venv        -        virtual environments of Python, for the tests of its package
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

source cmake/choose_cuda.sh # say, fail, is_older, choose_cuda
step() { if [ -n "$dry" ]; then say "would run: $*"; else "$@"; fi; }

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
  if [ -n "$dry" ]; then say "would install ${missing[*]}"; return; fi

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

  while read -r package probe what; do # one by one, to name those that are unavailable
    if [ -z "$package" ] || is_here "$package" "$probe"; then continue; fi
    "${apt[@]}" install -y --no-install-recommends "$package" >/dev/null && continue
    say "cannot install $package ($what)" >&2
    lost=1
  done <<<"$packages"
  [ $lost -eq 0 ] || fail 'Debian 12 and Ubuntu 24.04 have all of these (Ubuntu in its component' \
    'universe: add-apt-repository universe). Elsewhere install them from their own projects, then' \
    'set LONGSPAN_SKIP_INSTALL=1.'
}

build_targets() {
  local found options=("-DLONGSPAN_HOST_TARGETS=${LONGSPAN_HOST_TARGETS:-native}")
  if [ -z "$dry" ]; then
    found=$(cmake --version | sed -n '1s/[^0-9]*//p')
    ! is_older "$found" 3.25 ||
      fail "CMake is $found and 3.25 is needed; python3 -m pip install cmake gets a newer one"
  fi
  ! command -v ccache >/dev/null ||
    options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
  choose_cuda
  if [ -n "$architectures" ]; then
    options+=("-DLONGSPAN_CUDA_ARCHITECTURES=$architectures")
  else
    options+=(-ULONGSPAN_CUDA_ARCHITECTURES) # the request of an earlier run
  fi
  step cmake --preset default -B "$build" -DLONGSPAN_CUDA="$cuda" "${options[@]}"
  if [ "$cuda" = AUTO ] && [ -z "$dry" ] && ! grep -q '^LONGSPAN_HAS_CUDA:.*=ON$' "$build/CMakeCache.txt"
  then
    say 'the CUDA part is left out, for the reason above: the GPUs stay unused. LONGSPAN_CUDA=ON'
    say 'makes that an error.'
  fi
  step cmake --build "$build" --target "$@"
}

# A folder that was built elsewhere and moved here names its old place in the lists of tests.
settle_in() {
  local cache=$build/CMakeCache.txt old_build old_source here
  [ -f "$cache" ] || fail "LONGSPAN_SKIP_SETUP is set, and $build holds no build"
  old_build=$(sed -n 's/^CMAKE_CACHEFILE_DIR:INTERNAL=//p' "$cache")
  old_source=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$cache")
  here=$(cd "$build" && pwd)
  if [ "$old_build" = "$here" ] && [ "$old_source" = "$PWD" ]; then return; fi
  [ "$old_build" != "$here" ] || [ ! -e "$old_source/CMakeLists.txt" ] ||
    fail "LONGSPAN_SKIP_SETUP is set, and $here is the build of $old_source: run the script there, or" \
      'copy the folder to this one first'
  find "$build" \( -name CTestTestfile.cmake -o -name CMakeCache.txt -o -name '*_tests*.cmake' \) \
    -exec sed -i "s|$old_build|$here|g; s|$old_source|$PWD|g" {} +
}

source ./env.sh # settings for Open MPI

if [ -n "${LONGSPAN_SKIP_SETUP:-}" ]; then
  settle_in
else
  [ -n "${LONGSPAN_SKIP_INSTALL:-}" ] || install_missing
  build_targets "${@:-all}"
  [ -z "$dry" ] || exit 0
fi
