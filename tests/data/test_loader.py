"""The order of the rows: a function of seed and step, each row once an epoch."""

import subprocess
import sys
import threading
import time
from itertools import islice, pairwise

import numpy as np
import pytest

from shardlm.data import Corpus, DataError, Loader, ValidationLoader


def corpus_of(lengths, seed=0, vocab=300):
    random = np.random.default_rng(seed)
    return Corpus.of([random.integers(0, vocab, n) for n in lengths], vocab)


def small(seed=0, batch=4, length=7, **kwargs):
    return Loader(corpus_of([31, 1, 100, 14, 2]), seed=seed, batch=batch, length=length, **kwargs)


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


def test_rows_of_two_and_a_half_epochs_however_often_resumed():
    whole = small(prefetch=4)
    per_epoch = whole.rows_per_epoch
    assert per_epoch == 22  # 148 tokens in rows of 7
    steps = int(2.5 * per_epoch / whole.batch)
    ids = [whole.rows_of_step(step).tolist() for step in range(steps)]
    uninterrupted = list(islice(whole.iterate(), steps))
    stops = [0, 2, 7, 9, steps]  # 7 and 9 are in the second epoch
    resumed_ids, resumed = [], []
    for start, stop in pairwise(stops):
        again = small(prefetch=4)
        resumed_ids += [again.rows_of_step(step).tolist() for step in range(start, stop)]
        resumed += islice(again.iterate(start), stop - start)
    assert resumed_ids == ids
    assert all(equal(a, b) for a, b in zip(uninterrupted, resumed, strict=True))
    assert all(equal(a, whole.batch_at(step)) for step, a in enumerate(uninterrupted))
    assert not any(equal(a, small(seed=1).batch_at(step)) for step, a in enumerate(uninterrupted))
    flat = [row for rows in ids for row in rows]
    for epoch in range(2):
        rows = flat[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(rows) == list(range(epoch * per_epoch, (epoch + 1) * per_epoch))
    assert len(set(flat)) == len(flat)


def test_grain_is_imported_before_the_first_batch_is_drawn():
    """Its import replaces `__import__` for a while, for all threads: if it came with the first
    batch, in a thread, then jax, which imports while it traces, failed now and then."""
    code = """
import sys
from shardlm.data import Corpus, Loader
loader = Loader(Corpus.of([range(100)], 100), seed=0, batch=2, length=8)
assert "grain" not in sys.modules
batches = loader.iterate()
assert "grain" in sys.modules
before = set(sys.modules)
next(batches)
assert not [name for name in set(sys.modules) - before if name.startswith("grain")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_steps_can_be_asked_in_any_order():
    steps = [5, 0, 17, 3]
    loader = small()
    assert all(equal(loader.batch_at(s), small().batch_at(s)) for s in steps)


def test_orders_and_cuts_differ_between_epochs_and_seeds():
    # A batch is an epoch: 63 rows.
    loaders = [Loader(corpus_of([500]), seed=s, batch=63, length=8) for s in range(3)]
    epochs = [(loader, epoch) for loader in loaders for epoch in range(4)]
    orders = {tuple(loader.rows_of_step(e) - 63 * e) for loader, e in epochs}
    assert len(orders) == len(epochs)
    cuts = {frozenset(r.tobytes() for r in loader.batch_at(e)["tokens"]) for loader, e in epochs}
    assert len(cuts) >= len(epochs) - 2  # 12 draws of 500


def test_a_slice_of_a_batch_is_those_rows_of_it():
    loader = small(batch=6)
    for step in (0, 3, 11):  # 3 crosses the end of an epoch: 22 rows in batches of 6
        whole = loader.batch_at(step)
        for processes in (1, 2, 3):
            share = 6 // processes
            parts = [
                loader.batch_at(step, slice(p * share, (p + 1) * share)) for p in range(processes)
            ]
            joined = {key: np.concatenate([part[key] for part in parts]) for key in whole}
            assert equal(joined, whole)
    part = next(loader.iterate(3, slice(2, 5)))
    assert equal(part, loader.batch_at(3, slice(2, 5)))


def test_a_far_step_costs_no_more_than_a_near_one():
    started = time.monotonic()
    batch = small().batch_at(10**12)
    assert batch["tokens"].shape == (4, 7)
    assert next(small().iterate(10**12))["tokens"].tolist() == batch["tokens"].tolist()
    assert time.monotonic() - started < 5


def test_closing_the_iterator_ends_its_thread():
    before = set(threading.enumerate())
    batches = small().iterate()
    next(batches)
    (worker,) = set(threading.enumerate()) - before
    batches.close()
    worker.join(10)
    assert not worker.is_alive()
    with pytest.raises(StopIteration):
        next(batches)


def test_a_large_seed_is_as_good_as_a_small_one():
    assert not equal(small(seed=2**63).batch_at(0), small(seed=0).batch_at(0))


@pytest.mark.parametrize("lengths, rows", [([24], 3), ([17], 3), ([8], 1), ([3], 1)])
def test_fewer_rows_than_a_batch_are_refused(lengths, rows):
    with pytest.raises(DataError) as error:
        Loader(corpus_of(lengths), seed=0, batch=4, length=8)
    message = str(error.value)
    assert "train.batch is 4" in message
    assert f"only {rows} rows" in message
    assert f"({lengths[0]} tokens)" in message
    Loader(corpus_of(lengths), seed=0, batch=rows, length=8)
    if "data.length to" in message:
        longest = int(message.split("data.length to ")[1].split()[0])
        Loader(corpus_of(lengths), seed=0, batch=4, length=longest)
        with pytest.raises(DataError):
            Loader(corpus_of(lengths), seed=0, batch=4, length=longest + 1)


@pytest.mark.parametrize("lengths", [[], [0], [1], [1, 1, 1]])
def test_a_text_without_a_token_to_predict_is_refused(lengths):
    for make in (
        lambda: Loader(corpus_of(lengths), seed=0, batch=1, length=2),
        lambda: ValidationLoader(corpus_of(lengths), length=2),
    ):
        with pytest.raises(DataError, match=f"{sum(lengths)} tokens in"):
            make()


def test_a_document_shorter_than_a_row_comes_once_an_epoch():
    loader = Loader(corpus_of([3]), seed=0, batch=1, length=8)
    for step in range(5):
        batch = loader.batch_at(step)
        assert (batch["segments"] > 0).sum() == 3
        assert (batch["targets"] >= 0).sum() == 2
