"""A layer of a real model on a real text: the inputs of attention in all-MiniLM-L6-v2 for the opening of
Moby-Dick, over ranks, beside float64."""

import pathlib

import numpy as np

import longspan

DATA = pathlib.Path(__file__).resolve().parents[1] / "data" / "minilm"


def exact(q, k, v):
    """Attention in float64, [tokens, heads, dim]."""
    score = np.einsum("qhd,khd->hqk", *(x.astype(np.float64) for x in (q, k))) * q.shape[2] ** -0.5
    weights = np.exp(score - score.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v.astype(np.float64))


def main():
    comm = longspan.from_environment()
    # [attend]
    q, k, v = (np.load(DATA / f"{name}.npy") for name in "qkv")  # [512 tokens, 12 heads, 32]
    mine = [longspan.shard(x, "contiguous", comm=comm) for x in (q, k, v)]
    out = longspan.attend(*mine, comm=comm, queries="contiguous")  # the layer is not causal
    whole = longspan.unshard(out, "contiguous", comm=comm)
    # [/attend]
    right = exact(q, k, v)
    error = np.linalg.norm(whole - right) / np.linalg.norm(right)
    assert error < 5e-7, error
    print(f"rank {comm.rank} of {comm.size}: {len(out)} of {len(q)} tokens, {error:.1e} from float64 by norm", flush=True)


main()
