#!/usr/bin/env python3
"""A model whose tokens are sharded over GPUs: longspan's context_parallel beside PyTorch's, in one run.

    python3 bench/model_vs_torch.py --machine h200x2 --ranks 2
    python3 bench/model_vs_torch.py --machine h200x2 --ranks 2 --train

The model is a stack of Llama's layers (RMSNorm, rotary positions, attention by F.scaled_dot_product_attention,
SwiGLU) in bf16 with random weights, whole on every GPU. Its forward is the same code under both, and alone on one
GPU. torchrun starts the ranks, and each side is measured once in a round, in turns. Both results are compared with
the model on one GPU: the largest difference over the largest magnitude. Records go to model-<machine>.jsonl.
--train measures steps of training: forward, backward, the sum of gradients over the ranks, and AdamW. It compares
the gradients of the first layer in place of results.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys

import records

LAYERS, DIM = 4, 128
ALONE = "one GPU"
TRAIN_TARGET = 1.1  # times as fast as PyTorch's, at TRAIN_TOKENS
TRAIN_TOKENS = 32768
WITHIN = 0.05  # of the largest output or gradient: bf16 through four layers, by kernels that round at other places


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="name for the records")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--heads", nargs="+", default=["16/16", "32/8"], help="query heads / kv heads")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--train", action="store_true", help="measure steps of training")
    records.add_arguments(parser)
    return parser.parse_args()


def model_of(heads, kv_heads, tokens, device, train):
    import torch
    import torch.nn.functional as F

    width = heads * DIM
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows, columns):
        made = torch.randn(rows, columns, generator=generator, device=device) * rows ** -0.5
        return torch.nn.Parameter(made.to(torch.bfloat16), requires_grad=train)

    def norm(x):
        return F.rms_norm(x, (width,))

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = matrix(width, (heads + 2 * kv_heads) * DIM)
            self.out = matrix(width, width)
            self.up, self.down = matrix(width, 4 * width), matrix(2 * width, width)

        def forward(self, x, angles):
            batch, rows, _ = x.shape
            qkv = (norm(x) @ self.qkv).view(batch, rows, -1, DIM).transpose(1, 2)
            q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
            cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            q, k = (torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)
                    for a, b in (t.chunk(2, -1) for t in (q, k)))
            y = F.scaled_dot_product_attention(q, k, v.contiguous(), is_causal=True, enable_gqa=heads != kv_heads)
            x = x + y.transpose(1, 2).reshape(batch, rows, -1) @ self.out
            gate, up = (norm(x) @ self.up).chunk(2, -1)
            return x + (F.silu(gate) * up) @ self.down

    layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
    x = torch.randn(1, tokens, width, generator=generator, device=device).to(torch.bfloat16)
    frequencies = 500000.0 ** (-torch.arange(0, DIM, 2, device=device) / DIM)
    angles = torch.arange(tokens, device=device)[:, None] * frequencies

    def forward(x, angles):
        for layer in layers:
            x = layer(x, angles)
        return x

    return forward, x, angles, layers


def training_step(forward, layers, tokens):
    """step(x, angles) trains on this rank's rows, and returns the gradient of the first layer's qkv, of all rows."""
    import torch
    import torch.distributed as dist

    weights = list(layers.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)

    def step(x, angles):
        optimizer.zero_grad()
        (forward(x, angles).float().square().sum() / tokens).backward()
        if x.shape[1] < tokens:
            for weight in weights:
                dist.all_reduce(weight.grad)
        found = weights[0].grad.clone()
        optimizer.step()
        return found

    return step


def rank(args):
    import longspan.torch
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import torch_gpu

    theirs = torch_gpu.pytorch_context_parallel()
    device, mesh = torch_gpu.join()

    def milliseconds(work):
        return torch_gpu.slowest_ms(work, 2, args.iterations)

    def by_longspan(work, x, angles):
        own = [x.clone(), angles.clone()]
        with longspan.torch.context_parallel(mesh, buffers=own, buffer_seq_dims=[1, 0], no_restore_buffers=own):
            out = work(*own)
            ms, _ = milliseconds(lambda: work(*own))
        return ms, out if args.train else longspan.torch.context_parallel_unshard(mesh, [out], [1])[0]

    def by_torch(method, backend):
        def run(work, x, angles):
            theirs.set_rotate_method(method)
            theirs._cp_options.enable_load_balance = True
            own = [x.clone(), angles.clone()]
            with sdpa_kernel(backend), context_parallel(mesh, buffers=own, buffer_seq_dims=[1, 0],
                                                        no_restore_buffers=set(own)):
                out = work(*own)
                ms, _ = milliseconds(lambda: work(*own))
            return ms, out if args.train else context_parallel_unshard(mesh, [out], [1])[0]
        return run

    sides = {"longspan": by_longspan, "PyTorch allgather, cuDNN": by_torch("allgather", SDPBackend.CUDNN_ATTENTION),
             "PyTorch alltoall, cuDNN": by_torch("alltoall", SDPBackend.CUDNN_ATTENTION)}

    def work_of(shape):
        """A new model, always with the same weights: (forward or a step of training, x, angles)."""
        forward, x, angles, layers = model_of(*shape, device, args.train)
        return (training_step(forward, layers, shape[2]) if args.train else forward), x, angles

    def alone(work, x, angles):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = work(x, angles)
            ms, _ = milliseconds(lambda: work(x, angles))
        return ms, out

    def measure(shape):
        times, errors, right = {}, {}, None
        for number in range(args.rounds):
            for name, run in ({ALONE: alone} | sides).items():
                try:
                    with torch.set_grad_enabled(args.train):
                        ms, out = run(*work_of(shape))
                except (RuntimeError, ValueError, NotImplementedError) as error:
                    if name in (ALONE, "longspan"):
                        raise
                    errors[name] = str(error).splitlines()[0][:120]
                    continue
                times.setdefault(name, []).append(ms)
                if right is None:
                    right = out.float()
                elif number == 0:
                    errors[name] = round(((out - right).abs().max() / right.abs().max()).item(), 5)
        return {n: statistics.median(t) for n, t in times.items()}, errors

    for pair in args.heads:
        for tokens in args.tokens:
            shape = (*map(int, pair.split("/")), tokens)
            found = judge(args, shape, *measure(shape))
            torch.cuda.empty_cache()
            if dist.get_rank() == 0:  # kept from case to case: later there may be no memory for it
                records.write("model", args.machine, found, args.results)
    torch_gpu.leave()


def judge(args, shape, times, errors):
    """The records of a case; the same on every rank."""
    heads, kv_heads, tokens = shape
    alone = times.pop(ALONE)
    case = {"layers": LAYERS, "heads": heads, "kv_heads": kv_heads, "dim": DIM, "dtype": "bf16", "tokens": tokens,
            "ranks": args.ranks} | ({"train": True} if args.train else {})
    target = TRAIN_TARGET if args.train and tokens == TRAIN_TOKENS else 1.0
    ours, found = times["longspan"], []
    for name, error in errors.items():
        if name not in times:
            print(f"# {name} refuses {shape}: {error}")
        elif not error <= WITHIN:
            raise SystemExit(f"{name} is off by {error} of the largest output, {shape}")
    for name, ms in times.items():
        if int(os.environ["RANK"]) == 0:
            print(f"{heads:>3}/{kv_heads:<3}{tokens:>8} {name:<28}{ms:>10.3f} ms   efficiency "
                  f"{alone / ms / args.ranks:.3f}   off by {errors[name]}", flush=True)
        if name != "longspan":
            found.append(records.record("model", case, "ms", round(ours, 3), peer=name, peer_value=round(ms, 3),
                                        ratio=round(ms / ours, 3), target=target))
    found.append(records.record("model", case, "efficiency", round(alone / ours / args.ranks, 3)))
    if args.train:
        found.append(records.record("model", case, "tokens/s", round(tokens / ours * 1000)))
    return found


def main():
    args = arguments()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a process of torchrun
        return rank(args)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks),
            str(pathlib.Path(__file__).resolve()), *sys.argv[1:]]
    sys.exit(subprocess.run(line, env={"OMP_NUM_THREADS": "1"} | os.environ).returncode)


if __name__ == "__main__":
    main()
