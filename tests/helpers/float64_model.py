"""The loss of the test models and its gradients in float64, written out: no shards, no blocks, no
loops over micro-batches, and nothing of the engine's."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Mixture(NamedTuple):
    """As `MoeConfig`, of which it has what matters here."""

    experts: int
    top_k: int
    capacity_factor: float
    sigmoid: bool
    balance_loss: float
    z_loss: float


class Model(NamedTuple):
    """What the arrays do not say."""

    vocab: int
    z_loss: float
    eps: float
    mixture: Mixture | None = None


@functools.cache
def _differentiated(model: Model) -> Any:
    return jax.jit(jax.value_and_grad(functools.partial(_objective, model), has_aux=True))


def loss_and_gradients(
    model: Model, params: dict[str, np.ndarray], batch: dict[str, np.ndarray]
) -> tuple[float, dict[str, np.ndarray]]:
    """Mean negative log likelihood, and gradients of the mean objective by dotted path."""
    with jax.enable_x64(True):
        values = {name: jnp.asarray(leaf, jnp.float64) for name, leaf in params.items()}
        (_, loss), grads = _differentiated(model)(values, batch)
        return float(loss), {name: np.asarray(g) for name, g in grads.items()}


def _objective(model: Model, params: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
    segments, targets = batch["segments"], batch["targets"]
    counted = targets >= 0
    x = params["embed.table"][batch["tokens"]]
    layers = params["layers.attn_norm.scale"].shape[0]
    auxiliary = 0.0
    for i in range(layers):
        w = {k.removeprefix("layers."): v[i] for k, v in params.items() if k.startswith("layers.")}
        y = _norm(x, w["attn_norm.scale"], model.eps)
        x = x + _attention(y, w, batch["positions"], segments, model.eps)
        y = _norm(x, w["mlp_norm.scale"], model.eps)
        if model.mixture is None:
            x = x + _mlp(y, *(w[f"mlp.{name}.kernel"] for name in ("up", "gate", "down")))
        else:
            y, losses = _mixture(y, w, segments > 0, model.mixture)
            x = x + y
            auxiliary += (losses * counted.sum(1)).sum()
    logits = _norm(x, params["final_norm.scale"], model.eps) @ params["head.kernel"]
    logits = logits[..., : model.vocab]
    log_total = jax.nn.logsumexp(logits, -1)
    of_target = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    nll = jnp.where(counted, log_total - of_target, 0).sum()
    objective = nll + jnp.where(counted, model.z_loss * log_total**2, 0).sum() + auxiliary
    return objective / counted.sum(), nll / counted.sum()


def _norm(x: Any, scale: Any, eps: float) -> Any:
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def _mlp(x: Any, up: Any, gate: Any, down: Any) -> Any:
    hidden = x @ gate
    return (hidden / (1 + jnp.exp(-hidden)) * (x @ up)) @ down


def _attention(x: Any, w: dict[str, Any], positions: Any, segments: Any, eps: float) -> Any:
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, w[f"attn.{name}.kernel"]) for name in "qkv")
    q = _rotate(_norm(q, w["attn.q_norm.scale"], eps), positions)
    k = _rotate(_norm(k, w["attn.k_norm.scale"], eps), positions)
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], 2) for a in (k, v))
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) / np.sqrt(q.shape[-1])
    length = x.shape[1]
    seen = np.tril(np.ones((length, length), bool)) & (segments[:, :, None] == segments[:, None])
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), -1)
    return jnp.einsum("bhqs,bshk,hkd->bqd", weights, v, w["attn.o.kernel"])


def _rotate(x: Any, positions: Any) -> Any:
    half = x.shape[-1] // 2
    angle = positions[..., None, None] * 10_000.0 ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1
    )


def _mixture(x: Any, w: dict[str, Any], real: Any, moe: Mixture) -> tuple[Any, Any]:
    """Every expert on every token, weighed by what the token's gates and the capacity leave."""
    logits = x @ w["mlp.router.kernel"]
    scores = jax.nn.sigmoid(logits) if moe.sigmoid else jax.nn.softmax(logits)
    chances = scores / scores.sum(-1, keepdims=True)
    wanted = scores + w.get("mlp.router.bias", 0)
    order = jnp.argsort(-wanted, axis=-1, stable=True)[..., : moe.top_k]
    chosen = (order[..., None] == jnp.arange(moe.experts)) & real[..., None, None]
    tokens = real.sum(1)
    if moe.capacity_factor:
        # [B, T, k, E]: pairs of the same row and expert that come before.
        flat = chosen.reshape(len(x), -1, moe.experts)
        before = (jnp.cumsum(flat, 1) - flat).reshape(chosen.shape)
        limit = jnp.ceil(moe.capacity_factor * moe.top_k * tokens / moe.experts - 1e-6)
        kept = chosen & (before < limit[:, None, None, None])
    else:
        kept = chosen
    of_chosen = jnp.take_along_axis(scores, order, -1)
    gates = of_chosen / of_chosen.sum(-1, keepdims=True)
    share = (gates[..., None] * kept).sum(2)
    y = sum(
        share[..., e : e + 1]
        * _mlp(x, *(w[f"mlp.experts.{name}.kernel"][e] for name in ("up", "gate", "down")))
        for e in range(moe.experts)
    )
    if "mlp.shared.up.kernel" in w:
        y = y + _mlp(x, *(w[f"mlp.shared.{name}.kernel"] for name in ("up", "gate", "down")))
    n = jnp.maximum(tokens, 1)
    load = chosen.sum((1, 2)) / (n * moe.top_k)[:, None]
    chance = (chances * real[..., None]).sum(1) / n[:, None]
    z = ((jax.nn.logsumexp(logits, -1) ** 2) * real).sum(1) / n
    return y, moe.balance_loss * moe.experts * (load * chance).sum(1) + moe.z_loss * z
