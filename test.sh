#!/usr/bin/env bash
# Sets up (setup.sh has the switches) and runs the tests that every change needs. `./test.sh all` runs
# all tests of CI; `./test.sh long` also runs those for a release (tests/long.sh). Tests that need a
# GPU are skipped, with the reason, without one. Other arguments go to ctest: ./test.sh -L unit,
# ./test.sh -R shard; with them, and with LONGSPAN_PYTHON=OFF, the Python package is skipped.
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
work=$(mktemp -d) # files that tests leave go with it
trap 'rm -rf "$work"' EXIT
export TMPDIR=$work
# Twice the cores: many tests wait for ranks that start, are stopped, or are dead.
ctest --test-dir "$build" --no-tests=error --output-on-failure --parallel "$((2 * $(nproc)))" \
  ${labels:+-LE "^($labels)$"} "$@"
[ "$python" = OFF ] || LONGSPAN_TEST_TIER=$tier python/test.sh "$build"
