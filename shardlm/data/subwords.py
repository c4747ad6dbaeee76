"""Tokenizers of the library `tokenizers`: any `tokenizer.json`, or one trained here.

What the tokenizer's own template puts before a text starts a document, and what it puts after it
ends one; where it puts nothing after, the first of `ENDS` that it has as a special token does.
Truncation and padding that the file asks for are switched off.
"""

import contextlib
import functools
import itertools
import json
import os
import re
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Int32

from shardlm.data.errors import DataError
from shardlm.data.threads import Threads
from shardlm.data.tokenizer import ACCEPTED, ENDS, Tokenizer, checked, utf8

BYTES_AND_END = 257
"""Ids that byte-level BPE has before the first merge."""

_PARALLELISM = "TOKENIZERS_PARALLELISM"
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")

TOGETHER = 1 << 20
"""Characters that the library is given at once: it takes about 160 bytes of memory for each."""
PIECE = 1 << 18
"""Characters of a text of which it is given a part at a time, where that makes no difference."""
_BEFORE_SPACE = re.compile(r"(?<=\S)[ \n]")
"""No token of GPT-2's pattern goes on from a character that is no space to one that is."""


class Parts(NamedTuple):
    """A tokenizer, read."""

    library: Any
    """Which no text gives an id of `special`."""
    vocab_size: int
    start: int | None
    end: int | None
    special: np.ndarray
    falls_back: bool
    """Whether tokens such as `<0x0A>` stand for bytes."""
    cuttable: bool
    """Whether a text that is cut at `_BEFORE_SPACE` has the same tokens."""


@dataclass(frozen=True)
class SubwordTokenizer(Tokenizer):
    """A tokenizer of the library."""

    content: str = field(repr=False)
    """Its `tokenizer.json` in one form: as written in the file, but without layout, truncation and
    padding. The library would write it another way in another version."""
    name: str = field(default="subwords", compare=False)
    threads: int = field(default=1, compare=False)
    """Of this process that give text to the library at a time, whatever calls it. A batch of more
    than `TOGETHER` characters is tokenized by all of them: one long text would else have one."""
    kind: ClassVar[str] = "subwords"
    _gate: threading.Semaphore = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Memory is by what the library has at a time.
        object.__setattr__(self, "_gate", threading.Semaphore(self.threads))

    @classmethod
    def of(cls, content: Any, name: str = kind) -> "SubwordTokenizer":
        """The tokenizer of a `tokenizer.json` that `json.loads` has read.

        Raises:
          DataError: it is no tokenizer, or its template puts more than one token before or after a
            text.
        """
        if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
            raise DataError(
                "this is no tokenizer.json of the library tokenizers, which has a model: it must "
                f"be {ACCEPTED}"
            )
        content = {**content, "truncation": None, "padding": None}
        tokenizer = cls(json.dumps(content, sort_keys=True, separators=(",", ":")), name)
        _ = tokenizer._parts  # Raises now, not at the first text.
        return tokenizer

    @functools.cached_property
    def _parts(self) -> Parts:
        return _read(self.content)

    @property
    def vocab_size(self) -> int:
        """See `Tokenizer`."""
        return self._parts.vocab_size

    @property
    def start_of_document(self) -> int | None:
        """See `Tokenizer`."""
        return self._parts.start

    @property
    def end_of_document(self) -> int | None:
        """See `Tokenizer`."""
        return self._parts.end

    def encode(self, text: str) -> Int32[np.ndarray, "tokens"]:
        """See `Tokenizer`. Starts no threads: a process that reads prompts only may fork."""
        encode = self._parts.library.encode
        found = self._try(lambda: encode(text, add_special_tokens=False), [text])
        return np.array(found.ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See `Tokenizer`."""
        cut = _pieces if self._parts.cuttable else lambda text: iter((text,))
        pieces = [list(cut(text)) for text in texts]
        groups: list[list[str]] = [[]]
        size = 0
        for piece in itertools.chain.from_iterable(pieces):
            if size >= TOGETHER:
                groups.append([])
                size = 0
            groups[-1].append(piece)
            size += len(piece)
        if self.threads > 1 and len(groups) > 1:
            with Threads(self.threads) as threads:
                futures = [threads.submit(self._encode_together, group) for group in groups]
                found = [future.result() for future in futures]
        else:
            found = [self._encode_together(group) for group in groups]
        ids = itertools.chain.from_iterable(found)
        return [np.concatenate(list(itertools.islice(ids, len(part)))) for part in pieces]

    def _encode_together(self, texts: list[str]) -> list[np.ndarray]:
        encode = self._parts.library.encode_batch_fast
        with self._gate:
            found = self._try(lambda: encode(texts, add_special_tokens=False), texts)
            # By way of `array`, numpy reads a list of small integers a third faster.
            return [np.frombuffer(array("I", encoding.ids), np.uint32) for encoding in found]

    def _try(self, encode: Any, texts: Sequence[str]) -> Any:
        try:
            return encode()
        except Exception as error:  # The library raises no narrower one.
            for text in texts:
                utf8(text)
            raise DataError(
                f"the tokenizer {self.name} cannot encode the text ({error}): use one with a token "
                "for unknown text, or data.tokenizer bytes"
            ) from None

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """See `Tokenizer`."""
        ids = checked(ids, self.vocab_size)
        library = self._parts.library
        kept = ids[~np.isin(ids, self._parts.special)].tolist()
        text = str(library.decode(kept))
        if self._parts.falls_back and "\ufffd" in text:
            # The library replaces all bytes in a row if one of them is in no character.
            tokens = filter(None, map(library.id_to_token, kept))
            text = str(library.decoder.decode(list(_apart(tokens))))
        return text

    def to_json(self) -> str:
        """See `Tokenizer`."""
        return f'{{"tokenizer": "{self.kind}", "content": {self.content}}}'


@functools.lru_cache(2)
def _read(content: str) -> Parts:
    """What `content` says. Kept, since a tokenizer comes from a file, then from the store that was
    made with it, and reading takes a tenth of a second."""
    library = _load(content)
    vocab = library.get_vocab(with_added_tokens=True)
    start, end = _template(library, vocab)
    added = library.get_added_tokens_decoder()
    special = {number for number, token in added.items() if token.special}
    if end is None:
        ends = {added[number].content: number for number in special}
        end = next((ends[name] for name in ENDS if name in ends), None)
    special |= {number for number in (start, end) if number is not None}
    if not special <= set(vocab.values()):
        unknown = sorted(special - set(vocab.values()))
        raise DataError(
            f"its post_processor adds the ids {unknown}, which are of no token: correct the "
            "post_processor"
        )
    names = {name for name, number in vocab.items() if number in special}
    parsed = json.loads(content)
    cuttable = _is_cuttable(parsed)
    falls_back = "ByteFallback" in json.dumps(parsed.get("decoder"))
    if _hide(parsed, names):
        library = _load(json.dumps(parsed))
    library.encode_special_tokens = True
    size = max(vocab.values()) + 1
    special_ids = np.array(sorted(special), int)
    return Parts(library, size, start, end, special_ids, falls_back, cuttable)


def _is_cuttable(content: dict[str, Any]) -> bool:
    """Whether the tokenizer makes words by GPT-2's pattern, and tokens of each word by itself."""
    split = content.get("pre_tokenizer") or {}
    return (
        content.get("normalizer") is None
        and split.get("type") == "ByteLevel"
        and split.get("use_regex", True)
        and not split.get("add_prefix_space")
        and all(token["special"] for token in content.get("added_tokens", ()))
    )


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces of about `PIECE`, cut at `_BEFORE_SPACE` only."""
    start = 0
    while len(text) - start > PIECE:
        found = _BEFORE_SPACE.search(text, start + PIECE)
        if found is None:
            break
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


@contextlib.contextmanager
def library_in_one_thread() -> Iterator[None]:
    """Keep the library tokenizers to the thread that calls it: its own would compete with ours."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_PARALLELISM, None)
        else:
            os.environ[_PARALLELISM] = before


def _apart(tokens: Iterable[str]) -> Iterator[str]:
    """Tokens, with U+FFFD in place of those of bytes that are in no character."""
    for is_byte, run in itertools.groupby(tokens, lambda token: bool(_BYTE.fullmatch(token))):
        if not is_byte:
            yield from run
            continue
        text = bytes(int(token[3:5], 16) for token in run).decode(errors="replace")
        # As bytes again: a decoder may change characters.
        for piece in re.split("(\ufffd)", text):
            if piece == "\ufffd":
                yield piece
            else:
                yield from (f"<0x{byte:02X}>" for byte in piece.encode())


def _load(content: str) -> Any:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # The library raises no narrower one.
        raise DataError(
            f"the library tokenizers cannot use this tokenizer.json ({error}): save it again with "
            f"that library, or set data.tokenizer to {ACCEPTED}"
        ) from None


def _template(library: Any, vocab: Iterable[str]) -> tuple[int | None, int | None]:
    """The ids that the tokenizer by itself puts before and after a text."""
    for text in itertools.chain("a", vocab):
        try:
            alone = library.encode(text, add_special_tokens=False).ids
        except Exception:  # A letter that it has no id for says nothing of its template.
            continue
        if alone:
            break
    else:
        raise DataError("no text has a token in it: name another tokenizer.json")
    whole = library.encode(text, add_special_tokens=True).ids
    extra = len(whole) - len(alone)
    for before, after in ((0, 0), (1, 0), (0, 1), (1, 1)):
        if extra == before + after and whole[before : len(whole) - after] == alone:
            return whole[0] if before else None, whole[-1] if after else None
    raise DataError(
        f"its post_processor makes {whole} of a text of the ids {alone}: at most one token before "
        "and one after a text are supported; change the post_processor"
    )


def _hide(content: dict[str, Any], names: set[str]) -> bool:
    """Take the ways from text to the tokens `names` out of `content`; False if it has none.

    The library can leave added tokens alone that stand in a text. But many files list them in the
    vocabulary of the model also, and a model of words, or a unigram model, takes them from there.
    Renamed they keep the ids of all others.
    """
    model = content["model"]
    unknown = model.get("unk_token")
    vocab = model.get("vocab", {})
    # The token of unknown text remains what unknown text gives.
    if isinstance(vocab, list):
        listed = {pair[0] for i, pair in enumerate(vocab) if i != model.get("unk_id")} & names
    else:
        listed = names & vocab.keys() - {unknown}
    added = content["added_tokens"]
    if not listed and all(t["special"] for t in added if t["content"] in names):
        return False
    # No text holds the digest of its tokenizer by accident.
    digest = blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    def renamed(name: str) -> str:
        return f"\0{digest} {name}" if name in listed else name

    if isinstance(vocab, list):
        model["vocab"] = [[renamed(name), score] for name, score in vocab]
    else:
        model["vocab"] = {renamed(name): number for name, number in vocab.items()}
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        model["merges"] = [
            [left, right]
            for left, right in merges
            if listed.isdisjoint((left, right, left + right.removeprefix(prefix)))
        ]
    content["added_tokens"] = [
        {**token, "special": token["special"] or token["content"] in names}
        for token in added
        if token["content"] not in listed
    ]
    return True


def train_bpe(texts: Iterable[str], vocab: int) -> SubwordTokenizer:
    """Byte-level BPE (Sennrich et al., arXiv 1508.07909; over bytes: Radford et al. 2019), for any
    text, made from `texts`, which are read once.

    The same texts give the same tokenizer. It has `vocab` ids, or fewer if the text has no more
    pairs to merge; id 0, `ENDS[0]`, ends a document.

    Raises:
      DataError: `vocab` is below `BYTES_AND_END`, or a text has no UTF-8 form.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab < BYTES_AND_END:
        raise DataError(
            f"tokenizer.vocab is {vocab}: it must be at least {BYTES_AND_END}, for the 256 bytes "
            "and the end of a document"
        )
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[ENDS[0]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The library's pattern makes the same words of the pieces as of the text.
    pieces = (piece for text in texts if utf8(text) for piece in _pieces(text))
    library.train_from_iterator(pieces, trainer)
    return SubwordTokenizer.of(json.loads(library.to_str()))
