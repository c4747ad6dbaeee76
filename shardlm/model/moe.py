"""Mixture-of-experts layers: a router, and experts of which each token goes through a few.

Sources: Shazeer et al., arXiv 1701.06538 (top-k gates); GShard, arXiv 2006.16668 (capacity, experts
on several devices); Switch, arXiv 2101.03961 (balance loss); ST-MoE, arXiv 2202.08906 (z-loss);
DeepSeek, arXiv 2401.06066 (shared experts) and 2408.15664 (balance without a loss).

Shapes: B batch, T length (t: of this device's part of a row), D embed, E experts, k experts of a
token, F hidden units of an expert. `expert` splits E, `model` splits F, `context` T. The devices of
`model` route the same tokens alike, each makes its part of F, and the sum is that of the
feed-forward part of any layer.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Float32, Int

from shardlm.config import ModelConfig, MoeConfig
from shardlm.model.grouped import (
    Slots,
    collect,
    grouped_dot,
    slots_for_all,
    slots_within,
    spread,
)
from shardlm.model.layers import Context, Mlp, Routing, activate, normal, output_std
from shardlm.parallel.collectives import Parallel
from shardlm.parallel.experts import (
    gather_tokens,
    return_from_experts,
    scatter_tokens,
    send_to_experts,
)

BLOCK = 128
"""Most rows of a block of a grouped product: an expert's last block is filled up with zeros."""


class Choice(NamedTuple):
    """Where tokens go."""

    expert: Array
    """[B, T, k] int32, best first; E for padding."""
    gates: Array
    """[B, T, k] fp32, by which the outputs are weighed."""


class Router(nnx.Module):
    """Scores of the experts for each token, in fp32 throughout."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs) -> None:
        self.moe = model.moe
        shape = (model.embed, model.moe.experts)
        std = min(model.init_std, 1 / math.sqrt(model.embed))
        self.kernel = nnx.Param(normal(rngs.params(), shape, std), dims=("embed", "router"))
        self.bias = (
            nnx.Param(jnp.zeros(shape[1], jnp.float32), dims=("router",))
            if model.moe.bias_rate
            else None
        )

    def __call__(
        self, x: Float[Array, "B t D"], segments: Int[Array, "B T"], par: Parallel
    ) -> tuple[Choice, Routing]:
        """Experts of each token of this device, and what they do to the objective and the metrics.

        Of equal scores the first expert wins. The bias leads the choice and is in no weight.
        """
        moe = self.moe
        real = par.row_part(segments) > 0
        logits = jnp.einsum(
            "btd,de->bte",
            x.astype(jnp.float32),
            self.kernel[...],
            precision=jax.lax.Precision.HIGHEST,
        )
        if moe.gating == "softmax":
            scores = chances = jax.nn.softmax(logits)
        else:
            scores = jax.nn.sigmoid(logits)
            chances = jax.nn.softmax(jax.nn.log_sigmoid(logits))
        wanted = scores if self.bias is None else scores + self.bias[...]
        expert = jax.lax.top_k(jax.lax.stop_gradient(wanted), moe.top_k)[1]
        gates = jnp.take_along_axis(scores, expert, -1)
        if moe.normalize:
            # Sigmoids may all be 0.
            gates = gates / jnp.maximum(gates.sum(-1, keepdims=True), 1e-20)
        expert = jnp.where(real[..., None], expert, moe.experts)
        tokens = (segments > 0).sum(1)
        return Choice(expert, gates), report(moe, logits, chances, expert, real, tokens, par)


def report(
    moe: MoeConfig,
    logits: Float32[Array, "B t E"],
    chances: Float32[Array, "B t E"],
    expert: Int[Array, "B t k"],
    real: Bool[Array, "B t"],
    tokens: Int[Array, "B"],
    par: Parallel,
) -> Routing:
    """The auxiliary losses of each row, and counts; nothing is dropped yet.

    Of a row with n tokens, expert e gets the share f of its n·k pairs and the mean P of its tokens'
    chances: the balance loss is E · sum over e of f · P, 1 where all is level, and flows back
    through P. The z-loss is the mean of the squared log normaliser. Both are of a row, so that they
    are the same in micro-batches of any size and on any mesh.

    Args:
      chances: of the experts, adding up to 1 for each token.
      expert: that is chosen; E for padding.
      real: tokens that are not padding.
      tokens: of each whole row, without padding.
    """
    n = jnp.maximum(tokens, 1).astype(jnp.float32)
    load = (expert[..., None] == jnp.arange(moe.experts)).sum((1, 2), dtype=jnp.int32)
    losses = jnp.zeros_like(n)
    if moe.balance_loss:
        share = par.sum_context(load) / (n * moe.top_k)[:, None]
        chance = par.sum_context(jnp.where(real[..., None], chances, 0).sum(1)) / n[:, None]
        losses += moe.balance_loss * moe.experts * (share * chance).sum(1)
    if moe.z_loss:
        z = jnp.where(real, jnp.square(jax.nn.logsumexp(logits, -1)), 0)
        losses += moe.z_loss * par.sum_context(z.sum(1)) / n
    entropy = -jnp.where(real[..., None], jax.scipy.special.xlogy(chances, chances), 0).sum()
    return Routing(losses, load.sum(0), jnp.int32(0), jax.lax.stop_gradient(entropy))


class Matrices(nnx.Module):
    """A matrix an expert. Its initial values depend on the key and on its number."""

    def __init__(
        self, shape: tuple[int, ...], dims: tuple[str, ...], std: float, rngs: nnx.Rngs
    ) -> None:
        keys = jax.vmap(partial(jax.random.fold_in, rngs.params()))(jnp.arange(shape[0]))
        values = jax.vmap(lambda key: normal(key, shape[1:], std))(keys)
        self.kernel = nnx.Param(values, dims=dims)


class Experts(nnx.Module):
    """The feed-forward parts of this device's experts, without biases."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs) -> None:
        e, d, f = model.moe.experts, model.embed, model.mlp
        self.activation = model.activation
        std = min(model.init_std, 1 / math.sqrt(d))
        inner = ("experts", "embed", "mlp")
        self.up = Matrices((e, d, f), inner, std, rngs)
        self.gate = Matrices((e, d, f), inner, std, rngs) if model.gated else None
        self.down = Matrices((e, f, d), ("experts", "mlp", "embed"), output_std(model), rngs)

    @property
    def count(self) -> int:
        """Experts here."""
        return self.up.kernel[...].shape[0]

    def __call__(self, x: Array, product: Callable[[Array, Array], Array]) -> Array:
        """Rows to rows; `product` takes each to its expert's matrix of [E, in, out]."""
        y = product(x, self.up.kernel[...])
        gate = None if self.gate is None else product(x, self.gate.kernel[...])
        return product(activate(self.activation, y, gate), self.down.kernel[...])


class Moe(nnx.Module):
    """The feed-forward part of a layer as a mixture."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs) -> None:
        self.moe = model.moe
        self.router = Router(model, rngs)
        self.experts = Experts(model, rngs)
        shared = model.moe.shared_experts
        self.shared = (
            Mlp(dataclasses.replace(model, mlp=shared * model.mlp), rngs) if shared else None
        )

    def __call__(self, x: Array, ctx: Context) -> tuple[Array, Routing]:
        x = ctx.par.gather_sequence(x)
        choice, routing = self.router(x, ctx.segments, ctx.par)
        if self.moe.capacity_factor and not ctx.decoding:
            y, kept = self._within_capacity(x, choice, ctx.segments, ctx.par)
            routing = routing._replace(dropped=routing.load.sum() - kept)
        else:
            y = self._for_all(x, choice, ctx.par)
        if self.shared is not None:
            y += self.shared.partial(x)
        return ctx.par.scatter_sequence(y), routing

    def _within_capacity(
        self, x: Array, choice: Choice, segments: Array, par: Parallel
    ) -> tuple[Array, Array]:
        """What the experts make of the pairs that have a place, and how many those are. Tokens go
        to the devices of their experts and come back."""
        experts, factor = self.moe.experts, self.moe.capacity_factor
        slots = slots_within(choice.expert, (segments > 0).sum(1), experts, factor, par)
        rows = spread(x.reshape(-1, x.shape[-1]), slots).reshape(experts, -1, x.shape[-1])
        rows = send_to_experts(rows, par)
        rows = self.experts(rows, partial(jnp.einsum, "enx,exy->eny"))
        rows = return_from_experts(rows, par).reshape(-1, x.shape[-1])
        kept = (slots.of_pair < slots.pairs.shape[0]).sum(dtype=jnp.int32)
        return weigh(rows, slots, choice.gates).reshape(x.shape), kept

    def _for_all(self, x: Array, choice: Choice, par: Parallel) -> Array:
        """What the experts make of every pair. Each device works on the tokens of all devices of
        `expert`, as far as they go to its experts."""
        tokens = gather_tokens(x.reshape(-1, x.shape[-1]), par)
        k, here = self.moe.top_k, self.experts.count
        expert = gather_tokens(choice.expert.reshape(-1, k), par)
        gates = gather_tokens(choice.gates.reshape(-1, k), par)
        mine = expert - par.index("expert") * here
        mine = jnp.where((mine >= 0) & (mine < here), mine, here)
        n = tokens.shape[0]
        slots, groups = slots_for_all(mine, here, n * min(k, here), _block(n * k, self.moe.experts))
        rows = spread(tokens, slots)
        rows = self.experts(rows, lambda x, w: grouped_dot(x, w, groups))
        return scatter_tokens(weigh(rows, slots, gates), par).reshape(x.shape)


def weigh(rows: Array, slots: Slots, gates: Array) -> Array:
    """Rows [M, D] of slots to their sums by gate [..., k], for each token: [N, D]."""
    chosen = collect(rows, slots)
    gates = gates.reshape(chosen.shape[:2])
    return jnp.einsum("nkd,nk->nd", chosen.astype(jnp.float32), gates).astype(rows.dtype)


def _block(pairs: int, experts: int) -> int:
    """Slots of a block: what an expert gets on average, as a power of two from 8 to `BLOCK`."""
    return min(max(8, 1 << math.ceil(math.log2(max(pairs / experts, 1)))), BLOCK)
