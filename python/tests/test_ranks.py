"""Several ranks on CPUs: 2 and 3 processes that meet by from_exchange, and ranks of mpirun."""

import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import jobs
import longspan
from free_port import free_port
from oracle import assert_close, attention
from ranks import Ranks
from test_attend import numbers


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    made = Ranks(request.param)
    yield made
    assert made.end() == [0] * request.param


LAYOUTS = st.sampled_from(["contiguous", "zigzag", "striped"]) | st.builds(
    longspan.Sharding, st.just("interleaved"), st.sampled_from([1, 7, 128]))


@hypothesis.settings(max_examples=25, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(LAYOUTS, st.none() | LAYOUTS, st.integers(0, 400), st.booleans(), st.booleans(),
                  st.sampled_from(["float32", "bfloat16"]), st.integers(0, 2 ** 32 - 1))
def test_any_cut_is_exact(ranks, keys, queries, length, causal, window, dtype, seed):
    rng = np.random.default_rng(seed)
    tokens = int(rng.integers(0, min(length, 40) + 1))
    q = numbers(rng, (tokens, 4, 32), dtype)
    k, v = (numbers(rng, (length, 2, 32), dtype) for _ in range(2))
    options = dict(causal=causal, window_size=(int(rng.integers(0, 60)), -1) if window else (-1, -1))
    found = ranks.values(jobs.attend_sharded, q, k, v, keys, queries, options)
    right, right_lse = attention(q, k, v, causal=causal, window=options["window_size"])
    for out, lse in found:
        assert (np.asarray(out) == np.asarray(found[0][0])).all()
        assert_close(out, right, dtype)
        np.testing.assert_allclose(lse, right_lse, rtol=1e-5, atol=2e-5)


def test_what_a_function_returns_another_takes(ranks):
    """All pairs of shard, attend, its parts, unshard, layers, appends, merges, moves; any cut and length."""
    assert ranks.values(jobs.pairs, 1000 + ranks.size, 40) == [40] * ranks.size


@pytest.mark.parametrize("queries, results", [
    (("striped",), None), (("zigzag",), None), (("contiguous",), None), (("interleaved", 2), None),
    (None, ("striped",)), (None, ("zigzag",)), (None, ("interleaved", 2))])
def test_packed_sequences_of_dealt_out_rows(ranks, queries, results):
    """A rank may have more rows of many short sequences than of one sequence with as many rows."""
    for lengths, news in (([1, 2, 1], [1, 2, 1]), ([9, 0, 300, 5], [3, 0, 7, 5]), ([3] * 20, [1] * 20)):
        for answers in (True, False):
            ranks.values(jobs.packed, lengths, news, ("striped",), queries, results, answers)


@pytest.mark.parametrize("what, error, says", [
    ("keys", longspan.InputError, "k is rank .'s part of ., as longspan.shard cut it, by 'zigzag', and keys is 'contiguous': give keys='zigzag'"),
    ("values", longspan.InputError, "v is rank .*by 'striped', and keys is 'zigzag'"),
    ("a layer", longspan.InputError, "give keys='zigzag'"),
    ("alone", longspan.InputError, "comm is None.*give comm="),
    ("queries", longspan.InputError, "q is rank .*queries is None.*give queries='striped'"),
    ("total", longspan.InputError, "from 40 tokens, and total_keys is 41"),
    ("another whole", longspan.InputError, "from (20|40) keys, and all ranks together have"),
    ("dimension", longspan.InputError, "in dimension 0, and its tokens are dimension 1: give longspan.shard dim=1"),
    ("for one rank", longspan.InputError, "for one rank.*give longspan.shard the same comm"),
    ("packed", longspan.InputError, "one sequence of 40 tokens, and there are 2"),
    ("one rank only", longspan.InputError, "k is rank 1's part.*give keys='zigzag'"),
    ("all keys on every rank", longspan.InputError, "k has 40 keys on rank .*gives that rank"),
    ("contiguous, told", longspan.InputError, "multiples of 128.*leave total_keys out"),
    ("a layer of any parts", longspan.InputError, r"multiples of 128.*key_table=\[0, 10, 21"),
    ("lengths of another layout", longspan.InputError, "k has .* keys on rank ., of .* on all ranks; the layout 'striped'"),
    ("rules differ", longspan.UsageError, "'keys' differs between ranks: rank 0 has zigzag, rank 1 has striped"),
    ("new keys", longspan.InputError, "k_new is rank .*every rank gives all new keys"),
    ("a cache that moves", longspan.InputError, "k is rank .*give keys='zigzag'"),
    ("parts of unshard", longspan.InputError, "parts is rank .*by 'striped' in dimension 0 is wanted"),
    ("layouts of unshard", longspan.UsageError, "'keys' differs between ranks in unshard"),
    ("types of unshard", longspan.UsageError, "'dtype' differs"),
    ("shapes of unshard", longspan.InputError, "they may differ in dimension 0 alone"),
])
def test_calls_that_contradict_the_cut(ranks, what, error, says):
    for rank, (kind, found) in enumerate(ranks(jobs.contradicts, what)):
        assert kind == "error" and type(found) is error, (rank, kind, found)
        assert re.search(says, str(found)), found


def test_two_ranks_have_the_bits_of_one(ranks, rng):
    if ranks.size != 2:
        pytest.skip("3 does not divide 64: exact, other last bits")
    q, k, v = numbers(rng, (20, 4, 64)), *numbers(rng, (2, 1000, 2, 64))
    alone = longspan.attend(q, k, v, causal=True)
    for out, _ in ranks.values(jobs.attend_sharded, q, k, v, "contiguous", None, dict(causal=True)):
        assert (out == alone).all()


@pytest.mark.parametrize("strategy", ["gather-states", "scatter-states", "heads"])
@pytest.mark.parametrize("results", ["heads", "striped", longspan.Sharding("interleaved", 2), "all"])
def test_parts_of_the_result(ranks, rng, strategy, results):
    q, (k, v) = numbers(rng, (7, 12, 32)), numbers(rng, (2, 90, 6, 32))
    options = dict(causal=True, strategy=strategy)
    if strategy == "heads":
        options["max_seqlen_k"] = 90
    right, right_lse = attention(q, k, v, causal=True)
    found = ranks.values(jobs.attend_parts, q, k, v, results, options)
    rows = 0
    for rank, (out, lse, same) in enumerate(found):
        assert same
        part = slice(None), slice(None)
        if results == "heads":
            part = slice(None), slice(12 * rank // ranks.size, 12 * (rank + 1) // ranks.size)
        elif results == "striped":
            part = slice(rank, None, ranks.size), slice(None)
        elif results != "all":
            part = [t for t in range(7) if t // 2 % ranks.size == rank], slice(None)
        assert_close(out, right[part])
        np.testing.assert_allclose(lse, right_lse[part], rtol=1e-5, atol=2e-5)
        rows += len(out)
    assert rows == (7 if results not in ("heads", "all") else 7 * ranks.size)


def test_two_levels(rng):
    """Two nodes of two ranks, over TCP: heads inside a node, another strategy between them."""
    q, (k, v) = numbers(rng, (30, 6, 32)), numbers(rng, (2, 90, 2, 32))
    right = attention(q, k, v, causal=True)[0]
    made = Ranks(4)
    options = dict(causal=True, ranks_per_node=2, max_seqlen_k=90)
    for strategy in longspan.strategies():
        if "+" not in strategy:
            continue
        found = made.values(jobs.attend_sharded, q, k, v, "zigzag", "striped", dict(options, strategy=strategy))
        for out, _ in found:
            assert_close(out, right)
    for rank, (out, _, same) in enumerate(made.values(jobs.attend_parts, q, k, v, "striped",
                                                      dict(options, strategy="heads+scatter-states"))):
        assert same
        assert_close(out, right[rank::4])
    assert made.end() == [0] * 4


def test_a_cache_that_grows(ranks, rng):
    prompt = numbers(rng, (2, 50, 2, 32))
    q, (k, v) = numbers(rng, (20, 4, 32)), numbers(rng, (2, 20, 2, 32))
    whole = [np.concatenate([a, b]) for a, b in zip(prompt, (k, v))]
    right = attention(q, *whole, causal=True)[0]
    for out in ranks.values(jobs.grow, prompt, (q, k, v)):
        assert_close(out, right)


def test_listed_keys_that_overlap_or_are_missing(ranks, rng):
    q, (k, v) = numbers(rng, (3, 4, 32)), numbers(rng, (2, 90, 2, 32))
    tables = np.array_split(rng.permutation(90), ranks.size)
    right = attention(q, k, v)[0]
    for out in ranks.values(jobs.listed, q, k, v, tables):
        assert_close(out, right)
    wrong = [table.copy() for table in tables]
    taken, wrong[0][0] = int(wrong[0][0]), wrong[-1][0]
    for kind, error in ranks(jobs.listed, q, k, v, wrong):
        assert kind == "error" and type(error) is longspan.InputError
        assert (f"position {taken} is listed by no rank" in str(error)
                or f"position {wrong[0][0]} is listed by rank 0 and rank {ranks.size - 1}" in str(error))
    ranks.values(jobs.listed, q, k, v, tables)  # and they go on


@pytest.mark.parametrize("keys", ["contiguous", "zigzag", "striped"])
def test_a_cache_moves_to_pages_of_one_rank(ranks, rng, keys):
    lengths = [50, 0, 7, 133]
    k, v = numbers(rng, (2, sum(lengths), 2, 32))
    found = ranks.values(jobs.reshard, k, v, lengths, dict(keys=keys))
    assert (found[-1][0] == k).all() and (found[-1][1] == v).all()
    traffic = [one[2] for one in found]
    assert sum(t.sent for t in traffic) == traffic[-1].received
    assert traffic[-1].received + traffic[-1].kept == k.nbytes + v.nbytes


def test_the_merge_of_finished_results(ranks, rng):
    """Over keys that each rank has: some of the ranks have none."""
    q, (k, v) = numbers(rng, (5, 6, 32)), numbers(rng, (2, 90, 6, 32))
    cuts = [0, *sorted(rng.integers(0, 91, ranks.size - 1)), 90]
    found = [attention(q, k[a:b], v[a:b]) for a, b in zip(cuts, cuts[1:])]
    parts, lses = ([one.astype(np.float32) for one in ones] for ones in zip(*found))
    right, right_lse = attention(q, k, v)
    for base, unit in (("e", 1), (2, np.log(2))):
        given = [(lse / unit).astype(np.float32) for lse in lses]
        whole = ranks.values(jobs.merge, parts, given, dict(base=base))
        scattered = ranks.values(jobs.merge, parts, given, dict(base=base, scatter_heads=True))
        for out, lse in whole:
            assert (out == whole[0][0]).all()
            assert_close(out, right)
            np.testing.assert_allclose(lse, right_lse / unit, rtol=1e-5, atol=1e-5)
        assert (np.concatenate([out for out, _ in scattered], 1) == whole[0][0]).all()
        assert (np.concatenate([lse for _, lse in scattered], 1) == whole[0][1]).all()
    for is_same, part, lse in ranks.values(jobs.merge_in_place, parts, lses):
        assert is_same
        assert_close(part, right)
    for kind, error in ranks(jobs.merge, parts, lses, dict(base="10")):
        assert kind == "error" and isinstance(error, longspan.InputError) and "base is '10'" in str(error)
    for rank, (kind, error) in enumerate(ranks(jobs.merge, [p[:r + 1] for r, p in enumerate(parts)],
                                               [x[:r + 1] for r, x in enumerate(lses)], dict(base="e"))):
        assert kind == "error" and isinstance(error, longspan.UsageError), error
    ranks.values(jobs.gathers)


def test_communicators(ranks):
    for rank, found in enumerate(ranks.values(jobs.gathers)):
        parts, half, place, is_none, device, gpu, text = found
        assert parts == [bytes([r]) * r + b"\0\n" for r in range(ranks.size)]
        assert (half, place) == (len(range(rank % 2, ranks.size, 2)), rank // 2)
        assert is_none == (rank == 0) and (device, gpu) == ("cpu", None)
        assert f"rank {rank} of {ranks.size}" in text
    assert ranks.values(jobs.several, 5) == [[b"%d" % i for i in range(6)]] * ranks.size


def test_ranks_that_disagree(ranks, rng):
    q, k, v = numbers(rng, (3, 5, 2, 16))
    for kind, error in ranks(jobs.disagree, q, k, v):
        assert kind == "error" and isinstance(error, longspan.UsageError), error
        assert "causal" in str(error)
    for kind, error in ranks(jobs.disagree_in_lengths, q, k, v):
        assert kind == "error" and isinstance(error, longspan.UsageError), error
        assert "'cache_seqlens' differs" in str(error)
    ranks.values(jobs.gathers)


@pytest.mark.parametrize("orders, says", [([0, 1], "causal"), ([2, 3], "layer"), ([4, 5], "nan_is_empty")])
def test_ranks_that_make_two_calls_in_different_orders(ranks, rng, orders, says):
    """Also where all layers exist already, so that making one compares nothing."""
    q, k, v = numbers(rng, (3, 4 * ranks.size, 2, 16))
    for kind, error in ranks(jobs.calls_in_order, [orders] * (ranks.size - 1) + [orders[::-1]], q, k, v):
        assert kind == "error" and isinstance(error, longspan.UsageError), error
        assert f"'{says}' differs between ranks" in str(error)
    ranks.values(jobs.gathers)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_calls_is_right_or_refused(ranks, seed):
    rng = np.random.default_rng(seed)
    q, k, v = numbers(rng, (3, 4 * ranks.size, 2, 16))
    causal, full = (attention(q, k, v, causal=c)[0] for c in (True, False))
    wanted = [causal, full, full, full, q, q, full]
    order = rng.integers(0, len(wanted), 5)
    other = order.copy()
    if seed % 4 != 0:
        other[rng.integers(0, 5)] = rng.integers(0, len(wanted))
    orders = [order] * ranks.size
    orders[rng.integers(0, ranks.size)] = other
    found = ranks(jobs.calls_in_order, orders, q, k, v)
    if (order == other).all():
        for kind, results in found:
            assert kind == "value", results
            for i, result in zip(order, results):
                assert_close(result, wanted[i])
    else:
        for kind, error in found:
            assert kind == "error" and isinstance(error, longspan.UsageError), error
            assert "differs between ranks" in str(error)


def test_a_rank_that_makes_a_layer_while_others_run_theirs(rng):
    made = Ranks(2, deadline=1.5)
    q, k, v = numbers(rng, (3, 8, 2, 16))
    for kind, error in made(jobs.makes_another, q, k, v):
        assert kind == "error" and isinstance(error, longspan.UsageError), error
        assert "'softcap' differs between ranks" in str(error)
    assert made.end() == [0, 0]


def test_what_differs_has_its_python_name(ranks, rng):
    q, k, v = numbers(rng, (3, 5, 2, 16))
    if ranks.size == 1:
        pytest.skip("one rank agrees with itself")
    for name, values in {"softmax_scale": (1.0, 2.0), "window_size": ((4, 0), (5, 0)), "softcap": (0.0, 9.0),
                         "max_seqlen_k": (50, 60), "max_seqlen_q": (50, 60), "k_descale": (None, 2.0),
                         "alibi_slopes": (None, [1.0, 2.0])}.items():
        for kind, error in ranks(jobs.disagree_in, name, values, q, k, v):
            assert kind == "error" and isinstance(error, longspan.UsageError), error
            assert f"'{name}" in str(error)
    for kind, error in ranks(jobs.disagree_in_dtype, q, k, v):
        assert kind == "error" and "'q.dtype' differs" in str(error), error
    for kind, error in ranks(jobs.disagree_in_move):
        assert kind == "error" and "'to_key_table' differs" in str(error), error


def test_a_batch_of_no_sequences_is_one_on_all_ranks(ranks, rng):
    for shape in ranks.values(jobs.attend_nothing):
        assert shape == (0, 3, 2, 16)


def test_a_rank_that_stays_away(rng):
    made = Ranks(2, deadline=2.0)
    q, k, v = numbers(rng, (3, 5, 2, 16))
    (kind, error), stayed = made(jobs.stay_away, 1, q, k, v)
    assert kind == "error" and isinstance(error, longspan.RankError), error
    assert error.rank == 1 and error.step and "Rank 1" in str(error)
    assert stayed[1] == "stayed away"
    assert made.end() == [0, 0]


def test_a_rank_that_dies(rng):
    made = Ranks(3)
    q, k, v = numbers(rng, (3, 5, 2, 16))
    begin = time.monotonic()
    found = made(jobs.die, 1, q, k, v)
    assert time.monotonic() - begin < 15  # less than the deadline: its connection has ended
    assert found[1][0] == "dead"
    for rank in (0, 2):
        kind, error = found[rank]
        assert kind == "error" and isinstance(error, longspan.RankError) and error.rank == 1, error
    assert made.end() == [0, 7, 0]


def test_a_rank_that_gives_up():
    made = Ranks(2)
    gave, (kind, error) = made(jobs.give_up, 0)
    assert gave == ("value", "gave up")
    assert kind == "error" and isinstance(error, longspan.RankError) and "enough of it" in str(error)
    assert made.end() == [0, 0]


def test_interrupted_while_it_waits(rng):
    made = Ranks(2)
    q, k, v = numbers(rng, (3, 5, 2, 16))
    waited, answers = made.values(jobs.interrupted, 0, q, k, v)
    assert 0.4 < waited < 5  # the deadline is 20 s
    assert "Rank 0 gave up: it was interrupted" in answers
    assert made.end() == [0, 0]


@pytest.mark.parametrize("rank, listens", [(0, False), (1, False), (1, True)])
def test_interrupted_while_it_meets(monkeypatch, rank, listens):
    """Ctrl-C works while rank 0 waits for others, and while others look for it."""
    listener = socket.create_server(("127.0.0.1", 0))  # accepts connections, and sends nothing
    port = listener.getsockname()[1] if listens else free_port()
    clear_launchers(monkeypatch)
    for name, value in dict(RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", LONGSPAN_PORT=port).items():
        monkeypatch.setenv(name, str(value))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        longspan.from_environment(deadline=30)
    assert time.monotonic() - begin < 10
    timer.join()
    signal.signal(signal.SIGINT, before)
    listener.close()


def test_half_of_a_launchers_variables(monkeypatch):
    clear_launchers(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(longspan.UsageError, match="WORLD_SIZE=2 is set, but RANK and MASTER_ADDR are not"):
        longspan.from_environment()


def clear_launchers(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")) or name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
            monkeypatch.delenv(name)


def test_an_end_is_told_to_later_calls_as_such(rng):
    """These do not have the argument that the first error names."""
    made = Ranks(2)
    for first, later in made.values(jobs.disagree_and_go_on, *numbers(rng, (3, 5, 2, 16))):
        assert first.startswith("'cache_seqlens' differs between ranks")
        assert later.startswith("The communicator had ended before this call, at '") and first in later
    assert made.end() == [0, 0]


def test_exchanges_that_fail(ranks):
    assert ranks.values(jobs.failing_exchange) == ["'no such thing'"] * ranks.size
    for what, error, says in [("text", "TypeError", "what exchange returns is of type 'str'"),
                              ([1, 2, 3], "TypeError", "what exchange returns is of type 'int'"),
                              ([b"x"], "UsageError", ""), ([b"x"] * ranks.size, "UsageError", "")]:
        for name, text in ranks.values(jobs.wrong_exchange, what):
            assert name == error and says in text, text


@pytest.mark.parametrize("args, error, says", [
    ((0, 0, len), longspan.InputError, "size is 0"), ((2, 2, len), longspan.InputError, "rank is 2"),
    ((0, 2 ** 70, len), longspan.InputError, "size is past"), (("0", 2, len), TypeError, "rank is of type 'str'"),
    ((0, 2, 7), TypeError, "exchange is of type 'int'")])
def test_from_exchange_names_what_is_wrong(args, error, says):
    with pytest.raises(error, match=says):
        longspan.from_exchange(*args)


def test_after_a_fork(rng):
    """The child does not have the threads of the parent's layers; it has its own."""
    q, k, v = numbers(rng, (3, 300, 4, 64))
    right = longspan.attend(q, k, v, causal=True)
    merged = longspan.merge_states(q[:, None], np.zeros((300, 1, 4), np.float32), base=2)[0]
    child = os.fork()
    if child == 0:
        same = (longspan.attend(q, k, v, causal=True) == right).all()
        same &= (longspan.merge_states(q[:, None], np.zeros((300, 1, 4), np.float32), base=2)[0] == merged).all()
        os._exit(0 if same else 1)
    end = time.monotonic() + 30
    while (status := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(child, 9)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status[1]) == 0


MPIRUN = shutil.which("mpirun")


def run_under_mpi(script, count=2):
    env = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                        "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none",
                        "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
    done = subprocess.run([MPIRUN, "-np", str(count), sys.executable, "-c", script], env=env, text=True,
                          capture_output=True, timeout=120, cwd=pathlib.Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


ATTENDS = r"""
import numpy as np
import jobs
from oracle import assert_close, attention
rng = np.random.default_rng(3)
q, k, v = (rng.standard_normal((50, 2, 16), dtype=np.float32) for _ in range(3))
out, _ = jobs.attend_sharded(comm, q, k, v, "zigzag", "zigzag", dict(causal=True))
assert_close(out, attention(q, k, v, causal=True)[0])
print(f"rank {comm.rank} of {comm.size} is right\n", end="", flush=True)
"""


# """A process that a rank starts inherits its launcher's variables; one that it forks also its memory.
CHILDREN = r"""
import os, subprocess, sys
asks = "import longspan\ntry: longspan.from_environment()\nexcept longspan.UsageError as error: print(error)"
child = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, timeout=60)
assert "MPI takes one process a rank" in child.stdout and child.returncode == 0, child
pid = os.fork()
if pid == 0:
    try:
        longspan.from_environment()
    except longspan.UsageError as error:
        os._exit(0 if "forked from has started MPI" in str(error) else 2)
    os._exit(1)
assert os.waitpid(pid, 0)[1] == 0
comm.barrier("after the children")
"""


@pytest.mark.skipif(not (MPIRUN and longspan._core.has_mpi), reason="this build or machine has no MPI")
def test_ranks_of_mpirun():
    for script in ("import longspan; comm = longspan.from_environment()" + ATTENDS,
                   "import longspan; kept = comm = longspan.from_environment()" + CHILDREN + ATTENDS):
        assert sorted(run_under_mpi(script).splitlines()) == [f"rank {r} of 2 is right" for r in range(2)]


@pytest.mark.skipif(not (MPIRUN and longspan._core.has_mpi), reason="this build or machine has no MPI")
def test_ranks_of_mpi4py():
    pytest.importorskip("mpi4py")
    script = "from mpi4py import MPI; import longspan; comm = longspan.from_mpi4py(MPI.COMM_WORLD)"
    assert sorted(run_under_mpi(script + ATTENDS).splitlines()) == [f"rank {r} of 2 is right" for r in range(2)]


def test_torchrun_names(tmp_path):
    """The variables that torchrun sets, without torch: ranks meet over TCP."""
    script = "import longspan; comm = longspan.from_environment()" + ATTENDS
    port = free_port()
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_"))}
    ranks = [subprocess.Popen([sys.executable, "-c", script], text=True, stdout=subprocess.PIPE,
                              cwd=pathlib.Path(__file__).parent,
                              env=clean | {"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": "2",
                                           "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                                           "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": str(port)})
             for r in range(2)]
    answers = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert answers == [f"rank {r} of 2 is right\n" for r in range(2)]
