"""What must not cost more for being large: a store of 10 GB, and a step after 10^9 others."""

import json
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest

from shardlm.config import Config, DataConfig, TrainConfig
from shardlm.data import Buckets, Corpus, Loader, Share
from shardlm.data.balance import WorkModel
from shardlm.data.store import BLOCK, MANIFEST, TOKENIZER, ShardInfo, manifest_of
from shardlm.data.tokenizer import BytesTokenizer

IDS, SHARDS, DOCUMENT = 1 << 28, 20, 8192
"""Ids of a shard, of two bytes each; shards; ids of a document."""

OPEN = """
import gc, sys, time
from shardlm.data import open_store

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

gc.collect()
before, began = resident(), time.perf_counter()
store = open_store(sys.argv[1])
seconds, grown = time.perf_counter() - began, resident() - before
print(seconds, grown, sum(s.ids.nbytes for s in store.shards), len(store.lengths))
last = store.shards[-1]
last.check(len(last.ids) - 1, len(last.ids) - 1)
print(int(last.ids[-1]), resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")
def test_a_store_of_10_gigabytes_is_opened_at_once(tmp_path):
    """Zeros that take no room on the disk, with valid checksums, in 655,360 documents: a second
    and 50 MB at most, with a block read."""
    documents = IDS // DOCUMENT
    index = b"".join(
        (
            np.full(documents, DOCUMENT, "<u4").tobytes(),
            np.random.default_rng(0).bytes(8 * documents),
            np.full(2 * IDS // BLOCK, zlib.crc32(bytes(BLOCK)), "<u4").tobytes(),
        )
    )
    digest, infos = blake2b(index, digest_size=16).hexdigest(), []
    for i in range(SHARDS):
        with open(tmp_path / f"{i:05}.tokens", "wb") as file:
            file.truncate(2 * IDS)
        (tmp_path / f"{i:05}.index").write_bytes(index)
        infos.append(ShardInfo(f"{i:05}", IDS, documents, digest))
    tokenizer = BytesTokenizer()
    counts = {"empty": 0, "skipped": 0, "replaced": 0}
    (tmp_path / TOKENIZER).write_text(tokenizer.to_json())
    (tmp_path / MANIFEST).write_text(json.dumps(manifest_of(infos, tokenizer, counts, "key")))

    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(tmp_path)], capture_output=True, text=True, check=True
    )
    opened, read = done.stdout.splitlines()
    seconds, grown, size, found = opened.split()
    assert (int(size), int(found)) == (2 * IDS * SHARDS, SHARDS * documents)
    assert int(size) > 10 * 10**9
    assert float(seconds) < 1
    assert int(grown) < 50e6
    last, grown = read.split()
    assert int(last) == 0
    assert int(grown) < 50e6


@pytest.fixture(scope="module")
def corpora():
    """Three sources of 20,000 documents in all."""
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1.2, 20_000), 1, 16_384).astype(int)
    whole = Corpus.of([np.arange(n) % 256 for n in lengths], 256)
    return [
        replace(whole.select(slice(a, b)), base=int(whole.starts[a]))
        for a, b in ((0, 10_000), (10_000, 15_000), (15_000, 20_000))
    ]


@pytest.mark.parametrize("step", [10**6, 10**9])
@pytest.mark.parametrize("weights", [(), (0.7, 0.2, 0.1)], ids=["one text", "mixture"])
@pytest.mark.parametrize("packing", ["concat", "best_fit", "padded_buckets"])
def test_seeking_takes_less_than_a_second(packing, weights, step, corpora):
    """A loader as a restart makes it, and its first update, which is that of any other process."""
    import grain  # noqa: F401 - whose import is not what is measured.

    config = Config(
        data=DataConfig(length=4096, packing=packing, weights=weights),
        train=TrainConfig(batch=64, micro_batch=8),
    )

    def first(share):
        loader = Loader(corpora, config, WorkModel(100.0, 1.0, ((0, 1),)))
        loader.deal_to(8)
        updates = loader.iterate(step, share)
        update = next(updates)
        updates.close()
        return update.batch

    began = time.perf_counter()
    whole = first(Share())
    assert time.perf_counter() - began < 1
    half = first(Share(1, 2))
    if isinstance(whole, Buckets):
        assert np.array_equal(whole.counts, half.counts)
        pairs = list(zip(whole.parts, half.parts, strict=True))
    else:
        pairs = [(whole, half)]
    for ours, theirs in pairs:
        assert all(np.array_equal(ours[key][len(x) :], x) for key, x in theirs.items())
