"""Text from a model: a key/value cache, on any data x model mesh.

Shapes: B prompts, P prompt tokens (padded at the left), N new tokens, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float32, Int32

from shardlm.data import Tokenizer
from shardlm.data.tokenizer import decode_after
from shardlm.mesh.axes import BATCH_AXES, batch_ways
from shardlm.model.layers import Cache
from shardlm.model.loss import capped_logits
from shardlm.model.transformer import Params
from shardlm.options import Sampling
from shardlm.parallel.collectives import Parallel
from shardlm.parallel.heads import kv_heads_of
from shardlm.train.engine import Engine
from shardlm.train.prompts import encode_prompts
from shardlm.train.state import SAMPLE, specs


def generate(
    engine: Engine,
    params: Params,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
) -> list[str]:
    """Continue each prompt; returns the new text of each, without the prompt.

    Raises:
      ConfigError: see `encode_prompts`.
    """
    ids = encode_prompts(engine.config, tokenizer, prompts, sampling.tokens)
    longest = max(map(len, ids))
    ways = batch_ways(engine.mesh.shape)
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
    for prompt, row in zip(ids, new[: len(ids)], strict=True):
        end = tokenizer.end_of_document
        found = np.flatnonzero(row == end) if end is not None else np.empty(0, int)
        texts.append(decode_after(tokenizer, prompt, row[: found[0]] if found.size else row))
    return texts


def _decode(engine: Engine, sampling: Sampling) -> Any:
    """A jitted function of (params, tokens [B, P], segments [B, P], key): new tokens [B, N]."""
    model, rules = engine.config.model, engine.rules
    par = Parallel(rules, gather_weights=False, split_sequence=False)
    param_specs = specs(engine.abstract["params"])

    def local(params: Params, tokens: Array, segments: Array, key: Array) -> Array:
        # Gathered once: a token at a time would send the whole model for every token.
        params = par.gather_tree(params, param_specs, engine.dtype)
        rows, prompt = tokens.shape
        total = prompt + sampling.tokens
        kv_segments = jnp.pad(segments, ((0, 0), (0, sampling.tokens)), constant_values=1)
        pad = prompt - segments.sum(1, dtype=jnp.int32)
        ids = par.index(*BATCH_AXES) * rows + jnp.arange(rows)
        keys = jax.vmap(partial(jax.random.fold_in, key))(ids)
        shape = (
            model.layers // par.size("stage"),
            rows,
            total,
            kv_heads_of(par.size("model"), model.kv).shape[1],
            model.k_dim,
        )
        zeros = par.varying(jnp.zeros(shape, engine.dtype))

        def forward(
            tokens: Array, positions: Array, segments: Array, caches: Cache, start: Array | int
        ) -> tuple[Array, Array, Cache]:
            ctx = engine.transformer.context(
                par,
                engine.dtype,
                "xla",
                segments,
                positions,
                kv_segments=kv_segments,
                start=start,
            )
            x, head, new, _ = engine.transformer.hidden(
                params, tokens, positions, ctx, caches=caches
            )
            assert new is not None
            return x, head, new

        def draw(x: Array, head: Array, index: Array) -> Array:
            local = capped_logits(x[:, -1], head, model.vocab_size, model.logit_softcap, par)
            logits = par.concatenate_model(local, axis=1)
            step_keys = jax.vmap(lambda k: jax.random.fold_in(k, index))(keys)
            return jax.vmap(partial(sample, sampling=sampling))(step_keys, logits)

        positions = jnp.maximum(jnp.arange(prompt) - pad[:, None], 0)
        x, head, cache = forward(tokens, positions, segments, Cache(zeros, zeros), 0)
        first = draw(x, head, jnp.int32(0))

        def step(carry: tuple[Array, Any], index: Array) -> tuple[tuple[Array, Any], Array]:
            token, cache = carry
            at = prompt + index - 1
            x, head, cache = forward(
                token[:, None], (at - pad)[:, None], jnp.ones_like(token)[:, None], cache, at
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


def sample(key: Array, logits: Float32[Array, "V"], sampling: Sampling) -> Int32[Array, ""]:
    """One token drawn from its logits; temperature 0 takes the likeliest.

    Of equally likely tokens those of lower ids come first: exactly top_k are kept, and of top_p no
    more than it takes.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_k:
        kept = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[0]))[1]
        logits = jnp.full_like(logits, -jnp.inf).at[kept].set(logits[kept])
    if sampling.top_p < 1:
        order = jnp.argsort(logits, descending=True)
        chance = jax.nn.softmax(logits[order])
        # A token stays if those before it have not reached top_p; the likeliest always does.
        stays = (jnp.cumsum(chance) - chance < sampling.top_p).at[0].set(True)
        logits = logits.at[order].set(jnp.where(stays, logits[order], -jnp.inf))
    return jax.random.categorical(key, logits).astype(jnp.int32)
