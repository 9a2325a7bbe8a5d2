"""What a batch hides besides its mask, in the words of others: document numbers of tokens, and masks of padding."""

from __future__ import annotations

from ._errors import InputError, UnsupportedError

TYPE_CHECKING = False  # as type checkers read it
if TYPE_CHECKING:
    from typing import Any

    from ._types import Array, Numbers


def document_starts(document_ids: Numbers) -> Any:
    """The starts of documents, for `documents=`, from the number of each token's document.

    Args:
        document_ids: [batch, tokens] or [tokens] whole numbers, of the whole sequences: equal numbers that follow each
            other are a document. Negative ones, at the ends of a sequence, are in none: padding.

    Returns:
        [batch, count + 1] or [count + 1] int64, an array of torch (on the same device) or NumPy. Sequences with fewer
        documents repeat their end.

    Raises:
        InputError: a number that comes back after another one; a negative one between documents.

    >>> import longspan
    >>> longspan.document_starts([[0, 0, 0, 1], [7, 7, 2, -1]]).tolist()
    [[0, 3, 4], [0, 2, 3]]
    """
    import numpy

    ids, like = _numbers(document_ids, "document_ids")
    starts = [_starts_of(row, "document_ids" + (f" of sequence {b}" if ids.ndim > 1 else ""))
              for b, row in enumerate(ids.reshape(-1, ids.shape[-1]))]
    most = max(map(len, starts), default=1)
    made = numpy.array([row + row[-1:] * (most - len(row)) for row in starts], numpy.int64).reshape(len(starts), most)
    return _as(made if ids.ndim > 1 else made[0], like)


def padding(attention_mask: Array) -> dict[str, Any]:
    """The arguments of a call whose sequences are padded, from a mask of their tokens.

    Args:
        attention_mask: [batch, tokens] of 0 and 1 or bool, as a tokenizer of transformers gives it: 0 is padding, on the
            left or on the right of a sequence. tokens are those of the whole sequences, over all ranks.

    Returns:
        {"cache_leftpad": [batch] int32}: no query sees the keys of padding on the left. Where there is padding on the
        right, {"documents": [batch, 2] int64}, and queries must be all tokens: those of padding get 0.

    Raises:
        InputError: zeros between ones, other numbers, or another shape.

    >>> import longspan
    >>> longspan.padding([[0, 0, 1, 1], [1, 1, 1, 1]])["cache_leftpad"].tolist()
    [2, 0]
    >>> longspan.padding([[0, 1, 1, 0], [1, 1, 1, 1]])["documents"].tolist()
    [[1, 3], [0, 4]]
    """
    import numpy

    mask, like = _numbers(attention_mask, "attention_mask")
    if mask.ndim != 2:
        raise InputError(f"attention_mask is {list(mask.shape)}; [batch, tokens] is wanted")
    if not ((mask == 0) | (mask == 1)).all():
        raise InputError("attention_mask has other numbers than 0 and 1; 0 is padding")
    tokens = mask.shape[1]
    used = mask.sum(1)
    first = numpy.where(used > 0, mask.argmax(1) if tokens else 0, tokens)
    end = first + used
    place = numpy.arange(tokens)
    holes = (mask == 0) & (place >= first[:, None]) & (place < end[:, None])
    if holes.any():
        b, at = (int(i) for i in numpy.argwhere(holes)[0])
        raise InputError(f"attention_mask[{b}][{at}] is 0 between tokens that are 1: padding on the left or on the right "
                         "of a sequence is supported")
    if (end == tokens).all():
        return {"cache_leftpad": _as(first.astype(numpy.int32), like)}
    return {"documents": _as(numpy.stack([first, end], 1).astype(numpy.int64), like)}


def used_keys(k: Any, cache_seqlens: Any, seqused_k: Any, k_new: Any) -> Any:
    """cache_seqlens, where flash-attention's seqused_k is given in its place."""
    if cache_seqlens is not None:
        raise InputError("cache_seqlens and seqused_k are given; lengths stand in one of them")
    if k_new is not None:
        raise InputError("seqused_k is given with k_new: give cache_seqlens, the keys before the new ones")
    if len(getattr(k, "shape", ())) == 3 and len(seqused_k) != 1:
        raise UnsupportedError("seqused_k with k of 3 dimensions is not supported: where the keys of a sequence begin is "
                               "not given; k of [batch, capacity, kv_heads, head_dim], or pages, have room")
    return seqused_k


def _numbers(given: Any, name: str) -> tuple[Any, Any]:
    """An array of NumPy, int64, and the tensor of torch that it came from, or None."""
    import numpy

    like = given if type(given).__module__.partition(".")[0] == "torch" else None
    try:
        made = numpy.asarray(given if like is None else given.detach().cpu())
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{name} is not an array of whole numbers that a CPU can read: {error}") from None
    if made.dtype != bool and made.dtype.kind not in "iu" and made.size:
        raise InputError(f"{name} is of {made.dtype}; whole numbers are wanted")
    if made.ndim not in (1, 2):
        raise InputError(f"{name} is {list(made.shape)}; [tokens] or [batch, tokens] is wanted")
    return made.astype(numpy.int64), like


def _as(made: Any, like: Any) -> Any:
    if like is None:
        return made
    import torch

    return torch.from_numpy(made).to(like.device)


def _starts_of(ids: Any, name: str) -> list[int]:
    import numpy

    cuts = [0, *(int(i) + 1 for i in numpy.flatnonzero(ids[1:] != ids[:-1])), len(ids)] if len(ids) else [0]
    numbers = [int(ids[at]) for at in cuts[:-1]]
    if numbers and numbers[0] < 0:
        cuts, numbers = cuts[1:], numbers[1:]
    if numbers and numbers[-1] < 0:
        cuts, numbers = cuts[:-1], numbers[:-1]
    seen = set()
    for at, number in zip(cuts, numbers):
        if number < 0:
            raise InputError(f"{name}: token {at} has the number {number} between documents; only tokens at the ends of a "
                             "sequence can be in none")
        if number in seen:
            raise InputError(f"{name}: number {number} comes back at token {at}; the tokens of a document follow each other")
        seen.add(number)
    return cuts
