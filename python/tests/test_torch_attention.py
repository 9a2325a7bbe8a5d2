"""scaled_dot_product_attention and ContextParallelAttention on gloo ranks, against float64."""

import re
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import pytest

pytest.importorskip("torch")

import longspan
import longspan.torch as lt
import torch
import torch.nn.functional as F
import torch_jobs as jobs
from device import DEVICE
from torch.nn.attention.bias import causal_upper_left

LAYOUTS = ("contiguous", "zigzag", "striped", "interleaved:1", "interleaved:7", "interleaved")
CASES = st.fixed_dictionaries(dict(
    seed=st.integers(0, 2 ** 32 - 10), batch=st.integers(1, 3), kv_heads=st.integers(1, 2), keys=st.integers(0, 150),
    dim=st.sampled_from([8, 15, 16, 21, 32]), dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    layout=st.sampled_from(LAYOUTS), queries=st.sampled_from(["as keys", "zigzag", "striped", None]),
    format=st.sampled_from(["bhtd", "bthd"]), causal=st.booleans(), window=st.booleans(), softcap=st.booleans(),
    slopes=st.booleans(), sinks=st.booleans(), strided=st.booleans(), apart=st.booleans(), expanded=st.booleans(),
    first_rows=st.booleans(),
    strategy=st.sampled_from(["auto", "gather-states", "gather-kv"])))


@st.composite
def cases(draw):
    case = draw(CASES)
    case["heads"] = case["kv_heads"] * draw(st.integers(1, 3))
    case["tokens"] = draw(st.sampled_from([case["keys"], min(1, case["keys"]), case["keys"] // 2]))
    if case["queries"] != "as keys" and case["queries"] is not None:
        case["queries"] = case["layout"]  # the layer's unshard supports one layout
    if case["queries"] is None and case["strategy"] == "gather-kv":
        case["strategy"] = "auto"  # it needs max_seqlen_k, which has no use for whole rows
    return case


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_shape_stride_and_type(torch_ranks, ranks):
    @hypothesis.given(st.lists(cases(), min_size=8, max_size=8))
    @hypothesis.settings(max_examples=8)
    def check(drawn):
        torch_ranks.values(ranks, jobs.any_shape, drawn)

    check()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_batch_without_rows_whose_keys_are_cut_by_a_table(torch_ranks, ranks):
    case = {"seed": 0, "batch": 2, "kv_heads": 1, "keys": 1, "dim": 8, "dtype": "float32", "layout": "contiguous",
            "queries": "as keys", "format": "bhtd", "causal": False, "window": False, "softcap": False,
            "slopes": False, "sinks": False, "strided": False, "strategy": "auto", "heads": 1, "tokens": 0}
    torch_ranks.values(ranks, jobs.any_shape, [case])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_decode(torch_ranks, ranks):
    for total_keys in (True, False):
        torch_ranks.values(ranks, jobs.decode, total_keys, False)
    torch_ranks.values(ranks, jobs.decode, True, True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cache_that_grows(torch_ranks, ranks):
    torch_ranks.values(ranks, jobs.grow, "interleaved:4")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_documents(torch_ranks, ranks):
    for layout in ("zigzag", "contiguous", "striped"):
        for strategy in ("gather-kv", "gather-states"):
            torch_ranks.values(ranks, jobs.documents, layout, strategy)
            torch_ranks.values(ranks, jobs.padded_documents, layout, strategy)


@pytest.mark.parametrize("tokens", [63, 256, 5])
def test_contiguous_parts_of_torch_chunk(torch_ranks, tokens):
    torch_ranks.values(3, jobs.contiguous_by_chunk, tokens)


def test_what_a_function_returns_another_takes(torch_ranks):
    if DEVICE != "cpu":
        pytest.skip("the tables of the jobs are in CPU memory")
    assert torch_ranks.values(2, jobs.pairs, 7, 12) == [12, 12]


@pytest.mark.parametrize("what, says", [
    ("keys", "key is rank .*by 'striped', and keys is 'zigzag'"), ("dimension", "its tokens are dimension 2"),
    ("a layer", "by 'striped', and layout is 'zigzag': give layout='striped'"), ("unshard", "the tensor is rank .*by 'zigzag' in dimension 2 is wanted"),
    ("total", "gives that rank")])
def test_calls_that_contradict_the_cut(torch_ranks, what, says):
    for kind, error in torch_ranks(2, jobs.contradicts, what):
        assert kind == "error" and type(error) is longspan.InputError and re.search(says, str(error)), error


def test_communicators(torch_ranks):
    torch_ranks.values(2, jobs.kept)
    torch_ranks.values(2, jobs.own_communicator)


def test_communicators_are_let_go(torch_ranks):
    """A given one when nobody holds it, that of a process group when the group is destroyed."""
    torch_ranks.values(2, jobs.let_go)
    torch_ranks.values(torch_ranks.size, jobs.destroyed)  # all have made as many groups then


def test_layers_are_copied_and_pickled(torch_ranks):
    torch_ranks.values(torch_ranks.size, jobs.copied)


def test_names_are_of_one_process():
    """In another process a graph or a layer finds the same ranks, or none."""
    given = lt._groups.name_of(longspan.alone(), None, DEVICE)
    with pytest.raises(longspan.UsageError, match="no such communicator"):
        lt._groups.known(given)  # nobody holds it
    script = "import longspan, longspan.torch as lt; c = longspan.alone(); print(lt._groups.name_of(c, None, 'cpu'))"
    names = {lt._groups.name_of(longspan.alone(), None, DEVICE) for _ in range(3)}
    names.add(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip())
    assert len(names) == 4


def test_strides_of_torch(rng):
    """[batch, heads, tokens, dim], dense, transposed and expanded; three dimensions."""
    q, k, v = torch.randn(3, 3, 4, 20, 16)
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for layout in (lambda t: t, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
                   lambda t: t.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)):
        out = lt.scaled_dot_product_attention(*(layout(t) for t in (q, k, v)), is_causal=True)
        torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)
    out = lt.scaled_dot_product_attention(q[0], k[0], v[0], is_causal=True)
    torch.testing.assert_close(out, right[0], rtol=1e-5, atol=1e-5)
    one = k[:1].expand(3, -1, -1, -1)
    torch.testing.assert_close(lt.scaled_dot_product_attention(q, one, one), F.scaled_dot_product_attention(q, one, one),
                               rtol=1e-5, atol=1e-5)
    empty = lt.scaled_dot_product_attention(q[:0], k[:0], v[:0])
    assert empty.shape == (0, 4, 20, 16)


def test_sinks_and_slopes():
    """Learned sinks are weights; slopes are constants, which neither to_empty nor a cast touches."""
    slopes = torch.rand(4)
    layer = lt.ContextParallelAttention(sinks=torch.nn.Parameter(torch.ones(4)), alibi_slopes=slopes)
    other = lt.ContextParallelAttention(sinks=torch.zeros(4), alibi_slopes=slopes)
    assert list(layer.state_dict()) == list(other.state_dict()) == ["sinks"]
    assert isinstance(layer.sinks, torch.nn.Parameter) and [name for name, _ in layer.named_parameters()] == ["sinks"]
    assert not list(other.parameters()) and [name for name, _ in other.named_buffers()] == ["sinks"]
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.sinks, torch.ones(4))
    q, k, v = torch.randn(3, 2, 4, 9, 16)
    with torch.no_grad():
        right = lt.scaled_dot_product_attention(q, k, v, sinks=torch.ones(4), alibi_slopes=slopes)
        for one in (layer, other):
            assert torch.equal(one(q, k, v), right)
            one.to("meta").to_empty(device=DEVICE)
            one.sinks.fill_(float("nan"))
            one.load_state_dict({"sinks": torch.ones(4)})
            assert torch.equal(one(q, k, v), right)
        layer.bfloat16()
        assert layer.sinks.dtype == torch.bfloat16 and torch.equal(layer.alibi_slopes, slopes)
        layer.sinks = torch.nn.Parameter(torch.zeros(4))
        assert torch.equal(layer(q, k, v), lt.scaled_dot_product_attention(q, k, v, sinks=torch.zeros(4),
                                                                           alibi_slopes=slopes))
    if DEVICE == "cpu":
        layer(q, k, v).sum().backward()
        assert layer.sinks.grad is not None
    with torch.device("meta"):
        layer = lt.ContextParallelAttention(sinks=torch.ones(4), alibi_slopes=slopes)  # made elsewhere
        assert torch.equal(layer.alibi_slopes, slopes)
        with pytest.raises(longspan.InputError, match="alibi_slopes lies on 'meta'"):
            lt.ContextParallelAttention(alibi_slopes=torch.rand(4))
    with pytest.raises(longspan.InputError, match="alibi_slopes is a Parameter"):
        lt.ContextParallelAttention(alibi_slopes=torch.nn.Parameter(slopes))


def test_broadcasting():
    """One sequence broadcasts to a batch, and one head to all, as in torch."""
    q, k = torch.randn(2, 4, 6, 16), torch.randn(2, 4, 6, 16)
    for a, b, c in [(q, k[:1], k[:1]), (q[:1], k, k), (q, k, k[:1]), (q, k[:, :1], k[:, :1]), (q[:, :1], k, k),
                    (q[0], k[0, :1], k[0, :1]), (q, k[:1, :1], k[:1, :1])]:
        right = F.scaled_dot_product_attention(a, b, c, is_causal=True)
        torch.testing.assert_close(lt.scaled_dot_product_attention(a, b, c, is_causal=True), right, rtol=1e-5, atol=1e-5)


def test_the_layer():
    layer = lt.ContextParallelAttention(causal=True, sinks=torch.zeros(4), format="bthd")
    assert layer.comm.size == 1 and "causal=True" in repr(layer)
    q, k, v = torch.randn(3, 2, 9, 4, 16)
    out, lse = layer(q, k, v, return_lse=True)
    assert out.shape == q.shape and lse.shape == (2, 9, 4)
    cache = torch.full((2, 2, 30, 4, 16), float("nan"))
    cache[0, :, :9], cache[1, :, :9] = k, v
    lengths = torch.tensor([9, 9], dtype=torch.int32)
    torch.testing.assert_close(layer(q, *cache, cache_seqlens=lengths, queries=None), out)


@pytest.mark.parametrize("rows, keys", [(7, 20), (20, 7), (6, 6), (3, 0)])
def test_rows_at_the_first_positions(rows, keys):
    """As torch counts with is_causal, by each of the ways to say so."""
    q, k, v = torch.randn(2, 4, rows, 16), *torch.randn(2, 2, 4, keys, 16)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True) if keys else torch.zeros_like(q)
    layer = lt.ContextParallelAttention(causal=True, causal_alignment="upper_left")
    for attend in (lambda q, k, v: lt.scaled_dot_product_attention(q, k, v, is_causal=True, causal_alignment="upper_left"),
                   lambda q, k, v: lt.scaled_dot_product_attention(q, k, v, attn_mask=causal_upper_left(rows, keys)),
                   layer,
                   torch.compile(layer, fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(attend(q, k, v), wanted, rtol=1e-5, atol=1e-5)


def test_results_are_never_written_by_a_wrong_stride():
    q, name = torch.randn(2, 7, 4, 16), lt._groups.name_of(None, None, DEVICE)
    for out in (torch.zeros(2, 7, 4, 32)[..., ::2], torch.zeros(1, 7, 4, 16).expand(2, -1, -1, -1),
                torch.zeros(16, 2, 7, 4).permute(1, 2, 3, 0)):
        with pytest.raises(longspan.InputError, match="out"):
            torch.ops.longspan.attend_out(q, q, q, name, out)
        assert not out.any()


Q, K = torch.zeros(1, 4, 6, 16), torch.zeros(1, 2, 6, 16)


def sdpa(q=Q, k=Q, v=None, **options):
    return lt.scaled_dot_product_attention(q, k, k if v is None else v, **options)


@pytest.mark.parametrize("call, error, says", [
    (lambda: sdpa([1]), TypeError, "query is of type 'list'"),
    (lambda: sdpa(k=3), TypeError, "key is of type 'int'"),
    (lambda: sdpa(v=Q.half()), longspan.InputError, "value is torch.float16, and query is torch.float32"),
    (lambda: sdpa(k=Q.to("meta")), longspan.InputError, "key lies on meta, and query on"),
    (lambda: sdpa(Q.long(), Q.long()), longspan.InputError, "q is int64"),
    (lambda: sdpa(Q[0, 0], Q[0, 0]), longspan.InputError, "query has 2 dimensions"),
    (lambda: sdpa(k=Q[0]), longspan.InputError, "key has 3 dimensions"),
    (lambda: sdpa(k=Q[..., :8]), longspan.InputError, "key has 8 columns"),
    (lambda: sdpa(v=Q[:, :, :5]), longspan.InputError, "value is"),
    (lambda: sdpa(k=K), longspan.InputError, "enable_gqa"),
    (lambda: sdpa(k=Q[:, :3], enable_gqa=True), longspan.InputError, "does not divide"),
    (lambda: sdpa(*[Q.repeat(1, 1, 1, 40)] * 2), longspan.UnsupportedError, "head_dim 640"),
    (lambda: sdpa(Q.expand(2, -1, -1, -1), Q.expand(3, -1, -1, -1)), longspan.InputError, "sequences"),
    (lambda: sdpa(Q[None], Q[None]), longspan.InputError, "query has 5 dimensions; 3 or 4 are wanted: unsqueeze"),
    (lambda: sdpa(*[torch.nested.nested_tensor([Q[0]])] * 2), longspan.UnsupportedError, "query is nested"),
    (lambda: sdpa(k=Q.to_sparse()), longspan.UnsupportedError, "key is torch.sparse_coo"),
    (lambda: sdpa(attn_mask=torch.zeros(6, 6)), longspan.UnsupportedError, "attn_mask"),
    (lambda: sdpa(attn_mask=torch.ones(6, 6).tril().bool()), longspan.UnsupportedError, "give is_causal=True"),
    (lambda: sdpa(Q[:, :, :3], attn_mask=causal_upper_left(3, 6), causal_alignment="lower_right"), longspan.InputError,
     "attn_mask is causal_upper_left, and causal_alignment is 'lower_right'"),
    (lambda: lt.ContextParallelAttention(causal_alignment="middle"), longspan.InputError, "causal_alignment is 'middle'"),
    (lambda: sdpa(dropout_p=1.5), longspan.InputError, "dropout_p is 1.5"),
    (lambda: sdpa(Q[:, :, :3], is_causal=True), longspan.InputError, "3 tokens and key has 6.*'upper_left'"),
    (lambda: sdpa(causal_alignment="middle"), longspan.InputError, "causal_alignment"),
    (lambda: sdpa(keys="spiral"), longspan.InputError, "keys is 'spiral'"),
    (lambda: sdpa(queries=longspan.Sharding("listed")), longspan.InputError, "queries is 'listed'"),
    (lambda: sdpa(strategy="luck"), longspan.UnsupportedError, "luck"),
    (lambda: sdpa(group="all"), TypeError, "group is of type 'str'"),
    (lambda: sdpa(comm=3), TypeError, "comm is of type 'int'"),
    (lambda: sdpa(comm=longspan.alone(), group=3), longspan.InputError, "comm is given, and group too"),
    pytest.param(lambda: sdpa(documents=torch.tensor([0, 9, 3])), longspan.InputError, "documents descend",
                 marks=pytest.mark.skipif(DEVICE != "cpu", reason="what lies on a GPU is not read")),
    (lambda: sdpa(window_size=(-3, 0)), longspan.InputError, "window_size"),
    (lambda: sdpa(sinks=torch.zeros(3)), longspan.InputError, "sinks is"),
    (lambda: lt.communicator(dim="cp"), longspan.InputError, "dim is given"),
    (lambda: lt.communicator(device="tpu"), longspan.InputError, "device is 'tpu'"),
    (lambda: lt.ContextParallelAttention(format="hdbt"), longspan.InputError, "format is 'hdbt'"),
    (lambda: lt.ContextParallelAttention().shard(torch.ones(3), 1), longspan.InputError, "dim is 1"),
])
def test_what_is_wrong_is_named(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_a_rank_without_a_process_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(longspan.UsageError, match="init_process_group"):
        lt.communicator()


def test_ranks_that_disagree(torch_ranks):
    """Each rank is told at once what differs."""
    for job, error, says in [(jobs.wrong_layout, "InputError", "k has 8 tokens on rank 0, of 11 on all ranks"),
                             (jobs.contiguous_cache, "UnsupportedError", "cut moves"),
                             (jobs.rows_differ, "InputError", r"q has [1, 2] rows on the ranks")]:
        for name, text, took in torch_ranks.values(2, job):
            assert name == error and says in text and took < 10, text


@pytest.mark.more
def test_ranks_that_end():
    """After these a communicator, or a rank, has ended, so they have their own processes."""
    from torch_ranks import TorchRanks

    made = TorchRanks(4, deadline=4.0)
    for name, text, _ in made.values(4, jobs.no_member):
        assert name == "UsageError" and "not a member" in text
    for name, text, _ in made.values(2, jobs.options_differ):
        assert name == "UsageError" and "causal" in text
    if not torch.cuda.is_available():
        (name, text, _), *others = made.values(3, jobs.devices_differ)
        assert name == "UnsupportedError" and "no GPU" in text
        for name, _, took in others:
            assert name == "RankError" and took < 10
    found = made(4, jobs.die, 3)
    assert found[3][0] == "dead"
    for kind, value in found[:3]:
        assert kind == "value", value
        who, step, took = value
        assert who == 3 and step and took < 10
    assert made(2, jobs.die_in_unshard, 1) == [("value", "RankError"), ("dead", None)]
    assert made.end() == [0, 7, 0, 7]


@pytest.mark.more
def test_groups_that_differ():
    from torch_ranks import TorchRanks

    made = TorchRanks(4)
    for name, text, took in made.values(4, jobs.groups_differ, 2.0)[:1]:
        assert name == "RankError" and "meeting" in text and took < 10, text
    made.end()
