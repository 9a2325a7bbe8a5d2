#!/usr/bin/env python3
"""Decode over latent keys (MLA, 576/512) on one GPU, beside a Triton kernel with its tiles and splits
swept (triton_mla.py) and beside a copy of as many bytes, in one run.

    python3 bench/mla_decode.py --machine h200

Ours is a layer of one rank over a bf16 cache in pages of 64 keys. Both sides are captured in graphs
over caches larger than L2, and take turns; a figure is the median of the rounds. Bytes are those of
the latent keys. FLOPs are 2 (576 + 512) for each row and key. Records go to mla_decode-<machine>.jsonl.
"""

import argparse
import statistics

import longspan
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


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="name for the records, such as h200")
    parser.add_argument("--rounds", type=int, default=3)
    records.add_arguments(parser)
    args = parser.parse_args()
    copy = torch_gpu.copy_bandwidth()
    print(f"# MLA decode on {torch.cuda.get_device_name()}, bf16, median of {args.rounds} rounds; a copy "
          f"reads and writes {copy:.2f} TB/s")
    for case, metric, target in CASES:
        records.write("mla_decode", args.machine, compare(case, metric, target, args, copy), args.results)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
