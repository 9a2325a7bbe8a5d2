"""One rank holds each token; arrays are cut and put together again."""

import pickle

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import longspan
from longspan._shards import cut_of

LAYOUTS = st.sampled_from(["contiguous", "zigzag", "striped"]).map(longspan.Sharding) | st.builds(
    longspan.Sharding, st.just("interleaved"), st.integers(1, 200))


@hypothesis.given(LAYOUTS, st.integers(0, 900), st.integers(1, 7))
def test_every_token_once(sharding, length, ranks):
    seen = []
    for rank in range(ranks):
        shard = sharding.shard(length, rank, ranks)
        positions = np.asarray(shard.positions())
        assert positions.dtype == np.int64 and len(positions) == len(shard)
        assert (np.diff(positions) > 0).all()
        runs = [np.arange(a, b) for a, b in shard.intervals()]
        assert (np.concatenate([*runs, np.empty(0, int)]) == positions).all()
        seen += positions.tolist()
    assert sorted(seen) == list(range(length))


@hypothesis.given(LAYOUTS, st.integers(0, 500), st.integers(1, 5), st.integers(-2, 1))
def test_cut_and_put_together(sharding, length, ranks, dim):
    whole = np.random.default_rng(0).standard_normal((length, 3) if dim in (0, -2) else (3, length))
    parts = [longspan.shard(whole, sharding, rank=r, ranks=ranks, dim=dim) for r in range(ranks)]
    assert (longspan.unshard(parts, sharding, dim=dim) == whole).all()


def test_any_cut():
    whole = np.arange(10)
    table = [0, 7, 7, 10]
    parts = [longspan.shard(whole, "ranges", rank=r, ranks=3, table=table) for r in range(3)]
    assert [len(p) for p in parts] == [7, 0, 3]
    assert (longspan.unshard(parts, "ranges", tables=table) == whole).all()
    tables = [[9, 0, 4], [1, 2, 3, 5, 6, 7, 8]]
    parts = [longspan.shard(whole, "listed", rank=r, ranks=2, table=tables[r]) for r in range(2)]
    assert parts[0].tolist() == [9, 0, 4]
    assert (longspan.unshard(parts, "listed", tables=tables) == whole).all()


def test_parts_in_rank_order():
    """Parts of any lengths, as attention takes them, and heads as it returns them."""
    whole = np.random.default_rng(0).standard_normal((10, 8, 2))
    for ends in ([0, 3, 10], [0, 0, 10], [0, 4, 4, 10], [0, 10]):
        parts = [whole[a:b] for a, b in zip(ends, ends[1:])]
        assert (longspan.unshard(parts, "contiguous") == whole).all()
        assert (longspan.unshard(parts, "ranges") == whole).all()
        assert (longspan.unshard(parts, "ranges", tables=ends) == whole).all()
    for keys in ("heads", "contiguous"):
        assert (longspan.unshard([whole[:, :4], whole[:, 4:]], keys, dim=1) == whole).all()


def test_unshard_makes_a_new_array():
    whole = np.ones((4, 2), np.float32)
    comm = longspan.alone()
    for made in (longspan.unshard(longspan.shard(whole, "zigzag", comm=comm), "zigzag", comm=comm),
                 longspan.unshard([whole]), longspan.unshard([whole[:0], whole]),
                 longspan.unshard([whole[:0]], "striped"), longspan.unshard([whole[:0]] * 3, "zigzag")):
        made += 1
        assert not np.shares_memory(made, whole)
    assert (whole == 1).all()


def test_a_part_is_remembered():
    """By its identity: it and the arrays made from it are ordinary arrays."""
    whole = np.arange(40.0).reshape(20, 2)
    part = longspan.shard(whole, "zigzag", rank=1, ranks=3, dim=0)
    assert cut_of(part)[:5] == (longspan.Sharding("zigzag"), 1, 3, 20, 0)
    assert cut_of(np.asarray(part)) == cut_of(part)
    assert type(part) is np.ndarray and repr(part).startswith("array(")
    for made in (pickle.loads(pickle.dumps(part)), part[:], part.T, part + 0, part.copy(), whole,
                 np.concatenate([part]), part.astype(np.float32), part.view(np.int64)):
        assert cut_of(made) is None
    before = len(longspan._shards._cuts)
    kept = [longspan.shard(whole, "striped", rank=0, ranks=2) for _ in range(5)]
    assert len(longspan._shards._cuts) == before + 5
    del kept
    assert len(longspan._shards._cuts) == before


def test_values():
    assert longspan.Sharding("zigzag") == longspan.Sharding("zigzag") != longspan.Sharding("striped")
    assert len({longspan.Sharding(), longspan.Sharding("contiguous", 128)}) == 1
    assert repr(longspan.Sharding("interleaved", 64)) == "Sharding('interleaved', block=64)"
    assert longspan.Sharding("zigzag") != "zigzag"


@pytest.mark.parametrize("call, error, says", [
    (lambda: longspan.Sharding("spiral"), longspan.InputError, "layout is 'spiral'.*zigzag"),
    (lambda: longspan.Sharding(3), TypeError, "layout is of type 'int'"),
    (lambda: longspan.Sharding("interleaved", 0), longspan.InputError, "block"),
    (lambda: longspan.Sharding("interleaved", "4"), TypeError, "block is of type 'str'"),
    (lambda: longspan.Sharding().shard(-1, 0, 1), longspan.InputError, "length"),
    (lambda: longspan.Sharding().shard(5, 2, 2), longspan.InputError, "rank is 2"),
    (lambda: longspan.Sharding().shard(5, 0, 0), longspan.InputError, "ranks is 0"),
    (lambda: longspan.Sharding().shard(5, 0, 2 ** 40), longspan.InputError, "ranks is"),
    (lambda: longspan.Sharding("ranges").shard(5, 0, 2), longspan.InputError, "table is None"),
    (lambda: longspan.Sharding("ranges").shard(5, 0, 2, [0, 6, 5]), longspan.InputError, "descends"),
    (lambda: longspan.Sharding("ranges").shard(5, 0, 2, [0, 5]), longspan.InputError, "table has 2"),
    (lambda: longspan.Sharding("listed").shard(5, 0, 2, [5]), longspan.InputError, "position 5"),
    (lambda: longspan.Sharding().shard(5, 0, 2, [0, 3, 5]), longspan.InputError, "table is given"),
    (lambda: longspan.shard([1, 2], rank=0, ranks=1), TypeError, "array is of type 'list'"),
    (lambda: longspan.shard(np.ones(3), rank=0, ranks=1, dim=1), longspan.InputError, "dim is 1"),
    (lambda: longspan.shard(np.ones(3)), TypeError, "rank and ranks"),
    (lambda: longspan.shard(np.ones(3), rank=0, ranks=1, dim="0"), TypeError, "dim is of type 'str'"),
    (lambda: longspan.shard(np.ones(3), "spiral", rank=0, ranks=1), longspan.InputError, "keys is 'spiral'.*zigzag"),
    (lambda: longspan.shard(np.ones(3), 3, rank=0, ranks=1), TypeError, "keys is of type 'int'"),
    (lambda: longspan.shard(np.ones(3), comm=3), TypeError, "comm is of type 'int'"),
    (lambda: longspan.shard(np.ones(3), rank=0.0, ranks=1), TypeError, "rank is of type 'float'"),
    (lambda: longspan.shard(np.ones(3), comm=longspan.alone(), rank=0), longspan.InputError, "it says both"),
    (lambda: longspan.unshard(np.ones(3)), TypeError, "comm is None"),
    (lambda: longspan.unshard(np.ones(3), comm=3), TypeError, "comm is of type 'int'"),
    (lambda: longspan.unshard([np.ones(3), 4]), TypeError, "parts.1. is of type 'int'"),
    (lambda: longspan.unshard([np.ones(3), np.ones(9)], "striped"), longspan.InputError, "parts.0. has 3"),
    (lambda: longspan.unshard([np.ones((3, 2)), np.ones((3, 4))]), longspan.InputError,
     r"parts.1. is numpy float64 .3, 4., and parts.0. .*they may differ in dimension 0 alone"),
    (lambda: longspan.unshard([np.ones(3), np.ones(3, np.float32)]), longspan.InputError, "parts.1. is numpy float32"),
    (lambda: longspan.unshard([np.ones(3), np.ones((3, 1))]), longspan.InputError, "parts.1. is"),
    (lambda: longspan.unshard([]), longspan.InputError, "parts is empty"),
    (lambda: longspan.unshard([np.ones(3)] * 2, comm=longspan.alone()), longspan.InputError, "comm 1 ranks"),
    (lambda: longspan.unshard([np.ones(3)] * 2, "heads"), longspan.InputError, "dimension of the heads"),
    (lambda: longspan.unshard([np.ones(3)] * 2, "spiral"), longspan.InputError, "keys is 'spiral'"),
    (lambda: longspan.unshard([np.ones(3)] * 2, "listed"), longspan.InputError, "tables is None"),
    (lambda: longspan.unshard([np.ones(3)] * 2, tables=[0, 3, 6]), longspan.InputError, "tables is given"),
    (lambda: longspan.unshard(np.array([None]), comm=longspan.alone()), longspan.InputError, "type object"),
    (lambda: longspan.unshard([longspan.shard(np.ones(8), "striped", rank=r, ranks=2) for r in (1, 0)], "striped"),
     longspan.InputError, "parts.0. is rank 1's part of 2"),
    (lambda: longspan.unshard([longspan.shard(np.ones(8), "zigzag", rank=r, ranks=2) for r in (0, 1)], "striped"),
     longspan.InputError, "by 'zigzag' in dimension 0; rank 0's of 2 by 'striped'"),
])
def test_what_is_wrong_is_named(call, error, says):
    with pytest.raises(error, match=says):
        call()
