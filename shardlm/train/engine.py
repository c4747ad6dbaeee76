"""The fixed parts of a run that its compiled functions are made of."""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from shardlm.config import Config
from shardlm.mesh import AxisRules
from shardlm.model.transformer import Transformer
from shardlm.optim import Guarded
from shardlm.train.state import State

Batch = Mapping[str, Array]
"""tokens, targets, segments, positions: int32 [batch, T]; rows: int32 [batch], the number of each
row in the update, by which its dropout masks are drawn. Nothing else depends on the order of the
rows, so data loading may deal them to devices as it likes."""


class Engine(NamedTuple):
    """The fixed parts that the compiled functions are made of."""

    config: Config
    mesh: Mesh
    rules: AxisRules
    transformer: Transformer
    optimizer: Guarded
    abstract: State
    """Shapes and shardings of the state."""
    dtype: jnp.dtype
    """Compute dtype."""
    attention: str
    """Attention implementation."""
