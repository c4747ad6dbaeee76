"""Learning-rate schedules: exact at their ends, and one tick an update."""

import jax
import numpy as np
import optax
import pytest

from shardlm.config import OptimConfig
from shardlm.optim import accumulate_weighted, counted, make_schedule

NAMES = ("constant", "cosine", "linear", "wsd")


def optim(**changes) -> OptimConfig:
    defaults = {"schedule": "cosine", "warmup_steps": 10, "final_fraction": 0.1}
    return OptimConfig(**(defaults | changes))


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_fault_5_values(name):
    rate = make_schedule(optim(schedule=name), 100, 1.0)
    got = [float(rate(n)) for n in (1, 5, 10, 55, 100)]
    np.testing.assert_allclose(got, [0.1, 0.5, 1.0, 0.55, 0.1], rtol=1e-6)
    assert rate(10) == np.float32(1.0)
    assert rate(100) == np.float32(0.1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("peak, fraction", [(1.0, 0.1), (3e-4, 0.0), (0.02, 1 / 3), (7e-3, 1.0)])
@pytest.mark.parametrize("steps, warmup", [(100, 10), (1, 0), (7, 7), (1, 1), (317, 0), (50, 49)])
def test_bounds_and_ends(name, peak, fraction, steps, warmup):
    config = optim(schedule=name, warmup_steps=warmup, final_fraction=fraction)
    rate = make_schedule(config, steps, peak)
    updates = np.arange(1, steps + 20)
    values = np.asarray(jax.vmap(rate)(updates))
    compiled = np.asarray(jax.jit(jax.vmap(rate))(updates))
    assert compiled[steps - 1] == values[steps - 1]
    floor = np.float32(peak if name == "constant" else peak * fraction)
    assert values.dtype == np.float32
    assert values.max() <= np.float32(peak)
    assert values[max(warmup - 1, 0) :].min() >= floor
    assert (values[: max(warmup - 1, 0)] < np.float32(peak)).all()
    assert values[0] > 0 or fraction == 0
    if warmup:
        assert values[warmup - 1] == np.float32(peak)
    if warmup < steps:
        assert (values[steps - 1 :] == floor).all()


def test_wsd_is_constant_and_then_linear():
    rate = make_schedule(optim(schedule="wsd"), 100, 1.0)
    got = [float(rate(n)) for n in (10, 40, 80, 90, 100)]
    np.testing.assert_allclose(got, [1, 1, 1, 0.55, 0.1], rtol=1e-6)
    rate = make_schedule(optim(schedule="wsd", decay_fraction=0.3), 100, 1.0)
    np.testing.assert_allclose(rate(85), 0.55, rtol=1e-6)
    assert rate(70) == 1


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_a_decay_fraction_ends_early_at_the_floor(name):
    rate = make_schedule(optim(schedule=name, decay_fraction=0.4), 100, 1.0)
    np.testing.assert_allclose([rate(30), rate(50), rate(100)], [0.55, 0.1, 0.1], rtol=1e-6)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_a_decay_fits_into_what_warm_up_leaves(name):
    """So that a recipe runs with any number of updates from its warm-up on."""
    short, whole = (
        make_schedule(optim(schedule=name, warmup_steps=80, decay_fraction=f), 100, 1.0)
        for f in (0.2, 1.0)
    )
    assert [float(short(n)) for n in (80, 85, 100)] == [float(whole(n)) for n in (80, 85, 100)]


@pytest.mark.parametrize("name", NAMES)
def test_traced_and_python_numbers_agree(name):
    rate = make_schedule(optim(schedule=name), 100, 3e-4)
    for n in (1, 10, 37, 100):
        traced = jax.jit(rate)(np.int32(n))
        assert traced.dtype == rate(n).dtype == np.float32
        assert not traced.weak_type
        # A few roundings of fp32 next to the peak, where the compiler contracts or reorders.
        np.testing.assert_allclose(traced, rate(n), rtol=1e-6, atol=1e-7 * 3e-4)


@pytest.mark.parametrize("every", [1, 4])
def test_fault_5_schedule_advances_once_an_update(every):
    """SGD on a gradient of 1 moves by the learning rate: update n moves by schedule(n)."""
    rate = make_schedule(optim(), 100, 1.0)
    tx = accumulate_weighted(optax.sgd(counted(rate)), every)
    update = jax.jit(lambda state, weight: tx.update(weight, state, np.float32(0), weight=weight))
    state, moved = tx.init(np.float32(0)), []
    for call in range(100 * every):
        updates, state = update(state, np.float32(call % 3 + 1))
        moved.append(-float(updates))
    made = np.array(moved).reshape(100, every)
    assert (made[:, :-1] == 0).all()
    expected = np.asarray(jax.vmap(rate)(np.arange(1, 101)))
    np.testing.assert_allclose(made[:, -1], expected, rtol=1e-6)
    np.testing.assert_allclose(made[[9, 54, 99], -1], [1, 0.55, 0.1], rtol=1e-6)
