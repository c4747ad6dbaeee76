"""Sizes of mesh axes, and what they must divide. No device is touched."""

import dataclasses

import pytest

from shardlm.config import (
    Config,
    ConfigError,
    DataConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    TrainConfig,
)
from shardlm.mesh import AXES, resolve_sizes
from shardlm.mesh.axes import check_sizes


def test_sizes():
    assert resolve_sizes(MeshConfig(), 8) == dict.fromkeys(AXES, 1) | {"data": 8}
    assert resolve_sizes(MeshConfig(model=2), 8)["data"] == 4
    assert resolve_sizes(MeshConfig(replica=-1, data=2, model=2), 8)["replica"] == 2
    assert resolve_sizes(MeshConfig(data=3, model=2), 8) == dict.fromkeys(AXES, 1) | {
        "data": 3,
        "model": 2,
    }
    assert tuple(resolve_sizes(MeshConfig(), 1)) == AXES


@pytest.mark.parametrize(
    "sizes, devices, message",
    [
        ({"data": 4, "model": 4}, 8, r"asks for 16 devices \(data 4, model 4\) and there are 8"),
        ({"model": 3}, 8, r"mesh\.data is -1, and 8 devices .* 3: .*\(nearest: 2\)"),
        ({"model": 16}, 8, r"asks for 16 devices \(model 16\) and there are 8"),
        ({"model": -1}, 8, r"mesh\.data and mesh\.model are both -1"),
        ({"model": 0}, 8, r"mesh\.model is 0: it must be at least 1, or -1"),
        ({"data": -2}, 8, r"mesh\.data is -2"),
    ],
)
def test_refused_sizes(sizes, devices, message):
    with pytest.raises(ConfigError, match=message):
        resolve_sizes(dataclasses.replace(MeshConfig(), **sizes), devices)


MODEL = ModelConfig(embed=48, heads=16, kv_heads=8, head_dim=6, mlp=40, vocab=67)


@pytest.mark.parametrize(
    "sizes, train, model, message",
    [
        (
            {"data": 8},
            {"batch": 12},
            {},
            r"batch is 12 and data 8 split it 8 ways: .*\(train.batch 8 or 1",
        ),
        (
            {"replica": 2, "data": 4},
            {"batch": 16, "micro_batch": 4},
            {},
            r"micro_batch is 4 and replica 2 x data 4 split it 8 ways: .*\(8 would do",
        ),
        (
            {"model": 3},
            {},
            {},
            r"model\.heads is 16 and mesh\.model is 3: 3 does not divide 16 "
            r"\(model\.heads 15 or 18 would do, or mesh\.model 2\)",
        ),
        ({"model": 16}, {}, {}, r"model\.mlp is 40 and mesh\.model is 16: .*mesh\.model 20\)"),
        ({"model": 8}, {}, {"mlp": 42}, r"model\.mlp is 42 and .*\(model\.mlp 40 or 48 would do"),
        ({"model": 16}, {}, {"kv_heads": 16, "mlp": 48}, r"model\.vocab \(padded\) is 72 and .*16"),
        ({"data": 5}, {"batch": 5}, {}, r"model\.embed is 48 and mesh\.data is 5: .*45 or 50"),
        (
            {"data": 2, "expert": 4},
            {"batch": 12},
            {"moe": MoeConfig(8)},
            r"batch is 12 and data 2 x expert 4 split it 8 ways",
        ),
        (
            {"expert": 4},
            {},
            {"moe": MoeConfig(6)},
            r"model\.moe\.experts is 6 and mesh\.expert is 4: .*4 or 8 would do, or mesh\.expert 3",
        ),
        ({"expert": 2}, {}, {}, r"mesh\.expert is 2 and model\.moe\.experts 0: .*use mesh\.data 2"),
    ],
)
def test_what_sizes_must_divide(sizes, train, model, message):
    config = Config(
        model=dataclasses.replace(MODEL, **model), train=TrainConfig(**{"batch": 16} | train)
    )
    with pytest.raises(ConfigError, match=message):
        check_sizes(config, dict.fromkeys(AXES, 1) | sizes)


@pytest.mark.parametrize(
    "mesh, model, message",
    [
        (
            {"context_comm": "ulysses"},
            {"heads": 8},
            r"model\.heads is 8 and mesh\.context_comm ulysses splits heads over context 8 x "
            r"model 2: 16 does not divide 8 \(model\.heads 16 would do, or mesh\.context_comm",
        ),
        ({}, {"attention": "xla"}, r"attention is xla and mesh\.context 8 with .* ring, which"),
        (
            {"context_comm": "gather"},
            {"attention": "cudnn"},
            "use auto or blockwise, or .* ulysses",
        ),
    ],
)
def test_what_context_cannot_do(mesh, model, message):
    config = Config(
        mesh=MeshConfig(**mesh),
        model=dataclasses.replace(MODEL, **model),
        train=TrainConfig(batch=16),
    )
    with pytest.raises(ConfigError, match=message):
        check_sizes(config, dict.fromkeys(AXES, 1) | {"context": 8, "model": 2})


@pytest.mark.parametrize(
    "mesh, model, message",
    [
        (
            {},
            {"layers": 6},
            r"model\.layers is 6 and mesh\.stage is 4: 4 does not divide 6, and .*\(model\.layers "
            r"4 or 8 would do, or mesh\.stage 3\)",
        ),
        (
            {"stage_rounds": 3},
            {"layers": 8},
            r"layers is 8 and mesh\.stage is 4 with mesh\.stage_rounds 3: 12 does .* 12 would do\)",
        ),
        (
            {},
            {"layers": 12, "windows": (3, 0)},
            r"model\.windows names 2 windows, in turn, and mesh\.stage is 4 makes runs of 3 layers",
        ),
    ],
)
def test_what_stages_cannot_split(mesh, model, message):
    config = Config(
        mesh=MeshConfig(**mesh),
        model=dataclasses.replace(MODEL, **model),
        train=TrainConfig(batch=16),
    )
    with pytest.raises(ConfigError, match=message):
        check_sizes(config, dict.fromkeys(AXES, 1) | {"stage": 4})


@pytest.mark.parametrize("axis", ["stage", "expert"])
def test_dynamic_balance_is_refused_where_devices_go_in_step(axis):
    config = Config(
        mesh=MeshConfig(shard_params="none"),
        model=dataclasses.replace(MODEL, moe=MoeConfig(8)),
        data=DataConfig(balance="dynamic"),
        train=TrainConfig(batch=16),
    )
    with pytest.raises(ConfigError, match=rf"data\.balance is dynamic and mesh\.{axis} 2, over"):
        check_sizes(config, dict.fromkeys(AXES, 1) | {axis: 2})


def test_a_batch_of_tokens_is_spoken_of_in_tokens():
    data = DataConfig(length=16, batch_tokens=12 * 16)
    with pytest.raises(
        ConfigError,
        match=r"^data\.batch_tokens is 192 \(12 rows of data\.length 16\) and data 8 split it 8 "
        r"ways: it must be a multiple of 128 \(data\.batch_tokens 128 or 256 would do\)",
    ):
        check_sizes(Config(model=MODEL, data=data), dict.fromkeys(AXES, 1) | {"data": 8})


def test_replicated_parameters_need_not_divide():
    config = Config(model=MODEL, mesh=MeshConfig(shard_params="none"), train=TrainConfig(batch=5))
    check_sizes(config, dict.fromkeys(AXES, 1) | {"data": 5})
