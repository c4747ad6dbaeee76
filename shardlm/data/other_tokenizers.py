"""Tokenizers of the packages sentencepiece and tiktoken, which are extras of this one.

Both work on one thread: text is tokenized by as many processes as there are cores.
"""

import base64
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from json import dumps
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int32

from shardlm.data.errors import DataError
from shardlm.data.opening import require
from shardlm.data.tokenizer import ACCEPTED, ENDS, Tokenizer, checked, utf8


@dataclass(frozen=True)
class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model (Kudo & Richardson, arXiv 1808.06226).

    Its `bos` starts a document and its `eos` ends one, as far as it has them.
    """

    model: bytes = field(repr=False)
    """The content of its file."""
    name: str = field(default="sentencepiece", compare=False)
    kind: ClassVar[str] = "sentencepiece"

    @classmethod
    def of(cls, model: bytes, name: str = kind) -> "SentencePieceTokenizer":
        """The tokenizer of a model file's content.

        Raises:
          DataError: it is no model, or the package is missing.
        """
        tokenizer = cls(model, name)
        _ = tokenizer._library  # Raises now, not at the first text.
        return tokenizer

    @classmethod
    def restored(cls, model: Any) -> "SentencePieceTokenizer":
        """Of what `to_json` has written."""
        return cls.of(base64.b64decode(model, validate=True))

    @functools.cached_property
    def _library(self) -> Any:
        package = require(self.kind, self.kind, "the tokenizer")
        try:
            # An empty one is taken for none.
            library = package.SentencePieceProcessor(model_proto=self.model or b"\0")
        except RuntimeError as error:
            raise DataError(
                f"this is no sentencepiece model ({error}): it must be {ACCEPTED}"
            ) from None
        return library

    @property
    def vocab_size(self) -> int:
        """See `Tokenizer`."""
        return int(self._library.vocab_size())

    @functools.cached_property
    def start_of_document(self) -> int | None:
        """See `Tokenizer`."""
        return _or_none(self._library.bos_id())

    @functools.cached_property
    def end_of_document(self) -> int | None:
        """See `Tokenizer`."""
        return _or_none(self._library.eos_id())

    @functools.cached_property
    def _special(self) -> np.ndarray:
        return np.array([i for i in range(self.vocab_size) if self._library.is_control(i)], int)

    def encode(self, text: str) -> Int32[np.ndarray, "tokens"]:
        """See `Tokenizer`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See `Tokenizer`."""
        for text in texts:
            utf8(text)
        found = self._library.encode(list(texts), num_threads=1)
        return [np.array(ids, np.int32) for ids in found]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """See `Tokenizer`."""
        ids = checked(ids, self.vocab_size)
        return str(self._library.decode(ids[~np.isin(ids, self._special)].tolist()))

    def to_json(self) -> str:
        """See `Tokenizer`."""
        return dumps({"tokenizer": self.kind, "model": base64.b64encode(self.model).decode()})


@dataclass(frozen=True)
class TiktokenTokenizer(Tokenizer):
    """An encoding of tiktoken, of its own or of a plugin; the first of `ENDS` that it has ends a
    document."""

    encoding: str
    kind: ClassVar[str] = "tiktoken"

    @classmethod
    def of(cls, encoding: str) -> "TiktokenTokenizer":
        """The encoding of this name.

        Raises:
          DataError: there is none, its ranks cannot be had, or the package is missing.
        """
        tokenizer = cls(encoding)
        _ = tokenizer._library  # Raises now, not at the first text.
        return tokenizer

    @classmethod
    def restored(cls, encoding: Any, specials: Any, digest: Any) -> "TiktokenTokenizer":
        """Of what `to_json` has written.

        Raises:
          DataError: the encoding has other ranks or special tokens here.
        """
        tokenizer = cls.of(encoding)
        if (specials, digest) != (tokenizer._specials, tokenizer._digest):
            raise DataError(
                f"the stored tokenizer is {tokenizer.name}, and the encoding of that name has "
                "other tokens here: install the tiktoken, or its plugin, that it was stored with"
            )
        return tokenizer

    @functools.cached_property
    def _library(self) -> Any:
        try:
            package = require(self.kind, self.kind, "the tokenizer")
        except DataError as error:
            raise DataError(f"data.tokenizer is {self.name!r}: {error}") from None
        known = package.list_encoding_names()
        if self.encoding not in known:
            raise DataError(
                f"data.tokenizer is {self.name!r}: tiktoken has no such encoding; use one of "
                f"{', '.join(known)}, or install the plugin that has it"
            )
        try:
            return package.get_encoding(self.encoding)
        except Exception as error:  # Of the network, the disk or the plugin.
            raise DataError(
                f"data.tokenizer is {self.name!r}, whose ranks can neither be read nor downloaded "
                f"({type(error).__name__}: {error}): use it once where there is a network, and set "
                "TIKTOKEN_CACHE_DIR to the folder that has them then"
            ) from None

    @property
    def name(self) -> str:
        """See `Tokenizer`."""
        return f"{self.kind}:{self.encoding}"

    @property
    def vocab_size(self) -> int:
        """See `Tokenizer`."""
        return int(self._library.n_vocab)

    @functools.cached_property
    def _specials(self) -> Mapping[str, int]:
        return dict(self._library._special_tokens)

    @functools.cached_property
    def _digest(self) -> str:
        """Of all that makes ids of text."""
        digest = blake2b(self._library._pat_str.encode(), digest_size=16)
        for token, rank in sorted(self._library._mergeable_ranks.items()):
            digest.update(b"%d %d " % (rank, len(token)) + token)
        return digest.hexdigest()

    @functools.cached_property
    def _has_text(self) -> np.ndarray:
        """Whether an id is of a token that is not special."""
        has = np.zeros(self.vocab_size, bool)
        has[list(self._library._mergeable_ranks.values())] = True
        return has

    @property
    def end_of_document(self) -> int | None:
        """See `Tokenizer`."""
        return next((self._specials[name] for name in ENDS if name in self._specials), None)

    def encode(self, text: str) -> Int32[np.ndarray, "tokens"]:
        """See `Tokenizer`."""
        utf8(text)
        ids = self._library.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
        return ids.astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """See `Tokenizer`."""
        ids = checked(ids, self.vocab_size)
        return str(self._library.decode(ids[self._has_text[ids]].tolist()))

    def to_json(self) -> str:
        """See `Tokenizer`."""
        return dumps(
            {
                "tokenizer": self.kind,
                "encoding": self.encoding,
                "specials": self._specials,
                "digest": self._digest,
            },
            sort_keys=True,
        )


def _or_none(number: int) -> int | None:
    return number if number >= 0 else None
