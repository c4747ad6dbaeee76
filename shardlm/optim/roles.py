"""Parameter roles: what a leaf is for, read from its name in the tree and never from its shape.

Stacking the layers makes norm scales two-dimensional, so that a rule by the number of dims decays
them. The names say what a leaf is in either form.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax

Role = Literal["matrix", "embedding", "head", "norm", "bias"]
Path = Sequence[Any]

_EMBEDDINGS = ("table", "positions")
_DECAYED = ("matrix", "embedding", "head")


def path_names(path: Path) -> tuple[str, ...]:
    """Names along a path of `jax.tree_util` keys, or of strings: ("layers", "attn", "q", ...)."""
    return tuple(
        key if isinstance(key, str) else jax.tree_util.keystr((key,), simple=True) for key in path
    )


def role(path: Path) -> Role:
    """What the parameter at `path` is for.

    Args:
      path: keys from the root to the leaf, of `jax.tree_util` or plain strings.

    Returns:
      "matrix" for the kernels inside the layers, "head" for the output kernel, "embedding" for
      token and position tables, "norm" for scales, "bias" for every bias (of norms too).

    Raises:
      ValueError: the name of the leaf is none of those above.
    """
    names = path_names(path)
    leaf = names[-1] if names else ""
    if leaf == "kernel":
        return "head" if names[-2:-1] == ("head",) else "matrix"
    if leaf in _EMBEDDINGS:
        return "embedding"
    if leaf == "scale":
        return "norm"
    if leaf == "bias":
        return "bias"
    raise ValueError(
        f"parameter {'.'.join(names)!r} has no role: the last name must be kernel, table, "
        "positions, scale or bias; rename it, or teach shardlm.optim.roles the new name"
    )


def decay_mask(params: Any) -> Any:
    """Which leaves weight decay applies to: matrices, embeddings and the head.

    Args:
      params: nested dict of parameters, with the layers stacked or not.

    Returns:
      A tree of bool of the same structure, for `mask` arguments of optax.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: role(path) in _DECAYED, params)


def is_stacked(path: Path) -> bool:
    """Whether the leaf holds all layers, along its first dim: layers.attn..., not layers.3.attn."""
    names = path_names(path)
    return names[0] == "layers" and not names[1].isdigit()


def matrix_dims(path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dims of a kernel that its product sums over, and dims of its output, from the end.

    q, k and v are (embed, heads, head_dim): a matrix from embed to all heads together. o is
    (heads, head_dim, embed): a matrix from all heads to embed. Any other kernel is (in, out). Dims
    before those (layers, experts) count separate matrices.
    """
    owner = path_names(path)[-2:-1]
    if owner in (("q",), ("k",), ("v",)):
        return (-3,), (-2, -1)
    if owner == ("o",):
        return (-3, -2), (-1,)
    return (-2,), (-1,)
