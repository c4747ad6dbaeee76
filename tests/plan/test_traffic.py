"""Bytes that compiled updates send between devices, against the least possible."""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

import jax
import numpy as np
import pytest
from _pytest.capture import FDCapture
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from shardlm.config import (
    Config,
    ConfigError,
    DataConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    TrainConfig,
)
from shardlm.mesh import AXES, make_mesh
from shardlm.model.transformer import Transformer
from shardlm.plan import bytes_by_axis, count_traffic, minimum_bytes
from shardlm.train.setup import build_engine
from shardlm.train.step import make_train_step

ROWS, LENGTH = 8, 32  # of a micro-batch


class Case(NamedTuple):
    replica: int
    data: int
    model: int
    shard_params: str
    micro_batches: int
    context: int = 1
    comm: str = "ring"
    expert: int = 1
    mixture: MoeConfig = MoeConfig()
    stage: int = 1
    rounds: int = 1
    kv_heads: int = 4

    def __str__(self):
        sizes = f"{self.replica}-{self.data}-{self.expert}-{self.context}-{self.model}"
        sizes += f"-{self.comm}" * (self.context > 1)
        sizes += f"-{self.stage}x{self.rounds}" * (self.stage > 1)
        sizes += f"-{self.kv_heads}kv" * (self.kv_heads != 4)
        kind = ("" if self.mixture.capacity_factor else "-dropless") * (self.mixture.experts > 0)
        return f"{sizes}-{self.shard_params}-{self.micro_batches}{kind}"


# At capacity 1 the slots of the all-to-alls have nothing to spare: 32 tokens · 2 / 8 are 8.
MIXTURE = MoeConfig(8, 2, capacity_factor=1.0)
DROPLESS = MoeConfig(8, 2)

CASES = [
    Case(1, 8, 1, "none", 3),
    Case(1, 8, 1, "optimizer", 3),
    Case(1, 8, 1, "all", 3),
    Case(1, 4, 2, "all", 3),
    Case(1, 1, 4, "all", 1),
    Case(1, 2, 4, "all", 3, kv_heads=2),
    Case(1, 2, 1, "all", 2, 4),
    Case(1, 1, 1, "all", 1, 4, "gather"),
    Case(1, 1, 2, "all", 1, 2, "ulysses"),
    Case(1, 1, 1, "all", 3, expert=4, mixture=MIXTURE),
    Case(1, 2, 2, "all", 1, expert=2, mixture=MIXTURE),
    Case(1, 2, 1, "all", 1, expert=2, mixture=DROPLESS),
    Case(1, 2, 2, "all", 48, stage=2),
    Case(1, 1, 1, "all", 64, stage=4),
]
LONG = [
    *(Case(1, 8, 1, how, 1) for how in ("none", "optimizer", "all")),
    *(Case(1, 4, 2, how, 1) for how in ("none", "optimizer", "all")),
    Case(1, 1, 4, "all", 3),
    Case(1, 1, 2, "all", 1),
    Case(1, 1, 2, "all", 3),
    Case(1, 1, 8, "all", 1),
    Case(2, 1, 4, "none", 1, kv_heads=1),
    Case(1, 2, 2, "optimizer", 1, 2, "ulysses", kv_heads=1),
    Case(1, 1, 2, "all", 1, 4, kv_heads=1),
    Case(2, 2, 2, "all", 3),
    Case(2, 4, 1, "optimizer", 3),
    Case(1, 1, 1, "all", 1, 8),
    Case(1, 1, 2, "all", 1, 4),
    Case(1, 2, 1, "optimizer", 2, 4, "ulysses"),
    Case(2, 1, 2, "all", 1, 2, "gather"),
    Case(1, 2, 1, "optimizer", 3, expert=4, mixture=MIXTURE),
    Case(2, 2, 1, "all", 1, expert=2, mixture=MIXTURE),
    Case(1, 1, 2, "none", 1, expert=4, mixture=MIXTURE),
    Case(1, 2, 1, "optimizer", 48, stage=2, rounds=2),
    Case(1, 1, 1, "all", 48, 2, stage=2),
    Case(1, 1, 1, "all", 48, 2, "ulysses", stage=2),
    Case(1, 1, 1, "all", 48, expert=2, mixture=MIXTURE, stage=2),
    Case(2, 1, 1, "none", 64, stage=4),
]


def config_of(case):
    return Config(
        mesh=MeshConfig(
            replica=case.replica,
            data=case.data,
            expert=case.expert,
            context=case.context,
            model=case.model,
            shard_params=case.shard_params,
            context_comm=case.comm,
            stage=case.stage,
            stage_rounds=case.rounds,
        ),
        model=ModelConfig(
            layers=3 if case.stage == 1 else 4,
            embed=128,
            heads=8,
            kv_heads=case.kv_heads,
            mlp=240,
            vocab=500,
            moe=case.mixture,
            dtype="float32",
        ),
        data=DataConfig(length=LENGTH),
        train=TrainConfig(batch=ROWS * case.micro_batches, micro_batch=ROWS),
    )


@functools.cache
def compiled(config):
    """The text of the update, the mesh, and what the compiler said on standard error."""
    engine = build_engine(config, make_mesh(config.mesh))
    row = jax.ShapeDtypeStruct((config.train.batch, LENGTH), np.int32)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), row)
    text, errors = text_of(make_train_step(engine).lower(engine.abstract, batch))
    return text, engine.mesh, errors


def text_of(lowered):
    """The text of the compiled program, and what the compiler said on standard error."""
    capture = FDCapture(2)
    capture.start()
    try:
        # Machine code is not what this is about.
        program = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    finally:
        errors = capture.snap()
        capture.done()
    return program.as_text(), errors


every_case = pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(c, marks=pytest.mark.slow) for c in LONG)],
    ids=str,
)


def counted(config):
    """Collectives of the compiled update, each on a line."""
    text, mesh, _ = compiled(config)
    sent = count_traffic(text, mesh)
    return sent, mesh, "\n".join(map(str, sent))


@every_case
def test_bytes_are_the_least_possible(case):
    """The minimum is exact but for sums, so that less is a fault of the count."""
    config = config_of(case)
    sent, mesh, listing = counted(config)
    if case.rounds > 1:
        # What is in a conditional counts as if it were taken in each turn of the loop around it:
        # the loss, which comes once a micro-batch.
        sent = [
            dataclasses.replace(c, bytes=c.bytes * case.micro_batches / c.count)
            if "/cond/" in c.op_name and c.axes == ("stage",)
            else c
            for c in sent
        ]
    total, least = bytes_by_axis(sent), minimum_bytes(config, mesh.shape)
    assert total.keys() == least.keys(), listing
    limits = {axis: 1.10 if axis == "model" else 1.05 for axis in total}
    for axis, limit in limits.items():
        if mesh.shape[axis] > 1:
            ratio = total[axis] / least[axis]
            print(f"{case} {axis}: {total[axis]:,.0f} of {least[axis]:,.0f}, {ratio:.4f}")
            assert 0.99 <= ratio <= limit, f"{axis} {ratio:.4f}:\n{listing}"


EXCHANGES = {"all-gather", "reduce-scatter"}


@every_case
def test_nothing_else_is_sent(case):
    """Beside the budget there are sums of counts, losses and squares, and over `model` the
    statistics of the loss (3 numbers a token) and the gradients of what is whole on it. Nothing
    but tokens on their way to experts goes by all-to-all."""
    sent, _, _ = counted(config_of(case))
    weights = {"all-reduce"} if case.shard_params == "none" else {"all-gather", "reduce-scatter"}
    keys = {
        "ring": {"collective-permute"},
        "gather": {"all-gather", "reduce-scatter"},
        "ulysses": {"all-to-all"},
    }
    tokens_to_experts = {"all-to-all"} if case.mixture.capacity_factor else EXCHANGES
    budget = {
        "replica": {"all-reduce"},
        "data": weights,
        "expert": {"all-reduce"} | tokens_to_experts,
        "context": {"all-reduce", *keys[case.comm]},
        "model": EXCHANGES,
        "stage": {"all-reduce", "collective-permute"} | EXCHANGES,
    }
    beside = [c for c in sent if any(c.kind not in budget[axis] for axis in c.axes)]
    listing = "\n".join(map(str, beside))
    assert {c.kind for c in beside} <= {"all-reduce"}, listing
    ways = case.replica * case.data * case.expert * case.context
    tokens = ROWS * case.micro_batches * LENGTH / ways
    # Norm scales, and routers.
    whole = (2 * 3 + 1) * 128 + 3 * 128 * case.mixture.experts
    if case.kv_heads % case.model:
        # Weights of keys and values are whole over `model`, and their gradients summed.
        whole += 3 * 2 * 128 * case.kv_heads * (128 // 8)
    whole /= case.data if case.shard_params != "none" else 1
    few = 400 + 2 * 4 * 3 * (case.mixture.experts + 2) * (case.mixture.experts > 0)
    sums = dict.fromkeys(AXES, few) | {"model": few + 2 * 4 * (3 * tokens + whole)}
    for axis, bytes in bytes_by_axis(beside).items():
        assert bytes <= sums[axis], listing


REPLICATED = "Involuntary full rematerialization"
"""What XLA's partitioner says when it copies a whole array to every device to split it anew."""


def test_what_the_compiler_says_is_seen():
    """A split that XLA cannot change in one step; where it can, `REPLICATED` must change too."""
    mesh = make_mesh(MeshConfig(replica=2, data=4))
    before, after = (
        NamedSharding(mesh, PartitionSpec(*dims))
        for dims in [("replica", None, "data"), (None, ("data", "replica"), None)]
    )
    split_anew = jax.jit(lambda x: jax.lax.with_sharding_constraint(x + 1, after))
    x = jax.ShapeDtypeStruct((8, 8, 8), np.float32, sharding=before)
    assert REPLICATED in text_of(split_anew.lower(x))[1]


@every_case
def test_micro_batches_stay_split(case):
    text, _, errors = compiled(config_of(case))
    assert REPLICATED not in errors
    sent, _, listing = counted(config_of(case))
    # Ids and masks do not travel, only counts; of mixtures, counts of layers and experts, and
    # without a limit which experts a token goes to.
    whole = [c for c in sent if re.search(r"(s32|pred)\[\d", c.result)]
    if case.mixture.experts:
        whole = [c for c in whole if c.kind != "all-reduce" and c.axes != ("expert",)]
    assert not whole, listing
    k, ways = case.micro_batches, case.replica * case.data * case.expert
    here = {tuple(map(int, shape)) for shape in re.findall(r"s32\[(\d+),(\d+)\]", text)}
    assert (ROWS // ways * k, LENGTH) in here
    if ways > 1:
        assert not {(ROWS * k, LENGTH), (ROWS, LENGTH)} & here - {(ROWS // ways * k, LENGTH)}
    if k > 1:
        assert f"s32[{k},{ROWS // ways},{LENGTH}]" in text


@pytest.mark.parametrize("case", [c for c in CASES if c.data > 1 and c.shard_params == "all"])
def test_gathered_weights_are_not_kept(case):
    """Each layer's weights are gathered for the forward and again for the backward pass: kept in
    between, they would be the whole model on every device. Stages gather them once more."""
    config = config_of(case)
    sent, _, listing = counted(config)
    leaves = Transformer(config.model, LENGTH).abstract()["layers"]
    size = sum(
        4 * math.prod(x.shape) / (case.model * (case.expert if x.ndim == 4 else 1))
        for x in jax.tree.leaves(leaves)
    )
    size /= case.stage
    twice = (2 if case.stage == 1 else 3) * case.micro_batches * size * (case.data - 1) / case.data
    gathers = sum(c.bytes for c in sent if c.kind == "all-gather" and c.axes == ("data",))
    assert gathers >= 0.99 * twice, f"{gathers:,.0f} of {twice:,.0f} bytes:\n{listing}"


# Texts as compilers write them, of the smallest programs.
MESH = AbstractMesh((1, 1, 4, 1, 1, 2), AXES)


def program(*lines, extra=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m\n\n{extra}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


@pytest.mark.parametrize(
    "groups, axes",
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("model",)),
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", ("data",)),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", ("data", "model")),
        ("replica_groups={}", ("data", "model")),
        ("replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}", ()),
        ("replica_groups=[4,2]<=[8]", ("model",)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ("data",)),
        ("replica_groups=[1,8]<=[8]", ("data", "model")),
        ("replica_groups=mesh['data'=4,'model'=2] {'model'}", ("model",)),
        ("replica_groups=mesh['replica'=1,'data'=4,'model'=2] {'data'}", ("data",)),
        ("replica_groups=mesh['data'=4,'model'=2] {'data','model'}", ("data", "model")),
        ("replica_groups=mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'c'}", ("data",)),
        ("replica_groups=mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'b'}", ("model",)),
        ("replica_groups=mesh['x'=8] {'x':(1)4}", ("data",)),
        ("replica_groups=mesh['x'=8] {'x':(4)2}", ("model",)),
    ],
)
def test_axes_of_groups(groups, axes):
    text = program(
        f"ROOT %r = f32[6]{{0}} all-reduce(%p), channel_id=1, {groups}, to_apply=%add, "
        'metadata={op_name="jit(f)/psum"}',
        extra="%add (a: f32[], b: f32[]) -> f32[] {\n  ROOT %s = f32[] add(%a, %b)\n}\n",
    )
    sent = count_traffic(text, MESH)
    assert [c.axes for c in sent] == ([axes] if axes else [])
    if sent:
        n = math.prod(MESH.shape[a] for a in axes)
        assert (sent[0].kind, sent[0].op_name) == ("all-reduce", "jit(f)/psum")
        assert sent[0].bytes == pytest.approx(2 * (n - 1) / n * 24)


@pytest.mark.parametrize(
    "line, axis, bytes",
    [
        ("%x = bf16[8,3]{1,0} all-gather(%p), replica_groups={{0,2,4,6},{1,3,5,7}}", "data", 36),
        ("%x = f32[2,3]{1,0} reduce-scatter(%p), replica_groups={{0,2,4,6},{1,3,5,7}}", "data", 72),
        ("%x = f32[8]{0} all-to-all(%p), replica_groups=[4,2]<=[8]", "model", 16),
        (
            "%x = (f32[2]{0}, /*index=1*/f32[2]{0}) all-to-all(%p, %q), replica_groups=[4,2]<=[8]",
            "model",
            8,
        ),
        ("%x = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}", "model", 32),
        (
            "%x = (f32[2]{0}, f32[8]{0}) all-gather-start(%p), "
            "replica_groups={{0,2,4,6},{1,3,5,7}}",
            "data",
            24,
        ),
        (
            "%x = ((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%p), "
            "replica_groups={{0,2,4,6},{1,3,5,7}}",
            "data",
            24,
        ),
        ("%x = f32[8]{0:T(8,128)} all-reduce-start(%p), replica_groups=[4,2]<=[8]", "model", 32),
        (
            "%x = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), "
            "source_target_pairs={{0,2},{2,4},{4,6}}",
            "data",
            32,
        ),
    ],
)
def test_bytes_of_kinds(line, axis, bytes):
    done = re.sub(r"-start\(.*", "-done(%x)", line.split(" = ")[1]).split(" ")[-1]
    text = program(
        line,
        f"ROOT %y = f32[8]{{0}} {done}" if "-start" in line else "ROOT %y = f32[8]{0} add(%x, %x)",
    )
    assert bytes_by_axis(count_traffic(text, MESH)) == {axis: pytest.approx(bytes)}


LOOPS = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%inner_body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %r = f32[4]{0} all-reduce(%g), replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %o = (s32[], f32[4]{0}) tuple(%i, %r)
}

%inner_condition (t: (s32[], f32[4])) -> pred[] {
  %limit = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%outer_body.clone (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  ROOT %w = (s32[], f32[4]{0}) while(%t), condition=%inner_condition, body=%inner_body
}

%unknown_condition (t: (s32[], f32[4])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %j), direction=LT
}

%fused (p: f32[4]) -> f32[4] {
  ROOT %f = f32[4]{0} all-reduce(%p), replica_groups=[4,2]<=[8], to_apply=%add
}

%nothing (p: f32[4]) -> f32[4] {
  ROOT %p = f32[4]{0} parameter(0)
}
"""


def bytes_of(*lines):
    return bytes_by_axis(count_traffic(program(*lines, extra=LOOPS), MESH)).get("model", 0)


def test_loops_branches_and_calls():
    """An all-reduce of 16 bytes on 2 devices sends 16."""
    loop = "while(%t), condition=%inner_condition, body="
    known = ', backend_config={"known_trip_count":{"n":"5"}}'
    assert bytes_of(f"ROOT %w = (s32[], f32[4]{{0}}) {loop}%inner_body") == 3 * 16
    assert bytes_of(f"ROOT %w = (s32[], f32[4]{{0}}) {loop}%inner_body{known}") == 5 * 16
    assert bytes_of(f"ROOT %w = (s32[], f32[4]{{0}}) {loop}%outer_body.clone{known}") == 15 * 16
    assert bytes_of("ROOT %f = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused") == 16
    assert bytes_of("ROOT %f = f32[4]{0} call(%p), to_apply=%fused") == 16
    for branches in (
        "branch_computations={%fused, %nothing}",
        "true_computation=%nothing, false_computation=%fused",
    ):
        assert bytes_of(f"ROOT %c = f32[4]{{0}} conditional(%b, %p, %p), {branches}") == 16
    lost = "ROOT %w = (s32[], f32[4]{0}) while(%t), condition=%unknown_condition, body="
    assert bytes_of(f"{lost}%nothing") == 0
    with pytest.raises(ValueError, match="loop w has collectives inside, and its number of turns"):
        bytes_of(f"{lost}%inner_body")
    with pytest.raises(ValueError, match="no ENTRY computation"):
        count_traffic("not a program", MESH)


def test_least_bytes_by_hand():
    """2 layers of embed 8, 2 heads of 4, mlp 16 without gate, vocab 16 tied: 648 parameters."""
    model = ModelConfig(
        layers=2,
        embed=8,
        heads=2,
        mlp=16,
        activation="relu2",
        vocab=16,
        tied=True,
        dtype="bfloat16",
    )
    train = TrainConfig(batch=24, micro_batch=8)

    def least(how, **sizes):
        config = Config(
            model=model, mesh=MeshConfig(shard_params=how), data=DataConfig(length=10), train=train
        )
        return minimum_bytes(config, dict.fromkeys(AXES, 1) | sizes)

    matrices, scales = 16 * 8 + 2 * (4 * 8 * 8 + 2 * 8 * 16), 5 * 8
    assert least("none", data=4) == {"data": 3 / 4 * 8 * (matrices + scales)}
    assert least("optimizer", data=4) == {"data": 3 / 4 * (6 * matrices + 8 * scales)}
    # 3 micro-batches; the embedding and the last scale are gathered once in all of them.
    matrices_all = 3 * 8 * matrices - 5 * 2 * (16 * 8)
    scales_all = 3 * 12 * scales - 5 * 4 * 8
    assert least("all", data=4) == {"data": 3 / 4 * (matrices_all + scales_all)}
    both = least("all", data=4, model=2)
    assert both["data"] == 3 / 4 * (matrices_all / 2 + scales_all)
    assert both["model"] == 1 / 2 * 3 * (8 * 2 + 4) * (2 * 10) * 8 * 2
    assert least("all", replica=2, data=4)["replica"] == 1 / 2 * 8 * (matrices + scales) / 4
    # Of 4 experts (1,024 numbers on each of 2 devices) only routers are summed, and tokens go out
    # to 2 of them and come back, in 2 layers, forward and backward, in 3 micro-batches.
    model = dataclasses.replace(model, moe=MoeConfig(4, 2))
    outside = 16 * 8 + 2 * (4 * 8 * 8 + 8 * 4) + scales
    tokens = 3 * 4 * 2 * 2 * (4 * 10) * 8 * 2
    assert least("none", expert=2) == {"expert": 1 / 2 * (8 * outside + tokens)}
    inside = 2 * 4 * 2 * 8 * 16 / 2
    both = least("none", replica=2, expert=2)
    assert both["replica"] == 1 / 2 * 8 * (outside + inside)
    assert both["expert"] == 1 / 2 * (8 * outside + tokens / 2)
    with pytest.raises(ConfigError, match=r"model\.dtype is auto"):
        minimum_bytes(Config(model=ModelConfig(vocab=16)), dict.fromkeys(AXES, 1))
    with pytest.raises(ConfigError, match="does not divide 8"):
        least("all", data=3)


@pytest.mark.parametrize("how", ["optimizer", "all"])
def test_what_data_does_not_divide_is_summed_once(how):
    """Two norms of heads of 6 in each of 2 layers, on 4 devices: whole on each of them."""

    def least(qk_norm):
        model = ModelConfig(
            layers=2, embed=16, heads=2, head_dim=6, vocab=16, qk_norm=qk_norm, dtype="bfloat16"
        )
        train = TrainConfig(batch=24, micro_batch=8)
        config = Config(model=model, mesh=MeshConfig(shard_params=how), train=train)
        return minimum_bytes(config, dict.fromkeys(AXES, 1) | {"data": 4})["data"]

    assert least(qk_norm=True) - least(qk_norm=False) == 3 / 4 * 8 * (2 * 2 * 6)
