"""Muon on stacked and multi-head kernels, against float64."""

import jax
import numpy as np
import pytest

from shardlm.config import Config, OptimConfig, TrainConfig
from shardlm.optim import make_optimizer

RATE = 0.02
CONFIG = Config(
    optim=OptimConfig(
        name="muon",
        schedule="constant",
        warmup_steps=0,
        learning_rate=0.003,
        matrix_learning_rate=RATE,
        weight_decay=0.0,
        clip_norm=0.0,
    ),
    train=TrainConfig(steps=10),
)
# Kernel, and the shape of one layer's matrix: embed 12, 6 heads and 2 key/value heads of 5, mlp 20.
MATRICES = {
    ("attn", "q"): (12, 30),
    ("attn", "k"): (12, 10),
    ("attn", "o"): (30, 12),
    ("mlp", "up"): (12, 20),
    ("mlp", "down"): (20, 12),
}


def newton_schulz(matrix):
    """Five quintic steps of the reference description, in float64."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.fixture(scope="module")
def run(trees):
    """Gradients and updates of three steps."""
    tx = make_optimizer(CONFIG)
    params = trees.full(0.0)
    state, update, steps = jax.jit(tx.init)(params), jax.jit(tx.update), []
    for t in (1, 2, 3):
        grads = trees.random(t)
        updates, state = update(grads, state, params)
        steps.append((grads, updates))
    return steps


@pytest.mark.parametrize("owner", MATRICES)
def test_each_layer_is_its_own_matrix(run, owner):
    grads, updates = run[0]
    shape = MATRICES[owner]
    got = np.asarray(updates["layers"][owner[0]][owner[1]]["kernel"])
    gradient = np.asarray(grads["layers"][owner[0]][owner[1]]["kernel"], np.float64)
    for layer in range(2):
        # The first Nesterov step has the direction of the gradient, and the length is divided out.
        matrix = newton_schulz(gradient[layer].reshape(shape))
        expected = -RATE * max(1.0, shape[1] / shape[0]) ** 0.5 * matrix
        np.testing.assert_allclose(got[layer].reshape(shape), expected, rtol=1e-4, atol=1e-6)


def test_momentum_over_three_updates(run):
    """Nesterov with bias corrections: b m / (1 - b^(t+1)) + (1 - b) g / (1 - b^t), b 0.95."""
    momentum = np.zeros((2, 20, 12))
    for t, (grads, updates) in enumerate(run, start=1):
        gradient = np.asarray(grads["layers"]["mlp"]["down"]["kernel"], np.float64)
        momentum = 0.95 * momentum + 0.05 * gradient
        ahead = 0.95 * momentum / (1 - 0.95 ** (t + 1)) + 0.05 * gradient / (1 - 0.95**t)
        got = updates["layers"]["mlp"]["down"]["kernel"]
        for layer in range(2):
            expected = -RATE * newton_schulz(ahead[layer])
            np.testing.assert_allclose(got[layer], expected, rtol=1e-4, atol=1e-6)


def test_updates_are_nearly_orthogonal(run):
    """Five quintic steps take every singular value in (0.003, 1) to one in (0.681, 1.203)."""
    _, updates = run[0]
    for owner, shape in MATRICES.items():
        kernel = np.asarray(updates["layers"][owner[0]][owner[1]]["kernel"])
        for layer in range(2):
            matrix = kernel[layer].reshape(shape) / RATE / max(1.0, shape[1] / shape[0]) ** 0.5
            values = np.linalg.svd(matrix, compute_uv=False)
            assert values.min() > 0.681, owner
            assert values.max() < 1.203, owner


def test_the_rest_gets_adamw_at_its_own_rate(run):
    """The first Adam update is g / (|g| + eps) times the rate."""
    grads, updates = run[0]
    rest = [
        ("embed", "table"),
        ("head", "kernel"),
        ("final_norm", "scale"),
        ("layers", "attn_norm", "scale"),
        ("layers", "attn", "q", "bias"),
    ]
    for path in rest:
        got, grad = updates, grads
        for name in path:
            got, grad = got[name], grad[name]
        grad = np.asarray(grad, np.float64)
        np.testing.assert_allclose(got, -0.003 * grad / (abs(grad) + 1e-8), rtol=1e-5)
