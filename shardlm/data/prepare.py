"""From inputs to a store: tokenized in parallel, shard by shard, so that an interruption loses one.

The order of the documents and the cut into shards depend on the inputs only, never on the number of
workers: the same text and tokenizer give the same files, byte for byte.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from shardlm.data.errors import DataError
from shardlm.data.inputs import Input
from shardlm.data.readers import Chunk, Document, Parsed, Reading, parse, read_chunks
from shardlm.data.store import (
    FORMAT,
    MANIFEST,
    TOKENIZER,
    ShardInfo,
    Store,
    id_dtype,
    is_store,
    manifest_of,
    open_store,
    read_manifest,
    write_shard,
)
from shardlm.data.tokenizer import (
    BytesTokenizer,
    CharactersTokenizer,
    Tokenizer,
    from_json,
)
from shardlm.files import Occupied, lock, replace_text

SHARD_TOKENS = 1 << 25
"""A shard is closed by the chunk with which it has this many ids."""
_LOCK, _PROGRESS = ".lock", "progress.json"
_COUNTS = ("empty", "skipped", "replaced")


class Interrupted(Exception):
    """A preparation that was asked to stop; the shards that are finished stay."""


@runtime_checkable
class Progress(Protocol):
    """Is told how far a preparation is."""

    def __call__(self, stored_bytes: int, tokens: int) -> None:
        """So many more bytes of the inputs, as stored, are tokenized, to so many ids."""


class Tokenized(NamedTuple):
    """A chunk as ids."""

    ids: np.ndarray
    lengths: np.ndarray
    hashes: np.ndarray
    counts: tuple[int, int, int]
    """See `_COUNTS`."""


@dataclass
class Preparation:
    """What is made into a store, and how."""

    inputs: Sequence[Input]
    reading: Reading
    tokenizer: Tokenizer
    workers: int = 1
    shard_tokens: int = SHARD_TOKENS
    progress: Progress = field(default=lambda stored_bytes, tokens: None)
    stopped: Callable[[], bool] = lambda: False
    """Asked now and then: whether to stop."""

    @functools.cached_property
    def key(self) -> str:
        """Digest of all that decides what the store will hold."""
        parts = [
            FORMAT,
            self.tokenizer.fingerprint(),
            repr((self.reading.field, self.reading.errors, self.shard_tokens)),
            *(f"{i.name}\0{i.kind}\0{i.compression}\0{i.content()}" for i in self.inputs),
        ]
        return blake2b(
            "\n".join(parts).encode(errors="surrogateescape"), digest_size=16
        ).hexdigest()

    def into(self, path: Path, wait: bool = False) -> Store:
        """Make the store, or finish it; one that is there is opened.

        Args:
          path: its directory; made if need be.
          wait: for another process that prepares the same, rather than refuse.

        Raises:
          DataError: the directory holds something else, another process is at work in it, or the
            text cannot be used. Finished shards stay.
          Interrupted: `stopped`; finished shards stay.
          OSError: the disk is full or cannot be written to. Finished shards stay.
        """
        if is_store(path):
            return _finished(path, self.key)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise DataError(f"{path} is a file: name a directory for the store") from None
        descriptor = self._lock(path, wait)
        try:
            if is_store(path):
                return _finished(path, self.key)
            self._make(path)
        finally:
            os.close(descriptor)
        return open_store(path)

    def _lock(self, path: Path, wait: bool) -> int:
        while True:
            try:
                return lock(path / _LOCK)
            except Occupied as owner:
                if not wait:
                    raise DataError(
                        f"{owner} is preparing {path}: wait for it to end, or name another "
                        "directory"
                    ) from None
                if self.stopped():
                    raise Interrupted from None
                time.sleep(0.2)

    def _make(self, path: Path) -> None:
        done = _progress_of(path, self.key)
        shards = [ShardInfo(**s) for s in done["shards"]]
        counts = np.array(done["counts"])
        chunks_done = int(done["chunks"])
        replace_text(path / TOKENIZER, self.tokenizer.to_json())
        chunks = islice(read_chunks(self.inputs), chunks_done, None)
        parts: list[Tokenized] = []
        with contextlib.closing(self._tokenized(chunks)) as results:
            for stored_bytes, part in results:
                parts.append(part)
                chunks_done += 1
                self.progress(stored_bytes, len(part.ids))
                if sum(len(p.ids) for p in parts) >= self.shard_tokens:
                    shards.append(_write(path, len(shards), parts))
                    counts += np.sum([p.counts for p in parts], axis=0)
                    parts = []
                    state = {
                        "key": self.key,
                        "chunks": chunks_done,
                        "counts": counts.tolist(),
                        "shards": [asdict(s) for s in shards],
                    }
                    replace_text(path / _PROGRESS, json.dumps(state))
        if parts:
            counts += np.sum([p.counts for p in parts], axis=0)
            if any(len(p.ids) for p in parts):
                shards.append(_write(path, len(shards), parts))
        if not shards:
            raise DataError(
                "data.sources: every document is empty or left out "
                f"({', '.join(f'{n} {name}' for name, n in zip(_COUNTS, counts, strict=True))}): "
                "give some text"
            )
        named = dict(zip(_COUNTS, counts.tolist(), strict=True))
        manifest = manifest_of(shards, self.tokenizer, named, self.key)
        replace_text(path / MANIFEST, json.dumps(manifest, indent=1))
        (path / _PROGRESS).unlink(missing_ok=True)

    def _tokenized(self, chunks: Iterator[Chunk]) -> Generator[tuple[int, Tokenized], None, None]:
        """Chunks as ids, in their order, with the bytes that each has as stored."""
        if self.workers == 1:
            for chunk in chunks:
                if self.stopped():
                    raise Interrupted
                yield chunk.stored_bytes, tokenize(chunk, self.reading, self.tokenizer)
            return
        # Not forked: threads of libraries that are loaded would not come along.
        pool = ProcessPoolExecutor(
            self.workers,
            multiprocessing.get_context("spawn"),
            _start_worker,
            (self.reading, self.tokenizer.to_json()),
        )
        waiting: deque[tuple[int, Future[Tokenized]]] = deque()
        try:
            while True:
                for chunk in islice(chunks, 2 * self.workers + 1 - len(waiting)):
                    waiting.append((chunk.stored_bytes, pool.submit(_tokenize_in_worker, chunk)))
                if not waiting:
                    return
                stored_bytes, result = waiting.popleft()
                while True:
                    if self.stopped():
                        raise Interrupted
                    try:
                        tokenized = result.result(timeout=0.2)
                        break
                    except TimeoutError:
                        continue
                yield stored_bytes, tokenized
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_worker: Any = None


def _start_worker(reading: Reading, tokenizer: str) -> None:
    """Of a worker process: Ctrl-C is the parent's to answer."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Of this process: the workers are the threads.
    _worker = reading, from_json(tokenizer)


def _tokenize_in_worker(chunk: Chunk) -> Tokenized:
    return tokenize(chunk, *_worker)


def tokenize(chunk: Chunk, reading: Reading, tokenizer: Tokenizer) -> Tokenized:
    """The documents of a chunk as ids, each with its specials once.

    Raises:
      DataError: text that cannot be read, or an id outside the vocabulary.
    """
    parsed = parse(chunk, reading)
    dtype = id_dtype(tokenizer.vocab_size)
    pieces, lengths, hashes = [], [], []
    around = [
        np.array([special], dtype) if special is not None else np.zeros(0, dtype)
        for special in (tokenizer.start_of_document, tokenizer.end_of_document)
    ]
    for ids, digest in _documents(parsed, tokenizer):
        pieces += [around[0], ids.astype(dtype), around[1]]
        lengths.append(len(ids) + len(around[0]) + len(around[1]))
        hashes.append(digest)
    return Tokenized(
        np.concatenate(pieces) if pieces else np.zeros(0, dtype),
        np.array(lengths, np.int64),
        np.array(hashes, np.uint64),
        (parsed.empty, parsed.skipped, parsed.replaced),
    )


def _documents(parsed: Parsed, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    texts = [d.text for d in parsed.documents if d.text is not None]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        yield ids, _hash(text.encode(errors="surrogatepass"))
    for document in parsed.documents:
        if document.ids is not None:
            for ids in _checked(document, tokenizer):
                yield ids, _hash(ids.astype("<u4").tobytes())


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


def _checked(document: Document, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The documents of an array without their specials, which are added once for all."""
    ids = document.ids
    assert ids is not None
    outside = np.flatnonzero((ids < 0) | (ids >= tokenizer.vocab_size))
    if outside.size:
        raise DataError(
            f"data.sources: {document.name}: id {ids[outside[0]]} at place {outside[0]} is outside "
            f"the vocabulary of {tokenizer.vocab_size} ids: set data.tokenizer to the one that the "
            "array was made with"
        )
    start, end = tokenizer.start_of_document, tokenizer.end_of_document
    several = document.stream and end is not None
    cuts = np.flatnonzero(ids == end) + 1 if several else np.zeros(0, np.int64)
    for part in np.split(ids, cuts):
        part = part[1:] if start is not None and part[:1] == start else part
        part = part[:-1] if end is not None and part[-1:] == end else part
        if len(part):
            yield part


def _write(path: Path, number: int, parts: Sequence[Tokenized]) -> ShardInfo:
    columns = (np.concatenate([p[i] for p in parts]) for i in range(3))
    return write_shard(path, f"{number:05}", *columns)


def _finished(path: Path, key: str) -> Store:
    if read_manifest(path)["key"] != key:
        raise DataError(
            f"{path} is a finished store of other text, tokenizer or settings: name another "
            "directory, or remove it"
        )
    return open_store(path)


def _progress_of(path: Path, key: str) -> dict[str, Any]:
    """How far an earlier preparation of the same came."""
    nothing = {"key": key, "chunks": 0, "counts": [0] * len(_COUNTS), "shards": []}
    try:
        found = json.loads((path / _PROGRESS).read_text(encoding="utf-8"))
        same = found["key"] == key
    except FileNotFoundError:
        others = {p.name for p in path.iterdir()} - {_LOCK, TOKENIZER, f".{TOKENIZER}.tmp"}
        ours = {f"00000.{kind}" for kind in ("tokens", "index")}
        if others - ours - {f".{name}.tmp" for name in (*ours, MANIFEST, _PROGRESS)}:
            raise DataError(
                f"{path} is not empty and no store (it has {', '.join(sorted(others)[:3])}): name "
                "another directory"
            ) from None
        return nothing
    except (ValueError, KeyError, TypeError):
        return nothing
    if not same:
        raise DataError(
            f"{path} holds an unfinished store of other text, tokenizer or settings: finish that, "
            "name another directory, or remove it"
        )
    return dict(found)


def texts(inputs: Sequence[Input], reading: Reading) -> Iterator[str]:
    """The texts of all documents, for tokenizers that are made from them."""
    for chunk in read_chunks(inputs):
        for document in parse(chunk, reading).documents:
            if document.text is not None:
                yield document.text


def workers_for(tokenizer: Tokenizer, asked: int = 0) -> int:
    """Processes that tokenize: as many as asked for, or one for each core. Bytes and characters
    are tokenized faster than they are sent to another process."""
    if isinstance(tokenizer, BytesTokenizer | CharactersTokenizer):
        return 1
    if hasattr(os, "sched_getaffinity"):
        return asked or len(os.sched_getaffinity(0))
    return asked or os.cpu_count() or 1
