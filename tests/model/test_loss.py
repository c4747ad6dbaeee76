"""The vocabulary loss against float64: values, gradients, shards, chunks, padding."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from shardlm.config import MeshConfig
from shardlm.mesh import AxisRules, make_mesh
from shardlm.model.loss import LossRules, next_token_loss
from shardlm.parallel.collectives import Parallel

P = PartitionSpec
ALONE = Parallel(AxisRules({}))
N, D, VOCAB, PADDED = 11, 7, 13, 16


def reference(x, kernel, targets, rules):
    """Objective and negative log likelihood in float64; padding columns are cut off."""
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    logits = (x @ kernel)[:, : rules.vocab]
    if rules.softcap:
        logits = rules.softcap * np.tanh(logits / rules.softcap)
    top = logits.max(1)
    log_total = top + np.log(np.exp(logits - top[:, None]).sum(1))
    counted = targets >= 0
    nll = log_total - logits[np.arange(len(x)), np.where(counted, targets, 0)]
    return ((nll + rules.z_loss * log_total**2) * counted).sum(), (nll * counted).sum()


def numeric_gradient(function, x):
    """Central differences in float64."""
    x = np.asarray(x, np.float64)
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[i] = 1e-5
        gradient[i] = (function(x + step) - function(x - step)) / 2e-5
    return gradient


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, D)).astype(np.float32)
    kernel = rng.normal(size=(D, PADDED)).astype(np.float32)
    targets = rng.integers(0, VOCAB, N).astype(np.int32)
    targets[[0, 4, 5, 10]] = -1
    return x, kernel, targets


@pytest.fixture(scope="module")
def compiled(quick_jit):
    """Loss and gradients on one device, jitted once for all the tests."""

    @functools.cache
    def make(rules):
        def objective(x, kernel, targets):
            loss = next_token_loss(x, kernel, targets, rules, ALONE)
            return loss.objective, loss

        return quick_jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))

    return make


@pytest.mark.parametrize(
    "rules",
    [
        LossRules(VOCAB),
        LossRules(VOCAB, softcap=1.5, z_loss=0.1, chunk=4),
        LossRules(VOCAB, z_loss=0.1, chunk=1),
        LossRules(VOCAB, softcap=1.5, chunk=11),
        LossRules(VOCAB, z_loss=0.1, chunk=64),
    ],
    ids=str,
)
def test_values_and_gradients_match_float64(problem, compiled, rules):
    """Chunks that do not divide the tokens among them. The reported loss has no z-loss."""
    x, kernel, targets = problem
    (_, loss), (d_x, d_kernel) = compiled(rules)(x, kernel, targets)
    objective, nll = reference(x, kernel, targets, rules)
    assert float(loss.objective) == pytest.approx(objective, rel=1e-6)
    assert float(loss.nll) == pytest.approx(nll, rel=1e-6)
    assert int(loss.tokens) == 7
    expected = numeric_gradient(lambda x: reference(x, kernel, targets, rules)[0], x)
    np.testing.assert_allclose(d_x, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    np.testing.assert_array_equal(d_x[targets < 0], 0)
    expected = numeric_gradient(lambda k: reference(x, k, targets, rules)[0], kernel)
    np.testing.assert_allclose(d_kernel, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    np.testing.assert_array_equal(d_kernel[:, VOCAB:], 0)


def test_no_target_at_all_is_zero_with_zero_gradients(problem, compiled):
    x, kernel, _ = problem
    run = compiled(LossRules(VOCAB, softcap=1.5, z_loss=0.1, chunk=4))
    (_, loss), grads = run(x, kernel, np.full(N, -1, np.int32))
    assert [float(part) for part in loss] == [0, 0, 0]
    for gradient in grads:
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_logits_match_float64_and_their_gradients_sum_to_zero(compiled, dtype):
    """Logits up to 40 in size. The last feature's weights are all one, so that its gradient is the
    sum over the vocabulary of the gradients of a token's logits: zero, up to what rounding them to
    the compute dtype can add (their sizes sum to at most 2)."""
    rng = np.random.default_rng(0)
    n, d, vocab, padded = 64, 9, 101, 104
    x = rng.normal(size=(n, d))
    kernel = rng.normal(size=(d, padded))
    kernel[-1] = 1
    kernel[:-1] *= 40 / np.abs(x @ kernel).max()
    x, kernel = jnp.asarray(x, dtype), jnp.asarray(kernel, dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    assert 35 < np.abs(exact).max() < 45
    targets = rng.integers(0, vocab, n).astype(np.int32)
    rules = LossRules(vocab, chunk=16)
    (_, loss), (d_x, _) = compiled(rules)(x, kernel, targets)
    assert loss.nll.dtype == jnp.float32
    assert float(loss.nll) == pytest.approx(reference(x, kernel, targets, rules)[1], rel=1e-5)
    atol = 2e-6 if dtype == "float32" else 2 * 2.0**-8
    np.testing.assert_allclose(np.asarray(d_x[:, -1], np.float64), 0, rtol=0, atol=atol)


def on_shards(quick_jit, ways, rules, tied=False):
    """Loss and gradients of x and of the whole kernel, its vocabulary split over `model`."""
    mesh = make_mesh(MeshConfig(data=1, model=ways), jax.devices()[:ways])
    par = Parallel(AxisRules(mesh.shape))
    split = par.rules.spec(("vocab", "embed") if tied else ("embed", "vocab"))

    def run(x, kernel, targets):
        def objective(x, kernel):
            loss = next_token_loss(x, kernel.T if tied else kernel, targets, rules, par)
            return loss.objective, loss

        x, kernel = par.varying((x, kernel))
        (_, loss), (d_x, d_kernel) = jax.value_and_grad(objective, (0, 1), has_aux=True)(x, kernel)
        return loss, par.sum_model(d_x), d_kernel

    return quick_jit(
        jax.shard_map(run, mesh=mesh, in_specs=(P(), split, P()), out_specs=(P(), P(), split))
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("ways", [1, 2, 4])
def test_loss_and_gradients_do_not_depend_on_the_shards(problem, quick_jit, ways, tied):
    """With z-loss, soft-cap and chunks; padding is on the last shard."""
    x, kernel, targets = problem
    rules = LossRules(VOCAB, softcap=1.5, z_loss=0.1, chunk=4)
    given = kernel.T if tied else kernel
    loss, d_x, d_kernel = on_shards(quick_jit, ways, rules, tied)(x, given, targets)
    objective, nll = reference(x, kernel, targets, rules)
    assert float(loss.objective) == pytest.approx(objective, rel=1e-6)
    assert float(loss.nll) == pytest.approx(nll, rel=1e-6)
    expected = numeric_gradient(lambda x: reference(x, kernel, targets, rules)[0], x)
    np.testing.assert_allclose(d_x, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    expected = numeric_gradient(lambda k: reference(x, k, targets, rules)[0], kernel)
    d_kernel = d_kernel.T if tied else d_kernel
    np.testing.assert_allclose(d_kernel, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("ways", [1, 2, 4])
def test_uniform_logits_cost_the_log_of_the_vocabulary(quick_jit, ways, z_loss):
    """ln 8 = 2.0794 on any number of shards."""
    targets = np.array([0, 3, 7], np.int32)
    run = on_shards(quick_jit, ways, LossRules(8, z_loss=z_loss))
    loss, _, _ = run(np.ones((3, 2), np.float32), np.zeros((2, 8), np.float32), targets)
    assert float(loss.nll) / 3 == pytest.approx(math.log(8), rel=1e-6)
    z = z_loss * math.log(8) ** 2
    assert float(loss.objective) / 3 == pytest.approx(math.log(8) + z, rel=1e-6)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_padding_of_the_vocabulary_is_never_predicted_or_trained(quick_jit, softcap):
    """5 tokens stored as 8 rows on 4 shards, one and a half of them padding, zero weights: ln 5."""
    targets = np.array([0, 1, 4, -1], np.int32)
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    run = on_shards(quick_jit, 4, LossRules(5, softcap))
    loss, _, d_kernel = run(x, np.zeros((3, 8), np.float32), targets)
    assert float(loss.nll) / 3 == pytest.approx(math.log(5), rel=1e-6)
    np.testing.assert_array_equal(d_kernel[:, 5:], 0)
    assert np.abs(d_kernel[:, :5]).min() > 0


def test_chunks_keep_the_logits_from_being_held_at_once():
    """1,024 tokens, vocabulary 8,192, 64 at a time: a sixteenth of the 8.4 million logits at most
    in any array, and temporaries, forward and backward, of a quarter of their 33.6 MB."""
    n, d, vocab, chunk = 1024, 16, 8192, 64

    def objective(x, kernel, targets):
        rules = LossRules(vocab, 30.0, 1e-4, chunk)
        return next_token_loss(x, kernel, targets, rules, ALONE).objective

    shapes = (
        jax.ShapeDtypeStruct((n, d), jnp.float32),
        jax.ShapeDtypeStruct((d, vocab), jnp.float32),
        jax.ShapeDtypeStruct((n,), jnp.int32),
    )
    compiled = jax.jit(jax.grad(objective, argnums=(0, 1))).lower(*shapes).compile()
    arrays = re.findall(r"(?:f32|pred|s32)\[([\d,]+)\]", compiled.as_text())
    largest = max(math.prod(map(int, dims.split(","))) for dims in arrays)
    assert largest == chunk * vocab
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * n * vocab / 4
