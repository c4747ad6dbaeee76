"""The training state: what it holds, how it is sharded, how it begins."""

from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlm.mesh import AxisRules
from shardlm.mesh.shardings import tree_specs
from shardlm.model.transformer import Params, Transformer


class State(TypedDict):
    """Everything that an update changes; a plain tree of arrays."""

    params: Params
    """fp32 masters; layers in the order of their stages (`Transformer.order`)."""
    opt: Any
    """State of the optax transformation."""
    step: Array
    """Updates so far, int32; skipped ones count."""


def init_state(
    transformer: Transformer, optimizer: optax.GradientTransformation, seed: int
) -> State:
    """The state before the first update. Run it under `jax.jit` with `out_shardings`, so that the
    whole model is never on one device."""
    params = transformer.init(jax.random.fold_in(jax.random.key(seed), INIT))
    return State(params=params, opt=optimizer.init(params), step=jnp.zeros((), jnp.int32))


INIT, DROPOUT, SAMPLE = 0, 1, 2
"""Purposes of random numbers: each folds its number into the run's seed."""


def abstract_state(
    transformer: Transformer,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    rules: AxisRules,
) -> State:
    """Shapes and shardings of the state, without making it.

    A leaf of the optimizer's that mirrors a parameter is split like it; the rest (counters,
    factored moments) is whole.

    Raises:
      ConfigError: a dim does not divide over its axes.
    """
    shapes = jax.eval_shape(lambda: init_state(transformer, optimizer, 0))
    specs = tree_specs(rules, transformer.dims, shapes["params"])
    by_path = {
        _names(path): (spec, leaf.shape)
        for (path, spec), leaf in zip(
            jax.tree_util.tree_leaves_with_path(specs, is_leaf=_is_spec),
            jax.tree.leaves(shapes["params"]),
            strict=True,
        )
    }

    def place(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        names = _names(path)
        spec = PartitionSpec()
        for start in range(len(names)):
            if names[start:] in by_path and by_path[names[start:]][1] == leaf.shape:
                spec = by_path[names[start:]][0]
                break
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(place, shapes)


def in_layer_order(tree: Any, transformer: Transformer) -> Any:
    """A state, or part of one, with the layers in their order, as checkpoints hold them: a run on
    other stages can go on from them. The arrays of `tree` stay."""
    return _reorder(tree, np.argsort(transformer.order))


def in_stage_order(tree: Any, transformer: Transformer) -> Any:
    """The opposite of `in_layer_order`."""
    return _reorder(tree, transformer.order)


def _reorder(tree: Any, order: np.ndarray) -> Any:
    if (order == np.arange(len(order))).all():
        return tree

    def reorder(tree: Any) -> Any:
        def leaf(path: Any, x: Array) -> Array:
            stacked = "layers" in _names(path) and x.shape[:1] == order.shape
            return x[order] if stacked else x

        return jax.tree_util.tree_map_with_path(leaf, tree)

    return jax.jit(reorder, out_shardings=shardings(tree))(tree)


def shardings(tree: Any) -> Any:
    """The shardings of a tree of arrays or abstract arrays."""
    return jax.tree.map(lambda x: x.sharding, tree)


def specs(tree: Any) -> Any:
    """The partitions of a tree of arrays or abstract arrays."""
    return jax.tree.map(lambda x: x.sharding.spec, tree)


def _names(path: Any) -> tuple[str, ...]:
    return tuple(k.key for k in path if isinstance(k, jax.tree_util.DictKey))


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
