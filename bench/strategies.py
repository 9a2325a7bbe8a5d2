#!/usr/bin/env python3
"""Every strategy on several ranks, and whether "auto" chooses the fastest one.

    python3 bench/strategies.py --results bench/results              on CPUs
    python3 bench/strategies.py --backend cuda --machine h200x4 ...  on GPUs

First `longspan calibrate` measures the constants of the cost model, into a file of this run. Then `longspan
bench scale` measures prefill, chunks and decode of a grid of lengths, heads and groups by every supported
strategy. `longspan run` measures documents packed into one batch. All are compared with float64. Two files of
records:

    strategies-<machine>   efficiency of each strategy against one rank, the phases' shares of its time, bytes
                           received against the formula
    auto-<machine>         the time of auto's choice against that of the fastest strategy, for each problem: of those
                           that auto may take there, and of all, which may give other bits

All of it is measured in rounds, and the time of a strategy is its best round's median: the speed of a shared
machine changes between rounds.
"""

import argparse
import json
import os
import pathlib
import statistics
import tempfile

import longspan_command
import records

# The lengths of prefill, chunks of 512 and decode, on CPUs and on GPUs.
LENGTHS = {"host": {"prefill": [512, 1024, 2048, 4096], "chunk": [2048, 8192, 16384], "decode": [4096, 16384, 65536]},
           "cuda": {"prefill": [4096, 8192, 32768, 131072], "chunk": [8192, 32768, 131072],
                    "decode": [8192, 131072, 1048576]}}
# Target efficiency of the fastest strategy, two ranks against one: CPUs, 8 heads of 64.
TARGETS = {("prefill", 4096): 0.93, ("prefill", 16384): 0.97, ("decode", 131072): 0.90}
# Packed documents, each dealt out by itself: lengths, heads, dim, type and the target efficiency, by ranks.
DOCUMENTS = {"host": ([256, 8192, 640, 3072, 1280, 384, 5120, 2048], 8, 64, "fp32", {2: 0.90}),
             "cuda": ([65536, 1024, 8192, 32768, 2048, 16384, 4096, 1024], 16, 128, "bf16", {2: 0.93, 4: 0.90})}
WITHIN = 0.95  # of the fastest: the target of auto


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    longspan_command.add_command(parser)
    parser.add_argument("--launcher", default=longspan_command.MPIRUN)
    parser.add_argument("--backend", default="host", choices=["host", "cuda"])
    parser.add_argument("--machine", default="cpu", help="name for the records")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--heads", nargs="+", default=["8/8", "8/2", "16/4"], help="query heads / kv heads")
    parser.add_argument("--phases", nargs="+", default=["prefill", "chunk", "decode"], help="of the grid")
    parser.add_argument("--iterations", type=int, default=5, help="in a round; of decode, which is short, 5 times as many")
    parser.add_argument("--rounds", type=int, help="[5 on CPUs, 1 on GPUs, whose starts take longest]")
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--targets-only", action="store_true", help="only the problems that have a target")
    some.add_argument("--grid-only", action="store_true", help="only the grid that auto is judged by")
    records.add_arguments(parser)
    return longspan_command.parse(parser)


def scale(args, options, ranks):
    """The rows of `longspan bench scale`, each from its best round, with their efficiency."""
    threads = ["--threads", 1] if args.backend == "host" else []
    best = {}
    for _ in range(args.rounds):
        for row in longspan_command.run(args.command, [*options, *threads, "--backend", args.backend], max(ranks),
                                        args.launcher, what=("bench", "scale"))["rows"]:
            key = (*problem(row), row["strategy"])
            if key not in best or (not row["no"] and time(row) < time(best[key])):
                best[key] = row | {"chosen": best.get(key, row)["chosen"]}
    alone = {(phase, kv): time(row) for (phase, ranks, kv, _), row in best.items() if ranks == 1}
    for row in best.values():
        if not row["no"]:
            row["efficiency"] = alone[row["phase"], row["kv_len"]] / row["ranks"] / time(row)
    return list(best.values())


def problem(row):
    return row["phase"], row["ranks"], row["kv_len"]


def time(row):
    return row["time_ms"]["median"]


def case_of(args, row, heads, kv_heads):
    return {"phase": row["phase"], "ranks": row["ranks"], "kv_len": row["kv_len"], "tokens": row["tokens"],
            "heads": heads, "kv_heads": kv_heads, "dim": 64 if args.backend == "host" else 128,
            "dtype": "fp32" if args.backend == "host" else "bf16", "causal": True}


def judge(args, rows, heads, kv_heads, machine, targets):
    """The records of both files."""
    strategies, auto = [], []
    for row in rows:
        if row["no"] or row["ranks"] == 1:
            continue
        case = case_of(args, row, heads, kv_heads) | {"strategy": row["strategy"]}
        rivals = [r for r in rows if not r["no"] and problem(r) == problem(row)]
        fastest = min(rivals, key=time)
        wanted = targets.get((row["phase"], row["kv_len"])) if row is fastest and row["ranks"] == 2 else None
        strategies.append(records.record("strategies", case, "efficiency", round(row["efficiency"], 3), target=wanted,
                                         machine=machine))
        strategies += [records.record("strategies", case, f"{phase} share", round(share, 4), machine=machine)
                       for phase, share in row["split"].items()]
        if row["received_bytes"] and row["counted_bytes"]:  # copies by GPUs themselves are not counted
            strategies.append(records.record("strategies", case, "received bytes", row["counted_bytes"],
                                             peer="formula", peer_value=row["received_bytes"],
                                             ratio=round(row["received_bytes"] / row["counted_bytes"], 4),
                                             machine=machine))
        if not row["chosen"]:
            continue
        for metric, best, target in (
                ("us", min((r for r in rivals if not r["not_by_auto"]), key=time), WITHIN),
                ("us, of any bits", fastest, None)):
            auto.append(records.record(
                "auto", case, metric, round(time(row) * 1e3, 1), peer=f"fastest: {best['strategy']}",
                peer_value=round(time(best) * 1e3, 1), ratio=round(time(best) / time(row), 3), target=target,
                machine=machine))
    return strategies, auto


def main():
    args = arguments()
    args.rounds = args.rounds or (5 if args.backend == "host" else 1)
    machine = records.host_machine(args.command) if args.backend == "host" else None
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LONGSPAN_MACHINE"] = str(pathlib.Path(folder) / "measured.machine")
        common = ["--warmup", 4, "--iterations", args.iterations]  # the first runs find their memory cold
        chosen = []
        if args.backend == "host" and not args.grid_only:
            calibrate(args, 2, 8, 8)
            for phase, kv in TARGETS:
                rows = scale(args, [*common, "--phases", phase, "--kv", kv, "--ranks", 1, 2, "--shard",
                                    "interleaved" if phase == "decode" else "zigzag"], [2])
                save(args, *judge(args, rows, 8, 8, machine, TARGETS))
        if not args.grid_only:
            ranks = 2 if args.backend == "host" else max(args.ranks)
            calibrate(args, ranks, *[DOCUMENTS[args.backend][1]] * 2)
            save(args, documents(args, ranks, machine), [])
        for pair in [] if args.targets_only else args.heads:
            heads, kv_heads = map(int, pair.split("/"))
            for ranks in (r for r in args.ranks if r > 1):
                calibrate(args, ranks, heads, kv_heads)
                for phase, lengths in LENGTHS[args.backend].items():
                    if phase not in args.phases:
                        continue
                    count = args.iterations * (5 if phase == "decode" else 1)
                    rows = scale(args, ["--warmup", 4, "--iterations", count, "--phases", phase, "--kv", *lengths,
                                        "--heads", heads, "--kv-heads", kv_heads, "--ranks", 1, ranks], [ranks])
                    strategies, auto = judge(args, rows, heads, kv_heads, machine,
                                             TARGETS if (heads, kv_heads) == (8, 8) else {})
                    save(args, strategies, auto)
                    chosen += auto
    chosen = [r for r in chosen if r["target"]]
    if chosen:
        near = sum(r["met"] for r in chosen)
        print(f"# auto: within 5 % of the fastest in {near} of {len(chosen)}; at worst "
              f"{1 / min(r['ratio'] for r in chosen):.3f} times its time")


def documents(args, ranks, machine):
    """Records of packed documents; one rank and every strategy on all, in turns."""
    lengths, heads, dim, dtype, wanted = DOCUMENTS[args.backend]
    common = ["--lengths", *lengths, "--heads", heads, "--dim", dim, "--dtype", dtype, "--causal",
              *(["--threads", 1] if args.backend == "host" else []),
              "--backend", args.backend, "--iterations", args.iterations, "--warmup", 2]
    names = ["ring-kv", "gather-kv", "ring-q", "scatter-states", "heads", "gather-states"]
    times = {}
    for number in range(3):
        for name in [None, *names]:
            shared = ["--shard", "zigzag", "--shard-queries", "--strategy", name] if name else []
            found = longspan_command.run(args.command, [*common, "--check", 0 if number else 4, *shared],
                                         ranks if name else 1, args.launcher)
            times.setdefault(name, []).append(found["time_ms"]["median"])
    times = {name: statistics.median(values) for name, values in times.items()}
    best = min(names, key=times.get)
    return [records.record("strategies", {"phase": "documents", "ranks": ranks, "kv_len": sum(lengths),
                                          "tokens": sum(lengths), "heads": heads, "kv_heads": heads, "dim": dim,
                                          "dtype": dtype, "causal": True, "strategy": name},
                           "efficiency", round(times[None] / times[name] / ranks, 3),
                           target=wanted.get(ranks) if name == best else None, machine=machine) for name in names]


def calibrate(args, ranks, heads, kv_heads):
    """Measures the constants, on the number of ranks that work beside each other."""
    threads = ["--threads", "1"] if args.backend == "host" else []
    options = ["calibrate", *threads, "--backend", args.backend, "--heads", str(heads), "--kv-heads",
               str(kv_heads), "--out", os.environ["LONGSPAN_MACHINE"]]
    start = args.launcher.format(ranks=ranks).split()
    longspan_command.subprocess.run([*start, args.command, *options], env=longspan_command.environment(), check=True,
                                    capture_output=True)


def save(args, strategies, auto):
    for r in auto:
        c = r["case"]
        print(f"{c['phase']:<8}{c['ranks']:>3} ranks {c['kv_len']:>8} keys {c['heads']:>3}/{c['kv_heads']:<3}"
              f"{c['strategy']:<16}{r['ratio']:>7.3f} of {r['peer']}", flush=True)
    records.write("strategies", args.machine, strategies, args.results)
    records.write("auto", args.machine, auto, args.results, key=problem_key)


def problem_key(r):
    """For a record of auto: a new choice, or another fastest strategy, replaces the old record."""
    return json.dumps([{k: v for k, v in r["case"].items() if k != "strategy"}, r["metric"]], sort_keys=True)


if __name__ == "__main__":
    main()
