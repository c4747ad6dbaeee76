"""The beginning of a run: its directory and its data. Imports no jax, so that a mistake in them is
reported at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shardlm.config import Config
from shardlm.data import Data, load_data
from shardlm.observe import Progress, RunDirectory
from shardlm.train.prompts import encode_prompts
from shardlm.validation import validate


@dataclass(frozen=True)
class Start:
    """What is there before a device is touched."""

    config: Config
    directory: RunDirectory
    before: Config | None
    """Configuration of the run that the directory holds; None: it is new."""
    data: Data


@contextmanager
def begin(config: Config, stopped: Callable[[], bool]) -> Iterator[Start]:
    """Check the configuration, own the directory of the run, and read the text.

    Args:
      stopped: asked now and then while text is tokenized: whether to stop.

    Raises:
      Interrupted: `stopped`.
      ConfigError: the configuration, the directory or the data cannot be used.
    """
    validate(config)
    with RunDirectory.open(config.run.dir, config.run.fresh) as directory:
        before = directory.read_config()
        data = load_data(config, stopped, Progress)
        if config.eval.sample_tokens:
            # Now, rather than after the last update. One token: `sample_tokens` is an upper bound.
            encode_prompts(config, data.tokenizer, [config.eval.prompt], 1, "eval.prompt")
        yield Start(config, directory, before, data)
