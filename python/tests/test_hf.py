"""transformers: prompts prefilled in shards, and stock generate over the sharded cache."""

import concurrent.futures
import contextlib
import copy
import subprocess
import sys

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.17")

import hf_jobs as jobs
import hf_models as models
import hf_walk as walk
import longspan
import longspan.hf as hf
import torch
from device import DEVICE

LATENT = ["deepseek_v2", "deepseek_v3"]
KINDS = ["llama", "mistral", "gemma2", "gpt_oss"]  # grouped heads, window, softcap, sinks


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [7, 64, 65, 333])
def test_the_tokens_of_one_process(torch_ranks, ranks, kind, tokens):
    for block in (4, 128) if tokens == 333 else (4,):
        found = torch_ranks.values(ranks, jobs.same_tokens, kind, tokens, block)
        assert found == found[:1] * ranks  # the same bits on every rank
        assert found[0][1] == tokens + jobs.NEW - 1


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_batches_and_turns(torch_ranks, kind):
    torch_ranks.values(2, jobs.same_tokens, kind, 65, 4, 20, 2)
    torch_ranks.values(3, jobs.same_tokens, kind, 1, 4)
    torch_ranks.values(3, jobs.same_tokens, kind, 2, 4)
    torch_ranks.values(2, jobs.without_prefill, kind)
    torch_ranks.values(2, jobs.a_talk, kind)


@pytest.mark.parametrize("kind", LATENT)
def test_latent_keys(torch_ranks, kind):
    """Prefilled by heads of their own keys, decoded over the latent rows: the tokens of transformers' own attention."""
    for ranks, tokens, block in ((1, 65, 4), (2, 333, 128), (4, 65, 4)):
        found = torch_ranks.values(ranks, jobs.same_tokens, kind, tokens, block)
        assert found == found[:1] * ranks  # the same bits on every rank
    torch_ranks.values(2, jobs.same_tokens, kind, 65, 4, 20, 2)
    torch_ranks.values(3, jobs.same_tokens, kind, 2, 4)
    torch_ranks.values(2, jobs.without_prefill, kind)
    torch_ranks.values(3, jobs.same_tokens_of_padded, kind, 47, 4)
    if kind == "deepseek_v3":
        torch_ranks.values(2, jobs.a_talk, kind)


def test_latent_keys_of_whole_width(torch_ranks):
    torch_ranks.values(2, jobs.same_tokens, "deepseek_v3, whole rows", 40, 4)


@pytest.mark.more
def test_compiled_decode_of_latent_keys(torch_ranks):
    assert torch_ranks.values(2, jobs.compiled_decode, "deepseek_v3", False) == [1, 1]


@torch.no_grad()
def test_latent_rows():
    """A row lies in memory once; a copy of a cache has rows of its own; other caches of the model are as before."""
    model, ids = models.model("deepseek_v3"), models.prompt(20)
    own = model(ids).logits
    cache = hf.ShardedCache(model, 64)
    hf.prefill(model, ids, cache)
    layer = cache.layers[0]
    assert list(layer.share.rows.shape) == [1, 64, 1, 32] and layer.share.rows[0, :19].any()
    assert layer.keys.data_ptr() == layer.share.rows.data_ptr()
    assert layer.values.untyped_storage().data_ptr() == layer.share.rows.untyped_storage().data_ptr()
    other = copy.deepcopy(cache)
    assert other.layers[0].share.rows.data_ptr() != layer.share.rows.data_ptr()
    for each in (cache, other):
        torch.testing.assert_close(model(ids[:, -1:], past_key_values=each).logits, own[:, -1:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(ids).logits, own)
    copied = copy.deepcopy(model)
    copied.model.layers[0].self_attn.kv_b_proj.weight.data.zero_()
    assert (copied(ids).logits - own).abs().max() > 1e-3
    torch.testing.assert_close(model(ids).logits, own)


@torch.no_grad()
def test_latent_keys_that_cannot_be_absorbed():
    """A projection of another kind, as a quantised one: refused by name, not computed otherwise."""
    model = models.model("deepseek_v3")
    for block in model.model.layers:
        block.self_attn.kv_b_proj = torch.nn.Sequential(block.self_attn.kv_b_proj)
    with pytest.raises(NotImplementedError, match="latent keys are projected by other than"):
        model(models.prompt(5), past_key_values=hf.ShardedCache(model, 16))


@pytest.mark.more
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_decode(torch_ranks, ranks, kind):
    for by_generate in (False, True):
        assert torch_ranks.values(ranks, jobs.compiled_decode, kind, by_generate) == [1] * ranks


@torch.no_grad()
@pytest.mark.parametrize("default", [None, DEVICE])
def test_a_compiled_step_serves_any_cache(default):
    """Under a default device too, which torch.compile takes for a mode of torch functions."""
    torch._dynamo.reset()
    model, other = models.model("llama"), models.model("llama", "eager")
    step = torch.compile(model, fullgraph=True, backend="eager")
    with contextlib.nullcontext() if default is None else torch.device(default):
        check_steps(model, other, step)


def check_steps(model, other, step):
    for tokens in 20, 23, 26:
        ids = models.prompt(tokens, seed=tokens)
        cache = hf.ShardedCache(model, 64, block=4, compileable=True)
        hf.prefill(model, ids, cache)
        found = step(ids[:, -1:].clone(), past_key_values=cache).logits
        torch.testing.assert_close(found, other(ids).logits[:, -1:], rtol=1e-4, atol=1e-4)


def test_generate_does_not_compile_by_itself(torch_ranks):
    """On GPUs it would, for a cache that allows it, and single steps would no longer be checked."""
    assert torch_ranks.values(2, jobs.compiled_decode, "llama", True, False) == [0, 0]


def test_sampling(torch_ranks):
    first, second = torch_ranks.values(2, jobs.sampled, [5, 5])
    assert first == second and len(first[0]) == 40
    for error in torch_ranks.values(2, jobs.sampled, [5, 6]):
        assert "rank 0 and rank 1 feed different tokens" in error or "rank 1 and rank 0" in error
    for error in torch_ranks.values(2, jobs.prompts_differ):
        assert "input_ids differs between rank" in error


@pytest.mark.more
@pytest.mark.parametrize("compileable", [False, True])  # which matters on GPUs
def test_a_rank_that_dies_in_generate(compileable):
    from torch_ranks import TorchRanks

    made = TorchRanks(2)
    (kind, value), died = made(2, jobs.die, 1, compileable)
    assert died == ("dead", None) and kind == "value", value
    who, took = value
    assert who == 1 and (compileable or took < 15)  # compiling takes half a minute on a GPU
    assert made.end() == [0, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_padded_batches(torch_ranks, kind):
    torch_ranks.values(1, jobs.same_tokens_of_padded, kind, 30, 128)
    torch_ranks.values(2, jobs.same_tokens_of_padded, kind, 47, 4)
    torch_ranks.values(3, jobs.same_tokens_of_padded, kind, 65, 4, 20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_in_one_process(kind, side):
    """Logits of tokens besides the padding; and on the left those of generate over transformers' own cache."""
    model, other = models.model(kind), models.model(kind, "eager")
    ids, mask = jobs.padded(40, side)
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    found, right = (m(ids, attention_mask=mask, position_ids=places).logits[mask == 1] for m in (model, other))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    if side == "left":
        found, right = (jobs.generate(m, ids, attention_mask=mask) for m in (model, other))
        assert torch.equal(found[0], right[0])
        torch.testing.assert_close(found[1], right[1], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_padded_encoder():
    torch.manual_seed(2)
    config = transformers.BertConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                     intermediate_size=48, attn_implementation="eager")
    model = transformers.BertModel(config).eval().to(DEVICE)
    for side in ("left", "right"):
        ids, mask = jobs.padded(23, side)
        model.set_attn_implementation("eager")
        right = model(ids, attention_mask=mask).last_hidden_state[mask == 1]
        model.set_attn_implementation("longspan")
        torch.testing.assert_close(model(ids, attention_mask=mask).last_hidden_state[mask == 1], right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_one_process_and_any_cache(kind):
    """The attention alone: without a cache, and over transformers' own."""
    ids, model, other = models.prompt(50), models.model(kind), models.model(kind, "eager")
    torch.testing.assert_close(model(ids).logits, other(ids).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(jobs.generate(model, ids)[0], jobs.generate(other, ids)[0])


RIGHT, REFUSED, PARTS = ["right"] * 4, ["refused"] * 4, ["right"] * 2 + ["refused"] * 2


@pytest.mark.parametrize("kind, wanted", [  # without a cache, over transformers' own, over a ShardedCache, with prefill
    ("qwen2", RIGHT), ("gpt2", RIGHT), ("gemma4_text", RIGHT),
    ("deepseek_v2", RIGHT), ("deepseek_v3", RIGHT), ("glm4_moe_lite", RIGHT),  # latent keys
    ("diffllama", PARTS),  # values in two halves
    ("bloom", REFUSED), ("mpt", REFUSED), ("xglm", REFUSED), ("gpt_neox_japanese", REFUSED),  # their own attention
    ("roformer", REFUSED), ("rembert", REFUSED), ("megatron-bert", REFUSED), ("big_bird", REFUSED),
    ("roberta", RIGHT[:3] + REFUSED[:1]),  # positions do not begin at 0
    ("bart", RIGHT[:3] + REFUSED[:1]),  # no position_ids
    ("openai-gpt", RIGHT[:3] + REFUSED[:1]),  # no cache
])
def test_models_are_right_or_refused(kind, wanted):
    found = walk.tried(kind)
    assert [what for what, why in found.values()] == wanted, found


@pytest.mark.parametrize("kind", ["gpt2"] + [pytest.param(kind, marks=pytest.mark.long) for kind in (
    "llama", "mistral", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3", "qwen2_moe", "mixtral", "phi", "phi3", "gpt_neox",
    "opt", "olmo2", "cohere", "granite", "stablelm", "starcoder2", "glm", "gpt_oss", "smollm3")])
def test_padded_batches_of_families(kind):
    found = walk.tried_padded(kind)
    assert [what for what, why in found.values()] == ["right"] * 3, found


@torch.no_grad()
def test_a_model_that_is_another_one_further_on():
    """Compressed keys begin at 128 tokens."""
    model = walk.model("deepseek_v4")
    for tokens, wanted in (23, "right"), (150, "refused"):
        what, why = walk.outcome(lambda: walk.whole(walk.ours(model), tokens), walk.whole(model, tokens))
        assert what == wanted, (tokens, why)


@pytest.mark.parametrize("where", ["not given", "copied", "not both"])
def test_keys_that_are_not_what_the_cache_returned(where):
    """For a module that uses them otherwise than in attention."""
    cache, new = cached(), torch.randn(1, 2, 3, 8)
    keys, values = cache.update(new, new, 0)
    with pytest.raises(NotImplementedError, match="ShardedCache"):
        if where == "not given":
            cache.update(new, new, 1)
        elif where == "copied":
            keys.clone()
        else:
            hf.attention(torch.nn.Module(), new, keys, torch.zeros(values.shape), None)


def test_threads_have_caches_of_their_own():
    prompts = [models.prompt(n) for n in (21, 34)]
    right = [jobs.reference("gemma2", ids)[0] for ids in prompts]
    model = models.model("gemma2")

    def generated(turn):
        cache, ids = hf.ShardedCache(model, 64, block=4), prompts[turn % 2]
        hf.prefill(model, ids, cache)
        return jobs.generate(model, ids, past_key_values=cache)[0]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(generated, range(12)))
    assert [torch.equal(tokens, right[turn % 2]) for turn, tokens in enumerate(found)] == [True] * 12


PROMPT = models.prompt(20)


@pytest.mark.parametrize("forgotten", [0, 50])
@pytest.mark.parametrize("then", [
    models.prompt(20, seed=8), models.prompt(9, seed=8), models.prompt(40, seed=8), PROMPT, PROMPT[:, :9], PROMPT[:, :1],
    torch.cat([PROMPT[:, :10], models.prompt(15, seed=5)], 1), torch.cat([PROMPT, models.prompt(15, seed=5)], 1),
    models.prompt(20, 2)], ids=["other", "other, shorter", "other, longer", "same", "part", "one", "begin", "longer", "batch"])
def test_prefill_of_another_prompt(then, forgotten):
    """Afterwards the cache holds that prompt; only the common beginning is kept."""
    cache = cached(64, block=4)
    hf.prefill(MODEL, PROMPT, cache)
    jobs.generate(MODEL, PROMPT, past_key_values=cache)
    cache.crop(-forgotten)
    assert int(cache.get_seq_length()) == max(0, 24 - forgotten)
    hf.prefill(MODEL, then, cache)
    assert int(cache.get_seq_length()) == then.shape[1] - 1
    assert torch.equal(jobs.generate(MODEL, then, past_key_values=cache)[0], jobs.reference("llama", then)[0])


def test_ranks_that_prefill_differently(torch_ranks):
    for what, says in jobs.DIFFERENT.items():
        for text in torch_ranks.values(2, jobs.prefill_differently, what):
            assert says in text, (what, text)


@pytest.mark.parametrize("first, then", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)])
def test_a_cache_outlives_inference_mode(first, then):
    ids = models.prompt(20)
    with first():
        cache = cached(64, block=4)
        hf.prefill(MODEL, ids, cache)
    with then():
        again = torch.cat([jobs.generate(MODEL, ids, past_key_values=cache)[0], models.prompt(9)], 1)
        hf.prefill(MODEL, again, cache)
        cache.crop(-2)
        found = MODEL(again[:, -3:], past_key_values=cache).logits
        right = models.model("llama", "eager")(again).logits[:, -3:]
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_copies_of_a_cache():
    """A prompt is computed once, and answered twice."""
    begin, first = cached(64, block=4), torch.cat([PROMPT, models.prompt(5)], 1)
    hf.prefill(MODEL, PROMPT, begin)
    second = copy.deepcopy(begin)
    for cache, ids in (begin, first), (second, PROMPT), (copy.deepcopy(begin), first):
        hf.prefill(MODEL, ids, cache)
        assert torch.equal(jobs.generate(MODEL, ids, past_key_values=cache)[0], jobs.reference("llama", ids)[0])
    assert int(second.get_seq_length()) == 24 and int(begin.get_seq_length()) == 29


@pytest.mark.parametrize("of_cache", [False, True])
@torch.no_grad()
def test_a_model_that_is_not_causal(of_cache):
    """The mask decides what is visible, whatever is_causal of the layer."""
    ids, logits = models.prompt(20), []
    for attention in "longspan", "eager":
        model = models.model("llama", attention)
        model.config.is_causal = False
        caches = dict(longspan=lambda: hf.ShardedCache(model, 64, block=4), eager=transformers.DynamicCache)
        options = dict(past_key_values=caches[attention]()) if of_cache else dict(use_cache=False)
        logits.append(model(ids, **options).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


MODEL = models.model("llama")
IDS = models.prompt(9, 2)
RIGHT_PADDED = torch.ones_like(IDS).index_fill(1, torch.tensor([IDS.shape[1] - 1], device=IDS.device), 0)
HOLED = torch.ones_like(IDS).index_fill(1, torch.tensor([1]), 0)


def cached(tokens=20, **options):
    return hf.ShardedCache(MODEL, tokens, **options)


def attend(**options):
    q = torch.zeros(1, 2, 3, 8)
    return hf.attention(torch.nn.Module(), q, q, q, **dict(attention_mask=None) | options)


def of(change, kind="llama"):
    made = transformers.AutoModelForCausalLM.from_config(models.config(kind))
    for name, value in change.items():
        setattr(made.config, name, value)
    return made


def mask_of(function, **options):
    return hf.mask(batch_size=1, q_length=3, kv_length=3, q_offset=0, kv_offset=0, mask_function=function, **options)


def with_dropout():
    model = models.model("llama").train()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    return model


def generate_with_dropout():
    model = with_dropout()
    model.generate(IDS, past_key_values=hf.ShardedCache(model, 20), max_new_tokens=3, do_sample=False)


def test_dropout():
    """By torch's generator; none in evaluation."""
    model = with_dropout()
    torch.manual_seed(1)
    logits = model(IDS).logits
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    torch.manual_seed(1)
    assert torch.equal(model(IDS).logits, logits)
    assert not torch.equal(model(IDS).logits, logits)
    assert torch.equal(model.eval()(IDS).logits, models.model("llama")(IDS).logits)


def generate(**options):
    return MODEL.generate(IDS, **dict(max_new_tokens=3, do_sample=False) | options)


@pytest.mark.parametrize("call, error, says", [
    (lambda: MODEL(IDS, attention_mask=HOLED), NotImplementedError, "zeros between ones"),
    (lambda: generate(attention_mask=HOLED, past_key_values=cached()), NotImplementedError, "zeros between ones"),
    (lambda: hf.prefill(MODEL, IDS, cached(), attention_mask=HOLED), NotImplementedError, "zeros between ones"),
    (lambda: hf.prefill(MODEL, IDS, cached(), attention_mask=RIGHT_PADDED), NotImplementedError, "padding on the right"),
    (lambda: generate(attention_mask=RIGHT_PADDED), NotImplementedError, "zeros between ones"),
    (lambda: hf.prefill(MODEL, IDS, cached(), attention_mask=HOLED[:, 1:]), longspan.InputError, "the same shape"),
    (lambda: MODEL(IDS, attention_mask=torch.zeros(2, 1, 9, 9)), NotImplementedError, "attention_mask"),
    (lambda: generate(num_beams=2, past_key_values=cached()), NotImplementedError, "num_beams"),
    (lambda: generate(num_return_sequences=2, num_beams=2, past_key_values=prefilled()), NotImplementedError,
     "num_return_sequences"),
    (lambda: generate(cache_implementation="static"), NotImplementedError, "StaticCache"),
    (lambda: generate_with_dropout(), NotImplementedError, "dropout over a ShardedCache"),
    (lambda: attend(dropout=1.5), longspan.InputError, "dropout_p is 1.5"),
    (lambda: attend(position_bias=torch.zeros(1)), NotImplementedError, "position_bias"),
    (lambda: attend(cu_seq_lens_q=torch.zeros(1)), NotImplementedError, "cu_seq_lens_q"),
    (lambda: attend(output_attentions=True), NotImplementedError, "output_attentions"),
    (lambda: attend(sliding_window=3, is_causal=False), NotImplementedError, "sliding_window"),
    (lambda: mask_of(transformers.masking_utils.blockwise_overlay(torch.zeros(1, 3))), NotImplementedError,
     "blockwise_overlay"),
    (lambda: mask_of(transformers.masking_utils.padding_mask_function(IDS)), NotImplementedError, "packed"),
    (lambda: mask_of(lambda *a: True, use_vmap=True), NotImplementedError, "or_mask_function"),
    (lambda: hf.mask(1, 3, 5, q_offset=0, kv_offset=0), NotImplementedError, "StaticCache"),
    (lambda: hf.mask(1, 3, 5, q_offset=torch.tensor(0), kv_offset=0), NotImplementedError, "StaticCache"),
    (lambda: hf.ShardedCache(of(dict(layer_types=["chunked_attention"] * 2)), 9), NotImplementedError, "chunked"),
    (lambda: hf.ShardedCache(of(dict(layer_types=["linear_attention"] * 2)), 9), NotImplementedError, "linear"),
    (lambda: hf.ShardedCache(of(dict(attention_chunk_size=8)), 9), NotImplementedError, "chunked"),
    (lambda: hf.ShardedCache(of(dict(num_kv_shared_layers=1)), 9), NotImplementedError, "share"),
    (lambda: hf.ShardedCache(models.model("llama", "eager"), 9), longspan.UsageError, "attention is 'eager'"),
    (lambda: hf.ShardedCache(torch.nn.Linear(2, 2), 9), TypeError, "model is of type 'Linear'"),
    (lambda: cached(0), longspan.InputError, "max_cache_len is 0"),
    (lambda: cached(9, block=0), longspan.InputError, "block"),
    (lambda: hf.prefill(MODEL, IDS, cached(8)), longspan.InputError, "max_cache_len=8"),
    (lambda: generate(past_key_values=cached(10), max_new_tokens=9), longspan.InputError, "max_cache_len=10"),
    (lambda: hf.prefill(MODEL, IDS, None), TypeError, "cache is of type"),
    (lambda: hf.prefill(MODEL, IDS.float(), cached()), longspan.InputError, "input_ids"),
    (lambda: hf.prefill(MODEL, IDS, cached(), chunk=0), longspan.InputError, "chunk is 0"),
    (lambda: cached().layers[0].offload(), NotImplementedError, "offload"),
    (lambda: cached().crop(3), longspan.InputError, "tokens_to_remove"),
    (lambda: MODEL(IDS, past_key_values=prefilled(), attention_mask=torch.ones(2, 9)), longspan.InputError,
     "attention_mask is of 9 tokens, and there are 17"),
    # On GPUs generate gives a mask, which is too short.
    (lambda: jobs.generate(MODEL, IDS[:1], past_key_values=prefilled(IDS[:1]), prompt_lookup_num_tokens=2),
     longspan.LongspanError, "generate with an assistant|attention_mask is of 9 tokens, and there are 17"),
    (lambda: MODEL(IDS, position_ids=torch.arange(9).fmod(4)[None], use_cache=False), NotImplementedError, "packed"),
    (lambda: attend(attention_mask=mask_of(transformers.masking_utils.causal_mask_function)[..., :2]),
     NotImplementedError, "'__getitem__' is called on the attention mask"),
    (lambda: attend(attention_mask=hf.mask(1, 2, 2)), NotImplementedError, "3 query rows and 3 keys"),
    (lambda: attend(attention_mask=hf.mask(1, 3, 3), sliding_window=2), NotImplementedError, "sliding_window=2"),
    (lambda: cached().update(torch.zeros(1, 2, 3, 8), None, 0), NotImplementedError, "values NoneType"),
    (lambda: cached().update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 2), NotImplementedError, "2 layers"),
    (lambda: cached().layers[0].update_conv_state(torch.zeros(1)), NotImplementedError, "convolutions"),
    (lambda: hf.prefill(MODEL, IDS[:, :0], cached()), longspan.InputError, "there is no token"),
    (lambda: hf.prefill(MODEL, IDS, cached(), chunk=True + 0.5), longspan.InputError, "chunk is 1.5"),
    (lambda: prefill_of_rope("dynamic", 40), NotImplementedError, "rope_type is 'dynamic'"),
    (lambda: prefill_of_rope("longrope", 40, chunk=16), NotImplementedError, "rope_type is 'longrope'"),
    (lambda: prefill_of_rope("longrope", 33), NotImplementedError, "rope_type is 'longrope'"),
    (lambda: hf.attention(torch.nn.Module(), *torch.zeros(2, 1, 2, 3, 8).unbind(), torch.zeros(1, 2, 3, 8), None)
     and hf.attention(torch.nn.Module(), torch.zeros(1, 2, 3, 8), *torch.zeros(2, 1, 2, 4, 8).unbind(), None),
     NotImplementedError, "3 query rows, 4 keys and no mask"),
    (lambda: not_causal(), NotImplementedError, "not causal"),
])
def test_what_is_not_supported_is_named(call, error, says):
    with pytest.raises(error, match=says):
        call()


def prefill_of_rope(kind, tokens, **options):
    rope = dict(rope_type=kind, rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)
    if kind == "longrope":
        rope |= dict(long_factor=[3.0] * 4, short_factor=[1.0] * 4)
    config = models.config("llama")
    config.rope_parameters = rope
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    cache, ids = hf.ShardedCache(model, 64, block=4), models.prompt(tokens)
    hf.prefill(model, ids, cache, **options)
    with torch.no_grad():
        found = model(ids[:, -1:], past_key_values=cache).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(found, model(ids).logits[:, -1:], rtol=1e-4, atol=1e-4)


def test_rope_that_depends_on_the_length():
    for kind, tokens in ("dynamic", 32), ("longrope", 32), ("longrope", 40):
        prefill_of_rope(kind, tokens)


def not_causal():
    model = of(dict(is_causal=False))
    hf.prefill(model, IDS, hf.ShardedCache(model, 20))


def prefilled(ids=IDS):
    cache = cached()
    hf.prefill(MODEL, ids, cache)
    return cache


def test_assisted_generation():
    """Tokens are guessed, and removed."""
    wanted = jobs.reference("llama", models.prompt(20))[0]
    cache = hf.ShardedCache(MODEL, 64)
    found, _ = jobs.generate(MODEL, models.prompt(20), past_key_values=cache, prompt_lookup_num_tokens=2)
    assert torch.equal(found, wanted)


@pytest.mark.more
def test_importing_longspan_imports_no_transformers():
    script = "import longspan, longspan.torch, sys; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120,
                          check=True).stdout == "False\n"


def llama4(attention):
    torch.manual_seed(2)
    config = transformers.Llama4TextConfig(
        **models.SMALL | dict(attn_implementation=attention, num_hidden_layers=4), intermediate_size_mlp=48, num_local_experts=2,
        attention_chunk_size=8)
    made = transformers.Llama4ForCausalLM(config).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.5 * weight.shape[-1] ** -0.5)
    return made


def test_chunks_of_llama4():
    eager, ours = llama4("eager"), llama4("longspan")
    assert "chunked_attention" in eager.config.layer_types
    ids = models.prompt(29, batch=2)
    padded = torch.ones_like(ids)
    padded[0, :5] = 0
    for mask in (None, padded):
        found, wanted = (m(ids, attention_mask=mask, use_cache=False).logits for m in (ours, eager))
        seen = slice(None) if mask is None else mask.bool()
        torch.testing.assert_close(found[seen], wanted[seen], atol=2e-4, rtol=2e-4)
        found, wanted = (m.generate(ids, attention_mask=mask, max_new_tokens=14, do_sample=False) for m in (ours, eager))
        assert torch.equal(found, wanted)


def gemma3(attention):
    torch.manual_seed(3)
    text = dict(models.SMALL, num_hidden_layers=4, sliding_window=9, layer_types=["sliding_attention", "full_attention"] * 2)
    text.pop("attn_implementation")
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    made = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=60, boi_token_index=58,
        eoi_token_index=59)).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.5 * weight.shape[-1] ** -0.5)
    made.model.language_model.set_attn_implementation(attention)
    return made


def test_images_of_gemma3():
    eager, ours = gemma3("eager"), gemma3("longspan")
    ids = models.prompt(40, batch=2).clamp(max=50)
    images = torch.zeros_like(ids)
    images[0, 3:15] = images[0, 20:24] = images[1, 30:40] = 1
    text = ours(ids, token_type_ids=0 * images, use_cache=False).logits
    found, wanted = (m(ids, token_type_ids=images, use_cache=False).logits for m in (ours, eager))
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)
    assert not torch.allclose(text, wanted, atol=1e-2)
    found, wanted = (m.generate(ids, token_type_ids=images, max_new_tokens=6, do_sample=False) for m in (ours, eager))
    assert torch.equal(found, wanted)
