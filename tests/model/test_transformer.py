"""The whole model against float64 arithmetic written out in numpy, and decoding."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.config import ModelConfig, MoeConfig, RopeConfig
from shardlm.mesh import AxisRules
from shardlm.model.layers import Cache
from shardlm.model.loss import LossRules, capped_logits, next_token_loss
from shardlm.model.transformer import Transformer
from shardlm.parallel.collectives import Parallel

ALONE = Parallel(AxisRules({}))
FLOAT32 = jnp.dtype("float32")
LENGTH = 9
BASE = ModelConfig(layers=2, embed=12, heads=6, kv_heads=2, head_dim=4, mlp=10, vocab=13)
MODELS = {
    "llama": dataclasses.replace(BASE, rope=RopeConfig(theta=500.0), norm_eps=1e-5),
    "gpt2": dataclasses.replace(
        BASE,
        norm="layer",
        positions="learned",
        activation="gelu",
        bias=True,
        tied=True,
        kv_heads=6,
        head_dim=2,
        norm_eps=1e-5,
    ),
    "gemma": dataclasses.replace(
        BASE,
        layers=5,
        activation="geglu",
        logit_softcap=3.0,
        attention_softcap=2.0,
        windows=(2, 0),
        qk_norm=True,
        head_dim=6,
        tied=True,
    ),
    "mixtral": dataclasses.replace(
        BASE, rope=RopeConfig(theta=500.0), moe=MoeConfig(5, 2, shared_experts=1)
    ),
    "squared relu": dataclasses.replace(
        BASE, activation="relu2", positions="none", windows=(3,), bias=True
    ),
}


def random_weights(transformer):
    """Numbers of the size of trained ones for every parameter, scales and biases among them."""
    rng = np.random.default_rng(0)

    def leaf(path, x):
        scale = path[-1].key == "scale"
        return jnp.asarray(rng.normal(1 if scale else 0, 0.5 if scale else 0.4, x.shape), FLOAT32)

    return jax.tree_util.tree_map_with_path(leaf, transformer.abstract())


@pytest.fixture(scope="module")
def batch():
    """Two documents and padding; one document."""
    rng = np.random.default_rng(1)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0], [1] * LENGTH], np.int32)
    positions = np.array([[0, 1, 2, 0, 1, 2, 3, 0, 0], range(LENGTH)], np.int32)
    return rng.integers(0, 13, segments.shape).astype(np.int32), positions, segments


class Reference:
    """The model as textbooks have it, a token and a head at a time where that is clearest."""

    def __init__(self, model, weights):
        self.model = model
        self.weights = jax.tree.map(lambda x: np.asarray(x, np.float64), weights)

    def logits(self, tokens, positions, segments):
        model, weights = self.model, self.weights
        x = weights["embed"]["table"][tokens]
        if model.positions == "learned":
            x = x + weights["embed"]["positions"][positions]
        for i in range(model.layers):
            layer = jax.tree.map(lambda w, i=i: w[i], weights["layers"])
            window = model.windows[i % len(model.windows)]
            y = self.norm(x, layer["attn_norm"])
            x = x + self.attention(y, layer["attn"], positions, segments, window)
            feed_forward = self.mixture if model.moe.experts else self.mlp
            x = x + feed_forward(self.norm(x, layer["mlp_norm"]), layer["mlp"])
        x = self.norm(x, weights["final_norm"])
        head = weights["embed"]["table"].T if model.tied else weights["head"]["kernel"]
        return self.cap((x @ head)[..., : model.vocab], model.logit_softcap)

    def norm(self, x, weights, kind=None):
        if (kind or self.model.norm) == "layer":
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(
                x.var(-1, keepdims=True) + self.model.norm_eps
            )
        else:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.model.norm_eps)
        return x * weights["scale"] + weights.get("bias", 0)

    def heads(self, x, weights):
        return np.einsum("btd,dhk->bthk", x, weights["kernel"]) + weights.get("bias", 0)

    def attention(self, x, weights, positions, segments, window):
        model = self.model
        q, k, v = (self.heads(x, weights[name]) for name in "qkv")
        if model.qk_norm:
            q, k = self.norm(q, weights["q_norm"], "rms"), self.norm(k, weights["k_norm"], "rms")
        if model.positions == "rotary":
            q, k = self.turn(q, positions), self.turn(k, positions)
        out = np.zeros_like(q)
        for b, t, h in np.ndindex(q.shape[:3]):
            keys = [
                s
                for s in range(t + 1)
                if segments[b, s] == segments[b, t] != 0 and (window == 0 or t - s < window)
            ]
            if not keys:
                continue
            g = h * model.kv // model.heads
            scores = k[b, keys, g] @ q[b, t, h] / math.sqrt(model.k_dim)
            scores = self.cap(scores, model.attention_softcap)
            weight = np.exp(scores - scores.max())
            out[b, t, h] = weight @ v[b, keys, g] / weight.sum()
        out = np.einsum("bthk,hkd->btd", out, weights["o"]["kernel"])
        return out + weights["o"].get("bias", 0)

    @staticmethod
    def cap(x, bound):
        return bound * np.tanh(x / bound) if bound else x

    def turn(self, x, positions):
        """Numbers i and i + K/2 of a head as one complex number, turned by its angle."""
        half = self.model.k_dim // 2
        angle = positions[..., None, None] * self.model.rope.theta ** (-np.arange(half) / half)
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1)

    def mixture(self, x, weights):
        y = self.mlp(x, weights["shared"])
        for b, t in np.ndindex(x.shape[:2]):
            scores = np.exp(x[b, t] @ weights["router"]["kernel"])
            chosen = np.argsort(-scores)[: self.model.moe.top_k]
            for e in chosen:
                expert = jax.tree.map(lambda w, e=e: w[e], weights["experts"])
                y[b, t] += scores[e] / scores[chosen].sum() * self.mlp(x[b, t], expert)
        return y

    def mlp(self, x, weights):
        def linear(x, weights):
            return x @ weights["kernel"] + weights.get("bias", 0)

        def gelu(x):
            return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

        up = linear(x, weights["up"])
        hidden = {
            "swiglu": lambda: (gate := linear(x, weights["gate"])) / (1 + np.exp(-gate)) * up,
            "geglu": lambda: gelu(linear(x, weights["gate"])) * up,
            "gelu": lambda: gelu(up),
            "relu2": lambda: np.maximum(up, 0) ** 2,
        }[self.model.activation]()
        return linear(hidden, weights["down"])


def run_logits(transformer, params, tokens, positions, segments, attention="xla", **options):
    """fp32 logits [B, T, V], and the caches when decoding."""
    model = transformer.model
    caches, remat = options.pop("caches", None), options.pop("remat", "none")
    ctx = transformer.context(ALONE, FLOAT32, attention, segments, positions, **options)
    x, head, caches, _ = transformer.hidden(params, tokens, positions, ctx, remat, caches)
    flat = x.reshape(-1, x.shape[-1])
    logits = capped_logits(flat, head, model.vocab_size, model.logit_softcap, ALONE)
    return logits.reshape(*x.shape[:2], -1), caches


@pytest.mark.parametrize(
    "name, attention", [*((name, "xla") for name in MODELS), ("gemma", "blockwise")]
)
def test_logits_match_float64(quick_jit, batch, name, attention):
    model = dataclasses.replace(MODELS[name], attention_block=4)
    transformer = Transformer(model, LENGTH)
    params = random_weights(transformer)
    got, _ = quick_jit(lambda *x: run_logits(transformer, *x, attention=attention))(params, *batch)
    expected = Reference(model, params).logits(*batch)
    assert got.shape == (2, LENGTH, 16)
    real = batch[2] != 0
    np.testing.assert_allclose(
        np.asarray(got)[real][:, :13], expected[real], rtol=0, atol=1e-5 * np.abs(expected).max()
    )
    assert (np.asarray(got)[..., 13:] < -1e29).all()


@pytest.mark.parametrize(
    "name, remat", [("llama", "none"), ("gemma", "none"), ("gpt2", "full"), ("mixtral", "none")]
)
def test_gradients_match_float64(quick_jit, batch, name, remat):
    """Of the mean of randomly weighted logits, by central differences of the float64 model: for
    each leaf along one random direction."""
    model = dataclasses.replace(MODELS[name], attention_block=4)
    transformer = Transformer(model, LENGTH)
    params = random_weights(transformer)
    rng = np.random.default_rng(5)
    share = np.where((batch[2] != 0)[..., None], rng.normal(size=(2, LENGTH, 13)), 0)

    def objective(params):
        logits, _ = run_logits(
            transformer, params, *map(jnp.asarray, batch), "blockwise", remat=remat
        )
        return (logits[..., :13] * jnp.asarray(share, FLOAT32)).mean()

    grads = quick_jit(jax.grad(objective))(params)
    leaves, tree = jax.tree.flatten(jax.tree.map(lambda x: np.asarray(x, np.float64), params))
    paths = jax.tree_util.tree_leaves_with_path(grads)
    directions = [rng.normal(size=x.shape) for x in leaves]
    products = [np.asarray(g, np.float64) * d for (_, g), d in zip(paths, directions, strict=True)]
    # The bias of keys has no gradient without rotary positions, but for rounding.
    rounding = 1e-7 * max(np.abs(product).sum() for product in products)
    for i, ((path, _), product) in enumerate(zip(paths, products, strict=True)):

        def along(step, i=i):
            moved = [x + step * directions[i] if n == i else x for n, x in enumerate(leaves)]
            logits = Reference(model, jax.tree.unflatten(tree, moved)).logits(*batch)
            return (logits * share).mean()

        expected = (along(1e-5) - along(-1e-5)) / 2e-5
        error = abs(product.sum() - expected)
        assert error <= 1e-5 * np.abs(product).sum() + rounding, jax.tree_util.keystr(path)


@pytest.mark.parametrize("attention", ["xla", "blockwise"])
def test_a_document_does_not_see_what_it_is_packed_with(quick_jit, batch, attention):
    """Document B is tokens 3 to 6 of row 0. All of A changed: B's logits are the same to every bit;
    and those of B alone, at the start of a row, but for the order of sums."""
    transformer = Transformer(dataclasses.replace(MODELS["llama"], attention_block=4), LENGTH)
    params = random_weights(transformer)
    run = quick_jit(lambda *x: run_logits(transformer, *x, attention=attention)[0])
    tokens, positions, segments = (x.copy() for x in batch)
    together = np.asarray(run(params, tokens, positions, segments))[0, 3:7]
    document = tokens[0, 3:7].copy()
    tokens[0, :3] = (tokens[0, :3] + 1) % 13
    np.testing.assert_array_equal(run(params, tokens, positions, segments)[0, 3:7], together)
    tokens[0], positions[0], segments[0] = 0, 0, 0
    tokens[0, :4], positions[0, :4], segments[0, :4] = document, range(4), 1
    alone = np.asarray(run(params, tokens, positions, segments))[0, :4]
    np.testing.assert_allclose(alone[:, :13], together[:, :13], rtol=0, atol=1e-5)


def test_a_model_of_the_successor_has_no_loss(quick_jit):
    """Every layer adds zero and the head puts its weight on (x + 1) mod V: targets are shifted
    once."""
    v = 16
    model = ModelConfig(layers=1, embed=v, heads=2, mlp=4, vocab=v, positions="none")
    transformer = Transformer(model, v)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), transformer.abstract())
    params["embed"]["table"] = jnp.eye(v)
    params["final_norm"]["scale"] = jnp.ones(v)
    params["head"]["kernel"] = 10 * jnp.roll(jnp.eye(v), 1, axis=1)

    @quick_jit
    def mean_loss(params, tokens, targets):
        ones = jnp.ones_like(tokens)
        ctx = transformer.context(ALONE, FLOAT32, "xla", ones, ones)
        x, head, *_ = transformer.hidden(params, tokens, ones, ctx)
        loss = next_token_loss(x[0], head, targets, LossRules(v), ALONE)
        return loss.nll / loss.tokens

    sequence = np.arange(v + 1, dtype=np.int32) % v
    assert float(mean_loss(params, sequence[None, :-1], sequence[1:])) < 1e-3
    assert float(mean_loss(params, sequence[None, :-1], sequence[:-1])) > 10


@pytest.mark.parametrize("name", ["gemma", "gpt2", "mixtral"])
def test_decoding_with_a_cache_equals_the_whole_forward_pass(quick_jit, name):
    """Prompts of 2, 5 and 1 tokens, padded at the left to 5, then 4 given tokens one at a time."""
    transformer = Transformer(MODELS[name], LENGTH)
    params = random_weights(transformer)
    model = transformer.model
    lengths, prompt, new = np.array([2, 5, 1]), 5, 4
    total = prompt + new
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 13, (3, total)).astype(np.int32)
    place = np.arange(total)
    pad = prompt - lengths[:, None]
    segments = (place >= pad).astype(np.int32)
    positions = np.maximum(place - pad, 0).astype(np.int32)

    kv_segments = jnp.asarray(segments)

    @quick_jit
    def step(tokens, positions, segments, caches, start):
        return run_logits(
            transformer,
            params,
            tokens,
            positions,
            segments,
            caches=caches,
            kv_segments=kv_segments,
            start=start,
        )

    empty = jnp.zeros((model.layers, 3, total, model.kv, model.k_dim))
    first = slice(0, prompt)
    logits, caches = step(
        tokens[:, first], positions[:, first], segments[:, first], Cache(empty, empty), 0
    )
    decoded = [logits]
    for i in range(prompt, total):
        now = slice(i, i + 1)
        logits, caches = step(tokens[:, now], positions[:, now], segments[:, now], caches, i)
        decoded.append(logits)
    decoded = np.concatenate(decoded, axis=1)

    expected = Reference(model, params)
    for row, n in enumerate(lengths):
        own = tokens[None, row, prompt - n :]
        length = own.shape[1]
        whole = expected.logits(own, np.arange(length)[None], np.ones((1, length), int))[0]
        np.testing.assert_allclose(
            decoded[row, prompt - n :, :13], whole, rtol=0, atol=1e-5 * np.abs(whole).max()
        )


def test_parameters_are_counted_without_padding():
    """By hand: embedding and head 13 x 12 each, a layer of BASE, final norm."""
    layer = 2 * 12 * 24 + 2 * 12 * 8 + 3 * 12 * 10 + 2 * 12
    assert Transformer(BASE, LENGTH).count() == 2 * 13 * 12 + 2 * layer + 12
    tied = dataclasses.replace(BASE, tied=True)
    assert Transformer(tied, LENGTH).count() == 13 * 12 + 2 * layer + 12
    # 5 experts and a shared one, and a router.
    layer += 5 * 3 * 12 * 10 + 12 * 5
    assert Transformer(MODELS["mixtral"], LENGTH).count() == 2 * 13 * 12 + 2 * layer + 12
