#!/usr/bin/env python3
"""CPUs: forward and backward of attention (`longspan run --backward`) beside PyTorch's scaled_dot_product_attention.

    .venv/bin/python bench/train_vs_torch.py [--results bench/results]       # needs torch

Both sides use the same number of threads and are measured in turns, round after round. A side's figure is
its best forward plus its best backward of all rounds, so that other work on the machine matters little.
In bf16 both may use the CPU's own products, for which longspan has the option `--bf16-products`.
The step counts 14 heads tokens^2 dim operations (4 of forward, 10 of backward), half of them when causal.
`longspan bench scale --phases train` measures two ranks of one thread beside one rank of one thread with all
the work: the efficiency, the bytes that a rank receives, and the memory that it takes, beside the formula:
inputs, outputs, gradients and workspace. Records go to train-<machine>.jsonl.
"""

import argparse
import os
import time

import torch
import torch.nn.functional as F

import longspan_command
import records
import torch_host

TARGET, RANKS_TARGET = 1.0, 0.93
TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cases(most_threads):
    for threads in sorted({1, most_threads}):
        for dtype in TORCH_DTYPE:
            for heads, kv_heads, dim in [(8, 8, 64), (4, 4, 128), (8, 2, 64)]:
                for tokens, causal in [(1024, True), (4096, True), (2048, False)]:
                    yield {"heads": heads, "kv_heads": kv_heads, "dim": dim, "dtype": dtype, "tokens": tokens,
                           "causal": causal, "threads": threads}


def options(case, turns):
    words = [f"--{name.replace('_', '-')}={case[name]}"
             for name in ("heads", "kv_heads", "dim", "dtype", "tokens", "threads")]
    return words + [f"--kv={case['tokens']}", f"--iterations={turns}", "--check=off", "--backward", "--backend=host"] + (
        ["--causal"] if case["causal"] else []) + (["--bf16-products"] if case["dtype"] == "bf16" else [])


def best(forward, backward):
    return min(forward) + min(backward)


def ours_ms(command, case, turns):
    run = longspan_command.run(command, options(case, turns))
    return best(run["times_ms"], run["backward"]["times_ms"])


def torch_ms(case, turns):
    torch.set_num_threads(case["threads"])
    dtype = TORCH_DTYPE[case["dtype"]]

    def tensor(heads, grad=True):
        return torch.randn(1, heads, case["tokens"], case["dim"]).to(dtype).requires_grad_(grad)

    q, k, v = tensor(case["heads"]), tensor(case["kv_heads"]), tensor(case["kv_heads"])
    dout = tensor(case["heads"], False)
    forward, backward = [], []
    for _ in range(turns + 1):
        begin = time.perf_counter()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=case["causal"],
                                             enable_gqa=case["kv_heads"] < case["heads"])
        middle = time.perf_counter()
        out.backward(dout)
        forward.append(middle - begin)
        backward.append(time.perf_counter() - middle)
        q.grad = k.grad = v.grad = None
    return 1000 * best(forward[1:], backward[1:])


def memory(case, ranks, workspace):
    """Bytes of q, k, v, out, lse, dout, dq, dk and dv in fp32 on a rank, and of its workspace."""
    tokens, row = case["tokens"] / ranks, 4 * case["dim"]
    return tokens * (4 * case["heads"] * row + 4 * case["kv_heads"] * row + 4 * case["heads"]) + workspace


def ranks_records(args, case, machine):
    """Two ranks beside one, in rounds: of each number of ranks the best forward and backward of the strategy
    that `auto` takes."""
    found = {}
    for _ in range(args.rounds):
        made = longspan_command.run(
            args.command, ["--phases", "train", "--kv", case["tokens"], "--heads", case["heads"], "--kv-heads",
                           case["kv_heads"], "--dim", case["dim"], "--dtype", case["dtype"], "--threads", 1,
                           "--backend", "host", "--iterations", args.turns],
            2, args.launcher, ("bench", "scale"))
        for row in made["rows"]:
            if row["chosen"] or row["ranks"] == 1:
                found.setdefault(row["ranks"], []).append(row)
    ms = {ranks: best([r["forward_ms"]["min"] for r in rows], [r["backward_ms"]["min"] for r in rows])
          for ranks, rows in found.items()}
    for ranks, rows in found.items():
        on = case | {"ranks": ranks}
        last = rows[-1]
        yield records.record("train", on, "ms", round(ms[ranks], 2), machine=machine)
        yield records.record("train", on, "received MiB", round(last["counted_bytes"] / 2 ** 20, 3),
                             peer="the formula", peer_value=round(last["received_bytes"] / 2 ** 20, 3),
                             machine=machine)
        peak, expected = last["peak_bytes"], memory(case, ranks, last["workspace_bytes"])
        if peak:
            yield records.record("train", on, "peak MiB", round(peak / 2 ** 20, 1), peer="the formula",
                                 peer_value=round(expected / 2 ** 20, 1), ratio=round(expected / peak, 3),
                                 machine=machine)
    yield records.record("train", case | {"ranks": 2}, "efficiency", round(ms[1] / ms[2] / 2, 3),
                         target=RANKS_TARGET, machine=machine)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    longspan_command.add_command(parser)
    parser.add_argument("--launcher", default=longspan_command.MPIRUN,
                        help="how ranks are started (default: %(default)s)")
    parser.add_argument("--machine", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2, help="of a side in a round")
    records.add_arguments(parser)
    args = longspan_command.parse(parser)
    machine = torch_host.machine(None)
    made = []
    for case in cases(len(os.sched_getaffinity(0))):
        mine = theirs = float("inf")
        for _ in range(args.rounds):
            mine = min(mine, ours_ms(args.command, case, args.turns))
            theirs = min(theirs, torch_ms(case, args.turns))
        made.append(records.record("train", case, "ms", round(mine, 2), peer="PyTorch",
                                   peer_value=round(theirs, 2), ratio=round(theirs / mine, 3),
                                   target=TARGET, machine=machine))
        print(f"{mine:9.1f} {theirs:9.1f} ms  ratio {theirs / mine:5.2f}  {case}", flush=True)
        records.write("train", args.machine, made[-1:], args.results)
    if len(os.sched_getaffinity(0)) > 1:
        case = {"heads": 8, "kv_heads": 8, "dim": 64, "dtype": "fp32", "tokens": 4096, "causal": True,
                "threads": 1}
        found = list(ranks_records(args, case, machine))
        for r in found:
            print(f"{r['case']['ranks']} ranks: {r['metric']} {r['ours']}", flush=True)
        records.write("train", args.machine, found, args.results)
        made += found
    print(f"# {sum(r['met'] is False for r in made)} targets not met")


if __name__ == "__main__":
    main()
