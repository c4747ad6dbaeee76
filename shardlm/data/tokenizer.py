"""Text to ids and back.

- `bytes`: the 256 byte values of UTF-8 and, as id 256, the end of a document: 257 ids for any text.
- `characters`: the distinct characters of the text in code-point order, and nothing else. There is
  no end of document, so that a loss is comparable with published ones on the same text (65 ids for
  Shakespeare by characters).
"""

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from shardlm.data.errors import DataError
from shardlm.data.sources import Document


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the package needs of a tokenizer."""

    @property
    def name(self) -> str:
        """Its value of `data.tokenizer`."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, from 0."""

    @property
    def end_of_document(self) -> int | None:
        """Id that follows the last token of every document, if there is one."""

    def encode(self, text: str) -> Int32[np.ndarray, "tokens"]:
        """Ids of `text`, without end of document.

        Raises:
          DataError: a character that has no id.
        """

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`.

        Raises:
          DataError: an id outside the vocabulary.
        """

    def to_json(self) -> str:
        """What `from_json` makes an equal tokenizer of."""


@dataclass(frozen=True)
class BytesTokenizer:
    """Bytes of UTF-8, and the end of a document."""

    name: ClassVar[str] = "bytes"
    vocab_size: ClassVar[int] = 257
    end_of_document: ClassVar[int] = 256

    def encode(self, text: str) -> Int32[np.ndarray, "tokens"]:
        """The bytes of `text`."""
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"character {error.start} of the text, {text[error.start]!a}, is half of a pair "
                "and has no UTF-8 form: remove it"
            ) from None
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`. Ends of documents are dropped; bytes that are no character, for example
        where a text was cut within one, become U+FFFD."""
        ids = _checked(ids, self.vocab_size)
        return ids[ids != self.end_of_document].astype(np.uint8).tobytes().decode(errors="replace")

    def to_json(self) -> str:
        """See `Tokenizer`."""
        return json.dumps({"tokenizer": self.name})


@dataclass(frozen=True)
class CharactersTokenizer:
    """An id for each of `characters`, which are distinct and in code-point order."""

    characters: str
    name: ClassVar[str] = "characters"
    end_of_document: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not self.characters or list(self.characters) != sorted(set(self.characters)):
            raise DataError(
                f"the characters of a tokenizer are {self.characters!r}: they must be distinct, in "
                "code-point order and at least one"
            )

    @classmethod
    def of(cls, documents: Iterable[Document]) -> "CharactersTokenizer":
        """The tokenizer of exactly the characters that occur in `documents`."""
        occurs = np.zeros(0x110000, bool)
        for document in documents:
            occurs[_code_points(document.text)] = True
        return cls("".join(map(chr, np.flatnonzero(occurs))))

    @property
    def vocab_size(self) -> int:
        """Number of characters."""
        return len(self.characters)

    @functools.cached_property
    def _id_of(self) -> np.ndarray:
        # One entry more than the largest code point, which every larger one is clipped to.
        codes = _code_points(self.characters)
        table = np.full(int(codes[-1]) + 2, -1, np.int32)
        table[codes] = np.arange(len(codes), dtype=np.int32)
        return table

    def encode(self, text: str) -> Int32[np.ndarray, "tokens"]:
        """Ids of the characters of `text`."""
        ids = self._id_of[np.minimum(_code_points(text), len(self._id_of) - 1)]
        if (ids < 0).any():
            at = int(np.argmax(ids < 0))
            raise DataError(
                f"character {at} of the text, {text[at]!a}, is none of the {self.vocab_size} that "
                "the tokenizer was made from: use one of those, or train with data.tokenizer bytes"
            )
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`."""
        codes = _code_points(self.characters)[_checked(ids, self.vocab_size)]
        return codes.tobytes().decode("utf-32-le", "surrogatepass")

    def to_json(self) -> str:
        """See `Tokenizer`."""
        return json.dumps({"tokenizer": self.name, "characters": self.characters})


def make_tokenizer(name: str, documents: Iterable[Document]) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names, for `documents`."""
    if name == BytesTokenizer.name:
        return BytesTokenizer()
    if name == CharactersTokenizer.name:
        return CharactersTokenizer.of(documents)
    raise DataError(
        f"data.tokenizer is {name!r}: it must be {BytesTokenizer.name} or "
        f"{CharactersTokenizer.name}"
    )


def from_json(text: str) -> Tokenizer:
    """The tokenizer that `Tokenizer.to_json` wrote.

    Raises:
      DataError: not such a text.
    """
    try:
        stored = json.loads(text)
        name = stored.pop("tokenizer")
        if name == BytesTokenizer.name and not stored:
            return BytesTokenizer()
        if name == CharactersTokenizer.name and isinstance(stored["characters"], str):
            return CharactersTokenizer(**stored)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise DataError(
            f"the stored tokenizer cannot be read ({type(error).__name__}: {error}): restore the "
            "file that the run wrote"
        ) from None
    raise DataError(
        f"the stored tokenizer is of kind {name!r}: this version knows {BytesTokenizer.name} and "
        f"{CharactersTokenizer.name}"
    )


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _checked(ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    array = np.asarray(ids, np.int64).reshape(-1)
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise DataError(f"id {outside[0]} is outside the vocabulary of {vocab_size} ids")
    return array
