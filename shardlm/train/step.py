"""One update: `train_step(state, batch) -> (state, metrics)`, pure and compiled once.

    batch ──┐   shard_map, one device's part                     whole arrays, any optax
    params ─┴─ weights ─ micro-batches: loss, gradients ─ sums ──┬─ clip, optimizer ─ new state
               gather     (a scan; fp32 sums over tokens)        └─ metrics

The model runs inside one `jax.shard_map` over every mesh axis, so that all it sends is written in
`shardlm.parallel.collectives`. The optimizer runs outside, on global arrays, so that any optax
transformation means there what it means on one device.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlm.config import Config
from shardlm.mesh import AxisRules
from shardlm.mesh.axes import BATCH_AXES
from shardlm.model.loss import LossRules, next_token_loss
from shardlm.model.transformer import Params, Transformer
from shardlm.optim import Guarded, accumulate, global_norm, learning_rate
from shardlm.parallel.collectives import Parallel
from shardlm.train.state import DROPOUT, State, shardings, specs

Batch = Mapping[str, Array]
"""tokens, targets, segments, positions: int32 [batch, T]."""


class Engine(NamedTuple):
    """The fixed parts that the compiled functions are made of."""

    config: Config
    mesh: Mesh
    rules: AxisRules
    transformer: Transformer
    optimizer: Guarded
    abstract: State
    """Shapes and shardings of the state."""
    dtype: jnp.dtype
    """Compute dtype."""
    attention: str
    """Attention implementation."""


def loss_sums(
    engine: Engine,
    par: Parallel,
    params: Params,
    batch: Batch,
    rows: Array | None = None,
    dropout_key: Array | None = None,
) -> tuple[Array, tuple[Array, Array]]:
    """Objective, negative log likelihood and tokens of one device's rows, summed.

    To be called inside `shard_map`. `params` are typed as varying on every axis if they are to be
    differentiated.
    """
    config = engine.config
    batch = pad_sequence(batch, par.size("model"))
    x, kernel, _ = engine.transformer.hidden(
        params,
        batch["tokens"],
        batch["positions"],
        batch["segments"],
        par,
        engine.dtype,
        attention=engine.attention,
        remat=config.train.remat,
        dropout_key=dropout_key,
        rows=rows,
    )
    model = config.model
    rules = LossRules(
        model.vocab_size, model.logit_softcap, config.train.z_loss, config.train.loss_chunk
    )
    x = x.reshape(-1, x.shape[-1])
    loss = next_token_loss(x, kernel, batch["targets"].reshape(-1), rules, par)
    return loss.objective, (loss.nll, loss.tokens)


def pad_sequence(batch: Batch, multiple: int) -> Batch:
    """Pad rows [B, T] to a multiple with segment 0 and no targets."""
    length = batch["tokens"].shape[1]
    pad = padded_length(length, multiple) - length
    if not pad:
        return batch
    return {
        k: jnp.pad(x, ((0, 0), (0, pad)), constant_values=-1 if k == "targets" else 0)
        for k, x in batch.items()
    }


def padded_length(length: int, multiple: int) -> int:
    """Tokens of a row that `pad_sequence` has padded."""
    return length + -length % multiple


def make_gradients(engine: Engine) -> Callable[[Params, Batch, Array], Any]:
    """A function of (params, batch, step) on global arrays: the mean gradient over the batch's
    tokens, the sum of the negative log likelihoods, and the count of tokens."""
    config, rules = engine.config, engine.rules
    shard_params = config.mesh.shard_params
    once = shard_params == "optimizer"
    par = Parallel(rules, gather_weights=shard_params == "all")
    param_specs = specs(engine.abstract["params"])
    batch_spec = rules.spec(("batch", None))
    micro_batches = config.micro_batches

    def local(params: Params, batch: Batch, step: Array) -> Any:
        n = batch["tokens"].shape[0]
        first = par.index(*BATCH_AXES) * n
        key = jax.random.fold_in(jax.random.key(config.run.seed), DROPOUT)
        key = jax.random.fold_in(key, step)

        def cut(x: Array) -> Array:
            # Cutting this device's own rows moves nothing between devices.
            return x.reshape(micro_batches, n // micro_batches, *x.shape[1:])

        parts = {k: cut(x) for k, x in batch.items()}
        parts["rows"] = cut(first + jnp.arange(n))
        weights = par.varying(params)
        if once:
            weights = par.gather_tree(weights, param_specs, engine.dtype)

        def micro_batch(carry: Any, _: None) -> tuple[Any, None]:
            # The parts go round rather than being scanned over: XLA fuses the slice at a running
            # index that a scan takes into the loops over what depends on it, attention's masks for
            # one, and on CPU does not vectorize those.
            acc, nll, count, parts = carry
            part = {k: x[0] for k, x in parts.items()}
            parts = {k: jnp.roll(x, -1, 0) for k, x in parts.items()}
            rows = part["rows"]
            part = {k: x for k, x in part.items() if k != "rows"}
            grads, (nll_part, tokens) = jax.grad(partial(loss_sums, engine, par), has_aux=True)(
                weights, part, rows, key
            )
            return (accumulate.add(acc, grads, tokens), nll + nll_part, count + tokens, parts), None

        # The loss is equal on the devices of `model`, and typed so.
        examples = partial(par.varying, axes=BATCH_AXES)
        zero = accumulate.zeros_like_accumulated(weights)
        start = (
            zero._replace(grads=par.varying(zero.grads), weight=examples(zero.weight)),
            examples(jnp.float32(0)),
            examples(jnp.int32(0)),
            parts,
        )
        (acc, nll, count, _), _ = jax.lax.scan(micro_batch, start, None, micro_batches)
        whole = accumulate.Accumulated(
            par.reduce_gradients(acc.grads, param_specs, gathered=once),
            par.sum_examples(acc.weight),
        )
        return accumulate.mean(whole), par.sum_examples(nll), par.sum_examples(count)

    return jax.shard_map(
        local,
        mesh=engine.mesh,
        in_specs=(param_specs, batch_spec, PartitionSpec()),
        out_specs=(param_specs, PartitionSpec(), PartitionSpec()),
    )


def make_train_step(engine: Engine) -> jax.stages.Wrapped:
    """The update: a jitted function of (state, batch), with the state donated, to (state, metrics).

    Metrics are scalars: `loss` (nats a token, mean over the batch's targets), `grad_norm` (before
    clipping), `tokens` (with a target, int32), `skipped` (updates skipped so far, int32) and
    `consecutive` (of them, since the last good one), and `learning_rate` (of this update; of the
    next one that is made if this one is skipped).
    """
    gradients = make_gradients(engine)
    schedule = learning_rate(engine.config)

    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
        grads, nll, tokens = gradients(state["params"], batch, state["step"])
        norm = global_norm(grads)
        params, opt = engine.optimizer.apply(
            state["params"], state["opt"], grads, norm=norm, ok=tokens > 0
        )
        metrics = {
            "loss": nll / jnp.maximum(tokens, 1),
            "grad_norm": norm,
            "tokens": tokens,
            "skipped": opt.skipped,
            "consecutive": opt.consecutive,
            "learning_rate": schedule(state["step"] + 1 - state["opt"].skipped),
        }
        return State(params=params, opt=opt, step=state["step"] + 1), metrics

    whole = NamedSharding(engine.mesh, PartitionSpec())
    return jax.jit(
        train_step,
        in_shardings=(shardings(engine.abstract), batch_sharding(engine)),
        out_shardings=(shardings(engine.abstract), whole),
        donate_argnums=0,
    )


def make_eval_step(engine: Engine) -> jax.stages.Wrapped:
    """A jitted function of (params, batch): sum of the negative log likelihoods, and tokens."""
    par = Parallel(engine.rules, gather_weights=engine.config.mesh.shard_params != "none")

    def local(params: Params, batch: Batch) -> tuple[Array, Array]:
        _, (nll, tokens) = loss_sums(engine, par, par.varying(params), batch)
        return par.sum_examples(nll), par.sum_examples(tokens)

    spec = PartitionSpec()
    return jax.jit(
        jax.shard_map(
            local,
            mesh=engine.mesh,
            in_specs=(specs(engine.abstract["params"]), engine.rules.spec(("batch", None))),
            out_specs=(spec, spec),
        )
    )


def batch_sharding(engine: Engine) -> NamedSharding:
    """How a batch [batch, T] is split."""
    return NamedSharding(engine.mesh, engine.rules.spec(("batch", None)))
