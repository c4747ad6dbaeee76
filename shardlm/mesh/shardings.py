"""Trees of shardings, arrays placed by them, and a table that says what is where."""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlm.mesh.pictures import picture_sharding
from shardlm.mesh.rules import AxisRules


def named_sharding(
    mesh: Mesh, rules: AxisRules, dims: tuple[str | None, ...], shape: tuple[int, ...] | None = None
) -> NamedSharding:
    """The sharding of one tensor from its logical dims.

    Raises:
      ConfigError: see `AxisRules.spec`.
    """
    return NamedSharding(mesh, rules.spec(dims, shape))


def is_dims(x: Any) -> bool:
    """Whether this is the leaf of a tree of dims: a tuple of dim names or None."""
    return isinstance(x, tuple) and all(d is None or isinstance(d, str) for d in x)


def tree_specs(rules: AxisRules, dims: Any, tree: Any) -> Any:
    """Partition of each leaf of `tree` (arrays or shapes) by the same tree of logical dims."""
    return jax.tree.map(lambda d, x: rules.spec(d, x.shape), dims, tree, is_leaf=is_dims)


def tree_shardings(mesh: Mesh, rules: AxisRules, dims: Any, tree: Any) -> Any:
    """`tree_specs` as `NamedSharding`s on a mesh."""
    return jax.tree.map(
        lambda d, x: named_sharding(mesh, rules, d, x.shape), dims, tree, is_leaf=is_dims
    )


def shard_tree(mesh: Mesh, rules: AxisRules, dims: Any, tree: Any) -> Any:
    """Place every leaf of `tree` on the mesh.

    Args:
      mesh: from `make_mesh`.
      rules: from `AxisRules(mesh.shape)`, or your own table.
      dims: a tree like `tree` whose leaves are tuples of logical dims.
      tree: arrays.

    Raises:
      ConfigError: see `AxisRules.spec`.
    """
    return jax.device_put(tree, tree_shardings(mesh, rules, dims, tree))


def bytes_per_device(leaf: Any) -> int:
    """Bytes of one device's part of an array, or of a `ShapeDtypeStruct` with a sharding."""
    shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
    return math.prod(shape) * leaf.dtype.itemsize


def describe_sharding(tree: Any) -> str:
    """A table of a tree of arrays (or `ShapeDtypeStruct`s with shardings).

    One line a leaf: its path, global shape and dtype, the axes that split each dimension (`-`: not
    split), and the bytes that one device holds; then the sum. Below, of the largest leaf that is
    split over most axes, which devices hold which part.
    """
    rows = [("leaf", "shape", "dtype", "axes", "bytes a device")]
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()
        entries = tuple(spec) + (None,) * (leaf.ndim - len(spec))
        axes = ["-" if e is None else e if isinstance(e, str) else "+".join(e) for e in entries]
        size = bytes_per_device(leaf)
        total += size
        name = _dotted(path)
        shape = " x ".join(map(str, leaf.shape)) or "scalar"
        if not any(e is not None for e in entries):
            axes = ["whole"]
        rows.append((name, shape, str(leaf.dtype), ", ".join(axes), f"{size:,}"))
    rows.append(("sum", "", "", "", f"{total:,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = []
    for row in rows:
        cells = [row[i].ljust(widths[i]) for i in range(4)] + [row[4].rjust(widths[4])]
        lines.append("  ".join(cells).rstrip())
    most = max(
        jax.tree_util.tree_leaves_with_path(tree),
        key=lambda item: (len(_axes_of(item[1])), bytes_per_device(item[1])),
    )
    if _axes_of(most[1]):
        lines += ["", f"devices that hold each part of {_dotted(most[0])}:"]
        lines.append(picture_sharding(most[1]))
    return "\n".join(lines)


def _axes_of(leaf: Any) -> list[str]:
    """Axes of more than one device that split an array."""
    if not isinstance(leaf.sharding, NamedSharding):
        return []
    entries = (e if isinstance(e, tuple) else (e,) for e in leaf.sharding.spec if e is not None)
    return [a for entry in entries for a in entry if leaf.sharding.mesh.shape[a] > 1]


def _dotted(path: Any) -> str:
    """A path of `jax.tree_util` keys as "layers.attn.q"."""
    return ".".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
