"""Trains a small Llama of transformers from random weights on multiplication tables, its sequence sharded over the ranks.

    torchrun --nproc-per-node 4 main.py --steps 40 --losses losses-4.csv
    torchrun --nproc-per-node 4 main.py --steps 20 --save half.pt
    torchrun --nproc-per-node 4 main.py --steps 40 --resume half.pt      # the second half, to the bit
"""

import argparse
import os

import torch
import torch.distributed as dist
import transformers

import longspan.hf
import longspan.torch as lt

TOKENS = 768


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="the number of the last step")
    parser.add_argument("--save", help="write weights, optimizer and step to this file at the end")
    parser.add_argument("--resume", help="go on from such a file")
    parser.add_argument("--losses", help="write the loss of each step to this file")
    return parser.parse_args()


def batch_of(step):
    """(ids [1, TOKENS], starts of documents): tables of random numbers, a document each, as bytes."""
    generator = torch.Generator().manual_seed(step)
    text, starts = b"", [0]
    while len(text) < TOKENS:
        n = int(torch.randint(2, 100, (), generator=generator))
        text += "".join(f"{n} x {i} = {n * i}\n" for i in range(1, 10)).encode()
        starts.append(min(len(text), TOKENS))
    return torch.tensor(list(text[:TOKENS]))[None], torch.tensor(starts)


def new_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    model = transformers.LlamaForCausalLM(config)
    model.set_attn_implementation(longspan.hf.NAME)
    return model


# [step]
def backward(model, step, ranks):
    """The loss over all ranks. Gradients are averaged over the ranks by DistributedDataParallel, so the loss is multiplied by
    their number."""
    ids, documents = batch_of(step)
    batch = lt.shard_batch(ids, labels=ids, documents=documents)
    with lt.context_parallel(None, total_tokens=batch.total_tokens, documents=documents):
        logits = model(batch.input_ids, position_ids=batch.position_ids).logits
        loss = batch.loss(logits, averaged_over=ranks)
        loss.backward()
    loss = loss.detach() / ranks
    if dist.is_initialized():
        dist.all_reduce(loss)
    return float(loss)


# [/step]


def main():
    args = options()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    bare = new_model()
    model = torch.nn.parallel.DistributedDataParallel(bare) if ranks > 1 else bare
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    done = 0
    if args.resume:
        saved = torch.load(args.resume)
        bare.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    losses = {}
    for step in range(done + 1, args.steps + 1):
        optimizer.zero_grad()
        losses[step] = backward(model, step, ranks)
        optimizer.step()
    if rank == 0:
        if args.losses:
            with open(args.losses, "w") as file:
                file.write("step,loss\n" + "".join(f"{step},{loss!r}\n" for step, loss in losses.items()))
        if args.save:
            torch.save(dict(model=bare.state_dict(), optimizer=optimizer.state_dict(), step=args.steps), args.save)
    print(f"rank {rank} of {ranks}: step {args.steps}, loss {losses[args.steps]:.2f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


main()
