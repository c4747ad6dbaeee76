"""SwiGLU, whose derivative is written by hand, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.model.layers import swiglu

# Where the derivative of silu is least (-2.4), 0 (-1.28), and saturated.
GATE = np.concatenate([np.linspace(-9, 9, 181), [-1.2784645, -2.3993573, -80, 80]])


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("dtype, rounding", [("float32", 2**-23), ("bfloat16", 2**-8)])
@pytest.mark.parametrize("remat", [False, True])
def test_value_and_gradients_match_float64(quick_jit, dtype, rounding, remat):
    """Within 3 roundings of the largest factors; that of 1 - sigmoid is multiplied by the gate."""
    rng = np.random.default_rng(0)
    gate, up, d_out = (
        jnp.asarray(x, dtype)[None, :, None]
        for x in (GATE, rng.normal(size=GATE.size), rng.normal(size=GATE.size))
    )

    def both(gate, up, d_out):
        out, pull = jax.vjp(jax.checkpoint(swiglu) if remat else swiglu, gate, up)
        return out, *pull(d_out)

    got = quick_jit(both)(gate, up, d_out)
    assert {x.dtype for x in got} == {jnp.dtype(dtype)}
    gate, up, d_out = (np.asarray(x, np.float64) for x in (gate, up, d_out))
    slope = (silu(gate + 1e-6) - silu(gate - 1e-6)) / 2e-6
    for name, a, e, scale in (
        ("out", got[0], silu(gate) * up, np.abs(gate * up)),
        ("d_gate", got[1], slope * up * d_out, (1 + np.abs(gate)) * np.abs(up * d_out)),
        ("d_up", got[2], silu(gate) * d_out, np.abs(gate * d_out)),
    ):
        error = np.abs(np.asarray(a, np.float64) - e)
        assert (error <= 3 * rounding * scale + 1e-9).all(), name
