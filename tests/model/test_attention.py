"""Attention against a dense float64 computation, and what no query may see."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.config import Config, ConfigError, DataConfig, MeshConfig, ModelConfig
from shardlm.mesh import make_mesh
from shardlm.model.attention import attend, choose_implementation
from shardlm.model.blockwise import UNROLLED
from shardlm.model.scores import Rules
from shardlm.train import setup

B, T, H, G, K = 3, 37, 6, 2, 4
FORMS = {"xla": ("xla", 16), "written out": ("blockwise", 16), "loops": ("blockwise", 4)}
"""What runs on CPU: implementations and blocks, which do not divide T."""
assert 16 * UNROLLED >= T > 4 * UNROLLED


def seen_by(q_segments, kv_segments, window):
    """Whether query i sees key j, from the definition."""
    b, t = q_segments.shape
    seen = np.zeros((b, t, kv_segments.shape[1]), bool)
    for row, i, j in np.ndindex(seen.shape):
        near = window == 0 or i - j < window
        same = q_segments[row, i] == kv_segments[row, j] != 0
        seen[row, i, j] = j <= i and near and same
    return seen


def dense(q, k, v, segments, window, softcap, d_out):
    """Output and gradients of sum(d_out * output) in float64, a row and a head at a time."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    seen = seen_by(segments, segments, window)
    out, d_q, d_k, d_v = (np.zeros_like(x) for x in (q, q, k, v))
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        g = h // (q.shape[2] // k.shape[2])
        scores = q[b, :, h] @ k[b, :, g].T / math.sqrt(q.shape[3])
        slope = np.ones_like(scores)
        if softcap:
            slope = 1 - np.tanh(scores / softcap) ** 2
            scores = softcap * np.tanh(scores / softcap)
        scores = np.where(seen[b], scores, -np.inf)
        weights = np.exp(scores - np.maximum(scores.max(1, keepdims=True), -1e300))
        weights /= np.maximum(weights.sum(1, keepdims=True), 1e-300)
        out[b, :, h] = weights @ v[b, :, g]
        d_weights = d_out[b, :, h] @ v[b, :, g].T
        mean = (weights * d_weights).sum(1, keepdims=True)
        d_scores = weights * (d_weights - mean) * slope / math.sqrt(q.shape[3])
        d_q[b, :, h] = d_scores @ k[b, :, g]
        d_k[b, :, g] += d_scores.T @ q[b, :, h]
        d_v[b, :, g] += weights.T @ d_out[b, :, h]
    return out, d_q, d_k, d_v


@pytest.fixture(scope="module")
def packed():
    """Documents of several lengths; row 1 has padding in the middle and at the end, row 2 is
    padding only."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(0, 1.5, (B, T, n, K)).astype(np.float32) for n in (H, G, G))
    segments = np.zeros((B, T), np.int32)
    segments[0] = 1 + np.searchsorted([5, 6, 30], np.arange(T), "right")
    segments[1, :11], segments[1, 13:33] = 1, 2
    return q, k, v, segments, rng.normal(size=q.shape).astype(np.float32)


@pytest.fixture(scope="module")
def compiled(quick_jit):
    """Output and gradients of a form, jitted once for all the tests."""

    @functools.cache
    def make(form, window=0, softcap=0.0):
        implementation, block = FORMS[form]

        def run(q, k, v, segments, d_out):
            def output(q, k, v):
                rules = Rules(window, softcap, block)
                return attend(q, k, v, segments, segments, rules, implementation)

            out, back = jax.vjp(output, q, k, v)
            return out, *back(d_out)

        return quick_jit(run)

    return make


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window, softcap", [(0, 0.0), (5, 2.0), (17, 0.0)])
def test_output_and_gradients_match_float64(packed, compiled, form, window, softcap):
    q, k, v, segments, d_out = packed
    expected = dense(q, k, v, segments, window, softcap, d_out)
    got = compiled(form, window, softcap)(q, k, v, segments, d_out)
    for name, a, e in zip(("out", "d_q", "d_k", "d_v"), got, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=2e-6 * np.abs(e).max(), err_msg=name)
        np.testing.assert_array_equal(a[2], 0, err_msg=f"{name} of padding")
    np.testing.assert_array_equal(got[0][1, 11:13], 0)
    np.testing.assert_array_equal(got[1][1, 11:13], 0)


@pytest.mark.parametrize("form", FORMS)
def test_large_scores_do_not_overflow(packed, compiled, form):
    """Scores of some thousands: exp of one would be infinite, and exp of minus one 0 / 0.

    fp32 rounds such scores by 1e-4 and weights by as much; float64 has the same weights.
    """
    q, k, v, segments, d_out = packed
    q = q * 1000
    expected = dense(q, k, v, segments, 0, 0.0, d_out)
    got = compiled(form)(q, k, v, segments, d_out)
    for name, a, e in zip(("out", "d_q", "d_k", "d_v"), got, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=1e-3 * np.abs(e).max(), err_msg=name)


@pytest.mark.parametrize(
    "implementation, window, length, block",
    [
        ("xla", 2, 4, 4),
        ("xla", 3, 11, 4),
        ("blockwise", 2, 4, 4),
        ("blockwise", 2, 4, 2),
        ("blockwise", 3, 11, 4),
        ("blockwise", 2, 11, 1),
        ("blockwise", 3, 19, 2),
    ],
)
def test_a_window_is_of_as_many_keys_as_it_says(quick_jit, implementation, window, length, block):
    """Equal scores and one-hot values: the output of a query shows the keys that it sees."""
    q = jnp.zeros((1, length, 1, length))
    v = jnp.eye(length)[None, :, None]
    segments = jnp.ones((1, length), jnp.int32)
    rules = Rules(window=window, block=block)
    run = quick_jit(lambda *x: attend(*x, rules, implementation))
    out = run(q, q, v, segments, segments)[0, :, 0]
    keys = [min(i + 1, window) for i in range(length)]
    assert list((np.asarray(out) > 0).sum(1)) == keys
    for i, n in enumerate(keys):
        np.testing.assert_allclose(out[i, i + 1 - n : i + 1], 1 / n, rtol=1e-6)


def test_a_window_is_as_long_when_decoding(quick_jit):
    length, window = 4, 2
    v = jnp.eye(length)[None, :, None]
    ones = jnp.ones((1, length), jnp.int32)

    @quick_jit
    def query(i):
        q = jnp.zeros((1, 1, 1, length))
        return attend(q, jnp.zeros_like(v), v, ones[:, :1], ones, Rules(window), "xla", i)[0, 0, 0]

    assert [int((query(i) > 0).sum()) for i in range(length)] == [1, 2, 2, 2]


@pytest.mark.parametrize("form", FORMS)
def test_a_document_does_not_see_what_it_is_packed_with(packed, compiled, form):
    """B has tokens 6 to 29 of row 0. All of A (and of what follows) changed: B's outputs and
    gradients are the same to every bit. B alone in a row of padding: equal but for the order of
    sums."""
    q, k, v, segments, d_out = packed
    b = slice(6, 30)
    run = compiled(form)
    together = run(q, k, v, segments, d_out)
    rng = np.random.default_rng(9)
    changed = [x.copy() for x in (q, k, v, d_out)]
    for x in changed:
        other = rng.normal(0, 30, x.shape).astype(np.float32)
        other[0, b] = x[0, b]
        x[0] = other[0]
    apart = run(*changed[:3], segments, changed[3])
    alone = segments.copy()
    alone[0, :6], alone[0, 30:] = 0, 0
    by_itself = run(q, k, v, alone, d_out)
    for x, y, z in zip(together, apart, by_itself, strict=True):
        np.testing.assert_array_equal(y[0, b], x[0, b])
        np.testing.assert_allclose(z[0, b], x[0, b], rtol=0, atol=2e-6 * np.abs(x[0, b]).max())


def gradients_at_length(implementation, length, block):
    def loss(q, k, v, segments):
        return attend(q, k, v, segments, segments, Rules(block=block), implementation).sum()

    q = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, q, q, segments)


def largest_array(text):
    """Elements of the largest array that a program's text names."""
    shapes = re.findall(r"(?:f32|bf16|pred|s32|i32|bool)\[([\d,]+)\]", text)
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.parametrize("block", [128, 64], ids=["written out", "loops"])
def test_blockwise_never_holds_all_scores(block):
    """Of the 1,024 x 1,024 scores of a head: a block of queries at most (a pair of blocks in the
    loops), in what is traced and what is compiled. In the loops all temporaries, forward and
    backward, together take a quarter of what the scores once would."""
    length = 1024
    loops = block * UNROLLED < length
    bound = 4 * block**2 if loops else block * length
    traced = gradients_at_length("blockwise", length, block)
    assert largest_array(str(traced.jaxpr)) <= bound
    compiled = traced.lower().compile()
    assert largest_array(compiled.as_text()) <= bound
    if loops:
        assert compiled.memory_analysis().temp_size_in_bytes < length**2
    assert largest_array(str(gradients_at_length("xla", length, block).jaxpr)) >= length**2


def test_cudnn_refuses_what_it_cannot_do():
    capped = ModelConfig(attention="cudnn", attention_softcap=50.0)
    with pytest.raises(ConfigError, match=r"attention_softcap 50\.0.*use auto, xla or blockwise"):
        choose_implementation(capped, "gpu", 32)
    with pytest.raises(ConfigError, match=r"attention is cudnn and the devices are cpu"):
        choose_implementation(ModelConfig(attention="cudnn"), "cpu", 32)
    with pytest.raises(ConfigError, match=r"attention is cudnn and model\.dtype float32"):
        choose_implementation(ModelConfig(attention="cudnn", dtype="float32"), "gpu", 32)
    x, segments = jnp.zeros((1, 4, 2, 8)), jnp.ones((1, 4), jnp.int32)
    with pytest.raises(ConfigError, match="soft-cap"):
        attend(x, x, x, segments, segments, Rules(softcap=50.0), "cudnn")


@pytest.mark.parametrize(
    ("head_dim", "length", "capability", "message"),
    [
        (8, 32, "8.0", None),
        (128, 34, "8.6", None),
        (256, 32, "9.0", None),
        (256, 32, "10.3", None),
        (12, 32, "9.0", r"head_dim 12: .*a multiple of 8 up to 256"),
        (264, 32, "9.0", r"head_dim 264: .*a multiple of 8 up to 256"),
        (136, 32, "8.9", r"head_dim 136: .*a multiple of 8 up to 128"),
        (136, 32, "", r"head_dim 136: .*a multiple of 8 up to 128"),
        (64, 33, "9.0", r"rows are 33 tokens \(data\.length, .*use another length, or auto"),
    ],
)
def test_cudnn_shapes_are_checked_before_tracing(head_dim, length, capability, message):
    model = ModelConfig(attention="cudnn", dtype="bfloat16", head_dim=head_dim)
    if message is None:
        assert choose_implementation(model, "gpu", length, capability) == "cudnn"
    else:
        with pytest.raises(ConfigError, match=message):
            choose_implementation(model, "gpu", length, capability)


def test_cudnn_is_asked_about_rows_as_padded(monkeypatch):
    """33 tokens on 2 devices of `model` are 34 in attention. Each length of a row counts."""
    asked = []

    def choose(model, platform, length, capability):
        asked.append((platform, length, capability))
        return "xla"

    monkeypatch.setattr(setup, "choose_implementation", choose)
    for ways in (1, 2):
        config = Config(
            model=ModelConfig(vocab=256), mesh=MeshConfig(model=ways), data=DataConfig(length=33)
        )
        setup.build_engine(config, make_mesh(config.mesh))
    data = DataConfig(length=36, packing="padded_buckets", buckets=3)
    config = Config(model=ModelConfig(vocab=256), data=data)
    setup.build_engine(config, make_mesh(config.mesh))
    assert asked == [("cpu", n, "") for n in (33, 34, 9, 18, 36)]


def test_blockwise_refuses_to_decode():
    q, k = jnp.zeros((1, 1, 2, 8)), jnp.zeros((1, 4, 2, 8))
    ones = jnp.ones((1, 4), jnp.int32)
    with pytest.raises(ConfigError, match="decode with xla"):
        attend(q, k, k, ones[:, :1], ones, Rules(), "blockwise", 3)


def test_a_block_is_of_one_size_by_default():
    assert Rules() == Rules(block=ModelConfig().attention_block)


def test_what_was_asked_for_is_used_and_auto_is_blockwise():
    for asked, used in (("auto", "blockwise"), ("xla", "xla"), ("blockwise", "blockwise")):
        assert choose_implementation(ModelConfig(attention=asked), "cpu", 33) == used
