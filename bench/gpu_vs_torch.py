#!/usr/bin/env python3
"""Decode on one GPU beside PyTorch's cuDNN and FlashAttention-2, in one run.

    python3 bench/gpu_vs_torch.py --machine h200 [--sweep]

Ours is `bench_serving --section layer`: the layer of one rank on contiguous keys. Both sides are
captured in graphs of several calls over inputs larger than L2. They are measured in turns, and a
figure is the median of the rounds. Bytes are those of the keys and values. The ceiling is PyTorch's
sum over 4 GiB in the same run. `--sweep` adds cases without a peer: pages, fp8 and several new
tokens, each beside our own plain time. Records go to decode-<machine>.jsonl. For prefill see
prefill_vs_torch.py.
"""

import argparse
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import records
import serving_command
import torch_gpu

PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
BEYOND_CACHE = 240e6  # bytes; as bench_serving
# Rows of bench_serving's table: (heads, kv_heads, batch, keys; 0: ragged), target speed relative to
# cuDNN's. 1.01 of its time is within the spread between runs and counts as equal.
EQUAL = 0.99
ROWS = [((32, 8, 1, 131072), EQUAL), ((64, 8, 1, 131072), EQUAL), ((32, 8, 8, 32768), EQUAL),
        ((32, 8, 32, 4096), EQUAL), ((8, 1, 16, 65536), 1.01), ((64, 8, 1, 524288), EQUAL),
        ((32, 8, 1, 1024), EQUAL), ((32, 8, 1, 8192), EQUAL), ((32, 8, 64, 0), None)]
MOST_US = {(32, 8, 1, 1024): 8.0, (32, 8, 1, 8192): 14.0}
OF_CEILING = {(32, 8, 64, 0): 0.93}
DIM = 128


def peer_us(heads, kv_heads, batch, kv):
    size = 2 * batch * kv * kv_heads * DIM * 2
    copies = max(1, -(-int(BEYOND_CACHE) // size))
    calls = -(-5 // copies) * copies
    q = torch.randn(batch, heads, 1, DIM, device="cuda", dtype=torch.bfloat16)
    k, v = ([torch.randn(batch, kv_heads, kv, DIM, device="cuda", dtype=torch.bfloat16)
             for _ in range(copies)] for _ in range(2))
    times = {}
    for name, backend in PEERS.items():
        def work(i):
            with sdpa_kernel(backend), torch.no_grad():
                F.scaled_dot_product_attention(q, k[i % copies], v[i % copies],
                                               enable_gqa=heads != kv_heads)
        try:
            times[name] = torch_gpu.elapsed_us(torch_gpu.captured(work, calls), 25) / calls
        except RuntimeError as error:
            print(f"# {name} does not take this case: {str(error).splitlines()[0][:80]}")
    return times


def shape_of(line, **more):
    return {key: line[key] for key in ("heads", "kv_heads", "dim", "dtype", "batch", "tokens")} | {
        "kv_len": line["kv_len"] or "1 to 32768", "ranks": 1} | more


def compare(args, row, ceiling):
    """Records of one row: beside the peers, the ceiling, and in microseconds with a target."""
    case, target = ROWS[row]
    ours, peers = [], {}
    for _ in range(args.rounds):  # in turns
        ours += serving_command.run(args.program, "--section", "layer", "--row", str(row))
        for name, us in (peer_us(*case) if case[3] else {}).items():
            peers.setdefault(name, []).append(us)
        torch.cuda.empty_cache()
    if not ours:
        return []
    us = statistics.median(line["us"] for line in ours)
    size, shape = ours[0]["bytes"], shape_of(ours[0])
    mine = size / us / 1e6
    print(f"{case[0]:>3}/{case[1]:<3} batch {case[2]:<3} kv {case[3] or 'ragged':<7} longspan "
          f"{us:8.2f} us {mine:6.2f} TB/s", end="")
    found = []

    def add(metric, value, peer=None, theirs=None, **how):
        ratio = None if theirs is None else round(value / theirs, 3)
        found.append(records.record("decode", shape, metric, round(value, 3), peer=peer,
                                    peer_value=None if theirs is None else round(theirs, 3),
                                    ratio=ratio, **how))
        print("" if peer is None else f" | {peer} {theirs:6.2f} (ratio {ratio:.3f})", end="")

    if case in MOST_US:
        add("us", us, target=MOST_US[case], less_is_better=True)
    for name, times in peers.items():
        add("TB/s", mine, name, size / statistics.median(times) / 1e6,
            target=target if name == "cuDNN" else None)
    add("TB/s", mine, "read ceiling", ceiling, target=OF_CEILING.get(case))
    print(flush=True)
    return found


# Cases without a peer: options of bench_serving beside the plain case, and the target speed
# relative to it.
SWEEP = [("decode", ["--page", "16"], 0.97), ("decode", ["--page", "1"], 0.83),
         ("decode", ["--page", "16", "--kv-dtype", "e4m3"], 1.75),
         ("layer", ["--tokens", "2"], 0.87), ("layer", ["--tokens", "4"], 0.87),
         ("layer", ["--tokens", "8"], 0.87)]


def sweep(args, row):
    """The large rows, each beside our plain time in the same minute."""
    plain = serving_command.run(args.program, "--section", "layer", "--row", str(row))
    found = []
    for section, options, target in SWEEP:
        for line in serving_command.run(args.program, "--section", section, "--row", str(row),
                                        *options):
            ratio = round(plain[0]["us"] / line["us"], 3)
            shape = shape_of(line, **{key: line[key] for key in ("kv_dtype", "page", "table")
                                      if key in line})
            print(f"{line['heads']:>3}/{line['kv_heads']:<3} {' '.join(options):<28}"
                  f"{line['us']:8.2f} us beside {plain[0]['us']:.2f}: {ratio:.3f}", flush=True)
            found.append(records.record("decode", shape, "us", round(line["us"], 3),
                                        peer="longspan, contiguous keys, 1 token",
                                        peer_value=round(plain[0]["us"], 3), ratio=ratio,
                                        target=target))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    serving_command.add_program(parser)
    parser.add_argument("--machine", required=True, help="name for the records, such as h200")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sweep", action="store_true", help="pages, fp8, several tokens too")
    records.add_arguments(parser)
    args = serving_command.parse(parser)
    ceiling = torch_gpu.read_ceiling()
    print(f"# read ceiling {ceiling:.2f} TB/s\n"
          f"# decode: longspan beside PyTorch {torch.__version__} on "
          f"{torch.cuda.get_device_name()}, bf16, median of {args.rounds} rounds")
    for row in range(len(ROWS)):
        records.write("decode", args.machine, compare(args, row, ceiling), args.results)
    for row in (0, 2) if args.sweep else ():
        records.write("decode", args.machine, sweep(args, row), args.results)


if __name__ == "__main__":
    main()
