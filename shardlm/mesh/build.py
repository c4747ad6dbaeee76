"""Devices and meshes. Nothing here touches a device at import time."""

import math
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from shardlm.config import ConfigError, MeshConfig
from shardlm.mesh.axes import AXES, resolve_sizes

_COUNT_FLAG = "--xla_force_host_platform_device_count"


def simulate_devices(count: int) -> None:
    """Make this process see `count` CPU devices. Call it before anything touches a device.

    `XLA_FLAGS` keeps what it holds; the flag is added at its end, unless it says so already. A
    refusal leaves `XLA_FLAGS` and `jax_platforms` as they were.

    Raises:
      ConfigError: the backend is already up with another number or kind of devices.
    """
    if count < 1:
        raise ConfigError(f"simulate_devices is {count}: it must be at least 1")
    before, platforms = os.environ.get("XLA_FLAGS"), jax.config.values["jax_platforms"]
    flag = f"{_COUNT_FLAG}={count}"
    # Of several counts XLA takes the last.
    if [f for f in (before or "").split() if f.startswith(f"{_COUNT_FLAG}=")][-1:] != [flag]:
        os.environ["XLA_FLAGS"] = " ".join(filter(None, [before, flag]))
    jax.config.update("jax_platforms", "cpu")
    devices = jax.devices()
    if len(devices) != count or devices[0].platform != "cpu":
        if before is None:
            del os.environ["XLA_FLAGS"]
        else:
            os.environ["XLA_FLAGS"] = before
        jax.config.update("jax_platforms", platforms)
        raise ConfigError(
            f"run.simulate_devices is {count}, but JAX is already running with {len(devices)} "
            f"{devices[0].platform} devices: ask for them before the first use of JAX"
        )


def make_mesh(mesh: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Arrange devices in a mesh of the six named axes.

    Args:
      mesh: sizes of the axes; one may be -1.
      devices: the devices to use, all of them by default.

    Returns:
      A `jax.sharding.Mesh` with axes `AXES`. Neighbours on `model` are neighbours in the machine.

    Raises:
      ConfigError: see `shardlm.mesh.axes.resolve_sizes`.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = resolve_sizes(mesh, len(devices))
    shape = tuple(sizes.values())
    used = devices[: math.prod(shape)]
    if used[0].platform == "cpu":
        grid = np.array(used).reshape(shape)
    else:
        # Takes the physical torus into account, so that the last axes get the shortest links.
        from jax.experimental import mesh_utils

        grid = mesh_utils.create_device_mesh(shape, devices=used)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
