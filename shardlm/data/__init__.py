"""Text to batches, in the order of the modules: inputs, readers, tokenizer, prepare and store,
corpus, layout and rows, stream, loader.

Every function is deterministic: the same sources, configuration and step give the same batch, on
any number of processes.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from shardlm.config import Config
from shardlm.data.balance import WorkModel
from shardlm.data.buckets import Buckets
from shardlm.data.corpus import Corpus, split
from shardlm.data.errors import DataError
from shardlm.data.inputs import list_inputs
from shardlm.data.loader import Loader, Share, Update
from shardlm.data.prepare import Preparation, texts, workers_for
from shardlm.data.readers import Reading
from shardlm.data.rows import Batch
from shardlm.data.stopping import Display, Interrupted, quiet
from shardlm.data.store import Store, is_store, open_store
from shardlm.data.summary import Summary
from shardlm.data.tokenizer import BytesTokenizer, Tokenizer, from_json, make_tokenizer
from shardlm.data.validation_loader import ValidationLoader

__all__ = [
    "Batch",
    "Buckets",
    "Corpus",
    "Data",
    "DataError",
    "Interrupted",
    "Loader",
    "Preparation",
    "Share",
    "Store",
    "Summary",
    "Tokenizer",
    "Update",
    "ValidationLoader",
    "from_json",
    "is_store",
    "load_data",
    "make_tokenizer",
    "open_store",
]


@dataclass(frozen=True)
class Data:
    """What a run reads: `validation` is None where `data.validation` is 0."""

    train: Loader
    validation: ValidationLoader | None
    tokenizer: Tokenizer
    fingerprint: str
    """Digest of the ids of all sources, their boundaries and the tokenizer. A run that is resumed
    with another one would not continue the same sequence of batches."""
    stores: tuple[Store, ...]
    """Of each source."""

    def summary(self) -> str:
        """A line for each split and one for the tokenizer, for the start of a run."""
        validation = self.validation.summary() if self.validation else "none"
        return (
            f"training    {self.train.summary()}\n"
            f"validation  {validation}\n"
            f"tokenizer   {self.tokenizer.name}, {self.tokenizer.vocab_size:,} ids"
        )


def load_data(
    config: Config, stopped: Callable[[], bool] = lambda: False, display: Display = quiet
) -> Data:
    """Open, or tokenize into stores, what `config.data` names, and split it.

    Args:
      stopped: asked now and then while text is tokenized: whether to stop.
      display: shows how far that is.

    Raises:
      DataError: sources that cannot be used, too little text for the batch or the split, or a
        `model.vocab` below what the tokenizer needs.
      Interrupted: `stopped`.
      WorkerLost, OSError: see `Preparation.into`.
    """
    data = config.data
    stores = open_sources(config, stopped, display)
    tokenizer = stores[0].tokenizer
    if tokenizer.vocab_size < 2:
        raise DataError(
            f"data.tokenizer is {tokenizer.name} and the text has one distinct character, which "
            "there is nothing to learn of: give other data.sources, or use the tokenizer bytes"
        )
    vocab = config.model.vocab
    if vocab is not None and vocab < tokenizer.vocab_size:
        raise DataError(
            f"model.vocab is {vocab} and data.tokenizer {tokenizer.name} has "
            f"{tokenizer.vocab_size} ids: leave model.vocab out, or set it to at least "
            f"{tokenizer.vocab_size}"
        )
    corpora = Corpus.of_stores(stores, data.sources)
    train, validation = split(corpora, data.split, data.validation)
    model = dataclasses.replace(config.model, vocab=vocab or tokenizer.vocab_size)
    parts = "\n".join(store.fingerprint for store in stores)
    return Data(
        train=Loader(train, config, WorkModel.of(model)),
        validation=ValidationLoader(validation, length=data.length) if data.validation else None,
        tokenizer=tokenizer,
        fingerprint=blake2b(parts.encode(), digest_size=16).hexdigest(),
        stores=tuple(stores),
    )


def open_sources(
    config: Config, stopped: Callable[[], bool] = lambda: False, display: Display = quiet
) -> list[Store]:
    """A store for each source: the source itself if it is one, else its text tokenized into one,
    once, in `data.cache`."""
    data = config.data
    given = {source: open_store(source) for source in data.sources if is_store(source)}
    listed = {source: list_inputs(source) for source in data.sources if source not in given}
    reading = Reading(data.field, data.errors)
    tokenizer = _choose_tokenizer(data.tokenizer, list(given.values()))
    if tokenizer is None:
        assert data.tokenizer is not None
        everything = [i for inputs in listed.values() for i in inputs]
        with display("reading the text", sum(found.size for found in everything)) as progress:
            found = texts(everything, reading, progress, stopped)
            tokenizer = make_tokenizer(data.tokenizer, found)
    for path, store in given.items():
        if store.tokenizer.fingerprint() != tokenizer.fingerprint():
            raise DataError(
                f"data.sources: {path} was made with the tokenizer {store.tokenizer.name} "
                f"({store.tokenizer.fingerprint()[:8]}), and data.tokenizer is {tokenizer.name} "
                f"({tokenizer.fingerprint()[:8]}): leave data.tokenizer out, or prepare the text "
                "again"
            )
    workers = workers_for(tokenizer)
    cache = _cache(data.cache)
    stores = []
    for source in data.sources:
        if source in given:
            stores.append(given[source])
            continue
        preparation = Preparation(
            listed[source],
            reading,
            tokenizer,
            workers,
            display=display,
            what=f"tokenizing {source}",
            stopped=stopped,
        )
        stores.append(preparation.cached(cache))
    return stores


def _cache(given: str | None) -> Path:
    path = given or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/shardlm"
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # No home directory is known.
        raise DataError(f"data.cache is {path}: {error}; name a directory") from None


def _choose_tokenizer(name: str | None, stores: Sequence[Store]) -> Tokenizer | None:
    """The tokenizer that needs no text to be made; None if `name` needs some."""
    if name is None:
        return stores[0].tokenizer if stores else BytesTokenizer()
    if stores and name == stores[0].tokenizer.name:
        return stores[0].tokenizer
    return None
