#!/usr/bin/env python3
"""Keys in parts, as in the steps of a ring: state in, beside a slot for each part and a merge.

    python3 bench/chain.py --machine h200

Both, and one call over all keys, take turns in one process: the test program gpu_chain_times_test,
since only a backend takes a state as input, and no public call. The ratio is the median over the
rounds of the merge's time against the chain's; a sample of every result is compared with float64.
Records go to chain-<machine>.jsonl.
"""

import argparse
import json
import os
import subprocess

import longspan_command
import records

PROGRAM = "tests/gpu/gpu_chain_times_test"
PEER = "slots and a merge"
TARGET = 1.0  # of the speed with a merge


def to_records(lines):
    """Records of the two ways beside the merge, where all are right."""
    def row(line):
        return line["tokens"], line["kv_len"], line["parts"]

    merges = {row(line): line for line in lines if line["way"] == "merge"}
    for line in lines:
        merge = merges.get(row(line))
        if line is merge or merge is None:
            continue
        case = {key: line[key] for key in ("way", "heads", "kv_heads", "dim", "dtype", "tokens",
                                           "kv_len", "parts")} | {"batch": 1, "ranks": 1}
        yield records.record("chain", case, "us", round(line["us"], 1), peer=PEER,
                             peer_value=round(merge["us"], 1), ratio=round(line["ratio"], 3),
                             target=TARGET if line["way"] == "chain" else None)


def measure(program):
    """The lines of JSON with right results; the others are reported."""
    done = subprocess.run([program, "--gtest_filter=Chain.Times"], capture_output=True, text=True,
                          env=dict(os.environ) | {"LONGSPAN_TIME": "1"})
    lines = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    for line in lines:
        if not line["right"]:
            print(f"# NOT RIGHT: {json.dumps(line)}", flush=True)
    if done.returncode != 0 or not lines:
        print(f"# {program}: status {done.returncode}\n{done.stdout}{done.stderr}", flush=True)
    return [line for line in lines if line["right"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=longspan_command.newest(PROGRAM),
                        help="path of gpu_chain_times_test")
    parser.add_argument("--machine", default="h200")
    records.add_arguments(parser)
    args = parser.parse_args()
    if not args.program:
        raise SystemExit("no gpu_chain_times_test: build it with CUDA, or name it with --program")

    found = list(to_records(measure(args.program)))
    print("# us: ours, slots and a merge, ratio")
    for r in found:
        c = r["case"]
        print(f"{c['way']:<6} {c['tokens']:>6} x {c['kv_len']:<7} in {c['parts']:<3} "
              f"{r['ours']:>10.1f} {r['peer_value']:>10.1f} {r['ratio']:6.3f} "
              f"{'NOT MET' if r['met'] is False else ''}")
    records.write("chain", args.machine, found, args.results)


if __name__ == "__main__":
    main()
