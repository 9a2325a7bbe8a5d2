#!/usr/bin/env python3
"""Decode on one GPU: `longspan run` beside PyTorch's cuDNN and FlashAttention-2, in one run.

    python3 bench/gpu_vs_torch.py --machine h200

Counts the bytes of the keys and values. Both sides are warmed up and measured in turns; the figure
is the median. PyTorch's side is captured in a graph. Records go to
bench/results/decode-<machine>.jsonl. Prefill has a script of its own, prefill_vs_torch.py.
"""

import argparse
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import longspan_command
import records

PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
# (heads, kv_heads, dim, batch, kv)
DECODE = [(32, 8, 128, 1, 131072), (64, 8, 128, 1, 131072), (32, 8, 128, 8, 32768),
          (32, 8, 128, 32, 4096), (8, 1, 128, 16, 65536)]
DECODE_FLOOR_OF_COPY = 0.6


def elapsed_us(work, repeat):
    """Median time of one call, by events."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times)


def captured(work):
    """The same work as a graph's replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def copy_bandwidth():
    """TB/s read and written by a device-to-device copy of 2 GiB."""
    source = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / elapsed_us(lambda: target.copy_(source), 9) / 1e6


def peer_us(heads, kv_heads, dim, batch, kv):
    q = torch.randn(batch, heads, 1, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, kv_heads, kv, dim, device="cuda", dtype=torch.bfloat16)
            for _ in range(2))
    times = {}
    for name, backend in PEERS.items():
        def work():
            with sdpa_kernel(backend), torch.no_grad():
                F.scaled_dot_product_attention(q, k, v, enable_gqa=heads != kv_heads)
        try:
            times[name] = elapsed_us(captured(work), 15)
        except RuntimeError as error:
            print(f"# {name} does not take this case: {str(error).splitlines()[0][:80]}")
    return times


def ours_us(command, case):
    heads, kv_heads, dim, batch, kv = case
    run = longspan_command.run(command, [
        "--backend", "cuda", "--heads", heads, "--kv-heads", kv_heads, "--dim", dim, "--batch",
        batch, "--kv", kv, "--tokens", 1, "--dtype", "bf16", "--check", "1", "--iterations",
        "15", "--warmup", "3"])
    if not run["check"]["right"]:
        raise SystemExit(f"wrong result: {run}")
    return run["time_ms"]["median"] * 1000


def compare(args, case, floor):
    """Records of one case, our speed with its floor first."""
    heads, kv_heads, dim, batch, kv = case
    ours, peers = [], {}
    for _ in range(args.rounds):  # in turns
        ours.append(ours_us(args.command, case))
        for name, us in peer_us(*case).items():
            peers.setdefault(name, []).append(us)
        torch.cuda.empty_cache()
    size = 2 * batch * kv * kv_heads * dim * 2
    mine = size / statistics.median(ours) / 1e6
    print(f"{heads:>3}/{kv_heads:<3} dim {dim:<4} batch {batch:<3} kv {kv:<7} longspan "
          f"{mine:6.2f} TB/s", end="")
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "dtype": "bf16", "batch": batch,
             "tokens": 1, "kv_len": kv, "ranks": 1, "causal": False, "invariant": False}
    found = [records.record("decode", shape, "TB/s", round(mine, 3), target=floor)]
    for name, times in peers.items():
        theirs = size / statistics.median(times) / 1e6
        print(f" | {name} {theirs:6.2f} (ratio {mine / theirs:.2f})", end="")
        found.append(records.record("decode", shape, "TB/s", round(mine, 3), peer=name,
                                    peer_value=round(theirs, 3), ratio=round(mine / theirs, 3)))
    print(flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", default=longspan_command.find(), help="path of longspan")
    parser.add_argument("--machine", required=True, help="name for the records, such as h200")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", default=records.RESULTS, help="folder of the records")
    args = parser.parse_args()
    copy = copy_bandwidth()
    print(f"# copy bandwidth {copy:.2f} TB/s (read + written)\n"
          f"# decode: longspan beside PyTorch {torch.__version__} on "
          f"{torch.cuda.get_device_name()}, bf16, median of {args.rounds} rounds")
    for case in DECODE:
        floor = round(DECODE_FLOOR_OF_COPY * copy, 3)
        records.write("decode", args.machine, compare(args, case, floor), args.results)


if __name__ == "__main__":
    main()
