"""Treat every layer of a stack, and every kernel in it, as the matrix that it is."""

import math
from typing import Any

import jax
import optax

from shardlm.optim.roles import Path, is_stacked, matrix_dims, role


def layerwise(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply `inner` to each layer apart, with kernels reshaped to (layers, in, out).

    A transformation that looks at the shape of a leaf, or at statistics over a leaf, then does the
    same whether layers are stored stacked or one by one, and sees heads x head_dim as one dim.

    Args:
      inner: transformation whose state depends only on the leaves it is given.

    Returns:
      A transformation whose state for stacked leaves has the dim layers in front.
    """

    def init(params: Any) -> Any:
        return _over_layers(inner.init, params)(_as_matrices(params))

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        run = _over_layers(inner.update, grads)
        updates, state = run(_as_matrices(grads), state, _as_matrices(params))
        return jax.tree.map(lambda u, g: u.reshape(g.shape), updates, grads), state

    stacked = optax.GradientTransformation(init, update)
    return optax.partition({"stacked": stacked, "single": stacked}, _labels)


def _labels(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "stacked" if is_stacked(path) else "single", params
    )


def _over_layers(function: Any, tree: Any) -> Any:
    """`function` mapped over the first dim when the leaves of `tree` are stacked layers."""
    stacked = "stacked" in jax.tree.leaves(_labels(tree))
    return jax.vmap(function) if stacked else function


def _as_matrices(tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(_as_matrix, tree)


def _as_matrix(path: Path, x: jax.Array) -> jax.Array:
    if role(path) != "matrix":
        return x
    rows, columns = matrix_dims(path)
    batch = x.shape[: x.ndim - len(rows) - len(columns)]
    size = [math.prod(x.shape[dim] for dim in dims) for dims in (rows, columns)]
    return x.reshape(*batch, *size)
