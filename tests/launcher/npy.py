"""Arrays in .npy files with only the standard library, and attention on them in float64."""

import math
import random
import struct

FORMATS = {"<f4": "f", "<f2": "e", "<V2": "H"}


def to_bits(value, code):
    """A float as it is stored; bfloat16 by rounding to nearest even."""
    if code != "<V2":
        return value
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def from_bits(stored, code):
    return struct.unpack("<f", struct.pack("<I", stored << 16))[0] if code == "<V2" else stored


def header(code, shape, fortran=False, version=1):
    text = f"{{'descr': {code!r}, 'fortran_order': {fortran}, 'shape': {tuple(shape)!r}, }}"
    size = "<H" if version == 1 else "<I"
    start = 8 + struct.calcsize(size)
    text += " " * (-(start + len(text) + 1) % 64) + "\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack(size, len(text)) + text.encode()


def save(path, shape, values, code="<f4", **options):
    stored = [to_bits(value, code) for value in values]
    data = struct.pack(f"<{len(stored)}{FORMATS[code]}", *stored)
    path.write_bytes(header(code, shape, **options) + data)


def load(path):
    """(code, shape, values)"""
    raw = path.read_bytes()
    assert raw[:6] == b"\x93NUMPY"
    length = struct.unpack("<H", raw[8:10])[0]
    described = eval(raw[10:10 + length], {}, {})  # written by the command under test
    assert (10 + length) % 64 == 0 and not described["fortran_order"]
    code, shape = described["descr"], described["shape"]
    stored = struct.unpack(f"<{math.prod(shape)}{FORMATS[code]}", raw[10 + length:])
    return code, shape, [from_bits(value, code) for value in stored]


def draw(shape, seed, code="<f4"):
    """Values of order 1, rounded to what the file will hold."""
    generator = random.Random(seed)
    size = FORMATS[code]
    values = []
    for _ in range(math.prod(shape)):
        value = generator.gauss(0, 1)
        if size != "H":
            value = struct.unpack(f"<{size}", struct.pack(f"<{size}", value))[0]
        else:
            value = from_bits(to_bits(value, code), code)
        values.append(value)
    return values


def rotated(row, position, dim, interleaved=False, theta=10000.0, scale=1.0):
    """A row whose first `dim` elements RoPE rotates."""
    made = list(row)
    for i in range(dim // 2):
        x, y = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
        angle = position / scale * theta ** (-2 * i / dim)
        made[x] = row[x] * math.cos(angle) - row[y] * math.sin(angle)
        made[y] = row[y] * math.cos(angle) + row[x] * math.sin(angle)
    return made


def scored_rows(q, k, tokens, keys, heads, kv_heads, dim, causal=False, window=0, softcap=0.0, scale=None,
                alibi=None, rope=None, documents=None, padding=0, upper_left=False):
    """(head, row, places of the visible keys, slopes of the softcap, scores) of each row and head; rows are
    at the end of the sequence, or with upper_left at its start."""
    scale = dim ** -0.5 if scale is None else scale
    start = 0 if upper_left else keys - tokens
    for t in range(tokens):
        position = start + t
        first = max(0, position - window + 1) if window else 0
        last = min(keys, position + 1) if causal else keys
        if documents:
            own = [(a, b) for a, b in zip(documents, documents[1:]) if a <= position < b] or [(0, 0)]
            first, last = max(first, own[0][0]), min(last, own[0][1])
        first = max(first, padding)
        for h in range(heads):
            row = q[(t * heads + h) * dim:(t * heads + h + 1) * dim]
            if rope:
                row = rotated(row, position, **rope)
            places = [j * kv_heads + h // (heads // kv_heads) for j in range(first, last)]
            scores = [scale * math.fsum(a * b for a, b in zip(row, k[p * dim:(p + 1) * dim]))
                      for p in places]
            slopes = [1.0] * len(scores)
            if softcap:
                slopes = [1 - math.tanh(s / softcap) ** 2 for s in scores]
                scores = [softcap * math.tanh(s / softcap) for s in scores]
            if alibi:
                slope = 2.0 ** (-8 * (h + 1) / heads)
                scores = [s + slope * (j - start if alibi == "context"
                                       else -abs(j - position))
                          for s, j in zip(scores, range(first, last))]
            yield h, row, places, slopes, scores


def attention(q, k, v, tokens, keys, heads, kv_heads, dim, sinks=None, value_dim=None, **options):
    """(out, lse) in float64. The options are those of scored_rows."""
    value_dim = dim if value_dim is None else value_dim
    out, lse = [], []
    for h, _, places, _, scores in scored_rows(q, k, tokens, keys, heads, kv_heads, dim, **options):
        top = max(scores + ([sinks[h]] if sinks else []), default=-math.inf)
        if top == -math.inf:
            out += [0.0] * value_dim
            lse.append(-math.inf)
            continue
        weights = [math.exp(s - top) for s in scores]
        total = math.fsum(weights) + (math.exp(sinks[h] - top) if sinks else 0.0)
        out += [math.fsum(w * v[p * value_dim + d] for w, p in zip(weights, places)) / total
                for d in range(value_dim)]
        lse.append(top + math.log(total))
    return out, lse


def gradients(q, k, v, dout, tokens, keys, heads, kv_heads, dim, dlse=None, sinks=None, value_dim=None, scale=None,
              **options):
    """(dq, dk, dv, dsinks) in float64."""
    scale = dim ** -0.5 if scale is None else scale
    value_dim = dim if value_dim is None else value_dim
    shape = (tokens, keys, heads, kv_heads, dim)
    out, lse = attention(q, k, v, *shape, sinks=sinks, value_dim=value_dim, scale=scale, **options)
    dq, dk, dv, dsinks = [], [0.0] * len(k), [0.0] * len(v), [0.0] * heads
    rows = scored_rows(q, k, *shape, scale=scale, **options)
    for i, (h, row, places, slopes, scores) in enumerate(rows):
        given = dout[i * value_dim:(i + 1) * value_dim]
        delta = math.fsum(a * b for a, b in zip(given, out[i * value_dim:])) - (dlse[i] if dlse else 0.0)
        mine = [0.0] * dim
        for place, slope, score in zip(places, slopes, scores):
            weight = math.exp(score - lse[i])
            grown = math.fsum(a * b for a, b in zip(given, v[place * value_dim:]))
            of_product = scale * slope * weight * (grown - delta)
            for c in range(dim):
                mine[c] += of_product * k[place * dim + c]
                dk[place * dim + c] += of_product * row[c]
            for c in range(value_dim):
                dv[place * value_dim + c] += weight * given[c]
        dq += mine
        if sinks:
            dsinks[h] -= math.exp(sinks[h] - lse[i]) * delta
    return dq, dk, dv, dsinks
