"""Every axis and many products of them train as one device does, and as float64 says.

A dense model, one with a limit for its experts and one without, of odd sizes; packed rows with
padding and targets here and there; one program for each layout, which all checks share.
"""

import dataclasses
import functools
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from float64_model import Mixture, Model, loss_and_gradients
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardlm.config import ConfigError, MoeConfig
from shardlm.mesh import AXES
from shardlm.mesh.axes import check_sizes
from shardlm.train.state import shardings

ROWS = 24  # An update's: 1 or 3 micro-batches.
STEPS = 10
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
FEW = {"heads": 12, "kv_heads": 3}
"""Key/value heads that no size of `model` divides."""
KINDS = ("dense", "few", *MIXTURES)

ALONE = [
    ("dense", {"replica": 8, "micro_batches": 3}),
    ("dense", {"stage": 4, "micro_batches": 3, "remat": "full"}),
    ("dense", {"data": 2, "optim": "adamw", "remat": "full"}),
    ("capacity", {"expert": 4, "micro_batches": 3, "remat": "full"}),
    ("dense", {"context": 4, "context_comm": "gather", "optim": "adamw"}),
    ("dense", {"model": 4, "optim": "adamw", "micro_batches": 3}),
]
"""Each axis by itself."""

ALONE_TOO = [
    ("dense", {"replica": 2}),
    ("dense", {"stage": 2, "micro_batches": 3, "optim": "adamw"}),
    ("dense", {"stage": 2, "stage_rounds": 2, "micro_batches": 4}),
    ("dense", {"data": 4, "shard_params": "optimizer", "micro_batches": 3}),
    ("dense", {"data": 8, "shard_params": "none"}),
    ("dropless", {"expert": 2, "micro_batches": 3}),
    ("capacity", {"expert": 8, "optim": "adamw"}),
    ("dense", {"context": 2, "remat": "full"}),
    ("dense", {"context": 8, "context_comm": "ulysses", "micro_batches": 3}),
    ("dense", {"model": 2, "remat": "full"}),
    ("capacity", {"model": 8}),
]

TOGETHER = [
    ("dense", {"data": 4, "model": 2, "micro_batches": 3}),
    ("dense", {"replica": 2, "data": 2, "model": 2, "shard_params": "optimizer"}),
    ("dense", {"data": 2, "context": 2, "model": 2, "optim": "adamw", "micro_batches": 3}),
    ("dense", {"stage": 2, "data": 2, "model": 2, "micro_batches": 3}),
    ("few", {"data": 2, "model": 4, "micro_batches": 3}),
    ("dense", {"stage": 2, "stage_rounds": 2, "data": 2, "micro_batches": 3, "optim": "adamw"}),
    ("dropless", {"stage": 2, "expert": 2, "model": 2, "micro_batches": 3}),
    ("dropless", {"data": 2, "expert": 4, "micro_batches": 3}),
    ("capacity", {"data": 2, "expert": 2, "model": 2, "micro_batches": 3, "remat": "full"}),
    ("capacity", {"stage": 2, "stage_rounds": 2, "expert": 2, "context": 2, "micro_batches": 3}),
]
"""Products of two to four."""

TOGETHER_TOO = [
    ("dense", {"replica": 2, "data": 4, "optim": "adamw", "micro_batches": 3}),
    ("dense", {"data": 2, "context": 4, "remat": "full"}),
    ("few", {"replica": 2, "model": 4, "shard_params": "none", "remat": "full"}),
    ("few", {"context": 2, "model": 2, "context_comm": "ulysses", "shard_params": "optimizer"}),
    ("few", {"context": 4, "model": 2}),
    ("few", {"stage": 2, "model": 4, "micro_batches": 3}),
    ("dense", {"context": 4, "model": 2, "context_comm": "ulysses", "shard_params": "none"}),
    ("dense", {"replica": 2, "context": 2, "model": 2, "context_comm": "gather"}),
    ("dense", {"stage": 4, "data": 2, "shard_params": "optimizer", "micro_batches": 3}),
    ("dense", {"stage": 2, "context": 2, "model": 2, "micro_batches": 3, "remat": "full"}),
    ("dense", {"stage": 2, "replica": 2, "data": 2, "shard_params": "none", "micro_batches": 2}),
    ("dense", {"stage": 2, "data": 2, "context": 2, "context_comm": "ulysses"}),
    ("dropless", {"expert": 2, "model": 4, "optim": "adamw"}),
    ("dropless", {"expert": 2, "context": 4, "remat": "full"}),
    ("capacity", {"replica": 2, "data": 2, "expert": 2, "shard_params": "optimizer"}),
    ("capacity", {"stage": 2, "data": 2, "expert": 2, "micro_batches": 3}),
    ("capacity", {"expert": 2, "context": 2, "model": 2, "micro_batches": 3}),
]

SIXTEEN = [
    ("capacity", {"stage": 2, "data": 2, "expert": 2, "model": 2, "micro_batches": 3}),
    ("dense", {"replica": 2, "stage": 2, "data": 2, "context": 2, "micro_batches": 3}),
    ("dense", {"stage": 4, "data": 2, "model": 2, "shard_params": "optimizer"}),
    ("dropless", {"data": 2, "expert": 2, "context": 2, "model": 2}),
    ("dense", {"context": 16}),
    ("dense", {"replica": 2, "data": 4, "model": 2, "shard_params": "none", "micro_batches": 3}),
]


def every() -> list[tuple[str, dict]]:
    """All products on 2, 4 and 8 devices that the models allow, in all ways of splitting, each with
    one optimizer, recomputation and number of micro-batches, in turn."""
    found = []
    powers = [n for n in itertools.product((1, 2, 4, 8), repeat=len(AXES)) if math.prod(n) in (8,)]
    turn = itertools.count()
    for kind, sizes in itertools.product(KINDS, powers):
        layout = {axis: n for axis, n in zip(AXES, sizes, strict=True) if n > 1}
        i = next(turn)
        layout["shard_params"] = ("all", "optimizer", "none")[i % 3]
        layout["optim"] = ("sgd", "adamw")[i // 2 % 2]
        layout["remat"] = ("none", "full")[i // 3 % 2]
        layout["micro_batches"] = (1, 3)[i // 5 % 2]
        if "context" in layout:
            layout["context_comm"] = ("ring", "gather", "ulysses")[i // 2 % 3]
        if layout.get("stage") == 2:
            layout["stage_rounds"] = 1 + i // 7 % 2
        found.append((kind, layout))
    return found


class Suite:
    """Configurations, and what became of them, once in a process."""

    def __init__(self, lab):
        self.lab = lab

    def config(self, kind, optim="sgd", remat="none", dropout=0.0, **layout):
        layout = self.lab.Layout(**layout)
        config = self.lab.config(layout, optim)
        model = dataclasses.replace(config.model, dropout=dropout)
        if kind in MIXTURES:
            model = dataclasses.replace(model, moe=MIXTURES[kind])
        elif kind == "few":
            model = dataclasses.replace(model, **FEW)
        if layout.context_comm == "ulysses":
            model = dataclasses.replace(model, attention="xla")
        train = dataclasses.replace(
            config.train, batch=ROWS, micro_batch=ROWS // layout.micro_batches, remat=remat
        )
        return dataclasses.replace(config, model=model, train=train)

    @functools.cache  # noqa: B019 - lives as long as the tests
    def run(self, kind, layout=(), whole=True):
        """Initial state, state after one update, last state, all with the layers in their order,
        and the metrics of each update.

        Runs that are not whole begin with the values of one device, whose program need not be
        compiled once more, and end after a few updates.
        """
        config = self.config(kind, **dict(layout))
        compiled = self.lab.compiled(config)
        engine = compiled.engine
        if whole:
            state = compiled.start()
        else:
            one = self.lab.compiled(self.config(kind, config.optim.name)).initial
            order = engine.transformer.order
            stacked = jax.tree.map(lambda x: x.shape[:1] == order.shape, one)
            state = jax.tree.map(lambda x, s: x[order] if s else x, one, stacked)
            state = jax.device_put(state, shardings(engine.abstract))
        order = np.argsort(engine.transformer.order)

        def fetch(state):
            return {
                name: leaf[order] if "layers." in name and len(leaf) == len(order) else leaf
                for name, leaf in self.lab.fetch(state).items()
            }

        states, metrics = [fetch(state)], []
        steps = STEPS if whole else 3
        for i in range(steps):
            state, values = compiled.step(state, self.lab.put(engine, self.batch(i)))
            metrics.append({k: v.item() for k, v in self.lab.fetch(values).items()})
            if i in (0, steps - 1):
                states.append(fetch(state))
        return *states, metrics

    def batch(self, seed):
        return self.lab.batch(seed, ROWS)

    def gradients(self, kind, layout=(), whole=True):
        """Of the first update, from what the optimizer keeps of it."""
        optim = self.config(kind, **dict(layout)).optim
        _, after, _, metrics = self.run(kind, layout, whole)
        kept = {"sgd": ".trace.", "adamw": ".mu."}[optim.name]
        scale = 1.0
        if optim.name == "adamw":
            scale = (1 - optim.b1) * min(1, optim.clip_norm / metrics[0]["grad_norm"])
        return {k.split(kept)[1]: v / scale for k, v in after.items() if kept in k}

    @functools.cache  # noqa: B019
    def exact(self, kind):
        """Loss and gradients of the first update in float64."""
        first = self.run(kind)[0]
        params = {k[7:]: v for k, v in first.items() if k.startswith("params.")}
        config = self.config(kind)
        moe = config.model.moe
        mixture = Mixture(
            moe.experts,
            moe.top_k,
            moe.capacity_factor,
            moe.gating == "sigmoid",
            moe.balance_loss,
            moe.z_loss,
        )
        model = Model(
            config.model.vocab,
            config.train.z_loss,
            config.model.norm_eps,
            mixture if moe.experts else None,
        )
        return loss_and_gradients(model, params, self.batch(0))

    def check(self, kind, whole=True, **layout):
        """Everything that must not depend on the layout; see `run` of what is not whole."""
        key = tuple(sorted(layout.items()))
        alone = (("optim", layout.get("optim", "sgd")),)
        first, _, last, metrics = self.run(kind, key, whole)
        one_first, _, one_last, one_metrics = self.run(kind, alone)
        assert first.keys() == one_first.keys()
        for name, leaf in one_first.items():
            assert first[name].tobytes() == leaf.tobytes(), name

        loss, exact = self.exact(kind)
        got = self.gradients(kind, key, whole)
        assert metrics[0]["loss"] == pytest.approx(loss, rel=1e-5)
        norm = math.sqrt(sum(np.square(g).sum() for g in exact.values()))
        assert metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert got.keys() == exact.keys()
        worst = 0.0
        for name, g in exact.items():
            size = np.abs(g).max()
            assert size > 0 or name.endswith("router.bias"), name
            worst = max(worst, np.abs(got[name] - g).max() / max(size, 1e-30))
            np.testing.assert_allclose(got[name], g, rtol=0, atol=1e-4 * size, err_msg=name)
            # A sum in the place of a mean would be a factor; this sees much smaller ones.
            assert np.abs(got[name]).sum(dtype=float) == pytest.approx(np.abs(g).sum(), rel=2e-5)
        print(f"{kind} {layout}: worst gradient {worst:.1e}")
        self.check_losses(kind, metrics, one_metrics[: len(metrics)])
        if whole:
            self.check_parameters(kind, layout, last, one_last)

    def check_losses(self, kind, metrics, expected):
        """What the updates report."""
        strict, loose = (4, 100) if kind in MIXTURES else (STEPS, 1)
        for key in ("loss", "grad_norm", "tokens", "skipped", "consecutive", "dropped"):
            values = np.array([[m.get(key, 0) for m in ms] for ms in (metrics, expected)])
            tolerance = 2e-5 if key == "grad_norm" else 1e-5
            np.testing.assert_allclose(*values[:, :strict], rtol=tolerance, err_msg=key)
            np.testing.assert_allclose(*values, rtol=loose * tolerance, err_msg=key)

    def check_parameters(self, kind, layout, last, expected):
        """After ten updates.

        Gradients agree to δ = 1e-6 of their size, with room (the check above prints by how much
        they do). AdamW's update is lr · m / (sqrt(v) + eps): an error of a clipped gradient changes
        it by at most 2 · lr · δ · clip_norm / eps. With sgd and its momentum a parameter moves by
        lr · 10 times the gradient at most, and so does the error, which the loss may double a few
        times over ten updates of a rate this high.

        Of the 4,000 choices that a mixture makes in an update some are between scores that differ
        by less than their rounding, and may fall either way as soon as the parameters differ in
        their last bits: a token or two of some 250 then has another expert of equal weight. So
        mixtures are held to the same bounds for four updates, and after that to 100 times those.
        """
        optim = self.config(kind, **layout).optim
        if optim.name == "adamw":
            bound = STEPS * 2 * optim.learning_rate * 1e-6 * optim.clip_norm / optim.eps
        else:
            bound = 1e-4
        for name, leaf in expected.items():
            if name.startswith("params."):
                atol = 100 * bound if kind in MIXTURES else bound
                np.testing.assert_allclose(last[name], leaf, rtol=0, atol=atol, err_msg=name)
        # The vocabulary of 67 is padded to what any mesh divides.
        assert not last["params.embed.table"][67:].any()
        assert not last["params.head.kernel"][:, 67:].any()


@pytest.fixture(scope="session")
def suite(lab):
    return Suite(lab)


def name_of(value):
    if isinstance(value, str):
        return value
    return "-".join(f"{k}{v}" if k in AXES else str(v) for k, v in value.items())


def also(layouts):
    """Left out unless the matrix is asked for."""
    return [pytest.param(*layout, marks=pytest.mark.matrix) for layout in layouts]


@pytest.mark.parametrize("kind, layout", [*ALONE, *also(ALONE_TOO)], ids=name_of)
def test_an_axis_is_the_run_of_one_device(suite, kind, layout):
    suite.check(kind, **layout)


@pytest.mark.parametrize("kind, layout", [*TOGETHER, *also(TOGETHER_TOO)], ids=name_of)
def test_a_product_is_the_run_of_one_device(suite, kind, layout):
    suite.check(kind, whole=False, **layout)


def test_the_run_learns(suite):
    """For its end to mean something; and a tenth of all choices had no place."""
    for kind in KINDS:
        metrics = suite.run(kind, (("optim", "sgd"),))[-1]
        assert metrics[-1]["loss"] < 0.75 * metrics[0]["loss"]
    assert metrics[0]["dropped"] > 0.05


@pytest.mark.matrix
@pytest.mark.parametrize("kind, layout", every(), ids=name_of)
def test_every_product_is_the_run_of_one_device(suite, kind, layout):
    config = suite.config(kind, **layout)
    sizes = {axis: layout.get(axis, 1) for axis in AXES}
    try:
        check_sizes(config, sizes)
    except ConfigError as error:
        # Only what the documentation names.
        refused = ("model.heads", "model.moe.experts 0", "model.layers")
        said = str(error)
        assert any(part in said for part in refused)
        return
    suite.check(kind, **layout)


@pytest.mark.parametrize(
    "kind, layout",
    [
        ("dense", {"stage": 2, "data": 2, "model": 2, "micro_batches": 3}),
        ("capacity", {"expert": 2, "context": 2, "data": 2, "micro_batches": 3}),
    ],
    ids=name_of,
)
def test_dropout_masks_follow_rows_and_places(suite, kind, layout):
    """Gradients of the first update and three losses with a tenth dropped."""
    one = suite.run(kind, (("dropout", 0.1),))
    key = (("dropout", 0.1), *layout.items())
    run = suite.run(kind, key, whole=False)
    losses = [[m["loss"] for m in metrics[:3]] for metrics in (run[-1], one[-1])]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    plain = suite.run(kind, (("optim", "sgd"),))[-1]
    assert abs(plain[0]["loss"] / losses[1][0] - 1) > 1e-4
    expected = suite.gradients(kind, (("dropout", 0.1),))
    for name, g in suite.gradients(kind, key, whole=False).items():
        size = np.abs(expected[name]).max()
        np.testing.assert_allclose(g, expected[name], rtol=0, atol=1e-5 * size, err_msg=name)


@st.composite
def products(draw):
    """Up to 8 devices over any of the axes, in any way."""
    sizes = dict.fromkeys(AXES, 1)
    left = 8
    for axis in draw(st.permutations(AXES)):
        sizes[axis] = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if n <= left]))
        left //= sizes[axis]
    return draw(st.sampled_from(KINDS)), {
        **{axis: n for axis, n in sizes.items() if n > 1},
        "shard_params": draw(st.sampled_from(["all", "optimizer", "none"])),
        "context_comm": draw(st.sampled_from(["ring", "gather", "ulysses"])),
        "stage_rounds": draw(st.sampled_from([1, 2])),
        "micro_batches": draw(st.sampled_from([1, 2, 3, 4])),
        "remat": draw(st.sampled_from(["none", "full"])),
        "optim": draw(st.sampled_from(["sgd", "adamw"])),
    }


def check_product(suite, product, whole):
    kind, layout = product
    try:
        check_sizes(suite.config(kind, **layout), {axis: layout.get(axis, 1) for axis in AXES})
    except ConfigError:
        return
    suite.check(kind, whole, **layout)


def settings_for(examples):
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@given(products())
@settings_for(6)
def test_random_products(suite, product):
    check_product(suite, product, whole=False)


@pytest.mark.matrix
@given(products())
@settings_for(150)
def test_many_random_products(suite, product):
    check_product(suite, product, whole=True)


@pytest.mark.matrix
@pytest.mark.parametrize("kind, layout", SIXTEEN, ids=name_of)
def test_sixteen_devices(suite, kind, layout):
    """Here if there are so many, else in a process of its own."""
    if jax.device_count() >= 16:
        suite.check(kind, **layout)
        return
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=16 --xla_backend_optimization_level=0"
    }
    environment = {k: v for k, v in environment.items() if not k.startswith("PYTEST_")}
    test = f"{Path(__file__)}::test_sixteen_devices[{kind}-{name_of(layout)}]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "-m", "matrix", test],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "1 passed" in done.stdout
