"""Text to batches, in the order of the modules: sources, tokenizer, corpus, rows, loader.

Every function is deterministic: the same sources, configuration and step give the same batch, on
any number of processes.
"""

import hashlib
from dataclasses import dataclass

from shardlm.config import Config
from shardlm.data.corpus import Corpus, split_documents, split_tail
from shardlm.data.errors import DataError
from shardlm.data.loader import Loader, Summary, ValidationLoader
from shardlm.data.rows import Batch
from shardlm.data.sources import Document, read_documents
from shardlm.data.tokenizer import Tokenizer, from_json, make_tokenizer

__all__ = [
    "Batch",
    "Corpus",
    "Data",
    "DataError",
    "Document",
    "Loader",
    "Summary",
    "Tokenizer",
    "ValidationLoader",
    "data_fingerprint",
    "from_json",
    "load_data",
    "read_documents",
]


@dataclass(frozen=True)
class Data:
    """What a run reads: `validation` is None where `data.validation` is 0."""

    train: Loader
    validation: ValidationLoader | None
    tokenizer: Tokenizer
    fingerprint: str

    def summary(self) -> str:
        """A line for each split and one for the tokenizer, for the start of a run."""
        validation = self.validation.summary() if self.validation else "none"
        return (
            f"training    {self.train.summary()}\n"
            f"validation  {validation}\n"
            f"tokenizer   {self.tokenizer.name}, {self.tokenizer.vocab_size:,} ids"
        )


def load_data(config: Config) -> Data:
    """Read, tokenize and split what `config.data` names.

    Raises:
      DataError: sources that cannot be used, too little text for the batch or the split, or a
        `model.vocab` below what the tokenizer needs.
    """
    data = config.data
    documents = read_documents(data.sources)
    tokenizer = make_tokenizer(data.tokenizer, documents)
    if tokenizer.vocab_size < 2:
        raise DataError(
            f"data.tokenizer is {data.tokenizer} and the text has one distinct character, which "
            "there is nothing to learn of: give other data.sources, or use the tokenizer bytes"
        )
    vocab = config.model.vocab
    if vocab is not None and vocab < tokenizer.vocab_size:
        raise DataError(
            f"model.vocab is {vocab} and data.tokenizer {data.tokenizer} has "
            f"{tokenizer.vocab_size} ids: leave model.vocab out, or set it to at least "
            f"{tokenizer.vocab_size}"
        )
    split = split_documents if data.split == "documents" else split_tail
    train, validation = split(documents, tokenizer, data.validation)
    return Data(
        train=Loader(
            train,
            seed=config.run.seed,
            batch=config.train.batch,
            length=data.length,
            prefetch=data.prefetch,
        ),
        validation=ValidationLoader(validation, length=data.length) if data.validation else None,
        tokenizer=tokenizer,
        fingerprint=data_fingerprint(train, validation, tokenizer),
    )


def data_fingerprint(train: Corpus, validation: Corpus, tokenizer: Tokenizer) -> str:
    """Hexadecimal digest of the ids of both splits, their boundaries and the tokenizer. A run that
    is resumed with another one would not continue the same sequence of batches."""
    parts = (tokenizer.to_json(), train.fingerprint(), validation.fingerprint())
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
