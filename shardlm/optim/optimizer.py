"""The optimizer that a configuration asks for, as one optax transformation."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardlm.config import Config
from shardlm.optim.clip import clip_by_norm
from shardlm.optim.guard import Guarded, skip_nonfinite
from shardlm.optim.layerwise import layerwise
from shardlm.optim.roles import Path, decay_mask, matrix_dims, role
from shardlm.optim.schedule import counted, make_schedule


def make_optimizer(config: Config) -> Guarded:
    """Guard (clip, then optimizer, then decoupled weight decay, then schedule).

    The weight w of an update u at learning rate lr becomes w - lr · (u + weight_decay · w), with
    the decay for matrices, embeddings and the head only (arXiv 1711.05101). Moments are float32.

    - adamw: arXiv 1412.6980, 1711.05101.
    - lion: arXiv 2302.06675.
    - adafactor: arXiv 1804.04235, without its relative step sizes, so that the learning rate means
      what it means for adamw; each layer's matrix is factored, and its update clipped, apart.
    - sgd: heavy-ball momentum `b1`.
    - muon: matrices inside the layers, each layer's as one matrix over all heads, at
      `matrix_learning_rate` (https://kellerjordan.github.io/posts/muon); adamw for the rest.

    Parameters are expected in float32. For parameters held in bf16 use
    `fp32_masters(make_optimizer(config))`.

    Args:
      config: reads `optim` and `train.steps`.

    Returns:
      A transformation with extra arguments `norm` and `ok`, and `apply`: see `skip_nonfinite`.
    """
    clip_norm = config.optim.clip_norm
    clip = clip_by_norm(clip_norm) if clip_norm else optax.identity()
    return skip_nonfinite(optax.chain(clip, _rule(config)))


def learning_rate(config: Config) -> optax.Schedule:
    """Learning rate of update n, counted from 1 over the updates made (not those skipped)."""
    return make_schedule(config.optim, config.train.steps, config.optim.learning_rate)


def _rule(config: Config) -> optax.GradientTransformation:
    optim = config.optim
    rate = optim.learning_rate
    if optim.name == "muon":
        matrices = optax.chain(
            optax.contrib.scale_by_muon(mu_dtype=jnp.float32, weight_dimension_numbers=_muon_dims),
            optax.stateless(_scale_by_shape),
        )
        return optax.partition(
            {
                "muon": _finish(matrices, config, optim.matrix_learning_rate),
                "adamw": _finish(_adam(config), config, rate),
            },
            _labels,
        )
    if optim.name == "adamw":
        return _finish(_adam(config), config, rate)
    if optim.name == "lion":
        lion = optax.scale_by_lion(optim.b1, optim.b2, mu_dtype=jnp.float32)
        return _finish(lion, config, rate)
    if optim.name == "adafactor":
        adafactor = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
        return _finish(layerwise(adafactor), config, rate)
    momentum = optax.trace(optim.b1, accumulator_dtype=jnp.float32)
    return _finish(momentum if optim.b1 else optax.identity(), config, rate)


def _adam(config: Config) -> optax.GradientTransformation:
    optim = config.optim
    return optax.scale_by_adam(optim.b1, optim.b2, optim.eps, mu_dtype=jnp.float32)


def _finish(
    direction: optax.GradientTransformation, config: Config, peak: float
) -> optax.GradientTransformation:
    """Decoupled decay and learning rate after the optimizer's own direction."""
    decay = config.optim.weight_decay
    schedule = make_schedule(config.optim, config.train.steps, peak)
    return optax.chain(
        direction,
        optax.add_decayed_weights(decay, decay_mask) if decay else optax.identity(),
        optax.scale_by_learning_rate(counted(schedule)),
    )


def _labels(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "muon" if role(path) == "matrix" else "adamw", params
    )


def _muon_dims(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: optax.contrib.MuonDimensionNumbers(*matrix_dims(path)), params
    )


def _scale_by_shape(updates: Any, params: Any) -> Any:
    """Times sqrt(max(1, out / in)), so that one rate serves matrices of all shapes."""
    del params

    def scale(path: Path, x: jax.Array) -> jax.Array:
        rows, columns = (math.prod(x.shape[d] for d in dims) for dims in matrix_dims(path))
        return x * max(1.0, columns / rows) ** 0.5

    return jax.tree_util.tree_map_with_path(scale, updates)
