"""Which documents share a row: documents to pieces, pieces to rows.

`cut_pieces` cuts documents that are longer than a row, and only those; `best_fit` puts pieces in
rows so that hardly a position is padded and none is cut again (best-fit packing of documents: Ding
et al., "Fewer Truncations Improve Language Modeling", arXiv 2404.10830; best fit decreasing:
Johnson et al., SIAM J. Comput. 3, 1974, never above 11/9 of the fewest rows and a constant).

Nothing here sees a token: lengths go in, numbers of documents and pieces come out.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64, Integer


@dataclass(frozen=True, eq=False)
class Pieces:
    """Runs of tokens of documents, in the order of documents and then of offsets.

    `document`: the number of the document. `offset`: its first token within the document.
    `size`: tokens. `context`: leading positions whose targets the piece before has.
    """

    document: Int64[np.ndarray, "pieces"]
    offset: Int64[np.ndarray, "pieces"]
    size: Int32[np.ndarray, "pieces"]
    context: Int32[np.ndarray, "pieces"]

    def __len__(self) -> int:
        return len(self.size)


def cut_pieces(lengths: Int64[np.ndarray, "documents"], length: int, overlap: int) -> Pieces:
    """Pieces of at most `length` tokens that together hold every token of every document.

    Piece j of a document of n tokens has the tokens from a = j·(T - o) on, T of them or what is
    left; the last piece is the first one that reaches token n - 1. So documents of up to T tokens
    are one piece, and those of none no piece.

    Position p of a piece predicts token a + p + 1, also where that is the next piece's; it predicts
    nothing if a + p + 1 = n. The piece before ends below token a + o and so predicts tokens up to
    a + o. What is new are the positions from p = o on: `context` is o in all pieces but the first
    of a document, whose `context` is 0. Then every token but the first is predicted exactly once.

    A last piece has at least o + 1 tokens. Of exactly o + 1 it predicts nothing, and is there
    because its last token is in no other piece; besides such and documents of one token, every
    piece predicts something.

    Args:
      lengths: tokens of each document.
      length: T, at least 1.
      overlap: o, from 0 to T - 1.
    """
    assert 0 <= overlap < length, (overlap, length)
    stride = length - overlap
    count = np.where(lengths > 0, 1 + -(-np.maximum(lengths - length, 0) // stride), 0)
    document = np.repeat(np.arange(len(lengths)), count)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)
    offset = nth * stride
    return Pieces(
        document=document,
        offset=offset,
        size=np.minimum(lengths[document] - offset, length).astype(np.int32),
        context=np.where(nth > 0, np.int32(overlap), np.int32(0)),
    )


@dataclass(frozen=True, eq=False)
class Plan:
    """Rows and the pieces in them. Shorter rows come first, and those of one length in the order
    in which they were opened.

    `pieces`: the numbers of all pieces; row i has `pieces[starts[i] : starts[i + 1]]`, in falling
    order of size, at least one. `lengths`: the allowed lengths, ascending; the rows of
    `lengths[c]` are those from `bounds[c]` to below `bounds[c + 1]`.
    """

    pieces: Int64[np.ndarray, "pieces"]
    starts: Int64[np.ndarray, "rows_and_1"]
    lengths: tuple[int, ...]
    bounds: Int64[np.ndarray, "lengths_and_1"]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.starts) - 1

    @property
    def row_length(self) -> Int64[np.ndarray, "rows"]:
        """Positions of each row."""
        return np.repeat(np.array(self.lengths, np.int64), np.diff(self.bounds))


def best_fit(sizes: Integer[np.ndarray, "pieces"], lengths: tuple[int, ...]) -> Plan:
    """Best fit decreasing: few rows, no piece split.

    Pieces are placed in falling order of size, equal ones by number. A piece goes in the open row
    with the least room that holds it (of several, the one that has had that room longest); if
    there is none it opens a row of the shortest length that holds it.

    Args:
      sizes: tokens of each piece, from 1 to the greatest of `lengths`.
      lengths: allowed row lengths, ascending.
    """
    _check(sizes, lengths)
    counts = np.bincount(sizes, minlength=lengths[-1] + 1)
    rows, moves = _place(counts, lengths)
    first_row, row_count, each = np.array(moves, np.int64).reshape(-1, 3).T
    # Each move gives `each` pieces to each of consecutive rows; moves are in the order of pieces.
    nth = np.arange(row_count.sum()) - np.repeat(np.cumsum(row_count) - row_count, row_count)
    row = np.repeat(np.repeat(first_row, row_count) + nth, np.repeat(each, row_count))
    return _plan(_falling(sizes), row, np.array(rows, np.int64).reshape(-1, 2), lengths)


def one_each(sizes: Integer[np.ndarray, "pieces"], lengths: tuple[int, ...]) -> Plan:
    """A row for each piece, of the shortest length that holds it; in the order of pieces.

    Arguments as for `best_fit`.
    """
    _check(sizes, lengths)
    kind = np.searchsorted(lengths, sizes)
    pieces = np.argsort(kind.astype(np.uint16), kind="stable")
    bounds = np.searchsorted(kind[pieces], np.arange(len(lengths) + 1))
    return Plan(pieces, np.arange(len(sizes) + 1), lengths, bounds)


def waste(plan: Plan, sizes: Integer[np.ndarray, "pieces"]) -> float:
    """Share of the positions of all rows that are padding; 0 without rows."""
    positions = int(plan.row_length.sum())
    return 1 - int(sizes.sum()) / positions if positions else 0.0


def _check(sizes: np.ndarray, lengths: tuple[int, ...]) -> None:
    assert len(lengths) > 0, lengths
    assert list(lengths) == sorted({*lengths}), lengths
    assert not len(sizes) or 1 <= sizes.min() <= sizes.max() <= lengths[-1], (sizes, lengths)


def _place(
    counts: np.ndarray, lengths: tuple[int, ...]
) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
    """The rows opened, as (how many, of which length), and the moves in the order of pieces, as
    (first row, how many consecutive rows, pieces given to each in turn).

    Rows with the same history stay together as one run (first row, how many), so the work follows
    the number of sizes and not that of pieces. A row that takes a piece of size s and has room for
    another one is then the tightest, so it takes as many of that size as it holds.
    """
    open_rows: list[deque[tuple[int, int]]] = [deque() for _ in range(lengths[-1] + 1)]
    has_rows = bytearray(lengths[-1] + 1)  # Which rooms have any; `find` searches it fast.
    opened, moves, total = [], [], 0

    def give(size: int, room: int, first: int, rows: int, each: int) -> None:
        moves.append((first, rows, each))
        open_rows[room - each * size].append((first, rows))
        has_rows[room - each * size] = 1

    for size in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[size])
        while left:
            room = has_rows.find(1, size)
            if room < 0:
                room = lengths[int(np.searchsorted(lengths, size))]
                rows = -(-left // (room // size))
                opened.append((rows, room))
                open_rows[room].append((total, rows))
                total += rows
            each = room // size
            first, rows = open_rows[room].popleft()
            full = min(rows, left // each)
            if full:
                give(size, room, first, full, each)
                left -= full * each
            if full < rows:
                first, rows = first + full, rows - full
                if left:
                    give(size, room, first, 1, left)
                    first, rows, left = first + 1, rows - 1, 0
                if rows:
                    open_rows[room].appendleft((first, rows))
            has_rows[room] = bool(open_rows[room])
    return opened, moves


def _falling(sizes: np.ndarray) -> np.ndarray:
    """Numbers of the pieces in falling order of size, equal ones by number."""
    greatest = int(sizes.max(initial=0))
    # Numbers of 16 bits are sorted by digits, four times faster than wider ones.
    return np.argsort((greatest - sizes).astype(np.min_scalar_type(greatest)), kind="stable")


def _plan(order: np.ndarray, row: np.ndarray, opened: np.ndarray, lengths: tuple[int, ...]) -> Plan:
    """The plan of pieces `order[i]` in rows `row[i]`, rows numbered as they were opened."""
    kind = np.repeat(np.searchsorted(lengths, opened[:, 1]), opened[:, 0])
    by_kind = np.argsort(kind, kind="stable")
    number = np.empty_like(by_kind)
    number[by_kind] = np.arange(len(by_kind))
    row = number[row]
    starts = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(kind)))])
    bounds = np.searchsorted(kind[by_kind], np.arange(len(lengths) + 1))
    return Plan(order[np.argsort(row, kind="stable")], starts, lengths, bounds)
