"""The decoder-only transformer: embedding, a scan over stacked layers, final norm, head.

Shapes: B batch, T length (t: of this device of `context`, s: of this device of `model` too, between
the matrices), D embed, V vocabulary, L layers. All arrays are one device's part.
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
from shardlm.parallel.pipeline import WHOLE, Schedule

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
      schedule: how `stage` splits the layers, which are stored in its order.
    """

    def __init__(self, model: ModelConfig, length: int, schedule: Schedule = WHOLE) -> None:
        self.model = model
        self.length = length
        self.schedule = schedule
        self.order = schedule.layers(model.layers).reshape(-1)
        """Number of each layer, in the order in which they are stored."""
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
                keys = jax.vmap(partial(jax.random.fold_in, part_key))(jnp.asarray(self.order))
                # A loop rather than vmap: one layer's random numbers are compiled, not all. Its
                # turns are split over `stage`.
                stages = self.schedule.stages
                if stages > 1:
                    by_turn = keys.reshape(stages, -1).swapaxes(0, 1)
                    made = jax.lax.map(jax.vmap(values), by_turn)
                    params[name] = jax.tree.map(
                        lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), made
                    )
                else:
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

    def embed(
        self, params: Params, tokens: Int[Array, "B t"], positions: Int[Array, "B t"], ctx: Context
    ) -> Float[Array, "B s D"]:
        """What goes into the first layer."""
        embed = self._module("embed", params["embed"], ctx.par, ctx.dtype)
        return self._embed(embed, tokens, positions, ctx)

    def _embed(self, embed: Embed, tokens: Array, positions: Array, ctx: Context) -> Array:
        x = embed(tokens, positions, ctx.par)
        if ctx.dropout_key is None:
            return x
        return dropout(x, self.model.dropout, jax.random.fold_in(ctx.dropout_key, 0), ctx)

    def output(
        self,
        params: Params,
        x: Float[Array, "B s D"],
        ctx: Context,
        embed: Embed | None = None,
    ) -> tuple[Float[Array, "B t D"], Float[Array, "D V"]]:
        """What the head gets of the last layer's x, whole over `model`, and the head.

        Args:
          params: all but the layers.
          x: of the last layer.
          ctx: of the forward pass.
          embed: the embedding, if it is at hand.
        """
        norm = self._module("final_norm", params["final_norm"], ctx.par, ctx.dtype)
        x = ctx.par.gather_sequence(norm(x))
        if not self.model.tied:
            return x, self._module("head", params["head"], ctx.par, ctx.dtype).kernel[...]
        if embed is None:
            embed = self._module("embed", params["embed"], ctx.par, ctx.dtype)
        return x, embed.table[...].T

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "B t"],
        positions: Int[Array, "B t"],
        ctx: Context,
        remat: str = "none",
        caches: Cache | None = None,
    ) -> tuple[Float[Array, "B t D"], Float[Array, "D V"], Cache | None, Routing | None]:
        """Final hidden states and the head that turns them into logits.

        With stages all devices go through all of them in turn, each doing what counts in its own:
        right, and as slow as one device. Training does it by `shardlm.train.pipeline`.

        Args:
          params: this device's part.
          tokens, positions: ids of this device's tokens, and their places in their documents.
          ctx: see `context`.
          remat: see `TrainConfig.remat`.
          caches: keys and values [L, B, S, G, K] of this device's layers when decoding.

        Returns:
          The states (whole over `model`), the head, the new caches, and of mixtures what each
          layer reports, with a leading L (not with stages).
        """
        embed = self._module("embed", params["embed"], ctx.par, ctx.dtype)
        x = self._embed(embed, tokens, positions, ctx)
        if ctx.par.size("stage") == 1:
            numbers = jnp.arange(self.model.layers)
            x, caches, routing = self.layers(params["layers"], numbers, x, ctx, remat, caches)
        else:
            x, caches = self._in_turn(params["layers"], x, ctx, caches)
            routing = None
        return *self.output(params, x, ctx, embed), caches, routing

    def context(
        self,
        par: Parallel,
        dtype: jnp.dtype,
        attention: str,
        segments: Int[Array, "B T"],
        positions: Int[Array, "B t"],
        dropout_key: Array | None = None,
        rows: Int[Array, "B"] | None = None,
        kv_segments: Int[Array, "B S"] | None = None,
        start: Int[Array, ""] | int = 0,
    ) -> Context:
        """What the layers of one forward pass need.

        Args:
          par: the mesh.
          dtype: of weights and activations.
          attention: see `attend`.
          segments: the document of each token of whole rows; 0 is padding.
          positions: places of this device's tokens in their documents.
          dropout_key: of this update; None drops nothing.
          rows: see `Context.rows`; needed with a dropout key.
          kv_segments: when decoding, the document of each key of the caches.
          start: when decoding, the index of the first token.
        """
        rotary = self.model.positions == "rotary"
        cos, sin = rope_table(self.model, positions) if rotary else (None, None)
        if self.model.dropout == 0:
            dropout_key = None
        return Context(
            par, dtype, attention, segments, cos, sin, dropout_key, rows, kv_segments, start
        )

    def run_numbers(self, turn: Array | int, par: Parallel) -> Int[Array, "L"]:
        """Numbers of the layers that this device of `stage` takes in a round."""
        layers = jnp.asarray(self.schedule.layers(self.model.layers))
        return layers[par.index("stage"), turn]

    def take_run(self, tree: Any, turn: Array | int) -> Any:
        """Of a tree with the layers of this device in front, those of a round."""
        rounds = self.schedule.rounds
        if rounds == 1:
            return tree

        def take(x: Array) -> Array:
            runs = x.reshape(rounds, -1, *x.shape[1:])
            return jax.lax.dynamic_index_in_dim(runs, turn, keepdims=False)

        return jax.tree.map(take, tree)

    def put_run(self, tree: Any, part: Any, turn: Array | int) -> Any:
        """The tree with those replaced by `part`."""
        rounds = self.schedule.rounds
        if rounds == 1:
            return part

        def put(x: Array, y: Array) -> Array:
            runs = x.reshape(rounds, -1, *x.shape[1:])
            return jax.lax.dynamic_update_index_in_dim(runs, y, turn, 0).reshape(x.shape)

        return jax.tree.map(put, tree, part)

    def _in_turn(
        self, params: Params, x: Array, ctx: Context, caches: Cache | None
    ) -> tuple[Array, Cache | None]:
        """All layers of all stages, one run after the other."""
        par, stages = ctx.par, self.schedule.stages

        def run(i: Array, carry: tuple[Array, Cache | None]) -> tuple[Array, Cache | None]:
            x, caches = carry
            turn, stage = i // stages, i % stages
            part, kept = self.take_run((params, caches), turn)
            x = par.varying(x, ("stage",))
            x, new, _ = self.layers(part, self.run_numbers(turn, par), x, ctx, "none", kept)
            mine = par.index("stage") == stage
            if caches is not None:
                new = jax.tree.map(lambda a, b: jnp.where(mine, a, b), new, kept)
                caches = self.put_run(caches, new, turn)
            return par.from_stage(x, stage), caches

        return jax.lax.fori_loop(0, self.schedule.runs, run, (x, caches))

    def layers(
        self,
        params: Params,
        numbers: Int[Array, "L"],
        x: Float[Array, "B s D"],
        ctx: Context,
        remat: str = "none",
        caches: Cache | None = None,
    ) -> tuple[Array, Cache | None, Routing | None]:
        """Run stacked layers by a scan over repetitions of the window pattern.

        Args:
          params: of the layers, stacked.
          numbers: of each layer, which its dropout masks depend on.
          x, ctx, remat, caches: see `hidden`.
        """
        layers, pattern = numbers.shape[0], self.model.windows
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

        everything = (params, numbers, caches)
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
