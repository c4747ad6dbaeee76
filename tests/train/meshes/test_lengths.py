"""Rows of several lengths in one update, against the same rows padded to the longest."""

import dataclasses
import functools
import itertools
import re

import jax
import numpy as np
import pytest

from shardlm.data.buckets import Buckets
from shardlm.mesh.axes import batch_ways
from shardlm.plan import bytes_by_axis, count_traffic
from shardlm.train.setup import new_state
from shardlm.train.state import shardings
from shardlm.train.step import batch_sharding, make_train_step

LENGTHS = (45, 15, 9)
ROWS = (4, 12, 20)
"""Of a micro-batch of each length, over all devices: 180 positions."""
ROOM = 3
MIXTURES = [(2, 1, 0), (0, 0, 3), (1, 1, 1)]
FLAT = ROOM * max(ROWS)
"""Rows of the flat batch, which has room for every mixture."""
KEYS = ("tokens", "targets", "segments", "positions")

LAYOUTS = [
    (1, 1, 1, "all"),
    (1, 4, 1, "optimizer"),
    (1, 2, 2, "all"),
    (2, 2, 2, "none"),
    *(
        pytest.param(p, marks=pytest.mark.slow)
        for p in [(1, 4, 1, "all"), (1, 4, 1, "none"), (1, 2, 2, "optimizer"), (1, 2, 2, "none")]
    ),
]


class Steps:
    """An update, run from the same initial state each time."""

    def __init__(self, lab, layout, buckets):
        self.engine = self.engine_of(lab, layout, buckets)
        self.ways = batch_ways(self.engine.mesh.shape)
        self.step = make_train_step(self.engine, buckets)
        self.sharding = batch_sharding(self.engine, buckets)
        self.initial = jax.device_get(new_state(self.engine))
        self.fetch = lab.fetch

    @staticmethod
    def engine_of(lab, layout, buckets):
        config = lab.config(lab.Layout(*layout))
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(
                config.model,
                layers=2,
                dropout=0.3,
                # Rows of 45 are 12 blocks, in loops; the others are written out.
                attention="blockwise",
                attention_block=4,
            ),
            data=dataclasses.replace(config.data, length=LENGTHS[0]),
            train=dataclasses.replace(
                config.train,
                batch=ROOM * ROWS[0] if buckets else FLAT,
                micro_batch=ROWS[0] if buckets else FLAT // 2,
            ),
        )
        return lab.engine(config)

    def __call__(self, batch):
        """State, with the gradient in it as sgd's trace, and metrics after one update."""
        state = jax.device_put(self.initial, shardings(self.engine.abstract))
        state, metrics = self.step(state, jax.device_put(batch, self.sharding))
        return self.fetch(state), {k: v.item() for k, v in self.fetch(metrics).items()}


@pytest.fixture(scope="module")
def steps(lab):
    return functools.cache(functools.partial(Steps, lab))


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda p: "-".join(map(str, p)))
def bucketed(request, steps):
    return steps(request.param, buckets=True)


@pytest.fixture(scope="module")
def flat(steps):
    return steps((1, 1, 1, "all"), buckets=False)


def packed(n, length, rng, vocab=67):
    """Rows of documents and padding. Each has its own share of targets, and every third none."""
    shape = (n, length)
    segments = np.sort(rng.integers(0, 4, shape), 1)[:, ::-1]
    first = np.array([np.searchsorted(-row, -row, "left") for row in segments]).reshape(shape)
    has_target = rng.random(shape) < rng.uniform(0.05, 1, (n, 1))
    has_target[::3] = False
    tokens = rng.integers(0, vocab, shape)
    return {
        "tokens": tokens,
        "targets": np.where(has_target & (segments > 0), (5 * tokens + 2) % vocab, -1),
        "segments": segments,
        "positions": np.arange(length) - first,
    }


def rows_of(counts):
    """The rows of an update, some of each length."""
    rng = np.random.default_rng(counts)
    return [packed(c * r, n, rng) for c, r, n in zip(counts, ROWS, LENGTHS, strict=True)]


def as_flat(parts):
    """All rows padded to the longest, in the order of their numbers, and rows of padding."""

    def whole(key):
        out = np.full((FLAT, LENGTHS[0]), -1 if key == "targets" else 0, np.int32)
        first = 0
        for part in parts:
            n, length = part[key].shape
            out[first : first + n, :length] = part[key]
            first += n
        return out

    return {key: whole(key) for key in KEYS} | {"rows": np.arange(FLAT, dtype=np.int32)}


def as_buckets(parts, counts, ways, rubbish=0):
    """The rows dealt at random to the devices' micro-batches, and something in all other places."""
    rng = np.random.default_rng(rubbish)
    order = np.random.default_rng(0)
    first, out = 0, []
    for part, count, size, length in zip(parts, counts, ROWS, LENGTHS, strict=True):
        places = np.arange(ROOM * size).reshape(ways, ROOM, size // ways)[:, :count].ravel()
        places = order.permutation(places)
        arrays = packed(ROOM * size, length, rng)
        arrays["tokens"] += rng.integers(-1000, 1000)
        arrays["rows"] = rng.integers(0, 1000, ROOM * size)
        for key in KEYS:
            arrays[key][places] = part[key]
        arrays["rows"][places] = first + np.arange(len(places))
        first += len(places)
        out.append({k: np.ascontiguousarray(v, np.int32) for k, v in arrays.items()})
    return Buckets(np.array(counts, np.int32), tuple(out))


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.mark.parametrize("counts", MIXTURES, ids=str)
def test_the_update_is_that_of_the_rows_padded_to_the_longest(bucketed, flat, counts):
    """Loss, gradient and parameters, dropout included, on every mesh; one program for all."""
    parts = rows_of(counts)
    expected, figures = flat(as_flat(parts))
    got, metrics = bucketed(as_buckets(parts, counts, bucketed.ways))
    assert metrics["tokens"] == figures["tokens"] == sum((p["targets"] >= 0).sum() for p in parts)
    assert metrics["tokens"] > 100
    for key in ("loss", "grad_norm"):
        assert metrics[key] == pytest.approx(figures[key], rel=1e-5)
    assert got.keys() == expected.keys()
    traces = [name for name in got if "trace." in name]
    assert len(traces) == 14
    for name in got:
        # fp32 sums over some hundred tokens, in another order.
        size = np.abs(expected[name]).max()
        assert size > 0 or name.startswith("opt."), name
        np.testing.assert_allclose(
            got[name], expected[name], rtol=0, atol=1e-5 * size, err_msg=name
        )
    assert bucketed.step._cache_size() == 1


def test_what_is_not_run_changes_nothing(bucketed):
    """Bit for bit, whatever it is: ids that the vocabulary lacks too."""
    counts = MIXTURES[0]
    parts = rows_of(counts)
    one, other = (bucketed(as_buckets(parts, counts, bucketed.ways, rubbish)) for rubbish in (1, 2))
    assert one[1] == other[1]
    assert_same_bits(one[0], other[0])


@pytest.mark.parametrize("counts", [(0, 0, 0), (1, 0, 2)], ids=str)
def test_nothing_to_learn_changes_nothing(bucketed, counts):
    """No micro-batch, or only padding in those that there are."""
    parts = [{k: np.zeros_like(x) for k, x in part.items()} for part in rows_of(counts)]
    for part in parts:
        part["targets"] -= 1
    after, metrics = bucketed(as_buckets(parts, counts, bucketed.ways))
    assert (metrics["tokens"], metrics["grad_norm"]) == (0, 0)
    assert np.isnan(metrics["loss"])
    assert (metrics["skipped"], metrics["consecutive"]) == (1, 1)
    before = bucketed.fetch(bucketed.initial)
    for key in ("step", "opt.skipped", "opt.consecutive"):
        assert after.pop(key) == before.pop(key) + 1
    assert_same_bits(before, after)


def test_rows_may_be_dealt_in_any_order(steps):
    """A mask belongs to the row's number. With numbers by place it is another run."""
    flat = steps((1, 2, 2, "all"), buckets=False)
    batch = as_flat(rows_of((2, 1, 0)))
    order = np.random.default_rng(5).permutation(FLAT)
    expected, figures = flat(batch)
    got, metrics = flat({k: x[order] for k, x in batch.items()})
    assert metrics["loss"] == pytest.approx(figures["loss"], rel=1e-6)
    for name in expected:
        size = np.abs(expected[name]).max()
        np.testing.assert_allclose(
            got[name], expected[name], rtol=0, atol=1e-6 * size, err_msg=name
        )
    _, metrics = flat({k: x if k == "rows" else x[order] for k, x in batch.items()})
    assert abs(metrics["loss"] / figures["loss"] - 1) > 1e-4


def test_micro_batches_run_in_the_order_of_their_places(steps):
    """Those that a device does not run are its last, not the last of the whole array."""
    run = steps((1, 4, 1, "optimizer"), buckets=True)
    counts = (1, 0, 0)
    batch = as_buckets(rows_of(counts), counts, run.ways)
    for place, device in itertools.product(range(ROOM), range(run.ways)):
        part = {k: x.copy() for k, x in batch.parts[0].items()}
        part["targets"][:] = -1
        part["segments"][device * ROOM + place] = 1
        part["targets"][device * ROOM + place, :7] = 3
        _, metrics = run(Buckets(np.array(counts, np.int32), (part, *batch.parts[1:])))
        assert metrics["tokens"] == (7 if place == 0 else 0)


@pytest.mark.parametrize(
    "layout",
    [(1, 4, 2, "all"), pytest.param((1, 4, 1, "optimizer"), marks=pytest.mark.slow)],
    ids=str,
)
def test_a_length_that_is_not_used_sends_nothing(lab, layout):
    """All that more lengths send is in their loops, which need not turn. What the update sends
    once (weights or the embedding gathered, gradients summed) it sends once for all of them."""

    def sent_once(lengths):
        engine = Steps.engine_of(lab, layout, buckets=True)
        batch = jax.eval_shape(lambda: as_buckets(rows_of((1, 1, 1)), (1, 1, 1), 4))
        batch = Buckets(batch.counts.update(shape=(lengths,)), batch.parts[:lengths])
        lowered = make_train_step(engine, buckets=True).lower(engine.abstract, batch)
        return bytes_outside_loops(lowered.compile().as_text(), engine.mesh)

    one = sent_once(1)
    assert one["data"] > 0
    assert sent_once(3) == one


def bytes_outside_loops(text, mesh):
    """Bytes along each axis by a program whose loops do not turn at all."""
    kept = re.sub(r"^.* while\(.*$", "", text, flags=re.MULTILINE)
    return bytes_by_axis(count_traffic(kept, mesh))
