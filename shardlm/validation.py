"""Checks of a configuration that need neither devices nor data, nor jax.

What depends on the sizes of the mesh is checked in `shardlm.mesh.axes`.
"""

import dataclasses
import math
import re
import typing
from collections.abc import Sequence
from typing import Any, Literal

from shardlm.config import Config, ConfigError, ModelConfig, flatten


def validate(config: Config) -> None:
    """Refuse values that cannot be, alone or beside each other.

    Raises:
      ConfigError: names the key, its value, the requirement and what would do.
    """
    _check_choices(config, "")
    flat, sources = flatten(config), config.data.sources
    for key, value in flat.items():
        for number in value if isinstance(value, tuple) else (value,):
            most = _MOST.get(key, _INT32 if isinstance(number, int) else math.inf)
            if isinstance(number, int | float) and number > most:
                raise ConfigError(f"{key} is {number}: it must be at most {most}")
    for key, least in _LEAST.items():
        value = flat[key]
        if value is not None and not (math.isfinite(value) and value >= least):
            raise ConfigError(f"{key} is {value}: it must be at least {least}")
    for key in ("model.dropout", "data.validation", "optim.b1", "optim.b2"):
        if not 0 <= flat[key] < 1:
            raise ConfigError(f"{key} is {flat[key]}: it must be at least 0 and below 1")
    for key in ("model.norm_eps", "optim.eps"):
        if flat[key] == 0:
            raise ConfigError(f"{key} is 0: it must be above 0, or what is all zeros becomes NaN")
    if not 0 <= config.optim.final_fraction <= 1:
        raise ConfigError(
            f"optim.final_fraction is {config.optim.final_fraction}: it must be from 0 to 1"
        )
    _validate_model(config.model)
    # First, since data.batch_tokens may be what sets the batch.
    _validate_data(config)
    _validate_batch(config)
    if not config.run.dir:
        raise ConfigError("run.dir is empty: name a directory for the run")
    if config.data.cache == "":
        raise ConfigError("data.cache is empty: name a directory, or leave it out")
    for key, path in [
        ("run.dir", config.run.dir),
        ("data.cache", config.data.cache or "default"),
        *(("data.sources", s) for s in sources),
    ]:
        # Bytes that are not UTF-8 reach Python as lone surrogates.
        if "\0" in path or re.search("[\ud800-\udfff]", path):
            raise ConfigError(f"{key} is {path!r}: it must be UTF-8 text without NUL")
    if not sources:
        raise ConfigError("data.sources is empty: name at least one file, directory or glob")
    optim, steps = config.optim, config.train.steps
    if optim.warmup_steps > steps:
        raise ConfigError(
            f"optim.warmup_steps is {optim.warmup_steps}, more than train.steps {steps}"
        )
    if optim.decay_fraction is not None and not 0 < optim.decay_fraction <= 1:
        raise ConfigError(
            f"optim.decay_fraction is {optim.decay_fraction}: it must be above 0 and at most 1"
        )


_INT32 = 2**31 - 1
"""Most of a whole number: steps, positions and counts are int32 on the devices."""

_MOST: dict[str, float] = {
    "run.seed": 2**32 - 1,  # 32 bits without a sign
    "model.dropout": 0.999,
    "data.prefetch": 1024,
    "eval.sample_tokens": 2**20,
}

_LEAST: dict[str, float] = {
    "run.seed": 0,
    "run.simulate_devices": 0,
    "run.log_every_steps": 1,
    "model.layers": 1,
    "model.embed": 1,
    "model.heads": 1,
    "model.kv_heads": 1,
    "model.head_dim": 1,
    "model.mlp": 1,
    "mesh.stage_rounds": 1,
    "model.moe.experts": 0,
    "model.moe.top_k": 1,
    "model.moe.capacity_factor": 0,
    "model.moe.shared_experts": 0,
    "model.moe.balance_loss": 0,
    "model.moe.z_loss": 0,
    "model.moe.bias_rate": 0,
    "model.vocab": 2,
    "model.norm_eps": 0,
    "model.rope.factor": 1,
    "model.rope.original_length": 1,
    "model.logit_softcap": 0,
    "model.attention_softcap": 0,
    "model.attention_block": 1,
    "model.scan_unroll": 0,
    "model.init_std": 0,
    "data.length": 2,
    "data.overlap": 0,
    "data.buckets": 1,
    "data.batch_tokens": 1,
    "data.prefetch": 1,
    "train.batch": 1,
    "train.micro_batch": 1,
    "train.steps": 1,
    "train.loss_chunk": 0,
    "train.z_loss": 0,
    "optim.learning_rate": 0,
    "optim.matrix_learning_rate": 0,
    "optim.warmup_steps": 0,
    "optim.weight_decay": 0,
    "optim.clip_norm": 0,
    "optim.eps": 0,
    "optim.max_skipped": 1,
    "checkpoint.every_steps": 0,
    "checkpoint.every_minutes": 0,
    "checkpoint.keep": 1,
    "checkpoint.keep_every": 0,
    "eval.every_steps": 0,
    "eval.batch": 1,
    "eval.sample_tokens": 0,
}


def _check_choices(section: Any, prefix: str) -> None:
    """Values of `Literal` fields, for configurations that were made in Python."""
    hints = typing.get_type_hints(type(section))
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if dataclasses.is_dataclass(value):
            _check_choices(value, f"{prefix}{f.name}.")
        elif typing.get_origin(hints[f.name]) is Literal:
            choices = typing.get_args(hints[f.name])
            if value not in choices:
                raise ConfigError(
                    f"{prefix}{f.name} is {value!r}: it must be one of {', '.join(choices)}"
                )


def _validate_model(model: ModelConfig) -> None:
    if model.head_dim is None and model.embed % model.heads:
        raise ConfigError(
            f"model.embed is {model.embed} and model.heads {model.heads}: heads must divide embed "
            f"({nearest_divisible(model.embed, model.heads)} would do), or set model.head_dim"
        )
    if model.heads % model.kv:
        raise ConfigError(
            f"model.kv_heads is {model.kv} and model.heads {model.heads}: kv_heads must divide "
            f"heads (one of {', '.join(map(str, divisors(model.heads)))})"
        )
    if model.positions == "rotary" and model.k_dim % 2:
        raise ConfigError(f"model.head_dim is {model.k_dim}: rotary positions need an even number")
    if not model.windows or min(model.windows) < 0:
        raise ConfigError(
            f"model.windows is {list(model.windows)}: it must name at least one window, in tokens, "
            "with 0 for no limit"
        )
    moe = model.moe
    if moe.experts and moe.top_k > moe.experts:
        raise ConfigError(
            f"model.moe.top_k is {moe.top_k} and model.moe.experts {moe.experts}: a token cannot "
            f"go to more experts than there are; top_k {moe.experts} would do"
        )
    if moe.experts and moe.top_k == 1 and moe.normalize:
        raise ConfigError(
            "model.moe.top_k is 1 and model.moe.normalize true: the weight of the one expert is "
            "then always 1, and its router learns nothing from the loss; set model.moe.normalize "
            "false"
        )
    if moe.experts and model.bias:
        raise ConfigError(
            f"model.bias is true and model.moe.experts {moe.experts}: experts have no biases; set "
            "model.bias false"
        )
    rope = model.rope
    if rope.theta <= 1:
        raise ConfigError(f"model.rope.theta is {rope.theta}: it must be above 1")
    if rope.scaling in ("llama3", "yarn") and not 0 < rope.low < rope.high:
        raise ConfigError(
            f"model.rope.low is {rope.low} and model.rope.high {rope.high}: low must be above 0 "
            "and below high"
        )


def _validate_data(config: Config) -> None:
    data = config.data
    if data.weights and len(data.weights) != len(data.sources):
        raise ConfigError(
            f"data.weights are {len(data.weights)} and data.sources {len(data.sources)}: give one "
            "weight for each source, or none"
        )
    if not can_be_mixed(data.weights):
        raise ConfigError(
            f"data.weights is {list(data.weights)}: each must be from {LEAST_WEIGHT:g} to "
            f"{MOST_WEIGHT:g} and at least {LEAST_SHARE:g} of their sum: leave out the sources "
            "that are not wanted"
        )
    if data.overlap > data.length // 2:
        raise ConfigError(
            f"data.overlap is {data.overlap} and data.length {data.length}: it must be at most "
            f"half of it, {data.length // 2}"
        )
    if data.overlap and data.packing == "concat":
        raise ConfigError(
            f"data.overlap is {data.overlap} and data.packing concat, which cuts documents laid "
            "end to end: leave data.overlap out, or use another packing"
        )
    shortest = 2 ** (data.buckets - 1)
    if data.packing == "padded_buckets" and (data.length % shortest or data.length // shortest < 2):
        raise ConfigError(
            f"data.buckets is {data.buckets} and data.length {data.length}: rows of the length "
            f"halved {data.buckets - 1} times need a multiple of {shortest} and at least "
            f"{2 * shortest} ({nearest_divisible(max(data.length, 2 * shortest), shortest)} would "
            "do)"
        )
    tokens = data.batch_tokens
    if tokens is not None and tokens % data.length:
        raise ConfigError(
            f"data.batch_tokens is {tokens} and data.length {data.length}: it must be a multiple "
            f"({nearest_divisible(tokens, data.length)} would do)"
        )


LEAST_WEIGHT, MOST_WEIGHT = 1e-300, 1e300
"""Of a source: quotients and sums of weights beyond these would lose digits, or be infinite."""
LEAST_SHARE = 1e-12
"""Of a stream in a mixture: with less it would hardly come at all."""


def can_be_mixed(weights: Sequence[float]) -> bool:
    """Whether there is a mixture in exactly these shares."""
    if not all(LEAST_WEIGHT <= weight <= MOST_WEIGHT for weight in weights):
        return False
    total = math.fsum(weights)
    return all(weight / total >= LEAST_SHARE for weight in weights)


def _validate_batch(config: Config) -> None:
    batch, micro = config.batch, config.micro_batch
    if batch % micro:
        raise ConfigError(
            f"{batch_said(config)} and train.micro_batch {micro}: micro_batch must divide the "
            f"batch ({batch_near(config, micro)} would do, or train.micro_batch "
            f"{nearest_divisor(batch, micro)})"
        )


def batch_key(config: Config) -> str:
    """The key that sets the batch."""
    return "train.batch" if config.data.batch_tokens is None else "data.batch_tokens"


def batch_said(config: Config) -> str:
    """The batch as messages name it: the key that sets it, its value, and the rows that are."""
    tokens = config.data.batch_tokens
    if tokens is None:
        return f"train.batch is {config.batch}"
    return (
        f"data.batch_tokens is {tokens} ({config.batch} rows of data.length {config.data.length})"
    )


def batch_of(config: Config, rows: int) -> int:
    """The value of `batch_key` that makes so many rows."""
    return rows if config.data.batch_tokens is None else rows * config.data.length


def batch_near(config: Config, rows: int) -> str:
    """Multiples of `rows` next to the batch, for messages: "train.batch 12 or 16"."""
    near = nearest_divisible(batch_of(config, config.batch), batch_of(config, rows))
    return f"{batch_key(config)} {near}"


def nearest_divisible(value: int, divisor: int) -> str:
    """The multiples of `divisor` next to `value`, for messages: "12 or 16"."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"


def nearest_divisor(value: int, near: int) -> int:
    """The divisor of `value` closest to `near`."""
    return min(divisors(value), key=lambda n: abs(n - near))


def divisors(value: int) -> list[int]:
    """All divisors of `value`, ascending."""
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    return sorted({*small, *(value // n for n in small)})
