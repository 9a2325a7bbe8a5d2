"""Masks by name: chunks, bidirectional ranges and prefixes, against definitions written here once more, and
flex_attention."""

import xml.etree.ElementTree

import numpy as np
import pytest

import jobs
import longspan
from device import DEVICE
from longspan import mask
from oracle import assert_close
from ranks import Ranks

KEYS = 150
IMAGES = [[3, 20], [20, 31], [64, 110]]


def in_one_image(i, j):
    return np.logical_or.reduce([(i >= a) & (i < b) & (j >= a) & (j < b) for a, b in IMAGES])


# (mask, whether a row at position i sees the key at position j)
MASKS = {
    "causal": (mask.causal(), lambda i, j: j <= i),
    "window": (mask.window(20), lambda i, j: (j <= i) & (i - j <= 20)),
    "two sides": (mask.window(20, 7, causal=False), lambda i, j: (i - j <= 20) & (j - i <= 7)),
    "chunks": (mask.chunked(32), lambda i, j: (j <= i) & (i // 32 == j // 32)),
    "lookback": (mask.chunked(24, 2), lambda i, j: (j <= i) & (i // 24 - j // 24 <= 2)),
    "blocks": (mask.chunked(24, 10 ** 6, causal=False), lambda i, j: i // 24 >= j // 24),
    "images": (mask.bidirectional(IMAGES), lambda i, j: (j <= i) | in_one_image(i, j)),
    "images in a window": (mask.bidirectional(IMAGES, mask.window(20), clamped=True),
                           lambda i, j: (i - j <= 20) & ((j <= i) | in_one_image(i, j))),
    "images past a window": (mask.bidirectional(IMAGES, mask.window(20)),
                             lambda i, j: ((i - j <= 20) & (j <= i)) | in_one_image(i, j)),
    "prefix-LM": (mask.prefix_lm(40), lambda i, j: (j <= i) | ((i >= 0) & (i < 40) & (j < 40))),
    "prefix or window": (mask.prefix_or_window(30, mask.window(15)), lambda i, j: (j <= i) & ((j < 30) | (i - j <= 15))),
    "prefix or chunk": (mask.prefix_or_window(30, mask.chunked(16)), lambda i, j: (j <= i) & ((j < 30) | (i // 16 == j // 16))),
}
EACH = pytest.mark.parametrize("name", MASKS)


def arrays(seed, queries=KEYS, keys=KEYS, heads=4, kv_heads=2, dim=16, values=16):
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype(np.float32) for shape in
            ((queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, values))]


def by_definition(q, k, v, sees, first=None):
    first = len(k) - len(q) if first is None else first
    i, j = np.arange(first, first + len(q))[:, None], np.arange(len(k))[None]
    seen, group = sees(i, j) & (j < len(k)), q.shape[1] // k.shape[1]
    out = np.zeros((*q.shape[:2], v.shape[2]))
    for h in range(q.shape[1]):
        scores = np.where(seen, (q[:, h].astype(np.float64) @ k[:, h // group].T) * q.shape[2] ** -0.5, -np.inf)
        weights = np.exp(scores - np.where(seen.any(1), scores.max(1), 0)[:, None])
        out[:, h] = weights / np.maximum(weights.sum(1, keepdims=True), 1e-300) @ v[:, h // group]
    return out


@EACH
def test_a_matrix_is_the_definition(name):
    made, sees = MASKS[name]
    for queries, alignment in ((KEYS, "lower_right"), (37, "lower_right"), (37, "upper_left"), (KEYS + 9, "lower_right")):
        first = 0 if alignment == "upper_left" else KEYS - queries
        i, j = np.arange(first, first + queries)[:, None], np.arange(KEYS)[None]
        assert (made.matrix(queries, KEYS, causal_alignment=alignment) == (sees(i, j) & (j >= 0))).all()


@EACH
@pytest.mark.parametrize("queries", [1, 7, 60, KEYS])
def test_attend(name, queries):
    made, sees = MASKS[name]
    q, k, v = arrays(queries, queries)
    assert_close(longspan.attend(q, k, v, mask=made), by_definition(q, k, v, sees))
    out = longspan.attend(q, k, v, mask=made, causal_alignment="upper_left")
    assert_close(out, by_definition(q, k, v, sees, first=0))


@pytest.fixture(scope="module")
def ranks():
    made = Ranks(3)
    yield made
    assert made.end() == [0] * 3


@pytest.mark.parametrize("strategy", ["gather-states", "scatter-states", "gather-kv", "ring-kv", "ring-q"])
def test_ranks(ranks, strategy):
    for number, (made, sees) in enumerate(MASKS.values()):
        q, k, v = arrays(number)
        for out, _ in ranks.values(jobs.attend_sharded, q, k, v, "zigzag", "zigzag", {
                "mask": made, "strategy": strategy, "max_seqlen_k": KEYS}):
            assert_close(out, by_definition(q, k, v, sees))


def test_sequences_of_a_batch_differ():
    (q, k, v), batch = arrays(5), 3
    q, k, v = (np.stack([a + 0.1 * b for b in range(batch)]) for a in (q, k, v))
    prefixes, ranges = [0, 9, 30], [[[0, 5], [5, 5]], [[10, 20], [30, 60]], [[0, 0], [140, 150]]]
    made = mask.prefix_or_window(prefixes, mask.bidirectional(ranges, mask.window(11)))
    out = longspan.attend(q, k, v, mask=made)
    for b in range(batch):
        def sees(i, j, b=b):
            base = (j <= i) & ((j < prefixes[b]) | (i - j <= 11))
            return base | np.logical_or.reduce([(i >= x) & (i < y) & (j >= x) & (j < y) for x, y in ranges[b]])

        assert_close(out[b], by_definition(q[b], k[b], v[b], sees))
        assert (made.matrix(KEYS, sequence=b) == sees(np.arange(KEYS)[:, None], np.arange(KEYS)[None])).all()


def test_chunks_begin_behind_padding():
    q, k, v = arrays(6)
    out = longspan.attend(q[None], k[None], v[None], mask=mask.chunked(32), cache_leftpad=[13])
    assert_close(out[0], by_definition(q, k, v, lambda i, j: (j <= i) & (j >= 13) & ((i - 13) // 32 == (j - 13) // 32)))


def test_a_layer_keeps_its_mask():
    q, k, v = arrays(7)
    for made, sees in MASKS.values():
        layer = longspan.Attention(heads=4, kv_heads=2, head_dim=16, dtype="float32", max_queries=KEYS, mask=made)
        assert_close(layer(q, k, v), by_definition(q, k, v, sees))
    other = [[0, 10]]
    layer = longspan.Attention(heads=4, kv_heads=2, head_dim=16, dtype="float32", max_queries=KEYS, causal=True)
    assert_close(layer(q, k, v, bidirectional=other),
                 by_definition(q, k, v, lambda i, j: (j <= i) | ((i < 10) & (j < 10))))


@EACH
def test_flex_attention_agrees(name):
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    made = MASKS[name][0]
    seen = torch.from_numpy(made.matrix(KEYS).copy())
    tensors = [torch.from_numpy(a) for a in arrays(8)]
    block = flex.create_block_mask(lambda b, h, i, j: seen[i, j], None, None, KEYS, KEYS, device="cpu")
    found, wanted = ([t.clone().to(where).requires_grad_() for t in tensors] for where in (DEVICE, "cpu"))
    out = longspan.attend(*found, mask=made)
    q, k, v = (t.transpose(0, 1)[None] for t in wanted)
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    judge = flex.flex_attention(*(t.detach() for t in (q, k, v)), block_mask=block)[0].transpose(0, 1)
    assert_close(out.detach().cpu(), judge)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(dout.to(DEVICE))
    scores = (q @ k.transpose(-1, -2) * 16 ** -0.5).masked_fill(~seen, float("-inf"))
    ((scores.softmax(-1) @ v)[0].transpose(0, 1) * dout).sum().backward()
    for mine, theirs in zip(found, wanted):
        assert_close(mine.grad.cpu(), theirs.grad)
    import longspan.torch as lt

    again = [t.detach().transpose(0, 1)[None].requires_grad_() for t in found]
    other = lt.scaled_dot_product_attention(*again, attn_mask=made, enable_gqa=True)
    assert_close(other[0].transpose(0, 1).detach().cpu(), judge)
    other.backward(dout.to(DEVICE).transpose(0, 1)[None])
    for mine, theirs in zip(again, wanted):
        assert_close(mine.grad[0].transpose(0, 1).cpu(), theirs.grad)


def call(**given):
    q, k, v = arrays(9)
    return longspan.attend(q, k, v, **given)


@pytest.mark.parametrize("bad, kind, message", [
    (lambda: call(mask=mask.causal(), causal=True), longspan.InputError, "mask is given, and causal too"),
    (lambda: call(mask=mask.causal(), window_size=(3, 0)), longspan.InputError, "window_size too"),
    (lambda: call(mask=mask.causal(), bidirectional=IMAGES), longspan.InputError, "bidirectional too"),
    (lambda: call(mask="causal"), TypeError, "mask is of type 'str'"),
    (lambda: call(causal=True, bidirectional=[[5, 3]]), longspan.InputError, r"\[5, 3\), which ends before it begins"),
    (lambda: call(causal=True, bidirectional=[[5, 30], [29, 40]]), longspan.InputError, "do not overlap"),
    (lambda: call(causal=True, bidirectional=[[5, 151]]), longspan.InputError, r"the positions \[0, 150\)"),
    (lambda: call(causal=True, bidirectional=[1, 2]), longspan.InputError, r"bidirectional is \[2\]; \[count, 2\] is wanted"),
    (lambda: call(causal=True, bidirectional=[[1, 2, 3]]), longspan.InputError, r"\[count, 2\] is wanted"),
    (lambda: call(attention_chunk=-1), longspan.UsageError, "attention_chunk -1 is not in"),
    (lambda: call(chunk_lookback=2), longspan.UsageError, "chunk_lookback 2 without"),
    (lambda: call(prefix=-1), longspan.UsageError, "prefix -1 is not in"),
    (lambda: call(prefix_lens=[3]), longspan.InputError, "prefix_lens is given, and the layer's mask has no prefix"),
    (lambda: call(prefix=2, prefix_lens=[3], window_size=(5, 0)), longspan.InputError, r"prefix_lens\[0\] is 3"),
    (lambda: call(prefix=2, documents=[0, KEYS]), longspan.UnsupportedError, "prefix with documents"),
    (lambda: mask.chunked(0), longspan.InputError, "size is 0"),
    (lambda: mask.prefix_lm(3, "causal"), TypeError, "base is of type 'str'"),
    (lambda: mask.causal().draw(0), longspan.InputError, "queries is 0"),
    (lambda: mask.causal().draw(5, ranks=0), longspan.InputError, "ranks is 0"),
])
def test_bad_input(bad, kind, message):
    with pytest.raises(kind, match=message):
        bad()


def test_pictures(tmp_path):
    svg = "{http://www.w3.org/2000/svg}"
    for made, _ in MASKS.values():
        for tokens, ranks, layout in ((10, 1, "contiguous"), (KEYS, 3, "zigzag"), (5000, 2, "striped")):
            path = tmp_path / "mask.svg"
            text = made.draw(tokens, ranks=ranks, layout=layout, file=path)
            assert path.read_text() == text
            root = xml.etree.ElementTree.fromstring(text)
            cells = [r for r in root.iter(svg + "rect") if r.get("fill-opacity")]
            if tokens == 10:  # a cell for each pair
                assert len(cells) == made.matrix(10).sum()
            assert cells and len({r.get("fill") for r in cells}) == ranks if layout != "striped" else cells
    assert "chunk" in repr(mask.chunked(4)) and repr(mask.full()) == "longspan.mask.Mask()"
