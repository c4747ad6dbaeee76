"""From inputs to a store: tokenized in parallel, shard by shard, so that an interruption loses one.

The order of the documents and the cut into shards depend on the inputs only, never on the number of
workers: the same text and tokenizer give the same files, byte for byte.
"""

import contextlib
import dataclasses
import functools
import json
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path

import numpy as np

from shardlm.data.directory import PROGRESS, other_store, owned, progress_of
from shardlm.data.errors import DataError
from shardlm.data.inputs import Input
from shardlm.data.readers import Chunk, Reading, parse, read_chunks
from shardlm.data.stopping import (
    Display,
    Interrupted,
    Progress,
    quiet,
    result_of,
    unless_stopped,
    unseen,
)
from shardlm.data.store import (
    COUNTS,
    FORMAT,
    MANIFEST,
    TOKENIZER,
    ShardInfo,
    Store,
    is_store,
    manifest_of,
    odd_documents,
    open_store,
    read_manifest,
    write_shard,
)
from shardlm.data.subwords import SubwordTokenizer, library_in_one_thread
from shardlm.data.threads import Threads
from shardlm.data.tokenizer import (
    BytesTokenizer,
    CharactersTokenizer,
    Tokenizer,
)
from shardlm.data.tokenizing import Tokenized, tokenize
from shardlm.data.workers import Workers
from shardlm.files import replace_text

SHARD_TOKENS = 1 << 25
"""A shard is closed by the chunk with which it has this many ids."""
THREADS = 4
"""Threads that tokenize, at most, and the cores up to which they are used rather than processes.
What Python does to a text before and after the library, some tenth of the work, it does in one
thread at a time."""


@dataclass
class Preparation:
    """What is made into a store, and how."""

    inputs: Sequence[Input]
    reading: Reading
    tokenizer: Tokenizer
    workers: int = 1
    shard_tokens: int = SHARD_TOKENS
    display: Display = quiet
    what: str = "tokenizing"
    """What the display shows while it is done."""
    stopped: Callable[[], bool] = lambda: False
    """Asked now and then: whether to stop."""
    made_from: str | None = None
    """Of a tokenizer that was made from text: the digest of that; see `tokenizer_left`."""

    @functools.cached_property
    def key(self) -> str:
        """Digest of all that decides what the store will hold."""
        settings = self.tokenizer.fingerprint(), str(self.shard_tokens)
        return digest(self.inputs, self.reading, settings, self.stopped, self.display)

    def into(self, path: Path) -> Store:
        """Make the store, or finish it; one that is there is opened.

        Args:
          path: its directory; made if need be.

        Raises:
          DataError: the directory holds something else or cannot be made, another process is at
            work in it, or the text cannot be used. Finished shards stay.
          Interrupted: `stopped`; finished shards stay.
          WorkerLost: a process that tokenizes has ended. Finished shards stay.
          OSError: the disk is full or cannot be written to. Finished shards stay.
        """
        if is_store(path):
            return self.within(path)
        with owned(path):
            return self.within(path)

    def cached(self, cache: Path) -> Store:
        """`into` a directory below `data.cache`, which the key names. Another process that prepares
        the same is waited for."""
        path = cache / self.key
        if is_store(path):
            return self.within(path)
        with owned(path, cache, self.stopped, self.display):
            return self.within(path)

    def within(self, path: Path) -> Store:
        """`into` a directory that this process owns already."""
        if is_store(path):
            if read_manifest(path)["key"] != self.key:
                raise other_store(path)
            with contextlib.suppress(OSError):
                # Killed between the last two steps of `_make`.
                (path / PROGRESS).unlink(missing_ok=True)
        else:
            try:
                self._make(path)
            except DataError:
                self._clear(path)
                raise
        return open_store(path)

    def _clear(self, path: Path) -> None:
        """Leave nothing of a text that is refused before one of its shards is finished, but for a
        tokenizer that was trained: where a network failed, it is needed again."""
        with contextlib.suppress(DataError, OSError):
            done = progress_of(path, "key", self.key)
            if done.get("shards") == [] and self.made_from is None:
                (path / TOKENIZER).unlink(missing_ok=True)
                # Last: a directory that has it is ours.
                (path / PROGRESS).unlink(missing_ok=True)

    def _make(self, path: Path) -> None:
        done = progress_of(path, "key", self.key)
        shards = [ShardInfo(**s) for s in done.get("shards", ())]
        counts = np.array(done.get("counts", [0] * len(COUNTS)))
        chunks_done = int(done.get("chunks", 0))

        def save() -> None:
            state = {
                "key": self.key,
                "tokenizer": self.tokenizer.fingerprint(),
                "made_from": self.made_from,
                "chunks": chunks_done,
                "counts": counts.tolist(),
                "shards": [dataclasses.asdict(s) for s in shards],
            }
            replace_text(path / PROGRESS, json.dumps(state))

        save()  # First: a directory that has it is ours.
        replace_text(path / TOKENIZER, self.tokenizer.to_json())
        chunks = read_chunks(self.inputs, self.reading, self.tokenizer.end_of_document)
        parts: list[Tokenized] = []
        with self.display(self.what, sum(found.size for found in self.inputs)) as progress:
            for chunk in islice(chunks, chunks_done):
                if self.stopped():
                    raise Interrupted
                progress(chunk.stored_bytes, 0)
            with contextlib.closing(self._tokenized(chunks, progress)) as results:
                for stored_bytes, part in results:
                    parts.append(part)
                    chunks_done += 1
                    progress(stored_bytes, len(part.ids))
                    if sum(len(p.ids) for p in parts) >= self.shard_tokens:
                        shards.append(_write(path, len(shards), parts))
                        counts += np.sum([p.counts for p in parts], axis=0)
                        parts = []
                        save()
        if parts:
            counts += np.sum([p.counts for p in parts], axis=0)
            if any(len(p.ids) for p in parts):
                shards.append(_write(path, len(shards), parts))
        named = dict(zip(COUNTS, counts.tolist(), strict=True))
        if not shards:
            raise _without_text(self.inputs, named)
        manifest = manifest_of(shards, self.tokenizer, named, self.key)
        if self.made_from is not None:
            manifest["made_from"] = self.made_from
        replace_text(path / MANIFEST, json.dumps(manifest, indent=1))
        (path / PROGRESS).unlink(missing_ok=True)

    def _tokenized(
        self, chunks: Iterator[Chunk], progress: Progress
    ) -> Generator[tuple[int, Tokenized], None, None]:
        """Chunks as ids, in their order, with the bytes that each has as stored."""
        waiting: deque[tuple[int, Future[Tokenized]]] = deque()
        unreadable: Exception | None = None
        with self._at_work() as (number, submit):
            while True:
                try:
                    for chunk in islice(chunks, 2 * number + 1 - len(waiting)):
                        waiting.append((chunk.stored_bytes, submit(chunk)))
                except (
                    Exception
                ) as error:  # Told in its turn: what comes before it may be wrong too.
                    unreadable = error
                if not waiting:
                    if unreadable is not None:
                        raise unreadable
                    return
                stored_bytes, result = waiting.popleft()
                yield stored_bytes, result_of(result, self.stopped, progress)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[tuple[int, Callable[[Chunk], Future[Tokenized]]]]:
        """How many chunks are tokenized at a time, and what begins with one."""
        if self.workers > 1:
            workers = Workers(self.workers, self.reading, self.tokenizer)
            with contextlib.closing(workers):
                yield self.workers, workers.submit
            return
        number, tokenizer = threads_for(self.tokenizer), self.tokenizer
        if isinstance(tokenizer, SubwordTokenizer):
            tokenizer = dataclasses.replace(tokenizer, threads=number)
        with Threads(number) as threads, library_in_one_thread():
            yield number, lambda chunk: threads.submit(tokenize, chunk, self.reading, tokenizer)


def _without_text(inputs: Sequence[Input], counts: Mapping[str, int]) -> DataError:
    others = len(inputs) - 1
    files = inputs[0].path + (f" and {others:,} more" if others else "")
    odd = ", ".join(odd_documents(counts)) or "there is none"
    return DataError(
        f"data.sources: every document of {files} is empty or left out ({odd}): put text in one, "
        "or leave them out of the sources"
    )


def _write(path: Path, number: int, parts: Sequence[Tokenized]) -> ShardInfo:
    columns = (np.concatenate([p[i] for p in parts]) for i in range(3))
    return write_shard(path, f"{number:05}", *columns)


def digest(
    inputs: Sequence[Input],
    reading: Reading,
    settings: Sequence[str],
    stopped: Callable[[], bool] = lambda: False,
    display: Display = quiet,
) -> str:
    """Hexadecimal digest of what the inputs hold, how they are read, and `settings`.

    Raises:
      DataError: one cannot be read.
      Interrupted: `stopped`.
    """
    with display("hashing the text", sum(found.size for found in inputs)) as progress:

        def hashed() -> list[str]:
            hashes = []
            for found in inputs:
                hashes.append(found.content)
                progress(found.size, 0)
            return hashes

        contents = unless_stopped(hashed, stopped, progress)
    parts = [
        FORMAT,
        repr((reading.field, reading.errors, *settings)),
        *(
            f"{found.name}\0{found.kind}\0{found.compression}\0{content}"
            for found, content in zip(inputs, contents, strict=True)
        ),
    ]
    return blake2b("\n".join(parts).encode(errors="surrogateescape"), digest_size=16).hexdigest()


def texts(
    inputs: Sequence[Input],
    reading: Reading,
    progress: Progress = unseen,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[str]:
    """The texts of all documents, for tokenizers that are made from them.

    Raises:
      DataError: one cannot be read.
      Interrupted: `stopped`.
    """
    for chunk in read_chunks([found for found in inputs if found.kind != "array"], reading):
        for document in parse(chunk, reading).documents:
            if stopped():
                raise Interrupted
            assert document.text is not None
            yield document.text
        progress(chunk.stored_bytes, 0)


def workers_for(tokenizer: Tokenizer, asked: int = 0) -> int:
    """Processes that tokenize: as many as asked for, or one for each core. Bytes and characters
    are tokenized faster than they are sent to another process, and up to `THREADS` cores threads
    are faster than processes where the library tokenizers does the work."""
    if isinstance(tokenizer, BytesTokenizer | CharactersTokenizer):
        return 1
    cores = _cores()
    return asked or (1 if threads_for(tokenizer) == cores else cores)


def threads_for(tokenizer: Tokenizer) -> int:
    """Threads of a process that tokenize. The library tokenizers lets others run meanwhile."""
    return min(_cores(), THREADS) if isinstance(tokenizer, SubwordTokenizer) else 1


def _cores() -> int:
    # A process may be given fewer cores than there are.
    there = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if there else os.cpu_count() or 1
