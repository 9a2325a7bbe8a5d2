#!/usr/bin/env python3
"""Backward on GPUs: `longspan run --backward` beside PyTorch's.

The peer of plain attention is scaled_dot_product_attention over cuDNN, that of dropout the same over
FlashAttention-2, that of softcap, ALiBi, a window and documents flex_attention. Features are also beside our
own plain backward, by the pairs of rows and keys that are seen.

    python3 bench/backward_vs_torch.py --machine h200 [--ranks 2]

Both sides are measured in turns, round after round. A figure is the median of the rounds' medians. The
backward counts 2 heads tokens^2 (3 dim + 2 value_dim) operations, half of them when causal. Our time is that of
the whole backward, with the terms of rows before it and the rounding of the gradients after it, and each run
waits for the GPU; PyTorch's calls are queued ahead. With --ranks 2 `longspan bench scale --phases train`
measures forward and backward on two GPUs beside one: the efficiency, of every strategy. Records go to
backward-<machine>.jsonl.
"""

import argparse
import functools
import statistics

import longspan_command
import records

# (tokens, heads, kv_heads, dim, value_dim), and the target of our speed beside cuDNN's, causal and full.
CASES = {(16384, 32, 32, 64, 64): (1.05, 1.05), (4096, 64, 64, 128, 128): (1.05, 1.05),
         (16384, 16, 16, 128, 128): (1.05, 1.05), (8192, 32, 8, 128, 128): (1.05, 1.05),
         (8192, 16, 16, 192, 128): (1.05, 1.5), (8192, 8, 8, 256, 256): (1.25, 1.25)}
# Of causal attention with one more feature: our options, and the share of our plain speed that we want.
FEATURE_CASES = [(16384, 32, 32, 64, 64), (16384, 16, 16, 128, 128)]
DOCUMENT, WINDOW, SOFTCAP, DROPOUT = 2048, 1024, 50, 0.1
FEATURES = {
    "plain": ([], None),
    "fp16": ([], 0.95),
    "softcap": (["--softcap", SOFTCAP], 0.85),
    "alibi": (["--alibi", "query"], 0.85),
    "window": (["--window", WINDOW], 0.85),
    "documents": (["--documents"], 0.85),
    "dropout": (["--dropout", DROPOUT], 0.70),
}
SCALED = [(8192, 16, 16), (32768, 16, 16), (32768, 32, 8), (131072, 16, 16)]
EFFICIENCY = {8192: 0.80, 32768: 0.95, 131072: 0.98}


def operations(case, causal, feature="plain"):
    tokens, heads, _, dim, value_dim = case
    pairs = tokens * tokens * (0.5 if causal else 1)
    if feature == "window":
        pairs = tokens * WINDOW - WINDOW * WINDOW / 2
    if feature == "documents":
        pairs = tokens * DOCUMENT / 2
    return 2 * heads * pairs * (3 * dim + 2 * value_dim)


def dtype_of(feature):
    return "fp16" if feature == "fp16" else "bf16"


def ours_ms(args, case, causal, feature="plain"):
    tokens, heads, kv_heads, dim, value_dim = case
    options, _ = FEATURES[feature]
    starts = range(0, tokens + 1, DOCUMENT) if feature == "documents" else []
    run = longspan_command.run(args.command, [
        "--backend", args.backend, "--backward", "--check", "off", "--dtype", dtype_of(feature), "--heads", heads,
        "--kv-heads", kv_heads, "--dim", dim, "--value-dim", value_dim, "--kv", tokens, "--tokens", tokens,
        "--warmup", 5, "--iterations", args.iterations, *(["--causal"] if causal else []), *options, *starts])
    return statistics.median(run["backward"]["times_ms"])


def flex_attention(q, k, v, feature):
    """Causal attention with the feature, compiled."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    heads, tokens = q.shape[1:3]
    slopes = torch.exp2(-8 * torch.arange(1, heads + 1, device="cuda") / heads)

    def seen(b, h, i, j):
        if feature == "window":
            return (i >= j) & (i - j < WINDOW)
        if feature == "documents":
            return (i >= j) & (i // DOCUMENT == j // DOCUMENT)
        return i >= j

    def score(x, b, h, i, j):
        if feature == "softcap":
            return SOFTCAP * torch.tanh(x / SOFTCAP)
        return x + slopes[h] * (j - i)

    mask = create_block_mask(seen, None, None, tokens, tokens, device="cuda")
    changed = score if feature in ("softcap", "alibi") else None
    return torch.compile(flex_attention, dynamic=False)(q, k, v, score_mod=changed, block_mask=mask,
                                                        enable_gqa=q.shape[1] != k.shape[1])


def peer_of(feature):
    if feature in ("plain", "fp16"):
        return "cuDNN"
    return "FlashAttention-2" if feature == "dropout" else "flex_attention"


def peer_ms(args, case, causal, feature="plain"):
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import torch_gpu

    tokens, heads, kv_heads, dim, value_dim = case
    dtype = torch.float16 if feature == "fp16" else torch.bfloat16

    def drawn(count, width, grad=True):
        return torch.randn(1, count, tokens, width, device="cuda", dtype=dtype, requires_grad=grad)

    q, k = drawn(heads, dim), drawn(kv_heads, dim)
    v, dout = drawn(kv_heads, value_dim), drawn(heads, value_dim, False)
    backward = functools.partial(torch.autograd.grad, inputs=(q, k, v), grad_outputs=dout, retain_graph=True)
    peer = peer_of(feature)
    if peer == "flex_attention":
        out = flex_attention(q, k, v, feature)
        return torch_gpu.elapsed_us(functools.partial(backward, out), args.iterations) / 1000
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if peer == "cuDNN" else SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads,
                                             dropout_p=DROPOUT if feature == "dropout" else 0)
        return torch_gpu.elapsed_us(functools.partial(backward, out), args.iterations) / 1000


def shape_of(case, causal, ranks=1, feature="plain"):
    tokens, heads, kv_heads, dim, value_dim = case
    values = {} if value_dim == dim else {"value_dim": value_dim}
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, **values, "dtype": dtype_of(feature),
             "tokens": tokens, "causal": causal, "ranks": ranks}
    return shape if feature in ("plain", "fp16") else shape | {"feature": feature}


def beside_peer(args):
    found = {}
    for _ in range(args.rounds):
        for case in CASES:
            for causal in (True, False):
                found.setdefault((case, causal), []).append((ours_ms(args, case, causal),
                                                             peer_ms(args, case, causal)))
    made = []
    for (case, causal), pairs in found.items():
        work = operations(case, causal) / 1e9
        mine, theirs = (work / statistics.median(times) for times in zip(*pairs))
        made.append(records.record("backward", shape_of(case, causal), "TFLOP/s", round(mine, 1), peer="cuDNN",
                                   peer_value=round(theirs, 1), ratio=round(mine / theirs, 3),
                                   target=CASES[case][0 if causal else 1]))
        print(f"{case} causal {causal}: {mine:6.1f} TFLOP/s, cuDNN {theirs:6.1f}, ratio {mine / theirs:.3f}",
              flush=True)
    records.write("backward", args.machine, made, args.results)
    return made


def with_features(args):
    found = {}
    for _ in range(args.rounds):
        for case in FEATURE_CASES:
            for feature in FEATURES:
                found.setdefault((case, feature), []).append(
                    (ours_ms(args, case, True, feature), peer_ms(args, case, True, feature)))
    made, plain = [], {}
    for (case, feature), pairs in found.items():
        work = operations(case, True, feature) / 1e9
        mine, theirs = (work / statistics.median(times) for times in zip(*pairs))
        if feature == "plain":  # beside_peer records it
            plain[case] = mine
            continue
        shape, peer = shape_of(case, True, feature=feature), peer_of(feature)
        made.append(records.record("backward", shape, "TFLOP/s", round(mine, 1), peer=peer,
                                   peer_value=round(theirs, 1), ratio=round(mine / theirs, 3)))
        made.append(records.record("backward", shape, "of plain speed", round(mine / plain[case], 3),
                                   target=FEATURES[feature][1]))
        print(f"{case} {feature}: {mine:6.1f} TFLOP/s, {mine / plain[case]:.2f} of plain, {peer} {theirs:6.1f}, "
              f"ratio {mine / theirs:.3f}", flush=True)
    records.write("backward", args.machine, made, args.results)
    return made


def over_ranks(args):
    made = []
    for tokens, heads, kv_heads in SCALED:
        scale = longspan_command.run(
            args.command, ["--phases", "train", "--kv", tokens, "--heads", heads, "--kv-heads", kv_heads,
                           "--dim", 128, "--dtype", "bf16", "--backend", args.backend, "--iterations", 7],
            args.ranks, args.launcher, ("bench", "scale"))
        found = []
        for row in scale["rows"]:
            row["ms"] = row["forward_ms"]["median"] + row["backward_ms"]["median"]
            case = shape_of((tokens, heads, kv_heads, 128, 128), True, row["ranks"]) | {"strategy": row["strategy"]}
            found.append(records.record("backward", case, "ms of forward and backward", round(row["ms"], 3)))
            print(f"{case}: {row['ms']:.3f} ms, chosen {row['chosen']}", flush=True)
        one = min(row["ms"] for row in scale["rows"] if row["ranks"] == 1)
        for row in scale["rows"]:
            if not row["chosen"] or row["ranks"] != args.ranks:
                continue
            efficiency = one / row["ms"] / args.ranks
            found.append(records.record("backward", shape_of((tokens, heads, kv_heads, 128, 128), True, args.ranks),
                                        "efficiency of auto", round(efficiency, 3), target=EFFICIENCY[tokens]))
            print(f"  auto took {row['strategy']}: efficiency {efficiency:.3f}", flush=True)
        records.write("backward", args.machine, found, args.results)  # kept from case to case
        made += found
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    longspan_command.add_command(parser)
    parser.add_argument("--launcher", default=longspan_command.MPIRUN,
                        help="how ranks are started (default: %(default)s)")
    parser.add_argument("--machine", required=True, help="name for the records, such as h200")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs; 1 is beside cuDNN")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=11)
    parser.add_argument("--backend", default="cuda", choices=["cuda", "host"], help="for a try")
    records.add_arguments(parser)
    args = longspan_command.parse(parser)
    made = beside_peer(args) + with_features(args) if args.ranks == 1 else over_ranks(args)
    print(f"# {sum(r['met'] is False for r in made)} targets not met")


if __name__ == "__main__":
    main()
