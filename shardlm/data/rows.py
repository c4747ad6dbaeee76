"""Rows of `length` tokens cut from the stream of a corpus.

The stream is taken as a circle: it is cut at `phase`, and row j has the `length` tokens from
`phase + j * length`. The last row has what is left and is padded. So for any phase each token is in
exactly one row, and each token but the first of a document is the target of exactly one position
(the target of a row's last position is the first token of the next row if that is of the same
document).

The phase is another one in every epoch, so that texts are not cut at the same places again.
"""

import numpy as np
from jaxtyping import Bool, Int32, Int64

from shardlm.data.corpus import Corpus

Batch = dict[str, Int32[np.ndarray, "B T"]]
"""tokens, targets, segments, positions."""


def rows_per_epoch(corpus: Corpus, length: int) -> int:
    """Rows that hold every token once."""
    return -(-len(corpus.tokens) // length)


def cut_rows(
    corpus: Corpus, length: int, rows: Int64[np.ndarray, "B"], phases: Int64[np.ndarray, "B"]
) -> Batch:
    """The given rows of the stream cut at the given phases.

    Args:
      corpus: at least one token.
      length: T, tokens of a row.
      rows: the numbers of rows within an epoch. From `rows_per_epoch` on, rows are
        padding only.
      phases: each from 0 to below the number of tokens.

    Returns:
      tokens: the ids. targets: the next token of the same document, else -1.
      segments: 1 for the tokens of the row's first document, 2 for the second, ...; tokens attend
      only within their segment. positions: from 0 in each segment, so never above T - 1. Where
      the row is padded, tokens, segments and positions are 0 and targets -1.
    """
    size = len(corpus.tokens)
    first = phases + rows * length
    place = np.arange(length + 1)
    stream = corpus.tokens.take(first[:, None] + place, mode="wrap").astype(np.int32)
    starts = _document_starts(corpus, first, length + 1)
    tokens, targets = stream[:, :-1], np.where(starts[:, 1:], -1, stream[:, 1:])
    starts = starts[:, :-1]
    starts[:, 0] = True
    segments = np.cumsum(starts, axis=1, dtype=np.int32)
    place = place[:-1].astype(np.int32)
    positions = place - np.maximum.accumulate(np.where(starts, place, 0), axis=1)
    if (padded := rows >= size // length).any():
        padding = place >= (size - rows[padded] * length)[:, None]
        for array, value in ((tokens, 0), (targets, -1), (segments, 0), (positions, 0)):
            array[padded] = np.where(padding, value, array[padded])
    return {
        "tokens": np.ascontiguousarray(tokens),
        "targets": targets,
        "segments": segments,
        "positions": positions,
    }


def _document_starts(
    corpus: Corpus, first: Int64[np.ndarray, "B"], count: int
) -> Bool[np.ndarray, "B count"]:
    """Which of the `count` places from each of `first` on begin a document."""
    size, starts = len(corpus.tokens), corpus.starts
    # Places run over the circle's end, and rows beyond the last one run on for ever; by counting
    # boundaries from zero on, a start k circles later is `documents * k` entries later.
    lowest = _count_below(starts, size, first)
    found = _count_below(starts, size, first + count) - lowest
    row = np.repeat(np.arange(len(first)), found)
    nth = np.arange(found.sum()) - np.repeat(np.cumsum(found) - found, found)
    circle, document = np.divmod(np.repeat(lowest, found) + nth, corpus.documents)
    flags = np.zeros((len(first), count), bool)
    flags[row, circle * size + starts[document] - first[row]] = True
    return flags


def _count_below(
    starts: Int64[np.ndarray, "boundaries"], size: int, place: Int64[np.ndarray, "B"]
) -> Int64[np.ndarray, "B"]:
    """Document starts in [0, place) of the repeated stream."""
    circle, within = np.divmod(place, size)
    return circle * (len(starts) - 1) + np.searchsorted(starts[:-1], within, "left")
