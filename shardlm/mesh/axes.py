"""Mesh axes: their names, their sizes, and what the sizes must divide. Touches no device."""

import math
from collections.abc import Mapping

from shardlm.config import Config, ConfigError, MeshConfig, ModelConfig
from shardlm.validation import batch_near, batch_of, batch_said, nearest_divisible, nearest_divisor
from shardlm.words import many

AXES = ("replica", "stage", "data", "expert", "context", "model")
"""Names of the mesh axes, slowest link first."""

BATCH_AXES = ("replica", "data", "expert")
"""Axes that split the examples of a batch."""

TOKEN_AXES = (*BATCH_AXES, "context")
"""Axes that split its tokens."""

LOSS_AXES = (*TOKEN_AXES, "stage")
"""Axes that split the tokens when it comes to their loss."""


def resolve_sizes(mesh: MeshConfig, devices: int) -> dict[str, int]:
    """Size of each axis on this many devices.

    Args:
      mesh: the sizes asked for; at most one is -1.
      devices: how many devices there are.

    Returns:
      Axis name to size, in the order of `AXES`; the product is at most `devices`, and equal to it
      when a size is -1.

    Raises:
      ConfigError: a size that is not positive, more than one -1, more devices asked for than there
        are, or a remainder.
    """
    sizes = check_axes(mesh)
    known = math.prod(n for n in sizes.values() if n != -1)
    free = [axis for axis, n in sizes.items() if n == -1]
    if known > devices:
        wanted = ", ".join(f"{a} {n}" for a, n in sizes.items() if n not in (1, -1))
        raise ConfigError(
            f"the mesh asks for {many(known, 'device')} ({wanted}) and there are {devices}: make "
            f"an axis smaller, or use run.simulate_devices {known} to try it on CPU"
        )
    if free:
        if devices % known:
            raise ConfigError(
                f"mesh.{free[0]} is -1, and {devices} devices do not divide by the other axes' "
                f"{known}: their product must divide {devices} (nearest: "
                f"{nearest_divisor(devices, known)})"
            )
        sizes[free[0]] = devices // known
    return sizes


def check_axes(mesh: MeshConfig) -> dict[str, int]:
    """Check the sizes as they are written; returns axis to size, -1 unresolved.

    Raises:
      ConfigError: as `resolve_sizes`, as far as it can be told without a count of devices.
    """
    sizes = {axis: int(getattr(mesh, axis)) for axis in AXES}
    for axis, n in sizes.items():
        if n < 1 and n != -1:
            raise ConfigError(f"mesh.{axis} is {n}: it must be at least 1, or -1 for the rest")
    free = [axis for axis, n in sizes.items() if n == -1]
    if len(free) > 1:
        raise ConfigError(f"mesh.{free[0]} and mesh.{free[1]} are both -1: only one may be")
    return sizes


def batch_ways(sizes: Mapping[str, int]) -> int:
    """Devices that the examples of a batch are split over."""
    return math.prod(sizes[axis] for axis in BATCH_AXES)


def check_sizes(config: Config, sizes: Mapping[str, int]) -> None:
    """Check that batch and model divide over the axes.

    Raises:
      ConfigError: names both numbers and the nearest sizes that work.
    """
    ways = batch_ways(sizes)
    named = " x ".join(f"{axis} {sizes[axis]}" for axis in BATCH_AXES if sizes[axis] > 1)
    if config.batch % ways:
        raise ConfigError(
            f"{batch_said(config)} and {named} split it {ways} ways: it must be a multiple of "
            f"{batch_of(config, ways)} ({batch_near(config, ways)} would do)"
        )
    if config.micro_batch % ways:
        raise ConfigError(
            f"train.micro_batch is {config.micro_batch} and {named} split it {ways} ways: it must "
            f"be a multiple of {ways} ({nearest_divisible(config.micro_batch, ways)} would do)"
        )
    if config.data.balance == "dynamic" and config.mesh.shard_params == "all" and sizes["data"] > 1:
        raise ConfigError(
            "data.balance is dynamic and mesh.shard_params all, with which every micro-batch waits "
            "for all devices, so that none can make more of them than another: set "
            "mesh.shard_params optimizer or none, or data.balance work"
        )
    if config.data.balance == "dynamic" and sizes["expert"] > 1:
        raise ConfigError(
            f"data.balance is dynamic and mesh.expert {sizes['expert']}, over which tokens travel "
            "in every micro-batch, so that no device can make more of them than another: set "
            "data.balance work, or mesh.expert 1"
        )
    if config.data.balance == "dynamic" and sizes["stage"] > 1:
        raise ConfigError(
            f"data.balance is dynamic and mesh.stage {sizes['stage']}, over which all devices pass "
            "micro-batches on in step: set data.balance work, or mesh.stage 1"
        )
    check_model(config.model, sizes, config.mesh)
    if sizes["context"] > 1:
        _check_context(config, sizes)


def _check_context(config: Config, sizes: Mapping[str, int]) -> None:
    comm, model = config.mesh.context_comm, config.model
    if comm != "ulysses":
        if model.attention in ("xla", "cudnn"):
            raise ConfigError(
                f"model.attention is {model.attention} and mesh.context {sizes['context']} with "
                f"mesh.context_comm {comm}, which attends a block at a time: use auto or "
                "blockwise, or mesh.context_comm ulysses"
            )
        return
    ways = sizes["context"] * sizes["model"]
    if model.heads % ways:
        split = " x ".join(f"{a} {sizes[a]}" for a in ("context", "model") if sizes[a] > 1)
        raise ConfigError(
            f"model.heads is {model.heads} and mesh.context_comm ulysses splits heads over "
            f"{split}: {ways} does not divide {model.heads} (model.heads "
            f"{nearest_divisible(model.heads, ways)} would do, or mesh.context_comm ring)"
        )


def stage_rounds(mesh: MeshConfig, sizes: Mapping[str, int]) -> int:
    """Runs of layers of a device; without stages there is one."""
    return mesh.stage_rounds if sizes.get("stage", 1) > 1 else 1


def check_model(model: ModelConfig, sizes: Mapping[str, int], mesh: MeshConfig) -> None:
    """Check that the model divides over the axes; raises as `check_sizes` does."""
    if sizes["stage"] > 1:
        _check_stages(model, sizes["stage"], stage_rounds(mesh, sizes))
    if sizes["expert"] > 1 and not model.moe.experts:
        raise ConfigError(
            f"mesh.expert is {sizes['expert']} and model.moe.experts 0: there is no expert to "
            f"split; use mesh.data {sizes['expert']}, or set model.moe.experts"
        )
    split = [
        ("model.moe.experts", model.moe.experts, "expert"),
        ("model.heads", model.heads, "model"),
        ("model.mlp", model.mlp, "model"),
        ("model.vocab (padded)", model.vocab_padded, "model"),
    ]
    if mesh.shard_params != "none":
        split.append(("model.embed", model.embed, "data"))
    for key, value, axis in split:
        n = sizes[axis]
        if value % n:
            raise ConfigError(
                f"{key} is {value} and mesh.{axis} is {n}: {n} does not divide {value} "
                f"({key.split()[0]} {nearest_divisible(value, n)} would do, or mesh.{axis} "
                f"{nearest_divisor(value, n)})"
            )


def _check_stages(model: ModelConfig, stages: int, rounds: int) -> None:
    runs = stages * rounds
    named = f"mesh.stage is {stages}" + (f" with mesh.stage_rounds {rounds}" * (rounds > 1))
    if model.layers % runs:
        would = f"model.layers {nearest_divisible(model.layers, runs)} would do"
        if model.layers % rounds == 0:
            would += f", or mesh.stage {nearest_divisor(model.layers // rounds, stages)}"
        raise ConfigError(
            f"model.layers is {model.layers} and {named}: {runs} does not divide {model.layers}, "
            f"and all runs of layers are equally long ({would})"
        )
    pattern = len(model.windows)
    if model.layers // runs % pattern:
        raise ConfigError(
            f"model.windows names {pattern} windows, in turn, and {named} makes runs of "
            f"{model.layers // runs} layers: each run begins with the first window, so {pattern} "
            "must divide its length"
        )
