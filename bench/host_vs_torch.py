#!/usr/bin/env python3
"""Processors: `longspan run` in one process beside PyTorch's scaled_dot_product_attention, fp32.

    python3 -m venv .venv && .venv/bin/pip install torch
    .venv/bin/python bench/host_vs_torch.py

Both sides have the same cores and are measured in turns; a side's figure is the median over the
rounds of its best time in a round, so that other work on the machine weighs little. Prefill counts
4 heads kv^2 dim operations, half of them when causal.
Records go to host-<machine>.jsonl.
"""

import argparse
import itertools
import os
import statistics
import time

import torch
import torch.nn.functional as F

import longspan_command
import records
import torch_host

TARGET = 0.8  # of PyTorch's speed, in prefill
HEADS = 8
PREFILL = list(itertools.product([64, 128], [4096, 8192, 16384], [False, True]))  # dim, kv, causal
DECODE = [(64, 65536), (128, 65536)]  # dim, kv


def torch_seconds(dim, kv, tokens, causal, iterations):
    q = torch.randn(1, HEADS, tokens, dim)
    k, v = (torch.randn(1, HEADS, kv, dim) for _ in range(2))
    times = []
    with torch.no_grad():
        for _ in range(iterations + 1):
            start = time.perf_counter()
            F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            times.append(time.perf_counter() - start)
    return min(times[1:])  # the first one warms up


def longspan_seconds(command, dim, kv, tokens, causal, iterations, threads):
    run = longspan_command.run(command, [
        "--backend", "host", "--threads", threads, "--heads", HEADS, "--dim", dim, "--kv", kv,
        "--tokens", tokens, "--dtype", "fp32", "--check", 1, "--warmup", 1,
        "--iterations", iterations, *(["--causal"] if causal else [])])
    if not run["check"]["right"]:
        raise SystemExit(f"wrong result: {run}")
    return run["time_ms"]["min"] / 1000


def compare(args, dim, kv, tokens, causal, target):
    ours, theirs = [], []
    for _ in range(args.rounds):
        ours.append(longspan_seconds(args.command, dim, kv, tokens, causal, args.iterations,
                                     args.threads))
        theirs.append(torch_seconds(dim, kv, tokens, causal, args.iterations))
    flop = 4 * HEADS * tokens * kv * dim * (0.5 if causal else 1)
    mine, peer = (flop / statistics.median(side) / 1e12 for side in (ours, theirs))
    print(f"{dim:>5} {kv:>7} {tokens:>7}  {'causal' if causal else 'full':<7}{mine:9.3f} {peer:9.3f} "
          f"{mine / peer:7.2f}", flush=True)
    case = {"heads": HEADS, "kv_heads": HEADS, "dim": dim, "dtype": "fp32", "batch": 1,
            "tokens": tokens, "kv_len": kv, "ranks": 1, "threads": args.threads, "causal": causal}
    return records.record("host", case, "TFLOP/s", round(mine, 4), peer="PyTorch",
                          peer_value=round(peer, 4), ratio=round(mine / peer, 3), target=target,
                          machine=args.host)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    longspan_command.add_command(parser)
    parser.add_argument("--machine", default="cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=2, help="timed runs of a side in a round")
    parser.add_argument("--most-keys", type=int, default=1 << 20, help="leave longer cases out")
    records.add_arguments(parser)
    args = longspan_command.parse(parser)
    torch.set_num_threads(args.threads)
    args.host = torch_host.machine(args.command)
    print(f"# {args.host['cpu']}, {args.host['cores']} cores, {args.host['simd']}; PyTorch "
          f"{torch.__version__}, {args.host['pytorch_simd']}, {args.host['pytorch_math']}")

    print(f"# longspan beside PyTorch {torch.__version__}: {HEADS} heads, fp32, {args.threads} "
          f"threads, median of {args.rounds} rounds\n"
          f"#{'dim':>4} {'kv':>7} {'tokens':>7}  {'mask':<7}{'longspan':>9} {'PyTorch':>9} {'ratio':>7}"
          "   (TFLOP/s)")
    cases = [(dim, kv, kv, causal, TARGET) for dim, kv, causal in PREFILL]
    cases += [(dim, kv, 1, False, None) for dim, kv in DECODE]
    for case in cases:
        if case[1] <= args.most_keys:
            records.write("host", args.machine, [compare(args, *case)], args.results)


if __name__ == "__main__":
    main()
