#!/usr/bin/env bash
# Sets up (setup.sh has the switches) and runs the tests that every change needs. `./test.sh all` runs
# all that CI runs; `./test.sh long` runs those for a release too (tests/long.sh). What needs a GPU is
# skipped, with the reason, where there is none. Other arguments go to ctest: ./test.sh -L unit,
# ./test.sh -R shard; with them, and with LONGSPAN_PYTHON=OFF, the Python package is left out.
set -euo pipefail
cd "$(dirname "$0")"
source ./setup.sh all

python=${LONGSPAN_PYTHON:-ON} tier=quick without=(more long)
case ${1:-} in
  '') ;;
  all) tier=all without=(long) && shift ;;
  long) tier=long without=() && shift ;;
  *) without=() ;;
esac
[ $# -eq 0 ] || python=OFF
[ -z "${LONGSPAN_SKIP_SETUP:-}" ] || python=OFF without+=(packaging) # these build
labels=$(IFS='|' && echo "${without[*]}")
work=$(mktemp -d) # what tests leave behind goes with it
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
# Twice the cores: many tests wait, for ranks that start, that are stopped, or that are dead.
ctest --test-dir "$build" --no-tests=error --output-on-failure --parallel "$((2 * $(nproc)))" \
  ${labels:+-LE "^($labels)$"} "$@"
[ "$python" = OFF ] || LONGSPAN_TEST_TIER=$tier python/test.sh "$build"
