"""All communication of the loss and its gradients, written by hand.

The loss and its gradients run inside one `jax.shard_map` that is manual over every mesh axis, so
arrays here are one device's part and nothing travels except through these functions. The types
that say on which axes a value varies (`check_vma`) make a missing reduction an error when the step
is traced.

Traffic of a device, N the size of the axis (fully sharded data parallelism: Rajbhandari et al.,
arXiv 1910.02054; sequence-split tensor parallelism: Korthikanti et al., arXiv 2205.05198):
  `unshard`          (N-1)/N of the gathered leaf forward and, where `regather` or remat makes it
                     again, backward; the same in fp32 for its gradient; over `data`
  `gather_sequence`  (N-1)/N of the gathered activation forward and backward, over `model`
  `scatter_sequence` the same
  `shift_context`    a device's keys and values, N-1 times forward; backward, and their gradients in
                     fp32 as often, over `context`
  `gather_context`   the same at once
  `to_heads`, `to_tokens` (N-1)/N of the activation forward and backward, over `context`
  `send_forward`, `send_backward`  the activation, over `stage`
  `share_tokens`     (N-1)/N of the activation forward and backward, over `stage`
  `reduce_gradients` 2(N-1)/N of the leaves that are whole over an axis, (N-1)/N of those gathered
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from shardlm.mesh.axes import AXES, BATCH_AXES, LOSS_AXES, TOKEN_AXES
from shardlm.mesh.rules import AxisRules
from shardlm.parallel.heads import kv_copies, kv_heads_of
from shardlm.parallel.sequence import chunks_of

SEQUENCE = 1
"""The dimension of an activation [B, T, ...] that `model` splits between the matrices."""


def weight_dtype(dtype: jnp.dtype, path: tuple[Any, ...]) -> jnp.dtype:
    """The dtype in which a weight is used: norm scales and routers in fp32, the others in
    `dtype`."""
    fp32 = path[-1].key == "scale" or any(key.key == "router" for key in path)
    return jnp.dtype(jnp.float32) if fp32 else dtype


@dataclass(frozen=True)
class Parallel:
    """How the arrays of one device relate to those of the others.

    Args:
      rules: which dims are split over which axes.
      gather_weights: weights arrive split over `data`, and each layer gathers its own where it uses
        them; otherwise they arrive whole over `data`.
      split_sequence: between the matrices the residual stream is split over the sequence on
        `model`, and rows on `context`; otherwise they are whole (decoding, where the sequence is
        one token).
      context_comm: see `MeshConfig.context_comm`.
    """

    rules: AxisRules
    gather_weights: bool = True
    split_sequence: bool = True
    context_comm: str = "ring"

    def size(self, axis: str) -> int:
        """Devices of an axis that share the work."""
        if axis == "context" and not self.split_sequence:
            return 1  # Its devices do the same.
        return self.rules.sizes.get(axis, 1)

    def active(self, axes: tuple[str, ...] = AXES) -> tuple[str, ...]:
        """Those of the axes that have more than one device."""
        return tuple(axis for axis in axes if self.size(axis) > 1)

    def index(self, *axes: str) -> Array:
        """Place of this device along axes taken together, the first most significant."""
        active = self.active(axes)
        return jax.lax.axis_index(active) if active else jnp.int32(0)

    @property
    def chunks(self) -> np.ndarray:
        """See `shardlm.parallel.sequence.chunks_of`."""
        return chunks_of(self.size("context"), self.context_comm)

    def row_part(self, x: Array) -> Array:
        """This device's tokens [B, T/context, ...] of whole rows [B, T, ...]. Nothing travels."""
        if len(self.chunks) == 1:
            return x
        mine = jnp.asarray(self.chunks)[self.index("context")]
        cut = x.reshape(x.shape[0], self.chunks.size, -1, *x.shape[2:])
        return jnp.take(cut, mine, axis=1).reshape(x.shape[0], -1, *x.shape[2:])

    def places(self, length: int) -> Array:
        """Place in the row of each of the `length` tokens of this device's part of the residual
        stream: int32 [length]."""
        if not self.split_sequence:
            return jnp.arange(length)
        mine = jnp.asarray(self.chunks)[self.index("context")]
        chunk = length * self.size("model") // len(mine)
        places = (mine[:, None] * chunk + jnp.arange(chunk)).reshape(-1)
        return jax.lax.dynamic_slice_in_dim(places, self.index("model") * length, length)

    def shift_context(self, tree: Any) -> Any:
        """What the device before this one on `context` has; to the first comes the last's."""
        n = self.size("context")
        to = [(i, (i + 1) % n) for i in range(n)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, "context", to), tree)

    def gather_context(self, tree: Any) -> Any:
        """What all devices of `context` have, in their order along a new first dim."""
        return jax.tree.map(lambda x: jax.lax.all_gather(x, "context"), tree)

    def sum_context(self, x: Array) -> Array:
        """Sum over `context`, on which the result no longer varies."""
        return jax.lax.psum(x, "context") if self.size("context") > 1 else x

    def sum_earlier(self, x: Array) -> Array:
        """Of counts [B, C, ...], one for each chunk of this device, the sums over the chunks that
        come before them in the row."""
        mine, order = self.chunks, np.argsort(self.chunks, axis=None)
        if len(mine) == 1:
            return jnp.cumsum(x, 1) - x
        parts = jnp.moveaxis(self.gather_context(x), 0, 1)
        parts = parts.reshape(x.shape[0], -1, *x.shape[2:])[:, order]
        return (jnp.cumsum(parts, 1) - parts)[:, jnp.asarray(mine)[self.index("context")]]

    def scatter_context(self, tree: Any) -> Any:
        """This device's part, along the first dim, of the sum over `context`."""
        return jax.tree.map(lambda x: jax.lax.psum_scatter(x, "context", scatter_dimension=0), tree)

    def to_heads(self, x: Array) -> Array:
        """[B, T/context, H, K] to [B, T, H/context, K]; backward `to_tokens`."""
        return jax.lax.all_to_all(x, "context", split_axis=2, concat_axis=1, tiled=True)

    def to_tokens(self, x: Array) -> Array:
        """[B, T, H/context, K] to [B, T/context, H, K]; backward `to_heads`."""
        return jax.lax.all_to_all(x, "context", split_axis=1, concat_axis=2, tiled=True)

    def send_forward(self, x: Array, round_again: bool) -> Array:
        """What the device before this one on `stage` has; to the first comes the last's if it goes
        round again, and else zeros."""
        n = self.size("stage")
        to = [(i, (i + 1) % n) for i in range(n if round_again else n - 1)]
        return jax.lax.ppermute(x, "stage", to)

    def send_backward(self, x: Array, round_again: bool) -> Array:
        """What the device after this one on `stage` has; to the last comes the first's, or zeros,
        as with `send_forward`."""
        n = self.size("stage")
        to = [((i + 1) % n, i) for i in range(n if round_again else n - 1)]
        return jax.lax.ppermute(x, "stage", to)

    def share_tokens(self, x: Array) -> Array:
        """Rows [N, D] of the last device of `stage`, dealt to all of them: [N/stage, D]."""
        x = jnp.where(self.index("stage") == self.size("stage") - 1, x, 0)
        return jax.lax.psum_scatter(x, "stage", scatter_dimension=0, tiled=True)

    def from_stage(self, x: Array, stage: Array | int) -> Array:
        """What one device of `stage` has; equal, and typed so, on all of them."""
        return jax.lax.psum(jnp.where(self.index("stage") == stage, x, 0), "stage")

    def unshard(self, state: Any, dtype: jnp.dtype) -> Any:
        """Weights (an NNX state) cast for computing and whole over `data`; of key/value heads that
        are stored whole over `model`, this device's.

        Norm scales stay fp32. Gradients are summed over `data` in fp32 whatever `dtype` is.
        """

        def leaf(path: tuple[Any, ...], p: nnx.Variable[Array]) -> nnx.Variable[Array]:
            value = p[...]
            to = weight_dtype(dtype, path)
            names = p.get_metadata()["dims"]
            dims = [self.rules.axes(dim) for dim in names]
            if "kv_heads" in names and not dims[names.index("kv_heads")]:
                # Before the gather, which then sends what is needed.
                value = self.take_kv_heads(value, names.index("kv_heads"))
            split = [i for i, axes in enumerate(dims) if "data" in axes]
            if self.gather_weights and split:
                return p.replace(_gather_weight(value, split[0], to))
            return p.replace(value.astype(to))

        return jax.tree_util.tree_map_with_path(
            leaf, state, is_leaf=lambda x: isinstance(x, nnx.Variable)
        )

    def take_kv_heads(self, x: Array, dim: int) -> Array:
        """Of all key/value heads along a dimension, those that this device of `model` computes; one
        that it computes twice comes twice."""
        if self.size("model") == 1:
            return x
        heads = jnp.asarray(kv_heads_of(self.size("model"), x.shape[dim]))
        return jnp.take(x, heads[self.index("model")], axis=dim, mode="clip")

    def copy_kv_heads(self, x: Array) -> Array:
        """Keys or values [B, T, G, K] with as few copies of each head as let `context` divide
        them."""
        return jnp.repeat(x, kv_copies(self.size("context"), x.shape[2]), axis=2)

    def gather_sequence(self, x: Array) -> Array:
        """[B, T/model, ...] to [B, T, ...]; backward a reduce-scatter."""
        if self.size("model") == 1 or not self.split_sequence:
            return x
        return jax.lax.all_gather(x, "model", axis=SEQUENCE, tiled=True)

    def scatter_sequence(self, x: Array) -> Array:
        """Partial sums [B, T, ...] to their sum [B, T/model, ...]; backward an all-gather."""
        if self.size("model") == 1:
            return x
        if not self.split_sequence:
            return jax.lax.psum(x, "model")
        return jax.lax.psum_scatter(x, "model", scatter_dimension=SEQUENCE, tiled=True)

    def sum_model(self, x: Array) -> Array:
        """Sum over `model`, on which the result no longer varies."""
        return jax.lax.psum(x, "model") if self.size("model") > 1 else x

    def max_model(self, x: Array) -> Array:
        """Maximum over `model`, on which the result no longer varies."""
        return jax.lax.pmax(x, "model") if self.size("model") > 1 else x

    def concatenate_model(self, x: Array, axis: int) -> Array:
        """The parts of all devices of `model` side by side; equal, and typed so, on all of them."""
        if self.size("model") == 1:
            return x
        shape = list(x.shape)
        shape[axis] *= self.size("model")
        start = self.index("model") * x.shape[axis]
        whole = match_varying(jnp.zeros(shape, x.dtype), x)
        whole = jax.lax.dynamic_update_slice_in_dim(whole, x, start, axis)
        return jax.lax.psum(whole, "model")

    def sum_tokens(self, x: Array) -> Array:
        """Sum over the axes that split the tokens."""
        axes = self.active(TOKEN_AXES)
        return jax.lax.psum(x, axes) if axes else x

    def sum_losses(self, x: Array) -> Array:
        """Sum over the axes that split the tokens when it comes to their loss."""
        axes = self.active(LOSS_AXES)
        return jax.lax.psum(x, axes) if axes else x

    def list_examples(self, x: Array) -> Array:
        """One scalar a device, as an array [ways] with an entry for each share of the batch, in the
        order of the batch: the largest over the devices of the share. Equal, and typed so, on all
        devices."""
        axes = self.active(BATCH_AXES)
        ways = math.prod(self.size(axis) for axis in axes)
        share = self.active(("context", "model"))
        x = _vary(x, set(share))
        x = jax.lax.pmax(x, share) if share else x
        place = self.index(*BATCH_AXES)
        x = match_varying(jnp.zeros(ways, x.dtype), x).at[place].set(x)
        return jax.lax.psum(x, axes) if axes else x

    def varying(self, tree: Any, axes: tuple[str, ...] = AXES) -> Any:
        """The same values, typed as varying on all of these axes.

        Gradients with respect to the result are this device's part of the sum. Taken outside the
        loop over micro-batches, it is what lets the sum over devices be taken once an update.
        """

        def leaf(x: Array) -> Array:
            return _vary(x, set(self.active(axes)))

        return jax.tree.map(leaf, tree)

    def gather_tree(self, tree: Any, specs: Any, dtype: jnp.dtype) -> Any:
        """Every weight cast for computing and whole over `data`; norm scales stay fp32."""

        def leaf(path: Any, x: Array, spec: PartitionSpec) -> Array:
            dim = _data_dim(spec)
            x = x.astype(weight_dtype(dtype, path))
            return x if dim is None else jax.lax.all_gather(x, "data", axis=dim, tiled=True)

        return jax.tree_util.tree_map_with_path(leaf, tree, specs)

    def reduce_gradients(self, grads: Any, specs: Any, gathered: bool) -> Any:
        """Sum each gradient leaf over the devices whose parts it still lacks.

        Args:
          grads: this device's gradients, a leaf whole over each axis that its spec does not name,
            and over `data` too if `gathered`.
          specs: how the parameters are stored.
          gathered: the gradients are whole over `data`, and are to be split as the spec says.

        The sum over `replica` comes last, when only shards are left to send over slow links.
        """

        def leaf(g: Array, spec: PartitionSpec) -> Array:
            named = {
                a for e in spec if e is not None for a in (e if isinstance(e, tuple) else (e,))
            }
            dim = _data_dim(spec)
            if gathered and dim is not None:
                g = jax.lax.psum_scatter(g, "data", scatter_dimension=dim, tiled=True)
            for axis in reversed(self.active()):
                if axis not in named:
                    g = jax.lax.psum(g, axis)
            return g

        return jax.tree.map(leaf, grads, specs)


def after(x: Array, first: Array) -> Array:
    """x, which nothing can be made of before `first` is known; NaN where that begins with NaN.

    XLA on CPU runs what does not depend on each other at once, and keeps collectives in order, but
    not those in a loop with those after it: some devices would wait in one and some in the other,
    for ever (jax 0.10.2 and 0.12.0.1). A barrier does not help, since it is gone by then.
    """
    number = first[(0,) * first.ndim].astype(jnp.float32)
    x = match_varying(x, number)
    return jnp.where(jnp.isnan(match_varying(number, x)), jnp.nan, x).astype(x.dtype)


def match_varying(x: Array, like: Array) -> Array:
    """`x` typed as varying on the mesh axes on which `like` varies; a loop's carry needs it."""
    return _vary(x, varying_axes(like))


def varying_axes(x: Array) -> set[str]:
    """The manual mesh axes on which devices hold different values, by the type of `x`."""
    return set(jax.typeof(x).manual_axis_type.varying)


def _vary(x: Array, axes: set[str]) -> Array:
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _data_dim(spec: PartitionSpec) -> int | None:
    """The dimension that `data` splits."""
    for i, entry in enumerate(spec):
        if entry == "data" or (isinstance(entry, tuple) and "data" in entry):
            return i
    return None


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_weight(x: Array, dim: int, dtype: jnp.dtype) -> Array:
    # The cast comes first: bf16 halves what the gather sends.
    return jax.lax.all_gather(x.astype(dtype), "data", axis=dim, tiled=True)


def _gather_weight_fwd(x: Array, dim: int, dtype: jnp.dtype) -> tuple[Array, None]:
    return _gather_weight(x, dim, dtype), None


def _gather_weight_bwd(dim: int, dtype: jnp.dtype, _: None, g: Array) -> tuple[Array]:
    # Summing over devices in bf16 would lose what fp32 accumulation keeps.
    g = g.astype(jnp.float32)
    return (jax.lax.psum_scatter(g, "data", scatter_dimension=dim, tiled=True),)


_gather_weight.defvjp(_gather_weight_fwd, _gather_weight_bwd)


_VIEWS = ("broadcast_in_dim", "reshape", "squeeze", "transpose")


def regather(prim: Any, *_: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy: keep everything for the backward pass but gathered weights, which
    would be the whole model on every device.

    Views (broadcasts, reshapes, transposes) are made again too, whatever they are of: one of a
    gathered weight would keep the weight, and making one again costs next to nothing.
    """
    return prim.name not in _VIEWS and not _gathers(prim, params)


def _gathers(prim: Any, params: Any) -> bool:
    """Whether this is an all-gather over `data`, or a call of a function that does one."""
    if prim.name == "all_gather":
        return "data" in _names(params["axis_name"])
    called = params.get("call_jaxpr")
    return called is not None and any(_gathers(e.primitive, e.params) for e in called.eqns)


def _names(axis_name: Any) -> tuple[str, ...]:
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)
