"""One update: `train_step(state, batch) -> (state, metrics)`, pure and compiled once.

    batch ──┐   shard_map, one device's part                     whole arrays, any optax
    params ─┴─ weights ─ micro-batches: loss, gradients ─ sums ──┬─ clip, optimizer ─ new state
               gather     (loops; fp32 sums over tokens)         └─ metrics

The model runs inside one `jax.shard_map` over every mesh axis, so that all it sends is written in
`shardlm.parallel.collectives`. The optimizer runs outside, on global arrays, so that any optax
transformation means there what it means on one device.

A batch has rows of one length, or `Buckets` of several: a loop over micro-batches for each length.
The loops of buckets turn as often as the batch says, so that one program, compiled once, makes an
update of any mixture of lengths. With `data.balance` dynamic they turn as often as it says for each
device, and the device's time in them is part of the metrics.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from shardlm.data.buckets import Buckets
from shardlm.mesh.axes import LOSS_AXES, batch_ways
from shardlm.model.transformer import Params
from shardlm.optim import accumulate, global_norm, learning_rate
from shardlm.parallel.collectives import Parallel
from shardlm.train.engine import Batch, Engine
from shardlm.train.forward import Sums, loss_sums
from shardlm.train.mixture import Load, add_load, balance, load_metrics, sum_load
from shardlm.train.pipeline import pipelined_losses, pipelined_sums
from shardlm.train.state import DROPOUT, State, shardings, specs
from shardlm.train.stopwatch import read_clock, seconds_between


def make_gradients(engine: Engine) -> Callable[[Params, Batch | Buckets, Array], Any]:
    """A function of (params, batch, step) on global arrays: the mean gradient over the batch's
    tokens, the sum of the negative log likelihoods, the count of tokens, with `data.balance`
    dynamic the seconds [ways] that each share of the batch took, else None, and the `Load` of a
    mixture, else None."""
    config, rules = engine.config, engine.rules
    shard_params = config.mesh.shard_params
    once = shard_params == "optimizer"
    timed = config.data.balance == "dynamic"
    par = Parallel(
        rules, gather_weights=shard_params == "all", context_comm=config.mesh.context_comm
    )
    param_specs = specs(engine.abstract["params"])

    def local(params: Params, batch: Batch | Buckets, step: Array) -> Any:
        key = jax.random.fold_in(jax.random.key(config.run.seed), DROPOUT)
        key = jax.random.fold_in(key, step)
        weights = par.varying(params)
        if once:
            weights = par.gather_tree(weights, param_specs, engine.dtype)

        def micro_batch(turns: Array | int, turn: Any, carry: Any) -> Any:
            # The rows go round rather than being sliced at the loop's index: XLA fuses such a slice
            # into the loops over what depends on it, attention's masks for one, and on CPU does not
            # vectorize those.
            sums, ended, rows = carry
            grads, (nll_part, tokens, routing) = jax.grad(
                partial(loss_sums, engine, par), has_aux=True
            )(weights, {k: x[0] for k, x in rows.items()}, key)
            acc = accumulate.add(sums.accumulated, grads, tokens)
            if timed:
                # In the loop, whose end all that follows waits for.
                last = turn == turns - 1
                ended = jax.lax.cond(last, lambda: read_clock(acc.grads), lambda: ended)
            load = add_load(sums.load, routing)
            sums = Sums(acc, sums.nll + nll_part, sums.tokens + tokens, load)
            return sums, ended, {k: jnp.roll(x, -1, 0) for k, x in rows.items()}

        # The loss is equal on the devices of `model`, and typed so.
        over_tokens = partial(par.varying, axes=LOSS_AXES)
        zero = accumulate.zeros_like_accumulated(weights)
        started: Any = read_clock(weights) if timed else None
        ended = started
        sums = Sums(
            zero._replace(grads=par.varying(zero.grads), weight=over_tokens(zero.weight)),
            over_tokens(jnp.float32(0)),
            over_tokens(jnp.int32(0)),
            par.varying(Load.zero(config.model, par.size("stage"))),
        )
        for rows, turns in _loops(engine, batch):
            if par.size("stage") > 1:
                sums = pipelined_sums(engine, par, weights, rows, turns, key, sums)
            else:
                start = sums, ended, rows
                body = partial(micro_batch, turns)
                sums, ended, _ = jax.lax.fori_loop(0, turns, body, start)
        seconds = par.list_examples(seconds_between(started, ended)) if timed else None
        acc = sums.accumulated
        whole = accumulate.Accumulated(
            par.reduce_gradients(acc.grads, param_specs, gathered=once),
            par.sum_losses(acc.weight),
        )
        nll, tokens = par.sum_losses(sums.nll), par.sum_losses(sums.tokens)
        return accumulate.mean(whole), nll, tokens, seconds, sum_load(sums.load, par)

    def gradients(params: Params, batch: Batch | Buckets, step: Array) -> Any:
        batch_specs = _batch_specs(engine, isinstance(batch, Buckets))
        whole = PartitionSpec()
        run = jax.shard_map(
            local,
            mesh=engine.mesh,
            in_specs=(param_specs, batch_specs, whole),
            out_specs=(param_specs, whole, whole, whole, rules.spec(("layers",))),
        )
        return run(params, batch, step)

    return gradients


def _loops(engine: Engine, batch: Batch | Buckets) -> list[tuple[Batch, Array | int]]:
    """One device's rows of each length, cut into micro-batches [K, rows, ...], and how many of
    those to run.

    With buckets that number is part of the batch. It is the same on all devices, and typed so: the
    loops send, and a device that turned more often would wait for the others for ever. With
    `data.balance` dynamic each share of the batch has its own: then the loops send only over
    `model`, among devices of one share.
    """
    positions = engine.config.micro_batch * engine.config.data.length
    here = positions // batch_ways(engine.mesh.shape)

    def cut(part: Batch) -> Batch:
        n, length = part["tokens"].shape
        rows = here // length
        assert rows * length == here, f"rows of {length} do not divide {here} positions a device"
        assert n % rows == 0, f"{n} rows a device are not micro-batches of {rows}"
        # Cutting this device's own rows moves nothing between devices.
        return {k: x.reshape(n // rows, rows, *x.shape[1:]) for k, x in part.items()}

    if isinstance(batch, Buckets):
        counts = batch.counts
        if engine.config.data.balance == "dynamic":
            counts = counts.reshape(-1)  # Of this device: [1, S].
        return [(cut(part), counts[s]) for s, part in enumerate(batch.parts)]
    rows = cut(batch)
    return [(rows, rows["tokens"].shape[0])]


def make_train_step(engine: Engine, buckets: bool = False) -> jax.stages.Wrapped:
    """The update: a jitted function of (state, batch), with the state donated, to (state, metrics).

    Batches are flat, or `Buckets`: the one of them that `buckets` says.

    Metrics are scalars but for the last: `loss` (nats per token, mean over the batch's targets; NaN
    if it has none), `grad_norm` (before clipping), `tokens` (with a target, int32), `skipped`
    (updates skipped so far, int32) and `consecutive` (of them, since the last good one), and
    `learning_rate` (of this update; of the next one that is made if this one is skipped); for
    mixtures those of `load_metrics`. With `data.balance` dynamic there is also `device_seconds`
    [ways]: how long the devices of each share of the batch computed.
    """
    moe = engine.config.model.moe
    gradients = make_gradients(engine)
    schedule = learning_rate(engine.config)

    def train_step(state: State, batch: Batch | Buckets) -> tuple[State, dict[str, Array]]:
        grads, nll, tokens, seconds, load = gradients(state["params"], batch, state["step"])
        norm = global_norm(grads)
        params, opt = engine.optimizer.apply(
            state["params"], state["opt"], grads, norm=norm, ok=tokens > 0
        )
        metrics = {
            "loss": nll / tokens,
            "grad_norm": norm,
            "tokens": tokens,
            "skipped": opt.skipped,
            "consecutive": opt.consecutive,
            "learning_rate": schedule(state["step"] + 1 - state["opt"].skipped),
        }
        if seconds is not None:
            metrics["device_seconds"] = seconds
        if load is not None:
            metrics |= load_metrics(load, moe)
            if moe.bias_rate:
                params = balance(params, load, moe.bias_rate, opt.consecutive == 0)
        return State(params=params, opt=opt, step=state["step"] + 1), metrics

    whole = NamedSharding(engine.mesh, PartitionSpec())
    return jax.jit(
        train_step,
        in_shardings=(shardings(engine.abstract), batch_sharding(engine, buckets)),
        out_shardings=(shardings(engine.abstract), whole),
        donate_argnums=0,
    )


def make_eval_step(engine: Engine) -> jax.stages.Wrapped:
    """A jitted function of (params, flat batch): sum of the negative log likelihoods, and tokens.

    Nothing is dropped, so the batch needs no `rows`.
    """
    mesh = engine.config.mesh
    par = Parallel(
        engine.rules,
        gather_weights=mesh.shard_params != "none",
        context_comm=mesh.context_comm,
    )

    def local(params: Params, batch: Batch) -> tuple[Array, Array]:
        params = par.varying(params)
        if par.size("stage") > 1:
            nll, tokens = pipelined_losses(engine, par, params, batch)
        else:
            _, (nll, tokens, _) = loss_sums(engine, par, params, batch)
        return par.sum_losses(nll), par.sum_losses(tokens)

    spec = PartitionSpec()
    return jax.jit(
        jax.shard_map(
            local,
            mesh=engine.mesh,
            in_specs=(specs(engine.abstract["params"]), _batch_specs(engine)),
            out_specs=(spec, spec),
        )
    )


def batch_sharding(engine: Engine, buckets: bool = False) -> Any:
    """How a batch is split: for `jax.device_put`, one sharding for all arrays of a flat batch, or
    with `buckets` a `Buckets` of one for the counts and one for all arrays of all parts."""
    return jax.tree.map(
        partial(NamedSharding, engine.mesh),
        _batch_specs(engine, buckets),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def _batch_specs(engine: Engine, buckets: bool = False) -> Any:
    # Of the first dimension only, since `rows` has no other.
    rows = engine.rules.spec(("batch",))
    if not buckets:
        return rows
    dynamic = engine.config.data.balance == "dynamic"
    return Buckets(rows if dynamic else PartitionSpec(), rows)  # type: ignore[arg-type]
