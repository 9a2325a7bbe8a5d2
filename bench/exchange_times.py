#!/usr/bin/env python3
"""The cost of exchanging states between GPUs: apart, beside NCCL's all-gather and a merge, and
pushed from the epilogue of attention, beside the same in separate kernels.

    python3 bench/exchange_times.py --machine h200x2 --ranks 2

Both are tables that tests print when LONGSPAN_TIME is set: captured graphs of dependent repetitions,
and for each shape the faster variant. Microseconds are those added to the time of one GPU. Records
go to exchange-<machine>.jsonl.
"""

import argparse
import os
import re
import shlex
import subprocess

import longspan_command
import records

APART, PUSHED = "tests/dist/dist_exchange_test", "tests/dist/dist_push_test"
TESTS = {APART: "Exchange.Times", PUSHED: "PushTest.Times"}
# For four ranks: (tokens, heads) -> us added; apart, and pushed.
TARGETS = {APART: {(1, 32): 3.8, (1, 64): 4.0, (4, 64): 5.1, (16, 64): 7.5, (64, 64): 13.0},
           PUSHED: {(1, 32): 2.5, (1, 64): 2.8, (4, 64): 4.0, (16, 64): 6.5}}
NCCL, APART_KERNELS = "NCCL all_gather + merge", "kernels of their own"


def run(program, ranks, launcher):
    """The lines that the test of a program prints."""
    env = longspan_command.environment() | {"LONGSPAN_TIME": "1", "LONGSPAN_TEST_DEVICE": "cuda"}
    line = [*shlex.split(launcher.format(ranks=ranks)), program,
            f"--gtest_filter={TESTS[program_kind(program)]}"]
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(line)}\nended with status {done.returncode}:\n"
                         f"{done.stdout}{done.stderr}")
    return [text for text in done.stdout.splitlines() if text.startswith("#")]


def program_kind(program):
    return APART if os.path.basename(program) == os.path.basename(APART) else PUSHED


def parse_apart(lines):
    """(shape, variant, us added, us of NCCL) of the faster variant of each shape."""
    found = []
    for text in lines:
        shape = re.match(r"# *(\d+) x (\d+), .*NCCL ([\d.]+)", text)
        variant = re.match(r"# +([a-z-]+) +([\d.]+) \(", text)
        if shape:
            found.append([(int(shape[1]), int(shape[2])), None, None, float(shape[3])])
        elif variant and (found[-1][2] is None or float(variant[2]) < found[-1][2]):
            found[-1][1:3] = variant[1], float(variant[2])
    return found


def parse_pushed(lines):
    """(shape, keys of a rank, us added, us added by separate kernels)."""
    pattern = (r"# *(\d+) x (\d+), \d+ ranks with (\d+) keys .*kernels of their own ([\d.]+) .*"
               r"pushed from the epilogue ([\d.]+)")
    return [((int(m[1]), int(m[2])), int(m[3]), float(m[5]), float(m[4]))
            for m in (re.match(pattern, text) for text in lines) if m]


def to_records(kind, ranks, shape, more, metric, ours, peer, theirs):
    """One for the figure, which may have a target, and one beside its peer."""
    case = {"tokens": shape[0], "heads": shape[1], "dim": 128, "dtype": "bf16", "ranks": ranks} | more
    target = TARGETS[kind].get(shape) if ranks == 4 else None
    return [records.record("exchange", case, metric, ours, target=target, less_is_better=True),
            records.record("exchange", case, metric, ours, peer=peer, peer_value=theirs,
                           ratio=round(theirs / ours, 3))]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="name for the records, such as h200x2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launcher", default=longspan_command.MPIRUN,
                        help="how ranks are started (default: %(default)s)")
    parser.add_argument("--program", nargs=2, metavar=("EXCHANGE", "PUSH"),
                        default=[longspan_command.newest(APART), longspan_command.newest(PUSHED)],
                        help="the two tests (default: of the newest build)")
    records.add_arguments(parser)
    args = parser.parse_args()
    if None in args.program:
        parser.error("the tests were not found: build dist_exchange_test and dist_push_test")

    found = []
    for shape, variant, us, nccl in parse_apart(run(args.program[0], args.ranks, args.launcher)):
        print(f"{shape[0]:>3} x {shape[1]:<3} {variant:<10} {us:6.2f} us added | {NCCL} {nccl:.2f}")
        found += to_records(APART, args.ranks, shape, {"variant": variant}, "us added", us, NCCL, nccl)
    for shape, keys, us, apart in parse_pushed(run(args.program[1], args.ranks, args.launcher)):
        print(f"{shape[0]:>3} x {shape[1]:<3} pushed     {us:6.2f} us added | {APART_KERNELS} {apart:.2f}")
        found += to_records(PUSHED, args.ranks, shape,
                            {"variant": "pushed from the epilogue", "keys_of_a_rank": keys},
                            "us added to the step of one GPU", us, APART_KERNELS, apart)
    records.write("exchange", args.machine, found, args.results)


if __name__ == "__main__":
    main()
