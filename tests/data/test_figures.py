"""What rows of documents like texts waste, and how level they are dealt: the figures that the
engine promises, read off the arrays that updates have.

Lengths are log-normal with a heavy tail (3% of the documents have twice the spread), of mean 600
before the longest are clipped to 16,384; rows have 4,096 tokens.
"""

import functools

import numpy as np
import pytest

from shardlm.config import Config, DataConfig, ModelConfig, TrainConfig
from shardlm.data import Buckets, Corpus, Loader
from shardlm.data.balance import WorkModel

LENGTH, WAYS, BATCH, MICRO_BATCH, LAYERS = 4096, 8, 128, 16, 4
MODEL = ModelConfig(layers=LAYERS, embed=256, heads=4, mlp=688, vocab=256)
# Of a token the matrices of the layers and the head, of a pair in a layer scores and values:
# 2 FLOPs each forward and 4 backward.
PER_TOKEN = 6 * (LAYERS * (4 * 256 * 256 + 3 * 256 * 688) + 256 * 256)
PER_PAIR = LAYERS * 12 * 256


@functools.cache
def corpus():
    random = np.random.default_rng(0)
    spread = np.where(random.random(20_000) < 0.03, 2.4, 1.2)
    lengths = np.exp(random.normal(size=20_000) * spread)
    lengths = np.clip(np.rint(lengths * (600 / lengths.mean())), 1, 16_384).astype(int)
    return Corpus.of([np.zeros(n, np.uint8) for n in lengths], 256)


def updates(packing, balance):
    """The parts of each update of the first epoch, with the rows of them that are in use."""
    config = Config(
        data=DataConfig(length=LENGTH, packing=packing, balance=balance),
        train=TrainConfig(batch=BATCH, micro_batch=MICRO_BATCH),
    )
    loader = Loader([corpus()], config, WorkModel.of(MODEL))
    loader.deal_to(WAYS)
    for step in range(int(loader.updates_per_epoch)):
        batch = loader.at(step).batch
        if not isinstance(batch, Buckets):
            yield [(batch, np.ones(BATCH, bool))]
            continue
        parts = []
        for count, part in zip(batch.counts, batch.parts, strict=True):
            # Of the rows of each device, the micro-batches that are run are the first.
            rows, length = part["tokens"].shape
            run = count * (MICRO_BATCH * LENGTH // length) // WAYS
            parts.append((part, np.tile(np.arange(rows // WAYS) < run, WAYS)))
        yield parts


def measure(packing, balance):
    """Share of places that are padding, and of each update the heaviest device over the mean."""
    places, real, uneven = 0, 0, []
    for parts in updates(packing, balance):
        work = np.zeros(WAYS)
        for part, used in parts:
            segments = np.where(used[:, None], part["segments"], 0)
            rows, length = segments.shape
            # A number of its own for every segment of every row, and its tokens.
            name = segments + np.arange(rows)[:, None] * (length + 1)
            name, size = np.unique(name[segments > 0], return_counts=True)
            pairs = np.bincount(name // (length + 1), size * (size + 1) / 2, rows)
            row_work = PER_TOKEN * length * used + PER_PAIR * pairs
            work += row_work.reshape(WAYS, -1).sum(1)
            places += used.sum() * length
            real += size.sum()
            # The first token of a piece aside, and what overlap would repeat, all is predicted.
            targets = (part["targets"] >= 0) & used[:, None]
            assert not targets[segments == 0].any()
            assert size.sum() - len(size) <= targets.sum() <= size.sum()
        uneven.append(work.max() / work.mean())
    return 1 - real / places, np.array(uneven)


@pytest.mark.parametrize(
    "packing, waste", [("concat", 0.001), ("best_fit", 0.02), ("padded_buckets", 0.05)]
)
def test_padding_and_balance(packing, waste):
    padding, level = measure(packing, "work")
    same, chance = measure(packing, "none")
    print(
        f"\n{packing}: padding {padding:.3%}; heaviest over mean of {len(level)} "
        f"updates, dealt: mean {level.mean():.4f}, worst {level.max():.4f}; as they come: "
        f"mean {chance.mean():.4f}, worst {chance.max():.4f}"
    )
    assert padding == same < waste
    assert len(level) > 10
    assert level.max() < 1.05 < chance.max(), (level.max(), chance.max())
    assert level.mean() - 1 < (chance.mean() - 1) / 4, (level.mean(), chance.mean())


def test_a_row_for_each_document_wastes_most():
    """What packing is for."""
    padding, _ = measure("none", "none")
    assert padding > 0.8
