"""Jobs of the ranks of tests/test_ranks.py."""

import os

import numpy as np

import longspan
from oracle import assert_close, assert_lse_close, attention, host


def attend_sharded(comm, q, k, v, keys, queries, options):
    """Every rank has the whole arrays, cuts its own part, and gives back its result."""
    own_k, own_v = (longspan.shard(a, keys, comm=comm) for a in (k, v))
    own_q = q if queries is None else np.ascontiguousarray(longspan.shard(q, queries, comm=comm))
    out, lse = longspan.attend(own_q, own_k, own_v, comm=comm, keys=keys, queries=queries,
                               return_lse=True, **options)
    if queries is not None:
        out, lse = (longspan.unshard(a, queries, comm=comm) for a in (out, lse))
    return out, lse


def gradients_sharded(comm, q, k, v, dout, dlse, keys, queries, strategy, options):
    """Every rank has the whole arrays, cuts its own parts, and gives back the whole gradients."""
    from test_gradients import layer_of, terms_of

    def own(a, rule):
        return a if rule is None else np.ascontiguousarray(longspan.shard(a, rule, comm=comm))

    layer, run = layer_of(options, comm, q.dtype.name, strategy=strategy, keys=keys, queries=queries)
    run.update(total_keys=len(k), total_queries=None if queries is None else len(q))
    own_q, own_k, own_v = own(q, queries), own(k, keys), own(v, keys)
    out, lse = layer(own_q, own_k, own_v, return_lse=True, **run)
    terms = terms_of(options)
    dq, dk, dv = layer.backward(own(dout, queries), own_q, own_k, own_v, out, lse, dlse=own(dlse, queries),
                                **terms, **run)
    whole = [longspan.unshard(np.asarray(a), keys, comm=comm) for a in (dk, dv)]
    return (dq if queries is None else longspan.unshard(np.asarray(dq), queries, comm=comm), *whole,
            *terms.values())


def gradients_of_a_dout_apart(comm, q, k, v, dout, strategy):
    """The gradients of a batch whose dout has heads before tokens in memory, and those of a dense dout."""
    q, k, v, dout = (np.ascontiguousarray(longspan.shard(a, "zigzag", comm=comm, dim=1)) for a in (q, k, v, dout))
    layer = longspan.Attention(comm, heads=4, head_dim=32, dtype="float32", causal=True, keys="zigzag", queries="zigzag",
                               strategy=strategy, max_queries=128, max_batch=3, max_seqlen_k=64, gradients=True)
    lengths = dict(total_keys=30, total_queries=30)
    out, lse = layer(q, k, v, return_lse=True, **lengths)
    apart = np.ascontiguousarray(dout.swapaxes(1, 2)).swapaxes(1, 2)
    return [layer.backward(one, q, k, v, out, lse, **lengths) for one in (apart, dout)]


def gradients_of_parts(comm, q, k, v, douts, strategy):
    """Every rank has all queries, and the gradient of its own part of the loss."""
    own_k, own_v = (np.ascontiguousarray(longspan.shard(a, "zigzag", comm=comm)) for a in (k, v))
    made = []
    for dout, form in ((douts[comm.rank], "partial"), (sum(douts[1:comm.size], douts[0]), "replicated")):
        layer = longspan.Attention(comm, heads=4, kv_heads=2, head_dim=32, dtype="float32", causal=True, keys="zigzag",
                                   strategy=strategy, max_queries=64, max_seqlen_k=64, gradients=True, dout=form)
        out, lse = layer(q, own_k, own_v, total_keys=len(k), return_lse=True)
        made.append(layer.backward(dout, q, own_k, own_v, out, lse, total_keys=len(k)))
    return [np.array_equal(a, b) and not np.isnan(a).any() for a, b in zip(*made)]


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
    """Every rank's own keys are at the positions of its table."""
    own = tables[comm.rank]
    return longspan.attend(q, k[own], v[own], comm=comm, keys="listed", key_table=own, total_keys=len(k))


def reshard(comm, k, v, lengths, given):
    """From the ranks' shards to pages of 4 keys on the last rank alone: the pages, and the bytes that travelled."""
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


def calls_in_order(comm, orders, q, k, v):
    """This rank's order of calls. All ranks have made each of them before, so all layers exist."""
    own_k, own_v = (longspan.shard(a, "striped", comm=comm) for a in (k, v))
    lse = np.zeros(q.shape[:2], np.float32)
    layers = [longspan.Attention(comm, heads=q.shape[1], head_dim=q.shape[2], dtype="float32",
                                 max_queries=len(q), keys="striped") for _ in range(2)]
    move = longspan.Reshard(comm, lengths=[len(k)], kv_heads=k.shape[1], head_dim=k.shape[2],
                            dtype="float32", keys="striped", to_keys="zigzag")
    to_k, to_v = (np.empty_like(longspan.shard(a, "zigzag", comm=comm)) for a in (k, v))

    def attend(causal):
        return longspan.attend(q, own_k, own_v, comm=comm, causal=causal, keys="striped", total_keys=len(k))

    def reshard():
        move(own_k, own_v, to_k, to_v)
        return longspan.unshard(longspan.attend(longspan.shard(q, "zigzag", comm=comm), to_k, to_v, comm=comm,
                                                keys="zigzag", queries="zigzag", total_keys=len(k),
                                                total_queries=len(q)), "zigzag", comm=comm)

    calls = [lambda: attend(True), lambda: attend(False),
             lambda: layers[0](q, own_k, own_v, total_keys=len(k)),
             lambda: layers[1](q, own_k, own_v, total_keys=len(k)),
             lambda: longspan.cross_rank_merge(q, lse, comm=comm, base="e")[0],
             lambda: longspan.cross_rank_merge(q, lse, comm=comm, base="e", nan_is_empty=True)[0], reshard]
    for call in calls:
        call()
    return [calls[i]() for i in orders[comm.rank]]


def makes_another(comm, q, k, v):
    """The last rank asks for a layer that no rank has made yet."""
    own_k, own_v = (longspan.shard(a, "striped", comm=comm) for a in (k, v))
    for softcap in (0.0, 3.0 if comm.rank == comm.size - 1 else 0.0):
        longspan.attend(q, own_k, own_v, comm=comm, keys="striped", total_keys=len(k), softcap=softcap)


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
    """With a layer that is kept: a run is compared too."""
    for rank_has in (0, comm.rank):
        longspan.attend(q, k, v, comm=comm, cache_seqlens=[2 + rank_has])


def disagree_in(comm, name, values, q, k, v):
    longspan.attend(q, k, v, comm=comm, keys="striped", **{name: values[comm.rank > 0]})


def disagree_in_dtype(comm, q, k, v):
    dtype = np.float16 if comm.rank else np.float32
    longspan.attend(*(a.astype(dtype) for a in (q, k, v)), comm=comm)


def disagree_in_move(comm):
    starts = np.minimum(np.arange(comm.size + 1) * (comm.rank + 1), 9)
    starts[-1] = 9
    longspan.Reshard(comm, lengths=[9], kv_heads=1, head_dim=8, to_keys="ranges", to_key_table=starts[None])


def attend_nothing(comm):
    return longspan.attend(*np.zeros((3, 0, 3, 2, 16), np.float32), comm=comm).shape


def disagree_and_go_on(comm, q, k, v):
    """The error of each of two calls."""
    answers = []
    for call in (lambda: disagree_in_lengths(comm, q, k, v), comm.barrier):
        try:
            call()
        except longspan.UsageError as error:
            answers.append(str(error))
    return answers


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
    """Rank `who` waits for ranks that do not come, until Ctrl-C is pressed."""
    import signal
    import threading
    import time

    # Tests that a shell starts in the background ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if comm.rank != who:
        time.sleep(10)  # longer than the other rank's interrupt takes, on a busy machine too
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


class Cut:
    """A way to deal out tokens: the layout's name or rule, and the further arguments that it needs."""

    def __init__(self, rng, name, length, ranks):
        self.name, self.table, self.tables, self.own = name, None, None, None
        self.keys = longspan.Sharding(*name) if isinstance(name, tuple) else name
        ends = [0, *sorted(rng.integers(0, length + 1, ranks - 1).tolist()), length]
        if name == "any":  # parts in rank order of any lengths
            self.keys, self.own = "contiguous", [slice(a, b) for a, b in zip(ends, ends[1:])]
        elif name == "ranges":
            self.table = self.tables = ends
        elif name == "listed":
            order = rng.permutation(length)
            self.tables = [order[a:b].astype(np.int64) for a, b in zip(ends, ends[1:])]

    def part(self, array, comm, dim):
        if self.own is not None:
            return array[(slice(None),) * dim + (self.own[comm.rank],)]
        return longspan.shard(array, self.keys, comm=comm, dim=dim, table=self.table_of(comm))

    def table_of(self, comm):
        return self.tables[comm.rank] if self.name == "listed" else self.table

    def whole(self, part, comm, dim):
        return longspan.unshard(part, self.keys, comm=comm, dim=dim, tables=self.tables)


CUTS = ("contiguous", "any", "zigzag", "striped", ("interleaved", 1), ("interleaved", 3), "interleaved", "ranges",
        "listed")


def pairs(comm, seed, count, make=np.copy):
    """Random cases in which a function takes the results of another. `make`: NumPy array -> array."""
    rng = np.random.default_rng(seed)  # the same on every rank
    for number in range(count):
        batch = int(rng.integers(0, 3))  # 0: three dimensions
        length = int(rng.choice([0, 1, 2, 7, 40, 130, 300]))
        tokens = int(rng.integers(0, min(length, 30) + 1))
        keys, rows = (Cut(rng, CUTS[rng.integers(len(CUTS))], n, comm.size) for n in (length, tokens))
        case = f"case {number} of seed {seed}: batch {batch}, {length} keys by {keys.name}, {tokens} rows by {rows.name}"
        try:
            one_of_pairs(comm, rng, batch, length, tokens, keys, rows, make)
        except Exception as error:
            error.add_note(case)
            raise
    return count


def one_of_pairs(comm, rng, batch, length, tokens, keys, rows, make):
    lead, dim = ((batch,), 1) if batch else ((), 0)
    q, k, v = (make(rng.standard_normal((*lead, n, h, 16), dtype=np.float32))
               for n, h in ((tokens, 4), (length, 2), (length, 2)))
    causal, by = bool(rng.integers(2)), ("zigzag", "striped", longspan.Sharding("interleaved", 2))[rng.integers(3)]
    pairs_of = [attention(*(t[b] for t in (q, k, v)), causal=causal) for b in range(batch)] if batch else None
    right, right_lse = map(np.stack, zip(*pairs_of)) if batch else attention(q, k, v, causal=causal)

    def close(out, lse):
        assert type(out) is type(q)
        assert_close(out, right)
        assert_lse_close(lse, right_lse)

    own_k, own_v = (keys.part(a, comm, dim) for a in (k, v))
    for own, all_ in ((own_k, k), (own_v, v), (rows.part(q, comm, dim), q)):
        again = (rows if all_ is q else keys).whole(own, comm, dim)
        assert type(again) is type(all_) and (host(again) == host(all_)).all()
        again += 1  # it is the caller's own
    given = dict(comm=comm, causal=causal, keys=keys.keys, return_lse=True)
    if keys.name in ("ranges", "listed"):
        table = np.asarray(keys.table_of(comm), np.int64)
        given["key_table"] = make(table if batch < 2 else np.stack([table] * batch))
    if keys.name == "listed":
        if batch > 1:
            return  # a list describes one sequence
        given["total_keys"] = length  # a position may be missing
    close(*longspan.attend(q, own_k, own_v, **given))

    # Rows of the queries, and parts of the result.
    if batch < 2 or rows.name not in ("ranges", "listed"):
        dealt = dict(given, queries=rows.keys)
        if rows.name in ("ranges", "listed"):
            dealt["query_table"] = make(np.asarray(rows.table_of(comm), np.int64))
        if rows.name == "listed":
            dealt["total_queries"] = tokens
        out, lse = longspan.attend(rows.part(q, comm, dim), own_k, own_v, **dealt)
        close(rows.whole(out, comm, dim), rows.whole(lse, comm, dim))
    out, lse = longspan.attend(q, own_k, own_v, **given, results="heads")
    close(*(longspan.unshard(a, "heads", comm=comm, dim=dim + 1) for a in (out, lse)))
    out, lse = longspan.attend(q, own_k, own_v, **given, results=by)
    close(*(longspan.unshard(a, by, comm=comm, dim=dim) for a in (out, lse)))
    if keys.name not in ("any", "ranges", "listed"):
        layer = longspan.Attention(comm, heads=4, kv_heads=2, head_dim=16, dtype="float32", causal=causal,
                                   keys=keys.keys, max_queries=max(1, tokens * max(1, batch)), max_batch=max(1, batch))
        close(*layer(q, own_k, own_v, return_lse=True))
    if batch or length == 0:
        return

    # One sequence: states that are merged, a cache that grows, and one that moves.
    right, right_lse = attention(q, k, v)
    if tokens:
        mine = longspan.attend(q, own_k[:], own_v[:], comm=longspan.alone(), return_lse=True)
        close(*longspan.cross_rank_merge(*mine, comm=comm, base="e"))
    if keys.name in ("striped", ("interleaved", 1), ("interleaved", 3), "interleaved"):
        right, right_lse = attention(q, k, v, causal=True)
        cache_k, cache_v = (make(np.full((1, length, 2, 16), np.nan, np.float32)) for _ in range(2))
        for cache, all_ in ((cache_k, k), (cache_v, v)):
            old = keys.part(all_[:length - tokens], comm, 0)
            cache[0, :len(old)] = old
        close(*longspan.attend(q, cache_k, cache_v, comm=comm, causal=True, keys=keys.keys, return_lse=True,
                               k_new=k[length - tokens:], v_new=v[length - tokens:],
                               cache_seqlens=[length - tokens]))
        assert (host(cache_k[0, :len(own_k)]) == host(own_k)).all()
    if keys.name not in ("any", "listed"):
        to_k, to_v = (make(np.full(host(keys_of).shape, np.nan, np.float32)) for keys_of in
                      (longspan.shard(k, by, comm=comm), longspan.shard(v, by, comm=comm)))
        longspan.reshard(own_k, own_v, to_k, to_v, comm=comm, lengths=[length], kv_heads=2, head_dim=16,
                         dtype="float32", keys=keys.keys, key_table=keys.table, to_keys=by)
        assert (host(longspan.unshard(to_k, by, comm=comm)) == host(k)).all()
        assert (host(longspan.unshard(to_v, by, comm=comm)) == host(v)).all()


def users_arguments(comm, seed, count):
    """Random caches, of which each sequence uses some row, with new keys in another number than rows, and rows at the
    first or the last positions."""
    rng = np.random.default_rng(seed)  # the same on every rank
    for number in range(count):
        try:
            one_of_users_arguments(comm, rng)
        except Exception as error:
            error.add_note(f"case {number} of seed {seed}")
            raise
    return count


def one_of_users_arguments(comm, rng):
    batch, tokens, block = int(rng.integers(1, 4)), int(rng.integers(0, 7)), int(rng.choice([1, 4, 128]))
    keys = longspan.Sharding("interleaved", block)
    news = None if rng.integers(2) else int(rng.integers(0, 7))
    alignment = "lower_right" if news is not None or rng.integers(2) else "upper_left"
    old = [int(n) for n in rng.choice([0, 1, 3, 40, 150, 300], batch)]
    lengths = [n + (news or 0) for n in old]
    rows = [int(row) for row in rng.permutation(batch + 2)[:batch]]
    whole = [rng.standard_normal((2, n, 2, 16), dtype=np.float32) for n in lengths]
    q = rng.standard_normal((batch, tokens, 4, 16), dtype=np.float32)
    cache = np.full((2, batch + 2, 330, 2, 16), np.nan, np.float32)
    for row, own, n in zip(rows, whole, old):
        mine = keys.shard(n, comm.rank, comm.size).positions()
        cache[:, row, :len(mine)] = own[:, mine]
    window = (int(rng.integers(0, 60)), -1) if rng.integers(2) else (-1, -1)
    options = dict(causal=bool(rng.integers(2)), softcap=float(rng.choice([0, 5])))
    slopes = rng.uniform(0, 0.5, (batch, 4)).astype(np.float32) if rng.integers(2) else None
    given = dict(options, comm=comm, keys=keys, window_size=window, causal_alignment=alignment, alibi_slopes=slopes,
                 cache_seqlens=old, return_lse=True)
    if news is not None:
        given["k_new"], given["v_new"] = np.stack([own[:, n:] for own, n in zip(whole, old)], 1)
    if rng.integers(2):
        given["cache_batch_idx"] = rows
        k, v = cache
    else:  # the rows are those of the sequences
        k, v = np.ascontiguousarray(cache[:, rows])
    right = [attention(q[b], *whole[b], slopes=None if slopes is None else slopes[b],
                       first=0 if alignment == "upper_left" else None, window=window, **options) for b in range(batch)]
    if tokens and rng.integers(2) and "k_new" not in given:
        by = ("zigzag", "striped")[rng.integers(2)]
        own_q = np.ascontiguousarray(longspan.shard(q, by, comm=comm, dim=1))[:]
        parts = longspan.attend(own_q, k, v, queries=by, total_queries=tokens, **given)
        out, lse = (longspan.unshard(part, by, comm=comm, dim=1) for part in parts)
    else:
        out, lse = longspan.attend(q, k, v, **given)
    for b in range(batch):
        assert_close(out[b], right[b][0])
        assert_lse_close(lse[b], right[b][1])
    if news is not None:
        for b, row in enumerate(rows if "cache_batch_idx" in given else range(batch)):
            mine = keys.shard(lengths[b], comm.rank, comm.size).positions()
            for stored, own in zip((k, v), whole[b]):
                assert (stored[row, :len(mine)] == own[mine]).all() and np.isnan(stored[row, len(mine):]).all()


def packed(comm, lengths, news, keys, queries, results, answers):
    """Sequences one after the other, each dealt out by itself."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((sum(n), h, 16), dtype=np.float32) for n, h in ((news, 4), (lengths, 2), (lengths, 2)))
    starts, first = np.cumsum([0, *news]).astype(np.int32), np.cumsum([0, *lengths])

    def mine(rule, ends):
        return np.concatenate([np.asarray(longspan.Sharding(*rule).shard(b - a, comm.rank, comm.size).positions()) + a
                               for a, b in zip(ends, ends[1:])]).astype(int)

    own = mine(keys, first)
    right = np.concatenate([attention(q[a:b], k[c:d], v[c:d], causal=True)[0]
                            for a, b, c, d in zip(starts, starts[1:], first, first[1:])])
    options = dict(comm=comm, causal=True, keys=longspan.Sharding(*keys), cu_seqlens_q=starts, cache_seqlens=lengths)
    rows = slice(None)
    if queries:
        rows = mine(queries, starts)
        options["queries"] = longspan.Sharding(*queries)
        if answers:
            options["total_queries"] = len(q)
    elif results:
        options["results"] = longspan.Sharding(*results)
    out = longspan.attend(q[rows], k[own], v[own], **options)
    assert_close(out, right[mine(results, starts) if results else rows])


def contradicts(comm, what):
    """A call that contradicts shard()."""
    q = np.ones((4, 2, 16), np.float32)
    k = np.ones((40, 2, 16), np.float32)
    batch = np.ones((2, 40, 2, 16), np.float32)
    zigzag, given = longspan.shard(k, "zigzag", comm=comm), dict(comm=comm)
    if what == "keys":
        return longspan.attend(q, zigzag, zigzag, **given)
    if what == "values":
        return longspan.attend(q, zigzag, longspan.shard(k, "striped", comm=comm), **given, keys="zigzag")
    if what == "a layer":
        return longspan.Attention(comm, heads=2, head_dim=16, dtype="float32", max_queries=4)(q, zigzag, zigzag)
    if what == "alone":
        return longspan.attend(q, zigzag, zigzag, keys="zigzag")
    if what == "queries":
        return longspan.attend(longspan.shard(q, "striped", comm=comm), zigzag, zigzag, **given, keys="zigzag")
    if what == "total":
        return longspan.attend(q, zigzag, zigzag, **given, keys="zigzag", total_keys=41)
    if what == "another whole":  # on one rank; reported on all
        k = longspan.shard(k if comm.rank else k[:20], "contiguous", comm=comm)
        return longspan.attend(q, k, k, **given)
    if what == "dimension":
        cut = longspan.shard(np.ones((2 * comm.size, 40, 2, 16), np.float32), "striped", comm=comm)
        return longspan.attend(batch, cut, cut, **given, keys="striped")
    if what == "for one rank":
        whole = longspan.shard(k, "zigzag", comm=longspan.alone())
        return longspan.attend(q, whole, whole, **given, keys="zigzag")
    if what == "packed":
        return longspan.attend(q, zigzag, zigzag, **given, keys="zigzag", cu_seqlens_q=[0, 2, 4], cache_seqlens=[20, 20])
    if what == "one rank only":
        return longspan.attend(q, zigzag if comm.rank == 1 else zigzag.copy(), zigzag.copy(), **given)
    if what == "all keys on every rank":
        return longspan.attend(q, k, k, **given, keys="zigzag", total_keys=40)
    if what == "contiguous, told":
        own = k[40 * comm.rank // comm.size:40 * (comm.rank + 1) // comm.size]
        return longspan.attend(q, own, own, **given, total_keys=40)
    if what == "a layer of any parts":
        own = k[:10 + comm.rank]
        return longspan.Attention(comm, heads=2, head_dim=16, dtype="float32", max_queries=4)(q, own, own)
    if what == "lengths of another layout":
        own = k[:10 + comm.rank]
        return longspan.attend(q, own, own, **given, keys="striped", queries=None)
    if what == "rules differ":
        return longspan.attend(q, k, k, **given, keys="striped" if comm.rank else "zigzag")
    if what == "new keys":
        cache = np.ones((1, 60, 2, 16), np.float32)
        layer = longspan.Attention(comm, heads=2, head_dim=16, dtype="float32", keys="striped")
        return layer.append(longspan.shard(k, "striped", comm=comm), k, cache, cache.copy(), total_keys=40)
    if what == "a cache that moves":
        return longspan.reshard(zigzag, zigzag, k, k, comm=comm, lengths=[40], kv_heads=2, head_dim=16, dtype="float32",
                                keys="striped")
    if what == "parts of unshard":
        return longspan.unshard(zigzag, "striped", comm=comm)
    if what == "layouts of unshard":
        return longspan.unshard(zigzag.copy(), "striped" if comm.rank else "zigzag", comm=comm)
    if what == "types of unshard":
        return longspan.unshard(zigzag.astype(np.float32 if comm.rank else np.float64), "zigzag", comm=comm)
    if what == "shapes of unshard":
        return longspan.unshard(zigzag[:, :1 + comm.rank % 2], "zigzag", comm=comm)
    raise ValueError(what)


def dropout_sharded(comm, q, k, v, dout, dlse, keys, queries, strategy):
    """out, lse and gradients of causal rows, whole."""
    def own(a, rule):
        return a if rule is None else np.ascontiguousarray(longspan.shard(a, rule, comm=comm))

    def whole(a, rule):
        return np.asarray(a) if rule is None else longspan.unshard(np.asarray(a), rule, comm=comm)

    layer = longspan.Attention(comm, heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[2], dtype="float32",
                               causal=True, keys=keys, queries=queries, strategy=strategy, max_queries=len(q),
                               max_seqlen_k=len(k), gradients=True, dropout_p=0.4)
    run = dict(total_keys=len(k), total_queries=None if queries is None else len(q), dropout_seed=[11, 12])
    own_q, own_k, own_v = own(q, queries), own(k, keys), own(v, keys)
    out, lse = layer(own_q, own_k, own_v, return_lse=True, **run)
    dq, dk, dv = layer.backward(own(dout, queries), own_q, own_k, own_v, out, lse, dlse=own(dlse, queries), **run)
    return *(whole(a, queries) for a in (out, lse, dq)), whole(dk, keys), whole(dv, keys)


def dropout_of_parts(comm, q, k, v):
    """The result of a batch whose tokens are cut in parts that longspan.shard would not make."""
    tokens = q.shape[1]
    cuts = [0, *(tokens - 7 * r for r in range(comm.size - 1, 0, -1)), tokens]
    mine = slice(cuts[comm.rank], cuts[comm.rank + 1])
    out = longspan.attend(*(np.ascontiguousarray(a[:, mine]) for a in (q, k, v)), comm=comm, queries="contiguous",
                          dropout_p=0.5, dropout_seed=[3])
    return np.concatenate([np.frombuffer(part, np.float32).reshape(2, -1, *out.shape[2:])
                           for part in comm.gather(np.ascontiguousarray(out).tobytes(), "parts")], 1)


def drawn_seeds(comm, q, k, v):
    """The seeds of two runs that are given none."""
    layer = longspan.Attention(comm, heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[2], dtype="float32",
                               max_queries=len(q), dropout_p=0.5)
    drawn = []
    for _ in range(2):
        layer(q, longspan.shard(k, "contiguous", comm=comm), longspan.shard(v, "contiguous", comm=comm), total_keys=len(k))
        drawn.append(layer.dropout_seed)
    return drawn
