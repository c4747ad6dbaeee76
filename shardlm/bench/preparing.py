"""Speed of preparing a store against the library tokenizers alone, in one run and in
alternation."""

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from shardlm.bench.report import Say, Table
from shardlm.bench.synthetic import cut, document_lengths, write_rows
from shardlm.data import Preparation
from shardlm.data.inputs import list_inputs
from shardlm.data.prepare import texts, workers_for
from shardlm.data.readers import Reading
from shardlm.data.subwords import SubwordTokenizer, train_bpe

CHARACTERS = 12_000_000
"""Of text, from Python's standard library."""
VOCAB = 8192
BATCHES = (64, 1024)
"""Texts that the library is given at a time; the best counts."""
WHO = ("engine", "library")
PARALLELISM = "TOKENIZERS_PARALLELISM"


def preparing(
    directory: Path, rounds: int, say: Say, characters: int = CHARACTERS, vocab: int = VOCAB
) -> dict[str, Any]:
    """`Preparation.into`, from files to a store on disk, against the library's `encode_batch_fast`
    of the same texts in memory: on one core, and on all, with its threads. The ratio is the median
    over rounds of its seconds over ours: 1 is as fast."""
    text = "".join(texts(list_inputs("stdlib"), Reading()))[:characters]
    tokenizer = train_bpe([text], vocab)
    sources = write_sources(directory, text)
    table = Table(("text", "cores", "engine MB/s", "library MB/s", "ratio"))
    figures: dict[str, Any] = {}
    for cores in sorted({1, len(os.sched_getaffinity(0))}):
        for name, source in sources.items():
            f = compare(source, tokenizer, cores, directory / "store", rounds)
            figures[f"{name} {cores}"] = f
            cells = [f"{f['bytes'] / f[f'{who}_seconds'] / 1e6:.2f}" for who in WHO]
            table.add(f"{f['texts']:,} {name}", str(cores), *cells, f"{f['ratio']:.3f}")
    say(str(table))
    return figures


def write_sources(directory: Path, text: str) -> dict[str, Path]:
    """The same text in rows of one file, and in files."""
    pieces = cut(text, document_lengths(len(text) // 100) * 3)  # Some three letters a token.
    files = directory / "files"
    files.mkdir(parents=True)
    for number, piece in enumerate(pieces):
        (files / f"{number:06}.txt").write_text(piece, encoding="utf-8")
    return {"rows": write_rows(directory / "rows.jsonl", pieces), "files": files}


def compare(
    source: Path, tokenizer: SubwordTokenizer, cores: int, store: Path, rounds: int
) -> dict[str, Any]:
    """Seconds of both sides over the same texts on one core, or on all of several, and their ratio.

    Raises:
      RuntimeError: they do not make equally many ids.
    """
    import tokenizers

    inputs = list_inputs(str(source))
    everything = list(texts(inputs, Reading()))
    library = tokenizers.Tokenizer.from_str(tokenizer.content)

    def engine() -> int:
        shutil.rmtree(store, ignore_errors=True)
        made = (
            Preparation(inputs, Reading(), tokenizer, workers_for(tokenizer)).into(store).manifest
        )
        # Each document has an end, which the library does not add.
        return int(made["tokens"]) - int(made["documents"])

    def alone(batch: int) -> int:
        parts = (everything[i : i + batch] for i in range(0, len(everything), batch))
        encode = library.encode_batch_fast
        return sum(len(found) for part in parts for found in encode(part, add_special_tokens=False))

    with cores_of(cores):
        # Once for each, so that both have seen every word; and to choose the best batch.
        first = {batch: timed(partial(alone, batch)) for batch in BATCHES}
        best = min(BATCHES, key=lambda batch: first[batch][0])
        ids = {timed(engine)[1], *(n for _, n in first.values())}
        if len(ids) != 1:
            raise RuntimeError(f"engine and library make {ids} ids of the same text")
        works = engine, partial(alone, best)
        seconds = [[timed(work)[0] for work in works] for _ in range(rounds)]
    return {
        "ratio": statistics.median(theirs / ours for ours, theirs in seconds),
        "engine_seconds": statistics.median(s[0] for s in seconds),
        "library_seconds": statistics.median(s[1] for s in seconds),
        "library_batch": best,
        "texts": len(everything),
        "bytes": sum(len(text.encode()) for text in everything),
        "ids": ids.pop(),
    }


def timed(work: Callable[[], int]) -> tuple[float, int]:
    """Seconds, and what the work returns."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


@contextmanager
def cores_of(number: int) -> Iterator[None]:
    """Run this thread, and those it starts, on so many cores, the library too."""
    before, cores = os.environ.get(PARALLELISM), os.sched_getaffinity(0)
    os.environ[PARALLELISM] = "true" if number > 1 else "false"
    os.sched_setaffinity(0, sorted(cores)[:number])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        if before is None:
            del os.environ[PARALLELISM]
        else:
            os.environ[PARALLELISM] = before
