"""The decoder-only transformer: embedding, a scan over stacked layers, final norm, head.

Shapes: B batch, T length, D embed, V vocabulary, L layers. All arrays are one device's part.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from shardlm.config import ModelConfig
from shardlm.model.layers import (
    Cache,
    Context,
    Layer,
    Mlp,
    Norm,
    Routing,
    dropout,
    normal,
    rope_table,
)
from shardlm.model.moe import Moe
from shardlm.parallel.collectives import Parallel, regather

Params = dict[str, Any]
"""Nested dicts of arrays, one for each module."""


class Embed(nnx.Module):
    """Token embedding and, where positions are learned, theirs."""

    def __init__(self, model: ModelConfig, length: int, rngs: nnx.Rngs) -> None:
        shape = (model.vocab_padded, model.embed)
        real = jnp.arange(shape[0])[:, None] < model.vocab_size
        table = normal(rngs.params(), shape, model.init_std)
        self.table = nnx.Param(jnp.where(real, table, 0), dims=("vocab", "embed"))
        self.positions = (
            nnx.Param(
                normal(rngs.params(), (length, model.embed), model.init_std),
                dims=("positions", "embed"),
            )
            if model.positions == "learned"
            else None
        )

    def __call__(self, tokens: Array, positions: Array, par: Parallel) -> Array:
        """[B, T] ids to [B, T/model, D]: each device looks up the ids of its part of the table."""
        table = self.table[...]
        if par.size("model") == 1:
            x = table[tokens]
        else:
            local = tokens - par.index("model") * table.shape[0]
            mine = (local >= 0) & (local < table.shape[0])
            x = jnp.where(mine[..., None], table[jnp.where(mine, local, 0)], 0)
            x = par.scatter_sequence(x)
        if self.positions is not None:
            x = x + self.positions[...][_local_part(positions, x.shape[1], par)]
        return x


def _local_part(ids: Array, length: int, par: Parallel) -> Array:
    """The part of [B, T] that belongs to this device's part of the residual stream."""
    if par.size("model") == 1 or not par.split_sequence:
        return ids
    return jax.lax.dynamic_slice_in_dim(ids, par.index("model") * length, length, axis=1)


class Head(nnx.Module):
    """The output matrix, where it is not the embedding's."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs) -> None:
        std = min(model.init_std, 1 / math.sqrt(model.embed))
        kernel = normal(rngs.params(), (model.embed, model.vocab_padded), std)
        real = jnp.arange(model.vocab_padded) < model.vocab_size
        self.kernel = nnx.Param(jnp.where(real, kernel, 0), dims=("embed", "vocab"))


class Transformer:
    """What can be done with the parameters of a model. Holds no arrays.

    Args:
      model: the architecture; `vocab` must be set.
      length: longest row (learned positions have so many).
    """

    def __init__(self, model: ModelConfig, length: int) -> None:
        self.model = model
        self.length = length
        parts = {
            "embed": lambda rngs: Embed(model, length, rngs),
            "layers": lambda rngs: Layer(model, rngs, Moe if model.moe.experts else Mlp),
            "final_norm": lambda _: Norm(
                model.embed, "embed", model.norm, model.norm_eps, model.bias
            ),
        }
        if not model.tied:
            parts["head"] = lambda rngs: Head(model, rngs)
        self._parts = parts
        self._graphs = {
            name: nnx.split(nnx.eval_shape(lambda make=make: make(nnx.Rngs(0))))
            for name, make in parts.items()
        }
        self.dims: Params = {
            name: nnx.to_pure_dict(
                jax.tree.map(
                    lambda p, name=name: p.replace(
                        (("layers",) if name == "layers" else ()) + p.get_metadata()["dims"]
                    ),
                    state,
                    is_leaf=_is_param,
                )
            )
            for name, (_, state) in self._graphs.items()
        }
        """The logical dims of every parameter, as a tree like the parameters."""

    def init(self, key: Array) -> Params:
        """Initial parameters, fp32, layers stacked. Layer i's values depend on the key and i only
        (the scale of its last matrices on the number of layers too), and no value depends on how
        the result is sharded."""
        params: Params = {}
        for n, (name, make) in enumerate(self._parts.items()):
            part_key = jax.random.fold_in(key, n)

            def values(key: Array, make: Any = make) -> Params:
                return nnx.to_pure_dict(nnx.split(make(nnx.Rngs(params=key)))[1])

            if name == "layers":
                # A loop rather than vmap: one layer's random numbers are compiled, not all.
                keys = jax.vmap(partial(jax.random.fold_in, part_key))(
                    jnp.arange(self.model.layers)
                )
                params[name] = jax.lax.map(values, keys)
            else:
                params[name] = values(part_key)
        return params

    def abstract(self) -> Params:
        """Shapes of the parameters, without making them."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def count(self) -> int:
        """Parameters, without the padding of the vocabulary."""
        stored = sum(math.prod(x.shape) for x in jax.tree.leaves(self.abstract()))
        padding = (self.model.vocab_padded - self.model.vocab_size) * self.model.embed
        return stored - padding * (1 if self.model.tied else 2)

    def _state(self, name: str, params: Params) -> Any:
        """Parameters as an NNX state, whose leaves carry their dims."""
        state = jax.tree.map(lambda p: p, self._graphs[name][1])
        nnx.replace_by_pure_dict(state, params)
        return state

    def _module(self, name: str, params: Params, par: Parallel, dtype: jnp.dtype) -> Any:
        return nnx.merge(self._graphs[name][0], par.unshard(self._state(name, params), dtype))

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "B t"],
        positions: Int[Array, "B t"],
        segments: Int[Array, "B T"],
        par: Parallel,
        dtype: jnp.dtype,
        attention: str = "xla",
        remat: str = "none",
        dropout_key: Array | None = None,
        rows: Int[Array, "B"] | None = None,
        caches: Cache | None = None,
        kv_segments: Int[Array, "B S"] | None = None,
        start: Int[Array, ""] | int = 0,
    ) -> tuple[Float[Array, "B t D"], Float[Array, "D V"], Cache | None, Routing | None]:
        """Final hidden states and the head that turns them into logits.

        Args:
          params: this device's part.
          tokens, positions: ids of this device's tokens, and their places in their documents.
          segments: the document of each token of whole rows; 0 is padding.
          par: the mesh.
          dtype: of weights and activations.
          attention: see `attend`.
          remat: see `TrainConfig.remat`.
          dropout_key: of this update; None drops nothing.
          rows: see `Context.rows`; needed with a dropout key.
          caches: keys and values [L, B, S, G, K] when decoding, with the document of each key in
            `kv_segments` and the index `start` of the first token.

        Returns:
          The states (whole over `model`), the head, the new caches, and of mixtures what each
          layer reports, with a leading L.
        """
        model = self.model
        embed = self._module("embed", params["embed"], par, dtype)
        x = embed(tokens, positions, par)
        cos, sin = rope_table(model, positions) if model.positions == "rotary" else (None, None)
        if model.dropout == 0:
            dropout_key = None
        ctx = Context(
            par, dtype, attention, segments, cos, sin, dropout_key, rows, kv_segments, start
        )
        if dropout_key is not None:
            x = dropout(x, model.dropout, jax.random.fold_in(dropout_key, 0), ctx)
        x, caches, routing = self._layers(params["layers"], x, ctx, remat, caches)
        norm = self._module("final_norm", params["final_norm"], par, dtype)
        x = par.gather_sequence(norm(x))
        if model.tied:
            return x, embed.table[...].T, caches, routing
        head = self._module("head", params["head"], par, dtype)
        return x, head.kernel[...], caches, routing

    def _layers(
        self, params: Params, x: Array, ctx: Context, remat: str, caches: Cache | None
    ) -> tuple[Array, Cache | None, Routing | None]:
        """Run the stacked layers by a scan over repetitions of the window pattern."""
        layers, pattern = self.model.layers, self.model.windows
        repeats, rest = divmod(layers, len(pattern))
        unroll = self.model.scan_unroll or layers

        def run(
            window: int, x: Array, params: Params, index: Array, cache: Cache | None
        ) -> tuple[Array, Cache | None, Routing | None]:
            layer = self._module("layers", params, ctx.par, ctx.dtype)
            return layer(x, ctx, index, window, cache)

        def saving(in_loop: bool) -> Any:
            # Without a loop around it, the compiler would merge the recomputation and the original.
            save = partial(jax.checkpoint, static_argnums=(0,), prevent_cse=not in_loop)
            if remat == "full":
                return save(run)
            if ctx.par.gather_weights and ctx.par.size("data") > 1:
                return save(run, policy=regather)
            return run

        # A scan takes what `unroll` leaves over out of its loop.
        in_loop = unroll < repeats and repeats % unroll == 0
        scanned, alone = saving(in_loop), saving(in_loop=False)

        def group(x: Array, part: Any) -> tuple[Array, Any]:
            params, index, cache = part
            out = []
            for j, window in enumerate(pattern):
                at = partial(jax.tree.map, lambda a, j=j: a[j])
                x, *other = scanned(window, x, at(params), index[j], at(cache))
                out.append(other)
            return x, jax.tree.map(lambda *c: jnp.stack(c), *out)

        everything = (params, jnp.arange(layers), caches)
        n = repeats * len(pattern)
        grouped = jax.tree.map(
            lambda a: a[:n].reshape(repeats, len(pattern), *a.shape[1:]), everything
        )
        x, new = jax.lax.scan(group, x, grouped, unroll=min(unroll, max(repeats, 1)))
        new = jax.tree.map(lambda a: a.reshape(n, *a.shape[2:]), new)
        tail = []
        for j in range(rest):
            at = partial(jax.tree.map, lambda a, i=n + j: a[i])
            x, *other = alone(pattern[j], x, *at(everything))
            tail.append(other)
        if tail:
            new = jax.tree.map(lambda a, *c: jnp.concatenate([a, jnp.stack(c)]), new, *tail)
        return x, *new


def _is_param(x: Any) -> bool:
    return isinstance(x, nnx.Variable)
