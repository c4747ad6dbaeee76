"""Gradient accumulation weighted by loss tokens.

Micro-batches have different numbers of loss tokens, so the mean of their mean gradients is not the
gradient of the mean loss. What is added up here is gradients of summed losses, and tokens; the
division comes once, at the end. `add` and `mean` serve a `lax.scan` over micro-batches;
`accumulate_weighted` is the same as an optax transformation.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Accumulated(NamedTuple):
    """Sums over micro-batches so far."""

    grads: Any
    """Gradients of the summed loss; float32, whatever the gradients' dtype."""
    weight: jax.Array
    """Loss tokens; float32 scalar."""


def zeros_like_accumulated(params: Any) -> Accumulated:
    """Nothing accumulated, for gradients of the shapes of `params`."""
    return Accumulated(
        jax.tree.map(lambda x: jnp.zeros_like(x, dtype=jnp.float32), params),
        jnp.zeros((), jnp.float32),
    )


def add(acc: Accumulated, grads: Any, weight: jax.typing.ArrayLike) -> Accumulated:
    """Add one micro-batch.

    Args:
      acc: sums so far.
      grads: gradients of the SUM of the losses over the micro-batch's tokens, of any float dtype.
      weight: the number of those tokens (any non-negative weight will do).
    """
    return Accumulated(
        jax.tree.map(lambda a, g: a + g.astype(jnp.float32), acc.grads, grads),
        acc.weight + jnp.asarray(weight, jnp.float32),
    )


def mean(acc: Accumulated) -> Any:
    """Gradients of the mean loss over all tokens added; zeros where there was no token."""
    some = acc.weight > 0
    scale = 1 / jnp.where(some, acc.weight, 1)
    return jax.tree.map(lambda g: jnp.where(some, g * scale, 0), acc.grads)


class AccumulateState(NamedTuple):
    """State of `accumulate_weighted`."""

    accumulated: Accumulated
    calls: jax.Array
    """Micro-batches in `accumulated`; int32 scalar below `every`."""
    inner: Any


def accumulate_weighted(
    inner: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
    """One update of `inner` every `every` calls, with the weighted mean of their gradients.

    `optax.MultiSteps` is the same for equal weights. Here

        updates, state = tx.update(grads, state, params, weight=tokens, last=False)

    takes the gradients of the summed loss and its tokens. Other calls emit zeros and leave the
    inner state, with its counts and schedules, alone. So does an update whose weights were all 0.
    `last=True` makes the update now, a true mean of the fewer micro-batches of, say, the end of
    an epoch.

    Args:
      inner: transformation that gets the mean gradients, in float32, and the other extra
        arguments of the call that completes the update.
      every: calls to an update.

    Raises:
      ValueError: `every` is below 1.
    """
    if every < 1:
        raise ValueError(f"every is {every}: it must be at least 1 call to an update")
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> AccumulateState:
        return AccumulateState(
            zeros_like_accumulated(params), jnp.zeros((), jnp.int32), inner.init(params)
        )

    def update(
        grads: Any,
        state: AccumulateState,
        params: Any = None,
        *,
        weight: jax.typing.ArrayLike,
        last: jax.typing.ArrayLike = False,
        **extra: Any,
    ) -> tuple[Any, AccumulateState]:
        acc = add(state.accumulated, grads, weight)
        calls = state.calls + 1
        full = jnp.logical_or(calls >= every, last)

        def emit() -> tuple[Any, Any]:
            return inner.update(mean(acc), state.inner, params, **extra)

        shapes, _ = jax.eval_shape(emit)

        def wait() -> tuple[Any, Any]:
            # -0.0, since adding 0.0 turns a weight of -0.0 into 0.0.
            return jax.tree.map(lambda x: jnp.full(x.shape, -0.0, x.dtype), shapes), state.inner

        updates, inner_state = jax.lax.cond(full & (acc.weight > 0), emit, wait)
        kept = jax.tree.map(lambda x: jnp.where(full, jnp.zeros_like(x), x), acc)
        return updates, AccumulateState(kept, jnp.where(full, 0, calls), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
