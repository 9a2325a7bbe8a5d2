"""MLA decode in Triton, as engines run it where FlashMLA is missing: a program takes up to 16 heads of
a sequence and a split of its keys, in tiles of 32 keys, with the latent 512 columns and the rotary 64
apart; a second kernel merges the splits. Keys are in pages."""

import torch
import triton
import triton.language as tl

LATENT, ROTARY = 512, 64
DIM = LATENT + ROTARY


@triton.jit
def _split_kernel(q, cache, table, kv_len, partial, lse, scale, columns, splits,
                  heads: tl.constexpr, page: tl.constexpr, rows: tl.constexpr, tile: tl.constexpr,
                  latent: tl.constexpr, rotary: tl.constexpr):
    b, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dim: tl.constexpr = latent + rotary
    head = group * rows + tl.arange(0, rows)
    is_head = head < heads
    d, r = tl.arange(0, latent), latent + tl.arange(0, rotary)
    q_row = q + (b * heads + head)[:, None] * dim
    q_latent = tl.load(q_row + d[None, :], mask=is_head[:, None], other=0.0)
    q_rotary = tl.load(q_row + r[None, :], mask=is_head[:, None], other=0.0)
    length = tl.load(kv_len + b)
    each = tl.cdiv(tl.cdiv(length, splits), tile) * tile
    begin = split * each
    end = tl.minimum(begin + each, length)
    top = tl.full([rows], -float("inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    out = tl.zeros([rows, latent], tl.float32)
    for first in range(begin, end, tile):
        key = first + tl.arange(0, tile)
        seen = key < end
        at = tl.load(table + b * columns + key // page, mask=seen, other=0).to(tl.int64)
        row = cache + (at * page + key % page) * dim
        k = tl.load(row[None, :] + d[:, None], mask=seen[None, :], other=0.0)
        score = tl.dot(q_latent, k.to(q_latent.dtype))
        k_rotary = tl.load(row[None, :] + r[:, None], mask=seen[None, :], other=0.0)
        score += tl.dot(q_rotary, k_rotary.to(q_rotary.dtype))
        score = tl.where(seen[None, :], score * scale, -float("inf"))
        raised = tl.maximum(top, tl.max(score, 1))
        shrunk = tl.exp2(top - raised)
        weight = tl.exp2(score - raised[:, None])
        out = out * shrunk[:, None] + tl.dot(weight.to(k.dtype), tl.trans(k))
        total = total * shrunk + tl.sum(weight, 1)
        top = raised
    place = (b * heads + head) * splits + split
    if begin < end:
        tl.store(partial + place[:, None] * latent + d[None, :], out / total[:, None],
                 mask=is_head[:, None])
    tl.store(lse + place, tl.where(begin < end, top + tl.log2(total), -float("inf")), mask=is_head)


@triton.jit
def _merge_kernel(partial, lse, result, splits, latent: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, latent)
    top, total = -float("inf"), 0.0
    out = tl.zeros([latent], tl.float32)
    for split in range(splits):
        at = row * splits + split
        own = tl.load(lse + at)
        if own > -float("inf"):
            raised = tl.maximum(top, own)
            shrunk, weight = tl.exp2(top - raised), tl.exp2(own - raised)
            out = out * shrunk + weight * tl.load(partial + at * latent + d)
            total = total * shrunk + weight
            top = raised
    tl.store(result + row * latent + d, (out / total).to(result.dtype.element_ty))


class Decode:
    """One token of each sequence: q [batch, heads, 576], cache [pages, page, 1, 576]."""

    def __init__(self, q, cache, table, kv_len, splits, tile=32, warps=4, stages=2):
        batch, heads = q.shape[:2]
        self.q, self.cache, self.table, self.kv_len = q, cache, table, kv_len
        self.splits, self.tile, self.how = splits, tile, {"num_warps": warps, "num_stages": stages}
        self.partial = torch.empty(batch, heads, splits, LATENT, device=q.device)
        self.lse = torch.empty(batch, heads, splits, device=q.device)
        self.out = torch.empty(batch, heads, LATENT, device=q.device, dtype=q.dtype)

    def __call__(self):
        batch, heads = self.q.shape[:2]
        rows = 16
        _split_kernel[(batch, triton.cdiv(heads, rows), self.splits)](
            self.q, self.cache, self.table, self.kv_len, self.partial, self.lse,
            DIM ** -0.5 * 1.4426950408889634, self.table.shape[1], self.splits, heads,
            self.cache.shape[1], rows, self.tile, LATENT, ROTARY, **self.how)
        _merge_kernel[(batch * heads,)](self.partial, self.lse, self.out, self.splits, LATENT)
        return self.out


SWEEP = [(16, 4, 2), (16, 4, 3), (32, 4, 1), (32, 4, 2), (32, 8, 2), (64, 8, 1)]  # tile, warps, stages


def fastest(q, cache, table, kv_len, time_us, all_splits=(1, 2, 4, 8, 16, 32, 64)):
    """(us, splits, tile, warps, stages) of the fastest: tiles first, at the splits that fill the GPU,
    then splits."""
    best = None
    programs = q.shape[0] * -(-q.shape[1] // 16)
    fills = min(all_splits[-1], max(1, 1 << max(0, (264 // programs).bit_length())))

    def measure(splits, tile, warps, stages):
        nonlocal best
        try:
            us = time_us(Decode(q, cache, table, kv_len, splits, tile, warps, stages))
        except (triton.runtime.errors.OutOfResources, torch.OutOfMemoryError):
            return
        if best is None or us < best[0]:
            best = (us, splits, tile, warps, stages)

    for how in SWEEP:
        measure(fills, *how)
    for splits in all_splits:
        measure(splits, *best[2:])
    return best
