"""Rows as a person can read them: text instead of ids, with segments and the loss mask.

What comes out can be printed anywhere: characters that would move a cursor, start an escape
sequence, turn the direction of writing or not be seen are replaced by signs that stand for them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int32

from shardlm.data.buckets import Buckets
from shardlm.data.loader import Loader
from shardlm.data.rows import Batch
from shardlm.data.tokenizer import Tokenizer, decode_after
from shardlm.words import many

LINE_FEED, TAB = "↵", "␉"
"""Their signs."""


@dataclass(frozen=True)
class Piece:
    """Consecutive places of a segment that are alike."""

    text: str
    """Printable; see `visible`."""
    predicts: bool
    """Whether the places have targets, which is the loss mask."""
    kind: Literal["text", "id", "gap"] = "text"
    """id: tokens without text, by name; gap: what stands for text that was left out."""


@dataclass(frozen=True)
class ShownSegment:
    """A run of ids of one document."""

    pieces: tuple[Piece, ...]
    places: int
    predicted: int
    """Places with a target."""
    ends: bool
    """Whether the document ends here; else it goes on in another row."""


@dataclass(frozen=True)
class ShownRow:
    """A row of an update."""

    update: int
    """From 1, as in the metrics."""
    number: int
    """Of the row within the update, from 1."""
    rows: int
    """Of the update."""
    length: int
    """Places, T."""
    segments: tuple[ShownSegment, ...]

    @property
    def padding(self) -> int:
        """Places without a token."""
        return self.length - sum(segment.places for segment in self.segments)

    @property
    def predicted(self) -> int:
        """Places with a target."""
        return sum(segment.predicted for segment in self.segments)


def first_rows(loader: Loader, tokenizer: Tokenizer, count: int, updates: int) -> list[ShownRow]:
    """`count` rows of the first update, evenly spaced; if it has fewer, of the first ones, at most
    of `updates`. Rows are in the order of the update, not of the devices they are dealt to."""
    loader.deal_to(1)
    found: list[tuple[int, int, int, tuple[np.ndarray, ...]]] = []
    for step in range(updates):
        rows = list(_rows(loader.at(step).batch))
        found += [(step + 1, i, len(rows), arrays) for i, arrays in enumerate(rows, start=1)]
        if len(found) >= count:
            break
    chosen = np.unique(np.linspace(0, len(found) - 1, count).round().astype(int)).tolist()
    decoder = _Decoder(tokenizer)
    return [
        ShownRow(update, number, rows, arrays[0].size, tuple(decoder.segments(*arrays)))
        for update, number, rows, arrays in (found[i] for i in chosen)
    ]


def _rows(batch: Batch | Buckets) -> Iterator[tuple[np.ndarray, ...]]:
    """Tokens, targets and segments of each row that is used."""
    parts = batch.parts if isinstance(batch, Buckets) else (batch,)
    for part in parts:
        for i in np.flatnonzero(part["segments"].any(axis=1)).tolist():
            yield tuple(part[name][i] for name in ("tokens", "targets", "segments"))


class _Decoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._silent: dict[int, bool] = {}

    def segments(
        self,
        tokens: Int32[np.ndarray, "T"],
        targets: Int32[np.ndarray, "T"],
        segments: Int32[np.ndarray, "T"],
    ) -> Iterator[ShownSegment]:
        for number in range(1, int(segments.max(initial=0)) + 1):
            here = segments == number
            predicts = targets[here] >= 0
            yield ShownSegment(
                tuple(self._pieces(tokens[here], predicts)),
                places=len(predicts),
                predicted=int(predicts.sum()),
                ends=not predicts[-1],
            )

    def _pieces(self, ids: Int32[np.ndarray, "n"], predicts: Bool[np.ndarray, "n"]) -> list[Piece]:
        silent = np.array([self._is_silent(i) for i in ids.tolist()])
        changes = np.flatnonzero(np.diff(predicts) | np.diff(silent)) + 1
        bounds = [0, *changes.tolist(), len(ids)]
        found = []
        for first, end in pairwise(bounds):
            if silent[first]:
                names = "".join(self._name(i) for i in ids[first:end].tolist())
                found.append(Piece(names, bool(predicts[first]), "id"))
                continue
            text = decode_after(self._tokenizer, ids[:first], ids[first:end])
            found.append(Piece(visible(text), bool(predicts[first])))
        return found

    def _is_silent(self, token: int) -> bool:
        """Whether a token adds nothing to a text. It is asked twice in a row, since some tokenizers
        drop a space at the start."""
        if token not in self._silent:
            self._silent[token] = not self._tokenizer.decode([token, token])
        return self._silent[token]

    def _name(self, token: int) -> str:
        if token == self._tokenizer.end_of_document:
            return "⟨end⟩"
        if token == self._tokenizer.start_of_document:
            return "⟨start⟩"
        return f"⟨{token}⟩"


def visible(text: str) -> str:
    """`text` with a sign for each character that is not to be seen: ↵ for a line feed, pictures for
    other ASCII controls (␉ for a tab), ⟨U+202E⟩ for others, such as halves of surrogate pairs and
    odd spaces."""
    return text if text.isprintable() else "".join(map(_sign, text))


def _sign(character: str) -> str:
    code = ord(character)
    if character == "\n":
        return LINE_FEED
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    return character if character.isprintable() else f"⟨U+{code:04X}⟩"


def shorten(pieces: tuple[Piece, ...], most: int) -> tuple[Piece, ...]:
    """The pieces with at most `most` characters, the middle left out and said so."""
    size = sum(len(piece.text) for piece in pieces)
    if size <= most:
        return pieces
    left, right = _head(pieces, most // 2), _head(pieces[::-1], most // 2, from_end=True)
    gap = Piece(f" … {many(size - most // 2 * 2, 'character')} … ", True, "gap")
    return (*left, gap, *right[::-1])


def _head(pieces: tuple[Piece, ...], most: int, from_end: bool = False) -> list[Piece]:
    found = []
    for piece in pieces:
        if most <= 0:
            break
        text = piece.text[-most:] if from_end else piece.text[:most]
        found.append(Piece(text, piece.predicts, piece.kind))
        most -= len(text)
    return found
