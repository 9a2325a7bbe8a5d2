#!/usr/bin/env python3
"""The timeline of rank 0's GPU in one call of context-parallel attention.

    torchrun --nproc-per-node 2 bench/timeline.py --tokens 32768 --heads 16/16 [--json FILE]

The call is that of longspan.torch (bf16, causal, dim 128, zigzag); PyTorch's profiler sees every
kernel and copy of the process. The table has the activities of the last call, by their begin, and
how much of the copies' time overlaps with kernels.
"""

import argparse
import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import longspan.torch as lt

DIM = 128


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", default="16/16", help="query heads / kv heads")
    parser.add_argument("--strategy", default="ring-kv")
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--apart", action="store_true",
                        help="each call when the GPUs have nothing to do (default: one behind the other)")
    parser.add_argument("--host", action="store_true", help="what the host asks CUDA for, too")
    parser.add_argument("--json", help="the activities, as a list")
    return parser.parse_args()


def activities(trace, calls, host):
    """(begin, us, stream, name) of the last call, from 0 on; `host` adds the host's calls of CUDA."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = sorted((e["ts"], e["dur"], e["args"].get("stream", -1), e["name"]) for e in trace["traceEvents"]
                   if e.get("cat") in kinds and "AllReduce" not in e["name"])  # of a barrier between calls
    last = found[len(found) // calls * (calls - 1):]
    first, end = last[0][0], max(begin + us for begin, us, *_ in last)
    if host:
        last += [(e["ts"], e["dur"], "host", e["name"]) for e in trace["traceEvents"]
                 if e.get("cat") in ("cuda_runtime", "cuda_driver") and first - 100 < e["ts"] < end]
        last.sort()
    return [(begin - first, us, stream, name) for begin, us, stream, name in last]


def covered(span, others):
    """How much of a span is covered by the others, which may overlap."""
    begin, end = span
    cuts = sorted((max(begin, b), min(end, e)) for b, e in others if b < end and e > begin)
    total, reached = 0.0, begin
    for b, e in cuts:
        total += max(0.0, e - max(b, reached))
        reached = max(reached, e)
    return total


def main():
    args = arguments()
    heads, kv_heads = map(int, args.heads.split("/"))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = args.tokens // ranks

    def tensor(n):  # [1, tokens, heads, dim] in memory, as after a model's projections
        return torch.randn(1, rows, n, DIM, device=device, dtype=torch.bfloat16).transpose(1, 2)

    q, k, v = tensor(heads), tensor(kv_heads), tensor(kv_heads)
    with torch.no_grad():
        def call():
            return lt.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads,
                                                   total_keys=args.tokens, total_queries=args.tokens,
                                                   strategy=args.strategy)
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        dist.barrier()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(args.calls):
                call()
                if args.apart:
                    torch.cuda.synchronize()
                    dist.barrier()
                    torch.cuda.synchronize()
            torch.cuda.synchronize()
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            found.export_chrome_trace(path)
            with open(path) as file:
                last = activities(json.load(file), args.calls, args.host)
        print(f"# {args.tokens} tokens, {args.heads} heads, {ranks} GPUs: us from the first activity of the call")
        for begin, us, stream, name in last:
            print(f"{begin:>10.1f} {us:>9.1f}  stream {stream:<5}{name[:90]}")
        kernels = [(b, b + us) for b, us, stream, name in last if stream != "host" and "Memcpy" not in name]
        copies = [(b, b + us) for b, us, stream, name in last if stream != "host" and "Memcpy PtoP" in name]
        if copies:
            time = sum(e - b for b, e in copies)
            print(f"# copies between GPUs take {time:.1f} us, of which {sum(covered(c, kernels) for c in copies):.1f} "
                  "lie under kernels")
        if args.json:
            with open(args.json, "w") as file:
                json.dump([dict(begin_us=b, us=u, stream=s, name=n) for b, u, s, n in last], file)
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
