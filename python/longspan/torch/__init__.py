"""longspan for PyTorch: attention over tokens that are sharded across the ranks of a process group.

    from longspan.torch import context_parallel

    with context_parallel(mesh, buffers=[x, positions], buffer_seq_dims=[1, 0]):
        y = model(x)                # scaled_dot_product_attention inside runs over all ranks

It works on CPUs and GPUs, under torchrun without MPI, eagerly and under
torch.compile(fullgraph=True), and it trains. docs/reference/python.md and docs/guides/training.md in the
repository have more.

The operators are torch.ops.longspan.attend, attend_lse, attend_out, attend_append and append.
"""

from ._attention import ContextParallelAttention, scaled_dot_product_attention
from ._batch import ShardedBatch, shard_batch
from ._context import context_parallel, context_parallel_unshard, set_rotate_method
from ._groups import communicator
from ._varlen import varlen_attn

__all__ = ["ContextParallelAttention", "ShardedBatch", "communicator", "context_parallel", "context_parallel_unshard",
           "scaled_dot_product_attention", "set_rotate_method", "shard_batch", "varlen_attn"]
