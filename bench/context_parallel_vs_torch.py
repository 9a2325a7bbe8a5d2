#!/usr/bin/env python3
"""Context-parallel prefill on several GPUs beside PyTorch's context_parallel, in one run.

    python3 bench/context_parallel_vs_torch.py --machine h200x2 --ranks 2

Forward, bf16, causal, dim 128, the rows and the keys of a sequence dealt in zigzag. Ours is
`longspan bench scale --phases prefill`: every strategy, each row of it checked against float64.
PyTorch is started by torchrun: both of its ways to move keys and values (all-gather and all-to-all) over
cuDNN's attention and FlashAttention-2, and its own time on one GPU. Each side is measured once in a
round, in turns, and a figure is the median of the rounds. Efficiency is the time of one GPU over the
product of GPUs and the time of all. With --graph both sides are CUDA graphs that are replayed back to back,
as a model's step is; otherwise calls one by one, each with the host's part. Records go to
context_parallel-<machine>.jsonl.
"""

import json
import pathlib

import context_parallel
import longspan_command

DIM = 128
# (ranks, tokens) -> target efficiency of the fastest strategy, against our own one GPU.
TARGETS = {(2, 8192): 0.85, (2, 32768): 0.95, (2, 131072): 0.985,
           (4, 8192): 0.75, (4, 32768): 0.93, (4, 131072): 0.98}
BENCH = context_parallel.Bench(script=__file__, one="GPU", dim=DIM, dtype="bf16", options=["--backend", "cuda"],
                               targets=TARGETS)


def arguments():
    parser = context_parallel.parser_of(__doc__, tokens=[8192, 32768, 131072], heads=["16/16", "32/8"], iterations=9,
                                        rounds=2)
    parser.add_argument("--machine", required=True, help="name for the records")
    parser.add_argument("--graph", action="store_true", help="time replays of CUDA graphs, back to back, of each side")
    return longspan_command.parse(parser)


def peer(args):
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import torch_gpu

    cp = torch_gpu.pytorch_context_parallel()
    device, mesh = torch_gpu.join()
    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}

    def milliseconds(work):
        if args.graph:
            return torch_gpu.slowest_replay_ms(work, 3, args.iterations)
        return torch_gpu.slowest_ms(work, 3, args.iterations)[0]

    found = []
    for pair in args.heads:
        heads, kv_heads = map(int, pair.split("/"))
        for tokens in args.tokens:
            for backend, kind in backends.items():
                def inputs():
                    make = lambda n: torch.randn(1, n, tokens, DIM, device=device, dtype=torch.bfloat16)
                    return make(heads), make(kv_heads), make(kv_heads)

                def work():
                    F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

                alone = None
                with torch.no_grad(), sdpa_kernel(kind):
                    q, k, v = inputs()
                    alone = milliseconds(work)
                for method in ("allgather", "alltoall"):
                    cp.set_rotate_method(method)
                    cp._cp_options.enable_load_balance = True
                    row = {"heads": heads, "kv_heads": kv_heads, "tokens": tokens,
                           "name": f"PyTorch {method}, {backend}", "alone": alone}
                    try:
                        with torch.no_grad(), sdpa_kernel(kind):
                            q, k, v = inputs()
                            with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2],
                                                  no_restore_buffers={q, k, v}):
                                row["ms"] = milliseconds(work)
                    except (RuntimeError, ValueError, NotImplementedError) as error:
                        row["refused"] = str(error).splitlines()[0][:120]
                    found.append(row)
                    q = k = v = None
                    torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        pathlib.Path(args.peer).write_text(json.dumps(found))
    torch_gpu.leave()


def main():
    args = arguments()
    if args.peer:
        peer(args)
    else:
        context_parallel.measure(BENCH, args)


if __name__ == "__main__":
    main()
