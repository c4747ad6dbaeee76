"""Arrays on a mesh: what each device really holds."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from shardlm import AxisRules, MeshConfig, describe_sharding, make_mesh, named_sharding, shard_tree
from shardlm.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from shardlm.mesh import AXES, tree_shardings
from shardlm.train.setup import build_engine, new_state


def test_mesh():
    mesh = make_mesh(MeshConfig(model=2))
    assert dict(mesh.shape) == dict.fromkeys(AXES, 1) | {"data": 4, "model": 2}
    assert mesh.axis_types == (AxisType.Auto,) * 6
    # Neighbours along model are neighbours in the machine.
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    np.testing.assert_array_equal(ids.ravel(), np.arange(8))
    assert make_mesh(MeshConfig(data=3)).size == 3
    assert make_mesh(MeshConfig(), jax.devices()[4:6]).devices.flat[0].id == 4
    with pytest.raises(ConfigError, match="asks for 16 devices"):
        make_mesh(MeshConfig(data=16))


def test_shard_tree():
    mesh = make_mesh(MeshConfig(model=2))
    rules = AxisRules(mesh.shape)
    tree = {"w": np.arange(8 * 6.0).reshape(8, 6), "b": {"x": np.arange(5.0)}}
    dims = {"w": ("embed", "mlp"), "b": {"x": (None,)}}
    placed = shard_tree(mesh, rules, dims, tree)
    jax.tree.map(np.testing.assert_array_equal, placed, tree)
    assert {s.data.shape for s in placed["w"].addressable_shards} == {(2, 3)}
    assert {s.data.shape for s in placed["b"]["x"].addressable_shards} == {(5,)}
    assert placed["w"].sharding == named_sharding(mesh, rules, ("embed", "mlp"), (8, 6))
    assert tree_shardings(mesh, rules, dims, tree)["w"].spec == PartitionSpec("data", "model")
    with pytest.raises(ConfigError, match="dim embed is 7"):
        shard_tree(mesh, rules, {"w": ("embed", None)}, {"w": np.zeros((7, 6))})


@pytest.mark.parametrize("data, model", [(8, 1), (1, 8), (2, 4)])
def test_no_leaf_is_replicated_in_silence(data, model):
    """17 tokens on 8 devices: padded to 24, and each holds an eighth, of both moments too."""
    config = Config(
        model=ModelConfig(
            layers=2, embed=16, heads=8, head_dim=8, mlp=24, vocab=17, dtype="float32"
        ),
        mesh=MeshConfig(data=data, model=model),
        data=DataConfig(length=8),
        train=TrainConfig(batch=8, steps=100),
    )
    engine = build_engine(config, make_mesh(config.mesh))
    state = new_state(engine)
    trees = {"params": state["params"]}
    adam = [x for x in jax.tree.leaves(state["opt"], is_leaf=_is_adam) if _is_adam(x)]
    trees |= {"mu": adam[0].mu, "nu": adam[0].nu}
    for name, tree in trees.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            where = name + jax.tree_util.keystr(path)
            # Every dim but those of norm scales, which `model` does not split.
            ways = data if leaf.ndim == 1 or "norm" in where else data * model
            sizes = {s.data.nbytes for s in leaf.addressable_shards}
            assert sizes == {leaf.nbytes // ways}, where
    assert state["params"]["embed"]["table"].shape == (24, 16)
    assert len(jax.tree.leaves(trees)) == 3 * 12


@pytest.mark.parametrize("name, leaves", [("sgd", 12), ("lion", 12), ("muon", 7 + 2 * 5)])
def test_state_of_every_optimizer_is_split_like_its_parameters(name, leaves):
    """muon: one moment of the 7 matrices of the layers, two of the other parameters."""
    config = Config(
        model=ModelConfig(
            layers=2, embed=16, heads=8, head_dim=8, mlp=24, vocab=17, dtype="float32"
        ),
        mesh=MeshConfig(data=2, model=4),
        data=DataConfig(length=8),
        train=TrainConfig(batch=8, steps=100),
        optim=OptimConfig(name=name),
    )
    abstract = build_engine(config, make_mesh(config.mesh)).abstract
    shapes = {x.shape for x in jax.tree.leaves(abstract["params"])}
    leaves_of = jax.tree_util.tree_leaves_with_path(abstract["opt"])
    found = [(jax.tree_util.keystr(path), x) for path, x in leaves_of if x.shape in shapes]
    assert len(found) == leaves
    for where, x in found:
        ways = 2 if "norm" in where else 8
        assert math.prod(x.sharding.shard_shape(x.shape)) * ways == x.size, where


def _is_adam(x):
    return hasattr(x, "mu")


def test_description():
    mesh = make_mesh(MeshConfig(data=4, model=2))
    rules = AxisRules(mesh.shape)
    shapes = {"embed": {"table": (72, 48)}, "norm": (48,), "q": (16, 48), "step": (), "all": (3,)}
    dims = {
        "embed": {"table": ("vocab", "embed")},
        "norm": ("embed",),
        "q": ("mlp_vector", None),
        "step": (),
        "all": (None,),
    }
    tree = jax.tree.map(
        lambda shape, d: jax.ShapeDtypeStruct(
            shape, np.float32, sharding=named_sharding(mesh, rules, d, shape)
        ),
        shapes,
        dims,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    text, picture = describe_sharding(tree).split("\n\n")
    rows = [line.split() for line in text.splitlines()]
    assert rows[0] == "leaf shape dtype axes bytes a device".split()
    table = {row[0]: row[1:] for row in rows[1:]}
    assert table["embed.table"] == "72 x 48 float32 model, data 1,728".split()
    assert table["norm"] == "48 float32 data 48".split()
    assert table["q"] == "16 x 48 float32 model+data, - 384".split()
    assert table["step"] == "scalar float32 whole 4".split()
    assert table["all"] == "3 float32 whole 12".split()
    assert table["sum"] == [f"{1728 + 48 + 384 + 4 + 12:,}"]
    lines = picture.splitlines()
    assert lines[0].split()[-1] == "embed.table:"
    # data 4 x model 2: neighbours along model, of which there are pairs, are one apart.
    assert [line.split()[-4:] for line in lines[2:]] == [list("0246"), list("1357")]
    assert lines[2].startswith("0:36, :")
    # The same of arrays, and of arrays that are nowhere in particular.
    assert "whole" in describe_sharding({"x": np.float32(1) * jax.numpy.ones(3)})
