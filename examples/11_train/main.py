"""The smallest training: one layer, its sequence sharded over the ranks. The losses and the gradients are those of one
process, which trains the same model with PyTorch's attention."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

import longspan.torch as lt

VOCABULARY, HEADS, HEAD_DIM, TOKENS, PERIOD, STEPS = 32, 4, 16, 1001, 97, 20
WIDTH = HEADS * HEAD_DIM


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.place = torch.nn.Embedding(TOKENS, WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.head = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, positions, attention):
        x = self.token(ids) + self.place(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)  # [batch, heads, tokens, dim]
        y = attention(q, k, v, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


# [step]
def step(model, ids):
    """The loss of all tokens. Each rank computes its own tokens, and then has the gradients of the whole loss."""
    batch = lt.shard_batch(ids, labels=ids)
    logits = model(batch.input_ids, batch.position_ids, lt.scaled_dot_product_attention)
    loss = batch.loss(logits)
    loss.backward()
    loss = loss.detach()
    if dist.is_initialized():
        for part in (loss, *(p.grad for p in model.parameters())):
            dist.all_reduce(part)
    return loss


# [/step]


def step_alone(model, ids):
    logits = model(ids, torch.arange(TOKENS)[None], F.scaled_dot_product_attention)
    loss = F.cross_entropy(logits[0, :-1], ids[0, 1:])
    loss.backward()
    return loss.detach()


def main():
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    ids = torch.randint(VOCABULARY, (PERIOD,), generator=torch.Generator().manual_seed(1)).repeat(11)[None, :TOKENS]
    ours, alone = Model(), Model()
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in (ours, alone)]
    losses = []
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append([step(ours, ids), step_alone(alone, ids)])
        torch.testing.assert_close(*losses[-1], rtol=1e-5, atol=0)
        for found, right in zip(ours.parameters(), alone.parameters()):
            torch.testing.assert_close(found.grad, right.grad, rtol=1e-3, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
    assert losses[-1][0] < losses[0][0] / 10
    own = lt.shard_batch(ids).input_ids.shape[1]
    print(f"rank {rank} of {ranks}: {own} tokens; loss {losses[0][0]:.2f} to {losses[-1][0]:.2f} in {STEPS} steps, those of "
          "one process", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


main()
