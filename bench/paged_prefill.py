#!/usr/bin/env python3
"""The cost of pages in chunked prefill on one GPU: `context_attention` over a cache in pages in
permuted order, beside `longspan run` over contiguous keys, for the same new tokens.

    python3 bench/paged_prefill.py --machine h200

Cases are those of chunked prefill (bench/seeds_vs_longspan.py). Both sides take turns (rounds.py),
each with its own warm-up; a ratio is the median of the rounds' ratios. Records go to
paged-<machine>.jsonl.
"""

import argparse

import longspan_command
import prefill_runs
import rounds
import serving_command

TARGET = 0.9  # of contiguous keys
HEADS, KV_HEADS, DIM = 32, 8, 128
# Rows of bench_serving's table of chunks: sequences, new tokens, keys of a sequence.
ROWS = {0: (1, 512, 8704), 4: (1, 2048, 34816)}
PAGES = [16, 64, 256]
LAYOUTS = ["rows", "x-packed"]


class Contiguous(prefill_runs.Run):
    target = None

    def __init__(self, batch, tokens, kv):
        self.times = []
        self.work = 4 * HEADS * DIM * batch * (tokens * (kv - tokens) + tokens * (tokens + 1) // 2)
        self.options = ["--heads", HEADS, "--kv-heads", KV_HEADS, "--dim", DIM, "--dtype", "bf16",
                        "--batch", batch, "--tokens", tokens, "--kv", kv, "--causal"]


class Paged(Contiguous):
    target = TARGET

    def __init__(self, row, page, layout):
        batch, tokens, kv = ROWS[row]
        super().__init__(batch, tokens, kv)
        self.shape = {"heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM, "dtype": "bf16",
                      "batch": batch, "tokens": tokens, "kv_len": kv, "ranks": 1, "page": page,
                      "layout": layout}
        self.asked = ["--section", "chunked", "--row", str(row), "--page", str(page),
                      "--layout", layout]

    def measure(self, args, checked):
        lines = serving_command.run(args.program, *self.asked)
        if len(lines) != 1:
            raise SystemExit(f"bench_serving {' '.join(self.asked)} gave {len(lines)} results")
        self.times.append(lines[0]["us"])


class Group(prefill_runs.Group):
    def lines(self):
        for r in self.records():
            case = r["case"]
            yield (f"{case['batch']} x {case['tokens']:>4} new, {case['kv_len']:>6} keys, pages of "
                   f"{case['page']:>3}, {case['layout']:<9}{r['ours']:7.1f} | {r['peer']} "
                   f"{r['peer_value']:.1f} ratio {r['ratio']:.3f} of {r['target']:.2f}"
                   f"{' NOT MET' if r['met'] is False else ''}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    rounds.add_arguments(parser, 3, 120)
    serving_command.add_program(parser)
    args = longspan_command.parse(parser)
    rounds.take_turns(args, "paged", [
        Group("longspan, contiguous keys",
              [Contiguous(*ROWS[row]), *(Paged(row, page, layout) for page in PAGES
                                         for layout in LAYOUTS)], "paged") for row in ROWS],
                      "# longspan TFLOP/s, pages | contiguous keys")


if __name__ == "__main__":
    main()
