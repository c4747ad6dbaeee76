"""Causal attention over packed documents, with interchangeable implementations.

Shapes: B batch, T queries, S keys, H query heads, G key/value heads (H = G·R), K head_dim. Query
head h reads key/value head h // R (Ainslie et al., arXiv 2305.13245).

A query sees a key that is not after it, in the same segment, and fewer than `window` tokens back.
Segment 0 is padding: it sees nothing, is seen by nothing, and gives zeros.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from shardlm.config import ConfigError, ModelConfig
from shardlm.model.blockwise import UNROLLED, blockwise
from shardlm.model.ring import split_attention
from shardlm.model.scores import MASKED, Rules, scores, visible
from shardlm.parallel.collectives import Parallel


def attend(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    q_segments: Int[Array, "B T"],
    kv_segments: Int[Array, "B S"],
    rules: Rules = Rules(),
    implementation: str = "xla",
    q_start: Int[Array, ""] | int = 0,
) -> Float[Array, "B T H K"]:
    """Softmax attention, scaled by 1/sqrt(K).

    Args:
      q: queries.
      k, v: keys and values.
      q_segments: the document of each query, 0 for padding.
      kv_segments: the document of each key, 0 for padding.
      rules: window and soft-cap.
      implementation: "xla" (all scores at once), "blockwise" (a block of scores at a time, forward
        and backward) or "cudnn" (needs an NVIDIA GPU; takes what a query sees
        as a dense mask [B, 1, T, S], so that its memory grows with T·S).
      q_start: index of the first query among the keys.

    Returns:
      One vector a query, in the dtype of `v`. Scores and softmax are fp32 in all of them.

    Raises:
      ConfigError: the implementation cannot honour the request.
    """
    run = IMPLEMENTATIONS[implementation]
    return run(q, k, v, q_segments, kv_segments, rules, q_start)


def attend_over_context(
    q: Float[Array, "B t H K"],
    k: Float[Array, "B t G K"],
    v: Float[Array, "B t G K"],
    segments: Int[Array, "B T"],
    rules: Rules,
    implementation: str,
    par: Parallel,
) -> Float[Array, "B t H K"]:
    """`attend` where each device of `context` has t = T/context tokens of a row.

    Args:
      q, k, v: of this device's tokens.
      segments: of all tokens.
      rules: window and soft-cap.
      implementation: of `attend`, where a device has all tokens of some heads (ulysses).
      par: the mesh.
    """
    if par.context_comm == "ulysses":
        k, v = par.copy_kv_heads(k), par.copy_kv_heads(v)
        q, k, v = par.to_heads(q), par.to_heads(k), par.to_heads(v)
        return par.to_tokens(attend(q, k, v, segments, segments, rules, implementation))
    grouped = _by_group(q, k.shape[2]), k.swapaxes(1, 2), v.swapaxes(1, 2)
    return _by_head(split_attention(*grouped, segments, rules, par))


def choose_implementation(
    model: ModelConfig, platform: str, length: int, capability: str = ""
) -> str:
    """The implementation that a run uses.

    Args:
      model: `dtype` resolved.
      platform: of the devices.
      length: tokens of a row as attention sees it in training.
      capability: CUDA compute capability of the devices, such as "9.0".

    Raises:
      ConfigError: the one asked for cannot honour the model or the rows on these devices.
    """
    if model.attention == "cudnn":
        if platform not in ("gpu", "cuda"):
            raise ConfigError(
                f"model.attention is cudnn and the devices are {platform}: it needs an NVIDIA GPU; "
                "use auto, xla or blockwise"
            )
        if model.dtype == "float32":
            raise ConfigError(
                "model.attention is cudnn and model.dtype float32: cudnn's kernel takes bfloat16 "
                "only; use another dtype, or auto, xla or blockwise"
            )
        _refuse_softcap(model.attention_softcap)
        widest = 256 if _major(capability) >= 9 else 128
        if model.k_dim % 8 or model.k_dim > widest:
            raise ConfigError(
                f"model.attention is cudnn and model.head_dim {model.k_dim}: cudnn's kernel takes "
                f"a multiple of 8 up to {widest} on this GPU; use another width, or auto, xla or "
                "blockwise"
            )
        if length % 2:
            raise ConfigError(
                f"model.attention is cudnn and rows are {length} tokens (data.length, or a length "
                "of data.buckets, padded to divide over mesh.model): its gradient with a mask "
                "takes an even number; use another length, or auto, xla or blockwise"
            )
    return "blockwise" if model.attention == "auto" else model.attention


def _major(capability: str) -> int:
    digits = capability.split(".")[0]
    return int(digits) if digits.isdigit() else 0


def _refuse_softcap(softcap: float) -> None:
    if softcap:
        raise ConfigError(
            f"model.attention is cudnn and model.attention_softcap {softcap}: cudnn has no "
            "soft-cap; use auto, xla or blockwise"
        )


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
    x = scores(q, k, rules.softcap)
    seen = visible(jnp.arange(t) + q_start, jnp.arange(s), q_segments, kv_segments, rules.window)[
        :, None, None
    ]
    x = jnp.where(seen, x, MASKED)
    weights = jnp.where(seen, jnp.exp(x - x.max(-1, keepdims=True)), 0.0)
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
    if k.shape[1] != q.shape[1] or not isinstance(q_start, int) or q_start:
        raise ConfigError(
            "blockwise attention is for queries and keys of one length; decode with xla"
        )
    del kv_segments  # Those of the queries.
    t = q.shape[1]
    block = min(rules.block, t)
    # Written out, the last block may be short.
    if pad := -t % block if t > UNROLLED * block else 0:
        q, k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q, k, v))
        q_segments = jnp.pad(q_segments, ((0, 0), (0, pad)))
    grouped = _by_group(q, k.shape[2]), k.swapaxes(1, 2), v.swapaxes(1, 2)
    return _by_head(blockwise(*grouped, q_segments, rules._replace(block=block)))[:, :t]


IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "xla": _xla,
    "blockwise": _blockwise,
    "cudnn": _cudnn,
}
