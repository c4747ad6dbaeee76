"""Attention a block of queries at a time, forward and backward, with a softmax in fp32.

The backward pass keeps the log of the softmax's sum and computes scores again (Dao et al., arXiv
2205.14135). Keys after a block of queries, or before its window, are not computed.

Two forms of the same. Up to `UNROLLED` blocks, each block of queries meets all the keys it sees in
one product, written out: large products, which is what a CPU is fast at. Beyond, loops over blocks
of keys too, with a running softmax: a program of one size, and scores of one block at a time. These
also pass over pairs of blocks that have no document in common in any row: what they would add is
zero, so the results are the same to every bit. That takes documents to be contiguous: equal
segments other than 0 are one run in a row.

Shapes: B batch, G key/value heads, R query heads of each, T length, K head_dim; q [B, G, R, T, K],
k and v [B, G, T, K], segments [B, T].
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from shardlm.model.pairs import Softmax, gradients, times_keys
from shardlm.model.scores import MASKED, Rules, scores, visible
from shardlm.parallel.collectives import match_varying

UNROLLED = 8
"""Blocks up to which the loops are written out."""


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def blockwise(
    q: Float[Array, "B G R T K"],
    k: Float[Array, "B G T K"],
    v: Float[Array, "B G T K"],
    segments: Int[Array, "B T"],
    rules: Rules,
) -> Float[Array, "B G R T K"]:
    """Causal self-attention; T a multiple of the block when it has more than `UNROLLED` blocks.

    Tokens of a segment other than 0 must be contiguous in their row: of a document in two pieces,
    the later may miss the earlier.

    Returns one vector a query, in the dtype of `v`; zeros where a query sees nothing.
    """
    return _forward(q, k, v, segments, rules)[0]


def _forward(
    q: Array, k: Array, v: Array, segments: Array, rules: Rules
) -> tuple[Array, tuple[Array, ...]]:
    form = _unrolled_forward if q.shape[3] <= UNROLLED * rules.block else _looped_forward
    out, lse = form(q, k, v, segments, rules)
    return out, (q, k, v, segments, out, lse)


def _backward(
    rules: Rules, saved: tuple[Array, ...], d_out: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, segments, out, lse = saved
    # sum(weights · d_weights) of each query, which softmax's derivative needs.
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1)
    form = _unrolled_backward if q.shape[3] <= UNROLLED * rules.block else _looped_backward
    d_q, d_k, d_v = form(q, k, v, segments, lse, delta, d_out, rules)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


blockwise.defvjp(_forward, _backward)


# The written-out form.


def _spans(length: int, rules: Rules) -> Iterator[tuple[slice, slice]]:
    """Each block of queries and the keys it sees."""
    for start in range(0, length, rules.block):
        end = min(start + rules.block, length)
        first = max(0, start - rules.window + 1) if rules.window else 0
        yield slice(start, end), slice(first, end)


def _seen(segments: Array, queries: slice, keys: slice, window: int) -> Array:
    index = jnp.arange(segments.shape[1])
    seen = visible(index[queries], index[keys], segments[:, queries], segments[:, keys], window)
    # One mask for all heads: fused into what reads it, it would be computed again for each of them.
    return jax.lax.optimization_barrier(seen)[:, None, None]


def _unrolled_forward(
    q: Array, k: Array, v: Array, segments: Array, rules: Rules
) -> tuple[Array, Array]:
    outs, lses = [], []
    for queries, keys in _spans(q.shape[3], rules):
        seen = _seen(segments, queries, keys, rules.window)
        x = jnp.where(seen, scores(q[:, :, :, queries], k[:, :, keys], rules.softcap), MASKED)
        top = x.max(-1, keepdims=True)
        weights = jnp.exp(x - top)
        total = weights.sum(-1, keepdims=True)
        out = times_keys(weights.astype(v.dtype), v[:, :, keys]) / total
        some = top > MASKED / 2
        outs.append(jnp.where(some, out, 0.0).astype(v.dtype))
        # Where nothing is seen, any sum above MASKED makes the weights zero in the backward pass.
        lses.append(jnp.where(some, top + jnp.log(total), 0.0)[..., 0])
    return jnp.concatenate(outs, 3), jnp.concatenate(lses, 3)


def _unrolled_backward(
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    lse: Array,
    delta: Array,
    d_out: Array,
    rules: Rules,
) -> tuple[Array, Array, Array]:
    d_q = []
    d_k = match_varying(jnp.zeros(k.shape, jnp.float32), k)
    d_v = match_varying(jnp.zeros(v.shape, jnp.float32), v)
    for queries, keys in _spans(q.shape[3], rules):
        d_q_part, d_k_part, d_v_part = gradients(
            q[:, :, :, queries],
            k[:, :, keys],
            v[:, :, keys],
            lse[:, :, :, queries],
            delta[:, :, :, queries],
            d_out[:, :, :, queries],
            _seen(segments, queries, keys, rules.window),
            rules,
        )
        d_q.append(d_q_part)
        d_k = d_k.at[:, :, keys].add(d_k_part)
        d_v = d_v.at[:, :, keys].add(d_v_part)
    return jnp.concatenate(d_q, 3), d_k, d_v


# The looped form.


class _Blocks(NamedTuple):
    """Operands cut into blocks along a new leading dimension."""

    q: Array  # [N, B, G, R, block, K]
    k: Array  # [N, B, G, block, K]
    v: Array
    segments: Array  # [N, B, block]

    def seen(self, i: Array, j: Array, rules: Rules) -> Array:
        """Mask of query block i against key block j."""
        offsets = jnp.arange(rules.block)
        return visible(
            i * rules.block + offsets,
            j * rules.block + offsets,
            self.segments[i],
            self.segments[j],
            rules.window,
        )[:, None, None]


def _cut_operands(q: Array, k: Array, v: Array, segments: Array, block: int) -> _Blocks:
    return _Blocks(
        _cut(q, 3, block), _cut(k, 2, block), _cut(v, 2, block), _cut(segments, 1, block)
    )


def _cut(x: Array, dim: int, block: int) -> Array:
    shape = (*x.shape[:dim], x.shape[dim] // block, block, *x.shape[dim + 1 :])
    return jnp.moveaxis(x.reshape(shape), dim, 0)


def _join(x: Array, dim: int) -> Array:
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])


def _first_key_blocks(segments: Array, rules: Rules) -> Array:
    """First block of keys that each block of queries sees in any row: int32 [N]."""
    index = jnp.arange(segments.shape[1])
    new = jnp.diff(segments, axis=1, prepend=-1) != 0
    begin = jax.lax.cummax(jnp.where(new | (segments == 0), index, 0), 1)
    # Begins do not decrease along a row, so that of a block's first query is the least in it.
    first = begin[:, :: rules.block].min(0)
    if rules.window:
        first = jnp.maximum(first, index[:: rules.block] - rules.window + 1)
    return first // rules.block


def _last_query_blocks(segments: Array, rules: Rules) -> Array:
    """One past the last block of queries that sees each block of keys in any row: int32 [N]."""
    length = segments.shape[1]
    index = jnp.arange(length)
    new = jnp.diff(segments, axis=1, append=-1) != 0
    end = jax.lax.cummin(jnp.where(new | (segments == 0), index, length), 1, reverse=True)
    # Of a block's last key: the place of the last query that sees any key of the block.
    last = end[:, rules.block - 1 :: rules.block].max(0)
    if rules.window:
        last = jnp.minimum(last, index[rules.block - 1 :: rules.block] + rules.window - 1)
    return last // rules.block + 1


def _looped_forward(
    q: Array, k: Array, v: Array, segments: Array, rules: Rules
) -> tuple[Array, Array]:
    x = _cut_operands(q, k, v, segments, rules.block)
    first = _first_key_blocks(segments, rules)

    def queries(i: Array) -> tuple[Array, Array]:
        def keys(j: Array, softmax: Softmax) -> Softmax:
            return softmax.met(x.q[i], x.k[j], x.v[j], x.seen(i, j, rules), rules)

        start = Softmax.of_nothing(x.q[i])
        return jax.lax.fori_loop(first[i], i + 1, keys, start).result(v.dtype)

    out, lse = jax.lax.map(queries, jnp.arange(x.q.shape[0]))
    return _join(out, 3), _join(lse, 3)


def _looped_backward(
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    lse: Array,
    delta: Array,
    d_out: Array,
    rules: Rules,
) -> tuple[Array, Array, Array]:
    x = _cut_operands(q, k, v, segments, rules.block)
    last = _last_query_blocks(segments, rules)
    lse, delta, d_out = (_cut(a, 3, rules.block) for a in (lse, delta, d_out))

    def keys(d_q: Array, j: Array) -> tuple[Array, tuple[Array, Array]]:
        def queries(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_q, d_k, d_v = carry
            d_q_part, d_k_part, d_v_part = gradients(
                x.q[i],
                x.k[j],
                x.v[j],
                lse[i],
                delta[i],
                d_out[i],
                x.seen(i, j, rules),
                rules,
            )
            return d_q.at[i].add(d_q_part), d_k + d_k_part, d_v + d_v_part

        zero = match_varying(jnp.zeros(x.k.shape[1:], jnp.float32), q)
        d_q, d_k, d_v = jax.lax.fori_loop(j, last[j], queries, (d_q, zero, zero))
        return d_q, (d_k, d_v)

    start = match_varying(jnp.zeros(x.q.shape, jnp.float32), q)
    d_q, (d_k, d_v) = jax.lax.scan(keys, start, jnp.arange(x.q.shape[0]))
    return _join(d_q, 3), _join(d_k, 2), _join(d_v, 2)
