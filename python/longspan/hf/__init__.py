"""longspan for Hugging Face transformers: attention, and a cache that is sharded across ranks.

    import longspan.hf as hf                       # registers the attention "longspan"

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="longspan")
    cache = hf.ShardedCache(model, max_cache_len=1_000_000)     # each rank holds its share
    hf.prefill(model, input_ids, cache)                         # each rank computes its share
    tokens = model.generate(input_ids, past_key_values=cache)

Every rank runs the same program on the same input_ids, gets the same tokens, and holds all weights.
Without a ShardedCache the attention "longspan" is that of one process, over any cache. Inside
longspan.torch.context_parallel each rank has its own tokens, and attention is that of all ranks; so models train, and
ShardedTraining makes transformers' Trainer do so (docs/guides/training.md in the repository). Unsupported are, and
refused by name: zeros of a mask between ones, the caller's own masks, linear layers, chunked ones in a ShardedCache, position_bias, beams,
models that compute attention themselves. Latent keys (MLA) stay latent in a ShardedCache.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from ._attention import attention, mask
from ._cache import ShardedCache
from ._prefill import prefill
from ._sealed import NAME
from ._trainer import ShardedTraining

AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)

__all__ = ["ShardedCache", "ShardedTraining", "prefill"]
