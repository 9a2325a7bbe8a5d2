"""Bad input raises a Python exception of the right type that names the argument. It has no other
effect: the process goes on, and valid calls after it give right results."""

import inspect
import os
import pathlib
import pickle
import re
import subprocess
import sys
import types

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

import longspan
from oracle import assert_close, attention
from test_attend import numbers

RNG = np.random.default_rng(1)
Q, K, V = numbers(RNG, (6, 4, 16)), numbers(RNG, (20, 2, 16)), numbers(RNG, (20, 2, 16))
LATENT = K.astype(ml_dtypes.float8_e4m3fn)  # keys whose first columns are the values
FIXED = np.empty_like(Q)
FIXED.flags.writeable = False
SWAPPED = Q.astype(">f4")
SPACED = np.zeros((6, 4, 16), np.dtype([("x", np.float32), ("y", np.uint8)]))["x"]  # 5 bytes apart

INPUT, USAGE, UNSUPPORTED = longspan.InputError, longspan.UsageError, longspan.UnsupportedError


def attend(q=Q, k=K, v=V, **options):
    return longspan.attend(q, k, v, **options)


CASES = {
    # objects that are not arrays, or not the right ones
    "q a list": (lambda: attend([[1.0]]), TypeError, "q is of type 'list'"),
    "q None": (lambda: attend(None), TypeError, "q is None"),
    "k a string": (lambda: attend(k="keys"), TypeError, "k is of type 'str'"),
    "v an int": (lambda: attend(v=3), TypeError, "v is of type 'int'"),
    "float64 among float32": (lambda: attend(Q.astype(np.float64)), INPUT, "k is float32; float64, as q, is wanted"),
    "slopes of float64": (lambda: attend(alibi_slopes=np.ones(4)), INPUT, "alibi_slopes has elements of type float64"),
    "complex": (lambda: attend(k=K.astype(np.complex64)), INPUT, "k has elements of type complex64"),
    "int64 values": (lambda: attend(v=V.astype(np.int64)), INPUT, "v is int64"),
    "other byte order": (lambda: attend(SWAPPED), INPUT, "q has elements of type float32 in the other"),
    "objects": (lambda: attend(np.empty((3, 2, 8), object)), (INPUT, TypeError), "q"),
    "fp8 of another kind": (lambda: attend(k=K.astype(ml_dtypes.float8_e4m3b11fnuz)), INPUT,
                            "k has elements of type float8_e4m3b11fnuz"),
    "uneven strides": (lambda: attend(SPACED), INPUT, "q has a stride of"),
    "types differ": (lambda: attend(k=K.astype(np.float16)), INPUT, "k is float16; float32, as q"),
    "seven dimensions": (lambda: attend(np.zeros((1,) * 7, np.float32)), INPUT, "q has 7 dimensions"),
    # shapes
    "q of two dimensions": (lambda: attend(Q[0]), INPUT, "q is .4, 16."),
    "k of two dimensions": (lambda: attend(k=K[0]), INPUT, "k is .2, 16."),
    "heads": (lambda: attend(k=K[:, [0, 1, 1]], v=V[:, [0, 1, 1]]), (INPUT, USAGE), "heads"),
    "head_dim": (lambda: attend(k=K[..., :8].copy()), INPUT, "k is"),
    "head_dim 577": (lambda: attend(*(np.zeros((*x.shape[:2], 577), np.float32) for x in (Q, K))), UNSUPPORTED,
                     "head_dim 577 is not supported: 1 to 576 are"),
    "head_dim 0": (lambda: attend(Q[..., :0], K[..., :0]), (INPUT, USAGE, UNSUPPORTED), "0"),
    "k and v differ": (lambda: attend(v=V[:19]), INPUT, "v"),
    "batches differ": (lambda: attend(np.stack([Q] * 2), np.stack([K] * 3), np.stack([V] * 3)), INPUT,
                       "numbers of sequences differ"),
    "more queries than keys": (lambda: attend(k=K[:2], v=V[:2], causal=True, cache_seqlens=[3]), INPUT,
                               "cache_seqlens|sequence 0"),
    # results
    "out read-only": (lambda: attend(out=FIXED), INPUT, "out is read-only"),
    "out of another shape": (lambda: attend(out=np.empty((6, 4, 8), np.float32)), INPUT, "out is"),
    "out of another type": (lambda: attend(out=np.empty((6, 4, 16), np.int32)), INPUT, "out is int32"),
    "out is q": (lambda: attend(Q.copy(), out=None, lse=np.empty((4, 6), np.float32)), INPUT, "lse is"),
    "out overlaps": (lambda: overlapping(), INPUT, "out"),
    "lse float64": (lambda: attend(lse=np.empty((6, 4))), INPUT, "lse is float64; float32 is wanted"),
    # small arrays
    "cache_seqlens of float64": (lambda: attend(cache_seqlens=np.array([20.0])), INPUT, "cache_seqlens has elements"),
    "cache_seqlens of float32": (lambda: attend(cache_seqlens=np.array([20], np.float32)), INPUT,
                                 "cache_seqlens is float32; int32 or int64"),
    "cache_seqlens of bytes": (lambda: attend(cache_seqlens=np.array([20], np.uint8)), INPUT,
                               "cache_seqlens is uint8; int32 or int64"),
    "int64 past 32 bits": (lambda: attend(cache_seqlens=np.array([2 ** 32 + 20])), INPUT,
                           r"cache_seqlens has 4294967316; it is of 32 bits, -2\^31 to 2\^31 - 1"),
    "page past 32 bits": (lambda: attend(k=K[None], v=V[None], cache_seqlens=[20],
                                         block_table=np.full((1, 1), 2 ** 32)), INPUT, "block_table has 4294967296"),
    "block_table of numbers": (lambda: attend(k=K[None], v=V[None], cache_seqlens=[20], block_table=[[0]]), TypeError,
                               "block_table is of type 'list'"),
    "causal of floats": (lambda: attend(causal=np.ones(1, np.float32)), INPUT, "causal is float32; bool, uint8, int32"),
    "rows of numbers": (lambda: attend(keys="ranges", key_table=[[0, 20], [0]]), INPUT,
                        "key_table has rows of 2 and 1 numbers"),
    "slopes of more sequences": (lambda: attend(alibi_slopes=np.ones((2, 4), np.float32)), INPUT,
                                 r"alibi_slopes is \[2, 4\]; \[4\] or \[1, 4\] is wanted"),
    "scales of more sequences": (lambda: attend(k_descale=np.ones((2, 2), np.float32)), INPUT,
                                 r"k_descale is \[2, 2\]; \[1\], \[2\] or \[1, 2\] is wanted"),
    "fp8 as bytes": (lambda: attend(k=K.astype(np.uint8)), INPUT, r"k is uint8.*k.view\(ml_dtypes.float8_e4m3fn\)"),
    "k_new of other rows than v_new": (lambda: attend(k=K.copy(), v=V.copy(), k_new=K[:5], v_new=V[:4],
                                                      cache_seqlens=[10]), INPUT, r"v_new is \[4, "),
    "cache_seqlens too long": (lambda: attend(cache_seqlens=[21]), INPUT, "21"),
    "cache_seqlens negative": (lambda: attend(cache_seqlens=[-1]), INPUT, r"cache_seqlens.0. is -1|sequence 0"),
    "cache_seqlens past 32 bits": (lambda: attend(cache_seqlens=[2 ** 40]), INPUT, "cache_seqlens has"),
    "cache_seqlens of floats": (lambda: attend(cache_seqlens=[2.5]), TypeError, "cache_seqlens is of type 'float'"),
    "cache_seqlens empty": (lambda: attend(cache_seqlens=[]), INPUT, "cache_seqlens"),
    "cu_seqlens_q descends": (lambda: attend(cu_seqlens_q=[0, 4, 2], cache_seqlens=[4, 4]), INPUT,
                              "cu_seqlens_q descends"),
    "cu_seqlens_q missing": (lambda: attend(cache_seqlens=[4, 4]), INPUT, "cu_seqlens_q"),
    "sinks": (lambda: attend(sinks=[1.0]), INPUT, "sinks is"),
    "slopes": (lambda: attend(alibi_slopes=[1.0] * 5), INPUT, "alibi_slopes is"),
    "documents descend": (lambda: attend(documents=[0, 9, 3]), INPUT, "documents descend"),
    "documents of one sequence": (lambda: attend(q=Q[None].repeat(2, 0), k=K[None].repeat(2, 0), v=V[None].repeat(2, 0),
                                                 documents=[0, 9]), INPUT, r"\[2, count \+ 1\] is wanted"),
    "document_ids come back": (lambda: longspan.document_starts([[0, 0], [3, 3]][0] + [1, 0]), INPUT,
                               "document_ids: number 0 comes back at token 3"),
    "document_ids of a sequence": (lambda: longspan.document_starts([[1, 1, 2], [2, 1, 2]]), INPUT,
                                   "document_ids of sequence 1: number 2 comes back at token 2"),
    "document_ids with holes": (lambda: longspan.document_starts([1, -1, 2]), INPUT, "token 1 has the number -1"),
    "document_ids of floats": (lambda: longspan.document_starts([1.5]), INPUT, "document_ids is of float64"),
    "document_ids ragged": (lambda: longspan.document_starts([[1], [2, 3]]), INPUT, "document_ids is not an array"),
    "document_ids of 3 dimensions": (lambda: longspan.document_starts([[[1]]]), INPUT, r"document_ids is \[1, 1, 1\]"),
    "attention_mask with holes": (lambda: longspan.padding([[1, 1, 1], [1, 0, 1]]), INPUT, r"attention_mask\[1\]\[1\] is 0"),
    "attention_mask of numbers": (lambda: longspan.padding([[1, 2]]), INPUT, "other numbers than 0 and 1"),
    "attention_mask of one dimension": (lambda: longspan.padding([1, 1]), INPUT, r"attention_mask is \[2\]"),
    "cache_leftpad too much": (lambda: attend(cache_leftpad=[21]), INPUT, r"cache_leftpad\[0\] is 21; the sequence has 20 keys"),
    "cache_leftpad negative": (lambda: attend(cache_leftpad=[-1]), INPUT, r"cache_leftpad\[0\] is -1"),
    "cache_leftpad of others": (lambda: attend(cache_leftpad=[1, 2]), INPUT, r"cache_leftpad is \[2\]"),
    "seqused_q too many": (lambda: attend(seqused_q=[7]), INPUT, r"seqused_q\[0\] is 7; the sequence has 6 query rows"),
    "seqused_q and new keys": (lambda: attend(k=K.copy(), v=V.copy(), k_new=K[:6], v_new=V[:6], cache_seqlens=[10],
                                              seqused_q=[3]), UNSUPPORTED, "seqused_q with k_new"),
    "seqused_k twice": (lambda: attend(seqused_k=[9], cache_seqlens=[9]), INPUT, "cache_seqlens and seqused_k"),
    "seqused_k and new keys": (lambda: attend(seqused_k=[9], k_new=K[:6], v_new=V[:6]), INPUT, "seqused_k is given with k_new"),
    "seqused_k packed": (lambda: attend(seqused_k=[9, 8], cu_seqlens_q=[0, 3, 6]), UNSUPPORTED, "seqused_k with k of 3"),
    "scale of no fp8": (lambda: attend(k=K.astype(ml_dtypes.float8_e4m3fn), v=V.astype(ml_dtypes.float8_e4m3fn)),
                        INPUT, "k_descale"),
    "block_table and no lengths": (lambda: attend(k=K[None], v=V[None], block_table=np.zeros((1, 1), np.int32)),
                                   INPUT, "cache_seqlens is missing"),
    "block_table out of range": (lambda: attend(k=K[None], v=V[None], cache_seqlens=[20],
                                                block_table=np.full((1, 1), 7, np.int32)), INPUT, "block_table"),
    "total_keys twice": (lambda: attend(total_keys=20, cache_seqlens=[20]), INPUT, "total_keys"),
    "total_keys negative": (lambda: attend(total_keys=-1), INPUT, "total_keys is -1"),
    "total_keys too many": (lambda: attend(total_keys=21), INPUT, "21"),
    "total_keys past 31 bits": (lambda: attend(total_keys=2 ** 31), INPUT,
                                r"total_keys is 2147483648; 0 to 2\^31 - 1 are possible"),
    "total_queries past 31 bits": (lambda: attend(queries="striped", total_queries=2 ** 62), INPUT,
                                   r"total_queries is 4611686018427387904; 0 to 2\^31 - 1 are possible"),
    "max_seqlen_k past 31 bits": (lambda: attend(max_seqlen_k=2 ** 31), INPUT,
                                  r"max_seqlen_k is 2147483648; 0 to 2\^31 - 1 are possible"),
    "total_queries without": (lambda: attend(queries="striped", total_queries=7), INPUT, "total_queries"),
    "k_new alone": (lambda: attend(k_new=K[:6], cache_seqlens=[10]), INPUT, "^v_new is None"),
    "k_new into what is read-only": (lambda: attend(k=fixed(K), k_new=K[:6], v_new=V[:6], cache_seqlens=[10]),
                                     INPUT, "k is read-only"),
    # words
    "causal a string": (lambda: attend(causal="yes"), TypeError, "causal is of type 'str'"),
    "causal a number": (lambda: attend(causal=1), TypeError, "causal is of type 'int'"),
    "scale a string": (lambda: attend(softmax_scale="1"), TypeError, "softmax_scale is of type 'str'"),
    "scale nan": (lambda: attend(softmax_scale=float("nan")), (INPUT, USAGE), "^softmax_scale is nan"),
    "out's type": (lambda: attend(out=np.empty(Q.shape, np.float16)), USAGE, "out.dtype float16: it is q.dtype"),
    "softcap negative": (lambda: attend(softcap=-1.0), (INPUT, USAGE), "softcap"),
    **{f"softcap {cap}": (lambda cap=cap: attend(softcap=cap), (INPUT, USAGE), "softcap is")
       for cap in (1e-300, 1e-45, 1e-40, 1e38, 3e38)},
    "scale tiny": (lambda: attend(softmax_scale=1e-50), (INPUT, USAGE), "softmax_scale is 1e-50"),
    "scale huge": (lambda: attend(softmax_scale=3e38), (INPUT, USAGE), r"times log2\(e\) it is inf"),
    "slopes not finite": (lambda: attend(alibi_slopes=[1.0, float("inf"), 0.0, 1.0]), INPUT,
                          r"alibi_slopes.1. is inf"),
    "two scales of one memory": (lambda: attend(k=LATENT, v=LATENT, k_descale=[2.0], v_descale=[32.0]), INPUT,
                                 "k_descale is 2 and v_descale is 32 of kv head 0; v lies in the memory of k"),
    "values' scale of one memory": (lambda: attend(k=LATENT, v=LATENT, v_descale=[2.0]), INPUT,
                                    "v_descale is given and k_descale is not"),
    "window an int": (lambda: attend(window_size=5), TypeError, "window_size is of type 'int'"),
    "window of three": (lambda: attend(window_size=(1, 2, 3)), INPUT, "window_size has 3"),
    "window past 31 bits": (lambda: attend(window_size=(2 ** 31 - 1, 0)), INPUT, "window_size is .2147483647, 0."),
    "window negative": (lambda: attend(window_size=(-2, 0)), INPUT, "window_size is"),
    "window of words": (lambda: attend(window_size=("a", 0)), TypeError, "window_size.0."),
    "keys unknown": (lambda: attend(keys="spiral"), INPUT, "keys is 'spiral'"),
    "keys of a word of the library": (lambda: attend(keys="kv_len"), INPUT, "^keys is 'kv_len'"),
    "strategy of a word of the library": (lambda: attend(strategy="kv_len"), UNSUPPORTED, 'strategy "kv_len"'),
    "keys a number": (lambda: attend(keys=3), TypeError, "keys is of type 'int'"),
    "ranges without a table": (lambda: attend(keys="ranges"), INPUT, "key_table"),
    "exchange unknown": (lambda: attend(exchange="pigeon"), INPUT, "exchange is 'pigeon'"),
    "ranks_per_node negative": (lambda: attend(ranks_per_node=-1), INPUT, "ranks_per_node is -1"),
    "ranks_per_node a word": (lambda: attend(ranks_per_node="two"), TypeError, "ranks_per_node is of type 'str'"),
    "strategy of two levels on one rank": (lambda: attend(strategy="heads+ring-kv"), UNSUPPORTED, "of one node"),
    "strategy unknown": (lambda: attend(strategy="luck"), UNSUPPORTED, "luck"),
    "comm a number": (lambda: attend(comm=0), TypeError, "comm is of type 'int'"),
    "stream on CPUs": (lambda: attend(stream=7), INPUT, "stream is given"),
    "return_lse None": (lambda: attend(return_lse=None), TypeError, "return_lse is None"),
    "unknown argument": (lambda: attend(dropout=0.1), TypeError, "dropout"),
    "by position": (lambda: longspan.attend(Q, K, V, True), TypeError, "positional"),
    "a closed communicator": (lambda: attend(comm=closed()), USAGE, "comm cannot be used: it has been closed"),
    # layers and communicators
    "layer heads": (lambda: longspan.Attention(heads=3, kv_heads=2, head_dim=64), (USAGE, INPUT), "heads"),
    "layer heads word": (lambda: longspan.Attention(heads="3", head_dim=64), TypeError, "heads is of type 'str'"),
    "layer dtype": (lambda: longspan.Attention(heads=2, head_dim=64, dtype="float12"), INPUT, "dtype is 'float12'"),
    "layer dtype word": (lambda: longspan.Attention(heads=2, head_dim=64, dtype=7), TypeError, "dtype is of type 'int'"),
    "layer out_dtype": (lambda: longspan.Attention(heads=2, head_dim=64, out_dtype="float32"), USAGE,
                        "^out_dtype float32: it is dtype .bfloat16. or fp8"),
    "layer max_queries": (lambda: longspan.Attention(heads=2, head_dim=64, max_queries=-1), USAGE, "^max_queries -1"),
    "layer too many rows": (lambda: longspan.Attention(heads=4, kv_heads=2, head_dim=16, dtype="fp32")(Q, K, V),
                            INPUT, "max_queries"),
    "device": (lambda: longspan.alone("tpu"), INPUT, "device is 'tpu'"),
    "device word": (lambda: longspan.alone(1), TypeError, "device is of type 'int'"),
    "gpu": (lambda: longspan.alone("cuda", gpu=-1), INPUT, "gpu is -1"),
    "gpu past 31 bits": (lambda: longspan.alone("cuda", gpu=2 ** 32), INPUT, "gpu is 4294967296"),
    "color past 31 bits": (lambda: longspan.alone().split(2 ** 31), INPUT, "color is 2147483648"),
    "key past 31 bits": (lambda: longspan.alone().split(0, key=-2 ** 32), INPUT, "key is -4294967296"),
    "deadline": (lambda: longspan.from_environment(deadline=-1), INPUT, "deadline"),
    "mpi4py": (lambda: longspan.from_mpi4py(3), TypeError, "comm is of type 'int'"),
    "gather text": (lambda: longspan.alone().gather("text"), TypeError, "mine is of type 'str'"),
}


def fixed(a):
    a = a.copy()
    a.flags.writeable = False
    return a


def closed():
    comm = longspan.alone()
    comm.close()
    comm.close()
    assert "closed" in repr(comm)
    return comm


def overlapping():
    memory = np.zeros((12, 4, 16), np.float32)
    return attend(memory[:6], out=memory[3:9])


def reshard(k=K, v=V, to_k=None, to_v=None, **given):
    made = [np.empty_like(K) if one is None else one for one in (to_k, to_v)]
    given = {"lengths": [len(K)], "kv_heads": K.shape[1], "head_dim": K.shape[2], "dtype": K.dtype, **given}
    return longspan.reshard(k, v, *made, **given)


@pytest.mark.parametrize("given, error, says", [
    (dict(ranks=1), TypeError, "ranks is of type 'int'; a range"),
    (dict(to_ranks=range(0, 2, 2)), INPUT, "to_ranks is range"),
    (dict(to_ranks=range(0)), INPUT, "to_ranks is range"),
    (dict(ranks=range(0, 2)), longspan.LongspanError, "2 ranks"),
    (dict(keys="listed"), UNSUPPORTED, "listed"),
    (dict(to_keys="spiral"), INPUT, "to_keys is 'spiral'"),
    (dict(lengths=[len(K) + 1]), INPUT, "^k has 20 keys"),
    (dict(lengths="many"), TypeError, "lengths"),
    (dict(lengths=[-1]), longspan.LongspanError, "-1"),
    (dict(kv_heads=2.5), TypeError, "kv_heads is of type 'float'"),
    (dict(head_dim=-1), INPUT, "head_dim is -1"),
    (dict(dtype="float32", to_k=K.astype(np.float64)), INPUT, "to_k is float64; float32 is wanted"),
    (dict(k=None), INPUT, "^k is None"),
    (dict(to_v=np.empty_like(K[:9])), INPUT, r"^to_k is \[20, 2, 16\] and to_v is \[9, 2, 16\]"),
    (dict(keys="ranges", key_table=[[0, 5]]), USAGE, r"^key_table of sequence 0 is \[0, 5\]"),
    (dict(to_keys="ranges"), USAGE, "^to_key_table has 0 entries"),
    (dict(keys="ranges", key_table=[0, 20, 0, 0], lengths=[20, 0]), INPUT, r"^key_table is \[4\]; of 2 sequences \[2, ran"),
    (dict(keys="ranges", key_table=[[0, 20]] * 2), INPUT, r"^key_table has 2 dimensions, and 2 rows"),
    (dict(block_table=np.full((1, 1), 2 ** 32)), INPUT, "^block_table has 4294967296"),
    (dict(to_k=K.astype(np.uint8)), INPUT, "^to_k is uint8"),
])
def test_moves_that_make_no_sense(given, error, says):
    with pytest.raises(error, match=says):
        reshard(**given)
    assert reshard().kept == K.nbytes + V.nbytes


# ---- errors use the Python names of arguments ---------------------------------------------

HEADERS = pathlib.Path(__file__).parents[2] / "src/longspan"
PUBLIC = [longspan.attend, longspan.Attention.__init__, longspan.Attention.__call__, longspan.Attention.append,
          longspan.merge_attn_states, longspan.merge_state, longspan.merge_states, longspan.cross_rank_merge,
          longspan.segmented_attention, longspan.reduce_segments, longspan.context_attention, longspan.append_kv,
          longspan.Reshard.__init__, longspan.Reshard.__call__, longspan.shard, longspan.unshard]


def names_of_the_library():
    """Members of its structs that no Python function has as an argument, and words of C++ only."""
    python = {name for function in PUBLIC for name in inspect.signature(function).parameters}
    members = set()
    for header in ("options", "attention", "serving", "merge", "reshard"):
        text = (HEADERS / f"{header}.hpp").read_text()
        members |= set(re.findall(r"^  [\w:<>]+ (\w+_\w+)(?: = .*)?;", text, re.M))
    members -= python | {"workspace_bytes"}
    assert {"query_start", "kv_len", "max_tokens", "new_k", "k_scale", "prefix_out"} <= members
    return re.compile(r"\w::|\b(dtypes|limits|score|mask|debug|from|to)\.\w|\.hpp|\bof number \d|DLPack"
                      r"|\b(fp32|fp16|bf16|e4m3|e5m2|" + "|".join(sorted(members)) + r")\b"
                      r"|^scale |^window |^right |^slots |^parts |^lses |'(scale|window|right|dtype)'")


OF_THE_LIBRARY = names_of_the_library()


def assert_python_names(text):
    found = OF_THE_LIBRARY.search(text)
    assert found is None, f"{found[0]!r} in: {text}"


def small(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def good_calls():
    """function, its arguments by name: each call is valid as it is."""
    out, lse = small(3, 4, 16), small(3, 4)
    pages = dict(k_cache=small(6, 4, 2, 16), v_cache=small(6, 4, 2, 16))
    paged = dict(q=small(3, 4, 16), **pages, block_table=np.arange(6, dtype=np.int32).reshape(2, 3),
                 cache_seqlens=np.array([9, 5]), cu_seqlens_q=np.array([0, 1, 3]))
    states = longspan.segmented_attention(**paged, segments=2)
    layer = longspan.Attention(heads=4, kv_heads=2, head_dim=16, dtype="float32", max_queries=6, max_batch=2)
    move = longspan.Reshard(lengths=[20], kv_heads=2, head_dim=16, dtype="float32")
    to = np.empty((2, 20, 2, 16), np.float32)
    return {
        "attend": (longspan.attend, dict(q=Q, k=K, v=V)),
        "attend a batch": (longspan.attend, dict(q=small(2, 3, 4, 16), k=small(2, 9, 2, 16), v=small(2, 9, 2, 16),
                                                 cache_seqlens=[9, 5], causal=True)),
        "attend pages": (longspan.attend, dict(q=paged["q"], k=pages["k_cache"], v=pages["v_cache"],
                                               **{n: paged[n] for n in ("block_table", "cache_seqlens", "cu_seqlens_q")})),
        "attend and append": (longspan.attend, dict(q=Q, k=K.copy(), v=V.copy(), k_new=K[:6], v_new=V[:6],
                                                    cache_seqlens=[10])),
        "attend shards": (longspan.attend, dict(q=Q, k=K, v=V, keys="ranges", key_table=[0, 20], queries="ranges",
                                                query_table=[0, 6], total_queries=6)),
        "make a layer": (longspan.Attention, dict(heads=4, kv_heads=2, head_dim=16, dtype="float32")),
        "run a layer": (layer, dict(q=Q, k=K, v=V)),
        "append": (layer.append, dict(k_new=K[:2], v_new=V[:2], k=K.copy(), v=V.copy(), total_keys=2)),
        "merge_attn_states": (longspan.merge_attn_states, dict(
            prefix_output=out, prefix_lse=lse.T, suffix_output=out + 1, suffix_lse=lse.T + 1, base="e")),
        "merge_state": (longspan.merge_state, dict(v_a=out, s_a=lse, v_b=out + 1, s_b=lse + 1, base=2)),
        "merge_states": (longspan.merge_states, dict(v=small(3, 2, 4, 16), s=small(3, 2, 4), base="e")),
        "cross_rank_merge": (longspan.cross_rank_merge, dict(part=out, part_lse=lse, base="e")),
        "segmented_attention": (longspan.segmented_attention, paged),
        "context_attention": (longspan.context_attention, dict(paged, k=small(3, 2, 16), v=small(3, 2, 16))),
        "reduce_segments": (longspan.reduce_segments, dict(segments=states, cache_seqlens=paged["cache_seqlens"],
                                                           cu_seqlens_q=paged["cu_seqlens_q"], dtype="float32")),
        "append_kv": (longspan.append_kv, dict(k=K[:2], v=V[:2], **pages, slot_mapping=[3, -1])),
        "make a move": (longspan.Reshard, dict(lengths=[20, 3], kv_heads=2, head_dim=16, dtype="float32", keys="ranges",
                                               key_table=[[0, 20], [0, 3]])),
        "run a move": (move, dict(k=K, v=V, to_k=to[0], to_v=to[1])),
    }


def wrong_values(right):
    yield from (None, -1, 2 ** 31 - 1, 2 ** 40, float("nan"), 1e-45, "spiral", "listed", "float8_e5m2", (-5, 3), [[1], [2, 3]], [-3], object())
    yield from (np.float32([1, 2, 3]), np.int64([2 ** 33]), np.int32([[0, 9], [7, 3]]), np.zeros((1,) * 7, np.uint8))
    if isinstance(right, np.ndarray):
        yield from (right[:0], right[..., :-1], right[None], right[..., ::-1], right.astype(np.uint8),
                    right.astype(ml_dtypes.float8_e4m3fn), right.astype(np.float16), right.astype(np.float64),
                    right.astype(np.int64) - 99, np.ma.masked_array(right, right > 0))


def count_threads():
    return len(list(pathlib.Path("/proc/self/task").iterdir()))


@pytest.mark.more
def test_errors_have_the_names_of_python():
    threads = count_threads()
    for name, (call, right) in good_calls().items():
        call(**right)
        refused = 0
        for argument in inspect.signature(call).parameters:
            for wrong in wrong_values(right.get(argument)):
                given = {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in right.items()}
                try:
                    call(**{**given, argument: wrong})
                except MemoryError:
                    pass
                except (longspan.LongspanError, TypeError) as error:
                    assert not isinstance(error, longspan.InternalError), (name, argument, wrong)
                    assert_python_names(str(error))
                    refused += 1
        assert refused > 20, name
    assert count_threads() < threads + 20  # no machine accepts 2^31 - 1 threads


@pytest.mark.parametrize("given, says", [
    (dict(segments=0), "segments is 0; it is from 1 to 65536"),
    (dict(segments=2 ** 31 - 1), "segments is 2147483647; it is from 1 to 65536"),  # some systems promise its memory
    (dict(segments=2, tile=0), "tile is 0; it is from 1"),
])
def test_segments_that_make_no_sense(given, says):
    call, right = good_calls()["segmented_attention"]
    with pytest.raises(INPUT, match=says):
        call(**right, **given)


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_named(name):
    call, error, says = CASES[name]
    with pytest.raises(error, match=says) as caught:
        call()
    if "of the library" not in name:
        assert_python_names(str(caught.value))
    assert_close(attend(causal=True), attention(Q, K, V, causal=True)[0])


def test_the_classes():
    assert issubclass(INPUT, ValueError) and issubclass(USAGE, ValueError)
    assert issubclass(UNSUPPORTED, NotImplementedError)
    assert issubclass(longspan.RankError, RuntimeError)
    for error in (INPUT, USAGE, UNSUPPORTED, longspan.RankError, longspan.BackendError):
        assert issubclass(error, longspan.LongspanError)
    error = pickle.loads(pickle.dumps(longspan.RankError("gone", 3, "merge")))
    assert (error.rank, error.step, str(error)) == (3, "merge", "gone")


def test_cuda_where_there_is_none():
    if "not built in" not in longspan.info()["CUDA"]:
        pytest.skip("this build has CUDA")
    how = r"[a-z].*\. `LONGSPAN_CUDA=ON pip install \.` in its repository builds the CUDA part"
    assert re.fullmatch("not built in: " + how, longspan.info()["CUDA"])
    with pytest.raises(UNSUPPORTED, match=f"built without CUDA: {how}, or use device 'cpu'") as caught:
        longspan.alone("cuda")
    assert_python_names(str(caught.value))


def test_requires_grad():
    """Without torch: only a module of that name is looked at."""
    script = """
import sys, types
import numpy as np
torch = types.ModuleType("torch")
class Tensor:
    requires_grad = True
    def __init__(self, a): self.a = a
    def __dlpack__(self, **o): return self.a.__dlpack__(**o)
    def __dlpack_device__(self): return 1, 0
torch.Tensor, torch.is_grad_enabled = Tensor, lambda: Tensor.enabled
sys.modules["torch"] = torch
import longspan
a = np.ones((3, 2, 8), np.float32)
Tensor.enabled = True
try:
    longspan.attend(a, Tensor(a), a)
except longspan.UnsupportedError as e:
    print(e)
Tensor.enabled = False
longspan.attend(a, Tensor(a), a)
print("then fine")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("k requires grad") and done.stdout.endswith("then fine\n")


def test_text_that_is_no_utf_8():
    """Bytes of the system that are not UTF-8 are shown as marks."""
    script = """
import longspan
print(ascii([row["value"] for row in longspan.environment() if row["name"] == "LONGSPAN_DEADLINE_S"]))
for call in (longspan.from_environment, lambda: longspan.Sharding("a\\udcff")):
    try:
        call()
    except longspan.LongspanError as e:
        print(type(e).__name__, ascii(str(e)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                          env={**os.environb, b"LONGSPAN_DEADLINE_S": b"\xff5"})
    listed, environment, layout = done.stdout.splitlines()
    assert listed == "['\\ufffd5']"
    assert environment.startswith("UsageError") and "LONGSPAN_DEADLINE_S='\\ufffd5'" in environment
    assert layout.startswith("InputError") and "layout is 'a\\ufffd'" in layout


def arguments_of(monkeypatch, module, function, call):
    """The arguments that `call` gives to a function of the extension module."""
    given = {}
    with monkeypatch.context() as patched:
        patched.setattr(module, "_core", types.SimpleNamespace(**{function: lambda **named: given.update(named)}))
        call()
    return given


BORDER = {
    "attend": (longspan._attention, attend),
    "layer": (longspan._attention, lambda: longspan.Attention(heads=4, head_dim=16, dtype="float32")),
    "segmented_attention": (longspan._serving, lambda: longspan.segmented_attention(
        Q, K[None], V[None], np.zeros((1, 1), np.int32), [20], segments=None)),
    "merge_states": (longspan._serving, lambda: longspan.merge_states(Q[:, None], Q[:, None, :, 0], base=2)),
}


@pytest.mark.parametrize("function", BORDER)
def test_the_extension_module_takes_names(monkeypatch, function):
    """None is left out, unknown or given by position: a swapped pair would go unnoticed there."""
    module, call = BORDER[function]
    border = getattr(longspan._core, function)
    given = arguments_of(monkeypatch, module, function, call)
    border(**given)
    border(**dict(reversed(given.items())))
    for name in given:
        with pytest.raises(TypeError):
            border(**{other: value for other, value in given.items() if other != name})
    with pytest.raises(TypeError):
        border(**given, spiral=None)
    with pytest.raises(TypeError):
        border(*given.values())


@hypothesis.given(st.fixed_dictionaries({}, optional={
    name: st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3),
                    st.lists(st.integers(-9, 99), max_size=4), st.just(Q), st.just(np.arange(9)))
    for name in ("causal softmax_scale window_size softcap alibi_slopes sinks cu_seqlens_q "
                 "cache_seqlens block_table cache_batch_idx cu_seqlens_k_new causal_alignment k_new v_new q_descale k_descale v_descale out_scale "
                 "documents cache_leftpad seqused_q seqused_k qq_bias keys queries total_keys total_queries key_table query_table "
                 "max_seqlen_q max_seqlen_k invariant exchange strategy return_lse out lse stream").split()}))
@hypothesis.settings(max_examples=400)
def test_any_nonsense_is_an_exception(options):
    out = options.get("out")
    if out is Q:
        options["out"] = Q.copy()
    try:
        attend(**options)
    except (ValueError, TypeError, NotImplementedError):
        pass
