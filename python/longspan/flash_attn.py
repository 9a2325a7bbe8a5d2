"""flash-attention's functions by their names and arguments. flash_attn is not imported.

    from longspan.flash_attn import flash_attn_func, flash_attn_varlen_func

in place of `from flash_attn import ...`. Every function takes `comm` besides: with it the sequence is sharded over
the ranks. Arrays are of any kind; PyTorch's autograd differentiates the functions without a cache. An argument
that changes the result, and that longspan does not support, raises UnsupportedError with its name. `deterministic`
and `num_splits` are accepted and not read: results always repeat their bits.
"""

from __future__ import annotations

from ._attention import _is_recorded, attend
from ._errors import InputError, UnsupportedError
from ._names import check_shape

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ._attention import Array, Layout, Numbers
    from ._core import Communicator, Sharding

def flash_attn_func(q: Array, k: Array, v: Array, dropout_p: float = 0.0, softmax_scale: float | None = None,
                    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                    alibi_slopes: Numbers | None = None, deterministic: bool = False, return_attn_probs: bool = False, *,
                    comm: Communicator | None = None, layout: Layout | Sharding = "contiguous") -> Any:
    """Attention of a batch of sequences of one length.

    Args:
        q: [batch, tokens, heads, head_dim]; k, v: [batch, keys, kv_heads, head_dim]. With causal or a window the last row
            of q is at the last key (lower right).
        dropout_p: drop weights with this probability, by a mask of positions (longspan.attend's dropout_p). Its
            seed is drawn on the first rank; of tensors that require grad from torch's generator.
        softmax_scale, window_size, softcap: as in longspan.attend. alibi_slopes: [heads] or [batch, heads].
        return_attn_probs: return (out, softmax_lse, None), softmax_lse [batch, heads, tokens] float32; flash-attention's
            third result has numbers for tests with dropout only.
        comm: the ranks of each sequence; None is this process alone. Each rank gives its own tokens of q, k and v,
        layout: dealt out by this rule: "contiguous" (parts in rank order, of any lengths), "zigzag", "striped" ...

    Returns:
        out [batch, tokens, heads, head_dim], or the three.

    Raises:
        InputError, UnsupportedError, UsageError, RankError: as longspan.attend.

    >>> import numpy as np
    >>> from longspan.flash_attn import flash_attn_func
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 9, 4, 16), dtype=np.float32)
    >>> flash_attn_func(q, k, v, causal=True).shape
    (2, 9, 4, 16)
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_shape(name, array, (None,) * 4, "[batch, tokens, heads, head_dim]")
    made = attend(q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=_two(window_size), softcap=softcap,
                  alibi_slopes=alibi_slopes, dropout_p=dropout_p, return_lse=return_attn_probs, **_sharded(comm, layout))
    return _three(made, (0, 2, 1)) if return_attn_probs else made


def flash_attn_qkvpacked_func(qkv: Array, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                              window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                              alibi_slopes: Numbers | None = None, deterministic: bool = False,
                              return_attn_probs: bool = False, *, comm: Communicator | None = None,
                              layout: Layout | Sharding = "contiguous") -> Any:
    """flash_attn_func of q, k and v in one array qkv [batch, tokens, 3, heads, head_dim], which is read in place.

    >>> import numpy as np
    >>> from longspan.flash_attn import flash_attn_qkvpacked_func
    >>> flash_attn_qkvpacked_func(np.ones((2, 9, 3, 4, 16), np.float32), causal=True).shape
    (2, 9, 4, 16)
    """
    check_shape("qkv", qkv, (None, None, 3, None, None), "[batch, tokens, 3, heads, head_dim]")
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], dropout_p, softmax_scale, causal, window_size, softcap,
                           alibi_slopes, deterministic, return_attn_probs, comm=comm, layout=layout)


def flash_attn_kvpacked_func(q: Array, kv: Array, dropout_p: float = 0.0, softmax_scale: float | None = None,
                             causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                             alibi_slopes: Numbers | None = None, deterministic: bool = False,
                             return_attn_probs: bool = False, *, comm: Communicator | None = None,
                             layout: Layout | Sharding = "contiguous") -> Any:
    """flash_attn_func of k and v in one array kv [batch, keys, 2, kv_heads, head_dim], which is read in place.

    >>> import numpy as np
    >>> from longspan.flash_attn import flash_attn_kvpacked_func
    >>> flash_attn_kvpacked_func(np.ones((2, 9, 4, 16), np.float32), np.ones((2, 9, 2, 2, 16), np.float32)).shape
    (2, 9, 4, 16)
    """
    check_shape("kv", kv, (None, None, 2, None, None), "[batch, keys, 2, kv_heads, head_dim]")
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs, comm=comm, layout=layout)


def flash_attn_varlen_func(q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array, max_seqlen_q: int,
                           max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Numbers | None = None,
                           deterministic: bool = False, return_attn_probs: bool = False, block_table: Array | None = None, *,
                           comm: Communicator | None = None, layout: Layout | Sharding = "contiguous") -> Any:
    """Attention of packed sequences of different lengths.

    Args:
        q: [total_q, heads, head_dim]; k, v: [total_k, kv_heads, head_dim], or the pages of a block_table.
        cu_seqlens_q, cu_seqlens_k: [batch + 1], where the sequences begin. If both are alike, the sequences are
            documents packed in one: so they are sharded by `comm`, where each rank gives its own tokens of the whole of q, k
            and v, and the starts are those of the whole.
        max_seqlen_q, max_seqlen_k: no sequence is longer.
        return_attn_probs: return (out, softmax_lse, None), softmax_lse [heads, total_q].
        others: as in flash_attn_func.

    Raises:
        UnsupportedError: also several ranks where cu_seqlens_q and cu_seqlens_k differ; a derivative with a block_table.

    >>> import numpy as np
    >>> from longspan.flash_attn import flash_attn_varlen_func
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 9, 4, 16), dtype=np.float32)
    >>> starts = np.array([0, 4, 9])
    >>> flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, causal=True).shape
    (9, 4, 16)
    """
    check_shape("q", q, (None,) * 3, "[total_q, heads, head_dim]")
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_shape(name, starts, (None,), "[batch + 1]")
    given = dict(softmax_scale=softmax_scale, causal=causal, window_size=_two(window_size), softcap=softcap,
                 alibi_slopes=alibi_slopes, dropout_p=dropout_p)
    of_one = block_table is None and len(getattr(alibi_slopes, "shape", ())) != 2  # without slopes of each sequence
    sharded = comm is not None and comm.size > 1
    if of_one and (cu_seqlens_q is cu_seqlens_k or (sharded and _alike(cu_seqlens_q, cu_seqlens_k))):
        made = attend(q, k, v, documents=cu_seqlens_q, return_lse=return_attn_probs, **given, **_sharded(comm, layout))
        return _three(made, (1, 0)) if return_attn_probs else made
    if sharded:
        raise UnsupportedError("flash_attn_varlen_func over several ranks with cu_seqlens_q and cu_seqlens_k that differ, "
                               "a block_table, or alibi_slopes of each sequence is not supported; call longspan.attend")
    lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    if _is_recorded(q, k, v, alibi_slopes):
        if block_table is not None:
            raise UnsupportedError("block_table is given, and the call is recorded for a backward, which pages do not have: call "
                                   "it under torch.no_grad(), or give the keys one after the other")
        from .torch._packed import attend_packed

        made = attend_packed(q, k, v, cu_seqlens_q, lengths, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **given)
        return _three(made, (1, 0)) if return_attn_probs else made[0]
    made = attend(q, k, v, comm=comm, cu_seqlens_q=cu_seqlens_q, cache_seqlens=lengths, block_table=block_table,
                  max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, return_lse=return_attn_probs, **given)
    return _three(made, (1, 0)) if return_attn_probs else made


def flash_attn_varlen_qkvpacked_func(qkv: Array, cu_seqlens: Array, max_seqlen: int, dropout_p: float = 0.0,
                                     softmax_scale: float | None = None, causal: bool = False,
                                     window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                     alibi_slopes: Numbers | None = None, deterministic: bool = False,
                                     return_attn_probs: bool = False, *, comm: Communicator | None = None,
                                     layout: Layout | Sharding = "contiguous") -> Any:
    """flash_attn_varlen_func of q, k and v in one array qkv [total, 3, heads, head_dim], which is read in place.

    >>> import numpy as np
    >>> from longspan.flash_attn import flash_attn_varlen_qkvpacked_func
    >>> flash_attn_varlen_qkvpacked_func(np.ones((9, 3, 4, 16), np.float32), np.array([0, 4, 9]), 5, causal=True).shape
    (9, 4, 16)
    """
    check_shape("qkv", qkv, (None, 3, None, None), "[total, 3, heads, head_dim]")
    return flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
                                  comm=comm, layout=layout)


def flash_attn_varlen_kvpacked_func(q: Array, kv: Array, cu_seqlens_q: Array, cu_seqlens_k: Array, max_seqlen_q: int,
                                    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
                                    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                    alibi_slopes: Numbers | None = None, deterministic: bool = False,
                                    return_attn_probs: bool = False, *, comm: Communicator | None = None,
                                    layout: Layout | Sharding = "contiguous") -> Any:
    """flash_attn_varlen_func of k and v in one array kv [total_k, 2, kv_heads, head_dim], which is read in place.

    >>> import numpy as np
    >>> from longspan.flash_attn import flash_attn_varlen_kvpacked_func
    >>> q, kv, starts = np.ones((9, 4, 16), np.float32), np.ones((9, 2, 2, 16), np.float32), np.array([0, 4, 9])
    >>> flash_attn_varlen_kvpacked_func(q, kv, starts, starts, 5, 5).shape
    (9, 4, 16)
    """
    check_shape("kv", kv, (None, 2, None, None), "[total_k, 2, kv_heads, head_dim]")
    return flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
                                  comm=comm, layout=layout)


def flash_attn_with_kvcache(q: Array, k_cache: Array, v_cache: Array, k: Array | None = None, v: Array | None = None,
                            rotary_cos: Array | None = None, rotary_sin: Array | None = None,
                            cache_seqlens: int | Array | None = None, cache_batch_idx: Array | None = None,
                            cache_leftpad: Array | None = None, block_table: Array | None = None,
                            softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
                            softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Numbers | None = None,
                            num_splits: int = 0, return_softmax_lse: bool = False, *, comm: Communicator | None = None,
                            layout: Layout | Sharding = "contiguous") -> Any:
    """Attention over a cache, into which new keys are written first.

    Args:
        q: [batch, tokens, heads, head_dim].
        k_cache, v_cache: [batch, capacity, kv_heads, head_dim], or pages [pages, page, kv_heads, head_dim] of a block_table.
        k, v: [batch, new, kv_heads, head_dim], written behind the keys of each sequence.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2]: q and k are rotated by their positions. flash-attention gives all
            rows one position where it is neither causal nor has a window; then more than one row is refused.
        cache_seqlens: [batch] keys before the new ones, or one number for all; None: the whole cache, without new keys.
        cache_batch_idx, cache_leftpad, block_table: as in longspan.attend.
        return_softmax_lse: return (out, softmax_lse), softmax_lse [batch, heads, tokens].
        comm: with it each rank has its own keys of the caches, dealt out by `layout` (not contiguous), and all of q, k and v.

    >>> import numpy as np
    >>> from longspan.flash_attn import flash_attn_with_kvcache
    >>> cache, new = np.zeros((2, 1, 32, 4, 16), np.float32), np.ones((1, 1, 4, 16), np.float32)
    >>> flash_attn_with_kvcache(new, *cache, k=new, v=new, cache_seqlens=7, causal=True).shape, float(cache[1, 0, 7, 0, 0])
    ((1, 1, 4, 16), 1.0)
    """
    check_shape("q", q, (None,) * 4, "[batch, tokens, heads, head_dim]")
    (batch, tokens), window_size = q.shape[:2], _two(window_size)
    if (k is None) != (v is None):
        raise InputError("k and v are given together, or neither of them")
    if k is not None and cache_seqlens is None:
        raise InputError("k and v are given without cache_seqlens, so they have no place in the cache: give it")
    if block_table is not None and cache_seqlens is None:
        raise InputError("block_table is given without cache_seqlens: give it, since pages have no length")
    if rotary_cos is not None and not causal and window_size == (-1, -1) and tokens > 1:
        raise UnsupportedError(f"rotary_cos is given with {tokens} rows of q that are neither causal nor have a window: "
                               "flash-attention rotates all of them by one position. Rotate q before the call")
    lengths = [cache_seqlens] * batch if isinstance(cache_seqlens, int) else cache_seqlens
    if isinstance(cache_seqlens, int):
        lengths = _like(q, lengths)
    options = dict(comm=comm) if comm is None else dict(comm=comm, keys=layout)
    rotary = {} if rotary_cos is None else dict(rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved)
    made = attend(q, k_cache, v_cache, k_new=k, v_new=v, cache_seqlens=lengths, cache_batch_idx=cache_batch_idx,
                  cache_leftpad=cache_leftpad, block_table=block_table, softmax_scale=softmax_scale, causal=causal,
                  window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, return_lse=return_softmax_lse, **rotary,
                  **options)
    return _three(made, (0, 2, 1))[:2] if return_softmax_lse else made


def _sharded(comm: Communicator | None, layout: Layout | Sharding) -> dict:
    """The options of a call whose tokens are dealt out to the ranks of comm."""
    return dict(comm=comm) if comm is None else dict(comm=comm, keys=layout, queries=layout)


def _three(made: tuple, order: tuple[int, ...]) -> tuple:
    """flash-attention's results: the heads of its lse come before the tokens."""
    out, lse = made
    return out, lse.permute(order) if hasattr(lse, "permute") else lse.transpose(order), None


def _two(window_size) -> tuple[int, int]:
    """Also of an array, as flash-attention takes it."""
    return tuple(window_size) if isinstance(window_size, (tuple, list)) else tuple(int(n) for n in window_size)


def _alike(a: Array, b: Array) -> bool:
    """Whether they hold the same numbers; waits for a GPU."""
    return tuple(a.shape) == tuple(b.shape) and bool((a == b).all())


def _like(array: Array, numbers: list[int]):
    """int32 numbers on the device of a tensor; a list for others."""
    new = getattr(array, "new_tensor", None)
    return numbers if new is None else new(numbers).int()


__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache"]
