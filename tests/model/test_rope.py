"""Rotary positions: exact enough at 131,071, and the published scalings."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.config import ModelConfig, RopeConfig
from shardlm.model.layers import rope_frequencies, rope_table, rotate


def model(head_dim=8, **rope):
    return ModelConfig(head_dim=head_dim, rope=RopeConfig(**rope))


def test_angles_at_long_positions_match_float64():
    """fp32 holds positions up to 131,071 exactly and their angles to half of 2^-6/2; a frequency is
    off by at most 2^-24 of itself."""
    positions = np.array([[0, 1, 4096, 4097, 65_537, 131_070, 131_071]], np.int32)
    k = 96
    config = model(k, theta=500_000.0)
    cos, sin = (np.asarray(x)[0, :, 0] for x in rope_table(config, jnp.asarray(positions)))
    angle = positions[0][:, None] * 500_000.0 ** (-np.arange(0, k, 2) / k)
    bound = 2.0**-8 + 131_071 * 2.0**-24 + 1e-5
    assert bound < 0.02
    for half, sign in ((slice(0, k // 2), -1), (slice(k // 2, k), 1)):
        np.testing.assert_allclose(cos[:, half], np.cos(angle), rtol=0, atol=bound)
        np.testing.assert_allclose(sin[:, half], sign * np.sin(angle), rtol=0, atol=bound)


def test_neighbouring_positions_differ():
    """cos(4096) and cos(4097); bf16 has one number for both positions."""
    cos, _ = rope_table(model(), jnp.array([[4096, 4097]]))
    np.testing.assert_allclose(cos[0, :, 0, 0], [0.8040, 0.9348], rtol=0, atol=5e-5)


def inverse_wavelengths(k, theta):
    return [theta ** (-2 * i / k) for i in range(k // 2)]


def test_linear_scaling_divides_every_frequency():
    frequency, scale = rope_frequencies(model(16, theta=1000.0, scaling="linear", factor=4.0))
    expected = [f / 4 for f in inverse_wavelengths(16, 1000.0)]
    np.testing.assert_allclose(frequency, expected, rtol=1e-6)
    assert scale == 1


@pytest.mark.parametrize("k", [32, 128])
def test_llama3_scaling_is_that_of_the_published_models(k):
    """factor 8, low 1, high 4, original length 8,192: by wavelengths, as Llama 3.1 defines it."""
    old, factor, low, high = 8192, 8.0, 1.0, 4.0
    config = model(
        k, theta=5e5, scaling="llama3", factor=factor, original_length=old, low=low, high=high
    )
    expected, kinds = [], set()
    for f in inverse_wavelengths(k, 5e5):
        wavelength = 2 * math.pi / f
        if wavelength < old / high:
            kinds.add("kept")
            expected.append(f)
        elif wavelength > old / low:
            kinds.add("stretched")
            expected.append(f / factor)
        else:
            kinds.add("blended")
            smooth = (old / wavelength - low) / (high - low)
            expected.append((1 - smooth) * f / factor + smooth * f)
    assert kinds == {"kept", "stretched", "blended"}
    frequency, scale = rope_frequencies(config)
    np.testing.assert_allclose(frequency, expected, rtol=1e-6)
    assert scale == 1


@pytest.mark.parametrize(
    "k, theta, factor, old, low, high",
    [
        (128, 1e6, 4.0, 32_768, 1.0, 32.0),
        (64, 1e4, 16.0, 4096, 1.0, 32.0),
        (8, 1e4, 2.0, 64, 1.0, 4.0),
    ],
)
def test_yarn_scaling_is_that_of_the_paper(k, theta, factor, old, low, high):
    """Section 3.2's ramp over the index of the pair, between whole indices, as published models
    use it; cos and sin are scaled by 0.1 ln(factor) + 1."""

    def index_of(rotations):
        # The pair that turns so many times over the original length:
        # theta^(-2i/k) * old = 2 pi * rotations.
        return k / 2 * math.log(old / (2 * math.pi * rotations)) / math.log(theta)

    first, last = max(math.floor(index_of(high)), 0), min(math.ceil(index_of(low)), k - 1)
    expected = []
    for i, f in enumerate(inverse_wavelengths(k, theta)):
        stretched = min(max((i - first) / (last - first), 0), 1)
        expected.append(stretched * f / factor + (1 - stretched) * f)
    config = model(
        k, theta=theta, scaling="yarn", factor=factor, original_length=old, low=low, high=high
    )
    frequency, scale = rope_frequencies(config)
    np.testing.assert_allclose(frequency, expected, rtol=1e-6)
    assert scale == pytest.approx(1 + 0.1 * math.log(factor))
    cos, sin = rope_table(config, jnp.array([[0, 5]]))
    np.testing.assert_allclose(cos**2 + sin**2, scale**2, rtol=1e-5)


def test_rotation_turns_pairs_by_the_angle():
    """Number i and number i + K/2 are the real and imaginary part."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 3, 2, 8)).astype(np.float32)
    positions = np.array([[0, 3, 100]])
    cos, sin = rope_table(model(8, theta=100.0), jnp.asarray(positions))
    got = np.asarray(rotate(jnp.asarray(x), cos, sin))
    angle = positions[0][:, None, None] * 100.0 ** (-np.arange(4) / 4)
    expected = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)
    np.testing.assert_allclose(got[..., :4] + 1j * got[..., 4:], expected, atol=2e-5)
    np.testing.assert_array_equal(got[:, 0], x[:, 0])
    np.testing.assert_allclose(np.linalg.norm(got, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)


def test_scores_depend_on_the_distance_only():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def score(i, j):
        at = [rope_table(model(), jnp.array([[p]])) for p in (i, j)]
        return float((rotate(q, *at[0]) * rotate(k, *at[1])).sum())

    assert score(7, 3) == pytest.approx(score(1004, 1000), abs=1e-3)
    assert abs(score(7, 3) - score(7, 4)) > 1e-2
