"""Text from a trained model: the logic of `shardlm generate`."""

import sys
from collections.abc import Mapping
from typing import Any

from shardlm.options import GenerateOptions
from shardlm.train.decode import generate
from shardlm.train.trained import open_trained


def generate_text(options: GenerateOptions, mesh: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Prompts and what the model adds to each; on standard error, which model it is.

    Raises: as `open_trained` and `generate`.
    """
    trained = open_trained(options.run_dir, mesh, options.step)
    prompts = options.prompt or (trained.engine.config.eval.prompt,)
    print(
        f"{options.run_dir} after update {trained.step:,}, seed {options.seed}, temperature "
        f"{options.temperature:g}",
        file=sys.stderr,
    )
    texts = generate(trained.engine, trained.params, trained.tokenizer, prompts, options)
    return list(zip(prompts, texts, strict=True))
