"""Updates with gradients that are not finite are skipped, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardlm.optim import clip_by_norm, global_norm, skip_nonfinite


def spoil(grads, value):
    """One element of one leaf, neither the first nor the last."""
    return grads | {"w": grads["w"].at[1, 2].set(value)}


@pytest.mark.parametrize("way", ["update", "apply"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_fault_10_state_keeps_every_bit(trees, way, value):
    tx = skip_nonfinite(optax.adamw(0.01, weight_decay=0.1))
    params = trees.random(0, trees.small)
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads):
        if way == "apply":
            return tx.apply(params, state, grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for n in (1, 2, 3, 4, 5):
        bad = n in (3, 4)
        params["w"] = params["w"].at[0, 0].set(-0.0)
        grads = spoil(trees.random(n, trees.small), value) if bad else trees.random(n, trees.small)
        new_params, new_state = step(params, state, grads)
        if bad:
            trees.assert_same_bits(new_params, params)
            trees.assert_same_bits(new_state.inner, state.inner)
            assert int(new_state.consecutive) == n - 2
        else:
            assert int(new_state.consecutive) == 0
        params, state = new_params, new_state
    assert int(state.skipped) == 2
    assert int(optax.tree.get(state.inner, "ScaleByAdamState").count) == 3
    assert all(np.isfinite(x).all() for x in trees.leaves(params).values())


@pytest.mark.parametrize("way", ["update", "apply"])
def test_finite_updates_are_those_of_the_inner(trees, way):
    inner = optax.adamw(0.01, weight_decay=0.1)
    tx = skip_nonfinite(inner)
    params, grads = trees.random(0, trees.small), trees.random(1, trees.small)
    updates, inner_state = jax.jit(inner.update)(grads, inner.init(params), params)
    expected = optax.apply_updates(params, updates)
    if way == "apply":
        got, state = jax.jit(tx.apply)(params, tx.init(params), grads)
    else:
        updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
        got = optax.apply_updates(params, updates)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    jax.tree.map(close, got, expected)
    jax.tree.map(close, state.inner, inner_state)


def test_a_condition_of_the_caller(trees):
    tx = skip_nonfinite(optax.adam(0.01))
    params, grads = trees.random(0, trees.small), trees.random(1, trees.small)
    state = tx.init(params)
    updates, after = jax.jit(tx.update)(grads, state, params, ok=False)
    trees.assert_same_bits(optax.apply_updates(params, updates), params)
    trees.assert_same_bits(after.inner, state.inner)
    assert (int(after.skipped), int(after.consecutive)) == (1, 1)


def test_a_given_norm_decides_and_reaches_the_clipping(trees):
    tx = skip_nonfinite(optax.chain(clip_by_norm(1.0), optax.sgd(1.0)))
    params, grads = trees.full(0.0, trees.small), trees.full(1.0, trees.small)
    state = tx.init(params)
    update = jax.jit(tx.update)
    updates, _ = update(grads, state, params, norm=np.float32(4.0))
    assert all((u == -0.25).all() for u in jax.tree.leaves(updates))
    _, after = update(grads, state, params, norm=np.float32(np.nan))
    assert int(after.skipped) == 1


def test_global_norm_against_float64(trees):
    grads = trees.random(3, trees.small)
    exact = np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in trees.leaves(grads).values()))
    np.testing.assert_allclose(global_norm(grads), exact, rtol=1e-6)
    halved = jax.tree.map(lambda x: x.astype(jnp.bfloat16), grads)
    assert global_norm(halved).dtype == jnp.float32


@pytest.mark.parametrize("limit", [0.1, 1.0, 1e4])
def test_clipping_is_that_of_optax(trees, limit):
    grads = trees.random(3, trees.small)
    theirs = optax.clip_by_global_norm(limit)
    expected, _ = jax.jit(theirs.update)(grads, theirs.init(grads))
    ours = clip_by_norm(limit)
    got, _ = jax.jit(ours.update)(grads, ours.init(grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)
