"""Loss over the whole validation split."""

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import jax

from shardlm.config import Config
from shardlm.data import Tokenizer, ValidationLoader
from shardlm.data.tokenizer import BytesTokenizer
from shardlm.mesh.axes import batch_ways
from shardlm.model.transformer import Params
from shardlm.train.engine import Engine
from shardlm.train.step import batch_sharding, make_eval_step

AHEAD = 2
"""Batches that wait on the device, so that it never waits for the host."""

Evaluate = Callable[[Params, Callable[[], bool]], float | None]


def make_evaluate(engine: Engine, loader: ValidationLoader) -> Evaluate:
    """A function of the parameters and of a question: the mean loss in nats over every token of the
    split, each counted once, whatever the batches and the mesh. None as soon as the question, which
    is asked before each batch, is answered with yes: stop."""
    step = make_eval_step(engine)
    sharding = batch_sharding(engine)
    ways = batch_ways(engine.mesh.shape)
    rows = eval_batch(engine.config, ways)

    def evaluate(params: Params, stopped: Callable[[], bool]) -> float | None:
        nll, tokens = 0.0, 0
        waiting: deque[Any] = deque()

        def fetch(left: int) -> None:
            nonlocal nll, tokens
            while len(waiting) > left:
                nll_part, tokens_part = waiting.popleft()
                nll += float(nll_part)
                tokens += int(tokens_part)

        for batch in loader.batches(rows):
            if stopped():
                return None
            waiting.append(step(params, jax.device_put(batch, sharding)))
            fetch(AHEAD)
        fetch(0)
        return nll / tokens

    return evaluate


def bits_per_byte(loss: float, tokenizer: Tokenizer) -> float | None:
    """The loss in bits per byte, where tokens are bytes: the end of a document, which is predicted,
    makes up for its first byte, which is not. None for other tokenizers, whose bytes are not
    counted here."""
    return loss / math.log(2) if isinstance(tokenizer, BytesTokenizer) else None


def eval_batch(config: Config, ways: int) -> int:
    """Rows of an evaluation batch: `eval.batch`, or a micro-batch, and up to a multiple of the
    devices that the rows are split over. The result is that of any other number of rows."""
    rows = config.micro_batch if config.eval.batch is None else config.eval.batch
    return -(-rows // ways) * ways
