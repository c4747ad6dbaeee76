"""How long a device computes, measured from within the compiled program.

Devices wait for each other wherever they send, so the time of a whole update is the same for all of
them. A clock that is read by the program itself, where a device begins what it does alone and where
it ends, tells how long that took it.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import io_callback

from shardlm.parallel.collectives import match_varying


def read_clock(after: Any) -> Array:
    """The host's clock in microseconds, uint32 (modulo 2**32, 71 minutes), once all of `after` has
    been computed; typed as varying as its first array does.

    XLA keeps no order but that of the data: what is to come later has to depend on the result.
    """
    leaves = jax.tree.leaves(after)
    # An element of each is there when the whole is, and costs nothing to send to the host.
    elements = [x[(0,) * x.ndim].astype(jnp.float32) for x in leaves]
    now = io_callback(_microseconds, jax.ShapeDtypeStruct((), jnp.uint32), *elements)
    return match_varying(now, leaves[0])


def seconds_between(start: Array, end: Array) -> Array:
    """Seconds, float32, between two readings less than 71 minutes apart."""
    return (end - start).astype(jnp.float32) * 1e-6


def _microseconds(*_: np.ndarray) -> np.ndarray:
    return np.array(time.perf_counter_ns() // 1000 % 2**32, np.uint32)
