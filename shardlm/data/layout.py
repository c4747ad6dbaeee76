"""The rows of a split by `data.packing`: which ids stand in each row, as segments."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from shardlm.config import DataConfig
from shardlm.data.corpus import Corpus
from shardlm.data.packing import Pieces, Plan, best_fit, cut_pieces, one_each
from shardlm.data.rows import ConcatenatedRows, Segments, ranges


@runtime_checkable
class Rows(Protocol):
    """The rows of one length that hold a split, each once an epoch."""

    @property
    def corpus(self) -> Corpus:
        """The documents."""

    @property
    def rows(self) -> int:
        """How many."""

    def segments(self, rows: Int64[np.ndarray, "B"], phases: Int64[np.ndarray, "B"]) -> Segments:
        """The segments of some of them. `phases`: any numbers from 0 to below the ids of the split,
        one for each epoch, which say where to cut for those who cut anew in each."""


@dataclass(frozen=True, eq=False)
class PlannedRows:
    """Rows of a plan, which is the same in every epoch."""

    corpus: Corpus
    pieces: Pieces
    plan: Plan
    kind: int
    """Which of the plan's lengths."""

    @property
    def rows(self) -> int:
        """Rows of this length."""
        return int(self.plan.bounds[self.kind + 1] - self.plan.bounds[self.kind])

    def segments(self, rows: Int64[np.ndarray, "B"], phases: Int64[np.ndarray, "B"]) -> Segments:
        """See `Rows`."""
        row = rows + self.plan.bounds[self.kind]
        first, count = self.plan.starts[row], self.plan.starts[row + 1] - self.plan.starts[row]
        piece = self.plan.pieces[ranges(first, count)]
        document = self.pieces.document[piece]
        offset, size = self.pieces.offset[piece], self.pieces.size[piece].astype(np.int64)
        return Segments(
            np.repeat(np.arange(len(rows)), count),
            self.corpus.firsts[document] + offset,
            size,
            self.pieces.context[piece].astype(np.int64),
            offset + size == self.corpus.lengths[document],
        )


def row_lengths(data: DataConfig) -> tuple[int, ...]:
    """Lengths of rows, ascending: `data.length`, with buckets also its halves, quarters, ..."""
    count = data.buckets if data.packing == "padded_buckets" else 1
    return tuple(data.length >> i for i in reversed(range(count)))


def lay_rows(corpora: Sequence[Corpus], data: DataConfig) -> list[list[Rows]]:
    """For each of `row_lengths` the rows of each corpus."""
    lengths = row_lengths(data)
    if data.packing == "concat":
        return [[ConcatenatedRows(corpus, data.length) for corpus in corpora]]
    found: list[list[Rows]] = [[] for _ in lengths]
    for corpus in corpora:
        pieces = cut_pieces(corpus.lengths, data.length, data.overlap)
        plan = (one_each if data.packing == "none" else best_fit)(pieces.size, lengths)
        for kind, rows in enumerate(found):
            rows.append(PlannedRows(corpus, pieces, plan, kind))
    return found
