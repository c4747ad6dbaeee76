"""Reading runs of ids from several shards."""

import zlib
from pathlib import Path

import numpy as np
import pytest

from shardlm.data import DataError
from shardlm.data.corpus import Tokens
from shardlm.data.store import BLOCK, Shard

SIZES = (100_000, 0, 1, 70_000, 40_000)


@pytest.fixture(params=["<u2", "<u4"])
def arrays(request):
    random = np.random.default_rng(0)
    return [random.integers(0, 60_000, n).astype(request.param) for n in SIZES]


def tokens_of(arrays):
    """Shards whose checksums are of `arrays` as they are now."""
    shards = []
    for number, ids in enumerate(arrays):
        blocks = [
            zlib.crc32(ids.data.cast("B")[i : i + BLOCK]) for i in range(0, ids.nbytes, BLOCK)
        ]
        shards.append(Shard(Path(f"{number}.tokens"), ids, np.array(blocks, np.uint32)))
    return Tokens(shards)


def test_runs_of_any_shards_in_any_order(arrays):
    tokens, whole = tokens_of(arrays), np.concatenate(arrays).astype(np.int32)
    bases = np.cumsum([0, *SIZES])
    random = np.random.default_rng(1)
    for _ in range(20):
        shard = random.choice([0, 2, 3, 4], 30)
        starts = bases[shard] + random.integers(0, np.array(SIZES)[shard])
        sizes = np.minimum(random.integers(1, 50_000, 30), bases[shard + 1] - starts)
        found = tokens.gather(starts, sizes)
        runs = [whole[a : a + n] for a, n in zip(starts, sizes, strict=True)]
        assert found.dtype == np.int32
        assert np.array_equal(found, np.concatenate(runs))
    none = np.zeros(0, np.int64)
    assert tokens.gather(none, none).tolist() == []


@pytest.mark.parametrize("before", [False, True], ids=["first", "after others"])
def test_altered_ids_are_refused_wherever_they_are(arrays, before):
    tokens = tokens_of(arrays)
    base, per_block = sum(SIZES[:3]), BLOCK // arrays[0].itemsize
    if before:  # All but the last block of each shard.
        blocks = [np.arange(0, n - per_block, per_block) for n in SIZES]
        starts = np.concatenate(
            [b + s for b, s in zip(np.cumsum([0, *SIZES]), blocks, strict=False)]
        )
        tokens.gather(starts, np.ones_like(starts))
    arrays[3][-1] += 1
    one = np.ones(1, np.int64)
    # A run that ends before the last block, and those that begin in it or reach into it.
    tokens.gather(one * base, one * (SIZES[3] // per_block) * per_block)
    for start in (0, SIZES[3] - 1):
        with pytest.raises(DataError, match=r"3\.tokens was altered"):
            tokens.gather(one * (base + start), one * (SIZES[3] - start))


def test_altered_ids_between_good_ones_are_refused(arrays):
    tokens, per_block = tokens_of(arrays), BLOCK // arrays[0].itemsize
    arrays[0][per_block + 5] += 1
    ends = np.array([0, 2 * per_block])
    tokens.gather(ends, np.ones_like(ends))
    with pytest.raises(DataError, match=rf"its bytes from {BLOCK} on"):
        tokens.gather(ends[:1], ends[1:] + 1)
