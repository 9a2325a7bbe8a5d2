#!/usr/bin/env python3
"""CPUs: paged, x-packed and fp8 attention of the serving kernels beside the layer on contiguous
keys of the product's type, for the same work in one process, in turns.

    python3 bench/host_serving.py

A ratio is the best time of the layer against the best of ours; bench_serving also compares a sample
of every result with float64. Records go to {seeds,chunked}-<machine>.jsonl (segmented decode and
chunked prefill).
"""

import argparse

import longspan_command
import records
import serving_command

TARGET = 0.8  # of the layer's speed
PEER = "longspan, contiguous keys"
BENCH = {"plain decode": "seeds", "plain chunked": "chunked"}


def to_record(line, machine=None):
    case = {key: line[key] for key in ("heads", "kv_heads", "dim", "dtype", "kv_dtype", "batch",
                                       "tokens", "kv_len", "page", "layout")} | {"ranks": 1}
    return records.record(BENCH[line["section"]], case, "us", round(line["min_us"], 1), peer=PEER,
                          peer_value=round(line["plain_min_us"], 1),
                          ratio=round(line["plain_min_us"] / line["min_us"], 3), target=TARGET,
                          machine=machine)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    serving_command.add_program(parser)
    parser.add_argument("--machine", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a try")
    records.add_arguments(parser)
    args = serving_command.parse(parser)

    machine = records.host_machine(longspan_command.find())
    found = [to_record(line, machine) for line in serving_command.run(
        args.program, "--device", "host", "--section", "plain", "--threads", str(args.threads),
        *(["--tiny"] if args.tiny else []))]
    print("# us, best of each side in turns: ours, the layer on contiguous keys, ratio")
    for r in found:
        c = r["case"]
        print(f"{r['bench']:<8} {c['dtype']} kv {c['kv_dtype']:<5} page {c['page']:<3} "
              f"{c['layout']:<9} {c['tokens']:>4} x {c['kv_len']:<6} {r['ours']:>10.1f} "
              f"{r['peer_value']:>10.1f} {r['ratio']:6.2f} {'NOT MET' if r['met'] is False else ''}")
    for bench in BENCH.values():
        records.write(bench, args.machine, [r for r in found if r["bench"] == bench], args.results)


if __name__ == "__main__":
    main()
