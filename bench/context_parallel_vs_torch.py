#!/usr/bin/env python3
"""Context-parallel prefill on several GPUs beside PyTorch's context_parallel, in one run.

    python3 bench/context_parallel_vs_torch.py --machine h100x2 --ranks 2

Forward, bf16, causal, dim 128, the rows and the keys of a sequence dealt in zigzag. Ours is
`longspan bench scale --phases prefill`: every strategy, each row of it checked against float64.
PyTorch is started by torchrun: both of its ways to move keys and values (all-gather and all-to-all) over
cuDNN's attention and FlashAttention-2, and its own time on one GPU. Each side is measured once in a
round, in turns, and a figure is the median of the rounds. Efficiency is the time of one GPU over the
ranks times the time of all. Records go to context_parallel-<machine>.jsonl.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import longspan_command
import records

DIM = 128
# (ranks, tokens) -> efficiency that is asked of the fastest strategy, against our own one GPU.
TARGETS = {(2, 8192): 0.85, (2, 32768): 0.95, (2, 131072): 0.985,
           (4, 8192): 0.75, (4, 32768): 0.93, (4, 131072): 0.98}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    longspan_command.add_command(parser)
    parser.add_argument("--launcher", default=longspan_command.MPIRUN)
    parser.add_argument("--machine", required=True, help="name for the records")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--heads", nargs="+", default=["16/16", "32/8"], help="query heads / kv heads")
    parser.add_argument("--iterations", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only-ours", action="store_true",
                        help="without PyTorch (of lengths that it has no memory for)")
    parser.add_argument("--strategies", nargs="+", help="of ours (default: every one that serves)")
    parser.add_argument("--peer", help=argparse.SUPPRESS)  # the file that a process of torchrun writes
    records.add_arguments(parser)
    return longspan_command.parse(parser)


# ---- PyTorch, in the processes of torchrun ---------------------------------------------------

def peer(args):
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel
    try:
        import torch.distributed.tensor.experimental._context_parallel._attention as cp
    except ImportError:
        import torch.distributed.tensor.experimental._attention as cp

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks,))
    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}

    def milliseconds(work):
        """The median on the slowest rank."""
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        dist.barrier()
        times = []
        for _ in range(args.iterations):
            begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        slowest = torch.tensor(statistics.median(times), device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()

    found = []
    for pair in args.heads:
        heads, kv_heads = map(int, pair.split("/"))
        for tokens in args.tokens:
            for backend, kind in backends.items():
                def inputs():
                    make = lambda n: torch.randn(1, n, tokens, DIM, device=device, dtype=torch.bfloat16)
                    return make(heads), make(kv_heads), make(kv_heads)

                def work():
                    F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

                alone = None
                with torch.no_grad(), sdpa_kernel(kind):
                    q, k, v = inputs()
                    alone = milliseconds(work)
                for method in ("allgather", "alltoall"):
                    cp.set_rotate_method(method)
                    cp._cp_options.enable_load_balance = True
                    row = {"heads": heads, "kv_heads": kv_heads, "tokens": tokens, "backend": backend,
                           "method": method, "alone": alone}
                    try:
                        with torch.no_grad(), sdpa_kernel(kind):
                            q, k, v = inputs()
                            with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2],
                                                  no_restore_buffers={q, k, v}):
                                row["ms"] = milliseconds(work)
                    except (RuntimeError, ValueError, NotImplementedError) as error:
                        row["refused"] = str(error).splitlines()[0][:120]
                    found.append(row)
                    q = k = v = None
                    torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        pathlib.Path(args.peer).write_text(json.dumps(found))
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def run_peer(args):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "peer.json"
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks),
                __file__, "--machine", args.machine, "--peer", str(path), "--iterations", str(args.iterations),
                "--tokens", *map(str, args.tokens), "--heads", *args.heads]
        if args.command:
            line += ["--command", args.command]
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())


# ---- ours -------------------------------------------------------------------------------------

def run_ours(args, pair):
    heads, kv_heads = pair.split("/")
    chosen = ["--strategies", *args.strategies] if args.strategies else []
    return longspan_command.run(
        args.command, ["--backend", "cuda", "--phases", "prefill", "--kv", *args.tokens, "--heads", heads,
                       "--kv-heads", kv_heads, "--dim", DIM, "--dtype", "bf16", "--ranks", 1, args.ranks, "--shard",
                       "zigzag", "--warmup", 3, "--iterations", args.iterations, *chosen],
        args.ranks, args.launcher, what=("bench", "scale"))["rows"]


def judge(args, pair, rounds, peers):
    """The records of one pair of heads; `rounds` and `peers` hold what each round measured."""
    heads, kv_heads = map(int, pair.split("/"))
    found = []
    for tokens in args.tokens:
        rows = [r for rows in rounds for r in rows if r["kv_len"] == tokens and not r["no"]]
        alone = statistics.median(r["time_ms"]["median"] for r in rows if r["ranks"] == 1)
        times = {}
        for r in rows:
            if r["ranks"] == args.ranks:
                times.setdefault(r["strategy"], []).append(r["time_ms"]["median"])
        times = {name: statistics.median(values) for name, values in times.items()}
        best = min(times, key=times.get)
        theirs, their_alone, refused = {}, {}, {}
        for r in (r for found_rows in peers for r in found_rows):
            if (r["heads"], r["kv_heads"], r["tokens"]) != (heads, kv_heads, tokens):
                continue
            name = f"PyTorch {r['method']}, {r['backend']}"
            their_alone.setdefault(r["backend"], []).append(r["alone"])
            if "ms" in r:
                theirs.setdefault(name, []).append(r["ms"])
            else:
                refused[name] = r["refused"]
        theirs = {name: statistics.median(values) for name, values in theirs.items()}
        case = {"heads": heads, "kv_heads": kv_heads, "dim": DIM, "dtype": "bf16", "tokens": tokens, "causal": True,
                "ranks": args.ranks}
        say = lambda name, ms, one: print(f"{pair:>6} {tokens:>8} {name:<34}{ms:>10.3f} ms   efficiency "
                                          f"{one / ms / args.ranks:6.3f}", flush=True)
        print(f"{pair:>6} {tokens:>8} {'longspan, one GPU':<34}{alone:>10.3f} ms")
        for name, ms in times.items():
            say(f"longspan {name}", ms, alone)
            target = TARGETS.get((args.ranks, tokens)) if name == best else None
            found.append(records.record("context_parallel", case | {"strategy": name}, "efficiency",
                                        round(alone / ms / args.ranks, 3), target=target))
            found.append(records.record("context_parallel", case | {"strategy": name}, "ms", round(ms, 4)))
        for name, ms in theirs.items():
            say(name, ms, statistics.median(their_alone[name.rsplit(", ")[-1]]))
            found.append(records.record("context_parallel", case | {"strategy": best}, "ms", round(times[best], 4),
                                        peer=name, peer_value=round(ms, 4), ratio=round(ms / times[best], 3)))
        for name, why in refused.items():
            print(f"# {name} refuses {pair}, {tokens} tokens: {why}")
    return found


def main():
    args = arguments()
    if args.peer:
        return peer(args)
    ours, peers = {pair: [] for pair in args.heads}, []
    for _ in range(args.rounds):
        for pair in args.heads:
            ours[pair].append(run_ours(args, pair))
        if not args.only_ours:
            peers.append(run_peer(args))
    for pair in args.heads:
        records.write("context_parallel", args.machine, judge(args, pair, ours[pair], peers), args.results)


if __name__ == "__main__":
    main()
