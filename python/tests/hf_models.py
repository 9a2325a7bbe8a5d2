"""Tiny models with random weights, one for each option of attention."""

import torch
import transformers

from device import DEVICE

SMALL = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1,
             eos_token_id=None, attn_implementation="longspan", tie_word_embeddings=False)

LATENT = SMALL | dict(num_key_value_heads=4, kv_lora_rank=24, q_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8,
                      v_head_dim=12, first_k_dense_replace=1, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
                      n_group=1, topk_group=1, moe_intermediate_size=16)
LATENT.pop("head_dim")


def config(kind):
    if kind == "llama":  # grouped heads
        return transformers.LlamaConfig(**SMALL)
    if kind == "mistral":  # a window
        return transformers.MistralConfig(**SMALL, sliding_window=17)
    if kind == "gemma2":  # softcap, windows in every second layer, a scale of its own
        return transformers.Gemma2Config(**SMALL, sliding_window=24, attn_logit_softcapping=3.0,
                                         query_pre_attn_scalar=16)
    if kind == "gpt_oss":  # sinks
        return transformers.GptOssConfig(**SMALL | dict(num_attention_heads=8), sliding_window=40,
                                         num_local_experts=2, num_experts_per_tok=1)
    if kind in ("deepseek_v2", "deepseek_v3"):  # latent keys
        return transformers.AutoConfig.for_model(kind, **LATENT)
    if kind == "deepseek_v3, whole rows":  # of 576 columns, and heads of 192 and 128
        return transformers.AutoConfig.for_model("deepseek_v3", **LATENT | dict(
            num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128))
    raise KeyError(kind)


def model(kind, attention="longspan"):
    """The same on every rank. Weights are large enough for attention to matter."""
    torch.manual_seed(1)
    made = transformers.AutoModelForCausalLM.from_config(config(kind)).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "sinks" in name:
                weight.normal_()
            elif weight.dim() > 1:
                weight.normal_(std=1.5 * weight.shape[-1] ** -0.5)
    made.set_attn_implementation(attention)
    return made


def prompt(tokens, batch=1, seed=7):
    return torch.randint(2, 61, (batch, tokens), generator=torch.Generator().manual_seed(seed), device="cpu").to(DEVICE)
