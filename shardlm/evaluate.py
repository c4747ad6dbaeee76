"""Loss of a trained model: the logic of `shardlm evaluate`."""

import math
from collections.abc import Mapping
from typing import Any

from shardlm.arguments import override
from shardlm.config import ConfigError
from shardlm.data import load_data
from shardlm.observe import Progress, RunDirectory
from shardlm.options import EvaluateOptions
from shardlm.train.evaluate import bits_per_byte, make_evaluate
from shardlm.train.trained import open_trained


def evaluate_run(options: EvaluateOptions, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate over the whole validation split of the run.

    Args:
      changes: as for `open_trained`; also of `data.sources`, if the text has moved.

    Returns:
      `step`; `eval_loss`, mean in nats over `eval_tokens`; `perplexity`, its exponential
      (infinite where it cannot be computed); `bits_per_byte`, None where tokens are not bytes.

    Raises:
      ConfigError: there is no validation split, its text has changed, or as `open_trained`.
      CheckpointError: as `open_trained`.
    """
    trained = open_trained(options.run_dir, changes, options.step)
    # The run's own tokenizer: the file that it came from may have moved too.
    own = {"data.tokenizer": str(RunDirectory(options.run_dir).tokenizer_path)}
    data = load_data(override(trained.engine.config, own), display=Progress)
    if data.validation is None:
        raise ConfigError(f"{options.run_dir} has no validation text: its data.validation is 0")
    if trained.metadata.get("data") != data.fingerprint:
        raise ConfigError(
            f"{options.run_dir} was trained on other text than data.sources "
            f"{' '.join(trained.engine.config.data.sources)} hold now, so its validation split is "
            "another: restore the text, or say with --data.sources where it is"
        )
    loss = make_evaluate(trained.engine, data.validation)(trained.params, lambda: False)
    assert loss is not None
    return {
        "step": trained.step,
        "eval_loss": loss,
        "eval_tokens": data.validation.summary().loss_tokens,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": bits_per_byte(loss, data.tokenizer),
    }
