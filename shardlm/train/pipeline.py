"""Micro-batches through the devices of `stage`: `shardlm.parallel.pipeline`'s ticks, run.

In a tick every device takes a micro-batch forward through a run of its layers; the micro-batch that
has left the last run gets its loss; and every device takes one backward. What has no work in a tick
computes with what is there, and its gradients are multiplied by nothing: a device that waited
instead would be ready no sooner, since the others do work.

The loss would keep only the last device busy, for as long as a layer or several take where the
vocabulary is large. Instead the tokens of its micro-batch are dealt to all devices, of which each
has the head.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from shardlm.mesh.axes import LOSS_AXES
from shardlm.model.loss import Loss, next_token_loss
from shardlm.model.transformer import Params
from shardlm.parallel.collectives import Parallel, after, match_varying
from shardlm.parallel.pipeline import Item, Schedule
from shardlm.parallel.sequence import row_multiple
from shardlm.train.engine import Batch, Engine
from shardlm.train.forward import Part, Sums, device_part, loss_rules, padded_length
from shardlm.train.mixture import Load, auxiliary_loss


class Flow(NamedTuple):
    """What a tick leaves to the next one, of one device."""

    arrived: Array
    """[B, t/model, D], what the run before made of the micro-batch to go forward next."""
    returned: Array
    """[B, t/model, D], gradient of what this device made of the one to go backward next."""
    kept: Array
    """[`Schedule.kept`, B, t/model, D], what came into runs, by the number of the item."""
    sums: Sums


def pipelined_sums(
    engine: Engine,
    par: Parallel,
    weights: Params,
    rows: Batch,
    micro_batches: Array | int,
    key: Array,
    sums: Sums,
) -> Sums:
    """The sums with these micro-batches added. To be called inside `shard_map`.

    Args:
      engine: of the run.
      par: its mesh.
      weights: this device's, typed as varying on every axis.
      rows: arrays [K, rows, ...], one device's micro-batches.
      micro_batches: how many of them to run, the same on all devices.
      key: of the dropout masks of this update.
      sums: so far.
    """
    schedule = engine.transformer.schedule
    stage = _Stage(engine, par, weights, rows, micro_batches, key)
    some = isinstance(micro_batches, int) or micro_batches > 0
    lag = schedule.lag * some
    # From the first loss to the tick after the last.
    end = lag + schedule.items(micro_batches) - (schedule.rounds - 1) * schedule.stages
    flow = stage.begin(sums)
    flow = jax.lax.fori_loop(0, lag, stage.only_forward, flow)
    flow = jax.lax.fori_loop(lag, end, stage.both, flow)
    flow = jax.lax.fori_loop(end, end + lag, stage.only_backward, flow)
    # A loop of one turn is none to XLA. The losses do not vary over `model`.
    last = par.max_model(flow.returned[0, 0, 0])
    return jax.tree.map(lambda x: stage.after(x, last), flow.sums)


def pipelined_losses(
    engine: Engine, par: Parallel, params: Params, batch: Batch
) -> tuple[Array, Array]:
    """The sum of the negative log likelihoods of this device's share of tokens, and how many have a
    target. Nothing is dropped.

    A batch is cut into as many micro-batches as there are stages, or as many as divide its rows.
    """
    schedule = engine.transformer.schedule
    count = math.gcd(batch["tokens"].shape[0], schedule.stages)
    rows = {k: x.reshape(count, -1, *x.shape[1:]) for k, x in batch.items()}
    stage = _Stage(engine, par, params, rows, count, None)

    def tick(tick: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        arrived, nll, tokens = carry
        y, _ = stage.forward(tick, arrived)

        arrived = par.send_forward(y, schedule.rounds > 1)
        y = stage.after(y, arrived)

        def add() -> tuple[Array, Array]:
            loss = stage.loss(stage.tail, y, stage.part(stage.finished(tick)))
            return nll + loss.nll, tokens + loss.tokens

        ends = stage.ends(stage.finished(tick))
        nll, tokens = jax.lax.cond(ends, add, lambda: (nll, tokens))
        return arrived, nll, tokens

    nll, tokens = (
        par.varying(jnp.zeros((), dtype), LOSS_AXES) for dtype in (jnp.float32, jnp.int32)
    )
    ticks = schedule.lag + schedule.items(count) - (schedule.rounds - 1) * schedule.stages
    carry = (stage.nothing(), nll, tokens)
    _, nll, tokens = jax.lax.fori_loop(0, ticks, tick, carry)
    return nll, tokens


@dataclass(frozen=True)
class _Stage:
    """One device of `stage`, in one loop over micro-batches."""

    engine: Engine
    par: Parallel
    weights: Params
    rows: Batch
    micro_batches: Array | int
    key: Array | None

    @property
    def schedule(self) -> Schedule:
        return self.engine.transformer.schedule

    @property
    def index(self) -> Array:
        return self.par.index("stage")

    @property
    def tail(self) -> Params:
        """The parameters that the loss needs."""
        names = ("final_norm", "embed" if self.engine.config.model.tied else "head")
        return {name: self.weights[name] for name in names}

    def part(self, item: Item) -> Part:
        """What a forward pass of the item's micro-batch needs."""
        last = self.rows["tokens"].shape[0] - 1
        at = jnp.clip(item.micro_batch, 0, last)
        rows = {
            k: jax.lax.dynamic_index_in_dim(x, at, keepdims=False) for k, x in self.rows.items()
        }
        # Or XLA fuses the slices into the loops over attention's masks, and on CPU does not
        # vectorize those.
        rows = jax.lax.optimization_barrier(rows)
        return device_part(self.engine, self.par, rows, self.key)

    def nothing(self) -> Array:
        """Zeros of the shape of x."""
        rows, length = self.rows["tokens"].shape[1:]
        par = self.par
        length = padded_length(length, row_multiple(par.rules.sizes, par.context_comm))
        length //= par.size("context") * par.size("model")
        shape = (rows, length, self.engine.config.model.embed)
        return par.varying(jnp.zeros(shape, self.engine.dtype))

    def after(self, x: Array, first: Array) -> Array:
        """x, on CPU not before `first`, see `shardlm.parallel.collectives.after`. Elsewhere the
        compiler is free to send what the next tick needs while this one computes."""
        on_cpu = self.engine.mesh.devices.flat[0].platform == "cpu"
        return after(x, first) if on_cpu else x

    def begin(self, sums: Sums) -> Flow:
        """Before the first tick."""
        zeros = self.nothing()
        kept = jnp.broadcast_to(zeros, (self.schedule.kept, *zeros.shape))
        return Flow(zeros, zeros, kept, sums)

    def only_forward(self, tick: Array, flow: Flow) -> Flow:
        y, flow = self._forward(tick, flow)
        return flow._replace(arrived=self.par.send_forward(y, self.schedule.rounds > 1))

    def both(self, tick: Array, flow: Flow) -> Flow:
        y, flow = self._forward(tick, flow)
        arrived = self.par.send_forward(y, self.schedule.rounds > 1)
        sums, d_y = self._loss(tick, self.after(y, arrived), flow.sums)
        return self._backward(tick, d_y, flow._replace(arrived=arrived, sums=sums))

    def only_backward(self, tick: Array, flow: Flow) -> Flow:
        return self._backward(tick, self.nothing(), flow)

    def _forward(self, tick: Array, flow: Flow) -> tuple[Array, Flow]:
        y, x = self.forward(tick, flow.arrived)
        at = self.schedule.forward(tick, self.index, self.micro_batches).number
        kept = jax.lax.dynamic_update_index_in_dim(flow.kept, x, at % self.schedule.kept, 0)
        return y, flow._replace(kept=kept)

    def forward(self, tick: Array, arrived: Array) -> tuple[Array, Array]:
        """What the device makes of its forward item, and what it makes it of."""
        transformer = self.engine.transformer
        item = self.schedule.forward(tick, self.index, self.micro_batches)
        part = self.part(item)
        embedded = transformer.embed(self.weights, part.tokens, part.positions, part.context)
        first = (self.index == 0) & (item.round == 0)
        x = jnp.where(first, embedded, arrived)
        params = transformer.take_run(self.weights["layers"], item.round)
        numbers = transformer.run_numbers(item.round, self.par)
        y, _, _ = transformer.layers(params, numbers, x, part.context)
        return y, x

    def finished(self, tick: Array) -> Item:
        """The forward item of the last device; the same on all devices, and typed so."""
        return self.schedule.forward(tick, self.schedule.stages - 1, self.micro_batches)

    def ends(self, item: Item) -> Any:
        """Whether a micro-batch has left its last run."""
        return item.valid & (item.round == self.schedule.rounds - 1)

    def loss(self, tail: Params, y: Array, part: Part) -> Loss:
        """Of this device's share of the tokens that the last device's y is of.

        Args:
          tail: see `tail`.
          y: [B, t/model, D], of this device; that of the last one counts.
          part: of the micro-batch that y is of.
        """
        par, stages = self.par, self.schedule.stages
        y = y.reshape(-1, y.shape[-1])
        # [model, N]: targets of the tokens that each device of `model` has.
        rows = part.targets.shape[0]
        targets = part.targets.reshape(rows, par.size("model"), -1).swapaxes(0, 1)
        targets = targets.reshape(par.size("model"), -1)
        pad = -y.shape[0] % stages
        share = par.share_tokens(jnp.pad(y, ((0, pad), (0, 0))))
        targets = jnp.pad(targets, ((0, 0), (0, pad)), constant_values=-1)
        mine = targets.reshape(-1, stages, share.shape[0])[:, self.index].reshape(-1)
        x, kernel = self.engine.transformer.output(tail, share[None], part.context)
        return next_token_loss(x[0], kernel, mine, loss_rules(self.engine.config), par)

    def _loss(self, tick: Array, y: Array, sums: Sums) -> tuple[Sums, Array]:
        """The sums with what has left the last run, and the gradient of the last device's y."""
        item = self.finished(tick)

        def objective(tail: Params, y: Array) -> tuple[Array, Loss]:
            loss = self.loss(tail, y, self.part(item))
            return loss.objective, loss

        def add() -> tuple[Sums, Array]:
            (grads, d_y), loss = jax.grad(objective, argnums=(0, 1), has_aux=True)(self.tail, y)
            acc = sums.accumulated
            acc = acc._replace(
                grads=_add(acc.grads, grads), weight=acc.weight + loss.tokens.astype(jnp.float32)
            )
            nll, tokens = sums.nll + loss.nll, sums.tokens + loss.tokens
            return sums._replace(accumulated=acc, nll=nll, tokens=tokens), d_y

        if self.schedule.rounds == 1:
            return add()
        return jax.lax.cond(self.ends(item), add, lambda: (sums, self.nothing()))

    def _backward(self, tick: Array, d_y: Array, flow: Flow) -> Flow:
        """Take the backward item backward; `d_y` is the gradient where it has just got its loss."""
        par, transformer, schedule = self.par, self.engine.transformer, self.schedule
        item = schedule.backward(tick, self.index, self.micro_batches)
        part = self.part(item)
        last = (self.index == schedule.stages - 1) & (item.round == schedule.rounds - 1)
        d_y = jnp.where(item.valid, jnp.where(last, d_y, flow.returned), 0)
        x = jax.lax.dynamic_index_in_dim(flow.kept, item.number % schedule.kept, keepdims=False)
        x = self.after(x, d_y)
        params = transformer.take_run(self.weights["layers"], item.round)
        numbers = transformer.run_numbers(item.round, par)

        def run(params: Params, x: Array) -> Any:
            remat = self.engine.config.train.remat
            y, _, routing = transformer.layers(params, numbers, x, part.context, remat)
            if routing is None:
                return (y, None), None
            return (y, auxiliary_loss(routing, part.targets, par)), Load.of(routing)

        (_, auxiliary), back, load = jax.vjp(run, params, x, has_aux=True)
        d_auxiliary = jax.tree.map(
            lambda a: match_varying(item.valid.astype(a.dtype), a), auxiliary
        )
        d_params, d_x = back((d_y, d_auxiliary))
        returned = par.send_backward(d_x, schedule.rounds > 1)
        sums = self._add_run(flow.sums, item, d_params, load)
        sums = self._add_embedding(tick, self.after(d_x, returned), sums)
        return flow._replace(returned=returned, sums=sums)

    def _add_run(self, sums: Sums, item: Item, grads: Params, load: Load | None) -> Sums:
        """Sums with the gradients, and the load, of a run of layers."""
        transformer, acc = self.engine.transformer, sums.accumulated
        load = jax.tree.map(lambda x: jnp.where(item.valid, x, 0), load)
        before = (acc.grads["layers"], sums.load)
        run = transformer.take_run(before, item.round)
        after = jax.tree.map(lambda a, g: a + g.astype(a.dtype), run, (grads, load))
        layers, loads = transformer.put_run(before, after, item.round)
        acc = acc._replace(grads=acc.grads | {"layers": layers})
        return sums._replace(accumulated=acc, load=loads)

    def _add_embedding(self, tick: Array, d_x: Array, sums: Sums) -> Sums:
        """Sums with the gradient of the embedding, which is the first device's."""
        item = self.schedule.backward(tick, 0, self.micro_batches)
        begins = item.valid & (item.round == 0)

        def add() -> Sums:
            part = self.part(item)

            def embed(params: Params) -> Array:
                return self.engine.transformer.embed(
                    params, part.tokens, part.positions, part.context
                )

            params = {"embed": self.weights["embed"]}
            d_embedded = jnp.where((self.index == 0) & begins, d_x, 0)
            (grads,) = jax.vjp(embed, params)[1](d_embedded)
            acc = sums.accumulated
            return sums._replace(accumulated=acc._replace(grads=_add(acc.grads, grads)))

        if self.schedule.rounds == 1:
            return add()
        return jax.lax.cond(begins, add, lambda: sums)


def _add(sums: Params, grads: Params) -> Params:
    """Gradients of some of the parameters added to those of all."""
    return sums | {
        name: jax.tree.map(lambda a, g: a + g.astype(a.dtype), sums[name], part)
        for name, part in grads.items()
    }
