"""How tokens reach the experts of a mixture layer that other devices hold, and come back.

All of it runs inside the `jax.shard_map` of the step and sends along `expert` only. Elements that
a device sends, forward and as many backward, N the size of the axis, tokens those of its
micro-batch:

  `send_to_experts`, `return_from_experts`   (N-1)/N of the slots, each: capacity_factor · tokens ·
                                             top_k · embed (GShard: arXiv 2006.16668)
  `gather_tokens`, `scatter_tokens`              (N-1) · tokens · embed, each

Without a limit an expert may get any number of tokens. An all-to-all of unequal parts
(`jax.lax.ragged_all_to_all`) would send the least, but does not exist on CPU (jax 0.10.2 and
0.12.0.1), so that it could not be tested. Instead every device gets all tokens of the axis, and the
sums of what its experts made of them are scattered back: N / top_k times the bytes of an
all-to-all, so no more than it where N <= top_k.
"""

import jax
from jax import Array

from shardlm.parallel.collectives import Parallel


def send_to_experts(x: Array, par: Parallel) -> Array:
    """Slots [E, n, D] of this device's tokens to [E/expert, expert·n, D]: those that all devices
    have for this device's experts."""
    if par.size("expert") == 1:
        return x
    return jax.lax.all_to_all(x, "expert", split_axis=0, concat_axis=1, tiled=True)


def return_from_experts(x: Array, par: Parallel) -> Array:
    """The way back: [E/expert, expert·n, D] to [E, n, D]."""
    if par.size("expert") == 1:
        return x
    return jax.lax.all_to_all(x, "expert", split_axis=1, concat_axis=0, tiled=True)


def gather_tokens(x: Array, par: Parallel) -> Array:
    """[N, ...] of this device to [expert·N, ...] of all devices; backward a reduce-scatter."""
    if par.size("expert") == 1:
        return x
    return jax.lax.all_gather(x, "expert", axis=0, tiled=True)


def scatter_tokens(x: Array, par: Parallel) -> Array:
    """Partial sums [expert·N, ...] to the sums [N, ...] of this device's tokens; backward an
    all-gather."""
    if par.size("expert") == 1:
        return x
    return jax.lax.psum_scatter(x, "expert", scatter_dimension=0, tiled=True)
