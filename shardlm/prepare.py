"""Text into a store of tokens: the logic of `shardlm prepare`."""

from collections.abc import Callable
from pathlib import Path

from shardlm.config import Config, ConfigError
from shardlm.data import Preparation, Store, Tokenizer, is_store, make_tokenizer
from shardlm.data.inputs import list_inputs
from shardlm.data.prepare import texts, workers_for
from shardlm.data.readers import Reading
from shardlm.data.subwords import train_bpe
from shardlm.data.tokenizer import BytesTokenizer
from shardlm.options import PrepareOptions


def prepare(options: PrepareOptions, config: Config, stopped: Callable[[], bool]) -> Store:
    """Tokenize all of `data.sources` into one store.

    Raises:
      ConfigError: a source is tokenized already, or two tokenizers are asked for.
      DataError, Interrupted, OSError: see `Preparation.into`.
    """
    data = config.data
    if stores := [source for source in data.sources if is_store(source)]:
        raise ConfigError(
            f"data.sources: {stores[0]} is a store, which is tokenized already: name text, or "
            "train from the store"
        )
    train = options.tokenizer.train != "none"
    if train and data.tokenizer is not None:
        raise ConfigError(
            f"tokenizer.train is {options.tokenizer.train} and data.tokenizer {data.tokenizer}: "
            "leave one of them out"
        )
    inputs = [found for source in data.sources for found in list_inputs(source)]
    reading = Reading(data.field, data.errors)
    found = texts(inputs, reading)
    tokenizer: Tokenizer
    if train:
        tokenizer = train_bpe(found, options.tokenizer.vocab)
    else:
        tokenizer = make_tokenizer(data.tokenizer or BytesTokenizer.name, found)
    workers = workers_for(tokenizer, options.workers)
    preparation = Preparation(inputs, reading, tokenizer, workers, stopped=stopped)
    return preparation.into(Path(options.store))


def describe(store: Store) -> str:
    """What a finished store holds."""
    said = store.manifest
    odd = [f"{said[name]:,} {name}" for name in ("empty", "skipped", "replaced") if said[name]]
    return (
        f"{store.path}: {said['documents']:,} documents, {said['tokens']:,} tokens of "
        f"{store.tokenizer.name} ({said['vocab_size']:,} ids, {said['dtype']})"
        + (f"; documents not as they were: {', '.join(odd)}" if odd else "")
    )
