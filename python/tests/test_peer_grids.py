"""The tests of other projects for backward, on our functions of their names: a few cases of each, and with LONGSPAN_FULL_GRID
(tests/long.sh) every combination of their options, with lengths that are drawn."""

import inspect
import itertools
import os

import pytest

pytest.importorskip("torch")

import longspan
import peer_grids
import peer_jobs as jobs
import torch
from conftest import NEW_SEEDS
from longspan import ring_flash_attn as ring

FULL = bool(os.environ.get("LONGSPAN_FULL_GRID"))
SEED = int.from_bytes(os.urandom(4)) if NEW_SEEDS else 0


@pytest.mark.parametrize("name", peer_grids.GRIDS)
def test_grid(name):
    rounds = [(None, 3e7), (20, 4e9)] if FULL else [(2, 5e6)]  # every combination, and some of the greatest lengths
    for lengths, options in itertools.chain(*(peer_grids.cases(name, *one, SEED) for one in rounds)):
        say = f"{name} {lengths} {options}, seed {SEED}"
        try:
            peer_grids.run(name, lengths, options, SEED)
            assert name not in peer_grids.REFUSED, say
        except longspan.UnsupportedError as error:
            assert name in peer_grids.REFUSED and peer_grids.REFUSED[name] in str(error), say
        except Exception as error:
            error.add_note(say)
            raise


def test_a_grid_can_fail():
    """A scale that is wrong by 1 % is found."""
    q, k, v = (torch.randn(1, 2, 50, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    for factor in (1, 1.01):
        judge = peer_grids.Judge(lambda *t: longspan.torch.scaled_dot_product_attention(*t, scale=factor / 8), peer_grids.plain, [q, k, v])
        if factor == 1:
            judge.within(2, 3)
        else:
            with pytest.raises(AssertionError, match="the error is"):
                judge.within(2, 3)


# rule, kind, whether sequences are packed
RING = [(rule, kind, varlen) for rule, kinds in {"ring": (False, True), "zigzag": (False, True), "stripe": (False,), "llama3": (True,)}.items()
        for varlen in kinds for kind in ("qkvpacked", "kvpacked", "func")]
# theirs: [0, 120, 1248, 4232] and the like in bf16, 5 heads of 128 (of 8 by llama3), causal
STARTS = {"ring": [0, 120, 1248, 4232], "zigzag": [0, 128, 1248, 4240], "llama3": [0, 120, 1248, 4232]}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("rule", ["ring", "zigzag", "stripe", "llama3"])
def test_ring_flash_attention(torch_ranks, ranks, rule):
    for kind, varlen in ((kind, varlen) for one, kind, varlen in RING if one == rule):
        starts = [0, 16, 24, 80] if varlen else [0, 80]
        heads = dict(heads=4, kv_heads=4 if kind == "qkvpacked" else 2, dim=16)
        for more in (dict(causal=True, window=(-1, -1), slopes=False), dict(causal=False, window=(20, 9), slopes=varlen)):
            case = dict(heads, **more, dtype="float32", compiled=False)
            torch_ranks.values(ranks, jobs.ring_case, rule, kind, varlen, starts, *(case[n] for n in ORDER))


ORDER = ("heads", "kv_heads", "dim", "dtype", "causal", "window", "slopes", "compiled")


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rule", ["ring", "zigzag", "stripe", "llama3"])
def test_ring_flash_attention_at_their_sizes(torch_ranks, ranks, compiled, rule):
    for varlen in (varlen for one, kind, varlen in RING if one == rule and kind == "qkvpacked"):
        starts = STARTS[rule] if varlen else [0, 3824 if rule == "stripe" else 3816]
        torch_ranks.values(ranks, jobs.ring_case, rule, "qkvpacked", varlen, starts, 5, 5, 8 if rule == "llama3" else 128, "bfloat16", True,
                           (-1, -1), False, compiled)


def test_dropout_of_packed_sequences(torch_ranks):
    torch_ranks.values(2, jobs.ring_dropout)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_prepare_cu_seqlens(world, causal):
    """test_llama3_prepare_cu_seqlens: every row finds its sequence, and all keys that it may see."""
    for starts in ([0, 7, 14, 16], [0, 0, 8, 8, 16], [0, 16], [0, 1, 2, 3, 16]):
        part = starts[-1] // world
        for rank in range(world):
            rows, keys, longest_q, longest_k, places = ring.llama3_flash_attn_prepare_cu_seqlens(
                torch.tensor(starts, dtype=torch.int32), causal, rank, world)
            assert rows.dtype == keys.dtype == torch.int32 and len(rows) == len(keys)
            assert longest_q == int(rows.diff().max()) and longest_k == int(keys.diff().max())
            assert int(keys[-1]) == places.stop - places.start and int(rows[-1]) == part and rows[0] == keys[0] == 0
            for row in range(part):
                position = rank * part + row
                first = max(s for s in starts if s <= position)
                end = position + 1 if causal else min(s for s in starts if s > position)
                n = int(torch.searchsorted(rows, row, right=True)) - 1
                assert int(keys[n]) + places.start == first and end <= int(keys[n + 1]) + places.start
                if not causal:
                    assert end == int(keys[n + 1]) + places.start
                else:  # the last rows of a sequence are at its last keys
                    assert int(keys[n + 1]) - (int(rows[n + 1]) - row) + places.start == position


def test_wrong_calls_of_ring_flash_attention(torch_ranks):
    says = ["divided by the 2 ranks", r"[1, 2] sequences on the ranks", r"[2, 1] sequences on the ranks", "ascending starts",
            "cu_seqlens ends at 9", "local_k_slice begins at 3 on rank 1", "heads_k_stride is 3", "a multiple of the 2 ranks"]
    for messages in torch_ranks.values(2, jobs.wrong_ring_calls):
        for message, wanted in zip(messages, says, strict=True):
            assert message is not None and wanted in message, (message, wanted)


def test_names_are_those_of_ring_flash_attention():
    """The arguments, as version 0.1.8 has them."""
    tail = ["dropout_p", "softmax_scale", "causal", "window_size", "alibi_slopes", "deterministic", "return_attn_probs", "group"]
    of_llama3 = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride", "local_k_slice"]
    for rule, _, varlen in RING:
        name = f"{jobs.ring_name(rule)}_flash_attn{'_varlen' if varlen else ''}"
        packed = [] if not varlen else of_llama3 if rule == "llama3" else ["cu_seqlens", "max_seqlen"]
        for kind, first in (("", ["q", "k", "v"]), ("_kvpacked", ["q", "kv"]), ("_qkvpacked", ["qkv"])):
            function = getattr(ring, f"{name}{kind}_func")
            assert list(inspect.signature(function).parameters) == [*first, *packed, *tail], function.__name__
            assert function.__name__ in ring.__all__ and function.__doc__


CONTEXT = [case for case in itertools.product([True, False], [True, False], [True, False], ["allgather", "alltoall"], [True, False],
                                              ["bfloat16", "float32"]) if case[0] or not case[2]]  # load balance is of causal ones


@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallel(torch_ranks, ranks):
    """test/distributed/tensor/test_attention.py: causal, compiled, load balance, what travels, forward only."""
    for case in CONTEXT if FULL else [case for case in CONTEXT if not case[1]][ranks % 5::5]:
        torch_ranks.values(ranks, jobs.context_parallel_case, *case, *((8, 8, 64, 32) if FULL else (2, 4, 32, 32)))


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("causal", [True, False])
def test_context_parallel_of_a_model(torch_ranks, causal, rotate):
    torch_ranks.values(2, jobs.context_parallel_model, causal, rotate)
