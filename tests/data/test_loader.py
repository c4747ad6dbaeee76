"""The order of the rows: a function of seed and step, each row once an epoch."""

import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise

import numpy as np
import pytest

from shardlm.config import Config, DataConfig, RunConfig, TrainConfig
from shardlm.data import Buckets, Corpus, DataError, Loader, Share, ValidationLoader
from shardlm.data.balance import Speeds, WorkModel, imbalance
from shardlm.words import many

WORK = WorkModel(100.0, 1.0, ((0, 1),))
PACKINGS = ("concat", "best_fit", "none", "padded_buckets")


def corpus_of(lengths, seed=0, vocab=300):
    random = np.random.default_rng(seed)
    return Corpus.of([random.integers(0, vocab, n) for n in lengths], vocab)


def loader_of(corpora, seed=0, batch=4, length=8, prefetch=2, micro_batch=None, ways=1, **data):
    config = Config(
        run=RunConfig(seed=seed),
        data=DataConfig(length=length, prefetch=prefetch, buckets=3, **data),
        train=TrainConfig(batch=batch, micro_batch=micro_batch),
    )
    loader = Loader(corpora, config, WORK)
    loader.deal_to(ways)
    return loader


def small(seed=0, batch=8, lengths=(31, 1, 100, 14, 2, 6, 8, 3, 2, 1, 10, 4), **kwargs):
    return loader_of([corpus_of(lengths)], seed, batch, micro_batch=batch // 2, **kwargs)


def two_sources(**kwargs):
    """A mixture of 3:1 in which the smaller source comes round more often."""
    return loader_of(apart([corpus_of([31, 70, 14, 6], 1), corpus_of([9, 5], 2)]), **kwargs)


def apart(corpora):
    """The same documents in one array of ids, as stores give them."""
    whole = Corpus.of([c.document(i) for c in corpora for i in range(c.documents)], 300)
    found, document, base = [], 0, 0
    for corpus in corpora:
        part = whole.select(slice(document, document + corpus.documents))
        found.append(replace(part, base=base))
        document, base = document + corpus.documents, base + corpus.size
    return found


def flat(batch):
    """Arrays by name, also of rows of several lengths."""
    if isinstance(batch, Buckets):
        parts = {f"{k}{i}": v for i, part in enumerate(batch.parts) for k, v in part.items()}
        return {"counts": batch.counts, **parts}
    return batch


def equal(a, b):
    a, b = flat(a), flat(b)
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


def names(loader, step):
    return [tuple(row) for rows in loader.rows_of(step) for row in rows.tolist()]


def mixture(**kwargs):
    return two_sources(weights=(3.0, 1.0), packing="best_fit", **kwargs)


LOADERS = {packing: partial(small, packing=packing) for packing in PACKINGS}
LOADERS["mixture"] = mixture


@pytest.mark.parametrize("kind", LOADERS)
def test_rows_of_two_and_a_half_epochs_however_often_resumed(kind):
    """By 1, 2 and 4 processes, whose number changes at the restarts."""
    make = LOADERS[kind]
    whole = make(prefetch=4, ways=4)
    steps = int(2.5 * whole.updates_per_epoch) + 1
    uninterrupted = [whole.at(step) for step in range(steps)]
    assert all(
        equal(a.batch, b.batch)
        for a, b in zip(islice(whole.iterate(), steps), uninterrupted, strict=True)
    )
    # Two restarts in the second epoch.
    second = int(1.2 * whole.updates_per_epoch)
    stops = [0, 2, second, second + 1, steps]
    for (start, stop), processes in zip(pairwise(stops), (1, 2, 4, 2), strict=True):
        shares = [
            list(islice(make(prefetch=4, ways=4).iterate(start, Share(p, processes)), stop - start))
            for p in range(processes)
        ]
        for step, parts in enumerate(zip(*shares, strict=True), start=start):
            expected = flat(uninterrupted[step].batch)
            joined = {
                key: np.concatenate([flat(part.batch)[key] for part in parts])
                for key in expected
                if key != "counts"
            }
            assert all(np.array_equal(joined[key], expected[key]) for key in joined)
            for part in parts:
                assert np.array_equal(part.work, uninterrupted[step].work)
                assert np.array_equal(part.tokens, uninterrupted[step].tokens)
    assert not any(
        equal(a.batch, make(seed=1, ways=4).at(step).batch) for step, a in enumerate(uninterrupted)
    )


@pytest.mark.parametrize("kind", LOADERS)
def test_no_row_comes_twice_and_each_once_an_epoch(kind):
    loader = LOADERS[kind]()
    steps = int(3 * loader.updates_per_epoch) + 1
    seen = [name for step in range(steps) for name in names(loader, step)]
    assert len(set(seen)) == len(seen)
    for stream in range(len(loader.streams)):
        for pool in {p for s, p, _, _ in seen if s == stream}:
            mine = [(e, row) for s, p, e, row in seen if (s, p) == (stream, pool)]
            epochs = sorted({e for e, _ in mine})
            rows = [sorted(row for e, row in mine if e == epoch) for epoch in epochs]
            # All but the last are whole.
            assert all(r == list(range(len(rows[0]))) for r in rows[:-1])
            orders = [[row for e, row in mine if e == epoch] for epoch in epochs[:-1]]
            if len(rows[0]) > 5:
                assert len({tuple(order) for order in orders}) == len(orders)


@pytest.mark.parametrize("kind", LOADERS)
def test_the_batch_is_the_same_rows_for_any_number_of_devices(kind):
    """A row's number says which one it is, wherever it was dealt to."""
    loaders = {ways: LOADERS[kind](ways=ways) for ways in (1, 2, 4)}
    for step in range(5):
        rows = {}
        for ways, loader in loaders.items():
            found = {}
            batch = loader.at(step).batch
            for part in batch.parts if isinstance(batch, Buckets) else [batch]:
                for i, number in enumerate(part["rows"].tolist()):
                    if part["segments"][i].any():
                        found[number] = part["tokens"][i].tobytes() + part["targets"][i].tobytes()
            rows[ways] = found
        assert rows[1] == rows[2] == rows[4]


def test_weights_are_kept_at_every_update():
    loader = mixture()
    counts = np.zeros(2)
    for step in range(200):
        rows = np.array(names(loader, step))
        counts += np.bincount(rows[:, 1], minlength=2)
        assert abs(counts[1] - 0.25 * counts.sum()) <= 1
    tokens = sum(loader.at(step).tokens for step in range(20))
    assert tokens[0] > 1.5 * tokens[1] > 0


def test_predicted_tokens_are_those_of_the_batch():
    for make in LOADERS.values():
        loader = make()
        for step in range(8):
            update = loader.at(step)
            arrays = flat(update.batch)
            targets = sum((v >= 0).sum() for k, v in arrays.items() if k.startswith("targets"))
            assert update.tokens.sum() == targets


def test_buckets_hold_the_places_of_the_update():
    loader = small(packing="padded_buckets", ways=2)
    assert [shape.length for shape in loader.shapes] == [2, 4, 8]
    assert {shape.length * shape.rows for shape in loader.shapes} == {32}
    for step in range(10):
        batch = loader.at(step).batch
        assert batch.counts.sum() == 2
        for count, part, shape in zip(batch.counts, batch.parts, loader.shapes, strict=True):
            assert part["tokens"].shape == (2 * shape.rows, shape.length)
            used = part["segments"].any(1).reshape(2, -1)
            here = count * shape.rows // 2  # a device's rows come first in its part
            assert used[:, :here].all()
            assert not used[:, here:].any()


def test_work_is_levelled_and_counted():
    lengths = np.random.default_rng(0).integers(1, 9, 400)
    level, plain = (
        small(lengths=lengths, batch=32, packing="best_fit", ways=4, balance=b)
        for b in ("work", "none")
    )
    for step in range(5):
        a, b = level.at(step), plain.at(step)
        assert imbalance(a.work) <= imbalance(b.work)
        for update in (a, b):
            segments = update.batch["segments"].reshape(4, 8, 8)
            for device, work in zip(segments, update.work, strict=True):
                pairs = sum(
                    n * (n + 1) / 2
                    for row in device
                    for n in np.bincount(row[row > 0])[1:].tolist()
                )
                assert work == pytest.approx(100.0 * 64 + pairs)
    assert imbalance(level.at(0).work) < 1.005


def test_grain_is_imported_before_the_first_batch_is_drawn():
    """Its import replaces `__import__` for a while, for all threads: if it came with the first
    batch, in a thread, then jax, which imports while it traces, failed now and then."""
    code = """
import sys
from shardlm.config import Config, DataConfig, TrainConfig
from shardlm.data import Corpus, Loader
from shardlm.data.balance import WorkModel
config = Config(data=DataConfig(length=8), train=TrainConfig(batch=2))
loader = Loader([Corpus.of([range(100)], 100)], config, WorkModel(1.0, 1.0, ()))
assert "grain" not in sys.modules
updates = loader.iterate()
assert "grain" in sys.modules
before = set(sys.modules)
next(updates)
assert not [name for name in set(sys.modules) - before if name.startswith("grain")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_steps_can_be_asked_in_any_order():
    steps = [5, 0, 17, 3]
    loader = small()
    assert all(equal(loader.at(s).batch, small().at(s).batch) for s in steps)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_far_step_costs_no_more_than_a_near_one(kind):
    started = time.monotonic()
    update = LOADERS[kind]().at(10**9)
    assert equal(next(LOADERS[kind]().iterate(10**9)).batch, update.batch)
    assert time.monotonic() - started < 5


def test_closing_the_iterator_ends_its_thread():
    before = set(threading.enumerate())
    updates = small().iterate()
    next(updates)
    (worker,) = set(threading.enumerate()) - before
    updates.close()
    worker.join(10)
    assert not worker.is_alive()
    with pytest.raises(StopIteration):
        next(updates)


def test_a_large_seed_is_as_good_as_a_small_one():
    assert not equal(small(seed=2**63).at(0).batch, small(seed=0).at(0).batch)


@pytest.mark.parametrize("lengths, rows", [([24], 3), ([17], 3), ([8], 1), ([3], 1)])
def test_fewer_rows_than_a_batch_are_refused(lengths, rows):
    with pytest.raises(DataError) as error:
        loader_of([corpus_of(lengths)])
    message = str(error.value)
    assert "train.batch is 4" in message
    assert f"only {many(rows, 'row')} of" in message
    assert f"({lengths[0]} tokens)" in message
    loader_of([corpus_of(lengths)], batch=rows)
    if "data.length to" in message:
        longest = int(message.split("data.length to ")[1].split()[0])
        loader_of([corpus_of(lengths)], length=longest)
        with pytest.raises(DataError):
            loader_of([corpus_of(lengths)], length=longest + 1)


@pytest.mark.parametrize("packing", ["best_fit", "none", "padded_buckets"])
@pytest.mark.parametrize("lengths", [[24], [8, 8, 8], [20], [30, 2, 1, 1]])
def test_what_a_refusal_of_packed_rows_says_helps(packing, lengths):
    with pytest.raises(DataError, match=r"train\.batch is 8 and .*: give more text") as error:
        loader_of([corpus_of(lengths)], batch=8, packing=packing)
    if "only" in str(error.value):
        rows = int(str(error.value).split("set train.batch to ")[1].split()[0])
        with pytest.raises(DataError):
            loader_of([corpus_of(lengths)], batch=rows + 1, packing=packing)
        loader_of([corpus_of(lengths)], batch=rows, packing=packing)
    else:
        loader_of([corpus_of(lengths)], batch=2, packing=packing)


@pytest.mark.parametrize("lengths", [[], [0], [1], [1, 1, 1]])
def test_a_text_without_a_token_to_predict_is_refused(lengths):
    for make in (
        lambda: loader_of([corpus_of(lengths)], batch=1, length=2),
        lambda: ValidationLoader([corpus_of(lengths)], length=2),
    ):
        with pytest.raises(DataError, match=f"{many(sum(lengths), 'token')} in"):
            make()


def test_a_document_shorter_than_a_row_comes_once_an_epoch():
    loader = loader_of([corpus_of([3])], batch=1)
    for step in range(5):
        batch = loader.at(step).batch
        assert (batch["segments"] > 0).sum() == 3
        assert (batch["targets"] >= 0).sum() == 2


@pytest.mark.parametrize("balance", ["work", "dynamic"])
def test_no_more_is_prepared_than_is_said(balance, monkeypatch):
    """By which decisions of later updates are made in time."""
    loader = small(prefetch=4, balance=balance)
    asked = []
    make = loader.several
    monkeypatch.setattr(
        loader,
        "several",
        lambda step, count, share: asked.append(step + count - 1) or make(step, count, share),
    )
    updates = loader.iterate()
    for step in range(8):
        next(updates)
        time.sleep(0.05)  # As much as can be prepared meanwhile.
        assert step + 1 < max(asked) + 1 <= step + 1 + loader.ahead
    assert loader.ahead == 6 or balance == "work"
    updates.close()


def test_dynamic_rows_are_the_same_and_go_where_the_speeds_say():
    """Those of `balance` work, from another number of micro-batches of each device."""
    for packing in PACKINGS:
        kwargs = {"packing": packing, "batch": 16, "ways": 2}
        even, loader = small(**kwargs), small(balance="dynamic", **kwargs)
        loader.deal_to(2, Speeds((1.5, 0.5), ((0, (1.0, 1.0)), (3, (1.5, 0.5)))))
        for step in range(6):
            expected, update = even.at(step), loader.at(step)
            counts, parts = update.batch
            assert counts.shape == (2, len(loader.shapes))
            # Two micro-batches of each device; at 3:1 three and one.
            assert counts.sum(1).tolist() == ([2, 2] if step < 3 else [3, 1])
            assert update.tokens.tolist() == expected.tokens.tolist()
            assert update.work.sum() == pytest.approx(expected.work.sum())
            assert update.time.tolist() == pytest.approx(
                (update.work / loader.speeds.at(step)).tolist()
            )
            used = []
            for s, (shape, part) in enumerate(zip(loader.shapes, parts, strict=True)):
                each = shape.rows // 2
                for device in range(2):
                    first = device * 4 * each
                    used += part["tokens"][first : first + counts[device, s] * each].tolist()
                    rest = part["targets"][first + counts[device, s] * each : first + 4 * each]
                    assert (rest == -1).all()
            parts = [expected.batch] if len(loader.shapes) == 1 else expected.batch.parts
            counts = [2] if len(loader.shapes) == 1 else expected.batch.counts
            given = []
            for shape, part, count in zip(loader.shapes, parts, counts, strict=True):
                rows = part["tokens"].reshape(2, 2 * shape.rows // 2, shape.length)
                given += rows[:, : count * shape.rows // 2].reshape(-1, shape.length).tolist()
            assert sorted(used) == sorted(given)
            # Each process has its own devices.
            for share in range(2):
                alone = loader.at(step, Share(share, 2)).batch
                assert equal({"counts": alone.counts}, {"counts": update.batch.counts[[share]]})
                for part, whole in zip(alone.parts, update.batch.parts, strict=True):
                    assert equal(part, {k: np.split(v, 2)[share] for k, v in whole.items()})
