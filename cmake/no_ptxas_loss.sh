#!/bin/sh
# Runs a compiler and fails if ptxas reports, in notes and not warnings, that it dropped what the
# Hopper kernel depends on: products run one after the other (C7510 to C7518), or setmaxnreg is
# ignored (C7508).
notes=$(mktemp)
trap 'rm -f "$notes"' EXIT
"$@" 2>"$notes"
status=$?
cat "$notes" >&2
if grep -q '(C75[0-9][0-9])' "$notes"; then
  echo "longspan: the notes above say what ptxas gave up (${0##*/})" >&2
  exit 1
fi
exit $status
