"""Checksums of arrays, computed by the devices that hold them and the same on every mesh."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import UInt32


def checksums(arrays: Mapping[str, Array]) -> dict[str, int]:
    """A 32-bit checksum of each array; only that number of each travels.

    A change of one element always changes it; any other, but for one in 2^32.
    """
    groups: dict[frozenset[jax.Device], list[str]] = {}
    for name, array in arrays.items():
        groups.setdefault(frozenset(array.sharding.device_set), []).append(name)
    found: dict[str, int] = {}
    for names in groups.values():
        # One program at a time: several in flight can wait for each other on simulated devices.
        sums = jax.device_get(_checksums([arrays[name] for name in names]))
        found |= zip(names, map(int, sums), strict=True)
    return found


@jax.jit
def _checksums(arrays: list[Array]) -> UInt32[Array, "arrays"]:
    return jnp.stack([_checksum(x) for x in arrays])


def _checksum(x: Array) -> UInt32[Array, ""]:
    """The sum, modulo 2^32, of the elements' bits mixed with their places.

    The order of a sum of whole numbers does not matter, so neither does the mesh.
    """
    width = jnp.dtype(x.dtype).itemsize
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * width}")).astype(jnp.uint32)
    place, stride = jnp.uint32(0), 1
    for dim in reversed(range(x.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(stride % 2**32)
        stride *= x.shape[dim]
    # The finalizer of MurmurHash3: one to one, and each bit moves half of the others.
    h = bits + place * jnp.uint32(0x9E3779B9)
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(h ^ (h >> 16), dtype=jnp.uint32)
