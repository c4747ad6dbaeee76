"""Device meshes with named axes, and the placement of trees of arrays on them."""

from shardlm.mesh.axes import AXES, resolve_sizes
from shardlm.mesh.build import make_mesh, simulate_devices
from shardlm.mesh.rules import AxisRules
from shardlm.mesh.shardings import describe_sharding, named_sharding, shard_tree, tree_shardings

__all__ = [
    "AXES",
    "AxisRules",
    "describe_sharding",
    "make_mesh",
    "named_sharding",
    "resolve_sizes",
    "shard_tree",
    "simulate_devices",
    "tree_shardings",
]
