"""From the dims of a tensor to the axes of a mesh."""

import pytest
from jax.sharding import PartitionSpec

from shardlm.config import ConfigError, ModelConfig
from shardlm.mesh import AxisRules

RULES = AxisRules({"replica": 2, "data": 4, "model": 2})


@pytest.mark.parametrize(
    "dims, shape, spec",
    [
        (("embed", "mlp"), (256, 688), ("data", "model")),
        (("layers", "heads", "head_dim", "embed"), (3, 4, 6, 8), (None, "model", None, "data")),
        (("batch", None), (16, 19), (("replica", "data"), None)),
        (("mlp_vector",), (24,), (("model", "data"),)),
        ((None, "positions"), (3, 5), (None, None)),
        ((), (), ()),
    ],
)
def test_spec(dims, shape, spec):
    assert RULES.spec(dims, shape) == PartitionSpec(*spec)


def test_axes_of_one_device_are_left_out():
    assert AxisRules({"data": 1, "model": 2}).spec(("embed", "mlp")) == PartitionSpec(None, "model")
    assert AxisRules({}).spec(("batch", "embed")) == PartitionSpec(None, None)


@pytest.mark.parametrize(
    "dims, shape, message",
    [
        (("mlp", "vocab"), None, r"'mlp' and 'vocab' .* both split over mesh axis 'model'"),
        (("batch", "embed"), None, r"'batch' and 'embed' .* mesh axis 'data'"),
        (("embed", "embed"), None, r"'embed' and 'embed'"),
        (("hidden",), None, r"dim 'hidden' has no rule: known dims are batch, embed, "),
        (
            ("embed",),
            (18,),
            r"dim embed is 18 and data 4 split it 4 ways: 4 does not divide 18 "
            r"\(embed 16 or 20 would do, or 3 ways\)",
        ),
        (("batch",), (12,), r"dim batch is 12 and replica 2 x data 4 split it 8 ways"),
        (("embed", "mlp"), (4, 4, 4), r"name 2 dimensions of \(4, 4, 4\)"),
    ],
)
def test_refused(dims, shape, message):
    with pytest.raises(ConfigError, match=message):
        RULES.spec(dims, shape)


def test_rules_of_a_model():
    sizes = {"data": 4, "model": 2}
    model = ModelConfig(embed=16, heads=2, head_dim=6, mlp=20)
    rules = AxisRules.for_model(sizes, model)
    assert rules.spec(("embed", "mlp"), (16, 20)) == PartitionSpec("data", "model")
    # Only vectors stay whole over data where it does not divide them.
    assert rules.spec(("heads", "head_dim_vector"), (2, 6)) == PartitionSpec("model", None)
    assert rules.spec(("mlp_vector",), (20,)) == PartitionSpec("model")
    assert AxisRules.for_model(sizes, ModelConfig(head_dim=8)).axes("head_dim_vector") == ("data",)
    with pytest.raises(ConfigError, match="dim embed is 18"):
        rules.spec(("embed",), (18,))
    none = AxisRules.for_model(sizes, model, "none")
    assert none.spec(("embed", "mlp"), (15, 20)) == PartitionSpec(None, "model")
    assert none.spec(("batch", None)) == PartitionSpec("data", None)
    assert AxisRules.for_model(sizes, model, "optimizer").table == rules.table


def test_a_table_of_ones_own():
    rules = AxisRules({"x": 2, "y": 4}, {"rows": ("x", "y"), "columns": ()})
    assert rules.spec(("rows", "columns"), (8, 3)) == PartitionSpec(("x", "y"), None)
