"""The same run on every mesh, and under every way of doing it."""

import numpy as np
import pytest

MESHES = [(1, 8, 1), (1, 4, 2), (1, 2, 4), (1, 1, 8)]
VARIANTS = [
    (2, 2, 2, "optimizer", 2),
    (1, 4, 2, "none", 2),
    (1, 2, 1, "all", 2, 4),
    (1, 1, 2, "optimizer", 1, 4, "ulysses"),
]
LONG = [
    (1, 8, 1, "optimizer", 1),
    (1, 8, 1, "none", 1),
    (2, 2, 2, "all", 2),
    (8, 1, 1, "all", 1),
    (2, 1, 4, "none", 1),
    (1, 1, 1, "all", 4),
    (1, 1, 1, "all", 1, 8),
    (2, 1, 2, "none", 1, 2, "gather"),
]
slow = [pytest.param(layout, marks=pytest.mark.slow) for layout in LONG]


@pytest.fixture(
    scope="module", params=[*MESHES, *VARIANTS, *slow], ids=lambda p: "-".join(map(str, p))
)
def layout(request, lab):
    return lab.Layout(*request.param)


def test_initial_state_is_equal_in_every_bit(layout, lab):
    one, run = lab.run(), lab.run(layout)
    assert run.initial.keys() == one.initial.keys()
    for name, leaf in one.initial.items():
        assert run.initial[name].tobytes() == leaf.tobytes(), name


def test_twenty_losses(layout, lab):
    one, run = lab.run(), lab.run(layout)
    assert one.losses[-1] < 0.05 * one.losses[0], "the run must learn for its end to mean something"
    np.testing.assert_allclose(run.losses, one.losses, rtol=1e-5)
    for key in ("tokens", "skipped", "consecutive"):
        assert [m[key] for m in run.metrics] == [m[key] for m in one.metrics]


def test_final_parameters(layout, lab):
    one, run = lab.run().params(), lab.run(layout).params()
    assert one.keys() == run.keys()
    for name in one:
        np.testing.assert_allclose(run[name], one[name], rtol=0, atol=1e-4, err_msg=name)
    # The vocabulary of 67 is padded to what any mesh divides.
    assert not run["params.embed.table"][67:].any()
    assert not run["params.head.kernel"][:, 67:].any()


def test_gradients_of_every_leaf(layout, lab):
    """A sum in the place of a mean, or the reverse, is a factor of the size of an axis."""
    one, run = lab.run().gradients(), lab.run(layout).gradients()
    assert len(one) == 14
    for name in one:
        size = np.abs(one[name]).sum(dtype=np.float64)
        assert size > 0, name
        assert np.abs(run[name]).sum(dtype=np.float64) == pytest.approx(size, rel=1e-5), name
        # fp32 sums over 89 tokens, in another order.
        np.testing.assert_allclose(
            run[name], one[name], rtol=0, atol=1e-5 * np.abs(one[name]).max(), err_msg=name
        )


def test_norm_is_that_of_the_gathered_gradients(layout, lab):
    run = lab.run(layout)
    squares = sum(np.square(g, dtype=np.float64).sum() for g in run.gradients().values())
    assert run.metrics[0]["grad_norm"] == pytest.approx(np.sqrt(squares), rel=1e-5)


@pytest.mark.parametrize(
    "mesh", [(1, 4, 2), *[pytest.param(m, marks=pytest.mark.slow) for m in [(2, 2, 2), (1, 1, 4)]]]
)
def test_adamw(mesh, lab):
    """Each update is lr · m / (sqrt(v) + eps). An error δ of a gradient changes m and sqrt(v) by at
    most δ, and so the update by at most 2 · lr · δ / eps, however small the gradient: with the
    usual eps of 1e-8 that says nothing, with 1e-3 it does. Gradients of norm at most clip_norm
    agree to δ = 1e-6 · clip_norm (as the test above finds for each leaf)."""
    one, run = lab.run(optim="adamw"), lab.run(lab.Layout(*mesh), optim="adamw")
    optim = lab.config(optim="adamw").optim
    bound = 20 * 2 * optim.learning_rate * 1e-6 * optim.clip_norm / optim.eps
    assert bound < 1e-5
    np.testing.assert_allclose(run.losses, one.losses, rtol=1e-5)
    for name, leaf in one.params().items():
        np.testing.assert_allclose(run.params()[name], leaf, rtol=0, atol=bound, err_msg=name)


def test_clipped_gradients(lab):
    """The first moment after one update is (1 - b1) · g · min(1, clip_norm / norm)."""
    optim = lab.config(optim="adamw").optim
    for layout in (lab.Layout(), lab.Layout(1, 4, 2)):
        whole, run = lab.run().gradients(), lab.run(layout, optim="adamw")
        norm = run.metrics[0]["grad_norm"]
        assert norm > 10 * optim.clip_norm
        for name, leaf in run.after_one.items():
            if ".mu." in name:
                g = whole[name.split(".mu.")[1]] * (1 - optim.b1) * optim.clip_norm / norm
                np.testing.assert_allclose(leaf, g, rtol=0, atol=2e-6 * np.abs(g).max())


@pytest.mark.parametrize(
    "mesh", [(1, 4, 2), *[pytest.param(m, marks=pytest.mark.slow) for m in [(2, 2, 2), (1, 1, 8)]]]
)
def test_bfloat16(mesh, lab):
    """One rounding to bf16 is off by up to u = 2^-8. Meshes round other partial sums, about 25
    times between a weight and its gradient (3 layers of 4 matrices, forward and backward), which
    add up like random numbers: sqrt(25) · u = 5u for a gradient, and for the way that they lead.
    The loss is a mean over about 90 tokens of one such error each: u."""
    u = 2.0**-8
    layout = lab.Layout(*mesh)
    one, run = lab.run(dtype="bfloat16"), lab.run(layout, dtype="bfloat16")
    for name, leaf in one.initial.items():
        assert run.initial[name].tobytes() == leaf.tobytes(), name
    np.testing.assert_allclose(run.losses, one.losses, rtol=u)
    for name, g in one.gradients().items():
        assert np.linalg.norm(run.gradients()[name] - g) <= 5 * u * np.linalg.norm(g), name
    for name, leaf in one.params().items():
        way = np.linalg.norm(leaf - one.initial[name])
        assert np.linalg.norm(run.params()[name] - leaf) <= 5 * u * way, name
        assert leaf.dtype == np.float32
