#!/usr/bin/env python3
"""Context-parallel prefill on CPUs beside PyTorch over gloo, in one run.

    .venv/bin/python bench/context_parallel_vs_gloo.py [--results bench/results]       # needs torch

Forward, fp32, causal, dim 64, the rows and the keys of a sequence dealt in zigzag; a rank is a process of one
thread. Ours is `longspan bench scale --phases prefill`, over MPI.

PyTorch's own context_parallel is tried with both of its ways to move keys and values. PyTorch 2.15 has no
attention on CPUs for it, with gloo or any backend:

    NotImplementedError: Operator aten._scaled_dot_product_flash_attention_for_cpu.default does not have a
    sharding strategy registered.

So the bench measures what a user of PyTorch can write there: dist.all_gather of keys and values over gloo, and
attention of each of the rank's two runs of rows with the keys up to its end, in two ways:

    a mask       F.scaled_dot_product_attention with a mask, made before the time is taken
    two calls    of PyTorch's kernel for CPUs: the keys before the run, and the run's own keys, causal;
                 merged by the log-sum-exps that it returns. F.scaled_dot_product_attention does not return them

Every way is compared with the attention of one rank before it is timed. A time is that of the slowest rank,
from a barrier on. Records go to context_parallel-<machine>.jsonl.
"""

import json
import pathlib
import statistics
import time

import context_parallel
import longspan_command

DIM = 64
# (ranks, tokens) -> target efficiency of the fastest strategy, against our own one thread.
TARGETS = {(2, 4096): 0.93, (2, 16384): 0.97}
BENCH = context_parallel.Bench(script=__file__, one="thread", dim=DIM, dtype="fp32",
                               options=["--backend", "host", "--threads", 1], targets=TARGETS)
WARMUP = 3


def arguments():
    parser = context_parallel.parser_of(__doc__, tokens=[4096, 16384], heads=["8/8"], iterations=5, rounds=3)
    parser.add_argument("--machine", default="cpu", help="name for the records")
    args = longspan_command.parse(parser)
    if any(tokens % (2 * args.ranks) for tokens in args.tokens):
        parser.error(f"zigzag over {args.ranks} ranks needs tokens that {2 * args.ranks} divides")
    return args


def peer(args):
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as pytorch
    try:
        import torch.distributed.tensor.experimental._context_parallel._attention as cp
    except ImportError:
        import torch.distributed.tensor.experimental._attention as cp

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def milliseconds(work):
        """The median over the runs, each with the time of the slowest rank."""
        times = []
        for _ in range(WARMUP + args.iterations):
            dist.barrier()
            begin = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - begin))
        slowest = torch.tensor(times[WARMUP:])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return statistics.median(slowest.tolist())

    def compare(tokens, heads, kv_heads):
        torch.manual_seed(tokens)  # the same whole tensors on every rank
        whole = [torch.randn(1, n, tokens, DIM) for n in (heads, kv_heads, kv_heads)]
        grouped = {"enable_gqa": heads != kv_heads}
        half, runs = tokens // (2 * ranks), (rank, 2 * ranks - 1 - rank)
        ends = [(run + 1) * half for run in runs]

        def zigzag(tensor):
            return torch.cat([tensor[..., end - half:end, :] for end in ends], dim=-2)

        def alone():
            return F.scaled_dot_product_attention(*whole, is_causal=True, **grouped)

        right = zigzag(alone())
        q, kv = zigzag(whole[0]), torch.stack([zigzag(whole[1]), zigzag(whole[2])])
        masks = [torch.ones(half, end, dtype=torch.bool).tril(end - half) for end in ends]

        def gathered():
            """All keys and all values, in the order of the sequence."""
            parts = [torch.empty_like(kv) for _ in range(ranks)]
            dist.all_gather(parts, kv)
            return torch.cat([part[..., :half, :] for part in parts]
                             + [part[..., half:, :] for part in reversed(parts)], dim=-2)

        def with_a_mask():
            k, v = gathered()
            return torch.cat([
                F.scaled_dot_product_attention(rows, k[..., :end, :], v[..., :end, :], attn_mask=mask, **grouped)
                for rows, end, mask in zip(q.split(half, dim=-2), ends, masks)], dim=-2)

        def in_two_calls():
            k, v = gathered()
            out = []
            for rows, end in zip(q.split(half, dim=-2), ends):
                first = end - half
                own, lse = kernel(rows, k[..., first:end, :], v[..., first:end, :], is_causal=True)
                if first:
                    before, lse_before = kernel(rows, k[..., :first, :], v[..., :first, :])
                    own = torch.lerp(own, before, torch.sigmoid(lse_before - lse).unsqueeze(-1))
                out.append(own)
            return torch.cat(out, dim=-2)

        def checked(work):
            torch.testing.assert_close(work(), right, atol=1e-5, rtol=1e-4)
            return milliseconds(work)

        def by_pytorch(method):
            cp.set_rotate_method(method)
            cp._cp_options.enable_load_balance = True
            own = [tensor.clone() for tensor in whole]
            with pytorch(mesh, buffers=own, buffer_seq_dims=[2, 2, 2], no_restore_buffers=set(own)):
                return checked(lambda: F.scaled_dot_product_attention(*own, is_causal=True, **grouped))

        one = milliseconds(lambda: alone() if rank == 0 else None)
        row = {"heads": heads, "kv_heads": kv_heads, "tokens": tokens, "alone": one}
        yield row | {"name": "PyTorch all_gather and a mask", "ms": checked(with_a_mask)}
        yield row | {"name": "PyTorch all_gather and two calls", "ms": checked(in_two_calls)}
        for method in ("allgather", "alltoall"):
            mine = row | {"name": f"PyTorch context_parallel {method}"}
            try:
                yield mine | {"ms": by_pytorch(method)}
            except (RuntimeError, ValueError) as error:  # all ranks refuse alike
                yield mine | {"refused": f"{type(error).__name__}: {str(error).splitlines()[0]}"}

    with torch.no_grad():
        found = [row for pair in args.heads for tokens in args.tokens
                 for row in compare(tokens, *map(int, pair.split("/")))]
    if rank == 0:
        pathlib.Path(args.peer).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main():
    args = arguments()
    if args.peer:
        return peer(args)
    machine = None
    if not args.only_ours:
        import torch_host
        machine = torch_host.machine(args.command)
        print(f"# PyTorch {machine['pytorch']}, {machine['pytorch_simd']}, over gloo; {args.ranks} ranks of a thread")
    context_parallel.measure(BENCH, args, machine)


if __name__ == "__main__":
    main()
