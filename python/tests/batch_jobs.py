"""Jobs of the ranks of test_torch_batch.py: models learn from sharded batches as on one rank.

The reference is transformers' own attention on the whole batch, and a mean that torch computes.
"""

import importlib

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import hf_models
import longspan.torch as lt
from device import DEVICE

CLOSE = 1e-5 if DEVICE == "cpu" else 1e-4
TOKENS = 90
PACKED = [0, 17, 18, 60, 90]


def example(seed, unlearned=0.3):
    """(ids, labels); the same on every rank. Some labels are not learned."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 61, (1, TOKENS), generator=generator, device="cpu")
    labels = ids.masked_fill(torch.rand(1, TOKENS, generator=generator, device="cpu") < unlearned, -100)
    return ids.to(DEVICE), labels.to(DEVICE)


def model_of(kind, attention="longspan"):
    importlib.import_module("longspan.hf")  # makes the attention "longspan" known
    model = hf_models.model(kind, attention).train()
    model.config.use_cache = False
    return model


def right_sum(model, ids, labels, documents):
    """(sum of cross-entropies, valid labels), document by document."""
    total, valid = 0.0, 0
    for begin, end in zip(documents, documents[1:]):
        logits = model(ids[:, begin:end]).logits[0, :-1].float()
        wanted = labels[0, begin + 1:end]
        total = total + F.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
        valid += int((wanted != -100).sum())
    return total, valid


def backward_of_ranks(model, group, ids, labels, documents, layout="zigzag", averaged_over=1, data_group=None):
    starts = torch.tensor(documents)
    batch = lt.shard_batch(ids, labels, group=group, layout=layout, documents=starts, data_group=data_group)
    with lt.context_parallel(group, layout=layout, total_tokens=batch.total_tokens, documents=starts):
        logits = model(batch.input_ids, position_ids=batch.position_ids).logits
        loss = batch.loss(logits, averaged_over=averaged_over)
        loss.backward()  # inside: a checkpointed model calls attention again
    return loss.detach()


def learns_the_same(group, kind, layout, documents, checkpointed=False, steps=10):
    """Steps of AdamW: the losses of one rank."""
    losses = {}
    for who in ("one", "ranks"):
        model = model_of(kind, "eager" if who == "one" else "longspan")
        if who == "ranks" and checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
        losses[who] = []
        for step in range(steps):
            ids, labels = example(step % 2)
            optimizer.zero_grad()
            if who == "one":
                total, valid = right_sum(model, ids, labels, documents)
                loss = total / valid
                loss.backward()
            else:
                loss = backward_of_ranks(model, group, ids, labels, documents, layout)
                for summed in (loss, *(p.grad for p in model.parameters())):
                    dist.all_reduce(summed, group=group)
            losses[who].append(float(loss.detach()))
            optimizer.step()
    np.testing.assert_allclose(losses["ranks"][:10], losses["one"][:10], rtol=CLOSE)
    np.testing.assert_allclose(losses["ranks"], losses["one"], rtol=10 * CLOSE)
    assert losses["ranks"][-1] < losses["ranks"][0] - 0.1


def learns_the_same_with_dropout(group):
    """One process draws the same masks, from the seed of torch's generator; other seeds have other losses."""
    documents, losses = [0, TOKENS], {}
    for who in ("one", "ranks", "another seed"):
        model = model_of("llama")
        model.config.attention_dropout = 0.3
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.3
        optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
        torch.manual_seed(5 if who == "ranks" and group.rank() > 0 else 6 if who == "another seed" else 7)  # rank 0's counts
        losses[who] = []
        for step in range(4):
            ids, labels = example(step)
            optimizer.zero_grad()
            if who == "ranks":
                loss = backward_of_ranks(model, group, ids, labels, documents)
                for summed in (loss, *(p.grad for p in model.parameters())):
                    dist.all_reduce(summed, group=group)
            else:
                total, valid = right_sum(model, ids, labels, documents)
                loss = total / valid
                loss.backward()
            losses[who].append(float(loss.detach()))
            optimizer.step()
    np.testing.assert_allclose(losses["ranks"], losses["one"], rtol=CLOSE)
    assert abs(losses["another seed"][0] - losses["one"][0]) > 1e-4


def gradients_of_replicas(group, wrapped):
    """Two replicas with batches of unequal numbers of valid labels, each sharded over half of the ranks; the wrapper averages
    gradients over all ranks."""
    replicas, half = 2, group.size() // 2
    mesh = dist.init_device_mesh(DEVICE, (replicas, half), mesh_dim_names=("dp", "cp"))
    own = example(10 + mesh.get_local_rank("dp"), unlearned=0.1 + 0.6 * mesh.get_local_rank("dp"))
    documents = [0, 33, TOKENS]

    right = model_of("llama", "eager")
    sums = [right_sum(right, *example(10 + r, unlearned=0.1 + 0.6 * r), documents) for r in range(replicas)]
    (sum(total for total, _ in sums) / sum(valid for _, valid in sums)).backward()

    model = model_of("llama")
    if wrapped == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    else:
        flat = mesh._flatten("all")
        for layer in model.model.layers:
            torch.distributed.fsdp.fully_shard(layer, mesh=flat)
        torch.distributed.fsdp.fully_shard(model, mesh=flat)
    backward_of_ranks(model, mesh["cp"], *own, documents, averaged_over=group.size(), data_group=mesh["dp"])
    found = dict(model.named_parameters())
    for name, weight in right.named_parameters():
        grad = found["module." + name if wrapped == "ddp" else name].grad
        grad = grad if wrapped == "ddp" else grad.full_tensor()
        torch.testing.assert_close(grad, weight.grad, rtol=1e-4, atol=1e-6)


def accumulates(group):
    """Two batches before a step: each loss is divided by the valid labels of both."""
    documents = [0, TOKENS]
    right, model = model_of("llama", "eager"), model_of("llama")
    sums = [right_sum(right, *example(seed), documents) for seed in (3, 4)]
    (sum(total for total, _ in sums) / sum(valid for _, valid in sums)).backward()
    batches = [lt.shard_batch(*example(seed), group=group) for seed in (3, 4)]
    valid = sum(batch.valid_tokens for batch in batches)
    for batch in batches:
        with lt.context_parallel(group, total_tokens=batch.total_tokens):
            logits = model(batch.input_ids, position_ids=batch.position_ids).logits
            batch._replace(valid_tokens=valid).loss(logits).backward()
    for found, wanted in zip(model.parameters(), right.parameters()):
        dist.all_reduce(found.grad, group=group)
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-6)
