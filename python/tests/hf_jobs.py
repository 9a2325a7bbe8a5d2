"""Jobs of the ranks of tests/test_hf.py."""

import os
import time

import torch
import transformers

import hf_models as models
import longspan
import longspan.hf as hf

NEW = 5


def generate(model, ids, **options):
    made = model.generate(ids, **dict(max_new_tokens=NEW, do_sample=False, output_logits=True,
                                      attention_mask=torch.ones_like(ids),
                                      return_dict_in_generate=True) | options)
    return made.sequences, torch.stack(made.logits)


def reference(kind, ids):
    """One process, transformers' own attention and cache."""
    return generate(models.model(kind, "eager"), ids)


def same_tokens(group, kind, tokens, block, chunk=None, batch=1):
    """Prefilled in shards, then stock generate: the tokens of one process; the same bits on all ranks."""
    ids = models.prompt(tokens, batch)
    wanted, right = reference(kind, ids)
    model = models.model(kind)
    cache = hf.ShardedCache(model, tokens + NEW + 3, group, block=block)
    hf.prefill(model, ids, cache, attention_mask=torch.ones_like(ids), chunk=chunk)
    assert int(cache.get_seq_length()) == tokens - 1
    held = cache.comm.gather(b"%d" % cache._capacity)
    if tokens + NEW >= 2 * block * group.size():
        assert max(map(int, held)) < 0.8 * tokens or group.size() == 1  # no rank holds all of it
    found, logits = generate(model, ids, past_key_values=cache)
    assert torch.equal(found, wanted), (found, wanted)
    torch.testing.assert_close(logits, right, rtol=1e-4, atol=1e-4)
    return logits.view(torch.int32).sum().item(), int(cache.get_seq_length())


def padded(tokens, side="left"):
    """A batch of prompts of 1 to all of the tokens, and its mask."""
    ids, place = models.prompt(tokens, 3), torch.arange(tokens, device=models.DEVICE)
    least = torch.tensor([0, tokens // 3, tokens - 1], device=models.DEVICE)[:, None]
    mask = (place >= least if side == "left" else place < tokens - least).long()
    return ids * mask, mask  # 0 is the number of padding


def same_tokens_of_padded(group, kind, tokens, block, chunk=None):
    """A padded batch: prefilled in shards, or without prefill, the tokens of one process with the attention "eager"."""
    ids, mask = padded(tokens)
    wanted, right = generate(models.model(kind, "eager"), ids, attention_mask=mask)
    model = models.model(kind)
    cache = hf.ShardedCache(model, tokens + NEW + 3, group, block=block)
    for prefilled in (False, True, True):
        if prefilled:
            hf.prefill(model, ids, cache, attention_mask=mask, chunk=chunk)
        found, logits = generate(model, ids, attention_mask=mask, past_key_values=cache)
        assert torch.equal(found, wanted), (found, wanted)
        torch.testing.assert_close(logits, right, rtol=1e-4, atol=1e-4)
        if not prefilled:
            cache.reset()
    one = ids[1:2, tokens // 3:].repeat(3, 1)  # other padding: nothing of the cache is used again
    hf.prefill(model, one, cache)
    assert torch.equal(generate(model, one, past_key_values=cache)[0], reference(kind, one)[0])


def without_prefill(group, kind):
    """generate alone: every rank computes the prompt, and holds its share of it."""
    ids = models.prompt(30)
    model = models.model(kind)
    cache = hf.ShardedCache(model, 64, group, block=4)
    found, _ = generate(model, ids, past_key_values=cache)
    assert torch.equal(found, reference(kind, ids)[0])


def a_talk(group, kind):
    """Several turns in one cache; then again in it, from the beginning; and tokens removed."""
    model = models.model(kind)
    cache = hf.ShardedCache(model, 300, group, block=4)
    for _ in range(2):
        ids = models.prompt(21)
        for turn in range(3):
            hf.prefill(model, ids, cache, chunk=16)
            wanted, _ = reference(kind, ids)
            found, _ = generate(model, ids, past_key_values=cache)
            assert torch.equal(found, wanted)
            ids = torch.cat([found, models.prompt(33 + turn, seed=turn)], 1)
        cache.crop(-3)
        length = int(cache.get_seq_length())
        again, _ = generate(model, found[:, :length + 1], past_key_values=cache)
        assert torch.equal(again, reference(kind, found[:, :length + 1])[0])
        cache.reset()
        assert int(cache.get_seq_length()) == 0


def compiled_decode(group, kind, by_generate, compileable=True):
    """Decode as one graph, compiled once. Returns the number of graphs."""
    torch._dynamo.reset()
    ids = models.prompt(40)
    wanted, right = reference(kind, ids)
    model = models.model(kind)
    cache = hf.ShardedCache(model, 64, group, block=8, compileable=compileable)
    hf.prefill(model, ids, cache)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    if by_generate:
        found, _ = generate(model, ids, past_key_values=cache, compile_config=_compile_config(backend))
        assert torch.equal(found, wanted)
        return len(graphs)
    step = torch.compile(model, fullgraph=True, backend=backend)
    token = ids[:, -1:].clone(memory_format=torch.contiguous_format)
    with torch.no_grad():
        for i in range(NEW):
            logits = step(token, past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(logits, right[i], rtol=1e-4, atol=1e-4)
            token = logits.argmax(-1, keepdim=True)
    return len(graphs)


def _compile_config(backend):
    config = transformers.CompileConfig(fullgraph=True, backend=backend, mode=None, options=None)
    config._compile_all_devices = True
    return config


def sampled(group, seeds):
    """Ranks with equal seeds sample the same tokens; with others each gets an error."""
    ids = models.prompt(20)
    model = models.model("llama")
    cache = hf.ShardedCache(model, 64, group, block=4)
    hf.prefill(model, ids, cache)
    torch.manual_seed(seeds[group.rank()])
    try:
        made, _ = generate(model, ids, past_key_values=cache, do_sample=True, max_new_tokens=20, temperature=2.0)
    except longspan.UsageError as error:
        return str(error)
    return made.tolist()


def prompts_differ(group):
    model = models.model("llama")
    cache = hf.ShardedCache(model, 64, group)
    try:
        hf.prefill(model, models.prompt(9, seed=group.rank()), cache)
    except longspan.UsageError as error:
        return str(error)


DIFFERENT = {  # what the ranks do differently before or in prefill: each one's error
    "input_ids": "input_ids differs between rank", "chunk": "chunk differs between rank", "crop": "tokens in the cache differs",
    "padding": "the padding of attention_mask differs", "max_cache_len": "max_cache_len", "block": "block differs"}


def prefill_differently(group, what):
    model, ids, me = models.model("llama"), models.prompt(20), group.rank()
    cache = hf.ShardedCache(model, 64 + me * (what == "max_cache_len"), group, block=4 << me * (what == "block"))
    try:
        if what != "max_cache_len":
            hf.prefill(model, ids, cache) if what != "block" else None
            cache.crop(-me * (what == "crop"))
            hf.prefill(model, ids if what == "crop" else models.prompt(20, seed=me * (what == "input_ids")), cache,
                       chunk=8 + 8 * me * (what == "chunk"),
                       attention_mask=(torch.arange(20, device=ids.device) >= me * (what == "padding")).long().expand_as(ids))
        model(ids, past_key_values=cache)
    except longspan.LongspanError as error:
        return str(error)


class Dies(transformers.StoppingCriteria):
    def __init__(self, at):
        self.at = at

    def __call__(self, input_ids, scores, **options):
        if input_ids.shape[1] == self.at:
            os._exit(7)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def die(group, who, compileable):
    """A rank dies while it generates: the others' generate raises, or, where steps are compiled, their wait."""
    ids = models.prompt(20)
    model = models.model("llama")
    cache = hf.ShardedCache(model, 64, group, block=4, compileable=compileable)
    hf.prefill(model, ids, cache)
    criteria = transformers.StoppingCriteriaList([Dies(23)] if group.rank() == who else [])
    begin = time.monotonic()
    try:
        generate(model, ids, past_key_values=cache, max_new_tokens=20, stopping_criteria=criteria)
        cache.comm.wait()
    except longspan.RankError as error:
        return error.rank, time.monotonic() - begin
