"""From a configuration to the fixed parts of a run: resolved keys, mesh, model, optimizer."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from shardlm.arguments import difference
from shardlm.config import Config, ConfigError
from shardlm.data import Data
from shardlm.data.layout import row_lengths
from shardlm.mesh import AxisRules, make_mesh, resolve_sizes, simulate_devices
from shardlm.mesh.axes import batch_ways, check_axes, check_sizes, stage_rounds
from shardlm.mesh.shardings import bytes_per_device
from shardlm.model.attention import choose_implementation
from shardlm.model.transformer import Transformer
from shardlm.observe import memory_limit
from shardlm.optim import make_optimizer
from shardlm.parallel.pipeline import Schedule
from shardlm.parallel.sequence import row_multiple
from shardlm.train.engine import Engine
from shardlm.train.forward import padded_length
from shardlm.train.state import State, abstract_state, init_state, shardings
from shardlm.validation import batch_said

FREE_TO_CHANGE = (
    "run.dir",
    "run.fresh",
    "run.simulate_devices",
    "run.log_every_steps",
    "mesh.",
    "model.attention",
    "model.attention_block",
    "model.scan_unroll",
    "data.cache",
    "data.balance",
    "data.prefetch",
    "train.micro_batch",
    "train.remat",
    "train.loss_chunk",
    "train.steps",
    "optim.max_skipped",
    "checkpoint.",
    "eval.",
)
"""Keys (a dot at the end: sections) that change how a run is done and not what it computes; and
`train.steps`, whose effect on the schedule the run states."""


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
    device = mesh.devices.flat[0]
    platform = device.platform
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, dtype=compute_dtype(config, platform))
    )
    # Devices without CUDA need not have the attribute.
    capability = str(getattr(device, "compute_capability", ""))
    # Each length is checked; the choice is the same for all.
    for row in row_lengths(config.data):
        length = padded_length(row, row_multiple(mesh.shape, config.mesh.context_comm))
        attention = choose_implementation(config.model, platform, length, capability)
    rules = AxisRules.for_model(mesh.shape, config.model, config.mesh.shard_params)
    schedule = Schedule(mesh.shape["stage"], stage_rounds(config.mesh, mesh.shape))
    transformer = Transformer(config.model, config.data.length, schedule)
    optimizer = make_optimizer(config)
    abstract = abstract_state(transformer, optimizer, mesh, rules)
    dtype = jnp.dtype(config.model.dtype)
    return Engine(config, mesh, rules, transformer, optimizer, abstract, dtype, attention)


def check_memory(engine: Engine) -> None:
    """Refuse what cannot run whatever is tuned: more state, or a larger batch, than memory.

    What else an update needs (gradients, activations) is not counted.

    Raises:
      ConfigError: says what each device would hold, what it has, and what would be less.
    """
    config, devices = engine.config, list(engine.mesh.devices.flat)
    limit = memory_limit(devices)
    if limit is None:
        return
    # Tokens, targets, segments and positions, int32.
    batch = config.batch * config.data.length * 16 // batch_ways(engine.mesh.shape)
    state = sum(map(bytes_per_device, jax.tree.leaves(engine.abstract)))
    if batch > limit:
        raise ConfigError(
            f"{batch_said(config)} and data.length {config.data.length}: one batch "
            f"takes {batch:,} bytes a device, which has {limit:,}: lower them"
        )
    if state > limit:
        raise ConfigError(
            f"the training state of {engine.transformer.count():,} parameters takes {state:,} "
            f"bytes a device, which has {limit:,}: make the model smaller (model.layers, "
            "model.embed), or split it over more devices (mesh.shard_params all, mesh.model)"
        )


def new_state(engine: Engine) -> State:
    """The state before the first update, made sharded: the whole model is never on one device."""
    make = jax.jit(
        partial(init_state, engine.transformer, engine.optimizer, engine.config.run.seed),
        out_shardings=shardings(engine.abstract),
    )
    # On CPU optimizing the code of random numbers takes far longer than running it once.
    on_cpu = engine.mesh.devices.flat[0].platform == "cpu"
    options: Any = {"xla_backend_optimization_level": 0} if on_cpu else None
    state: State = make.lower().compile(options)()
    return jax.block_until_ready(state)


def compute_dtype(config: Config, platform: str) -> Literal["float32", "bfloat16"]:
    """`model.dtype`, with auto resolved."""
    if config.model.dtype != "auto":
        return config.model.dtype
    if platform != "cpu":
        return "bfloat16"
    # Without the instructions, or before jax 0.11, bf16 products on CPU are emulated and slower
    # than fp32 ones (docs/log.md has the figures).
    fast = jax.__version_info__ >= (0, 11) and _cpu_multiplies_bf16()
    return "bfloat16" if fast else "float32"


def _cpu_multiplies_bf16() -> bool:
    """Whether the processor has bf16 products, by what Linux says of it."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def refuse_changes(before: Config, now: Config, same_text: bool) -> None:
    """Refuse to resume a run as another one.

    Args:
      same_text: the sources hold what they held, wherever they lie, in the same tokens.

    Raises:
      ConfigError: lists the keys that differ and would change what the run computes.
    """
    sections = tuple(key for key in FREE_TO_CHANGE if key.endswith("."))
    free = (*FREE_TO_CHANGE, *(("data.sources", "data.tokenizer") if same_text else ()))
    changed = [
        f"{key}: {old} -> {new}" + (", where the text or its ids differ" * (key == "data.sources"))
        for key, old, new in difference(before, now)
        if key not in free and not key.startswith(sections)
    ]
    if changed:
        raise ConfigError(
            f"run.dir {now.run.dir} holds a run of another configuration ({'; '.join(changed)}): "
            "restore those keys to resume it, or name another run.dir"
        )
