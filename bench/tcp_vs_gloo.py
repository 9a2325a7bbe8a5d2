#!/usr/bin/env python3
"""CPUs: the all-gather of the TCP transport beside gloo's, for the sizes of decode.

    .venv/bin/python bench/tcp_vs_gloo.py [--results bench/results]       # needs torch

Ranks are processes of this machine. Both sides are measured in turns, round after round. A side makes
calls one after the other, without anything between them, and times them in blocks. A round's figure is
the median of its blocks, a side's the median of its rounds. Ours is timed in C++ (bench_tcp_gather).
gloo is called from Python, as by torch's users, in the shortest way: a method of the ProcessGroup. The
time of such a call on one rank, without a peer, is printed above the table, and not subtracted.

Records go to tcp-<machine>.jsonl. The ratio is gloo's time by ours; the target is 1.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

import records

sys.path.insert(0, str(records.ROOT / "python" / "tests"))
from free_port import free_port  # noqa: E402

SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20]  # bytes of each rank
RANKS = [2, 4]
PROGRAM = records.ROOT / "build" / "default" / "bin" / "bench_tcp_gather"
TARGET = 1.0
LAUNCHER = ("OMPI_COMM_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "LONGSPAN_")


BLOCK = 10  # calls that are timed together


def blocks(size):
    """In a round: some tenths of a second."""
    return max(8, min(100, (64 << 20) // size // BLOCK))


def ours(program, ranks, size):
    """Median microseconds of a round."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER)}
    port = free_port()
    kept |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "LONGSPAN_PORT": str(port),
             "MASTER_PORT": str(port), "LONGSPAN_THREADS": "1", "LONGSPAN_DEADLINE_S": "60"}
    made = [subprocess.Popen([program, "--bytes", str(size), "--block", str(BLOCK), "--blocks",
                              str(blocks(size))],
                             env=kept | {"RANK": str(r)}, stdout=subprocess.PIPE, text=True)
            for r in range(ranks)]
    outputs = [process.communicate()[0] for process in made]
    if any(process.returncode for process in made):
        raise SystemExit(f"{program} failed")
    run = json.loads(outputs[0])
    if not run["transport"].startswith("TCP"):
        raise SystemExit(f"{program} used {run['transport']}")
    return statistics.median(run["us"])


def gloo_rank(rank, ranks, store, pipe):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    group = dist.distributed_c10d._get_default_group()
    while (size := pipe.recv()) is not None:
        mine = torch.empty(size, dtype=torch.uint8)
        whole = torch.empty(ranks * size, dtype=torch.uint8)
        mine.fill_((31 * rank + 1) % 256)
        right = torch.arange(ranks).mul(31).add(1).to(torch.uint8).repeat_interleave(size)
        times = []
        for turn in range(-2, blocks(size)):
            whole.zero_()
            begin = time.perf_counter_ns()
            for _ in range(BLOCK):
                group._allgather_base(whole, mine).wait()
            spent = time.perf_counter_ns() - begin
            if turn >= 0:
                times.append(spent / BLOCK / 1000)
            assert torch.equal(whole, right), "a wrong result"
        pipe.send(times)
    dist.destroy_process_group()


class Gloo:
    def __init__(self, ranks):
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            own, theirs = context.Pipe()
            process = context.Process(target=gloo_rank, daemon=True, args=(
                rank, ranks, pathlib.Path(self.folder.name) / "store", theirs))
            process.start()
            self.pipes.append(own)
            self.processes.append(process)

    def median_us(self, size):
        for pipe in self.pipes:
            pipe.send(size)
        times = [pipe.recv() for pipe in self.pipes]
        return statistics.median(map(statistics.fmean, zip(*times)))

    def end(self):
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default=PROGRAM,
                        help="bench_tcp_gather (default: that of build/default)")
    parser.add_argument("--machine", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of each rank")
    records.add_arguments(parser)
    args = parser.parse_args()
    if not args.program.exists():
        raise SystemExit(f"{args.program} is not there: cmake --build build/default --target bench_tcp_gather")
    machine = records.host_machine(pytorch=torch.__version__)
    alone = Gloo(1)
    empty = statistics.median(alone.median_us(4 << 10) for _ in range(5))
    alone.end()
    print(f"# gloo's call on one rank takes {empty:.1f} us\n"
          f"#{'ranks':>6} {'bytes':>8} {'TCP us':>9} {'gloo us':>9} {'ratio':>6}   of {args.rounds} rounds: "
          "least and greatest ratio")
    missed = 0
    for ranks in args.ranks:
        gloo = Gloo(ranks)
        for size in args.sizes:
            mine, theirs = [], []
            for _ in range(args.rounds):
                mine.append(ours(args.program, ranks, size))
                theirs.append(gloo.median_us(size))
            us, peer = statistics.median(mine), statistics.median(theirs)
            each = sorted(b / a for a, b in zip(mine, theirs))
            print(f"{ranks:>7} {size:>8} {us:9.1f} {peer:9.1f} {peer / us:6.2f}   {each[0]:.2f} to {each[-1]:.2f}",
                  flush=True)
            made = records.record("tcp", {"collective": "all_gather", "ranks": ranks, "bytes": size}, "us",
                                  round(us, 1), peer="gloo", peer_value=round(peer, 1),
                                  ratio=round(peer / us, 3), target=TARGET, machine=machine)
            records.write("tcp", args.machine, [made], args.results)
            missed += made["met"] is False
        gloo.end()
    print(f"# {missed} targets not met")


if __name__ == "__main__":
    main()
