"""Devices that make unequal numbers of micro-batches, and tell how long they took."""

import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest

from shardlm.config import ConfigError
from shardlm.data.buckets import Buckets
from shardlm.mesh.axes import batch_ways
from shardlm.train import stopwatch
from shardlm.train.setup import build_mesh, new_state
from shardlm.train.state import shardings
from shardlm.train.step import batch_sharding, make_train_step

ROOM = 8
"""Micro-batches that a device has room for."""
LAYOUTS = [(1, 4, 1, "optimizer"), (2, 2, 2, "none")]
MADE = [(2, 2, 2, 2), (5, 1, 1, 1), (1, 3, 1, 3)]


class Dynamic:
    """An update of 16 rows over 4 shares, in micro-batches of 2 rows a device."""

    def __init__(self, lab, layout):
        config = lab.config(lab.Layout(*layout, micro_batches=2))
        self.engine = lab.engine(
            dataclasses.replace(
                config,
                data=dataclasses.replace(config.data, balance="dynamic"),
                model=dataclasses.replace(config.model, layers=2, dropout=0.3),
            )
        )
        assert batch_ways(self.engine.mesh.shape) == 4
        self.step = make_train_step(self.engine, buckets=True)
        self.initial = jax.device_get(new_state(self.engine))

    def __call__(self, batch):
        state = jax.device_put(self.initial, shardings(self.engine.abstract))
        return self.step(state, jax.device_put(batch, batch_sharding(self.engine, buckets=True)))


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda p: "-".join(map(str, p)))
def dynamic(request, lab):
    return Dynamic(lab, request.param)


@pytest.fixture(scope="module")
def flat(lab):
    """State and metrics of the same update on one device."""
    config = lab.config()
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, layers=2, dropout=0.3)
    )
    engine = lab.engine(config)
    step = make_train_step(engine)

    @functools.cache
    def run():
        state, metrics = step(new_state(engine), lab.put(engine, lab.batch(0)))
        return lab.fetch(state), lab.fetch(metrics)

    return run


def dealt(batch, made):
    """The rows of a flat batch on devices that make so many micro-batches each."""
    each = 2 * np.array(made)
    slots = np.concatenate([2 * ROOM * d + np.arange(n) for d, n in enumerate(each)])
    part = {k: np.full((4 * 2 * ROOM, *x.shape[1:]), 7, np.int32) for k, x in batch.items()}
    for key, values in batch.items():
        part[key][slots] = values
    return Buckets(np.array(made, np.int32)[:, None], (part,))


@pytest.mark.parametrize("made", MADE, ids=str)
def test_the_update_is_that_of_one_device(dynamic, flat, made, lab):
    """Loss, gradient, parameters and dropout, whoever makes what; one program for all."""
    state, metrics = dynamic(dealt(lab.batch(0), made))
    got, metrics = lab.fetch(state), lab.fetch(metrics)
    expected, figures = flat()
    assert metrics["tokens"] == figures["tokens"] > 50
    for key in ("loss", "grad_norm"):
        assert metrics[key] == pytest.approx(figures[key], rel=1e-5)
    assert got.keys() == expected.keys()
    for name in got:
        size = np.abs(expected[name]).max()
        np.testing.assert_allclose(
            got[name], expected[name], rtol=0, atol=1e-5 * size, err_msg=name
        )
    assert metrics["device_seconds"].shape == (4,)
    assert (metrics["device_seconds"] > 0).all()
    assert dynamic.step._cache_size() == 1


def test_each_device_reads_the_clock_before_its_first_and_after_its_last(dynamic, lab, monkeypatch):
    """The clock stands at 3 s before 2**32 µs, where it starts again, until a device has made all
    its micro-batches, and the gradient is there; then at 2 s after it."""
    calls, lock = [], threading.Lock()
    weights = lab.fetch(dynamic.initial)
    values = {v for name, x in weights.items() if name.startswith("params.") for v in x.flat}

    def clock(*elements):
        begun = all(e.item() in values for e in elements)
        with lock:
            calls.append(begun)
        return np.uint32(2**32 - 3_000_000 if begun else 2_000_000)

    devices = dynamic.engine.mesh.size
    monkeypatch.setattr(stopwatch, "_microseconds", clock)
    step = make_train_step(dynamic.engine, buckets=True)
    batch = jax.device_put(
        dealt(lab.batch(0), MADE[1]), batch_sharding(dynamic.engine, buckets=True)
    )
    state = jax.device_put(dynamic.initial, shardings(dynamic.engine.abstract))
    _, metrics = step(state, batch)
    assert lab.fetch(metrics)["device_seconds"].tolist() == [5.0] * 4
    assert sorted(calls) == [False] * devices + [True] * devices


def test_a_mesh_that_waits_in_every_micro_batch_is_refused(lab):
    config = lab.config(lab.Layout(data=4))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, balance="dynamic"))
    with pytest.raises(ConfigError, match=r"data.balance is dynamic and mesh.shard_params all"):
        build_mesh(config)
