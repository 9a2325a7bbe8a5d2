#!/usr/bin/env python3
"""CPUs: forward and backward of attention beside PyTorch's scaled_dot_product_attention.

    .venv/bin/python bench/train_vs_torch.py [--results bench/results]       # needs torch

Both sides use the same number of threads and are measured in turns, round after round. A side's figure is
its best forward plus its best backward of all rounds, so that other work on the machine matters little.
The step counts 14 heads tokens^2 dim operations (4 of forward, 10 of backward), half of them when causal.
Two ranks of one thread are measured beside one rank of one thread with half the work: the efficiency.
Records go to train-<machine>.jsonl.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

import records
import torch_host

sys.path.insert(0, str(records.ROOT / "python" / "tests"))
from free_port import free_port  # noqa: E402

PROGRAM = records.ROOT / "build" / "default" / "bin" / "bench_train"
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
    return words + [f"--turns={turns}"] + (["--causal"] if case["causal"] else [])


def ours_ms(program, case, turns, ranks=1):
    """The best forward and the best backward of `turns`."""
    port = str(free_port())
    named = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
             "LONGSPAN_PORT": port} if ranks > 1 else {}
    made = [subprocess.Popen([program, *options(case, turns)], stdout=subprocess.PIPE, text=True,
                             env=os.environ | named | ({"RANK": str(r)} if named else {}))
            for r in range(ranks)]
    outputs = [process.communicate()[0] for process in made]
    if any(process.returncode for process in made):
        raise SystemExit(f"{program} failed")
    run = json.loads(outputs[0])
    return min(run["forward_ms"]) + min(run["backward_ms"])


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
    return 1000 * (min(forward[1:]) + min(backward[1:]))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default=PROGRAM,
                        help="bench_train (default: that of build/default)")
    parser.add_argument("--machine", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2, help="of a side in a round")
    records.add_arguments(parser)
    args = parser.parse_args()
    if not args.program.exists():
        raise SystemExit(f"{args.program} is not there: cmake --build build/default --target bench_train")
    machine = torch_host.machine(None)
    made = []
    for case in cases(len(os.sched_getaffinity(0))):
        mine = theirs = float("inf")
        for _ in range(args.rounds):
            mine = min(mine, ours_ms(args.program, case, args.turns))
            theirs = min(theirs, torch_ms(case, args.turns))
        made.append(records.record("train", case, "ms", round(mine, 2), peer="PyTorch",
                                   peer_value=round(theirs, 2), ratio=round(theirs / mine, 3),
                                   target=TARGET, machine=machine))
        print(f"{mine:9.1f} {theirs:9.1f} ms  ratio {theirs / mine:5.2f}  {case}", flush=True)
        records.write("train", args.machine, made[-1:], args.results)
    if len(os.sched_getaffinity(0)) > 1:
        case = {"heads": 8, "kv_heads": 8, "dim": 64, "dtype": "fp32", "tokens": 4096, "causal": True,
                "threads": 1}
        one = min(ours_ms(args.program, case, args.turns) for _ in range(args.rounds))
        two = min(ours_ms(args.program, case, args.turns, 2) for _ in range(args.rounds))
        made.append(records.record("train", case | {"ranks": 2}, "efficiency", round(one / two / 2, 3),
                                   target=RANKS_TARGET, machine=machine))
        print(f"{one:9.1f} ms alone, {two:9.1f} ms on two ranks: efficiency {one / two / 2:.3f}")
        records.write("train", args.machine, made[-1:], args.results)
    print(f"# {sum(r['met'] is False for r in made)} targets not met")


if __name__ == "__main__":
    main()
