"""What a query may see, and the scores it sees it by: shared by the attention implementations."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Float32, Int

from shardlm.config import ModelConfig

MASKED = -1e30
"""A score that softmax takes for nothing; finite, so that a row of nothing has no NaN."""


class Rules(NamedTuple):
    """What a query may see, and how scores are formed; static."""

    window: int = 0
    """Tokens a query sees, itself included; 0: all before it."""
    softcap: float = 0.0
    """Bound c of the scores, c·tanh(x/c); 0 is off."""
    block: int = ModelConfig.attention_block
    """Queries and keys of a block of the blockwise implementation."""


def visible(
    q_index: Int[Array, "T"],
    kv_index: Int[Array, "S"],
    q_segments: Int[Array, "B T"],
    kv_segments: Int[Array, "B S"],
    window: int,
) -> Bool[Array, "B T S"]:
    """Which key each query sees."""
    back = q_index[:, None] - kv_index[None, :]
    seen = back >= 0
    if window:
        seen &= back < window
    same = q_segments[:, :, None] == kv_segments[:, None, :]
    return seen & same & (kv_segments != 0)[:, None, :]


def products(
    q: Float[Array, "B G R T K"], k: Float[Array, "B G S K"]
) -> Float32[Array, "B G R T S"]:
    """Of each query with each key."""
    b, g, r, t, d = q.shape
    # One product for all heads of a group: CPU libraries do not see through five dims.
    product = jnp.einsum(
        "btk,bsk->bts",
        q.reshape(b * g, r * t, d),
        k.reshape(b * g, -1, d),
        preferred_element_type=jnp.float32,
    )
    return product.reshape(b, g, r, t, -1)


def scores(
    q: Float[Array, "B G R T K"], k: Float[Array, "B G S K"], softcap: float
) -> Float32[Array, "B G R T S"]:
    """`products` scaled by 1/sqrt(K) and capped."""
    x = products(q, k) * (1 / math.sqrt(q.shape[-1]))
    return softcap * jnp.tanh(x / softcap) if softcap else x


def softcap_slope(x: Float32[Array, "*shape"], softcap: float) -> Float32[Array, "*shape"]:
    """Derivative of the soft-cap by its result; where it is out of range (`MASKED`), zero."""
    return jnp.maximum(1 - (x / softcap) ** 2, 0.0)
