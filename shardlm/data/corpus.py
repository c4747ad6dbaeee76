"""Documents as one stream of ids with their boundaries, split into training and validation."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64, UInt

from shardlm.data.errors import DataError
from shardlm.data.sources import Document
from shardlm.data.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Corpus:
    """A stream of token ids and where its documents start.

    `tokens`: the ids, of the smallest unsigned dtype that holds the vocabulary.
    `starts`: documents + 1 places, strictly ascending, from 0 to the number of tokens; document i
    is `tokens[starts[i] : starts[i + 1]]`.
    """

    tokens: UInt[np.ndarray, "tokens"]
    starts: Int64[np.ndarray, "boundaries"]

    @classmethod
    def of(cls, documents: Iterable[np.ndarray], vocab_size: int) -> "Corpus":
        """The concatenation of the ids of `documents`; those without ids add nothing."""
        dtype = np.min_scalar_type(vocab_size - 1)
        pieces = [np.asarray(ids).astype(dtype) for ids in documents if len(ids)]
        lengths = [len(piece) for piece in pieces]
        tokens = np.concatenate(pieces) if pieces else np.zeros(0, dtype)
        return cls(tokens, np.cumsum([0, *lengths], dtype=np.int64))

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.starts) - 1

    @property
    def loss_tokens(self) -> int:
        """Tokens that are predicted in an epoch: all but the first of each document."""
        return len(self.tokens) - self.documents

    def fingerprint(self) -> str:
        """Hexadecimal digest of ids and boundaries, the same for any dtype of the ids."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(np.ascontiguousarray(self.starts, "<i8").data)
        for at in range(0, len(self.tokens), 1 << 22):
            digest.update(np.ascontiguousarray(self.tokens[at : at + (1 << 22)], "<u4").data)
        return digest.hexdigest()


def tokenize(document: Document, tokenizer: Tokenizer) -> Int32[np.ndarray, "tokens"]:
    """Ids of a document, with its end where the tokenizer has one."""
    ids = tokenizer.encode(document.text)
    if tokenizer.end_of_document is None:
        return ids
    return np.append(ids, np.int32(tokenizer.end_of_document))


def split_documents(
    documents: Sequence[Document], tokenizer: Tokenizer, share: float
) -> tuple[Corpus, Corpus]:
    """Training and validation of whole documents.

    A document is on the side that a hash of its name says, whatever the other documents are, so
    that adding some moves none. `share` of them are expected in validation.

    Raises:
      DataError: one of the sides has none.
    """
    sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for document in documents:
        sides[_unit_hash(document.name) < share].append(tokenize(document, tokenizer))
    if share and not all(sides):
        side = "validation" if sides[0] else "training"
        raise DataError(
            f"data.split is documents and data.validation {share:g}: by the hash of their names "
            f"none of the {len(documents)} documents is left for {side}: set data.split tail, "
            "change data.validation, or give the text in more files"
        )
    train, validation = (Corpus.of(side, tokenizer.vocab_size) for side in sides)
    return train, validation


def split_tail(
    documents: Sequence[Document], tokenizer: Tokenizer, share: float
) -> tuple[Corpus, Corpus]:
    """Training on the first `int((1 - share) * tokens)` tokens, validation on the others.

    The document in which the cut falls becomes one document on each side.

    Raises:
      DataError: one of the sides has no token.
    """
    whole = Corpus.of((tokenize(d, tokenizer) for d in documents), tokenizer.vocab_size)
    tokens, starts = whole.tokens, whole.starts
    cut = int((1 - share) * len(tokens))
    if share and not 0 < cut < len(tokens):
        raise DataError(
            f"data.split is tail and data.validation {share:g}: of {len(tokens)} tokens {cut} "
            f"would be for training and {len(tokens) - cut} for validation: give more text or "
            "change data.validation"
        )
    before, after = starts[starts < cut], starts[starts > cut]
    return (
        Corpus(tokens[:cut], np.append(before, cut)),
        Corpus(tokens[cut:], np.concatenate([[0], after - cut])),
    )


def _unit_hash(name: str) -> float:
    digest = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
