"""Gradients of an update: the same on every mesh, recomputed or not, dropout included."""

import itertools

import jax
import numpy as np
import pytest

MESH = {"replica": 2, "data": 2, "model": 2}


@pytest.mark.parametrize("unroll, devices", [(0, 1), (2, 4)])
def test_recomputed_and_unrolled_layers_have_the_same_gradients_and_dropout(tiny, unroll, devices):
    batch = tiny.batch()
    expected, nll, tokens = tiny.gradients(batch, data=devices)
    grads, nll_again, tokens_again = tiny.gradients(
        batch, remat="full", unroll=unroll, data=devices
    )
    assert tokens == tokens_again == (batch["targets"] >= 0).sum()
    assert nll_again == pytest.approx(nll, rel=1e-6)
    tiny.assert_close(grads, expected, 1e-6)


@pytest.mark.parametrize("shard_params", ["all", "optimizer", "none"])
def test_gradients_of_eight_devices_are_those_of_one(tiny, shard_params):
    """Masks of dropout included, and with rows of unequal numbers of targets."""
    batch = tiny.batch()
    expected, nll, tokens = tiny.gradients(batch, data=1)
    grads, nll_again, tokens_again = tiny.gradients(batch, shard_params=shard_params, **MESH)
    assert tokens_again == tokens
    assert nll_again == pytest.approx(nll, rel=1e-6)
    tiny.assert_close(grads, expected, 5e-6)


def test_blockwise_attention_on_eight_devices_is_plain_attention_on_one(tiny):
    """Blocks of 2 in rows of 5, two documents a row."""
    batch = tiny.batch()
    expected, nll, _ = tiny.gradients(batch, data=1)
    grads, nll_again, _ = tiny.gradients(batch, attention="blockwise", **MESH)
    assert nll_again == pytest.approx(nll, rel=1e-6)
    tiny.assert_close(grads, expected, 5e-6)


def test_gradients_are_the_slope_of_the_reported_loss(tiny):
    """A factor common to all meshes would not show when they are compared with each other."""
    batch = tiny.batch()
    grads, _, tokens = tiny.gradients(batch, data=1)
    norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in jax.tree.leaves(grads)))

    def loss(step):
        _, nll, _ = tiny.gradients(batch, moved=(step / norm, grads), data=1)
        return nll / tokens

    step = 3e-3
    # Curvature falls out of the central difference; two fp32 losses, rounded to 2^-24 of about 5
    # each, leave up to 6e-7 over a distance of 6e-3.
    assert (loss(step) - loss(-step)) / (2 * step) == pytest.approx(norm, abs=1e-4)


def masks(tiny, **sizes):
    """What dropout keeps, by (layer, branch, row, step).

    With one target, on the first token of its document, the gradient of a bias before a dropout is
    zero exactly where that token's element was dropped.
    """
    found = {}
    for row, step in itertools.product((1, 2, 5), (0, 1)):
        batch = tiny.batch()
        batch["targets"][:] = -1
        place, places = 2, np.arange(tiny.length)
        batch["segments"][row] = 1 + (places >= place)
        batch["positions"][row] = np.where(places >= place, places - place, places)
        batch["targets"][row, place] = 3
        grads, _, tokens = tiny.gradients(batch, step=step, **sizes)
        assert tokens == 1
        for branch, part in enumerate(("attn", "mlp")):
            bias = grads["layers"][part]["o" if part == "attn" else "down"]["bias"]
            for layer in range(tiny.model.layers):
                found[layer, branch, row, step] = tuple(bias[layer] != 0)
    return found


def test_every_layer_micro_batch_and_step_has_its_own_dropout_mask(tiny):
    """Rows 1 and 2 are of one micro-batch; row 5 is in the other where row 1 is in the first."""
    found = masks(tiny, data=1)
    assert len(set(found.values())) == len(found) == 3 * 2 * 3 * 2
    kept = np.mean(list(found.values()))
    # 36 masks of 16 elements: four standard deviations are .083.
    assert abs(kept - 0.5) < 0.083
    assert masks(tiny, data=1) == found
    assert masks(tiny, **MESH) == found


@pytest.mark.parametrize("sizes", [{"data": 1}, MESH], ids=str)
def test_rows_of_padding_change_nothing(tiny, sizes):
    """The sums over rows 0 to 2 and over the others, with padding for the rest, add up to those of
    all rows. What tokens the padding holds is the same to every bit."""

    def sums(first, last, token=0):
        batch = tiny.batch()
        rows = np.arange(tiny.batch_size)
        padding = (rows < first) | (rows >= last)
        for name, value in (("segments", 0), ("targets", -1), ("tokens", token), ("positions", 0)):
            batch[name][padding] = value
        grads, nll, tokens = tiny.gradients(batch, **sizes)
        return jax.tree.map(lambda g: g * tokens, grads), nll, tokens

    whole, nll, tokens = sums(0, tiny.batch_size)
    head, tail = sums(0, 3), sums(3, tiny.batch_size)
    assert head[2] + tail[2] == tokens
    assert head[1] + tail[1] == pytest.approx(nll, rel=1e-6)
    tiny.assert_close(jax.tree.map(np.add, head[0], tail[0]), whole, 2e-6)
    other = sums(0, 3, token=7)
    assert other[1] == head[1]
    jax.tree.map(np.testing.assert_array_equal, other[0], head[0])


@pytest.mark.parametrize("sizes", [{"data": 1}, MESH], ids=str)
def test_a_batch_of_padding_only_has_zero_gradients(tiny, sizes):
    batch = {k: np.zeros_like(v) for k, v in tiny.batch().items()}
    batch["targets"] -= 1
    grads, nll, tokens = tiny.gradients(batch, **sizes)
    assert (nll, tokens) == (0, 0)
    for leaf in jax.tree.leaves(grads):
        assert not leaf.any()
