"""Common to the benches of context-parallel prefill beside PyTorch: rows and keys of a sequence dealt in
zigzag, causal. Ours is `longspan bench scale --phases prefill`: every strategy, with rows of each compared
with float64. PyTorch is the bench itself, started by torchrun with --peer FILE, into which rank 0 writes a
list:

    {"name", "heads", "kv_heads", "tokens", "alone": ms of one rank, "ms": of all, or "refused": why}

Each side is measured once in a round, in turns, and a figure is the median of the rounds. Efficiency is the
time of one rank over the product of ranks and the time of all, for each side against its own one rank.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import longspan_command
import records

# The most that a rank may take, in sizes of its q, k, v, out and two blocks of keys and values; for long sequences.
MEMORY, MEMORY_TOKENS = 1.2, 1 << 20


@dataclasses.dataclass(frozen=True)
class Bench:
    script: str  # of PyTorch's side
    one: str  # what a rank has: GPU, thread
    dim: int
    dtype: str
    options: list  # of `longspan bench scale`
    targets: dict  # (ranks, tokens) -> target efficiency of the fastest strategy


def parser_of(doc, tokens, heads, iterations, rounds):
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    longspan_command.add_command(parser)
    parser.add_argument("--launcher", default=longspan_command.MPIRUN)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=tokens)
    parser.add_argument("--heads", nargs="+", default=heads, help="query heads / kv heads")
    parser.add_argument("--iterations", type=int, default=iterations)
    parser.add_argument("--warmup", type=int, default=3, help="of ours (less where a run takes seconds)")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--only-ours", action="store_true",
                        help="without PyTorch (of lengths that it has no memory for)")
    parser.add_argument("--strategies", nargs="+", help="of ours (default: every one that serves)")
    parser.add_argument("--peer", help=argparse.SUPPRESS)  # the file that a process of torchrun writes
    records.add_arguments(parser)
    parser.set_defaults(graph=False)  # an option of the benches of GPUs
    return parser


def run_peer(bench, args):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "peer.json"
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks),
                bench.script, "--machine", args.machine, "--peer", str(path), "--iterations", str(args.iterations),
                "--tokens", *map(str, args.tokens), "--heads", *args.heads]
        if args.graph:
            line.append("--graph")
        if args.command:
            line += ["--command", args.command]
        env = {"OMP_NUM_THREADS": "1"} | os.environ  # torchrun would set it too, with a message
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL, env=env)
        return json.loads(path.read_text())


def run_ours(bench, args, pair):
    heads, kv_heads = pair.split("/")
    chosen = ["--strategies", *args.strategies] if args.strategies else []
    if args.graph:
        chosen.append("--graph")
    return longspan_command.run(
        args.command, [*bench.options, "--phases", "prefill", "--kv", *args.tokens, "--heads", heads, "--kv-heads",
                       kv_heads, "--dim", bench.dim, "--dtype", bench.dtype, "--ranks", 1, args.ranks, "--shard",
                       "zigzag", "--warmup", args.warmup, "--iterations", args.iterations, *chosen],
        args.ranks, args.launcher, what=("bench", "scale"))["rows"]


def medians(pairs):
    """{name: the median of its values}"""
    found = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def judge(bench, args, pair, rounds, peers, machine=None):
    """The records of one pair of heads; `rounds` and `peers` hold the measurements of each round."""
    heads, kv_heads = map(int, pair.split("/"))
    found = []
    for tokens in args.tokens:
        rows = [r for rows in rounds for r in rows if r["kv_len"] == tokens and not r["no"]]
        alone = statistics.median(r["time_ms"]["median"] for r in rows if r["ranks"] == 1)
        times = medians((r["strategy"], r["time_ms"]["median"]) for r in rows if r["ranks"] == args.ranks)
        best = min(times, key=times.get)
        theirs = [r for rows in peers for r in rows
                  if (r["heads"], r["kv_heads"], r["tokens"]) == (heads, kv_heads, tokens)]
        their_alone = medians((r["name"], r["alone"]) for r in theirs)
        case = {"heads": heads, "kv_heads": kv_heads, "dim": bench.dim, "dtype": bench.dtype, "tokens": tokens,
                "causal": True, "ranks": args.ranks} | ({"graph": True} if args.graph else {})

        size = {"fp32": 4}.get(bench.dtype, 2) * bench.dim * tokens / args.ranks  # of a head's rows on a rank
        arrays, block = 2 * size * (heads + kv_heads), 2 * size * kv_heads

        def print_row(name, ms, one, more=""):
            print(f"{pair:>6} {tokens:>8} {name:<44}{ms:>10.3f} ms   efficiency {one / ms / args.ranks:6.3f}{more}",
                  flush=True)

        def add(strategy, metric, value, **more):
            found.append(records.record("context_parallel", case | {"strategy": strategy}, metric, value,
                                        machine=machine, **more))

        print(f"{pair:>6} {tokens:>8} {'longspan, one ' + bench.one:<44}{alone:>10.3f} ms")
        for name, ms in times.items():
            print_row(f"longspan {name}", ms, alone)
            target = bench.targets.get((args.ranks, tokens)) if name == best else None
            add(name, "efficiency", round(alone / ms / args.ranks, 3), target=target)
            add(name, "ms", round(ms, 4))
            workspace = max(r["workspace_bytes"] + r["peer_bytes"] for r in rows
                            if r["ranks"] == args.ranks and r["strategy"] == name)
            add(name, "memory", round((arrays + workspace) / (arrays + 2 * block), 3),
                target=MEMORY if name == best and tokens >= MEMORY_TOKENS else None,
                less_is_better=True)
        for name, ms in medians((r["name"], r["ms"]) for r in theirs if "ms" in r).items():
            print_row(name, ms, their_alone[name], f"   (one {bench.one}: {their_alone[name]:.3f} ms)")
            add(best, "ms", round(times[best], 4), peer=name, peer_value=round(ms, 4), ratio=round(ms / times[best], 3))
        for name, why in {r["name"]: r["refused"] for r in theirs if "refused" in r}.items():
            print(f"# {name} refuses {pair}, {tokens} tokens: {why}")
    return found


def measure(bench, args, machine=None):
    ours, peers = {pair: [] for pair in args.heads}, []
    for _ in range(args.rounds):
        for pair in args.heads:
            ours[pair].append(run_ours(bench, args, pair))
        if not args.only_ours:
            peers.append(run_peer(bench, args))
    for pair in args.heads:
        records.write("context_parallel", args.machine, judge(bench, args, pair, ours[pair], peers, machine),
                      args.results)
