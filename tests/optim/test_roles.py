"""Roles of parameters, from their names."""

import jax
import pytest

from shardlm.config import ModelConfig
from shardlm.model.transformer import Transformer
from shardlm.optim import decay_mask, is_stacked, matrix_dims, role


@pytest.mark.parametrize(
    "path, expected",
    [
        ("embed.table", "embedding"),
        ("embed.positions", "embedding"),
        ("head.kernel", "head"),
        ("head.bias", "bias"),
        ("final_norm.scale", "norm"),
        ("layers.attn_norm.scale", "norm"),
        ("layers.attn_norm.bias", "bias"),
        ("layers.attn.q.kernel", "matrix"),
        ("layers.attn.q.bias", "bias"),
        ("layers.attn.k_norm.scale", "norm"),
        ("layers.3.mlp.down.kernel", "matrix"),
    ],
)
def test_role(path, expected):
    names = path.split(".")
    assert role(names) == expected
    assert role([jax.tree_util.DictKey(name) for name in names]) == expected


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"parameter 'layers\.mlp\.alpha' has no role"):
        role(["layers", "mlp", "alpha"])


def test_fault_12_the_same_leaves_decay_stacked_or_not(trees):
    stacked = trees.leaves(decay_mask(trees.full(1.0)))
    single = trees.leaves(decay_mask(trees.unstack(trees.full(1.0))))
    for name, decays in single.items():
        names = name.split(".")
        if names[0] == "layers":
            del names[1]
        assert stacked[".".join(names)] == decays, name
    assert sorted(name for name, decays in stacked.items() if decays) == [
        "embed.table",
        "head.kernel",
        "layers.attn.k.kernel",
        "layers.attn.o.kernel",
        "layers.attn.q.kernel",
        "layers.mlp.down.kernel",
        "layers.mlp.up.kernel",
    ]


def test_fault_12_every_leaf_of_a_model_with_everything():
    model = ModelConfig(
        layers=2,
        embed=8,
        heads=2,
        mlp=4,
        vocab=8,
        bias=True,
        norm="layer",
        qk_norm=True,
        positions="learned",
    )
    mask = decay_mask(Transformer(model, 4).abstract())
    for path, decays in jax.tree_util.tree_leaves_with_path(mask):
        assert decays == (path[-1].key in ("kernel", "table", "positions")), path


def test_stacking_and_matrix_dims():
    assert is_stacked(["layers", "mlp", "up", "kernel"])
    assert not is_stacked(["layers", "0", "mlp", "up", "kernel"])
    assert not is_stacked(["embed", "table"])
    assert matrix_dims(["layers", "attn", "v", "kernel"]) == ((-3,), (-2, -1))
    assert matrix_dims(["layers", "attn", "o", "kernel"]) == ((-3, -2), (-1,))
    assert matrix_dims(["layers", "mlp", "up", "kernel"]) == ((-2,), (-1,))
