"""Which dim of a tensor goes to which axis of the mesh."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

from shardlm.config import ConfigError, ModelConfig
from shardlm.mesh.axes import BATCH_AXES
from shardlm.validation import nearest_divisible, nearest_divisor

DIMS: Mapping[str, tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "layers": ("stage",),
    "positions": (),
    "embed": ("data",),
    "heads": ("model",),
    "kv_heads": ("model",),
    "head_dim": (),
    "mlp": ("model",),
    "experts": ("expert",),
    # Experts as the router's outputs, which every token needs all of.
    "router": (),
    "vocab": ("model",),
    # The dims of biases and scales, where there is no `embed` to take the data axis.
    "head_dim_vector": ("data",),
    "mlp_vector": ("model", "data"),
}
"""Logical dims of shardlm's tensors, and the mesh axes that split them."""


@dataclass(frozen=True)
class AxisRules:
    """Maps the logical dims of a tensor to mesh axes.

    Args:
      sizes: size of each mesh axis.
      table: logical dim to the axes that split it, most significant first.

    Example:
      >>> rules = AxisRules({"data": 4, "model": 2})
      >>> rules.spec(("embed", "mlp"), (256, 688))
      PartitionSpec('data', 'model')
    """

    sizes: Mapping[str, int]
    table: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: DIMS)

    @classmethod
    def for_model(
        cls, sizes: Mapping[str, int], model: ModelConfig, shard_params: str = "all"
    ) -> "AxisRules":
        """The rules of a run.

        With `shard_params` "none", `data` splits only the batch. Biases and query/key norm scales
        (a few thousand numbers) stay whole over `data` where it does not divide them, and key/value
        heads over `model` (see `shardlm.parallel.heads`), rather than limit the size of a mesh; a
        run says so at its start. No other dim is ever left whole.
        """
        table = dict(DIMS)
        if model.kv % sizes.get("model", 1):
            table["kv_heads"] = ()
        for dim, size in (("head_dim_vector", model.k_dim), ("mlp_vector", model.mlp)):
            if size % math.prod(sizes.get(axis, 1) for axis in DIMS[dim]):
                table[dim] = _without_data(DIMS[dim])
        if shard_params == "none":
            table |= {d: _without_data(axes) for d, axes in table.items() if d != "batch"}
        return cls(dict(sizes), table)

    def axes(self, dim: str, size: int | None = None) -> tuple[str, ...]:
        """The axes of more than one device that split a dim of this size.

        Raises:
          ConfigError: the dim has no rule, or its size does not divide.
        """
        if dim not in self.table:
            raise ConfigError(
                f"dim {dim!r} has no rule: known dims are {', '.join(sorted(self.table))}"
            )
        axes = tuple(axis for axis in self.table[dim] if self.sizes.get(axis, 1) > 1)
        ways = math.prod(self.sizes[axis] for axis in axes)
        if size is not None and size % ways:
            raise ConfigError(
                f"dim {dim} is {size} and {' x '.join(f'{a} {self.sizes[a]}' for a in axes)} split "
                f"it {ways} ways: {ways} does not divide {size} ({dim} "
                f"{nearest_divisible(size, ways)} would do, or {nearest_divisor(size, ways)} ways)"
            )
        return axes

    def spec(self, dims: Sequence[str | None], shape: Sequence[int] | None = None) -> PartitionSpec:
        """The partition of a tensor with these dims (None: not split).

        Args:
          dims: a logical dim for each dimension.
          shape: sizes to check; without it only the rules are checked.

        Raises:
          ConfigError: an unknown dim, a size that does not divide, or two dims on one axis.
        """
        if shape is not None and len(dims) != len(shape):
            raise ConfigError(f"dims {tuple(dims)} name {len(dims)} dimensions of {tuple(shape)}")
        entries: list[str | tuple[str, ...] | None] = []
        owner: dict[str, str] = {}
        for i, dim in enumerate(dims):
            axes = () if dim is None else self.axes(dim, None if shape is None else shape[i])
            for axis in axes:
                if axis in owner:
                    raise ConfigError(
                        f"dims {owner[axis]!r} and {dim!r} of one tensor are both split over mesh "
                        f"axis {axis!r}: an axis can split only one of them"
                    )
                owner[axis] = str(dim)
            entries.append(None if not axes else axes[0] if len(axes) == 1 else axes)
        return PartitionSpec(*entries)


def _without_data(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis != "data")
