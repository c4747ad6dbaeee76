"""Attention of rows that are split over `context`: keys come to the queries.

`ring`: keys and values go round, a device's at a time, while those that are there are attended to
(Liu et al., arXiv 2310.01889). `gather`: all of them are brought together first; fewer, larger
messages, and memory for the keys of a whole row.

Scores exist a block at a time, forward and backward. Partial results are fp32: the softmax is
carried on from one device's keys to the next, not merged afterwards. Pairs of blocks in which no
query sees a key (later ones, outside the window, of other documents) are not computed, so that the
work of a device is that of its queries.

Shapes: B batch, G key/value heads, R query heads of each, T length of a row, t = T/context tokens
of a device, K head_dim; N blocks of a device, b tokens of each.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from shardlm.model.pairs import Softmax, gradients
from shardlm.model.scores import Rules, visible
from shardlm.parallel.collectives import Parallel, match_varying


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def split_attention(
    q: Float[Array, "B G R t K"],
    k: Float[Array, "B G t K"],
    v: Float[Array, "B G t K"],
    segments: Int[Array, "B T"],
    rules: Rules,
    par: Parallel,
) -> Float[Array, "B G R t K"]:
    """Causal attention of this device's queries to the keys of the whole row.

    Args:
      q, k, v: of this device's tokens.
      segments: the document of every token of the row, contiguous; 0 is padding.

    Returns one vector a query, in the dtype of `v`; zeros where a query sees nothing.
    """
    return _forward(q, k, v, segments, rules, par)[0]


class _Blocks(NamedTuple):
    """Blocks of a device."""

    start: Array  # int32 [N], place in the row of the first token.
    segments: Array  # [N, B, b], 0 where a chunk ends before its last block does.


class _Geometry:
    """How rows are cut: into chunks of `chunk` tokens, each into `blocks` of `block`."""

    def __init__(self, segments: Array, rules: Rules, par: Parallel) -> None:
        self.rules, self.chunks = rules, par.chunks
        self.chunk = segments.shape[1] // self.chunks.size
        self.block = min(rules.block, self.chunk)
        self.blocks = -(-self.chunk // self.block)
        self._segments = segments
        # [all chunks, blocks, B, b]
        cut = self.cut(segments, 1, self.chunks.size)
        self._of_chunks = cut.reshape(self.chunks.size, self.blocks, *cut.shape[1:])

    def cut(self, x: Array, dim: int, chunks: int | None = None) -> Array:
        """So many chunks of tokens (default: a device's), along `dim`, as blocks along a new first
        dim; the last block of a chunk is filled up with zeros."""
        chunks = chunks or self.chunks.shape[1]
        x = x.reshape(*x.shape[:dim], chunks, self.chunk, *x.shape[dim + 1 :])
        pad = self.blocks * self.block - self.chunk
        x = jnp.pad(x, [(0, pad if i == dim + 1 else 0) for i in range(x.ndim)])
        x = x.reshape(*x.shape[:dim], chunks * self.blocks, self.block, *x.shape[dim + 2 :])
        return jnp.moveaxis(x, dim, 0)

    def join(self, x: Array, dim: int) -> Array:
        """The tokens that `cut` has cut."""
        x = jnp.moveaxis(x, 0, dim)
        shape = x.shape
        x = x.reshape(*shape[:dim], -1, self.blocks * self.block, *shape[dim + 2 :])
        x = jax.lax.slice_in_dim(x, 0, self.chunk, axis=dim + 1)
        return x.reshape(*shape[:dim], -1, *shape[dim + 2 :])

    def of(self, device: Array) -> _Blocks:
        """The blocks of a device."""
        numbers = jnp.asarray(self.chunks)[device]
        offsets = jnp.arange(self.blocks) * self.block
        segments = self._of_chunks[numbers]
        start = numbers[:, None] * self.chunk + offsets
        return _Blocks(start.reshape(-1), segments.reshape(-1, *segments.shape[2:]))

    def seen_by(self, queries: _Blocks) -> tuple[Array, Array]:
        """Places of the first and the last key that any query of a block sees, in any row: int32
        [N] each."""
        index = jnp.arange(self._segments.shape[1])
        new = jnp.diff(self._segments, axis=1, prepend=-1) != 0
        begin = jax.lax.cummax(jnp.where(new | (self._segments == 0), index, 0), 1)
        # Begins do not decrease along a row, so that of a block's first query is the least in it.
        first = begin[:, queries.start].min(0)
        if self.rules.window:
            first = jnp.maximum(first, queries.start - self.rules.window + 1)
        end = queries.start // self.chunk * self.chunk + self.chunk
        return first, jnp.minimum(queries.start + self.block, end) - 1

    def over(self, keys: _Blocks, first: Array, last: Array, meet: Any, carry: Any) -> Any:
        """What `meet(j, carry)` makes of the carry over the blocks j of a device's keys that have
        keys from `first` to `last`."""
        # Of each chunk, those from a to b; one loop for all chunks compiles once.
        start = keys.start[:: self.blocks]
        a = jnp.clip((first - start) // self.block, 0, self.blocks)
        b = jnp.clip((last - start) // self.block + 1, 0, self.blocks)
        a, b = (x + jnp.arange(len(start)) * self.blocks for x in (a, b))
        if len(start) == 1:
            return jax.lax.fori_loop(a[0], b[0], meet, carry)
        early = b[0] - a[0]

        def one(i: Array, carry: Any) -> Any:
            return meet(jnp.where(i < early, a[0] + i, a[1] + i - early), carry)

        return jax.lax.fori_loop(0, early + b[1] - a[1], one, carry)

    def seen(self, start: Array, segments: Array, keys: _Blocks, j: Array) -> Array:
        """Mask of a block of queries and block j of the keys."""
        offsets = jnp.arange(self.block)
        return visible(
            start + offsets,
            keys.start[j] + offsets,
            segments,
            keys.segments[j],
            self.rules.window,
        )[:, None, None]


def _forward(
    q: Array, k: Array, v: Array, segments: Array, rules: Rules, par: Parallel
) -> tuple[Array, tuple[Array, ...]]:
    rows = _Geometry(segments, rules, par)
    me = par.index("context")
    mine = rows.of(me)
    first, last = rows.seen_by(mine)
    queries = rows.cut(q, 3)

    def meet(softmax: Softmax, keys: tuple[Array, Array], device: Array) -> Softmax:
        theirs = rows.of(device)

        def block(part: Any) -> Softmax:
            softmax, q, start, segments, first, last = part

            def key(j: Array, softmax: Softmax) -> Softmax:
                seen = rows.seen(start, segments, theirs, j)
                return softmax.met(q, keys[0][j], keys[1][j], seen, rules)

            return rows.over(theirs, first, last, key, softmax)

        return jax.lax.map(block, (softmax, queries, *mine, first, last))

    there = rows.cut(k, 2), rows.cut(v, 2)
    softmax = Softmax.of_nothing(queries)
    if par.context_comm == "gather":
        everything = par.gather_context(there)

        def one(softmax: Softmax, device: Array) -> tuple[Softmax, None]:
            return meet(softmax, _of(everything, device), device), None

        softmax, _ = jax.lax.scan(one, softmax, jnp.arange(len(rows.chunks)))
    else:

        def hop(state: Any, hops: Array) -> tuple[Any, None]:
            softmax, there = state
            # Before the keys that are here are attended to, so that the next are under way.
            coming = par.shift_context(there)
            return (meet(softmax, there, (me - hops) % len(rows.chunks)), coming), None

        n = len(rows.chunks) - 1
        (softmax, there), _ = jax.lax.scan(hop, (softmax, there), jnp.arange(n))
        softmax = meet(softmax, there, (me - n) % len(rows.chunks))
    out, lse = softmax.result(v.dtype)
    out, lse = rows.join(out, 3), rows.join(lse, 3)
    return out, (q, k, v, segments, out, lse)


def _backward(
    rules: Rules, par: Parallel, saved: tuple[Array, ...], d_out: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, segments, out, lse = saved
    rows = _Geometry(segments, rules, par)
    me = par.index("context")
    mine = rows.of(me)
    first, last = rows.seen_by(mine)
    # sum(weights · d_weights) of each query, which softmax's derivative needs.
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1)
    queries = tuple(rows.cut(x, 3) for x in (q, lse, delta, d_out))

    def meet(d_q: Array, keys: tuple[Array, Array], device: Array) -> tuple[Array, Any]:
        theirs = rows.of(device)

        def block(d_keys: Any, part: Any) -> tuple[Any, Array]:
            d_q, (q, lse, delta, d_out), start, segments, first, last = part

            def key(j: Array, carry: Any) -> Any:
                d_q, d_k, d_v = carry
                seen = rows.seen(start, segments, theirs, j)
                d_q_part, d_k_part, d_v_part = gradients(
                    q, keys[0][j], keys[1][j], lse, delta, d_out, seen, rules
                )
                return d_q + d_q_part, d_k.at[j].add(d_k_part), d_v.at[j].add(d_v_part)

            d_q, *d_keys = rows.over(theirs, first, last, key, (d_q, *d_keys))
            return tuple(d_keys), d_q

        zero = match_varying(jnp.zeros(keys[0].shape, jnp.float32), q)
        parts = (d_q, queries, *mine, first, last)
        d_keys, d_q = jax.lax.scan(block, (zero, zero), parts)
        return d_q, d_keys

    there = rows.cut(k, 2), rows.cut(v, 2)
    d_q = match_varying(jnp.zeros(queries[0].shape, jnp.float32), q)
    n = len(rows.chunks)
    if par.context_comm == "gather":
        everything = par.gather_context(there)

        def one(d_q: Array, device: Array) -> tuple[Array, Any]:
            return meet(d_q, _of(everything, device), device)

        d_q, d_keys = jax.lax.scan(one, d_q, jnp.arange(n))
        d_keys = par.scatter_context(d_keys)
    else:
        # The gradients of keys go round with them, one hop behind, and end where they belong.
        coming = par.shift_context(there)
        d_q, at_home = meet(d_q, there, me)
        there, coming = coming, par.shift_context(coming) if n > 2 else coming
        d_q, d_keys = meet(d_q, there, (me - 1) % n)

        def hop(state: Any, hops: Array) -> tuple[Any, None]:
            d_q, there, d_before = state
            coming, d_before = par.shift_context(there), par.shift_context(d_before)
            d_q, d_part = meet(d_q, there, (me - hops) % n)
            return (d_q, coming, jax.tree.map(jnp.add, d_before, d_part)), None

        if n > 2:
            (d_q, there, d_keys), _ = jax.lax.scan(hop, (d_q, coming, d_keys), jnp.arange(2, n - 1))
            d_before = par.shift_context(d_keys)
            d_q, d_part = meet(d_q, there, (me - (n - 1)) % n)
            d_keys = jax.tree.map(jnp.add, d_before, d_part)
        d_keys = jax.tree.map(jnp.add, par.shift_context(d_keys), at_home)
    d_k, d_v = (rows.join(x, 2) for x in d_keys)
    return rows.join(d_q, 3).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


split_attention.defvjp(_forward, _backward)


def _of(everything: Any, device: Array) -> Any:
    return jax.tree.map(lambda x: x[device], everything)
