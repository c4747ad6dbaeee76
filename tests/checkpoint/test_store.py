"""Checkpoints: values, meshes, refusals, damage, failures."""

import json
import logging
import resource
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardlm.checkpoint import CheckpointError, CheckpointStore, SaveError

SPECS = {"table": ("model", "data"), "kernel": (None, "data", "model"), "scale": (None, "data")}
SHAPES = {"table": (24, 12), "kernel": (3, 24, 12), "scale": (3, 12)}


def mesh_of(data, model):
    devices = np.array(jax.devices()[: data * model]).reshape(data, model)
    return jax.sharding.Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def sharding_of(name, mesh):
    """Split as SPECS says where the sizes divide, else replicated in that dim."""
    spec = [
        axis if axis and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(SPECS[name], SHAPES[name], strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*spec))


def make_state(mesh, seed=0, dtype=np.float32):
    """Parameters, AdamW's state with other values, a count, and a bfloat16 leaf."""
    rng = np.random.default_rng(seed)

    def place(name):
        value = rng.standard_normal(SHAPES[name]).astype(dtype)
        return jax.device_put(value, sharding_of(name, mesh))

    def scalar(value):
        return jax.device_put(jnp.int32(value), NamedSharding(mesh, PartitionSpec()))

    opt = optax.adamw(1e-3).init({name: jnp.zeros(()) for name in SHAPES})
    (adam, *rest) = opt
    moments = {field: {name: place(name) for name in SHAPES} for field in ("mu", "nu")}
    half = jax.device_put(
        jnp.asarray(rng.standard_normal((24, 12)), jnp.bfloat16), sharding_of("table", mesh)
    )
    return {
        "params": {name: place(name) for name in SHAPES},
        "opt": (adam._replace(count=scalar(seed), **moments), *rest),
        "half": half,
        "step": scalar(seed),
    }


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    yield store
    store.close()


def test_an_empty_run_has_no_checkpoint(store):
    assert store.latest() is None
    assert store.steps() == []
    assert not store.directory.exists()
    with pytest.raises(CheckpointError, match="3 is not a complete checkpoint"):
        store.metadata(3)
    with pytest.raises(CheckpointError, match="3 is not a complete checkpoint"):
        store.restore(3, {})


@pytest.mark.parametrize("shape", [(1, 1), (2, 4), (8, 1), (3, 1)], ids=str)
def test_restores_bit_equal_onto_any_mesh(store, shape):
    state = make_state(mesh_of(4, 2), seed=5)
    assert store.save(5, state, {"config": {"model.layers": 2}}, wait=True)
    mesh = mesh_of(*shape)
    like = abstract(make_state(mesh))
    reader = CheckpointStore(store.directory)
    restored = reader.restore(5, like)
    assert_same(restored, state)
    assert type(restored["opt"][0]) is type(state["opt"][0])
    for leaf, want in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
        assert leaf.sharding == want.sharding
        assert not leaf.weak_type
    assert reader.metadata(5) == {"config": {"model.layers": 2}}


def test_part_of_a_state_can_be_restored(store):
    state = make_state(mesh_of(2, 1))
    store.save(1, state, {}, wait=True)
    wanted = {"params": abstract(state)["params"]}
    assert_same(store.restore(1, wanted, partial=True), {"params": state["params"]})
    with pytest.raises(CheckpointError, match=r"opt.0.count \(\) int32 is in the checkpoint only"):
        store.restore(1, wanted)


def test_what_is_saved_is_the_state_at_the_time_of_the_call(store):
    """Donated at once, five times, with leaves of 4 MB: each save still has its own step's value"""
    mesh = mesh_of(4, 2)
    sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
    store = CheckpointStore(store.directory, keep=10)
    state = {f"w{i}": jnp.zeros((1024, 1024), device=sharding) for i in range(3)}

    @partial(jax.jit, donate_argnums=0)
    def step(state):
        return jax.tree.map(lambda x: x + 1, state)

    like = abstract(state)
    for k in range(1, 6):
        state = step(state)
        store.save(k, state, {})
        for _ in range(3):
            state = step(state)
    store.close()
    for k in range(1, 6):
        for leaf in jax.tree.leaves(store.restore(k, like)):
            assert np.all(np.asarray(leaf) == 4 * k - 3)


def test_a_restored_state_can_be_donated(store):
    state = make_state(mesh_of(4, 2), seed=2)
    store.save(2, state, {}, wait=True)
    like = abstract(state)
    double = jax.jit(lambda s: jax.tree.map(lambda x: 2 * x, s), donate_argnums=0)
    doubled = double(store.restore(2, like))
    assert_same(doubled, jax.tree.map(lambda x: 2 * x, state))
    assert_same(store.restore(2, like), state)


def test_keeps_the_newest_and_every_nth(tmp_path):
    state = {"x": jnp.arange(3)}
    store = CheckpointStore(tmp_path, keep=2, keep_every=4)
    for step in range(1, 12):
        assert store.save(step, state, {})
        assert not store.save(step, state, {}), "saved twice"
    store.close()
    assert store.steps() == [4, 8, 10, 11]
    again = CheckpointStore(tmp_path, keep=1)
    again.save(12, state, {}, wait=True)
    again.close()
    assert again.steps() == [12]


def test_a_checkpoint_of_another_model_is_refused_naming_the_leaf(store):
    state = make_state(mesh_of(2, 2))
    store.save(1, state, {}, wait=True)
    like = abstract(state)
    kernel = like["params"]["kernel"]

    def params(**new):
        return {**like, "params": {**like["params"], **new}}

    def resized(*shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=kernel.sharding)

    refused = {
        "layers": (
            params(kernel=resized(4, 24, 12)),
            r"\(3, 24, 12\) float32 there, \(4, 24, 12\)",
        ),
        "width": (
            params(kernel=resized(3, 24, 16)),
            r"params.kernel is .* \(3, 24, 16\) float32 h",
        ),
        "dtype": (params(kernel=resized(3, 24, 12, dtype="bfloat16")), r"24, 12\) bfloat16 here"),
        "missing": (
            params(head=resized(1, 12, 24)),
            r"params.head \(1, 12, 24\) float32 is not in the c",
        ),
        "extra": (params(), r"params.scale \(3, 12\) float32 is in the checkpoint only"),
        "optimizer": ({**like, "opt": ()}, "opt.0.count .* and 3 more"),
    }
    del refused["extra"][0]["params"]["scale"]
    damaged = store.directory / "1" / "state" / "manifest.ocdbt"
    damaged.write_bytes(b"")  # so that a test that passes has not read the arrays
    for tree, message in refused.values():
        with pytest.raises(CheckpointError, match=message):
            store.restore(1, tree)


def test_a_torn_checkpoint_is_passed_over(store):
    state = {"x": jnp.arange(5)}
    store.save(1, state, {})
    store.save(2, state, {}, wait=True)
    for part in ("metadata", "state"):
        broken = store.directory / "2" / part
        broken.rename(store.directory.parent / part)
        reader = CheckpointStore(store.directory)
        assert reader.latest() == 1
        assert part in reader.broken()[2]
        (store.directory.parent / part).rename(broken)
    (store.directory / "2" / "metadata" / "metadata").write_text('{"form')
    (store.directory / "3.orbax-checkpoint-tmp").mkdir()
    again = CheckpointStore(store.directory)
    assert again.steps() == [1]
    new = {"x": jnp.arange(5) + 7}
    assert again.save(2, new, {}, wait=True)
    again.close()
    assert again.steps() == [1, 2]
    assert_same(again.restore(2, abstract(new)), new)
    assert sorted(path.name for path in store.directory.iterdir()) == ["1", "2", "2.broken"]


def test_the_rest_of_an_interrupted_deletion_is_removed(store):
    state = {"x": jnp.arange(5)}
    store.save(3, state, {}, wait=True)
    (store.directory / "2" / "state").mkdir(parents=True)
    again = CheckpointStore(store.directory, keep=2)
    assert again.steps() == [3]
    assert again.broken() == {}
    again.save(4, state, {}, wait=True)
    again.close()
    assert sorted(path.name for path in store.directory.iterdir()) == ["3", "4"]


def test_only_torn_checkpoints_is_an_error_not_a_fresh_start(store):
    (store.directory / "7" / "state").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint .7: FileNotFoundError"):
        store.latest()


def test_damaged_arrays_are_named(store):
    state = {"x": jnp.arange(1000)}
    store.save(1, state, {}, wait=True)
    for data in (store.directory / "1").rglob("d/*"):
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    message = r"1/state cannot be read: Requested byte range [^:]*; remove .*/1 to resume from the "
    with pytest.raises(CheckpointError, match=message + "beginning"):
        store.restore(1, abstract(state))


@pytest.mark.parametrize("layout", [(1, 1), (2, 4)])
@pytest.mark.parametrize("bit", [0, 31])
def test_a_flipped_bit_is_found_on_any_mesh(store, layout, bit):
    """One of 64 x 64 numbers: the least bit of its fraction, or its sign. (Smaller arrays stand,
    compressed, in a tree that OCDBT checks.)"""
    values = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)

    def placed(mesh):
        return {"x": {"y": jax.device_put(values, sharding_of("table", mesh))}, "z": jnp.ones(9)}

    store.save(1, placed(mesh_of(2, 2)), {}, wait=True)
    like = abstract(placed(mesh_of(*layout)))
    assert_same(store.restore(1, like), placed(mesh_of(1, 1)))
    number = values[17, 40].tobytes()
    places = [(f, f.read_bytes().find(number)) for f in (store.directory / "1").rglob("d/*")]
    ((file, at),) = [(file, at) for file, at in places if at >= 0]
    data = bytearray(file.read_bytes())
    data[at + bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"1 is damaged: x.y is not as saved; remove .*/1 to res"
    ):
        store.restore(1, like)


def test_damaged_metadata_is_refused(store):
    store.save(1, {"x": jnp.ones(2)}, {"tokens": 5}, wait=True)
    path = store.directory / "1" / "metadata" / "metadata"
    whole = json.loads(path.read_text())
    for key in ("leaves", "checksums", "metadata"):
        path.write_text(json.dumps({k: v for k, v in whole.items() if k != key}))
        with pytest.raises(CheckpointError, match="is damaged: its metadata is not as saved"):
            store.latest()


def test_what_appears_beside_checkpoints_does_not_end_a_run(store):
    store.save(1, {"x": jnp.ones(2)}, {}, wait=True)
    (store.directory / "notes.txt").touch()
    store.save(2, {"x": jnp.ones(2)}, {}, wait=True)
    assert store.steps() == [1, 2]


def test_foreign_contents_are_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckpointError, match="file is not a directory"):
        CheckpointStore(file).latest()
    other = tmp_path / "other"
    (other / "pytorch_model").mkdir(parents=True)
    store = CheckpointStore(other)
    for call in (store.latest, lambda: store.save(1, {"x": jnp.ones(2)}, {})):
        with pytest.raises(CheckpointError, match="pytorch_model is not a checkpoint"):
            call()
    mine = CheckpointStore(tmp_path / "mine")
    mine.save(1, {"x": jnp.ones(2)}, {}, wait=True)
    mine.close()
    path = mine.directory / "1" / "metadata" / "metadata"
    path.write_text(json.dumps({"some": "thing"}))
    with pytest.raises(CheckpointError, match="another program or version"):
        mine.latest()


@pytest.fixture
def file_size_limit():
    """Files above 64 KiB fail as they would on a full disk (EFBIG in place of ENOSPC)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("reported_by", ["wait", "save", "close"])
def test_a_failed_save_is_said_and_the_next_one_works(store, file_size_limit, reported_by, caplog):
    def state(value):
        return {"x": jnp.full((256, 1024), value, jnp.float32)}

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    store.save(1, state(1), {}, wait=True)
    file_size_limit()
    report = {"wait": store.wait, "save": lambda: store.save(3, state(3), {}), "close": store.close}
    with caplog.at_level(logging.WARNING):
        store.save(2, state(2), {})
        with pytest.raises(SaveError, match=r"/2 was not saved: .*File too large"):
            report[reported_by]()
    assert not caplog.records, "Orbax's own account of the same error"
    assert [path.name for path in store.directory.iterdir()] == ["1"], "space is given back"
    assert store.latest() == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.save(3, state(3), {}, wait=True)
    assert store.steps() == [1, 3]
    assert_same(store.restore(3, abstract(state(0))), state(3))


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(SaveError, match="was not saved"):
        CheckpointStore(tmp_path / "run" / "checkpoints").save(1, {"x": jnp.ones(2)}, {})


def test_a_directory_that_vanishes_while_the_run_goes_on(store):
    state = {"x": jnp.ones(2)}
    store.save(1, state, {}, wait=True)
    shutil.rmtree(store.directory)
    for _ in range(2):  # at most one save is lost
        try:
            store.save(2, state, {}, wait=True)
        except SaveError:
            continue
    assert store.steps() == [2]


def test_many_saves_of_many_arrays_on_many_devices(store):
    """Programs that reduce over devices must not be in flight together: one would wait for
    another."""
    mesh = mesh_of(2, 4)
    arrays = {str(i): jnp.full((8, 8 * (i + 1)), i, jnp.float32) for i in range(24)}
    state = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec("data", "model")))
    for step in range(5):
        store.save(step, state, {}, wait=True)
    assert_same(store.restore(4, abstract(state)), arrays)
