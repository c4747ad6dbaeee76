"""Rows: runs of ids laid side by side, with what a model must know of them.

A row of T places is filled with *segments*, each a run of ids of one document. Tokens attend only
within their segment, and positions start again in each. Each token but the first of a document is
the target of exactly one place of an epoch: a segment's last place predicts the id that follows it
in the document, wherever that lies, and nothing where the document ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from jaxtyping import Bool, Int32, Int64

from shardlm.data.corpus import Corpus, Tokens

Batch = dict[str, Int32[np.ndarray, "..."]]
"""tokens, targets, segments, positions [B, T]; rows [B]."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments of some rows, in the order of the rows and from left to right."""

    row: Int64[np.ndarray, "segments"]
    """Number of the row among those asked for, ascending."""
    place: Int64[np.ndarray, "segments"]
    """Where the first id lies."""
    size: Int64[np.ndarray, "segments"]
    """Ids, at least 1."""
    context: Int64[np.ndarray, "segments"]
    """Leading places that predict nothing, since the segment before has predicted the same."""
    ends: Bool[np.ndarray, "segments"]
    """Whether the document ends with the segment."""

    @property
    def predicted(self) -> Int64[np.ndarray, "segments"]:
        """Places that have a target."""
        return self.size - np.minimum(self.context, self.size - self.ends) - self.ends

    def renumbered(self, rows: Int64[np.ndarray, "B"]) -> "Segments":
        """The same with row i called `rows[i]`; these ascend."""
        return replace(self, row=rows[self.row])

    @classmethod
    def merge(cls, parts: "Sequence[Segments]") -> "Segments":
        """Segments of different rows, in the order of the rows."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            none = np.zeros(0, np.int64)
            return cls(none, none, none, none, np.zeros(0, bool))
        names = [f.name for f in fields(cls)]
        joined = [np.concatenate([getattr(p, name) for p in parts]) for name in names]
        order = np.argsort(joined[0], kind="stable")
        return cls(*(a[order] for a in joined))

    def of_rows(self, rows: Int64[np.ndarray, "B"]) -> "Segments":
        """The segments of some of the rows, numbered by their places in `rows`."""
        first = np.searchsorted(self.row, rows)
        count = np.searchsorted(self.row, rows, "right") - first
        chosen = ranges(first, count)
        return Segments(
            np.repeat(np.arange(len(rows)), count),
            *(a[chosen] for a in (self.place, self.size, self.context, self.ends)),
        )


def ranges(
    first: Int64[np.ndarray, "n"], count: Int64[np.ndarray, "n"]
) -> Int64[np.ndarray, "total"]:
    """The numbers first, first + 1, ..., `count` of them, one range after the other."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(first - (ends - count), count)


def lay_out(tokens: Tokens, segments: Segments, rows: int, length: int) -> Batch:
    """Arrays of rows.

    Args:
      segments: of the rows 0 to `rows` - 1; those of a row have at most `length` ids in all.
      rows: B. length: T.

    Returns:
      tokens: the ids. targets: what each place predicts, else -1. segments: 1 for the row's first
      segment, 2 for the second, ... positions: from 0 in each segment. Where a row is not filled,
      tokens, segments and positions are 0 and targets -1.
    """
    size = segments.size
    ids = tokens.gather(segments.place, size)
    ends = np.cumsum(size)
    begins = ends - size
    within = (np.arange(len(ids)) - np.repeat(begins, size)).astype(np.int32)
    targets = np.empty_like(ids)
    targets[:-1] = ids[1:]
    last = np.full(len(size), -1, np.int32)
    if (goes_on := ~segments.ends).any():
        places = (segments.place + size)[goes_on]
        last[goes_on] = tokens.gather(places, np.ones_like(places))
    targets[ends - 1] = last
    if segments.context.any():
        targets[within < np.repeat(segments.context, size)] = -1
    first_of_row = np.searchsorted(segments.row, segments.row)
    number = np.repeat((np.arange(len(size)) - first_of_row + 1).astype(np.int32), size)
    found = {"tokens": ids, "targets": targets, "segments": number, "positions": within}
    if len(ids) != rows * length:
        # Where each segment stands in the arrays, as if rows were laid end to end.
        at = ranges(segments.row * length + begins - begins[first_of_row], size)
        for key, values in found.items():
            # Of zeros that nobody reads, the system makes no memory.
            room = rows * length
            empty = np.full(room, -1, np.int32) if key == "targets" else np.zeros(room, np.int32)
            found[key] = empty
            found[key][at] = values
    return {key: values.reshape(rows, length) for key, values in found.items()}


@dataclass(frozen=True, eq=False)
class ConcatenatedRows:
    """Rows cut from the documents laid end to end.

    The ids are taken as a circle: it is cut at `phase`, and row j has the `length` ids from
    `phase + j * length`; the last row has what is left. So for any phase each token is in exactly
    one row. The phase is another one in every epoch, so that texts are not cut at the same places
    again.
    """

    corpus: Corpus
    length: int

    @property
    def rows(self) -> int:
        """Rows that hold every token once."""
        return -(-self.corpus.size // self.length)

    def segments(self, rows: Int64[np.ndarray, "B"], phases: Int64[np.ndarray, "B"]) -> Segments:
        """Segments of the given rows of the circle cut at the given phases, each from 0 to below
        the number of tokens. From `rows` on, rows are empty."""
        size, starts, documents = self.corpus.size, self.corpus.starts, self.corpus.documents
        first = phases + rows * self.length
        count = np.clip(size - rows * self.length, 0, self.length)
        # Places run over the circle's end; by counting documents from zero on, a document k circles
        # later is `documents * k` further.
        from_document, to_document = (self._document(place) for place in (first, first + count - 1))
        number = np.where(count > 0, to_document - from_document + 1, 0)
        row = np.repeat(np.arange(len(rows)), number)
        circle, document = np.divmod(ranges(from_document, number), max(documents, 1))
        begin = circle * size + starts[document]
        end = begin + self.corpus.lengths[document]
        low = np.maximum(begin, first[row])
        high = np.minimum(end, (first + count)[row])
        return Segments(
            row,
            self.corpus.firsts[document] + low - begin,
            high - low,
            np.zeros_like(row),
            high == end,
        )

    def _document(self, place: Int64[np.ndarray, "B"]) -> Int64[np.ndarray, "B"]:
        circle, within = np.divmod(place, self.corpus.size)
        of = np.searchsorted(self.corpus.starts, within, "right") - 1
        return circle * self.corpus.documents + of
