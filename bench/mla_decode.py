#!/usr/bin/env python3
"""Decode over latent keys (MLA, 576/512) on one GPU, beside a Triton kernel with its tiles and splits
swept (triton_mla.py) and beside a copy of as many bytes, in one run.

    python3 bench/mla_decode.py --machine h200
    python3 bench/mla_decode.py --machine h200x2 --ranks 2

Ours is a layer of one rank over a bf16 cache in pages of 64 keys. Both sides are captured in graphs
over caches larger than L2, and take turns; a figure is the median of the rounds. Bytes are those of
the latent keys. FLOPs are 2 (576 + 512) for each row and key. With --ranks, torchrun starts ranks that
share the keys of one sequence, beside rank 0 alone with all of them. Their efficiency is the time of one rank
over the product of ranks and the time of all. Records go to mla_decode-<machine>.jsonl.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys

import longspan
import longspan.torch
import torch

import records
import torch_gpu
import triton_mla

PAGE, DIM, LATENT = 64, triton_mla.DIM, triton_mla.LATENT
BEYOND_CACHE = 240e6  # bytes
# heads, batch, tokens, keys; what is compared, and its target: the share of copy bandwidth, TFLOP/s, or us.
CASES = [((16, batch, 1, keys), "TB/s", 0.85) for batch in (32, 128) for keys in (8192, 32768)]
CASES += [((128, 128, 1, keys), "TFLOP/s", 600) for keys in (4096, 8192, 32768)]
CASES += [((64, 128, 2, 8192), "TFLOP/s", 600), ((128, 1, 1, 32768), "us", 35)]
OF_TRITON = 3.0
SHARED = [(128, 1 << 18, None), (128, 1 << 20, 0.92), (16, 1 << 20, None)]  # heads, keys, target efficiency


class Case:
    def __init__(self, heads, batch, tokens, keys):
        self.shape = {"heads": heads, "kv_heads": 1, "dim": DIM, "value_dim": LATENT, "dtype": "bf16",
                      "batch": batch, "tokens": tokens, "kv_len": keys, "page": PAGE, "ranks": 1}
        self.bytes = batch * keys * DIM * 2
        self.flops = 2 * heads * tokens * batch * keys * (DIM + LATENT)
        self.copies = max(1, -(-int(BEYOND_CACHE) // self.bytes))
        pages = batch * (keys // PAGE)
        self.caches = [torch.empty(pages, PAGE, 1, DIM, device="cuda", dtype=torch.bfloat16).normal_()
                       for _ in range(self.copies)]
        self.table = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, -1)
        self.lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
        self.q = torch.randn(batch * tokens, heads, DIM, device="cuda", dtype=torch.bfloat16)
        self.starts = torch.arange(0, batch * tokens + 1, tokens, device="cuda", dtype=torch.int32)
        self.out = torch.empty(batch * tokens, heads, LATENT, device="cuda", dtype=torch.bfloat16)
        self.layer = longspan.Attention(
            longspan.alone("cuda"), heads=heads, kv_heads=1, head_dim=DIM, value_dim=LATENT,
            dtype="bfloat16", causal=True, softmax_scale=DIM ** -0.5, max_queries=batch * tokens,
            max_batch=batch, max_seqlen_k=keys, max_seqlen_q=tokens)

    def ours(self, i):
        cache = self.caches[i % self.copies]
        self.layer(self.q, cache, cache[..., :LATENT], cu_seqlens_q=self.starts,
                   cache_seqlens=self.lengths, block_table=self.table, out=self.out)

    def us(self, work):
        calls = -(-4 // self.copies) * self.copies
        return torch_gpu.elapsed_us(torch_gpu.captured(work, calls), 15) / calls

    def triton(self):
        """Its fastest, found once: a call of i."""
        def time_us(decode):
            return torch_gpu.elapsed_us(decode, 3)

        _, *how = triton_mla.fastest(self.q, self.caches[0], self.table, self.lengths, time_us)
        calls = [triton_mla.Decode(self.q, cache, self.table, self.lengths, *how)
                 for cache in self.caches]
        self.ours(0)
        difference = (calls[0]().float() - self.out.float()).abs().max().item()
        if not difference < 2e-2:
            raise SystemExit(f"Triton's result differs by {difference} from ours: {self.shape}")
        return lambda i: calls[i % self.copies](), dict(zip(("splits", "tile", "warps", "stages"), how))


def compare(case, metric, target, args, copy):
    c = Case(*case)
    ours, theirs, how = [], [], None
    if case[2] == 1:  # Triton's takes one token
        peer, how = c.triton()
    for _ in range(args.rounds):
        ours.append(c.us(c.ours))
        if how:
            theirs.append(c.us(peer))
    us = statistics.median(ours)
    value = {"us": us, "TB/s": c.bytes / us / 1e6, "TFLOP/s": c.flops / us / 1e6}
    print(f"heads {case[0]:>3} batch {case[1]:>3} tokens {case[2]} keys {case[3]:>6} longspan {us:9.2f} us "
          f"{value['TB/s']:.2f} TB/s {value['TFLOP/s']:6.1f} TFLOP/s", end="")
    found = []
    if metric == "TB/s":
        found.append(records.record("mla_decode", c.shape, metric, round(value[metric], 3), peer="copy",
                                    peer_value=round(copy, 3), ratio=round(value[metric] / copy, 3),
                                    target=target))
    else:
        found.append(records.record("mla_decode", c.shape, metric, round(value[metric], 3), target=target,
                                    less_is_better=metric == "us"))
    if how:
        peer_us = statistics.median(theirs)
        print(f" | Triton {peer_us:9.2f} us (ratio {peer_us / us:.2f}, {how})", end="")
        found.append(records.record("mla_decode", c.shape, "us", round(us, 3), peer="Triton",
                                    peer_value=round(peer_us, 3), ratio=round(peer_us / us, 3),
                                    target=OF_TRITON))
    print(flush=True)
    return found


def step_us(comm, heads, keys, own, check=False):
    """One token's attention over a sequence of latent keys, of which this rank has `own`."""
    import torch.distributed as dist

    cache = torch.empty(own, 1, DIM, device="cuda", dtype=torch.bfloat16).normal_()
    q = torch.randn(1, heads, DIM, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(1))
    out = torch.empty(1, heads, LATENT, device="cuda", dtype=torch.bfloat16)
    layer = longspan.Attention(comm, heads=heads, kv_heads=1, head_dim=DIM, value_dim=LATENT, dtype="bfloat16",
                               causal=True, softmax_scale=DIM ** -0.5, values_in_keys=True, max_queries=1, max_seqlen_k=keys)

    def step():
        layer(q, cache, None, out=out, total_keys=keys)

    us = torch_gpu.slowest_replay_ms(step, 5, 30) * 1000
    if check:  # against products of fp32
        scores = (q[0].float() @ cache[:, 0].float().T) * DIM ** -0.5
        most = scores.amax(-1, keepdim=True)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        weights = (scores - most).exp()
        sums = torch.cat([weights.sum(-1, keepdim=True), weights @ cache[:, 0, :LATENT].float()], -1)
        dist.all_reduce(sums)
        right = sums[:, 1:] / sums[:, :1]
        difference = ((out[0].float() - right).abs().max() / right.abs().max()).item()
        if not difference < 2e-2:
            raise SystemExit(f"the result is off by {difference} of the largest: {heads} heads, {keys} keys")
    return us


def over_ranks(args):
    import torch.distributed as dist

    torch_gpu.join()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    comm, alone = longspan.torch.communicator(), longspan.alone("cuda", gpu=int(os.environ["LOCAL_RANK"]))
    for heads, keys, target in SHARED:
        us = statistics.median(step_us(comm, heads, keys, keys // ranks, check=True) for _ in range(args.rounds))
        one = statistics.median(step_us(alone, heads, keys, keys) for _ in range(args.rounds))
        efficiency = one / us / ranks
        case = {"heads": heads, "kv_heads": 1, "dim": DIM, "value_dim": LATENT, "dtype": "bf16", "batch": 1, "tokens": 1,
                "kv_len": keys, "ranks": ranks}
        if rank == 0:
            print(f"heads {heads:>3} keys {keys:>8}: {us:.2f} us on {ranks} ranks, {one:.2f} on one, efficiency "
                  f"{efficiency:.3f}", flush=True)
            records.write("mla_decode", args.machine, [
                records.record("mla_decode", case, "us", round(us, 2), peer="1 rank", peer_value=round(one, 2),
                               ratio=round(one / us, 3)),
                records.record("mla_decode", case, "efficiency", round(efficiency, 3), target=target)], args.results)
        torch.cuda.empty_cache()
    torch_gpu.leave()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="name for the records, such as h200")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    records.add_arguments(parser)
    args = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a process of torchrun
        return over_ranks(args)
    if args.ranks > 1:
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks),
                str(pathlib.Path(__file__).resolve()), *sys.argv[1:]]
        sys.exit(subprocess.run(line, env={"OMP_NUM_THREADS": "1"} | os.environ).returncode)
    copy = torch_gpu.copy_bandwidth()
    print(f"# MLA decode on {torch.cuda.get_device_name()}, bf16, median of {args.rounds} rounds; a copy "
          f"reads and writes {copy:.2f} TB/s")
    for case, metric, target in CASES:
        records.write("mla_decode", args.machine, compare(case, metric, target, args, copy), args.results)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
