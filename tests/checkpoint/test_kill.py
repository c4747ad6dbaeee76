"""SIGKILL in the middle of a save: there is always a complete checkpoint, and it is whole."""

import multiprocessing
import os
import random
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardlm.checkpoint import CheckpointStore

LEAVES, ROWS = 6, 512


def initial_state():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return {f"w{i}": jnp.zeros((ROWS, 512), device=sharding) for i in range(LEAVES)}


def save_for_ever(directory, pipe):
    """Each leaf of the state of step k holds k everywhere. Tells the steps that are complete."""
    store = CheckpointStore(directory, keep=1)
    state = initial_state()
    step = jax.jit(lambda s, k: jax.tree.map(lambda x: jnp.full_like(x, k), s), donate_argnums=0)
    start = store.latest() or 0
    pipe.send(start)
    for k in range(start + 1, 100_000):
        state = step(state, k)
        store.save(k, state, {"step": k})
        state = step(state, -1)
        store.wait()
        pipe.send(k)


def kill_and_check(directory, kills, seed):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["jax", "orbax.checkpoint"])
    rng = random.Random(seed)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), initial_state()
    )
    previous = 0
    for _ in range(kills):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=save_for_ever, args=(directory, theirs), daemon=True)
        child.start()
        theirs.close()
        assert ours.recv() == previous, "the child resumes from what the check below saw"
        told = previous
        while told < previous + 2:
            told = ours.recv()
        child.join(rng.uniform(0, 0.15))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        while True:
            try:
                told = ours.recv()
            except EOFError:
                break
        store = CheckpointStore(directory)
        previous = store.latest()
        assert store.broken() == {}
        assert previous in (told, told + 1), "nothing that was complete is lost"
        assert store.metadata(previous) == {"step": previous}
        for name, leaf in store.restore(previous, like).items():
            assert np.all(np.asarray(leaf) == previous), name


def test_killed_while_saving(tmp_path):
    kill_and_check(tmp_path / "checkpoints", kills=3, seed=1)


@pytest.mark.slow
def test_killed_at_twenty_random_moments(tmp_path):
    kill_and_check(tmp_path / "checkpoints", kills=20, seed=2)
