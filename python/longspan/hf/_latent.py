"""Latent attention (MLA) over a ShardedCache, which keeps rows [latent | rotary] as transformers' own caches do.

A module of such a model projects what the cache returned to the keys and values of all heads (expand_kv). A rank has only
its share, so here the attention does that. In a prefill it projects the rank's own rows. In decode it does not: it
absorbs the projections into the queries and the results,

    q' = [q_nope W_uk | q_rotary],   o = attention(q', rows, the first columns of the rows) W_uv,

and all heads read the one row of a token.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from ._sealed import Held


def _weights(module: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """(W_uk [heads, nope, latent], W_uv [heads, value, latent]), views of kv_b_proj."""
    nope, value = module.qk_nope_head_dim, module.v_head_dim
    weight = module.kv_b_proj.weight.view(-1, nope + value, module.kv_lora_rank)
    return weight[:, :nope], weight[:, nope:]


def _expand_kv(self: torch.nn.Module, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """A module's expand_kv, which leaves what a ShardedCache returned to the attention."""
    if isinstance(kv_nope, Held):
        return kv_nope, k_rot
    return type(self).expand_kv(self, kv_nope, k_rot)


@torch.no_grad()
def _can_absorb(module: torch.nn.Module) -> bool:
    """Whether a module's keys and values are these products of the latents, and no others."""
    sizes = [getattr(module, name, None) for name in ("qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim")]
    project = getattr(module, "kv_b_proj", None)
    if type(project) is not torch.nn.Linear or project.bias is not None or not all(isinstance(n, int) for n in sizes):
        return False
    nope, value, rank, rotary = sizes
    weight = project.weight
    if not weight.is_floating_point() or weight.is_meta or weight.shape[1] != rank or weight.shape[0] % (nope + value):
        return False
    of_keys, of_values = _weights(module)
    steps = torch.arange(3 * (rank + rotary), device=weight.device).view(1, 1, 3, -1) % 7 - 3.0
    latents, turned = steps.to(weight.dtype).split([rank, rotary], -1)
    keys, values = type(module).expand_kv(module, latents, turned)
    wanted = torch.cat([latents @ of_keys.mT, turned.expand(-1, len(of_keys), -1, -1)], -1), latents @ of_values.mT
    tolerance = torch.finfo(weight.dtype).eps ** 0.5
    return all(found.shape == right.shape and torch.allclose(found, right, rtol=tolerance, atol=tolerance * float(
        right.abs().max())) for found, right in zip((keys, values), wanted))


def latent_layers(model: Any) -> set[int]:
    """The layers whose attention can absorb its projections. Their expand_kv leaves a ShardedCache's rows alone from
    now on, and does what it did with others."""
    found, checked = set(), {}
    for module in model.modules():
        of_type = type(module)
        if not hasattr(of_type, "expand_kv") or not isinstance(getattr(module, "layer_idx", None), int):
            continue
        if of_type not in checked:
            checked[of_type] = _can_absorb(module)
        if checked[of_type] and type(module.kv_b_proj) is torch.nn.Linear:
            module.expand_kv = types.MethodType(_expand_kv, module)
            found.add(module.layer_idx)
    return found


def expanded(module: torch.nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [batch, tokens, heads, dim] of rows [batch, tokens, 1, latent + rotary]."""
    latents, turned = rows.transpose(1, 2).split([module.kv_lora_rank, module.qk_rope_head_dim], -1)
    if not rows.shape[1]:  # views of nothing have no certain shape
        of_keys, of_values = _weights(module)
        heads, nope = of_keys.shape[:2]
        return (rows.new_empty(rows.shape[0], 0, heads, nope + module.qk_rope_head_dim),
                rows.new_empty(rows.shape[0], 0, heads, of_values.shape[1]))
    return tuple(t.transpose(1, 2) for t in type(module).expand_kv(module, latents, turned))


def absorbed(module: torch.nn.Module, query: Tensor) -> Tensor:
    """Queries [batch, tokens, heads, latent + rotary] of query [batch, heads, tokens, nope + rotary]."""
    nope, rotary = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    return torch.cat([nope @ _weights(module)[0], rotary], -1).transpose(1, 2).contiguous()


def projected(module: torch.nn.Module, out: Tensor) -> Tensor:
    """Results [batch, tokens, heads, value] of out [batch, tokens, heads, latent]."""
    return (out.transpose(1, 2) @ _weights(module)[1].mT).transpose(1, 2)
