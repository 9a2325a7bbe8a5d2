#!/usr/bin/env bash
# Sets up (setup.sh has the switches) and runs the main job: attention over a sequence sharded
# across ranks, on this machine's GPUs in a build with CUDA, or else on its CPUs.
set -euo pipefail
cd "$(dirname "$0")"
source ./setup.sh longspan_command # only what the demo runs

longspan=$build/bin/longspan
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
gpus=$("$longspan" info | sed -n 's/^ *GPUs *\([0-9]\+\).*/\1/p')
device=CPUs counts=(1 2 4)
if [ "${gpus:-0}" -gt 0 ]; then
  device=GPUs counts=()
  for ranks in 1 2 4; do [ "$ranks" -gt "$gpus" ] || counts+=("$ranks"); done
fi
most=${counts[-1]}

# job RANKS ARGUMENTS...: one `longspan run`; its output goes to $work/RANKS.
job() {
  local ranks=$1
  shift
  if ! mpirun --oversubscribe --bind-to none -np "$ranks" "$longspan" run "$@" >"$work/$ranks"; then
    cat "$work/$ranks" >&2
    exit 1
  fi
}

# same_bits ARGUMENTS...: the same job on every rank count, as one table; fails if a bit differs.
same_bits() {
  local ranks digest first=''
  for ranks in "${counts[@]}"; do
    job "$ranks" "$@" --digest
    [ "$ranks" -ne "${counts[0]}" ] ||
      sed -n '/^# .*strategy/ s/^#/# ranks/p; t; s/^#    /#          /p' "$work/$ranks"
    sed -n "/^#/! s/^/$(printf '%6s' "$ranks")/p" "$work/$ranks"
  done
  for ranks in "${counts[@]}"; do
    digest=$(sed -n 's/^# digest //p' "$work/$ranks")
    first=${first:-$digest}
    [ "$digest" = "$first" ] || { printf '\n   %s ranks gave OTHER bits\n' "$ranks"; exit 1; }
  done
  [ ${#counts[@]} -eq 1 ] || printf '\n   %s ranks gave the same bits: digest %s\n' \
    "$(sed 's/ /, /g; s/, \([0-9]*\)$/ and \1/' <<<"${counts[*]}")" "$first"
}

printf '\n1. Real input: one attention layer of all-MiniLM-L6-v2 reading the opening of Moby-Dick.\n'
printf '   512 tokens, all compared with float64 (rel err), on the %s.\n\n' "$device"
data=examples/data/minilm
same_bits --q $data/q.npy --k $data/k.npy --v $data/v.npy --check all --invariant

if [ "$device" = CPUs ]; then
  printf '\n2. A long sequence: the last 256 queries on 65,536 keys, on %s ranks.\n\n' "$most"
  job "$most" --kv 65536 --tokens 256 --heads 8 --dim 64 --dtype fp32 --causal --iterations 5
  cat "$work/$most"
else
  prefill=(--kv 65536 --tokens 65536 --heads 16 --kv-heads 4 --dim 128 --dtype bf16 --causal)
  printf '\n2. A long sequence: the causal prefill of 65,536 tokens on %s GPUs.\n\n' "$most"
  job "$most" "${prefill[@]}" --shard zigzag
  cat "$work/$most"
  printf '\n   The same with --invariant, which keeps one order of sums whatever the ranks.\n\n'
  same_bits "${prefill[@]}" --invariant
fi
