#!/usr/bin/env python3
"""How `longspan run` scales: the same problem on more ranks (strong), and a problem that grows with
them (weak).

    python3 bench/scale.py                                  on CPUs, one thread for each rank
    python3 bench/scale.py --backend cuda --heads 32 --kv-heads 8 --dim 128 --dtype bf16 \\
        --kv 131072 1048576 --machine h200x4                on GPUs
    python3 bench/scale.py --tokens kv -- --shard-queries --shard zigzag --causal

    speed        floating point of the visible (row, key) pairs / time
    speed-up     speed(n ranks) / speed(1 rank): in strong scaling, time(1) / time(n)
    efficiency   speed-up / n

Prints a table and writes records (scale-<machine>.jsonl in build/results, or in the folder of
--results), from which bench/plot.py draws. Arguments after `--` go to `longspan run`.
"""

import argparse
import os
import sys

import longspan_command
import records


def arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    longspan_command.add_arguments(parser)
    parser.add_argument("--scaling", nargs="+", choices=["strong", "weak"],
                        default=["strong", "weak"])
    parser.add_argument("--kv", type=int, nargs="+", default=[16384, 65536],
                        help="keys; in weak scaling, keys for each rank (default: %(default)s)")
    parser.add_argument("--tokens", default="64", help="query rows, or kv for as many as keys")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "fp16", "bf16"])
    parser.add_argument("--backend", default="host", choices=["host", "cuda"])
    parser.add_argument("--threads", type=int, default=1, help="of a rank, on CPUs")
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--machine", help="name for the records (default: cpu; h200x4 and the like)")
    parser.add_argument("--no-records", action="store_true", help="only print")
    records.add_arguments(parser)
    parser.add_argument("extra", nargs="*", help="after --: more options for longspan run")
    args = longspan_command.parse(parser)
    if args.machine is None:
        if args.backend == "cuda" and not args.no_records:
            parser.error("give the machine a name with --machine, such as h200x4, for the records")
        args.machine = "cpu" if args.backend == "host" else "gpu"
    return args


def measure(args, ranks, kv, tokens):
    """The record that `longspan run` writes."""
    options = ["--kv", kv, "--tokens", tokens, "--heads", args.heads, "--kv-heads", args.kv_heads,
               "--dim", args.dim, "--dtype", args.dtype, "--backend", args.backend, "--iterations",
               args.iterations, "--check", 4]
    if args.backend == "host":
        options += ["--threads", args.threads]
    return longspan_command.run(args.command, options + args.extra, ranks, args.launcher)


class Progress:
    """One line on a terminal; nothing when stderr is a file or a pipe."""

    def __init__(self, total):
        self.total, self.done, self.shown = total, 0, sys.stderr.isatty()
        self.dim, self.plain = ("", "") if os.environ.get("NO_COLOR") else ("\033[2m", "\033[0m")

    def show(self, what):
        if self.shown:
            sys.stderr.write(f"\r\033[K{self.dim}[{self.done + 1}/{self.total}] {what}{self.plain}")
            sys.stderr.flush()
        self.done += 1

    def clear(self):
        if self.shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


HEADER = (f"# {'scaling':>8}{'kv':>10}{'tokens':>8}{'ranks':>6}{'time(ms)':>11}{'TFLOP/s':>10}"
          f"{'speed-up':>10}{'efficiency':>11}{'attend':>8}{'exchange':>9}{'merge':>7}"
          f"{'busbw':>9}{'max|err|':>10}")


def line(row):
    run, share = row["run"], row["run"]["share"]
    return (f"  {row['scaling']:>8}{row['kv']:>10}{row['tokens']:>8}{row['ranks']:>6}"
            f"{run['time_ms']['median']:>11.3f}{run['tflops']:>10.4g}{row['speedup']:>10.2f}"
            f"{row['efficiency']:>11.2f}{100 * share['attend']:>8.1f}{100 * share['exchange']:>9.1f}"
            f"{100 * share['merge']:>7.1f}{run['busbw_gbs']:>9.3g}{run['check']['max_error']:>10.1e}")


def sweep(args):
    cases = [(scaling, kv, ranks) for scaling in args.scaling for kv in args.kv
             for ranks in args.ranks]
    progress, rows, base = Progress(len(cases)), [], {}
    for scaling, kv, ranks in cases:
        total = kv if scaling == "strong" else kv * ranks
        tokens = total if args.tokens == "kv" else int(args.tokens)
        progress.show(f"{scaling} scaling, {total} keys, ranks: {ranks}")
        run = measure(args, ranks, total, tokens)
        speed = run["tflops"]
        first = base.setdefault((scaling, kv), (ranks, speed, run["time_ms"]["median"]))
        speedup = speed / first[1]
        rows.append({"scaling": scaling, "size": kv, "kv": total, "tokens": tokens, "ranks": ranks,
                     "run": run, "speedup": speedup, "efficiency": speedup * first[0] / ranks,
                     "base_ms": first[2], "base_ranks": first[0]})
        progress.clear()
        if len(rows) == 1:
            print(f"# longspan {run['longspan']} | {run['backend']} | {run['world'].split(' | ')[0]}"
                  f" | heads {args.heads}/{args.kv_heads} dim {args.dim} {args.dtype}\n{HEADER}")
        print(line(rows[-1]), flush=True)
    return rows


def to_records(args, rows):
    machine = records.host_machine(args.command) if args.backend == "host" else None
    for row in rows:
        case = {key: row["run"]["case"][key]
                for key in ("heads", "kv_heads", "dim", "dtype", "batch", "tokens", "kv_len",
                            "ranks", "strategy", "causal", "shard", "shard_queries")}
        case |= {"scaling": row["scaling"]}
        if args.backend == "host":
            case |= {"threads": args.threads}
        peer = f"{row['base_ranks']} rank" + ("s" if row["base_ranks"] > 1 else "")
        yield records.record("scale", case, "us", round(row["run"]["time_ms"]["median"] * 1000, 2),
                             peer=peer, peer_value=round(row["base_ms"] * 1000, 2),
                             ratio=round(row["speedup"], 3), machine=machine)
        yield records.record("scale", case, "efficiency", round(row["efficiency"], 3),
                             machine=machine)
        for phase, share in row["run"]["share"].items():
            yield records.record("scale", case, f"{phase} share", round(share, 4),
                                 machine=machine)


def main():
    args = arguments()
    rows = sweep(args)
    if not args.no_records:
        path = records.write("scale", args.machine, to_records(args, rows), args.results)
        print(f"# records: {path}; plot: python3 bench/plot.py {path.stem} --results {path.parent}")


if __name__ == "__main__":
    main()
