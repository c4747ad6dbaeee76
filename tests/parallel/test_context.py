"""Rows split over `context`: attention against float64, and what a device has to do."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from shardlm.mesh import AxisRules
from shardlm.model.attention import attend_over_context
from shardlm.model.scores import Rules
from shardlm.parallel.collectives import Parallel
from shardlm.parallel.sequence import chunks_of, row_multiple

B, H, K = 2, 8, 4
FORMS = ("ring", "gather", "ulysses")


def dense(q, k, v, segments, weigh, rules):
    """Outputs, and gradients of their sum weighted by `weigh`, in float64: all scores at once."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, repeats, 2) for x in (k, v))
    back = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])
    seen = (back >= 0) & ((back < rules.window) if rules.window else True)
    seen = seen & (segments[:, :, None] == segments[:, None]) & (segments != 0)[:, None]
    raw = np.einsum("bthk,bshk->bhts", q, k) / np.sqrt(K)
    x = rules.softcap * np.tanh(raw / rules.softcap) if rules.softcap else raw
    x = np.where(seen[:, None], x, -np.inf)
    weights = np.exp(x - np.maximum(x.max(-1, keepdims=True), -1e300))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    out = np.einsum("bhts,bshk->bthk", weights, v)
    d_weights = np.einsum("bthk,bshk->bhts", weigh, v)
    d_x = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    if rules.softcap:
        d_x *= 1 - np.tanh(raw / rules.softcap) ** 2
    d_x /= np.sqrt(K)
    d_k, d_v = np.einsum("bhts,bthk->bshk", d_x, q), np.einsum("bhts,bthk->bshk", weights, weigh)
    d_k, d_v = (x.reshape(*x.shape[:2], -1, repeats, K).sum(3) for x in (d_k, d_v))
    return out, np.einsum("bhts,bshk->bthk", d_x, k), d_k, d_v


@functools.cache
def compiled(n, comm, rules, quick):
    """A function of whole q, k, v, segments and weights of the outputs, in the order of the row:
    the outputs, and the gradients of their weighted sum."""
    mesh = Mesh(np.array(jax.devices()[:n]), ("context",))
    par = Parallel(AxisRules({"context": n}), context_comm=comm)

    def local(q, k, v, segments, weigh):
        q, k, v, weigh = (par.row_part(x) for x in (q, k, v, weigh))

        def total(q, k, v):
            out = attend_over_context(q, k, v, segments, rules, "blockwise", par)
            return (out * weigh).sum(), out

        gradients, out = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return out, *gradients

    split = PartitionSpec(None, "context")
    run = jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec(), out_specs=(split,) * 4)
    run = jax.jit(run, compiler_options=dict(quick))
    order = chunks_of(n, comm).reshape(-1)

    def in_order(x):
        chunks = np.split(np.asarray(x), len(order), axis=1)
        return np.concatenate([chunks[i] for i in np.argsort(order)], axis=1)

    return lambda *arrays: tuple(map(in_order, run(*arrays)))


def inputs(length, kv_heads=8):
    rng = np.random.default_rng(0)
    q, weigh = rng.normal(0, 1, (2, B, length, H, K))
    k, v = rng.normal(0, 1, (2, B, length, kv_heads, K))
    # Two documents and the end of the first row empty; the second row one document.
    segments = np.ones((B, length), np.int32)
    segments[0, length // 3 :], segments[0, -length // 5 :] = 2, 0
    return q, k, v, segments, weigh


def errors(found, expected):
    """Of each array, relative to its largest element."""
    return [np.abs(f - e).max() / np.abs(e).max() for f, e in zip(found, expected, strict=True)]


@pytest.fixture
def run(tiny):
    quick = tuple(tiny.quick.items())

    def run(arrays, n, comm, rules=Rules(block=4)):
        q, k, v, segments, weigh = arrays
        q, k, v, weigh = (x.astype(np.float32) for x in (q, k, v, weigh))
        return compiled(n, comm, rules, quick)(q, k, v, segments, weigh)

    return run


@pytest.mark.parametrize("comm", FORMS)
@pytest.mark.parametrize(
    "rules, kv_heads",
    [
        (Rules(block=4), 8),
        (Rules(block=4, window=7), 8),
        (Rules(block=64, softcap=1.5), 8),
        (Rules(block=3), 4),
        (Rules(block=4), 2),
    ],
    ids=["plain", "window", "softcap", "groups", "fewer than devices"],
)
def test_outputs_and_gradients_are_those_of_dense_attention(comm, rules, kv_heads, run):
    arrays = inputs(48, kv_heads=kv_heads)
    assert max(errors(run(arrays, 4, comm, rules), dense(*arrays, rules))) < 1e-5


@pytest.mark.parametrize("comm", FORMS)
def test_the_error_does_not_grow_with_the_devices(comm, run):
    arrays = inputs(64)
    expected = dense(*arrays, Rules())
    found = {n: max(errors(run(arrays, n, comm), expected)) for n in (2, 4, 8)}
    assert max(found.values()) < 1e-6, found


@pytest.mark.parametrize("comm", FORMS)
def test_sums_of_very_different_size_and_blocks_of_nothing(comm, run):
    """Scores of one device's keys are 200 above those of the others, which must vanish and not
    overflow; and a device has padding only."""
    q, k, v, segments, weigh = inputs(32)
    q[..., 0], k[..., 0] = 20.0, 0.0
    k[:, 8:12, :, 0] = 20.0  # 20 · 20 / sqrt(4)
    segments[1, 16:] = 0
    arrays = q, k, v, segments, weigh
    found, expected = run(arrays, 4, comm), dense(*arrays, Rules())
    assert all(np.isfinite(x).all() for x in found)
    # A score of 200 is rounded by up to 7.6e-6, which is the relative error of its weight.
    assert max(errors(found, expected)) < 3e-5
    assert not found[0][1, 16:].any()


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("comm", FORMS)
def test_every_token_has_one_device_and_its_place(comm, n):
    sizes = {"context": n, "model": 2}
    length = 2 * row_multiple(sizes, comm)
    par = Parallel(AxisRules(sizes), context_comm=comm)
    devices = np.array(jax.devices()[: 2 * n]).reshape(n, 2)

    def local(row):
        tokens = par.row_part(row)
        return tokens, par.places(tokens.shape[1] // 2)[None]

    split = PartitionSpec(None, "context"), PartitionSpec(None, ("context", "model"))
    mesh = Mesh(devices, ("context", "model"))
    row = np.arange(length, dtype=np.int32)[None]
    tokens, places = jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec(), out_specs=split)(row)
    assert sorted(np.asarray(tokens)[0]) == list(range(length))
    assert np.array_equal(tokens, places)


def test_the_order_of_a_ring_is_level():
    """Pairs of blocks of 16 tokens that a device computes, of a causal row of 4,096 over 8."""

    def work(chunks):
        size = 4096 // 16 // chunks.size
        return np.array([sum(i * size * size + size * (size + 1) // 2 for i in c) for c in chunks])

    balanced, plain = work(chunks_of(8, "ring")), work(chunks_of(8, "ulysses"))
    assert balanced.sum() == plain.sum() == 256 * 257 // 2
    assert balanced.max() / balanced.mean() < 1.05
    assert plain.max() / plain.mean() > 1.8  # What the order is for.
