#!/usr/bin/env python3
"""CPUs: `longspan run` in one process beside PyTorch's scaled_dot_product_attention.

    python3 -m venv .venv && .venv/bin/pip install torch
    .venv/bin/python bench/host_vs_torch.py

Both sides use the same cores and are measured in turns. The figure of a side is the best time of
all rounds, so that other work on the machine matters little. Prefill counts 4 heads kv^2 dim
operations, half of them when causal, and is in TFLOP/s. Decode counts the bytes of keys and values
once, and is in GB/s. Beside it is the speed at which the same threads read memory in the same
turns: the better one of a plain sum and a dot product over 1 GiB. An fp8 cache (e4m3) has only that
peer. bf16 prefill uses bf16_products. Decode over latent keys (MLA) is in TFLOP/s, beside what one
thread could do: the less of what it reads, times the operations of a byte, and of torch.mm. These records go to
latent-<machine>.jsonl. With --only ranks: 2 and 4 ranks beside one with the same
cores. Records go to host-<machine>.jsonl.
"""

import argparse
import itertools
import os
import time

import torch
import torch.nn.functional as F

import longspan_command
import records
import torch_host

HEADS = 8
PREFILL_TARGET, DECODE_TARGET = 1.2, 1.0  # of PyTorch's speed
READ_TARGET = 0.85  # of the speed of reading memory, in decode
LATENT, LATENT_VALUE = 576, 512  # columns of a latent row, and those that are its value
LATENT_TARGET, LIMIT = 0.7, "less of plain read and torch.mm"
READ = "plain read"
RANKS, RANKS_TARGET = [2, 4], 0.9  # of one rank's speed with the same cores
TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}
BYTES = {"fp32": 4, "bf16": 2, "e4m3": 1}


def prefill_cases():
    for dtype, dim, kv, causal in itertools.product(["fp32", "bf16"], [64, 128],
                                                    [128, 1024, 4096, 8192, 16384], [False, True]):
        products = {"bf16_products": True} if dtype == "bf16" else {}
        yield {"kv_heads": HEADS, "dim": dim, "dtype": dtype, "tokens": kv, "kv_len": kv,
               "causal": causal} | products


def rank_cases():
    """Ranks that share the cores of this machine, each with its part of the keys."""
    for dtype, tokens, kv in itertools.product(["fp32", "bf16"], [1, 2048], [2048, 65536]):
        if (tokens == 1) == (kv == 65536):
            yield {"kv_heads": HEADS, "dim": 128, "dtype": dtype, "tokens": tokens, "kv_len": kv,
                   "causal": tokens > 1} | (
                       {"bf16_products": True} if dtype == "bf16" and tokens > 1 else {})


def decode_cases(threads):
    def case(dtype, dim, group, kv, count):
        return {"kv_heads": HEADS // group, "dim": dim, "dtype": dtype, "tokens": 1, "kv_len": kv,
                "causal": False, "threads": count}
    counts = sorted({1, threads})
    for count, dtype, dim, group in itertools.product(counts, BYTES, [64, 128, 256], [1, 4, 8]):
        yield case(dtype, dim, group, 32768, count)
    for count, dtype, kv in itertools.product(counts, BYTES, [1024, 8192, 131072]):
        yield case(dtype, 128, 1, kv, count)


def latent_cases():
    for dtype, heads in itertools.product(["fp32", "bf16"], [16, 64, 128]):
        yield {"heads": heads, "kv_heads": 1, "dim": LATENT, "value_dim": LATENT_VALUE, "values_in_keys": True,
               "dtype": dtype, "tokens": 1, "kv_len": 16384, "causal": False, "threads": 1}


def best(run, iterations):
    """The best time of some runs, after one to warm up."""
    times = []
    for _ in range(iterations + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times[1:])


class Memory:
    """How fast threads read more memory than a cache holds. Each operation may be limited by its own
    arithmetic, so the better one counts."""

    def __init__(self):
        self.halves = torch.ones(2 ** 27), torch.ones(2 ** 27)

    def gb_s(self, threads):
        torch.set_num_threads(threads)
        size = self.halves[0].numel() * 4 / 1e9
        return max(size / best(self.halves[0].sum, 3),
                   2 * size / best(lambda: torch.dot(*self.halves), 3))


def torch_seconds(case, iterations):
    if case["dtype"] not in TORCH_DTYPE:
        return None
    torch.set_num_threads(case["threads"])
    dtype = TORCH_DTYPE[case["dtype"]]
    q = torch.randn(1, HEADS, case["tokens"], case["dim"]).to(dtype)
    k, v = (torch.randn(1, case["kv_heads"], case["kv_len"], case["dim"]).to(dtype)
            for _ in range(2))
    with torch.no_grad():
        return best(lambda: F.scaled_dot_product_attention(
            q, k, v, is_causal=case["causal"], enable_gqa=case["kv_heads"] < HEADS), iterations)


def longspan_seconds(command, case, iterations, ranks=1):
    cache = ["--qkv-dtype", case["dtype"]] if case["dtype"] == "e4m3" else []
    run = longspan_command.run(command, [
        "--backend", "host", *(["--threads", case["threads"]] if "threads" in case else []),
        "--heads", HEADS,
        "--kv-heads", case["kv_heads"], "--dim", case["dim"], "--kv", case["kv_len"],
        "--tokens", case["tokens"], "--dtype", "bf16" if cache else case["dtype"], *cache,
        "--check", 1, "--warmup", 1, "--iterations", iterations,
        *(["--bf16-products"] if case.get("bf16_products") else []),
        *(["--causal"] if case["causal"] else [])], ranks)
    if not run["check"]["right"]:
        raise SystemExit(f"wrong result: {run}")
    return run["time_ms"]["min"] / 1000


def compare_latent(args, case):
    """A record of decode over latent keys beside what limits one thread, measured in turns."""
    torch.set_num_threads(1)
    work = 2 * case["heads"] * case["kv_len"] * (LATENT + LATENT_VALUE) / 1e12
    a, b = torch.randn(2, 1024, 1024)
    ours = limit = 0
    for _ in range(args.rounds):
        run = longspan_command.run(args.command, [
            "--backend", "host", "--threads", 1, "--heads", case["heads"], "--kv-heads", 1, "--dim", LATENT, "--value-dim",
            LATENT_VALUE, "--values-in-keys", "--kv", case["kv_len"], "--tokens", 1, "--dtype", case["dtype"], "--check", 1,
            "--warmup", 1, "--iterations", max(args.iterations, 10)], 1)
        if not run["check"]["right"]:
            raise SystemExit(f"wrong result: {run}")
        ours = max(ours, work / (run["time_ms"]["min"] / 1000))
        a_byte = 2 * case["heads"] * (LATENT + LATENT_VALUE) / (LATENT * BYTES[case["dtype"]])
        limit = max(limit, min(args.memory.gb_s(1) * a_byte / 1e3, 2 * 1024 ** 3 / 1e12 / best(lambda: torch.mm(a, b), 10)))
    return [records.record("latent", {"batch": 1, "ranks": 1} | case, "TFLOP/s", round(ours, 4), peer=LIMIT,
                           peer_value=round(limit, 4), ratio=round(ours / limit, 3), target=LATENT_TARGET, machine=args.host)]


def compare(args, case):
    """Records of a case: beside PyTorch and, in decode, beside the sum."""
    decode = case["tokens"] == 1
    work = 4 * HEADS * case["tokens"] * case["kv_len"] * case["dim"] / (2 if case["causal"] else 1)
    bytes_read = 2 * case["kv_heads"] * case["kv_len"] * case["dim"] * BYTES[case["dtype"]]
    amount, metric = (bytes_read / 1e9, "GB/s") if decode else (work / 1e12, "TFLOP/s")
    # Short runs are repeated for about the time of the long ones.
    iterations = max(args.iterations, min(200, int(2e9 / work if not decode else 1e9 / bytes_read)))
    sides = {}

    def measured(side, value):
        if value is not None:
            sides[side] = max(sides.get(side, 0), value)
    for _ in range(args.rounds):
        measured("longspan", amount / longspan_seconds(args.command, case, iterations))
        seconds = torch_seconds(case, iterations)
        measured("PyTorch", seconds and amount / seconds)
        if decode:
            measured(READ, args.memory.gb_s(case["threads"]))
    mine = sides.pop("longspan")
    targets = {"PyTorch": DECODE_TARGET if decode else PREFILL_TARGET, READ: READ_TARGET}
    named = {"heads": HEADS, "batch": 1, "ranks": 1} | case
    return [records.record("host", named, metric, round(mine, 4), peer=peer,
                           peer_value=round(value, 4), ratio=round(mine / value, 3),
                           target=targets[peer], machine=args.host)
            for peer, value in sides.items()]


def compare_ranks(args, case):
    """Records of 2 and 4 ranks beside one rank with the same cores, in turns; the threads of a rank
    are its share of them."""
    work = HEADS * case["tokens"] * case["kv_len"] * case["dim"]
    iterations = max(args.iterations, min(50, int(2e9 / work)))
    best_of = {}
    for _ in range(args.rounds):
        for ranks in [1, *RANKS]:
            seconds = longspan_seconds(args.command, case, iterations, ranks)
            best_of[ranks] = min(best_of.get(ranks, seconds), seconds)
    named = {"heads": HEADS, "batch": 1} | case
    return [records.record("host", named | {"ranks": ranks}, "us", round(best_of[ranks] * 1e6, 1),
                           peer="one rank", peer_value=round(best_of[1] * 1e6, 1),
                           ratio=round(best_of[1] / best_of[ranks], 3), target=RANKS_TARGET,
                           machine=args.host)
            for ranks in RANKS]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    longspan_command.add_command(parser)
    parser.add_argument("--machine", default="cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)),
                        help="of prefill; decode has one, too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=2,
                        help="least timed runs of a side in a round")
    parser.add_argument("--most-keys", type=int, default=1 << 20, help="leave longer cases out")
    parser.add_argument("--only", choices=["prefill", "decode", "latent", "ranks"])
    records.add_arguments(parser)
    args = longspan_command.parse(parser)
    args.memory = Memory()
    args.host = torch_host.machine(args.command) | {"memory_read_gb_s": {
        str(n): round(args.memory.gb_s(n), 1) for n in sorted({1, args.threads})}}
    print(f"# {args.host['cpu']}, {args.host['cores']} cores, {args.host['simd']}; PyTorch "
          f"{torch.__version__}, {args.host['pytorch_simd']}, {args.host['pytorch_math']}\n"
          f"# GB/s of reading memory by threads: {args.host['memory_read_gb_s']}; best of {args.rounds} "
          f"rounds\n"
          f"#dtype {'dim':>4} {'kvh':>3} {'kv':>7} {'tokens':>7} threads mask {'longspan':>9} "
          f"{'peer':>9} {'ratio':>6}")
    cases = []
    if args.only in (None, "decode"):
        cases += decode_cases(args.threads)
    if args.only in (None, "prefill"):
        cases += [case | {"threads": args.threads} for case in prefill_cases()]
    if args.only in (None, "latent"):
        cases += latent_cases()
    for case in cases:
        if case["kv_len"] > args.most_keys:
            continue
        found = (compare_latent if "values_in_keys" in case else compare)(args, case)
        for r in found:
            print(f"{case['dtype']:<6} {case['dim']:>4} {case['kv_heads']:>3} {case['kv_len']:>7} "
                  f"{case['tokens']:>7} {case['threads']:>7} {'causal' if case['causal'] else 'full':<6}"
                  f"{r['ours']:9.3f} {r['peer_value']:9.3f} {r['ratio']:6.2f} {r['metric']:<8}"
                  f"{r['peer']}{'  NOT MET' if r['met'] is False else ''}", flush=True)
        records.write(found[0]["bench"], args.machine, found, args.results)
    for case in rank_cases() if args.only in (None, "ranks") else []:
        found = compare_ranks(args, case)
        for r in found:
            print(f"{case['dtype']:<6} {case['dim']:>4} {case['kv_len']:>7} keys {case['tokens']:>5} "
                  f"tokens {r['case']['ranks']} ranks {r['ours']:10.1f} us, one {r['peer_value']:10.1f} us "
                  f"{r['ratio']:6.2f}{'  NOT MET' if r['met'] is False else ''}", flush=True)
        records.write("host", args.machine, found, args.results)


if __name__ == "__main__":
    main()
