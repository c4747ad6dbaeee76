"""Text into a store of tokens: the logic of `shardlm prepare`."""

from collections.abc import Callable
from pathlib import Path

from shardlm.config import Config, ConfigError
from shardlm.data import Preparation, Store, Tokenizer, is_store, make_tokenizer
from shardlm.data.directory import owned, tokenizer_left
from shardlm.data.inputs import list_inputs
from shardlm.data.prepare import digest, texts, workers_for
from shardlm.data.readers import Reading
from shardlm.data.stopping import Display, quiet, unless_stopped
from shardlm.data.store import odd_documents
from shardlm.data.subwords import train_bpe
from shardlm.data.tokenizer import BytesTokenizer
from shardlm.options import PrepareOptions
from shardlm.words import many


def prepare(
    options: PrepareOptions,
    config: Config,
    stopped: Callable[[], bool],
    display: Display = quiet,
) -> Store:
    """Tokenize all of `data.sources` into one store.

    Raises:
      ConfigError: a source is tokenized already, or two tokenizers are asked for.
      DataError, Interrupted, WorkerLost, OSError: see `Preparation.into`.
    """
    data = config.data
    if stores := [source for source in data.sources if is_store(source)]:
        raise ConfigError(
            f"data.sources: {stores[0]} is a store, which is tokenized already: name text, or "
            "train from the store"
        )
    train, vocab = options.tokenizer.train, options.tokenizer.vocab
    if train != "none" and data.tokenizer is not None:
        raise ConfigError(
            f"tokenizer.train is {train} and data.tokenizer {data.tokenizer}: leave one of them out"
        )
    inputs = [found for source in data.sources for found in list_inputs(source)]
    reading = Reading(data.field, data.errors)
    total = sum(found.size for found in inputs)
    path = Path(options.store)
    tokenizer: Tokenizer | None
    made_from = None
    with owned(path):
        if train == "none":
            with display("reading the text", total) as progress:
                found = texts(inputs, reading, progress, stopped)
                tokenizer = make_tokenizer(data.tokenizer or BytesTokenizer.name, found)
        else:
            made_from = digest(inputs, reading, (train, str(vocab)), stopped, display)
            tokenizer = tokenizer_left(path, made_from)
            if tokenizer is None:
                with display("training the tokenizer", total) as progress:
                    found = texts(inputs, reading, progress, stopped)
                    tokenizer = unless_stopped(lambda: train_bpe(found, vocab), stopped, progress)
        workers = workers_for(tokenizer, options.workers)
        return Preparation(
            inputs,
            reading,
            tokenizer,
            workers,
            display=display,
            stopped=stopped,
            made_from=made_from,
        ).within(path)


def describe(store: Store) -> str:
    """What a finished store holds."""
    said = store.manifest
    odd = odd_documents(said)
    return (
        f"{store.path}: {many(said['documents'], 'document')}, {many(said['tokens'], 'token')} of "
        f"{store.tokenizer.name} ({said['vocab_size']:,} ids, {said['dtype']})"
        + (f"; not as they were: {', '.join(odd)}" if odd else "")
    )
