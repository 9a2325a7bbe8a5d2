"""Every token is held once, arrays are cut and put together again."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import longspan

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
    (lambda: longspan.unshard(np.ones(3)), TypeError, "comm is None"),
    (lambda: longspan.unshard([np.ones(3), np.ones(9)], "striped"), longspan.InputError, "parts.0. has 3"),
    (lambda: longspan.unshard([]), longspan.InputError, "parts is empty"),
])
def test_what_is_wrong_is_named(call, error, says):
    with pytest.raises(error, match=says):
        call()
