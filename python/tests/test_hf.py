"""transformers: prompts that are prefilled in shards, and stock generate over the cache where it is."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.17")

import hf_jobs as jobs
import hf_models as models
import longspan
import longspan.hf as hf
import torch

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


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_decode(torch_ranks, ranks, kind):
    for by_generate in (False, True):
        assert torch_ranks.values(ranks, jobs.compiled_decode, kind, by_generate) == [1] * ranks


def test_generate_does_not_compile_by_itself(torch_ranks):
    """On GPUs it would, for a cache that lets it, and nothing would look at single steps any more."""
    assert torch_ranks.values(2, jobs.compiled_decode, "llama", True, False) == [0, 0]


def test_sampling(torch_ranks):
    first, second = torch_ranks.values(2, jobs.sampled, [5, 5])
    assert first == second and len(first[0]) == 40
    for said in torch_ranks.values(2, jobs.sampled, [5, 6]):
        assert "rank 0 and rank 1 feed different tokens" in said or "rank 1 and rank 0" in said
    for said in torch_ranks.values(2, jobs.prompts_differ):
        assert "input_ids differs between rank" in said


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
@torch.no_grad()
def test_one_process_and_any_cache(kind):
    """The attention alone: without a cache, and over transformers' own."""
    ids, model, other = models.prompt(50), models.model(kind), models.model(kind, "eager")
    torch.testing.assert_close(model(ids).logits, other(ids).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(jobs.generate(model, ids)[0], jobs.generate(other, ids)[0])


MODEL = models.model("llama")
IDS = models.prompt(9, 2)
PADDED = torch.ones_like(IDS).index_fill(1, torch.tensor([0]), 0)


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
    with torch.no_grad():
        model(IDS)


def generate(**options):
    return MODEL.generate(IDS, **dict(max_new_tokens=3, do_sample=False) | options)


@pytest.mark.parametrize("call, error, says", [
    (lambda: MODEL(IDS, attention_mask=PADDED), NotImplementedError, "padding"),
    (lambda: generate(attention_mask=PADDED), NotImplementedError, "padding"),
    (lambda: generate(attention_mask=PADDED, past_key_values=cached()), NotImplementedError, "padding"),
    (lambda: hf.prefill(MODEL, IDS, cached(), attention_mask=PADDED), NotImplementedError, "padding"),
    (lambda: MODEL(IDS, attention_mask=torch.zeros(2, 1, 9, 9)), NotImplementedError, "attention_mask"),
    (lambda: generate(num_beams=2, past_key_values=cached()), NotImplementedError, "num_beams"),
    (lambda: generate(num_return_sequences=2, num_beams=2, past_key_values=prefilled()), NotImplementedError,
     "num_return_sequences"),
    (lambda: generate(cache_implementation="static"), NotImplementedError, "StaticCache"),
    (lambda: with_dropout(), NotImplementedError, "dropout"),
    (lambda: attend(dropout=0.1), NotImplementedError, "dropout"),
    (lambda: attend(position_bias=torch.zeros(1)), NotImplementedError, "position_bias"),
    (lambda: attend(cu_seq_lens_q=torch.zeros(1)), NotImplementedError, "cu_seq_lens_q"),
    (lambda: attend(output_attentions=True), NotImplementedError, "output_attentions"),
    (lambda: attend(sliding_window=3, is_causal=False), NotImplementedError, "sliding_window"),
    (lambda: MODEL(IDS), NotImplementedError, "requires grad"),
    (lambda: mask_of(transformers.masking_utils.chunked_causal_mask_function(4, torch.zeros(1)), local_size=4),
     NotImplementedError, "chunked_overlay"),
    (lambda: mask_of(transformers.masking_utils.padding_mask_function(IDS)), NotImplementedError, "packed"),
    (lambda: mask_of(lambda *a: True, use_vmap=True), NotImplementedError, "or_mask_function"),
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
])
def test_what_is_not_supported_is_named(call, error, says):
    with pytest.raises(error, match=says):
        call()


def prefilled():
    cache = cached()
    hf.prefill(MODEL, IDS, cache)
    return cache


def test_assisted_generation():
    """Tokens are guessed, and taken back."""
    wanted = jobs.reference("llama", models.prompt(20))[0]
    cache = hf.ShardedCache(MODEL, 64)
    found, _ = jobs.generate(MODEL, models.prompt(20), past_key_values=cache, prompt_lookup_num_tokens=2)
    assert torch.equal(found, wanted)


def test_importing_longspan_imports_no_transformers():
    script = "import longspan, longspan.torch, sys; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120,
                          check=True).stdout == "False\n"
