"""Prompts to token ids, checked. Imports no jax."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from shardlm.config import Config, ConfigError
from shardlm.data import DataError, Tokenizer
from shardlm.words import many


def encode_prompts(
    config: Config, tokenizer: Tokenizer, prompts: Sequence[str], tokens: int, key: str = "prompt"
) -> list[np.ndarray]:
    """Ids of each prompt, int32; the start of a document in front, where the tokenizer has one.

    Args:
      config: of the model.
      tokenizer: of the model.
      prompts: texts.
      tokens: how many are to be added to each.
      key: what messages call a prompt.

    Raises:
      ConfigError: an empty prompt, one that the tokenizer has no ids for, or more tokens than
        learned positions.
    """
    found = []
    for prompt in prompts:
        if not prompt:
            raise ConfigError(f"{key} is empty: give at least one character")
        try:
            ids = prompt_ids(tokenizer, prompt)
        except DataError as error:
            raise ConfigError(f"{key} is {prompt!r}: {error}") from None
        room = room_after(config, len(ids))
        if room is not None and tokens > room:
            raise ConfigError(
                f"{key} has {many(len(ids), 'token')} and {tokens} are to be added, and the "
                f"model has learned positions up to {config.data.length}: ask for at most "
                f"{many(room, 'token')}"
            )
        found.append(ids)
    return found


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> Int32[np.ndarray, "tokens"]:
    """Ids of a prompt, as the start of a document that goes on.

    Raises:
      DataError: a character that has no id, or nothing that has one.
    """
    start = tokenizer.start_of_document
    ids = tokenizer.encode(prompt)
    if not len(ids):
        raise DataError("the tokenizer has no token for any of it: give another text")
    return ids if start is None else np.insert(ids, 0, start)


def room_after(config: Config, tokens: int) -> int | None:
    """Tokens that can follow so many; None where there is no bound."""
    if config.model.positions != "learned":
        return None
    return max(config.data.length - tokens, 0)
