"""What a block of queries and a block of keys have to do with each other, forward and backward.

Shapes: B batch, G key/value heads, R query heads of each, T queries, S keys, K head_dim; q
[B, G, R, T, K], k and v [B, G, S, K].
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from shardlm.model.scores import MASKED, Rules, products, scores, softcap_slope
from shardlm.parallel.collectives import match_varying

_TINY = 1e-30


class Softmax(NamedTuple):
    """A softmax over the keys that were met so far, fp32 (Milakov and Gimelshein, arXiv
    1805.02867)."""

    out: Array
    """Values, weighted and summed but not divided: [..., T, K]."""
    top: Array
    """Largest score: [..., T]."""
    total: Array
    """Sum of the weights: [..., T]."""

    @classmethod
    def of_nothing(cls, q: Array) -> "Softmax":
        """For queries [..., T, K] that have met no key."""
        zero = match_varying(jnp.zeros(q.shape, jnp.float32), q)
        return cls(zero, zero[..., 0] + MASKED, zero[..., 0])

    def met(self, q: Array, k: Array, v: Array, seen: Array, rules: Rules) -> "Softmax":
        """After another block of keys, of which queries see `seen`."""
        x = jnp.where(seen, scores(q, k, rules.softcap), MASKED)
        top = jnp.maximum(self.top, x.max(-1))
        weights = jnp.where(seen, jnp.exp(x - top[..., None]), 0.0)
        keep = jnp.exp(self.top - top)
        part = times_keys(weights.astype(v.dtype), v)
        return Softmax(self.out * keep[..., None] + part, top, self.total * keep + weights.sum(-1))

    def result(self, dtype: jnp.dtype) -> tuple[Array, Array]:
        """The attended values, and the log of the sum of the weights; zeros where nothing was
        seen, for which any sum above `MASKED` makes the weights zero in the backward pass."""
        total = jnp.maximum(self.total, _TINY)
        lse = jnp.where(self.top > MASKED / 2, self.top + jnp.log(total), 0.0)
        return (self.out / total[..., None]).astype(dtype), lse


def times_keys(x: Array, k: Array) -> Array:
    """fp32 [B, G, R, T, K] of [B, G, R, T, S] and [B, G, S, K]."""
    b, g, r, t, s = x.shape
    y = jnp.einsum(
        "bts,bsk->btk",
        x.reshape(b * g, r * t, s),
        k.reshape(b * g, s, -1),
        preferred_element_type=jnp.float32,
    )
    return y.reshape(b, g, r, t, -1)


def over_queries(x: Array, q: Array) -> Array:
    """fp32 [B, G, S, K] of [B, G, R, T, S] and [B, G, R, T, K], summed over R and T."""
    b, g, r, t, s = x.shape
    y = jnp.einsum(
        "bts,btk->bsk",
        x.reshape(b * g, r * t, s),
        q.reshape(b * g, r * t, -1),
        preferred_element_type=jnp.float32,
    )
    return y.reshape(b, g, s, -1)


def gradients(
    q: Array, k: Array, v: Array, lse: Array, delta: Array, d_out: Array, seen: Array, rules: Rules
) -> tuple[Array, Array, Array]:
    """fp32 gradients of the queries and keys of a pair of blocks."""
    x = scores(q, k, rules.softcap)
    weights = jnp.exp(jnp.where(seen, x, MASKED) - lse[..., None])
    d_x = weights * (products(d_out, v) - delta[..., None])
    if rules.softcap:
        d_x *= softcap_slope(x, rules.softcap)
    d_x = (d_x * q.shape[-1] ** -0.5).astype(q.dtype)
    return times_keys(d_x, k), over_queries(d_x, q), over_queries(weights.astype(v.dtype), d_out)
