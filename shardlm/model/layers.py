"""The parts of a layer, as Flax NNX modules on one device's part of the weights.

Every parameter names the logical dim of each of its dimensions; `AxisRules` says which axes split
them. Sizes are read off the arrays, so that the same code runs on a whole weight or a shard.

Shapes: B batch, T length (of the whole row), D embed, H heads, G kv_heads, K head_dim, F mlp.
`model` splits H, G and F, `context` T; x between the parts is [B, T/context/model, D].
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Float32, Int

from shardlm.config import ModelConfig
from shardlm.model.attention import attend, attend_over_context
from shardlm.model.scores import Rules
from shardlm.parallel.collectives import Parallel


class Cache(NamedTuple):
    """Keys and values so far, for decoding."""

    k: Array  # [B, S, G, K]
    v: Array


class Routing(NamedTuple):
    """What a mixture layer reports of this device's rows; equal on the devices of `model`."""

    losses: Array  # [B] fp32, the auxiliary losses of each row, with their coefficients
    load: Array  # [E] int32, tokens that chose each expert
    dropped: Array  # int32, of those choices, what did not fit
    entropy: Array  # fp32, of the experts' chances in nats, summed over tokens


@dataclass(frozen=True)
class Context:
    """What every layer of one forward pass needs beside x."""

    par: Parallel
    dtype: jnp.dtype
    attention: str
    segments: Array  # [B, T] of the whole row
    cos: Array | None  # [B, T/context, 1, K] fp32, see `rope_table`
    sin: Array | None
    dropout_key: Array | None = None
    """None when nothing is dropped."""
    rows: Array | None = None
    """[B], the number of each row in the update, which with the place in the row decides its
    dropout mask, on any mesh and in any micro-batch."""
    kv_segments: Array | None = None
    """[B, S] when decoding into a cache."""
    start: Array | int = 0
    """Index of the first query among the keys, when decoding."""

    @property
    def decoding(self) -> bool:
        """Whether keys and values come from a cache."""
        return self.kv_segments is not None


def normal(key: Array, shape: tuple[int, ...], std: float, contract: int = 1) -> Array:
    """fp32 normal numbers with this standard deviation.

    Drawn as a matrix of the first `contract` dims by the rest: three dims take XLA three times as
    long to compile.
    """
    if std == 0:
        return jnp.zeros(shape, jnp.float32)
    n = math.prod(shape[:contract])
    matrix = jax.random.normal(key, (n, math.prod(shape) // n), jnp.float32)
    return matrix.reshape(shape) * std


def project(x: Array, kernel: Array, contract: int = 1) -> Array:
    """Contract the last `contract` dims of x with the first of the kernel, as one 2-D product."""
    batch = x.shape[: x.ndim - contract]
    n = math.prod(kernel.shape[:contract])
    y = x.reshape(-1, n) @ kernel.reshape(n, -1)
    return y.reshape(*batch, *kernel.shape[contract:])


class Linear(nnx.Module):
    """A matrix (or a stack of them, a head each) and perhaps a bias."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dims: tuple[str, ...],
        contract: int,
        std: float,
        bias_dims: tuple[str, ...] | None,
        rngs: nnx.Rngs,
    ) -> None:
        self.contract = contract
        self.kernel = nnx.Param(normal(rngs.params(), shape, std, contract), dims=dims)
        self.bias = (
            None
            if bias_dims is None
            else nnx.Param(jnp.zeros(shape[contract:], jnp.float32), dims=bias_dims)
        )

    def __call__(self, x: Array) -> Array:
        y = project(x, self.kernel[...], self.contract)
        return y if self.bias is None else y + self.bias[...]


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last dim, in fp32."""

    def __init__(self, size: int, dim: str, kind: str, eps: float, bias: bool) -> None:
        self.kind = kind
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), dims=(dim,))
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32), dims=(dim,)) if bias else None

    def __call__(self, x: Array) -> Array:
        y = x.astype(jnp.float32)
        if self.kind == "layer":
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        y = y * self.scale[...]
        if self.bias is not None:
            y = y + self.bias[...]
        return y.astype(x.dtype)


def rope_frequencies(model: ModelConfig) -> tuple[Float32[Array, "pairs"], float]:
    """Angle per position of each of the K/2 pairs of a head's numbers, and what scales cos and sin.

    linear: Chen et al., arXiv 2306.15595. llama3: frequencies slower than `low` rotations over the
    original length are stretched, faster than `high` left, between them blended. yarn: Peng et al.,
    arXiv 2309.00071, with its attention temperature 0.1·ln(factor) + 1.
    """
    rope, k = model.rope, model.k_dim
    pair = jnp.arange(0, k, 2, dtype=jnp.float32)
    frequency = rope.theta ** (-pair / k)
    if rope.scaling == "none":
        return frequency, 1.0
    stretched = frequency / rope.factor
    if rope.scaling == "linear":
        return stretched, 1.0
    if rope.scaling == "llama3":
        rotations = rope.original_length * frequency / (2 * math.pi)
        keep = jnp.clip((rotations - rope.low) / (rope.high - rope.low), 0, 1)
        return keep * frequency + (1 - keep) * stretched, 1.0

    # yarn blends linearly in the index of the pair between those with `high` and `low` rotations.
    def index(rotations: float) -> float:
        return (
            k
            * math.log(rope.original_length / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    first = max(math.floor(index(rope.high)), 0)
    last = min(math.ceil(index(rope.low)), k - 1)
    stretch = jnp.clip((pair / 2 - first) / max(last - first, 0.001), 0, 1)
    return stretch * stretched + (1 - stretch) * frequency, 0.1 * math.log(rope.factor) + 1


def rope_table(
    model: ModelConfig, positions: Int[Array, "B T"]
) -> tuple[Float32[Array, "B T 1 K"], Float32[Array, "B T 1 K"]]:
    """What `rotate` multiplies by: cos and signed sin of the angle of each number.

    In fp32: bf16 cannot tell positions above 256 apart.
    """
    frequency, scale = rope_frequencies(model)
    angle = positions.astype(jnp.float32)[:, :, None, None] * frequency
    cos, sin = jnp.cos(angle) * scale, jnp.sin(angle) * scale
    return jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)


def rotate(
    x: Float[Array, "B T H K"],
    cos: Float32[Array, "B T 1 K"],
    sin: Float32[Array, "B T 1 K"],
) -> Float[Array, "B T H K"]:
    """Rotate the pairs (i, i + K/2) of each head by their angles, in fp32."""
    y = x.astype(jnp.float32)
    return (y * cos + jnp.roll(y, y.shape[-1] // 2, -1) * sin).astype(x.dtype)


def dropout(x: Array, rate: float, key: Array, ctx: Context) -> Array:
    """Drop elements of [B, T/context/model, D] and scale up the rest.

    The mask of a token depends on the key, its row and its place in the row, and on nothing else.
    """
    assert ctx.rows is not None
    place = ctx.par.places(x.shape[1])
    fold = jax.random.fold_in
    keys = jax.vmap(lambda r: jax.vmap(lambda p: fold(fold(key, r), p))(place))(ctx.rows)
    bits = jax.vmap(jax.vmap(lambda k: jax.random.bits(k, x.shape[2:])))(keys)
    keep = bits >= jnp.uint32(round(rate * 2**32))
    return jnp.where(keep, x / jnp.asarray(1 - rate, x.dtype), jnp.zeros_like(x))


class Attention(nnx.Module):
    """Grouped-query self-attention."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs) -> None:
        d, h, g, k = model.embed, model.heads, model.kv, model.k_dim
        self.model = model
        std = min(model.init_std, 1 / math.sqrt(d))

        def heads(n: int, dim: str) -> Linear:
            bias = (dim, "head_dim_vector") if model.bias else None
            return Linear((d, n, k), ("embed", dim, "head_dim"), 1, std, bias, rngs)

        self.q, self.k, self.v = heads(h, "heads"), heads(g, "kv_heads"), heads(g, "kv_heads")
        self.o = Linear(
            (h, k, d),
            ("heads", "head_dim", "embed"),
            2,
            output_std(model),
            ("embed",) if model.bias else None,
            rngs,
        )
        norm = model.qk_norm
        self.q_norm = Norm(k, "head_dim_vector", "rms", model.norm_eps, False) if norm else None
        self.k_norm = Norm(k, "head_dim_vector", "rms", model.norm_eps, False) if norm else None

    def __call__(
        self, x: Array, ctx: Context, window: int, cache: Cache | None
    ) -> tuple[Array, Cache | None]:
        x = ctx.par.gather_sequence(x)
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if ctx.cos is not None and ctx.sin is not None:
            q, k = rotate(q, ctx.cos, ctx.sin), rotate(k, ctx.cos, ctx.sin)
        kv_segments = ctx.segments
        if cache is not None:
            assert ctx.kv_segments is not None
            cache = Cache(
                jax.lax.dynamic_update_slice_in_dim(cache.k, k, ctx.start, 1),
                jax.lax.dynamic_update_slice_in_dim(cache.v, v, ctx.start, 1),
            )
            k, v, kv_segments = cache.k, cache.v, ctx.kv_segments
        rules = Rules(window, self.model.attention_softcap, self.model.attention_block)
        if len(ctx.par.chunks) > 1:
            y = attend_over_context(q, k, v, ctx.segments, rules, ctx.attention, ctx.par)
        else:
            y = attend(q, k, v, ctx.segments, kv_segments, rules, ctx.attention, ctx.start)
        return add_bias_once(self.o, y, ctx.par), cache


def add_bias_once(linear: Linear, x: Array, par: Parallel) -> Array:
    """A matrix split over its input dims: sum the partial products over `model`, then the bias."""
    y = par.scatter_sequence(project(x, linear.kernel[...], linear.contract))
    return y if linear.bias is None else y + linear.bias[...]


@jax.custom_vjp
def swiglu(gate: Float[Array, "*B F"], up: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
    """silu(gate) · up (Shazeer, arXiv 2002.05202).

    The derivative is written out so that the two operands are all that the backward pass keeps.
    """
    return jax.nn.silu(gate) * up


def _swiglu_forward(gate: Array, up: Array) -> tuple[Array, tuple[Array, Array]]:
    return swiglu(gate, up), (gate, up)


def _swiglu_backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    gate, up = saved
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    return g * up * (sigmoid + silu * (1 - sigmoid)), g * silu


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def activate(kind: str, up: Array, gate: Array | None) -> Array:
    """The activation of hidden units, `kind` as in `ModelConfig.activation`."""
    if gate is not None:
        return swiglu(gate, up) if kind == "swiglu" else up * jax.nn.gelu(gate)
    return jax.nn.gelu(up) if kind == "gelu" else jnp.square(jax.nn.relu(up))


class Mlp(nnx.Module):
    """The feed-forward part."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs) -> None:
        d, f = model.embed, model.mlp
        self.activation = model.activation
        std = min(model.init_std, 1 / math.sqrt(d))
        bias = ("mlp_vector",) if model.bias else None
        self.up = Linear((d, f), ("embed", "mlp"), 1, std, bias, rngs)
        self.gate = Linear((d, f), ("embed", "mlp"), 1, std, bias, rngs) if model.gated else None
        self.down = Linear(
            (f, d), ("mlp", "embed"), 1, output_std(model), ("embed",) if model.bias else None, rngs
        )

    def __call__(self, x: Array, ctx: Context) -> tuple[Array, None]:
        return add_bias_once(self.down, self._hidden(ctx.par.gather_sequence(x)), ctx.par), None

    def partial(self, x: Array) -> Array:
        """This device's part of the sum over `model`, without a bias, of x that is whole."""
        return project(self._hidden(x), self.down.kernel[...])

    def _hidden(self, x: Array) -> Array:
        return activate(self.activation, self.up(x), None if self.gate is None else self.gate(x))


def output_std(model: ModelConfig) -> float:
    """Initial scale of the last matrix of a residual branch (GPT-2's 1/sqrt(2 layers))."""
    return 0.0 if model.zero_init_output else model.init_std / math.sqrt(2 * model.layers)


class Layer(nnx.Module):
    """Attention and feed-forward (`Mlp`, or a mixture), each normed first and added to x
    (pre-norm)."""

    def __init__(
        self, model: ModelConfig, rngs: nnx.Rngs, feed_forward: Callable[..., Any] = Mlp
    ) -> None:
        def norm() -> Norm:
            return Norm(model.embed, "embed", model.norm, model.norm_eps, model.bias)

        self.rate = model.dropout
        self.attn_norm = norm()
        self.attn = Attention(model, rngs)
        self.mlp_norm = norm()
        self.mlp = feed_forward(model, rngs)

    def __call__(
        self, x: Array, ctx: Context, layer: Array, window: int, cache: Cache | None
    ) -> tuple[Array, Cache | None, Routing | None]:
        y, cache = self.attn(self.attn_norm(x), ctx, window, cache)
        x = x + self._drop(y, ctx, layer, 0)
        y, routing = self.mlp(self.mlp_norm(x), ctx)
        return x + self._drop(y, ctx, layer, 1), cache, routing

    def _drop(self, y: Array, ctx: Context, layer: Array, branch: int) -> Array:
        if ctx.dropout_key is None:
            return y
        key = jax.random.fold_in(jax.random.fold_in(ctx.dropout_key, layer + 1), branch)
        return dropout(y, self.rate, key, ctx)
