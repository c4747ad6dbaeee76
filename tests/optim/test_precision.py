"""Casts, and fp32 masters behind bf16 parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardlm.optim import cast_tree, fp32_masters, skip_nonfinite


def test_cast_tree_leaves_integers_alone():
    tree = {"w": jnp.ones(3), "n": jnp.arange(3), "flag": jnp.array(True)}
    cast = cast_tree(tree, jnp.bfloat16)
    assert [cast[k].dtype for k in ("w", "n", "flag")] == [jnp.bfloat16, jnp.int32, jnp.bool_]


def test_many_tiny_updates_add_up():
    """1,000 steps of 1e-4 from 1: 0.9. In bf16 alone 1 - 1e-4 rounds to 1."""
    grads = jnp.ones(3, jnp.bfloat16)

    def run(tx):
        params = jnp.ones(3, jnp.bfloat16)

        def body(carry, _):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.jit(lambda: jax.lax.scan(body, (params, tx.init(params)), length=1000)[0])()

    alone, _ = run(optax.sgd(1e-4))
    assert (alone == 1).all()
    params, state = run(fp32_masters(optax.sgd(1e-4)))
    assert params.dtype == jnp.bfloat16
    np.testing.assert_allclose(state.masters, 0.9, rtol=1e-4)
    np.testing.assert_allclose(params.astype(jnp.float32), 0.9, rtol=2**-8)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_parameters_are_the_rounded_masters_bit_for_bit(trees, jitted, dtype):
    """Also from weights far away in size: those grow and shrink by up to 2**15."""
    tx = fp32_masters(optax.sgd(1.0))
    params = cast_tree(trees.random(0, trees.small), dtype)
    state = tx.init(params)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if jitted else step
    for seed in range(1, 6):
        target = jax.tree.map(
            lambda x, s=seed: x * 2.0 ** (-3 * s % 15), trees.random(seed, trees.small)
        )
        grads = jax.tree.map(lambda m, t: m - t, state.masters, target)
        params, state = step(params, state, grads)
        trees.assert_same_bits(params, cast_tree(state.masters, dtype))


def test_a_step_from_foreign_parameters_leads_to_the_masters(trees):
    tx = fp32_masters(optax.sgd(0.1))
    params = cast_tree(trees.random(0, trees.small), jnp.bfloat16)
    state = tx.init(params)
    elsewhere = cast_tree(trees.random(9, trees.small), jnp.bfloat16)
    updates, state = tx.update(trees.random(1, trees.small), state, elsewhere)
    trees.assert_same_bits(
        optax.apply_updates(elsewhere, updates), cast_tree(state.masters, jnp.bfloat16)
    )


def test_moments_are_fp32_and_skipping_keeps_bits(trees):
    params = cast_tree(trees.random(0, trees.small), jnp.bfloat16)
    params["w"] = params["w"].at[0, 0].set(-0.0)
    tx = fp32_masters(skip_nonfinite(optax.adam(0.1)))
    state = tx.init(params)
    assert {x.dtype for x in jax.tree.leaves(state)} == {np.dtype("float32"), np.dtype("int32")}
    bad = trees.full(np.nan, trees.small)
    updates, after = jax.jit(tx.update)(bad, state, params)
    trees.assert_same_bits(optax.apply_updates(params, updates), params)
    trees.assert_same_bits(after.masters, state.masters)
    assert int(after.inner.skipped) == 1


def test_needs_params():
    tx = fp32_masters(optax.sgd(1.0))
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
