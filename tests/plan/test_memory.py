"""Memory of compiled updates, by the compiler's own account."""

import jax
import numpy as np
import pytest

from shardlm.config import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from shardlm.mesh import make_mesh
from shardlm.train.setup import build_engine
from shardlm.train.step import make_train_step


def temporaries(mesh, model, length, rows, micro_batches=1, **train):
    """Bytes a device needs beside the state, the batch and the metrics."""
    train = TrainConfig(batch=rows * micro_batches, micro_batch=rows, **train)
    config = Config(mesh=mesh, model=model, data=DataConfig(length=length), train=train)
    engine = build_engine(config, make_mesh(config.mesh))
    row = jax.ShapeDtypeStruct((train.batch, length), np.int32)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), row)
    step = make_train_step(engine).lower(engine.abstract, batch)
    compiled = step.compile(compiler_options={"xla_backend_optimization_level": 0})
    return compiled.memory_analysis().temp_size_in_bytes


DEEP = ModelConfig(layers=8, embed=128, heads=4, kv_heads=2, mlp=344, vocab=512, dtype="float32")


@pytest.mark.parametrize(
    "stages, rounds, remat",
    [
        (4, 1, "none"),
        pytest.param(4, 2, "none", marks=pytest.mark.slow),
        pytest.param(4, 1, "full", marks=pytest.mark.slow),
    ],
)
def test_stages_keep_no_more_for_more_micro_batches(stages, rounds, remat):
    mesh = MeshConfig(stage=stages, stage_rounds=rounds, data=1)
    few, many = (temporaries(mesh, DEEP, 256, 2, k, remat=remat) for k in (16, 64))
    print(f"stage {stages}, rounds {rounds}, {remat}: {few:,} bytes for 16, {many:,} for 64")
    assert many <= 1.02 * few


def test_stages_keep_what_came_into_them_and_one_micro_batch():
    """A quarter of what depends on the layers, all of what embedding and head need, which is less
    than a tenth, and the inputs of `Schedule.kept` runs."""
    one = temporaries(MeshConfig(data=1), DEEP, 256, 2, 16)
    four = temporaries(MeshConfig(stage=4, data=1), DEEP, 256, 2, 16)
    kept = 7 * 2 * 256 * DEEP.embed * 4
    print(f"{one:,} bytes on one device, {four:,} on each of 4 stages, {kept:,} of them kept")
    assert four <= 0.35 * one + kept


@pytest.mark.parametrize("comm", ["ring", pytest.param("gather", marks=pytest.mark.slow)])
def test_a_row_over_context_takes_its_part_of_the_memory(comm):
    """Of 32,768 tokens, whose scores would take 8 GiB."""
    model = ModelConfig(
        layers=2,
        embed=64,
        heads=2,
        kv_heads=1,
        mlp=128,
        vocab=256,
        dtype="float32",
        attention="blockwise",
        attention_block=512,
    )

    def of(context):
        mesh = MeshConfig(context=context, context_comm=comm, data=1)
        return temporaries(mesh, model, 32_768, 1, loss_chunk=4096)

    one, eight = of(1), of(8)
    print(f"{one:,} bytes on one device, {eight:,} on each of 8, {one / eight:.1f} times less")
    assert eight <= one / 6
