"""Optimization, as optax transformations.

`make_optimizer`, `make_schedule` and `learning_rate` read shardlm's configuration; the others know
none of its keys.
"""

from shardlm.optim.accumulate import (
    Accumulated,
    AccumulateState,
    accumulate_weighted,
    add,
    mean,
    zeros_like_accumulated,
)
from shardlm.optim.clip import clip_by_norm, global_norm
from shardlm.optim.guard import Guarded, GuardState, skip_nonfinite
from shardlm.optim.layerwise import layerwise
from shardlm.optim.optimizer import learning_rate, make_optimizer
from shardlm.optim.precision import MastersState, cast_tree, fp32_masters
from shardlm.optim.roles import Role, decay_mask, is_stacked, matrix_dims, role
from shardlm.optim.schedule import counted, make_schedule

__all__ = [
    "AccumulateState",
    "Accumulated",
    "GuardState",
    "Guarded",
    "MastersState",
    "Role",
    "accumulate_weighted",
    "add",
    "cast_tree",
    "clip_by_norm",
    "counted",
    "decay_mask",
    "fp32_masters",
    "global_norm",
    "is_stacked",
    "layerwise",
    "learning_rate",
    "make_optimizer",
    "make_schedule",
    "matrix_dims",
    "mean",
    "role",
    "skip_nonfinite",
    "zeros_like_accumulated",
]
