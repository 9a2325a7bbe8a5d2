#!/usr/bin/env python3
"""Prefill on one GPU: `longspan run` beside PyTorch's cuDNN and FlashAttention-2 attention.

    python3 bench/prefill_vs_torch.py --machine h200

The kernels are measured in turns, round after round over the whole table, so that a chip limited by
power or heat treats all alike. Each measurement first keeps the GPU busy for rounds.WARM_S with the
same work, then takes the median of 7 calls or more. A ratio is the median of the rounds' ratios
(within a round both sides ran within seconds of each other). Operations: 2 heads kv^2 (dim +
value_dim), half of them when causal. Our time is that of a whole run of the layer on one rank,
which waits for each run; the peers' calls are queued ahead. With --seconds no round begins that
would end later. Records go to prefill-<machine>.jsonl after each round, those of --only-two-widths
to mla_prefill-<machine>.jsonl.
"""

import argparse
import functools
import statistics
import typing

import longspan_command
import records
import rounds


class Case(typing.NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    batch: int
    kv: int
    dtype: str
    value_dim: int = 0  # 0: dim

    @property
    def of_value(self):
        return self.value_dim or self.dim

    def of(self, kv_heads=None, shrink=1):
        """With other kv heads, or fewer keys."""
        return self._replace(kv_heads=kv_heads or self.kv_heads, kv=max(1, self.kv // shrink))


PLAIN = [Case(16, 16, 128, 4, 4096, "bf16"), Case(16, 16, 128, 1, 16384, "bf16"),
         Case(8, 8, 128, 1, 65536, "bf16"), Case(32, 32, 64, 4, 4096, "bf16"),
         Case(32, 32, 64, 1, 16384, "bf16"), Case(8, 8, 256, 1, 16384, "bf16"),
         Case(16, 16, 128, 1, 16384, "fp16")]
GROUPED = [Case(32, 8, 128, 1, 16384, "bf16"), Case(64, 8, 128, 1, 16384, "bf16")]
PEERS = {"cuDNN": "CUDNN_ATTENTION", "FlashAttention-2": "FLASH_ATTENTION"}
EQUAL_HEADS = "longspan, equal heads"
INVARIANT_TARGET = 0.8  # in the fixed order
EQUAL_TARGET = 1.0  # grouped heads are no slower than equal ones
TWO_WIDTHS_TARGET = 1.05
# In the fixed order, for which Hopper has dims up to 128.
IN_ORDER = [Case(16, 16, 128, 4, 4096, "bf16"), Case(16, 16, 128, 1, 16384, "bf16"),
            Case(32, 32, 64, 1, 16384, "bf16"), Case(32, 8, 128, 1, 16384, "bf16")]
# Heads of latent attention before absorption.
TWO_WIDTHS = [*(Case(16, 16, 192, 1, kv, "bf16", 128) for kv in (4096, 8192, 16384, 32768)),
              Case(16, 16, 96, 1, 16384, "bf16", 64)]


def target(dim, kv, causal):
    """Of our speed against cuDNN's."""
    if dim == 256:
        return 1.0 if causal else 0.95
    return 1.0 if not causal else 1.05 if kv <= 4096 else 1.02


def operations(case, causal):
    widths = case.dim + case.of_value
    return 2 * case.batch * case.heads * case.kv**2 * widths * (0.5 if causal else 1)


def ours_us(args, case, causal, checked, invariant=False):
    return rounds.run_us(args, operations(case, causal), checked, [
        "--heads", case.heads, "--kv-heads", case.kv_heads, "--dim", case.dim, "--value-dim",
        case.of_value, "--batch", case.batch, "--kv", case.kv, "--tokens", case.kv, "--dtype",
        case.dtype, *(["--causal"] if causal else []), *(["--invariant"] if invariant else [])])


def peer_us(case, causal):
    """Median time of each of PyTorch's kernels that takes the case."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads, kv_heads = case.heads, case.kv_heads
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
    q, k, v = (torch.randn(case.batch, n, case.kv, dim, device="cuda", dtype=kind)
               for n, dim in ((heads, case.dim), (kv_heads, case.dim), (kv_heads, case.of_value)))
    warmup, iterations = rounds.counts(operations(case, causal))
    times = {}
    for name, backend in PEERS.items():
        with sdpa_kernel(getattr(SDPBackend, backend)), torch.no_grad():
            work = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal,
                                     enable_gqa=heads != kv_heads)
            try:
                work()
            except RuntimeError as error:
                print(f"# {name} does not take {case}: {str(error).splitlines()[0][:80]}")
                continue
            slow = 2 if name == "FlashAttention-2" else 1  # the same warm-up time
            for _ in range(max(3, warmup // slow)):
                work()
            marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                     for _ in range(max(rounds.LEAST_ITERATIONS, iterations // slow))]
            for begin, end in marks:
                begin.record()
                work()
                end.record()
            torch.cuda.synchronize()
            times[name] = statistics.median(b.elapsed_time(e) for b, e in marks) * 1000
    del q, k, v, work
    torch.cuda.empty_cache()
    return times


class Row:
    """One case: times of each side, one a round."""

    def __init__(self, case, causal, invariant=False):
        self.case, self.causal, self.invariant = case, causal, invariant
        self.ours, self.peers = [], {}

    def measure(self, args, number):
        def ours():
            self.ours.append(ours_us(args, self.case, self.causal, number == 0, self.invariant))

        def peers():
            for name, us in peer_us(self.case, self.causal).items():
                self.peers.setdefault(name, []).append(us)
            if self.case.heads != self.case.kv_heads and not self.invariant:
                equal = self.case.of(kv_heads=self.case.heads)
                self.peers.setdefault(EQUAL_HEADS, []).append(
                    ours_us(args, equal, self.causal, number == 0))

        for side in (ours, peers) if number % 2 == 0 else (peers, ours):
            side()

    def speed(self, times):
        return operations(self.case, self.causal) / statistics.median(times) / 1e6

    def target(self, peer):
        heads, kv_heads, dim, _, kv, _, value_dim = self.case
        if self.invariant:  # Hopper has the fixed order for dims up to 128
            asked = peer == "cuDNN" and heads == kv_heads and dim == 128 and self.causal
            return INVARIANT_TARGET if asked else None
        if peer == EQUAL_HEADS:
            return EQUAL_TARGET
        if value_dim:
            return TWO_WIDTHS_TARGET if peer == "cuDNN" else None
        return target(dim, kv, self.causal) if peer == "cuDNN" and heads == kv_heads else None

    def records(self):
        heads, kv_heads, dim, batch, kv, dtype, value_dim = self.case
        shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim,
                 **({"value_dim": value_dim} if value_dim else {}), "dtype": dtype, "batch": batch,
                 "tokens": kv, "kv_len": kv, "ranks": 1, "causal": self.causal,
                 "invariant": self.invariant}
        for peer, times in self.peers.items():
            ratio = statistics.median(t / o for t, o in zip(times, self.ours))
            yield records.record("prefill", shape, "TFLOP/s", round(self.speed(self.ours), 1),
                                 peer=peer, peer_value=round(self.speed(times), 1),
                                 ratio=round(ratio, 3), target=self.target(peer))

    def lines(self):
        heads, kv_heads, dim, batch, kv, dtype, value_dim = self.case
        line = (f"{dim}{f'/{value_dim}' if value_dim else '':<4} {kv:>6} x {batch} x {f'{heads}/{kv_heads}':<6}{dtype:<5}"
                f"{'causal' if self.causal else 'full':<7}{'invariant' if self.invariant else '':<10}"
                f"{self.speed(self.ours):7.1f}")
        for r in self.records():
            asked = "" if r["target"] is None else f" of {r['target']:.2f}" + (
                " NOT MET" if r["met"] is False else "")
            line += f" | {r['peer']} {r['peer_value']:.1f} ratio {r['ratio']:.3f}{asked}"
        spread = max(self.ours) / min(self.ours) - 1
        return [line + f" | rounds {len(self.ours)}, spread of ours {100 * spread:.1f} %"]


def table(args):
    def rows(cases, invariant=False):
        return [Row(case.of(shrink=args.shrink), causal, invariant)
                for case in cases if not args.dim or case.dim in args.dim
                for causal in (False, True)]

    if args.only_two_widths:
        return rows(TWO_WIDTHS)
    if args.only_invariant:
        return rows(IN_ORDER, True)
    return rows(PLAIN + GROUPED) + (rows(IN_ORDER, True) if args.invariant else [])


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    rounds.add_arguments(parser, 3, 230)
    parser.add_argument("--dim", type=int, nargs="+", help="only these dims")
    parser.add_argument("--invariant", action="store_true", help="the fixed order too")
    parser.add_argument("--only-invariant", action="store_true", help="the fixed order alone")
    parser.add_argument("--only-two-widths", action="store_true",
                        help="heads whose values are narrower than keys, alone")
    args = longspan_command.parse(parser)
    name = ("mla_prefill" if args.only_two_widths else
            "invariant" if args.only_invariant else "prefill")
    rounds.take_turns(args, name, table(args), "# dim, keys x batch x heads: longspan TFLOP/s | peers")


if __name__ == "__main__":
    main()
