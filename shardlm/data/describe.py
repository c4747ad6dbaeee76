"""The figures of what a run will read: sources, lengths, packings, balance, and some of its rows.

All of them come from the loaders that training uses. Memory follows the number of documents and the
size of an update, never the ids of the sources.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args, get_type_hints

import numpy as np
from jaxtyping import Float64

from shardlm.arguments import override
from shardlm.config import Config, ConfigError, DataConfig
from shardlm.data import Data
from shardlm.data.balance import WorkModel, imbalance
from shardlm.data.buckets import Buckets
from shardlm.data.corpus import Corpus
from shardlm.data.loader import Loader, Shape, Share
from shardlm.data.rows import ranges
from shardlm.data.shown import ShownRow, first_rows
from shardlm.data.summary import Summary
from shardlm.data.tokenizer import Tokenizer
from shardlm.validation import validate

_CHOICES = {key: get_args(hint) for key, hint in get_type_hints(DataConfig).items()}
ROWS = 10
"""Rows that are shown."""
UPDATES = 16
"""Updates, spread over the run, on which dealing is measured, at most."""
POSITIONS = 1 << 25
"""Positions of those updates, at most, but for two updates."""
BLOCK = 1 << 16
"""Rows that are looked at together."""
SAMPLES = 64
"""Runs of ids in which the bytes per token are counted, evenly spread over those of a source."""
SAMPLE = 1024
"""Ids of such a run, at most."""
PERCENTILES = (0, 1, 10, 25, 50, 75, 90, 99, 100)


@dataclass(frozen=True)
class Source:
    """One of `data.sources`."""

    name: str
    documents: int
    """In the store, validation among them."""
    tokens: int
    empty: int
    """Documents without text, which are left out."""
    skipped: int
    """Documents left out for not being UTF-8."""
    replaced: int
    """Documents with U+FFFD for what was not UTF-8."""
    training_tokens: int
    share: float
    """Of the rows of an update with weights; else of the tokens."""
    epochs: float
    """That the run makes."""
    bytes_per_token: float | None
    """UTF-8 bytes over tokens, specials counted, in a sample; None: there is nothing to read."""


class LengthClass(NamedTuple):
    """Documents of at least `least` tokens, a power of two, and below twice as many."""

    least: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens of the training documents."""

    classes: tuple[LengthClass, ...]
    """From the one of the shortest document to that of the longest."""
    percentiles: dict[int, int]
    """The shortest length that so many of a hundred documents do not exceed."""
    mean: float
    longer: int
    """Documents that no row of `data.length` holds."""


@dataclass(frozen=True)
class Packing:
    """The rows that one `data.packing` makes."""

    name: str
    configured: bool
    rows: int = 0
    """Of an epoch."""
    updates: float = 0
    """Of an epoch."""
    waste: float = 0
    """Share of the places of all rows that hold no token, or one that `data.overlap` repeats."""
    cut: int = 0
    """Documents that are in more than one row, where rows are cut from the first token on."""
    shapes: tuple[Shape, ...] = ()
    """Of the micro-batches."""
    problem: str = ""
    """Why there are none."""


@dataclass(frozen=True)
class Balance:
    """Heaviest over mean of the devices' estimated work with one `data.balance`; of dynamic before
    any device is measured."""

    name: str
    configured: bool
    mean: float
    worst: float


@dataclass(frozen=True)
class Description:
    """All figures of a run's data."""

    tokenizer: str
    vocab_size: int
    sources: tuple[Source, ...]
    training: Summary
    validation: Summary | None
    lengths: Lengths
    steps: int
    """Updates of the run."""
    updates_per_epoch: float
    packings: tuple[Packing, ...]
    ways: int
    """Devices that the rows of an update are dealt to."""
    sampled: int
    """Updates that the following are measured on."""
    balances: tuple[Balance, ...]
    """Empty for one device."""
    micro_batches: tuple[float, ...]
    """Micro-batches of an update by shape of the configured packing, their mean."""
    predicted: float
    """Places of an update that predict a token, their mean."""
    places: int
    """Of an update."""
    rows: tuple[ShownRow, ...]
    """Of the first update, or the first few."""


def describe(data: Data, config: Config, ways: int) -> Description:
    """Look at what a run reads.

    Args:
      data: what `load_data` made of `config`.
      ways: devices of the batch; they divide the micro-batch.
    """
    vocab = config.model.vocab or data.tokenizer.vocab_size
    config = override(config, {"model.vocab": vocab})
    loader, steps = data.train, config.train.steps
    places = config.batch * config.data.length
    reach = min(steps, loader.reach)
    rows = first_rows(loader, data.tokenizer, ROWS, min(ROWS, steps))
    loader.deal_to(ways)
    updates = _spread(reach, min(UPDATES, max(2, POSITIONS // places)))
    # A share of the rows is enough for what is said of all of them.
    looked = [loader.at(step, Share(0, ways)) for step in updates]
    counts = [
        # Of the one device, where each has its own.
        u.batch.counts.reshape(-1)
        if isinstance(u.batch, Buckets)
        else np.array([config.micro_batches])
        for u in looked
    ]
    return Description(
        tokenizer=data.tokenizer.name,
        vocab_size=data.tokenizer.vocab_size,
        sources=tuple(_sources(data, config, loader.epochs(steps))),
        training=loader.summary(),
        validation=data.validation.summary() if data.validation else None,
        lengths=_lengths(loader.corpora, config.data.length),
        steps=steps,
        updates_per_epoch=loader.updates_per_epoch,
        packings=tuple(_packing(data, config, name) for name in _CHOICES["packing"]),
        ways=ways,
        sampled=len(updates),
        balances=tuple(_balances(loader, config.data.balance, updates)) if ways > 1 else (),
        micro_batches=tuple(np.mean(counts, axis=0).tolist()),
        predicted=float(np.mean([u.tokens.sum() for u in looked])),
        places=places,
        rows=tuple(rows),
    )


def _spread(steps: int, count: int) -> list[int]:
    """Steps from the first to the last of the run, evenly spaced."""
    return np.unique(np.linspace(0, steps - 1, count).round().astype(int)).tolist()


def _sources(
    data: Data, config: Config, epochs: Float64[np.ndarray, "sources"]
) -> Iterator[Source]:
    corpora, weights = data.train.corpora, config.data.weights
    shares = np.array(weights or [corpus.size for corpus in corpora], float)
    for i, (store, corpus) in enumerate(zip(data.stores, corpora, strict=True)):
        said = store.manifest
        yield Source(
            name=config.data.sources[i],
            documents=int(said["documents"]),
            tokens=int(said["tokens"]),
            empty=int(said["empty"]),
            skipped=int(said["skipped"]),
            replaced=int(said["replaced"]),
            training_tokens=corpus.size,
            share=float(shares[i] / shares.sum()),
            epochs=float(epochs[i]),
            bytes_per_token=_bytes_per_token(corpus, data.tokenizer),
        )


def _bytes_per_token(corpus: Corpus, tokenizer: Tokenizer) -> float | None:
    """In a sample that has each token as likely as any other; of a small source, in all of it."""
    if not corpus.size:
        return None
    starts, edges = corpus.starts, np.linspace(0, corpus.size, SAMPLES + 1).astype(np.int64)
    edges = np.unique(edges)
    firsts, ends = edges[:-1], np.minimum(edges[:-1] + SAMPLE, edges[1:])
    # No text goes from one document into the next.
    low, high = np.searchsorted(starts, firsts, "right"), np.searchsorted(starts, ends)
    borders = starts[ranges(low, high - low)]
    firsts, ends = (np.sort(np.concatenate([bounds, borders])) for bounds in (firsts, ends))
    of = np.searchsorted(starts, firsts, "right") - 1
    places, sizes = corpus.firsts[of] + firsts - starts[of], ends - firsts
    parts = np.split(corpus.tokens.gather(places, sizes), np.cumsum(sizes)[:-1])
    texts = [tokenizer.decode(part) for part in parts]
    size = sum(len(text.encode(errors="surrogatepass")) for text in texts)
    return size / int(sizes.sum())


def _lengths(corpora: Sequence[Corpus], length: int) -> Lengths:
    lengths = np.sort(np.concatenate([corpus.lengths for corpus in corpora]))
    # Of n = m · 2^e with m from 1/2 to below 1, the class is e - 1.
    of = np.frexp(lengths)[1] - 1
    sums = np.concatenate([[0], np.cumsum(lengths)])
    classes = []
    for i in range(int(of[0]), int(of[-1]) + 1):
        first, end = np.searchsorted(of, [i, i + 1]).tolist()
        classes.append(LengthClass(1 << i, end - first, int(sums[end] - sums[first])))
    return Lengths(
        classes=tuple(classes),
        percentiles={p: int(lengths[max(-(-p * len(lengths) // 100) - 1, 0)]) for p in PERCENTILES},
        mean=float(lengths.mean()),
        longer=int((lengths > length).sum()),
    )


def _packing(data: Data, config: Config, name: str) -> Packing:
    configured = name == config.data.packing
    loader = data.train
    if not configured:
        overlap = 0 if name == "concat" else config.data.overlap
        try:
            other = override(config, {"data.packing": name, "data.overlap": overlap})
            validate(other)
            loader = Loader(loader.corpora, other, WorkModel.of(config.model))
        except ConfigError as error:
            return Packing(name, configured, problem=str(error))
    return Packing(
        name,
        configured,
        rows=loader.rows_per_epoch,
        updates=loader.updates_per_epoch,
        waste=float(loader.padding),
        cut=sum(corpus.documents for corpus in loader.corpora) - _whole(loader),
        shapes=tuple(loader.shapes),
    )


def _whole(loader: Loader) -> int:
    """Documents that one row has from start to end."""
    found = 0
    for stream in loader.streams:
        for rows, _ in stream.drawn(0):
            firsts = rows.corpus.firsts
            for start in range(0, rows.rows, BLOCK):
                numbers = np.arange(start, min(start + BLOCK, rows.rows))
                segments = rows.segments(numbers, np.zeros_like(numbers))
                place = segments.place[segments.ends]
                of = np.searchsorted(firsts, place, "right") - 1
                found += int((firsts[of] == place).sum())
    return found


def _balances(loader: Loader, configured: str, updates: list[int]) -> Iterator[Balance]:
    share = Share(0, loader.ways)
    for name in _CHOICES["balance"]:
        balanced = loader.balanced(name)
        found = [imbalance(balanced.at(step, share).time) for step in updates]
        yield Balance(name, name == configured, float(np.mean(found)), max(found))
