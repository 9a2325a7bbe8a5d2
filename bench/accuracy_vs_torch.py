#!/usr/bin/env python3
"""Maximum error against float64, beside PyTorch's own attention in the same dtype on the same data.

    python3 bench/accuracy_vs_torch.py --backend host --ranks 1 2 4 --machine cpu

The bound is the same for every rank count: at most twice PyTorch's error; fp32 below 2e-6 by norm.
Records go to accuracy-<machine>.jsonl.
"""

import argparse
import math
import pathlib
import tempfile

import numpy
import torch
import torch.nn.functional as F

import longspan_command
import records

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# (tokens, kv, heads, kv_heads, dim, causal)
CASES = [(64, 2048, 8, 2, 64, False), (512, 512, 8, 8, 128, True), (1, 5000, 8, 1, 128, False),
         (300, 1500, 4, 4, 96, True)]


def save(path, tensor):
    """[tokens, heads, dim] as .npy; bf16 as two bytes without a name."""
    if tensor.dtype == torch.bfloat16:
        numpy.save(path, tensor.view(torch.int16).numpy().view("V2"))
    else:
        numpy.save(path, tensor.numpy())


def load(path, dtype):
    array = numpy.load(path)
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.view(numpy.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array)


def attention(q, k, v, causal):
    """PyTorch's, on [tokens, heads, dim]; the queries are the last rows of the sequence."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    tokens, kv = q.shape[2], k.shape[2]
    mask = None
    if causal and tokens != kv:
        mask = torch.ones(tokens, kv, dtype=torch.bool, device=q.device).tril(kv - tokens)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask,
                                         is_causal=causal and mask is None)
    return out.squeeze(0).transpose(0, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    longspan_command.add_command(parser)
    parser.add_argument("--backend", choices=["host", "cuda"], required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--machine", required=True, help="name for the records")
    records.add_arguments(parser)
    args = longspan_command.parse(parser)
    device = "cuda" if args.backend == "cuda" else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False

    machine = None
    if args.backend == "host":
        machine = records.host_machine(args.command, pytorch=torch.__version__)
    found, failed = [], 0
    print("# dtype tokens    kv heads  dim causal ranks  max|err|  PyTorch's  rel err  bound")
    for name, dtype in DTYPES.items():
        for tokens, kv, heads, kv_heads, dim, causal in CASES:
            q = torch.randn(tokens, heads, dim).to(dtype)
            k, v = (torch.randn(kv, kv_heads, dim).to(dtype) for _ in range(2))
            exact = attention(q.double(), k.double(), v.double(), causal)
            theirs = attention(q.to(device), k.to(device), v.to(device), causal).cpu()
            peer = (theirs.double() - exact).abs().max().item()
            for ranks in args.ranks:
                with tempfile.TemporaryDirectory() as folder:
                    paths = {n: str(pathlib.Path(folder) / f"{n}.npy") for n in "qkvo"}
                    for n, x in (("q", q), ("k", k), ("v", v)):
                        save(paths[n], x)
                    longspan_command.run(args.command, [
                        "--backend", args.backend, "--q", paths["q"], "--k", paths["k"], "--v",
                        paths["v"], "--dtype", name, "--out", paths["o"], "--iterations", 1,
                        *(["--causal"] if causal else [])], ranks)
                    ours = load(paths["o"], dtype).double()
                error = (ours - exact).abs().max().item()
                relative = ((ours - exact).norm() / exact.norm()).item()
                good = error <= 2 * peer and (name != "fp32" or relative < 2e-6)
                failed += not (good and math.isfinite(error))
                case = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "dtype": name,
                        "tokens": tokens, "kv_len": kv, "ranks": ranks, "causal": causal}
                found.append(records.record(
                    "accuracy", case, "max error", error, peer="PyTorch", peer_value=peer,
                    ratio=round(peer / error, 3) if error else None, target=0.5,
                    machine=machine))
                print(f"  {name:>5}{tokens:>7}{kv:>6}{heads:>6}{dim:>5}{str(causal):>7}{ranks:>6}"
                      f"{error:>10.2e}{peer:>11.2e}{relative:>9.1e}  {'met' if good else 'MISSED'}",
                      flush=True)
    records.write("accuracy", args.machine, found, args.results)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
