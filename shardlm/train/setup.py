"""From a configuration to the fixed parts of a run: resolved keys, mesh, model, optimizer."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from shardlm.config import Config, ConfigError, flatten
from shardlm.data import Data
from shardlm.mesh import AxisRules, make_mesh, resolve_sizes, simulate_devices
from shardlm.mesh.axes import check_axes, check_sizes
from shardlm.model.attention import choose_implementation
from shardlm.model.transformer import Transformer
from shardlm.optim import make_optimizer
from shardlm.train.state import abstract_state
from shardlm.train.step import Engine

FREE_TO_CHANGE = (
    "run.dir",
    "run.fresh",
    "run.simulate_devices",
    "run.log_every_steps",
    "mesh.",
    "model.attention",
    "model.attention_block",
    "model.scan_unroll",
    "data.prefetch",
    "train.micro_batch",
    "train.remat",
    "train.loss_chunk",
    "optim.max_skipped",
    "checkpoint.",
    "eval.",
)
"""Keys (a dot at the end: sections) that change how a run is done and not what it computes."""


def resolve_vocab(config: Config, data: Data) -> Config:
    """Fill in `model.vocab` from the tokenizer."""
    if config.model.vocab is not None:
        return config
    vocab = data.tokenizer.vocab_size
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab=vocab))


def build_mesh(config: Config) -> Mesh:
    """The mesh of a run. Sizes are checked before a device is touched where that is possible.

    Raises:
      ConfigError: sizes that the devices, the batch or the model do not allow.
    """
    written = check_axes(config.mesh)
    if config.run.simulate_devices:
        written = resolve_sizes(config.mesh, config.run.simulate_devices)
    if -1 not in written.values():
        check_sizes(config, written)
    if config.run.simulate_devices:
        simulate_devices(config.run.simulate_devices)
    mesh = make_mesh(config.mesh)
    check_sizes(config, mesh.shape)
    return mesh


def build_engine(config: Config, mesh: Mesh) -> Engine:
    """The engine of a run on a mesh; `model.vocab` must be set.

    Raises:
      ConfigError: what the model asks for is not possible on these devices.
    """
    platform = mesh.devices.flat[0].platform
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, dtype=compute_dtype(config, platform))
    )
    attention = choose_implementation(config.model, config.data.length, platform)
    rules = AxisRules.for_model(mesh.shape, config.model, config.mesh.shard_params)
    transformer = Transformer(config.model, config.data.length)
    optimizer = make_optimizer(config)
    abstract = abstract_state(transformer, optimizer, mesh, rules)
    dtype = jnp.dtype(config.model.dtype)
    return Engine(config, mesh, rules, transformer, optimizer, abstract, dtype, attention)


def compute_dtype(config: Config, platform: str) -> str:
    """`model.dtype`, with auto resolved."""
    if config.model.dtype != "auto":
        return config.model.dtype
    if platform != "cpu":
        return "bfloat16"
    # bf16 products on CPU became fast with jax 0.11 (docs/log.md has the figures).
    return "bfloat16" if jax.__version_info__ >= (0, 11) else "float32"


def refuse_changes(before: Config, now: Config) -> None:
    """Refuse to resume a run as another one.

    Raises:
      ConfigError: lists the keys that differ and would change what the run computes.
    """
    old, new = flatten(before), flatten(now)
    free = set(FREE_TO_CHANGE)
    if now.optim.schedule == "constant":
        # Nothing before the end depends on where the end is.
        free.add("train.steps")
    changed = [
        f"{key}: {old[key]} -> {new[key]}"
        for key in new
        if old[key] != new[key]
        and key not in free
        and not any(key.startswith(section) for section in free if section.endswith("."))
    ]
    if changed:
        raise ConfigError(
            f"run.dir {now.run.dir} holds a run of another configuration ({'; '.join(changed)}): "
            "restore those keys to resume it, or name another run.dir"
        )
