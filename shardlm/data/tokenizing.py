"""A chunk of raw input as ids, in any process."""

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from shardlm.data.errors import DataError
from shardlm.data.readers import Chunk, Document, Parsed, Reading, parse
from shardlm.data.store import id_dtype
from shardlm.data.tokenizer import Tokenizer

COUNTS = ("empty", "skipped", "replaced")
_BLOCK = 1 << 22
"""Ids of an array that are looked at together, so that memory stays level."""


class Tokenized(NamedTuple):
    """A chunk as ids."""

    ids: np.ndarray
    lengths: np.ndarray
    hashes: np.ndarray
    counts: tuple[int, int, int]
    """See `COUNTS`."""


def tokenize(chunk: Chunk, reading: Reading, tokenizer: Tokenizer) -> Tokenized:
    """The documents of a chunk as ids, each with its specials once.

    Raises:
      DataError: text that cannot be read, or an id outside the vocabulary.
    """
    parsed = parse(chunk, reading)
    dtype = id_dtype(tokenizer.vocab_size)
    pieces, lengths, hashes, empty = [], [], [], parsed.empty
    around = [
        np.array([special], dtype) if special is not None else np.zeros(0, dtype)
        for special in (tokenizer.start_of_document, tokenizer.end_of_document)
    ]
    for ids, digest in _documents(parsed, tokenizer):
        if not len(ids):
            empty += 1
            continue
        pieces += [around[0], ids.astype(dtype), around[1]]
        lengths.append(len(ids) + len(around[0]) + len(around[1]))
        hashes.append(digest)
    return Tokenized(
        np.concatenate(pieces) if pieces else np.zeros(0, dtype),
        np.array(lengths, np.int64),
        np.array(hashes, np.uint64),
        (empty, parsed.skipped, parsed.replaced),
    )


def _documents(parsed: Parsed, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    texts = [d.text for d in parsed.documents if d.text is not None]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        yield ids, _hash([text.encode(errors="surrogatepass")])
    for document in parsed.documents:
        if document.ids is not None:
            for ids in _checked(document, tokenizer):
                blocks = (ids[at : at + _BLOCK] for at in range(0, len(ids), _BLOCK))
                yield ids, _hash(block.astype("<u4").tobytes() for block in blocks)


def _hash(parts: Iterable[bytes]) -> int:
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "big")


def _checked(document: Document, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The documents of an array without their specials, which are added once for all."""
    ids = document.ids
    assert ids is not None
    start, end = tokenizer.start_of_document, tokenizer.end_of_document
    cuts = []
    for at in range(0, len(ids), _BLOCK):
        part = ids[at : at + _BLOCK]
        if part.max() >= tokenizer.vocab_size or part.min() < 0:
            place = np.flatnonzero((part < 0) | (part >= tokenizer.vocab_size))[0]
            raise DataError(
                f"data.sources: {document.name}: id {part[place]} at place "
                f"{document.first + at + place} is outside the vocabulary of "
                f"{tokenizer.vocab_size} ids: set data.tokenizer to the one that the array was "
                "made with"
            )
        if document.stream and end is not None:
            cuts.append(np.flatnonzero(part == end) + at + 1)
    parts = np.split(ids, np.concatenate(cuts) if cuts else [])
    if document.stream and not len(parts[-1]):
        parts.pop()  # Behind the last end.
    for part in parts:
        if start is not None and len(part) and part[0] == start:
            part = part[1:]
        if end is not None and len(part) and part[-1] == end:
            part = part[:-1]
        yield part
