"""Initial values: the same on every mesh and for any depth, of the stated spread."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from shardlm.config import MeshConfig, ModelConfig
from shardlm.mesh import AxisRules, make_mesh
from shardlm.mesh.shardings import tree_specs
from shardlm.model.transformer import Transformer

INITIAL = ModelConfig(
    layers=2,
    embed=64,
    heads=8,
    kv_heads=4,
    head_dim=6,
    mlp=96,
    vocab=61,
    activation="gelu",
    bias=True,
    qk_norm=True,
    norm="layer",
    init_std=0.15,
)


def initial_values(config, **sizes):
    """Initial parameters made on a mesh of these sizes, each leaf split as it is stored."""
    transformer = Transformer(config, 24)
    count = int(np.prod(list(sizes.values()), dtype=int))
    mesh = make_mesh(MeshConfig(**({"data": 1} | sizes)), jax.devices()[:count])
    rules = AxisRules.for_model(mesh.shape, config)
    specs = tree_specs(rules, transformer.dims, transformer.abstract())
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params = jax.jit(transformer.init, out_shardings=places)(jax.random.key(0))
    return jax.tree.map(np.asarray, params)


@pytest.fixture(scope="module")
def initial():
    return initial_values(INITIAL)


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "model": 4}], ids=str)
def test_initial_values_are_the_same_on_every_mesh(initial, sizes):
    jax.tree.map(np.testing.assert_array_equal, initial_values(INITIAL, **sizes), initial)


def test_initial_values_of_a_layer_do_not_depend_on_how_many_follow(initial):
    """But for the scale of the last matrix of each branch, 1/sqrt(2 layers)."""
    deeper = initial_values(dataclasses.replace(INITIAL, layers=4))
    for path, x in jax.tree_util.tree_leaves_with_path(initial):
        names = [k.key for k in path]
        y = functools.reduce(lambda tree, name: tree[name], names, deeper)
        if names[0] == "layers":
            y = y[:2]
        if names[-2] in ("o", "down") and names[-1] == "kernel":
            np.testing.assert_allclose(x, math.sqrt(2) * y, rtol=1e-6)
        else:
            np.testing.assert_array_equal(x, y, err_msg=str(names))


def test_initial_values_have_the_stated_spread(initial):
    """Embedding .15; matrices the lesser of .15 and 1/sqrt(64) = .125; the last of a branch
    .15/sqrt(4). Sample and stated standard deviation agree to four standard errors."""
    stated = {"table": 0.15, "o": 0.075, "down": 0.075}
    for path, x in jax.tree_util.tree_leaves_with_path(initial):
        names = [k.key for k in path]
        if names[-1] == "scale":
            np.testing.assert_array_equal(x, 1)
        elif names[-1] == "bias":
            np.testing.assert_array_equal(x, 0)
        else:
            if "head" in names:
                x = x[:, :61]
            if "table" in names:
                x = x[:61]
            std = next((stated[n] for n in names if n in stated), 0.125)
            assert x.std() == pytest.approx(std, rel=4 / math.sqrt(2 * x.size)), names
            assert abs(x.mean()) < 4 * std / math.sqrt(x.size), names
    layers = initial["layers"]["attn"]["q"]["kernel"]
    assert abs(np.corrcoef(layers[0].ravel(), layers[1].ravel())[0, 1]) < 0.1


def test_padding_of_the_vocabulary_starts_at_zero(initial):
    table, head = initial["embed"]["table"], initial["head"]["kernel"]
    assert table.shape == (64, 64)
    np.testing.assert_array_equal(table[61:], 0)
    np.testing.assert_array_equal(head[:, 61:], 0)
    assert np.abs(table[:61]).max(1).min() > 0


def test_zero_init_output_starts_the_layers_as_the_identity(quick_jit):
    transformer = Transformer(dataclasses.replace(INITIAL, zero_init_output=True), 24)
    layers = quick_jit(transformer.init)(jax.random.key(0))["layers"]
    for part, last in (("attn", "o"), ("mlp", "down")):
        np.testing.assert_array_equal(layers[part][last]["kernel"], 0)
    assert np.abs(layers["mlp"]["up"]["kernel"]).max() > 0
