"""What an update of a mixture keeps count of: the load of its experts, for metrics and balance."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from shardlm.config import ModelConfig, MoeConfig
from shardlm.model.layers import Routing
from shardlm.model.transformer import Params
from shardlm.parallel.collectives import Parallel


class Load(NamedTuple):
    """Sums over the tokens of an update, padding left out."""

    experts: Array
    """[L, E] int32, tokens that chose each expert, whether or not they had a place."""
    dropped: Array
    """[L] int32, of those choices, what had no place."""
    entropy: Array
    """[L] fp32, of the experts' chances, in nats."""

    @classmethod
    def zero(cls, model: ModelConfig, stages: int) -> "Load | None":
        """Before the first micro-batch, of one device's layers; None without experts."""
        layers, experts = model.layers // stages, model.moe.experts
        if not experts:
            return None
        return cls(
            jnp.zeros((layers, experts), jnp.int32),
            jnp.zeros(layers, jnp.int32),
            jnp.zeros(layers, jnp.float32),
        )

    @classmethod
    def of(cls, routing: Routing) -> "Load":
        """Of one micro-batch."""
        return cls(routing.load, routing.dropped, routing.entropy)


def auxiliary_loss(routing: Routing, targets: Array, par: Parallel) -> Array:
    """Sum of the auxiliary losses of one device's rows, over layers.

    A row counts as often as it has targets [B, T], as it does in the sum of the other losses: the
    division by the targets of the update makes means of both. All devices of `model` have the same
    sum; each differentiates its part of it.
    """
    weight = (targets >= 0).sum(1, dtype=jnp.float32)
    return par.sum_model((routing.losses * weight).sum() / par.size("model"))


def add_load(load: Load | None, routing: Routing | None) -> Load | None:
    """The sums with one micro-batch more."""
    if load is None or routing is None:
        return None
    return jax.tree.map(jnp.add, load, Load.of(routing))


def sum_load(load: Load | None, par: Parallel) -> Load | None:
    """Over all devices; those of `model` have counted the same tokens."""
    return jax.tree.map(lambda x: par.sum_tokens(par.max_model(x)), load)


def load_metrics(load: Load, moe: MoeConfig) -> dict[str, Array]:
    """Scalars, see `shardlm.observe.MIXTURE_METRICS`."""
    choices = load.experts.sum(1).astype(jnp.float32)
    busiest = load.experts.max(1) * moe.experts / choices
    return {
        "dropped": load.dropped.sum() / choices.sum(),
        "expert_load": busiest.max(),
        "router_entropy": load.entropy.sum() * moe.top_k / choices.sum(),
    }


def balance(params: Params, load: Load, rate: float, made: Array) -> Params:
    """Parameters with the routers' biases moved one step, if the update was made: up for an expert
    with less than the mean load, down for one with more (Wang et al., arXiv 2408.15664).

    Args:
      params: with layers.mlp.router.bias [L, E].
      load: of the update.
      rate: see `MoeConfig.bias_rate`.
      made: whether the update was; a bool scalar.
    """
    mean = load.experts.mean(1, keepdims=True)
    step = jnp.where(made, rate * jnp.sign(mean - load.experts), 0)

    def leaf(path: Any, x: Array) -> Array:
        names = [key.key for key in path]
        return x + step if names[-2:] == ["router", "bias"] else x

    return jax.tree_util.tree_map_with_path(leaf, params)
