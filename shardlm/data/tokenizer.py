"""Text to ids and back. `data.tokenizer` is one of

- `bytes`: the 256 byte values of UTF-8 and, as id 256, the end of a document: 257 ids for any text.
- `characters`: the distinct characters of the text in code-point order, and nothing else. There is
  no end of document, so that a loss is comparable with published ones on the same text (65 ids for
  Shakespeare by characters).
- a `tokenizer.json` of the library tokenizers, or the one that a run or a store keeps: see
  `shardlm.data.subwords`.
- a sentencepiece `.model`, or `tiktoken:NAME`: see `shardlm.data.other_tokenizers`.

Special ids come from the caller, once per document: `encode` adds none, and the text of a special
token, "<|endoftext|>" in somebody's README, is text like any other.
"""

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int32

from shardlm.data.errors import DataError

ACCEPTED = (
    "bytes, characters, the path of a tokenizer.json of the library tokenizers (ends with .json) "
    "or of a sentencepiece model (ends with .model), or tiktoken:NAME"
)
"""Values of `data.tokenizer`, for messages."""

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|endofdoc|>", "<|im_end|>")
"""Names of the end of a document where a tokenizer does not say which it is: the first of these
that is a special token."""


class Tokenizer(ABC):
    """What the rest of the package needs of a tokenizer."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its value of `data.tokenizer`; of one that was restored, and was a file: its kind."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The largest id and one: ids are from 0, and not all need be of a token."""

    @property
    def start_of_document(self) -> int | None:
        """Id that precedes the first token of every document and prompt, if there is one."""
        return None

    @property
    @abstractmethod
    def end_of_document(self) -> int | None:
        """Id that follows the last token of every document, if there is one."""

    @abstractmethod
    def encode(self, text: str) -> Int32[np.ndarray, "tokens"]:
        """Ids of `text`, without start and end of document.

        Raises:
          DataError: a character that has no id.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, as `encode` gives them, in any dtype of integers.

        Raises:
          DataError: a character that has no id.
        """
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`. Special tokens and ids of no token have none; bytes that are no character,
        for example where a text was cut within one, become U+FFFD.

        Raises:
          DataError: an id outside the vocabulary.
        """

    @abstractmethod
    def to_json(self) -> str:
        """What `from_json` makes an equal tokenizer of."""

    def fingerprint(self) -> str:
        """Hexadecimal digest of `to_json`; equal tokenizers have equal ones."""
        return blake2b(self.to_json().encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class BytesTokenizer(Tokenizer):
    """Bytes of UTF-8, and the end of a document."""

    name: ClassVar[str] = "bytes"
    vocab_size: ClassVar[int] = 257
    end_of_document: ClassVar[int] = 256

    def encode(self, text: str) -> Int32[np.ndarray, "tokens"]:
        """The bytes of `text`."""
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`. Ends of documents are dropped; bytes that are no character, for example
        where a text was cut within one, become U+FFFD."""
        ids = checked(ids, self.vocab_size)
        return ids[ids != self.end_of_document].astype(np.uint8).tobytes().decode(errors="replace")

    def to_json(self) -> str:
        """See `Tokenizer`."""
        return json.dumps({"tokenizer": self.name})


@dataclass(frozen=True)
class CharactersTokenizer(Tokenizer):
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
    def of(cls, texts: Iterable[str]) -> "CharactersTokenizer":
        """The tokenizer of exactly the characters that occur in `texts`.

        Raises:
          DataError: none does.
        """
        occurs = np.zeros(0x110000, bool)
        for text in texts:
            occurs[_code_points(text)] = True
        if not occurs.any():
            raise DataError(
                "data.tokenizer is characters and data.sources have no text to take them from "
                "(stores and arrays are ids already): leave data.tokenizer out, or give text"
            )
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
        codes = _code_points(self.characters)[checked(ids, self.vocab_size)]
        return codes.tobytes().decode("utf-32-le", "surrogatepass")

    def to_json(self) -> str:
        """See `Tokenizer`."""
        return json.dumps({"tokenizer": self.name, "characters": self.characters})


def make_tokenizer(name: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names; `texts` are read only by `characters`.

    Raises:
      DataError: there is no such tokenizer, its file is missing or holds none, or what it needs is
        not installed.
    """
    # Here, since these modules stand on this one.
    from shardlm.data.other_tokenizers import SentencePieceTokenizer, TiktokenTokenizer

    if name == BytesTokenizer.name:
        return BytesTokenizer()
    if name == CharactersTokenizer.name:
        return CharactersTokenizer.of(texts)
    kind, _, encoding = name.partition(":")
    if kind == TiktokenTokenizer.kind and encoding:
        return TiktokenTokenizer.of(encoding)
    if not name.endswith((".json", ".model")):
        raise DataError(f"data.tokenizer is {name!r}: it must be {ACCEPTED}")
    try:
        data = Path(name).expanduser().read_bytes()
    except OSError as error:
        raise DataError(
            f"data.tokenizer is {name!r}, which cannot be read ({error.strerror}): it must be "
            f"{ACCEPTED}"
        ) from None
    try:
        if name.endswith(".model"):
            return SentencePieceTokenizer.of(data, name)
        return _of_json(data, name)
    except DataError as error:
        raise DataError(f"data.tokenizer is {name!r}: {error}") from None


def _of_json(data: bytes, name: str) -> Tokenizer:
    """The tokenizer of a file: the library's form, or that of `to_json`."""
    from shardlm.data.subwords import SubwordTokenizer

    try:
        content = json.loads(data)
    except ValueError as error:
        raise DataError(f"the file is not JSON ({error}): it must be {ACCEPTED}") from None
    if isinstance(content, dict) and "tokenizer" in content:
        return _restore(content)
    return SubwordTokenizer.of(content, name)


def from_json(text: str) -> Tokenizer:
    """The tokenizer that `Tokenizer.to_json` wrote.

    Raises:
      DataError: not such a text, or what the tokenizer needs is not installed.
    """
    try:
        stored = json.loads(text)
    except ValueError as error:
        raise _unreadable(error) from None
    return _restore(stored)


def _restore(stored: Any) -> Tokenizer:
    from shardlm.data.other_tokenizers import SentencePieceTokenizer, TiktokenTokenizer
    from shardlm.data.subwords import SubwordTokenizer

    try:
        rest = dict(stored)
        name = rest.pop("tokenizer")
        if name == BytesTokenizer.name and not rest:
            return BytesTokenizer()
        if name == CharactersTokenizer.name and isinstance(rest["characters"], str):
            return CharactersTokenizer(**rest)
        if name == SubwordTokenizer.kind:
            return SubwordTokenizer.of(**rest)
        if name == SentencePieceTokenizer.kind:
            return SentencePieceTokenizer.restored(**rest)
        if name == TiktokenTokenizer.kind:
            return TiktokenTokenizer.restored(**rest)
    except DataError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(error) from None
    raise DataError(
        f"the stored tokenizer is of kind {name!r}: this version knows {BytesTokenizer.name}, "
        f"{CharactersTokenizer.name}, {SubwordTokenizer.kind}, {SentencePieceTokenizer.kind} and "
        f"{TiktokenTokenizer.kind}"
    )


def _unreadable(error: Exception) -> DataError:
    return DataError(
        f"the stored tokenizer cannot be read ({type(error).__name__}: {error}): restore the file "
        "that the run wrote"
    )


def decode_after(
    tokenizer: Tokenizer, before: Sequence[int] | np.ndarray, new: Sequence[int] | np.ndarray
) -> str:
    """The text that the ids `new` add where they follow the ids `before`.

    By themselves, ids may begin within a character, and some tokenizers drop a space in front. So
    both are decoded together, and what `before` gives alone is taken off: all of it, or, where it
    ends within a character that `new` completes, what is in front of that character.

    Raises:
      DataError: an id outside the vocabulary.
    """
    known = tokenizer.decode(before)
    whole = tokenizer.decode(np.concatenate([np.asarray(ids, np.int64) for ids in (before, new)]))
    pairs = zip(known, whole, strict=False)
    shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(known), len(whole)))
    return whole[shared:]


def utf8(text: str) -> bytes:
    """The bytes of `text`.

    Raises:
      DataError: half of a surrogate pair.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {error.start} of the text, {text[error.start]!a}, is half of a pair and "
            "has no UTF-8 form: remove it"
        ) from None


def checked(ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """`ids` as an array of int64.

    Raises:
      DataError: an id outside the vocabulary.
    """
    array = np.asarray(ids, np.int64).reshape(-1)
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise DataError(f"id {outside[0]} is outside the vocabulary of {vocab_size} ids")
    return array


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
