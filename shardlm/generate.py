"""Text from a trained model: a key/value cache, on any data x model mesh.

Shapes: B prompts, P prompt tokens (padded at the left), N new tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from shardlm.config import ConfigError
from shardlm.data import Tokenizer
from shardlm.mesh.axes import BATCH_AXES
from shardlm.model.layers import Cache
from shardlm.model.loss import capped_logits
from shardlm.model.transformer import Params
from shardlm.parallel.collectives import Parallel
from shardlm.train.step import Engine, weight_dtype
from shardlm.train.state import SAMPLE, specs


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn."""

    tokens: int = 200
    """Tokens to add at most; a document's end stops earlier."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest."""
    top_k: int = 0
    """Keep this many likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together have this probability (arXiv 1904.09751)."""
    seed: int = 0
    """A prompt's text depends on the seed, its place among the prompts, and nothing else."""

    def __post_init__(self) -> None:
        for name, value, good, need in (
            ("tokens", self.tokens, self.tokens >= 1, "at least 1"),
            ("temperature", self.temperature, self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k, self.top_k >= 0, "at least 0"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("seed", self.seed, self.seed >= 0, "at least 0"),
        ):
            if not good:
                raise ConfigError(f"{name} is {value}: it must be {need}")


def generate(
    engine: Engine,
    params: Params,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
) -> list[str]:
    """Continue each prompt; returns the new text of each, without the prompt.

    Raises:
      ConfigError: an empty prompt, or more tokens than learned positions.
      DataError: a character that the tokenizer does not know.
    """
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    for prompt, row in zip(prompts, ids, strict=True):
        if not len(row):
            raise ConfigError(f"prompt {prompt!r} is empty: give at least one character")
    longest = max(map(len, ids))
    model, length = engine.config.model, engine.config.data.length
    if model.positions == "learned" and longest + sampling.tokens > length:
        raise ConfigError(
            f"the longest prompt has {longest} tokens and {sampling.tokens} are to be added, and "
            f"the model has learned positions up to {length}: ask for at most "
            f"{max(length - longest, 0)} tokens"
        )
    ways = int(np.prod([engine.mesh.shape[axis] for axis in BATCH_AXES]))
    rows = -(-len(ids) // ways) * ways
    tokens = np.zeros((rows, longest), np.int32)
    segments = np.zeros((rows, longest), np.int32)
    for i in range(rows):
        row = ids[min(i, len(ids) - 1)]
        tokens[i, longest - len(row) :] = row
        segments[i, longest - len(row) :] = 1
    key = jax.random.fold_in(jax.random.key(sampling.seed), SAMPLE)
    new = np.asarray(_decode(engine, sampling)(params, tokens, segments, key))
    texts = []
    for row in new[: len(ids)]:
        end = np.flatnonzero(row == tokenizer.end_of_document)
        texts.append(tokenizer.decode(row[: end[0]] if len(end) else row))
    return texts


def _decode(engine: Engine, sampling: Sampling) -> Any:
    """A jitted function of (params, tokens [B, P], segments [B, P], key): new tokens [B, N]."""
    model, rules = engine.config.model, engine.rules
    par = Parallel(rules, gather_weights=False, split_sequence=False)
    param_specs = specs(engine.abstract["params"])

    def local(params: Params, tokens: Array, segments: Array, key: Array) -> Array:
        # Gathered once: a token at a time would send the whole model for every token.
        params = par.gather_tree(params, param_specs, partial(weight_dtype, engine.dtype))
        rows, prompt = tokens.shape
        total = prompt + sampling.tokens
        kv_segments = jnp.pad(segments, ((0, 0), (0, sampling.tokens)), constant_values=1)
        pad = prompt - segments.sum(1, dtype=jnp.int32)
        ids = par.index(*BATCH_AXES) * rows + jnp.arange(rows)
        keys = jax.vmap(partial(jax.random.fold_in, key))(ids)
        shape = (model.layers, rows, total, model.kv // par.size("model"), model.k_dim)
        zeros = par.varying(jnp.zeros(shape, engine.dtype))
        forward = partial(
            engine.transformer.hidden,
            params,
            par=par,
            dtype=engine.dtype,
            kv_segments=kv_segments,
        )

        def draw(x: Array, head: Array, index: Array) -> Array:
            local = capped_logits(x[:, -1], head, model.vocab_size, model.logit_softcap, par)
            logits = par.concatenate_model(local, axis=1)
            step_keys = jax.vmap(lambda k: jax.random.fold_in(k, index))(keys)
            return jax.vmap(partial(sample, sampling=sampling))(step_keys, logits)

        positions = jnp.maximum(jnp.arange(prompt) - pad[:, None], 0)
        x, head, cache = forward(tokens, positions, segments, caches=Cache(zeros, zeros), start=0)
        first = draw(x, head, jnp.int32(0))

        def step(carry: tuple[Array, Cache], index: Array) -> tuple[tuple[Array, Cache], Array]:
            token, cache = carry
            at = prompt + index - 1
            x, head, cache = forward(
                token[:, None],
                (at - pad)[:, None],
                jnp.ones_like(token)[:, None],
                caches=cache,
                start=at,
            )
            token = draw(x, head, index)
            return (token, cache), token

        _, rest = jax.lax.scan(step, (first, cache), jnp.arange(1, sampling.tokens))
        return jnp.concatenate([first[:, None], rest.T], axis=1)

    batch = rules.spec(("batch", None))
    return jax.jit(
        jax.shard_map(
            local,
            mesh=engine.mesh,
            in_specs=(param_specs, batch, batch, PartitionSpec()),
            out_specs=batch,
        )
    )


def sample(key: Array, logits: Array, sampling: Sampling) -> Array:
    """One token, int32, from fp32 logits [V]."""
    if sampling.temperature == 0:
        return jnp.argmax(logits).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_k:
        kth = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[0]))[0][-1]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if sampling.top_p < 1:
        ordered = jnp.sort(logits, descending=True)
        chance = jax.nn.softmax(ordered)
        # A token stays if those before it have not reached top_p; the likeliest always does.
        kept = jnp.cumsum(chance) - chance < sampling.top_p
        logits = jnp.where(logits < jnp.where(kept, ordered, jnp.inf).min(), -jnp.inf, logits)
    return jax.random.categorical(key, logits).astype(jnp.int32)
