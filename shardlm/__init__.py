"""shardlm: sharded training of language models in JAX.

The mesh utilities are importable from here; they load jax on first use, so that the command line
can check a configuration without it.
"""

from typing import TYPE_CHECKING, Any

from shardlm.config import Config, ConfigError, MeshConfig

if TYPE_CHECKING:
    from shardlm.mesh import (
        AxisRules,
        describe_sharding,
        make_mesh,
        named_sharding,
        shard_tree,
        simulate_devices,
    )

__version__ = "0.1.0"

__all__ = [
    "AxisRules",
    "Config",
    "ConfigError",
    "MeshConfig",
    "describe_sharding",
    "make_mesh",
    "named_sharding",
    "shard_tree",
    "simulate_devices",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from shardlm import mesh

        return getattr(mesh, name)
    raise AttributeError(f"module 'shardlm' has no attribute {name!r}")
