"""Loss over the whole validation split."""

from collections.abc import Callable

import jax

from shardlm.config import Config
from shardlm.data import ValidationLoader
from shardlm.model.transformer import Params
from shardlm.train.step import Engine, batch_sharding, make_eval_step


def make_evaluate(engine: Engine, loader: ValidationLoader) -> Callable[[Params], float]:
    """A function of the parameters: the mean loss in nats over every token of the split, each
    counted once, whatever the batches and the mesh."""
    step = make_eval_step(engine)
    sharding = batch_sharding(engine)
    batch = eval_batch(engine.config)

    def evaluate(params: Params) -> float:
        nll, tokens = 0.0, 0
        # Fetched at the end, so that the host prepares batches while the device works.
        sums = [step(params, jax.device_put(b, sharding)) for b in loader.batches(batch)]
        for nll_part, tokens_part in sums:
            nll += float(nll_part)
            tokens += int(tokens_part)
        return nll / tokens

    return evaluate


def eval_batch(config: Config) -> int:
    """Rows of an evaluation batch."""
    return config.micro_batch if config.eval.batch is None else config.eval.batch
