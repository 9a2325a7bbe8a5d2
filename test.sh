#!/usr/bin/env bash
# Sets up (setup.sh has the switches) and runs every test; what needs a GPU is skipped, with the
# reason, where there is none. Arguments go to ctest: ./test.sh -L unit, ./test.sh -R shard.
set -euo pipefail
cd "$(dirname "$0")"
source ./setup.sh all

without=()
[ -z "${LONGSPAN_SKIP_SETUP:-}" ] || without=(-LE packaging) # these build, so they need a set-up
# Twice the cores: many tests wait, for ranks that start, that are stopped, or that are dead.
ctest --test-dir "$build" --no-tests=error --output-on-failure --parallel "$((2 * $(nproc)))" \
  "${without[@]}" "$@"
