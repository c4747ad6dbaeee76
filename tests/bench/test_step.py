"""The reference that the engine is timed against does the engine's work."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm import cli
from shardlm.bench import step as bench_step
from shardlm.bench.reference import Form, Shape, init, make_step, nearest_forms
from shardlm.mesh import make_mesh
from shardlm.options import BENCHES
from shardlm.train.setup import build_engine, new_state
from shardlm.train.step import make_train_step

SHAPE = Shape(
    layers=2, embed=32, heads=2, head_dim=16, mlp=48, vocab=64, length=128, batch=4, micro_batches=2
)
UPDATES = 3


@pytest.fixture(scope="module")
def tokens():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(0, SHAPE.vocab, (SHAPE.batch, SHAPE.length + 1)), jnp.int32)


@pytest.fixture(scope="module")
def losses(tokens):
    """Of the engine's first updates, from the reference's first parameters."""
    config = bench_step.engine_config(SHAPE, "float32")
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, clip_norm=0.0))
    engine = build_engine(config, make_mesh(config.mesh, jax.devices()[:1]))
    theirs = init(SHAPE, jax.random.key(0))
    layers, heads = theirs["layers"], (SHAPE.heads, SHAPE.head_dim)
    split = {
        n: {"kernel": layers[n].reshape(*layers[n].shape[:2], *heads)} for n in ("q", "k", "v")
    }
    merge = layers["o"].reshape(SHAPE.layers, *heads, SHAPE.embed)
    params = {
        "embed": {"table": theirs["embed"]},
        "layers": {
            "attn_norm": {"scale": layers["attn_norm"]},
            "attn": split | {"o": {"kernel": merge}},
            "mlp_norm": {"scale": layers["mlp_norm"]},
            "mlp": {n: {"kernel": layers[n]} for n in ("gate", "up", "down")},
        },
        "final_norm": {"scale": theirs["norm"]},
        "head": {"kernel": theirs["head"]},
    }
    state = new_state(engine)
    assert jax.tree.map(jnp.shape, state["params"]) == jax.tree.map(jnp.shape, params)
    state = state | {"params": params}
    ones = jnp.ones_like(tokens[:, 1:])
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": ones}
    batch |= {"positions": jnp.cumsum(ones, 1) - 1}
    step, found = make_train_step(engine), []
    for _ in range(UPDATES):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.parametrize("form", [Form(), *nearest_forms(Form())], ids=str)
def test_reference_and_engine_compute_the_same(losses, tokens, form):
    """The first loss to fp32's rounding; later ones but for the decay of norm scales, which the
    reference does not leave out: 1e-4 an update. bf16 has 2**-8 a weight."""
    step, state = make_step(SHAPE, form)
    for update, expected in enumerate(losses):
        state, loss = step(state, tokens[:, :-1], tokens[:, 1:])
        close = 2e-3 if form.dtype == "bfloat16" else 1e-6 if update == 0 else 1e-4
        assert float(loss) == pytest.approx(expected, rel=close)
    assert losses[0] - losses[-1] > 0.04, "a hundred times what may differ"


def test_the_last_line_is_json(monkeypatch, capsys):
    monkeypatch.setattr(bench_step, "WORKLOADS", {"bytes": SHAPE, "micro_batches": SHAPE})
    assert cli.run(cli.bench, ["step", "--rounds", "2", "--only", "bytes"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["bench"] == "step"
    assert found["machine"]["jax"] == jax.__version__
    (figures,) = found["figures"].values()
    assert figures["engine_tokens_per_second"] > 0
    low, high = figures["ratio_quartiles"]
    assert 0 < low <= figures["ratio"] <= high


def test_all_workloads_have_a_flag():
    assert BENCHES["step"] == tuple(bench_step.WORKLOADS)
