#!/usr/bin/env bash
# The long tests, by hand before a release: new seeds, all mutants, 1,000 schedules a case, and a
# soak. `.ci/run` has the rest.
#
#   tests/long.sh [PARTS...]    default: all of them, hours on two cores
#
#   seeds       every test of a release build with new seeds and whole grids
#   gradients   600 random cases of gradients, by every strategy, on 1, 2, 3, 4 and 7 ranks
#   malformed   malformed calls with new seeds under ASan and UBSan, for an hour
#   sanitizers  all unit and comm tests under ASan and UBSan, and under ThreadSanitizer
#   schedules   the CUDA kernels in the simulator: every test, 1,000 schedules a case, and under
#               ThreadSanitizer
#   mutants     defects that the tests of ranks, and the simulator, have to find
#   cuda        the CUDA part for every architecture of a release
#   soak        a million exchanges between GPUs; needs at least two
#
# LONGSPAN_LONG=SHORT tries all parts for minutes, not hours. A part that fails does not stop the
# next ones. The last lines list what passed, with its time; the log of a part is in build/long.
# shellcheck disable=SC2317 # the parts are called by their names
set -uo pipefail
cd "$(dirname "$0")/.." || exit
export LC_ALL=C.UTF-8 LONGSPAN_TEST_SEEDS=new

all=(seeds gradients malformed sanitizers schedules mutants cuda soak)
parts=("${@:-${all[@]}}")
minutes=60 schedules=1000 soak=1000000 size=--full
if [ "${LONGSPAN_LONG:-}" = SHORT ]; then minutes=2 schedules=10 soak=1000 size=--quick; fi
jobs=$(nproc)
out=build/long
mkdir -p "$out"

preset() { # name, targets...
  local name=$1
  shift
  cmake --preset "$name" >/dev/null && cmake --build "build/$name" ${1:+--target "$@"}
}

seeds() { LONGSPAN_FULL_GRID=1 LONGSPAN_PYTHON_TORCH=1 ./test.sh long; }

gradients() {
  local ranks failed=0
  preset default longspan_command || return
  for ranks in 1 2 3 4 7; do # the output has the seed
    mpirun --allow-run-as-root --oversubscribe --bind-to none -np "$ranks" build/default/bin/longspan \
      verify "$size" --families gradients --threads 1 --seed "$RANDOM" || failed=1
  done
  return "$failed"
}

malformed() {
  local end=$((SECONDS + 60 * minutes)) failed=0
  preset asan unit_malformed_{calls,layer,states,reshard}_test || return
  while [ "$SECONDS" -lt "$end" ]; do # a program prints its seed; LONGSPAN_TEST_SEED repeats it
    ctest --preset asan -R '^unit\.malformed_' --parallel "$jobs" || failed=1
  done
  return "$failed"
}

sanitizers() {
  local name
  for name in asan tsan; do
    preset "$name" unit_tests comm_tests && ctest --preset "$name-all" --parallel "$jobs" || return
  done
}

schedules() {
  preset simulated gpu_tests longspan_command || return
  ctest --preset simulated --parallel 1 && tests/simulate.py --schedules "$schedules" || return
  preset simulated-tsan simulator_{kernels,exchange,small_kernels,race}_test || return
  TSAN_OPTIONS=halt_on_error=1:exitcode=66:history_size=4 \
    setarch -R build/simulated-tsan/tests/simulator/simulator_race_test || return
  tests/simulate.py --build build/simulated-tsan --schedules "$((schedules / 100 + 1))" --together
}

mutants() {
  tests/mutation.py || return
  preset simulated gpu_tests && preset simulated-tsan || return
  tests/simulator/mutation.py --schedules "$((schedules / 10))" --out "$out/mutants.jsonl"
}

cuda() { cmake --preset cuda -B build/cuda-all >/dev/null && cmake --build build/cuda-all; }

soak() {
  local gpus
  gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
  if [ "$gpus" -lt 2 ]; then
    echo "a soak needs two GPUs, and $gpus are seen"
    return 77
  fi
  LONGSPAN_SOAK=$soak LONGSPAN_TEST_DEVICE=cuda \
    ctest --test-dir build/default --no-tests=error -R '^gpu\.(exchange|push)_test\.np2$'
}

for part in "${parts[@]}"; do
  [[ " ${all[*]} " == *" $part "* ]] || {
    echo "tests/long.sh: there is no part '$part'; the parts are ${all[*]}" >&2
    exit 2
  }
done
status=0 summary=''
for part in "${parts[@]}"; do
  began=$SECONDS
  printf '==== %s, log in %s/%s.log\n' "$part" "$out" "$part"
  ($part) >"$out/$part.log" 2>&1
  case $? in
    0) result=passed ;;
    77) result="left out: $(tail -n 1 "$out/$part.log")" ;;
    *) result=FAILED status=1 ;;
  esac
  summary+=$(printf '\n%-10s %6d s  %s' "$part" $((SECONDS - began)) "$result")
done
printf '\n%s, commit %s%s\n' "$(date -u +%F)" "$(git rev-parse --short HEAD)" "$summary" |
  tee "$out/summary.txt"
exit $status
