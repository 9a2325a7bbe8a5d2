#!/usr/bin/env bash
# Sets up (setup.sh has the switches) and runs every test; what needs a GPU is skipped, with the
# reason, where there is none. Arguments go to ctest: ./test.sh -L unit, ./test.sh -R shard; with
# arguments, and with LONGSPAN_PYTHON=OFF, the Python package is left out.
set -euo pipefail
cd "$(dirname "$0")"
source ./setup.sh all

work=$(mktemp -d) # what tests leave behind goes with it
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work

without=()
[ -z "${LONGSPAN_SKIP_SETUP:-}" ] || without=(-LE packaging) # these build, so they need a set-up
# Twice the cores: many tests wait, for ranks that start, that are stopped, or that are dead.
ctest --test-dir "$build" --no-tests=error --output-on-failure --parallel "$((2 * $(nproc)))" \
  "${without[@]}" "$@"

if [ $# -eq 0 ] && [ -z "${LONGSPAN_SKIP_SETUP:-}" ] && [ "${LONGSPAN_PYTHON:-ON}" != OFF ]; then
  python/test.sh "$build"
fi
