"""Causal attention over packed documents, with interchangeable implementations.

Shapes: B batch, T queries, S keys, H query heads, G key/value heads (H = G·R), K head_dim. Query
head h reads key/value head h // R (Ainslie et al., arXiv 2305.13245).

A query sees a key that is not after it, in the same segment, and fewer than `window` tokens back.
Segment 0 is padding: it sees nothing, is seen by nothing, and gives zeros.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from shardlm.config import ConfigError, ModelConfig
from shardlm.parallel.collectives import match_varying

MASKED = -1e30
"""A score that softmax takes for nothing; finite, so that a row of nothing has no NaN."""


class Rules(NamedTuple):
    """What a query may see, and how scores are formed; static."""

    window: int = 0
    """Tokens a query sees, itself included; 0: all before it."""
    softcap: float = 0.0
    """Bound c of the scores, c·tanh(x/c); 0 is off."""
    block: int = 128
    """Block size of the blockwise implementation."""


def attend(
    q: Array,
    k: Array,
    v: Array,
    q_segments: Array,
    kv_segments: Array,
    rules: Rules = Rules(),
    implementation: str = "xla",
    q_start: Array | int = 0,
) -> Array:
    """Softmax attention, scaled by 1/sqrt(K).

    Args:
      q: [B, T, H, K].
      k, v: [B, S, G, K].
      q_segments: [B, T] int, 0 for padding.
      kv_segments: [B, S] int, 0 for padding.
      rules: window and soft-cap.
      implementation: "xla" (all scores at once), "blockwise" (a block of scores at a time, forward
        and backward) or "cudnn" (needs an NVIDIA GPU).
      q_start: index of the first query among the keys.

    Returns:
      [B, T, H, K] in the dtype of `v`. Scores and softmax are fp32 in all of them.

    Raises:
      ConfigError: the implementation cannot honour the request.
    """
    run = IMPLEMENTATIONS[implementation]
    return run(q, k, v, q_segments, kv_segments, rules, q_start)


def choose_implementation(model: ModelConfig, length: int, platform: str) -> str:
    """The implementation that a run uses.

    Raises:
      ConfigError: the one asked for cannot honour the model on this platform.
    """
    if model.attention == "cudnn":
        if platform not in ("gpu", "cuda"):
            raise ConfigError(
                f"model.attention is cudnn and the devices are {platform}: it needs an NVIDIA GPU; "
                "use auto, xla or blockwise"
            )
        _refuse_softcap(model.attention_softcap)
    if model.attention != "auto":
        return model.attention
    return "xla" if length <= 2 * model.attention_block else "blockwise"


def _refuse_softcap(softcap: float) -> None:
    if softcap:
        raise ConfigError(
            f"model.attention is cudnn and model.attention_softcap {softcap}: cudnn has no "
            "soft-cap; use auto, xla or blockwise"
        )


def visible(
    q_index: Array, kv_index: Array, q_segments: Array, kv_segments: Array, window: int
) -> Array:
    """Which key each query sees: [B, T, S] from indices [T], [S] and segments [B, T], [B, S]."""
    back = q_index[:, None] - kv_index[None, :]
    seen = back >= 0
    if window:
        seen &= back < window
    same = q_segments[:, :, None] == kv_segments[:, None, :]
    return seen & same & (kv_segments != 0)[:, None, :]


def _scores(q: Array, k: Array, softcap: float) -> Array:
    """fp32 scores [B, G, R, T, S] of q [B, G, R, T, K] and k [B, G, S, K]."""
    scores = jnp.einsum("bgrtk,bgsk->bgrts", q, k, preferred_element_type=jnp.float32)
    scores = scores / math.sqrt(q.shape[-1])
    return softcap * jnp.tanh(scores / softcap) if softcap else scores


def _xla(
    q: Array,
    k: Array,
    v: Array,
    q_segments: Array,
    kv_segments: Array,
    rules: Rules,
    q_start: Array | int,
) -> Array:
    t, s = q.shape[1], k.shape[1]
    q, k, v = _by_group(q, k.shape[2]), k.swapaxes(1, 2), v.swapaxes(1, 2)
    scores = _scores(q, k, rules.softcap)
    seen = visible(
        jnp.arange(t) + q_start, jnp.arange(s), q_segments, kv_segments, rules.window
    )[:, None, None]
    scores = jnp.where(seen, scores, MASKED)
    weights = jnp.where(seen, jnp.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    total = jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    out = jnp.einsum("bgrts,bgsk->bgrtk", (weights / total).astype(v.dtype), v)
    return _by_head(out)


def _cudnn(
    q: Array,
    k: Array,
    v: Array,
    q_segments: Array,
    kv_segments: Array,
    rules: Rules,
    q_start: Array | int,
) -> Array:
    _refuse_softcap(rules.softcap)
    t, s = q.shape[1], k.shape[1]
    seen = visible(jnp.arange(t) + q_start, jnp.arange(s), q_segments, kv_segments, rules.window)
    out = jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], implementation="cudnn")
    return jnp.where((q_segments != 0)[:, :, None, None], out, 0)


def _by_group(q: Array, groups: int) -> Array:
    """[B, T, H, K] to [B, G, R, T, K]."""
    b, t, h, k = q.shape
    return q.reshape(b, t, groups, h // groups, k).transpose(0, 2, 3, 1, 4)


def _by_head(x: Array) -> Array:
    """[B, G, R, T, K] to [B, T, H, K]."""
    b, g, r, t, k = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, t, g * r, k)


def _blockwise(
    q: Array,
    k: Array,
    v: Array,
    q_segments: Array,
    kv_segments: Array,
    rules: Rules,
    q_start: Array | int,
) -> Array:
    """Blocks of queries against blocks of keys with a running softmax (Dao et al.,
    arXiv 2205.14135). Blocks wholly after the queries or outside the window are not computed."""
    t = q.shape[1]
    if k.shape[1] != t or not isinstance(q_start, int) or q_start:
        raise ConfigError(
            "blockwise attention is for queries and keys of one length; decode with xla"
        )
    block = min(rules.block, t)
    pad = -t % block
    if pad:
        q, k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q, k, v))
        q_segments, kv_segments = (
            jnp.pad(x, ((0, 0), (0, pad))) for x in (q_segments, kv_segments)
        )
    grouped = _by_group(q, k.shape[2]), k.swapaxes(1, 2), v.swapaxes(1, 2)
    out = _flash(*grouped, q_segments, kv_segments, rules._replace(block=block))
    return _by_head(out)[:, :t]


class _Blocks(NamedTuple):
    """Operands cut into blocks along a new leading dimension."""

    q: Array  # [N, B, G, R, block, K]
    k: Array  # [N, B, G, block, K]
    v: Array
    q_segments: Array  # [N, B, block]
    kv_segments: Array


def _cut(x: Array, dim: int, block: int) -> Array:
    shape = (*x.shape[:dim], x.shape[dim] // block, block, *x.shape[dim + 1 :])
    return jnp.moveaxis(x.reshape(shape), dim, 0)


def _join(x: Array, dim: int) -> Array:
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])


def _cut_all(q: Array, k: Array, v: Array, qs: Array, ks: Array, block: int) -> _Blocks:
    return _Blocks(
        _cut(q, 3, block), _cut(k, 2, block), _cut(v, 2, block), _cut(qs, 1, block), _cut(ks, 1, block)
    )


def _block_scores(x: _Blocks, i: Array, j: Array, rules: Rules) -> tuple[Array, Array]:
    """Scores of query block i against key block j, and which of them count."""
    offsets = jnp.arange(rules.block)
    scores = _scores(x.q[i], x.k[j], rules.softcap)
    seen = visible(
        i * rules.block + offsets,
        j * rules.block + offsets,
        x.q_segments[i],
        x.kv_segments[j],
        rules.window,
    )[:, None, None]
    return jnp.where(seen, scores, MASKED), seen


def _first_key_block(i: Array, rules: Rules) -> Array | int:
    """First block of keys that a block of queries sees."""
    if not rules.window:
        return 0
    return jnp.maximum(0, (i * rules.block - rules.window + 1) // rules.block)


def _last_query_block(j: Array, blocks: int, rules: Rules) -> Array | int:
    """One past the last block of queries that sees a block of keys."""
    if not rules.window:
        return blocks
    return jnp.minimum(blocks, ((j + 1) * rules.block + rules.window - 2) // rules.block + 1)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _flash(q: Array, k: Array, v: Array, qs: Array, ks: Array, rules: Rules) -> Array:
    return _flash_fwd(q, k, v, qs, ks, rules)[0]


def _flash_fwd(
    q: Array, k: Array, v: Array, qs: Array, ks: Array, rules: Rules
) -> tuple[Array, tuple[Array, ...]]:
    x = _cut_all(q, k, v, qs, ks, rules.block)
    blocks = x.q.shape[0]

    def queries(i: Array) -> tuple[Array, Array]:
        def keys(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            out, top, total = carry
            scores, seen = _block_scores(x, i, j, rules)
            new_top = jnp.maximum(top, scores.max(-1))
            weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
            keep = jnp.exp(top - new_top)
            part = jnp.einsum(
                "bgrts,bgsk->bgrtk",
                weights.astype(v.dtype),
                x.v[j],
                preferred_element_type=jnp.float32,
            )
            return out * keep[..., None] + part, new_top, total * keep + weights.sum(-1)

        shape = x.q.shape[1:]
        start = (
            jnp.zeros(shape, jnp.float32),
            jnp.full(shape[:-1], MASKED, jnp.float32),
            jnp.zeros(shape[:-1], jnp.float32),
        )
        start = jax.tree.map(lambda a: match_varying(a, q), start)
        out, top, total = jax.lax.fori_loop(_first_key_block(i, rules), i + 1, keys, start)
        total = jnp.maximum(total, 1e-30)
        return (out / total[..., None]).astype(v.dtype), top + jnp.log(total)

    out, lse = jax.lax.map(queries, jnp.arange(blocks))
    out = _join(out, 3)
    return out, (q, k, v, qs, ks, out, _join(lse, 3))


def _flash_bwd(
    rules: Rules, saved: tuple[Array, ...], d_out: Array
) -> tuple[Array, Array, Array, None, None]:
    q, k, v, qs, ks, out, lse = saved
    x = _cut_all(q, k, v, qs, ks, rules.block)
    blocks = x.q.shape[0]
    # sum(weights * d_weights) of each query, which softmax's derivative needs.
    delta = jnp.einsum(
        "bgrtk,bgrtk->bgrt", d_out, out, preferred_element_type=jnp.float32
    )
    d_out, delta, lse = (_cut(a, 3, rules.block) for a in (d_out, delta, lse))
    scale = 1 / math.sqrt(q.shape[-1])

    def keys(d_q: Array, j: Array) -> tuple[Array, tuple[Array, Array]]:
        def queries(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_q, d_k, d_v = carry
            scores, seen = _block_scores(x, i, j, rules)
            weights = jnp.where(seen, jnp.exp(scores - lse[i][..., None]), 0.0)
            d_v += _dot("bgrts,bgrtk->bgsk", weights.astype(v.dtype), d_out[i])
            d_weights = _dot("bgrtk,bgsk->bgrts", d_out[i], x.v[j])
            d_scores = weights * (d_weights - delta[i][..., None])
            if rules.softcap:
                # MASKED scores are outside the bound; their weight is zero already.
                d_scores *= jnp.where(seen, 1 - (scores / rules.softcap) ** 2, 0.0)
            d_scores = (d_scores * scale).astype(q.dtype)
            d_k += _dot("bgrts,bgrtk->bgsk", d_scores, x.q[i])
            d_q = d_q.at[i].add(_dot("bgrts,bgsk->bgrtk", d_scores, x.k[j]))
            return d_q, d_k, d_v

        zero = match_varying(jnp.zeros(x.k.shape[1:], jnp.float32), q)
        last = _last_query_block(j, blocks, rules)
        d_q, d_k, d_v = jax.lax.fori_loop(j, last, queries, (d_q, zero, zero))
        return d_q, (d_k, d_v)

    start = match_varying(jnp.zeros(x.q.shape, jnp.float32), q)
    d_q, (d_k, d_v) = jax.lax.scan(keys, start, jnp.arange(blocks))
    return (
        _join(d_q, 3).astype(q.dtype),
        _join(d_k, 2).astype(k.dtype),
        _join(d_v, 2).astype(v.dtype),
        None,
        None,
    )


_dot = partial(jnp.einsum, preferred_element_type=jnp.float32)
_flash.defvjp(_flash_fwd, _flash_bwd)

IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "xla": _xla,
    "blockwise": _blockwise,
    "cudnn": _cudnn,
}
