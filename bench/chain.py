#!/usr/bin/env python3
"""Keys in parts, as a ring's steps bring them: state in, beside a slot for each part and a merge.

    python3 bench/chain.py --machine h200

`bench_serving --section chain` measures both, and one call over all keys, in turns in one process.
The ratio is the median over the rounds of the merge's time against the chain's; a sample of every
result is held against float64. Records go to bench/results/chain-<machine>.jsonl.
"""

import argparse

import records
import seeds_vs_longspan

PEER = "slots and a merge"
TARGET = 1.0  # of the speed with a merge


def to_records(lines):
    """Of the two ways that the merge is the peer of, where all are right."""
    def row(line):
        return line["tokens"], line["kv_len"], line["parts"]

    merges = {row(line): line for line in lines if line["way"] == "merge"}
    for line in lines:
        merge = merges.get(row(line))
        if line is merge or merge is None:
            continue
        case = {key: line[key] for key in ("way", "heads", "kv_heads", "dim", "dtype", "batch",
                                           "tokens", "kv_len", "parts")} | {"ranks": 1}
        yield records.record("chain", case, "us", round(line["us"], 1), peer=PEER,
                             peer_value=round(merge["us"], 1), ratio=round(line["ratio"], 3),
                             target=TARGET if line["way"] == "chain" else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=seeds_vs_longspan.find_program(),
                        help="path of bench_serving")
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--device", default="cuda", choices=("cuda", "host"))
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a try")
    parser.add_argument("--results", default=records.RESULTS)
    args = parser.parse_args()
    if not args.program:
        raise SystemExit("no bench_serving: configure with -DLONGSPAN_BUILD_BENCH=ON and build it, "
                         "or name it with --program")

    found = list(to_records(seeds_vs_longspan.serving(
        args.program, "--device", args.device, "--section", "chain",
        *(["--tiny"] if args.tiny else []))))
    print("# us: ours, slots and a merge, ratio")
    for r in found:
        c = r["case"]
        print(f"{c['way']:<6} {c['tokens']:>6} x {c['kv_len']:<7} in {c['parts']:<3} "
              f"{r['ours']:>10.1f} {r['peer_value']:>10.1f} {r['ratio']:6.3f} "
              f"{'' if r['met'] else 'NOT MET'}")
    records.write("chain", args.machine, found, args.results)


if __name__ == "__main__":
    main()
