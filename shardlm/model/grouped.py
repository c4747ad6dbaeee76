"""Tokens sorted by expert: their places, the way there and back, and products of each group.

A *pair* is a token and one of the experts that it goes to, number token · k + choice. A *slot* is
a place in the rows that the experts work on. Every pair has a slot or none, every slot a pair or
none; with both directions at hand no gradient needs a scatter of rows.

Shapes: N tokens, k choices, M slots, E experts, D and F widths.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from shardlm.parallel.collectives import Parallel, match_varying


class Slots(NamedTuple):
    """Where pairs are. A number beyond the last means none."""

    of_pair: Array
    """[N, k], slot of each pair; M: it has none."""
    pairs: Array
    """[M], pair in each slot; N·k: it is empty."""


class Groups(NamedTuple):
    """Which slots belong to which expert: whole blocks of slots."""

    expert: Array
    """[M/block], expert of each block."""
    used: Array
    """Blocks before the empty rest, int32."""
    sizes: Array
    """[E], slots of each expert."""


def rank_in_expert(expert: Int[Array, "*rows P"], experts: int) -> Int[Array, "*rows P"]:
    """How many pairs before this one, in its row, go to the same expert; -1 for those that go to
    none (`expert` is `experts`)."""
    chosen = expert[..., None] == jnp.arange(experts)
    return jnp.where(chosen, jnp.cumsum(chosen, -2, dtype=jnp.int32), 0).sum(-1) - 1


def capacities(length: int, experts: int, top_k: int, factor: float) -> np.ndarray:
    """Pairs that an expert takes of a row with n tokens, for n from 0 to `length`; int32."""
    # Less a little: a product such as 1.1 · 10 must not be rounded up for its last bit.
    return np.ceil(factor * top_k * np.arange(length + 1) / experts - 1e-6).astype(np.int32)


def slots_within(
    expert: Int[Array, "B t k"],
    tokens: Int[Array, "B"],
    experts: int,
    factor: float,
    par: Parallel,
) -> Slots:
    """Slots [E, B, C] with a capacity of each expert in each row.

    Those that come first have a place: in the order of the row, a token's first choice before its
    second. Neither the count nor the order depends on other rows, on padding, or on the mesh.

    Args:
      expert: that each pair of this device's tokens goes to, best choice first; `experts`: to none
        (padding).
      tokens: of each whole row, without padding.
      experts: E.
      factor: see `MoeConfig.capacity_factor`.
    """
    rows, length, k = expert.shape
    limits = capacities(length * par.size("context"), experts, k, factor)
    # All that an expert takes of a row may be of this device's part.
    most = min(int(limits[-1]), length)
    pairs = expert.reshape(rows, length * k)
    rank = rank_in_expert(pairs, experts)
    earlier = _of_other_devices(pairs, experts, par)
    kept = (rank >= 0) & (rank + earlier < jnp.asarray(limits)[tokens][:, None])
    slot = (pairs * rows + jnp.arange(rows)[:, None]) * most + rank
    return _both_ways(jnp.where(kept, slot, experts * rows * most), experts * rows * most, k)


def _of_other_devices(pairs: Array, experts: int, par: Parallel) -> Array | int:
    """Pairs that come before each of [B, P] in its row, go to its expert, and are of other
    devices of `context`."""
    if par.size("context") == 1:
        return 0
    chunked = pairs.reshape(pairs.shape[0], par.chunks.shape[1], -1)
    counts = (chunked[..., None] == jnp.arange(experts)).sum(2, dtype=jnp.int32)
    others = par.sum_earlier(counts) - (jnp.cumsum(counts, 1) - counts)
    return jnp.take_along_axis(others, jnp.minimum(chunked, experts - 1), 2).reshape(pairs.shape)


def slots_for_all(
    expert: Int[Array, "N k"], experts: int, most: int, block: int
) -> tuple[Slots, Groups]:
    """Slots for every pair that goes to one of `experts`, each group from the start of a block.

    Args:
      expert: that each pair goes to; `experts`: to none here.
      experts: E.
      most: of those pairs.
      block: slots of a block.
    """
    k = expert.shape[1]
    pairs = expert.reshape(-1)
    blocks = -(-most // block) + experts
    counts = (pairs[:, None] == jnp.arange(experts)).sum(0, dtype=jnp.int32)
    each = -(-counts // block)
    ends = jnp.cumsum(each)
    start = jnp.append((ends - each) * block, blocks * block)
    rank = rank_in_expert(pairs, experts)
    slot = jnp.where(rank >= 0, start[pairs] + rank, blocks * block)
    owner = jnp.searchsorted(ends, jnp.arange(blocks), side="right")
    groups = Groups(jnp.minimum(owner, experts - 1).astype(jnp.int32), ends[-1], each * block)
    return _both_ways(slot, blocks * block, k), groups


def _both_ways(slot: Array, slots: int, k: int) -> Slots:
    slot = slot.reshape(-1)
    n = slot.shape[0]
    empty = match_varying(jnp.full(slots, n, jnp.int32), slot)
    pairs = empty.at[slot].set(jnp.arange(n, dtype=jnp.int32), mode="drop", unique_indices=True)
    return Slots(slot.reshape(-1, k), pairs)


def _rows(x: Array, index: Array) -> Array:
    """Rows of x by number; zeros for numbers beyond the last."""
    return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def spread(x: Float[Array, "N D"], slots: Slots) -> Float[Array, "M D"]:
    """The token of each slot; zeros in empty ones."""
    return _rows(x, slots.pairs // slots.of_pair.shape[1])


def _spread_forward(x: Array, slots: Slots) -> tuple[Array, Slots]:
    return spread(x, slots), slots


def _spread_backward(slots: Slots, g: Array) -> tuple[Array, None]:
    # One choice at a time: their rows need not exist all at once.
    sums = jnp.zeros((), jnp.float32)
    for j in range(slots.of_pair.shape[1]):
        sums = sums + _rows(g, slots.of_pair[:, j])
    return sums.astype(g.dtype), None


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def collect(y: Float[Array, "M D"], slots: Slots) -> Float[Array, "N k D"]:
    """What is in the slot of each pair; zeros for pairs that have none."""
    return _rows(y, slots.of_pair)


def _collect_forward(y: Array, slots: Slots) -> tuple[Array, Slots]:
    return collect(y, slots), slots


def _collect_backward(slots: Slots, g: Array) -> tuple[Array, None]:
    return _rows(g.reshape(-1, g.shape[-1]), slots.pairs), None


collect.defvjp(_collect_forward, _collect_backward)


def grouped_dot(
    x: Float[Array, "M D"], w: Float[Array, "E D F"], groups: Groups
) -> Float[Array, "M F"]:
    """Each row times the matrix of its expert; zeros beyond the blocks that are used.

    `jax.lax.ragged_dot`, but on CPU, where that makes every product with every expert's matrix and
    takes 10 to 20 times as long: there a loop over blocks of rows (docs/log.md has the figures).
    """
    return jax.lax.platform_dependent(x, w, groups, cpu=_dot_of_blocks, default=_ragged_dot)


def _ragged_dot(x: Array, w: Array, groups: Groups) -> Array:
    return jax.lax.ragged_dot(x, w, groups.sizes)


@jax.custom_vjp
def _dot_of_blocks(x: Array, w: Array, groups: Groups) -> Array:
    return _each_block(partial(jnp.dot), x, w, groups)


def _each_block(product: partial[Array], x: Array, w: Array, groups: Groups) -> Array:
    """product(block of x, its expert's part of w), for the blocks that are used."""
    blocks = groups.expert.shape[0]
    x = x.reshape(blocks, -1, x.shape[-1])
    shape = jax.eval_shape(product, x[0], w[0]).shape

    def body(i: Array, out: Array) -> Array:
        return out.at[i].set(product(x[i], w[groups.expert[i]]))

    out = match_varying(match_varying(jnp.zeros((blocks, *shape), x.dtype), x), w)
    return jax.lax.fori_loop(0, groups.used, body, out).reshape(-1, shape[-1])


def _dot_forward(x: Array, w: Array, groups: Groups) -> tuple[Array, tuple[Array, Array, Groups]]:
    return _dot_of_blocks(x, w, groups), (x, w, groups)


def _dot_backward(saved: tuple[Array, Array, Groups], g: Array) -> tuple[Array, Array, None]:
    x, w, groups = saved
    dx = _each_block(partial(jnp.einsum, "nf,df->nd"), g, w, groups)
    blocks = groups.expert.shape[0]
    xs, gs = x.reshape(blocks, -1, x.shape[-1]), g.reshape(blocks, -1, g.shape[-1])

    def body(i: Array, dw: Array) -> Array:
        part = jnp.dot(xs[i].T, gs[i], preferred_element_type=jnp.float32)
        return dw.at[groups.expert[i]].add(part)

    dw = match_varying(jnp.zeros(w.shape, jnp.float32), g)
    return dx, jax.lax.fori_loop(0, groups.used, body, dw).astype(w.dtype), None


_dot_of_blocks.defvjp(_dot_forward, _dot_backward)
