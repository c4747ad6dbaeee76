"""Attention in loops over blocks passes over pairs of blocks without a document in common."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.model import blockwise
from shardlm.model.scores import Rules, visible

B, G, R, T, K, BLOCK = 3, 2, 3, 60, 4, 4
BLOCKS = T // BLOCK
assert BLOCKS > blockwise.UNROLLED
RULES = [Rules(block=BLOCK), Rules(5, 2.0, BLOCK), Rules(17, 0.0, BLOCK)]


def packing(seed):
    """Documents of 1 token to a whole row; padding at the end, and in some rows between them."""
    rng = np.random.default_rng(seed)
    segments = np.zeros((B, T), np.int32)
    for row in segments:
        place = number = 0
        while place < T and rng.random() > 0.05:
            size = min(int(np.exp(rng.uniform(0, np.log(T)))), T - place)
            number += 1
            row[place : place + size] = number if rng.random() < 0.9 else 0
            place += size
    if seed % 3 == 0:
        segments[seed % B] = 0
    return segments


def seen_blocks(segments, window):
    """Which block of keys each block of queries sees in any row, from the rule for tokens."""
    index = jnp.arange(T)
    seen = np.asarray(visible(index, index, segments, segments, window))
    return seen.reshape(B, BLOCKS, BLOCK, BLOCKS, BLOCK).any((0, 2, 4))


@pytest.mark.parametrize("rules", RULES, ids=lambda r: f"window {r.window}")
def test_no_pair_of_blocks_is_lost_or_computed_in_vain(rules):
    """From the first block that is seen to the last, or to itself where there is only padding."""
    skipped = 0
    for seed in range(60):
        segments = jnp.asarray(packing(seed))
        seen = seen_blocks(segments, rules.window) | np.eye(BLOCKS, dtype=bool)
        first = np.asarray(blockwise._first_key_blocks(segments, rules))
        last = np.asarray(blockwise._last_query_blocks(segments, rules))
        np.testing.assert_array_equal(first, seen.argmax(1))
        np.testing.assert_array_equal(last, BLOCKS - seen[::-1].argmax(0))
        skipped += first.sum()
    assert skipped > 0


def run(rules, q, k, v, segments, d_out):
    """Output and gradients."""
    out, back = jax.vjp(lambda *x: blockwise.blockwise(*x, segments, rules), q, k, v)
    return out, *back(d_out)


def operands(seed, dtype):
    rng = np.random.default_rng(seed)
    shapes = [(B, G, R, T, K), (B, G, T, K), (B, G, T, K), (B, G, R, T, K)]
    return [jnp.asarray(rng.normal(0, 1.5, shape), dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rules", RULES, ids=lambda r: f"window {r.window}")
def test_results_are_those_of_all_blocks_in_every_bit(monkeypatch, rules, dtype):
    skipping = jax.jit(functools.partial(run, rules))
    index = jnp.arange(BLOCKS)
    with monkeypatch.context() as patch:
        patch.setattr(blockwise, "_first_key_blocks", lambda *_: 0 * index)
        patch.setattr(blockwise, "_last_query_blocks", lambda *_: 0 * index + BLOCKS)
        q, k, v, d_out = operands(0, dtype)
        segments = jnp.asarray(packing(0))
        every = jax.jit(lambda *x: run(rules, *x)).lower(q, k, v, segments, d_out).compile()
    for seed in range(12):
        q, k, v, d_out = operands(seed, dtype)
        segments = jnp.asarray(packing(seed))
        got = skipping(q, k, v, segments, d_out)
        expected = every(q, k, v, segments, d_out)
        for name, a, e in zip(("out", "d_q", "d_k", "d_v"), got, expected, strict=True):
            assert a.dtype == e.dtype
            assert np.asarray(a).tobytes() == np.asarray(e).tobytes(), (seed, name)


def test_blocks_of_other_documents_are_not_read():
    """NaN in one document: a block that were read would give NaN, since 0 · NaN is one."""
    rules = RULES[0]
    segments = jnp.asarray(np.repeat([[1, 2, 3]], B, 0).repeat(T // 3, 1))
    middle = slice(T // 3, 2 * T // 3)
    assert T // 3 % BLOCK == 0
    q, k, v, d_out = (x.at[..., middle, :].set(jnp.nan) for x in operands(1, "float32"))
    for x in jax.jit(functools.partial(run, rules))(q, k, v, segments, d_out):
        bad = np.isnan(x).any((*range(x.ndim - 2), x.ndim - 1))
        np.testing.assert_array_equal(np.flatnonzero(bad), np.arange(T)[middle])
