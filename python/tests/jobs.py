"""What tests/test_ranks.py has its ranks do."""

import os

import numpy as np

import longspan


def attend_sharded(comm, q, k, v, keys, queries, options):
    """Every rank has the whole arrays, cuts its own part, and gives back its result."""
    own_k, own_v = (longspan.shard(a, keys, comm=comm) for a in (k, v))
    own_q = q if queries is None else np.ascontiguousarray(longspan.shard(q, queries, comm=comm))
    out, lse = longspan.attend(own_q, own_k, own_v, comm=comm, keys=keys, queries=queries,
                               return_lse=True, **options)
    if queries is not None:
        out, lse = (longspan.unshard(a, queries, comm=comm) for a in (out, lse))
    return out, lse


def attend_parts(comm, q, k, v, results, options):
    """Every rank has all of q; its part of the result, by one call and by a layer."""
    own_k, own_v = (longspan.shard(a, "zigzag", comm=comm) for a in (k, v))
    given = dict(options, keys="zigzag", results=results)
    out, lse = longspan.attend(q, own_k, own_v, comm=comm, return_lse=True, **given)
    layer = longspan.Attention(comm, heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[2],
                               dtype=np.float32, max_queries=len(q), **given)
    return out, lse, np.array_equal(out, layer(q, own_k, own_v))


def grow(comm, prompt, steps):
    """A cache that grows by appending in the run, dealt out in blocks; the last results."""
    (q, k, v), keys = steps, longspan.Sharding("interleaved", 4)
    layer = longspan.Attention(comm, heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[2],
                               dtype=np.float32, causal=True, keys=keys)
    cache_k, cache_v = np.full((2, 1, 200, *k.shape[1:]), np.nan, np.float32)
    layer.append(*prompt, cache_k, cache_v, total_keys=len(prompt[0]))
    made = []
    for i in range(len(q)):
        made.append(layer(q[i:i + 1], cache_k, cache_v, k_new=k[i:i + 1], v_new=v[i:i + 1],
                          cache_seqlens=[len(prompt[0]) + i]))
    return np.concatenate(made)


def listed(comm, q, k, v, tables):
    """Every rank's own keys stand where its table says."""
    own = tables[comm.rank]
    return longspan.attend(q, k[own], v[own], comm=comm, keys="listed", key_table=own, total_keys=len(k))


def reshard(comm, k, v, lengths, given):
    """From the ranks' shards to pages of 4 keys on the last rank alone: these, and what travelled."""
    last, total = comm.size - 1, sum(lengths)
    rows = [longspan.Sharding(given["keys"]).shard(n, comm.rank, comm.size) for n in lengths]
    starts = np.cumsum([0, *lengths[:-1]])
    mine = np.concatenate([np.asarray(s.positions()) + start for s, start in zip(rows, starts)])
    to_k = to_v = table = None
    if comm.rank == last:
        pages = [-(-n // 4) for n in lengths]
        order = np.random.default_rng(1).permutation(sum(pages)).astype(np.int32)
        table = np.zeros((len(lengths), max(pages)), np.int32)
        for b, count in enumerate(pages):
            table[b, :count] = order[sum(pages[:b]):sum(pages[:b]) + count]
        to_k, to_v = np.full((2, sum(pages), 4, *k.shape[1:]), np.nan, k.dtype)
    traffic = longspan.reshard(k[mine], v[mine], to_k, to_v, comm=comm, lengths=lengths,
                               kv_heads=k.shape[1], head_dim=k.shape[2], dtype=k.dtype,
                               to_ranks=range(last, last + 1), to_block_table=table, **given)
    if comm.rank != last:
        return None, None, traffic
    found = [np.concatenate([to[table[b]].reshape(-1, *k.shape[1:])[:n] for b, n in enumerate(lengths)])
             for to in (to_k, to_v)]
    assert len(found[0]) == total
    return *found, traffic


def merge(comm, parts, lses, options):
    """Every rank has the whole arrays, and gives its own part."""
    return longspan.cross_rank_merge(parts[comm.rank], lses[comm.rank], comm=comm, **options)


def merge_in_place(comm, parts, lses):
    part, lse = parts[comm.rank].copy(), lses[comm.rank].copy()
    out, out_lse = longspan.cross_rank_merge(part, lse, comm=comm, base="e", out=part, lse=lse)
    return out is part and out_lse is lse, part, lse


def gathers(comm):
    comm.barrier()
    parts = comm.gather(bytes([comm.rank]) * comm.rank + b"\0\n")
    half = comm.split(comm.rank % 2)
    none = comm.split(-1 if comm.rank == 0 else 0)
    return parts, half.size, half.rank, none is None, comm.device, comm.gpu, repr(comm)


def several(comm, count):
    """Many communicators in one process."""
    made = [comm] + [longspan.from_exchange(comm.rank, comm.size, comm.gather) for _ in range(count)]
    return [c.gather(b"%d" % i)[-1] for i, c in enumerate(made)]


def disagree(comm, q, k, v):
    return longspan.attend(q, k, v, comm=comm, causal=comm.rank == 0)


def disagree_in_lengths(comm, q, k, v):
    """Of a layer that is kept: a run is compared too."""
    for rank_has in (0, comm.rank):
        longspan.attend(q, k, v, comm=comm, cache_seqlens=[2 + rank_has])


def disagree_and_go_on(comm, q, k, v):
    """What each of two calls raises."""
    said = []
    for call in (lambda: disagree_in_lengths(comm, q, k, v), comm.barrier):
        try:
            call()
        except longspan.UsageError as error:
            said.append(str(error))
    return said


def die(comm, who, q, k, v):
    longspan.attend(q, k, v, comm=comm, keys="striped")
    if comm.rank == who:
        os._exit(7)
    longspan.attend(q, k, v, comm=comm, keys="striped")


def stay_away(comm, who, q, k, v):
    if comm.rank == who:
        return "stayed away"
    return longspan.attend(q, k, v, comm=comm, keys="striped")


def give_up(comm, who):
    if comm.rank == who:
        comm.abort("enough of it")
        return "gave up"
    comm.barrier("the end")


def failing_exchange(comm):
    def exchange(mine):
        raise KeyError("no such thing")

    try:
        longspan.from_exchange(comm.rank, comm.size, exchange)
    except KeyError as error:
        return str(error)


def wrong_exchange(comm, what):
    try:
        longspan.from_exchange(comm.rank, comm.size, lambda mine: what, deadline=2)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)


def interrupted(comm, who, q, k, v):
    """Rank `who` waits for others that do not come, and Ctrl-C is pressed."""
    import signal
    import threading
    import time

    # A shell that starts tests in the background has them ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if comm.rank != who:
        time.sleep(10)  # longer than the other takes to be interrupted, on a busy machine too
        try:
            comm.barrier("after it")
        except longspan.RankError as error:
            return str(error)
        return "nothing"
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    try:
        longspan.attend(q, k, v, comm=comm, keys="striped", total_keys=comm.size * len(k))
    except KeyboardInterrupt:
        return time.monotonic() - begin
