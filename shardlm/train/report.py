"""What a run says at its start and at its end."""

from shardlm.data import Data
from shardlm.observe import RunDirectory, peak_memory
from shardlm.train.arithmetic import Arithmetic
from shardlm.train.commands import Commands
from shardlm.train.step import Engine


def describe(engine: Engine, data: Data) -> str:
    """What will be done: text, model, mesh, and the arithmetic of the updates."""
    config = engine.config
    axes = " x ".join(f"{axis} {n}" for axis, n in engine.mesh.shape.items() if n > 1)
    kind = engine.mesh.devices.flat[0].device_kind
    lines = [
        data.summary(),
        f"model       {engine.transformer.count():,} parameters, {config.model.layers} layers, "
        f"width {config.model.embed}, computing in {engine.dtype}",
        f"mesh        {axes or 'one device'} ({engine.mesh.size} {kind})",
        str(Arithmetic.of(config, engine.mesh.shape, data.train.rows_per_epoch)),
    ]
    if config.eval.every_steps and data.validation is None:
        lines.append("nothing is evaluated, since data.validation is 0")
    return "\n".join(lines)


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
