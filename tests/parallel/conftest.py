"""A tiny model on any mesh, and its gradients as the update takes them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from shardlm.mesh import make_mesh
from shardlm.train.setup import build_engine
from shardlm.train.step import make_gradients

BATCH, LENGTH, VOCAB = 8, 5, 21
MODEL = ModelConfig(
    layers=3,
    embed=16,
    heads=6,
    kv_heads=2,
    head_dim=4,
    mlp=24,
    vocab=VOCAB,
    activation="relu2",
    bias=True,
    dropout=0.5,
    dtype="float32",
    attention="xla",
)

# Little optimization: these programs run once or twice, and compiling them is all the time.
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    QUICK["xla_cpu_use_fusion_emitters"] = False


class Tiny:
    """Gradients of a tiny model with dropout on meshes of the simulated devices."""

    batch_size, length, vocab, model, quick = BATCH, LENGTH, VOCAB, MODEL, QUICK

    @staticmethod
    def batch() -> dict[str, np.ndarray]:
        """Two documents a row, at different places, and targets in every row at other places."""
        rng = np.random.default_rng(1)
        shape = (BATCH, LENGTH)
        place, start = np.arange(LENGTH), rng.integers(1, LENGTH, (BATCH, 1))
        segments = 1 + (place >= start)
        tokens = rng.integers(0, VOCAB, shape)
        targets = np.where(rng.random(shape) < 0.6, rng.integers(0, VOCAB, shape), -1)
        batch = {"tokens": tokens, "targets": targets, "segments": segments}
        batch["positions"] = np.where(place >= start, place - start, place)
        batch["rows"] = np.arange(BATCH, dtype=np.int32)
        return {k: v.astype(np.int32) for k, v in batch.items()}

    @staticmethod
    def weights(abstract: Any) -> Any:
        """Random numbers for every parameter, biases and scales too; equal on every mesh."""
        rng = np.random.default_rng(2)
        return jax.tree.map(
            lambda x: jax.device_put(rng.normal(0, 0.5, x.shape).astype(np.float32), x.sharding),
            abstract,
        )

    @staticmethod
    @functools.cache
    def _compiled(
        sizes: tuple[tuple[str, int], ...],
        shard_params: str = "all",
        remat: str = "none",
        unroll: int = 1,
        attention: str = "xla",
    ) -> tuple[Callable[..., Any], Any]:
        config = Config(
            mesh=MeshConfig(**({"data": 1} | dict(sizes)), shard_params=shard_params),
            model=dataclasses.replace(
                MODEL, scan_unroll=unroll, attention=attention, attention_block=2
            ),
            data=DataConfig(length=LENGTH),
            train=TrainConfig(batch=BATCH, micro_batch=4, remat=remat, loss_chunk=7),
            optim=OptimConfig(name="sgd"),
        )
        devices = jax.devices()[: int(np.prod([n for _, n in sizes], dtype=int))]
        engine = build_engine(config, make_mesh(config.mesh, devices))
        weights = Tiny.weights(engine.abstract["params"])
        return jax.jit(make_gradients(engine), compiler_options=QUICK), weights

    @classmethod
    def gradients(
        cls,
        batch: dict[str, np.ndarray],
        step: int = 0,
        shard_params: str = "all",
        remat: str = "none",
        unroll: int = 1,
        attention: str = "xla",
        moved: tuple[float, Any] | None = None,
        **sizes: int,
    ) -> tuple[Any, float, int]:
        """Mean gradients, summed loss and tokens of an update of two micro-batches, at the weights
        plus so much of a direction."""
        run, weights = cls._compiled(tuple(sizes.items()), shard_params, remat, unroll, attention)
        if moved:
            distance, direction = moved
            weights = jax.tree.map(lambda w, d: w + np.float32(distance) * d, weights, direction)
        grads, nll, tokens, *_ = run(weights, batch, jnp.int32(step))
        return jax.tree.map(np.asarray, grads), float(nll), int(tokens)

    @staticmethod
    def assert_close(actual: Any, expected: Any, relative: float) -> None:
        """Every leaf, relative to the leaf's largest element."""
        pairs = zip(
            jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
        )
        for (path, a), e in pairs:
            error = np.abs(a - e).max() / np.abs(e).max()
            assert error <= relative, f"{jax.tree_util.keystr(path)}: {error:.2e}"


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    return Tiny
