"""What a run says at its start and at its end."""

from typing import Any

import jax

from shardlm.data import Data
from shardlm.mesh.axes import batch_ways
from shardlm.mesh.shardings import bytes_per_device
from shardlm.observe import RunDirectory, peak_memory
from shardlm.parallel.heads import kv_copies
from shardlm.train.arithmetic import Arithmetic
from shardlm.train.commands import Commands
from shardlm.train.engine import Engine
from shardlm.words import many


def describe(engine: Engine, data: Data) -> str:
    """What will be done: text, model, mesh, and the arithmetic of the updates."""
    config = engine.config
    axes = " x ".join(f"{axis} {n}" for axis, n in engine.mesh.shape.items() if n > 1)
    device, used = engine.mesh.devices.flat[0], engine.mesh.size
    there = device.client.device_count()
    devices = f"{used} {device.device_kind}"
    if used < there:
        devices = f"{used} of {there} {device.device_kind}, {there - used} idle"
    sources = (
        zip(config.data.sources, data.train.epochs(config.train.steps).tolist(), strict=True)
        if config.data.weights
        else ()
    )
    lines = [
        data.summary(),
        f"model       {engine.transformer.count():,} parameters, "
        f"{many(config.model.layers, 'layer')}, width {config.model.embed}, "
        f"computing in {engine.dtype}",
        f"mesh        {axes or 'one device'} ({devices})",
        # Of rows of several lengths, as many of the longest as have their places.
        str(
            Arithmetic.of(
                config,
                engine.mesh.shape,
                round(data.train.updates_per_epoch * config.batch),
                sources,
            )
        ),
    ]
    ways = engine.mesh.shape["model"]
    copies = kv_copies(ways, config.model.kv)
    if copies > 1:
        lines.append(
            f"kv heads    {config.model.kv}, which do not divide over model: each is computed on "
            f"{copies} devices, and their weights are whole on all {ways}"
        )
    schedule = engine.transformer.schedule
    if schedule.stages > 1:
        # Of several lengths each has its own loop; how many turns it has is known with the batch.
        bubble = schedule.bubble(config.micro_batches)
        rounds = f" in {many(schedule.rounds, 'round')}" * (schedule.rounds > 1)
        each = config.model.layers // schedule.stages
        lines.append(
            f"stages      {schedule.stages} of {many(each, 'layer')}"
            f"{rounds}: {bubble:.1%} idle with {many(config.micro_batches, 'micro-batch', 'es')}"
        )
    if len(data.train.shapes) > 1:
        shapes = ", or ".join(map(str, data.train.shapes))
        lines.append(f"a micro-batch is {shapes}: {len(data.train.shapes)} shapes, compiled once")
    if data.train.padding >= 0.001:
        lines.append(f"padding     {data.train.padding:.1%} of the places of all rows")
    whole = _whole_over_data(engine)
    total = sum(map(bytes_per_device, whole))
    if total > 1024:  # Constants of an optimizer are not worth a line.
        lines.append(
            f"whole       {many(len(whole), 'array')} that data does not divide, "
            f"{total:,} bytes a device"
        )
    dynamic = config.data.balance == "dynamic" and batch_ways(engine.mesh.shape) > 1
    if dynamic and config.micro_batches == 1:
        lines.append(
            "data.balance is dynamic and an update has one micro-batch, so that a slow device is "
            "given rows of less work and no fewer: lower train.micro_batch to give it fewer"
        )
    if config.eval.every_steps and data.validation is None:
        lines.append("nothing is evaluated, since data.validation is 0")
    return "\n".join(lines)


def _whole_over_data(engine: Engine) -> list[Any]:
    """Arrays of the state that `shard_params` would split and `data` does not divide."""
    if engine.config.mesh.shard_params == "none" or engine.mesh.shape["data"] == 1:
        return []
    arrays = [leaf for leaf in jax.tree.leaves(engine.abstract) if leaf.ndim]
    return [x for x in arrays if "data" not in jax.tree.leaves(tuple(x.sharding.spec))]


def how_to_go_on(engine: Engine, directory: RunDirectory, commands: Commands) -> str:
    """Memory, files, and the next commands."""
    used = peak_memory(list(engine.mesh.devices.flat)).items()
    memory = ", ".join(f"{where} {n / 2**20:,.0f} MiB" for where, n in used if n is not None)
    picture, metrics = directory.picture_path, directory.metrics_path
    return (
        f"peak memory: {memory}\n"
        f"{picture} has the loss curve, {metrics} the figures\n"
        f"generate with: {commands.generate}\n"
        f"continue with: {commands.longer}"
    )
