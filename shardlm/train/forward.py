"""From one device's part of a batch to the sums that an update is made of."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from shardlm.config import Config
from shardlm.model.layers import Context, Routing
from shardlm.model.loss import LossRules, next_token_loss
from shardlm.model.transformer import Params
from shardlm.optim.accumulate import Accumulated
from shardlm.parallel.collectives import Parallel
from shardlm.parallel.sequence import row_multiple
from shardlm.train.engine import Batch, Engine
from shardlm.train.mixture import Load, auxiliary_loss


class Sums(NamedTuple):
    """Over the micro-batches so far, of one device."""

    accumulated: Accumulated
    """Gradients of the summed objective, and the tokens with a target."""
    nll: Array
    """Negative log likelihoods, in nats."""
    tokens: Array
    """With a target, int32."""
    load: Load | None
    """Of a mixture."""


def loss_sums(
    engine: Engine,
    par: Parallel,
    params: Params,
    batch: Batch,
    dropout_key: Array | None = None,
) -> tuple[Array, tuple[Array, Array, Routing | None]]:
    """Objective, negative log likelihood and tokens of one device's rows, summed; and of a mixture
    what its layers report.

    To be called inside `shard_map`. `params` are typed as varying on every axis if they are to be
    differentiated. Without a dropout key the batch needs no `rows`.
    """
    part = device_part(engine, par, batch, dropout_key)
    x, kernel, _, routing = engine.transformer.hidden(
        params, part.tokens, part.positions, part.context, remat=engine.config.train.remat
    )
    x = x.reshape(-1, x.shape[-1])
    targets = part.targets
    loss = next_token_loss(x, kernel, targets.reshape(-1), loss_rules(engine.config), par)
    objective = loss.objective
    if routing is not None:
        objective += auxiliary_loss(routing, targets, par)
    return objective, (loss.nll, loss.tokens, routing)


def loss_rules(config: Config) -> LossRules:
    """How the loss of a run is formed."""
    model, train = config.model, config.train
    return LossRules(model.vocab_size, model.logit_softcap, train.z_loss, train.loss_chunk)


class Part(NamedTuple):
    """What a forward pass needs of one device's part of a batch."""

    tokens: Array  # [B, t]
    positions: Array  # [B, t]
    targets: Array  # [B, t]
    context: Context


def device_part(engine: Engine, par: Parallel, batch: Batch, dropout_key: Array | None) -> Part:
    """Rows padded to what the mesh can split, and this device's tokens of them."""
    batch = pad_sequence(batch, row_multiple(par.rules.sizes, par.context_comm))
    positions = par.row_part(batch["positions"])
    context = engine.transformer.context(
        par,
        engine.dtype,
        engine.attention,
        batch["segments"],
        positions,
        dropout_key,
        batch.get("rows"),
    )
    return Part(par.row_part(batch["tokens"]), positions, par.row_part(batch["targets"]), context)


def pad_sequence(batch: Batch, multiple: int) -> Batch:
    """Pad rows [B, T] to a multiple with segment 0 and no targets; `rows` [B] stay."""
    length = batch["tokens"].shape[1]
    pad = padded_length(length, multiple) - length
    if not pad:
        return batch
    return {
        k: x
        if k == "rows"
        else jnp.pad(x, ((0, 0), (0, pad)), constant_values=-1 if k == "targets" else 0)
        for k, x in batch.items()
    }


def padded_length(length: int, multiple: int) -> int:
    """Tokens of a row that `pad_sequence` has padded."""
    return length + -length % multiple
