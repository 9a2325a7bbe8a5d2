"""longspan.torch.shard_batch: tokens, labels and positions of a rank, and losses whose sum is the mean over all."""

import pytest

pytest.importorskip("torch")

import torch

import batch_jobs as jobs
import longspan
import longspan.torch as lt


def ids(batch=1, tokens=7):
    return torch.arange(batch * tokens).view(batch, tokens)


def test_labels_are_shifted_before_they_are_sharded():
    batch = lt.shard_batch(ids(2), ids(2))
    assert batch.labels.tolist() == [[1, 2, 3, 4, 5, 6, -100], [8, 9, 10, 11, 12, 13, -100]]
    assert batch.position_ids.tolist() == [list(range(7))] * 2
    assert batch.total_tokens == 7 and int(batch.valid_tokens) == 12
    same = lt.shard_batch(ids(), ids(), shift_labels=False)
    assert same.labels.tolist() == ids().tolist() and int(same.valid_tokens) == 7


def test_documents():
    """A document's last token predicts nothing, nor does a token outside of all documents."""
    batch = lt.shard_batch(ids(tokens=10), ids(tokens=10), documents=torch.tensor([2, 5, 5, 6, 8]), ignore_index=-1)
    assert batch.labels.tolist() == [[-1, -1, 3, 4, -1, -1, 7, -1, -1, -1]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 0, 0, 1, 0, 1]]
    two = lt.shard_batch(ids(2, 4), ids(2, 4), documents=torch.tensor([[0, 2, 4], [0, 4, 4]]))
    assert two.labels.tolist() == [[1, -100, 3, -100], [5, 6, 7, -100]]
    assert two.position_ids.tolist() == [[0, 1, 0, 1], [0, 1, 2, 3]]


def test_loss():
    batch = lt.shard_batch(ids(), ids().masked_fill(ids() == 3, -100))
    logits = torch.randn(1, 7, 9, dtype=torch.bfloat16, requires_grad=True)
    right = torch.nn.functional.cross_entropy(logits[0, [0, 1, 3, 4, 5]].float(), torch.tensor([1, 2, 4, 5, 6]))
    torch.testing.assert_close(batch.loss(logits), right)
    torch.testing.assert_close(batch.loss(logits, averaged_over=4), 4 * right)
    nothing = lt.shard_batch(ids(), torch.full((1, 7), -100)).loss(logits)
    nothing.backward()
    assert float(nothing.detach()) == 0 and not logits.grad.any()


def test_refusals():
    for wrong, match in ((dict(labels=ids(2)), "labels is"), (dict(labels=ids().int()), "int64"),
                         (dict(documents=torch.tensor([0, 5, 3])), "ascend"), (dict(documents=torch.tensor([0, 8])), "ascend"),
                         (dict(documents=torch.tensor([0.0, 7.0])), "int64"), (dict(position_ids=ids(1, 3)), "position_ids is"),
                         (dict(documents=torch.zeros(2, 3, dtype=torch.int64)), "1 sequences"), (dict(layout="zag"), "layout")):
        with pytest.raises(longspan.InputError, match=match):
            lt.shard_batch(ids(), **wrong)
    with pytest.raises(longspan.InputError, match=r"\[batch, tokens\]"):
        lt.shard_batch(torch.arange(3))
    with pytest.raises(TypeError):
        lt.shard_batch([[1, 2]])
    batch = lt.shard_batch(ids(), ids())
    with pytest.raises(longspan.InputError, match="logits is"):
        batch.loss(torch.zeros(1, 6, 3))
    with pytest.raises(longspan.InputError, match="averaged_over"):
        batch.loss(torch.zeros(1, 7, 9), averaged_over=0)
    with pytest.raises(longspan.InputError, match="no labels"):
        lt.shard_batch(ids()).loss(torch.zeros(1, 7, 9))


def test_attention_stays_within_the_documents_of_the_context():
    q, k, v = torch.randn(3, 1, 2, 9, 16)
    starts = torch.tensor([0, 4, 9])
    with lt.context_parallel(None, documents=starts):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(out, lt.scaled_dot_product_attention(q, k, v, is_causal=True, documents=starts))
    assert not torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind, layout, documents", [("llama", "zigzag", jobs.PACKED), ("mistral", "striped", [0, jobs.TOKENS])])
def test_a_model_learns_the_same(torch_ranks, ranks, kind, layout, documents):
    pytest.importorskip("transformers")
    torch_ranks.values(ranks, jobs.learns_the_same, kind, layout, documents)


def test_a_model_learns_the_same_for_longer(torch_ranks):
    pytest.importorskip("transformers")
    torch_ranks.values(3, jobs.learns_the_same, "llama", "zigzag", jobs.PACKED, False, 50)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_a_checkpointed_model_learns_the_same(torch_ranks, kind):
    """Softcap, and sinks that learn."""
    pytest.importorskip("transformers")
    torch_ranks.values(2, jobs.learns_the_same, kind, "interleaved:7", jobs.PACKED, True, 4)


@pytest.mark.parametrize("ranks", [1, 3])
def test_dropout_of_a_model(torch_ranks, ranks):
    pytest.importorskip("transformers")
    torch_ranks.values(ranks, jobs.learns_the_same_with_dropout)


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp"])
def test_gradients_of_replicas(torch_ranks, wrapped):
    pytest.importorskip("transformers")
    torch_ranks.values(4, jobs.gradients_of_replicas, wrapped)


def test_accumulation(torch_ranks):
    pytest.importorskip("transformers")
    torch_ranks.values(3, jobs.accumulates)
