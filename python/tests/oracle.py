"""Attention in float64, written plainly: the reference of the tests."""

import numpy as np


def host(a):
    """An array for NumPy: a tensor may lie on a GPU, or have a type that NumPy lacks."""
    if not hasattr(a, "detach"):
        return np.asarray(a)
    a = a.detach().cpu()
    return np.asarray(a.double() if a.is_floating_point() and a.element_size() < 4 else a)


def attention(q, k, v, *, causal=False, scale=None, window=(-1, -1), softcap=0.0, slopes=None,
              alibi="query", qq=None, sinks=None, documents=None, leftpad=0, used=None, first=None):
    """(out, lse) of one sequence: q [tokens, heads, dim], k and v [keys, kv_heads, dim]. The `used`
    first query rows, by default all, have the positions from `first` on; None: they are the last of
    the sequence."""
    q, k, v = (host(a).astype(np.float64) for a in (q, k, v))
    (tokens, heads, _), (keys, kv_heads, value_dim) = q.shape, v.shape
    out = np.zeros((tokens, heads, value_dim))
    lse = np.full((tokens, heads), -np.inf)
    for h, score in enumerate(scores(q, k, causal=causal, scale=scale, window=window, softcap=softcap, slopes=slopes,
                                     alibi=alibi, qq=qq, documents=documents, leftpad=leftpad, used=used,
                                     first=first)):
        sink = np.full((tokens, 1), -np.inf if sinks is None else float(sinks[h]))
        all_scores = np.concatenate([score, sink], 1)
        most = all_scores.max(1, keepdims=True)
        most = np.where(np.isfinite(most), most, 0)
        weights = np.exp(all_scores - most)
        total = weights.sum(1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            lse[:, h] = (most + np.log(total))[:, 0]
            share = np.where(total > 0, weights / total, 0)
        out[:, h] = share[:, :keys] @ v[:, h // (heads // kv_heads)]
    return out, lse


def distances(tokens, keys, alibi, first):
    """What a slope is the negative factor of, [tokens, keys], for rows from position `first` on."""
    i, j = np.arange(first, first + tokens)[:, None], np.arange(keys)[None, :]
    return {"query": np.abs(i - j), "context": first - j + 0 * i, "sqrt": np.sqrt(np.maximum(i - j, 0))}[alibi]


def between_new(tokens, keys, width, first):
    """The (rows, columns) of the scores that have an entry in qq_bias, whose corner is at (0, first)."""
    return slice(0, min(tokens, width)), slice(first, min(keys, first + width))


def scores(q, k, *, causal, scale, window, softcap, slopes, alibi, documents, qq=None, leftpad=0, used=None,
           first=None):
    """Yields the scores [tokens, keys] of each head; -inf where a key is not seen."""
    tokens, heads, dim = q.shape
    keys, group = len(k), heads // k.shape[1]
    scale = dim ** -0.5 if scale is None else scale
    used = tokens if used is None else used
    first = keys - used if first is None else first
    i = np.arange(first, first + tokens)[:, None]
    j = np.arange(keys)[None, :]
    seen = (i < first + used) & (j >= leftpad)
    if causal:
        seen &= j <= i
    if window[0] >= 0:
        seen &= i - j <= window[0]
    if window[1] >= 0 and not causal:
        seen &= j - i <= window[1]
    if documents is not None:
        def document(x):
            return np.searchsorted(documents, x, side="right")
        inside = (i >= documents[0]) & (i < documents[-1])
        seen &= (document(i) == document(j)) & inside
    for h in range(heads):
        score = q[:, h] @ k[:, h // group].T * scale
        if softcap:
            score = softcap * np.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[h] * distances(tokens, keys, alibi, first)
        if qq is not None:
            rows, columns = between_new(tokens, keys, len(qq), first)
            score[rows, columns] += qq[rows, :columns.stop - first]
        yield np.where(seen, score, -np.inf)


# Error bounds for a result of order 1: one rounding to the type, and float32 within. Ranks add nothing.
TOLERANCE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}


def assert_close(found, wanted, dtype="float32"):
    found = host(found).astype(np.float64)
    assert found.shape == wanted.shape
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(found, wanted, rtol=4 * tolerance, atol=4 * tolerance)


def assert_lse_close(found, wanted):
    np.testing.assert_allclose(host(found), wanted, rtol=1e-5, atol=2e-5)


def gradients(q, k, v, dout, dlse=None, *, causal=False, scale=None, window=(-1, -1), softcap=0.0, slopes=None,
              alibi="query", qq=None, sinks=None, documents=None, leftpad=0, used=None, first=None):
    """(dq, dk, dv, dsinks, dslopes, dqq) of attention() with these options, for gradients of its out and
    lse; the last three are None without such terms."""
    q, k, v, dout = (host(a).astype(np.float64) for a in (q, k, v, dout))
    tokens, keys = len(q), len(k)
    if first is None:
        first = keys - (tokens if used is None else used)
    options = dict(causal=causal, window=window, slopes=slopes, alibi=alibi, qq=qq, documents=documents,
                   leftpad=leftpad, used=used, first=first)
    group = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out, lse = attention(q, k, v, scale=scale, softcap=softcap, sinks=sinks, **options)
    dq, dk, dv = (np.zeros(a.shape) for a in (q, k, v))
    dsinks, dslopes, dqq = (None if a is None else np.zeros(np.shape(a)) for a in (sinks, slopes, qq))
    for h, score in enumerate(scores(q, k, scale=scale, softcap=softcap, **options)):
        x = q[:, h] @ k[:, h // group].T * scale
        weight = np.exp(score - np.where(np.isfinite(lse[:, h]), lse[:, h], np.inf)[:, None])
        d = (dout[:, h] * out[:, h]).sum(1) - (0 if dlse is None else host(dlse)[:, h].astype(np.float64))
        ds = weight * (dout[:, h] @ v[:, h // group].T - d[:, None])
        dx = scale * ds * (1 - np.tanh(x / softcap) ** 2 if softcap else 1)
        dq[:, h] = dx @ k[:, h // group]
        dk[:, h // group] += dx.T @ q[:, h]
        dv[:, h // group] += weight.T @ dout[:, h]
        if sinks is not None:
            dsinks[h] = -(np.exp(float(sinks[h]) - lse[:, h]) * d).sum()
        if slopes is not None:
            dslopes[h] = -(ds * distances(tokens, keys, alibi, first)).sum()
        if qq is not None:
            rows, columns = between_new(tokens, keys, len(qq), first)
            dqq[rows, :columns.stop - first] += ds[rows, columns]
    return dq, dk, dv, dsinks, dslopes, dqq
