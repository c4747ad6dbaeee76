"""Next-token loss on vocabulary shards, without gathering logits or holding all of them.

Shapes: N tokens, D embed, V vocabulary (this device's part of the padded one).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int

from shardlm.model.scores import MASKED, softcap_slope
from shardlm.parallel.collectives import Parallel, match_varying


class LossRules(NamedTuple):
    """How the loss is formed; static."""

    vocab: int
    """Tokens that exist; rows beyond are padding and can never be predicted."""
    softcap: float = 0.0
    """Bound c of the logits, c·tanh(x/c); 0 is off."""
    z_loss: float = 0.0
    """Coefficient of the squared log normaliser."""
    chunk: int = 0
    """Tokens whose logits exist at a time; 0: all."""


class Loss(NamedTuple):
    """Sums over this device's tokens; equal on all devices of `model`."""

    objective: Array
    """What is differentiated: `nll` and the z-loss."""
    nll: Array
    """Sum of the negative log likelihoods, in nats; to report: it has no gradient."""
    tokens: Array
    """Tokens with a target, int32."""


def capped_logits(
    x: Float[Array, "N D"], kernel: Float[Array, "D V"], vocab: int, softcap: float, par: Parallel
) -> Float32[Array, "N V"]:
    """Logits of hidden states; those of padding are `MASKED`."""
    logits = jnp.dot(x, kernel, preferred_element_type=jnp.float32)
    if softcap:
        logits = softcap * jnp.tanh(logits / softcap)
    v = kernel.shape[1]
    if vocab == v * par.size("model"):
        return logits
    ids = par.index("model") * v + jnp.arange(v)
    return jnp.where(ids < vocab, logits, MASKED)


def next_token_loss(
    x: Float[Array, "N D"],
    kernel: Float[Array, "D V"],
    targets: Int[Array, "N"],
    rules: LossRules,
    par: Parallel,
) -> Loss:
    """Cross-entropy of the next token, summed.

    The logits of a chunk, their loss and (when differentiating) the gradients that follow from them
    are computed together, so that no logits are kept or computed twice. Softmax is fp32; over
    `model` only one maximum, one sum and one target logit a token travel.

    Args:
      x: final hidden states.
      kernel: of the head.
      targets: -1 where there is no loss.

    Returns:
      Sums over the N tokens; all zero, with zero gradients, when no token has a target.
    """
    objective, nll = _loss(x, kernel, targets, rules, par)
    return Loss(objective, jax.lax.stop_gradient(nll), (targets >= 0).sum(dtype=jnp.int32))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _loss(
    x: Array, kernel: Array, targets: Array, rules: LossRules, par: Parallel
) -> tuple[Array, Array]:
    def chunk(
        carry: tuple[Array, Array], part: tuple[Array, Array]
    ) -> tuple[tuple[Array, Array], None]:
        objective, nll, _ = _chunk(*part, kernel, rules, par)
        return (carry[0] + objective, carry[1] + nll), None

    zero = match_varying(jnp.float32(0), targets)
    (objective, nll), _ = jax.lax.scan(chunk, (zero, zero), _chunks(x, targets, rules.chunk))
    return objective, nll


def _loss_fwd(
    x: Array, kernel: Array, targets: Array, rules: LossRules, par: Parallel
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    def chunk(
        carry: tuple[Array, Array, Array], part: tuple[Array, Array]
    ) -> tuple[tuple[Array, Array, Array], Array]:
        objective, nll, d_kernel = carry
        x_part = part[0]
        objective_part, nll_part, d_logits = _chunk(*part, kernel, rules, par)
        d_logits = d_logits.astype(x.dtype)
        d_x = jnp.dot(d_logits, kernel.T)
        d_kernel += jnp.dot(x_part.T, d_logits, preferred_element_type=jnp.float32)
        return (objective + objective_part, nll + nll_part, d_kernel), d_x

    zero = match_varying(jnp.float32(0), targets)
    start = (zero, zero, match_varying(jnp.zeros(kernel.shape, jnp.float32), kernel))
    (objective, nll, d_kernel), d_x = jax.lax.scan(chunk, start, _chunks(x, targets, rules.chunk))
    d_x = d_x.reshape(-1, x.shape[1])[: x.shape[0]]
    return (objective, nll), (d_x, d_kernel.astype(kernel.dtype))


def _loss_bwd(
    rules: LossRules, par: Parallel, saved: tuple[Array, Array], g: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    d_x, d_kernel = saved
    return (d_x * g[0].astype(d_x.dtype), d_kernel * g[0].astype(d_kernel.dtype), None)


_loss.defvjp(_loss_fwd, _loss_bwd)


def _chunks(x: Array, targets: Array, size: int) -> tuple[Array, Array]:
    """[N, D] and [N] as [C, chunk, D] and [C, chunk], the rest padded with no target."""
    n = x.shape[0]
    size = min(size, n) or n
    pad = -n % size
    x = jnp.pad(x, ((0, pad), (0, 0)))
    targets = jnp.pad(targets, (0, pad), constant_values=-1)
    return x.reshape(-1, size, x.shape[1]), targets.reshape(-1, size)


def _chunk(
    x: Array, targets: Array, kernel: Array, rules: LossRules, par: Parallel
) -> tuple[Array, Array, Array]:
    """Sums of one chunk, and the gradient of the objective with respect to its raw logits."""
    logits = capped_logits(x, kernel, rules.vocab, rules.softcap, par)
    v = logits.shape[1]
    top = par.max_model(logits.max(1))
    weights = jnp.exp(logits - top[:, None])
    total = par.sum_model(weights.sum(1))
    log_total = top + jnp.log(total)
    local = targets - par.index("model") * v
    is_target = local[:, None] == jnp.arange(v)
    of_target = jnp.take_along_axis(logits, jnp.clip(local, 0, v - 1)[:, None], 1)[:, 0]
    of_target = par.sum_model(jnp.where((local >= 0) & (local < v), of_target, 0.0))
    counted = (targets >= 0).astype(jnp.float32)
    nll = ((log_total - of_target) * counted).sum()
    z = rules.z_loss * log_total
    objective = nll + (z * log_total * counted).sum()
    d_logits = (weights / total[:, None]) * (1 + 2 * z)[:, None] - is_target
    d_logits *= counted[:, None]
    if rules.softcap:
        d_logits *= softcap_slope(logits, rules.softcap)
    return objective, nll, d_logits
