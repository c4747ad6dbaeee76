"""Computing in bf16 on several meshes."""

import numpy as np
import pytest


@pytest.mark.parametrize(
    "mesh", [(1, 4, 2), *[pytest.param(m, marks=pytest.mark.slow) for m in [(2, 2, 2), (1, 1, 8)]]]
)
def test_bfloat16(mesh, lab):
    """One rounding to bf16 is off by up to u = 2^-8. Meshes round other partial sums, about 33
    times between a weight and its gradient (4 layers of 4 matrices, forward and backward), which
    add up like random numbers: sqrt(33) · u < 6u for a gradient, and for the way that they lead.
    The loss is a mean over about 90 tokens of one such error each: u."""
    u = 2.0**-8
    layout = lab.Layout(*mesh)
    one, run = lab.run(dtype="bfloat16"), lab.run(layout, dtype="bfloat16")
    for name, leaf in one.initial.items():
        assert run.initial[name].tobytes() == leaf.tobytes(), name
    np.testing.assert_allclose(run.losses, one.losses, rtol=u)
    for name, g in one.gradients().items():
        assert np.linalg.norm(run.gradients()[name] - g) <= 6 * u * np.linalg.norm(g), name
    for name, leaf in one.params().items():
        way = np.linalg.norm(leaf - one.initial[name])
        assert np.linalg.norm(run.params()[name] - leaf) <= 6 * u * way, name
        assert leaf.dtype == np.float32
