"""Prompts to token ids, checked. Imports no jax."""

from collections.abc import Sequence

import numpy as np

from shardlm.config import Config, ConfigError
from shardlm.data import DataError, Tokenizer


def encode_prompts(
    config: Config, tokenizer: Tokenizer, prompts: Sequence[str], tokens: int, key: str = "prompt"
) -> list[np.ndarray]:
    """Ids of each prompt, int32.

    Args:
      config: of the model.
      tokenizer: of the model.
      prompts: texts.
      tokens: how many are to be added to each.
      key: what messages call a prompt.

    Raises:
      ConfigError: an empty prompt, a character that the tokenizer does not know, or more tokens
        than learned positions.
    """
    found = []
    for prompt in prompts:
        try:
            ids = tokenizer.encode(prompt)
        except DataError as error:
            raise ConfigError(f"{key} is {prompt!r}: {error}") from None
        if not len(ids):
            raise ConfigError(f"{key} is empty: give at least one character")
        room = room_after(config, len(ids))
        if room is not None and tokens > room:
            raise ConfigError(
                f"{key} has {len(ids)} tokens and {tokens} are to be added, and the model has "
                f"learned positions up to {config.data.length}: ask for at most {room} tokens"
            )
        found.append(ids)
    return found


def room_after(config: Config, tokens: int) -> int | None:
    """Tokens that can follow so many; None where there is no bound."""
    if config.model.positions != "learned":
        return None
    return max(config.data.length - tokens, 0)
