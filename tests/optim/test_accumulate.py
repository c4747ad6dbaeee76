"""Accumulation over micro-batches: a mean over tokens, not a mean of means."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardlm.optim import accumulate_weighted, add, mean, zeros_like_accumulated


def squares(weights, x, y, mask):
    """Sum over tokens of a squared error, for a linear model."""
    return jnp.sum(mask * (x @ weights["w"] + weights["b"] - y) ** 2)


def problem(rows, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, 7)).astype(np.float32)
    y = generator.normal(size=rows).astype(np.float32)
    mask = (generator.random(rows) < 0.6).astype(np.float32)
    weights = {"w": jnp.asarray(generator.normal(size=7), jnp.float32), "b": jnp.float32(0.3)}
    return weights, x, y, mask


def test_fault_1_unequal_masks():
    acc = zeros_like_accumulated(jnp.float32(0))
    acc = add(acc, jnp.float32(4), 1)
    acc = add(acc, jnp.float32(14), 7)
    assert float(mean(acc)) == 18 / 8


@pytest.mark.parametrize("parts", [2, 3])
def test_fault_1_same_gradient_as_one_batch(parts):
    weights, x, y, mask = problem(18)
    whole = jax.grad(squares)(weights, x, y, mask)
    expected = jax.tree.map(lambda g: np.asarray(g, np.float64) / mask.sum(), whole)

    def body(acc, rows):
        return add(acc, jax.grad(squares)(weights, *rows), rows[2].sum()), None

    rows = tuple(a.reshape(parts, -1, *a.shape[1:]) for a in (x, y, mask))
    acc, _ = jax.jit(lambda: jax.lax.scan(body, zeros_like_accumulated(weights), rows))()
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-5), mean(acc), expected)


def test_fault_2_a_micro_batch_without_tokens():
    acc = add(zeros_like_accumulated(jnp.float32(0)), jnp.float32(6), 4)
    assert float(mean(add(acc, jnp.float32(0), 0))) == 6 / 4


def test_fault_2_nothing_but_padding(trees):
    """Zero gradients, no NaN, and neither parameters nor state move, decay or not."""
    params = trees.random(0, trees.small)
    nothing = trees.full(0.0, trees.small)
    acc = add(zeros_like_accumulated(params), nothing, 0)
    trees.assert_same_bits(mean(acc), nothing)

    tx = accumulate_weighted(optax.adamw(0.1, weight_decay=0.1), 2)
    update = jax.jit(lambda grads, state, weight: tx.update(grads, state, params, weight=weight))
    _, state = update(params, jax.jit(tx.init)(params), 3)
    _, state = update(params, state, 3)
    before = state.inner
    for _ in range(2):
        updates, state = update(nothing, state, 0)
    trees.assert_same_bits(state.inner, before)
    trees.assert_same_bits(optax.apply_updates(params, updates), params)
    assert int(state.calls) == 0


@pytest.mark.parametrize("every", [1, 3])
def test_equal_weights_match_multi_steps(every):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.03, weight_decay=0.1))
    ours, theirs = accumulate_weighted(tx, every), optax.MultiSteps(tx, every)

    @jax.jit
    def ours_step(params, state, x, y):
        grads = jax.grad(squares)(params, x, y, 1)
        updates, state = ours.update(grads, state, params, weight=4)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def theirs_step(params, state, x, y):
        grads = jax.tree.map(lambda g: g / 4, jax.grad(squares)(params, x, y, 1))
        updates, state = theirs.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    ours_params = theirs_params = problem(4)[0]
    ours_state, theirs_state = ours.init(ours_params), theirs.init(theirs_params)
    for call in range(7 * every):
        _, x, y, _ = problem(4, seed=call)
        ours_params, ours_state = ours_step(ours_params, ours_state, x, y)
        theirs_params, theirs_state = theirs_step(theirs_params, theirs_state, x, y)
    for a, b in zip(jax.tree.leaves(ours_params), jax.tree.leaves(theirs_params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    count = optax.tree.get(ours_state.inner, "ScaleByAdamState").count
    assert int(count) == 7


def test_fault_6_left_over_micro_batches():
    """Ten micro-batches by fours: the third update is the true mean of the last two."""
    tx = accumulate_weighted(optax.sgd(1.0), 4)
    tokens = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], np.float32)
    sums = np.arange(1, 11, dtype=np.float32)
    state, moves = tx.init(jnp.float32(0)), []
    update = jax.jit(lambda g, s, w, last: tx.update(g, s, jnp.float32(0), weight=w, last=last))
    for i in range(10):
        updates, state = update(sums[i], state, tokens[i], i == 9)
        moves.append(-float(updates))
    expected = [sums[a:b].sum() / tokens[a:b].sum() for a, b in ((0, 4), (4, 8), (8, 10))]
    np.testing.assert_allclose([moves[3], moves[7], moves[9]], expected, rtol=1e-6)
    assert np.count_nonzero(moves) == 3
    assert int(state.calls) == 0
    assert float(state.accumulated.weight) == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_fault_11_sums_are_fp32(dtype):
    params = jnp.zeros((3,), dtype)
    grads = jnp.full((3,), 1e-3, dtype)
    acc = zeros_like_accumulated(params)
    acc = jax.lax.scan(lambda a, _: (add(a, grads, 1), None), acc, length=1024)[0]
    assert acc.grads.dtype == jnp.float32
    # 1e-3 in bf16 is 0.00099945.
    np.testing.assert_allclose(acc.grads, 1024 * np.float64(grads[0]), rtol=1e-5)
    np.testing.assert_allclose(acc.grads, 1.024, rtol=1e-3)
    assert float(acc.weight) == 1024


def test_every_must_be_positive():
    with pytest.raises(ValueError, match="every is 0: it must be at least 1"):
        accumulate_weighted(optax.sgd(1.0), 0)
