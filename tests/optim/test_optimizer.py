"""The configured optimizers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardlm.config import Config, OptimConfig, TrainConfig
from shardlm.optim import decay_mask, learning_rate, make_optimizer

NAMES = ("adamw", "lion", "adafactor", "sgd", "muon")


def configured(name, **changes) -> Config:
    optim = OptimConfig(name=name, schedule="constant", warmup_steps=0, clip_norm=0.5)
    optim = dataclasses.replace(optim, learning_rate=1.0, matrix_learning_rate=1.0)
    return Config(optim=dataclasses.replace(optim, **changes), train=TrainConfig(steps=100))


@functools.cache
def compiled(name):
    """Initial state and a step that donates its state, for any tree."""
    tx = make_optimizer(configured(name))
    return jax.jit(tx.init), jax.jit(tx.apply, donate_argnums=(0, 1))


@pytest.mark.parametrize("name", NAMES)
def test_fault_12_decay_by_role(trees, name):
    """Zero gradients, decay 0.1, learning rate 1."""
    init, step = compiled(name)
    for arrange, decayed in ((lambda tree: tree, 7), (trees.unstack, 2 + 5 * 2)):
        params = arrange(trees.full(1.0))
        params, _ = step(params, init(params), arrange(trees.full(0.0)))
        decays = trees.leaves(decay_mask(params))
        assert sum(decays.values()) == decayed
        for leaf, values in trees.leaves(params).items():
            assert (values == np.float32(0.9 if decays[leaf] else 1.0)).all(), leaf


@pytest.mark.parametrize("name", NAMES)
def test_stacked_layers_learn_as_single_ones(trees, name):
    """No optimizer sees the stack: not in a matrix, not in a statistic over a leaf."""
    init, step = compiled(name)
    stacked, single = trees.random(0), trees.unstack(trees.random(0))
    stacked_state, single_state = init(stacked), init(single)
    for n in (1, 2, 3):
        stacked, stacked_state = step(stacked, stacked_state, trees.random(n))
        single, single_state = step(single, single_state, trees.unstack(trees.random(n)))
    for a, b in zip(jax.tree.leaves(trees.unstack(stacked)), jax.tree.leaves(single), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_adafactor_factors_each_layers_matrix():
    """128 x (2 x 64): factored over all heads together, not over layers, not head by head."""
    params = {"layers": {"attn": {"q": {"kernel": jnp.ones((200, 128, 2, 64))}}}}
    state = jax.eval_shape(make_optimizer(configured("adafactor")).init, params)
    shapes = sorted(x.shape for x in jax.tree.leaves(state) if x.ndim > 1)
    assert shapes == [(200, 1), (200, 128), (200, 128)]


def test_adamw_is_that_of_optax(trees):
    config = configured("adamw", learning_rate=0.01, schedule="cosine", warmup_steps=3)
    tx = make_optimizer(config)
    rate = learning_rate(config)
    theirs = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(
            lambda count: rate(count + 1), 0.9, 0.95, 1e-8, weight_decay=0.1, mask=decay_mask
        ),
    )
    ours_params = theirs_params = trees.random(0)
    ours_state, theirs_state = jax.jit(tx.init)(ours_params), jax.jit(theirs.init)(theirs_params)
    ours_step, theirs_step = jax.jit(tx.apply), jax.jit(theirs.update)
    for n in range(1, 6):
        ours_params, ours_state = ours_step(ours_params, ours_state, trees.random(n))
        updates, theirs_state = theirs_step(trees.random(n), theirs_state, theirs_params)
        theirs_params = optax.apply_updates(theirs_params, updates)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        ours_params,
        theirs_params,
    )


def test_sgd_with_clipping_against_float64(trees):
    tx = make_optimizer(
        configured("sgd", learning_rate=0.01, b1=0.8, clip_norm=2.0, weight_decay=0.05)
    )
    params = trees.random(0)
    state, step = jax.jit(tx.init)(params), jax.jit(tx.apply)
    decays = trees.leaves(decay_mask(params))
    exact = {k: v.astype(np.float64) for k, v in trees.leaves(params).items()}
    velocity = {k: np.zeros_like(v) for k, v in exact.items()}
    for n in (1, 2, 3):
        grads = trees.random(n)
        params, state = step(params, state, grads)
        wide = {k: v.astype(np.float64) for k, v in trees.leaves(grads).items()}
        norm = np.sqrt(sum((g**2).sum() for g in wide.values()))
        for k, g in wide.items():
            velocity[k] = 0.8 * velocity[k] + g * min(1.0, 2.0 / norm)
            exact[k] -= 0.01 * (velocity[k] + 0.05 * decays[k] * exact[k])
    for k, value in trees.leaves(params).items():
        np.testing.assert_allclose(value, exact[k], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_fault_40_one_compilation_with_donation(trees, name):
    init, step = compiled(name)
    params = trees.random(0)
    state = init(params)
    for leaf in jax.tree.leaves(state):
        assert not leaf.weak_type
        assert leaf.dtype in (jnp.float32, jnp.int32)
    before = None
    for n in range(4):
        params, state = step(params, state, trees.random(n))
        assert not any(leaf.weak_type for leaf in jax.tree.leaves((params, state)))
        before = before or step._cache_size()
    assert step._cache_size() == before


@pytest.mark.parametrize("name", NAMES)
def test_fault_10_a_bad_gradient_changes_nothing(trees, name):
    init, step = compiled(name)
    params = trees.random(0)
    params, state = step(params, init(params), trees.random(1))
    old_params, old_state = jax.tree.map(np.array, (params, state))
    grads = trees.random(2)
    grads["final_norm"]["scale"] = grads["final_norm"]["scale"].at[1].set(jnp.nan)
    new_params, new_state = step(params, state, grads)
    trees.assert_same_bits(new_params, old_params)
    trees.assert_same_bits(new_state.inner, old_state.inner)
    assert int(new_state.skipped) == 1


@pytest.mark.parametrize("name", NAMES)
def test_fault_4_eight_devices_update_as_one(trees, name):
    """Embed (12) over 4 devices and, where it divides, another dim over 2."""
    init, step = compiled(name)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def shard(x):
        axes = [None] * x.ndim
        if 12 in x.shape:
            axes[x.shape.index(12)] = "data"
        for dim, size in enumerate(x.shape):
            if axes[dim] is None and size in (6, 2, 20, 16):
                axes[dim] = "model"
                break
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    params = trees.random(0)
    expected = step(params, init(params), trees.random(1))
    sharded, grads = jax.tree.map(shard, (trees.random(0), trees.random(1)))
    shardings = jax.tree.map(lambda x: x.sharding, sharded)
    got = step(sharded, init(sharded), grads)
    jax.tree.map(
        lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim) or pytest.fail(str(x)),
        got[0],
        shardings,
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)
