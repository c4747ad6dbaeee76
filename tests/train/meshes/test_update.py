"""What one update does: masks, skipped updates, donation, one compilation."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from shardlm.train.setup import new_state
from shardlm.train.step import make_train_step


@pytest.fixture(scope="module")
def layout(lab):
    # The same as in test_invariance, so that a process compiles it once.
    return lab.Layout(1, 4, 2, "none", 2)


@pytest.fixture
def compiled(lab, layout):
    return lab.compiled(lab.config(layout))


def same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


def test_loss_is_a_mean_over_tokens(lab, compiled):
    """Sums 4 and 14 over 1 and 7 tokens are 18 / 8 = 2.25, not the mean 3 of the means 4 and 2."""
    engine, step = compiled.engine, compiled.step
    whole = lab.batch(0)

    def loss(rows):
        targets = np.full_like(whole["targets"], -1)
        targets[rows] = whole["targets"][rows]
        _, metrics = step(compiled.start(), lab.put(engine, whole | {"targets": targets}))
        return metrics["loss"].item(), metrics["tokens"].item()

    rows = np.arange(16)
    parts = [loss(rows % 2 == i) for i in range(2)]
    assert parts[0][1] != parts[1][1]
    both, tokens = loss(rows >= 0)
    assert tokens == sum(n for _, n in parts) == (whole["targets"] >= 0).sum()
    assert both == pytest.approx(sum(x * n for x, n in parts) / tokens, rel=1e-6)
    assert abs(both - np.mean([x for x, _ in parts])) > 1e-4


def test_rate_advances_once_an_update(lab):
    """Logged and applied, with 4 micro-batches: warm-up of 2, then linear to .1 at update 4."""
    config = lab.config(lab.Layout(micro_batches=4))
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, layers=1),
        optim=dataclasses.replace(
            config.optim, schedule="linear", warmup_steps=2, final_fraction=0.1
        ),
        train=dataclasses.replace(config.train, steps=4),
    )
    run = lab.compiled(config)
    state = run.start()
    for i, part in enumerate((0.5, 1.0, 0.55, 0.1)):
        before = lab.fetch(state["params"])
        state, metrics = run.step(state, lab.put(run.engine, lab.batch(i)))
        rate = part * config.optim.learning_rate
        assert metrics["learning_rate"].item() == pytest.approx(rate, rel=1e-6)
        opt = lab.fetch(state["opt"])
        # Of sgd, the trace after an update is what the rate multiplies.
        trace = {k.split("trace.")[1]: v for k, v in opt.items() if "trace." in k}
        for name, after in lab.fetch(state["params"]).items():
            rounding = 2.0**-23 * np.abs(after).max()
            step = before[name] - after
            np.testing.assert_allclose(step, rate * trace[name], rtol=1e-5, atol=rounding)


def test_nothing_to_learn_changes_nothing(lab, compiled):
    engine, step = compiled.engine, compiled.step
    state, _ = step(compiled.start(), lab.put(engine, lab.batch(0)))
    before = lab.fetch(state)
    batch = lab.batch(1)
    batch["targets"][:] = -1
    state, metrics = step(state, lab.put(engine, batch))
    after = lab.fetch(state)
    assert np.isnan(metrics["loss"].item())
    assert metrics["tokens"].item() == 0
    assert metrics["grad_norm"].item() == 0
    assert after.pop("step") == before.pop("step") + 1
    for key in ("opt.skipped", "opt.consecutive"):
        assert after.pop(key) == before.pop(key) + 1
    same_bits(before, after)


def test_nan_in_the_third_update(lab, compiled):
    """Nothing learned is lost or poisoned, and the run goes on as if the batch had not been."""
    engine, step = compiled.engine, compiled.step
    state = compiled.start()
    for i in range(2):
        state, _ = step(state, lab.put(engine, lab.batch(i)))
    table = np.array(state["params"]["embed"]["table"])
    poisoned = table.copy()
    poisoned[7, 3] = np.nan
    sharding = engine.abstract["params"]["embed"]["table"].sharding

    def with_table(state, value):
        params = state["params"] | {"embed": {"table": jax.device_put(value, sharding)}}
        return {**state, "params": params}

    state = with_table(state, poisoned)
    before = lab.fetch(state)
    state, metrics = step(state, lab.put(engine, lab.batch(2)))
    after = lab.fetch(state)
    assert not np.isfinite(metrics["grad_norm"].item())
    assert metrics["skipped"].item() == metrics["consecutive"].item() == 1
    counts = {key: after.pop(key) - before.pop(key) for key in ("step", "opt.skipped")}
    assert counts == {"step": 1, "opt.skipped": 1}
    assert (before.pop("opt.consecutive"), after.pop("opt.consecutive")) == (0, 1)
    same_bits(before, after)

    state = with_table(state, table)
    for i in (3, 4):
        state, metrics = step(state, lab.put(engine, lab.batch(i)))
        assert np.isfinite(metrics["loss"].item())
    assert metrics["skipped"].item() == 1
    assert metrics["consecutive"].item() == 0
    clean = compiled.start()
    for i in (0, 1, 3, 4):
        clean, _ = step(clean, lab.put(engine, lab.batch(i)))
    same_bits(lab.fetch(state["params"]), lab.fetch(clean["params"]))
    same_bits(lab.fetch(state["opt"].inner), lab.fetch(clean["opt"].inner))


def test_state_is_donated(lab, compiled):
    engine, step = compiled.engine, compiled.step
    state = compiled.start()
    size = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert step.memory_analysis().alias_size_in_bytes == size
    step(state, lab.put(engine, lab.batch(0)))
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_one_compilation(lab):
    """Fresh, and from arrays as a checkpoint restores them: no weak type or other sharding."""
    config = lab.config(lab.Layout(data=2))
    model = dataclasses.replace(config.model, layers=1, qk_norm=False, activation="gelu")
    engine = lab.engine(dataclasses.replace(config, model=model))
    step = make_train_step(engine)
    state = new_state(engine)
    for i in range(3):
        state, _ = step(state, lab.put(engine, lab.batch(i)))
    restored = jax.tree.map(
        lambda x, a: jax.device_put(np.array(x), a.sharding), state, engine.abstract
    )
    for i in range(3, 5):
        restored, _ = step(restored, lab.put(engine, lab.batch(i)))
    assert step._cache_size() == 1
    for leaf, abstract in zip(
        jax.tree.leaves(restored), jax.tree.leaves(engine.abstract), strict=True
    ):
        assert (leaf.shape, leaf.dtype, leaf.weak_type) == (abstract.shape, abstract.dtype, False)
        assert leaf.sharding.is_equivalent_to(abstract.sharding, leaf.ndim)


def test_program_does_not_grow_with_the_layers(lab):
    config = lab.config(lab.Layout(data=2))

    def size(layers):
        model = dataclasses.replace(config.model, layers=layers, qk_norm=False, activation="gelu")
        step = lab.compiled(dataclasses.replace(config, model=model)).step
        # Without the numbers, which have more digits.
        return len(re.sub(r"\d+", "0", step.as_text()))

    assert size(16) <= 1.3 * size(4)
