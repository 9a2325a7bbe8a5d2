"""Which keys a query sees: objects for `mask=` of longspan.attend, longspan.Attention and longspan.torch.

    out = longspan.attend(q, k, v, mask=longspan.mask.chunked(8192))
    longspan.mask.chunked(8192).draw(40000, file="mask.svg")

All of them go by positions in the whole sequence, so they mean the same on any number of ranks.
"""

from __future__ import annotations

from ._errors import InputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ._core import Sharding
    from ._types import Alignment, Layout, Numbers

__all__ = ["Mask", "bidirectional", "causal", "chunked", "full", "prefix_lm", "prefix_or_window", "window"]

_CELLS = 64       # of a picture's side, at most
_POSITIONS = 2048  # of a sequence that a picture looks at, at most
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#994455")


class Mask:
    """What a query at position i sees of the keys j of its sequence. Made by the functions of this module.

    Args:
        causal: j <= i.
        window_size: (left, right) keys besides its own; -1 is no bound.
        attention_chunk: keys of a chunk; a query sees those of its own one, and of `chunk_lookback` chunks before it.
            0 is no chunks.
        prefix: the first keys, which windows and chunks do not hide; the most of any sequence.
        prefix_lens: [batch] in its place, none above it.
        bidirectional: [count, 2] or [batch, count, 2], [begin, end) of ranges whose tokens see each other as well.
        clamp_bidirectional: they do not reach past the window, or the chunks, on the left.
    """

    __slots__ = ("causal", "window_size", "attention_chunk", "chunk_lookback", "prefix", "prefix_lens", "bidirectional",
                 "clamp_bidirectional")

    def __init__(self, *, causal: bool = False, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0,
                 chunk_lookback: int = 0, prefix: int = 0, prefix_lens: Numbers | None = None,
                 bidirectional: Numbers | None = None, clamp_bidirectional: bool = False):
        self.causal, self.window_size, self.attention_chunk = causal, window_size, attention_chunk
        self.chunk_lookback, self.prefix, self.prefix_lens = chunk_lookback, prefix, prefix_lens
        self.bidirectional, self.clamp_bidirectional = bidirectional, clamp_bidirectional

    def arguments(self) -> dict[str, Any]:
        """Those of longspan.attend that mean this mask."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __repr__(self) -> str:
        plain = Mask().arguments()
        given = (f"{name}={value!r}" for name, value in self.arguments().items()
                 if value is not None and not (isinstance(value, (bool, int, tuple)) and value == plain[name]))
        return f"longspan.mask.Mask({', '.join(given)})"

    def matrix(self, queries: int, keys: int | None = None, *, sequence: int = 0,
               causal_alignment: Alignment = "lower_right") -> Any:
        """[queries, keys] bool, a NumPy array: whether a query sees a key. For small lengths, tests and pictures.

        Args:
            queries: rows; by default as many as keys, of which they are the last ones (or the first, `upper_left`).
            keys: of the sequence; None is as many as queries.
            sequence: the number in the batch, where ranges or prefixes differ.

        >>> import longspan
        >>> longspan.mask.chunked(2).matrix(4).astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
        """
        import numpy

        keys = queries if keys is None else keys
        first = 0 if causal_alignment == "upper_left" else keys - queries
        return self._sees(numpy.arange(first, first + queries)[:, None], numpy.arange(keys)[None], keys, sequence)

    def _sees(self, i, j, keys: int, sequence: int):
        import numpy

        left, right = self.window_size
        chunks = i // self.attention_chunk - j // self.attention_chunk if self.attention_chunk else 0 * (i - j)
        on_left = chunks <= self.chunk_lookback
        if left >= 0:
            on_left &= i - j <= left
        prefix = self.prefix
        if self.prefix_lens is not None:
            lens = _whole(self.prefix_lens)
            if lens.ndim != 1 or not 0 <= sequence < len(lens):
                raise InputError(f"sequence is {sequence}; prefix_lens is {list(lens.shape)}")
            prefix = int(lens[sequence])
        on_left |= j < prefix
        on_right = chunks >= 0
        if self.causal:
            on_right &= j <= i
        elif right >= 0:
            on_right &= j - i <= right
        seen = on_left & on_right
        if self.bidirectional is not None:
            ranges = _whole(self.bidirectional)
            if ranges.ndim == 3:
                if not 0 <= sequence < len(ranges):
                    raise InputError(f"sequence is {sequence}; bidirectional is {list(ranges.shape)}")
                ranges = ranges[sequence]
            for begin, end in ranges.reshape(-1, 2).tolist():
                ranged = (i >= begin) & (i < end) & (j >= begin) & (j < end)
                seen |= ranged & on_left if self.clamp_bidirectional else ranged
        return numpy.broadcast_to(seen, numpy.broadcast_shapes(i.shape, j.shape)) & (j < keys)

    def draw(self, queries: int, keys: int | None = None, *, sequence: int = 0, ranks: int = 1,
             layout: Layout | Sharding = "contiguous", causal_alignment: Alignment = "lower_right",
             file: Any = None) -> str:
        """An SVG picture: which keys (columns) each query (row) sees, in the colours of the ranks that hold the keys.

        A cell stands for several positions of a long sequence: the fuller its colour, the more of its pairs are visible.
        White cells are seen by nobody, and no rank computes or sends them.

        Args:
            queries, keys, sequence, causal_alignment: as in matrix().
            ranks, layout: how many ranks share the keys, and how; as `keys` of longspan.attend.
            file: a path, or an open file, to which the text is written too.

        Returns:
            The text of the picture.

        Raises:
            InputError: lengths or ranks below 1.

        >>> import longspan
        >>> longspan.mask.causal().draw(300, ranks=2)[:4]
        '<svg'
        """
        import numpy

        from ._shards import shard

        keys = queries if keys is None else keys
        for name, value in (("queries", queries), ("keys", keys), ("ranks", ranks)):
            if not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r}; it is a whole number, at least 1")
        holder = numpy.zeros(keys, dtype=numpy.int64)
        if ranks > 1:
            places = numpy.arange(keys)
            for rank in range(ranks):
                holder[shard(places, layout, rank=rank, ranks=ranks)] = rank
        first = 0 if causal_alignment == "upper_left" else keys - queries
        rows, row_cells = _looked_at(queries)
        columns, column_cells = _looked_at(keys)
        seen = self._sees(rows[:, None] + first, columns[None], keys, sequence)
        own = holder[columns]
        side, label = 8, 44
        width, height = label + side * column_cells[-1] + side + 12, label + side * row_cells[-1] + side + 40
        parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                 f'font-family="sans-serif" font-size="11">',
                 f'<rect width="{width}" height="{height}" fill="white"/>',
                 f'<text x="{label}" y="14">keys 0 to {keys - 1}</text>',
                 f'<text x="4" y="{label - 6}">row, at position</text>',
                 f'<text x="4" y="{label + 10}">{first}</text>',
                 f'<text x="4" y="{label + side * (row_cells[-1] + 1)}">{first + queries - 1}</text>']
        for cell in range(column_cells[-1] + 1):  # who holds the keys
            x = label + side * cell
            parts.append(f'<rect x="{x}" y="{label - 26}" width="{side}" height="6" '
                         f'fill="{_colour(own[column_cells == cell], ranks)}"/>')
        counts = numpy.zeros((row_cells[-1] + 1, column_cells[-1] + 1, ranks))
        sizes = numpy.bincount(row_cells)[:, None] * numpy.bincount(column_cells)[None]
        for rank in range(ranks):
            by_row = numpy.add.reduceat((seen & (own == rank)).astype(float), _starts(row_cells), axis=0)
            counts[:, :, rank] = numpy.add.reduceat(by_row, _starts(column_cells), axis=1) / sizes
        for row in range(counts.shape[0]):
            for column in range(counts.shape[1]):
                shown = counts[row, column].sum()
                if shown > 0:
                    parts.append(f'<rect x="{label + side * column}" y="{label + side * row}" width="{side}" '
                                 f'height="{side}" fill="{_COLOURS[int(counts[row, column].argmax()) % len(_COLOURS)]}" '
                                 f'fill-opacity="{0.25 + 0.75 * min(1.0, shown):.2f}"/>')
        parts.append(f'<rect x="{label}" y="{label}" width="{side * (column_cells[-1] + 1)}" '
                     f'height="{side * (row_cells[-1] + 1)}" fill="none" stroke="#999999"/>')
        for rank in range(min(ranks, len(_COLOURS))):
            x, y = label + 62 * rank, height - 12
            parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{_COLOURS[rank]}"/>'
                         f'<text x="{x + 14}" y="{y}">rank {rank}</text>')
        text = "\n".join((*parts, "</svg>\n"))
        if file is not None:
            if hasattr(file, "write"):
                file.write(text)
            else:
                with open(file, "w", encoding="utf-8") as out:
                    out.write(text)
        return text


def arguments_of(mask: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Those of a mask, where the caller gives none of them. `given` are the caller's."""
    if not isinstance(mask, Mask):
        raise TypeError(f"mask is of type '{type(mask).__name__}'; one of longspan.mask is wanted")
    plain = Mask().arguments()
    for name, value in given.items():
        if value is not None and not (isinstance(value, (bool, int, tuple)) and value == plain[name]):
            raise InputError(f"mask is given, and {name} too; one of them says what is seen")
    return {name: value for name, value in mask.arguments().items() if name in given}


def _colour(ranks_of_keys, ranks: int) -> str:
    import numpy

    return _COLOURS[int(numpy.bincount(ranks_of_keys, minlength=ranks).argmax()) % len(_COLOURS)]


def _starts(cells):
    import numpy

    return numpy.flatnonzero(numpy.diff(cells, prepend=-1))


def _looked_at(count: int):
    """The positions that a picture looks at, and the cell of each, from 0 on."""
    import numpy

    places = numpy.unique(numpy.linspace(0, count - 1, min(count, _POSITIONS)).astype(numpy.int64))
    cells = places * min(count, _CELLS) // count
    return places, cells - cells[0]


def _whole(numbers):
    """A small array of whole numbers, in NumPy."""
    import numpy

    if hasattr(numbers, "detach"):
        numbers = numbers.detach().cpu().numpy()
    return numpy.asarray(numbers)


def _with(base: Mask, **more: Any) -> Mask:
    if not isinstance(base, Mask):
        raise TypeError(f"base is of type '{type(base).__name__}'; a mask of longspan.mask is wanted")
    return Mask(**(base.arguments() | more))


def full() -> Mask:
    """Every query sees every key."""
    return Mask()


def causal() -> Mask:
    """A query sees the keys up to its own position."""
    return Mask(causal=True)


def window(left: int, right: int = -1, *, causal: bool = True) -> Mask:
    """A sliding window: `left` keys before a query's own and, if not causal, `right` ones behind it; -1 is no bound."""
    return Mask(causal=causal, window_size=(left, right))


def chunked(size: int, lookback: int = 0, *, causal: bool = True) -> Mask:
    """Chunks of `size` keys, as in Llama 4: a query sees its own chunk, and `lookback` chunks before it.

    Chunks are counted from the first key of a sequence behind its padding. If not causal, a query sees up to the end of
    its chunk (block-causal attention, with a lookback over all chunks).
    """
    if isinstance(size, int) and size < 1:
        raise InputError(f"size is {size}; a chunk has 1 to 2^31 - 1 keys")
    return Mask(causal=causal, attention_chunk=size, chunk_lookback=lookback)


def bidirectional(ranges: Numbers, base: Mask | None = None, *, clamped: bool = False) -> Mask:
    """Ranges whose tokens see each other, besides what `base` (None: causal) lets them see: the images of Gemma 3.

    Args:
        ranges: [count, 2] of the one sequence, or [batch, count, 2]: the begin of each, and the position past its last.
            They ascend and do not overlap; sequences with fewer ones end with empty ones. int64.
        clamped: ranges do not reach past the window or the chunks of `base` on the left, as in Gemma 4.
    """
    if isinstance(ranges, (list, tuple)):
        import numpy

        ranges = numpy.asarray(ranges, dtype=numpy.int64)
    return _with(causal() if base is None else base, bidirectional=ranges, clamp_bidirectional=clamped)


def prefix_lm(lengths: int | Numbers, base: Mask | None = None) -> Mask:
    """The first tokens see each other, and the others what `base` (None: causal) says.

    Args:
        lengths: of the prefix, for one sequence; or [batch].
    """
    if isinstance(lengths, int):
        return bidirectional([[0, lengths]], base)
    if hasattr(lengths, "detach"):
        import torch

        return bidirectional(torch.stack((torch.zeros_like(lengths), lengths), -1)[:, None].to(torch.int64), base)
    import numpy

    lengths = numpy.asarray(lengths, dtype=numpy.int64)
    return bidirectional(numpy.stack((numpy.zeros_like(lengths), lengths), -1)[:, None], base)


def prefix_or_window(prefix: int | Numbers, base: Mask, *, most: int | None = None) -> Mask:
    """A query sees the first keys, and besides them what the window or the chunks of `base` let it see, up to its own
    position. So models keep instructions, or attention sinks, in view (StreamingLLM).

    Args:
        prefix: the first keys, of every sequence; or [batch].
        most: none of them is longer; None reads the numbers.
    """
    if isinstance(prefix, int):
        return _with(base, prefix=prefix)
    if most is None:
        lens = _whole(prefix)
        most = int(lens.max()) if lens.size else 0
    return _with(base, prefix=max(most, 1), prefix_lens=prefix)
