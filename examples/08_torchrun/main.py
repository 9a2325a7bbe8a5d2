"""A long prompt in PyTorch: its tokens are dealt out to the ranks, and each computes its own rows."""

import torch

import longspan


def attention(q, k, v, comm):
    """Replaces scaled_dot_product_attention(q, k, v, is_causal=True) in a model: the tokens are
    this rank's, and see those of all ranks."""
    # [attend]
    return longspan.attend(q, k, v, comm=comm, causal=True, keys="zigzag", queries="zigzag")
    # [/attend]


def main():
    # [ranks]
    comm = longspan.from_environment()  # torchrun's ranks; torch.distributed need not be initialised
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = 1001  # any number of tokens, over any number of ranks
    q, k, v = torch.randn(tokens, 8, 64), *torch.randn(2, tokens, 2, 64)

    mine = [longspan.shard(x, "zigzag", comm=comm) for x in (q, k, v)]
    out = attention(*mine, comm)
    # [/ranks]

    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    whole = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    right = longspan.shard(whole[0].transpose(0, 1), "zigzag", comm=comm)
    torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)
    places = longspan.Sharding("zigzag").shard(tokens, comm.rank, comm.size).intervals()
    print(f"rank {comm.rank} of {comm.size}: tokens {' and '.join(f'{a} to {b - 1}' for a, b in places)}, right",
          flush=True)


main()
