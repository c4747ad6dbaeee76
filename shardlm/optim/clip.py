"""The global gradient norm, and clipping by one that is already known."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def global_norm(grads: Any) -> jax.Array:
    """Euclidean norm of all leaves together, in float32.

    On global arrays, sharded or not, every element counts once.
    """
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def clip_by_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_global_norm` that takes the norm as extra argument `norm`, if there is one.

    Gradients g become g · min(1, max_norm / norm) (arXiv 1211.5063). Without `norm` it is computed.
    """

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(
        grads: Any,
        state: optax.EmptyState,
        params: Any = None,
        *,
        norm: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[Any, optax.EmptyState]:
        del params, extra
        norm = global_norm(grads) if norm is None else norm
        scale = jnp.where(norm < max_norm, 1, max_norm / norm)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads), state

    return optax.GradientTransformationExtraArgs(init, update)
