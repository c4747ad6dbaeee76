"""Precision of parameters: casts, and fp32 masters behind parameters held in fewer bits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


def cast_tree(tree: Any, dtype: jax.typing.DTypeLike) -> Any:
    """The tree with its floating-point leaves in `dtype`; other leaves as they are."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


class MastersState(NamedTuple):
    """State of `fp32_masters`: parameters in fp32, and the state of the inner transformation."""

    masters: Any
    inner: Any


def fp32_masters(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Run `inner` on fp32 masters of parameters that are held in bf16 (arXiv 1710.03740).

    The emitted updates are in fp32 and lead from the parameters as they are to the new masters
    rounded once: `optax.apply_updates(params, updates)` equals `cast_tree(state.masters, bf16)`
    bit for bit, whatever the parameters were. The one exception is a weight that shrinks more
    than 2**16 times in one update, where fp32 holds no such update: the weight is then off by at
    most 2**-24 of its old value, until the next update.

    Args:
      inner: any optax transformation; it sees fp32 gradients, masters and updates only.

    Returns:
      A transformation with state `MastersState`. `update` raises ValueError without `params`.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> MastersState:
        # A copy also where params are fp32 already: a donated state must not share buffers.
        masters = jax.tree.map(jnp.array, cast_tree(params, jnp.float32))
        return MastersState(masters, inner.init(masters))

    def update(
        grads: Any, state: MastersState, params: Any = None, **extra: Any
    ) -> tuple[Any, MastersState]:
        if params is None:
            raise ValueError(
                "fp32_masters needs the parameters that its updates lead from: call "
                "update(grads, state, params)"
            )
        updates, inner_state = inner.update(
            cast_tree(grads, jnp.float32), state.inner, state.masters, **extra
        )
        masters = optax.apply_updates(state.masters, updates)
        return jax.tree.map(_difference, masters, params), MastersState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _difference(master: jax.Array, param: jax.Array) -> jax.Array:
    """fp32 update from `param` to `master` rounded to the dtype of `param`."""
    if not jnp.issubdtype(param.dtype, jnp.floating):
        return master - param
    bits = jnp.finfo(param.dtype)
    # A pair of casts would do, but XLA may drop it and keep the excess precision.
    target = jax.lax.reduce_precision(master, bits.nexp, bits.nmant)
    param = param.astype(jnp.float32)
    # Adding -0.0 leaves every bit of a weight alone; adding 0.0 turns -0.0 into 0.0.
    return jnp.where(target == param, -0.0, target - param)
