"""A training step as one writes it by hand for one device, to measure the engine against.

jit and `optax.adamw`, nothing else: no mesh, no clipping, no guard, no packed documents. It shares
no code with the engine. Each choice that people make differently is a switch of `Form`, so that the
best of all of them can be taken.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array


@dataclass(frozen=True)
class Shape:
    """Sizes of the workload: RMSNorm, rotary positions, SwiGLU, untied head."""

    layers: int = 4
    embed: int = 256
    heads: int = 4
    head_dim: int = 64
    mlp: int = 688
    vocab: int = 256
    length: int = 256
    batch: int = 16
    micro_batches: int = 1


@dataclass(frozen=True)
class Form:
    """How the step is written."""

    unrolled: bool = True
    """A Python loop over the layers, else `lax.scan`."""
    blockwise: bool = True
    """Attention by blocks of 64 queries that keeps the log-sum-exp, else plain softmax."""
    dtype: str = "float32"
    """Of weights and activations; the rest is fp32."""
    flat: bool = True
    """[B, T, D] made two-dimensional around each product."""

    def __str__(self) -> str:
        return " ".join(
            (
                "unrolled" if self.unrolled else "scanned",
                "blockwise" if self.blockwise else "plain",
                self.dtype,
                "flat" if self.flat else "3-D",
            )
        )


def forms() -> Iterator[Form]:
    """Every combination."""
    for unrolled, blockwise, dtype, flat in itertools.product(
        (True, False), (True, False), ("float32", "bfloat16"), (True, False)
    ):
        yield Form(unrolled, blockwise, dtype, flat)


def nearest_forms(best: Form) -> Iterator[Form]:
    """The forms that differ from `best` in one switch."""
    yield replace(best, unrolled=not best.unrolled)
    yield replace(best, blockwise=not best.blockwise)
    yield replace(best, dtype="bfloat16" if best.dtype == "float32" else "float32")
    yield replace(best, flat=not best.flat)


def init(shape: Shape, key: Array) -> Any:
    """Parameters, layers stacked."""
    n, d, h, f = shape.layers, shape.embed, shape.heads * shape.head_dim, shape.mlp
    sizes = {
        "q": (n, d, h),
        "k": (n, d, h),
        "v": (n, d, h),
        "o": (n, h, d),
        "gate": (n, d, f),
        "up": (n, d, f),
        "down": (n, f, d),
    }
    keys = dict(zip([*sizes, "embed", "head"], jax.random.split(key, 9), strict=True))
    layers = {k: jax.random.normal(keys[k], s) * 0.02 for k, s in sizes.items()}
    layers |= {"attn_norm": jnp.ones((n, d)), "mlp_norm": jnp.ones((n, d))}
    return {
        "embed": jax.random.normal(keys["embed"], (shape.vocab, d)) * 0.02,
        "layers": layers,
        "norm": jnp.ones(d),
        "head": jax.random.normal(keys["head"], (d, shape.vocab)) * 0.02,
    }


def make_step(shape: Shape, form: Form) -> tuple[jax.stages.Wrapped, Any]:
    """A jitted `step(state, tokens, targets) -> (state, loss)` that donates its state, and the
    first state."""
    optimizer = optax.adamw(1e-3, b2=0.95, weight_decay=0.1)

    def step(state: Any, tokens: Array, targets: Array) -> tuple[Any, Array]:
        params, opt = state
        value_and_grad = jax.value_and_grad(partial(_loss, shape, form))
        if shape.micro_batches == 1:
            loss, grads = value_and_grad(params, tokens, targets)
        else:

            def add(total: Any, part: Any) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, value_and_grad(params, *part)), None

            k = shape.micro_batches
            parts = tokens.reshape(k, -1, shape.length), targets.reshape(k, -1, shape.length)
            zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
            total, _ = jax.lax.scan(add, zero, parts)
            loss, grads = jax.tree.map(lambda x: x / k, total)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    params = init(shape, jax.random.key(0))
    return jax.jit(step, donate_argnums=0), (params, optimizer.init(params))


def _loss(shape: Shape, form: Form, params: Any, tokens: Array, targets: Array) -> Array:
    dtype = jnp.dtype(form.dtype)
    angle = jnp.arange(shape.length)[:, None] * 1e4 ** (
        -jnp.arange(0, shape.head_dim, 2) / shape.head_dim
    )
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]

    def linear(x: Array, w: Array) -> Array:
        w = w.astype(dtype)
        if not form.flat:
            return x @ w
        return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], -1)

    def norm(x: Array, scale: Array) -> Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6)
        return (y * scale).astype(dtype)

    def heads(x: Array) -> Array:
        return x.reshape(*x.shape[:2], shape.heads, shape.head_dim)

    def rotate(x: Array) -> Array:
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(dtype)

    attention = _blockwise if form.blockwise else _plain

    def layer(x: Array, w: Any) -> tuple[Array, None]:
        y = norm(x, w["attn_norm"])
        q, k, v = (heads(linear(y, w[n])) for n in "qkv")
        y = attention(rotate(q), rotate(k), v)
        x = x + linear(y.reshape(*x.shape[:2], -1), w["o"])
        y = norm(x, w["mlp_norm"])
        return x + linear(jax.nn.silu(linear(y, w["gate"])) * linear(y, w["up"]), w["down"]), None

    x = params["embed"].astype(dtype)[tokens]
    if form.unrolled:
        for i in range(shape.layers):
            x, _ = layer(x, jax.tree.map(lambda w, i=i: w[i], params["layers"]))
    else:
        x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = linear(norm(x, params["norm"]), params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def _plain(q: Array, k: Array, v: Array) -> Array:
    length = q.shape[1]
    scores = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=jnp.float32)
    causal = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(causal, scores / math.sqrt(q.shape[-1]), -1e30)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores).astype(v.dtype), v)


def _blockwise(q: Array, k: Array, v: Array) -> Array:
    b, t, h, d = q.shape
    q, k, v = (x.swapaxes(1, 2).reshape(b * h, t, d) for x in (q, k, v))
    return _flash(q, k, v).reshape(b, h, t, d).swapaxes(1, 2)


_BLOCK = 64


def _scores(q: Array, k: Array, start: int) -> Array:
    """Masked fp32 scores [N, block, keys] of a block of queries that begins at `start`."""
    scores = jnp.einsum("ntk,nsk->nts", q, k, preferred_element_type=jnp.float32)
    seen = start + jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
    return jnp.where(seen, scores / math.sqrt(q.shape[-1]), -1e30)


@jax.custom_vjp
def _flash(q: Array, k: Array, v: Array) -> Array:
    return _flash_forward(q, k, v)[0]


def _flash_forward(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    outs, sums = [], []
    for i in range(0, q.shape[1], _BLOCK):
        end = i + _BLOCK
        scores = _scores(q[:, i:end], k[:, :end], i)
        lse = jax.nn.logsumexp(scores, -1, keepdims=True)
        outs.append(jnp.exp(scores - lse).astype(v.dtype) @ v[:, :end])
        sums.append(lse)
    out = jnp.concatenate(outs, 1)
    return out, (q, k, v, out, jnp.concatenate(sums, 1))


def _flash_backward(saved: Any, d_out: Array) -> tuple[Array, Array, Array]:
    q, k, v, out, lse = saved
    delta = (d_out.astype(jnp.float32) * out).sum(-1, keepdims=True)
    dot = partial(jnp.einsum, preferred_element_type=jnp.float32)
    d_q = []
    d_k, d_v = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for i in range(0, q.shape[1], _BLOCK):
        rows, keys = slice(i, i + _BLOCK), slice(0, i + _BLOCK)
        weights = jnp.exp(_scores(q[:, rows], k[:, keys], i) - lse[:, rows])
        d_weights = dot("ntk,nsk->nts", d_out[:, rows], v[:, keys])
        d_scores = weights * (d_weights - delta[:, rows]) / math.sqrt(q.shape[-1])
        d_scores = d_scores.astype(q.dtype)
        d_q.append(d_scores @ k[:, keys])
        d_k = d_k.at[:, keys].add(dot("nts,ntk->nsk", d_scores, q[:, rows]))
        d_v = d_v.at[:, keys].add(dot("nts,ntk->nsk", weights.astype(v.dtype), d_out[:, rows]))
    return jnp.concatenate(d_q, 1), d_k.astype(k.dtype), d_v.astype(v.dtype)


_flash.defvjp(_flash_forward, _flash_backward)
