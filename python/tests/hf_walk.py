"""All causal language models of transformers, tiny and with random weights, beside transformers' own attention:

    python3 python/tests/hf_walk.py [MODEL_TYPE ...]

Each is tried on two ranks: without a cache, over transformers' own cache, and over a ShardedCache with and without
prefill. A model that is not refused by name must have the logits of the attention "eager"; anything else is a
failure.
"""

import copy
import functools
import inspect
import warnings

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import longspan
import longspan.hf as hf
from device import DEVICE

TOKENS = 23  # of the prompt

SMALL = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=256, n_positions=256, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    is_decoder=True, is_encoder_decoder=False, tie_word_embeddings=False, attention_dropout=0.0, hidden_dropout_prob=0.0,
    # encoders and decoders
    d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48, encoder_layers=1,
    encoder_attention_heads=4, encoder_ffn_dim=48, ffn_dim=48, embedding_size=32, word_embed_proj_dim=32,
    # windows
    sliding_window=8, window_size=8, sliding_window_size=8,
    # experts
    moe_intermediate_size=16, num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
    topk_group=1, n_shared_experts=1, first_k_dense_replace=1, shared_expert_intermediate_size=16, moe_topk=2,
    expert_ffn_hidden_size=16, ffn_hidden_size=48, zero_expert_num=1, moe_layer_start_index=1, moe_num_experts=4,
    moe_k=2, num_shared_experts=1, shared_intermediate_size=16,
    # latent keys
    kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, qk_head_dim=16,
    index_n_heads=2, index_head_dim=8, index_topk=8, o_lora_rank=16, o_groups=2, hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=61,
    # linear layers
    mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16, mamba_expand=2, mamba_n_groups=1, state_size=8,
    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, lru_width=32)

# Further arguments of a model.
ALSO = {
    "openai-gpt": dict(n_embd=32, n_layer=2, n_head=4), "xlm": dict(emb_dim=32, n_layers=2, n_heads=4, n_words=61),
    "codegen": dict(rotary_dim=4), "gptj": dict(rotary_dim=4), "gpt_neo": dict(
        attention_types=[[["global", "local"], 1]]), "falcon_h1": dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8),
    "cohere_compass_text": dict(layer_types=["sliding_attention", "full_attention"]), "gemma3n_text": dict(
        num_kv_shared_layers=0, layer_types=["sliding_attention", "full_attention"]),
    "xlnet": dict(d_head=8), "zaya": dict(num_experts_per_tok=1), "zamba": dict(
        num_hidden_layers=2, layer_types=["hybrid", "mamba"]), "reformer": dict(axial_pos_embds=False),
    "dbrx": dict(attn_config=dict(kv_n_heads=2, rope_theta=1e4), ffn_config=dict(
        ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2)),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]), "mamba2": dict(num_heads=8),
}


def names():
    """Models of text; models with pictures or sound contain one."""
    return sorted(kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
                  if all(part in ("attn_config", "ffn_config") for part in CONFIG_MAPPING[kind].sub_configs))


def config(kind, **changed):
    made = CONFIG_MAPPING[kind]
    default = made()
    given = {name: value for name, value in SMALL.items() if _has(default, name)}
    if _has(default, "kv_lora_rank"):  # as many heads of keys as of queries
        given["num_key_value_heads"] = 4
    return made(**given | ALSO.get(kind, {}) | changed)


def _has(default, name):
    """Whether a config has that, and it may be set."""
    try:
        return hasattr(default, name) and not isinstance(getattr(type(default), name, None), property)
    except Exception:  # how it means that layers have different ones
        return False


def model(kind, **changed):
    """With the attention "eager", and weights that are large enough for attention to matter."""
    torch.manual_seed(1)
    made = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])(config(kind, **changed)).eval()
    made.set_attn_implementation("eager")
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "sink" in name:
                weight.normal_()
            elif weight.dim() > 1:
                weight.normal_(std=1.5 * weight.shape[-1] ** -0.5)
    return made


def ours(made):
    """The same model with the attention "longspan"."""
    other = copy.deepcopy(made)
    other.config._attn_implementation = hf.NAME
    for module in other.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = hf.NAME
    return other


def prompt(tokens=TOKENS):
    return torch.randint(2, 61, (2, tokens), generator=torch.Generator().manual_seed(7), device="cpu").to(DEVICE)


def whole(made, tokens=TOKENS):
    return made(prompt(tokens), use_cache=False).logits


def in_steps(made, cache):
    """A first forward, then single tokens and several."""
    ids, logits, at = prompt(), [], 0
    for step in (TOKENS - 10, 1, 1, 5, 3):
        logits.append(made(ids[:, at:at + step], past_key_values=cache, use_cache=True).logits)
        at += step
    return torch.cat(logits, 1)


def prefilled(made, cache):
    hf.prefill(made, prompt(), cache, chunk=8)
    return made(prompt()[:, -1:], past_key_values=cache, use_cache=True).logits


def padded(made, side, cache=None):
    """Logits of a batch whose second sequence is padded, with zeros for padding; over a cache in steps."""
    place, least = torch.arange(TOKENS, device=DEVICE), torch.tensor([[0], [9]], device=DEVICE)
    mask = (place >= least if side == "left" else place < TOKENS - least).long()
    ids, options = prompt() * mask, {}
    if "position_ids" in inspect.signature(made.forward).parameters:
        options["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    logits, at = [], 0
    for step in (TOKENS,) if cache is None else (TOKENS - 6, 1, 5):
        now = slice(at, at + step)
        logits.append(made(ids[:, now], attention_mask=mask[:, :at + step], past_key_values=cache, use_cache=cache is not None,
                           **{name: value[:, now] for name, value in options.items()}).logits)
        at += step
    return torch.cat(logits, 1) * mask[:, :, None]


def outcome(call, right):
    try:
        found = call()
    except longspan.UnsupportedError as error:
        return "refused", str(error)
    except Exception as error:
        return "fails", f"{type(error).__name__}: {error}"
    right = right[:, -found.shape[1]:]
    if not torch.isfinite(right).all():
        return "skipped", "eager is not finite"
    off = ((found - right).abs().max() / right.abs().max()).item()
    return ("right", "") if off < 1e-4 else ("WRONG", f"off by {off:.2g}")


@torch.no_grad()
def tried(kind, group=None, **changed):
    """{way: (outcome, why)}."""
    made = model(kind, **changed)
    right = whole(made)
    mine = ours(made)
    text = made.config.get_text_config(decoder=True)
    found = {"no cache": outcome(lambda: whole(mine), right)}
    try:
        steps = in_steps(made, transformers.DynamicCache(config=text))
        found["own cache"] = outcome(lambda: in_steps(mine, transformers.DynamicCache(config=text)), steps)
    except Exception as error:  # some take no cache of transformers
        steps = right
        found["own cache"] = "skipped", f"so does eager: {type(error).__name__}: {error}"
    cache = functools.partial(hf.ShardedCache, mine, 40, group, block=4)
    found["sharded"] = outcome(lambda: in_steps(mine, cache()), steps)
    found["prefill"] = outcome(lambda: prefilled(mine, cache()), right)
    return found


@torch.no_grad()
def tried_padded(kind, group=None):
    """{way: (outcome, why)} of padded batches."""
    made = model(kind)
    mine = ours(made)
    found = {side: outcome(lambda side=side: padded(mine, side), padded(made, side)) for side in ("left", "right")}
    cache = hf.ShardedCache(mine, 40, group, block=4)
    found["sharded"] = outcome(lambda: padded(mine, "left", cache), padded(made, "left"))
    return found


def try_all(group, kinds):
    """The results of tried(), as lines."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    lines = []
    for kind in kinds:
        try:
            lines += [f"{kind:24} {way:10} {what:8} {why}" for way, (what, why) in tried(kind, group).items()]
        except Exception as error:
            lines.append(f"{kind:24} cannot be made: {type(error).__name__}: {str(error)[:200]!r}")
    return lines


if __name__ == "__main__":
    import sys

    from torch_ranks import TorchRanks

    ranks = TorchRanks(2)
    for kind in sys.argv[1:] or names():
        here, there = ranks.values(2, try_all, [kind])
        print(*here, *(line for line in there if line not in here), sep="\n", flush=True)
    ranks.end()
