# shellcheck shell=bash
# What the scripts and pip build for GPUs: code only for those of this machine, since every
# architecture costs minutes. Sourced by setup.sh, whose head has the switches, and run by
# choose_cuda.cmake for the Python package: four lines on stdout, and messages on stderr.

say() { printf 'longspan: %s\n' "$*"; }
fail() { say "$*" >&2; exit 1; }
is_older() { [ "$1" != "$2" ] && [ "$(printf '%s\n' "$@" | sort -V | head -n 1)" = "$1" ]; }

# Compute capabilities of the usable NVIDIA GPUs ("8.0 9.0"), `unknown` for one without a
# description. /proc/driver/nvidia does not mean a GPU: a container without any has it too.
gpus_here() {
  local smi found
  for smi in nvidia-smi /usr/lib/wsl/lib/nvidia-smi; do # WSL's is not always on the PATH
    found=$(timeout 30 "$smi" --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
      grep -Ex '[0-9]+\.[0-9]+' | sort -Vu | xargs) || true
    if [ -z "$found" ] && timeout 30 "$smi" -L 2>/dev/null | grep '^GPU ' >/dev/null; then
      found=unknown # a driver too old for that query
    fi
    if [ -n "$found" ]; then echo "$found"; return; fi
  done
  if compgen -G '/dev/nvidia[0-9]*' >/dev/null; then echo unknown; fi
}

nvcc_here() {
  command -v "${CUDACXX:-nvcc}" || command -v "${CUDA_PATH:-/usr/local/cuda}/bin/nvcc" || true
}

# The targets of nvcc ($1) for a compute capability ($2): its own machine code; or else that of a
# lower one of the same generation; or else PTX, which the driver translates at the first start.
architecture_of() {
  local asked=${2/./} known code='' ptx=80
  if [ "$asked" = 90 ]; then echo 90a-real; return; fi # with the features of Hopper only
  for known in $("$1" --list-gpu-arch | sed -n 's/^compute_\([0-9]*\)$/\1/p' | sort -n); do
    [ "$known" -le "$asked" ] || break
    ptx=$known
    [ $((known / 10)) -ne $((asked / 10)) ] || code=$known
  done
  if [ -n "$code" ]; then echo "$code-real"; else echo "$ptx-virtual"; fi
}

# Sets `cuda`, `architectures` (empty: those of CMakeLists.txt), and, for cuda OFF, `why`; prints them.
choose_cuda() {
  local gpus gpu nvcc release codes=()
  cuda=${LONGSPAN_CUDA:-AUTO} architectures=${LONGSPAN_CUDA_ARCHITECTURES:-} why=''
  case $cuda in
    OFF)
      why='LONGSPAN_CUDA=OFF was asked for'
      say 'building for CPUs only, as LONGSPAN_CUDA says'
      return ;;
    ON) ;;
    AUTO) [ -z "$architectures" ] || cuda=ON ;;
    *) fail "LONGSPAN_CUDA is $cuda, and can be ON, OFF or AUTO" ;;
  esac
  gpus=$(gpus_here)
  nvcc=$(nvcc_here)
  [ -z "$nvcc" ] || export CUDACXX=$nvcc
  if [ "$cuda" = AUTO ]; then
    if [ -z "$gpus" ]; then
      why='no NVIDIA GPU was seen'
      say 'no NVIDIA GPU is seen: building for CPUs only. LONGSPAN_CUDA=ON builds the CUDA'
      say 'part too, for the architectures that LONGSPAN_CUDA_ARCHITECTURES names.'
      cuda=OFF
      return
    fi
    [ -z "$nvcc" ] || release=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
    if [ "$gpus" != unknown ] && is_older "${gpus##* }" 8.0; then
      why='compute capability 8.0 is the oldest that longspan has code for'
    elif [ -z "$nvcc" ]; then
      why='nvcc was not found (install the CUDA toolkit, 12.5 or newer)'
    elif is_older "${release:-0}" 12.5; then
      why="$nvcc is ${release:-of no known release}, and 12.5 is needed"
    fi
    if [ -n "$why" ]; then
      say "a GPU is seen (compute capability $gpus), but $why: building for CPUs only"
      cuda=OFF
      return
    fi
  fi
  if [ -z "$architectures" ] && [ -n "$nvcc" ] && [[ $gpus != *unknown* ]]; then
    for gpu in $gpus; do
      is_older "$gpu" 8.0 || codes+=("$(architecture_of "$nvcc" "$gpu")")
    done
    architectures=$(IFS=';' && echo "${codes[*]}")
  fi
  say "building the CUDA part for ${architectures:-every architecture in CMakeLists.txt} (GPUs here:" \
    "${gpus:-none}; LONGSPAN_CUDA_ARCHITECTURES chooses others)"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -euo pipefail
  choose_cuda >&2
  printf '%s\n' "$cuda" "$architectures" "${CUDACXX:-}" "$why"
fi
