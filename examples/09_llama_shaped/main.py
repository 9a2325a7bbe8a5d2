"""A Llama-shaped model (RMSNorm, rotary embedding, grouped queries, SwiGLU) with random weights. The
prompt is computed in shards; its keys stay on their ranks, and decoding continues from there. The
resulting tokens are those of one process."""

import torch
import torch.nn.functional as F

import longspan

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 199, 128, 3, 8, 2, 32, 320
PROMPT, NEW, CAPACITY = 333, 30, 400
# Blocks of 16 tokens go to the ranks in turn, so that a cache stays even while it grows.
CUT = longspan.Sharding("interleaved", 16)


def weights():
    torch.manual_seed(0)

    def matrix(*shape):
        return torch.randn(*shape) * shape[-1] ** -0.5

    layers = [dict(q=matrix(HEADS * HEAD_DIM, WIDTH), k=matrix(KV_HEADS * HEAD_DIM, WIDTH),
                   v=matrix(KV_HEADS * HEAD_DIM, WIDTH), o=matrix(WIDTH, HEADS * HEAD_DIM),
                   gate=matrix(MLP, WIDTH), up=matrix(MLP, WIDTH), down=matrix(WIDTH, MLP))
              for _ in range(LAYERS)]
    return layers, torch.randn(VOCABULARY, WIDTH), matrix(VOCABULARY, WIDTH)


def norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotate(x, positions):
    """x [tokens, heads, head_dim] by the angles of its tokens' positions in the whole sequence."""
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = positions[:, None, None] * frequencies
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Model:
    def __init__(self, comm):
        self.comm = comm
        self.layers, self.embedding, self.head = weights()
        rows = len(CUT.shard(CAPACITY, comm.rank, comm.size))  # of the cache: this rank's tokens
        self.cache = torch.zeros(LAYERS, 2, 1, rows, KV_HEADS, HEAD_DIM)

    def run(self, tokens, positions, attention):
        """Logits of the last of these tokens. attention(layer, q, k, v) knows which ranks have the others."""
        x = self.embedding[tokens]
        for number, w in enumerate(self.layers):
            y = norm(x)
            q = rotate((y @ w["q"].T).view(-1, HEADS, HEAD_DIM), positions)
            k = rotate((y @ w["k"].T).view(-1, KV_HEADS, HEAD_DIM), positions)
            v = (y @ w["v"].T).view(-1, KV_HEADS, HEAD_DIM)
            x = x + attention(number, q, k, v).reshape(len(x), -1) @ w["o"].T
            y = norm(x)
            x = x + (F.silu(y @ w["gate"].T) * (y @ w["up"].T)) @ w["down"].T
        return norm(x[-1:]) @ self.head.T

    # [prefill]
    def prefill(self, prompt):
        """The token that follows. Each rank runs the model on its own tokens, and keeps their keys."""
        own = CUT.shard(len(prompt), self.comm.rank, self.comm.size)
        positions = torch.asarray(own.positions(), dtype=torch.int64)

        def attention(layer, q, k, v):
            self.cache[layer, 0, 0, :len(k)], self.cache[layer, 1, 0, :len(v)] = k, v
            return longspan.attend(q, k, v, comm=self.comm, causal=True, keys=CUT, queries=CUT,
                                   total_keys=len(prompt), total_queries=len(prompt))

        logits = self.run(prompt[positions], positions, attention)
        last = len(prompt) - 1 in positions  # one rank has the last token, and tells the others
        found = self.comm.gather(b"%d" % logits.argmax() if last else b"")
        return int(b"".join(found))

    # [/prefill]

    # [decode]
    def decode(self, token, length):
        """The token that follows `token`, which is number `length` of the sequence. Every rank runs
        it; its key goes to the one whose turn it is."""

        def attention(layer, q, k, v):
            return longspan.attend(q, *self.cache[layer], comm=self.comm, causal=True, keys=CUT,
                                   k_new=k, v_new=v, cache_seqlens=[length])

        return int(self.run(torch.tensor([token]), torch.tensor([length]), attention).argmax())

    # [/decode]

    def generate(self, prompt, count):
        made = [self.prefill(prompt)]
        while len(made) < count:
            made.append(self.decode(made[-1], len(prompt) + len(made) - 1))
        return made


def main():
    comm = longspan.from_environment()
    torch.set_num_threads(1)
    prompt = torch.randint(VOCABULARY, (PROMPT,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model = Model(comm)
        made = model.generate(prompt, NEW)
        alone = Model(longspan.alone()).generate(prompt, NEW)
    assert made == alone, (made, alone)
    print(f"rank {comm.rank} of {comm.size}: {model.cache.shape[3]} rows of the cache; {NEW} tokens, those of one "
          f"process: {' '.join(map(str, made[:6]))} ...", flush=True)


main()
