"""The smallest example: every rank has some of the keys, and gets attention over all of them."""

import numpy as np

import longspan

# [all]
comm = longspan.from_environment()  # the ranks of mpirun, torchrun or srun; else this process alone

rng = np.random.default_rng(0)
q = rng.standard_normal((1, 8, 64), dtype=np.float32)  # one query of 8 heads
k, v = rng.standard_normal((2, 5000, 2, 64), dtype=np.float32)  # 5000 keys of 2 heads
my_k, my_v = longspan.shard(k, comm=comm), longspan.shard(v, comm=comm)

out = longspan.attend(q, my_k, my_v, comm=comm)
# [/all]

score = np.einsum("qhd,khd->hqk", q, k.repeat(4, 1), dtype=np.float64) / 8
weights = np.exp(score - score.max(-1, keepdims=True))
right = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v.repeat(4, 1))
assert np.abs(out - right).max() < 1e-6
print(f"rank {comm.rank} of {comm.size}: {len(my_k)} of {len(k)} keys, out[0, 0, 0] {out[0, 0, 0]:.6f}, right",
      flush=True)
