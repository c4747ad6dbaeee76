"""Skip updates whose gradients are not finite."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardlm.optim.clip import global_norm


class GuardState(NamedTuple):
    """State of `skip_nonfinite`."""

    inner: Any
    skipped: jax.Array
    """Updates skipped so far; int32 scalar."""
    consecutive: jax.Array
    """Updates skipped since the last one made; int32 scalar."""


class Guarded(optax.GradientTransformationExtraArgs):
    """An optax transformation that can also apply its updates: see `skip_nonfinite`."""

    apply: Callable[..., tuple[Any, GuardState]]


def skip_nonfinite(inner: optax.GradientTransformation) -> Guarded:
    """Make an update of `inner` only where the gradients are finite.

        updates, state = tx.update(grads, state, params, norm=norm, ok=True)
        params, state = tx.apply(params, state, grads, norm=norm, ok=True)

    `norm` is the global norm of the gradients, computed here if it is not given and passed on to
    `inner`: it is finite only if every element is (and if its square fits float32). `ok` is any
    further condition. When either fails, the updates are zeros and the inner state keeps every
    bit. The zeros are -0.0, which leaves every bit of a weight too.

    `apply` is `update` and `optax.apply_updates` in one, for a training step that donates its
    state: with the sum inside the branch no buffer for the updates exists. (Its arguments stand in
    the order of its results, as donation pairs buffers of one shape in order.) docs/log.md has
    what it costs.

    Args:
      inner: any optax transformation.

    Returns:
      A transformation with state `GuardState`.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> GuardState:
        return GuardState(inner.init(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def guarded(
        make: Callable[[Any, Any], Any],
        skip: Callable[[Any, Any], Any],
        grads: Any,
        state: GuardState,
        params: Any,
        norm: jax.Array | None,
        ok: jax.typing.ArrayLike,
        extra: dict[str, Any],
    ) -> tuple[Any, GuardState]:
        norm = global_norm(grads) if norm is None else norm
        good = jnp.isfinite(norm) & ok

        def run(grads: Any, inner_state: Any, params: Any) -> tuple[Any, Any]:
            updates, inner_state = inner.update(grads, inner_state, params, norm=norm, **extra)
            return make(params, updates), inner_state

        def keep(grads: Any, inner_state: Any, params: Any) -> tuple[Any, Any]:
            return skip(params, jax.eval_shape(run, grads, inner_state, params)[0]), inner_state

        result, inner_state = jax.lax.cond(good, run, keep, grads, state.inner, params)
        return result, GuardState(
            inner_state,
            state.skipped + jnp.where(good, 0, 1),
            jnp.where(good, 0, state.consecutive + 1),
        )

    def update(
        grads: Any,
        state: GuardState,
        params: Any = None,
        *,
        norm: jax.Array | None = None,
        ok: jax.typing.ArrayLike = True,
        **extra: Any,
    ) -> tuple[Any, GuardState]:
        def zeros(_: Any, shapes: Any) -> Any:
            return jax.tree.map(lambda x: jnp.full(x.shape, -0.0, x.dtype), shapes)

        return guarded(lambda _, u: u, zeros, grads, state, params, norm, ok, extra)

    def apply(
        params: Any,
        state: GuardState,
        grads: Any,
        *,
        norm: jax.Array | None = None,
        ok: jax.typing.ArrayLike = True,
        **extra: Any,
    ) -> tuple[Any, GuardState]:
        make, skip = optax.apply_updates, lambda params, _: params
        return guarded(make, skip, grads, state, params, norm, ok, extra)

    result = Guarded(init, update)
    result.apply = apply
    return result
