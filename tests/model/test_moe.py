"""Mixture layers against float64 arithmetic in numpy that goes from token to token."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardlm.config import ModelConfig, MoeConfig
from shardlm.mesh import AxisRules
from shardlm.model.grouped import (
    _dot_of_blocks,
    _ragged_dot,
    capacities,
    slots_for_all,
    slots_within,
)
from shardlm.model.layers import Context
from shardlm.model.moe import Moe
from shardlm.parallel.collectives import Parallel

ALONE = Parallel(AxisRules({}))
B, T, D, E = 3, 11, 6, 5
BASE = ModelConfig(layers=2, embed=D, heads=2, mlp=7, vocab=13)
MIXTURES = {
    "softmax": MoeConfig(E, balance_loss=0.3, z_loss=0.2),
    "softmax, 3 not normalized, within .9": MoeConfig(
        E, 3, capacity_factor=0.9, normalize=False, balance_loss=0.3
    ),
    "sigmoid, biased, 2 shared": MoeConfig(
        E, gating="sigmoid", shared_experts=2, balance_loss=0.5, z_loss=0.1, bias_rate=0.1
    ),
    "sigmoid, biased, within .7": MoeConfig(
        E, gating="sigmoid", capacity_factor=0.7, balance_loss=0.0, bias_rate=0.1
    ),
    "one, within 1": MoeConfig(E, 1, capacity_factor=1.0, normalize=False),
    "all": MoeConfig(E, E),
}
SEGMENTS = np.array([[1] * 4 + [2] * 5 + [0] * 2, [1] * T, [0] * T], np.int32)
REAL = SEGMENTS > 0


def layer_of(moe, activation="swiglu"):
    """The graph of a layer, and weights of the size of trained ones."""
    model = dataclasses.replace(BASE, moe=moe, activation=activation)
    graph, state = nnx.split(Moe(model, nnx.Rngs(0)))
    rng = np.random.default_rng(4)
    shapes = nnx.to_pure_dict(state)
    values = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.6, x.shape), jnp.float32), shapes)

    def run(values, x, segments=SEGMENTS, decoding=False):
        filled = jax.tree.map(lambda p: p, state)
        nnx.replace_by_pure_dict(filled, values)
        keys = jnp.asarray(segments) if decoding else None
        ctx = Context(
            ALONE, jnp.dtype("float32"), "xla", jnp.asarray(segments), None, None, kv_segments=keys
        )
        return nnx.merge(graph, filled)(x, ctx)

    return run, values


def tokens(seed=0):
    return np.random.default_rng(seed).normal(0, 1.5, (B, T, D)).astype(np.float32)


class Reference:
    """A layer as the papers have it, one token and one expert at a time."""

    def __init__(self, moe, values, x, activation="swiglu", segments=SEGMENTS):
        self.moe, self.activation = moe, activation
        w = jax.tree.map(lambda v: np.asarray(v, np.float64), values)
        x = np.asarray(x, np.float64)
        real = segments > 0
        self.y = np.zeros_like(x)
        self.losses = np.zeros(len(x))
        self.load = np.zeros(E, int)
        self.dropped, self.entropy = 0, 0.0
        for b in range(len(x)):
            n = real[b].sum()
            taken, count, chance, z = np.zeros(E, int), np.zeros(E), np.zeros(E), 0.0
            most = capacities(T, E, moe.top_k, moe.capacity_factor)[n]
            for t in np.flatnonzero(real[b]):
                logits = x[b, t] @ w["router"]["kernel"]
                total = np.exp(logits).sum()
                z += np.log(total) ** 2
                score = np.exp(logits) / total
                if moe.gating == "sigmoid":
                    score = 1 / (1 + np.exp(-logits))
                p = score / score.sum()
                chance += p / n
                self.entropy -= (p * np.log(p)).sum()
                order = np.argsort(-(score + w["router"].get("bias", 0)), kind="stable")
                chosen = order[: moe.top_k]
                scale = score[chosen].sum() if moe.normalize else 1.0
                for e in chosen:
                    count[e] += 1
                    if moe.capacity_factor and taken[e] == most:
                        self.dropped += 1
                        continue
                    taken[e] += 1
                    experts = {k: v["kernel"][e] for k, v in w["experts"].items()}
                    self.y[b, t] += score[e] / scale * self.mlp(x[b, t], experts)
            self.load += count.astype(int)
            if n:
                balance = E * (count / (n * moe.top_k) * chance).sum()
                self.losses[b] = moe.balance_loss * balance + moe.z_loss * z / n
        if moe.shared_experts:
            self.y += self.mlp(x, {k: v["kernel"] for k, v in w["shared"].items()})

    def mlp(self, x, w):
        up = x @ w["up"]
        if self.activation == "relu2":
            return np.maximum(up, 0) ** 2 @ w["down"]
        gate = x @ w["gate"]
        return (gate / (1 + np.exp(-gate)) * up) @ w["down"]


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("name", MIXTURES)
def test_layer_matches_float64(quick_jit, name, activation):
    """Outputs, auxiliary losses and counts, with two documents in a row and a row of padding."""
    moe = MIXTURES[name]
    run, values = layer_of(moe, activation)
    x = tokens()
    y, routing = quick_jit(run)(values, x)
    expected = Reference(moe, values, x, activation)
    np.testing.assert_allclose(
        np.asarray(y)[REAL], expected.y[REAL], rtol=0, atol=2e-6 * np.abs(expected.y).max()
    )
    np.testing.assert_allclose(routing.losses, expected.losses, rtol=2e-6)
    np.testing.assert_array_equal(routing.load, expected.load)
    assert routing.load.sum() == REAL.sum() * moe.top_k
    assert routing.dropped == expected.dropped
    assert (expected.dropped > 0) == (moe.capacity_factor > 0)
    assert routing.entropy == pytest.approx(expected.entropy, rel=1e-6)


@pytest.mark.parametrize("name", MIXTURES)
def test_gradients_match_float64(quick_jit, name):
    """Of a weighted sum of outputs and auxiliary losses, by central differences of the float64
    layer: for each leaf, and for x, along one random direction."""
    moe = MIXTURES[name]
    run, values = layer_of(moe)
    x = tokens()
    rng = np.random.default_rng(5)
    share = np.where(REAL[..., None], rng.normal(size=x.shape), 0)
    weight = rng.uniform(1, 3, B)

    def objective(values, x):
        y, routing = run(values, x)
        return (y * share.astype(np.float32)).sum() + (routing.losses * weight).sum()

    def exact(values, x):
        layer = Reference(moe, values, x)
        return (layer.y * share).sum() + (layer.losses * weight).sum()

    grads = quick_jit(jax.grad(objective, argnums=(0, 1)))(values, x)
    point = jax.tree.map(lambda v: np.asarray(v, np.float64), (values, x))
    leaves, tree = jax.tree.flatten(point)
    for i, (path, grad) in enumerate(jax.tree_util.tree_leaves_with_path(grads)):
        direction = rng.normal(size=grad.shape)
        step = 1e-6

        def moved(sign, i=i, direction=direction, step=step):
            at = [v + sign * step * direction if i == j else v for j, v in enumerate(leaves)]
            return exact(*jax.tree.unflatten(tree, at))

        slope = (moved(1) - moved(-1)) / (2 * step)
        if jax.tree_util.keystr(path).endswith("['bias']"):
            # It leads the choice only.
            assert slope == 0
            assert not np.asarray(grad).any()
            continue
        size = np.sqrt(np.square(np.asarray(grad, np.float64)).sum() * grad.size)
        assert (np.asarray(grad) * direction).sum() == pytest.approx(slope, abs=3e-6 * size), path


def test_capacity_is_a_rows_even_share():
    """Of 11 tokens that go to 2 of 5 experts each: 4.4, so 5, and at most all that there are."""
    assert capacities(11, 5, 2, 1.0).tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4, 5]
    # 1.1 · 2 · 10 / 4 is 5.5 and 1.1 · 20 / 4 · 10 is 55.00000000000001.
    assert capacities(10, 4, 2, 1.1)[10] == 6
    assert capacities(10, 4, 20, 1.1)[10] == 55


def test_who_comes_first_has_a_place():
    """Expert 0 takes 2 pairs of a row of 4 tokens, whoever else is in other rows; padding none."""
    expert = np.full((2, 6, 2), 3, np.int32)
    expert[0, 1:5] = [[1, 0], [0, 2], [0, 1], [2, 1]]
    expert[1, :4] = [[0, 1], [0, 2], [2, 0], [1, 2]]
    slots = slots_within(jnp.asarray(expert), jnp.array([4, 4]), 3, 0.75, ALONE)
    most = len(slots.pairs) // (3 * 2)
    kept = np.asarray(slots.of_pair < len(slots.pairs)).reshape(2, 6, 2)
    assert kept[0].tolist() == [
        [False, False],
        [True, True],
        [True, True],
        [False, True],
        [True, False],
        [False, False],
    ]
    assert kept[1, :4].tolist() == [[True, True], [True, True], [True, False], [True, False]]
    # Every slot lies with its expert and its row, and knows its pair.
    for b, t, j in itertools.product(range(2), range(6), range(2)):
        if kept[b, t, j]:
            slot = int(slots.of_pair[b * 6 + t, j])
            assert slot // most == expert[b, t, j] * 2 + b
            assert slots.pairs[slot] == (b * 6 + t) * 2 + j
    assert (np.asarray(slots.pairs) < 24).sum() == kept.sum()


@pytest.mark.parametrize("factor", [0.0, 0.8])
def test_padding_is_nowhere(quick_jit, factor):
    """What it holds changes no bit of tokens, losses and counts; with it at the front of a row the
    tokens have the same places; a row without it is as long."""
    moe = MoeConfig(E, capacity_factor=factor, z_loss=0.1)
    run, values = layer_of(moe)
    run = quick_jit(run)
    x = tokens()
    y, routing = run(values, x)
    other = np.where(REAL[..., None], x, 50 * tokens(1))
    again, routing_again = run(values, other)
    assert np.asarray(y)[REAL].tobytes() == np.asarray(again)[REAL].tobytes()
    jax.tree.map(np.testing.assert_array_equal, routing, routing_again)
    shifted, _ = run(values, np.roll(x, 2, 1), np.roll(SEGMENTS, 2, 1))
    np.testing.assert_allclose(np.asarray(y)[0, :9], shifted[0, 2:], rtol=0, atol=1e-6)
    short, _ = run(values, x[:1, :9], SEGMENTS[:1, :9])
    np.testing.assert_allclose(np.asarray(short)[0], np.asarray(y)[0, :9], rtol=0, atol=1e-6)
    nothing, routing = run(values, x, np.zeros_like(SEGMENTS))
    assert not np.asarray(nothing).any()
    assert not any(np.asarray(leaf).any() for leaf in routing)


def test_padding_only_has_finite_gradients(quick_jit):
    run, values = layer_of(MoeConfig(E, z_loss=0.1, gating="sigmoid"))

    def objective(values, x):
        y, routing = run(values, x, np.zeros_like(SEGMENTS))
        return y.sum() + routing.losses.sum()

    for leaf in jax.tree.leaves(quick_jit(jax.grad(objective, (0, 1)))(values, tokens())):
        assert not np.asarray(leaf).any()


def test_enough_capacity_is_none(quick_jit):
    """With room for all, nothing is dropped and the result is that of no limit; when decoding there
    never is a limit."""
    x = tokens()
    results = []
    for factor, decoding in ((0.0, False), (E / 2, False), (0.5, True)):
        run, values = layer_of(MoeConfig(E, capacity_factor=factor))
        y, routing = quick_jit(lambda v, x, run=run, d=decoding: run(v, x, decoding=d))(values, x)
        assert routing.dropped == 0
        results.append(np.asarray(y))
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=0, atol=1e-6)


def test_of_equal_scores_the_first_expert_wins(quick_jit):
    """With nothing to choose by, all tokens go to experts 0 and 1, and nothing is dropped; the loss
    of a balance so bad is still 1 where the chances are level."""
    run, values = layer_of(MoeConfig(E, balance_loss=1.0))
    values["router"]["kernel"] *= 0
    y, routing = quick_jit(run)(values, tokens())
    n = REAL.sum()
    assert routing.load.tolist() == [n, n, 0, 0, 0]
    assert routing.dropped == 0
    assert np.asarray(y)[REAL].all(-1).all()
    np.testing.assert_allclose(routing.losses, [1, 1, 0], rtol=1e-6)
    assert routing.entropy == pytest.approx(n * np.log(E), rel=1e-6)


@pytest.mark.parametrize("chosen", ["any", "one", "none"])
@pytest.mark.parametrize("dot", [_dot_of_blocks, _ragged_dot])
def test_grouped_products(quick_jit, dot, chosen):
    """Both implementations, values and gradients, with experts that get nothing and rows beyond."""
    rng = np.random.default_rng(0)
    n, k, f, block = 37, 2, 3, 4
    expert = rng.integers(0, E + 1, (n, k)) if chosen == "any" else np.full((n, k), E)
    if chosen == "one":
        expert[:, 0] = 3
    expert[expert == 1] = E
    slots, groups = slots_for_all(jnp.asarray(expert, jnp.int32), E, n * k, block)
    of_slot = np.append(expert.reshape(-1), E)[np.asarray(slots.pairs)]
    assert (np.asarray(slots.of_pair < len(of_slot)) == (expert < E)).all()
    by_block = np.repeat(np.asarray(groups.expert), block)
    assert (by_block[of_slot < E] == of_slot[of_slot < E]).all()
    assert groups.used * block == groups.sizes.sum()
    x = np.where(of_slot[:, None] < E, rng.normal(size=(len(of_slot), D)), 0).astype(np.float32)
    w = rng.normal(size=(E, D, f)).astype(np.float32)
    g = np.where(of_slot[:, None] < E, rng.normal(size=(len(of_slot), f)), 0).astype(np.float32)

    def with_gradients(x, w, g):
        y, back = jax.vjp(lambda x, w: dot(x, w, groups), x, w)
        return y, *back(g)

    y, dx, dw = quick_jit(with_gradients)(x, w, g)
    one_hot = of_slot[:, None] == np.arange(E)
    for got, expected in (
        (y, np.einsum("me,md,edf->mf", one_hot, x, w)),
        (dx, np.einsum("me,mf,edf->md", one_hot, g, w)),
        (dw, np.einsum("me,md,mf->edf", one_hot, x, g)),
    ):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
