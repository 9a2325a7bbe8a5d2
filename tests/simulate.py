#!/usr/bin/env python3
"""Runs the CUDA kernels in the simulator under many schedules (docs/contributing/testing.md).

    tests/simulate.py [--schedules N | --hours H] [--build build/simulated] [--tests REGEX]
                      [--seed S] [--jobs J] [--all] [--together]

Every case of the programs of tests/simulator, and with --all also of tests/gpu, runs under N
schedules (default: 50), or under as many as fit into H hours. Schedules are numbered, and so are
inputs: a case that fails is named with the number that repeats it exactly. Without --seed the first
number is a fresh one. The exit status is 0 without failures.
"""

import argparse
import collections
import concurrent.futures
import os
import pathlib
import random
import re
import resource
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Cases that are wrong on purpose, or have no schedules, are only for ctest.
PROGRAMS = [f"tests/simulator/simulator_{name}_test"
            for name in ("kernels", "exchange", "small_kernels", "backward")]
CHUNK = 25  # schedules of a process
LIMIT_S = 900  # of a process, which only a hang reaches


def environment(seed):
    found = dict(os.environ, LONGSPAN_SIMULATED_SEED=str(seed))
    found.setdefault("LONGSPAN_SIMULATED_GPUS", "8")
    found.setdefault("TSAN_OPTIONS", "halt_on_error=1:exitcode=66:history_size=4")
    return found


def command(program, *options):
    """ThreadSanitizer needs addresses where it expects them."""
    return ["setarch", "-R", str(program), *options]


def cases_of(program):
    """The cases of a program; those that are wrong on purpose end by themselves."""
    listed = subprocess.run(command(program, "--gtest_list_tests"), env=environment(1), text=True,
                            stdout=subprocess.PIPE, check=True).stdout
    cases, suite = [], ""
    for line in listed.splitlines():
        name = line.split("#")[0].rstrip()
        if not line.startswith(" "):
            suite = name if name.endswith(".") else ""
        elif suite:
            cases.append(suite + name.strip())
    return cases


def run(program, cases, seed, count):
    """Schedules seed .. seed + count - 1. Returns how many ran, and of the first failure its seed,
    the case, and the output."""
    try:
        job = subprocess.run(
            command(program, f"--gtest_filter={cases}", f"--gtest_repeat={count}",
                    "--gtest_break_on_failure=0", "--gtest_throw_on_failure=0"),
            env=environment(seed), text=True, errors="replace", stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=LIMIT_S)
        output, status = job.stdout, job.returncode
    except subprocess.TimeoutExpired as hang:
        output = (hang.stdout or b"").decode(errors="replace") + f"\nhung for {LIMIT_S} s\n"
        status = None
    done = len(re.findall(r"^\[==========\] \d+ tests? from .* ran\.", output, re.MULTILINE))
    if status == 0:
        return count, None, cases, ""
    named = re.search(r"This schedule again: LONGSPAN_SIMULATED_SEED=(\d+)", output)
    failed = int(named.group(1)) if named else seed + done
    begun = re.findall(r"^\[ RUN      \] (\S+)", output, re.MULTILINE)
    case = re.search(r"This schedule again: .*--gtest_filter=(\S+)", output)
    case = case.group(1) if case else begun[-1] if begun else cases
    return failed - seed + 1, failed, case, output


def processor_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Tally:
    """What ran, and what failed."""

    def __init__(self, folder):
        self.folder = folder
        self.ran = collections.Counter()
        self.failed = collections.defaultdict(list)

    def add(self, program, cases, ran, failed, case, output):
        self.ran[program, cases] += ran
        if failed is None:
            return
        self.failed[program, case].append(failed)
        if len(self.failed[program, case]) > 3:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / f"{program.name}-{re.sub('[^A-Za-z0-9]+', '_', case)}-{failed}.log"
        log.write_text(output)
        print(f"FAILED: {program.name} {case}\n  again: LONGSPAN_SIMULATED_SEED={failed} "
              f"{program} --gtest_filter={case}\n  what it printed: {log}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "simulated")
    parser.add_argument("--schedules", type=int, default=50)
    parser.add_argument("--hours", type=float)
    parser.add_argument("--tests", default="", help="a regular expression of names of cases")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2, 1 << 32))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--all", action="store_true", help="the programs of tests/gpu too")
    parser.add_argument("--together", action="store_true",
                        help="all cases of a program in one process")
    options = parser.parse_args()

    programs = [options.build / name for name in PROGRAMS]
    if options.all:
        programs += sorted(p for p in (options.build / "tests" / "gpu").glob("gpu_*_test"))
    missing = [str(p) for p in programs if not p.exists()]
    if missing:
        sys.exit(f"{', '.join(missing)}: not built. cmake --preset simulated && "
                 f"cmake --build {options.build} --target gpu_tests")
    work = [(program, case) for program in programs for case in cases_of(program)
            if re.search(options.tests, case)]
    if not work:
        sys.exit(f"no case has a name with '{options.tests}'")
    cases = len(work)
    if options.together:
        work = [(program, ":".join(case for p, case in work if p == program))
                for program in dict.fromkeys(p for p, _ in work)]
    began = time.monotonic()
    ends = began + 3600 * options.hours if options.hours else None
    print(f"{cases} cases, schedules from {options.seed} on", flush=True)

    tally = Tally(options.build / "simulate")
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        first = options.seed
        while True:
            left = options.schedules - (first - options.seed)
            count = CHUNK if ends else min(CHUNK, left)
            if count <= 0 or (ends and time.monotonic() > ends):
                break

            def chunk(item, first=first, count=count):
                seed, end = first, first + count
                while seed < end and (ends is None or time.monotonic() < ends):
                    ran, *outcome = run(*item, seed, end - seed)
                    tally.add(*item, ran, *outcome)
                    seed += ran
            list(pool.map(chunk, work))
            first += count
            # An interrupted run reports what it has done.
            print(f"{first - options.seed} of each in {time.monotonic() - began:.0f} s: "
                  f"{sum(map(len, tally.failed.values()))} failed", flush=True)

    total = sum(ran * (names.count(":") + 1) for (_, names), ran in tally.ran.items())
    failures = sum(map(len, tally.failed.values()))
    least = min(tally.ran[item] for item in work)
    print(f"{total} schedules of {cases} cases, at least {least} of each, in "
          f"{time.monotonic() - began:.0f} s ({processor_seconds():.0f} s of CPUs): "
          f"{failures} failed")
    for (program, case), seeds in sorted(tally.failed.items()):
        print(f"  {program.name} {case}: {len(seeds)}, seeds {', '.join(map(str, seeds[:5]))}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
