"""What mixtures keep beside gradients: the bias of their routers, and auxiliary losses alone."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from shardlm.config import MoeConfig
from shardlm.model.loss import next_token_loss
from shardlm.train import forward as forward_module
from shardlm.train.step import make_gradients

MIXTURES = {
    "dropless": MoeConfig(8, balance_loss=0.05, z_loss=0.01),
    "capacity": MoeConfig(
        8,
        3,
        capacity_factor=0.9,
        gating="sigmoid",
        shared_experts=1,
        balance_loss=0.05,
        bias_rate=0.05,
    ),
}
STEPS = 4


def config_of(lab, name, **layout):
    config = lab.config(lab.Layout(**layout))
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, layers=2, moe=MIXTURES[name])
    )


@functools.cache
def run_of(lab, name, layout=()):
    """Initial state, state after one update, last state, and metrics of each."""
    compiled = lab.compiled(config_of(lab, name, **dict(layout)))
    state = compiled.start()
    states, metrics = [lab.fetch(state)], []
    for i in range(STEPS):
        state, values = compiled.step(state, lab.put(compiled.engine, lab.batch(i)))
        states.append(lab.fetch(state))
        metrics.append({k: v.item() for k, v in lab.fetch(values).items()})
    return states[0], states[1], states[-1], metrics


def mesh_id(param):
    return param if isinstance(param, str) else "-".join(f"{k} {v}" for k, v in param.items())


def test_the_bias_follows_the_load(lab):
    """One step of `bias_rate` an update, in the direction of the mean load, by no gradient."""
    first, after, last, _ = run_of(lab, "capacity")
    (name,) = [k for k in first if k.startswith("params") and k.endswith("router.bias")]
    assert not first[name].any()
    steps = after[name] / MIXTURES["capacity"].bias_rate
    assert set(steps.flat) <= {-1, 0, 1}
    assert (steps > 0).any(1).all()
    assert (steps < 0).any(1).all()
    assert np.abs(last[name]).max() <= STEPS * MIXTURES["capacity"].bias_rate * (1 + 1e-6)


def test_a_skipped_update_leaves_the_bias(lab):
    compiled = lab.compiled(config_of(lab, "capacity"))
    before = lab.fetch(compiled.start()["params"])
    batch = lab.batch(0)
    batch["targets"][:] = -1
    state, metrics = compiled.step(compiled.start(), lab.put(compiled.engine, batch))
    assert metrics["consecutive"] == 1
    assert metrics["expert_load"] > 1
    for key, leaf in lab.fetch(state["params"]).items():
        assert leaf.tobytes() == before[key].tobytes(), key


class Auxiliary:
    """Gradients of the auxiliary losses alone: the main one has weight 0."""

    def __init__(self, lab, monkeypatch):
        self.lab = lab

        def weightless(*args):
            loss = next_token_loss(*args)
            return loss._replace(objective=0 * loss.objective)

        monkeypatch.setattr(forward_module, "next_token_loss", weightless)

    def __call__(self, coefficients=(0.1, 0.03), remat="none", unroll=1, **layout):
        config = config_of(self.lab, "dropless", **layout)
        balance, z = coefficients
        moe = dataclasses.replace(config.model.moe, balance_loss=balance, z_loss=z)
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, moe=moe, scan_unroll=unroll),
            train=dataclasses.replace(config.train, remat=remat),
        )
        engine = self.lab.engine(config)
        params = self.lab.compiled(config_of(self.lab, "dropless")).initial["params"]
        specs = jax.tree.map(lambda x: x.sharding, engine.abstract["params"])
        run = jax.jit(make_gradients(engine), compiler_options=self.lab.quick_compile)
        batch = self.lab.put(engine, self.lab.batch(0))
        return self.lab.fetch(run(jax.device_put(params, specs), batch, 0)[0])


@pytest.fixture
def auxiliary(lab, monkeypatch):
    return Auxiliary(lab, monkeypatch)


def assert_same(got, expected):
    for key, leaf in expected.items():
        size = np.abs(leaf).max()
        np.testing.assert_allclose(got[key], leaf, rtol=0, atol=2e-5 * size, err_msg=key)


def test_auxiliary_losses_are_in_the_gradients(auxiliary):
    """Not of what comes after the last router, and twice as large with coefficients twice as large;
    the same for data 2 and 4, 4 micro-batches, layers unrolled and recomputed."""
    once = auxiliary()
    router = "layers.mlp.router.kernel"
    assert np.abs(once[router]).max() > 1e-4
    assert np.abs(once["layers.attn.q.kernel"]).max() > 0
    assert not once["head.kernel"].any()
    assert not once["layers.mlp.experts.up.kernel"][1].any()
    for part in ((0.2, 0.0), (0.0, 0.06)):
        # Each alone; together they are twice the first.
        once[router] = once[router] - auxiliary(part)[router] / 2
    assert np.abs(once[router]).max() < 1e-7


@pytest.mark.parametrize(
    "how",
    [
        {"data": 4, "micro_batches": 4, "remat": "full"},
        {"data": 2, "model": 2, "unroll": 0},
        pytest.param({"data": 2}, marks=pytest.mark.slow),
        pytest.param({"micro_batches": 4}, marks=pytest.mark.slow),
        pytest.param({"expert": 4, "model": 2, "remat": "full"}, marks=pytest.mark.slow),
    ],
    ids=mesh_id,
)
def test_auxiliary_losses_do_not_depend_on_how(auxiliary, how):
    assert_same(auxiliary(**how), auxiliary())
