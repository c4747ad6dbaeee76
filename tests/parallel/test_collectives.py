"""What travels between devices: sums in fp32, gathers and scatters that undo each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from shardlm.config import MeshConfig
from shardlm.mesh import AxisRules, make_mesh
from shardlm.parallel.collectives import Parallel

P = PartitionSpec


def on_mesh(function, in_specs, out_specs, **sizes):
    """`function(par, ...)` on each device's part of arrays over a mesh of these sizes."""
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = make_mesh(MeshConfig(**({"data": 1} | sizes)), devices)
    par = Parallel(AxisRules(mesh.shape))

    def run(*args):
        mapped = jax.shard_map(
            lambda *parts: function(par, *parts), mesh=mesh, in_specs=in_specs, out_specs=out_specs
        )
        return jax.tree.map(np.asarray, jax.jit(mapped)(*args))

    return run


def test_weights_are_gathered_in_bf16_and_their_gradients_summed_in_fp32():
    """Device n sends 1 + n/128 for every element: 8 + 28/128 in all, which bf16 cannot hold."""
    weight = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    scale = np.random.default_rng(1).normal(size=16).astype(np.float32)

    def unshard(par, weight, scale):
        def loss(weight, scale):
            state = {
                "kernel": nnx.Param(weight, dims=("embed", "mlp")),
                "scale": nnx.Param(scale, dims=("embed",)),
            }
            whole = par.unshard(state, jnp.dtype("bfloat16"))
            kernel, scale = whole["kernel"][...], whole["scale"][...]
            share = (1 + par.index("data") / 128).astype(jnp.bfloat16)
            return (kernel * share).astype(jnp.float32).sum() + scale.sum(), (kernel, scale)

        grads, whole = jax.grad(loss, argnums=(0, 1), has_aux=True)(weight, scale)
        return grads, jax.tree.map(lambda x: x[None], whole)

    specs = (P("data", None), P("data"))
    run = on_mesh(unshard, specs, (specs, (P("data"), P("data"))), data=8)
    (d_weight, d_scale), (kernels, scales) = run(weight, scale)
    assert kernels.dtype == jnp.bfloat16
    assert scales.dtype == np.float32
    for kernel, whole_scale in zip(kernels, scales, strict=True):
        np.testing.assert_array_equal(kernel, weight.astype(jnp.bfloat16))
        np.testing.assert_array_equal(whole_scale, scale)
    assert d_weight.dtype == np.float32
    np.testing.assert_array_equal(d_weight, np.full((16, 3), 8 + 28 / 128))
    np.testing.assert_array_equal(d_scale, np.full(16, 8))


def test_gathering_and_scattering_the_sequence_are_each_others_inverse_and_transpose():
    rng = np.random.default_rng(0)
    parts = rng.normal(size=(2, 12, 3)).astype(np.float32)
    partial_sums = rng.normal(size=(4, 2, 12, 3)).astype(np.float32)

    def both(par, x, y):
        y = y[0]
        gathered, gather_back = jax.vjp(par.gather_sequence, x)
        scattered, scatter_back = jax.vjp(par.scatter_sequence, y)
        return (
            gathered[None],
            scattered,
            par.scatter_sequence(gathered / 4),
            gather_back(y)[0],
            scatter_back(x)[0][None],
        )

    each, split = P("model"), P(None, "model")
    run = on_mesh(both, (split, each), (each, split, split, split, each), model=4)
    gathered, scattered, again, gather_back, scatter_back = run(parts, partial_sums)
    total = partial_sums.astype(np.float64).sum(0)
    np.testing.assert_array_equal(again, parts)
    np.testing.assert_allclose(scattered, total, atol=1e-6)
    np.testing.assert_array_equal(gather_back, scattered)
    for device in range(4):
        np.testing.assert_array_equal(gathered[device], parts)
        np.testing.assert_array_equal(scatter_back[device], parts)


def test_parts_of_the_model_axis_stand_side_by_side_in_order():
    x = np.arange(24, dtype=np.float32).reshape(3, 8)

    def whole(par, x):
        return par.concatenate_model(x, axis=1)

    np.testing.assert_array_equal(on_mesh(whole, P(None, "model"), P(), model=4)(x), x)


STORED = {
    "matrix": P("data", "model"),
    "scale": P("data", None),
    "bias": P(("model", "data"), None),
    "whole": P(None, None),
}
"""How parameters of shape [8, 4] are split: over both axes, one or none."""


def whole_over_data(spec):
    def without(entry):
        kept = tuple(a for a in (entry if isinstance(entry, tuple) else (entry,)) if a != "data")
        return kept[0] if len(kept) == 1 else kept or None

    return P(*map(without, spec))


@pytest.mark.parametrize("shard_params", ["all", "optimizer", "none"])
def test_gradients_are_summed_over_the_devices_whose_parts_they_lack(shard_params):
    """Every device has its own numbers. all: split as they are stored; optimizer: whole over
    `data` and to be split; none: stored whole over `data`."""
    sizes = {"replica": 2, "data": 2, "model": 2}
    mesh = make_mesh(MeshConfig(**sizes))
    stored = STORED
    if shard_params == "none":
        stored = {k: whole_over_data(s) for k, s in STORED.items()}
    arriving = stored
    if shard_params == "optimizer":
        arriving = {k: whole_over_data(s) for k, s in STORED.items()}

    rng = np.random.default_rng(3)
    parts, expected = {}, {}
    for key, spec in arriving.items():
        index = NamedSharding(mesh, spec).devices_indices_map((8, 4))
        numbers = [rng.normal(size=np.zeros((8, 4))[index[d]].shape) for d in mesh.devices.flat]
        parts[key] = np.stack(numbers).astype(np.float32)
        expected[key] = np.zeros((8, 4))
        for device, part in zip(mesh.devices.flat, parts[key], strict=True):
            expected[key][index[device]] += part

    def reduce(par, parts):
        grads = jax.tree.map(lambda x: x[0], parts)
        return par.reduce_gradients(grads, stored, gathered=shard_params == "optimizer")

    devices = P(tuple(sizes))
    got = on_mesh(reduce, (dict.fromkeys(parts, devices),), stored, **sizes)(parts)
    for key in parts:
        np.testing.assert_allclose(got[key], expected[key], atol=1e-6, err_msg=key)
