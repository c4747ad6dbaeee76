"""What it takes to open a large store, and to begin in the middle of a long run."""

import json
import os
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from shardlm.bench.loading import loader_of
from shardlm.bench.report import Say, Table
from shardlm.bench.synthetic import document_lengths
from shardlm.data import Corpus, open_store
from shardlm.data.loader import Shape
from shardlm.data.store import BLOCK, MANIFEST, TOKENIZER, ShardInfo, id_dtype, manifest_of
from shardlm.data.tokenizer import BytesTokenizer
from shardlm.files import replace_text

SHARD_DOCUMENTS = 60_000
"""Some 70 MB of ids, as a preparation makes shards."""
STEP = 1_000_000


def sparse_store(path: Path, size: int, shard_documents: int = SHARD_DOCUMENTS) -> Path:
    """A store of at least `size` bytes of ids, all 0, which take no room on the disk."""
    tokenizer = BytesTokenizer()
    width = id_dtype(tokenizer.vocab_size).itemsize
    lengths = document_lengths(shard_documents)
    tokens = int(lengths.sum())
    full, rest = divmod(tokens * width, BLOCK)
    crcs = [zlib.crc32(bytes(BLOCK))] * full + [zlib.crc32(bytes(rest))] * (rest > 0)
    hashes = np.random.default_rng(0).integers(0, 2**64, len(lengths), np.uint64)
    index = lengths.astype("<u4").tobytes() + hashes.astype("<u8").tobytes()
    index += np.array(crcs, "<u4").tobytes()
    digest = blake2b(index, digest_size=16).hexdigest()
    path.mkdir()
    shards = []
    for number in range(-(-size // (tokens * width))):
        shards.append(ShardInfo(f"{number:05}", tokens, len(lengths), digest))
        (path / f"{number:05}.index").write_bytes(index)
        with open(path / f"{number:05}.tokens", "wb") as file:
            file.truncate(tokens * width)
    (path / TOKENIZER).write_text(tokenizer.to_json())
    counts = {"empty": 0, "skipped": 0, "replaced": 0}
    manifest = manifest_of(shards, tokenizer, counts, key="")
    replace_text(path / MANIFEST, json.dumps(manifest))
    return path


def opening(directory: Path, size: int, say: Say, step: int = STEP) -> dict[str, Any]:
    """Seconds and growth of resident memory, in a process of its own: to open a store of `size`
    bytes, to lay its rows (concat), and to make an update far on."""
    path = sparse_store(directory / "sparse", size)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        figures = pool.submit(measure, path, step).result()
    say(f"{figures['bytes'] / 1e9:.1f} GB of ids in {figures['documents']:,} documents")
    table = Table(("", "seconds", "memory grows by"))
    for name, what in (("open", "open"), ("rows", "lay rows"), ("seek", f"update {step:,}")):
        memory = figures[f"{name}_resident_bytes"] / 2**20
        table.add(what, f"{figures[f'{name}_seconds']:.3f}", f"{memory:,.0f} MiB")
    say(str(table))
    return figures


def measure(path: Path, step: int) -> dict[str, Any]:
    """What `opening` does in another process."""
    figures: dict[str, Any] = {}
    seconds, resident = time.perf_counter(), _resident()

    def took(name: str) -> None:
        nonlocal seconds, resident
        figures[f"{name}_seconds"] = time.perf_counter() - seconds
        figures[f"{name}_resident_bytes"] = _resident() - resident
        seconds, resident = time.perf_counter(), _resident()

    store = open_store(path)
    took("open")
    (corpus,) = Corpus.of_stores([store], ["sparse"])
    loader = loader_of(corpus, Shape(4096, 16))
    took("rows")
    loader.at(step)
    took("seek")
    size = sum(shard.ids.nbytes for shard in store.shards)
    return figures | {"bytes": size, "documents": corpus.documents}


def _resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
