#!/usr/bin/env python3
"""All tests and measurements on several GPUs, one part after the other.

    python3 bench/on_gpus.py --machine h200x4 --ranks 4 --results bench/results
    python3 bench/on_gpus.py --machine h200x2 --ranks 2 --parts keys prefill

Every part has its own limit, past which it is ended, with all that it started. Its output goes to
<logs>/<part>.log, and a line reports its time and its result. Exits with 1 if a part failed. The order of
the parts suits a machine that is lent for half an hour.
"""

import argparse
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import longspan_command
import records

BENCH = pathlib.Path(__file__).resolve().parent


def parts(args):
    """(name, limit in seconds, variables set in the environment, command line)"""
    ranks = str(args.ranks)
    both = ["--ranks", "1", ranks]
    asked = {"LONGSPAN_TEST_DEVICE": "cuda", "LONGSPAN_SOAK": "1000000"}  # of soaks
    kept = ["--machine", args.machine, "--results", args.results]

    def bench(script, *options):
        return [sys.executable, str(BENCH / f"{script}.py"), *kept, *options]

    def tests(pattern):  # more at once take longer: on a GPU the kernels of several processes run in turns
        return ["ctest", "--test-dir", args.build, "-L", "^gpu$", "-R", pattern, "-j", "8", "--no-tests=error",
                "--output-on-failure"]

    def soak(test):
        program = pathlib.Path(args.build) / "tests/dist" / f"dist_{test}_test"
        return [*shlex.split(longspan_command.MPIRUN.format(ranks=ranks)), str(program), "--gtest_filter=*Soak*"]

    def decode(*kv, options=()):
        # Results are checked in one layer: float64 on the host takes longer than the rest.
        return bench("decode_step", "--ranks", ranks, "--kv", *kv, "--", "--check", "1", *options)

    def prefill(*options):
        return bench("context_parallel_vs_torch", "--ranks", ranks, "--rounds", "1", "--heads", "16/16", "32/8",
                     "--strategies", "gather-kv", "heads", "ring-kv", *options)

    def auto(*heads):
        return bench("strategies", "--backend", "cuda", *both, "--iterations", "3", "--grid-only", "--heads", *heads)

    def memcheck(test, cases="*"):
        program = pathlib.Path(args.build) / "tests/gpu" / f"gpu_{test}"
        return ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", str(program),
                f"--gtest_filter={cases}"]

    return [
        ("keys", 240, {}, tests(r"^gpu\.(key_arrivals_test|put_rows_test|put_flags_test|"
                                rf"(gather_kv_test|heads_test|fault\.(keys|heads).*)\.np{ranks})$")),
        ("prefill", 240, {}, prefill("--iterations", "7")),
        ("graphs", 240, {}, prefill("--iterations", "15", "--graph")),
        ("exchange", 120, {}, bench("exchange_times", "--ranks", ranks)),
        ("decode", 120, {}, decode("131072", "524288", "1048576")),
        ("decode-4m", 150, {}, decode("4194304")),
        ("pages", 60, {}, decode("131072", "1048576", options=["--page", "16"])),
        ("fp8", 60, {}, decode("131072", "1048576", options=["--kv-dtype", "e4m3"])),
        ("slow-tests", 560, {}, tests(rf"(strategies|two_level)_test\.np{ranks}$")),
        ("tests", 590, {}, tests(rf"np{ranks}$")),
        ("batches", 120, {}, decode("131072", "524288", "--batch", "8")),
        ("documents", 180, {}, bench("strategies", "--backend", "cuda", *both, "--iterations", "3", "--targets-only")),
        ("million", 240, {}, bench("context_parallel_vs_torch", "--ranks", ranks, "--tokens", "1048576", "--heads", "8/8",
                                   "--only-ours", "--rounds", "1", "--iterations", "2", "--warmup", "1",
                                   "--strategies", "ring-kv", "gather-kv", "heads")),
        ("auto", 300, {}, auto("8/8", "8/2", "16/4")),
        ("auto-more", 480, {}, auto("16/16", "32/8", "8/1")),
        ("model", 120, {}, bench("model_vs_torch", "--ranks", ranks)),
        ("memcheck-puts", 120, {}, memcheck("put_rows_test")),
        ("memcheck-meeting", 120, {}, memcheck("put_flags_test")),
        ("memcheck-states", 240, {}, memcheck("state_in_test", "*Documents:*LargeScores:*Short*:*Fp32:*Tf32:*Parts*")),
        ("soak", 240, asked, soak("exchange")),
        ("soak-pushed", 240, asked, soak("push")),
        ("weak", 180, {}, decode("131072", "1048576", "--scaling", "weak")),
    ]


def run(command, limit, env, log):
    """The exit status of a command, or None past its limit."""
    with log.open("w") as output:
        print(shlex.join(command), file=output, flush=True)
        process = subprocess.Popen(command, env=longspan_command.environment() | env, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:  # a part that ended by itself leaves nothing to end
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="name for the records, such as h200x4")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parts", nargs="+", metavar="PART", help="of all, in their order (default: all)")
    parser.add_argument("--build", default=str(records.ROOT / "build" / "cuda"), help="build folder with the tests")
    parser.add_argument("--logs", type=pathlib.Path, default=records.ROOT / "build" / "gpu-logs")
    records.add_arguments(parser)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and what it started ends with it
    args.results = str(args.results)
    known = parts(args)
    unknown = set(args.parts or []) - {name for name, *_ in known}
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(name for name, *_ in known)}")
    args.logs.mkdir(parents=True, exist_ok=True)
    failed = False
    for name, limit, env, command in known:
        if args.parts and name not in args.parts:
            continue
        begin = time.monotonic()
        log = args.logs / f"{name}.log"
        status = run(command, limit, env, log)
        how = "was not done in time" if status is None else "done" if status == 0 else f"failed ({status})"
        print(f"{time.monotonic() - begin:6.0f} s of {limit:3}  {name}: {how}", flush=True)
        if status != 0:
            failed = True
            for line in log.read_text(errors="replace").splitlines()[-5:]:
                print(f"    {line}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
